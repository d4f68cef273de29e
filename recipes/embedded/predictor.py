"""Train the DynTS head of an embedded model on correct full-cache traces of problems outside the test sets.

    python recipes/embedded/predictor.py --model embedded:tiny-llama

Writes dynts.safetensors with its provenance into the model's folder and prints the quality on held-out traces.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from kvatlas import benchmarks, models
from kvatlas.benchmarks.chain import STANDARD_PROBLEMS
from kvatlas.core import Sampling, Setting, Trace
from kvatlas.predictor import Examples, evaluate, examples, train
from kvatlas.sweep.plan import Unit
from kvatlas.sweep.work import Job, decode


def correct_traces(
    model: models.Model, names: list[str], first: int, count: int, seed: int
) -> list[tuple[tuple[int, ...], Trace]]:
    """Correct full-cache traces (with their prompts) of `count` problems of each benchmark from index `first` on."""
    units, prompts = [], {}
    for name in names:
        benchmark = benchmarks.find(name)
        for problem in benchmark.problems(first + count)[first:]:
            units.append(Unit(name, problem, 0, (Setting.of("full"),)))
            prompts[name, problem.id] = model.encode(benchmark.prompt(problem))
    sampling = Sampling(temperature=0.8, max_new_tokens=700)
    job = Job(model.name, model.weights_digest, tuple(units), sampling, seed, batch_size=64)
    found = sorted((trace for trace, _ in decode(job, range(len(units)))), key=lambda t: (t.benchmark, t.problem))
    return [(prompts[trace.benchmark, trace.problem], trace) for trace in found if trace.grade.correct]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded:tiny-llama")
    parser.add_argument("--benchmarks", nargs="+", default=["CHAIN8", "CHAIN10", "CHAIN12", "CHAIN14"])
    parser.add_argument("--problems", type=int, default=200, help="problems of each benchmark to learn from")
    parser.add_argument("--held-out", type=int, default=25, help="problems of each benchmark to evaluate on")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="default: the model's folder")
    options = parser.parse_args()

    model = models.find(options.model)
    network = model.network()

    def gather(first: int, count: int) -> Examples:
        return examples(model, network, correct_traces(model, options.benchmarks, first, count, options.seed))

    learned = gather(STANDARD_PROBLEMS, options.problems)
    head = train(learned, steps=options.steps, seed=options.seed)
    quality = evaluate(head, gather(STANDARD_PROBLEMS + options.problems, options.held_out))
    provenance = {
        "program": "recipes/embedded/predictor.py",
        "model_weights": model.weights_digest,
        "benchmarks": " ".join(options.benchmarks),
        "traces": str(int(learned.trace.max()) + 1),
        "tokens": str(learned.label.numel()),
        "steps": str(options.steps),
        "seed": str(options.seed),
        "held_out": json.dumps(asdict(quality)),
    }
    out = options.out or model.folder
    save_file(head, out / "dynts.safetensors", metadata=provenance)
    print(json.dumps(provenance, indent=2))


if __name__ == "__main__":
    main()
