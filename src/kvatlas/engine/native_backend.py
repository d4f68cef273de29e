"""Attention on CPUs: native kernels."""

from collections.abc import Sequence

from torch import Tensor

from kvatlas.cpu.fused import FusedLayer
from kvatlas.cpu.native import Native, PagedLayer
from kvatlas.cpu.native.decoder import DecoderLayer, DecoderPass
from kvatlas.engine.attention import AttentionBackend
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import Layer


class CpuBackend(AttentionBackend):
    """Native kernels: the numbers of a token depend on its sequence alone, not on the rest of the batch."""

    name = "cpu"
    computes_layers = True

    def __init__(self, native: Native) -> None:
        self.native = native

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        paged_layer = self._paged_layer(batch, layer)
        out = self.native.attention(batch.paged, paged_layer, _dense(query), _dense(key), _dense(value))
        if batch.cache.packed:
            batch.keep_recent(layer.place, key, value)
        return out

    def compute_layers(
        self, batch: ForwardBatch, cached_layers: Sequence[Layer], layers: Sequence[FusedLayer], tokens: DecoderPass
    ) -> None:
        cache = batch.cache
        shape = cache.shape
        if batch.watched or cache.packed or any(layer.window for layer in cached_layers):
            paged_layers: Sequence[PagedLayer] = [self._paged_layer(batch, layer) for layer in cached_layers]
        else:
            # The same layers in each pass, while nothing but the pools belongs to them.
            if cache.paged_layers is None:
                cache.paged_layers = [self._paged_layer(batch, layer) for layer in cached_layers]
            paged_layers = cache.paged_layers
            self.native.make_scratch(batch.paged, max(max(layer.key, layer.value) for layer in shape.cached_layers))

        if not batch.remembered and not cache.packed:
            DecoderLayer.compute(layers, tokens, batch.paged, paged_layers)
            return

        # The heads of a layer, side by side in one table, are stored before the next layer replaces them.
        first_value = shape.heads + shape.kv_heads
        for layer, fused_layer, paged_layer in zip(cached_layers, layers, paged_layers, strict=True):
            DecoderLayer.compute([fused_layer], tokens, batch.paged, [paged_layer])
            heads = tokens.heads.view(len(tokens.heads), -1, shape.cached_layers[layer.place].key)
            batch.remember(layer.place, heads[:, : shape.heads])
            if cache.packed:
                batch.keep_recent(layer.place, heads[:, shape.heads : first_value], heads[:, first_value:])

    def _paged_layer(self, batch: ForwardBatch, layer: Layer) -> PagedLayer:
        cache = batch.cache
        place = layer.place
        cached_layer = cache.shape.cached_layers[place]
        paged_layer = self.native.paged_layer(
            batch.paged,
            cache.shape.heads,
            (cached_layer.key, cached_layer.value),
            cache.keys[place],
            cache.values[place],
            layer.scaling,
            cache.form.bits,
            cache.storage.group,
            cache.recent[place],
        )
        paged_layer.softcap = layer.softcap or 0.0
        if layer.sinks is not None:
            paged_layer.sinks = layer.sinks.data_ptr()
        if layer.window:
            paged_layer.window = layer.window
            paged_layer.positions = batch.positions32.data_ptr()
            paged_layer.places = cache.watch_window(place).data_ptr()
        if batch.watched:
            paged_layer.mass = batch.attention[place].data_ptr()
        if cache.key_biases is not None:
            angles = cache.key_biases.angles(0)
            paged_layer.bias = cache.key_biases.layers[place].data_ptr()
            paged_layer.angles = angles.data_ptr()
            paged_layer.positions_known = len(angles)
        return paged_layer


def _dense(heads: Tensor) -> Tensor:
    # The heads of a token must lie side by side.
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
