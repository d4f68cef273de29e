/* The app: what its addresses show. */
const state = { run: null, versions: new Map(), runs: [], turn: 0, address: null, trace: null, other: null };
const markWords = { r: "right", w: "wrong", t: "truncated", n: "no answer" };
const filters = { "": "all", lost: "wrong here, right with full", right: "right", wrong: "wrong", truncated: "truncated" };

Object.assign(go, {
  cell: (number) => lead(to(state.run, "cell", number)),
  has: (cell, row, marks) => [...marks].some((mark) => mark !== "."),
  outcome: (cell, row, marks) => lead(to(state.run, "trace", cell, row.index, [...marks].findIndex((mark) => mark !== "."))),
  problem: (table, index) => to(state.run, "problem", table, index),
  others: (trace) => trace.others.map(([cell, mark]) => ({ cell, verdict: markWords[mark] })),
  other: () => state.other,
  beside: (trace, short) => lead(traceAddress(trace, { beside: short || "none" })),
  token: (trace, index) => { if (trace === state.trace) lead(traceAddress(trace, here().query, index + 1), true); },
});

const traceAddress = (trace, query = {}, token = null) => withQuery(to(state.run, "trace", trace.cell, trace.index, trace.sample, ...(token ? [token] : [])), query);
const link = (address, text, extra = {}) => el("a", { href: address, ...extra }, text);

/* -- the frame of all pages ---------------------------------------------------------------------------------------- */

function open_(page, heading, crumbs) {
  for (const section of document.querySelectorAll("[data-page]")) section.hidden = section.id !== page;
  byId("heading").textContent = heading;
  document.title = `${heading} | kvatlas`;
  byId("failure").textContent = "";
  const path = [["Runs", "#/"], ...crumbs];
  byId("crumbs").replaceChildren(...path.flatMap(([text, address], index) => [index ? " / " : null, index === path.length - 1 ? el("span", { "aria-current": "page" }, text) : link(address, text)]).filter(known));
  drawSearch();
}

function drawSearch() {
  const form = byId("search");
  form.hidden = state.run === null || Boolean(data.static);
  if (form.hidden || form.contains(document.activeElement)) return;
  const field = el("input", { type: "search", name: "text", placeholder: "Search in traces", "aria-label": "Search in traces", value: here().parts[1] === "find" ? here().query.text ?? "" : "" });
  form.replaceChildren(field, el("button", {}, "Search"));
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const { parts, query } = here(), text = byId("search").querySelector("input").value;
  lead(withQuery(to(state.run, "find"), { ...(parts[1] === "find" ? query : {}), text }));
});
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });

function said(run) {
  const share = run.done < run.promised ? `${whole(run.done)} of ${whole(run.promised)} traces` : `${whole(run.done)} traces`;
  return run.failure ? `${share}; ${run.failure}` : share;
}

/* -- runs ---------------------------------------------------------------------------------------------------------- */

function showRuns() {
  open_("runs", "Runs", []);
  const rows = state.runs.map((run) => el("tr", {}, el("th", { scope: "row" }, link(to(run.name), run.name)), el("td", {}, run.models.join(", ")), el("td", {}, run.benchmarks.join(", ")), el("td", { class: "number" }, whole(run.settings)), el("td", { class: "number" }, said(run))));
  byId("runs").replaceChildren(el("div", { class: "scroll" }, el("table", { class: "list" }, el("caption", { class: "unseen" }, "Runs"), el("thead", {}, el("tr", {}, ...["Run", "Models", "Benchmarks"].map((name) => el("th", { scope: "col" }, name)), ...["Settings", "Traces"].map((name) => el("th", { scope: "col", class: "number" }, name)))), el("tbody", {}, ...rows))));
}

/* -- one run ------------------------------------------------------------------------------------------------------- */

async function useRun(name) {
  if (!state.runs.some((run) => run.name === name)) throw new Error(`There is no run ${JSON.stringify(name)}.`);
  Object.assign(data, await ofRun(name, "run.json"));
  state.run = name;
}

