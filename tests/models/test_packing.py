"""Packed layers against the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from kvatlas import native
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.models.packed_layers import FusedDecoder, FusedLayer
from kvatlas.models.packing import pack, packed
from kvatlas.policies import of

pytestmark = pytest.mark.newest

if native.load() is None:
    pytest.skip(str(native.why_not()), allow_module_level=True)

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def fused(model: Any) -> list[bool]:
    return [isinstance(layer.forward, FusedLayer) for layer in model.get_decoder().layers]


@pytest.mark.parametrize(
    ("kind", "whole"), [("llama", True), ("qwen2", True), ("mistral", True), ("qwen3", False), ("gemma3", False)]
)
def test_layers_of_llamas_form_are_fused(random_models: dict[str, ModelHandle], kind: str, whole: bool) -> None:
    model = random_models[kind].load()
    assert set(fused(model)) == {whole}
    assert isinstance(model.get_decoder().forward, FusedDecoder) == whole


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_a_fused_layer_computes_the_bits_of_its_own(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]

    def decode(model: Any) -> tuple[tuple[int, ...], torch.Tensor]:
        seen: list[torch.Tensor] = []
        model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[2][0, -1].clone()))
        policy = of(Setting.of("full"))
        (generation,) = Engine(handle, model, [policy], Sampling(1.0, 0, 1.0, 40), 4).run(
            [Request(0, tuple(range(3, 30)), 5, (policy,))]
        )
        return generation.tokens, torch.stack(seen)

    tokens, logits = decode(handle.load())
    plain = handle.load()
    for module in (plain.get_decoder(), *plain.get_decoder().layers):
        del module.forward
    expected, own = decode(plain)
    assert tokens == expected
    assert torch.equal(logits, own)


def test_a_layer_that_computes_something_else_keeps_its_forward() -> None:
    """Granite's layers have the children of Llama's, and scale what is added."""
    model = GraniteForCausalLM(GraniteConfig(**SMALL, residual_multiplier=0.3)).eval()
    pack(model)
    assert not any(fused(model))
    alike = GraniteForCausalLM(GraniteConfig(**SMALL, residual_multiplier=1.0)).eval()
    pack(alike)
    assert all(fused(alike))


def test_a_layer_of_a_width_that_cannot_be_joined_keeps_its_forward() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "intermediate_size": 90})).eval()
    pack(model)
    assert not any(fused(model))


def test_a_layer_that_is_looked_into_keeps_its_forward() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    seen: list[torch.Tensor] = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *call: seen.append(call[2]))
    pack(model)
    assert fused(model) == [True, False]
    assert not isinstance(model.model.forward, FusedDecoder)


def test_what_is_packed_or_replaced_already_is_left_alone() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    layer = model.model.layers[1].self_attn.o_proj
    layer.forward = lambda x, forward=layer.forward: 2 * forward(x)
    pack(model)
    assert fused(model) == [True, False]
    with torch.inference_mode():
        inputs = torch.tensor([[5, 6, 7]])
        wanted = model(inputs).logits
        with packed(model):
            assert torch.equal(model(inputs).logits, wanted)
    assert fused(model) == [True, False]
    assert "forward" in vars(layer)
    assert type(layer) is torch.nn.Linear


@pytest.mark.parametrize("bias", [False, True])
def test_a_model_of_somebody_else_is_as_it_was_afterwards(tmp_path: Path, bias: bool) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=bias)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        wanted = model(inputs).logits
        with packed(model):
            assert all(fused(model))
            torch.testing.assert_close(model(inputs).logits, wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(inputs).logits, wanted)
    assert not any(fused(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.get_decoder())
