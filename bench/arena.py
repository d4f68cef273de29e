"""The numbers of docs/findings/arena.md: each policy against random, and how much the prompt explains.

For each model and each look, `against` has the differences to each policy of `RIVALS` with the same values, in points,
with 95 % limits for all settings of the model at once (kvatlas.stats.pairs). For each budget, `prompt` has,
over all policies that are there with the prompt kept and without: `kept_minus_not`, the mean gain by keeping the
prompt, and `spread_kept` and `spread_not`, the standard deviation of Pass@1 between policies, from which the sampling
error is taken out, so that policies which are alike have a spread near 0; `explained` is the share of the variance
between policies that is gone when all of them keep the prompt. Intervals are 95 % and come from problems drawn again
within each benchmark (bootstrap, 2,000 times).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import part_of
from kvatlas.core import Setting, grouped
from kvatlas.results import Store
from kvatlas.stats.pairs import AgainstTable, against_policy
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces, TraceTable
from outcomes import Json, write_run

PAGES = ("docs/findings/arena.md",)
#: The first problem of each benchmark, and their number in each look.
FIRST, PROBLEMS = 120, 60
#: Policies that the others are compared with: survivors at random, and the plain kinds of those with variants.
RIVALS = ("random", "h2o", "triattention", "snapkv")
Floats = NDArray[np.float64]
DRAWS = 2000


def outcomes(cells: Sequence[CellTraces], settings: Sequence[Setting], benchmarks: Sequence[str]) -> list[Floats]:
    """Return Pass@1 [settings, problems] of each benchmark on the problems that all settings have."""
    by_name = {(cell.setting, cell.benchmark): cell for cell in cells}
    tables = []
    for benchmark in benchmarks:
        of_settings = [by_name[setting, benchmark] for setting in settings]
        problems = list(of_settings[0].place)
        values = np.array([cell.in_order(cell.values(), problems) for cell in of_settings])
        is_known = ~np.isnan(values).any((0, 2))
        tables.append(values[:, is_known].mean(2))
    return tables


def spread(tables: Sequence[Floats], samplings: int) -> float:
    """Return the variance between settings of their means over benchmarks, less what sampling of problems adds.

    Problems that are drawn again from a sample were sampled twice. It may be negative where settings are alike.
    """
    centred = [table - table.mean(0) for table in tables]
    count = len(tables)
    means = sum(table.mean(1) for table in centred) / count
    errors = sum(table.var(1, ddof=1) / table.shape[1] for table in centred) / count**2
    settings = len(means)
    return float((np.sum(means**2) - samplings * np.sum(errors)) / (settings - 1))


def drawn_again(tables: Sequence[Floats], rng: np.random.Generator) -> list[Floats]:
    return [table[:, rng.integers(0, table.shape[1], table.shape[1])] for table in tables]


def with_interval(
    tables: Sequence[Floats], statistic: Callable[[Sequence[Floats], int], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return each number with its limits over problems that are drawn again."""
    rng = np.random.default_rng(0)
    values = statistic(tables, 1)
    drawn = [statistic(drawn_again(tables, rng), 2) for _ in range(DRAWS)]
    found = {}
    for name, value in values.items():
        low, high = np.nanquantile([draw[name] for draw in drawn], (0.025, 0.975))
        found[name] = {"value": round(value, 4), "low": round(float(low), 4), "high": round(float(high), 4)}
    return found


def prompt_factor(tables: Sequence[Floats], samplings: int) -> dict[str, float]:
    """Return the numbers of `prompt`; of each table the first half of the rows keep the prompt, in the same order."""
    half = len(tables[0]) // 2
    kept = [table[:half] for table in tables]
    free = [table[half:] for table in tables]
    gain = sum(float((one - other).mean()) for one, other in zip(kept, free, strict=True)) / len(tables)
    variance_kept = spread(kept, samplings)
    variance_free = spread(free, samplings)
    return {
        "kept_minus_not": 100 * gain,
        "spread_kept": 100 * math.sqrt(max(0.0, variance_kept)),
        "spread_not": 100 * math.sqrt(max(0.0, variance_free)),
        "explained": 100 * (1 - max(0.0, variance_kept) / variance_free) if variance_free > 0 else math.nan,
    }


