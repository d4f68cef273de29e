/* The cache in motion: a trace, and one next to it, as the cache was after so many new tokens. */
const SECONDS = 15;

/* Cached tokens after each new token: the prompt's and its own, without those that left. */
function cacheSizes(trace, length) {
  const left = trace.left === undefined ? [] : numbers(trace.left), steps = trace.steps ?? [];
  const gone = new Array(length + 1).fill(0);
  for (const number of left) if (number && steps[number - 1] <= length) gone[steps[number - 1]] += 1;
  (trace.prompt_left ?? []).forEach((count, index) => { if (steps[index] <= length) gone[steps[index]] += count; });
  let size = trace.prompt ?? 0;
  return gone.map((count, at) => (size += (at ? 1 : 0) - count));
}

/* One column that follows: it changes only the tokens between two moments. */
function follower({ trace, text }) {
  const length = text.nodes.length, left = trace.left === undefined ? [] : numbers(trace.left);
  const leaving = new Map();
  left.forEach((number, index) => { if (number) { const step = trace.steps[number - 1]; if (!leaving.has(step)) leaving.set(step, []); leaving.get(step).push(text.nodes[index]); } });
  let now = length;
  const sizes = cacheSizes(trace, length);
  const show = (moment) => {
    const to = Math.min(moment, length), [low, high] = [Math.min(now, to), Math.max(now, to)];
    for (let at = low; at < high; at++) text.nodes[at].classList.toggle("unwritten", to < now);
    for (let at = low + 1; at <= high; at++) for (const node of leaving.get(at) ?? []) node.classList.toggle("gone", to > now);
    now = to;
  };
  const begin = () => {
    text.box.classList.add("moving");
    for (const nodes of leaving.values()) for (const node of nodes) node.classList.add("gone");
  };
  const end = () => {
    text.box.classList.remove("moving");
    for (const node of text.nodes) node.classList.remove("unwritten", "gone");
    now = length;
  };
  return { trace, length, sizes, show, begin, end, steps: [...leaving.keys()].sort((a, b) => a - b), text };
}

function motion(columns) {
  const parts = columns.map(follower), own = parts[0], last = Math.max(...parts.map((part) => part.length));
  const said = el("output", { class: "soft" });
  const slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "New tokens written" });
  const chart = sizeChart(parts, last);
  let moving = false, playing = 0;
  const say = (moment) => {
    const names = parts.map((part) => `${data.cells[part.trace.cell].short}: ${whole(part.sizes[Math.min(moment, part.length)])} cached`);
    said.textContent = `${whole(moment)} of ${whole(last)} new tokens; ${names.join(", ")}`;
  };
  const show = (moment) => {
    if (!moving) { moving = true; for (const part of parts) part.begin(); }
    for (const part of parts) part.show(moment);
    slider.value = moment;
    slider.setAttribute("aria-valuetext", `${moment} of ${last} new tokens`);
    chart.at(moment);
    say(moment);
    for (const part of parts) follow(part, moment);
  };
  const stop = () => { cancelAnimationFrame(playing); playing = 0; play.textContent = "Play"; };
  const run = () => {
    if (playing) { stop(); return; }
    let from = Number(slider.value) >= last ? 0 : Number(slider.value), start = null;
    play.textContent = "Pause";
    const frame = (time) => {
      start ??= time;
      const moment = Math.min(last, Math.round(from + ((time - start) / 1000) * (last / SECONDS)));
      if (!slider.isConnected) { stop(); return; }
      show(moment);
      if (moment >= last) stop(); else playing = requestAnimationFrame(frame);
    };
    playing = requestAnimationFrame(frame);
  };
  const jump = (label, moment, about) => (known(moment) ? el("button", { title: about, onclick: () => { stop(); show(moment); } }, label) : null);
  const play = el("button", { onclick: run }, "Play");
  const off = el("button", { onclick: () => { stop(); for (const part of parts) part.end(); moving = false; slider.value = last; chart.at(last); say(last); } }, "Whole trace");
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  chart.node.addEventListener("click", (event) => { const box = chart.node.getBoundingClientRect(); stop(); show(Math.round(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * last)); });
  const next = () => own.steps.find((step) => step > Number(slider.value)) ?? own.steps[0];
  const compression = own.steps.length ? el("button", { onclick: () => { stop(); const step = Number(slider.value) >= last ? own.steps[0] : next(); show(step); } }, "Next compression") : null;
  const differs = parts.length > 1 ? departsAt(pieces(parts[0].trace), pieces(parts[1].trace)) : -1;
  const at = own.trace.departs?.at ?? (differs >= 0 ? differs : null);
  const missed = own.trace.departs?.missed?.length ? el("button", { onclick: () => { stop(); show(at); own.text.select(own.trace.departs.missed[0][0], true); } }, "What was missed") : null;
  say(last);
  return el("div", { class: "motion" }, chart.node, el("div", { class: "controls" }, play, slider, compression, jump("Departure", at, "Where the two begin to differ"), missed, off), said);
}

/* The newest token stays in sight, without moving the page. */
function follow(part, moment) {
  const node = part.text.nodes[Math.min(moment, part.length) - 1], box = part.text.box;
  if (!node) { box.scrollTop = 0; return; }
  const top = node.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (top < 0 || top > box.clientHeight - 48) centre(box, node);
}

/* Cached tokens against new tokens, a line for each trace, and a mark for the moment. */
function sizeChart(parts, last) {
  const [width, height] = [600, 64], most = Math.max(1, ...parts.flatMap((part) => part.sizes));
  const names = parts.map((part) => data.cells[part.trace.cell].short).join(" and ");
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "sizes", preserveAspectRatio: "none", role: "img", "aria-label": `Cached tokens over time of ${names}, ${whole(most)} at most` });
  const px = (at) => (at / Math.max(last, 1)) * width, py = (size) => height - 2 - (size / most) * (height - 6);
  parts.forEach((part, index) => {
    const every = Math.max(1, Math.floor(part.sizes.length / 1200)), path = [], steps = new Set(part.steps);
    part.sizes.forEach((size, at) => { if (at % every === 0 || steps.has(at) || at === part.length) path.push(`${px(at).toFixed(1)} ${py(size).toFixed(1)}`); });
    node.append(svg("path", { class: index ? "other" : "own", d: `M${path.join("L")}` }));
  });
  const mark = svg("line", { class: "moment", x1: width, x2: width, y1: 0, y2: height });
  node.append(mark);
  return { node, at: (moment) => { mark.setAttribute("x1", px(moment)); mark.setAttribute("x2", px(moment)); } };
}
