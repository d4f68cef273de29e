"""Every policy in the loop: traces do not depend on neighbours, memory falls, state does not leak."""

import random
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvatlas import models, policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import GROWTH, PAGE, SMALL_GROWTH, pages_for
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Policy, Scope, Signal
from kvatlas.policies.dynts import HEAD_FILE
from kvatlas.policies.learned import SCORER_FILE
from kvatlas.policies.model_files import SUBFOLDER
from kvatlas.policies.triattention import STATISTICS_FILE
from kvatlas.predictor.calibration import statistics_of_queries
from kvatlas.predictor.training import new_head
from tests.command_line import Call
from tests.decoding import endless, outcome, prompts, requests, run
from tests.r1 import copied

BUDGET = 88
COMMON = {"kv_budget": BUDGET, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
#: Small observation windows, so that short test sequences compress on them.
SMALL: dict[str, dict[str, Any]] = {"snapkv": {"queries": 12}, "vase": {"queries": 16}, "lazyeviction": {"alpha": 0.01}}
SMALL |= {name: {"queries": 12} for name in ("caote", "dropkv", "expected_attention")}
NAMES = [name for name in policies.policies.names() if name != "full"]


@pytest.fixture(autouse=True, scope="module")
def _files(random_models: dict[str, ModelHandle]) -> Iterator[None]:
    """The model has a predictor of importance and statistics of its queries, for these tests alone."""
    model = random_models["qwen3"]
    torch.manual_seed(0)
    save_file(new_head(model.shape.hidden).state_dict(), model.folder / HEAD_FILE)
    save_file(statistics_of_queries(model, model.load(), prompts(model, 3)), model.folder / STATISTICS_FILE)
    save_file(random_scorer(model), model.folder / SCORER_FILE)
    yield
    for name in (HEAD_FILE, STATISTICS_FILE, SCORER_FILE):
        (model.folder / name).unlink()


def random_scorer(model: ModelHandle, hidden: int = 4) -> dict[str, torch.Tensor]:
    """Return untrained heads of `learned`."""
    shape = model.shape
    heads = (shape.layers, shape.kv_heads)
    return {
        "first": torch.randn(*heads, sum(shape.cached_layers[0][1:]), hidden),
        "first_bias": torch.zeros(*heads, hidden),
        "second": torch.randn(*heads, hidden),
        "second_bias": torch.zeros(*heads),
    }


def make(name: str, **changes: Any) -> CompressingPolicy:
    return policies.from_setting(Setting.from_parameters(name, **{**COMMON, **SMALL.get(name, {}), **changes}))


def everything(scopes: int) -> list[Policy]:
    """Every policy in its scope, and in so many of the others that its user may choose, in turn."""
    results: list[Policy] = [policies.from_setting(Setting.from_parameters("full"))]
    for number, name in enumerate(NAMES):
        policy = make(name)
        results.append(policy)
        parameter = policies.policies.get(name).__dataclass_fields__.get("scope")
        if parameter is not None:
            others = [scope for scope in Scope if scope != policy.scope and parameter.metadata["accepts"](scope)]
            first = number % len(others)
            in_turn = others[first:] + others[:first]
            results += [make(name, scope=scope) for scope in in_turn[:scopes]]
    return results


@pytest.mark.parametrize("scopes", [1, pytest.param(len(Scope), marks=pytest.mark.deep)])
def test_traces_do_not_depend_on_batch_size_order_or_neighbours(
    random_models: dict[str, ModelHandle], scopes: int
) -> None:
    """A batch of all equals batches of one, with all settings or with one at a time; prompts are of unequal length."""
    model = random_models["qwen3"]
    result = everything(scopes)
    work = requests(model, result, 2)
    assert len({len(request.prompt) for request in work}) > 1
    expected = outcome(run(model, work, 1, max_new_tokens=90)[1])
    assert len(expected) == len(work) * len(result)
    apart = [Request(r.key, r.prompt, r.stream, (policy,)) for r in work for policy in r.policies]
    engine, together = run(model, random.Random(3).sample(apart, len(apart)), 64, max_new_tokens=90)
    assert outcome(together) == expected
    # Some of them again in another order, on slots that other sequences left behind.
    assert outcome(engine.run(apart[::-3])).items() <= expected.items()


@pytest.mark.parametrize("name", NAMES)
def test_memory_falls_to_the_predicted_bytes(random_models: dict[str, ModelHandle], name: str) -> None:
    model = endless(random_models["qwen3"])
    policy = make(name)
    # Enough for two compressions.
    new = 50 if policy.budget.keep_prompt else 80
    engine, generations = run(model, requests(model, [policy], 3, (66, 76)), 8, max_new_tokens=new)
    assert all(generation.usage.peak_kv_tokens == BUDGET for generation in generations)
    assert all(generation.usage.compressions > 1 for generation in generations)
    shape, rows = model.shape, engine.cache.rows
    layers, heads = policy.scope.width(shape)
    # Three sequences share what is allocated, which has a page of no sequence and grows by a part of itself.
    pages = 1 + 3 * pages_for(BUDGET)
    assert not policy.budget.keep_prompt or engine.cache.bytes >= PAGE * pages * shape.kv_bytes_per_token()
    noted = 4 * len(policy.columns) * layers * heads * rows * pages_for(BUDGET) * (1 + 1 / GROWTH)
    rings = (rows + 1) * policy.queries * shape.layers * shape.heads * shape.head_dim * 4
    most = pages * (1 + 1 / SMALL_GROWTH) * shape.kv_bytes_per_token() + noted
    assert engine.cache.bytes <= PAGE * most + rings


@pytest.mark.parametrize("name", ["window", "dynts", "h2o", "snapkv"])
def test_only_observing_policies_pay(random_models: dict[str, ModelHandle], name: str, monkeypatch: Any) -> None:
    """Attention weights and recent queries are shown of rows whose policy declares them, and of no others."""
    model = random_models["qwen3"]
    watched: list[tuple[int, ...]] = []
    remembered: list[tuple[int, ...]] = []
    whole = ForwardBatch.__post_init__

    def noted(self: ForwardBatch) -> None:
        whole(self)
        watched.append(self.watched)
        remembered.append(self.remembered)

    monkeypatch.setattr(ForwardBatch, "__post_init__", noted)
    policy = make(name)
    results = (
        [policy, policies.from_setting(Setting.from_parameters("full")), make("window")]
        if name != "window"
        else [policy]
    )
    apart = [Request(r.key, r.prompt, r.stream, (p,)) for r in requests(model, results, 3) for p in r.policies]
    run(model, apart, 16, max_new_tokens=60)
    # Three of nine rows are under the policy: no more than those have to show anything.
    assert max(map(len, watched)) == (3 if Signal.ATTENTION in policy.observes else 0)
    assert max(map(len, remembered)) == (3 if Signal.QUERIES in policy.observes else 0)


def test_a_policy_sees_the_loaded_weights(
    tiny_llama: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide has it: the packed model gives its embeddings, and no weight is read again."""
    guide = (Path(__file__).parents[2] / "docs" / "adding-a-policy.md").read_text("utf-8")
    (block,) = [text for text in re.findall(r"^```python\n(.*?)^```", guide, re.S | re.M) if "EmbeddingNorm" in text]
    file = tmp_path / "norm.py"
    file.write_text(block)
    policies.permit(str(file))
    policy = policies.from_setting(Setting.from_parameters(str(file), **COMMON))

    weights = tiny_llama.load_unpacked().get_input_embeddings().weight
    loaded = tiny_llama.load()
    monkeypatch.setattr(ModelHandle, "load", None)
    seen = []
    score = type(policy).score

    def watched(self: Any, cached: Any) -> torch.Tensor:
        scores = score(self, cached)
        tokens = cached.tokens()
        assert torch.allclose(cached.embedding(tokens), weights[tokens])
        seen.append(scores.shape == cached.positions.shape)
        return scores

    monkeypatch.setattr(type(policy), "score", watched)
    engine = Engine(tiny_llama, loaded, [policy], Sampling(max_new_tokens=120), 4)
    requests = [Request(index, prompt, index, (policy,)) for index, prompt in enumerate(prompts(tiny_llama, 3))]
    deque(engine.run(requests), maxlen=0)
    assert seen
    assert all(seen)


def test_heads_lie_in_a_subfolder_and_earlier_places_are_read(
    tiny_llama: ModelHandle, tmp_path: Path, kvatlas: Call
) -> None:
    """Engines that load every safetensors file of a model's folder find weights alone."""
    assert [path.name for path in tiny_llama.folder.glob("*.safetensors")] == ["model.safetensors"]
    model = copied(tiny_llama, tmp_path / "model")
    policy = policies.from_setting(Setting.from_parameters("dynts", **COMMON))
    key = policy.identity(tiny_llama)
    assert policies.from_setting(Setting.from_parameters("dynts", **COMMON)).identity(model) == key
    head = model.folder / SUBFOLDER / HEAD_FILE
    head.rename(model.folder / HEAD_FILE)
    earlier = policies.from_setting(Setting.from_parameters("dynts", **COMMON))
    earlier.check(model)
    assert earlier.identity(model) == key
    assert models.find(model.name).weights_digest == tiny_llama.weights_digest

    # What is written into the folder goes into the subfolder, and is found there first.
    words = ("predictor", "calibrate", model.folder / STATISTICS_FILE, model.name, "CHAIN4")
    code, out, _ = kvatlas(*words, "--problems", 1, "--max-new-tokens", 60)
    assert (code, str(model.folder / SUBFOLDER / STATISTICS_FILE) in out) == (0, True)
    assert not (model.folder / STATISTICS_FILE).exists()
