/* The pages of the app, and the addresses that lead to them. */

/* Show one page under a heading, with the way to it. */
function show(name, heading, crumbs) {
  for (const section of document.querySelectorAll("[data-page]")) section.hidden = section.id !== name;
  byId("heading").textContent = heading;
  document.title = `${heading} | kvatlas`;
  byId("failure").textContent = "";
  const path = state.runs.length === 1 ? crumbs : [["Runs", "#/"], ...crumbs];
  const steps = path.map(([text, address], index) => (index === path.length - 1 ? el("span", { "aria-current": "page" }, text) : link(address, text)));
  byId("crumbs").replaceChildren(...steps.flatMap((step, index) => (index ? [" / ", step] : [step])));
  drawSearch();
  drawHeader();
}

const tabs = { answer: "Answer", decide: "Decide", maps: "Maps", find: "Traces", compare: "Compare", evidence: "Evidence" };

/* The page of the address on show. */
const pageShown = () => {
  const { parts } = here();
  return parts[1] === "map" ? "maps" : (parts[1] ?? "answer");
};

/* The pages of a run. */
function drawHeader() {
  const page_ = pageShown(), there = state.run !== null;
  document.body.dataset.on = page_;
  byId("pages").hidden = !there;
  if (!there) return;
  const isThere = { find: page.source !== "files" && data.done > 0, decide: data.decision !== null };
  const names = Object.entries(tabs).filter(([name]) => isThere[name] ?? true);
  const onTraces = !(page_ in tabs);
  byId("pages").replaceChildren(...names.map(([name, text]) => el("a", {
    href: name === "answer" ? to(state.run) : to(state.run, name), "aria-current": name === page_ || (onTraces && name === "find") ? "page" : null,
  }, text)));
  drawView(page_);
}

/* What a page is about: model, policy and measure; above what these change. */
function drawView(page_) {
  const places = { answer: forestCards().length ? "forest" : data.tables.length ? "settings" : "maps", maps: "maps", compare: "comparisons", find: "list" };
  const box = byId("view"), place = places[page_], onMaps = place === "maps";
  box.hidden = !place;
  if (!place) return;
  const section = byId(place), title = section.querySelector(":scope > h2");
  if (title) title.after(box);
  else section.prepend(box);
  const { query } = here(), models = unique(data.maps.map((map) => map.model));
  const policies = unique(data.maps.map((map) => map.policy)).filter(Boolean);
  const shown = Object.entries(measures).filter(([, one]) => data.cells.some((cell) => known(one.of(cell)))).map(([name, one]) => [name, one.label]);
  const change = (name, common = usual[name]) => (value) => lead(withQuery(location.hash || to(state.run), { ...query, [name]: value === common ? "" : value }));
  const controls = [
    choice("Model", [["", "all"], ...models.map((name) => [name, shortOf(name)])].slice(models.length > 1 ? 0 : 1), view.model, change("model")),
    choice("Policy", [["", "all"], ...policies.map((name) => [name, name])].slice(policies.length > 1 ? 0 : 1), view.policy, change("policy")),
  ];
  if (onMaps) controls.push(choice("Show", shown, nameShown(), change("show", usualMeasure())));
  box.replaceChildren(...controls);
}

function drawSearch() {
  const field = byId("search");
  field.hidden = state.run === null || page.source === "files";
  if (field.hidden || field.contains(document.activeElement)) return;
  const { parts, query } = here(), found = parts[1] === "find" ? query : {};
  const input = el("input", { type: "search", placeholder: "Search in traces", "aria-label": "Search in traces", value: found.text ?? "" });
  const submit = (event) => {
    event.preventDefault();
    lead(withQuery(to(state.run, "find"), { ...found, text: input.value }));
  };
  field.replaceChildren(el("form", { onsubmit: submit }, input, el("button", {}, "Search")));
}

byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });

function progress(run) {
  if (run.loading && !run.failure) return "Loading the traces …";
  const share = run.done < run.promised ? `${whole(run.done)} of ${whole(run.promised)} traces` : plural(run.done, "trace");
  if (known(run.held) && run.held < run.done) return `${share} (${whole(run.held)} in this file)`;
  return run.failure ? `${share}; ${run.failure}` : share;
}

