/* The part for a decision: what a setting saves on a card, computed here, and what it loses, measured by the run. */
const decision = { model: 0, setting: 0, sizes: null, card: null, memory: null, bandwidth: null, tokens: null };

/* Requests at a time and tokens a second of a card, for requests of so many cached bytes each. A step reads the weights
   and all cached bytes once. */
function onCard(requestBytes, weights, requests = null) {
  const memory = decision.memory * 2 ** 30 * data.decision.filled, rate = decision.bandwidth * 1e12 * data.decision.bandwidth_share;
  const fitting = Math.max(0, Math.floor((memory - weights) / requestBytes)), count = requests ?? fitting;
  const seconds = (weights + count * requestBytes) / rate;
  return { fitting, seconds, tokens: fitting ? fitting / ((weights + fitting * requestBytes) / rate) : 0 };
}

/* The sizes that savings can be computed for: those of the model itself, if they are known, and published ones. */
function sizesOf(model) {
  const own = model.own ? [{ ...model.own, name: model.short }] : [];
  return model.is_large && own.length ? [...own, ...data.decision.sizes] : [...data.decision.sizes, ...own];
}

/* Choose a card, the sizes of a model, or one of the run's models, and the numbers that come with it. */
function chooseCard(name) {
  const card = data.decision.cards.find((one) => one.name === name);
  decision.card = name;
  if (card) Object.assign(decision, { memory: card.memory, bandwidth: card.bandwidth });
}
function chooseSizes(name) {
  const sizes = sizesOf(data.decision.models[decision.model]), chosen = sizes.find((one) => one.name === name) ?? sizes[0];
  Object.assign(decision, { sizes: chosen.name, tokens: Math.round(chosen.tokens) });
}
function chooseModel(number) {
  Object.assign(decision, { model: number, setting: 0 });
  chooseSizes(decision.sizes);
}

function drawDecision() {
  const { models, cards, usual_card } = data.decision;
  if (!models[decision.model]) decision.model = 0;
  if (decision.card === null) chooseCard(usual_card);
  const wanted = models.findIndex((model) => model.model === view.model);
  if (wanted >= 0 && wanted !== decision.model) chooseModel(wanted);
  if (!decision.sizes) chooseModel(decision.model);
  const model = models[decision.model];

  const after = (change) => (value) => { change(value); drawDecision(); };
  const card = choice("Card", [...cards.map(({ name }) => [name, name]), ["", "your own"]], decision.card, after(chooseCard));
  /* A number that is typed: the controls stay as they are, so that the next one can be typed. */
  const number = (label, name, least) => {
    const input = el("input", { type: "number", min: least, step: "any", value: decision[name] });
    input.addEventListener("change", () => {
      if (!(Number(input.value) > 0)) return;
      decision[name] = Number(input.value);
      if (name !== "tokens") decision.card = card.querySelector("select").value = "";
      drawDecisionParts(model);
    });
    return el("label", {}, label, input);
  };
  byId("decision-controls").replaceChildren(
    choice("Model", models.map((one, index) => [String(index), one.short]), String(decision.model), after((value) => chooseModel(Number(value)))),
    choice("Setting", model.settings.map((one, index) => [String(index), data.cells[one.cell].short]), String(decision.setting), after((value) => { decision.setting = Number(value); })),
    card, number("GiB", "memory", 1), number("TB/s", "bandwidth", 0.01),
    choice("Sizes of", sizesOf(model).map(({ name }) => [name, name]), decision.sizes, after(chooseSizes)),
    number("Tokens of a request", "tokens", 1),
    el("button", { onclick: () => print() }, "Print"));
  drawDecisionParts(model);
}

function drawDecisionParts(model) {
  const setting = model.settings[decision.setting], sizes = sizesOf(model).find(({ name }) => name === decision.sizes);
  const numbers = savingsOf(setting, sizes);
  const heading = decisionHeading(model, setting, sizes, numbers);
  byId("heading").textContent = heading;
  document.title = `${heading} | kvatlas`;
  byId("decision-parts").replaceChildren(savingsPart(model, setting, sizes, numbers), lossPart(model, setting));
}

/* What the full cache and the setting take and allow on the card. */
function savingsOf(setting, sizes) {
  const fullBytes = decision.tokens * sizes.token_bytes, full = onCard(fullBytes, sizes.weights);
  const ownBytes = fullBytes * setting.memory, own = onCard(ownBytes, sizes.weights);
  return { fullBytes, ownBytes, full, own, sameLoad: onCard(ownBytes, sizes.weights, full.fitting) };
}

const cardName = () => decision.card || `a card of ${brief(decision.memory)} GiB and ${brief(decision.bandwidth)} TB/s`;

