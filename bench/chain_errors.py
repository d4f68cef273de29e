"""Judge the promises of runs with chains, and of the gate, on the designs of chain_designs.py.

Each round draws answers whose truth is known, stores them as a run (or writes the files of both sides of the gate),
opens it, and compares marks, recommendations, limits, intervals, effects and verdicts with the truth of both claims.

    python bench/chain_errors.py --rounds 300 --out bench/results/chain_designs.json
    python bench/chain_errors.py --only copies_48 gate:copies_48 --rounds 1000
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import stats

import kvatlas
from chain_designs import GATES, MAPS, RATIOS, WINDOWS, GateDesign, MapDesign
from common import arguments, keep
from judging import Counts, judge_choice, judge_levels, judge_losses, judge_memory, judge_pairs, with_outcomes
from kvatlas.core import REFERENCE, Claim, Costs, Grade, Setting, Status, Trace, Usage
from kvatlas.report.result import Result, analyse
from kvatlas.results import Expected, Manifest, Store

BUDGET = 240
PROMPT = 30
FULL = Setting.from_parameters("full")
EXACT = 1e-9
#: Of so many rounds one goes through the store, and must equal the same round in memory.
STORED_EACH = 1000
#: Effects, pairs and lines at equal memory take longer: they are judged in each fourth round, of these designs in all.
JUDGED_EACH = 4
AXES = ("noisy_level", "only_memory_matters", "rare_collapse_of_one_policy", "nothing_lost", "copies_10")
#: Mean, and quantile function, of the chances of the full cache.
DIFFICULTIES: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    "sure": (1.0, np.ones_like),
    "half": (0.5, lambda u: np.full_like(u, 0.5)),
    "weak": (0.04, lambda u: np.full_like(u, 0.04)),
    "even": (0.5, stats.beta(1, 1).ppf),
    "easy": (8 / 9, stats.beta(8, 1).ppf),
    "hard": (1 / 6, stats.beta(0.4, 2).ppf),
    "two": (0.7, lambda u: (u > 0.3).astype(float)),
}
#: Difficulties of which all problems are alike, so that fixed problems are the population, too.
ALIKE = ("sure", "half", "weak")
RARE_CONTROLS = ("random", "window")


@dataclass(frozen=True)
class Drawn:
    """Chances [1 + settings, problems] and grades [problems, samples] of a benchmark, and which problems are copies."""

    chances: np.ndarray
    full: np.ndarray
    settings: np.ndarray
    copied: np.ndarray


def cells_of(design: MapDesign) -> list[tuple[str, int, float]]:
    """Return policy, window and ratio of each setting in the order of the losses."""
    cells = []
    for policy, table in design.losses.items():
        for window, row in zip(WINDOWS, table, strict=False):
            cells += [(policy, window, ratio) for ratio, _ in zip(RATIOS, row, strict=False)]
    return cells


def losses_of_design(design: MapDesign) -> np.ndarray:
    return np.array([loss for table in design.losses.values() for row in table for loss in row]) * design.margin / 100


def setting_of(cell: tuple[str, int, float]) -> Setting:
    policy, window, ratio = cell
    if policy == "served":
        return Setting.from_parameters("served", level=f"level{10 - round(10 * ratio)}")
    return Setting.from_parameters(policy, kv_budget=BUDGET, local_window=window, ratio=ratio)


# -- drawing -----------------------------------------------------------------------------------------------------------


def lose(
    rng: np.random.Generator,
    full: np.ndarray,
    mean: float,
    losses: np.ndarray,
    shapes: Sequence[str],
    design: Any,
    copied: np.ndarray,
    overlap: str,
) -> np.ndarray:
    """Return the chances of each setting [settings, problems]; `mean` is that of the full cache's chances."""
    problems = len(full)
    chances = np.empty((len(losses), problems))
    place = rng.random(problems)
    kind = rng.random(problems)
    start = 0.0
    for number, (loss, shape) in enumerate(zip(losses, shapes, strict=True)):
        if copied.any():
            share = np.where(copied, loss / np.mean(full * copied), 0)
            chances[number] = full * (1 - share)
        elif shape == "spread":
            chances[number] = full * (1 - loss / mean)
        elif shape == "part":
            chances[number] = full * (1 - np.where(kind < design.part, loss / (design.part * mean), 0))
        elif shape == "mixed":
            gained = 0.1 * (1 - mean)
            loses = full * (1 - (loss + gained) / (0.3 * mean))
            chances[number] = np.where(kind < 0.1, 1.0, np.where(kind < 0.4, loses, full))
        else:
            share = loss / mean
            if overlap == "own":
                place = rng.random(problems)
            lost = (place >= start) & (place < start + share)
            if overlap == "apart":
                start += share
            chances[number] = np.where(lost, 0.0, full)
    assert (chances >= -EXACT).all(), chances.min()
    assert start <= 1, start
    return chances.clip(0, 1)