async function showRun(parts, query) {
  open_("overview", state.run, [[state.run, to(state.run)]]);
  byId("counts").replaceChildren(...[["models", data.models.length], ["benchmarks", data.benchmarks.length], ["settings", data.settings], ["traces", data.done]].map(([name, count]) => el("div", {}, el("dt", {}, name), el("dd", {}, whole(count)))));
  const state_ = data.finished ? [] : ["The run is not complete, or still being read: maps have no frames, and nothing is chosen, until it is."];
  byId("findings").replaceChildren(...[...state_, ...(data.obstacle ? [data.obstacle] : [])].map((text) => el("p", { class: "warn" }, text)),
    data.findings.length ? el("details", {}, el("summary", { class: "warn" }, `What limits the run (${data.findings.length})`), ...data.findings.map((text) => el("p", {}, text))) : "");
  drawCards();
  const map = parts[1] === "map" ? data.maps[numbered(parts[2], "map")] : null;
  if (parts[1] === "map" && !map) throw new Error("There is no such map.");
  if (map) { mapView.model = map.model; mapView.open = true; }
  if (data.maps.length) drawMaps(); else for (const id of ["maps-controls", "maps-panels"]) byId(id).replaceChildren();
  byId("costs").hidden = !data.fronts.length;
  if (data.fronts.length) drawCosts();
  if (query.open === "problems") byId("problems").open = true;
  if (byId("problems").open) await showProblems();
  linkMaps(map);
}

/* Each map has its address in its caption. */
function linkMaps(wanted) {
  const shown = data.maps.filter((map) => map.model === mapView.model), order = unique(shown.map((map) => map.benchmark));
  const sorted = order.flatMap((name) => shown.filter((map) => map.benchmark === name));
  byId("maps-panels").querySelectorAll("figure").forEach((figure, index) => {
    const number = data.maps.indexOf(sorted[index]), name = figure.querySelector("figcaption strong");
    name.replaceChildren(link(to(state.run, "map", number), name.textContent));
    if (sorted[index] === wanted) { figure.classList.add("here"); figure.scrollIntoView({ block: "center" }); }
  });
}
byId("maps-controls").addEventListener("change", () => linkMaps(null));

async function showProblems() {
  const table = data.outcomes[problemView.table] ?? data.outcomes[(problemView.table = 0)];
  if (!table.rows.length) return;
  const { marks } = await ofRun(state.run, `outcomes/${problemView.table}.json`);
  table.rows.forEach((row, index) => { row.marks = marks[index]; });
  if (data.outcomes[problemView.table] === table) drawProblems();
}
byId("problems").addEventListener("toggle", () => { if (byId("problems").open) guarded(showProblems); });
/* Another table is drawn when its marks are there. */
byId("problems-controls").addEventListener("change", () => guarded(showProblems), true);

/* -- lists of traces ----------------------------------------------------------------------------------------------- */

const nameOf = (number) => `${shortOf(data.cells[number].model)} | ${data.cells[number].benchmark} | ${data.cells[number].short}`;
const tableOf = (number) => data.outcomes.findIndex((table) => table.rows.some((row) => row.cell === number));

