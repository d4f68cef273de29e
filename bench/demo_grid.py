"""The demo's grid on chains, decoded in this process: tokens and CPU seconds. `bench/decode.py` calls it.

    PYTHONPATH=TREE/src python bench/demo_grid.py PROBLEMS

`embedded:tiny-llama` on CHAIN7-16 under all settings of the demo that compress, 64 sequences at a time, one thread, one
problem beforehand that does not count. It uses only what any source tree of kvatlas has, so that trees can be compared:
a plan, an engine and its `run`. Prints one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.resources import files

import torch
import yaml

from kvatlas.engine import Engine, Request
from kvatlas.noise import stream_key
from kvatlas.sweep import make_plan, parse_spec

MODEL, BENCHMARK, BATCH = "embedded:tiny-llama", "CHAIN7-16", 64


def main() -> None:
    problems = int(sys.argv[1])
    torch.set_num_threads(1)
    data = yaml.safe_load((files("kvatlas.sweep") / "demo.yaml").read_text())
    plan = make_plan(parse_spec({**data, "models": [MODEL], "benchmarks": [BENCHMARK], "problems": problems + 1}))
    (model,), (benchmark,) = plan.models, plan.benchmarks
    settings = tuple(policy for policy, _ in plan.policies if policy.budget is not None)
    work = []
    for problem in plan.problems[benchmark.name]:
        stream = stream_key(0, model.weights_digest, benchmark.name, problem.id, 0)
        work.append(Request(problem.id, model.encode(benchmark.prompt(problem)), stream, settings))
    engine = Engine(model, model.network(), settings, plan.spec.sampling.sampling(), BATCH)
    for _ in engine.run(work[:1]):
        pass
    before, began = engine.decoded_tokens, time.process_time()
    written = sum(len(generation.tokens) for generation in engine.run(work[1:]))
    seconds = time.process_time() - began
    print(
        json.dumps(
            {
                "settings": len(settings),
                "decoded_tokens": engine.decoded_tokens - before,
                "trace_tokens": written,
                "seconds": round(seconds, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
