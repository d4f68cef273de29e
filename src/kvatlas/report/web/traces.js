/* Traces: which ones a cell has, and one of them token by token. */
const traceView = { cell: null, mode: "evictions", trace: null, beside: "" };
const numbers = (coded) => (typeof coded === "string" ? [...coded].map((letter) => data.letters.indexOf(letter)) : coded);

function home(number) {
  const map = (data.maps || []).find((candidate) => candidate.cells.flat().includes(number) || candidate.beside.includes(number));
  return map ? `${map.short} | ${map.benchmark}` : "";
}

const badge = (trace) => el("span", { class: trace.right ? "badge right" : "badge wrong" }, trace.verdict);

/* What of its cost is known: logs of other programs say little. */
function costs(trace) {
  const said = [];
  if (trace.tokens !== null) said.push(`${whole(trace.tokens)} new tokens (${whole(trace.thinking)} of thinking)`, `prompt ${whole(trace.prompt)}`);
  if (trace.peak !== null) said.push(`${whole(trace.peak)} cached at the peak`, `${trace.compressions} ${trace.compressions === 1 ? "compression" : "compressions"}`);
  const gone = (trace.prompt_left ?? []).reduce((a, b) => a + b, 0);
  if (gone) said.push(`${gone} prompt tokens evicted`);
  return said.join(", ") || "unknown";
}

function facts(trace) {
  const rows = [["Setting", data.cells[trace.cell].name], ["Question", trace.question], ["Answer", trace.answer ?? "none"], ["Reference", trace.reference],
    ["Grade", `${trace.verdict}${trace.progress > 0 && trace.progress < 1 ? `, progress ${fixed(100 * trace.progress)} %` : ""}`],
    ["Cost", costs(trace)]];
  return el("dl", { class: "facts" }, ...rows.filter(([, value]) => known(value)).flatMap(([name, value]) => [el("dt", {}, name), el("dd", { tabindex: String(value).length > 300 || String(value).split("\n").length > 5 ? 0 : null }, value)]));
}

function showTrace(trace) {
  traceView.trace = trace;
  const modes = [["evictions", "eviction from the cache"]];
  if (trace.measured) modes.push(["predicted", "predicted importance"], ["attention", "attention of the answer"]);
  if (!modes.some(([name]) => name === traceView.mode)) traceView.mode = "evictions";
  const parts = [el("h3", {}, badge(trace), `${trace.problem}, sample ${trace.sample}`), facts(trace)];
  if (trace.lengths) {
    const others = go.others(trace), other = go.other(trace);
    const names = others.map((other) => [data.cells[other.cell].short, `${data.cells[other.cell].short} (${other.verdict})`]);
    const info = el("p", { class: "info", role: "status" }, "Point at a token, or move with the arrow keys.");
    parts.push(el("div", { class: "controls" }, choice("Colour by", modes, traceView.mode, (v) => { traceView.mode = v; showTrace(trace); }),
      choice("Beside it", [["", "nothing"], ...names], other ? traceView.beside : "", (v) => go.beside(trace, v))), legendOf(trace));
    const text = tokenText(trace, info), chips = trace.departs ? departure(trace, text) : null;
    const columns = [{ trace, text }, ...(other ? [{ trace: other, text: tokenText(other, info) }] : [])];
    if (trace.left !== undefined) parts.push(motion(columns));
    if (other) parts.push(info, sideBySide(...columns));
    else parts.push(info, text.box);
    traceView.text = text;
    if (chips) parts.splice(2, 0, chips);
    if (trace.measured) parts.push(scatter(trace));
  } else parts.push(el("pre", { tabindex: 0 }, trace.text));
  if (trace.more) parts.push(el("p", { class: "soft" }, `${whole(trace.more)} more ${trace.lengths ? "tokens" : "characters"} are in the run; export it to read them.`));
  byId("trace").replaceChildren(...parts);
  for (const node of byId("trace").querySelectorAll(".token.parts")) centre(node.closest("pre"), node);
}

function pieces(trace) {
  let at = 0;
  return numbers(trace.lengths).map((length) => trace.text.slice(at, (at += length)));
}

/* The first token in which two traces differ, -1 where one only ends sooner or they are the same. */
const departsAt = (own, others) => own.findIndex((piece, index) => piece !== others[index]);