def draw_benchmark(
    rng: np.random.Generator,
    design: Any,
    problems: int,
    losses: np.ndarray,
    shapes: Sequence[str],
    copied_share: float,
    *,
    overlap: str,
    between: str,
    clusters: int,
    full_samples: int,
) -> Drawn:
    mean, quantile = DIFFICULTIES[design.difficulty]
    groups = problems // clusters
    if design.fixed:
        full = quantile((np.arange(groups) + 0.5) / groups)
        # The same order in all rounds.
        full = np.random.default_rng(1).permutation(full)
        mean = full.mean()
    else:
        full = quantile(rng.random(groups))
    copied = np.arange(groups) < round(copied_share * groups)
    chances = lose(rng, full, mean, losses, shapes, design, copied, overlap)

    most = max(full_samples, design.samples)
    uniform = rng.random((groups, most))
    shape = (len(losses), groups, design.samples)
    others = rng.random(shape)
    if between in ("shared", "opposite"):
        others[:] = others[:1]
    if between == "opposite":
        others[1::2] = 1 - others[1::2]
    is_common = rng.random((1, *shape[1:])) < design.common
    others = np.where(is_common, uniform[None, :, : design.samples], others)
    uniform[copied] = uniform[copied][:, :1]
    others[:, copied] = others[:, copied][:, :, :1]
    grades_full = (uniform[:, :full_samples] < full[:, None]).astype(float)
    grades = (others < chances[..., None]).astype(float)

    by_problem = np.concatenate([full[None], chances])
    return Drawn(
        np.repeat(by_problem, clusters, axis=1),
        np.repeat(grades_full, clusters, axis=0),
        np.repeat(grades, clusters, axis=1),
        np.repeat(copied, clusters),
    )


def draw(rng: np.random.Generator, design: MapDesign) -> dict[str, Drawn]:
    cells = cells_of(design)
    drawn = {}
    with_copies = sum(share > 0 for share in design.copies.values())
    for name, problems in design.problems.items():
        losses = losses_of_design(design)
        if with_copies:
            losses = losses * (len(design.problems) / with_copies if design.copies.get(name, 0) else 0)
        shapes = []
        for policy, window, _ in cells:
            shape = design.shapes.get(policy, design.shape)
            shapes.append("spread" if shape == "mixed" and window not in WINDOWS[: design.mixed_windows] else shape)
        one = draw_benchmark(
            rng,
            design,
            problems,
            losses,
            shapes,
            design.copies.get(name, 0),
            overlap=design.overlap,
            between=design.between,
            clusters=design.clusters,
            full_samples=design.full_samples or design.samples,
        )
        if design.missing:
            count = int(design.missing * one.settings[0].size)
            for grades in one.settings:
                # Lost pairs first, in a random order.
                is_lost = (one.full[:, : design.samples] == 1) & (grades == 0)
                order = np.argsort(rng.random(grades.size) - is_lost.reshape(-1), kind="stable")
                grades.reshape(-1)[order[:count]] = np.nan
        drawn[name] = one
    return drawn


# -- storing -----------------------------------------------------------------------------------------------------------


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(text.encode().ljust(64, b"."))


