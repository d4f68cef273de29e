"""The DynTS head and the statistics of triattention: labels, training, storage, calibration."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas.core import Grade, KvatlasError, Setting, Status, Trace, Usage
from kvatlas.engine.whole_texts import answer_attention
from kvatlas.models import ModelHandle
from kvatlas.policies.dynts import OURS
from kvatlas.predictor.calibration import statistics_of_queries
from kvatlas.predictor.training import (
    REASONS,
    Examples,
    joined,
    judge_head,
    label_trace,
    sample_tokens,
    save_head,
    train_head,
    why_left_out,
)
from tests.conftest import ARCHITECTURES
from tests.decoding import prompts
from tests.stored import provenance_of

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(("kind", "length"), [*((kind, 0) for kind in ARCHITECTURES), ("llama", 700), ("gemma3", 700)])
def test_labels_equal_the_rows_of_the_whole_attention_matrix(
    random_models: dict[str, ModelHandle], kind: str, length: int
) -> None:
    """Also where queries are computed in several blocks."""
    handle = random_models[kind]
    tokens = [5 + i * 7919 % 40 for i in range(length)] or list(prompts(handle, 1)[0])
    start = len(tokens) - (60 if length else 5)
    result, hidden = answer_attention(handle.load(), tokens, start)
    model = handle.load()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        whole = model.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    expected = torch.stack([layer[0, :, start:, :start].mean((0, 1)) for layer in whole.attentions]).mean(0)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden, whole.last_hidden_state[0, :start], atol=1e-4, rtol=1e-4)


def test_labels_are_of_the_thinking_tokens_alone(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    prompt, thinking = (9, 10, 11), (12, 13, 14, 15)
    tokens = (*thinking, model.think_close, 20, 21)
    hidden, label = label_trace(model, model.load(), prompt, tokens)
    assert hidden.shape == (4, model.shape.hidden)
    attention, _ = answer_attention(model.load(), list(prompt + tokens), 8)
    torch.testing.assert_close(label, attention[3:7] * 4)


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
    end = {"": (), "</think>": (model.think_close,)}.get(after, (model.think_close, 20))
    tokens = end if after == "unthought" else (12, 13, *end)
    usage = Usage(3, len(tokens), 2, 9, 9, 0, 0)
    assert (
        why_left_out(model, Trace("m", "b", "p", 0, Setting.from_parameters("full"), tokens, "", grade, usage)) == why
    )
    assert why in ("", *REASONS)


def _synthetic(seed: int, traces: int = 30) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(traces * 50, 16, generator=generator)
    label = torch.expm1((hidden[:, 0] + 0.5 * hidden[:, 1]).clamp(min=0))
    return list(zip(hidden.split(50), label.split(50), strict=True))


def test_a_head_learns_to_rank_tokens() -> None:
    head = train_head(*joined(_synthetic(0)), steps=300, batch=512)
    assert set(head) == set(OURS)
    assert judge_head(head, _synthetic(1)).spearman > 0.5


def test_traces_without_ranks_are_left_out_of_the_quality_and_counted() -> None:
    data = _synthetic(0, traces=6)
    head = train_head(*joined(data), steps=20, batch=64)
    expected = judge_head(head, data)
    # A trace of one token, and one with equal labels.
    hidden, label = data[0]
    more = [*data, (hidden[:1], label[:1]), (hidden[1:4], torch.tensor([0.2, 0.2, 0.2]))]
    assert judge_head(head, more) == replace(expected, one_label=2)
    constant = {name: torch.zeros_like(value) for name, value in head.items()}
    assert judge_head(constant, data).spearman == 0
    with pytest.raises(KvatlasError, match="the tokens of each of 1 held-out traces have one label"):
        judge_head(head, [(hidden[:1], label[:1])])


def test_sampling_keeps_pairs_order_and_range() -> None:
    hidden = torch.arange(100.0)[:, None] * torch.tensor([1.0, 1e5])
    label = torch.arange(100.0)
    few, few_labels = sample_tokens(hidden, label, 30, 7)
    assert few.shape == (30, 2)
    assert torch.equal(few[:, 0].float(), few_labels)
    assert torch.equal(few_labels, few_labels.sort().values)
    assert torch.isfinite(few).all()
    again, _ = sample_tokens(hidden, label, 30, 7)
    assert torch.equal(few, again)
    assert len(sample_tokens(hidden, label, 200, 7)[1]) == 100


def test_a_head_keeps_its_provenance(tmp_path: Path) -> None:
    data = _synthetic(0, traces=5)
    head = train_head(*joined(data), steps=20, batch=64)
    path = tmp_path / "deep" / "head.safetensors"
    save_head(path, head, {"model": "m", "traces": 5, "held_out": {"spearman": 0.5}})
    assert provenance_of(path) == {"model": "m", "traces": 5, "held_out": {"spearman": 0.5}}
    assert json.loads(json.dumps(provenance_of(path)))


@pytest.mark.parametrize(("kind", "part"), [("llama", "q_proj"), ("qwen2", "q_proj"), ("qwen3", "q_norm")])
def test_statistics_are_those_of_the_queries_before_rotation(
    random_models: dict[str, ModelHandle], kind: str, part: str
) -> None:
    handle = random_models[kind]
    model = handle.load()
    texts = [prompt[:20] for prompt in prompts(handle, 3)]
    result = statistics_of_queries(handle, model, texts)

    shape, planes = handle.shape, handle.shape.head_dim // 2
    recorded: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(shape.layers)}

    def note(layer: int, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        recorded[layer].append(output.reshape(-1, shape.heads, shape.head_dim).double())

    for layer, block in enumerate(model.get_decoder().layers):
        getattr(block.self_attn, part).register_forward_hook(partial(note, layer))
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


def test_what_cannot_be_calibrated_is_said(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = random_models["qwen3"]
    model = handle.load()
    rotary = model.get_decoder().rotary_emb
    monkeypatch.setattr(rotary, "inv_freq", rotary.inv_freq[:4])
    with pytest.raises(KvatlasError, match="it rotates 8 of 16"):
        statistics_of_queries(handle, model, [(5, 6)])
    monkeypatch.setattr(rotary, "rope_type", "dynamic")
    with pytest.raises(KvatlasError, match="rotation of positions is not steady"):
        statistics_of_queries(handle, model, [(5, 6)])
