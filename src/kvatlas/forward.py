"""Running a model under the engine: an attention function of ours, and layers that keep a state, row by row.

One attention function is registered with transformers. The function that it calls is set around each call of a model,
for the calling thread: some models drop keyword arguments, and several threads may run models at once.

Layers with a state (linear attention, Mamba, short convolutions) do not support ragged batches. Such a layer computes
each sequence of a batch by itself, from the state of its row in a cache of transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

import torch

from kvatlas.core import KvatlasError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The name of our function with transformers' attention interface.
ATTENTION = "kvatlas"
#: Methods of transformers' caches for layers with a state.
_CALLS = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
_function: ContextVar[Callable[..., Any] | None] = ContextVar(ATTENTION, default=None)
#: The batch of this thread: a `ForwardBatch`, or None.
_batch: ContextVar[Any] = ContextVar("kvatlas_batch", default=None)
#: The attention of models before `own_attention`, and the number of its callers.
_callers: WeakKeyDictionary[PreTrainedModel, tuple[str, int]] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend by the `attention_function` of its caller; restore its own attention afterwards.

    Callers may overlap, as decoding in turns does: the last one restores.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    with _lock:
        before, callers = _callers.get(model, (model.config._attn_implementation, 0))
        if not callers:
            model.set_attn_implementation(ATTENTION)
        _callers[model] = (before, callers + 1)
    try:
        yield
    finally:
        with _lock:
            before, callers = _callers.pop(model)
            if callers > 1:
                _callers[model] = (before, callers - 1)
            else:
                model.set_attn_implementation(before)


@contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Let a variable of this thread have a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def attention_function(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let models under `own_attention` attend by `function` in calls of this thread."""
    return _holding(_function, function)


def attend(*tensors: Any, **others: Any) -> Any:
    """Attend by the function of `attention_function`: transformers' attention interface."""
    function = _function.get()
    if function is None:
        raise KvatlasError("The model is called while kvatlas decodes with it; call it afterwards, or load it again.")
    return function(*tensors, **others)


def layer_attention() -> Any:
    """Return the function of `attention_function` if it computes whole layers by `compute_layers`, else None."""
    function = _function.get()
    return function if getattr(function, "computes_layers", False) else None


class RowStates:
    """The states of all rows: one cache of transformers for each row with tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers import DynamicCache

        self.config = model.config.get_text_config()
        kinds = vars(sys.modules[type(model).__module__]).values()
        caches = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, DynamicCache)]
        #: The class of the model's caches: its own if its module defines one.
        self.kind = next((kind for kind in caches if kind is not DynamicCache), None)
        self.rows: dict[int, Any] = {}

    def of(self, row: int) -> Any:
        """Return the state of a row, empty at first."""
        from transformers import DynamicCache

        if row not in self.rows:
            self.rows[row] = self.kind() if self.kind is not None else DynamicCache(config=self.config)
        return self.rows[row]

    def bytes(self, row: int) -> int:
        """Return the bytes of the tensors in the state of a row."""
        found: dict[int, int] = {}

        def visit(item: Any) -> None:
            if isinstance(item, torch.Tensor):
                found[id(item)] = item.numel() * item.element_size()
            elif isinstance(item, dict | list | tuple):
                for entry in item.values() if isinstance(item, dict) else item:
                    visit(entry)
            elif hasattr(item, "__dict__") and type(item).__module__.startswith("transformers."):
                visit(vars(item))

        visit(vars(self.of(row)) | {"config": None})
        return sum(found.values())


class RowByRow:
    """The `forward` of a layer with a state, row by row under `reading_batch`; otherwise the layer's own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.whole: Any = WeakMethod(layer.forward)
        names = inspect.signature(layer.forward).parameters
        # Versions of transformers name it differently.
        self.state = next(name for name in ("cache_params", "cache", "past_key_values") if name in names)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = _batch.get()
        whole = self.whole()
        if batch is None:
            return whole(hidden_states, *args, **kwargs)
        outputs = [
            whole(hidden_states[:, start:end], *args, **{**kwargs, self.state: batch.cache.states.of(row)})
            for row, start, end in zip(batch.rows, batch.starts, batch.starts[1:], strict=False)
        ]
        if isinstance(outputs[0], tuple):
            return torch.cat([output for output, *_ in outputs], 1), None
        return torch.cat(outputs, 1)


def split_rows(model: PreTrainedModel) -> bool:
    """Let every layer with a state compute row by row under `reading_batch`; return True if there is any."""
    stateful = [module for module in model.modules() if _keeps_state(module)]
    for module in stateful:
        if not isinstance(module.forward, RowByRow):
            module.forward = RowByRow(module)
    return bool(stateful)


def _keeps_state(module: torch.nn.Module) -> bool:
    """Return True if a method of a layer asks transformers' cache for a state."""
    for kind in type(module).__mro__:
        for item in vars(kind).values():
            if inspect.isfunction(item) and _CALLS & {*inspect.unwrap(item).__code__.co_names}:
                return True
    return False


def reading_batch(batch: Any) -> AbstractContextManager[None]:
    """Let layers with a state that this thread calls read `batch`, a `ForwardBatch`."""
    return _holding(_batch, batch)