/* Two traces in two columns, each scrolled to the first token in which they differ. */
function sideBySide({ trace, text }, { trace: other, text: beside }) {
  const [own, others] = [pieces(trace), pieces(other)];
  const at = departsAt(own, others);
  const column = (shown, block) => {
    if (at >= 0) block.nodes[at]?.classList.add("parts");
    return el("section", { "aria-label": data.cells[shown.cell].short }, el("h4", {}, badge(shown), data.cells[shown.cell].short), block.box);
  };
  const short = data.cells[other.cell].short;
  const words = at < 0 && own.length === others.length ? `Token by token what ${short} wrote.`
    : `The first ${whole(at < 0 ? own.length : at)} tokens are the same; then ${JSON.stringify(own[at] ?? "")} here and ${JSON.stringify(others[at] ?? "")} with ${short}.`;
  return el("div", {}, el("p", { class: "parting" }, words), el("div", { class: "pair" }, column(trace, text), column(other, beside)));
}

/* Which evicted tokens the full cache attends to where this trace departs from its own. */
function departure(trace, text) {
  const { at, share, prompt, missed } = trace.departs;
  const percent = (part) => `${fixed(100 * part)}\u00a0%`;
  const all = pieces(trace);
  for (const [index] of missed) text.nodes[index]?.classList.add("missed");
  const chips = missed.filter(([index]) => index < all.length).map(([index, part]) => el("button", { onclick: () => text.select(index, true) }, `${JSON.stringify(all[index])} ${percent(part)}`));
  const full = traceView.beside !== "full" && go.others(trace).some((other) => data.cells[other.cell].short === "full");
  const reader = full ? [el("button", { class: "plain", onclick: () => go.beside(trace, "full") }, "Read both side by side")] : [];
  return el("div", { class: "departure" }, el("p", {}, `After ${whole(at)} new tokens it departs from the full cache. Where it does, the full cache pays ${percent(share)} of its attention (mean over layers and heads) to tokens that ${trace.holders ? "every layer and head had evicted here" : "were evicted here"}${prompt > 0 ? ` (${percent(prompt)} to the prompt's)` : ""}; most of it to:`),
    el("div", { class: "controls" }, ...chips, ...reader));
}

function bin(value) {
  return value <= 0.2 ? 0 : Math.min(6, 1 + Math.floor(Math.log2(Math.max(value, 0.2) / 0.2)));
}

function tokenClass(trace, left, held, index) {
  if (traceView.mode !== "evictions") return trace.measured && index < trace.measured[traceView.mode].length ? `h${bin(trace.measured[traceView.mode][index])}` : "";
  if (!left) return "";
  const number = left[index];
  if (number === undefined) return "in";
  if (number) return `e${Math.min(4, Math.floor(((number - 1) / trace.steps.length) * 5))}`;
  if (index >= trace.judged) return "in";
  return held && held[index] < 50 ? `k${1 + Math.min(2, Math.floor(held[index] / 17))}` : "kept";
}

function tokenWords(trace, left, held, index, text) {
  const parts = [`token ${index + 1} ${JSON.stringify(text)}`];
  if (left && left[index] !== undefined) {
    if (left[index]) parts.push(`evicted after ${trace.steps[left[index] - 1]} new tokens`);
    else if (index >= trace.judged) parts.push(trace.steps.length ? "still in the window: no compression has judged it" : "in the cache: there was no compression");
    else parts.push("kept to the end");
    if (held && !left[index]) parts.push(`by ${held[index] * 2} % of ${trace.holders} choices of layers and heads`);
  } else if (left) parts.push("the last token is never cached");
  if (trace.measured && index < trace.measured.predicted.length) parts.push(`predicted importance ${fixed(trace.measured.predicted[index], 2)}, attention of the answer ${fixed(trace.measured.attention[index], 2)} (1 is the mean)`);
  return parts.join(", ");
}

/* Tokens in blocks that end with a line, so that a browser lays out only those in sight. */
function chunks(nodes) {
  const blocks = [];
  let block = [];
  for (const node of nodes) {
    block.push(node);
    if (block.length >= 300 && node.textContent.endsWith("\n")) { blocks.push(el("div", { class: "chunk" }, ...block)); block = []; }
  }
  return [...blocks, ...(blocks.length ? [el("div", { class: "chunk" }, ...block)] : block)];
}

/* Scrolls a box so that a token in it is in its middle. */
function centre(box, node) {
  box.scrollTop += node.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
}

function tokenText(trace, info) {
  /* Isolating each token costs a second for 16,000 of them, and keeps apart only scripts that run from right to left. */
  const box = el("pre", { tabindex: 0, role: "group", "aria-label": "Tokens of the trace", class: /[\u0590-\u08ff\ufb1d-\ufefc]|[\ud802\ud803\ud83a\ud83b]/.test(trace.text) ? "isolated" : null });
  const left = trace.left === undefined ? null : numbers(trace.left), held = trace.held === undefined ? null : numbers(trace.held);
  const nodes = pieces(trace).map((text, index) => {
    const node = document.createElement("span");
    node.className = `token ${tokenClass(trace, left, held, index)}`;
    node.textContent = text;
    node.index = index;
    return node;
  });
  box.append(...chunks(nodes));
  let current = -1;
  const select = (index, shown = false) => {
    if (index < 0 || index >= nodes.length) return;
    nodes[current]?.classList.remove("at");
    current = index;
    nodes[current].classList.add("at");
    if (shown) nodes[current].scrollIntoView({ block: "nearest" });
    if (shown !== null) go.token?.(trace, index);
    info.textContent = tokenWords(trace, left, held, index, nodes[index].textContent);
  };
  box.addEventListener("mouseover", (event) => { const node = event.target.closest(".token"); if (node) select(node.index, null); });
  box.addEventListener("click", (event) => { const node = event.target.closest(".token"); if (node) select(node.index); });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    select(Math.min(Math.max(current + step, 0), nodes.length - 1), true);
  });
  return { box, nodes, select };
}

