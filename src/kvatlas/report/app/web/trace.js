/* The page of a trace: its facts, its tokens, another setting's trace beside it, and how its answer was lost. */
const nameOf = (number) => `${shortOf(data.cells[number].model)} | ${data.cells[number].benchmark} | ${data.cells[number].short}`;

function traceAddress(trace, query, token = null) {
  return withQuery(to(state.run, "trace", trace.cell, trace.index, trace.sample, ...(known(token) ? [token] : [])), query);
}

async function showTrace([cell, problem, sample, token], query) {
  const trace = await ofRun(traceAt(cell, problem, sample)), table = await outcomesOf(tableOf(cell));
  const others = othersOf(table, trace), full = others.find((other) => other.cell === table.full);
  const name = data.cells[cell].short, chosen = query.beside ?? full?.short ?? "";
  state.trace = trace;
  show("traces", nameOf(cell), [[state.run, to(state.run)], [name, to(state.run, "cell", cell)], [`${trace.problem}, sample ${sample}`, ""]]);
  byId("traces-map").replaceChildren(...[...mapAround(cell), mazeOf(trace.question, [["reference", trace.reference], ["answer", trace.answer]])].filter(known));
  byId("traces-controls").replaceChildren(...neighbours(table, trace, query),
    link(to(state.run, "problem", tableOf(cell), problem), "This problem in all cells"));
  const draw = (other) => {
    const text = drawTrace(trace, others, other);
    if (known(token)) text?.select(token - 1, true);
  };
  /* Long traces take their time: the one that was asked for does not wait for the other. */
  draw(null);
  const beside = others.find((other) => other.short === chosen);
  if (!beside) return;
  const other = await ofRun(traceAt(beside.cell, problem, sample));
  if (!other.lengths) return;
  draw(other);
}

/* Other settings' traces of the same model, problem and sample, the full cache's first. */
function othersOf(table, trace) {
  const at = trace.index * table.samples + trace.sample;
  return table.rows.map((cell) => ({ cell, short: data.cells[cell].short, mark: table.marks[cell][at] ?? "." }))
    .filter(({ cell, mark }) => cell !== trace.cell && mark !== "." && holds(cell, trace.index, trace.sample))
    .sort((a, b) => (b.cell === table.full) - (a.cell === table.full));
}

function neighbours(table, trace, query) {
  const own = table.marks[trace.cell], at = trace.index * table.samples + trace.sample;
  const full = table.marks[table.full];
  const step = (by, text, fits = () => true) => {
    for (let next = at + by; own[next]; next += by) {
      const place = [Math.floor(next / table.samples), next % table.samples];
      if (own[next] !== "." && fits(next) && holds(trace.cell, ...place)) return link(withQuery(to(state.run, "trace", trace.cell, ...place), { beside: query.beside }), text);
    }
    return null;
  };
  const isLost = (at_) => table.full !== trace.cell && filters.lost[1](own[at_], full?.[at_]);
  return [step(-1, steps_.p), step(1, steps_.n), step(1, steps_.l, isLost)].filter(known);
}

