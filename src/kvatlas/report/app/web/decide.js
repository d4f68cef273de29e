/* The part for a decision: what a setting saves and loses, measured by the run, and what a card allows, computed here. */
const decision = { model: 0, setting: null, card: null, memory: null, bandwidth: null };

/* Requests at a time and tokens a second of a card, for requests of so many cached bytes each. A step reads the weights
   and all cached bytes once. */
function onCard(requestBytes, weights, requests = null) {
  const memory = decision.memory * 2 ** 30 * data.decision.filled, rate = decision.bandwidth * 1e12 * data.decision.bandwidth_share;
  const fitting = Math.max(0, Math.floor((memory - weights) / requestBytes)), count = requests ?? fitting;
  const seconds = (weights + count * requestBytes) / rate;
  return { fitting, seconds, tokens: fitting ? fitting / ((weights + fitting * requestBytes) / rate) : 0 };
}

function chooseCard(name) {
  const card = data.decision.cards.find((one) => one.name === name);
  decision.card = name;
  if (card) Object.assign(decision, { memory: card.memory, bandwidth: card.bandwidth });
}

/* The card of a model, and its settings of which the memory is known. */
const cardOf = (model) => data.cards[model.card];
const settingsWithMemory = (model) => cardOf(model).rows.filter((row) => known(row.memory));
const offered = (model) => settingsWithMemory(model).find((row) => row.cell === cardOf(model).cell) ?? settingsWithMemory(model)[0];

/* One model and setting by choice; beside the answer, for paper, what is offered for each model. */
function drawDecision(tab) {
  const models = data.decision.models.filter((model) => settingsWithMemory(model).length), { cards, usual_card } = data.decision;
  if (decision.card === null) chooseCard(usual_card);
  if (tab !== "decide") {
    const shown = models.filter((model) => !view.model || cardOf(model).model === shortOf(view.model));
    byId("decision-parts").replaceChildren(...shown.flatMap((model) => [el("h2", {}, decisionHeading(model, offered(model))), ...decisionParts(model, offered(model))]),
      ...(shown.length ? [unmeasuredPart(shown[0])] : []));
    return;
  }
  const wanted = models.findIndex((model) => view.model && cardOf(model).model === shortOf(view.model));
  if (wanted >= 0) decision.model = wanted;
  const model = models[decision.model] ?? models[0], settings = settingsWithMemory(model);
  const setting = settings.find((row) => row.cell === decision.setting) ?? offered(model);

  const drawParts = () => byId("decision-parts").replaceChildren(...decisionParts(model, setting), unmeasuredPart(model));
  const after = (change) => (value) => { change(value); drawDecision(tab); };
  const controls = [
    choice("Model", models.map((one, index) => [String(index), cardOf(one).model]), String(models.indexOf(model)), after((value) => { decision.model = Number(value); })),
    choice("Setting", settings.map((row) => [String(row.cell), data.cells[row.cell].short]), String(setting.cell), after((value) => { decision.setting = Number(value); })),
  ];
  /* A number that is typed: the controls stay as they are, so that the next one can be typed. */
  const card = choice("Card", [...cards.map(({ name }) => [name, name]), ["", "your own"]], decision.card, after(chooseCard));
  const number = (label, name, least) => {
    const input = el("input", { type: "number", min: least, step: "any", value: decision[name] });
    input.addEventListener("change", () => {
      if (!(Number(input.value) > 0)) return;
      decision[name] = Number(input.value);
      decision.card = card.querySelector("select").value = "";
      drawParts();
    });
    return el("label", {}, label, input);
  };
  if (isOnCard(model)) controls.push(card, number("GiB", "memory", 1), number("TB/s", "bandwidth", 0.01));
  byId("decision-controls").replaceChildren(...controls, el("button", { onclick: () => print() }, "Print"));
  const heading = decisionHeading(model, setting);
  byId("heading").textContent = heading;
  document.title = `${heading} | kvatlas`;
  drawParts();
}

/* Whether a card would be filled by the memory of a model: one that is known, and large. */
const isOnCard = (model) => known(model.weights) && known(model.token_bytes) && known(model.tokens);
const cardName = () => decision.card || `a card of ${brief(decision.memory)} GiB and ${brief(decision.bandwidth)} TB/s`;

const decisionParts = (model, setting) => [savingsPart(model, setting), lossPart(model, setting)];
const unmeasuredPart = (model) => el("section", { class: "wide" }, el("h3", {}, "What was not measured"), el("ul", { class: "words" }, ...model.unmeasured.map((text) => el("li", {}, text))));