function traceRows(rows, columns) {
  const body = rows.map((row) => el("tr", {}, el("th", { scope: "row" }, link(to(state.run, "trace", row.cell, row.problem, row.sample), row.name)), el("td", {}, el("span", { class: row.mark === "r" ? "badge right" : "badge wrong" }, markWords[row.mark])), ...row.more.map((text) => el("td", {}, text))));
  byId("list-rows").replaceChildren(rows.length ? el("table", { class: "list" }, el("caption", { class: "unseen" }, "Traces"), el("thead", {}, el("tr", {}, ...["Trace", "Grade", ...columns].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...body)) : "");
}

async function showCell(number, query) {
  const cell = data.cells[number];
  if (!cell) throw new Error("There is no such cell.");
  const table = data.outcomes[tableOf(number)];
  open_("list", `${shortOf(cell.model)} | ${cell.benchmark} | ${cell.short}`, [[state.run, to(state.run)], [cell.short, ""]]);
  byId("list-map").replaceChildren(...mapAround(number));
  if (!table) { showMeanCell(number); return; }
  const marked = await ofRun(state.run, `cell/${number}.json`);
  const rows = [...marked.marks].map((mark, at) => ({ at, mark, cell: number, problem: Math.floor(at / marked.samples), sample: at % marked.samples, full: marked.full?.[at], tokens: marked.lengths[at] }));
  const fits = { "": () => true, lost: (row) => row.mark !== "r" && row.full === "r", right: (row) => row.mark === "r", wrong: (row) => row.mark !== "r", truncated: (row) => row.mark === "t" };
  const there = rows.filter((row) => row.mark !== ".");
  const what = fits[query.what] ? query.what : "";
  const options = Object.entries(filters).filter(([name]) => name !== "lost" || marked.full).map(([name, text]) => [name, `${text} (${whole(there.filter(fits[name]).length)})`]);
  byId("list-controls").replaceChildren(choice("Show", options, what, (v) => lead(withQuery(to(state.run, "cell", number), { what: v }))));
  const shown = there.filter(fits[what]);
  byId("list-said").textContent = `${[title(cell), ...cellFacts(cell)].join("; ")}. ${whole(shown.length)} of ${whole(there.length)} traces.`;
  traceRows(shown.map((row) => ({ ...row, name: `${table.problems[row.problem]}, sample ${row.sample}`, more: [`${whole(row.tokens)} tokens`, row.full ? `full: ${markWords[row.full] ?? "missing"}` : ""] })), ["New tokens", "Full cache"]);
}

/* A cell of a mean leads to the same setting's cells on each benchmark. */
function showMeanCell(number) {
  const { name, model } = data.cells[number];
  byId("list-controls").replaceChildren();
  byId("list-said").textContent = `${[title(data.cells[number]), ...cellFacts(data.cells[number])].join("; ")}. The same setting on each benchmark:`;
  const same = data.cells.map((cell, index) => [cell, index]).filter(([cell, index]) => index !== number && cell.name === name && cell.model === model && tableOf(index) >= 0);
  byId("list-rows").replaceChildren(el("ul", {}, ...same.map(([cell, index]) => el("li", {}, link(to(state.run, "cell", index), `${cell.benchmark}: ${fixed(cell.value)}`)))));
}

async function showProblem(tableNumber, index, query) {
  const table = data.outcomes[tableNumber];
  const problem = table?.problems[index];
  if (!known(problem)) throw new Error("There is no such problem.");
  open_("list", `${table.short} | ${table.benchmark} | ${problem}`, [[state.run, to(state.run)], ["Problems", withQuery(to(state.run), { open: "problems" })], [problem, ""]]);
  byId("list-map").replaceChildren();
  const { marks } = await ofRun(state.run, `outcomes/${tableNumber}.json`);
  const rows = table.rows.flatMap((row, at) => [...marks[at].slice(index * table.samples, (index + 1) * table.samples)].map((mark, sample) => ({ cell: row.cell, problem: index, sample, mark })));
  const there = rows.filter((row) => row.mark !== "."), fits = { "": () => true, right: (row) => row.mark === "r", wrong: (row) => row.mark !== "r", truncated: (row) => row.mark === "t" };
  const what = fits[query.what] ? query.what : "";
  byId("list-controls").replaceChildren(choice("Show", Object.keys(fits).map((name) => [name, `${filters[name]} (${there.filter(fits[name]).length})`]), what, (v) => lead(withQuery(to(state.run, "problem", tableNumber, index), { what: v }))));
  byId("list-said").textContent = `${whole(there.filter(fits.right).length)} of ${whole(there.length)} traces are right.`;
  traceRows(there.filter(fits[what]).map((row) => ({ ...row, name: `${data.cells[row.cell].short}, sample ${row.sample}`, more: [] })), []);
}

async function showFound(query, turn) {
  open_("list", "Search", [[state.run, to(state.run)], ["Search", ""]]);
  byId("list-map").replaceChildren();
  byId("list-rows").replaceChildren();
  const tables = data.outcomes.map((table, index) => [String(index), `${table.short} | ${table.benchmark}`]);
  const again = (change) => lead(withQuery(to(state.run, "find"), { ...query, ...change }));
  byId("list-controls").replaceChildren(choice("In", [["", "the whole run"], ...tables], query.table ?? "", (v) => again({ table: v })), choice("Show", Object.entries(filters), query.what ?? "", (v) => again({ what: v })));
  const hits = [];
  for (let start = 0; known(start) && hits.length < 200;) {
    const path = `${state.run}/find.json?${new URLSearchParams({ text: query.text ?? "", what: query.what ?? "", ...(query.table ? { table: query.table } : {}), start })}`;
    const answer = await fetched(path);
    if (turn !== state.turn) return;
    hits.push(...answer.hits);
    start = answer.next;
    byId("list-said").textContent = `${whole(hits.length)} traces found; ${known(start) ? `${whole(answer.seen)} of ${whole(answer.total)} looked at` : "all looked at"}${known(start) && hits.length >= 200 ? ", the rest is left out" : ""}.`;
    traceRows(hits.map(([cell, problem, sample, mark, around]) => ({ cell, problem, sample, mark, name: `${data.outcomes[tableOf(cell)].problems[problem]}, sample ${sample}`, more: [nameOf(cell), around ? `… ${around} …` : ""] })), ["Cell", "Text"]);
  }
}

/* -- a trace ------------------------------------------------------------------------------------------------------- */

async function showWhole([cell, problem, sample, token], query, turn) {
  const trace = await ofRun(state.run, `trace/${cell}/${problem}/${sample}.json`);
  const wanted = query.beside ?? (known(trace.base) ? data.cells[trace.base].short : "none");
  const beside = trace.others.find(([number]) => data.cells[number].short === wanted);
  if (turn !== state.turn) return;
  state.trace = trace;
  traceView.cell = cell;
  const name = data.cells[cell].short;
  open_("traces", `${nameOf(cell)}`, [[state.run, to(state.run)], [name, to(state.run, "cell", cell)], [`${trace.problem}, sample ${sample}`, ""]]);
  byId("traces-map").replaceChildren(...mapAround(cell));
  const measure = data.static || trace.measured !== undefined ? null : el("button", { onclick: (event) => guarded(() => measureTrace(trace, event.target)) }, "Measure attention");
  byId("traces-controls").replaceChildren(...[...neighbours(trace, problem, sample), link(to(state.run, "problem", tableOf(cell), problem), "This problem in all cells"), measure].filter(known));
  const draw = (other) => {
    state.other = other?.lengths ? other : null;
    traceView.beside = state.other ? data.cells[other.cell].short : "";
    showTrace(trace);
    if (known(token)) traceView.text?.select(token - 1, true);
  };
  // Long traces take their time: the one that was asked for does not wait for the other.
  draw(null);
  if (!beside) return;
  const other = await ofRun(state.run, `trace/${beside[0]}/${problem}/${sample}.json`);
  if (turn === state.turn) draw(other);
}

function neighbours(trace, problem, sample) {
  const table = data.outcomes[tableOf(trace.cell)], at = problem * table.samples + sample, all = table.problems.length * table.samples;
  const step = (index, text) => (index < 0 || index >= all ? null : link(withQuery(to(state.run, "trace", trace.cell, Math.floor(index / table.samples), index % table.samples), { beside: here().query.beside }), text));
  return [step(at - 1, "Previous trace"), step(at + 1, "Next trace")];
}

async function measureTrace(trace, button) {
  button.disabled = true;
  button.textContent = "Measuring …";
  const answer = await fetched(`${state.run}/attention/${trace.cell}/${trace.index}/${trace.sample}.json`);
  trace.measured = answer.measured ?? undefined;
  trace.departs = answer.departs ?? undefined;
  button.textContent = answer.measured || answer.departs ? "Measured" : "Nothing to measure";
  if (trace === state.trace) showTrace(trace);
}

/* -- routing and living -------------------------------------------------------------------------------------------- */

async function guarded(job) {
  try { await job(); } catch (error) { byId("failure").textContent = error.message; }
}

async function route(fresh = true) {
  const turn = ++state.turn, { parts, query } = here();
  hideTip();
  await guarded(async () => {
    if (!parts.length) { state.run = null; showRuns(); }
    else {
      await useRun(parts[0]);
      if (turn !== state.turn) return;
      if (parts.length === 1 || parts[1] === "map") await showRun(parts, query);
      else if (parts[1] === "cell") await showCell(numbered(parts[2], "cell"), query);
      else if (parts[1] === "problem") await showProblem(numbered(parts[2], "table"), numbered(parts[3], "problem"), query);
      else if (parts[1] === "trace") await showWhole([...parts.slice(2, 5).map((part) => numbered(part, "trace")), known(parts[5]) ? numbered(parts[5], "token") : null], query, turn);
      else if (parts[1] === "find" && !data.static) await showFound(query, turn);
      else throw new Error("There is no such page.");
    }
  });
  if (turn !== state.turn) return;
  if (fresh && parts[1] !== "map" && !known(parts[5])) window.scrollTo(0, 0);
  if (fresh) byId("main").focus({ preventScroll: true });
  say();
}

function say() {
  const run = state.runs.find((run) => run.name === state.run);
  byId("live").textContent = run ? said(run) : "";
}

/* While a sweep writes, what is looked at follows; a trace that is read stays as it is. */
async function live() {
  try {
    const runs = await fetched("runs.json");
    const before = new Map(state.versions);
    state.runs = runs;
    for (const run of runs) state.versions.set(run.name, run.version);
    const { parts } = here(), name = parts[0];
    const about = parts.length ? [name] : runs.map((run) => run.name);
    const changed = about.some((run) => before.get(run) !== state.versions.get(run));
    if (changed && !["trace", "find"].includes(parts[1]) && before.size) {
      const focused = document.activeElement?.dataset?.cell;
      await route(false);
      const again = focused && document.querySelector(`td[data-cell="${focused}"]`);
      if (again) { again.closest("details")?.setAttribute("open", ""); again.focus({ preventScroll: true }); }
    }
    say();
  } catch (error) { byId("live").textContent = "The server does not answer."; }
  if (!data.static) setTimeout(live, document.hidden ? 10_000 : 1_500);
}

window.addEventListener("hashchange", () => route());
live().then(() => route());
