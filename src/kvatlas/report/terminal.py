"""One map in a terminal: a table with coloured cells that still reads without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvatlas.core import Map
from kvatlas.figures import style
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: Characters of an interval such as `25.7–100.0`.
_WIDE = 10


def print_map(map_: Map, console: Console) -> None:
    """Print a map with the largest vertical value on top, each cell with its 95 % interval, baselines and notes below.

    Cells are coloured like the figures where the console has colours; an empty cell is a dash.
    """
    from rich.text import Text

    console.print(map_table(map_, console.width))
    for text, interval in style.baseline_texts(map_.baselines):
        shown = f"{text} ({interval})" if interval else text
        console.print(Text(visible(f"  baseline: {shown}")), soft_wrap=True)
    for note in map_.remarks:
        console.print(Text(visible(f"  {note}"), style="bold red" if note.is_warning else ""), soft_wrap=True)


def map_table(map_: Map, width: int) -> Table:
    """A map as a table for a console of so many columns; intervals are left out where they do not fit."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    (vertical, rows), (horizontal, columns) = map_.axes
    low, high = style.scale([map_])
    known = any(style.interval(cell.estimate) for cell in map_.cells.values())
    intervals = known and width >= len(style.label(vertical)) + 5 + (_WIDE + 3) * len(columns)
    title = " | ".join(part for part in (style.model(map_.model), map_.benchmark, map_.policy) if part)
    metric = style.label(map_.metric)
    table = Table(
        title=Text(visible(f"{title}: {metric} in percent{' with its 95 % interval' if intervals else ''}")),
        caption=Text(f"{style.label(horizontal)} →"),
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        title_style="bold",
    )
    table.add_column(Text(f"{style.label(vertical)} ↑ "), justify="right", no_wrap=True)
    for column in columns:
        table.add_column(Text(visible(str(column))), justify="center", no_wrap=True)
    for row in reversed(rows):
        table.add_row(Text(visible(f"{row} ")), *(_cell(map_, row, column, low, high, intervals) for column in columns))
    return table


def _cell(map_: Map, row: object, column: object, low: float, high: float, intervals: bool) -> Text:
    from rich.text import Text

    cell = map_.cells.get((row, column))
    if cell is None:
        return Text(f" {'–':^{_WIDE if intervals else 5}} ", style="dim")
    background = style.colour(100 * cell.estimate.value, low, high)
    text = f" {style.percent(cell.estimate.value):^{_WIDE if intervals else 5}} "
    if intervals:
        text += f"\n {style.interval(cell.estimate):^{_WIDE}} "
    return Text(text, style=f"{style.text_on(background)} on {background}")
