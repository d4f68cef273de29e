/* Heatmaps: one block for each benchmark, one panel for each policy. */
const measures = {
  value: {
    get label() { return data.metric; },
    of: (cell) => cell.value,
    text: (cell) => fixed(cell.value),
    small: (cell) => between(cell.low, cell.high),
    steps: page.scales.values,
  },
  loss: {
    get label() { return isLossMap() ? "points lost" : `points lost against ${data.against}`; },
    of: (cell) => cell.difference && -cell.difference[0],
    text: (cell) => pointsLost(-cell.difference[0]),
    small: (cell) => `${pointsLost(-cell.difference[2], 0)} to ${pointsLost(-cell.difference[1], 0)}`,
    get steps() { return isLossMap() ? page.scales.losses : [...page.scales.differences].reverse(); },
    get centred() { return !isLossMap(); },
    /* Losses of so many points have one quiet colour. */
    get silent() { return isLossMap() ? data.margin : null; },
  },
  ...Object.fromEntries(page.columns.filter((column) => column.choice).map((column) => [column.name, costMeasure(column)])),
};

/* A declared column as a measure of maps; only whole numbers and percent have a least distance of a scale's ends. */
function costMeasure({ name, form, choice, scale }) {
  return {
    label: choice,
    of: (cell) => cell[name],
    text: (cell) => printed(cell[name], form),
    steps: page.scales[scale],
    least: ["whole", "fixed"].includes(form) ? 1 : 1e-6,
  };
}

/* Losses against the full cache, of which a margin is known, are shown where there are any. */
const isLossMap = () => known(data.margin) && data.against === data.reference;
const pointsLost = (points, digits = 1) => fixed(points, digits).replace("-", "−");
const usualMeasure = () => (isLossMap() && data.cells.some((cell) => cell.difference) ? "loss" : "value");
const nameShown = () => (view.show in measures ? view.show : usualMeasure());
const measureShown = () => measures[nameShown()];

const openCell = (number) => { hideTip(); lead(to(state.run, "cell", number)); };
const numbersIn = (map) => map.cells.flat().filter(known);

function spanOf(maps, measure) {
  const values = maps.flatMap(numbersIn).map((number) => measure.of(data.cells[number])).filter(known);
  /* From the full cache on, and as far beyond the margin as within it, at least. */
  if (known(measure.silent)) return [0, Math.max(2 * measure.silent, ...values)];
  return span(values, measure.centred, measure.least);
}

/* The ends of a map's colour scale, shared by the maps of its benchmark; differences are on one scale around 0. */
const scaleOf = (map, measure) => spanOf(measure.centred ? data.maps : data.maps.filter((one) => one.benchmark === map.benchmark), measure);

/* All maps, or on the page with the answer the first ones: the means over benchmarks, where there are any. */
function drawMaps(tab, wanted) {
  const measure = measureShown(), shown = data.maps.filter(isShown);
  const blocks = unique(shown.map((map) => map.model)).map((model) => {
    const own = shown.filter((map) => map.model === model), benchmarks = unique(own.map((map) => map.benchmark));
    return (tab === "maps" ? benchmarks : benchmarks.slice(0, 1)).flatMap((benchmark) => {
      const row = own.filter((map) => map.benchmark === benchmark);
      const panels = row.map((map) => {
        const figure = panel(map, measure), name = figure.querySelector("figcaption strong");
        name.replaceChildren(link(to(state.run, "map", data.maps.indexOf(map)), name.textContent));
        if (map === wanted) figure.classList.add("here");
        return figure;
      });
      return [el("h3", {}, `${row[0].short} | ${benchmark}`), besideOf(row[0]), el("div", { class: "panels" }, ...panels)];
    });
  });
  byId("maps-about").textContent = aboutMaps(shown);
  byId("maps-panels").replaceChildren(...blocks.flat());
  byId("maps-panels").querySelector("figure.here")?.scrollIntoView({ block: "center" });
}

