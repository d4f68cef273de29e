"""Parameters of policies with the values that are valid for them: numbers in a range, one of several words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvatlas.core import KvatlasError


def int_param(default: int, least: int) -> int:
    """A parameter that is a whole number from `least` up."""
    parameter: int = field(default=default, metadata={"valid": Numbers(int, least)})
    return parameter


def float_param(default: float, least: float, most: float = math.inf) -> float:
    """A parameter that is a number from `least` to `most`."""
    parameter: float = field(default=default, metadata={"valid": Numbers(float, least, most)})
    return parameter


def choice_param(default: str, *options: str) -> str:
    """A parameter that is one of several words."""
    parameter: str = field(default=default, metadata={"valid": Words((default, *options))})
    return parameter


@dataclass(frozen=True)
class Numbers:
    """Numbers of a kind in a range."""

    kind: type[int] | type[float]
    least: float
    most: float = math.inf

    def check(self, name: str, value: object) -> None:
        fits = isinstance(value, int | self.kind) and not isinstance(value, bool)
        if not fits or not self.least <= value <= self.most:  # type: ignore[operator]
            words = "whole numbers" if self.kind is int else "numbers"
            limits = f"from {self.least} up" if self.most == math.inf else f"from {self.least} to {self.most}"
            raise KvatlasError(f"{name} is {value!r}; valid are {words} {limits}.")


@dataclass(frozen=True)
class Words:
    """One of several words."""

    options: tuple[str, ...]

    def check(self, name: str, value: object) -> None:
        if value not in self.options:
            raise KvatlasError(f"{name} is {value!r}; valid are {', '.join(repr(str(word)) for word in self.options)}.")