/* The finding in a sentence, of the measured model alone: what a card allows is in its own sentence if the model's sizes are chosen. */
function decisionHeading(model, setting, sizes, { full, own }) {
  const margin = plural(model.margin, "point"), isKept = setting.claims.some((claim) => claim[2]), isBroken = setting.claims.some((claim) => claim[3]);
  const standing = isKept ? `proven to lose at most ${margin}` : isBroken ? `proven to lose more than ${margin}` : `not proven to lose at most ${margin}`;
  const saved = `${fixed(100 * (1 - setting.memory), 0)} % less KV memory`;
  const allows = full.fitting && sizes.name === model.short ? `; ${whole(own.fitting)} requests at a time instead of ${whole(full.fitting)} on ${cardName()} (computed)` : "";
  return `${data.cells[setting.cell].short} on ${model.short}: ${standing}, ${saved} (measured)${allows}`;
}

function savingsPart(model, setting, sizes, { fullBytes, ownBytes, full, own, sameLoad }) {
  const cell = data.cells[setting.cell], fullCell = data.cells[model.full];
  const gib = (bytes) => (bytes >= 2 ** 30 ? `${fixed(bytes / 2 ** 30, 2)} GiB` : `${precise(bytes / 2 ** 20)} MiB`);
  const rounded = (value) => whole(Number(value.toPrecision(3))), ratio = (a, b) => (a && b ? `× ${(b / a).toFixed(2)}` : "–");
  const milliseconds = (seconds) => `${precise(1000 * seconds)} ms`;
  const rows = [
    ["KV cache of a request", gib(fullBytes), gib(ownBytes), ratio(fullBytes, ownBytes)],
    ["Requests at a time", whole(full.fitting), whole(own.fitting), ratio(full.fitting, own.fitting)],
    ["Tokens a second, card full", rounded(full.tokens), rounded(own.tokens), ratio(full.tokens, own.tokens)],
    [`Time of a token, ${plural(full.fitting, "request")}`, milliseconds(full.seconds), milliseconds(sameLoad.seconds), ratio(full.seconds, sameLoad.seconds)],
  ];
  const written = [fullCell?.output, cell.output];
  if (written.every(known)) rows.push(["New tokens of an answer (measured)", whole(written[0]), whole(written[1]), ratio(...written)]);

  const times = [fullCell?.seconds, cell.seconds];
  if (times.every(known)) rows.push(["Seconds of an answer (measured here, this run's machine)", ...times.map(precise), ratio(...times)]);

  const words = [`The setting: ${cell.name}.`, `${sizes.name} on ${cardName()}: ${brief(decision.memory)} GiB, ${brief(decision.bandwidth)} TB/s; ${gib(sizes.weights)} of weights, ${whole(sizes.token_bytes)} bytes a cached token, ${whole(decision.tokens)} cached tokens a request with the full cache.`];
  if (sizes.name !== model.short) {
    words.push(`The losses and the share of memory, ${fixed(100 * setting.memory)} %, were measured on ${model.short}; the sizes are computed for ${sizes.name}. What ${sizes.name} loses is not known: run it. Share and loss depend on how long traces are beside the KV budget, and are not computed for other lengths.`);
  }
  if (full.fitting > 1000) words.push("So many requests are limited by computing, not by memory: take a larger model's sizes.");
  if (!full.fitting) words.push("The full cache of one request does not fit beside the weights.");
  words.push(`Requests: ${fixed(100 * data.decision.filled, 0)} % of the memory without the weights, over the KV cache of a request. Tokens a second: a step reads the weights and all KV caches once, at ${fixed(100 * data.decision.bandwidth_share, 0)} % of the bandwidth (57 to 69 % were measured on one H200).`);
  return el("section", { "aria-labelledby": "decision-saves" }, el("h3", { id: "decision-saves" }, sizes.name === model.short ? "What is saved: computed, not measured" : `What is saved: computed for ${sizes.name}, which was not run`),
    el("div", { class: "scroll", tabindex: 0 }, listTable("What is saved", ["On this card", "Full cache", "This setting", "Ratio"], rows, [1, 2, 3])),
    ...words.map((text) => el("p", { class: "soft" }, text)));
}

function lossPart(model, setting) {
  const [value, low, high] = setting.loss.map((points) => pointsLost(points));
  const standing = (isKept, isBroken) => (isKept ? "yes" : isBroken ? "no: proven to lose more" : setting.untested ? "not tested" : "open");
  const rows = setting.claims.map(([words, limit, isKept, isBroken]) => [`On ${words}`, pointsLost(limit), standing(isKept, isBroken)]);
  return el("section", { "aria-labelledby": "decision-loses" }, el("h3", { id: "decision-loses" }, `What is lost: measured on ${model.short}, ${listed(data.benchmarks)}`),
    el("p", { class: "large" }, `${value} ${setting.loss[0] === 1 ? "point" : "points"} of ${data.metric}`, el("small", {}, ` 95 %: ${low} to ${high}`)),
    listTable("What is lost by each claim", ["Claim", "Loses at most", `Proven within ${brief(model.margin)}`], rows, [1]),
    el("h3", {}, "The chance of a wrong choice"), el("p", {}, setting.risk),
    el("h3", {}, "What was not measured"), el("ul", { class: "words" }, ...model.unmeasured.map((text) => el("li", {}, text))));
}