/* What all maps on show have in common, said once. */
function aboutMaps(maps) {
  const [first] = maps, words = [];
  if (first && maps.every((map) => map.vertical === first.vertical && map.horizontal === first.horizontal)) {
    words.push(`Rows: ${first.vertical}${first.horizontal ? `; columns: ${first.horizontal}` : ""}.`);
  }
  const shown = new Set(maps.flatMap((map) => map.states.flat()));
  if (nameShown() === "loss" && isLossMap()) {
    words.push(`Points of ${data.metric} lost against ${data.reference}; ${shown.has("beyond") ? "red: proven beyond the margin, " : ""}no colour: not decided.`);
  }
  const key = Object.entries(page.states).filter(([state]) => shown.has(state)).map(([state, { sign }]) => `${sign} ${stateWords(state, data.margin)}`);
  if (key.length) words.push(`${key.join(", ")}.`);
  if (shown.has("tied")) words.push("Framed: statistically tied with the best.");
  const ringed = maps.filter((map) => known(map.recommended));
  if (ringed.length) words.push(`Boxed: recommended${unique(ringed.map((map) => map.recommendedFor).filter(Boolean)).map((name) => ` for the ${name} benchmarks`).join("")}.`);
  if (maps.some((map) => numbersIn(map).some((number) => noChoice(data.cells[number])))) {
    words.push("Open corner: in some problems every policy keeps the same tokens; filled: in most.");
  }
  return [...words, "Point at a cell, or move with the arrow keys; Enter lists its traces."].join(" ");
}

/* The map of a cell, small, with the cell marked: it stands next to the cell's traces. */
function mapAround(number) {
  const map = data.maps.find((one) => numbersIn(one).includes(number)) ?? data.maps.find((one) => one.beside.includes(number));
  if (!map) return [];
  const figure = panel(map, measureShown());
  for (const node of figure.querySelectorAll(`td[data-cell="${number}"]`)) {
    node.classList.add("here");
    node.setAttribute("aria-current", "true");
  }
  return [el("p", { class: "soft" }, `${map.short} | ${map.benchmark}`), figure, besideOf(map), el("p", { class: "soft" }, aboutMaps([map]))];
}

/* One problem under every setting: a small map for each policy, each cell with its right samples. */
function mosaic(table, problem) {
  const maps = data.maps.filter((map) => map.model === table.model && map.benchmark === table.benchmark);
  return maps.map((map) => {
    const rows = map.cells.map((row, y) => el("tr", {}, el("th", { scope: "row" }, map.rows[y]), ...row.map((number) => {
      const letters = known(number) ? table.marks[number].slice(problem * table.samples, (problem + 1) * table.samples) : "";
      if (!letters) return el("td", { class: "none" });
      const right = [...letters].filter((mark) => mark === "r").length, first = [...letters].findIndex((_, sample) => holds(number, problem, sample));
      const one = letters.length === 1, text = one ? signs[letters] : `${right}/${letters.length}`, name = `${data.cells[number].short}: ${one ? marks[letters] : text}`;
      const node = el("td", { title: name, "aria-label": name }, first < 0 ? text : link(to(state.run, "trace", number, problem, first), text));
      node.firstChild.ariaLabel = first < 0 ? null : name;
      paint(node, right / letters.length, 0, 1, page.scales.values);
      return node;
    })));
    const head = el("tr", {}, el("td", { class: "corner" }), ...map.columns.map((column) => el("th", { scope: "col" }, column)));
    return el("figure", { class: "mosaic" }, el("figcaption", {}, el("strong", {}, map.policy || map.benchmark), ` ${map.vertical}${map.horizontal ? ` by ${map.horizontal}` : ""}`),
      el("table", { class: "heat", "aria-label": `This problem under ${map.policy}` }, el("tbody", {}, ...rows), el("tfoot", {}, head)));
  });
}

function besideOf(map) {
  return el("p", { class: "beside" }, ...map.beside.map((number) => {
    const cell = data.cells[number], button = el("button", { onclick: () => openCell(number) }, baselineWords(cell, map));
    tipped(button, title(cell), () => cellFacts(cell));
    return button;
  }));
}

