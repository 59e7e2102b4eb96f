"use strict";
// What every page is drawn with. All that peers say ends up in textContent: nothing of it is ever markup.
const $ = id => document.getElementById(id);
const svg = "http://www.w3.org/2000/svg";
function make(name, fields, ...inside) {
  const element = document.createElement(name);
  Object.assign(element, fields);
  element.append(...inside);
  return element;
}
function draw(parent, name, fields, text) {
  const element = document.createElementNS(svg, name);
  for (const [key, value] of Object.entries(fields)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
// Pictures are drawn as wide as they are shown, so that their texts can be read on a phone.
const wide = box => Math.max(280, box.clientWidth);
function picture(width, height, label) {
  const made = document.createElementNS(svg, "svg");
  for (const [key, value] of [["viewBox", `0 0 ${width} ${height}`], ["role", "img"], ["aria-label", label]]) made.setAttribute(key, value);
  return made;
}
// Round values within a range: 1, 2 or 5 times a power of ten apart. They are counted: where numbers are too large for
// the step, the sum would stand still.
function ticks(low, high, most) {
  const raw = ((high - low) || Math.abs(high) || 1) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw * .999), found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && found.length <= 10 * most; index++) found.push(index * step);
  return {found, digits: Math.min(20, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))};
}
function short(value, units) {
  let index = 0;
  while (Math.abs(value) >= 1000 && index < units.length - 1) { value /= 1000; index++; }
  return (value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3)) + units[index];
}
const count = value => value == null ? "?" : short(value, ["", " k", " M", " G", " T"]);
const bytes = value => short(value, [" B", " kB", " MB", " GB", " TB"]);
function ago(seconds) {
  const s = Math.max(0, seconds);
  if (s < 90) return Math.round(s) + " s";
  if (s < 5400) return Math.round(s / 60) + " min";
  return s < 172800 ? Math.round(s / 3600) + " h" : Math.round(s / 86400) + " days";
}
