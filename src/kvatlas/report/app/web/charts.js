/* Charts: accuracy against cost, the size of the cache over time. */
const costView = { group: 0 };

function drawCosts() {
  const names = data.fronts.map((front, index) => [String(index), `${shortOf(front.model)} | ${front.benchmark}`]);
  if (costView.group >= names.length) costView.group = 0;
  const own = data.fronts.findIndex((front) => front.model === view.model);
  const group = data.fronts[own >= 0 && data.fronts[costView.group]?.model !== view.model ? own : costView.group];
  const change = (value) => { costView.group = Number(value); drawCosts(); };
  byId("costs-controls").replaceChildren(choice("Maps", names, String(costView.group), change));
  const axes = [["kept", "Mean cached tokens per sequence"], ["seconds", "Seconds per answer"]];
  const there = axes.filter(([name]) => group?.cells.some((number) => known(data.cells[number][name])));
  byId("costs-charts").replaceChildren(...there.map(([name, label]) => costChart(group, name, label)));
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
      svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, (vertical.text ?? brief)(y)));
  }
  const middle = (top + height - bottom) / 2;
  picture.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, horizontal.label),
    svg("text", { transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle" }, vertical.label));
  return { picture, px, py };
}

const linear = ([low, high]) => (value) => (value - low) / (high - low);

function padded(values, most = Infinity) {
  const [low, high] = span(values, false, 1e-9);
  const room = (high - low) * 0.08 || 1;
  return [Math.max(0, low - room), Math.min(Math.max(most, high) + (most === 100 ? 2 : 0), high + room)];
}

function costChart(group, name, label) {
  const size = [520, 330], margins = [44, 12, 10, 40];
  const dots = group.cells.filter((number) => known(data.cells[number][name])).map((number) => ({ number, cell: data.cells[number] }));
  /* Points lost against the full cache, where it is there; better is higher up, as with the metric. */
  const full = dots.find(({ cell }) => cell.policy === "full")?.cell, ys = padded(dots.map(({ cell }) => cell.value), 100);
  const xs = padded(dots.map(({ cell }) => cell[name])), lost = (value) => (full ? full.value - value : value);
  const marks_ = full ? ticks([lost(ys[1]), lost(ys[0])], 5).map(lost) : ticks(ys, 5);
  const { picture, px, py } = frame(size, `${data.metric} against ${label}`, { at: linear(xs), ticks: ticks(xs, 5), label },
    { at: linear(ys), ticks: marks_, label: full ? "Points lost against the full cache" : data.metric, text: (value) => brief(lost(value)) }, margins);
  const margin = data.cards[0]?.margin;
  if (full && known(margin)) {
    const [top, bottom] = [py(Math.min(full.value, ys[1])), py(Math.max(full.value - margin, ys[0]))];
    picture.prepend(svg("rect", { class: "band", x: margins[0], y: top, width: size[0] - margins[0] - margins[1], height: Math.max(2, bottom - top) }));
  }
  const front = group[name].map((number) => data.cells[number]);
  if (front.length) {
    const steps = front.map((cell, index) => (index ? `H${px(cell[name])}V${py(cell.value)}` : `M${px(cell[name])} ${py(cell.value)}`));
    picture.append(svg("path", { class: "front", d: `${steps.join("")}H${size[0] - margins[1]}` }));
  }
  const policies = unique(group.cells.map((number) => data.cells[number].policy));
  const colour = (policy) => page.lines[policies.indexOf(policy) % (page.lines.length - 1)];
  for (const { cell } of dots.filter((dot) => known(dot.cell.low))) {
    const x = px(cell[name]), [y1, y2] = [py(Math.max(ys[0], cell.low)), py(Math.min(ys[1], cell.high))];
    picture.append(svg("line", { class: "whisker", x1: x, x2: x, y1, y2 }));
  }
  for (const { number, cell } of dots) {
    const on = group[name].includes(number);
    const node = svg("circle", {
      class: on ? "dot on" : "dot", cx: px(cell[name]), cy: py(cell.value), r: on ? 6 : 4.5, fill: colour(cell.policy),
      tabindex: on ? 0 : -1, role: "button", "aria-label": title(cell), onclick: () => openCell(number),
      onkeydown: (event) => { if (event.key === "Enter") openCell(number); },
    });
    tipped(node, title(cell), () => cellFacts(cell));
    picture.append(node);
  }
  const legend = policies.map((policy) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = colour(policy);
    return el("li", {}, swatch, policy);
  });
  return el("figure", {}, el("figcaption", {}, el("strong", {}, `${full ? "Loss" : data.metric} against ${label.toLowerCase()}`)), picture,
    el("ul", { class: "legend" }, ...legend, el("li", {}, `ringed, dashed line: the front${full && known(margin) ? `; band: at most ${brief(margin)} points lost` : ""}`)));
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
