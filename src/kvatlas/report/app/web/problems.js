/* Problems by settings: the outcomes of a table. */
const problemView = { table: 0, policy: "", sort: "order", down: false, text: "", split: false };

async function drawProblems() {
  if (!data.outcomes[problemView.table]) problemView.table = 0;
  const table = await outcomesOf(problemView.table);
  const policies = unique(table.rows.map((cell) => data.cells[cell].policy));
  if (!policies.includes(problemView.policy)) problemView.policy = "";
  const fill = () => fillProblems(table);
  const filter = el("input", { type: "search", value: problemView.text, placeholder: "problem contains …", "aria-label": "Filter problems" });
  filter.addEventListener("input", () => { problemView.text = filter.value; fill(); });
  const split = el("input", { type: "checkbox", checked: problemView.split });
  split.addEventListener("change", () => { problemView.split = split.checked; fill(); });
  const names = data.outcomes.map((one, index) => [String(index), `${one.short} | ${one.benchmark}`]);
  byId("problems-controls").replaceChildren(
    choice("Benchmark", names, String(problemView.table), (value) => {
      Object.assign(problemView, { table: Number(value), sort: "order" });
      guarded(drawProblems);
    }),
    choice("Policy", [["", "all"], ...policies.map((name) => [name, name])], problemView.policy, (value) => { problemView.policy = value; fill(); }),
    el("label", {}, "Filter", filter),
    el("label", {}, split, "only where settings disagree"),
  );
  fill();
}

function problemRows(table, cells) {
  return table.problems.map((problem, index) => {
    const letters = cells.map((cell) => table.marks[cell].slice(index * table.samples, (index + 1) * table.samples));
    const shares = letters.map((own) => {
      const done = [...own].filter((mark) => mark !== ".");
      return done.length ? done.filter((mark) => mark === "r").length / done.length : null;
    });
    const there = shares.filter(known);
    return { problem, index, letters, shares, solved: there.length ? there.reduce((a, b) => a + b, 0) / there.length : null };
  });
}

function fillProblems(table) {
  const cells = table.rows.filter((cell) => !problemView.policy || data.cells[cell].policy === problemView.policy);
  const text = problemView.text.toLowerCase(), { sort, down } = problemView;
  const rows = problemRows(table, cells).filter((row) => row.problem.toLowerCase().includes(text) && (!problemView.split || (row.solved > 0 && row.solved < 1)));
  const key = (row) => (sort === "order" ? row.index : sort === "solved" ? (row.solved ?? -1) : (row.shares[sort] ?? -1));
  rows.sort((a, b) => (key(a) - key(b)) * (down ? -1 : 1) || a.index - b.index);
  const heading = (name, label, plain) => {
    const sorted = sort === name;
    const resort = () => {
      Object.assign(problemView, { sort: name, down: sorted ? !down : name !== "order" });
      fillProblems(table);
    };
    const arrow = sorted ? (down ? " ↓" : " ↑") : "";
    return el("th", { scope: "col", class: plain ? "plain" : null, "aria-sort": sorted ? (down ? "descending" : "ascending") : "none" },
      el("button", { onclick: resort }, `${label}${arrow}`));
  };
  const head = el("tr", {}, heading("order", "Problem", true), heading("solved", "Solved", true),
    ...cells.map((cell, index) => heading(index, data.cells[cell].short)));
  const body = rows.map((row) => el("tr", {},
    el("th", { scope: "row" }, link(to(state.run, "problem", problemView.table, row.index), row.problem)),
    el("td", {}, row.solved === null ? "–" : `${Math.round(100 * row.solved)} %`),
    ...row.letters.map((letters, index) => outcome(row, letters, cells[index]))));
  const part = documents && state.runs[0].held < data.done, legend = part ? "; underlined: the trace is in this file" : "";
  const seldom = Object.keys(marks).filter((mark) => !"rwtn.".includes(mark)).filter((mark) => cells.some((cell) => table.marks[cell].includes(mark))).map((mark) => `, ${signs[mark]} ${marks[mark]}`).join("");
  byId("problems-said").textContent = `${rows.length} of ${table.problems.length} problems. ✓ right, · wrong, … truncated, ? no answer${seldom}${legend}.`;
  byId("problems-table").replaceChildren(el("table", { class: "outcomes" }, el("thead", {}, head), el("tbody", {}, ...body)));
}

function outcome(row, letters, cell) {
  const sample = [...letters].findIndex((mark, index) => mark !== "." && holds(cell, row.index, index));
  const right = [...letters].filter((mark) => mark === "r").length, one = letters.length === 1;
  const kind = one ? letters : right === letters.length ? "r" : "w";
  const name = `${data.cells[cell].short}, ${row.problem}: ${one ? marks[letters] : `${right}/${letters.length} right`}`;
  return el("td", {}, el("button", {
    class: `${kind === "." ? "m" : kind}${documents && sample >= 0 ? " has" : ""}`, disabled: sample < 0, title: name, "aria-label": name,
    onclick: () => lead(to(state.run, "trace", cell, row.index, sample)),
  }, one ? signs[letters] : `${right}/${letters.length}`));
}
