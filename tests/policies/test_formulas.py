"""Every policy against a slow reading of its formula (float64, a token at a time), and the search for repeated keys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, ReferenceTrace, Scope, rkv
from tests.policies import formulas
from tests.policies.scenes import SHAPE, Noted, assert_keeps, scene

COMMON = {"kv_budget": 60, "local_window": 10, "ratio": 0.4, "ratio_over": "thinking"}
#: Each scope on a cache of its own.
SCENES = pytest.mark.parametrize(("scope", "seed"), [*zip(Scope, range(3), strict=True)])


def make(name: str, **changes: Any) -> CompressingPolicy:
    policy = policies.of(Setting.of(name, **{**COMMON, **changes}))
    assert isinstance(policy, CompressingPolicy)
    return policy


@SCENES
def test_h2o(scope: Scope, seed: int) -> None:
    policy = make("h2o", scope=scope)
    width = scope.width(SHAPE)
    mass = torch.rand(*width, 60, generator=torch.Generator().manual_seed(seed))

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        return float(mass[min(layer, width[0] - 1), min(head, width[1] - 1), slot])

    assert_keeps(policy, scene(policy, seed, {"mass": mass}), score)


@SCENES
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("snapkv", {"queries": 6, "local_window": 10, "pooling": "max", "kernel": 7}),
        ("snapkv", {"queries": 12, "local_window": 4, "pooling": "avg", "kernel": 5}),
        ("snapkv", {"queries": 12, "local_window": 4, "pooling": "max", "kernel": 1}),
        ("rkv", {"mix": 0.1, "threshold": 0.5}),
        ("rkv", {"mix": 0.9, "local_window": 4, "threshold": 0.5}),
        ("rkv", {"mix": 0.1, "threshold": 0.9}),
        ("rkv", {"mix": 0.0, "threshold": 0.95, "unlike": "first", "keep_prompt": False}),
        ("tova", {}),
        ("keydiff", {}),
        ("vase", {"queries": 8, "large": 0.5, "keep_prompt": True}),
        ("vase", {"queries": 8, "large": 0.5, "keep_prompt": False}),
    ],
)
def test_scores_follow_from_queries_keys_and_values(scope: Scope, seed: int, name: str, values: dict[str, Any]) -> None:
    policy = make(name, scope=scope, **values)
    cached = scene(policy, seed)
    assert_keeps(policy, cached, getattr(formulas, name)(policy, cached))


@SCENES
def test_tova_where_one_layer_has_a_sliding_window(scope: Scope, seed: int) -> None:
    policy = make("tova", scope=scope)
    cached = scene(policy, seed, window=(None, 48).__getitem__)
    assert_keeps(policy, cached, formulas.tova(policy, cached))


def redundancy_by_matrix(key: torch.Tensor, threshold: float, spare_first: bool) -> torch.Tensor:
    """R-KV's redundancy [KV heads, cached] from the matrix of all similarities."""
    unit = torch.nn.functional.normalize(key, dim=-1, eps=1e-8)
    number = torch.arange(key.shape[1])
    similarity = (unit @ unit.transpose(-1, -2)).masked_fill(number[:, None] == number, 0.0)
    newest = torch.where(similarity > threshold, number, -1).amax(-1, keepdim=True)
    newest = newest.clamp(min=0) if spare_first else newest
    return similarity.masked_fill(newest == number, 0.0).mean(1).softmax(-1)


