"""Attention of one forward pass: the function of every model, and what a backend is.

All masks are ours: transformers builds none for an attention function without a registered mask function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvatlas.core import KvatlasError, Sampling
from kvatlas.cpu.native import load
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import PAGE, KVCache, Layer
from kvatlas.machine import compiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.cpu.fused import FusedLayer
    from kvatlas.cpu.native.decoder import DecoderPass

#: The addresses of the backends, MODULE:CLASS, by name; a backend is imported when it is used.
BACKENDS = {
    "cpu": "kvatlas.engine.native_backend:CpuBackend",
    "flex": "kvatlas.engine.gpu.flex:FlexBackend",
    "reference": "kvatlas.engine.reference:ReferenceBackend",
}


class AttentionBackend(ABC):
    """An implementation that writes the new keys and values of a batch into the cache and attends to the cache."""

    name: ClassVar[str]
    #: Tokens of a page of its cache.
    page_size: ClassVar[int] = PAGE
    #: True if the backend defines `compute_layers`, which computes whole decoder layers.
    computes_layers: ClassVar[bool] = False

    @abstractmethod
    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention [tokens, heads, value size] of new tokens, and add the weights of watched sequences to
        `batch.attention`; query [tokens, heads, key size], key [tokens, KV heads, key size], value [tokens, KV heads,
        value size]. A token sees the cached tokens of its sequence and itself, within the layer's window."""

    def compute_layers(
        self, batch: ForwardBatch, cached_layers: Sequence[Layer], layers: Sequence[FusedLayer], tokens: DecoderPass
    ) -> None:
        """Compute decoder layers of Llama's form for the new tokens of a batch, attention included."""
        raise NotImplementedError

    def decoding(self, model: PreTrainedModel) -> AbstractContextManager[Any]:
        """Return the context in which a model is decoded."""
        return nullcontext()

    def passing(self) -> AbstractContextManager[Any]:
        """Return the context of one forward pass."""
        return nullcontext()

    def graph_runner(self, cache: KVCache, sampling: Sampling) -> Any:
        """Return the runner of captured steps for one engine (`gpu.graphs.CudaGraphRunner`), or None."""
        return None


def backend_for(device: torch.device, dtype: torch.dtype, name: str | None = None) -> AttentionBackend:
    """Return the backend `name` (cpu, flex, reference), or the fastest one for this device and type."""
    native = load() if device.type == "cpu" and dtype is torch.float32 else None
    if name is None:
        name = "reference" if native is None else "cpu"
        if device.type == "cuda" and compiles(device):
            name = "flex"
    if name not in BACKENDS or (name == "cpu" and native is None):
        raise KvatlasError(f"The attention backend is {name!r}; expected 'reference' or 'flex' here.")

    arguments = {"cpu": (native,), "flex": (device.type == "cuda",), "reference": ()}
    backend: AttentionBackend = resolve_name(BACKENDS[name])(*arguments[name])
    return backend


class PassAttention:
    """The attention of a model in one pass, for `forward.attention_function`."""

    def __init__(self, backend: AttentionBackend, batch: ForwardBatch) -> None:
        self.backend = backend
        self.batch = batch
        self.computes_layers = backend.computes_layers

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend by transformers' interface: query [1, heads, tokens, key size], key [1, KV heads, tokens, key size],
        value [1, KV heads, tokens, value size]; `s_aux` are sinks.

        Returns [1, tokens, heads, value size] and None. Raises KvatlasError for layers with masks of their own, or
        whose tensors do not fit the cache.
        """
        batch = self.batch
        layer_number: Any = getattr(module, "layer_idx", None)
        if attention_mask is not None:
            raise KvatlasError(f"The model masks tokens by a rule of its own (layer {layer_number}).")
        shapes = (query.shape, key.shape, value.shape)
        expected = batch.layer_shapes.get(layer_number, ())
        if shapes != expected:
            raise KvatlasError(
                f"The model changes the shapes of its layers (layer {layer_number}: query, key and value are "
                f"{_shapes_text(shapes)}, expected {_shapes_text(expected)})."
            )

        layer = Layer(batch.cache.shape.place[layer_number], scaling, sliding_window, softcap, s_aux)
        batch.cache.layers[layer.place] = layer
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        batch.remember(layer.place, query)
        return self.backend.attend(batch, layer, query, key, value)[None], None

    def compute_layers(self, layers: Sequence[FusedLayer], tokens: DecoderPass) -> None:
        """Compute decoder layers of Llama's form, attention included."""
        cache = self.batch.cache
        cached_layers = [Layer(cache.shape.place[layer.number], layer.scaling, layer.window) for layer in layers]
        cache.layers.update((layer.place, layer) for layer in cached_layers)
        self.backend.compute_layers(self.batch, cached_layers, layers, tokens)


def _shapes_text(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes) or "no cache"
