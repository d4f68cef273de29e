"""A spec's grid, decoded in this process: tokens and CPU seconds. `bench/decode.py` calls it with the demo's.

    PYTHONPATH=TREE/src python bench/demo_grid.py PROBLEMS SPEC [--shares]

The spec's first model on its last benchmark under all settings that compress, as many sequences at a time as a worker
takes by default on a CPU, one thread, one problem beforehand that does not count. Each source tree has its own:
`decode.py` compares them. Prints one JSON document.

With --shares the same is decoded once more while torch's operators are timed, and the document says what share of the
time native kernels and operators take; what is left is the interpreter's (Python, ctypes, and calls into torch and
back). All of them are CPU seconds of this thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from kvatlas import sweeps
from kvatlas.engine import Engine, Request
from kvatlas.engine.memory_plan import CPU_BATCH
from kvatlas.noise import stream_key


def main() -> None:
    problems, spec, shares = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["--shares"]
    torch.set_num_threads(1)
    data = yaml.safe_load(spec.read_text())
    data |= {"models": data["models"][:1], "benchmarks": data["benchmarks"][-1:], "problems": problems + 1}
    plan = sweeps.make_plan(sweeps.parse_spec(data))
    (model,), (benchmark,) = plan.models, plan.benchmarks
    settings = tuple(policy for policy, _ in plan.policies if policy.budget is not None)
    work = []
    for problem in plan.problems[benchmark.name]:
        stream = stream_key(0, model.name, benchmark.name, problem.id, 0)
        work.append(Request(problem.id, model.encode(benchmark.prompt(problem)), stream, settings))
    kernels = TimedKernels() if shares else None
    engine = Engine(model, model.load(), settings, plan.spec.sampling.sampling(), CPU_BATCH)
    for _ in engine.run(work[:1]):
        pass
    if kernels is not None:
        kernels.seconds = 0.0
    before = engine.decoded_tokens
    began = time.thread_time()
    written = sum(len(generation.tokens) for generation in engine.run(work[1:]))
    seconds = time.thread_time() - began
    result = {
        "settings": len(settings),
        "decoded_tokens": engine.decoded_tokens - before,
        "trace_tokens": written,
        "seconds": round(seconds, 3),
    }
    if kernels is not None:
        parts = {"native_kernels": kernels.seconds / seconds, "torch_operators": operators(engine, work[1:]) / seconds}
        parts["interpreter"] = 1 - sum(parts.values())
        if parts["interpreter"] < 0:
            raise SystemExit(f"The parts take longer than the whole, so that the machine was too busy: {parts}")
        result["shares"] = {name: round(share, 3) for name, share in parts.items()}
    print(json.dumps(result))


class TimedKernels:
    """Times native kernels, from before the first layer is packed."""

    def __init__(self) -> None:
        from kvatlas.cpu.native import load

        self.seconds = 0.0
        native = load()
        if native is None:
            raise SystemExit("There are no native kernels here to be timed.")
        names = ("linear", "attend", "rms_norm", "silu_mul", "rotate", "uniform", "decoder_layers", "compact", "sample")
        for name in names:
            kernel = getattr(native.library, f"kvatlas_{name}", None)
            # Other source trees have fewer.
            if kernel is not None:
                timed = self._timed(kernel)
                setattr(native.library, f"kvatlas_{name}", timed)
                setattr(native, f"_{name}", timed)

    def _timed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object) -> Any:
            began = time.thread_time()
            result = kernel(*arguments)
            self.seconds += time.thread_time() - began
            return result

        return timed


def operators(engine: Engine, work: list[Request[str]]) -> float:
    """CPU seconds that torch's operators take for the same work.

    Its profiler tells them by the clock on the wall, on which this thread also waits for others. They are taken to wait
    as much as the whole pass does.
    """
    wall_began = time.perf_counter()
    began = time.thread_time()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in engine.run(work):
            pass
        seconds = time.thread_time() - began
        wall_seconds = time.perf_counter() - wall_began
    on_the_wall = sum(event.self_cpu_time_total for event in profile.key_averages()) / 1e6
    return on_the_wall * seconds / wall_seconds


if __name__ == "__main__":
    main()
