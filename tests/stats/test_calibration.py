"""The promises of the statistics on the hardest designs known, in a minute; bench/calibration.py measures them all."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvatlas.stats.numerics.levels import permute_levels
from kvatlas.stats.table import GradeMatrix
from kvatlas.stats.verdicts import levels_of, verdict

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module", autouse=True)
def _bench_is_importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCH))
    try:
        yield
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def exact_errors(_bench_is_importable: None) -> ModuleType:
    return importlib.import_module("exact_errors")


@pytest.fixture(scope="module")
def simulations(_bench_is_importable: None) -> ModuleType:
    return importlib.import_module("simulations")


@pytest.fixture(scope="module")
def designs(_bench_is_importable: None) -> dict[str, dict[str, Any]]:
    return importlib.import_module("designs").TUNING


def three_standard_errors(chance: float, rounds: int) -> float:
    return 3 * float(np.sqrt(chance * (1 - chance) / rounds))


# Exact sums.


def test_limits_err_at_most_at_their_level_whatever_the_true_loss(exact_errors: ModuleType) -> None:
    # Quantiles are approximate.
    assert max(row["over_level"] for row in exact_errors.limit_errors()) <= 0.0005


def test_limits_over_unlike_benchmarks_err_at_most_at_their_level(exact_errors: ModuleType) -> None:
    rows = exact_errors.limit_errors_over_benchmarks([(30, 30), (8, 198)], [0.05])
    assert max(row["over_level"] for row in rows) <= 0.0005


def test_a_setting_just_beyond_the_margin_is_kept_in_at_most_5_percent(exact_errors: ModuleType) -> None:
    rows = list(exact_errors.recommendation_errors(margins=[0.03, 0.05], sequences=[1, 2]))
    assert max(row["error"] for row in rows) <= 0.05
    # The bound is nearly reached, so the search has found the hard cases.
    assert min(row["error"] for row in rows) > 0.045


# Simulations with fixed seeds.