function legendOf(trace) {
  const item = (name, text) => el("li", {}, el("i", { class: `swatch ${name}` }), text);
  if (traceView.mode !== "evictions") return el("ul", { class: "legend" }, item("h0", "under a fifth of the mean"), item("h3", "the mean"), item("h6", "six times the mean and more"), el("li", {}, "thinking tokens, on the full cache"));
  if (trace.left === undefined) return el("p", { class: "soft" }, "The evictions of these tokens were not recorded.");
  if (!trace.steps.length) return el("ul", { class: "legend" }, item("in", trace.compressions ? "still in the cache" : "no compression fired: everything stayed"));
  return el("ul", { class: "legend" }, item("kept", "kept to the end"), item("e0", "evicted early"), item("e4", "evicted late"), item("in", "still in the window"), ...(trace.holders ? [item("k1", "kept by few layers or heads")] : []));
}

/* Predicted importance against what the answer attended to, a dot for each thinking token, both axes logarithmic. */
function scatter(trace) {
  const { predicted, attention, agreement } = trace.measured;
  const [width, height, pad] = [420, 300, 44];
  const logarithm = (value) => Math.log10(Math.min(Math.max(value, 0.01), 100)) / 2;
  const px = (value) => pad + ((logarithm(value) + 1) / 2) * (width - pad - 10), py = (value) => height - pad - ((logarithm(value) + 1) / 2) * (height - pad - 10);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `Predicted importance against attention of the answer, rank correlation ${agreement === null ? "unknown" : fixed(agreement, 2)}` });
  for (const tick of [0.01, 0.1, 1, 10, 100]) picture.append(svg("line", { class: "axis", x1: px(tick), x2: px(tick), y1: 10, y2: height - pad }), svg("line", { class: "axis", x1: pad, x2: width - 10, y1: py(tick), y2: py(tick) }),
    svg("text", { x: px(tick), y: height - pad + 14, "text-anchor": "middle" }, String(tick)), svg("text", { x: pad - 5, y: py(tick) + 4, "text-anchor": "end" }, String(tick)));
  predicted.forEach((value, index) => picture.append(svg("circle", { cx: px(value), cy: py(attention[index]), r: 2.6, fill: data.lines[0], "fill-opacity": 0.5 })));
  picture.append(svg("text", { x: (pad + width) / 2, y: height - 8, "text-anchor": "middle" }, "Predicted importance (1 = mean)"), svg("text", { transform: `translate(11 ${(height - pad) / 2}) rotate(-90)`, "text-anchor": "middle" }, "Attention of the answer (1 = mean)"));
  return el("figure", { class: "scatter" }, el("figcaption", {}, el("strong", {}, "Predicted importance against later attention"), ` of the ${predicted.length} thinking tokens, measured with the full cache on this trace's tokens. Spearman's rank correlation: ${agreement === null ? "unknown" : fixed(agreement, 2)}.`), picture);
}