function showRuns() {
  show("runs", "Runs", []);
  const rows = state.runs.map((run) => [link(to(run.name), run.name), run.models.join(", "), run.benchmarks.join(", "), whole(run.settings), progress(run)]);
  byId("runs").replaceChildren(el("div", { class: "scroll" }, listTable("Runs", ["Run", "Models", "Benchmarks", "Settings", "Traces"], rows, [3, 4])));
}

/* -- one run ------------------------------------------------------------------------------------------------------- */

async function useRun(name) {
  if (!state.runs.some((run) => run.name === name)) throw new Error(`There is no run ${JSON.stringify(name)}.`);
  const fresh = await ofRun("run", name);
  /* The cell with the focus just before all is drawn anew: a key may have moved it while the run was fetched. */
  state.focused = document.activeElement?.dataset.cell ?? null;
  Object.assign(data, fresh);
  state.run = name;
}

const isShown = (map) => (!view.model || map.model === view.model) && (!view.policy || !map.policy || map.policy === view.policy);

const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names.join(""));

/* The finding in a sentence, as `kvatlas describe` has it: of the run, or of the model on show. */
function claim() {
  const card = view.model ? data.cards.find((one) => one.model === shortOf(view.model)) : null;
  const finding = card?.headline ?? (view.model ? "" : data.headline);
  const on = data.benchmarks.length === 1 ? data.benchmarks[0] : `${data.benchmarks.length} benchmarks`;
  return finding || `${data.models.join(", ")} on ${on}`;
}

/* What was run, in a sentence. */
function whatRan() {
  const problems = new Map(data.outcomes.map((table) => [table.benchmark, table.problems.length]));
  const samples = unique(data.outcomes.map((table) => table.samples)), policies = unique(data.cells.map((cell) => cell.policy));
  const each = samples.length > 1 || samples[0] > 1 ? `, ${Math.min(...samples)} to ${Math.max(...samples)} samples each`.replace(/(\d+) to \1 /, "$1 ") : "";
  const count = plural([...problems.values()].reduce((sum, one) => sum + one, 0), "problem");
  return `${listed(data.models)} on ${listed(data.benchmarks)}: ${count}${each}, ${plural(data.settings, "setting")} of ${listed(policies)}, ` +
    `${plural(data.done, "trace")}. ${data.metric} in percent; intervals are 95 % and speak of ${data.claim}. Truncated and answerless traces count as wrong.`;
}

async function showRun(parts, query, fresh) {
  const map = parts[1] === "map" ? data.maps[numbered(parts[2], "map")] : null;
  if (parts[1] === "map" && !map) throw new Error("There is no such map.");
  const tab = map ? "maps" : (parts[1] ?? "answer");
  show("overview", tab === "answer" ? claim() : tabs[tab], [[state.run, to(state.run)]]);
  for (const section of document.querySelectorAll("[data-tab]")) section.hidden = !section.dataset.tab.split(" ").includes(tab);
  byId("metric").hidden = tab !== "answer";
  byId("metric").textContent = whatRan();
  byId("warnings").replaceChildren(...data.warnings.map((text) => el("p", { class: "warn" }, text)));
  byId("verdicts").replaceChildren(...data.cards.filter((card) => !view.model || card.model === shortOf(view.model)).map(verdictCard));
  byId("autopsies").replaceChildren(...data.autopsies.map((text) => el("p", {}, text)));
  byId("findings").replaceChildren(...data.findings.map((text) => el("p", {}, text)));
  const hasForest = forestCards().length > 0;
  drawNext();
  drawForests();
  drawSettings();
  if (data.decision) drawDecision(tab);
  if (data.maps.length) drawMaps(tab, map);
  else byId("maps-panels").replaceChildren();
  /* What is empty has no heading on paper either. */
  const hide = (id, empty) => {
    byId(id).hidden ||= empty;
    byId(id).toggleAttribute("data-empty", empty);
  };
  hide("limits", !data.findings.length);
  hide("settings", !data.tables.length);
  /* The forest, or the table, has every setting already. */
  byId("maps").hidden ||= tab === "answer" && (data.tables.length > 0 || hasForest);
  hide("maps", !data.maps.length);
  hide("forest", !hasForest);
  hide("decision", !data.decision);
  for (const id of ["next", "comparisons", "summary", "analysis"]) hide(id, !data.finished);
  /* Without a server all is here already; else only what is on show is fetched. */
  if (!live || document.querySelector("[data-about]:not([hidden])")) await drawAbout();
  if (!live || !byId("problems").hidden) await drawProblems();
}

