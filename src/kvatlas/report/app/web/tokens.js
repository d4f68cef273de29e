/* The tokens of a trace, coloured by what became of them, and the cache in motion. */
/* Seconds in which a trace is played. */
const SECONDS = 15;

function pieces(trace) {
  let at = 0;
  return trace.lengths.map((length) => trace.text.slice(at, (at += length)));
}

/* The first token in which two traces differ, -1 where one only ends sooner or they are the same. */
const departsAt = (own, others) => own.findIndex((piece, index) => piece !== others[index]);

function tokenClass(trace, index) {
  const { left, held } = trace;
  if (!left) return "";
  const number = left[index];
  if (number) return `e${Math.min(4, Math.floor(((number - 1) / trace.steps.length) * 5))}`;
  if (number === undefined || index >= trace.judged) return "in";
  return held && held[index] < 100 ? `k${1 + Math.min(2, Math.floor(held[index] / 34))}` : "kept";
}

function tokenWords(trace, index, text) {
  const { left, held } = trace;
  const parts = [`token ${index + 1} ${JSON.stringify(text)}`];
  const number = left?.[index];
  if (left && number === undefined) parts.push("the last token is never cached");
  else if (number) parts.push(`evicted after ${trace.steps[number - 1]} new tokens`);
  else if (left && index < trace.judged) parts.push("kept to the end");
  else if (left) parts.push(trace.steps.length ? "still in the window: no compression has judged it" : "in the cache: there was no compression");
  if (held && number === 0) parts.push(`by ${held[index]} % of ${trace.holders} choices of layers and heads`);
  return parts.join(", ");
}

/* Tokens in blocks that end with a line, so that a browser lays out only those in sight. */
function chunks(nodes) {
  const blocks = [];
  let block = [];
  for (const node of nodes) {
    block.push(node);
    if (block.length >= 300 && node.textContent.endsWith("\n")) {
      blocks.push(el("div", { class: "chunk" }, ...block));
      block = [];
    }
  }
  return [...blocks, ...(blocks.length ? [el("div", { class: "chunk" }, ...block)] : block)];
}

/* Scroll a box by whole lines so that a node in it stands so many pixels below its top. */
function scrollBelow(box, node, below) {
  const line = parseFloat(getComputedStyle(box).lineHeight) || 1;
  const top = box.scrollTop + node.getBoundingClientRect().top - box.getBoundingClientRect().top - below;
  box.scrollTop = Math.round(top / line) * line;
}

/* The box of a trace's tokens; `said` shows the words of the token under the pointer, `chosen` is told which was clicked. */
function tokenText(trace, said, chosen) {
  /* Isolating each token costs a second for 16,000 of them, and keeps apart only scripts that run from right to left. */
  const fromRight = /[\u0590-\u08ff\ufb1d-\ufefc]|[\ud802\ud803\ud83a\ud83b]/.test(trace.text);
  const box = el("pre", { tabindex: 0, role: "group", "aria-label": "Tokens of the trace", class: fromRight ? "isolated" : null });
  const nodes = pieces(trace).map((text, index) => {
    const node = document.createElement("span");
    node.className = `token ${tokenClass(trace, index)}`;
    node.textContent = text;
    node.index = index;
    return node;
  });
  box.append(...chunks(nodes));
  let current = -1;
  const point = (index) => {
    nodes[current]?.classList.remove("at");
    current = index;
    nodes[index].classList.add("at");
    said.textContent = tokenWords(trace, index, nodes[index].textContent);
  };
  const select = (index, scroll = false) => {
    if (!nodes[index]) return;
    point(index);
    if (scroll) nodes[index].scrollIntoView({ block: "nearest" });
    chosen?.(index);
  };
  const tokenOf = (event) => event.target.closest(".token");
  box.addEventListener("mouseover", (event) => { if (tokenOf(event)) point(tokenOf(event).index); });
  box.addEventListener("click", (event) => { if (tokenOf(event)) select(tokenOf(event).index); });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    select(Math.min(Math.max(current + step, 0), nodes.length - 1), true);
  });
  return { box, nodes, select };
}

function legendOf(trace) {
  const legend = (...items) => el("ul", { class: "legend fate" }, ...items.map(([name, text]) =>
    el("li", {}, el("i", { class: `swatch ${name}` }), text)));
  if (trace.left === undefined) return el("p", { class: "soft" }, "The evictions of these tokens were not recorded.");
  if (!trace.steps.length) return legend(["in", trace.compressions ? "still in the cache" : "no compression fired: everything stayed"]);
  return legend(["kept", "kept to the end"], ["e0", "evicted early"], ["e4", "evicted late"], ["in", "still in the window"],
    ...(trace.holders ? [["k1", "kept by few layers or heads"]] : []), ...(trace.death?.missed.length ? [["needed", "the value that was missed"]] : []),
    ...(trace.autopsy ? [["saving", trace.autopsy.is_proven ? "would have saved the answer" : "restore the answer under these random numbers"]] : []));
}

/* -- the cache in motion ------------------------------------------------------------------------------------------- */