def prompt_of(run: RunData, model: str) -> list[Json]:
    """Return the factor prompt of a model, for each budget."""
    cells = [cell for cell in run.cells if cell.model == model and cell.measured]
    benchmarks = list(dict.fromkeys(cell.benchmark for cell in cells))
    with_budget = [cell for cell in cells if "keep_prompt" in cell.setting.values]
    found = []
    for budget, of_budget in grouped(with_budget, lambda cell: cell.setting.values["kv_budget"]).items():
        settings = list(dict.fromkeys(cell.setting for cell in of_budget))
        kept = [setting for setting in settings if setting.values["keep_prompt"]]
        free = [Setting.from_parameters(one.policy, **{**one.values, "keep_prompt": False}) for one in kept]
        tables = outcomes(of_budget, [*kept, *free], benchmarks)
        numbers = with_interval(tables, prompt_factor)
        found.append({"kv_budget": budget, "policies": len(kept), "problems": [t.shape[1] for t in tables], **numbers})
    return found


def rows_of(table: AgainstTable) -> list[Json]:
    rows = []
    for row in table.rows:
        contrast = row.contrast
        numbers = {name: round(100 * getattr(contrast, name), 2) for name in ("value", "low", "high")}
        shared = {name: row.partner.values[name] for name in ("keep_prompt", "kv_budget")}
        rows.append({"name": row.name, **shared, **numbers, "proven": contrast.excludes_zero})
    return rows


def of_look(store: Store, problems: slice) -> Json:
    """Return the numbers of these problems of each benchmark."""
    manifest = part_of(store.manifest(), problems)
    run = RunData(manifest, TraceTable(manifest, store.columns()))
    against = {}
    for policy in RIVALS:
        (table,) = against_policy(run, policy)
        against[policy] = {
            "problems": table.problems,
            "would_have_been_shown": round(100 * table.detectable, 1),
            "rows": rows_of(table),
        }
    return {"values": values_of(run), "against": against, "prompt": prompt_of(run, manifest.expected[0].model)}


def values_of(run: RunData) -> dict[str, float]:
    """Return Pass@1 of the full cache and of random survivors with the prompt kept, in percent."""
    by_name: dict[str, list[float]] = {}
    for cell in run.cells:
        values = cell.setting.values
        name = "full" if cell.baseline else f"random, {values['kv_budget']}"
        if cell.baseline or (cell.setting.policy == "random" and "plan_prefix" not in values and values["keep_prompt"]):
            by_name.setdefault(name, []).append(float(np.nanmean(cell.values())))
    return {name: round(100 * sum(means) / len(means), 2) for name, means in by_name.items()}


def numbers_of(outcomes: dict[str, list[Json]]) -> Json:
    """Return the numbers of both looks by model."""
    numbers = {}
    for model, parts in outcomes.items():
        with tempfile.TemporaryDirectory() as folder:
            write_run(parts[0], Path(folder) / "run", *parts[1:])
            with Store.open(Path(folder) / "run") as store:
                looks = {"first": slice(PROBLEMS), "second": slice(PROBLEMS, None)}
                numbers[model] = {name: of_look(store, problems) for name, problems in looks.items()}
    return numbers


#: Settings of a policy that differ from its plain kind in one choice.
CHOICES = {
    "h2o": ("cam",),
    "triattention": ("triattention(scope=union)", "triattention(scope=kv_head)"),
    "snapkv": ("snapkv(budgets=ada)", "snapkv(budgets=pyramid)"),
}
BUDGETS = (160, 208)


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    of_look = {
        (short(model), look, rival): {(row["name"], row["kv_budget"], row["keep_prompt"]): row for row in table["rows"]}
        for model, looks in numbers.items()
        for look, of_model in looks.items()
        for rival, table in of_model["against"].items()
    }
    models = [short(model) for model in numbers]
    places = [(model, budget) for model in models for budget in BUDGETS]

    # Each policy minus random survivors, with the prompt kept: both looks of each model and budget.
    values = {}
    for name in dict.fromkeys(name for name, _, _ in of_look[models[0], "second", "random"]):
        found = [
            [of_look[model, look, "random"][name, budget, True] for look in ("first", "second")]
            for model, budget in places
        ]
        cells = [" / ".join(f"{points(row['value'])}{mark_of(row)}" for row in pair) for pair in found]
        values[f"| {name} | {' | '.join(cells)} |"] = sum(pair[1]["value"] for pair in found)
    rows = sorted(values, key=lambda line: -values[line])

    rows += repetition_lines(numbers)

    # What keeping the prompt is worth, and what it explains.
    for model, looks in numbers.items():
        for index, budget in enumerate(BUDGETS):
            found = [looks[look]["prompt"][index] for look in ("first", "second")]
            cells = [bootstrap_text(one[name]) for name in ("kept_minus_not", "explained") for one in found]
            rows.append(f"| {short(model)}, {budget} | {' | '.join(cells)} |")

    # What one choice changes.
    for rival, names in CHOICES.items():
        for name in names:
            for model, budget in places:
                for is_kept in (True, False):
                    pair = [of_look[model, look, rival][name, budget, is_kept] for look in ("first", "second")]
                    prompt = "kept" if is_kept else "competes"
                    cells = [limits_text(row) for row in pair]
                    rows.append(f"| {name} − {rival} | {model}, {budget} | {prompt} | {' | '.join(cells)} |")
    return rows


