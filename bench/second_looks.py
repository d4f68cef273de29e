"""Windows at equal memory, and `learned` trained twice, on problems that no run had decoded.

    python bench/second_looks.py --decode windows-tiny-llama learned-tiny-llama --heads HEADS --runs runs/second-looks
    python bench/second_looks.py --runs runs/second-looks --heads HEADS --out bench/results/second_looks.json

The predictions are in the predictions.md of recipes/embedded, recipes/smollm and recipes/real. `--decode` decodes or
resumes the named parts; without it the document is made of what is there. The folder of `--heads` has the second
training of each model as MODEL-second.safetensors (of the pretrained models also MODEL-first.safetensors), as

    kvatlas predictor train HEADS/tiny-qwen-second.safetensors embedded:tiny-qwen CHAIN7-14 SEQBENCH-5x5 LEDGER12-28 \
        --target kv_head --skip 2000 --problems 60 --held-out 10 --seed 1

writes it. `outcomes` has the outcomes by problem, `numbers` what docs/findings/second-looks.md quotes: each comparison
has limits that hold for all comparisons of the document at once (Bonferroni), and p-values after Holm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common import arguments, keep
from kvatlas import benchmarks
from kvatlas.stats.numerics.arrays import LEVEL, Floats, normal_quantile, strata_of_sizes
from kvatlas.stats.numerics.bounded import mean_differences
from kvatlas.stats.numerics.equal_memory import compare_pairs, dominance_pairs
from kvatlas.stats.numerics.multiple import holm
from kvatlas.sweeps import make_plan, sweep
from kvatlas.sweeps.spec import parse_spec
from outcomes import Json, from_hex, mean_over_benchmarks, outcomes_of, whole_problems

PAGES = ("docs/findings/second-looks.md",)
#: The first problem that is decoded of each benchmark.
FIRST = 3000
#: The names of a head's two trainings, and of the policy that they are compared with.
TRAININGS = ("first", "second")
RIVAL = "random"
SMOLLM = "smollm2-135m-think"


@dataclass(frozen=True)
class Part:
    """A grid of one model: `question` is windows or learned, `problems` the number on each benchmark."""

    question: str
    model: str
    benchmarks: tuple[str, ...]
    problems: int
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    windows: tuple[str | int, ...]
    keep_prompt: tuple[bool, ...] = (True,)
    every: int = 32
    first: int = FIRST
    weights: str = "auto"
    temperature: float = 0.6
    max_new_tokens: int = 700

    @property
    def short_model(self) -> str:
        """The model's name without where it comes from."""
        return self.model.removeprefix("embedded:").removesuffix(".gguf")

    def problem_names(self, benchmark: str) -> list[str]:
        """Return the names of the problems of a benchmark that the grid was declared with."""
        found = benchmarks.find(benchmark).problems(self.first + self.problems)
        return [problem.id for problem in found[self.first :]]


def embedded_windows(model: str) -> Part:
    windows = ("10%", "40%", "75%")
    return Part("windows", model, ("SEQBENCH-6x6",), 240, ("dynts", "rkv"), (48, 96), windows)


def embedded_learned(model: str) -> Part:
    benchmarks = ("SEQBENCH-4x4", "CHAIN7-16")
    return Part("learned", model, benchmarks, 120, (*TRAININGS, RIVAL), (160, 208), (16,), (False, True))


def qwen_learned(benchmark: str) -> Part:
    return Part(
        "learned",
        "qwen2.5-coder-1.5b.gguf",
        (benchmark,),
        60,
        (*TRAININGS, RIVAL),
        (144, 208),
        (32,),
        (False,),
        every=64,
        first=0,
        weights="bfloat16",
        temperature=0.0,
        max_new_tokens=900,
    )


PARTS = {
    "windows-tiny-llama": embedded_windows("embedded:tiny-llama"),
    "windows-tiny-qwen": embedded_windows("embedded:tiny-qwen"),
    "learned-tiny-llama": embedded_learned("embedded:tiny-llama"),
    "learned-tiny-qwen": embedded_learned("embedded:tiny-qwen"),
    "windows-smollm": Part(
        "windows",
        SMOLLM,
        ("WORDS6-8",),
        80,
        ("rkv",),
        (80, 128),
        ("10%", "75%"),
        weights="bfloat16",
        max_new_tokens=500,
    ),
    "learned-smollm": Part(
        "learned",
        SMOLLM,
        ("WORDS6-8",),
        60,
        (*TRAININGS, RIVAL),
        (240, 288),
        (16,),
        (False,),
        weights="bfloat16",
        max_new_tokens=500,
    ),
    "learned-qwen": qwen_learned("MATH500@panel/level3-short.jsonl"),
    "learned-qwen-gaokao": qwen_learned("GAOKAO2023EN@panel/gaokao-short.jsonl"),
}


