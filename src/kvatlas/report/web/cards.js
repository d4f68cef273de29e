/* The verdict, first of all: for each model what to choose, what it saves and what it loses. */
function drawCards() {
  byId("verdicts").replaceChildren(...data.cards.map(verdictCard));
}

function verdictCard(card) {
  const cell = known(card.cell) ? data.cells[card.cell] : null;
  const numbers = [];
  if (cell && known(card.saved)) numbers.push(["KV memory saved", `${fixed(card.saved)} %`, `${whole(cell.kept)} tokens cached on average`]);
  if (card.loss) numbers.push(["points lost", signed(card.loss[0]), `95 %: ${signed(card.loss[1])} to ${signed(card.loss[2])}; the margin is ${brief(card.margin)}`]);
  if (cell) numbers.push([data.metric, fixed(cell.value), between(cell.low, cell.high)]);
  return el("article", { class: "card" }, el("h3", {}, `${card.model} | ${card.benchmark}`),
    card.shown ? null : el("p", { class: "setting" }, `No setting is proven to stay within ${brief(card.margin)} points of the full cache`),
    cell && !card.shown ? el("p", { class: "closest" }, "The least loss:") : null,
    cell ? el("p", { class: "setting" }, el("button", { onclick: () => go.cell(card.cell) }, cell.short)) : null,
    el("dl", {}, ...numbers.map(([name, value, about]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, about))))),
    el("p", { class: "soft" }, card.words));
}
