"""Numbers on the command line that no quantity has: not a number, infinite, or nothing where something is needed."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """The value of an option, unless it is infinite or no number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


def positive(value: float | None) -> float | None:
    """The value of an option, unless it is infinite, no number, 0 or less."""
    if finite(value) is not None and value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value
