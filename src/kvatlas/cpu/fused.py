"""Decoders of Llama's form in few calls: the `forward` of the whole decoder, and its layers on native code."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor

from kvatlas.cpu.native.decoder import DecoderLayer, DecoderPass, Products
from kvatlas.forward import ATTENTION, attend, layer_attention

#: Types of rotary embeddings whose angles depend on the position alone, as transformers names them.
BY_POSITION = ("default", "linear", "llama3", "yarn")


class FusedLayer(DecoderLayer):
    """A decoder layer of Llama's form in two calls of native code, with any attention between them.

    Its linear layers are packed, queries, keys and values side by side, gate and up, too.
    """

    def __init__(self, layer: Any) -> None:
        self.attention = layer.self_attn
        gate = layer.mlp.layer
        products = Products(
            self.attention.q_proj.packed.whole,
            self.attention.o_proj.packed,
            gate.gate_proj.packed.whole,
            gate.down_proj.packed,
        )

        self.number: int = self.attention.layer_idx
        self.size = self.attention.head_dim
        self.scaling: float = self.attention.scaling
        projections = (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        self.heads = [projection.out_features // self.size for projection in projections]
        self.window = window_of(self.attention)
        rotary_heads = sum(self.heads[:2]) if getattr(self.attention, "use_rope", True) else 0
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        super().__init__([(norm.weight, norm.eps) for norm in norms], products, rotary_heads, self.size)

    def __call__(self, tokens: DecoderPass) -> None:
        """Replace the states of `tokens` by the output of this layer."""
        self.project(tokens)
        heads = tokens.heads.view(1, len(tokens.heads), -1, self.size).transpose(1, 2)
        query, key, value = torch.split(heads, self.heads, 1)
        seen, _ = attend(self.attention, query, key, value, None, scaling=self.scaling, sliding_window=self.window)
        tokens.seen.copy_(seen.reshape(tokens.seen.shape))
        self.feed_forward(tokens)


def window_of(attention: Any) -> int | None:
    """Return the sliding window that a layer of one of `packing.ATTENTIONS` passes to its attention function."""
    window: int | None = getattr(attention.config, "sliding_window", None)
    # Mistral's layers have none of their own.
    return getattr(attention, "sliding_window", window)


def compute_layers(layers: Sequence[FusedLayer], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute all layers of a decoder, in one call of native code if attention is native.

    They share working memory: their products have the same sizes.
    """
    tokens = DecoderPass(x, cos, sin, layers[0].products)
    attention = layer_attention()
    if attention is not None:
        attention.compute_layers(layers, tokens)
        return tokens.states
    for layer in layers:
        layer(tokens)
    return tokens.states


#: One or several decoder layers: gets x [tokens, hidden size], and cos and sin [1, tokens, head size].
ShortLayer = Callable[[Tensor, Tensor, Tensor], Tensor]


class DecoderOutput(NamedTuple):
    """The output of a decoder, with the names of transformers."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class FusedDecoder:
    """The `forward` of a decoder of fused layers, for one row of tokens under `own_attention`; otherwise its own."""

    def __init__(self, decoder: Any, layers: Sequence[ShortLayer]) -> None:
        self.unfused: Any = WeakMethod(decoder.forward)
        self.layers = layers
        self.head_size = decoder.layers[0].self_attn.head_dim
        self.embedding = decoder.embed_tokens
        self.rotary = decoder.rotary_emb
        self.norm = decoder.norm
        self.config = decoder.config
        #: Cosines and sines [positions, head size] of all positions so far, on a CPU.
        self.angles: Sequence[Tensor] = (torch.empty(0), torch.empty(0))

    def __call__(self, input_ids: Tensor | None = None, **others: Any) -> Any:
        positions = others.get("position_ids")
        if input_ids is None or positions is None or self.config._attn_implementation != ATTENTION:
            return self.unfused()(input_ids, **others)

        # Layers of a fused decoder have no hooks.
        x = self.embedding.forward(input_ids)
        cos, sin = self.rotation(x, positions)
        if cos.shape != (1, x.shape[1], self.head_size):
            raise ValueError(f"The rotary embedding is {list(cos.shape)}, which does not turn whole heads.")
        x = x[0]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return DecoderOutput(self.norm.forward(x[None]))

    def rotation(self, x: Tensor, positions: Tensor) -> Sequence[Tensor]:
        """Return cosines and sines [1, tokens, head size] for positions [1, tokens]."""
        if not positions.is_cpu or getattr(self.rotary, "rope_type", None) not in BY_POSITION:
            angles: Sequence[Tensor] = self.rotary(x, position_ids=positions)
            return angles

        # Read from a table: to compute them takes longer than a layer of a small model.
        beyond = int(positions.max()) + 1
        if beyond > len(self.angles[0]):
            # Twice as many, but none that the model does not have.
            count = max(beyond, min(2 * beyond, getattr(self.config, "max_position_embeddings", 0)))
            every_position = torch.arange(count)[None]
            self.angles = [angles[0] for angles in self.rotary(x, position_ids=every_position)]
        return [angles[positions] for angles in self.angles]


class ModelOutput(NamedTuple):
    """The output of a causal model, with the name of transformers."""

    logits: Tensor


class FusedModel:
    """The `forward` of a causal model with a fused decoder: logits as Llama computes them, in fewer steps."""

    def __init__(self, model: Any) -> None:
        self.unfused: Any = WeakMethod(model.forward)
        self.decoder = model.get_decoder()
        self.head = model.lm_head
        self.config = model.config

    def __call__(self, input_ids: Tensor | None = None, **others: Any) -> Any:
        positions = others.get("position_ids")
        if input_ids is None or positions is None or self.config._attn_implementation != ATTENTION:
            return self.unfused()(input_ids, **others)
        states = self.decoder(input_ids, position_ids=positions).last_hidden_state
        needed = others.get("logits_to_keep", 0)
        if isinstance(needed, Tensor):
            states = states[:, needed]
        elif needed:
            states = states[:, -needed:]
        return ModelOutput(self.head(states))
