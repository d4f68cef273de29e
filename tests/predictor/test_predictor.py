from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvatlas.core import Grade, KvatlasError, Setting, Status, Trace, Usage
from kvatlas.models import ModelHandle
from kvatlas.policies.dynts import Layout, importance
from kvatlas.predictor import REASONS, Examples, Loss, answer_attention, evaluate, examples, left_out, train
from kvatlas.predictor.training import new_head
from tests.conftest import ARCHITECTURES
from tests.engine.test_loop import prompts

pytestmark = pytest.mark.newest


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_labels_equal_the_rows_of_the_whole_attention_matrix(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]
    tokens = list(prompts(handle, 1)[0])
    start = len(tokens) - 5
    result, hidden = answer_attention(handle.load(), tokens, start)
    model = handle.load()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        whole = model.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    wanted = torch.stack([layer[0, :, start:, :start].mean((0, 1)) for layer in whole.attentions]).mean(0)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden, whole.last_hidden_state[0, :start], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_labels_of_several_blocks_equal_the_whole_matrix(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]
    tokens = [5 + i * 7919 % 40 for i in range(700)]
    start = 640
    result, hidden = answer_attention(handle.load(), tokens, start)
    model = handle.load()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        whole = model.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    wanted = torch.stack([layer[0, :, start:, :start].mean((0, 1)) for layer in whole.attentions]).mean(0)
    assert (result - wanted).abs().max() < 1e-5
    torch.testing.assert_close(hidden, whole.last_hidden_state[0, :start], atol=1e-4, rtol=1e-4)


def test_examples_are_the_thinking_tokens_alone(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    prompt, thinking = (9, 10, 11), (12, 13, 14, 15)
    tokens = (*thinking, model.think_close, 20, 21)
    trace = Trace(
        "m", "b", "p", 0, Setting.of("full"), tokens, "", Grade(True, 1.0, "", Status.OK), Usage(3, 7, 4, 9, 9, 0, 0)
    )
    data = examples(model, model.load(), [(prompt, trace), (prompt, trace)])
    assert data.hidden.shape == (8, model.shape.hidden)
    assert data.trace.tolist() == [0] * 4 + [1] * 4
    attention, _ = answer_attention(model.load(), list(prompt + tokens), 8)
    torch.testing.assert_close(data.label[:4], attention[3:7] * 4)


@pytest.mark.parametrize(
    ("after", "grade", "why"),
    [
        ("</think> 7", Grade(True, 1.0, "7", Status.OK), ""),
        ("", Grade(False, 0.0, None, Status.TRUNCATED), "no_closing_tag"),
        ("</think>", Grade(False, 0.0, None, Status.NO_ANSWER), "no_answer"),
        ("</think> 7", Grade(False, 0.0, None, Status.NO_ANSWER), "no_answer"),
        ("</think> 7", Grade(False, 0.0, None, Status.TRUNCATED), "no_answer"),
        ("</think> 7", Grade(False, 0.0, "7", Status.OK), "wrong"),
        ("</think> 7", Grade(False, 0.0, "7", Status.GRADER_TIMEOUT), "wrong"),
        ("unthought", Grade(True, 1.0, "7", Status.OK), "no_thinking"),
    ],
)
def test_why_a_trace_is_left_out(random_models: dict[str, ModelHandle], after: str, grade: Grade, why: str) -> None:
    model = random_models["llama"]
    assert model.think_close is not None
    end = {"": (), "</think>": (model.think_close,)}.get(after, (model.think_close, 20))
    tokens = end if after == "unthought" else (12, 13, *end)
    usage = Usage(3, len(tokens), 2, 9, 9, 0, 0)
    assert left_out(model, Trace("m", "b", "p", 0, Setting.of("full"), tokens, "", grade, usage)) == why
    assert why in ("", *REASONS)


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


@pytest.mark.parametrize("loss", list(Loss))
def test_a_head_learns_in_either_layout_with_each_loss(loss: Loss) -> None:
    data, others = replace(_synthetic(0), thinking=torch.full((30,), 5000)), _synthetic(1)
    for layout in Layout:
        head = train(data, layout=layout, loss=loss, steps=300, batch=512)
        assert set(head) == set(layout.tensors)
        assert evaluate(head, others).spearman > 0.5


def test_targets_and_weights_of_the_authors_losses() -> None:
    """Attention of 2e-4 and 4.5e-4 in a trace of 1000 thinking tokens, three of which are here."""
    attention = torch.tensor([2e-4, 4.5e-4, 5e-4])
    data = Examples(torch.zeros(3, 4), attention * 1000, torch.zeros(3, dtype=torch.long), torch.tensor([1000]))
    torch.testing.assert_close(Loss.RANKED.target(data), torch.log1p(torch.tensor([0.2, 0.45, 0.5])))
    torch.testing.assert_close(Loss.SCALED.target(data), torch.tensor([2.0, 4.5, 5.0]))
    torch.testing.assert_close(Loss.POWER.target(data), torch.tensor([10 * a**0.3 / 0.3 for a in attention.tolist()]))
    # A head that can say only one number learns the weighted mean: the target in [4, 5) counts five times.
    head = train(data, layout=Layout.AUTHORS, loss=Loss.SCALED, steps=2000, batch=256)
    head = {name: weights * (name != "0.weight") for name, weights in head.items()}
    constant = float(importance(head, torch.zeros(1, 4)))
    assert constant == pytest.approx((2.0 + 5 * 4.5 + 5.0) / 7, abs=0.1)


def test_inner_widths_are_the_authors() -> None:
    with torch.device("meta"):
        widths = {size: [tuple(w.shape) for w in new_head(size, Layout.AUTHORS).parameters()] for size in (3584, 4096)}
    assert widths == {
        3584: [(8192, 3584), (2048, 8192), (1, 2048)],
        4096: [(8192, 4096), (2048, 8192), (1, 2048)],
    }


def test_nothing_to_learn_from_is_refused() -> None:
    empty = Examples(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    with pytest.raises(KvatlasError, match="nothing to learn from"):
        train(empty)
