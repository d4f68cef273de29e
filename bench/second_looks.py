"""The numbers of docs/findings/second-looks.md: windows at equal memory, and `learned` trained twice.

Each comparison was chosen before decoding, and has limits that hold for all comparisons of the document at once
(Bonferroni), and p-values after Holm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.stats.numerics.arrays import LEVEL, Floats, holm, normal_quantile, strata_of_sizes
from kvatlas.stats.numerics.bounded import mean_differences
from kvatlas.stats.numerics.equal_memory import compare_pairs, dominance_pairs
from outcomes import Json, from_hex, mean_over_benchmarks

PAGES = ("docs/findings/second-looks.md",)
#: The names of a head's two trainings, and of the policy that they are compared with.
TRAININGS = ("first", "second")
RIVAL = "random"


@dataclass(frozen=True)
class Part:
    """A grid of one model: `question` is windows or learned."""

    question: str
    short_model: str
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    windows: tuple[str, ...] = ()
    keep_prompt: tuple[bool, ...] = (False,)


EMBEDDED_WINDOWS = (("dynts", "rkv"), (48, 96), ("10%", "40%", "75%"))
HEADS = (*TRAININGS, RIVAL)
PARTS = {
    "windows-tiny-llama": Part("windows", "tiny-llama", *EMBEDDED_WINDOWS),
    "windows-tiny-qwen": Part("windows", "tiny-qwen", *EMBEDDED_WINDOWS),
    "learned-tiny-llama": Part("learned", "tiny-llama", HEADS, (160, 208), keep_prompt=(False, True)),
    "learned-tiny-qwen": Part("learned", "tiny-qwen", HEADS, (160, 208), keep_prompt=(False, True)),
    "windows-smollm": Part("windows", "smollm2-135m-think", ("rkv",), (80, 128), ("10%", "75%")),
    "learned-smollm": Part("learned", "smollm2-135m-think", HEADS, (240, 288)),
    "learned-qwen": Part("learned", "qwen2.5-coder-1.5b", HEADS, (144, 208)),
    "learned-qwen-gaokao": Part("learned", "qwen2.5-coder-1.5b", HEADS, (144, 208)),
}


def numbers_of(outcomes: Json) -> Json:
    """Return Pass@1 of each setting in percent, and the comparisons in points."""
    values: dict[str, dict[str, Json]] = {}
    comparisons: list[Json] = []
    rows: list[tuple[Floats, Sequence[int]]] = []
    for name, of_part in outcomes.items():
        part = PARTS[name]
        tables = {setting: right_of(of_part, setting) for setting in right_names(of_part)}
        sizes = [len(found["problems"]) for found in of_part["benchmarks"].values()]
        values[name] = {
            "problems": sum(sizes),
            "value": {setting: round(100 * mean_over_benchmarks(right, sizes), 4) for setting, right in tables.items()},
            "compressed": {setting: count_compressed(of_part, setting) for setting in tables if setting != "full"},
        }
        if part.question == "windows":
            values[name]["equal_memory"] = {
                policy: proven_pairs(part, policy, tables, sizes) for policy in part.policies
            }
        for first, second in pairs_of(part):
            comparisons.append({"part": name, "first": first, "second": second})
            rows.append((tables[first] - tables[second], sizes))

    z = normal_quantile(LEVEL / 2 / len(rows))
    p_values = []
    for comparison, (difference, sizes) in zip(comparisons, rows, strict=True):
        (contrast,) = mean_differences(difference[None], strata_of_sizes(sizes), z)
        p_values.append(contrast.p)
        comparison |= {end: round(100 * getattr(contrast, end), 4) for end in ("value", "low", "high")}
        comparison["p"] = contrast.p
    for comparison, adjusted in zip(comparisons, holm(p_values), strict=True):
        comparison["adjusted_p"] = adjusted
    return {"parts": values, "comparisons": comparisons}


def proven_pairs(part: Part, policy: str, tables: dict[str, Floats], sizes: Sequence[int]) -> Json:
    """Return the windows that are proven better at equal memory, as `kvatlas describe` tests the map of a policy."""
    settings = [f"{policy} {budget} {window}" for budget in part.budgets for window in part.windows]
    tokens = np.repeat(np.array(part.budgets, float), len(part.windows))
    window_of = np.tile(np.arange(len(part.windows)), len(part.budgets))
    outcomes = np.stack([tables[setting] for setting in settings], axis=1)
    tests = compare_pairs(outcomes, strata_of_sizes(sizes), dominance_pairs(tokens, window_of))
    proven = []
    for (better, other), difference in tests.items():
        # A setting that keeps fewer tokens may win, too; here those of equal memory are told.
        if difference.is_proven and tokens[better] == tokens[other]:
            limits = {end: round(100 * getattr(difference, end), 4) for end in ("value", "low", "high")}
            proven.append(
                {"better": settings[better], "other": settings[other], **limits, "adjusted_p": difference.p_holm}
            )
    return {"pairs": len(tests), "proven": proven}


def right_names(of_part: Json) -> list[str]:
    return list(next(iter(of_part["benchmarks"].values()))["right"])


def right_of(of_part: Json, setting: str) -> Floats:
    """Return 1 for each right answer of a setting, benchmark by benchmark."""
    bits = [from_hex(found["right"][setting]) for found in of_part["benchmarks"].values()]
    return np.concatenate([np.array(of_benchmark, float) for of_benchmark in bits])


def count_compressed(of_part: Json, setting: str) -> int:
    return sum(sum(from_hex(found["compressed"][setting])) for found in of_part["benchmarks"].values())


def pairs_of(part: Part) -> list[tuple[str, str]]:
    """Return the comparisons of a grid, which were chosen before decoding."""
    pairs = []
    if part.question == "windows":
        for policy in part.policies:
            for budget in part.budgets:
                place = f"{policy} {budget}"
                pairs.append((f"{place} {part.windows[-1]}", f"{place} {part.windows[0]}"))
        return pairs

    for budget in part.budgets:
        for is_kept in part.keep_prompt:
            place = f"{budget} {'kept' if is_kept else 'competes'}"
            pairs += [(f"{training} {place}", f"{RIVAL} {place}") for training in TRAININGS]
            pairs.append((f"second {place}", f"first {place}"))
    return pairs


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    by_pair = {(item["part"], item["first"], item["second"]): item for item in numbers["comparisons"]}
    rows = []
    for name, found in numbers["parts"].items():
        part = PARTS[name]
        value = found["value"]
        if part.question == "windows":
            for policy in part.policies:
                for budget in part.budgets:
                    settings = [f"{policy} {budget} {window}" for window in part.windows]
                    shares = [f"{value[setting]:.1f}" for setting in settings]
                    # SmolLM2 has two windows, the embedded models three.
                    if len(shares) == 2:
                        shares.insert(1, "")
                    difference = limits_text(by_pair[name, settings[-1], settings[0]])
                    cells = [part.short_model, policy, str(budget), *shares, difference]
                    rows.append(f"| {' | '.join(cells)} |")
            continue
        for is_kept in part.keep_prompt:
            for budget in part.budgets:
                prompt = "kept" if is_kept else "competes"
                place = f"{budget} {prompt}"
                cells = [part.short_model, prompt, str(budget), f"{value[f'{RIVAL} {place}']:.1f}"]
                cells += [limits_text(by_pair[name, f"{one} {place}", f"{RIVAL} {place}"]) for one in TRAININGS]
                cells.append(limits_text(by_pair[name, f"second {place}", f"first {place}"]))
                rows.append(f"| {' | '.join(cells)} |")
    return rows


def limits_text(item: Json) -> str:
    mark = "*" if item["adjusted_p"] <= LEVEL else ""
    return f"{item['value']:.1f} ({item['low']:.1f} to {item['high']:.1f}){mark}"
