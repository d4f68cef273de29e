/* Accuracy against cost, a dot for each setting, with the front of those that no other beats. */
const costView = { group: 0 };

function drawCosts() {
  const names = data.fronts.map((front, index) => [String(index), `${shortOf(front.model)} | ${front.benchmark}`]);
  byId("costs-controls").replaceChildren(choice("Maps", names, String(costView.group), (v) => { costView.group = Number(v); drawCosts(); }));
  const group = data.fronts[costView.group];
  const axes = [["kept", "Mean cached tokens per sequence"], ["seconds", "Seconds per answer"]];
  const charts = axes.filter(([name]) => group.cells.some((n) => known(data.cells[n][name]))).map(([name, label]) => costChart(group, name, label));
  byId("costs-charts").replaceChildren(...charts);
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => size >= rough);
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

function costChart(group, name, label) {
  const [width, height, left, right, top, bottom] = [520, 330, 44, 12, 10, 40];
  const dots = group.cells.filter((n) => known(data.cells[n][name])).map((n) => ({ n, cell: data.cells[n], x: data.cells[n][name], y: data.cells[n].value }));
  const [x0, x1] = padded(dots.map((dot) => dot.x)), [y0, y1] = padded(dots.map((dot) => dot.y), 100);
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right), py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "group", "aria-label": `${data.metric} against ${label}` });
  for (const x of ticks(x0, x1, 5)) picture.append(svg("line", { class: "axis", x1: px(x), x2: px(x), y1: top, y2: height - bottom }), svg("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, brief(x)));
  for (const y of ticks(y0, y1, 5)) picture.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: py(y), y2: py(y) }), svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, brief(y)));
  picture.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, label));
  picture.append(svg("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, data.metric));
  const front = group[name].map((n) => data.cells[n]);
  if (front.length) {
    const path = front.map((cell, i) => (i ? `H${px(cell[name])}V${py(cell.value)}` : `M${px(cell[name])} ${py(cell.value)}`)).join("");
    picture.append(svg("path", { class: "front", d: `${path}H${width - right}` }));
  }
  const policies = unique(group.cells.map((n) => data.cells[n].policy));
  const lineColour = (policy) => data.lines[policies.indexOf(policy) % (data.lines.length - 1)];
  for (const dot of dots) if (known(dot.cell.low)) picture.append(svg("line", { class: "whisker", x1: px(dot.x), x2: px(dot.x), y1: py(Math.max(y0, dot.cell.low)), y2: py(Math.min(y1, dot.cell.high)) }));
  for (const dot of dots) {
    const on = group[name].includes(dot.n);
    const node = svg("circle", { class: on ? "dot on" : "dot", cx: px(dot.x), cy: py(dot.y), r: on ? 6 : 4.5, fill: lineColour(dot.cell.policy), tabindex: on ? 0 : -1, role: "button", "aria-label": title(dot.cell) });
    node.addEventListener("click", () => go.cell(dot.n));
    node.addEventListener("keydown", (event) => { if (event.key === "Enter") go.cell(dot.n); });
    tipped(node, title(dot.cell), () => cellFacts(dot.cell));
    picture.append(node);
  }
  const legend = el("ul", { class: "legend" }, ...policies.map((policy) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = lineColour(policy);
    return el("li", {}, swatch, policy);
  }), el("li", {}, "ringed, dashed line: the front"));
  return el("figure", {}, el("figcaption", {}, el("strong", {}, `${data.metric} against ${label.toLowerCase()}`)), picture, legend);
}

function padded(values, most = Infinity) {
  const [low, high] = span(values, false, 1e-9);
  const room = (high - low) * 0.08 || 1;
  return [Math.max(0, low - room), Math.min(Math.max(most, high) + (most === 100 ? 2 : 0), high + room)];
}