/* What to choose for a model, what it saves and what it loses. */
function verdictCard(card) {
  const cell = known(card.cell) ? data.cells[card.cell] : null, numbers = [];
  if (cell && known(card.saved)) numbers.push(["KV memory saved", `${fixed(card.saved)} %`, `${whole(cell.kept)} tokens cached`]);
  if (card.loss) {
    const [value, low, high, limit] = [...card.loss, card.limit].map((points) => fixed(points).replace("-", "−"));
    const interval = `95 %: ${low} to ${high}`;
    numbers.push(["points lost", value, card.shown ? interval : known(card.limit) ? `at most ${limit}` : `${interval}; not tested`]);
    if (card.compressed < card.traces) numbers.push(["traces compressed", `${whole(card.compressed)} of ${whole(card.traces)}`, "the others equal full"]);
  }
  if (cell) numbers.push([data.metric, fixed(cell.value), between(cell.low, cell.high)]);
  if (card.above_random) {
    const [value, low, high] = card.above_random.map((points) => signed(points));
    numbers.push(["above random", value, `95 %: ${low} to ${high}`, "wide-only"]);
  }
  const open = card.settings - card.kept - card.broken, within = `within ${plural(card.margin, "point")}`;
  const standing = card.settings > 1 ? `Of ${plural(card.settings, "setting")} ${card.kept} are proven ${within}, ${card.broken} to lose more, ${open} are open.` : null;
  return el("article", { class: card.shown ? "card" : "card unproven" },
    el("h3", {}, `${card.model} | ${card.benchmark}${cell ? `: ${card.shown ? "cheapest proven setting" : `closest to ${data.reference}`} ` : ""}`,
      cell ? el("button", { class: "setting", onclick: () => openCell(card.cell) }, cell.short) : null),
    el("dl", {}, ...numbers.map(([name, value, about, kind]) => el("div", { class: kind }, el("dt", {}, name), el("dd", {}, value, el("small", {}, about))))),
    standing ? el("p", { class: "soft" }, standing) : null,
    el("details", { open: !card.shown }, el("summary", {}, "In words"), el("p", { class: "soft" }, card.words)));
}

/* What to try next: each step with a spec to copy, then links into this run. */
function drawNext() {
  const steps = data.next.map((step) => {
    const spec = el("pre", { tabindex: 0 }, step.spec), copy = el("button", {}, "Copy the spec");
    copy.addEventListener("click", async () => {
      getSelection().selectAllChildren(spec);
      /* Files from disk may not write to the clipboard; the text is selected then. */
      try { await navigator.clipboard.writeText(step.spec); copy.textContent = "Copied"; } catch { copy.textContent = "Selected: copy it"; }
    });
    return el("details", {}, el("summary", {}, el("b", {}, `Try ${step.title}.`), ` ${step.reason}`),
      el("p", {}, "Save the spec as ", el("code", {}, `${step.name}.yaml`), ", then run ", el("code", {}, step.command)), el("div", { class: "controls" }, copy), spec);
  });
  const links = [];
  const lost = data.lost && holds(...data.lost) ? data.lost : null;
  if (lost) links.push(link(to(state.run, "trace", ...lost), "Read what was lost"));
  if (page.source !== "files") links.push(link(withQuery(to(state.run, "find"), { what: "lost" }), lost ? "List lost answers" : "Read what was lost"));
  if (data.decision) links.push(link(to(state.run, "decide"), "For a decision"));
  links.push(link(to(state.run, "compare"), "Compare problem by problem"), link(to(state.run, "maps"), "See every map"));
  byId("next-title").textContent = steps.length ? "What to try next" : "Look closer";
  byId("next-steps").replaceChildren(...steps, el("p", { class: "steps" }, ...links));
}

/* The settings of a run without maps, sorted by the column that was clicked. */
const settingView = { sort: "value", down: true };

function drawSettings() {
  const tables = data.tables.filter((table) => !view.model || table.model === view.model);
  byId("settings-table").replaceChildren(...tables.flatMap((table) => [
    el("h3", {}, `${table.short} | ${table.benchmark}`), el("div", { class: "scroll", tabindex: 0 }, settingsOf(table)),
  ]));
}

