"""The command that judges a change: gate."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_text
from kvatlas.cli.progress import count_display
from kvatlas.cli.serving import KEY
from kvatlas.core import KvatlasError

app = options.Commands()
#: The heading of the options that only addresses have a use for.
_OF_ENDPOINTS = "Options of endpoints"


def _endpoint_option(about: str, *names: str, **named: Any) -> Any:
    return typer.Option(*names, help=about, rich_help_panel=_OF_ENDPOINTS, **named)


@app.command("gate")
def gate_command(
    context: typer.Context,
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
    metric: Annotated[
        str, typer.Option(help="Metric of the logs, SCORER or SCORER:KEY of Inspect's; default: their first.")
    ] = "",
    filter_: Annotated[str, typer.Option("--filter", help="Filter of lm-eval's samples; default: their first.")] = "",
    task: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Only this task. Repeat it.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="DIFFERENCE", help="prompts, version, grading or missing. Repeat it."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse sides with other sampling or solver.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page (.html) or the figure (.png, .svg, .pdf).")
    ] = None,
    as_json: options.Json = False,
    samples: Annotated[int, _endpoint_option("Answers to each problem.", min=1)] = 1,
    problems: Annotated[int | None, _endpoint_option("Only the first problems.", min=1)] = None,
    temperature: Annotated[float, _endpoint_option("Sampling temperature; 0 is greedy.", min=0)] = 0.6,
    max_new_tokens: Annotated[int, _endpoint_option("Limit of an answer.", min=1)] = 16_384,
    seed: Annotated[int, _endpoint_option("Another seed gives other answers.", min=0)] = 0,
    served: Annotated[list[str] | None, _endpoint_option("The model's name there; twice for two names.")] = None,
    column: Annotated[
        list[str] | None, _endpoint_option("Column of a problem file.", metavar="question|answer=NAME")
    ] = None,
    concurrency: Annotated[int, _endpoint_option("Open questions at a time.", min=1, max=256)] = 8,
    answers: Annotated[Path, _endpoint_option("The run of their answers, which is resumed.", metavar="RUN")] = Path(
        "gate-answers"
    ),
    again: Annotated[bool, _endpoint_option("Ask all anew, as after a new deployment.", "--again")] = False,
) -> None:
    """Judge whether a change cost answers. Exit code 0 if it keeps them, 1 if it loses, 3 if that cannot be told.

    Both sides answer the same questions. Piped, the text is Markdown. KVATLAS_API_KEY holds the key of endpoints.
    """
    from kvatlas.gates.endpoints import Asking
    from kvatlas.gates.gate import gate as judged
    from kvatlas.gates.gate_page import check_out

    if out is not None:
        check_out(out)
    has_address = any(side.startswith(("http://", "https://")) for side in (before, after))
    of_endpoints = [each.name for each in context.command.params if vars(each).get("rich_help_panel") == _OF_ENDPOINTS]
    sources = {name: context.get_parameter_source(name) for name in of_endpoints if name is not None}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given and not has_address:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise KvatlasError(
            f"{named}: for endpoints alone, and neither side is an address, as http://HOST:8000/v1; logs have their "
            "answers."
        )
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
        columns=options.file_columns(column),
        on_message=note,
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
        strict=strict,
        asking=asking if has_address or benchmarks else None,
        on_trace=count_display("gate", "answers"),
    )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print_text(str(result))
    if out is not None:
        note(f"{result.write(out)}")
    raise typer.Exit(result.exit_code)
