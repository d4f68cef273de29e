/* The answer as a forest: one row a setting, by what it saves; its loss with its interval against the margin. */
const MOST_ROWS = 20;
/* The share of the width up to the place from which on the axis is closer. */
const NEAR_SHARE = 0.77;
/* What a state says, as the key of all figures has it. */
const stateWords = (state, margin) => page.states[state].words.replace("{}", plural(margin, "point"));

/* The cards of the models on show, where each has losses and few enough settings for a row each. */
function forestCards() {
  const cards = data.cards.filter((card) => (!view.model || card.model === shortOf(view.model)) && card.rows.length);
  return cards.every((card) => card.rows.length <= MOST_ROWS) ? cards : [];
}

function drawForests() {
  const cards = forestCards();
  if (!cards.length) return;
  const scale = forestScale(cards), rows = cards.flatMap((card) => card.rows);
  byId("forest-key").replaceChildren(...keyOf(cards[0].margin, unique(rows.map((row) => row.state)), cards.some((card) => card.shown), controlsOf(rows)));
  byId("forest-panels").replaceChildren(...cards.map((card) => forest(card, scale)));
  const counts = unique(rows.map((row) => data.cells[row.cell].problems).filter(known)), words = [`Lines: 95 % intervals against ${data.reference}, paired${counts.length === 1 ? `, ${plural(counts[0], "problem")}` : ""}.`];
  if (scale.times > 1) words.push(`Grey: the axis is ${whole(scale.times)} times closer beyond ${brief(scale.bend)} points.`);
  byId("forest-about").textContent = words.join(" ");
}

const controlsOf = (rows) => unique(rows.flatMap((row) => (row.state === "control" ? [data.cells[row.cell].policy] : row.controls.map(([name]) => name))));

/* One axis for all models. It has room for the intervals of all that is not proven beyond the margin; where others lie far beyond these it is closer there. */
function forestScale(cards) {
  const { margin } = cards[0], rows = cards.flatMap((card) => card.rows);
  const near = rows.filter((row) => row.state !== "beyond" && row.state !== "control");
  const far = Math.max(2.2 * margin, ...rows.flatMap((row) => [...row.loss, ...row.controls.map(([, points]) => points)])), most = far > 60 ? 100 : far;
  const wanted = Math.max(2.2 * margin, ...near.map((row) => 1.05 * row.loss[2])), bend = wanted > 0.6 * most ? most : wanted;
  const low = Math.min(-0.6 * margin, ...near.map((row) => 1.05 * row.loss[1]));
  const times = bend < most ? ((most - bend) / (1 - NEAR_SHARE)) * (NEAR_SHARE / (bend - low)) : 1;
  const share = (points) => (times === 1 ? (points - low) / (most - low) : points <= bend ? NEAR_SHARE * ((points - low) / (bend - low)) : NEAR_SHARE + (1 - NEAR_SHARE) * ((points - bend) / (most - bend)));
  const at = (points) => 2 + 96 * Math.min(Math.max(share(points), 0), 1);
  /* Numbers in the order of their weight, where there is room for them. */
  const ticks = [];
  for (const points of [0, margin, 100, 50, 2 * margin, 20, 10, -20, -10]) {
    if (points >= low && points <= most && ticks.every((other) => Math.abs(at(other) - at(points)) > 7)) ticks.push(points);
  }
  return { margin, bend, times, at, ticks };
}

/* The mark of a state at a place in percent of the width. */
function markAt(x, state) {
  if (state === "control") return svg("line", { class: "mark control", x1: `${x}%`, x2: `${x}%`, y1: "22%", y2: "78%" });
  if (state === "beyond") return svg("svg", { x: `${x}%`, y: "50%", overflow: "visible" }, svg("path", { class: "mark beyond", d: "M-5 -5L5 5M5 -5L-5 5" }));
  return svg("circle", { class: `mark ${state}`, cx: `${x}%`, cy: "50%", r: 5 });
}

function keyOf(margin, shown, hasPick, controls) {
  const item = (node, text) => el("li", {}, node, text);
  const sign = (state) => svg("svg", { class: "key", "aria-hidden": "true" }, markAt(50, state));
  return [
    ...(hasPick ? [item(el("i", { class: "boxed" }), "recommended")] : []),
    ...Object.keys(page.states).filter((state) => shown.includes(state)).map((state) => item(sign(state), stateWords(state, margin))),
    ...(controls.length ? [item(sign("control"), `the same memory, policy ${listed(controls)}`)] : []),
  ];
}

