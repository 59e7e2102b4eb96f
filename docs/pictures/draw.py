"""``python -m docs.pictures.draw`` makes an SVG of each ``*.diagram`` in this folder.

A diagram is a title and lines of these forms:

    title: A round                      what a reader who cannot see it is told
    lanes: anna, the leader | boris     the columns of a sequence, from left to right
    boris -> anna: join                 a message; ``-x`` instead of ``->``: it does not arrive
    anna -> all: commit                 a message to all other lanes
    note boris: keeps what it sent      a note at a lane, or over all of them: ``note all: ...``
    dies anna: its machine is switched off
    box: the trainer: one line | more   a box with a heading, below the one before
    arrow: shared memory                a labelled arrow, both ways, between two boxes
    down: imports                       the same, one way
    bar DDP, 1 Gbit/s: 1.32 of 12 h     a bar, as long as its number is of the most that there is

Pictures are 400 units wide, so that they can be read on a telephone, and bring their own
background, so that they can be read in dark and light.
"""

from __future__ import annotations

import textwrap
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, EDGE = 400, 14
LETTER = 6.5
"""Width of a letter of 12.5 units, on average."""

LIGHT = {
    "back": "fill:#ffffff;stroke:#d0d7de",
    "ink": "fill:#1f2328",
    "dim": "fill:#57606a",
    "life": "stroke:#c3cad2;stroke-dasharray:3 4",
    "head": "fill:#ddf4ff;stroke:#54aeff",
    "note": "fill:#fff8c5;stroke:#d4a72c",
    "bad": "fill:#ffebe9;stroke:#ff8182",
    "go": "stroke:#0969da;stroke-width:1.6;fill:none",
    "tip": "fill:#0969da",
    "plain": "fill:#ffffff",
}
DARK = {
    "back": "fill:#161b22;stroke:#30363d",
    "ink": "fill:#e6edf3",
    "dim": "fill:#9aa4af",
    "life": "stroke:#3d444d",
    "head": "fill:#12304d;stroke:#316dca",
    "note": "fill:#3a3012;stroke:#8a6d1d",
    "bad": "fill:#4a1f22;stroke:#c93c37",
    "go": "stroke:#6cb6ff",
    "tip": "fill:#6cb6ff",
    "plain": "fill:#161b22",
}
FONT = "12.5px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def style() -> str:
    light, dark = (
        "".join(f".{name}{{{rule}}}\n" for name, rule in rules.items()) for rules in (LIGHT, DARK)
    )
    return (
        f"text{{font:{FONT}}}.strong{{font-weight:600}}\n{light}"
        f"@media (prefers-color-scheme:dark){{\n{dark}}}"
    )


def wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(8, int(width / LETTER))) or [""]


