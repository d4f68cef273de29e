"""Captured steps write what passes of just the needed shapes write; on CUDA they are graphs."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.graphs import BUCKET
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from tests.decoding import outcome

BUDGET = 48
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")


def dense(query: Any, key: Any, value: Any, block_mask: Any, scale: float) -> Any:
    """Compute FlexAttention densely; without a compiler that takes 50 ms a call, which test_backends.py spends once."""
    rows, slots = torch.arange(len(query))[:, None, None, None], torch.arange(key.shape[2])
    seen = block_mask.mask_mod(rows, rows, rows, slots)
    keys, values = (part.expand(len(query), -1, -1, -1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=scale)


@pytest.fixture(autouse=True)
def _dense_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", dense)


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


def settings(*names: str) -> list[Policy]:
    values = {"kv_budget": BUDGET, "local_window": 8, "ratio": 0.3}
    return [policies.of(Setting.of(name, **(values if name != "full" else {}))) for name in names]


def requests(model: ModelHandle, chosen: Iterable[Policy], count: int) -> list[Request[int]]:
    words = model.vocabulary - 5
    prompts = [tuple(5 + (7 * row + 3 * i) % words for i in range(5 + row % 9)) for row in range(count)]
    return [Request(row, prompt, 100 + row, tuple(chosen)) for row, prompt in enumerate(prompts)]


def run(model: ModelHandle, work: list[Request[int]], graphs: bool, rows: int = 40, **drawn: Any) -> tuple[Engine, Any]:
    by_name = dict.fromkeys(policy for request in work for policy in request.policies)
    sampling = Sampling(**{"temperature": 0.8, "top_k": 20, "top_p": 0.95, "max_new_tokens": 70, **drawn})
    engine = Engine(model, model.load(), by_name, sampling, rows, "flex" if graphs else "reference")
    return engine, outcome(engine.run(work))


@pytest.mark.parametrize(("kind", "rows"), [("llama", 1), ("qwen2", 7), ("llama", 40)])
def test_captured_steps_write_the_same_tokens(random_models: dict[str, ModelHandle], kind: str, rows: int) -> None:
    """Trunks and branches, short and long rows; a policy that looks at recent queries."""
    model = random_models[kind]
    work = requests(model, settings("full", "window", "random", "snapkv"), 2 if rows == 1 else 10)
    _, plain = run(model, work, graphs=False, rows=rows)
    engine, fixed = run(model, work, graphs=True, rows=rows)
    assert fixed == plain
    assert engine.graphs is not None
    # All passes but those that read prompts.
    assert 60 < engine.graphs.steps < engine.passes


def test_steps_that_are_not_captured(random_models: dict[str, ModelHandle], sizes: set[int]) -> None:
    """Watched attention and sliding windows need passes of the shapes at hand; the others of the run stay captured."""
    work = requests(random_models["llama"], settings("window"), 4)
    work[0] = Request(0, work[0].prompt, 100, tuple(settings("h2o")))
    _, plain = run(random_models["llama"], work, graphs=False, rows=2)
    engine, fixed = run(random_models["llama"], work, graphs=True, rows=2)
    assert fixed == plain
    assert engine.graphs is not None
    assert 0 < engine.graphs.steps < engine.passes
    work = requests(random_models["gemma3"], settings("window"), 3)
    _, plain = run(random_models["gemma3"], work, graphs=False)
    engine, fixed = run(random_models["gemma3"], work, graphs=True)
    assert fixed == plain
    assert engine.graphs is not None
    assert engine.graphs.steps == 0
    assert sizes == {BUCKET}


def test_requests_with_their_own_sampling(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    work = requests(model, settings("window"), 6)
    work[2] = Request(2, work[2].prompt, 102, work[2].policies, sampling=Sampling(temperature=0, max_new_tokens=40))
    work[4] = Request(4, work[4].prompt, 104, work[4].policies, logits_processor=lambda _tokens, logits: -logits)
    _, plain = run(model, work, graphs=False)
    _, fixed = run(model, work, graphs=True)
    assert fixed == plain


def test_a_step_that_cannot_be_captured_is_decoded_all_the_same(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch, sizes: set[int]
) -> None:
    from kvatlas.engine.graphs import CudaGraphRunner

    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = random_models["llama"]
    work = requests(model, settings("window"), 3)
    _, plain = run(model, work, graphs=False)
    monkeypatch.setattr(CudaGraphRunner, "_record", refuse)
    by_name = dict.fromkeys(policy for request in work for policy in request.policies)
    engine = Engine(model, model.load(), by_name, Sampling(0.8, 20, 0.95, 70), 40, "flex")
    assert engine.graphs is not None
    # What a capture on a GPU does when it fails.
    engine.graphs.cuda = True
    monkeypatch.setattr(CudaGraphRunner, "_drop_moved", lambda _: None)
    with pytest.warns(UserWarning, match=r"CUDA graphs are off.*stream is capturing$"):
        fixed = outcome(engine.run(work))
    assert fixed == plain
    assert engine.graphs.steps == 0
    assert sizes == {BUCKET}


@needs_gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_cuda_graphs_equal_the_steps_that_they_replay(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]
    model = handle.load().to("cuda")
    chosen = settings("full", "window", "random", "snapkv")
    work = requests(handle, chosen, 9)
    results: list[Any] = []
    for backend in ("reference", "flex"):
        engine = Engine(handle, model, chosen, Sampling(0.8, 20, 0.95, 110), 40, backend)
        results.append(outcome(engine.run(work)))
        assert engine.graphs is None or (engine.graphs.steps and not engine.graphs.broken)
    assert results[0] == results[1]
