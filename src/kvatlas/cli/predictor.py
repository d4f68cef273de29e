"""The DynTS predictor: train it, judge it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.cli.progress import showing
from kvatlas.cli.sweeps import BatchSize, ModelOption, Quiet, Workers, assignments

Address = Annotated[str, typer.Option("--model", help="embedded:NAME, hf:FOLDER or hf:OWNER/NAME.")]
Benchmarks = Annotated[list[str], typer.Option("--benchmark", help="May be given several times.")]
Problems = Annotated[int | None, typer.Option(min=1, help="Problems of each benchmark; default: all.")]
Skip = Annotated[int, typer.Option(min=0, help="Leave out the first problems, which a map is to be drawn from.")]
Samples = Annotated[int, typer.Option(min=1, help="Traces of each problem.")]
Seed = Annotated[int, typer.Option(min=0)]
Temperature = Annotated[float, typer.Option(min=0)]
MaxNewTokens = Annotated[int, typer.Option(min=1)]
Work = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="For traces and hidden states, which are used again.")
]


def train(
    model: Address,
    benchmark: Benchmarks,
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="The head, for `dynts`.")],
    problems: Problems = None,
    skip: Skip = 0,
    held_out: Annotated[int | None, typer.Option(min=0, help="Last problems, to judge on; default: a fifth.")] = None,
    samples: Samples = 1,
    tokens_per_trace: Annotated[int, typer.Option(min=0, help="Thinking tokens sampled of each trace; 0: all.")] = 2048,
    layout: Annotated[
        str, typer.Option(help="The head: ours (biases, GELU) or authors (no biases, softplus).")
    ] = "ours",
    loss: Annotated[
        str,
        typer.Option(
            help="ranked: log(1 + label), with a ranking loss (default for ours); scaled: attention x 10^4, weighted "
            "(default for authors, theirs for R1-Llama); power: attention^0.3, weighted (theirs for R1-Qwen)."
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=1)] = 3000,
    seed: Seed = 0,
    temperature: Temperature = 0.6,
    max_new_tokens: MaxNewTokens = 16_384,
    model_option: ModelOption = None,
    work: Work = None,
    workers: Workers = None,
    batch_size: BatchSize = None,
    quiet: Quiet = False,
) -> None:
    """Train a head on the answer's attention in correct full-cache traces; prints provenance and quality as JSON."""
    from kvatlas.core import KvatlasError
    from kvatlas.sweeps.predictor_pipeline import Material, learn, left_out_as_text

    if out.suffix != ".safetensors":
        raise KvatlasError(f"--out is {str(out)!r}; valid are names that end in .safetensors.")
    spec = _spec(model, model_option, benchmark, problems, skip, samples, seed, temperature, max_new_tokens)
    last = held_out
    if last is None:
        # A fifth of the smallest benchmark, at least one problem.
        sizes = [len(entry.find().problems(spec.problems)) - skip for entry in spec.benchmarks]
        last = max(1, min(sizes) // 5)
    material = Material(spec, skip, last, tokens_per_trace)
    with showing(quiet) as on_trace:
        provenance = learn(
            material,
            work or out.with_suffix(".work"),
            out,
            steps=steps,
            layout=layout,
            loss=loss,
            workers=workers,
            batch_size=batch_size,
            on_trace=on_trace,
        )
    left_out = left_out_as_text(provenance["left_out"])
    typer.echo(f"learned from {provenance['traces']} traces; left out: {left_out}", err=True)
    typer.echo(json.dumps(provenance, indent=2))


def evaluate(
    head: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The head to judge.")],
    model: Address,
    benchmark: Benchmarks,
    problems: Problems = None,
    skip: Skip = 0,
    samples: Samples = 1,
    seed: Seed = 1,
    temperature: Temperature = 0.6,
    max_new_tokens: MaxNewTokens = 16_384,
    model_option: ModelOption = None,
    work: Work = None,
    workers: Workers = None,
    batch_size: BatchSize = None,
    quiet: Quiet = False,
) -> None:
    """Judge a head on traces that it was not trained on: rank correlation, overlap of the top 20 %; prints JSON."""
    from kvatlas.core import KvatlasError
    from kvatlas.sweeps.predictor_pipeline import Material, judge

    if not head.is_file():
        raise KvatlasError(f"The predictor {str(head)!r} is not there.")
    spec = _spec(model, model_option, benchmark, problems, skip, samples, seed, temperature, max_new_tokens)
    material = Material(spec, skip)
    folder = work or head.with_suffix(".eval")
    with showing(quiet) as on_trace:
        quality = judge(head, material, folder, workers=workers, batch_size=batch_size, on_trace=on_trace)
    typer.echo(json.dumps(quality, indent=2))


def _spec(
    model: str,
    model_option: list[str] | None,
    benchmark: list[str],
    problems: int | None,
    skip: int,
    samples: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
) -> Any:
    from kvatlas.sweeps import parse_spec

    options = assignments("--model-option", model_option)
    return parse_spec(
        {
            "models": [{"model": model, **options}],
            "benchmarks": benchmark,
            "problems": None if problems is None else skip + problems,
            "samples": samples,
            "seed": seed,
            "sampling": {"temperature": temperature, "max_new_tokens": max_new_tokens},
            "baseline": {"policy": "full"},
        },
        "the options",
    )


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    group = typer.Typer(no_args_is_help=True)
    group.command()(train)
    group.command("eval")(evaluate)
    app.add_typer(group, name="predictor", help="The DynTS importance predictor.")
