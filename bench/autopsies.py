"""Autopsies with equal arms on problems that no run had decoded, and the outcomes behind each of their numbers.

    python bench/autopsies.py --decode tiny-llama tiny-qwen --runs runs/equal-arms
    python bench/autopsies.py --runs runs/equal-arms --out bench/results/equal_arms.json

`--decode` decodes or resumes a sweep of each named model and examines its lost answers; the predictions are in the
predictions.md of recipes/embedded and recipes/smollm. The document has for each model the outcomes of every arm of
every lost answer as bits, and the `numbers` that docs/findings/saving-tokens.md quotes: the summary of `kvatlas
autopsy`, the p-values of all differences of a family of models after Holm, and, of the answers that the cause saves
in at least half of the streams more than random sets do, those that no compression to the end saves no better than
nothing.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas.autopsy.autopsies import Autopsy, SavingToken, key_of, read_autopsies
from kvatlas.autopsy.driver import find_lost, perform
from kvatlas.autopsy.summary import ARMS, held_out_text, summarise, tested_causes
from kvatlas.core import Setting, grouped
from kvatlas.stats.numerics.multiple import holm
from kvatlas.sweeps import make_plan, sweep
from kvatlas.sweeps.spec import parse_spec
from outcomes import Json

PAGES = ("docs/findings/saving-tokens.md",)


@dataclass(frozen=True)
class Grid:
    """One model under one setting of `dynts`, on `problems` from number `first` on; a family is tested as one."""

    model: str
    family: str
    benchmark: str
    first: int
    problems: int
    setting: Json
    weights: str = "auto"


def embedded(model: str) -> Grid:
    return Grid(model, "embedded", "CHAIN8-12", 3000, 240, {"kv_budget": 288, "local_window": 32, "ratio": 0.1})


THINKING = {"ratio_over": "thinking", "budget_over": "thinking"}
GRIDS = {
    "tiny-llama": embedded("embedded:tiny-llama"),
    "tiny-qwen": embedded("embedded:tiny-qwen"),
    "smollm2": Grid(
        "smollm2-135m-think",
        "smollm",
        "WORDS6-8",
        3200,
        60,
        {"kv_budget": 192, "local_window": 16, "ratio": 0.1, **THINKING},
        weights="bfloat16",
    ),
}
#: Lost answers that are examined of each model at most.
MOST = 100
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


def decode(grid: Grid, run: Path) -> None:
    document = {
        "models": [{"model": grid.model, "weights": grid.weights} if grid.weights != "auto" else grid.model],
        "benchmarks": [grid.benchmark],
        "problems": grid.first + grid.problems,
        "seed": 11,
        "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 500},
        "baseline": [{"policy": "full"}],
        "settings": [{"policy": "dynts", **grid.setting}],
    }
    plan = make_plan(parse_spec(document))
    problems = {name: found[grid.first :] for name, found in plan.problems.items()}
    sweep(replace(plan, problems=problems), run, workers=1, on_message=print)
    perform(find_lost(run, Setting.from_parameters("dynts", **grid.setting)), run, MOST, tell)


def tell(examined: Autopsy, done: int, total: int) -> None:
    print(f"{done}/{total} {examined.key[3]}: {examined.cause_text}{held_out_text(examined)}", flush=True)


def outcomes_of(grid: Grid, folder: Path) -> Json:
    """Return the outcomes of the autopsies of a run of one model."""
    (cell,) = find_lost(folder, Setting.from_parameters("dynts", **grid.setting))
    found = read_autopsies(folder)
    # Short searches finish first: after a stop only the answers before the first missing one are no choice by that.
    keys = takewhile(found.__contains__, map(key_of, cell.lost[:MOST]))
    return {
        "benchmark": cell.benchmark,
        "setting": str(cell.setting),
        "answers": cell.answers,
        "lost": len(cell.lost),
        "autopsies": [compact(found[key]) for key in keys],
    }


def compact(autopsy: Autopsy) -> Json:
    """Return an autopsy with its outcomes as bits, without what no number is made of."""
    document = dataclasses.asdict(autopsy)
    for name in ("key", "version", "random_positions", "kept_by_others", "token"):
        del document[name]
    document["problem"] = autopsy.problem
    document["random"] = bits(autopsy.random)
    for name in ("held_out", "control"):
        document[name] = {arm: bits(right) for arm, right in document[name].items()}
    document["tokens"] = [list(dataclasses.astuple(token)) for token in autopsy.tokens]
    return document


def bits(outcomes: tuple[bool, ...]) -> str:
    return "".join("01"[right] for right in outcomes)


def autopsy_of(document: Json) -> Autopsy:
    """Return the autopsy of a compact document."""
    values = dict(document)
    values["key"] = ("", "", "", values.pop("problem"), "0")
    values["token"] = None
    values["random"] = flags(values["random"])
    for name in ("held_out", "control"):
        values[name] = {arm: flags(right) for arm, right in values[name].items()}
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
        # What other settings keep was not asked.
        del summary["kept_by_others"]
        numbers[model] = {"summary": summary, "strong": strong_causes(autopsies)}

    for models in grouped(list(numbers), lambda model: GRIDS[model].family).values():
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
    like = [summary["in_right_answers"]["like_over_nothing"] for summary in summaries]
    rows.append(row("like tokens in right answers, points", list(map(limits, like))))
    return rows


def limits(values: Json) -> str:
    return f"{values['value']:.1f} ({values['low']:.1f} to {values['high']:.1f})"


def main() -> None:
    options = arguments(__doc__, runs=Path("runs/equal-arms"), decode=[""])
    asked = [name for name in options.decode if name]
    for name in asked:
        decode(GRIDS[name], options.runs / name)
    if asked:
        return

    # A model whose run is not here keeps the outcomes that the document has.
    outcomes: dict[str, Any] = {}
    if options.out is not None and options.out.is_file():
        outcomes = json.loads(options.out.read_text("utf-8"))["outcomes"]
    for name, grid in GRIDS.items():
        if (options.runs / name).is_dir():
            outcomes[name] = outcomes_of(grid, options.runs / name)
    # Keys are texts in JSON, as an audit finds them.
    numbers = json.loads(json.dumps(numbers_of(outcomes)))
    keep(options, bench="autopsies", numbers=numbers, outcomes=outcomes)
    print("\n".join(lines(numbers)))


if __name__ == "__main__":
    main()
