"""What packed layers are replaced by: modules and forms that compute the same with native CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn import functional as F

from kvatlas.models.attention import ATTENTION, attend
from kvatlas.native import Linear, Native

if TYPE_CHECKING:
    from torch import Tensor


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed; in other types than fp32 it computes as torch does."""

    def __init__(self, packed: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.inputs, packed.outputs
        self.packed = packed

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

    def __init__(self, native: Native, norm: Any) -> None:
        super().__init__()
        self.native, self.norm, self.eps = native, norm, norm.variance_epsilon

    @property
    def weight(self) -> Any:
        """The weight [hidden size] of the layer that it stands for."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype is not torch.float32 or weight.dtype is not torch.float32:
            return self.norm(x)  # type: ignore[no-any-return]
        return self.native.rms_norm(x.contiguous(), weight, self.eps)


class PackedGate(nn.Module):
    """down(silu(gate(x)) * up(x)), the gated feed-forward layer of Llama and its kin, over packed layers."""

    def __init__(self, native: Native, layer: Any) -> None:
        super().__init__()
        self.native, self.layer = native, layer

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return self.layer(x)  # type: ignore[no-any-return]
        layer = self.layer
        inner = self.native.silu_mul(layer.gate_proj(x).flatten(0, -2), layer.up_proj(x).flatten(0, -2))
        return layer.down_proj(inner.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class FusedLayer:
    """A decoder layer of Llama's form in twelve calls instead of sixty.

    Its linear layers are packed, queries, keys and values side by side, gate and up, too.
    """

    def __init__(self, native: Native, layer: Any) -> None:
        self.native, self.attention, gate = native, layer.self_attn, layer.mlp.layer
        # Looked up once: the children of a module take as long to find as a small layer to compute.
        self.norms = [(norm.weight, norm.eps) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.inputs, self.output = self.attention.q_proj.packed.whole, self.attention.o_proj.packed
        self.inner, self.down = gate.gate_proj.packed.whole, gate.down_proj.packed
        self.size, self.scaling = self.attention.head_dim, self.attention.scaling
        projections = self.attention.q_proj, self.attention.k_proj, self.attention.v_proj
        self.heads = [projection.out_features // self.size for projection in projections]
        window = getattr(self.attention.config, "sliding_window", None)
        self.window: int | None = getattr(self.attention, "sliding_window", window)
        self.rotary_heads = sum(self.heads[:2]) if getattr(self.attention, "use_rope", True) else 0

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layer's output for x [tokens, hidden size]; cos and sin [1, tokens, head size]."""
        native = self.native
        table = self.inputs(native.rms_norm(x, *self.norms[0]))
        native.rotate(table, cos, sin, self.rotary_heads, self.size)
        heads = table.view(1, len(x), -1, self.size).transpose(1, 2).split(self.heads, 1)
        seen, _ = attend(self.attention, *heads, None, scaling=self.scaling, sliding_window=self.window)
        x = x + self.output(seen.reshape(len(x), -1))
        gate, up = self.inner(native.rms_norm(x, *self.norms[1])).chunk(2, 1)
        out: Tensor = x + self.down(native.silu_mul(gate, up))
        return out


class FusedDecoder:
    """The `forward` of a decoder of fused layers under `own_attention`, for one row of tokens; else it is its own."""

    def __init__(self, decoder: Any, layers: Sequence[FusedLayer]) -> None:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        self.unfused: Any = WeakMethod(decoder.forward)
        self.layers, self.output = layers, BaseModelOutputWithPast
        self.embedding, self.rotary, self.norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self.config = decoder.config

    def __call__(self, input_ids: Tensor | None = None, **given: Any) -> Any:
        positions = given.get("position_ids")
        if input_ids is None or positions is None or self.config._attn_implementation != ATTENTION:
            return self.unfused()(input_ids, **given)
        x = self.embedding(input_ids)
        cos, sin = self.rotary(x, position_ids=positions)
        if cos.shape != (1, x.shape[1], self.layers[0].size):
            raise ValueError(f"The rotary embedding is {list(cos.shape)}, which does not turn whole heads.")
        x = x[0]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x[None]))
