"""Decoding speed beside kvpress' DecodingPress: the same model, policy, budget and batch, one thread, in turns.

    python bench/peers.py FOLDER --peer build/conformance/environment/bin/python

FOLDER holds a model in transformers' form; `make conformance` makes the environment of kvpress. Each arm decodes whole
cycles: it samples (temperature 0.6, top-k 20, top-p 0.95) as many tokens as lie between two compressions, and then
compresses once. Caches are filled by hand with random tokens. Times are CPU seconds of the thread that decodes; every
round runs both arms of a case, kvpress in a fresh process. `speed` is the median over rounds of kvpress' time / ours.
Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import FilledEngine, arguments, endless, keep
from kvatlas.core import Sampling, Setting
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy, from_setting

#: Cases: the tokens in the cache after a compression, and those between two compressions.
CYCLES = {256: (224, 64), 4096: (4076, 40)}
#: Of each policy the parameters with which kvpress does the same.
PARAMETERS: dict[str, dict[str, Any]] = {
    "snapkv": {"queries": 32, "local_window": 32, "kernel": 5, "pooling": "avg"},
    "random": {"local_window": 1},
}


class OurCycle:
    """Cycles of our loop under one policy, with sequences of `kept` tokens."""

    def __init__(self, handle: ModelHandle, name: str, batch: int, kept: int, every: int) -> None:
        values = {"kv_budget": kept, "every": every, "every_from": "prompt", "keep_prompt": False, **PARAMETERS[name]}
        self.policy: Policy = from_setting(Setting.from_parameters(name, **values))
        sampling = Sampling(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=10**6)
        self.engine = FilledEngine(handle, [self.policy], sampling, batch, kept + every)
        self.kept = kept
        self.every = every

    def seconds(self) -> float:
        """CPU seconds of one cycle."""
        self.engine.put(self.kept, self.policy)
        rows = self.engine.scheduler.rows
        for row in rows:
            row.trigger = self.kept + self.every
        seconds = self.engine.step(self.every)
        assert all(row.compressions == 1 and row.cached.length == self.kept for row in rows), "no compression"
        return seconds


def peer_seconds(python: Path, folder: Path, *case: object) -> float:
    """CPU seconds of one cycle of kvpress."""
    program = Path(__file__).with_name("kvpress_cycle.py")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = clean | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(program), str(folder), *map(str, case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    python = Path("build/conformance/environment/bin/python")
    options = arguments(__doc__, "folder", peer=str(python), cached=[256, 4096], batches=[1, 16], rounds=3)
    torch.set_num_threads(1)
    handle = endless(options.folder)
    results = []
    for cached in options.cached:
        kept, every = CYCLES[cached]
        for batch in options.batches:
            for name in PARAMETERS:
                ours = OurCycle(handle, name, batch, kept, every)
                # The first cycle allocates.
                ours.seconds()
                seconds: dict[str, list[float]] = {"kvatlas": [], "kvpress": []}
                for _ in range(options.rounds):
                    seconds["kvatlas"].append(ours.seconds())
                    seconds["kvpress"].append(peer_seconds(options.peer, options.folder, name, batch, kept, every))
                del ours
                pairs = zip(seconds["kvatlas"], seconds["kvpress"], strict=True)
                results.append(
                    {
                        "policy": name,
                        "batch": batch,
                        "cached": cached,
                        "kept": kept,
                        "every": every,
                        "seconds": {arm: [round(taken, 3) for taken in arms] for arm, arms in seconds.items()},
                        "tokens_per_cpu_second": {
                            arm: round(batch * every / min(arms), 2) for arm, arms in seconds.items()
                        },
                        "speed": round(median(theirs / own for own, theirs in pairs), 2),
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    keep(options, bench="peers", peer_version="kvpress 0.5.5", results=results)


if __name__ == "__main__":
    main()