def store(
    folder: Path, design: MapDesign, models: Sequence[Mapping[str, Drawn]], samples: int, extensions: int
) -> None:
    """Store what was drawn of each model as a finished run of so many samples."""
    cells = cells_of(design)
    settings = [setting_of(cell) for cell in cells]
    is_served = bool(design.served)
    reference = REFERENCE if is_served else FULL
    policies = dict.fromkeys(policy for policy, _, _ in cells)
    controls = design.controls
    if controls is None:
        controls = RARE_CONTROLS if set(policies) - set(RARE_CONTROLS) else ()
    full_samples = samples * (design.full_samples or design.samples) // design.samples
    names = ("level",) if is_served else ("local_window", "ratio")
    axes = tuple((name, tuple(dict.fromkeys(one.values[name] for one in settings))) for name in names)

    expected = []
    for number, (benchmark, problems) in product(range(len(models)), design.problems.items()):
        ids = tuple(f"p{index:04d}" for index in range(problems))
        for place, setting in enumerate([reference, *settings]):
            expected.append(
                Expected(
                    f"tiny{number}",
                    benchmark,
                    setting,
                    f"key {number} {benchmark}",
                    ids,
                    samples if place else full_samples,
                    place == 0,
                    (1000 - 100 * place, 0) if is_served else None,
                    control=place > 0 and setting.policy in controls,
                )
            )
    clusters = {}
    if design.clusters > 1:
        for benchmark, problems in design.problems.items():
            clusters[benchmark] = {f"p{index:04d}": f"c{index // design.clusters}" for index in range(problems)}
    claim = "these_problems" if design.samples > 1 else "problems_like_these"
    spec: dict[str, Any] = {"seed": 0, "models": [f"tiny{number}" for number in range(len(models))]}
    spec |= {
        "sampling": {"temperature": 0.6},
        "claim": claim,
        "lose_at_most": design.margin,
        "controls": list(controls),
    }
    if design.looks:
        spec["looks"] = list(design.looks)
    if is_served:
        spec["tests"] = design.served
    provenance = {"kvatlas": "test", "extensions": extensions}
    manifest = Manifest(axes, tuple(expected), spec, provenance, clusters=clusters)

    def traces() -> Any:
        for cell in expected:
            drawn = models[int(cell.model[4:])][cell.benchmark]
            is_full = cell.setting == reference
            grades = drawn.full if is_full else drawn.settings[settings.index(cell.setting)]
            if is_served:
                usage: Costs = Costs(None, 100, None, None, None, None, 0.1)
            elif is_full:
                usage = Usage(PROMPT, 300, 250, 330, 330.0, 0, 0.1)
            else:
                values = cell.setting.values
                left = BUDGET - PROMPT - values["local_window"]
                stays = PROMPT + values["local_window"] + int(values["ratio"] * left)
                usage = Usage(PROMPT, 300, 250, BUDGET, (BUDGET + stays) / 2, 3, 0.1)
            for index, problem in enumerate(cell.problems):
                for sample in range(cell.samples):
                    grade = grades[index, sample]
                    if np.isnan(grade):
                        continue
                    written = f"{problem} {0 if drawn.copied[index] else sample} {cell.setting.id}"
                    yield (
                        cell.run_key,
                        Trace(
                            model=cell.model,
                            benchmark=cell.benchmark,
                            problem=problem,
                            sample=sample,
                            setting=cell.setting,
                            tokens=tokens_of(written),
                            text="so\n</think>7",
                            grade=Grade(bool(grade), float(grade), "7" if grade else "8", Status.OK),
                            usage=usage,
                        ),
                    )

    with Store.create(folder) as stored:
        stored.put_manifest(manifest)
        stored.add_all(traces())


def in_memory(template: Result, design: MapDesign, models: Sequence[Mapping[str, Drawn]]) -> Result:
    """Return the result of a stored run with the grades of other draws in place of its own."""
    settings = [setting_of(cell) for cell in cells_of(design)]
    parts = []
    for cell in template.opened_runs[0].manifest.expected:
        drawn = models[int(cell.model[4:])][cell.benchmark]
        grades = drawn.settings[settings.index(cell.setting)] if cell.setting in settings else drawn.full
        parts.append(grades[:, : cell.samples])
    return with_outcomes(template, parts)


