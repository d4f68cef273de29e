/* Heatmaps: one block for each benchmark, one panel for each policy. */
const measures = {
  value: { get label() { return data.metric; }, of: (c) => c.value, text: (c) => fixed(c.value), small: (c) => between(c.low, c.high), steps: data.colours },
  difference: { label: "Difference to the baseline (points)", of: (c) => c.difference && c.difference[0], text: (c) => signed(c.difference[0]),
    small: (c) => `${signed(c.difference[1], 0)} to ${signed(c.difference[2], 0)}`, steps: data.differences, centred: true },
  kept: { label: "KV memory (mean cached tokens)", of: (c) => c.kept, text: (c) => whole(c.kept), steps: data.costs },
  seconds: { label: "Time (seconds per answer)", of: (c) => c.seconds, text: (c) => brief(c.seconds), steps: data.costs, least: 1e-6 },
  output: { label: "Tokens per answer", of: (c) => c.output, text: (c) => whole(c.output), steps: data.costs },
  truncated: { label: "Truncated (%)", of: (c) => c.truncated, text: (c) => fixed(c.truncated), steps: data.costs },
};
const mapView = { model: "", measure: "value", scale: "row", open: false };

const shortOf = (model) => data.maps.find((map) => map.model === model)?.short ?? model;

function drawMaps() {
  const models = unique(data.maps.map((map) => map.model));
  mapView.model = models.includes(mapView.model) ? mapView.model : models[0];
  const shown = data.maps.filter((map) => map.model === mapView.model);
  const measure = measures[mapView.measure];
  const there = Object.entries(measures).filter(([, measure]) => data.cells.some((cell) => known(measure.of(cell))));
  const cellsOf = (maps) => maps.flatMap((map) => map.cells.flat()).filter(known).map((n) => measure.of(data.cells[n])).filter(known);
  byId("maps-controls").replaceChildren(
    choice("Model", models.map((name) => [name, data.maps.find((map) => map.model === name).short]), mapView.model, (v) => { mapView.model = v; drawMaps(); }),
    choice("Show", there.map(([name, measure]) => [name, measure.label]), mapView.measure, (v) => { mapView.measure = v; drawMaps(); }),
    choice("Colour scale", [["row", "shared in a benchmark"], ["all", "shared by all"], ["own", "own for each map"]], mapView.scale, (v) => { mapView.scale = v; drawMaps(); }),
  );
  const whole_ = span(cellsOf(shown), measure.centred, measure.least);
  const blocks = [], folded = [];
  const scales = new Set();
  const benchmarks = unique(shown.map((map) => map.benchmark));
  for (const benchmark of benchmarks) {
    const row = shown.filter((map) => map.benchmark === benchmark);
    const shared = span(cellsOf(row), measure.centred, measure.least);
    const panels = row.map((map) => {
      const scale = mapView.scale === "all" ? whole_ : mapView.scale === "row" ? shared : span(cellsOf([map]), measure.centred, measure.least);
      scales.add(scale.join());
      return panel(map, measure, scale);
    });
    /* The mean over benchmarks comes first, where there is one. */
    (benchmark === benchmarks[0] ? blocks : folded).push(el("h3", {}, `${row[0].short} | ${benchmark}`), el("p", { class: "beside" }, ...row[0].beside.map(besideButton)), el("div", { class: "panels" }, ...panels));
  }
  byId("maps-scale").textContent = scales.size > 1 ? "Colour scales differ between maps." : "";
  if (folded.length) {
    const details = el("details", { open: mapView.open, ontoggle: () => { mapView.open = details.open; } }, el("summary", {}, `Each benchmark (${benchmarks.length - 1})`), ...folded);
    blocks.push(details);
  }
  byId("maps-panels").replaceChildren(...blocks);
}

/* The map of a cell, small, with the cell marked: what stands next to its traces. */
function mapAround(number) {
  const map = data.maps?.find((candidate) => candidate.cells.flat().includes(number)) ?? data.maps?.find((candidate) => candidate.beside.includes(number));
  if (!map) return [];
  const values = map.cells.flat().filter(known).map((n) => data.cells[n].value).filter(known);
  const figure = panel(map, measures.value, span(values));
  for (const node of figure.querySelectorAll(`td[data-cell="${number}"]`)) { node.classList.add("here"); node.setAttribute("aria-current", "true"); }
  return [el("p", { class: "soft" }, `${map.short} | ${map.benchmark}`), figure, el("p", { class: "beside" }, ...map.beside.map(besideButton))];
}

