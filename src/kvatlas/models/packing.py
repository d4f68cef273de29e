"""Layers of a model on native CPU kernels: numbers of a token never depend on how many there are beside it.

torch's own linear layers sum in another order for one row than for eight. Here weights are packed once, the originals
dropped, and every row is summed in an order of its own. Layers that read the same input (queries, keys and values; gate
and up) lie side by side in one table, and what is computed in one of the usual forms takes fewer calls: normalisations,
gated feed-forward layers, and whole decoder layers of Llama's form (`packed_layers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvatlas.models.attention import attention_function
from kvatlas.models.packed_layers import FusedDecoder, FusedLayer, PackedEmbedding, PackedGate, PackedLinear, PackedNorm
from kvatlas.native import LANES, Linear, Native, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Activations x * sigmoid(x), as torch and transformers call them.
_SILU = ("SiLU", "SiLUActivation")
#: Linear layers that read the same input.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


#: Puts back what was replaced.
Undo = Callable[[], None]


def pack(model: PreTrainedModel) -> list[Undo]:
    """Replace a model's layers by packed ones where native kernels serve it: fp32 on the CPU.

    The weights of replaced linear layers are gone; what is returned puts them back, the last one first. Modules that
    have hooks are left alone; hooks that are registered afterwards inside a fused layer see no call of the engine's.
    """
    native = load()
    packed_already = vars(model).get("tie_weights") is _tied
    if native is None or model.device.type != "cpu" or model.dtype is not torch.float32 or packed_already:
        return []
    # What shares weights shares the packed ones; the names that transformers would tie are gone.
    model.tie_weights = _tied
    undo: list[Undo] = [lambda: vars(model).pop("tie_weights", None)]
    return [*undo, *_pack_linear(native, model), *_pack_forms(native, model), *_fuse(native, model)]


def _tied(*_: Any, **__: Any) -> None:
    pass


def _pack_linear(native: Native, model: nn.Module) -> list[Undo]:
    places: dict[nn.Module, list[tuple[str, Any]]] = {
        parent: [
            (name, child) for name, child in parent.named_children() if isinstance(child, nn.Linear | nn.Embedding)
        ]
        for parent in model.modules()
    }
    users = Counter(id(child.weight) for children in places.values() for _, child in children)
    tied = {
        id(child.weight): (parent, name)
        for parent, children in places.items()
        for name, child in children
        if type(child) is nn.Embedding
    }
    undo: list[Undo] = []
    for parent, children in places.items():
        joined = _join(native, parent)
        for name, child in children:
            if not _plain(child):
                continue
            packed = PackedLinear(joined.get(id(child)) or native.linear(child.weight, child.bias))
            undo.append(_replace(parent, name, packed))
            embedding = tied.get(id(child.weight))
            if embedding is not None:
                undo.append(_replace(*embedding, PackedEmbedding(packed)))
            if users[id(child.weight)] == 1 + (embedding is not None):
                undo.append(partial(_unpack, child, packed))
                child.weight.data = child.weight.data.new_empty(0)
    return undo


def _plain(layer: nn.Module | None) -> bool:
    """Whether this is torch's linear layer, unchanged."""
    return type(layer) is nn.Linear and not _changed(layer)


def _changed(module: nn.Module) -> bool:
    """Whether a module has hooks or a `forward` of its own, which a shorter form would pass by."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _join(native: Native, parent: nn.Module) -> dict[int, Linear]:
    """Layers of one parent that read the same input, packed side by side: by the layer's id, its part of the table."""
    parts: dict[int, Linear] = {}
    for names in JOINED:
        layers: list[Any] = [getattr(parent, name, None) for name in names]
        if not all(_plain(layer) and layer.out_features % LANES == 0 for layer in layers):
            continue
        biases = [layer.bias for layer in layers]
        if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
            continue
        bias = None if biases[0] is None else torch.cat(biases)
        table = native.linear(torch.cat([layer.weight for layer in layers]), bias)
        first = 0
        for layer in layers:
            parts[id(layer)] = table.part(first, layer.out_features)
            first += layer.out_features
    return parts


def _replace(parent: nn.Module, name: str, by: nn.Module) -> Undo:
    undo = partial(setattr, parent, name, getattr(parent, name))
    setattr(parent, name, by)
    return undo


def _unpack(layer: nn.Linear, packed: PackedLinear) -> None:
    layer.weight.data = packed.weight


def _pack_forms(native: Native, model: nn.Module) -> list[Undo]:
    forms = (
        (parent, name, _form(native, child))
        for parent in list(model.modules())
        for name, child in parent.named_children()
    )
    return [_replace(parent, name, form) for parent, name, form in forms if form is not None]


