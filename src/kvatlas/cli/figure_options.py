"""The options that every command has which draws a figure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.core import KvatlasError


def _look(
    columns: Annotated[
        int | None, typer.Option(min=1, max=2, help="Fill one or two columns of a paper (3.35 or 7 inches).")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="ROWSxPANELS", help="Rows, and panels in a row, such as 1x4.")
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="On a dark ground.")] = False,
    font: Annotated[str | None, typer.Option(metavar="NAME", help="An installed font instead of DejaVu Sans.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=TEXT", help="What to write for a name in the figure. Repeat it."),
    ] = None,
    no_intervals: Annotated[bool, typer.Option("--no-intervals", help="Without intervals.")] = False,
    no_notes: Annotated[
        bool, typer.Option("--no-notes", help="Notes in the caption alone, but for warnings; needs --caption.")
    ] = False,
    caption: Annotated[
        Path | None, typer.Option(metavar="FILE.tex", help="Write the notes as a LaTeX caption, too.")
    ] = None,
) -> Any:
    from kvatlas.figures.look import FONT, Look

    if no_notes and caption is None:
        raise KvatlasError("--no-notes leaves notes to the caption alone; name its file with --caption FILE.tex.")
    return Look(
        columns, dark, _layout(layout), font or FONT, _labels(label or []), not no_intervals, not no_notes, caption
    )


def _layout(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isascii() and number.isdecimal() and len(number) < 4 for number in numbers):
        raise KvatlasError(f"--layout is ROWSxPANELS, such as 1x4; {text!r} was given.")
    return int(numbers[0]), int(numbers[1])


def _labels(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise KvatlasError(f"--label is NAME=TEXT, such as AIME24='AIME 2024'; {text!r} was given.")
    return {name: shown for name, _, shown in (text.partition("=") for text in texts)}


def with_figure_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of all figures in place of its parameter `look`, which is made of them."""
    own, options = (dict(inspect.signature(function, eval_str=True).parameters) for function in (command, _look))
    del own["look"]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        look = _look(**{name: given.pop(name) for name in options})
        command(**given, look=look)

    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (own | options).values()]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
