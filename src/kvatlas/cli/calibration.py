"""`calibrate`: what a policy has to know of a model before it can run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.sweeps import ModelOption, assignment


def calibrate(
    model: Annotated[str, typer.Argument(help="embedded:NAME or hf:FOLDER.")],
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...")],
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where the statistics go.")],
    problems: Annotated[int, typer.Option(min=1, help="Of each benchmark, its first problems.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest trace to take in.")] = 2048,
    model_option: ModelOption = None,
) -> None:
    """Make the statistics of queries that the policy triattention needs, from prompts and the model's own traces."""
    import torch
    from safetensors.torch import save_file

    from kvatlas import policies
    from kvatlas.benchmarks import find as find_benchmark
    from kvatlas.core import KvatlasError, Sampling, Setting
    from kvatlas.engine import Engine, Request
    from kvatlas.models import find
    from kvatlas.predictor.calibration import query_statistics

    torch.set_num_threads(1)
    if out.is_dir() or not out.parent.is_dir():
        raise KvatlasError(f"--out {str(out)!r} cannot be written; name a file in a folder that is there.")
    found = find(model, **dict(assignment("--model-option", text) for text in model_option or []))
    texts = [
        found.encode(benchmark.prompt(problem))
        for benchmark in map(find_benchmark, benchmarks)
        for problem in benchmark.problems(problems)
    ]
    full = policies.of(Setting.of("full"))
    network = found.network()
    engine = Engine(found, network, [full], Sampling(max_new_tokens=max_new_tokens), 16)
    work = [Request(number, prompt, number, (full,)) for number, prompt in enumerate(texts)]
    whole = [texts[generation.key] + generation.tokens for generation in engine.run(work)]
    save_file(query_statistics(found, network, whole), out, metadata={"model_weights": found.weights_digest})
    typer.echo(f"{out}: means over the queries of {sum(map(len, whole)):,} tokens")


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(calibrate)
