"""The view of a policy: the signals of the decode loop, its notes, and the cache at a compression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvatlas.noise import uniform_by_choice

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvatlas.models import ModelHandle

#: A tensor of torch, by its name: policies are found without torch, whose import takes seconds.
Tensor: TypeAlias = "torch.Tensor"


class Signal(StrEnum):
    """The signals of the decode loop, each collected only for policies that declare it.

    HIDDEN: the last hidden state of each token that enters the cache, after the model's last norm: the product with the
    output matrix gives its logits. ATTENTION: the attention of each new token to every cached one; its weights are
    computed at every step, for the sequences of the policy alone. QUERIES: the last `queries` queries when a
    compression fires; they are copied as they pass, without any attention.
    """

    HIDDEN = "hidden"
    ATTENTION = "attention"
    QUERIES = "queries"


class PolicyNotes(Protocol):
    """The notes of policies beside cached tokens: tensors [rows, layers, KV heads, cached] of the policy's scope."""

    def enter(self, name: str, values: Tensor) -> None: ...

    def read(self, name: str) -> Tensor: ...

    def write(self, name: str, values: Tensor) -> None: ...


@dataclass(frozen=True)
class Step:
    """The input of `observe` after tokens entered the caches of `rows` sequences of a policy.

    `positions` [rows, entered] are true positions of these tokens: first parts of the prompt, of one row at a time,
    with `prompt_length` as its length; then new tokens, with `prompt_length` None. `hidden` [rows, entered, hidden
    size] is their last hidden state (HIDDEN). `attention` [rows, layers, KV heads, cached], reduced by the mean over
    query heads and to the policy's scope, is their attention to each cached token, themselves included, summed over
    them (ATTENTION); 0 in slots past a sequence's length.
    """

    model: ModelHandle
    positions: Tensor
    hidden: Tensor | None
    attention: Tensor | None
    columns: PolicyNotes
    prompt_length: int | None = None

    def enter(self, column: str, values: Tensor) -> None:
        """Write `values` [rows, entered] beside the tokens that entered. Raises ValueError for another shape."""
        if values.shape != self.positions.shape:
            raise ValueError(
                f"step.enter({column!r}, ...): expected values [rows, entered], {list(self.positions.shape)} here, "
                f"{list(values.shape)} was given"
            )
        self.columns.enter(column, values)

    def read(self, column: str) -> Tensor:
        """Return the values of all cached tokens [rows, layers, KV heads, cached]; 0 before the first write."""
        return self.columns.read(column)

    def write(self, column: str, values: Tensor) -> None:
        """Replace the values of all cached tokens by `values` [rows, layers, KV heads, cached]; 0 past each length."""
        self.columns.write(column, values)

    def add(self, column: str, values: Tensor) -> None:
        """Add `values` [rows, layers, KV heads, cached] (of the policy's scope) to those of all cached tokens."""
        self.write(column, self.read(column) + values)


def undeclared_column(name: str, declared: tuple[str, ...]) -> KeyError:
    """Return the error for a column that a policy reads or writes without having declared it."""
    return KeyError(f"the column {name!r} is not declared; the policy has columns = {declared}")


class Columns(dict[str, Any]):
    """Values by the columns that a policy declares."""

    def __missing__(self, name: str) -> None:
        raise undeclared_column(name, tuple(self))


class CacheView:
    """One sequence's cache at a compression; `[...]` is the scope's (layers, KV heads).

    `positions` [..., cached] are true positions, ascending; `columns` [..., cached] the notes of `observe`. `length` is
    the number of the sequence's tokens so far, evicted ones included, `stream` the key of its random numbers,
    `thinking_end` the position of the end of thinking, None without one. `model` has the facts of the model's
    files; `loaded` is the model itself with its weights, which no policy may change.

    The engine passes its own view (`engine.rows.RowView`); a test passes one that defines the methods that it needs.
    """

    model: ModelHandle
    loaded: PreTrainedModel | None = None
    positions: Tensor
    prompt_length: int
    thinking_end: int | None
    length: int
    stream: int
    columns: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Any:
        members = sorted(name for name in {*dir(CacheView), *CacheView.__annotations__} if not name.startswith("_"))
        raise AttributeError(
            f"a CacheView has no {name!r}; it has {', '.join(members)}; signals, as attention, are declared with "
            "observes, and noted in a column by observe"
        )

    def key(self, layer: int) -> Tensor:
        """Return the keys of a layer [KV heads, cached, head size], with their rotation."""
        raise NotImplementedError

    def value(self, layer: int) -> Tensor:
        """Return the values of a layer [KV heads, cached, head size]."""
        raise NotImplementedError

    def query(self, layer: int) -> Tensor:
        """Return the policy's last `queries` queries [heads, queries, head size] with their rotation (QUERIES).

        The oldest come first, fewer in a shorter sequence: the last one belongs to the newest cached token.
        """
        raise NotImplementedError

    def tokens(self) -> Tensor:
        """Return the token ids [length] of the sequence."""
        raise NotImplementedError

    def embedding(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [..., hidden size] of token ids, as the model reads them."""
        assert self.loaded is not None, "a view of the engine has the loaded model"
        embedded: Tensor = self.loaded.get_input_embeddings()(tokens)
        return embedded

    def scaling(self, layer: int) -> float:
        """Return the factor of q k before a layer's softmax, often but not always 1 / sqrt(head size)."""
        raise NotImplementedError

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a layer with a sliding window sees; None for all."""
        return None

    def softcap(self, layer: int) -> float | None:
        """Return the soft cap c, by which a layer's scores become c tanh(score / c); None without one."""
        return None

    def sinks(self, layer: int) -> Tensor | None:
        """Return the further logits [heads] of a layer without a value; None without any."""
        return None

    def uniform(self) -> Tensor:
        """Return random numbers in (0, 1) [..., cached], by stream, length, position and unit of choice alone."""
        return uniform_by_choice(self.stream, self.length, self.positions)

    def each_layer(self, score: Callable[[int], Tensor], union: bool = False) -> Tensor:
        """Return the scores [KV heads, cached] of every layer as [..., cached], averaged over each unit of choice.

        In a `union` the greatest score of a token counts instead.
        """
        import torch

        layers, heads, _ = self.positions.shape
        scores = torch.stack([score(layer) for layer in range(self.model.shape.layers)])
        if union:
            return scores.amax((0, 1), keepdim=True)
        scores = scores.mean(0, keepdim=True) if layers == 1 else scores
        return scores.mean(1, keepdim=True) if heads == 1 else scores
