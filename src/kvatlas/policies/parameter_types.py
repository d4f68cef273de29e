"""The parameters of policies: how they are declared and checked."""

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from kvatlas.core import KvatlasError, Shape, shortened

#: The largest integer that a parameter can be.
LARGEST_INTEGER = 2**31 - 1


class Scope(StrEnum):
    """The unit of one choice of tokens: the whole model, each layer, each KV head, or a KV head of all layers.

    Units that share a choice share the mean of their scores; in a `union`, a choice for the whole model, the greatest.
    """

    GLOBAL = "global"
    LAYER = "layer"
    HEAD = "head"
    KV_HEAD = "kv_head"
    UNION = "union"

    def width(self, shape: Shape) -> tuple[int, int]:
        """Return the numbers of separate choices over (layers, KV heads)."""
        layers = shape.layers if self in (Scope.LAYER, Scope.HEAD) else 1
        heads = shape.kv_heads if self in (Scope.HEAD, Scope.KV_HEAD) else 1
        return layers, heads


def is_integer_within(value: Any, least: int, most: int = LARGEST_INTEGER) -> bool:
    """Return whether a value is an integer from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def int_param(default: Any = MISSING, least: int = 0, most: int = LARGEST_INTEGER, **options: Any) -> Any:
    """Declare a parameter that is an integer from `least` to `most`."""
    expected = f"an integer from {least} to {most}" if most < LARGEST_INTEGER else f"an integer >= {least}"
    return parameter(expected, lambda value: is_integer_within(value, least, most), default, **options)


def tokens_param(least: int, pattern: str, expected: str, default: Any = MISSING, **options: Any) -> Any:
    """Declare a parameter that is a number of tokens, or a text of a pattern."""

    def accepts(value: Any) -> bool:
        return re.fullmatch(pattern, value) is not None if isinstance(value, str) else is_integer_within(value, least)

    return parameter(f"an integer >= {least}, or {expected}", accepts, default, **options)


def float_param(default: Any = MISSING, least: float = 0, most: float = math.inf, **options: Any) -> Any:
    """Declare a parameter that is a number from `least` to `most`."""

    def accepts(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most and value < math.inf

    expected = f"a number from {least} to {most}" if most < math.inf else f"a number >= {least}"
    return parameter(expected, accepts, default, **options)


def flag_param(default: bool, **options: Any) -> Any:
    """Declare a parameter that is true or false."""
    return parameter("true or false", lambda value: isinstance(value, bool), default, **options)


def choice_param(default: Any, *others: str | int, **options: Any) -> Any:
    """Declare a parameter that is one of several words or integers."""
    if not isinstance(default, str | int):
        raise KvatlasError(f"choice_param takes its choices one by one, as ('max', 'avg'), and not {default}.")
    choices = dict.fromkeys((default, *others))

    def accepts(value: Any) -> bool:
        return isinstance(value, str | int) and not isinstance(value, bool) and value in choices

    texts = (repr(str(choice)) if isinstance(choice, str) else str(choice) for choice in choices)
    return parameter(", ".join(texts), accepts, default, **options)


def scope_param(default: Scope, *others: Scope) -> Any:
    """Declare the parameter `scope`, for policies whose scores differ between layers and heads.

    Every policy has the scopes in which units share the mean of their scores; `others` are further ones.
    """
    return choice_param(default, Scope.GLOBAL, Scope.LAYER, Scope.HEAD, Scope.KV_HEAD, *others)


def parameter(expected: str, accepts: Callable[[Any], bool], default: Any = MISSING, **options: Any) -> Any:
    """Declare a parameter by a test of its values, and their description in an error sentence.

    `options` are those of `dataclasses.field`.
    """
    return field(default=default, metadata={"expected": expected, "accepts": accepts}, **options)


#: Types of defaults, and their names in sentences.
_TYPES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def check_parameters(owner: Any) -> None:
    """Raise KvatlasError if a field of a dataclass does not accept its value."""
    for item in fields(owner):
        value = getattr(owner, item.name)
        # Rule and precision, the parts of a policy, check themselves.
        fault = "" if is_dataclass(value) else value_fault(item, value)
        if fault:
            raise KvatlasError(f"{fault}.")


def value_fault(item: Field[Any], value: Any) -> str:
    """Return why a field does not accept a value, as `sinks is -1; expected an integer >= 0`; empty if it does."""
    expected = item.metadata.get("expected")
    accepts = item.metadata.get("accepts")

    # A parameter without a description takes values like its default; an integer is a number, too.
    kind = next((kind for kind in _TYPES if isinstance(item.default, kind)), None)
    if accepts is not None:
        is_accepted = accepts(value)
    elif kind is not None:
        expected = _TYPES[kind]
        is_accepted = isinstance(value, (int, float) if kind is float else kind)
    else:
        expected = "a number, a text, true or false"
        is_accepted = value is None or isinstance(value, tuple(_TYPES))
    return "" if is_accepted else f"{item.name} is {shortened(value)}; expected {expected}"