def settings_of(part: Part, heads: Path) -> dict[str, Json]:
    """Return the settings of a grid by what the document calls them."""
    settings: dict[str, Json] = {}
    for policy in part.policies:
        for budget in part.budgets:
            for window in part.windows:
                for is_kept in part.keep_prompt:
                    setting = {"policy": policy, "kv_budget": budget, "local_window": window, "every": part.every}
                    if part.question == "windows":
                        setting["budget_over"] = "thinking"
                        settings[f"{policy} {budget} {window}"] = setting
                        continue
                    setting["keep_prompt"] = is_kept
                    file = heads / f"{part.short_model}-{policy}.safetensors"
                    if policy in TRAININGS:
                        setting["policy"] = "learned"
                        # The first training of an embedded model is in its own folder.
                        if file.is_file():
                            setting["scorer"] = str(file)
                    settings[f"{policy} {budget} {'kept' if is_kept else 'competes'}"] = setting
    return settings


def decode(part: Part, heads: Path, folder: Path, workers: int) -> None:
    """Decode what is missing of a grid, the first problems first."""
    for benchmark in part.benchmarks:
        sampling: Json = {"temperature": part.temperature, "max_new_tokens": part.max_new_tokens}
        if part.temperature > 0:
            sampling |= {"top_k": 20, "top_p": 0.95}
        document = {
            "models": [{"model": part.model, "weights": part.weights} if part.weights != "auto" else part.model],
            "benchmarks": [benchmark],
            "problems": part.first + part.problems,
            "seed": 11,
            "sampling": sampling,
            "baseline": [{"policy": "full"}],
            "settings": list(settings_of(part, heads).values()),
        }
        plan = make_plan(parse_spec(document))
        problems = {name: found[part.first :] for name, found in plan.problems.items()}
        out = folder / benchmark.partition("@")[0]
        sweep(replace(plan, problems=problems), out, workers=workers, on_message=print)


def outcomes_of_part(part: Part, heads: Path, folder: Path) -> Json:
    """Return the right answers of each setting, on the problems that all settings have, by benchmark."""
    settings = settings_of(part, heads)
    by_benchmark = {}
    for benchmark in part.benchmarks:
        name, _, _ = benchmark.partition("@")
        decoded = whole_problems(folder / name)
        problems = [problem for problem in part.problem_names(benchmark) if problem in decoded]
        found = outcomes_of(folder / name, problems, 0)
        entries = {"full": next(entry for entry in found["settings"] if entry["baseline"])}
        of_settings = [entry for entry in found["settings"] if not entry["baseline"]]
        for (name, setting), entry in zip(settings.items(), of_settings, strict=True):
            # Settings of a run keep the order of their spec.
            assert entry["policy"] == setting["policy"]
            assert all(
                entry["values"].get(key, True) == setting[key] for key in ("kv_budget", "keep_prompt") if key in setting
            )
            entries[name] = entry
        right = {name: entry["right"] for name, entry in entries.items()}
        compressed = {name: entry["compressed"] for name, entry in entries.items()}
        by_benchmark[name] = {"problems": found["problems"], "right": right, "compressed": compressed}
    return {"model": part.short_model, "question": part.question, "benchmarks": by_benchmark}


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
    for test in tests:
        better, other = test.pair
        # A setting that keeps fewer tokens may win, too; here those of equal memory are told.
        if test.is_proven and tokens[better] == tokens[other]:
            limits = {end: round(100 * getattr(test.difference, end), 4) for end in ("value", "low", "high")}
            proven.append(
                {"better": settings[better], "other": settings[other], **limits, "adjusted_p": test.adjusted_p}
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


def main() -> None:
    options = arguments(__doc__, runs=Path("runs/second-looks"), heads=Path("runs/heads"), decode=[""], workers=1)
    asked = [name for name in options.decode if name]
    for name in asked:
        decode(PARTS[name], options.heads, options.runs / name, options.workers)
    if asked:
        return

    # A part whose run is not here keeps the outcomes that the document has.
    outcomes: dict[str, Any] = {}
    if options.out is not None and options.out.is_file():
        outcomes = json.loads(options.out.read_text("utf-8"))["outcomes"]
    for name, part in PARTS.items():
        if (options.runs / name).is_dir():
            outcomes[name] = outcomes_of_part(part, options.heads, options.runs / name)
    numbers = numbers_of(outcomes)
    keep(options, bench="second_looks", numbers=numbers, outcomes=outcomes)
    print("\n".join(lines(numbers)))


if __name__ == "__main__":
    main()
