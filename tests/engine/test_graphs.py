"""Captured steps write what passes of just the needed shapes write; on CUDA they are graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvatlas import models, policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.gpu.graphs import CudaGraphRunner, bucket
from kvatlas.models import ModelHandle
from tests.decoding import outcome, requests, run
from tests.engine.gpu_stand_in import paged_attention

BUDGET = 48
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")


@pytest.fixture(autouse=True)
def _dense_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without a compiler takes 50 ms a call, which test_backends.py spends once."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", paged_attention)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch, _dense_without_a_gpu: None) -> set[int]:
    """Numbers of sequences that FlexAttention is asked for: a GPU compiles it for each."""
    seen: set[int] = set()
    kernel = torch.nn.attention.flex_attention.flex_attention

    def noted(query: Any, *given: Any, **named: Any) -> Any:
        seen.add(len(query))
        return kernel(query, *given, **named)

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", noted)
    return seen


def work(model: ModelHandle, count: int, *names: str) -> list[Request[int]]:
    """Requests of short prompts under these policies."""
    values = {"kv_budget": BUDGET, "local_window": 8, "ratio": 0.3}
    chosen = [
        policies.from_setting(Setting.from_parameters(name, **(values if name != "full" else {}))) for name in names
    ]
    return requests(model, chosen, count, (5, 14))


def captured(model: ModelHandle, work: list[Request[int]], rows: int = 40) -> tuple[int, int]:
    """Captured steps and all passes of an engine, which wrote what one without captured steps writes."""
    _, plain = run(model, work, rows, "reference", max_new_tokens=70)
    engine, fixed = run(model, work, rows, "flex", max_new_tokens=70)
    assert outcome(fixed) == outcome(plain)
    assert not engine.graphs.broken
    return engine.graphs.steps, engine.passes


@pytest.mark.parametrize(
    ("kind", "rows", "device"),
    [
        ("llama", 1, "cpu"),
        ("qwen2", 7, "cpu"),
        ("llama", 40, "cpu"),
        pytest.param("llama", 40, "cuda", marks=needs_gpu),
        pytest.param("qwen2", 40, "cuda", marks=needs_gpu),
    ],
)
def test_captured_steps_write_the_same_tokens(
    random_models: dict[str, ModelHandle], kind: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trunks and branches, short and long rows; a policy that looks at recent queries. A step samples, too."""
    pass_ = Engine._pass
    sampled_in_steps = []

    def noted(*given: Any) -> Any:
        logits, hidden, sampled = pass_(*given)
        sampled_in_steps.append(sampled is not None)
        return logits, hidden, sampled

    monkeypatch.setattr(Engine, "_pass", noted)
    model = models.find(random_models[kind].name, device=device, dtype="float32")
    asked = work(model, {1: 2, 7: 4, 40: 10 if device == "cuda" else 6}[rows], "full", "window", "random", "snapkv")
    steps, passes = captured(model, asked, rows)
    # All passes but those that read prompts.
    assert 60 < steps < passes
    assert sum(sampled_in_steps) == steps


def test_buckets() -> None:
    """Few rows have few idle ones beside them: each is read like a sequence."""
    assert [bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 33, 69)] == [1, 2, 4, 8, 8, 16, 16, 32, 48, 80]


def test_steps_of_windows_are_not_captured(random_models: dict[str, ModelHandle], sizes: set[int]) -> None:
    """Sliding windows need passes of the shapes at hand; watched attention does not, beside rows without it."""
    first, *others = work(random_models["llama"], 4, "window")
    (watched,) = work(random_models["llama"], 1, "h2o")
    steps, passes = captured(random_models["llama"], [replace(first, policies=watched.policies), *others], 2)
    assert 120 < steps < passes
    assert captured(random_models["gemma3"], work(random_models["gemma3"], 3, "window"))[0] == 0
    assert sizes == {1, 2, 4}


def test_requests_with_their_own_sampling(random_models: dict[str, ModelHandle]) -> None:
    asked = work(random_models["llama"], 6, "window")
    asked[2] = replace(asked[2], sampling=Sampling(temperature=0, max_new_tokens=40))
    asked[4] = replace(asked[4], logits_processor=lambda _tokens, logits: -logits)
    captured(random_models["llama"], asked)


def test_rows_with_too_many_equal_logits_are_sampled_outside_of_captured_steps(
    random_models: dict[str, ModelHandle],
) -> None:
    handle = random_models["llama"]
    model = handle.load()
    model.lm_head.forward = lambda states: states.new_zeros(*states.shape[:-1], handle.vocabulary)
    asked, sampling = work(handle, 3, "window"), Sampling(0.9, 20, 1.0, 30)
    plain, fixed = (
        outcome(Engine(handle, model, asked[0].policies, sampling, 3, backend).run(asked))
        for backend in ("reference", "flex")
    )
    assert fixed == plain


def test_a_step_that_cannot_be_captured_is_decoded_all_the_same(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch, sizes: set[int]
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = random_models["llama"]
    asked = work(model, 3, "window")
    _, plain = run(model, asked, 40, "reference", max_new_tokens=70)
    # What a capture on a GPU does when it fails.
    monkeypatch.setattr(CudaGraphRunner, "_record", refuse)
    monkeypatch.setattr(CudaGraphRunner, "_drop_moved", lambda _: None)
    engine = Engine(model, model.load(), asked[0].policies, Sampling(0.9, 20, 0.95, 70), 40, "flex")
    engine.graphs.cuda = True
    with pytest.warns(UserWarning, match=r"CUDA graphs are off.*stream is capturing$"):
        fixed = outcome(engine.run(asked))
    assert fixed == outcome(plain)
    assert engine.graphs.steps == 0
    assert sizes == {2, 4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for captures on a GPU, which succeed there")
def test_memory_that_runs_out_in_a_capture_leads_to_a_smaller_batch(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    model = random_models["llama"]
    asked = work(model, 3, "window")
    _, plain = run(model, asked, 40, "reference", max_new_tokens=70)
    monkeypatch.setattr(CudaGraphRunner, "_record", fail)
    monkeypatch.setattr(CudaGraphRunner, "_drop_moved", lambda _: None)
    engine = Engine(model, model.load(), asked[0].policies, Sampling(0.9, 20, 0.95, 70), 40, "flex")
    engine.graphs.cuda = True
    assert outcome(engine.run(asked)) == outcome(plain)
    assert engine.batch_size == 20
    assert not engine.graphs.broken
