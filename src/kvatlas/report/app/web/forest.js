/* The answer as a forest: one row a setting, by what it saves; its loss with its interval against the margin. */
/* What a state says, as the key of all figures has it. */
const stateWords = (state, margin) => page.states[state].words.replace("{}", plural(margin, "point"));

/* The cards of the models on show; none where there are no losses, or too many settings for a row each. */
function forestCards() {
  return data.axis ? data.cards.filter((card) => (!view.model || card.model === shortOf(view.model)) && card.rows.length) : [];
}

function drawForests() {
  const cards = forestCards();
  if (!cards.length) return;
  const scale = forestScale(cards[0].margin), rows = cards.flatMap((card) => card.rows);
  byId("forest-key").replaceChildren(...keyOf(cards[0].margin, unique(rows.map((row) => row.state)), cards.some((card) => card.shown), controlsOf(rows)));
  byId("forest-panels").replaceChildren(...cards.map((card) => forest(card, scale)));
  const counts = unique(rows.map((row) => data.cells[row.cell].problems).filter(known)), words = [`Lines: 95 % intervals against ${data.reference}, paired${counts.length === 1 ? `, ${plural(counts[0], "problem")}` : ""}.`];
  if (scale.closer > 1) words.push(`Grey: the axis is ${whole(scale.closer)} times closer beyond ${whole(scale.turn)} points.`);
  byId("forest-about").textContent = words.join(" ");
}

const controlsOf = (rows) => unique(rows.flatMap((row) => (row.state === "control" ? [data.cells[row.cell].policy] : row.controls.map(([name]) => name))));

/* The axis of all models, as figures have it: losses beyond `turn` are so many times closer. */
function forestScale(margin) {
  const { low, turn, high, closer, ticks } = data.axis;
  const place = (points) => (points <= turn ? points : turn + (points - turn) / closer);
  const at = (points) => 2 + 96 * Math.min(Math.max((place(points) - low) / (place(high) - low), 0), 1);
  return { margin, turn, closer, ticks, at };
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
  const zero = `${scale.at(0)}%`, edge = `${scale.at(scale.margin)}%`, turn = scale.at(scale.turn);
  return svg("svg", { class: "strip", "aria-hidden": "true" },
    svg("rect", { class: "band", x: 0, y: 0, width: edge, height: "100%" }),
    ...(scale.closer > 1 ? [svg("rect", { class: "far", x: `${turn}%`, y: 0, width: `${100 - turn}%`, height: "100%" })] : []),
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
    svg("text", { x: `${scale.at(points)}%`, y: "1em", "text-anchor": "middle" }, brief(points).replace("-", "−"))))), el("td"));
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