function settingsOf(table) {
  const cellOf = (row) => data.cells[row.cell], several = table.benchmarks.length > 1;
  const standing = (row) => (row.kept ? "within the margin" : row.broken ? "loses more" : row.loss ? "open" : "–");
  const columns = [
    ["name", "Setting", (row) => cellOf(row).short, (row) => el("button", { class: "setting", onclick: () => openCell(row.cell) }, cellOf(row).short)],
    ["value", data.metric, (row) => cellOf(row).value, (row) => fixed(cellOf(row).value)],
    ["low", "95 %", (row) => cellOf(row).low, (row) => between(cellOf(row).low, cellOf(row).high) || "–"],
    ["loss", "Points lost", (row) => row.loss?.[0], (row) => (row.loss ? fixed(row.loss[0]).replace("-", "−") : "–")],
    ["limits", "95 %", (row) => row.loss?.[2], (row) => (row.loss ? `${fixed(row.loss[1])} to ${fixed(row.loss[2])}`.replaceAll("-", "−") : "–")],
    ["standing", "Proven", (row) => Number(row.kept) - Number(row.broken), standing],
    ...(several ? table.benchmarks.map((name, index) => [name, name, (row) => row.values[index], (row) => fixed(row.values[index])]) : []),
    ...page.columns.filter((column) => column.heading).map(({ name, form, heading }) =>
      [name, heading, (row) => cellOf(row)[name], (row) => printed(cellOf(row)[name], form)]),
  ].filter(([name]) => table.rows.some((row) => row.loss) || !["loss", "limits", "standing"].includes(name));
  const key = (columns.find(([name]) => name === settingView.sort) ?? columns[1])[2];
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0), rank = (row) => key(row) ?? -Infinity;
  const rows = [...table.rows].sort((a, b) => (settingView.down ? order(rank(b), rank(a)) : order(rank(a), rank(b))));
  const heads = columns.map(([name, text]) => {
    const sorted = settingView.sort === name;
    const resort = () => { Object.assign(settingView, { sort: name, down: sorted ? !settingView.down : name !== "name" }); drawSettings(); };
    return el("button", { class: "heading", onclick: resort }, `${text}${sorted ? (settingView.down ? " ↓" : " ↑") : ""}`);
  });
  const body = rows.map((row) => columns.map(([, , , shown]) => shown(row)));
  const numbers = columns.map((_, index) => index).filter((index) => index && columns[index][0] !== "standing");
  return listTable(`Settings of ${table.short}`, heads, body, numbers);
}

const titleOf = (map) => [map.short, map.benchmark, map.policy].filter(Boolean).join(" | ");

/* The run's sentences, comparisons and provenance. */
async function drawAbout() {
  const about = await ofRun("about");
  const items = (lines) => lines.map((line) => el("li", {}, line));
  byId("observations").replaceChildren(...items([...about.interpretation, ...about.observations]));
  byId("sentences").replaceChildren(...about.sentences.flatMap(([name, lines]) => [el("h3", {}, name),
    el("div", { class: "evidence" }, ...data.maps.filter((map) => titleOf(map) === name).map((map) => panel(map, measureShown())),
      el("ul", { class: "words" }, ...items(lines)))]));
  for (const [id, there] of [["summary", about.interpretation], ["analysis", about.sentences], ["comparisons", about.comparisons]]) {
    byId(id).hidden ||= !there.length;
    byId(id).toggleAttribute("data-empty", !there.length);
  }
  const of = (one) => (!view.model || one.model.split(", ").includes(view.model)) && (!view.policy || `${one.first} ${one.second}`.includes(view.policy));
  byId("comparisons-table").replaceChildren(...comparisonTables(about.comparisons.filter(of)));
  byId("provenance-table").replaceChildren(listTable("Provenance of the run", [], about.provenance));
  byId("spec").textContent = about.spec;
  byId("keys").textContent = about.keys.map(([key, settings]) => [key, ...settings.map((setting) => `    ${setting}`)].join("\n")).join("\n");
}

