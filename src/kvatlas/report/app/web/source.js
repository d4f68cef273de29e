/* Addresses behind the #, and the source that answers them: a server, files, or documents in this page. */
const state = { run: null, runs: [], versions: new Map(), turn: 0, trace: null, focused: null };
/* The outcomes of traces: a word and a sign for each letter. */
const marks = Object.fromEntries(Object.entries(page.marks).map(([letter, [word]]) => [letter, word]));
const signs = Object.fromEntries(Object.entries(page.marks).map(([letter, [, sign]]) => [letter, sign]));
const filters = {
  "": ["all", () => true],
  lost: ["lost: the full cache is right", (mark, full) => mark !== "r" && full === "r"],
  right: ["right", (mark) => mark === "r"],
  wrong: ["wrong", (mark) => mark !== "r"],
  truncated: ["truncated", (mark) => mark === "t"],
};

const to = (...parts) => withQuery(`#/${parts.map((part) => encodeURIComponent(part)).join("/")}`, view.chosen());

/* What the header chooses; every address has what differs from the usual. */
const usual = { model: "", policy: "", show: "" };
const view = {
  ...usual,
  read(query) { for (const name of Object.keys(usual)) this[name] = query[name] ?? usual[name]; },
  chosen() { return Object.fromEntries(Object.keys(usual).map((name) => [name, this[name] === usual[name] ? "" : this[name]])); },
};

function withQuery(address, values) {
  const [path, query] = address.split("?"), all = { ...Object.fromEntries(new URLSearchParams(query ?? "")), ...values };
  const given = Object.entries(all).filter(([, value]) => known(value) && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  let parts = [];
  try { parts = path.split("/").filter(Boolean).map(decodeURIComponent); } catch { parts = ["?"]; }
  return { parts, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/* Go to an address; `instead` of the one on show, where it only says more of the same page. */
function lead(address, instead = false) {
  if (instead) history.replaceState(null, "", address);
  else location.href = address;
}

function numbered(part, noun) {
  if (!/^\d{1,9}$/.test(part ?? "")) throw new Error(`${JSON.stringify(part ?? "")} is no number of a ${noun}.`);
  return Number(part);
}

/* -- sources ------------------------------------------------------------------------------------------------------- */

const live = page.source === "server";
let documents = null;

async function unpacked(coded) {
  const bytes = Uint8Array.from(atob(coded), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function fetched(address) {
  const [path, query] = address.split("?");
  if (page.source === "embedded") {
    documents ??= await unpacked(page.documents);
    if (!documents[path]) throw new Error("This file does not hold it.");
    return documents[path];
  }
  const answer = await fetch(`data/${path}.json${query ? `?${query}` : ""}`);
  if (answer.ok) return answer.json();
  let detail = "";
  try { detail = (await answer.json()).detail; } catch { detail = ""; }
  throw new Error(detail || `There is nothing at ${path} (${answer.status}).`);
}

/* Thrown where another page was asked for meanwhile: what comes late is not drawn. */
class Late extends Error {}

/* Documents of the run on show, kept as long as nothing is added to it. */
const kept = new Map();
const MOST_KEPT = 60;

async function ofRun(path, run = state.run) {
  const key = `${run}/${path}`, version = state.versions.get(run) ?? 0, { turn } = state;
  if (kept.get(key)?.version === version) return kept.get(key).value;
  const value = await fetched(key);
  if (turn !== state.turn) throw new Late();
  kept.delete(key);
  kept.set(key, { version, value });
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  return value;
}

/* -- traces of a run ----------------------------------------------------------------------------------------------- */

const traceAt = (cell, problem, sample) => `trace/${cell}/${problem}/${sample}`;
const tableOf = (cell) => data.outcomes.findIndex((table) => table.rows.includes(cell));

/* Whether the source holds a trace, of those that are stored. */
const holds = (cell, problem, sample) => !documents || `${state.run}/${traceAt(cell, problem, sample)}` in documents;

/* The outcomes of a table: `marks` of each row, one letter for each problem and sample. */
async function outcomesOf(number) {
  const table = data.outcomes[number];
  const { marks: letters } = await ofRun(`outcomes/${number}`);
  return { ...table, marks: Object.fromEntries(table.rows.map((cell, index) => [cell, letters[index]])) };
}

/* Traces of a search, `shown` as they come: a server searches all, a page the traces that it holds. */
async function found({ text = "", what = "", table = "" }, shown) {
  const hits = [], most = 200;
  if (page.source === "files") throw new Error("Files are not searched; kvatlas view searches every trace.");
  if (!live) {
    const sought = text.toLowerCase(), chosen = data.outcomes.map((_, index) => index).filter((index) => !table || index === Number(table));
    const tables = await Promise.all(chosen.map(outcomesOf));
    let seen = 0;
    for (const one of tables) for (const cell of one.rows) for (const [at, mark] of [...one.marks[cell]].entries()) {
      const problem = Math.floor(at / one.samples), sample = at % one.samples;
      if (mark === "." || !holds(cell, problem, sample)) continue;
      seen += 1;
      const trace = documents[`${state.run}/${traceAt(cell, problem, sample)}`], body = trace.text, position = body.toLowerCase().indexOf(sought);
      const isLost = filters.lost[1](mark, one.marks[one.full]?.[at]);
      if (position < 0 || !filters[what][1](mark, one.marks[one.full]?.[at])) continue;
      hits.push([cell, problem, sample, mark, text ? body.slice(Math.max(0, position - 60), position + text.length + 60) : "",
        isLost ? { expected: trace.reference, written: trace.answer, death: trace.death } : null]);
    }
    shown(hits.slice(0, most), { seen, total: seen, rest: hits.length > most });
    return;
  }
  for (let start = 0; known(start) && hits.length < most;) {
    const answer = await ofRun(`find?${new URLSearchParams({ text, what, table, start })}`);
    hits.push(...answer.hits);
    start = answer.next;
    shown(hits, { seen: answer.seen, total: answer.total, rest: known(start) && hits.length >= most });
  }
}