/* The picture of a row or of a head: the margin, the part where the axis is closer, and what stands in it. */
function strip(scale, ...children) {
  const zero = `${scale.at(0)}%`, edge = `${scale.at(scale.margin)}%`, bend = scale.at(scale.bend);
  return svg("svg", { class: "strip", "aria-hidden": "true" },
    svg("rect", { class: "band", x: 0, y: 0, width: edge, height: "100%" }),
    ...(scale.times > 1 ? [svg("rect", { class: "far", x: `${bend}%`, y: 0, width: `${100 - bend}%`, height: "100%" })] : []),
    svg("line", { class: "zero", x1: zero, x2: zero, y1: 0, y2: "100%" }), svg("line", { class: "edge", x1: edge, x2: edge, y1: 0, y2: "100%" }), ...children);
}

function forest(card, scale) {
  const shown = card.rows.filter((row) => !view.policy || data.cells[row.cell].policy === view.policy), policies = unique(shown.map((row) => data.cells[row.cell].policy));
  const isNarrow = scale.at(scale.margin) - scale.at(0) < 9, anchors = { full: isNarrow ? "end" : "middle", margin: "start" };
  const label = (points, text) => svg("text", { class: text === "margin" ? "edge" : null, x: `${scale.at(points)}%`, y: "1em", "text-anchor": anchors[text] }, text);
  const head = el("tr", {}, el("th", { scope: "col" }, policies.length === 1 ? policies[0] : "Setting"), el("th", { scope: "col", class: "number" }, "saves"),
    el("th", { scope: "col" }, svg("svg", { class: "strip", "aria-hidden": "true" }, label(0, "full"), label(scale.margin, "margin")), el("span", { class: "unseen" }, "interval")),
    el("th", { scope: "col", class: "number" }, "points lost"));
  const foot = el("tr", { "aria-hidden": "true" }, el("td", { colspan: 2 }), el("td", {}, svg("svg", { class: "strip" }, ...scale.ticks.map((points) =>
    svg("text", { x: `${scale.at(points)}%`, y: "1em", "text-anchor": "middle" }, pointsLost(points, 0))))), el("td"));
  const map = data.maps.find((one) => one.benchmark === card.benchmark && one.short === card.model);
  return el("figure", {}, el("figcaption", {}, el("strong", {}, `${card.model} | ${card.benchmark}`), ...(map ? [besideOf(map)] : [])),
    el("table", { class: "forest" }, el("caption", { class: "unseen" }, `What the settings of ${card.model} save and lose`), el("thead", {}, head),
      el("tbody", {}, ...shown.map((row) => forestRow(card, row, scale, policies.length === 1 ? `${policies[0]}, ` : ""))), el("tfoot", {}, foot)));
}

function forestRow(card, row, scale, prefix) {
  const cell = data.cells[row.cell], [value, low, high] = row.loss, isPick = card.shown && row.cell === card.cell, isControl = row.state === "control";
  const said = isControl ? "control" : stateWords(row.state, card.margin);
  const line = svg("line", { class: `span ${row.state}`, x1: `${scale.at(low)}%`, x2: `${scale.at(high)}%`, y1: "50%", y2: "50%" });
  const picture = strip(scale, ...row.controls.map(([, points]) => markAt(scale.at(points), "control")), ...(isControl ? [] : [line]), markAt(scale.at(value), row.state));
  const name = el("button", { class: "setting", onclick: () => openCell(row.cell) }, row.name.replace(prefix, ""));
  const node = el("tr", { class: isPick ? "pick" : null }, el("th", { scope: "row" }, name, row.state === "untested" ? el("small", {}, " fits, not tested") : null),
    el("td", { class: "number" }, known(row.memory) ? `${fixed(100 * (1 - row.memory), 0)} %` : "–"),
    el("td", {}, picture, el("span", { class: "unseen" }, `95 %: ${pointsLost(low)} to ${pointsLost(high)}; ${said}${isPick ? "; recommended" : ""}`)), el("td", { class: "number" }, pointsLost(value)));
  tipped(node, title(cell), () => [...cellFacts(cell), said, ...(isPick ? ["recommended"] : []), ...row.controls.map(([policy, points]) => `policy ${policy} in its place: ${pointsLost(points)} lost`)]);
  name.addEventListener("focus", () => node.dispatchEvent(new Event("focus")));
  name.addEventListener("blur", () => node.dispatchEvent(new Event("blur")));
  return node;
}
