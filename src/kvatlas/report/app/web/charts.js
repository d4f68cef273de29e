/* Charts: what is lost at which cost, the size of the cache over time. */
const costView = { group: 0 };

/* The cells of each model and benchmark: those that are proven to keep the margin and to lose more, and the recommended ones. */
function costGroups() {
  const groups = new Map();
  for (const map of data.maps) {
    const key = `${map.short} | ${map.benchmark}`, framed = map.framed.flat();
    if (!groups.has(key)) groups.set(key, { key, model: map.model, frame: "", cells: new Set(), kept: new Set(), broken: new Set(), chosen: new Set() });
    const group = groups.get(key);
    map.cells.flat().forEach((number, place) => {
      if (known(number)) group.cells.add(number);
      if (framed[place]) group.kept.add(number);
      if (map.loses.includes(place)) group.broken.add(number);
      if (map.recommended.includes(place)) group.chosen.add(number);
    });
    map.beside.forEach((number) => group.cells.add(number));
    if (framed.some(Boolean)) group.frame = map.frame;
  }
  return [...groups.values()].filter((group) => [...group.cells].some((number) => known(data.cells[number].kept)));
}

function drawCosts() {
  const groups = costGroups(), names = groups.map((group, index) => [String(index), group.key]);
  if (costView.group >= names.length) costView.group = 0;
  const own = groups.findIndex((group) => group.model === view.model);
  const group = groups[own >= 0 && groups[costView.group]?.model !== view.model ? own : costView.group];
  const change = (value) => { costView.group = Number(value); drawCosts(); };
  byId("costs-controls").replaceChildren(choice("Maps", names, String(costView.group), change));
  byId("costs-charts").replaceChildren(...(group ? [costChart(group)] : []));
}

function ticks([low, high], wanted) {
  const rough = (high - low) / wanted || 1, base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => size >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) values.push(Number(value.toPrecision(12)));
  return values;
}

