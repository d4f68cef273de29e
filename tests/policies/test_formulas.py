"""Every policy against a slow reading of its formula (float64, a token at a time), and against its authors' code."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from kvatlas import policies
from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle
from kvatlas.policies import PRESETS, Scope, parameters, rkv, select_tokens
from tests.policies import formulas
from tests.policies.authors import FACTS, choosing
from tests.policies.scenes import SHAPE, assert_keeps, make, places, scene

#: The scopes that every policy has, each on a cache of its own.
MEANS = (Scope.GLOBAL, Scope.LAYER, Scope.HEAD, Scope.KV_HEAD)
SCENES = pytest.mark.parametrize(("scope", "seed"), [*zip(MEANS, range(4), strict=True)])


#: Policies whose scope is a parameter, which the test gives, with values of others; presets have scopes of their own.
FORMULAS: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {"queries": 6, "local_window": 10, "pooling": "max", "kernel": 7}),
    ("snapkv", {"queries": 12, "local_window": 4, "pooling": "avg", "kernel": 5}),
    ("snapkv", {"queries": 12, "local_window": 4, "pooling": "max", "kernel": 1}),
    ("rkv", {"mix": 0.1, "threshold": 0.5}),
    ("rkv", {"mix": 0.9, "local_window": 4, "threshold": 0.5}),
    ("rkv", {"mix": 0.1, "threshold": 0.9}),
    ("rkv", {"mix": 0.0, "threshold": 0.95, "unlike": "first", "keep_prompt": False}),
    ("tova", {}),
    ("tova", {"sliding": 48}),
    ("keydiff", {}),
    ("knorm", {}),
    ("knorm", {"keep_prompt": False}),
    # Ranks of partitions of 2, 4, 8 and 16 tokens are exact, so that equal means are equal.
    ("lagkv", {"sinks": 0, "local_window": 8, "keep_prompt": False}),
    ("lagkv", {"sinks": 8, "local_window": 8, "keep_prompt": False}),
    ("lagkv", {"sinks": 4, "local_window": 16, "ratio": 0.5}),
    ("lagkv", {"sinks": 2, "local_window": 2, "keep_prompt": False}),
    ("vase", {"queries": 8, "large": 0.5, "keep_prompt": True}),
    ("vase", {"queries": 8, "large": 0.5, "keep_prompt": False}),
    ("caote", {"queries": 1}),
    ("caote", {"queries": 12, "keep_prompt": False}),
    ("dropkv", {"queries": 6}),
    ("dropkv", {"queries": 6, "keep_prompt": False, "sliding": 48}),
    # Queries of evicted tokens, which see no cached one.
    ("caote", {"queries": 70, "sliding": 2, "keep_prompt": False}),
    ("snapkv", {"queries": 70, "sliding": 2, "kernel": 1}),
    # The running sum is overwritten at every step by the mean over layers, heads and the one query.
    ("h2o@dynts-paper", {}),
    # Collected from ob_window = 32 steps before the compression's own step on: 33 means over layers and heads.
    ("snapkv@dynts-paper", {"local_window": 40, "ratio": 0.5}),
    # Where no other key is similar, argmax over an all-zero row points at the first token, which is then spared.
    ("rkv@r-kv-paper", {"local_window": 8}),
]


@pytest.mark.parametrize(
    ("name", "values", "scope", "seed"),
    [
        # One of four scopes in turn; presets have scopes of their own.
        pytest.param(name, values, scope, seed, marks=[pytest.mark.deep] if seed != number % len(MEANS) else [])
        for number, (name, values) in enumerate(FORMULAS)
        for seed, scope in enumerate(MEANS)
    ],
)
def test_scores_follow_from_queries_keys_and_values(name: str, values: dict[str, Any], scope: Scope, seed: int) -> None:
    """`sliding` is the window of the second layer; one key is like no other. Presets have scopes of their own."""
    own = {key: value for key, value in values.items() if key != "sliding"}
    policy = make(name, **own, **({} if "@" in name else {"scope": scope}))
    cached = scene(policy, seed)
    keys = [cached.key(layer).clone() for layer in range(SHAPE.layers)]
    for key in keys:
        key[:, 20] = -key[:, 0]
    cached = replace(cached, window=(None, values.get("sliding")).__getitem__, key=keys.__getitem__)
    formula = getattr(formulas, PRESETS[name].policy if name in PRESETS else name)
    assert_keeps(policy, cached, formula(policy, cached))


def test_every_policy_has_a_formula() -> None:
    """Ablations have that of their method: `dynts-bottom` that of `dynts`."""
    methods = {name.partition("-")[0] for name in policies.policies.names() if name != "full"}
    assert methods - {name.removesuffix("_per_query") for name in vars(formulas)} == set()


def test_a_scene_has_the_embeddings_of_its_tokens() -> None:
    cached = scene(make("window"), 0)
    embedded = cached.embedding(cached.tokens()[cached.positions])
    assert embedded.shape == (*cached.positions.shape, SHAPE.hidden)


def newest_by_matrix(unit: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Similarities [..., keys, keys] of all keys, and the newest key that each repeats, -1 for none."""
    similarity = unit @ unit.transpose(-1, -2) * (1 - torch.eye(unit.shape[-2]))
    return similarity, torch.where(similarity > threshold, torch.arange(unit.shape[-2]), -1).amax(-1)


