"""The options that several commands share, each declared once, and the reading of `NAME=VALUE`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from kvatlas.core import KvatlasError
from kvatlas.figures.style import OPTIONS, Look


def finite(value: float | None) -> float | None:
    """Return the value of an option, unless it is infinite or no number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


def positive(value: float | None) -> float | None:
    """Return the value of an option, unless it is infinite, no number, 0 or less."""
    if finite(value) is not None and value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]

# A model and its problems.
Model = Annotated[str, typer.Argument(help="embedded:NAME, hf:FOLDER, hf:FILE.gguf or hf:OWNER/NAME.")]
ModelOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="dtype, device, revision, think_close, ...")
]
Benchmark = Annotated[str, typer.Argument(metavar="BENCHMARK", help="CHAIN12, AIME24, AIME24@FILE, file:FILE.")]
QuestionField = Annotated[str, typer.Option(help="Column of the question in a problem file with unusual names.")]
AnswerField = Annotated[str, typer.Option(help="Column of the reference answer in such a file.")]
FirstProblems = Annotated[int | None, typer.Option(min=1, help="Only the first problems of each benchmark.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed gives other traces.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]

# A cell: one setting of a policy.
Policy = Annotated[str, typer.Option(help="KV-cache token selection.")]
KvBudget = Annotated[int | None, typer.Option(help="Cache length at which a compression fires.")]
LocalWindow = Annotated[int | None, typer.Option(help="Newest tokens that a compression always keeps.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the older tokens that a compression keeps.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Another parameter of the policy.")]
StrictBudget = Annotated[bool, typer.Option("--strict-budget", help="Drop prompt tokens that exceed the ratio.")]
Cell = Annotated[str, typer.Option(help="The cell, as 'dynts ratio=0.3'; default: the recommended one.")]

# Decoding.
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes of one thread each; default: what pays.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a batch; default: what fits, 64 on CPUs.")]
Executor = Annotated[str, typer.Option(help="Where problems are decoded: local or ray.")]
Replace = Annotated[bool, typer.Option("--replace", help="Show only this in the run; other traces stay stored.")]

# Runs and maps, and what is read from them.
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, imported ones too.")]
Inputs = Annotated[list[str], typer.Argument(metavar="RUN|CSV...", help="Runs, CSV maps, or published:NAME.")]
Metric = Annotated[str, typer.Option(help="pass@1, progress, pass@K, avg@K, maj@K, or one of the benchmark itself.")]
Partial = Annotated[bool, typer.Option("--partial", help="Accept missing traces; maps and figures say so.")]
Fix = Annotated[list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Hold an axis beyond two to one value.")]
OnlyPolicy = Annotated[str | None, typer.Option("--policy", help="Only this policy's maps.")]
LoseAtMost = Annotated[float | None, typer.Option(metavar="POINTS", help="Margin; default: the sweep's own, 3.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A system, as 'R1-Qwen full' or 'dynts ratio=0.3'. Repeat it.")
]
FigureFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="PNG, SVG or PDF by its suffix.")]


@functools.cache
def _figure_options() -> list[Any]:
    """Return the options of a `Look` as typer makes them."""
    types, annotated = get_type_hints(Look), Annotated  # type: Any, Any
    defaults = {item.name: item.default for item in fields(Look)}
    declared: list[tuple[str, Any, Any]] = []
    for name, (metavar, text) in OPTIONS.items():
        flags = [f" /--no-{name}" if defaults[name] else f"--{name}"] if types[name] is bool else []
        option = typer.Option(*flags, metavar=metavar, help=text, show_default=False)
        declared.append((name, annotated[types[name], option], defaults[name]))
    app = typer.Typer(add_completion=False)
    app.command()(make_dataclass("FigureOptions", declared))
    return list(typer.main.get_command(app).params)


class FigureCommand(TyperCommand):
    """A command with the options of figures beside its own; it finds the `Look` that they make in `context.obj`."""

    def __init__(self, *args: Any, params: Sequence[Any], **settings: Any) -> None:
        self.of_look = _figure_options()
        super().__init__(*args, params=[*params, *self.of_look], **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command with the figure options taken out of its parameters."""
        ctx.obj = Look(**{option.name: ctx.params.pop(option.name) for option in self.of_look})
        return super().invoke(ctx)


def assignments(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the names and values, as they were written, of an option that is given as NAME=VALUE."""
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise KvatlasError(f"{option}: expected NAME=VALUE, got {text!r}.")
        pairs[name.strip()] = value
    return pairs


def problem_columns(question_field: str, answer_field: str) -> dict[str, Any]:
    """Return the column names of a problem file as options of its benchmark."""
    columns = {name: field for name, field in (("question", question_field), ("answer", answer_field)) if field}
    return {"columns": columns} if columns else {}
