/* Problems by settings: which problems which settings solve. */
const problemView = { table: 0, policy: "", sort: "order", down: false, text: "", split: false };

function drawProblems() {
  const tables = data.outcomes;
  const table = tables[problemView.table];
  const policies = unique(table.rows.map((row) => data.cells[row.cell].policy));
  if (!policies.includes(problemView.policy)) problemView.policy = "";
  const filter = el("input", { type: "search", value: problemView.text, placeholder: "problem contains …", "aria-label": "Filter problems" });
  filter.addEventListener("input", () => { problemView.text = filter.value; fillProblems(); });
  const split = el("input", { type: "checkbox", checked: problemView.split });
  split.addEventListener("change", () => { problemView.split = split.checked; fillProblems(); });
  byId("problems-controls").replaceChildren(
    choice("Benchmark", tables.map((table, index) => [String(index), `${shortOf(table.model)} | ${table.benchmark}`]), String(problemView.table), (v) => { problemView.table = Number(v); problemView.sort = "order"; drawProblems(); }),
    choice("Policy", [["", "all"], ...policies.map((name) => [name, name])], problemView.policy, (v) => { problemView.policy = v; drawProblems(); }),
    el("label", {}, "Filter", filter),
    el("label", {}, split, "only where settings disagree"),
  );
  fillProblems();
}

function problemRows(table, rows) {
  return table.problems.map((problem, index) => {
    const marks = rows.map((row) => row.marks.slice(index * table.samples, (index + 1) * table.samples));
    const shares = marks.map((outcomes) => { const done = [...outcomes].filter((mark) => mark !== "."); return done.length ? done.filter((mark) => mark === "r").length / done.length : null; });
    const told = shares.filter(known);
    return { problem, index, marks, shares, solved: told.length ? told.reduce((a, b) => a + b, 0) / told.length : null };
  });
}

function fillProblems() {
  const table = data.outcomes[problemView.table];
  const rows = table.rows.filter((row) => !problemView.policy || data.cells[row.cell].policy === problemView.policy);
  const wanted = problemView.text.toLowerCase();
  const shown = problemRows(table, rows).filter((row) => row.problem.toLowerCase().includes(wanted) && (!problemView.split || (row.solved > 0 && row.solved < 1)));
  const key = (row) => (problemView.sort === "order" ? row.index : problemView.sort === "solved" ? (row.solved ?? -1) : (row.shares[problemView.sort] ?? -1));
  shown.sort((a, b) => (key(a) - key(b)) * (problemView.down ? -1 : 1) || a.index - b.index);
  const heading = (sort, text, plain) => {
    const sorted = problemView.sort === sort;
    const button = el("button", { onclick: () => { problemView.down = sorted ? !problemView.down : sort !== "order"; problemView.sort = sort; fillProblems(); } }, `${text}${sorted ? (problemView.down ? " ↓" : " ↑") : ""}`);
    return el("th", { scope: "col", class: plain ? "plain" : null, "aria-sort": sorted ? (problemView.down ? "descending" : "ascending") : "none" }, button);
  };
  const head = el("tr", {}, heading("order", "Problem", true), heading("solved", "Solved", true), ...rows.map((row, index) => heading(index, data.cells[row.cell].short)));
  const body = shown.map((row) => el("tr", {}, el("th", { scope: "row" }, go.problem ? el("a", { href: go.problem(problemView.table, row.index) }, row.problem) : row.problem), el("td", {}, row.solved === null ? "–" : `${Math.round(100 * row.solved)} %`), ...row.marks.map((mark, index) => outcome(row, mark, rows[index].cell))));
  byId("problems-table").replaceChildren(el("table", { class: "outcomes" }, el("thead", {}, head), el("tbody", {}, ...body)), el("p", { class: "soft", role: "status" }, `${shown.length} of ${table.problems.length} problems. ✓ right, · wrong, … truncated, ? no answer${go.legend ?? ""}.`));
}

const signs = { r: "✓", w: "·", t: "…", n: "?", ".": "" };
const words = { r: "right", w: "wrong", t: "truncated", n: "no answer", ".": "missing" };
function outcome(row, marks, cell) {
  const stored = go.has(cell, row, marks);
  const right = [...marks].filter((mark) => mark === "r").length;
  const text = marks.length === 1 ? signs[marks] : `${right}/${marks.length}`;
  const kind = marks.length === 1 ? marks : right === marks.length ? "r" : "w";
  const name = `${data.cells[cell].short}, ${row.problem}: ${marks.length === 1 ? words[marks] : `${right} of ${marks.length} right`}`;
  const button = el("button", { class: `${kind === "." ? "m" : kind}${stored ? " has" : ""}`, disabled: !stored, title: name, "aria-label": name, onclick: () => stored && go.outcome(cell, row, marks) }, text);
  return el("td", {}, button);
}
