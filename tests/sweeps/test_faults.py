"""bench/faults.py in small: the finished run equals the undisturbed one, whatever was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def blows(moments: int, *kinds: str, seed: int = 1) -> dict[str, Any]:
    words = ["--kinds", *kinds, "--moments", str(moments), "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "faults.py"), *words], capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["whole"] is True
    kinds_: dict[str, Any] = document["kinds"]
    return kinds_


@pytest.mark.slow
def test_kill_9_of_the_driver_and_a_full_disk_lose_nothing() -> None:
    result = blows(3, "driver", "disk")
    assert all(entry["blows"] == 3 and entry["finished_runs"] for entry in result.values())
    # At work, not before it or after.
    assert any(0 < stored < 144 for stored in result["driver"]["traces_stored_at_blow"])
    assert any(0 < stored < 144 for stored in result["disk"]["traces_stored_at_blow"])


@pytest.mark.slow
def test_kill_9_of_a_worker_loses_nothing() -> None:
    result = blows(1, "worker")
    assert result["worker"]["blows"] == 1
