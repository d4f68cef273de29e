"""Peak memory of decoding, measured, against what `kvatlas plan` estimates.

    python bench/memory.py --out bench/results/memory.json

A Llama with random weights whose cached tokens take 32 KB each decodes traces of known lengths, without the full cache
beside four settings and with it. Measured is the growth of the resident memory of a fresh process, its weights
included, up to the peak; estimated is `kvatlas.engine.memory_plan.peak`, `peak_bytes` of `plan --json`: weights,
pages and what stands beside them, waiting snapshots and workspace, not the interpreter and its libraries. Linux only.
Prints one JSON document.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from common import arguments, bench_model, endless, keep, resident
from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.memory_plan import peak

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
PROMPT, OUTPUT, BUDGET, BATCH, TREES = 64, 400, 256, 32, 12
CASES = ("grid", "grid and full")


def measure(folder: Path, case: str) -> dict[str, Any]:
    """Decode in this process."""
    torch.set_num_threads(1)
    handle = endless(folder)
    values = {"kv_budget": BUDGET, "ratio": 0.3, "ratio_over": "thinking"}
    settings = [
        policies.from_setting(Setting.from_parameters("window", local_window=window, **values))
        for window in (16, 32, 64, 96)
    ]
    settings += [policies.from_setting(Setting.from_parameters("full"))] if case != "grid" else []
    prompt = tuple(5 + i % 1000 for i in range(PROMPT))
    # What libraries allocate once, at their first use, is theirs.
    model = handle.load()
    list(Engine(handle, model, settings, Sampling(max_new_tokens=2), 1).run([Request(0, prompt, 0, (settings[0],))]))
    before = resident("VmRSS") - (handle.weight_bytes or 0)
    engine = Engine(handle, model, settings, Sampling(max_new_tokens=OUTPUT), BATCH)
    for _ in engine.run([Request(number, prompt, number, tuple(settings)) for number in range(TREES)]):
        pass
    estimated = peak(handle, settings, BATCH, TREES, PROMPT, OUTPUT)
    measured = resident("VmHWM") - before
    return {
        "estimated": estimated.to_json(),
        "measured": measured,
        "estimated_against_measured": round(estimated.total / measured, 3),
    }


def main() -> None:
    options = arguments(__doc__, case={"choices": CASES}, folder=Path)
    if options.case:
        print(json.dumps(measure(options.folder, options.case)))
        return

    by_name = {}
    with tempfile.TemporaryDirectory() as folder:
        bench_model(Path(folder), SHAPE)
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            by_name[case] = json.loads(done.stdout.splitlines()[-1])
    keep(options, bench="memory", cases=by_name)


if __name__ == "__main__":
    main()