def _form(native: Native, layer: nn.Module) -> nn.Module | None:
    """The packed form of a layer, if it computes the same; what a class is called says little, so it is tried."""
    own = dict(layer.named_children())
    if set(own) == {"gate_proj", "up_proj", "down_proj", "act_fn"} and type(own["act_fn"]).__name__ in _SILU:
        form: nn.Module = PackedGate(native, layer)
        width = getattr(own["gate_proj"], "in_features", 0)
    elif not own and set(dict(layer.named_parameters())) == {"weight"} and "Norm" in type(layer).__name__:
        eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
        if not isinstance(eps, float):
            return None
        form, width = PackedNorm(native, layer, eps), int(layer.weight.numel())  # type: ignore[operator]
    else:
        return None
    sample = torch.linspace(-2, 2, 3 * width).view(1, 3, width)
    with torch.inference_mode():
        return form if torch.allclose(form(sample), layer(sample), rtol=1e-4, atol=1e-5) else None


#: Children of a decoder of Llama's form, of its layers, and of their attention.
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_PROBE = "kvatlas-probe"


def _fuse(native: Native, model: PreTrainedModel) -> list[Undo]:
    """Decoder layers of Llama's form get a shorter `forward`, and a decoder of nothing but these."""
    undo: list[Undo] = []
    with _probing(model) as passed:
        for decoder in [module for module in model.modules() if set(dict(module.named_children())) == _DECODER]:
            if "forward" in vars(decoder):
                continue
            fused = [(layer, _fused(native, layer, passed)) for layer in decoder.layers]
            whole = _fused_decoder(decoder, [form for _, form in fused if form is not None])
            for module, form in [*fused, (decoder, whole)]:
                if form is not None:
                    module.forward = form
                    undo.append(partial(delattr, module, "forward"))
    return undo


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Attention that notes what layers pass to it, and gives something that depends on query, key and value."""
    passed: dict[str, Any] = {}

    def probe(_layer: object, query: Any, key: Any, value: Any, _mask: object, **others: Any) -> tuple[Any, None]:
        passed.update(others)
        group = query.shape[1] // key.shape[1]
        return (query * key.repeat_interleave(group, 1) + value.repeat_interleave(group, 1)).transpose(1, 2), None

    with attention_function(model, _PROBE, probe):
        yield passed


def _fused(native: Native, layer: Any, passed: dict[str, Any]) -> FusedLayer | None:
    """The short form of a layer if it computes the same; what a class is called says little, so it is tried."""
    if set(dict(layer.named_children())) != _LAYER:
        return None
    parts = dict(layer.self_attn.named_children())
    packed = set(parts) == _ATTENTION and all(type(part) is PackedLinear for part in parts.values())
    norms = all(type(norm) is PackedNorm for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    if not (packed and norms and type(layer.mlp) is PackedGate) or any(map(_changed, layer.modules())):
        return None
    inner = dict(layer.mlp.layer.named_children())
    joined = all(
        type(together[name]) is PackedLinear and together[name].packed.whole is not None
        for together, names in ((parts, JOINED[0]), (inner, JOINED[1]))
        for name in names
    )
    size = getattr(layer.self_attn, "head_dim", None)
    if not joined or type(inner["down_proj"]) is not PackedLinear or not isinstance(size, int):
        return None
    hidden = parts["q_proj"].in_features
    sample, angles = torch.linspace(-2, 2, 3 * hidden).view(1, 3, hidden), torch.linspace(0, 3, 3 * size)
    positions = angles.cos().view(1, 3, size), angles.sin().view(1, 3, size)
    passed.clear()
    with torch.inference_mode():
        expected = layer(sample, position_embeddings=positions, attention_mask=None)
        fused = FusedLayer(native, layer, dict(passed), size)
        computed = fused.compute(sample, positions, _PROBE)
    same = isinstance(expected, torch.Tensor) and torch.allclose(computed, expected, rtol=1e-4, atol=1e-5)
    return fused if same else None


def _fused_decoder(decoder: Any, layers: Sequence[FusedLayer]) -> FusedDecoder | None:
    """The same for a decoder."""
    if len(layers) < len(decoder.layers):
        return None
    tokens, positions = torch.arange(3)[None], torch.tensor([[0, 2, 5]])
    with torch.inference_mode():
        expected = decoder(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        fused = FusedDecoder(decoder, layers)
        computed = fused.compute(tokens, positions, _PROBE)
    return fused if torch.allclose(computed, expected, rtol=1e-4, atol=1e-5) else None


@contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """The same for a while, for a model that belongs to somebody else: every weight is back afterwards, bit for bit."""
    undo = pack(model)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()
