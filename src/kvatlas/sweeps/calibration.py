"""Statistics of queries for a policy: full-cache traces of a model are decoded, and what they show is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas import policies
from kvatlas.benchmarks import asked_of
from kvatlas.benchmarks import find as find_benchmark
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.models import find


def calibrate(
    model: str,
    benchmarks: Sequence[str],
    out: Path,
    *,
    problems: int,
    max_new_tokens: int,
    model_options: Mapping[str, Any],
) -> int:
    """Write the query statistics that the policy triattention needs; returns the number of tokens behind them.

    They are means over the model's own traces on the first `problems` of each benchmark. KvatlasError for a file that
    cannot be written.
    """
    import torch
    from safetensors.torch import save_file

    from kvatlas.engine import Engine, Request
    from kvatlas.predictor.labels import query_statistics

    torch.set_num_threads(1)
    if out.is_dir() or not out.parent.is_dir():
        raise KvatlasError(f"--out {str(out)!r} cannot be written; name a file in a folder that is there.")
    handle = find(model, **model_options)
    prompts = [
        handle.encode(asked_of(benchmark, handle.reads).prompt(problem))
        for benchmark in map(find_benchmark, benchmarks)
        for problem in benchmark.problems(problems)
    ]
    full = policies.of(Setting.of("full"))
    loaded = handle.load()
    engine = Engine(handle, loaded, [full], Sampling(max_new_tokens=max_new_tokens), 16)
    requests = [Request(number, prompt, number, (full,)) for number, prompt in enumerate(prompts)]
    texts = [prompts[generation.key] + generation.tokens for generation in engine.run(requests)]
    save_file(query_statistics(handle, loaded, texts), out, metadata={"model_weights": handle.weights_digest})
    return sum(map(len, texts))
