"""Train the DynTS head of an embedded model on correct full-cache traces of problems outside the test sets.

    python recipes/embedded/predictor.py --model embedded:tiny-llama

What `kvatlas predictor train` does, with the problems and sampling of the embedded models. Writes dynts.safetensors
with its provenance into the model's folder and prints the quality on held-out traces.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvatlas import models
from kvatlas.policies.dynts import HEAD_FILE
from kvatlas.policies.model_files import path_to_write
from kvatlas.predictor.learning import TrainingData, learn
from kvatlas.sweeps import parse_spec

# The test sets: problems that nothing learns from.
STANDARD_PROBLEMS = 300
CHAINS = ["CHAIN8", "CHAIN10", "CHAIN12"]
MAZES = ["SEQBENCH-4x4", "SEQBENCH-5x5", "SEQBENCH-4x4-B1"]
LEDGERS = ["LEDGER8-36", "LEDGER24-36"]
BENCHMARKS = [*CHAINS, *MAZES, *LEDGERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded:tiny-llama")
    parser.add_argument("--benchmarks", nargs="+", default=BENCHMARKS)
    parser.add_argument("--problems", type=int, default=150, help="problems of each benchmark to learn from")
    parser.add_argument("--held-out", type=int, default=25, help="problems of each benchmark to evaluate on")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="for traces and states; default: in the model's folder")
    parser.add_argument("--out", type=Path, default=None, help="default: the model's folder")
    options = parser.parse_args()

    spec = parse_spec(
        {
            "models": [options.model],
            "benchmarks": options.benchmarks,
            "problems": STANDARD_PROBLEMS + options.problems + options.held_out,
            "samples": 1,
            "seed": options.seed,
            "sampling": {"temperature": 0.8, "max_new_tokens": 1100},
        }
    )
    material = TrainingData(spec, skip=STANDARD_PROBLEMS, held_out=options.held_out, tokens_per_trace=0)
    folder = models.find(options.model).folder
    out = path_to_write((options.out or folder) / HEAD_FILE)
    print(json.dumps(learn(material, options.work or folder / "predictor", out, steps=options.steps, workers=1)))


if __name__ == "__main__":
    main()
