"""Running a model under another attention function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def attention_function(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """The model attends by `function`, registered as `name` with transformers' attention interface.

    What it attended by before is back afterwards.
    """
    from transformers import AttentionInterface

    # The interface keeps what is registered for ever: not what a closure holds.
    AttentionInterface.register(name, weakref.proxy(function))
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