function besideButton(number) {
  const cell = data.cells[number];
  const button = el("button", { onclick: () => go.cell(number) }, title(cell));
  tipped(button, title(cell), () => cellFacts(cell));
  return button;
}

function scaleBar([low, high], steps) {
  const bar = el("i", { role: "img", "aria-label": "colour scale" });
  bar.style.background = `linear-gradient(90deg, ${steps.join(",")})`;
  return el("div", { class: "scale" }, brief(low), bar, brief(high));
}

function panel(map, measure, scale) {
  const table = el("table", { class: map.columns.length > 5 ? "heat wide" : "heat", role: "grid", "aria-label": `${map.policy} on ${map.benchmark}: ${measure.label}` });
  table.style.setProperty("--columns", map.columns.length + 1);
  const best = Math.max(...map.cells.flat().filter(known).map((n) => data.cells[n].value));
  const body = el("tbody");
  map.cells.forEach((row, y) => {
    const line = el("tr", {}, el("th", { scope: "row" }, map.rows[y]));
    row.forEach((number, x) => line.append(mapCell(map, number, x, y, measure, scale, best)));
    body.append(line);
  });
  table.append(body, el("tfoot", {}, el("tr", {}, el("td", { class: "corner" }), ...map.columns.map((name) => el("th", { scope: "col" }, name)))));
  table.addEventListener("keydown", moveInGrid);
  const first = table.querySelector("td[data-cell]");
  if (first) first.tabIndex = 0;
  const caption = el("figcaption", {}, el("strong", {}, map.policy || map.benchmark), ` ${map.vertical} (rows)${map.horizontal ? ` by ${map.horizontal} (columns)` : ""}`);
  const everywhere = map.framed.flat().every(Boolean);
  if (everywhere) caption.append(`. All cells are ${map.frame}.`);
  if (map.cells.flat().filter(known).some((n) => noChoice(data.cells[n]))) caption.append(`${everywhere ? "" : "."} Corner: policies have nothing to choose in some problems, filled: in most.`);
  if (map.vacuous) caption.append(el("br"), el("span", { class: "warn" }, `Vacuous: ${map.vacuous}.`));
  for (const note of map.notes) caption.append(el("br"), el("span", { class: note.warning ? "warn" : "" }, note.text));
  return el("figure", {}, caption, scaleBar(scale, measure.steps), el("div", { class: "scroll" }, table));
}

const noChoice = (cell) => (cell.audit ? cell.audit.no_choice : 0);

function mapCell(map, number, x, y, measure, scale, best) {
  if (!known(number)) return el("td", { class: "none", "aria-label": "no traces" });
  const cell = data.cells[number];
  const value = measure.of(cell);
  const member = (dx, dy) => Boolean((map.framed[y + dy] || [])[x + dx]);
  const framed = member(0, 0) && !map.framed.flat().every(Boolean);
  const sides = framed ? [["pt", 0, -1], ["pr", 1, 0], ["pb", 0, 1], ["pl", -1, 0]].filter(([, dx, dy]) => !member(dx, dy)).map(([name]) => name) : [];
  const peak = mapView.measure === "value" && cell.value > best - 1e-6 ? ["peak"] : [];
  const fixedBy = noChoice(cell) > 50 ? ["fixed"] : noChoice(cell) ? ["partly"] : [];
  const node = el("td", { class: [...sides, ...peak, ...fixedBy].join(" "), "data-cell": number, tabindex: -1, role: "gridcell", onclick: () => go.cell(number),
    "aria-label": `${title(cell)}${framed ? `, ${map.frame}` : ""}` });
  if (known(value)) {
    node.append(measure.text(cell));
    if (measure.small) node.append(el("small", {}, measure.small(cell)));
    paint(node, value, ...scale, measure.steps);
  } else node.append("–");
  tipped(node, title(cell), () => [...cellFacts(cell), ...(framed ? [map.frame] : [])]);
  return node;
}

function moveInGrid(event) {
  const at = event.target.closest("td[data-cell]");
  if (!at) return;
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go.cell(Number(at.dataset.cell)); return; }
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!steps) return;
  event.preventDefault();
  const rows = [...at.closest("tbody").rows];
  const next = rows[at.parentNode.rowIndex + steps[1]]?.cells[at.cellIndex + steps[0]];
  if (!next || !next.dataset.cell) return;
  at.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
