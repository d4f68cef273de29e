/* The report: traces that stand in the page itself. */
const traceAt = (cell, problem) => data.traces.find((trace) => trace.cell === cell && trace.problem === problem);

/* The traces of a cell; of a mean over benchmarks those of the same setting on each of them. */
function tracesOf(number) {
  const own = data.traces.filter((trace) => trace.cell === number);
  const same = (cell, other) => cell.name === other.name && cell.model === other.model;
  return own.length ? own : data.traces.filter((trace) => same(data.cells[trace.cell], data.cells[number]));
}

function openCell(number) {
  hideTip();
  traceView.cell = number;
  byId("traces-map").replaceChildren(...mapAround(number));
  const first = tracesOf(number)[0];
  traceView.trace = first ?? null;
  listTraces();
  if (first) showTrace(first);
  else byId("trace").replaceChildren(el("p", {}, "This page holds no trace of this cell; export the run to read them."));
  byId("traces").scrollIntoView();
  byId("trace").focus({ preventScroll: true });
}

function openTrace(trace) {
  traceView.cell = trace.cell;
  traceView.trace = trace;
  byId("traces-map").replaceChildren(...mapAround(trace.cell));
  listTraces();
  showTrace(trace);
  byId("traces").scrollIntoView();
  byId("trace").focus({ preventScroll: true });
}

function listTraces() {
  const cells = unique(data.traces.map((trace) => trace.cell));
  const options = [["", `all (${data.traces.length})`], ...cells.map((n) => [String(n), `${home(n)} | ${data.cells[n].short}`.trim()])];
  const controls = [choice("Cell", options, traceView.cell === null ? "" : String(traceView.cell), (v) => { traceView.cell = v === "" ? null : Number(v); listTraces(); })];
  if (traceView.cell !== null && data.folder && cells.includes(traceView.cell)) controls.push(el("a", { href: `${encodeURIComponent(data.folder)}/${traceView.cell}.html` }, "All traces of this cell"));
  byId("traces-controls").replaceChildren(...controls);
  const shown = (traceView.cell === null ? data.traces : tracesOf(traceView.cell)).slice(0, 400);
  byId("traces-list").replaceChildren(...shown.map((trace) => el("li", {}, el("button", { onclick: () => { showTrace(trace); listTraces(); byId("trace").focus(); }, "aria-current": trace === traceView.trace },
    badge(trace), `${trace.problem}, sample ${trace.sample} `, el("span", { class: "soft" }, `${traceView.cell !== trace.cell ? `${home(trace.cell)} | ${data.cells[trace.cell].short}, ` : ""}${trace.tokens === null ? "" : `${whole(trace.tokens)} tokens`}${trace.measured ? ", with measured attention" : ""}`)))));
}

/* Other settings' traces of the same model, problem and sample, the full cache first. */
function sameSample(trace) {
  const same = data.traces.filter((other) => other !== trace && other.lengths && home(other.cell) === home(trace.cell) && other.problem === trace.problem && other.sample === trace.sample);
  return same.sort((a, b) => (data.cells[b.cell].short === "full") - (data.cells[a.cell].short === "full"));
}

Object.assign(go, {
  cell: openCell,
  has: (cell, row) => traceAt(cell, row.problem),
  outcome: (cell, row) => openTrace(traceAt(cell, row.problem)),
  legend: "; underlined: the trace is in this page",
  others: sameSample,
  other: (trace) => sameSample(trace).find((same) => data.cells[same.cell].short === traceView.beside),
  beside: (trace, short) => { traceView.beside = short; showTrace(trace); },
});

/* The page begins here, when all its parts are there. */
listTraces();
if (data.maps) {
  drawCards();
  drawMaps();
  drawCosts();
  if (data.outcomes.length) drawProblems();
} else if (data.traces.length) showTrace(data.traces[0]);

/* What is folded opens for who is led there, and for paper. */
const unfold = (node) => { for (let at = node; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true; };
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("nav a[href^='#']"), section = link && document.querySelector(link.getAttribute("href"));
  if (section) { unfold(section); section.querySelector(":scope > details")?.setAttribute("open", ""); }
});
window.addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("section > details")) details.open = true; });
