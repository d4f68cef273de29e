"""The numbers of docs/findings/saving-tokens.md from the outcomes of autopsies with equal arms.

The document has for each model the outcomes of every arm of every lost answer as bits. Its `numbers` are the summary
of `kvatlas autopsy`, the p-values of all differences of a family of models after Holm, and, of the answers that the
cause saves in at least half of the streams more than random sets do, those that no compression to the end saves no
better than nothing.
"""

from __future__ import annotations

from kvatlas.autopsy.autopsies import Autopsy, SavingToken
from kvatlas.autopsy.summary import ARMS, summarise, tested_causes
from kvatlas.stats.numerics.arrays import holm
from outcomes import Json

PAGES = ("docs/findings/saving-tokens.md",)
#: Models whose differences are tested as one family.
FAMILIES = (("tiny-llama", "tiny-qwen"), ("smollm2",))
#: The rows of the page's table: arms, then differences.
ARM_NAMES = {
    "nothing": "nothing put back",
    "random": "random tokens",
    "kind": "others of their kinds",
    "cause": "**saving tokens**",
    "no_compression": "no compression from there on",
    "cause_until_death": "saving tokens until the death",
    "no_compression_until_death": "no compression until the death",
}
#: The differences of the page, by the names of their arms.
ROWS = (
    ("cause", "random", "**saving over random, points**"),
    ("cause", "kind", "**saving over others of their kinds**"),
    ("kind", "random", "others of their kinds over random"),
    ("cause", "nothing", "saving over nothing"),
    ("no_compression", "cause", "no compression over saving"),
    ("cause_until_death", "no_compression_until_death", "until the death: saving over no compression"),
)


def autopsy_of(document: Json) -> Autopsy:
    """Return the autopsy of a compact document."""
    values = dict(document)
    values["key"] = ("", "", "", values.pop("problem"), "0")
    values["token"] = None
    values["random"] = flags(values["random"])
    values["held_out"] = {arm: flags(right) for arm, right in values["held_out"].items()}
    for name in ("control", "control_replays"):
        del values[name]
    values["tokens"] = tuple(SavingToken(*token) for token in values["tokens"])
    return Autopsy(**values)


def flags(text: str) -> tuple[bool, ...]:
    return tuple(digit == "1" for digit in text)


def numbers_of(outcomes: Json) -> Json:
    """Return the summary of each model, and the p-values of all differences of each family after Holm."""
    numbers = {}
    for model, found in outcomes.items():
        autopsies = list(map(autopsy_of, found["autopsies"]))
        summary = summarise(autopsies, found["lost"] / found["answers"])
        numbers[model] = {"summary": summary, "strong": strong_causes(autopsies)}

    for family in FAMILIES:
        models = [model for model in family if model in numbers]
        places = [(model, f"{first}_over_{second}") for model in models for first, second, _ in ROWS]
        adjusted = holm([numbers[model]["summary"]["held_out"][name]["p"] for model, name in places])
        for (model, name), p in zip(places, adjusted, strict=True):
            numbers[model]["summary"]["held_out"][name]["adjusted_p"] = round(p, 5)
    return numbers


def strong_causes(autopsies: list[Autopsy]) -> dict[str, int]:
    """Return how many causes save in half of the streams more than random sets, and what other arms do there."""
    strong = []
    for item in tested_causes(autopsies):
        right = {arm: sum(item.held_out[arm]) for arm in ARMS}
        if right["cause"] - right["random"] >= len(item.held_out["cause"]) / 2:
            strong.append(right)
    return {
        "answers": len(strong),
        "no_compression_at_most_2_above_nothing": sum(r["no_compression"] - r["nothing"] <= 2 for r in strong),
        "until_death_at_most_2_above_nothing": sum(r["no_compression_until_death"] - r["nothing"] <= 2 for r in strong),
        "cause_until_death_at_most_2_above_nothing": sum(r["cause_until_death"] - r["nothing"] <= 2 for r in strong),
        "alike_for_good_and_until_death": sum(
            item.held_out["cause"] == item.held_out["cause_until_death"] for item in tested_causes(autopsies)
        ),
    }


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    summaries = [found["summary"] for found in numbers.values()]
    tests = [summary["held_out"] for summary in summaries]

    def row(name: str, cells: list[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    rows = [
        row("lost answers, all decoded again alike", [str(summary["reproduced"]) for summary in summaries]),
        row("with a cause of at most 8 tokens, %", [limits(one["cause_of_at_most"]["8"]) for one in summaries]),
        row("by luck alone, %", [f"{summary['by_luck']:.1f}" for summary in summaries]),
        row("tested causes", [str(test["answers"]) for test in tests]),
    ]
    rows += [row(f"{name}, % right", [limits(test["right"][arm]) for test in tests]) for arm, name in ARM_NAMES.items()]
    for first, second, name in ROWS:
        differences = [test[f"{first}_over_{second}"] for test in tests]
        rows.append(row(name, [limits(one) + (" *" if one["adjusted_p"] <= 0.05 else "") for one in differences]))
    rows.append(row("causes proven alone", [f"{test['proven_alone']} of {test['answers']}" for test in tests]))
    rows.append(row("saving over random, of all lost answers, points", [limits(test["of_all_lost"]) for test in tests]))
    rows.append(row("room, points of Pass@1", [limits(test["room"]) for test in tests]))
    return rows


def limits(values: Json) -> str:
    return f"{values['value']:.1f} ({values['low']:.1f} to {values['high']:.1f})"
