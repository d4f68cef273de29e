"""Layers of a model on native CPU kernels: numbers of a token never depend on how many there are beside it.

torch's own linear layers sum in another order for one row than for eight. Here weights are packed once, the originals
dropped, and every row is summed in an order of its own. Layers that read the same input (queries, keys and values; gate
and up) lie side by side in one table, and what is computed in one of the usual forms takes fewer calls: normalisations,
gated feed-forward layers, and whole decoders of Llama's form (`packed_layers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from kvatlas.models.attention import attention_function, own_attention
from kvatlas.models.packed_experts import pack_experts
from kvatlas.models.packed_layers import FusedDecoder, FusedLayer, PackedEmbedding, PackedGate, PackedLinear, PackedNorm
from kvatlas.native import LANES, Linear, Native, load

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

#: Linear layers that read the same input.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Layers that have a packed form, by transformers' module and class. Other models have copies of these classes, which
#: are known by their code.
NORMS = ("llama.LlamaRMSNorm", "olmo2.Olmo2RMSNorm")
GATES = ("llama.LlamaMLP", "seed_oss.SeedOssMLP")
LAYERS = ("llama.LlamaDecoderLayer",)
ATTENTIONS = (
    "llama.LlamaAttention",
    "mistral.MistralAttention",
    "qwen2.Qwen2Attention",
    "seed_oss.SeedOssAttention",
    "smollm3.SmolLM3Attention",
)
#: Children of a decoder of Llama's form; what the feed-forward layer and the norms of its layers are packed into.
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
FORMS = [PackedGate, PackedNorm, PackedNorm]
#: Distance of numbers that differ by rounding alone, relative to their norm.
ROUNDING = 1e-3

#: Puts back what was replaced.
Undo = Callable[[], None]


def pack(model: PreTrainedModel) -> list[Undo]:
    """Replace a model's layers by packed ones where native kernels serve it: fp32 on the CPU.

    The weights of replaced linear layers are gone; what is returned puts them back, the last one first. Each step must
    leave the numbers of a few tokens as the model's own layers compute them, or is undone. A model with hooks is not
    run: its linear layers alone are packed. Hooks registered later inside a fused decoder see no call of the engine's.
    """
    native = load()
    if native is None or model.device.type != "cpu" or model.dtype is not torch.float32:
        return []
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        return []
    if any(map(_has_hooks, model.modules())):
        return _pack_linear(native, model)
    undo: list[Undo] = []
    own = _numbers(model)
    for step in (_pack_linear, pack_experts, _pack_forms, _fuse):
        replaced = step(native, model)
        if own and _close(_numbers(model), own):
            undo += replaced
        else:
            _put_back(replaced)
    return undo


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


@torch.inference_mode()
def _numbers(model: PreTrainedModel) -> list[Tensor]:
    """What a model passes to attention in each layer, and logits, for a few tokens; nothing if it raises."""
    numbers: list[Tensor] = []

    def probe(_layer: object, *given: Any, scaling: float, sliding_window: int = 0, **_: Any) -> tuple[Tensor, None]:
        query, key, value = given[:3]
        numbers.extend((query, key, value, torch.tensor([scaling, sliding_window or 0])))
        grouped = query.shape[1] != key.shape[1]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return seen.transpose(1, 2), None

    tokens, positions = torch.arange(3)[None], torch.tensor([[0, 2, 5]])
    try:
        with own_attention(model), attention_function(probe):
            return [*numbers, model(input_ids=tokens, position_ids=positions, use_cache=False).logits]
    except Exception:
        return []


def _close(numbers: list[Tensor], own: list[Tensor]) -> bool:
    same = [each.shape for each in numbers] == [each.shape for each in own]
    return same and all(torch.dist(a, b) <= ROUNDING * b.norm() for a, b in zip(numbers, own, strict=True))


def _put_back(replaced: list[Undo]) -> None:
    for step in reversed(replaced):
        step()


def _tied(*_: Any, **__: Any) -> None:
    pass


def _pack_linear(native: Native, model: PreTrainedModel) -> list[Undo]:
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
    if undo:
        # What shares weights shares the packed ones; the names that transformers would tie are gone.
        model.tie_weights = _tied
        undo.insert(0, lambda: vars(model).pop("tie_weights"))
    return undo


def _plain(layer: nn.Module | None) -> bool:
    """Whether this is torch's linear layer without hooks."""
    return type(layer) is nn.Linear and not _has_hooks(layer)


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
    from transformers.activations import ACT2FN

    silu = nn.SiLU, type(ACT2FN["silu"])
    undo: list[Undo] = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if _computes_as(child, NORMS):
                undo.append(_replace(parent, name, PackedNorm(native, child)))
            elif _computes_as(child, GATES) and isinstance(child.act_fn, silu):
                undo.append(_replace(parent, name, PackedGate(native, child)))
    return undo


def _computes_as(layer: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a layer's `forward` is the code of one of these classes."""
    classes = (name.split(".") for name in names)
    modules = ((import_module(f"transformers.models.{module}.modeling_{module}"), name) for module, name in classes)
    return _code(type(layer)) in [_code(getattr(module, name)) for module, name in modules]


def _code(layer: type[nn.Module]) -> Any:
    # transformers wraps the layers that checkpoint gradients, all in the same code.
    forward: Any = unwrap(layer.forward)
    code, doc = getattr(forward, "__code__", None), forward.__doc__
    return code and (code.co_code, code.co_names, [value for value in code.co_consts if value != doc])


def _fuse(native: Native, model: PreTrainedModel) -> list[Undo]:
    """A decoder of nothing but layers of Llama's form gets a shorter `forward`."""
    decoder = model.get_decoder()
    if set(dict(decoder.named_children())) != DECODER or not all(map(_fusable, decoder.layers)):
        return []
    decoder.forward = FusedDecoder(decoder, [FusedLayer(native, layer) for layer in decoder.layers])
    return [partial(delattr, decoder, "forward")]


def _fusable(layer: Any) -> bool:
    """Whether a layer has Llama's form, and all that it computes with is packed."""
    if not (_computes_as(layer, LAYERS) and _computes_as(layer.self_attn, ATTENTIONS)):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if [type(part) for part in (mlp, layer.input_layernorm, layer.post_attention_layernorm)] != FORMS:
        return False
    parents = (attention, JOINED[0]), (mlp.layer, JOINED[1])
    joined = [getattr(parent, name) for parent, names in parents for name in names]
    linear = *joined, attention.o_proj, mlp.layer.down_proj
    return all(type(part) is PackedLinear for part in linear) and all(part.packed.whole for part in joined)


@contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """The same for a while, for a model that belongs to somebody else: every weight is back afterwards, bit for bit."""
    undo = pack(model)
    try:
        yield
    finally:
        _put_back(undo)
