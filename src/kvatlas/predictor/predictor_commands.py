"""The commands `predictor train` and `predictor calibrate`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note
from kvatlas.cli.progress import count_display, progress_display
from kvatlas.core import KvatlasError, Setting

app = options.Commands()
predictor = options.Commands(no_args_is_help=True)
app.add_typer(
    predictor,
    name="predictor",
    help="Train or calibrate what dynts, learned and triattention need of a model; other policies need nothing.",
)

Head = Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The head of dynts.")]
Skip = Annotated[int, typer.Option(min=0, help="Leave out the first problems, which a map is to be drawn from.")]
Samples = Annotated[int, typer.Option(min=1, help="Traces of each problem.")]
Work = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for traces, to use again.")]


@predictor.command("train")
def train_command(
    out: Head,
    model: options.Model,
    benchmarks: options.Benchmarks,
    problems: options.FirstProblems = None,
    skip: Skip = 0,
    held_out: Annotated[int | None, typer.Option(min=0, help="Last problems, to judge on; default: a fifth.")] = None,
    samples: Samples = 1,
    tokens_per_trace: Annotated[int, typer.Option(min=0, help="Thinking tokens sampled of each trace; 0: all.")] = 2048,
    target: Annotated[
        str, typer.Option(help="answer: one head for dynts. kv_head: one for each layer and KV head, for learned.")
    ] = "answer",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3000,
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
    work: Work = None,
) -> None:
    """Train a head on later attention in correct full-cache traces; print provenance and quality as JSON.

    The attention is that of the answer, or with --target kv_head that of all later tokens by layer and KV head.
    """
    from kvatlas.benchmarks import problems_of
    from kvatlas.predictor.learning import TrainingData, learn, left_out_as_text
    from kvatlas.sweeps import parse_spec
    from kvatlas.sweeps.spec import setting_spec

    if target not in ("answer", "kv_head"):
        raise KvatlasError(f"--target is {target!r}; expected answer or kv_head.")
    out = _written_first(out, "train")
    raw_spec = setting_spec(
        model,
        benchmarks,
        Setting("full"),
        sampling={"temperature": 0.6, "max_new_tokens": max_new_tokens},
        model_options=options.model_options(model_option, template_values),
        problems=None if problems is None else skip + problems,
        samples=samples,
        seed=seed,
    )
    spec = parse_spec(raw_spec, "the options")
    if held_out is None:
        # A fifth of the smallest benchmark, at least one problem.
        counts = [len(problems_of(entry.find(), spec.problems)) for entry in spec.benchmarks]
        held_out = max(1, (min(counts) - skip) // 5)
    provenance = learn(
        TrainingData(spec, skip, held_out, tokens_per_trace),
        work or out.with_suffix(".work"),
        out,
        target=target,
        steps=steps,
        on_step=count_display("training", "steps"),
        on_trace=progress_display(),
    )
    note(f"{out}: learned from {provenance['traces']} traces; left out: {left_out_as_text(provenance['left_out'])}")
    typer.echo(json.dumps(provenance, indent=2))


def _written_first(out: Path, command: str) -> Path:
    """Return the file to write. Raises KvatlasError for a name that ends otherwise, as that of a model."""
    from kvatlas.policies.model_files import path_to_write

    if out.suffix != ".safetensors":
        raise KvatlasError(
            f"The file to write comes first and ends in .safetensors, {str(out)!r} was given; as kvatlas predictor "
            f"{command} head.safetensors embedded:tiny-llama CHAIN6."
        )
    return path_to_write(out)


@predictor.command("calibrate")
def calibrate_command(
    out: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="File for the statistics.")],
    model: options.Model,
    benchmarks: options.Benchmarks,
    problems: Annotated[int, typer.Option(min=1, help="The number of problems of each benchmark.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of a trace.")] = 2048,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
) -> None:
    """Write the query statistics of the policy triattention, from prompts and the model's own traces."""
    from kvatlas.class_files import permit
    from kvatlas.predictor.calibration import calibrate

    out = _written_first(out, "calibrate")
    model_options = options.model_options(model_option, template_values)
    permit(*benchmarks)
    tokens = calibrate(
        model, benchmarks, out, problems=problems, max_new_tokens=max_new_tokens, model_options=model_options
    )
    typer.echo(f"{out}: means over the queries of {tokens:,} tokens")