def redundancy_by_matrix(key: Tensor, threshold: float, spare_first: bool) -> Tensor:
    """R-KV's redundancy [KV heads, cached] from the matrix of all similarities."""
    similarity, newest = newest_by_matrix(torch.nn.functional.normalize(key, dim=-1, eps=1e-8), threshold)
    spared = newest.clamp(min=0 if spare_first else -1)[..., None] == torch.arange(key.shape[1])
    return similarity.masked_fill(spared, 0.0).mean(1).softmax(-1)


@pytest.mark.parametrize("keys", ["alike", "random", "equal", "one"])
@pytest.mark.parametrize("threshold", [0.5, -0.1, 1.0])
@pytest.mark.parametrize("spare_first", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_redundancy_is_that_of_the_matrix(
    keys: str, threshold: float, spare_first: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several blocks: where most keys repeat another soon, where hardly one does, and at the edges.

    Head by head as on CPUs, and all heads at once as on GPUs.
    """
    monkeypatch.setattr(rkv, "BLOCK", 64)
    monkeypatch.setattr(rkv, "BLOCK_OF_ALL", 64)
    if at_once:
        monkeypatch.setattr(rkv, "newest_similar", rkv._newest_similar_of_all)
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


def test_lagkv_of_a_channel_without_a_range_divides_by_no_0() -> None:
    policy = make("lagkv", sinks=2, keep_prompt=False)
    cached = scene(policy, 3)
    keys = [cached.key(layer).clone() for layer in range(SHAPE.layers)]
    for key in keys:
        key[:, :, 0] = 0.25
    cached = replace(cached, key=keys.__getitem__)
    scores = policy.score(cached)
    assert not scores.isnan().any()


@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_sepllm(tiny_llama: ModelHandle, ratio: float) -> None:
    policy = make("sepllm", sinks=3, keep_prompt=False, ratio_over="older", ratio=ratio)
    cached = replace(scene(policy, 1), model=tiny_llama)
    score = formulas.sepllm(policy, cached)
    separators = [score(cached, 0, 0, slot) >= cached.length for slot in range(3, 60)]
    assert 0 < sum(separators) < 40
    assert_keeps(policy, cached, score)


def test_vase_keeps_the_older_of_equally_large_values() -> None:
    policy = make("vase", scope=Scope.GLOBAL, queries=8, large=1.0, keep_prompt=False)
    cached = scene(policy, 0)
    alike = torch.zeros(SHAPE.kv_heads, 60, SHAPE.head_dim)
    alike[:, 12::2, 0] = 1.0
    kept = select_tokens(policy, replace(cached, value=lambda _: alike))[0, 0].tolist()
    # 20 of 50 places: the first four tokens as sinks, then every other token from the 12th on.
    assert kept == [*range(4), *range(12, 44, 2), *range(50, 60)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dynts", {"keep_prompt": True}),
        ("dynts", {"keep_prompt": False}),
        ("dynts-bottom", {"keep_prompt": True}),
        ("dynts-bottom", {"keep_prompt": False}),
        ("dynts-noprompt", {"ratio": 0.9}),
    ],
)
def test_dynts_and_its_ablations(name: str, values: dict[str, Any]) -> None:
    policy = make(name, **values)
    importance = torch.rand(90, generator=torch.Generator().manual_seed(1)) + 1e-3
    cached = scene(policy, 2)
    cached = replace(cached, columns={"importance": importance[cached.positions]})
    assert_keeps(policy, cached, formulas.dynts(policy, cached, importance.tolist()))
    if name == "dynts-noprompt":
        # 45 of 50 places for 41 thinking tokens: four prompt tokens are left.
        assert select_tokens(policy, cached)[0, 0, :5].tolist() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize(("name", "width"), [("random", (2, 2)), ("dynts-random", (1, 1))])
def test_random_choices_are_their_numbers(name: str, width: tuple[int, int]) -> None:
    policy = make(name)
    cached = scene(policy, 0)
    assert cached.positions.shape[:2] == width
    assert_keeps(policy, cached, formulas.random(policy, cached))
    later = select_tokens(policy, replace(cached, length=cached.length + 1))
    assert not torch.equal(later, select_tokens(policy, cached))


@pytest.mark.parametrize("keep_prompt", [True, False])
def test_streaming(keep_prompt: bool) -> None:
    policy = make("streaming", sinks=5, keep_prompt=keep_prompt, ratio_over="older", ratio=0.5)
    cached = scene(policy, 0)
    assert_keeps(policy, cached, formulas.streaming(policy, cached))
    kept = select_tokens(policy, cached)[0, 0].tolist()
    assert kept == [*range(9 if keep_prompt else 5), *range(60 - 10 - (25 - (9 if keep_prompt else 5)), 60)]


def random_statistics(seed: int, folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Return statistics of queries and a file with them."""
    random = torch.Generator().manual_seed(seed)
    planes = SHAPE.head_dim // 2
    center = torch.complex(*torch.randn(2, SHAPE.layers, SHAPE.heads, planes, generator=random))
    norm = center.abs() + torch.rand(center.shape, generator=random)
    frequency = 100.0 ** -(torch.arange(planes) / planes)
    file = folder / "statistics.safetensors"
    parts = {"center_real": center.real, "center_imag": center.imag, "norm": norm, "frequency": frequency}
    save_file({name: value.contiguous() for name, value in parts.items()}, file)
    return parts, file


@SCENES
@pytest.mark.parametrize("keep_prompt", [True, False])
def test_triattention(scope: Scope, seed: int, keep_prompt: bool, tmp_path: Path) -> None:
    parts, file = random_statistics(seed, tmp_path)
    policy = make("triattention", scope=scope, statistics=str(file), reach=300, keep_prompt=keep_prompt)
    cached = scene(policy, seed)
    assert_keeps(policy, cached, formulas.triattention(policy, cached, parts))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep_prompt", [True, False])
def test_a_union_is_the_best_of_each_head_together_by_the_largest_score(
    seed: int, keep_prompt: bool, tmp_path: Path
) -> None:
    """Each head of each layer nominates as many tokens as stay; of the nominated ones those with the largest score."""
    parts, file = random_statistics(seed, tmp_path)
    policy = make("triattention", scope="union", statistics=str(file), reach=300, keep_prompt=keep_prompt)
    cached = scene(policy, seed)
    assert cached.positions.shape[:2] == (1, 1)
    score = formulas.triattention(policy, cached, parts)
    positions = cached.positions[0, 0].tolist()
    certain, room = places(policy, positions, cached.prompt_length)
    others = [slot for slot in range(len(positions) - policy.budget.window) if slot not in certain]

    largest = dict.fromkeys(others, -math.inf)
    nominated: set[int] = set()
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.kv_heads):
            scores = {slot: score(cached, layer, head, slot) for slot in others}
            nominated |= set(sorted(others, key=scores.__getitem__, reverse=True)[:room])
            largest = {slot: max(largest[slot], scores[slot]) for slot in others}
    best = sorted(nominated, key=largest.__getitem__, reverse=True)[:room]

    window = range(len(positions) - policy.budget.window, len(positions))
    assert select_tokens(policy, cached).tolist() == [[sorted({*certain, *best, *window})]]
    means = make("triattention", scope="global", statistics=str(file), reach=300, keep_prompt=keep_prompt)
    assert select_tokens(means, cached).tolist() != select_tokens(policy, cached).tolist()


def authors_file(parts: dict[str, Tensor], **metadata: Any) -> dict[str, Any]:
    """The content of the authors' file of statistics."""
    stats = {}
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.heads):
            stats[f"layer{layer:02d}_head{head:02d}"] = {
                "q_mean_real": parts["center_real"][layer, head],
                "q_mean_imag": parts["center_imag"][layer, head],
                "q_abs_mean": parts["norm"][layer, head],
            }
    return {"metadata": {"rope_style": "half", **metadata}, "stats": stats}


