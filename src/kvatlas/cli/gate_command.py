"""The command that judges a change: gate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_text
from kvatlas.cli.progress import count_display
from kvatlas.cli.serving import KEY

app = options.Commands()


@app.command("gate")
def gate_command(
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE", help="lm-eval's samples, a log of Inspect, RUN@CELL, a file of answers, or an address."
        ),
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same after the change.")],
    benchmarks: Annotated[
        list[str] | None, typer.Argument(metavar="BENCHMARK...", help="What two endpoints are asked.")
    ] = None,
    lose_at_most: Annotated[
        float, typer.Option(callback=options.margin, metavar="POINTS", help="Margin in points.")
    ] = 3.0,
    claim: Annotated[
        str, typer.Option(help="auto, these_problems (however often sampled) or problems_like_these.")
    ] = "auto",
    metric: Annotated[str, typer.Option(help="Metric or scorer of the logs; default: their first.")] = "",
    filter_: Annotated[str, typer.Option("--filter", help="Filter of lm-eval's samples; default: their first.")] = "",
    task: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Only this task. Repeat it.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="DIFFERENCE", help="prompts, version, grading or missing. Repeat it."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Endpoints: answers to each problem.")] = 1,
    problems: options.FirstProblems = None,
    temperature: options.Temperature = 0.6,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Endpoints: limit of an answer.")] = 16_384,
    seed: options.Seed = 0,
    served: Annotated[
        list[str] | None, typer.Option(help="Endpoints: the model's name there; twice for two names.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Endpoints: open questions at a time.")] = 8,
    answers: Annotated[
        Path, typer.Option(metavar="RUN", help="Endpoints: the run of their answers, which is resumed.")
    ] = Path("gate-answers"),
    again: Annotated[bool, typer.Option("--again", help="Endpoints: ask all anew, as after a new deployment.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page (.html) or the figure (.png, .svg, .pdf).")
    ] = None,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
) -> None:
    """Judge whether a change cost answers. Exit code 0 if it keeps them, 1 if it loses, 3 if that cannot be told.

    Both sides answer the same questions. Piped, the text is Markdown. KVATLAS_API_KEY holds the key of endpoints.
    """
    from kvatlas.gates.endpoints import Asking
    from kvatlas.gates.gate import gate as judged
    from kvatlas.gates.gate_page import check_out

    if out is not None:
        check_out(out)
    asking = Asking(
        benchmarks=tuple(benchmarks or ()),
        problems=problems,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        concurrency=concurrency,
        models=tuple(served or ()),
        key=os.environ.get(KEY),
        answers=answers,
        again=again,
        allow_code=allow_code,
    )
    result = judged(
        before,
        after,
        lose_at_most=lose_at_most,
        claim=claim,
        metric=metric,
        filter=filter_,
        tasks=task or (),
        allow=allow or (),
        asking=asking,
        on_trace=count_display("gate", "answers"),
    )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print_text(str(result))
    if out is not None:
        note(f"{result.write(out)}")
    raise typer.Exit(result.exit_code)
