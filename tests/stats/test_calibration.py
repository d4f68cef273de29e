"""The promises of the limits in exact sums; bench/calibration.py has more, bench/chain_errors.py whole runs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def deep(*values: Any) -> Any:
    """A case of `make deep`."""
    return pytest.param(*values, marks=pytest.mark.deep)


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


def test_limits_err_at_most_at_their_level_whatever_the_true_loss(exact_errors: ModuleType) -> None:
    # Quantiles are approximate.
    assert max(row["over_level"] for row in exact_errors.limit_errors()) <= 0.0005


def test_limits_over_unlike_benchmarks_err_at_most_at_their_level(exact_errors: ModuleType) -> None:
    rows = exact_errors.limit_errors_over_benchmarks([(30, 30), (8, 198)], [0.05])
    assert max(row["over_level"] for row in rows) <= 0.0005


@pytest.mark.parametrize("settings", [1, deep(3)])
def test_a_setting_just_beyond_the_margin_is_kept_in_at_most_5_percent(exact_errors: ModuleType, settings: int) -> None:
    rows = list(exact_errors.recommendation_errors(margins=[0.03], sequences=[settings]))
    assert max(row["error"] for row in rows) <= 0.05
    # The bound is nearly reached, so the search has found the hard cases.
    assert min(row["error"] for row in rows) > 0.045
