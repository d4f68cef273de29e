/* Heatmaps: one block for each benchmark, one panel for each policy. */
const measures = {
  value: {
    get label() { return data.metric; },
    of: (cell) => cell.value,
    text: (cell) => fixed(cell.value),
    small: (cell) => between(cell.low, cell.high),
    steps: page.colours,
  },
  difference: {
    label: "Difference to the baseline (points)",
    of: (cell) => cell.difference && cell.difference[0],
    text: (cell) => signed(cell.difference[0]),
    small: (cell) => `${signed(cell.difference[1], 0)} to ${signed(cell.difference[2], 0)}`,
    steps: page.differences,
    centred: true,
  },
  kept: cost("KV memory (mean cached tokens)", "kept", whole),
  seconds: { ...cost("Time (seconds per answer)", "seconds", brief), least: 1e-6 },
  output: cost("Tokens per answer", "output", whole),
  truncated: cost("Truncated (%)", "truncated", fixed),
};
const mapView = { model: "", measure: "value", scale: "row", open: false };

function cost(label, name, text) {
  return { label, of: (cell) => cell[name], text: (cell) => text(cell[name]), steps: page.costs };
}

const openCell = (number) => { hideTip(); lead(to(state.run, "cell", number)); };
const numbersIn = (map) => map.cells.flat().filter(known);

function spanOf(maps, measure) {
  const values = maps.flatMap(numbersIn).map((number) => measure.of(data.cells[number])).filter(known);
  return span(values, measure.centred, measure.least);
}

function drawMaps(wanted = null) {
  const models = unique(data.maps.map((map) => map.model));
  if (!models.includes(mapView.model)) [mapView.model] = models;
  const shown = data.maps.filter((map) => map.model === mapView.model);
  const measure = measures[mapView.measure];
  const there = Object.entries(measures).filter(([, one]) => data.cells.some((cell) => known(one.of(cell))));
  const scales = [["row", "shared in a benchmark"], ["all", "shared by all"], ["own", "own for each map"]];
  const change = (name) => (value) => { mapView[name] = value; drawMaps(); };
  byId("maps-controls").replaceChildren(
    choice("Model", models.map((name) => [name, shortOf(name)]), mapView.model, change("model")),
    choice("Show", there.map(([name, one]) => [name, one.label]), mapView.measure, change("measure")),
    choice("Colour scale", scales, mapView.scale, change("scale")),
  );
  const every = spanOf(shown, measure), used = new Set();
  const blocks = unique(shown.map((map) => map.benchmark)).map((benchmark) => {
    const row = shown.filter((map) => map.benchmark === benchmark), shared = spanOf(row, measure);
    const panels = row.map((map) => {
      const scale = { all: every, row: shared, own: spanOf([map], measure) }[mapView.scale];
      used.add(scale.join());
      const figure = panel(map, measure, scale), name = figure.querySelector("figcaption strong");
      name.replaceChildren(link(to(state.run, "map", data.maps.indexOf(map)), name.textContent));
      if (map === wanted) figure.classList.add("here");
      return figure;
    });
    return [el("h3", {}, `${row[0].short} | ${benchmark}`), besideOf(row[0]), el("div", { class: "panels" }, ...panels)];
  });
  byId("maps-scale").textContent = used.size > 1 ? "Colour scales differ between maps." : "";
  /* The mean over benchmarks comes first, where there is one. */
  const [first, ...folded] = blocks;
  const details = el("details", { open: mapView.open, ontoggle: () => { mapView.open = details.open; } },
    el("summary", {}, `Each benchmark (${folded.length})`), ...folded.flat());
  byId("maps-panels").replaceChildren(...first, ...(folded.length ? [details] : []));
  byId("maps-panels").querySelector("figure.here")?.scrollIntoView({ block: "center" });
}

/* The map of a cell, small, with the cell marked: it stands next to the cell's traces. */
function mapAround(number) {
  const map = data.maps.find((one) => numbersIn(one).includes(number)) ?? data.maps.find((one) => one.beside.includes(number));
  if (!map) return [];
  const figure = panel(map, measures.value, spanOf([map], measures.value));
  for (const node of figure.querySelectorAll(`td[data-cell="${number}"]`)) {
    node.classList.add("here");
    node.setAttribute("aria-current", "true");
  }
  return [el("p", { class: "soft" }, `${map.short} | ${map.benchmark}`), figure, besideOf(map)];
}

