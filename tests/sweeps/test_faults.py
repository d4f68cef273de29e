"""bench/faults.py in small: the finished run equals the undisturbed one, whatever was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_kill_9_of_driver_and_worker_and_a_full_disk_lose_nothing() -> None:
    words = ["--kinds", "driver", "disk", "worker", "--moments", "2", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "faults.py"), *words], capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["whole"] is True
    for kind in ("driver", "disk", "worker"):
        result = document["kinds"][kind]
        assert (result["blows"], result["finished_runs"] > 0) == (2, True)
        # At work, not before it or after.
        assert any(0 < stored < 144 for stored in result["traces_stored_at_blow"])
