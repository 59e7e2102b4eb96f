const wanted = new URLSearchParams(location.search).get("run");
const of = path => wanted ? path + "?" + new URLSearchParams({run: wanted}) : path;
let byTime = false, shown = null;

const date = at => new Date(at * 1000).toISOString().slice(0, 16).replace("T", " ");
// Only addresses that a browser opens as a page or a letter become links.
function anchor(text, label) {
  if (/^[^\s@:\/]+@[^\s@]+$/.test(text)) return make("a", {href: "mailto:" + text, textContent: label || text});
  return /^(https?:\/\/|mailto:)/i.test(text) ? make("a", {href: text, rel: "noreferrer nofollow", textContent: label || text}) : text;
}
function show(id, is) { $(id).hidden = !is; return is; }

function about(page) {
  document.title = page.name || "Shoal";
  $("title").textContent = page.name || "run " + page.run.slice(0, 16);
  const ended = page.ended_at != null;
  $("state").textContent = ended ? "ended on " + date(page.ended_at) + " UTC" : page.learners ? "training" : "nobody trains now";
  $("state").className = "pill" + (!ended && page.learners ? " good" : "");
  show("description", page.description);
  $("description").textContent = page.description;
  const facts = [["model", page.model], ["data", page.data], ["needs", page.needs], ["licence", page.licence], ["homepage", page.homepage],
    ["contact", page.contact], ["discussion", page.discussion], ["run", page.run.slice(0, 16) + "…"]];
  $("facts").replaceChildren(...facts.filter(([, text]) => text).flatMap(([name, text]) =>
    [make("dt", {textContent: name}), make("dd", {}, anchor(text))]));
}
function tiles(page) {
  const goal = page.tokens_goal ? "of " + count(page.tokens_goal) + " tokens" : "tokens merged";
  const peers = page.learners + page.keepers + page.others;
  const found = [[count(page.tokens), goal], [page.learners, page.learners === 1 ? "peer trains now" : "peers train now"],
    [peers, peers === 1 ? "peer on line" : "peers on line"]];
  if (page.contributors_total != null) found.push([page.contributors_total, "contributed so far"]);
  const held = page.held_out.at(-1), loss = page.losses.at(-1);
  if (held) found.push([held.loss.toFixed(3), "held-out loss at " + count(held.tokens) + " tokens"]);
  else if (loss) found.push([loss.loss.toFixed(3), "training loss"]);
  $("tiles").replaceChildren(...found.map(([value, label]) =>
    make("div", {className: "tile"}, make("b", {textContent: value}), make("span", {textContent: label}))));
}
function join(page) {
  if (!show("join", page.link && page.ended_at == null)) return;
  $("line").textContent = "shoal join '" + page.link + "'";
  if ($("code").dataset.link !== page.link) {
    $("code").dataset.link = page.link;
    $("code").src = of("qr.svg");
  }
}
// The run's count stands still between merges: its losses meanwhile are one point, their mean.
function perCount(points) {
  const found = [];
  for (const point of points) {
    const last = found.at(-1);
    if (last && last.tokens === point.tokens) last.loss += (point.loss - last.loss) / ++last.samples;
    else found.push({...point, samples: 1});
  }
  return found;
}
function chart(page) {
  const curves = [["train", byTime ? page.losses : perCount(page.losses)], ["held", page.held_out]];
  const all = curves.flatMap(([, points]) => points);
  if (!show("lossbox", all.length > 0)) return;
  const x = point => byTime ? point.at : point.tokens;
  const xs = all.map(x), ys = all.map(point => point.loss);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const width = wide($("loss")), [left, top, right, bottom] = [46, 8, width - 14, 230], pad = (y1 - y0 || 1) * .06;
  const px = value => left + (right - left) * (x1 > x0 ? (value - x0) / (x1 - x0) : .5);
  const py = value => bottom - (bottom - top) * (value - y0 + pad) / (y1 - y0 + 2 * pad || 1);
  const drawn = picture(width, 256, "loss over " + (byTime ? "time" : "tokens"));
  for (const level of ticks(y0 - pad, y1 + pad, 5).found) {
    draw(drawn, "line", {class: "grid", x1: left, x2: right, y1: py(level), y2: py(level)});
    draw(drawn, "text", {class: "level", x: left - 6, y: py(level) + 4, "text-anchor": "end"}, String(+level.toPrecision(6)));
  }
  const span = x1 - x0, label = at => byTime ? (span > 172800 ? date(at).slice(0, 10) : date(at).slice(5)) : count(at);
  const marks = byTime ? [x0, (x0 + x1) / 2, x1] : ticks(x0, x1, width / 130).found;
  for (const [index, at] of (span ? marks : [x0]).entries()) {
    if (byTime && span && width < 420 && index === 1) continue;
    const anchored = byTime && span ? ["start", "middle", "end"][index] : px(at) > right - 24 ? "end" : px(at) < left + 24 ? "start" : "middle";
    draw(drawn, "text", {x: px(at), y: 250, "text-anchor": anchored}, label(at));
  }
  for (const [name, points] of curves) {
    draw(drawn, "polyline", {class: name, points: points.map(p => px(x(p)).toFixed(1) + "," + py(p.loss).toFixed(1)).join(" ")});
    if (points.length && (name === "held" || points.length === 1)) for (const p of points.length > 40 ? points.slice(-1) : points)
      draw(drawn, "circle", {class: name, cx: px(x(p)), cy: py(p.loss), r: 3});
  }
  $("loss").replaceChildren(drawn);
  show("heldkey", page.held_out.length > 0);
}
function days(page) {
  if (!show("daysbox", page.days.length > 0)) return;
  const width = wide($("days")), list = page.days.slice(-Math.floor(width / 9)), most = Math.max(...list.map(day => day.tokens), 1);
  const drawn = picture(width, 150, "tokens merged on each day"), step = Math.min(60, (width - 16) / list.length);
  for (const [index, day] of list.entries()) {
    const height = 100 * day.tokens / most;
    const bar = draw(drawn, "rect", {class: "day", x: 8 + index * step, y: 124 - height, width: Math.max(1, step - 3), height, rx: 2});
    draw(bar, "title", {}, day.date + ": " + count(day.tokens));
  }
  draw(drawn, "text", {x: 8, y: 144}, list[0].date);
  if (list.length > 4) draw(drawn, "text", {x: 8 + list.length * step, y: 144, "text-anchor": "end"}, list.at(-1).date);
  draw(drawn, "text", {x: 8, y: 14}, "at most " + count(most) + "; " + list.at(-1).date + ": " + count(list.at(-1).tokens));
  $("days").replaceChildren(drawn);
}
function latest(page) {
  const newest = page.latest;
  if (!show("latestbox", newest)) return;
  const loss = newest.loss == null ? "" : ", held-out loss " + newest.loss.toFixed(3) + " at " + count(newest.loss_tokens) + " tokens";
  const parts = [count(newest.tokens) + " tokens, " + date(newest.at) + " UTC" + loss + ", " + bytes(newest.size_bytes) + ". "];
  const folder = newest.path.slice(0, newest.path.lastIndexOf("/") + 1);
  if (newest.path) for (const [label, path] of [["Parameters", newest.path], ["model card", folder + "README.md"], ["configuration", folder + "config.json"]])
    parts.push(make("a", {href: path, textContent: label}), label === "configuration" ? ". " : ", ");
  if (newest.url) parts.push("At the hub: ", anchor(newest.url));
  $("latest").replaceChildren(...parts);
}
function contributors(page) {
  if (!show("contributorsbox", page.contributors.length > 0)) return;
  $("contributors").replaceChildren(...page.contributors.map(row => make("tr", {}, make("td", {textContent: row.name}),
    make("td", {textContent: count(row.tokens)}), make("td", {textContent: (100 * row.share).toFixed(1) + "%"}))));
}
function news(page) {
  if (show("newsbox", page.news.length > 0))
    $("news").replaceChildren(...page.news.map(each => make("li", {}, make("time", {textContent: date(each.at)}), each.text)));
  if (show("unknownbox", page.unknown.length > 0))
    $("unknown").replaceChildren(...page.unknown.map(text => make("li", {textContent: text})));
}
function render(page) {
  shown = page;
  show("page", true);
  for (const part of [about, tiles, join, chart, days, latest, contributors, news]) part(page);
}
function list(found) {
  $("who").textContent = found.who + ".";
  if (!show("runsbox", !wanted && found.runs.length !== 1)) return;
  $("title").textContent = "Runs";
  $("json").href = $("json").textContent = "runs.json";
  $("state").textContent = found.runs.length + (found.runs.length === 1 ? " run" : " runs");
  const rows = found.runs.map(run => make("tr", {}, make("td", {}, make("a", {
    href: "?" + new URLSearchParams({run: run.run}), textContent: run.name || run.run.slice(0, 16)})),
    make("td", {textContent: run.learners}), make("td", {textContent: count(run.tokens)})));
  $("runs").replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", {textContent: "none is known here now"}))]));
}
async function look() {
  try {
    const runs = await fetch("runs.json"), found = await runs.json();
    list(found);
    if (wanted || found.runs.length === 1) {
      const answer = await fetch(of("run.json"));
      if (!answer.ok) throw new Error(await answer.text());
      const page = await answer.json();
      render(page);
      const age = Date.now() / 1000 - page.at;
      $("age").textContent = age > 60 ? "As of " + ago(age) + " ago." : "";
    }
    show("lost", false);
  } catch (error) {
    $("lost").textContent = error instanceof TypeError ? "This page cannot reach its server; it tries again." : String(error.message).slice(0, 300);
    show("lost", true);
  }
  setTimeout(look, 10000);
}
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("line").textContent);
    $("copy").textContent = "Copied";
  } catch {  // without https, browsers give no clipboard
    getSelection().selectAllChildren($("line"));
    $("copy").textContent = "Selected: copy it";
  }
  setTimeout(() => $("copy").textContent = "Copy", 3000);
});
for (const [id, is] of [["bytokens", false], ["bytime", true]]) $(id).addEventListener("click", () => {
  byTime = is;
  $("bytokens").setAttribute("aria-pressed", String(!is));
  $("bytime").setAttribute("aria-pressed", String(is));
  if (shown) chart(shown);
});
addEventListener("resize", () => { if (shown) { chart(shown); days(shown); } });
$("code").addEventListener("load", () => show("code", true));
$("code").addEventListener("error", () => show("code", false));
$("json").href = of("run.json");
look();