def test_triattention_reads_its_authors_statistics(tmp_path: Path) -> None:
    """One choice for each KV head by the mean over layers, with the frequency of the model."""
    random = torch.Generator().manual_seed(5)
    center = torch.randn(2, SHAPE.layers, SHAPE.heads, 4, generator=random)
    parts = {"center_real": center[0], "center_imag": center[1], "norm": center.norm(dim=0) + 0.3}
    file = tmp_path / "statistics.pt"
    torch.save(authors_file(parts), file)
    policy = make("triattention@paper", local_window=1, statistics=str(file))
    assert policy.scope is Scope.KV_HEAD
    cached = scene(policy, 5)
    assert cached.positions.shape[:2] == (1, SHAPE.kv_heads)
    model = SimpleNamespace(shape=SHAPE, config=ROTATED, name="of a test")
    cached = replace(cached, model=model)
    policy.check(model)
    frequency = torch.tensor([100.0 ** -(plane / 4) for plane in range(4)], dtype=torch.double)
    assert_keeps(policy, cached, formulas.triattention(policy, cached, {**parts, "frequency": frequency}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content["metadata"].update(rope_style="interleaved"), "rope_style is 'interleaved'"),
        (lambda content: content["stats"].pop("layer00_head01"), "7 heads of 8; expected all"),
        (lambda content: content["stats"].update(other={}), "unknown entry 'other'"),
        (lambda content: content.pop("stats"), "'stats'"),
    ],
)
def test_other_statistics_of_authors_are_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    part = torch.ones(SHAPE.layers, SHAPE.heads, 4)
    content = authors_file({"center_real": part, "center_imag": part, "norm": part})
    change(content)
    file = tmp_path / "statistics.pt"
    torch.save(content, file)
    policy = make("triattention", statistics=str(file))
    with pytest.raises(KvatlasError, match=sentence):
        policy.check(SimpleNamespace(shape=SHAPE, config=ROTATED, name="of a test"))