@pytest.mark.parametrize("keys", ["alike", "random", "equal", "one"])
@pytest.mark.parametrize("threshold", [0.5, -0.1, 1.0])
@pytest.mark.parametrize("spare_first", [False, True])
def test_redundancy_is_that_of_the_matrix(
    keys: str, threshold: float, spare_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several blocks: where most keys repeat another soon, where hardly one does, and at the edges."""
    monkeypatch.setattr(rkv, "BLOCK", 64)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 1 if keys == "one" else 500, 16, generator=random)
    key = {
        "alike": noise + 2 * torch.randn(2, 1, 16, generator=random),
        "random": noise,
        "equal": torch.eye(16)[torch.arange(500) % 3].expand(2, -1, -1),
        "one": noise,
    }[keys]
    result, wanted = rkv.redundancy(key, threshold, spare_first), redundancy_by_matrix(key, threshold, spare_first)
    torch.testing.assert_close(result, wanted, rtol=2e-6, atol=0.0)
    assert result.sum(-1).allclose(torch.ones(2))


@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_sepllm(tiny_llama: ModelHandle, ratio: float) -> None:
    policy = make("sepllm", sinks=3, keep_prompt=False, ratio_over="older", ratio=ratio)
    cached = scene(policy, 1, model=tiny_llama)
    score = formulas.sepllm(policy, cached)
    separators = [score(cached, 0, 0, slot) >= cached.length for slot in range(3, 60)]
    assert 0 < sum(separators) < 40
    assert_keeps(policy, cached, score)


@SCENES
def test_lazyeviction(scope: Scope, seed: int) -> None:
    """From the first step on: attention weights in, the tokens' last times and longest pauses noted, scores out."""
    policy = make("lazyeviction", scope=scope, alpha=0.02)
    layers, heads = scope.width(SHAPE)
    random = torch.Generator().manual_seed(seed)
    prompt, total = 9, 60
    weights = torch.zeros(total - prompt, layers, heads, total)
    for step in range(total - prompt):
        drawn = torch.rand(layers, heads, prompt + step + 1, generator=random) ** 6
        weights[step, ..., : prompt + step + 1] = drawn / drawn.sum(-1, keepdim=True)
    noted = Noted(policy, layers, heads, total)
    noted.show(torch.arange(prompt), torch.zeros(1, layers, heads, total))
    for step in range(total - prompt):
        noted.show(torch.tensor([prompt + step]), weights[step][None])
    cached = replace(
        scene(policy, seed, {name: value[0] for name, value in noted.held.items()}),
        positions=torch.arange(total).expand(layers, heads, -1),
        length=total,
    )
    assert_keeps(policy, cached, formulas.lazyeviction(policy, cached, weights))


def test_vase_keeps_the_older_of_equally_large_values() -> None:
    policy = make("vase", scope=Scope.GLOBAL, queries=8, large=1.0, keep_prompt=False)
    cached = scene(policy, 0)
    alike = torch.zeros(SHAPE.kv_heads, 60, SHAPE.head_dim)
    alike[:, 12::2, 0] = 1.0
    kept = policies.select_tokens(policy, replace(cached, value=lambda _: alike))[0, 0].tolist()
    # 20 of 50 places: the first four tokens as sinks, then every other token from the 12th on.
    assert kept == [*range(4), *range(12, 44, 2), *range(50, 60)]


@pytest.mark.parametrize("keep_prompt", [True, False])
@pytest.mark.parametrize("name", ["dynts", "dynts-bottom"])
def test_dynts_and_its_bottom(name: str, keep_prompt: bool) -> None:
    policy = make(name, keep_prompt=keep_prompt)
    importance = torch.rand(90, generator=torch.Generator().manual_seed(1))
    cached = scene(policy, 2)
    cached = replace(cached, columns={"importance": importance[cached.positions]})
    assert_keeps(policy, cached, formulas.dynts(policy, cached, importance.tolist()))


def test_dynts_without_the_prompt() -> None:
    policy = make("dynts-noprompt", ratio=0.9)
    importance = torch.rand(90, generator=torch.Generator().manual_seed(1)) + 1e-3
    cached = scene(policy, 2)
    cached = replace(cached, columns={"importance": importance[cached.positions]})
    assert_keeps(policy, cached, formulas.dynts(policy, cached, importance.tolist()))
    # 45 of 50 places for 41 thinking tokens: four prompt tokens are left.
    assert policies.select_tokens(policy, cached)[0, 0, :5].tolist() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize(("name", "width"), [("random", (2, 2)), ("dynts-random", (1, 1))])
def test_random_choices_are_their_numbers(name: str, width: tuple[int, int]) -> None:
    policy = make(name)
    cached = scene(policy, 0)
    assert cached.positions.shape[:2] == width
    assert_keeps(policy, cached, formulas.random(policy, cached))
    later = policies.select_tokens(policy, replace(cached, length=cached.length + 1))
    assert not torch.equal(later, policies.select_tokens(policy, cached))


@pytest.mark.parametrize("keep_prompt", [True, False])
def test_streaming(keep_prompt: bool) -> None:
    policy = make("streaming", sinks=5, keep_prompt=keep_prompt, ratio_over="older", ratio=0.5)
    cached = scene(policy, 0)
    assert_keeps(policy, cached, formulas.streaming(policy, cached))
    kept = policies.select_tokens(policy, cached)[0, 0].tolist()
    assert kept == [*range(9 if keep_prompt else 5), *range(60 - 10 - (25 - (9 if keep_prompt else 5)), 60)]


@SCENES
@pytest.mark.parametrize("keep_prompt", [True, False])
def test_triattention(scope: Scope, seed: int, keep_prompt: bool, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(seed)
    planes = SHAPE.head_dim // 2
    center = torch.complex(*torch.randn(2, SHAPE.layers, SHAPE.heads, planes, generator=random))
    norm = center.abs() + torch.rand(center.shape, generator=random)
    frequency = 100.0 ** -(torch.arange(planes) / planes)
    file = tmp_path / "statistics.safetensors"
    parts = {"center_real": center.real, "center_imag": center.imag, "norm": norm, "frequency": frequency}
    save_file({name: value.contiguous() for name, value in parts.items()}, file)
    policy = make("triattention", scope=scope, statistics=str(file), reach=300, keep_prompt=keep_prompt)
    cached = scene(policy, seed)
    assert_keeps(policy, cached, formulas.triattention(policy, cached, parts))


@pytest.mark.parametrize("shared", [90, 60, 5])
@pytest.mark.parametrize("answered", [True, False])
def test_oracle(shared: int, answered: bool) -> None:
    policy = make("oracle")
    attention = torch.rand(100, generator=torch.Generator().manual_seed(1))
    cached = scene(policy, 3)
    theirs = [*cached.tokens().tolist(), *[7] * 40]
    if shared < len(theirs) - 40:
        theirs[shared] += 1
    cached = replace(cached, reference=ReferenceTrace(tuple(theirs), attention) if answered else None)
    assert_keeps(policy, cached, formulas.oracle(policy, cached))


def newest_by_matrix(unit: torch.Tensor, threshold: float) -> list[int]:
    similarity = (unit.double() @ unit.double().T).fill_diagonal_(0.0)
    return torch.where(similarity > threshold, torch.arange(len(unit)), -1).amax(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("apart", [1e-5, 5e-3])
def test_similarities_about_the_threshold_are_told_apart(apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose similarities to one another lie just above and below it."""
    monkeypatch.setattr(rkv, "BLOCK", 32)
    random = torch.Generator().manual_seed(int(1e6 * apart))
    centres = torch.linalg.qr(torch.randn(64, 64, generator=random)).Q
    which = torch.randint(16, (300,), generator=random)
    # No two of these add up to nothing, so that no similarity is the threshold.
    share = (0.5 + apart * torch.tensor([-3.0, -1.0, 2.0])[torch.randint(3, (300,), generator=random)]).sqrt()
    beside = centres[16 + torch.arange(300) % 48]
    unit = share[:, None] * centres[which] + (1 - share**2).sqrt()[:, None] * beside
    assert rkv.newest_similar(unit, 0.5).tolist() == newest_by_matrix(unit, 0.5)