/* A chart's frame: lines and numbers at the ticks, labels, and the functions that place a value on each axis. */
function frame([width, height], label, horizontal, vertical, [left, right, top, bottom]) {
  const px = (x) => left + horizontal.at(x) * (width - left - right);
  const py = (y) => height - bottom - vertical.at(y) * (height - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "group", "aria-label": label });
  for (const x of horizontal.ticks) {
    picture.append(svg("line", { class: "axis", x1: px(x), x2: px(x), y1: top, y2: height - bottom }),
      svg("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, brief(x)));
  }
  for (const y of vertical.ticks) {
    picture.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, brief(y)));
  }
  const middle = (top + height - bottom) / 2;
  picture.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, horizontal.label),
    svg("text", { transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle" }, vertical.label));
  return { picture, px, py };
}

/* The place of a value on an axis; of one that runs down from its end. */
const linear = ([low, high]) => (value) => (value - low) / (high - low);
const falling = ([low, high]) => (value) => (high - value) / (high - low);

/* The ends of an axis: the values with room around them, at least `least` apart, so that equal ones have ticks, too. */
function padded(values, least) {
  const low = Math.min(...values), high = Math.max(...values), room = Math.max((high - low) * 0.08, (least - (high - low)) / 2);
  return [low - room, high + room];
}

/* The marks of policies, told apart without colours, in the order of `MARKERS` of the figures. */
const shapes = [
  (r) => `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z`,
  (r) => `M${-r} ${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0 ${-1.35 * r}L${1.35 * r} 0L0 ${1.35 * r}L${-1.35 * r} 0Z`,
  (r) => `M0 ${-1.3 * r}L${1.2 * r} ${0.9 * r}H${-1.2 * r}Z`,
  (r) => `M0 ${1.3 * r}L${1.2 * r} ${-0.9 * r}H${-1.2 * r}Z`,
  (r) => `M${-0.5 * r} ${-1.2 * r}H${0.5 * r}V${-0.5 * r}H${1.2 * r}V${0.5 * r}H${0.5 * r}V${1.2 * r}H${-0.5 * r}V${0.5 * r}H${-1.2 * r}V${-0.5 * r}H${-0.5 * r}Z`,
  (r) => `M0 ${-0.5 * r}L${0.7 * r} ${-1.2 * r}L${1.2 * r} ${-0.7 * r}L${0.5 * r} 0L${1.2 * r} ${0.7 * r}L${0.7 * r} ${1.2 * r}L0 ${0.5 * r}L${-0.7 * r} ${1.2 * r}L${-1.2 * r} ${0.7 * r}L${-0.5 * r} 0L${-1.2 * r} ${-0.7 * r}L${-0.7 * r} ${-1.2 * r}Z`,
  (r) => `M0 ${-1.4 * r}L${0.35 * r} ${-0.35 * r}L${1.4 * r} ${-0.35 * r}L${0.55 * r} ${0.3 * r}L${0.85 * r} ${1.3 * r}L0 ${0.7 * r}L${-0.85 * r} ${1.3 * r}L${-0.55 * r} ${0.3 * r}L${-1.4 * r} ${-0.35 * r}L${-0.35 * r} ${-0.35 * r}Z`,
];

/* The mark of a setting. Filled: proven, or not tested; hollow: not decided, or not tested beside others that are; a cross: proven to lose more. */
function mark(policy, x, y, r, state, attributes) {
  const [colour, shape] = data.identities[policy], ink = colour === page.lines.length - 1 ? "currentColor" : page.lines[colour];
  const looks = state === "broken" ? { d: `M${-r} ${-r}L${r} ${r}M${r} ${-r}L${-r} ${r}`, fill: "none", stroke: ink, "stroke-width": 2 }
    : { d: shapes[shape](r), fill: state === "open" ? "var(--ground)" : ink, stroke: state === "open" ? ink : "var(--ground)" };
  return svg("path", { ...looks, transform: `translate(${x} ${y})`, ...attributes });
}

/* The memory that settings save and what they lose beside the full cache; without one their memory and their value. */
function costAxes(group) {
  const cells = [...group.cells].map((number) => ({ number, cell: data.cells[number] })).filter(({ cell }) => known(cell.kept));
  const full = cells.find(({ cell }) => cell.policy === "full" || cell.policy === "reference")?.cell, saves = full && full.kept > 0;
  const cost = (cell) => (saves ? 100 * (1 - cell.kept / full.kept) : cell.kept);
  const value = (cell) => (full ? full.value - cell.value : cell.value);
  const dots = cells.map((dot) => ({ ...dot, x: cost(dot.cell), y: value(dot.cell) }));
  const label = saves ? `KV memory saved, % of ${data.reference}` : "Mean cached tokens per sequence";
  return { dots, full, label, cost, least: saves ? 4 : 0.2 * Math.max(...dots.map(({ x }) => Math.abs(x)), 1e-6) };
}

function costChart(group) {
  const size = [560, 360], margins = [44, 14, 12, 42], { dots, full, label, cost, least } = costAxes(group);
  const xs = padded(dots.map(({ x }) => x), least), ys = padded(dots.map(({ y }) => y), 4), margin = full && data.cards[0]?.margin;
  if (known(margin) && full) ys[1] = Math.max(ys[1], margin + 1);
  const what = full ? `Points lost against ${data.reference}` : data.metric;
  const { picture, px, py } = frame(size, `${what}; ${label}`, { at: linear(xs), ticks: ticks(xs, 5), label },
    { at: (full ? falling : linear)(ys), ticks: ticks(ys, 5), label: what }, margins);
  if (full && known(margin)) {
    const [top, bottom] = [py(ys[0]), py(margin)];
    picture.prepend(svg("rect", { class: "band", x: margins[0], y: top, width: size[0] - margins[0] - margins[1], height: Math.max(2, bottom - top) }));
  }
  const interval = data.cards.find((card) => card.loss && group.chosen.has(card.cell));
  if (full && interval) {
    const x = px(cost(data.cells[interval.cell])), [y1, y2] = [interval.loss[1], interval.loss[2]].map((points) => py(Math.min(Math.max(points, ys[0]), ys[1])));
    picture.append(svg("line", { class: "whisker", x1: x, x2: x, y1, y2 }));
  }
  const tested = Boolean(group.kept.size || group.broken.size || known(margin));
  const states = new Map(dots.map(({ number, cell }) => [number, group.broken.has(number) ? "broken" : !tested || cell === full || group.kept.has(number) ? "kept" : "open"]));
  dots.forEach(({ number, cell, x, y }, index) => {
    const isRinged = group.chosen.has(number), at = [px(x), py(y)];
    const node = mark(cell.policy, ...at, 5, states.get(number), {
      class: "dot", tabindex: isRinged || !index ? 0 : -1, role: "button", "aria-label": title(cell), onclick: () => openCell(number),
      onkeydown: (event) => { if (event.key === "Enter") openCell(number); },
    });
    tipped(node, title(cell), () => cellFacts(cell));
    picture.append(node);
    if (isRinged) picture.append(svg("circle", { class: "ring", cx: at[0], cy: at[1], r: 9 }));
  });
  const policies = unique(dots.map(({ cell }) => cell.policy)), shown = new Set(states.values());
  const legend = policies.map((policy) => el("li", {}, svg("svg", { viewBox: "-8 -8 16 16", class: "key" }, mark(policy, 0, 0, 6, "kept", {})), policy));
  const said = [];
  if (group.frame) said.push(`filled: ${group.frame}`);
  if (tested && shown.has("open")) said.push("hollow: not decided, or not tested");
  if (shown.has("broken")) said.push("cross: proven to lose more than the margin");
  if (dots.some(({ number }) => group.chosen.has(number))) said.push(`ringed: recommended${full && interval ? ", with its 95 % interval" : ""}`);
  if (full && known(margin)) said.push(`band: at most ${plural(margin, "point")} lost`);
  return el("figure", {}, el("figcaption", {}, el("strong", {}, `${what.replace(` against ${data.reference}`, "")} and memory`)), picture,
    el("ul", { class: "legend" }, ...legend, el("li", {}, said.join("; "))));
}

/* Cached tokens against new tokens, a line for each trace, and a mark for the moment. */
function sizeChart(parts, last) {
  const [width, height] = [600, 64], most = Math.max(1, ...parts.flatMap((part) => part.sizes));
  const names = parts.map((part) => data.cells[part.trace.cell].short).join(" and ");
  const node = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, class: "sizes", preserveAspectRatio: "none", role: "img",
    "aria-label": `Cached tokens over time of ${names}, ${whole(most)} at most`,
  });
  const px = (at) => (at / Math.max(last, 1)) * width, py = (size) => height - 2 - (size / most) * (height - 6);
  parts.forEach((part, index) => {
    const every = Math.max(1, Math.floor(part.sizes.length / 1200)), steps = new Set(part.steps), path = [];
    part.sizes.forEach((size, at) => {
      if (at % every === 0 || steps.has(at) || at === part.length) path.push(`${px(at).toFixed(1)} ${py(size).toFixed(1)}`);
    });
    node.append(svg("path", { class: index ? "other" : "own", d: `M${path.join("L")}` }));
  });
  const mark = svg("line", { class: "moment", x1: width, x2: width, y1: 0, y2: height });
  node.append(mark);
  return { node, at: (moment) => { mark.setAttribute("x1", px(moment)); mark.setAttribute("x2", px(moment)); } };
}
