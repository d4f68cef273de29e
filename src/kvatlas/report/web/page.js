"use strict";
/* What all parts of the page share. Every text goes in as a text node: nothing that a model wrote is ever markup. */
const data = JSON.parse(document.getElementById("data").textContent);
/* Where a click leads: each page sets these. */
const go = {};
const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-") && value !== null) node.setAttribute(name, value);
    else if (value === null || value === undefined || value === false) continue;
    else if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const fixed = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(?=[0.]*$)/, ""));
const whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const brief = (value) => (value >= 100 ? whole(value) : Number(value.toPrecision(3)).toString());
const signed = (value, digits = 1) => fixed(value, digits).replace(/^-/, "−").replace(/^(?=.*[1-9])(?!−)/, "+");
const between = (low, high) => (low === null || low === undefined ? "" : `${fixed(low)}–${fixed(high)}`);
const known = (value) => value !== null && value !== undefined;
const unique = (values) => [...new Set(values)];

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function colourOf(value, low, high, steps) {
  const position = Math.min(Math.max((value - low) / (high - low), 0), 1) * (steps.length - 1);
  const step = Math.min(Math.floor(position), steps.length - 2);
  const [from, to] = [rgb(steps[step]), rgb(steps[step + 1])];
  return from.map((part, i) => Math.round(part + (to[i] - part) * (position - step)));
}

/* Dark or light text, whichever has the higher contrast (WCAG relative luminance). */
function inkOn(parts) {
  const linear = parts.map((part) => part / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return (luminance + 0.05) ** 2 > 1.05 * 0.056 ? "#111111" : "#ffffff";
}

function paint(node, value, low, high, steps) {
  const parts = colourOf(value, low, high, steps);
  node.style.backgroundColor = `rgb(${parts.join(" ")})`;
  node.style.color = inkOn(parts);
}

/* From the smallest to the largest value, `least` apart at least, within 0 to 100 if they are; as far below 0 as above it if centred. */
function span(values, centred = false, least = 1) {
  if (!values.length) return [0, 1];
  const low = Math.min(...values), high = Math.max(...values);
  if (centred) {
    const reach = Math.max(Math.abs(low), Math.abs(high), 1);
    return [-reach, reach];
  }
  if (high - low >= least) return [low, high];
  let start = (low + high - least) / 2;
  if (low >= 0 && high <= 100) start = Math.min(Math.max(start, 0), 100 - least);
  return [start, start + least];
}

/* A labelled choice; nothing where there is nothing to choose. */
function choice(label, options, chosen, changed) {
  const select = el("select", { onchange: () => changed(select.value) });
  for (const [value, text] of options) select.append(el("option", { value, selected: value === chosen }, text));
  const wrapped = el("label", {}, label, select);
  wrapped.hidden = options.length < 2;
  return wrapped;
}

/* Facts about a cell, as hover and focus show them. */
function cellFacts(cell) {
  const facts = [];
  if (cell.problems) facts.push(`${whole(cell.problems)} problems${cell.samples ? `, ${cell.samples} ${cell.samples === 1 ? "sample" : "samples"} each` : ""}`);
  if (cell.difference) {
    const [value, low, high] = cell.difference;
    facts.push(`${signed(value)} points against the baseline (${signed(low)} to ${signed(high)}, paired)`);
  }
  if (cell.kept !== null) facts.push(`${whole(cell.kept)} tokens cached on average${cell.peak ? `, ${whole(cell.peak)} at the peak` : ""}`);
  if (cell.output !== null) facts.push(`${whole(cell.output)} tokens per answer`);
  if (cell.seconds) facts.push(`${brief(cell.seconds)} s per answer`);
  if (cell.truncated !== null) facts.push(`${fixed(cell.truncated)} % truncated`);
  if (cell.audit) {
    const { median, worst, no_choice } = cell.audit;
    facts.push(`${whole(median)} places for older thinking tokens in the median problem, ${whole(worst)} in the worst`);
    if (no_choice) facts.push(`policies have nothing to choose in ${fixed(no_choice)} % of the problems`);
  }
  return facts;
}

const title = (cell) => `${cell.short}: ${fixed(cell.value)}${cell.low === null ? "" : ` (${between(cell.low, cell.high)})`}`;

const tip = byId("tip");
function showTip(node, head, lines) {
  tip.replaceChildren(el("b", {}, head), ...lines.map((line) => el("span", {}, line)));
  tip.hidden = false;
  const box = node.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), document.documentElement.clientWidth - own.width - 8);
  const below = box.bottom + 8 + own.height < window.innerHeight || box.top < own.height + 8;
  tip.style.left = `${Math.max(0, left + window.scrollX)}px`;
  tip.style.top = `${(below ? box.bottom + 8 : box.top - own.height - 8) + window.scrollY}px`;
}
function hideTip() { tip.hidden = true; }
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
function tipped(node, head, lines) {
  for (const name of ["mouseenter", "focus"]) node.addEventListener(name, () => showTip(node, head, lines()));
  for (const name of ["mouseleave", "blur"]) node.addEventListener(name, hideTip);
}
