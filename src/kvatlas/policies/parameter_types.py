"""The parameters of policies: how they are declared, checked and written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any

from kvatlas.core import KvatlasError, Shape, Storage
from kvatlas.core.settings import BYTE_UNITS

#: New tokens between two compressions that an advised budget leaves room for, a multiple of so many tokens.
ROOM = 64
#: A budget in bytes.
_BYTES = rf"[0-9]{{1,12}}[{BYTE_UNITS}]iB"
#: A local window as a share of the KV budget, below 100 %.
_WINDOW_SHARE = r"[0-9]{1,2}(\.[0-9]{1,6})?%"
#: The largest integer that a parameter can be.
MOST = 2**31 - 1


class Scope(StrEnum):
    """The unit of one choice of tokens: the whole model, each layer, each KV head, or a KV head of all layers."""

    GLOBAL = "global"
    LAYER = "layer"
    HEAD = "head"
    KV_HEAD = "kv_head"

    def width(self, shape: Shape) -> tuple[int, int]:
        """Return the numbers of separate choices over (layers, KV heads)."""
        layers = shape.layers if self in (Scope.LAYER, Scope.HEAD) else 1
        heads = shape.kv_heads if self in (Scope.HEAD, Scope.KV_HEAD) else 1
        return layers, heads


@dataclass(frozen=True)
class Budget:
    """The parameters `kv_budget`, `budget_over`, `every` and `every_from` of a policy."""

    tokens: int
    over: str
    every: int
    every_from: str

    def tokens_with(self, prompt: int) -> int:
        return self.tokens + (prompt if self.over == "thinking" else 0)

    def most(self, prompt: int) -> int:
        """Return the greatest length of the cache before a compression, for prompts below the budget."""
        return self.tokens_with(prompt) + self.every

    def first(self, prompt: int) -> int:
        """Return the cache length at the first compression."""
        if self.every_from == "budget":
            return self.most(prompt)
        return self._turn(prompt, prompt, prompt)

    def next(self, prompt: int, cached: int, position: int) -> int:
        """Return the cache length at the next compression, after one that left `cached` of `position` tokens.

        Tokens kept above the budget (prompt and answer) delay it.
        """
        limit = self.tokens_with(prompt)
        if not self.every:
            return limit
        if self.every_from == "budget":
            return self.every + max(limit, cached)
        return self._turn(prompt, cached, position)

    def _turn(self, prompt: int, cached: int, position: int) -> int:
        """Return the cache length at the first position with a turn and more than the budget in the cache."""
        turn = 1 if self.every_from == "start" else prompt
        earliest = position + max(1, self.tokens_with(prompt) + 1 - cached)
        return cached + earliest + (turn - earliest) % self.every - position


def in_largest_unit(text: str) -> str:
    """Return a budget in bytes in the largest unit without a fraction: equal budgets are one setting."""
    size = int(text[:-3])
    unit = BYTE_UNITS.index(text[-3])
    while size and size % 1024 == 0 and unit + 1 < len(BYTE_UNITS):
        size //= 1024
        unit += 1
    return f"{size}{BYTE_UNITS[unit]}iB"


def plain_share(text: str) -> str:
    """Return a share such as `25.0%` without needless zeros: equal shares are one setting."""
    return f"{Decimal(text[:-1]).normalize():f}%"


def parameter(expected: str, accepts: Callable[[Any], bool], default: Any = MISSING, **options: Any) -> Any:
    """Declare a parameter by a test of its values, and their description in an error sentence."""
    return field(default=default, metadata={"expected": expected, "accepts": accepts}, **options)


def int_param(default: Any = MISSING, least: int = 0, **options: Any) -> Any:
    """Declare a parameter that is an integer >= `least`, and at most `MOST`."""

    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST

    return parameter(f"an integer >= {least}", accepts, default, **options)


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


def choice_param(default: str | int, *others: str | int, **options: Any) -> Any:
    """Declare a parameter that is one of several words or integers."""
    choices = dict.fromkeys((default, *others))

    def accepts(value: Any) -> bool:
        return isinstance(value, str | int) and not isinstance(value, bool) and value in choices

    texts = (repr(str(choice)) if isinstance(choice, str) else str(choice) for choice in choices)
    return parameter(", ".join(texts), accepts, default, **options)


def budget_param() -> Any:
    """Declare a parameter that is a number of tokens, or of bytes with their unit."""

    def accepts(value: Any) -> bool:
        if isinstance(value, str):
            return re.fullmatch(_BYTES, value) is not None
        return isinstance(value, int) and not isinstance(value, bool) and 2 <= value <= MOST

    return parameter("an integer >= 2, or bytes such as 12MiB (KiB, MiB or GiB)", accepts)


def window_param() -> Any:
    """Declare a parameter that is a number of tokens, or a share of the KV budget."""

    def accepts(value: Any) -> bool:
        if isinstance(value, str):
            return re.fullmatch(_WINDOW_SHARE, value) is not None
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST

    return parameter("an integer >= 1, or a share of the kv_budget below 100%, such as 25%", accepts)


def scope_param(default: Scope) -> Any:
    """Declare the parameter `scope`, for policies whose scores differ between layers and heads."""
    return choice_param(default, *Scope)


def check_value(item: Field[Any], value: Any) -> None:
    """Raise KvatlasError if a parameter does not accept a value."""
    expected = item.metadata.get("expected")
    accepts = item.metadata.get("accepts")
    # A parameter without a description takes texts if its default is one, else anything.
    if expected is None and isinstance(item.default, str):
        expected = "a text"
        accepts = _is_text
    if accepts is not None and not accepts(value):
        raise KvatlasError(f"{item.name} is {_shown(value)}; expected {expected}.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _shown(value: Any) -> str:
    """Return a value for an error sentence; Python does not write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} ... ({len(text):,} characters)"


def storage_parameters(storage: Storage) -> dict[str, int]:
    """Return the parameters of a storage in their canonical form: equal storages have equal parameters."""
    sizes = {"group": storage.group, "residual": storage.residual}
    if storage.key_bits == storage.value_bits:
        return {"kv_bits": storage.key_bits, "key_bits": 0, "value_bits": 0, **sizes}
    return {"kv_bits": 16, "key_bits": storage.key_bits, "value_bits": storage.value_bits, **sizes}