/* Comparisons of policies, then those of models under one policy, each in a table of its own. */
function comparisonTables(comparisons) {
  const isOfModels = (one) => one.model.includes(", "), several = data.models.length > 1;
  const groups = [
    ["Policies", several ? "Model" : null, comparisons.filter((one) => !isOfModels(one)), (one) => shortOf(one.model)],
    ["Models", "Policy", comparisons.filter(isOfModels), (one) => one.note ?? ""],
  ];
  return groups.filter(([, , shown]) => shown.length).flatMap(([name, heading, shown, under]) => {
    const rows = shown.map((one) => {
      const [value, low, high] = [one.difference, one.low, one.high].map((points) => signed(points));
      const p = one.p < 0.001 ? "< 0.001" : one.p > 0.99 ? "> 0.99" : String(Number(one.p.toPrecision(2)));
      return [...(heading ? [under(one)] : []), one.benchmark, shortOf(one.first), shortOf(one.second), one.cells, one.problems, value, `${low} to ${high}`, p];
    });
    const columns = [...(heading ? [heading] : []), "Benchmark", "First", "Second", "Cells", "Problems", "Difference", "95 % interval", "p"];
    const table = listTable(`Paired comparisons: ${name}`, columns, rows, columns.map((_, index) => index).slice(-5));
    return [el("h3", {}, name), el("div", { class: "scroll", tabindex: 0 }, table)];
  });
}

/* -- lists of traces ----------------------------------------------------------------------------------------------- */

function traceTable(rows, columns) {
  const body = rows.map(({ cell, problem, sample, mark, more }) => {
    const name = `${data.outcomes[tableOf(cell)].problems[problem]}, sample ${sample}`;
    const address = to(state.run, "trace", cell, problem, sample);
    return [holds(cell, problem, sample) ? link(address, name) : name, badge(mark === "r", marks[mark]), ...more];
  });
  return listTable("Traces", ["Trace", "Grade", ...columns], body);
}

function drawRows(rows, columns) {
  byId("list-rows").replaceChildren(...(rows.length ? [traceTable(rows, columns)] : []));
}

/* Lost answers by their causes, the most frequent first: what was expected and written, and how each was lost. */
function drawLost(rows) {
  const causeOf = ({ lost }) => lost.death?.kind ?? "cause not read", causes = new Map();
  for (const row of rows) causes.set(causeOf(row), [...(causes.get(causeOf(row)) ?? []), row]);
  const groups = [...causes].sort(([, a], [, b]) => b.length - a.length);
  byId("list-rows").replaceChildren(...groups.flatMap(([cause, own]) => {
    const lines = own.map((row) => ({ ...row, more: [...comparedWords(row.lost.expected, row.lost.written), row.lost.death?.words ?? "–", ...row.more] }));
    return [el("h2", { class: "plain" }, `${cause[0].toUpperCase()}${cause.slice(1)}: ${plural(own.length, "answer")}`), traceTable(lines, ["Expected", "Written", "How it was lost", "Cell"])];
  }));
}

/* Two short texts of as many words, the words in which they differ marked; long texts are cut. */
function comparedWords(...texts) {
  const words = texts.map((text) => (text ?? "none").slice(0, 120).split(" ")), [first, second] = words, isAlike = first.length === second.length;
  return words.map((own) => el("span", {}, ...own.flatMap((word, index) => [isAlike && first[index] !== second[index] ? el("mark", {}, word) : word, " "])));
}

/* Which of these traces a file holds, and how to read the others; nothing where all are there. */
function heldOf(rows) {
  const held = rows.filter((row) => holds(row.cell, row.problem, row.sample)).length;
  if (held === rows.length) return "";
  const share = held ? `This file holds ${whole(held)} of the ${whole(rows.length)} traces` : `This file holds none of the ${whole(rows.length)} traces`;
  return `${share}; kvatlas view ${data.folder} shows them all.`;
}

function filterChoice(what, counts, address) {
  const options = Object.entries(counts).map(([name, count]) => [name, `${filters[name][0].replace("the full cache", data.reference)} (${whole(count)})`]);
  return choice("Show", options, what, (value) => lead(withQuery(address, { what: value })));
}

/* The rows that a filter keeps, and how many each filter would keep. */
function filtered(rows, query, names) {
  const there = rows.filter((row) => row.mark !== "."), what = names.includes(query.what) ? query.what : "";
  const keep = (name) => there.filter((row) => filters[name][1](row.mark, row.full));
  return { there, what, rows: keep(what), counts: Object.fromEntries(names.map((name) => [name, keep(name).length])) };
}

