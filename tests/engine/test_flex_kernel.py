"""Attention on CUDA without a GPU: the kernel that torch makes of our mask, compiled by Triton and interpreted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.engine.flex_kernel import LENGTHS, SHARED, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton (extra cuda-check)"),
]

BFLOAT, HALF, EXACT = "bfloat16", "float16", "float32"
#: Each compute capability with both sizes and two groups, each group and size with two capabilities and three.
COMPILED = [
    Case(1, 64, BFLOAT, capability=80, compiled=True),
    Case(1, 128, HALF, capability=90, compiled=True),
    Case(4, 64, BFLOAT, capability=90, compiled=True),
    Case(4, 128, HALF, capability=100, compiled=True),
    Case(7, 64, HALF, capability=100, compiled=True),
    Case(7, 128, BFLOAT, capability=80, compiled=True),
]
#: Triton's interpreter has no bfloat16. Of four parts of a sequence some are empty.
INTERPRETED = [case for case in COMPILED if case.dtype == HALF]
INTERPRETED += [Case(1, 64, EXACT), Case(4, 64, EXACT, splits=4), Case(7, 128, EXACT)]
BOUNDS = {EXACT: 1e-5, HALF: 1e-3}
#: A token that does not see itself, a page that is not listed where the new token is its first.
FAULTS = [
    Case(1, 64, EXACT, ((0, 128),), fault)
    for fault in (
        ("slot % BLOCK <= length[row]", "slot % BLOCK < length[row]"),
        ("number * BLOCK <= batch.length[:, None]", "number * BLOCK < batch.length[:, None]"),
    )
]
#: Batches and lengths that change as they do while decoding; the last needs no kernel of its own.
GROWING = Case(4, 64, BFLOAT, ((300,) * 2, (700,) * 2, (900,) * 3, (1500,) * 2))
ALL = [*COMPILED, *(case for case in INTERPRETED if case not in COMPILED), *FAULTS, GROWING]


def name(case: Case) -> str:
    return f"group {case.group}, size {case.size}, {case.dtype}, capability {case.capability}"


def run(verb: str, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """What tests/engine/flex_kernel.py says of the cases, in a process of its own."""
    command = [sys.executable, "-m", "tests.engine.flex_kernel", verb, json.dumps([asdict(case) for case in cases])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder / "triton")}
    environment |= {"TRITON_INTERPRET": "1"} if verb == "interpret" else {}
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    document: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def emitted(folder: Path) -> dict[Case, dict[str, Any]]:
    return dict(zip(ALL, run("emit", ALL, folder), strict=True))


@pytest.fixture(scope="module")
def errors(folder: Path, emitted: dict[Case, dict[str, Any]]) -> dict[Case, list[float]]:
    cases = [*INTERPRETED, *FAULTS]
    (folder / "emitted.json").write_text(json.dumps([emitted[case] for case in cases]))
    return {case: result["errors"] for case, result in zip(cases, run("interpret", cases, folder), strict=True)}


@pytest.mark.parametrize("case", COMPILED, ids=name)
def test_the_kernel_is_compiled_for_a_gpu(emitted: dict[Case, dict[str, Any]], case: Case) -> None:
    kernels = emitted[case]["machine_code"]
    assert emitted[case]["splits"] == [True]
    assert len(kernels) > 1  # the parts are put together by others
    assert all(kernel["bytes"] > 1000 for kernel in kernels.values())
    assert all(kernel["shared"] <= SHARED[case.capability] for kernel in kernels.values())


@pytest.mark.parametrize("case", INTERPRETED, ids=name)
def test_the_kernel_computes_attention_at_every_border(errors: dict[Case, list[float]], case: Case) -> None:
    assert len(errors[case]) == len(LENGTHS)
    assert max(errors[case]) < BOUNDS[case.dtype]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.fault[1])
def test_a_wrong_bound_is_noticed(errors: dict[Case, list[float]], case: Case) -> None:
    assert min(errors[case]) > 0.01


def test_every_batch_and_length_gets_the_kernel_that_splits_sequences(emitted: dict[Case, dict[str, Any]]) -> None:
    assert emitted[GROWING]["splits"] == [True] * 3
