"""Build the embedded models from nothing: weights, importance head, query statistics and provenance, side by side.

    python recipes/embedded/build.py --out OUT --seed 1 --models tiny-llama

Chains and mazes first (train.py), then ledgers besides (further.py). One process and one thread for each model; the
second part takes hours on CPUs and minutes on a GPU:

    --further "--seconds 330 --device cuda --attention sdpa --rate 1.5e-3 --batch-tokens 24000 --workers 6"

Started again, training goes on from the last checkpoints. Without --out the shipped models are replaced; their model
cards are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

import kvatlas
from kvatlas import models

HERE = Path(__file__).parent
SHIPPED = Path(kvatlas.__file__).parent / "models" / "embedded"
NAMES = ("tiny-llama", "tiny-qwen")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "kvatlas/dynts.safetensors",
    "kvatlas/kv_heads.safetensors",
    "kvatlas/triattention.safetensors",
)
#: What the means of queries are taken over, for `triattention`.
QUERIES = (
    *("CHAIN8", "CHAIN11", "SEQBENCH-4x4", "SEQBENCH-5x5", "LEDGER12", "LEDGER24"),
    *("--problems", "8", "--max-new-tokens", "600"),
)
#: The problems on which the heads of `learned` are trained.
HEADS = (
    *("CHAIN7-14", "SEQBENCH-5x5", "LEDGER12-28"),
    *("--target", "kv_head", "--skip", "1000", "--problems", "60", "--held-out", "10"),
)


def together(commands: Sequence[Sequence[str]]) -> None:
    """Run programs side by side; stop all and fail when one fails."""
    # Threads that spin between two small kernels take the core from the other model; memory given back after each step
    # has to be cleared by the system again, a tenth of the time.
    memory = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
    memory["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    environment = {**os.environ, **memory, "GOMP_SPINCOUNT": "20000", "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, *command], env=environment) for command in commands]
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
    if any(codes):
        sys.exit(f"a program failed: {dict(zip(map(' '.join, commands), codes, strict=True))}")


def ship(built: Path, folder: Path, provenance: dict[str, object]) -> None:
    """Copy what users load into a model's folder, with its provenance; the model card there is kept."""
    (folder / "kvatlas").mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(built / name, folder / name)
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/embedded"), help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where the finished model folders go")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", default="24e6", help="training tokens of each model in the first part")
    parser.add_argument("--more", default="9e6", help="and in the second")
    parser.add_argument("--further", default="--seconds 25000", help="options of further.py")
    options = parser.parse_args()
    started = time.monotonic()
    first = {name: options.work / f"{name}-seed{options.seed}-first" for name in options.models}
    folders = {name: options.work / f"{name}-seed{options.seed}" for name in options.models}
    common = ["--seed", str(options.seed), "--tokens", options.tokens, "--more", options.more]
    together([[str(HERE / "train.py"), "--model", name, "--out", str(first[name]), *common] for name in options.models])
    further = ["--seed", str(options.seed), *shlex.split(options.further)]
    together(
        [
            [str(HERE / "further.py"), "--from", str(first[name]), "--out", str(folders[name]), *further]
            for name in options.models
        ]
    )
    trained = time.monotonic()
    together([[str(HERE / "predictor.py"), "--model", f"hf:{folder}"] for folder in folders.values()])
    together(
        [
            ["-m", "kvatlas", "predictor", "calibrate", str(folder / "triattention.safetensors"), str(folder), *QUERIES]
            for folder in folders.values()
        ]
    )
    together(
        [
            ["-m", "kvatlas", "predictor", "train", str(folder / "kv_heads.safetensors"), str(folder), *HEADS]
            for folder in folders.values()
        ]
    )
    for name, folder in folders.items():
        weights = models.find(f"hf:{folder}").weights_digest
        parts = [
            torch.load(part / "checkpoint.pt", weights_only=True, map_location="cpu") for part in (first[name], folder)
        ]
        provenance = {
            "name": name,
            "program": "recipes/embedded/build.py",
            "date": datetime.now(UTC).date().isoformat(),
            "license": "Apache-2.0",
            "seed": options.seed,
            "tokens": [part["tokens"] for part in parts],
            "steps": [part["step"] for part in parts],
            "training_seconds": [round(part["seconds"]) for part in parts],
            "statistics_seconds": round(time.monotonic() - trained),
            "weights_digest": weights,
            "versions": {package: version(package) for package in ("torch", "transformers")},
        }
        ship(folder, options.out / name, provenance)
    print(json.dumps({"seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
