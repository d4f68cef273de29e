"use strict";
/* Elements, numbers, colours and hover texts. Every text goes in as a text node: no text of a model is ever markup. */
const page = JSON.parse(document.getElementById("page").textContent);
/* The document of the run on show. */
const data = {};
const byId = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;
const unique = (values) => [...new Set(values)];

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-") && value !== null) node.setAttribute(name, value);
    else if (!known(value) || value === false) continue;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children.filter(known));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

const link = (address, text) => el("a", { href: address }, text);
const badge = (right, text) => el("span", { class: right ? "badge right" : "badge wrong" }, text);

/* A table with a caption for screen readers; `number` columns are right-aligned. */
function listTable(caption, columns, rows, number = []) {
  const kind = (index) => (number.includes(index) ? "number" : null);
  const head = columns.map((name, index) => el("th", { scope: "col", class: kind(index) }, name));
  const body = rows.map((row) => el("tr", {}, ...row.map((value, index) =>
    index ? el("td", { class: kind(index) }, value) : el("th", { scope: "row" }, value))));
  return el("table", { class: "list" }, el("caption", { class: "unseen" }, caption),
    columns.length ? el("thead", {}, el("tr", {}, ...head)) : null, el("tbody", {}, ...body));
}

/* A labelled choice; hidden where there is nothing to choose. */
function choice(label, options, chosen, changed) {
  const select = el("select", { onchange: () => changed(select.value) });
  for (const [value, text] of options) select.append(el("option", { value, selected: value === chosen }, text));
  return el("label", { hidden: options.length < 2 }, label, select);
}

/* -- numbers ------------------------------------------------------------------------------------------------------- */

const fixed = (value, digits = 1) => (known(value) ? value.toFixed(digits).replace(/^-(?=[0.]*$)/, "") : "–");
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");
const brief = (value) => (value >= 100 ? whole(value) : Number(value.toPrecision(3)).toString());
/* Three digits, trailing zeros too: equal numbers of them stand beside each other. */
const precise = (value) => (value >= 100 ? whole(value) : value.toPrecision(3));
/* A number in the form that its column declares. */
const printed = (value, form) => (known(value) ? { whole, fixed, precise, brief }[form](value) : "–");
const signed = (value, digits = 1) => fixed(value, digits).replace(/^-/, "−").replace(/^(?=.*[1-9])(?!−)/, "+");
const between = (low, high) => (known(low) ? `${fixed(low)}–${fixed(high)}` : "");
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/* The least and the largest value, `least` apart at least, within 0 to 100 if they are; symmetric around 0 if centred. */
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

/* -- colours ------------------------------------------------------------------------------------------------------- */

function colourOf(value, low, high, steps) {
  const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const position = Math.min(Math.max((value - low) / (high - low), 0), 1) * (steps.length - 1);
  const step = Math.min(Math.floor(position), steps.length - 2);
  const [from, to] = [channels(steps[step]), channels(steps[step + 1])];
  return from.map((part, index) => Math.round(part + (to[index] - part) * (position - step)));
}

/* All scales are pale: black type can be read on every colour. */
function paint(node, value, low, high, steps) {
  node.style.backgroundColor = `rgb(${colourOf(value, low, high, steps).join(" ")})`;
  node.style.color = "#111111";
}

/* -- cells --------------------------------------------------------------------------------------------------------- */

const title = (cell) => `${cell.short}: ${fixed(cell.value)}${known(cell.low) ? ` (${between(cell.low, cell.high)})` : ""}`;
const shortOf = (model) => data.outcomes.find((table) => table.model === model)?.short ?? model;
const noChoice = (cell) => cell.audit?.no_choice ?? 0;

/* The facts that hover and focus show. */
function cellFacts(cell) {
  const facts = [];
  if (cell.problems) facts.push(`${plural(cell.problems, "problem")}${cell.samples ? `, ${plural(cell.samples, "sample")} each` : ""}`);
  if (cell.difference) {
    const [value, low, high] = cell.difference.map((points) => fixed(-points).replace("-", "−"));
    const against = `against ${data.against}`, gains = value.startsWith("−");
    facts.push(gains ? `gains ${fixed(cell.difference[0])} points ${against} (95 %, paired: ${fixed(cell.difference[1]).replace("-", "−")} to ${fixed(cell.difference[2])})`
      : `loses ${value} points ${against} (95 %, paired: ${high} to ${low})`);
  }
  for (const { name, form, hover } of page.columns.filter((column) => column.hover && known(cell[column.name]))) {
    const fact = hover.replace("{}", () => printed(cell[name], form));
    if (fact.startsWith(",") && facts.length) facts.push(facts.pop() + fact);
    else facts.push(fact);
  }
  if (cell.audit) {
    const { median, worst } = cell.audit;
    facts.push(`${whole(median)} places for older thinking tokens in the median problem, ${whole(worst)} in the worst`);
    if (noChoice(cell)) facts.push(`every policy keeps the same tokens in ${fixed(noChoice(cell))} % of the problems`);
  }
  return facts;
}

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
