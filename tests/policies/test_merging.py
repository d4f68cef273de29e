"""Policies that merge: the values of evicted tokens go into those that stay, and nothing else changes."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvatlas import policies
from kvatlas.core import KvatlasError, Setting
from kvatlas.engine import scheduler
from kvatlas.engine.cache import KVCache
from kvatlas.engine.rows import Row, RowView, compress
from kvatlas.models import ModelHandle
from kvatlas.policies import BudgetRule, CacheView, CompressingPolicy, Merging, Policy, fit_policy, select_tokens
from kvatlas.policies.selection import make_selection
from tests.decoding import endless, outcome, requests, run
from tests.policies import formulas
from tests.policies.scenes import SHAPE, make, scene

COMMON = {"kv_budget": 88, "local_window": 8, "ratio": 0.3}


def with_mass(policy: Policy, seed: int) -> Any:
    """Return a scene with accumulated attention, of which some is 0."""
    cached = scene(policy, seed)
    random = torch.Generator().manual_seed(seed)
    mass = torch.rand(cached.positions.shape, generator=random)
    mass[..., 30:33] = 0.0
    return replace(cached, columns={"mass": mass}), mass


@pytest.mark.parametrize("scope", ["head", "layer", "kv_head", "global"])
@pytest.mark.parametrize("neighbours", [1, 3, 32])
def test_cam_is_a_slow_reading_of_its_formula(scope: str, neighbours: int) -> None:
    policy = make("cam", scope=scope, neighbours=neighbours)
    cached, mass = with_mass(policy, neighbours)
    selection = make_selection(policy, cached)
    assert selection.kept.tolist() == select_tokens(make("h2o", scope=scope), cached).tolist()
    merged = selection.merged_values(policy, cached)
    changed = 0
    for layer, values in enumerate(merged):
        for head, result in enumerate(values):
            choice = selection.kept[min(layer, len(selection.kept) - 1)]
            kept = choice[min(head, len(choice) - 1)].tolist()
            expected = torch.tensor(formulas.cam_values(policy, cached, mass, layer, head, kept))
            assert torch.allclose(result.double(), expected.double(), atol=1e-5)
            changed += int((result != cached.value(layer)[head, kept]).any(-1).sum())
    assert changed > SHAPE.layers * SHAPE.kv_heads


def test_a_token_without_attention_gives_nothing() -> None:
    policy = make("cam")
    cached, _ = with_mass(policy, 1)
    nothing = torch.zeros(cached.positions.shape)
    selection = make_selection(policy, replace(cached, columns={"mass": nothing}))
    for layer, values in enumerate(selection.merged_values(policy, cached)):
        kept = selection.kept[layer][..., None].expand(-1, -1, SHAPE.head_dim)
        assert torch.equal(values, cached.value(layer).gather(1, kept))


def test_the_cache_holds_the_merged_values(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each compression, in every layer; keys and positions are those of a policy that drops."""
    model = endless(random_models["qwen3"])
    compressions = []

    def watched(model: ModelHandle, cache: KVCache, row: Row[Any]) -> int:
        (policy,) = row.policies
        assert isinstance(policy, CompressingPolicy)
        view = RowView(model, cache, row, policy)
        selection = make_selection(policy, view)
        expected = selection.merged_values(policy, view)
        keys = [
            view.key(layer).gather(1, _rows(selection.kept[layer], view.key(layer))) for layer in range(len(expected))
        ]
        evicted = compress(model, cache, row)
        after = RowView(model, cache, row, policy)
        for layer, values in enumerate(expected):
            assert torch.equal(after.value(layer), values)
            assert torch.equal(after.key(layer), keys[layer])
        compressions.append(row.request.key)
        return evicted

    monkeypatch.setattr(scheduler, "compress", watched)
    policy = policies.from_setting(Setting.from_parameters("cam", **COMMON))
    run(model, requests(model, [policy], 1), 8, max_new_tokens=140)
    assert len(compressions) > 1


def _rows(kept: Tensor, table: Tensor) -> Tensor:
    return kept[..., None].expand(-1, -1, table.shape[2])


def test_merging_changes_what_is_written_and_the_plain_cache_does_not(random_models: dict[str, ModelHandle]) -> None:
    """The trunk of a request with a policy that drops is not touched: shared pages keep their values."""
    model = endless(random_models["qwen3"])
    names = ("full", "h2o", "cam")
    settings = [
        policies.from_setting(Setting.from_parameters(name, **(COMMON if name != "full" else {}))) for name in names
    ]
    work = requests(model, settings, 2)
    together = outcome(run(model, work, 8, max_new_tokens=140)[1])
    for policy in settings:
        alone = outcome(run(model, requests(model, [policy], 2), 1, max_new_tokens=140)[1])
        assert alone.items() <= together.items()
    tokens = {name: [value[0] for (_, setting), value in together.items() if f'"{name}"' in setting] for name in names}
    assert tokens["cam"] != tokens["h2o"]


def test_backends_write_the_same(random_models: dict[str, ModelHandle]) -> None:
    """Plain torch and the native kernels, of which the GPU's are compared in tests/engine/test_gpu.py."""
    model = endless(random_models["llama"])
    policy = policies.from_setting(Setting.from_parameters("cam", **COMMON))
    work = requests(model, [policy], 2)
    native, plain = (
        {item.key: item.tokens for item in run(model, work, 4, backend, temperature=0.0, max_new_tokens=120)[1]}
        for backend in (None, "reference")
    )
    assert native == plain


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"kv_bits": 4, "residual": 8},
            "'cam' merges values, and those of few bits cannot be changed; expected 16 bits",
        ),
        ({"value_bits": 8, "residual": 8}, "those of few bits cannot be changed"),
    ],
)
def test_what_merging_cannot_do_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence) as caught:
        make("cam", **changes)
    assert str(caught.value).count(". ") == 0


def test_latent_attention_is_refused_before_weights_are_read(random_models: dict[str, ModelHandle]) -> None:
    policy = make("cam")
    with pytest.raises(KvatlasError, match=r"'cam' merges values, and .* has latent attention"):
        fit_policy(policy, random_models["deepseek_v3"])
    fit_policy(policy, random_models["llama"])
    fit_policy(make("h2o"), random_models["deepseek_v3"])


@dataclass(frozen=True)
class Given(CompressingPolicy):
    """A policy whose result is a column's; `result` is what its `score` returns."""

    name = "given"
    summary = "keeps the newest tokens"
    merges = True

    def score(self, cached: CacheView) -> Any:
        return cached.columns["result"]


def _fails(layer: int, kept: Tensor) -> Tensor:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (torch.zeros(60), "merges and returned no values; expected a Merging"),
        (Merging(torch.zeros(59), _fails), "gave scores of the shape"),
        (Merging(torch.zeros(60), _fails), "failed in score .ValueError: boom"),
        (Merging(torch.zeros(60), lambda layer, kept: None), "merged values into a NoneType; expected a tensor of the"),
        (Merging(torch.zeros(60), lambda layer, kept: torch.zeros(2, 3, 8)), r"merged values into a shape \(2, 3, 8\)"),
        (
            Merging(torch.zeros(60), lambda layer, kept: torch.full((*kept.shape, SHAPE.head_dim), torch.nan)),
            "merged values into infinite ones; expected finite numbers",
        ),
    ],
)
def test_results_of_others_are_checked(result: Any, sentence: str) -> None:
    policy = Given(budget=BudgetRule(60, 10, 0.4))
    cached = replace(scene(policy, 1), columns={"result": result})
    with pytest.raises(KvatlasError, match=sentence):
        make_selection(policy, cached).merged_values(policy, cached)