def test_models_without_one_rotation_are_refused() -> None:
    policy = make("expected_attention")
    for change in (
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        {"rope_type": "default", "rope_theta": 1e4},
    ):
        size = 16 if change["rope_type"] == "default" else 8
        model = SimpleNamespace(shape=SHAPE, config={**ROTATED, "head_dim": size, "rope_parameters": change}, name="m")
        with pytest.raises(KvatlasError, match="rotation of positions in 'm' is not the same"):
            policy.check(model)


class Separators:
    """A tokenizer with a separator in each fifth place."""

    bos_token_id = None

    def decode(self, tokens: list[int]) -> str:
        return "." if tokens[0] % 5 == 0 else "a"


#: Of a model with 8 channels a head, whose rotation is that of transformers' Llama.
ROTATED = {"model_type": "llama", "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}


@SCENES
@pytest.mark.parametrize("keep_prompt", [True, False])
def test_expected_attention(scope: Scope, seed: int, keep_prompt: bool) -> None:
    policy = make("expected_attention", scope=scope, queries=14, future=40, sinks=3, keep_prompt=keep_prompt)
    cached = scene(policy, seed)
    cached = replace(cached, model=SimpleNamespace(shape=SHAPE, config=ROTATED, name="of a test"))
    frequency = [100.0 ** -(plane / 4) for plane in range(4)]
    assert_keeps(policy, cached, formulas.expected_attention(policy, cached, frequency))


@SCENES
def test_learned(scope: Scope, seed: int, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(seed)
    sizes = {"first": (16, 5), "first_bias": (5,), "second": (5,), "second_bias": ()}
    scorer = {name: torch.randn(2, 2, *size, generator=random) for name, size in sizes.items()}
    save_file(scorer, tmp_path / "scorer.safetensors")
    policy = make("learned", scope=scope, scorer=str(tmp_path / "scorer.safetensors"))
    cached = scene(policy, seed)
    cached = replace(cached, model=SimpleNamespace(shape=SHAPE, config=ROTATED, name="of a test"))
    assert_keeps(policy, cached, formulas.learned(cached, scorer, [100.0 ** -(plane / 4) for plane in range(4)]))


@SCENES
def test_h2o_per_query(scope: Scope, seed: int) -> None:
    policy = make("h2o", scope=scope, per_query=True)
    cached = scene(policy, seed)
    mass = torch.rand(cached.positions.shape, generator=torch.Generator().manual_seed(seed)) + 1e-3
    cached = replace(cached, columns={"mass": mass})
    assert_keeps(policy, cached, formulas.h2o_per_query(policy, cached, mass))
    assert "per_query" in policy.setting.values
    assert "per_query" not in make("h2o").setting.values


#: Policies without a file of their own, and what may leave them nothing to count.
UNFILED = [
    name
    for name in policies.policies.names()
    if name not in ("full", "learned", "triattention") and not name.startswith("dynts")
]
CHOICES: dict[str, list[Any]] = {
    "queries": [2, 32, 64],
    "sinks": [0, 500],
    "scope": ["head", "kv_head", "layer", "global"],
    "large": [0.0, 1.0],
    "ratio": [0.0, 0.3, 1.0],
    "keep_prompt": [True, False],
}


class OfTest(SimpleNamespace):
    """A model that caches of results know by itself."""

    __hash__ = object.__hash__


MODEL = OfTest(shape=SHAPE, config=ROTATED, name="of a test", tokenizer=Separators())


@given(st.data())
@settings(max_examples=300)
def test_no_score_is_nan_where_a_set_is_empty(data: st.DataObject) -> None:
    """A query may see no cached token, a head have few, all tokens be sinks, or be in the observation window."""
    name = data.draw(st.sampled_from(UNFILED))
    own = {item.name for item in parameters(policies.policies.get(name))}
    values = {word: data.draw(st.sampled_from(choice)) for word, choice in CHOICES.items() if word in own}
    policy = make(name, **values)

    length = data.draw(st.integers(70, 400))
    newest = data.draw(st.integers(12, 30))
    oldest = sorted(data.draw(st.sets(st.integers(0, length - newest - 1), max_size=12)))
    places = [*oldest, *range(length - newest, length)]
    positions = torch.tensor(places).expand(*policy.scope.width(SHAPE), -1).clone()

    random = torch.Generator().manual_seed(length)
    numbers = torch.randn(SHAPE.layers, SHAPE.kv_heads, len(places), SHAPE.head_dim, generator=random)
    # With large keys one token has all of the attention.
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    numbers = numbers.to(dtype)
    keys = numbers * data.draw(st.sampled_from([1.0, 30.0]))
    plain = scene(policy, length)
    queries = [plain.query(layer).to(dtype) * 10 for layer in range(SHAPE.layers)]
    window = data.draw(st.sampled_from([None, 1, 3, 40]))
    tokens = torch.arange(length)
    cached = replace(
        plain,
        model=MODEL,
        positions=positions,
        prompt_length=data.draw(st.integers(0, 40)),
        length=length,
        columns={column: torch.rand(positions.shape, generator=random) for column in policy.columns},
        key=lambda layer: keys[layer],
        value=numbers.__getitem__,
        query=lambda layer: queries[layer],
        window=lambda _: window,
        tokens=lambda: tokens,
    )
    # Scores that are not a number are refused.
    select_tokens(policy, cached)


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
    wanted = newest_by_matrix(unit.double(), 0.5)[1][None]
    assert torch.equal(rkv.newest_similar(unit[None], 0.5), wanted)
    monkeypatch.setattr(rkv, "BLOCK_OF_ALL", 32)
    assert torch.equal(rkv._newest_similar_of_all(unit[None], 0.5), wanted)


def test_the_search_in_one_kernel_finds_the_same() -> None:
    """Triton's interpreter, which is chosen before Triton is imported, computes it on CPUs."""
    pytest.importorskip("triton")
    program = """
import torch
from kvatlas.policies import newest_similar_gpu
from tests.policies.test_formulas import newest_by_matrix

random = torch.Generator().manual_seed(0)
for heads, length, size in ((2, 300, 128), (3, 130, 80), (1, 5, 16)):
    for mean in (0.0, 1.0):
        keys = torch.randn(heads, length, size, generator=random) + mean
        unit = torch.nn.functional.normalize(keys, dim=-1)
        for threshold in (0.5, 0.2, -0.1):
            found = newest_similar_gpu.newest_similar_in_one_kernel(unit, threshold)
            assert torch.equal(found, newest_by_matrix(unit, threshold)[1])
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_policies_keep_what_their_authors_code_keeps(fact: dict[str, Any], tmp_path: Path) -> None:
    policy, cached = choosing(fact, tmp_path)
    (ours,), scores = select_tokens(policy, cached).tolist(), policy.score(cached)[0].double()
    for head, (kept, theirs) in enumerate(zip(ours, fact["kept"], strict=True)):
        apart = scores[head, sorted(set(kept) ^ set(theirs))]
        # torch.topk breaks ties arbitrarily.
        assert len(kept) == len(theirs)
        assert not len(apart) or apart.max() - apart.min() <= 1e-5 * apart.abs().max()
