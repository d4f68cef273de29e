"""Runs made of numbers: a manifest and traces whose grades follow a given function."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.results import Expected, Manifest
from kvatlas.results.records import TraceColumns, join_records, record, small_of
from kvatlas.stats.numerics.against_reference import losses_of_units
from kvatlas.stats.numerics.arrays import Difference, Floats, Ints
from kvatlas.stats.numerics.units import units_of_traces
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import ModelSetting, systems_of
from kvatlas.stats.table import TraceTable

WINDOWS = (8, 16, 32)
RATIOS = (0.1, 0.3, 0.5)
AXES = (("local_window", WINDOWS), ("ratio", RATIOS))


def losses(
    differences: Floats, strata: Ints, margin: float, sequences: Sequence[Sequence[int]]
) -> list[Difference | None]:
    """Return what settings lose; `differences` [settings, problems] are their means minus the reference's."""
    lost = -differences[..., None]
    return losses_of_units(units_of_traces(lost, ~np.isnan(lost), strata, by_trace=True), margin, sequences)


def setting(policy: str, window: int, ratio: float, **fixed: object) -> Setting:
    return Setting.from_parameters(policy, kv_budget=96, local_window=window, ratio=ratio, **fixed)


def grid(*policies: str, **fixed: object) -> list[Setting]:
    return [setting(policy, window, ratio, **fixed) for policy in policies for window in WINDOWS for ratio in RATIOS]


def manifest(
    settings: Sequence[Setting],
    *,
    models: Sequence[str] = ("tiny",),
    benchmarks: Sequence[str] = ("CHAIN6", "CHAIN8"),
    baselines: Sequence[Setting] = (Setting.from_parameters("full"),),
    problems: int = 12,
    samples: int = 2,
    axes: tuple[tuple[str, tuple[object, ...]], ...] = AXES,
) -> Manifest:
    ids = tuple(f"p{number}" for number in range(problems))
    expected = tuple(
        Expected(model, benchmark, cell, f"key-{model}-{benchmark}", ids, samples, cell in baselines)
        for model in models
        for benchmark in benchmarks
        for cell in (*settings, *baselines)
    )
    return Manifest(axes, expected, {"seed": 0, "models": list(models)}, {"version": "0.1.0"})


def trace(expected: Expected, problem: str, sample: int, correct: bool, **changes: object) -> Trace:
    usage = Usage(20, 100, 80, 96, 60.0 + sample, 2, 0.1)
    grade = Grade(
        correct, 1.0 if correct else 0.5, "7" if correct else None, Status.OK if correct else Status.TRUNCATED
    )
    values = {"text": f"so {problem}\n</think>7", "grade": grade, "usage": usage} | changes
    return Trace(
        model=expected.model,
        benchmark=expected.benchmark,
        problem=problem,
        sample=sample,
        setting=expected.setting,
        tokens=(1, 2, zlib.crc32(f"{expected.setting.id} {problem} {sample}".encode()) % 1000),
        **values,  # type: ignore[arg-type]
    )


def traces(
    plan: Manifest, chance: Callable[[Setting], float] = lambda _: 0.5, seed: int = 0
) -> Iterator[tuple[str, Trace]]:
    generator = np.random.default_rng(seed)
    for expected in plan.expected:
        for problem in expected.problems:
            for sample in range(expected.samples):
                yield expected.run_key, trace(expected, problem, sample, generator.random() < chance(expected.setting))


def columns_of(stored: Iterable[tuple[str, Trace]]) -> TraceColumns:
    """The columns of traces with their run keys, as those of a store."""
    codes: dict[str, int] = {}
    rows = []
    for run_key, each in stored:
        small = small_of(run_key, each)
        digest = bytes.fromhex(each.token_digest)
        rows.append((0, *record(small, digest, each.made_with, lambda text: codes.setdefault(text, len(codes)))))
    _, records, measured = join_records(rows)
    return TraceColumns(records, measured, tuple(codes))


def run_of(plan: Manifest, stored: Iterable[tuple[str, Trace]] = (), **options: object) -> RunData:
    """A run of a plan with these traces, which are in no store."""
    return RunData(plan, TraceTable(plan, [columns_of(stored)]), **options)  # type: ignore[arg-type]


def system(model: str, cell: Setting, values: object, depths: Sequence[float] | None = None) -> ModelSetting:
    """A model under a setting, in a run of its own: progress by problem, or by problem and sample; NaN is missing."""
    by_sample = np.array(values, float)
    by_sample = by_sample.reshape(len(by_sample), -1)
    plan = manifest([], models=(model,), benchmarks=("B",), baselines=(cell,), problems=len(by_sample))
    about = {} if depths is None else {"B": {f"p{n}": {"L": float(depth)} for n, depth in enumerate(depths)}}
    (expected,) = (replace(one, samples=by_sample.shape[1]) for one in plan.expected)
    stored = []
    for problem, row in zip(expected.problems, by_sample.tolist(), strict=True):
        for sample, value in enumerate(row):
            if not math.isnan(value):
                grade = Grade(value == 1, value, "7", Status.OK)
                stored.append((expected.run_key, trace(expected, problem, sample, value == 1, grade=grade)))
    (found,) = systems_of([run_of(replace(plan, expected=(expected,), about=about), stored)])
    return found