async function showCell(number, query) {
  const cell = data.cells[number];
  if (!cell) throw new Error("There is no such cell.");
  const at = tableOf(number), facts = [title(cell), ...cellFacts(cell)].join("; ");
  if (at < 0) { showMeanCell(number, facts); return; }
  const table = await outcomesOf(at), { lengths } = await ofRun(`cell/${number}`);
  const full = table.full === number ? null : table.marks[table.full];
  const rows = [...table.marks[number]].map((mark, place) => {
    const problem = Math.floor(place / table.samples), sample = place % table.samples;
    const tokens = `${whole(lengths[place])} tokens`;
    return { cell: number, problem, sample, mark, full: full?.[place], more: [tokens, full?.[place] ? `full: ${marks[full[place]]}` : ""] };
  });
  const names = Object.keys(filters).filter((name) => name !== "lost" || full);
  const shown = filtered(rows, query, names);
  show("list", nameOf(number), [[state.run, to(state.run)], [cell.short, ""]]);
  byId("list-map").replaceChildren(...mapAround(number));
  byId("list-controls").replaceChildren(filterChoice(shown.what, shown.counts, to(state.run, "cell", number)));
  byId("list-said").textContent = `${facts}. ${whole(shown.rows.length)} of ${whole(shown.there.length)} traces. ${heldOf(shown.there)}`;
  /* Lost ones come first, and of others those that can be read. */
  const rank = (row) => 2 * filters.lost[1](row.mark, row.full) + holds(row.cell, row.problem, row.sample);
  drawRows(shown.rows.sort((a, b) => rank(b) - rank(a)), ["New tokens", "Full cache"]);
}

/* A cell of a mean leads to the same setting's cells on each benchmark. */
function showMeanCell(number, facts) {
  const { name, model } = data.cells[number];
  show("list", nameOf(number), [[state.run, to(state.run)], [data.cells[number].short, ""]]);
  byId("list-map").replaceChildren(...mapAround(number));
  byId("list-controls").replaceChildren();
  byId("list-said").textContent = `${facts}. The same setting on each benchmark:`;
  const same = [...data.cells.entries()].filter(([index, cell]) => cell.name === name && cell.model === model && tableOf(index) >= 0);
  byId("list-rows").replaceChildren(el("ul", {}, ...same.map(([index, cell]) => el("li", {}, link(to(state.run, "cell", index), `${cell.benchmark}: ${fixed(cell.value)}`)))));
}

async function showProblem(at, index, query) {
  const problem = data.outcomes[at]?.problems[index];
  if (!known(problem)) throw new Error("There is no such problem.");
  const table = await outcomesOf(at), places = [...Array(table.samples).keys()];
  const rows = table.rows.flatMap((cell) => places.map((sample) => ({ cell, problem: index, sample, mark: table.marks[cell][index * table.samples + sample], more: [data.cells[cell].short] })));
  const shown = filtered(rows, query, Object.keys(filters).filter((name) => name !== "lost"));
  show("list", `${table.short} | ${table.benchmark} | ${problem}`, [[state.run, to(state.run)], ["Problems", to(state.run, "compare")], [problem, ""]]);
  byId("list-map").replaceChildren(...mosaic(table, index));
  byId("list-controls").replaceChildren(filterChoice(shown.what, shown.counts, to(state.run, "problem", at, index)));
  byId("list-said").textContent = `${whole(shown.counts.right)} of ${whole(shown.there.length)} traces are right. ${heldOf(shown.there)}`;
  drawRows(shown.rows, ["Setting"]);
  const { question, reference } = (await ofRun(`questions/${at}`)).problems[index] ?? {};
  if (question) byId("list-map").append(mazeOf(question, [["reference", reference]]) ?? el("p", { class: "question" }, question));
}