/* Cached tokens after each new token: the prompt's and its own, without those that left. */
function cacheSizes(trace, left, length) {
  const steps = trace.steps ?? [], gone = new Array(length + 1).fill(0);
  const leave = (step, count) => { if (step <= length) gone[step] += count; };
  for (const number of left) if (number) leave(steps[number - 1], 1);
  (trace.prompt_left ?? []).forEach((count, index) => leave(steps[index], count));
  let size = trace.prompt ?? 0;
  return gone.map((count, at) => (size += (at ? 1 : 0) - count));
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

/* One column that follows: it changes only the tokens between two moments. */
function follower({ trace, text }) {
  const length = text.nodes.length, left = trace.left ?? [], leaving = new Map();
  left.forEach((number, index) => {
    const step = trace.steps[number - 1];
    if (number) leaving.set(step, [...(leaving.get(step) ?? []), text.nodes[index]]);
  });
  let now = length;
  const show = (moment) => {
    const next = Math.min(moment, length), [low, high] = [Math.min(now, next), Math.max(now, next)];
    for (let at = low; at < high; at++) text.nodes[at].classList.toggle("unwritten", next < now);
    for (let at = low + 1; at <= high; at++) for (const node of leaving.get(at) ?? []) node.classList.toggle("gone", next > now);
    now = next;
    /* The newest token stays in sight, without moving the page. */
    const newest = text.nodes[now - 1];
    if (!newest) { text.box.scrollTop = 0; return; }
    const top = newest.getBoundingClientRect().top - text.box.getBoundingClientRect().top;
    if (top < 0 || top > text.box.clientHeight - 24) scrollBelow(text.box, newest, text.box.clientHeight / 3);
  };
  const begin = () => {
    text.box.classList.add("moving");
    byId("trace").classList.add("replayed");
    for (const nodes of leaving.values()) for (const node of nodes) node.classList.add("gone");
  };
  const end = () => {
    text.box.classList.remove("moving");
    byId("trace").classList.remove("replayed");
    for (const node of text.nodes) node.classList.remove("unwritten", "gone");
    now = length;
  };
  return { trace, text, length, sizes: cacheSizes(trace, left, length), steps: [...leaving.keys()].sort((a, b) => a - b), show, begin, end };
}

/* A slider, a player and jumps over the cache of a trace and of the one beside it. */
function motion(columns) {
  const parts = columns.map(follower), own = parts[0], last = Math.max(...parts.map((part) => part.length));
  const said = el("output", { class: "soft" });
  const slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "New tokens written" });
  const chart = sizeChart(parts, last);
  let moving = false, playing = 0;
  const mark = (moment) => {
    slider.value = moment;
    slider.setAttribute("aria-valuetext", `${moment} of ${last} new tokens`);
    chart.at(moment);
    const sizes = parts.map((part) => `${data.cells[part.trace.cell].short}: ${whole(part.sizes[Math.min(moment, part.length)])} cached`);
    said.textContent = `${whole(moment)} of ${whole(last)} new tokens; ${sizes.join(", ")}`;
  };
  const show = (moment) => {
    if (!moving) for (const part of parts) part.begin();
    moving = true;
    mark(moment);
    for (const part of parts) part.show(moment);
  };
  const stop = () => {
    cancelAnimationFrame(playing);
    playing = 0;
    play.textContent = "Play";
  };
  const run = () => {
    if (playing) { stop(); return; }
    const from = Number(slider.value) >= last ? 0 : Number(slider.value);
    let start = null;
    play.textContent = "Pause";
    const next = (time) => {
      start ??= time;
      const moment = Math.min(last, Math.round(from + ((time - start) / 1000) * (last / SECONDS)));
      if (!slider.isConnected) { stop(); return; }
      show(moment);
      if (moment >= last) stop();
      else playing = requestAnimationFrame(next);
    };
    playing = requestAnimationFrame(next);
  };
  const play = el("button", { onclick: run }, "Play");
  const jump = (label, moment, about) => el("button", { title: about, onclick: () => { stop(); show(moment()); } }, label);
  const whole_ = () => {
    stop();
    for (const part of parts) part.end();
    moving = false;
    mark(last);
  };
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  chart.node.addEventListener("click", (event) => {
    const box = chart.node.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    stop();
    show(Math.round(Math.min(1, Math.max(0, share)) * last));
  });
  const buttons = [play, slider];
  if (own.steps.length) buttons.push(jump("Next compression", () => own.steps.find((step) => step > Number(slider.value)) ?? own.steps[0]));
  const at = parts[1] ? departsAt(pieces(own.trace), pieces(parts[1].trace)) : -1;
  if (at >= 0) buttons.push(jump("Departure", () => at, "Where the two begin to differ"));
  /* A trace opens where it departs. */
  if (at >= 0 && here().parts.length < 6) setTimeout(() => { if (slider.isConnected) show(at); });
  else mark(last);
  const fates = el("p", { class: "fates soft" }, "Blue: in the cache. Struck through: evicted. Slanted: not yet written. Red: where the two part.",
    own.trace.death?.missed.length ? " Between two lines: the value that was missed." : "");
  return el("div", { class: "motion" }, chart.node, el("div", { class: "controls" }, ...buttons, el("button", { onclick: whole_ }, "Whole trace")),
    el("div", { class: "said" }, said, fates));
}