# -- judging -----------------------------------------------------------------------------------------------------------


def truths_of(design: MapDesign, drawn: Mapping[str, Drawn]) -> dict[str, np.ndarray]:
    """Return the true chances [1 + settings] of both claims, means over benchmarks."""
    truths = {"TP": np.mean([one.chances.mean(axis=1) for one in drawn.values()], axis=0)}
    if not design.fixed:
        mean = DIFFICULTIES[design.difficulty][0]
        truths["PLT"] = np.concatenate([[mean], mean - losses_of_design(design)])
    elif design.difficulty in ALIKE:
        truths["PLT"] = truths["TP"]
    return truths


def judge_marks(result: Result, design: MapDesign, model: str, truths: Mapping[str, np.ndarray], note: Counts) -> None:
    """Compare marks, limits and the recommendation of a model with the true losses."""
    family = next(
        one
        for losses in result.losses
        for (name, benchmarks), one in losses.items()
        if name == model and benchmarks == frozenset(design.problems)
    )
    ids = [setting_of(cell).id for cell in cells_of(design)]
    claim = "TP" if result.claim == Claim.THESE else "PLT"
    note.power("speaks of these problems", claim == "TP")
    margin = design.margin / 100
    is_void = design.name == "weak_full_cache"
    judge_losses(family, ids, truths, note, margin, is_void)
    judge_choice(next(one for one in result.choices if one.model == model), ids, truths, note, claim, margin, is_void)


def judge_intervals(result: Result, design: MapDesign, model: str, drawn: Mapping[str, Drawn], note: Counts) -> None:
    """Compare the intervals of Pass@1 of the cells of each map with the true chances."""
    run_claim = "TP" if result.claim == Claim.THESE else "PLT"
    if run_claim == "PLT" and design.fixed:
        return
    places = {setting_of(cell): place for place, cell in enumerate(cells_of(design), 1)}
    losses = losses_of_design(design)
    mean = DIFFICULTIES[design.difficulty][0]
    missed = np.zeros(len(losses), bool)
    for one in (one for one in result.maps if not one.map.is_mean):
        if one.map.model != model:
            continue
        for cell in one.map.cells.values():
            place = places[cell.setting]
            true = drawn[one.map.benchmark].chances[place].mean() if run_claim == "TP" else mean - losses[place - 1]
            estimate = cell.estimate
            missed[place - 1] |= not estimate.low - EXACT <= true <= estimate.high + EXACT
    note.each("Pass@1 interval, one setting", missed)