/* A baseline beside its maps: what it loses where they show losses, but of the full cache its own value. */
function baselineWords(cell, map) {
  const full = map.beside.map((number) => data.cells[number]).find((one) => one.policy === "full" || one.policy === "reference");
  if (nameShown() !== "loss" || !isLossMap() || !full) return title(cell);
  return cell === full ? `${cell.short}: ${data.metric} ${fixed(cell.value)} (${between(cell.low, cell.high)})` : `policy ${cell.short}: ${pointsLost(full.value - cell.value)} lost`;
}

/* The colour of a value. Of losses only what is proven has one: a quiet one within the margin, whatever they are. */
function paintCell(node, value, [low, high], measure, state) {
  if (known(measure.silent) && state !== "beyond") {
    if (state === "within") node.style.backgroundColor = "var(--silent)";
    node.style.color = state === "within" ? "#111111" : "var(--ink)";
  } else paint(node, value, measure.silent ?? low, high, measure.steps);
}

function scaleBar([low, high], { steps, silent }) {
  const bar = el("i", { role: "img", "aria-label": "colour scale" });
  const end = `${(100 * (silent ?? 0)) / high}%`;
  const colours = known(silent) ? [`var(--silent) 0 ${end}`, `${steps[0]} ${end}`, ...steps.slice(1)] : steps;
  bar.style.background = `linear-gradient(90deg, ${colours.join(",")})`;
  return el("div", { class: "scale" }, brief(low), bar, brief(high));
}

function panel(map, measure) {
  const scale = scaleOf(map, measure), name = `${map.policy} on ${map.benchmark}: ${measure.label}`;
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
  return el("figure", {}, captionOf(map), known(measure.silent) && !map.states.flat().includes("beyond") ? null : scaleBar(scale, measure), el("div", { class: "scroll" }, table));
}

function captionOf(map) {
  const caption = el("figcaption", {}, el("strong", {}, (map.policy || map.benchmark) + (map.control ? " (control)" : "")));
  if (map.vacuous) caption.append(el("br"), el("span", { class: "warn" }, `Can show no loss: ${map.vacuous}.`));
  for (const note of map.notes) caption.append(el("br"), el("span", { class: note.warning ? "warn" : null }, note.text));
  return caption;
}

function mapCell(map, number, x, y, measure, scale, best) {
  if (!known(number)) return el("td", { class: "none", "aria-label": "no traces" });
  const cell = data.cells[number], value = measure.of(cell), state = map.states[y][x];
  const isTied = (dx, dy) => map.states[y + dy]?.[x + dx] === "tied", sides = [["pt", 0, -1], ["pr", 1, 0], ["pb", 0, 1], ["pl", -1, 0]];
  const kinds = isTied(0, 0) ? sides.filter(([, dx, dy]) => !isTied(dx, dy)).map(([name]) => name) : [];
  if (measure === measures.value && cell.value > best - 1e-6) kinds.push("peak");
  const recommended = map.recommended === y * map.columns.length + x;
  if (known(measure.silent) && state !== "within" && state !== "beyond") kinds.push("open");
  if (recommended) kinds.push("ringed");
  if (noChoice(cell)) kinds.push(noChoice(cell) > 50 ? "fixed" : "partly");
  const node = el("td", {
    class: kinds.join(" "), "data-cell": number, tabindex: -1, role: "gridcell", onclick: () => openCell(number),
  });
  if (known(value)) {
    node.append(measure.text(cell));
    if (measure.small) node.append(el("small", {}, measure.small(cell)));
    paintCell(node, value, scale, measure, state);
  } else node.append("–");
  if (state in page.states) node.append(svg("svg", { class: "state", "aria-hidden": "true" }, markAt(50, state)));
  const said = state in page.states ? stateWords(state, data.margin) : state === "tied" ? "statistically tied with the best" : null;
  const facts = [said, recommended ? "recommended" : null].filter(known);
  /* Behind what is seen, the setting and the marks for those who hear the page. */
  node.append(el("span", { class: "unseen" }, [`, ${cell.short}`, ...facts].join(", ")));
  tipped(node, title(cell), () => [...cellFacts(cell), ...facts]);
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