class Drawing:
    """The parts of a picture, and how far down they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = float(EDGE)

    def rect(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="5"/>'
        )

    def text(self, lines: list[str], x: float, y: float, kind: str, anchor: str = "middle") -> None:
        for number, line in enumerate(lines):
            self.parts.append(
                f'<text class="{kind}" x="{x:.1f}" y="{y + 16 * number:.1f}" '
                f'text-anchor="{anchor}">{escape(line)}</text>'
            )

    def card(self, kind: str, text: str, left: float, right: float, strong: str = "") -> None:
        """A box with text in it, from ``left`` to ``right``, at ``y``."""
        head = wrapped(strong, right - left - 16) if strong else []
        body = [piece for part in text.split(" | ") for piece in wrapped(part, right - left - 16)]
        height = 16 * (len(head) + len(body)) + 12
        self.rect(kind, left, self.y, right - left, height)
        middle = (left + right) / 2
        self.text(head, middle, self.y + 18, "ink strong")
        self.text(body, middle, self.y + 18 + 16 * len(head), "ink")
        self.y += height + 12

    def finished(self, title: str, lanes: list[float]) -> str:
        lives = [f'<path class="life" d="M{x:.1f} {EDGE + 40}V{self.y:.1f}"/>' for x in lanes]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.y + 4:.0f}" '
                'role="img">',
                f"<title>{escape(title)}</title>",
                f"<style>{style()}</style>",
                f'<rect class="back" x="1" y="1" width="{WIDTH - 2}" height="{self.y + 2:.0f}" '
                'rx="8"/>',
                *lives,
                *self.parts,
                "</svg>\n",
            ]
        )


def drawn(source: str) -> str:
    """The SVG of a diagram."""
    drawing = Drawing()
    title, lanes, lowered = "", dict[str, float](), False
    for line in filter(None, map(str.strip, source.splitlines())):
        head, _, rest = line.partition(": ")
        kind, _, name = head.partition(" ")
        if kind == "title":
            title = rest
        elif kind == "lanes":
            lanes = _lanes(drawing, rest)
            lowered = True
        elif kind in ("note", "dies"):
            _note(drawing, lanes, name, rest, bad=kind == "dies")
        elif kind == "box":
            heading, _, text = rest.partition(": ")
            drawing.card("head", text, EDGE, WIDTH - EDGE, strong=heading)
        elif kind == "bar":
            _bar(drawing, name, rest)
        elif kind in ("arrow", "down"):
            _arrow_down(drawing, rest, both=kind == "arrow")
        else:
            _message(drawing, lanes, head, rest)
    return drawing.finished(title, [*lanes.values()] if lowered else [])


def _lanes(drawing: Drawing, text: str) -> dict[str, float]:
    names = text.split(" | ")
    room = (WIDTH - 2 * EDGE) / len(names)
    lanes = {}
    for index, each in enumerate(names):
        name, _, role = each.partition(", ")
        left = EDGE + index * room
        drawing.rect("head", left + 4, EDGE, room - 8, 38)
        middle = left + room / 2
        if role:
            drawing.text([name], middle, EDGE + 16, "ink strong")
            drawing.text([role], middle, EDGE + 32, "dim")
        else:
            drawing.text([name], middle, EDGE + 24, "ink strong")
        lanes[name] = middle
    drawing.y = EDGE + 52
    return lanes


def _note(drawing: Drawing, lanes: dict[str, float], name: str, text: str, *, bad: bool) -> None:
    left, right = float(EDGE), float(WIDTH - EDGE)
    if name != "all":
        width = min(190.0, right - left)
        left = min(max(left, lanes[name] - width / 2), right - width)
        right = left + width
    drawing.card("bad" if bad else "note", text, left, right)


def _message(drawing: Drawing, lanes: dict[str, float], head: str, text: str) -> None:
    lost = " -x " in head
    sender, _, receiver = head.partition(" -x " if lost else " -> ")
    start = lanes[sender]
    ends = [x for name, x in lanes.items() if name != sender and receiver in (name, "all")]
    span = [start, *ends]
    label = wrapped(text, WIDTH - 2 * EDGE - 10)
    middle = (min(span) + max(span)) / 2
    half = max(len(line) for line in label) * LETTER / 2
    middle = min(max(middle, EDGE + half), WIDTH - EDGE - half)
    for number in range(len(label)):
        drawing.rect("plain", middle - half, drawing.y + 16 * number, 2 * half, 16)
    drawing.text(label, middle, drawing.y + 12, "ink")
    y = drawing.y + 16 * len(label) + 6
    for end in ends:
        step = 7 if end > start else -7
        tip = end - step if not lost else (start + end) / 2
        drawing.parts.append(f'<path class="go" d="M{start:.1f} {y:.1f}H{tip:.1f}"/>')
        if lost:
            drawing.parts.append(
                f'<path class="go" d="M{tip - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"/>'
            )
        else:
            drawing.parts.append(
                f'<path class="tip" d="M{end:.1f} {y:.1f}l{-step * 1.3:.1f} -4.5v9z"/>'
            )
    drawing.y = y + 14


def _bar(drawing: Drawing, name: str, text: str) -> None:
    value, _, rest = text.partition(" of ")
    most, _, unit = rest.partition(" ")
    drawing.text([name], EDGE, drawing.y + 13, "ink", "start")
    width = (WIDTH - 2 * EDGE - 90) * float(value) / float(most)
    drawing.rect("head", EDGE, drawing.y + 19, max(3.0, width), 14)
    drawing.text([f"{value} {unit}"], EDGE + width + 8, drawing.y + 30, "ink strong", "start")
    drawing.y += 44


def _arrow_down(drawing: Drawing, text: str, *, both: bool) -> None:
    y, x = drawing.y - 8, WIDTH / 2
    label = wrapped(text, WIDTH / 2 - 30)
    height = max(30, 16 * len(label) + 6)
    drawing.parts.append(f'<path class="go" d="M{x} {y}V{y + height}"/>')
    drawing.parts.append(f'<path class="tip" d="M{x} {y + height + 2}l-4.5 -9h9z"/>')
    if both:
        drawing.parts.append(f'<path class="tip" d="M{x} {y - 2}l-4.5 9h9z"/>')
    drawing.text(label, x + 12, y + height / 2 + 4 - 8 * (len(label) - 1), "dim", "start")
    drawing.y = y + height + 8


def main() -> None:
    for path in sorted(FOLDER.glob("*.diagram")):
        path.with_suffix(".svg").write_text(drawn(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
