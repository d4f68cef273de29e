"""Layers of a model on native CPU kernels: numbers of a token never depend on how many there are beside it.

torch's own linear layers sum in another order for one row than for eight. Here weights are packed once, the originals
dropped, and every row is summed in an order of its own. Normalisations and gated feed-forward layers of the usual form
are one call each instead of five.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from kvatlas.native import Native, load

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

#: Activations x * sigmoid(x), as torch and transformers call them.
_SILU = ("SiLU", "SiLUActivation")


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed; in other types than fp32 it computes as torch does."""

    def __init__(self, native: Native, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = native.linear(linear.weight, linear.bias)

    @property
    def weight(self) -> Tensor:
        """The weights as they were [outputs, inputs]: a copy."""
        return self.packed.weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            bias = self.packed.bias
            return F.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return self.packed(x)


class PackedEmbedding(nn.Module):
    """The embedding that shares its weights with a packed layer."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        # Not a child of this module: the layer belongs to another.
        self.linear = (linear,)

    @property
    def weight(self) -> Tensor:
        """The weights as they were [tokens, hidden size]: a copy."""
        return self.linear[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.linear[0].packed.weight
        lanes = weight.shape[2]
        return weight[tokens // lanes, :, tokens % lanes]


class PackedNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, native: Native, norm: nn.Module, eps: float) -> None:
        super().__init__()
        self.native, self.norm, self.eps = native, norm, eps

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.norm.weight
        if x.dtype is not torch.float32 or weight.dtype is not torch.float32:
            return self.norm(x)  # type: ignore[no-any-return]
        return self.native.rms_norm(x.contiguous(), weight, self.eps)


class PackedGate(nn.Module):
    """down(silu(gate(x)) * up(x)), the gated feed-forward layer of Llama and its kin, over packed layers."""

    def __init__(self, native: Native, layer: Any) -> None:
        super().__init__()
        self.native, self.layer = native, layer
        # Looking children up costs as much as a small layer.
        self.parts = (layer.gate_proj, layer.up_proj, layer.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return self.layer(x)  # type: ignore[no-any-return]
        gate, up, down = self.parts
        inner = self.native.silu_mul(gate(x).flatten(0, -2), up(x).flatten(0, -2))
        found: Tensor = down(inner.view(*x.shape[:-1], -1))
        return found


#: (parent, name, layer) of layers that were replaced.
Replaced = list[tuple[nn.Module, str, nn.Module]]


def pack(network: PreTrainedModel) -> Replaced:
    """Replace a model's layers by packed ones where native kernels serve it: fp32 on the CPU.

    The weights of replaced linear layers are gone.
    """
    native = load()
    if native is None or network.device.type != "cpu" or network.dtype is not torch.float32:
        return []
    # What shares weights shares the packed ones; the names that transformers would tie are gone.
    network.tie_weights = _tied
    return [*_pack_linear(native, network), *_pack_forms(native, network)]


def _tied(*_: Any, **__: Any) -> None:
    pass


def _pack_linear(native: Native, network: nn.Module) -> Replaced:
    found = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear | nn.Embedding)
    ]
    users = Counter(id(child.weight) for _, _, child in found)
    tied = {id(child.weight): (parent, name, child) for parent, name, child in found if type(child) is nn.Embedding}
    replaced: Replaced = []
    for parent, name, child in found:
        if type(child) is not nn.Linear:
            continue
        packed = PackedLinear(native, child)
        setattr(parent, name, packed)
        replaced.append((parent, name, child))
        embedding = tied.get(id(child.weight))
        if embedding is not None:
            setattr(embedding[0], embedding[1], PackedEmbedding(packed))
            replaced.append(embedding)
        if users[id(child.weight)] == 1 + (embedding is not None):
            child.weight.data = child.weight.data.new_empty(0)
    return replaced


def _pack_forms(native: Native, network: nn.Module) -> Replaced:
    replaced: Replaced = []
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            form = _form(native, child)
            if form is not None:
                setattr(parent, name, form)
                replaced.append((parent, name, child))
    return replaced


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


@contextmanager
def packed(network: PreTrainedModel) -> Iterator[None]:
    """The same for a while, for a model that belongs to somebody else: every weight is back afterwards, bit for bit."""
    replaced = pack(network)
    try:
        yield
    finally:
        vars(network).pop("tie_weights", None)
        for parent, name, layer in reversed(replaced):
            if isinstance(layer, nn.Linear) and not layer.weight.numel():
                layer.weight.data = getattr(parent, name).weight
            setattr(parent, name, layer)
