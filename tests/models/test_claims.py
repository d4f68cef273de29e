"""What a model says it can do, and who says so where more is asked of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas.benchmarks import find as find_benchmark
from kvatlas.models import embedded, find
from kvatlas.models.claims import FILE, Claims
from kvatlas.sweeps import make_plan, parse_spec

RANGES = {"CHAIN": {"n": [3, 12]}, "SEQBENCH": {"grid": ["4x4", "6x5"], "B": [0, 1], "N": [0, 1.5], "L": [3, 16]}}


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("CHAIN3", 0),
        ("CHAIN12", 0),
        ("CHAIN13", 10),
        ("CHAIN10-14", 4),
        ("SEQBENCH-4x4", 0),
        ("SEQBENCH-6x5-B1-N1.5", 0),
        ("SEQBENCH-5x6", 10),
        ("SEQBENCH-3x4", 10),
        ("SEQBENCH-6x5-N1.6", 10),
        ("SEQBENCH-5x5-B2", 10),
        ("SEQBENCH-6x5-L16-N0.5", 0),
        ("SEQBENCH-6x5-L17-N0.5", 10),
        ("WORDS4", 10),
    ],
)
def test_both_ends_are_within(name: str, outside: int, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(RANGES))
    assert Claims.read(tmp_path).outside(name, find_benchmark(name).problems(10)) == outside


def test_a_model_that_claims_nothing_is_never_asked_too_much(tmp_path: Path) -> None:
    claims = Claims.read(tmp_path)
    assert claims.outside("CHAIN26", find_benchmark("CHAIN26").problems(3)) == 0
    assert str(claims) == ""


@pytest.mark.parametrize("name", embedded())
def test_what_ships_says_what_it_can_do(name: str) -> None:
    claims = Claims.read(find(name).folder)
    assert set(claims.ranges) == {"CHAIN", "SEQBENCH"}
    assert str(claims).startswith("CHAIN with n 3 to ")


def test_a_plan_says_in_one_line_what_lies_outside() -> None:
    spec = {"models": ["embedded:tiny-llama"], "problems": 5, "samples": 1, "baseline": {"policy": "full"}}
    spec |= {"sampling": {"max_new_tokens": 200}}
    inside = make_plan(parse_spec(spec | {"benchmarks": ["CHAIN6", "SEQBENCH-4x4-B1"]}))
    assert not inside.warnings
    (said,) = make_plan(parse_spec(spec | {"benchmarks": ["CHAIN6", "CHAIN20", "SEQBENCH-4x4-N3"]})).warnings
    assert "5 of 5 of CHAIN20, 5 of 5 of SEQBENCH-4x4-N3." in said
    assert "\n" not in said
    assert "CHAIN6" not in said
