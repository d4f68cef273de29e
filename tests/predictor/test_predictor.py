from __future__ import annotations

import pytest
import torch

from kvatlas.core import Grade, KvatlasError, Setting, Status, Trace, Usage
from kvatlas.models import Model
from kvatlas.predictor import Examples, answer_attention, evaluate, examples, train
from tests.conftest import ARCHITECTURES
from tests.engine.test_loop import prompts


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_labels_equal_the_rows_of_the_whole_attention_matrix(random_models: dict[str, Model], kind: str) -> None:
    model = random_models[kind]
    tokens = list(prompts(model, 1)[0])
    start = len(tokens) - 5
    found, hidden = answer_attention(model.network(), tokens, start)
    network = model.network()
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        whole = network.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    wanted = torch.stack([layer[0, :, start:, :start].mean((0, 1)) for layer in whole.attentions]).mean(0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden, whole.last_hidden_state[0, :start], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_labels_of_several_blocks_equal_the_whole_matrix(random_models: dict[str, Model], kind: str) -> None:
    model = random_models[kind]
    tokens = [5 + i * 7919 % 40 for i in range(700)]
    start = 640
    found, hidden = answer_attention(model.network(), tokens, start)
    network = model.network()
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        whole = network.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    wanted = torch.stack([layer[0, :, start:, :start].mean((0, 1)) for layer in whole.attentions]).mean(0)
    assert (found - wanted).abs().max() < 1e-5
    torch.testing.assert_close(hidden, whole.last_hidden_state[0, :start], atol=1e-4, rtol=1e-4)


def test_examples_are_the_thinking_tokens_alone(random_models: dict[str, Model]) -> None:
    model = random_models["llama"]
    prompt, thinking = (9, 10, 11), (12, 13, 14, 15)
    tokens = (*thinking, model.think_close, 20, 21)
    trace = Trace(
        "m", "b", "p", 0, Setting.of("full"), tokens, "", Grade(True, 1.0, "", Status.OK), Usage(3, 7, 4, 9, 9, 0, 0)
    )
    data = examples(model, model.network(), [(prompt, trace), (prompt, trace)])
    assert data.hidden.shape == (8, model.shape.hidden)
    assert data.trace.tolist() == [0] * 4 + [1] * 4
    attention, _ = answer_attention(model.network(), list(prompt + tokens), 8)
    torch.testing.assert_close(data.label[:4], attention[3:7] * 4)


def _synthetic(seed: int, traces: int = 30) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(traces * 50, 16, generator=generator)
    label = torch.expm1((hidden[:, 0] + 0.5 * hidden[:, 1]).clamp(min=0))
    return Examples(hidden, label, torch.arange(traces).repeat_interleave(50))


def test_a_head_learns_what_can_be_learned() -> None:
    head = train(_synthetic(0), steps=300, batch=512)
    quality = evaluate(head, _synthetic(1))
    assert quality.traces == 30
    assert quality.spearman > 0.75
    assert quality.overlap > 0.8
    untrained = evaluate(train(_synthetic(0), steps=1, batch=8), _synthetic(1))
    assert untrained.spearman < 0.5


def test_nothing_to_learn_from_is_refused() -> None:
    empty = Examples(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    with pytest.raises(KvatlasError, match="nothing to learn from"):
        train(empty)