def judge_run(design: MapDesign, rounds: int, seed: int, folder: Path, until: float) -> dict[str, Any]:
    note = Counts()
    began = time.perf_counter()
    stages = design.looks or design.extensions or (design.samples,)
    grid = SimpleNamespace(grid=SimpleNamespace(cells=cells_of(design), policies=tuple(design.losses)))
    done = 0
    templates: dict[int, Result] = {}
    for number in range(rounds):
        if time.time() > until:
            break
        rng = np.random.default_rng([seed, zlib.crc32(design.name.encode()), number])
        models = [draw(rng, design) for _ in range(design.models)]
        for index, samples in enumerate(stages):
            is_stored = number % STORED_EACH == 0
            if is_stored:
                path = folder / f"{design.name}-{number}-{samples}"
                store(path, design, models, samples, index if design.extensions else 0)
                result = analyse([path], partial=design.missing > 0)
                # A run without missing traces, whose outcomes are replaced in the other rounds.
                if number == 0:
                    whole = [
                        {name: replace(one, settings=np.nan_to_num(one.settings)) for name, one in m.items()}
                        for m in models
                    ]
                    store(
                        path.with_name(f"{path.name}-whole"), design, whole, samples, index if design.extensions else 0
                    )
                    templates[samples] = analyse([path.with_name(f"{path.name}-whole")], partial=design.missing > 0)
                other = in_memory(templates[samples], design, models)
                for asked in ("recommendation", "comparisons", "effects"):
                    assert str(result.to_dict()[asked]) == str(other.to_dict()[asked]), asked
                shutil.rmtree(path)
            else:
                result = in_memory(templates[samples], design, models)
            for which, drawn in enumerate(models):
                truths = truths_of(design, drawn)
                judge_marks(result, design, f"tiny{which}", truths, note)
                if not design.served and number % JUDGED_EACH == 0:
                    judge_intervals(result, design, f"tiny{which}", drawn, note)
            if design.models == 1 and not design.served and (number % JUDGED_EACH == 0 or design.name in AXES):
                claim = "TP" if result.claim == Claim.THESE else "PLT"
                if claim in truths:
                    judge_levels(result, grid, truths, note, claim)
                    judge_pairs(result, grid, truths, note)
                    judge_memory(result, grid, truths, note, claim)
                    judge_found(result, design, truths[claim], note)
        note.end_round()
        done += 1
    return {
        "promise": design.promise,
        "rounds": done,
        **note.document(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def judge_found(result: Result, design: MapDesign, truth: np.ndarray, note: Counts) -> None:
    """An effect that is told of an axis whose levels are all equal is wrong."""
    for effect in result.effects:
        policy = effect.over.rsplit(" | ", 1)[-1]
        place = 1 if effect.axis == "local_window" else 2
        means: dict[Any, list[float]] = {}
        for cell, value in zip(cells_of(design), truth[1:], strict=True):
            if cell[0] == policy:
                means.setdefault(cell[place], []).append(value)
        levels = [np.mean(values) for values in means.values()]
        if np.ptp(levels) < 1e-6:
            note.error("an effect of equal levels", effect.is_found)


# -- the gate ----------------------------------------------------------------------------------------------------------


def write_side(folder: Path, tasks: Sequence[np.ndarray], copied: Sequence[np.ndarray], design: GateDesign) -> Path:
    """Write a side as lm-eval does, or as a file of answers where some are missing or are scores; return its path."""
    side = folder.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows: dict[int, list[str]] = {}
    for task, grades in enumerate(tasks):
        rows[task] = []
        for problem, of_problem in enumerate(grades):
            question = f"What is {problem // design.duplicates} plus {task}?"
            texts = []
            for sample, grade in enumerate(of_problem):
                which = 0 if copied[task][problem] else sample
                texts.append(f"{side} answers {question} in sample {which}: {'so it goes on, ' * 20} {grade:.4f}")
            if is_file(design):
                for sample, (grade, text) in enumerate(zip(of_problem, texts, strict=True)):
                    if not np.isnan(grade):
                        row = {"benchmark": f"task{task}", "problem": f"p{problem}", "sample": sample}
                        row |= {"question": question, "text": text}
                        row["score" if design.score else "correct"] = float(grade) if design.score else int(grade)
                        rows[task].append(json.dumps(row))
            else:
                scores = list(map(float, of_problem))
                generation = {"until": ["\n"], "do_sample": True, "temperature": 0.7, "max_gen_toks": 256}
                row = {"doc_id": problem, "doc": {"question": question, "name": f"p{problem}"}, "target": str(problem)}
                row["arguments"] = {"gen_args_0": {"arg_0": question, "arg_1": generation}}
                row |= {"resps": [texts], "filtered_resps": [texts], "filter": "none", "metrics": ["exact_match"]}
                row["exact_match"] = scores if len(scores) > 1 else scores[0]
                if len(scores) == 1:
                    row["filtered_resps"] = texts
                rows[task].append(json.dumps(row))
    if is_file(design):
        path = folder / "answers.jsonl"
        path.write_text("".join(f"{row}\n" for of_task in rows.values() for row in of_task))
        return path
    for task, of_task in rows.items():
        path = folder / f"samples_task{task}_2026-01-01T00-00-00.000000.jsonl"
        path.write_text("".join(f"{row}\n" for row in of_task))
    return folder


def is_file(design: GateDesign) -> bool:
    return design.missing > 0 or design.score or design.unequal or design.duplicates > 1


def judge_gate(design: GateDesign, rounds: int, seed: int, folder: Path, until: float) -> dict[str, Any]:
    """Return how often each verdict came, and how often it was wrong by the claim that it names."""
    counts: Counter[str] = Counter()
    margin = design.margin / 100
    wrong = Counter[str]()
    began = time.perf_counter()
    done = 0
    for number in range(rounds):
        if time.time() > until:
            break
        rng = np.random.default_rng([seed, zlib.crc32(f"gate {design.name}".encode()), number])
        before, after, copied, tp = [], [], [], []
        for task, problems in enumerate(design.problems):
            loss = np.array([design.losses[task] * margin])
            one = draw_benchmark(
                rng,
                design,
                problems,
                loss,
                [design.shape],
                design.copies[task] if design.copies else 0,
                overlap="own",
                between="own",
                clusters=design.duplicates,
                full_samples=design.samples,
            )
            new, old = one.settings[0], one.full
            if design.score:
                # Half of the lost problems keep a score of .1, all others move a little to both sides.
                noise = rng.uniform(0, 0.04, new.shape)
                old = old * 0.98 - rng.uniform(0, 0.04, new.shape) * 0.5
                new = np.where(new > 0, new * 0.98 - noise * 0.5, 0.0).clip(0, 1)
            if design.missing:
                count = int(design.missing * new.size)
                order = np.argsort(rng.random(new.size) - ((old == 1) & (new == 0)).reshape(-1), kind="stable")
                new.reshape(-1)[order[:count]] = np.nan
            if design.unequal:
                old = old[:, : old.shape[1] // 2]
            before.append(old)
            after.append(new)
            copied.append(one.copied)
            truth = one.chances[0].mean() - one.chances[1].mean()
            tp.append(truth * 0.96 if design.score else truth)
        paths = []
        for side, tasks in zip(("before", "after"), (before, after), strict=True):
            paths.append(write_side(folder / f"{design.name} {side}", tasks, copied, design))
        claim = "these_problems" if design.missing else "auto"
        result = kvatlas.gate(paths[0], paths[1], lose_at_most=design.margin, claim=claim)
        is_tp = result.to_dict()["claim"] == "these_problems"
        counts[result.verdict] += 1
        counts["these problems" if is_tp else "like these"] += 1
        losses = (
            tp if is_tp or design.fixed else [loss * margin * (0.96 if design.score else 1) for loss in design.losses]
        )
        mean = float(np.mean(losses))
        wrong["keeps"] += result.verdict == "keeps" and mean > margin
        wrong["loses"] += result.verdict == "loses" and mean <= margin and max(losses) <= margin
        done += 1
    shares = {word: round(100 * count / done, 2) for word, count in counts.items()}
    errors = {}
    for word in ("keeps", "loses"):
        share = wrong[word] / done
        low = stats.beta.ppf(0.01, wrong[word], done - wrong[word] + 1) if wrong[word] else 0.0
        errors[word] = {
            "percent": round(100 * share, 2),
            "error": round(100 * float(np.sqrt(max(share, 1 / done) * (1 - share) / done)), 2),
            "at_least": round(100 * float(low), 2),
            "rounds": done,
        }
    seconds = round(time.perf_counter() - began, 1)
    return {"promise": design.promise, "rounds": done, "errors": errors, "shares": shares, "seconds": seconds}


def main() -> None:
    """Judge the designs that the options name, all of them by default."""
    options = arguments(__doc__, rounds=300, seed=0, only=[""], seconds=100.0)
    judged = {}
    named = {design.name: design for design in MAPS} | {f"gate:{design.name}": design for design in GATES}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only if any(options.only) else named:
            design = named[name]
            until = time.time() + options.seconds
            judge: Any = judge_gate if isinstance(design, GateDesign) else judge_run
            judged[name] = judge(design, options.rounds, options.seed, Path(folder), until)
            print(json.dumps({name: judged[name]}), file=sys.stderr, flush=True)
    keep(options, designs=judged)


if __name__ == "__main__":
    main()