function decisionHeading(model, setting) {
  const card = cardOf(model), margin = plural(card.margin, "point"), isKept = setting.claims.some((claim) => claim[2]), isBroken = setting.claims.some((claim) => claim[3]);
  const standing = isKept ? `proven to lose at most ${margin}` : isBroken ? `proven to lose more than ${margin}` : `not proven to lose at most ${margin}`;
  return `${data.cells[setting.cell].short} on ${card.model}: ${standing}, ${fixed(100 * (1 - setting.memory), 0)} % less KV memory`;
}

const timesText = (a, b) => (a && b ? `× ${(b / a).toFixed(2)}` : "–");

function savingsPart(model, setting) {
  const cell = data.cells[setting.cell], fullCell = data.cells[model.full], { model: name } = cardOf(model);
  const rows = [["KV memory of a request", "100 %", `${fixed(100 * setting.memory)} %`, timesText(1, setting.memory)]];
  for (const [label, column, shown] of [["Cached tokens, mean", "kept", whole], ["New tokens of an answer", "output", whole], ["Seconds of an answer, on this run's machine", "seconds", precise]]) {
    const values = [fullCell?.[column], cell[column]];
    if (values.every(known)) rows.push([label, ...values.map(shown), timesText(...values)]);
  }
  const table = (caption, shown) => el("div", { class: "scroll", tabindex: 0 }, listTable(caption, [caption, "Full cache", "This setting", "Ratio"], shown, [1, 2, 3]));
  return el("section", {}, el("h3", {}, `What is saved: measured on ${name}`), table("Measured", rows), el("p", { class: "soft" }, `The setting: ${cell.name}.`),
    ...(isOnCard(model) ? cardParts(model, setting, table) : [el("p", { class: "soft" },
      `What a card holds and writes is computed for models of a gigabyte or more that were run. ${name} is smaller, or its size is not known, and what it saves is not what a larger model saves.`)]));
}

/* What the full cache and the setting take and allow on a card, by the sizes and the share of memory of a model that was run. */
function cardParts(model, setting, table) {
  const gib = (bytes) => (bytes >= 2 ** 30 ? `${fixed(bytes / 2 ** 30, 2)} GiB` : `${precise(bytes / 2 ** 20)} MiB`);
  const rounded = (value) => whole(Number(value.toPrecision(3))), milliseconds = (seconds) => `${precise(1000 * seconds)} ms`;
  const fullBytes = model.tokens * model.token_bytes, full = onCard(fullBytes, model.weights);
  const ownBytes = fullBytes * setting.memory, own = onCard(ownBytes, model.weights), sameLoad = onCard(ownBytes, model.weights, full.fitting);
  const rows = [
    ["KV cache of a request", gib(fullBytes), gib(ownBytes), timesText(fullBytes, ownBytes)],
    ["Requests at a time", whole(full.fitting), whole(own.fitting), timesText(full.fitting, own.fitting)],
    ["Tokens a second, card full", rounded(full.tokens), rounded(own.tokens), timesText(full.tokens, own.tokens)],
    [`Time of a token, ${plural(full.fitting, "request")}`, milliseconds(full.seconds), milliseconds(sameLoad.seconds), timesText(full.seconds, sameLoad.seconds)],
  ];
  const words = [`${gib(model.weights)} of weights, ${whole(model.token_bytes)} bytes a cached token, ${whole(model.tokens)} cached tokens a request with the full cache, as in this run. ` +
    `Requests: ${fixed(100 * data.decision.filled, 0)} % of the memory without the weights, over the KV cache of a request. Tokens a second: a step reads the weights and all KV caches once, at ${fixed(100 * data.decision.bandwidth_share, 0)} % of the bandwidth (57 to 69 % were measured on one H200).`];
  if (full.fitting > 1000) words.push("So many requests are limited by computing, not by memory.");
  if (!full.fitting) words.push("The full cache of one request does not fit beside the weights.");
  return [el("h3", {}, `On ${cardName()}: computed, not measured`), table("Computed", rows), ...words.map((text) => el("p", { class: "soft" }, text))];
}

function lossPart(model, setting) {
  const [value, low, high] = setting.loss.map((points) => pointsLost(points)), card = cardOf(model);
  const standing = (isKept, isBroken) => (isKept ? "yes" : isBroken ? "no: proven to lose more" : setting.state === "untested" ? "not tested" : "open");
  const rows = setting.claims.map(([words, limit, isKept, isBroken]) => [`On ${words}`, pointsLost(limit), standing(isKept, isBroken)]);
  return el("section", {}, el("h3", {}, `What is lost: measured on ${card.model}, ${listed(data.benchmarks)}`),
    el("p", { class: "large" }, `${value} ${setting.loss[0] === 1 ? "point" : "points"} of ${data.metric}`, el("small", {}, ` 95 %: ${low} to ${high}`)),
    listTable("What is lost by each claim", ["Claim", "Loses at most", `Proven within ${brief(card.margin)}`], rows, [1]),
    el("h3", {}, "The chance of a wrong choice"), el("p", {}, setting.risk));
}
