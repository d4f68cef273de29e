"""Every policy against a slow reading of its paper's formula: float64, one token at a time, other code."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.models import Model
from kvatlas.noise import uniform
from kvatlas.policies import Cached, Reference, Scope, Selection, Step, rkv
from tests.policies.scenes import GROUP, SCALING, SHAPE, assert_keeps, scene

COMMON = {"kv_budget": 60, "local_window": 10, "ratio": 0.4, "ratio_over": "thinking"}
SEEDS = range(3)


def make(name: str, **changes: Any) -> Selection:
    policy = policies.of(Setting.of(name, **{**COMMON, **changes}))
    assert isinstance(policy, Selection)
    return policy


def position(cached: Cached, layer: int, head: int, slot: int) -> int:
    layers, heads, _ = cached.positions.shape
    return int(cached.positions[min(layer, layers - 1), min(head, heads - 1), slot])


def logit(cached: Cached, layer: int, head: int, query: int, slot: int) -> float:
    """q k of query head `head` times the layer's scaling, in float64; -inf for a token that the query does not see."""
    vectors = cached.query(layer)[head].double()
    back = cached.length - len(vectors) + query - position(cached, layer, head // GROUP, slot)
    if not 0 <= back < (cached.window(layer) or math.inf):
        return -math.inf
    key = cached.key(layer)[head // GROUP, slot].double()
    return float(vectors[query] @ key) * SCALING[layer]


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    parts = [math.exp(value - top) for value in values]
    return [part / sum(parts) for part in parts]


def in_window(cached: Cached, layer: int, head: int, slot: int, queries: int) -> bool:
    return position(cached, layer, head, slot) >= cached.length - queries


def neighbours(slot: int, kernel: int, count: int) -> range:
    return range(max(0, slot - kernel // 2), min(count, slot - kernel // 2 + kernel))


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
def test_h2o(scope: Scope, seed: int) -> None:
    policy = make("h2o", scope=scope)
    width = scope.width(SHAPE)
    mass = torch.rand(*width, 60, generator=torch.Generator().manual_seed(seed))

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        return float(mass[min(layer, width[0] - 1), min(head, width[1] - 1), slot])

    assert_keeps(policy, scene(policy, seed, {"mass": mass}), score)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("queries", "window"), [(6, 10), (12, 4)])
@pytest.mark.parametrize(("pooling", "kernel"), [("max", 7), ("avg", 5), ("max", 1)])
def test_snapkv(scope: Scope, seed: int, queries: int, window: int, pooling: str, kernel: int) -> None:
    policy = make("snapkv", scope=scope, queries=queries, local_window=window, pooling=pooling, kernel=kernel)
    votes: dict[tuple[int, int], list[float]] = {}

    def of_head(cached: Cached, layer: int, head: int) -> list[float]:
        """Sum over the observation window's queries of their softmax, before the window; of one query head."""
        count = cached.positions.shape[-1]
        rows = [softmax([logit(cached, layer, head, q, slot) for slot in range(count)]) for q in range(queries)]
        return [
            0.0 if in_window(cached, layer, head // GROUP, slot, queries) else sum(row[slot] for row in rows)
            for slot in range(count)
        ]

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        if in_window(cached, layer, head, slot, queries):
            return math.inf
        total = 0.0
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            if (layer, query_head) not in votes:
                votes[layer, query_head] = of_head(cached, layer, query_head)
            near = [votes[layer, query_head][i] for i in neighbours(slot, kernel, cached.positions.shape[-1])]
            total += max(near) if pooling == "max" else sum(near) / kernel
        return total / GROUP

    assert_keeps(policy, scene(policy, seed), score)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("mix", "window", "threshold", "unlike"),
    [(0.1, 10, 0.5, "none"), (0.9, 4, 0.5, "none"), (0.1, 10, 0.9, "none"), (0.0, 10, 0.95, "first")],
)
def test_rkv(scope: Scope, seed: int, mix: float, window: int, threshold: float, unlike: str) -> None:
    queries, kernel = 8, 7
    given = {"threshold": threshold, "unlike": unlike, "keep_prompt": unlike == "none"}
    policy = make("rkv", scope=scope, mix=mix, local_window=window, **given)
    memory: dict[Any, list[float]] = {}

    def importance(cached: Cached, layer: int, head: int) -> list[float]:
        slots = range(cached.positions.shape[-1])
        past = [slot for slot in slots if not in_window(cached, layer, head, slot, queries)]
        rows = []
        for q in range(queries):
            best = [max(logit(cached, layer, head * GROUP + g, q, slot) for g in range(GROUP)) for slot in past]
            rows.append(dict(zip(past, softmax(best), strict=True)))
        mean = [sum(row.get(slot, 0.0) for row in rows) / queries for slot in slots]
        return [max(mean[i] for i in neighbours(slot, kernel, len(mean))) for slot in slots]

    def redundancy(cached: Cached, layer: int, head: int) -> list[float]:
        keys = cached.key(layer)[head].double()
        count = len(keys)
        unit = [key / key.norm() for key in keys]
        total = [0.0] * count
        for i in range(count):
            similar = [0.0 if i == j else float(unit[i] @ unit[j]) for j in range(count)]
            repeats = [j for j in range(count) if similar[j] > threshold]
            if repeats or unlike == "first":
                similar[max(repeats, default=0)] = 0.0
            total = [before + now for before, now in zip(total, similar, strict=True)]
        return softmax([value / count for value in total])

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        if in_window(cached, layer, head, slot, queries):
            return math.inf
        for what in (importance, redundancy):
            if (what, layer, head) not in memory:
                memory[what, layer, head] = what(cached, layer, head)
        return mix * memory[importance, layer, head][slot] - (1 - mix) * memory[redundancy, layer, head][slot]

    assert_keeps(policy, scene(policy, seed), score)


def redundancy_by_matrix(key: torch.Tensor, threshold: float, spare_first: bool) -> torch.Tensor:
    """R-KV's redundancy [KV heads, cached] from the matrix of all similarities."""
    unit = torch.nn.functional.normalize(key, dim=-1, eps=1e-8)
    number = torch.arange(key.shape[1])
    similarity = (unit @ unit.transpose(-1, -2)).masked_fill(number[:, None] == number, 0.0)
    newest = torch.where(similarity > threshold, number, -1).amax(-1, keepdim=True)
    newest = newest.clamp(min=0) if spare_first else newest
    return similarity.masked_fill(newest == number, 0.0).mean(1).softmax(-1)


@pytest.mark.parametrize("keys", ["alike", "random", "equal", "one"])
@pytest.mark.parametrize("threshold", [0.5, 0.9, -0.1, -1.0, 1.0])
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
    found, wanted = rkv.redundancy(key, threshold, spare_first), redundancy_by_matrix(key, threshold, spare_first)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0.0)
    assert found.sum(-1).allclose(torch.ones(2))


def test_redundancy_never_holds_the_matrix_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of keys alone: and after the newest few where every key repeats another."""
    sizes: list[int] = []
    amax = torch.Tensor.amax

    def spy(self: torch.Tensor, *dims: Any, **named: Any) -> torch.Tensor:
        sizes.append(self.numel())
        return amax(self, *dims, **named)

    monkeypatch.setattr(torch.Tensor, "amax", spy)
    key = torch.randn(1, 8192, 16, generator=torch.Generator().manual_seed(0)) + 3.0
    assert int(rkv.newest_similar(torch.nn.functional.normalize(key[0], dim=-1), 0.5).min()) >= 8190
    assert max(sizes) <= 2 * rkv.BLOCK**2
    assert sum(sizes) == 8192 * rkv.BLOCK


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("windows", [(None, None), (None, 48)])
def test_tova(scope: Scope, seed: int, windows: tuple[int | None, ...]) -> None:
    policy = make("tova", scope=scope)

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        weights = []
        for query_head in range(SHAPE.heads) if scope is Scope.LAYER else range(head * GROUP, (head + 1) * GROUP):
            row = [logit(cached, layer, query_head, 0, other) for other in range(cached.positions.shape[-1])]
            weights.append(softmax(row)[slot])
        return sum(weights) / len(weights)

    assert_keeps(policy, scene(policy, seed, window=windows.__getitem__), score)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
def test_keydiff(scope: Scope, seed: int) -> None:
    policy = make("keydiff", scope=scope)

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        keys = cached.key(layer)[head].double()
        anchor = sum(key / key.norm() for key in keys) / len(keys)
        return -float(keys[slot] @ anchor) / float(keys[slot].norm() * anchor.norm())

    assert_keeps(policy, scene(policy, seed), score)


@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_sepllm(tiny_llama: Model, ratio: float) -> None:
    policy = make("sepllm", sinks=3, keep_prompt=False, ratio_over="older", ratio=ratio)
    cached = scene(policy, 1, model=tiny_llama)
    texts = [tiny_llama.tokenizer.decode([token]) for token in cached.tokens().tolist()]
    separators = [text != "" and all(letter in ".,?!;: \t\n" for letter in text) for text in texts]
    assert 3 < sum(separators[at] for at in cached.positions[0, 0].tolist()) < 40

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        return math.inf if at < 3 else at + 1000 * separators[at]

    assert_keeps(policy, cached, score)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
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

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        layer, head = min(layer, layers - 1), min(head, heads - 1)
        times = [prompt - 1 if slot < prompt else slot - 1]
        times += [t for t in range(max(prompt, slot), total) if float(weights[t - prompt, layer, head, slot]) >= 0.02]
        pause = max((b - a for a, b in pairwise(times)), default=0)
        waited = (total - 1 - times[-1]) / (pause + 1e-5)
        recent = 0.0 if waited > 700 else 2 / (1 + math.exp(1 + waited))
        return recent + (2 / (1 + math.exp(pause - 1)) if pause else 0.0)

    assert_keeps(policy, cached, score)


class Noted:
    """Columns of one sequence, as the loop keeps them."""

    def __init__(self, policy: Selection, layers: int, heads: int, slots: int) -> None:
        self.policy = policy
        self.held = {name: torch.zeros(1, layers, heads, slots) for name in policy.columns}

    def show(self, positions: torch.Tensor, attention: torch.Tensor) -> None:
        self.entered = positions
        self.policy.observe(Step(None, positions[None], None, attention, self))  # type: ignore[arg-type]

    def enter(self, name: str, values: torch.Tensor) -> None:
        self.held[name][..., self.entered] = values[:, None, None].to(torch.float32)

    def read(self, name: str) -> torch.Tensor:
        return self.held[name].clone()

    def write(self, name: str, values: torch.Tensor) -> None:
        self.held[name] = values


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keep_prompt", [True, False])
def test_vase(scope: Scope, seed: int, keep_prompt: bool) -> None:
    queries, kernel, window = 8, 5, 10
    policy = make("vase", scope=scope, queries=queries, large=0.5, keep_prompt=keep_prompt)
    cached = scene(policy, seed)
    layers, heads, count = cached.positions.shape

    def mean(values: list[list[float]]) -> list[float]:
        return [sum(column) / len(column) for column in zip(*values, strict=True)]

    def attention(layer: int, head: int) -> list[float]:
        past = [slot for slot in range(count) if not in_window(cached, layer, head, slot, queries)]
        total = [0.0] * count
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            rows = [softmax([logit(cached, layer, query_head, q, slot) for slot in past]) for q in range(queries)]
            for slot, weight in zip(past, mean(rows), strict=True):
                total[slot] += weight / GROUP
        return [sum(total[i] for i in neighbours(slot, kernel, count)) / kernel for slot in range(count)]

    def ranges(layer: int, head: int) -> list[float]:
        return [float(value.max() - value.min()) for value in cached.value(layer)[head].double()]

    kept = policies.select(policy, cached)
    for layer in range(layers):
        for head in range(heads):
            shared = [
                (a, b)
                for a in (range(SHAPE.layers) if layers == 1 else [layer])
                for b in (range(SHAPE.kv_heads) if heads == 1 else [head])
            ]
            weight = mean([attention(a, b) for a, b in shared])
            size = mean([ranges(a, b) for a, b in shared])
            at = cached.positions[layer, head].tolist()
            free = [slot for slot in range(count - window) if not (keep_prompt and at[slot] < cached.prompt_length)]
            room = int(0.4 * len(free) + 1e-9)
            large = sorted(free, key=lambda slot: (at[slot] < 4, size[slot]), reverse=True)[: room // 2]
            choice = layer * heads + head + 1
            keyed = {
                slot: math.log(weight[slot]) - math.log(-math.log(uniform_of(cached, at[slot], choice)))
                for slot in free
                if slot not in large
            }
            drawn = sorted(keyed, key=lambda slot: keyed[slot], reverse=True)[: room - len(large)]
            certain = [slot for slot in range(count) if slot >= count - window or slot not in free]
            assert kept[layer, head].tolist() == sorted({*certain, *large, *drawn})


def uniform_of(cached: Cached, at: int, choice: int) -> float:
    one = torch.tensor([at])
    return float(uniform(torch.tensor([cached.stream]), cached.length, one, torch.tensor([choice])))


def test_vase_keeps_the_older_of_equally_large_values() -> None:
    policy = make("vase", scope=Scope.GLOBAL, queries=8, large=1.0, keep_prompt=False)
    cached = scene(policy, 0)
    alike = torch.zeros(SHAPE.kv_heads, 60, SHAPE.head_dim)
    alike[:, 12::2, 0] = 1.0
    kept = policies.select(policy, replace(cached, value=lambda _: alike))[0, 0].tolist()
    # 20 of 50 places: the first four tokens as sinks, then every other token from the 12th on.
    assert kept == [*range(4), *range(12, 44, 2), *range(50, 60)]


def test_vase_draws_in_proportion_to_attention() -> None:
    """Without large values the first token drawn is token t with probability attention(t)."""
    policy = make("vase", scope=Scope.GLOBAL, large=0.0, queries=1, kernel=1, ratio=0.05, keep_prompt=False)
    assert policy.kv_budget == 60
    cached = scene(policy, 0)
    counts = torch.zeros(60)
    draws = 4000
    weight = None
    for stream in range(draws):
        kept = policies.select(replace(policy, ratio=0.02), replace(cached, stream=stream))[0, 0].tolist()
        counts[kept[0]] += 1
    weight = cached.each_layer(lambda layer: policy._attention(cached, layer))[0, 0, :50]  # type: ignore[attr-defined]
    share = weight / weight.sum()
    error = (share * (1 - share) / draws).sqrt()
    assert torch.all((counts[:50] / draws - share).abs() < 5 * error + 1e-9)


@pytest.mark.parametrize("keep_prompt", [True, False])
@pytest.mark.parametrize(("name", "sign", "of_prompt"), [("dynts", 1, None), ("dynts-bottom", -1, math.inf)])
def test_dynts_and_its_bottom(name: str, sign: int, of_prompt: float | None, keep_prompt: bool) -> None:
    policy = make(name, keep_prompt=keep_prompt)
    importance = torch.rand(1, 1, 60, generator=torch.Generator().manual_seed(1))

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        in_prompt = position(cached, layer, head, slot) < cached.prompt_length
        return sign * (of_prompt if in_prompt and of_prompt is not None else float(importance[0, 0, slot]))

    assert_keeps(policy, scene(policy, 2, {"importance": importance}), score)


def test_dynts_without_the_prompt() -> None:
    policy = make("dynts-noprompt", ratio=0.9)
    importance = torch.rand(1, 1, 60, generator=torch.Generator().manual_seed(1)) + 1e-3

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        return 0.0 if at < cached.prompt_length else float(importance[0, 0, slot])

    cached = scene(policy, 2, {"importance": importance})
    assert_keeps(policy, cached, score)
    # 45 of 50 places for 41 thinking tokens: four prompt tokens are left.
    assert policies.select(policy, cached)[0, 0, :5].tolist() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize(("name", "width"), [("random", (2, 2)), ("dynts-random", (1, 1))])
def test_random_choices_are_their_numbers(name: str, width: tuple[int, int]) -> None:
    policy = make(name)
    cached = scene(policy, 0)
    assert cached.positions.shape[:2] == width

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        choice = layer * width[1] + head + 1 if width != (1, 1) else 1
        return uniform_of(cached, position(cached, layer, head, slot), choice)

    assert_keeps(policy, cached, score)
    later = policies.select(policy, replace(cached, length=cached.length + 1))
    assert not torch.equal(later, policies.select(policy, cached))


@pytest.mark.parametrize("keep_prompt", [True, False])
def test_streaming(keep_prompt: bool) -> None:
    policy = make("streaming", sinks=5, keep_prompt=keep_prompt, ratio_over="older", ratio=0.5)

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        return math.inf if position(cached, layer, head, slot) < 5 else position(cached, layer, head, slot)

    cached = scene(policy, 0)
    assert_keeps(policy, cached, score)
    kept = policies.select(policy, cached)[0, 0].tolist()
    assert kept == [*range(9 if keep_prompt else 5), *range(60 - 10 - (25 - (9 if keep_prompt else 5)), 60)]


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keep_prompt", [True, False])
def test_triattention(scope: Scope, seed: int, keep_prompt: bool, tmp_path: Path) -> None:
    """The sums over planes and future distances of section 4, on keys whose rotation is undone first."""
    random = torch.Generator().manual_seed(seed)
    planes = SHAPE.head_dim // 2
    center = torch.complex(*torch.randn(2, SHAPE.layers, SHAPE.heads, planes, generator=random))
    norm = center.abs() + torch.rand(center.shape, generator=random)
    frequency = 100.0 ** -(torch.arange(planes) / planes)
    file = tmp_path / "statistics.safetensors"
    parts = {"center_real": center.real, "center_imag": center.imag, "norm": norm, "frequency": frequency}
    save_file({name: value.contiguous() for name, value in parts.items()}, file)
    policy = make("triattention", scope=scope, statistics=str(file), reach=300, keep_prompt=keep_prompt)
    memory: dict[tuple[int, int], list[float]] = {}

    def of_head(cached: Cached, layer: int, head: int) -> list[float]:
        found = []
        for slot in range(cached.positions.shape[-1]):
            at = position(cached, layer, head // GROUP, slot)
            key = cached.key(layer)[head // GROUP, slot].double().tolist()
            total = 0.0
            for f in range(planes):
                w = float(frequency[f])
                k = complex(key[f], key[f + planes]) * cmath.exp(-1j * at * w)
                q = complex(center[layer, head, f])
                phi = cmath.phase(q) - cmath.phase(k)
                for d in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                    total += abs(q) * abs(k) * math.cos(w * (cached.length - at + d) + phi) / 9
                total += (float(norm[layer, head, f]) - abs(q)) * abs(k)
            found.append(total)
        written = [
            value
            for slot, value in enumerate(found)
            if position(cached, layer, head // GROUP, slot) >= cached.prompt_length
        ]
        mean = sum(written) / len(written)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in written) / len(written))
        return [(value - mean) / deviation for value in found]

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            if (layer, query_head) not in memory:
                memory[layer, query_head] = of_head(cached, layer, query_head)
        return max(memory[layer, h][slot] for h in range(head * GROUP, (head + 1) * GROUP))

    assert_keeps(policy, scene(policy, seed), score)


@pytest.mark.parametrize("shared", [90, 60, 5])
@pytest.mark.parametrize("answered", [True, False])
def test_oracle(shared: int, answered: bool) -> None:
    policy = make("oracle")
    attention = torch.rand(100, generator=torch.Generator().manual_seed(1)).double()
    cached = scene(policy, 3)
    theirs = [*cached.tokens().tolist(), *[7] * 40]
    if shared < len(theirs) - 40:
        theirs[shared] += 1
    reference = Reference(tuple(theirs), attention.float()) if answered else None

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        return (float(attention[at]) if answered and at < shared else 0.0) + 1e-12 * at

    assert_keeps(policy, replace(cached, reference=reference), score)
