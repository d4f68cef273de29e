from __future__ import annotations

from typing import Any

import pytest
import torch

from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle
from kvatlas.predictor.calibration import query_statistics
from kvatlas.predictor.labels import answer_attention
from tests.conftest import WINDOW
from tests.engine.test_loop import prompts


@pytest.mark.parametrize(("kind", "part"), [("llama", "q_proj"), ("qwen2", "q_proj"), ("qwen3", "q_norm")])
def test_statistics_are_those_of_the_queries_before_rotation(
    random_models: dict[str, ModelHandle], kind: str, part: str
) -> None:
    handle = random_models[kind]
    model = handle.load()
    texts = [prompt[:20] for prompt in prompts(handle, 3)]
    result = query_statistics(handle, model, texts)

    shape, planes = handle.shape, handle.shape.head_dim // 2
    recorded: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(shape.layers)}

    def note(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            recorded[layer].append(output.reshape(-1, shape.heads, shape.head_dim).double())

        return hook

    for layer, block in enumerate(model.get_decoder().layers):
        getattr(block.self_attn, part).register_forward_hook(note(layer))
    with torch.inference_mode():
        for text in texts:
            model.get_decoder()(input_ids=torch.tensor([text]), use_cache=False)
    for layer in range(shape.layers):
        queries = torch.cat(recorded[layer])
        pairs = torch.complex(queries[..., :planes], queries[..., planes:])
        center = torch.complex(result["center_real"][layer], result["center_imag"][layer])
        torch.testing.assert_close(center, pairs.mean(0).to(center.dtype), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(result["norm"][layer], pairs.abs().mean(0).float(), atol=1e-5, rtol=1e-4)
    wanted = 10_000.0 ** -(torch.arange(planes) / planes)
    torch.testing.assert_close(result["frequency"], wanted, atol=1e-6, rtol=1e-5)


def test_layers_with_a_window_are_read_with_it(random_models: dict[str, ModelHandle]) -> None:
    """A text longer than the window of mistral's layers: queries after the first layer depend on it."""
    handle = random_models["mistral"]
    model = handle.load()
    text = tuple(token for prompt in prompts(handle, 4) for token in prompt)
    assert len(text) > 3 * WINDOW
    result = query_statistics(handle, model, [text])
    model.set_attn_implementation("eager")
    seen: list[torch.Tensor] = []
    layer = model.get_decoder().layers[-1].self_attn
    layer.q_proj.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    with torch.inference_mode():
        model.get_decoder()(input_ids=torch.tensor([text]), use_cache=False)
    halves = seen[0].view(len(text), handle.shape.heads, 2, -1)
    norms = halves.square().sum(2).sqrt().mean(0)
    torch.testing.assert_close(result["norm"][-1], norms, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("softcap", "has layers with soft-capped attention"), ("s_aux", "has layers with attention sinks")],
)
def test_attention_that_is_more_than_a_softmax_is_refused(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch, what: str, sentence: str
) -> None:
    """As where the engine and the labels attend."""
    from transformers import AttentionInterface

    handle = random_models["qwen3"]
    model, other = handle.load(), handle.load()
    register = AttentionInterface.register

    def with_more(name: str, function: Any) -> None:
        register(name, lambda *tensors, **others: function(*tensors, **others, **{what: 30.0}))

    monkeypatch.setattr(AttentionInterface, "register", with_more)
    with pytest.raises(KvatlasError, match=sentence):
        query_statistics(handle, model, [(5, 6, 7)])
    with pytest.raises(KvatlasError, match=sentence):
        answer_attention(other, [5, 6, 7], 2)


def test_what_cannot_be_calibrated_is_said(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = random_models["qwen3"]
    model = handle.load()
    with pytest.raises(KvatlasError, match="There is no text to calibrate on"):
        query_statistics(handle, model, [])
    rotary = model.get_decoder().rotary_emb
    monkeypatch.setattr(rotary, "inv_freq", rotary.inv_freq[:4])
    with pytest.raises(KvatlasError, match="it rotates 8 of 16"):
        query_statistics(handle, model, [(5, 6)])
    monkeypatch.setattr(rotary, "rope_type", "dynamic")
    with pytest.raises(KvatlasError, match="rotation of positions is not steady"):
        query_statistics(handle, model, [(5, 6)])