async function showFound(given) {
  /* Without a search, lost traces come first. */
  const query = { ...given, what: given.what ?? (given.text ? "" : "lost") };
  show("list", query.text ? "Search" : "Traces", [[state.run, to(state.run)], ["Traces", ""]]);
  for (const id of ["list-map", "list-rows"]) byId(id).replaceChildren();
  const tables = data.outcomes.map((table, index) => [String(index), `${table.short} | ${table.benchmark}`]);
  const again = (change) => lead(withQuery(to(state.run, "find"), { ...query, ...change }));
  byId("list-controls").replaceChildren(
    choice("In", [["", "the whole run"], ...tables], query.table ?? "", (table) => again({ table })),
    choice("Show", Object.entries(filters).map(([name, [text]]) => [name || "all", text.replace("the full cache", data.reference)]), query.what || "all", (what) => again({ what })));
  await found({ ...query, what: query.what === "all" ? "" : query.what }, (hits, { seen, total, rest }) => {
    const among = documents && total < data.done ? `among the ${whole(total)} traces in this file; kvatlas view ${data.folder} searches all ${whole(data.done)}` : "all looked at";
    const share = seen < total ? `${whole(seen)} of ${whole(total)} looked at` : among;
    byId("list-said").textContent = `${plural(hits.length, "trace")} found; ${share}${rest ? ", the rest is left out" : ""}.`;
    const of = ([cell]) => (!view.model || data.cells[cell].model === view.model) && (!view.policy || data.cells[cell].policy === view.policy);
    const row = ([cell, problem, sample, mark, around, lost]) => ({ cell, problem, sample, mark, lost, more: [nameOf(cell), ...(query.text ? [`… ${around} …`] : [])] });
    const rows = hits.filter(of).map(row);
    if (query.what === "lost" && !query.text) drawLost(rows);
    else drawRows(rows, ["Cell", ...(query.text ? ["Text"] : [])]);
  });
}

/* -- routing and following ----------------------------------------------------------------------------------------- */

async function guarded(job) {
  try { await job(); } catch (error) { if (!(error instanceof Late)) byId("failure").textContent = error.message; }
}

async function open(parts, query, fresh) {
  /* A list of one run says nothing that its page does not. */
  if (!parts.length && state.runs.length === 1) parts = [state.runs[0].name];
  if (!parts.length) {
    state.run = null;
    showRuns();
    return;
  }
  await useRun(parts[0]);
  const [, kind, ...rest] = parts;
  if (!kind || kind === "map" || (kind in tabs && kind !== "find")) await showRun(parts, query, fresh);
  else if (kind === "cell") await showCell(numbered(rest[0], "cell"), query);
  else if (kind === "problem") await showProblem(numbered(rest[0], "table"), numbered(rest[1], "problem"), query);
  else if (kind === "trace") {
    const place = rest.slice(0, 3).map((part) => numbered(part, "trace"));
    await showTrace([...place, known(rest[3]) ? numbered(rest[3], "token") : null], query);
  } else if (kind === "find") await showFound(query);
  else throw new Error("There is no such page.");
}

async function route(fresh = true) {
  const turn = ++state.turn, { parts, query } = here();
  hideTip();
  view.read(query);
  if (fresh) byId("live").textContent = "Loading …";
  await guarded(() => open(parts, query, fresh));
  if (turn !== state.turn) return;
  if (fresh && parts[1] !== "map" && !known(parts[5])) window.scrollTo(0, 0);
  if (fresh) byId("main").focus({ preventScroll: true });
  sayProgress();
}

function sayProgress() {
  const run = state.runs.find((one) => one.name === state.run);
  byId("live").replaceChildren(run ? progress(run) : "");
}

/* While a sweep writes, all pages but a trace and a search follow. */
async function follow() {
  try {
    const before = new Map(state.versions);
    state.runs = await fetched("runs");
    for (const run of state.runs) state.versions.set(run.name, run.version);
    const { parts } = here(), names = parts.length ? [parts[0]] : state.runs.map((run) => run.name);
    const changed = before.size && names.some((name) => before.get(name) !== state.versions.get(name));
    if (changed && !["trace", "find"].includes(parts[1])) {
      await route(false);
      const again = state.focused && document.querySelector(`td[data-cell="${state.focused}"]`);
      again?.closest("details")?.setAttribute("open", "");
      again?.focus({ preventScroll: true });
    }
    sayProgress();
  } catch (error) { byId("live").textContent = live ? "The server does not answer." : error.message; }
  if (live) setTimeout(follow, document.hidden ? 10_000 : 1_500);
}

window.addEventListener("hashchange", () => route());
follow().then(() => route());