/* Keys lead to other traces; the links name them. */
const steps_ = { p: "Previous trace (p)", n: "Next trace (n)", l: "Next lost trace (l)" };
document.addEventListener("keydown", (event) => {
  const text = steps_[event.key];
  if (!text || byId("traces").hidden || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  [...byId("traces-controls").querySelectorAll("a")].find((node) => node.textContent === text)?.click();
});

/* Logs of other programs say little about costs. */
function costsOf(trace) {
  const facts = [], evicted = (trace.prompt_left ?? []).reduce((a, b) => a + b, 0);
  if (known(trace.tokens)) facts.push(`${whole(trace.tokens)} new tokens (${whole(trace.thinking)} of thinking)`, `prompt ${whole(trace.prompt)}`);
  if (known(trace.peak)) facts.push(`${whole(trace.peak)} cached at the peak`, plural(trace.compressions, "compression"));
  if (evicted) facts.push(`${evicted} prompt tokens evicted`);
  return facts.join(", ") || "unknown";
}

function factsOf(trace) {
  const progress = trace.progress > 0 && trace.progress < 1 ? `, progress ${fixed(100 * trace.progress)} %` : "";
  return listOfFacts([["Setting", data.cells[trace.cell].name], ["Question", trace.question], ["Grade", `${trace.verdict}${progress}`], ["Cost", costsOf(trace)]]);
}

/* Answer and reference; of a wrong answer the words in which the two differ are marked. */
function answersOf(trace) {
  const marked = (parts) => (parts ?? []).filter(([text]) => text).map(([text, differs]) => (differs && text.trim() ? el("mark", {}, text) : text));
  return listOfFacts([["Answer", trace.answer ?? "none", marked(trace.wrong_parts?.answer)], ["Reference", trace.reference, marked(trace.wrong_parts?.reference)]]);
}

/* Names with values; what is unknown is left out. `nodes`, if there are any, stand for the value. */
function listOfFacts(rows) {
  const long = (value) => value.length > 300 || value.split("\n").length > 5;
  const entry = ([name, value, nodes = []]) => [el("dt", {}, name), el("dd", { tabindex: long(value) ? 0 : null }, ...(nodes.length ? nodes : [value]))];
  return el("dl", { class: "facts" }, ...rows.filter(([, value]) => known(value)).flatMap(entry));
}

/* Draw a trace, and another one beside it; returns the text of the first. */
function drawTrace(trace, others, other) {
  const name = el("h3", {}, badge(trace.right, trace.verdict), `${trace.problem}, sample ${trace.sample}`);
  const parts = [];
  let text = null;
  if (trace.lengths) {
    const info = el("p", { class: "info", role: "status" }, "Point at a token, or move with the arrow keys.");
    text = tokenText(trace, info, (index) => lead(traceAddress(trace, here().query, index + 1), true));
    const columns = [{ trace, text }, ...(other ? [{ trace: other, text: tokenText(other, info) }] : [])];
    const names = others.map(({ short, mark }) => [short, `${short} (${marks[mark]})`]);
    const beside = choice("Beside it", [["none", "nothing"], ...names], other ? data.cells[other.cell].short : "none", (value) => lead(traceAddress(trace, { beside: value })));
    parts.push(el("div", { class: "controls head" }, name, beside), answersOf(trace));
    if (trace.death || trace.autopsy !== undefined) parts.push(lossOf(trace, text));
    parts.push(legendOf(trace));
    if (trace.left !== undefined) parts.push(motion(columns));
    parts.push(...(other ? sideBySide(...columns, info) : [info, text.box]));
    parts.push(factsOf(trace));
  } else parts.push(name, answersOf(trace), factsOf(trace), el("pre", { tabindex: 0 }, trace.text));
  if (trace.more) parts.push(el("p", { class: "soft" }, `${whole(trace.more)} more ${trace.lengths ? "tokens" : "characters"} are in the run; export it to read them.`));
  const write = () => { if (raw.children.length < 2) raw.append(el("pre", { tabindex: 0 }, JSON.stringify(trace, null, 1))); };
  const raw = el("details", { ontoggle: write }, el("summary", {}, "Raw JSON"));
  byId("trace").replaceChildren(...parts, raw);
  if (other) openAtBothEnds(text);
  return text;
}

/* Give two panes the rest of the screen, and scroll them so that the departure is seen together with the first statement
   of the missed value that is near enough; without one the departure stands at a third. */
function openAtBothEnds({ box, nodes }) {
  const pair = box.closest(".pair"), room = window.innerHeight - box.getBoundingClientRect().top - window.scrollY - 12;
  pair.style.setProperty("--pane", `${Math.max(240, room)}px`);
  const departure = nodes.find((node) => node.classList.contains("parts"));
  if (!departure) return;
  /* The height of a block out of sight is a guess: those around the departure are laid out first. */
  for (const { parentNode: block } of pair.querySelectorAll(".chunk > .parts")) {
    for (const one of [block.previousElementSibling, block]) one?.style.setProperty("content-visibility", "visible");
  }
  const end = departure.getBoundingClientRect().bottom, line = parseFloat(getComputedStyle(box).lineHeight);
  const isNear = (node) => node.getBoundingClientRect().top < end && end - node.getBoundingClientRect().top < box.clientHeight - 2 * line;
  const statement = nodes.find((node) => node.classList.contains("needed") && isNear(node));
  if (statement) scrollBelow(box, statement, line);
  else scrollBelow(box, departure, box.clientHeight / 3);
  for (const pane of pair.querySelectorAll("pre")) pane.scrollTop = box.scrollTop;
}

/* Two traces in two columns, each scrolled to the first token in which they differ; above them the words about it. */
function sideBySide({ trace, text }, { trace: other, text: beside }, info) {
  const [own, others] = [pieces(trace), pieces(other)], at = departsAt(own, others), { short } = data.cells[other.cell];
  const column = (one, block) => {
    if (at >= 0) block.nodes[at]?.classList.add("parts");
    const name = data.cells[one.cell].short;
    return el("section", { "aria-label": name }, el("h4", {}, badge(one.right, one.verdict), name), block.box);
  };
  const quoted = (piece) => JSON.stringify(piece ?? "");
  const words = at < 0 && own.length === others.length ? `Token by token what ${short} wrote.`
    : `The first ${whole(at < 0 ? own.length : at)} tokens are the same; then ${quoted(own[at])} here and ${quoted(others[at])} with ${short}.`;
  scrollTogether([text.box, beside.box]);
  return [el("div", { class: "said" }, el("p", { class: "parting" }, words), info), el("div", { class: "pair" }, column(trace, text), column(other, beside))];
}

/* Boxes that scroll together and are as high, whatever their texts: the shorter one ends in empty lines, and so do both,
   so that each line can stand at a third of the height. */
function scrollTogether(boxes) {
  const level = () => {
    const heights = boxes.map((box) => [...box.children].reduce((low, node) => Math.max(low, node.offsetTop + node.offsetHeight), 0));
    boxes.forEach((box, index) => box.style.setProperty("--missing", `${Math.max(...heights) - heights[index]}px`));
  };
  const resized = new ResizeObserver(level);
  for (const box of boxes) {
    for (const node of [box, ...box.querySelectorAll(".chunk")]) resized.observe(node);
    for (const other of boxes) {
      if (other !== box) box.addEventListener("scroll", () => { if (other.scrollTop !== box.scrollTop) other.scrollTop = box.scrollTop; });
    }
  }
}

/* How the answer was lost: by the rules that read the text, and by the autopsy, if there is one. */
function lossOf(trace, text) {
  const box = el("div", { class: "autopsy" });
  if (trace.death) box.append(deathOf(trace, text));
  if (trace.autopsy) box.append(...autopsyOf(trace, text));
  else if (trace.autopsy === null) box.append(el("p", {}, "Its autopsy found no evicted tokens that restore the answer."));
  return box;
}

/* The words about a death; the statements of the value that was missed are outlined in the text. */
function deathOf({ death, ...trace }, text) {
  const all = pieces(trace), words = (tokens) => tokens.map((index) => all[index]).join("").trim();
  const there = death.missed.filter((tokens) => tokens.every((index) => index < all.length));
  for (const index of there.flat()) text.nodes[index].classList.add("needed");
  const chips = there.map((tokens) => el("button", { onclick: () => text.select(tokens[0], true) }, `${words(tokens)}: token ${tokens[0] + 1}${death.evicted ? ", evicted" : ""}`));
  if (known(death.token) && death.token < all.length) {
    text.nodes[death.token].classList.add("missed-at");
    chips.push(el("button", { onclick: () => text.select(death.token, true) }, "Where it goes wrong"));
  }
  return el("p", { title: "By rules that read the text, as kvatlas describe --deaths does" }, el("b", {}, "How it was lost: "), death.words, " ", ...chips.flatMap((chip) => [chip, " "]));
}

/* The evicted tokens that restore the right answer when they are put back, marked in the text. */
function autopsyOf({ autopsy, ...trace }, text) {
  const all = pieces(trace), there = autopsy.tokens.filter((index) => index < all.length), { right, streams } = autopsy;
  for (const index of there) text.nodes[index].classList.add("saving");
  const chips = there.map((index) => el("button", { onclick: () => text.select(index, true) }, JSON.stringify(all[index])));
  if (autopsy.of_prompt) chips.push(el("span", { class: "soft" }, plural(autopsy.of_prompt, "token") + " of the prompt"));
  const one = autopsy.tokens.length + autopsy.of_prompt === 1, tokens = one ? "this evicted token" : "these evicted tokens";
  const tested = streams ? ` Under ${streams} other random streams the answer is right ${right.cause} times with ${one ? "it" : "them"}, ${right.kind} times with as many others of their kinds, ${right.nothing} times with neither${autopsy.is_proven ? "" : ": not shown to be more than luck"}.` : "";
  return [el("p", {}, el("b", {}, "Autopsy: "), `Put back in place of kept tokens after ${whole(autopsy.after)} new tokens, ${tokens} restore${one ? "s" : ""} the right answer.${tested}`),
    el("div", { class: "controls" }, ...chips)];
}
