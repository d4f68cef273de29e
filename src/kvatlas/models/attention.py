"""Running a model under an attention function of ours.

transformers knows one function of ours by name. What it computes is set around each call of a model, for the thread
that calls: some models drop keyword arguments, and several threads may run models at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The name of our function with transformers' attention interface.
ATTENTION = "kvatlas"
_function: ContextVar[Callable[..., Any] | None] = ContextVar(ATTENTION, default=None)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend by the `attention_function` of its caller; what it attended by before is back afterwards."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def attention_function(function: Callable[..., Any]) -> Iterator[None]:
    """Let models under `own_attention` attend by `function` when this thread calls them."""
    token = _function.set(function)
    try:
        yield
    finally:
        _function.reset(token)


def attend(*tensors: Any, **others: Any) -> Any:
    """Attention by the function of `attention_function`, as transformers' attention interface wants it."""
    function = _function.get()
    if function is None:
        raise KvatlasError("The model is called while kvatlas decodes with it; call it afterwards, or load it again.")
    return function(*tensors, **others)
