"""Mixtures of experts on native CPU kernels: what a token gets does not depend on the tokens beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kvatlas.models.packed_layers import PackedLinear
from kvatlas.native import Native

if TYPE_CHECKING:
    from torch import Tensor

#: Functions that torch computes in vectors of numbers, and by another formula for those left over.
CURVES = ("sigmoid", "exp", "tanh", "softplus", "silu", "gelu")
#: A multiple of every vector's length.
VECTOR = 64


class PackedExperts(nn.Module):
    """Experts as `transformers.integrations.moe` knows them, in one table for all, each packed by itself."""

    def __init__(self, native: Native, layer: Any) -> None:
        super().__init__()
        self.layer, self.names = layer, ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
        self.first, self.second = (
            [PackedLinear(native.linear(*own)) for own in self._own(name)] for name in self.names
        )
        for name in self.names:
            getattr(layer, name).data = torch.empty(0)

    def _own(self, name: str) -> list[tuple[Tensor, Tensor | None]]:
        weights = getattr(self.layer, name)
        biases = getattr(self.layer, f"{name}_bias") if self.layer.has_bias else [None] * len(weights)
        return list(zip(weights.transpose(1, 2) if self.layer.is_transposed else weights, biases, strict=True))

    def unpack(self) -> None:
        """Give the layer its weights back."""
        for name, experts in zip(self.names, (self.first, self.second), strict=True):
            weights = torch.stack([expert.weight for expert in experts])
            getattr(self.layer, name).data = weights.mT.contiguous() if self.layer.is_transposed else weights

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden size] through the experts `chosen` [tokens, experts of each], summed in that order."""
        layer, flat, number = self.layer, chosen.flatten(), chosen.shape[1]
        out = x.new_zeros(len(flat), x.shape[1])
        for expert in flat[flat < len(self.first)].unique().tolist():  # type: ignore[no-untyped-call]
            places = (flat == expert).nonzero()[:, 0]
            inner = self.first[expert](x[places // number])
            out[places] = self.second[expert](layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner))
        if layer.has_post_expert_norm:
            out = layer.post_expert_norm(out)
        first, *others = (out * weights.reshape(-1, 1)).view(*chosen.shape, -1).unbind(1)
        return sum(others, first)


class RowExact(TorchFunctionMode):
    """The `forward` of a layer of experts, with what chooses among them: tables and curves row by row."""

    def __init__(self, native: Native, layer: nn.Module) -> None:
        super().__init__()
        self.inexact = layer.forward
        tables = [weight for weight in layer.parameters() if weight.dim() == 2 and weight.numel()]
        self.tables = {id(weight): PackedLinear(native.linear(weight, None)) for weight in tables}

    def __call__(self, *given: Any, **named: Any) -> Any:
        with self:
            return self.inexact(*given, **named)

    def __torch_function__(self, function: Any, _types: Any, given: Any = (), named: Any = None) -> Any:
        named, name = named or {}, getattr(function, "__name__", "")
        if function is F.linear and len(given) > 1 and id(given[1]) in self.tables:
            bias = named.get("bias", given[2] if len(given) > 2 else None)
            return self.tables[id(given[1])](given[0]) + (0 if bias is None else bias)
        if name in CURVES and (width := given[0].shape[-1]) % VECTOR:
            return function(F.pad(given[0], (0, -width % VECTOR)), *given[1:], **named)[..., :width]
        return function(*given, **named)


def pack_experts(native: Native, model: nn.Module) -> list[Callable[[], None]]:
    """Replace experts; what is returned puts them back. Linear layers are packed before."""
    undo: list[Callable[[], None]] = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if {"has_gate", "has_post_expert_norm"} <= vars(child).keys():
                packed = PackedExperts(native, child)
                setattr(parent, name, packed)
                parent.forward = RowExact(native, parent)
                undo += [packed.unpack, partial(setattr, parent, name, child), partial(delattr, parent, "forward")]
    return undo