def points(value: float) -> str:
    # Without a minus before a zero.
    return f"{round(value, 1) + 0:.1f}"


def mark_of(row: Json) -> str:
    return "*" if row["proven"] else ""


def limits_text(row: Json) -> str:
    return f"{points(row['value'])} ({points(row['low'])} to {points(row['high'])}){mark_of(row)}"


def bootstrap_text(number: dict[str, float]) -> str:
    return f"{number['value']:.1f} ({number['low']:.1f} to {number['high']:.1f})"


def key_of(row: Json) -> tuple[str, int, bool]:
    return row["name"], row["kv_budget"], row["keep_prompt"]


def differences_of(numbers: Json, model: str, look: str) -> dict[tuple[str, int, bool], float]:
    """Return the differences to random survivors of a look in points."""
    return {key_of(row): row["value"] for row in numbers[model][look]["against"]["random"]["rows"]}


def correlation(first: dict[Any, float], second: dict[Any, float]) -> float:
    shared = [key for key in first if key in second]
    return float(np.corrcoef([first[key] for key in shared], [second[key] for key in shared])[0, 1])


def repeated(numbers: Json, sign: int, is_kept: bool) -> list[str]:
    """Return, for each model, how many rows the first look proves on one side of random, with the prompt kept or not.

    Behind it how many of these the second look proves, too, and how many are on that side there.
    """
    cells = []
    for looks in numbers.values():
        second = {key_of(row): row for row in looks["second"]["against"]["random"]["rows"]}
        first = [row for row in looks["first"]["against"]["random"]["rows"] if row["keep_prompt"] == is_kept]
        proven = [row for row in first if row["proven"] and sign * row["value"] > 0]
        again = [second[key_of(row)] for row in proven]
        on_that_side = [row for row in again if sign * row["value"] > 0]
        cells.append(f"{len(proven)}, {sum(row['proven'] for row in on_that_side)}, {len(on_that_side)}")
    return cells


def repetition_lines(numbers: Json) -> list[str]:
    """Return what the looks and the models have in common."""
    of_looks = []
    means = []
    for model in numbers:
        first, second = (differences_of(numbers, model, look) for look in ("first", "second"))
        of_looks.append(f"{correlation(first, second):.2f}")
        means.append({key: (first[key] + second[key]) / 2 for key in first if key[2]})
    shown = [f"{looks['second']['against']['random']['would_have_been_shown']:.1f}" for looks in numbers.values()]
    return [
        f"| rows | {' | '.join(str(len(differences_of(numbers, model, 'first'))) for model in numbers)} |",
        *[
            f"| prompt {arm}: proven {side} random, of these again, of these {side} "
            f"| {' | '.join(repeated(numbers, sign, arm == 'kept'))} |"
            for arm in ("kept", "competes")
            for side, sign in (("above", 1), ("below", -1))
        ],
        f"| correlation of the differences of both looks | {' | '.join(of_looks)} |",
        f"| the second look would have shown, points | {' | '.join(shown)} |",
        *value_lines(numbers),
        f"| correlation between the models, prompt kept, mean of both looks | {correlation(*means):.2f} | |",
    ]


def value_lines(numbers: Json) -> list[str]:
    """Return Pass@1 of the full cache and of random survivors in both looks."""
    lines = []
    for name in ("full", *(f"random, {budget}" for budget in BUDGETS)):
        cells = [
            " / ".join(f"{looks[look]['values'][name]:.1f}" for look in ("first", "second"))
            for looks in numbers.values()
        ]
        lines.append(f"| Pass@1 of `{name}` in both looks, % | {' | '.join(cells)} |")
    return lines


def short(model: str) -> str:
    return model.removeprefix("embedded:")