function besideOf(map) {
  return el("p", { class: "beside" }, ...map.beside.map((number) => {
    const cell = data.cells[number], button = el("button", { onclick: () => openCell(number) }, title(cell));
    tipped(button, title(cell), () => cellFacts(cell));
    return button;
  }));
}

function scaleBar([low, high], steps) {
  const bar = el("i", { role: "img", "aria-label": "colour scale" });
  bar.style.background = `linear-gradient(90deg, ${steps.join(",")})`;
  return el("div", { class: "scale" }, brief(low), bar, brief(high));
}

function panel(map, measure, scale) {
  const name = `${map.policy} on ${map.benchmark}: ${measure.label}`;
  const table = el("table", { class: map.columns.length > 5 ? "heat wide" : "heat", role: "grid", "aria-label": name });
  table.style.setProperty("--columns", map.columns.length + 1);
  const best = Math.max(...numbersIn(map).map((number) => data.cells[number].value));
  const rows = map.cells.map((row, y) => el("tr", {}, el("th", { scope: "row" }, map.rows[y]),
    ...row.map((number, x) => mapCell(map, number, x, y, measure, scale, best))));
  const columns = map.columns.map((column) => el("th", { scope: "col" }, column));
  table.append(el("tbody", {}, ...rows), el("tfoot", {}, el("tr", {}, el("td", { class: "corner" }), ...columns)));
  table.addEventListener("keydown", moveInGrid);
  const first = table.querySelector("td[data-cell]");
  if (first) first.tabIndex = 0;
  return el("figure", {}, captionOf(map), scaleBar(scale, measure.steps), el("div", { class: "scroll" }, table));
}

function captionOf(map) {
  const axes = ` ${map.vertical} (rows)${map.horizontal ? ` by ${map.horizontal} (columns)` : ""}`;
  const caption = el("figcaption", {}, el("strong", {}, map.policy || map.benchmark), axes);
  const everywhere = map.framed.flat().every(Boolean);
  if (everywhere) caption.append(`. All cells are ${map.frame}.`);
  if (numbersIn(map).some((number) => noChoice(data.cells[number]))) {
    caption.append(`${everywhere ? "" : "."} Corner: policies have nothing to choose in some problems, filled: in most.`);
  }
  if (map.vacuous) caption.append(el("br"), el("span", { class: "warn" }, `Vacuous: ${map.vacuous}.`));
  for (const note of map.notes) caption.append(el("br"), el("span", { class: note.warning ? "warn" : null }, note.text));
  return caption;
}

function mapCell(map, number, x, y, measure, scale, best) {
  if (!known(number)) return el("td", { class: "none", "aria-label": "no traces" });
  const cell = data.cells[number], value = measure.of(cell);
  const member = (dx, dy) => Boolean(map.framed[y + dy]?.[x + dx]);
  const framed = member(0, 0) && !map.framed.flat().every(Boolean);
  const sides = [["pt", 0, -1], ["pr", 1, 0], ["pb", 0, 1], ["pl", -1, 0]];
  const kinds = framed ? sides.filter(([, dx, dy]) => !member(dx, dy)).map(([name]) => name) : [];
  if (mapView.measure === "value" && cell.value > best - 1e-6) kinds.push("peak");
  if (noChoice(cell)) kinds.push(noChoice(cell) > 50 ? "fixed" : "partly");
  const node = el("td", {
    class: kinds.join(" "), "data-cell": number, tabindex: -1, role: "gridcell", onclick: () => openCell(number),
    "aria-label": `${title(cell)}${framed ? `, ${map.frame}` : ""}`,
  });
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
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    openCell(Number(at.dataset.cell));
    return;
  }
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!steps) return;
  event.preventDefault();
  const rows = [...at.closest("tbody").rows];
  const next = rows[at.parentNode.rowIndex + steps[1]]?.cells[at.cellIndex + steps[0]];
  if (!next?.dataset.cell) return;
  at.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
