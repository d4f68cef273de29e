"""Unequal budgets: the choice by a slow reading, logits against a masked full cache, and the memory that is left."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.cache import PAGE, CachedSequence, pages_for
from kvatlas.engine.parts import AHEAD
from kvatlas.models import ModelHandle
from kvatlas.policies import BudgetRule, CacheView, CompressingPolicy, Scope
from kvatlas.policies.budgets import pyramid
from tests.decoding import endless, outcome, prompts, requests, run
from tests.engine.test_compacted_cache import _masked

BUDGET = 120
WINDOW = 6
NEW = 230
Rule = Callable[[list[list[int]], list[list[float]], int, int], list[set[int]]]
#: Positions [layers, KV heads, cached] and scores at each compression.
LOG: list[tuple[torch.Tensor, torch.Tensor]] = []


@dataclass(frozen=True)
class Noted(CompressingPolicy):
    """Scores by a hash of position, layer and head, greater in some heads; notes what is cached."""

    name = "noted"
    unequal = True

    def score(self, cached: CacheView) -> torch.Tensor:
        layers, heads, _ = cached.positions.shape
        salt = torch.arange(1, layers * heads + 1).view(layers, heads, 1)
        scores = (cached.positions * 7919 + salt * 104_729) % 10_007 * (1 + salt % 3)
        LOG.append((cached.positions.clone(), scores.double()))
        return scores


def slow_pyramid(slots: int, candidates: list[int]) -> list[int]:
    """An arithmetic series with the mean `slots` that ends at a 20th of it, or begins at all candidates."""
    first = min(Fraction(2 * slots) - Fraction(slots, 20), Fraction(candidates[0]))
    last = 2 * slots - first
    layers = len(candidates)
    if layers == 1:
        return [slots]
    exact = [first + (last - first) * Fraction(layer, layers - 1) for layer in range(layers)]
    whole = [min(math.floor(number), most) for number, most in zip(exact, candidates, strict=True)]
    while sum(whole) < slots * layers:
        for layer, most in enumerate(candidates):
            if sum(whole) < slots * layers and whole[layer] < most:
                whole[layer] += 1
    return whole


def slow_choice(policy: CompressingPolicy, positions: torch.Tensor, scores: torch.Tensor, prompt: int) -> Any:
    """The positions that stay in each layer and head, token by token."""
    now = int(positions.max()) + 1
    layers, heads, _ = positions.shape
    candidates: dict[tuple[int, int], list[tuple[float, int]]] = {}
    kept: dict[tuple[int, int], set[int]] = defaultdict(set)
    for layer in range(layers):
        for head in range(heads):
            old = []
            for place, score in zip(positions[layer, head].tolist(), scores[layer, head].tolist(), strict=True):
                if place >= now - policy.budget.window or 0 <= place < prompt:
                    kept[layer, head].add(place)
                elif place >= 0:
                    old.append((-score, place))
            candidates[layer, head] = sorted(old)
    total = sum(map(len, candidates.values()))
    slots = math.floor(Fraction(str(policy.budget.ratio)) * Fraction(total, layers * heads))
    by_layer = slow_pyramid(slots, [len(candidates[layer, 0]) for layer in range(layers)])
    for layer in range(layers):
        if policy.budget.budgets == "pyramid":
            for head in range(heads):
                kept[layer, head] |= {place for _, place in candidates[layer, head][: by_layer[layer]]}
            continue
        rest = []
        floor = max(1, math.floor(Fraction(slots, 5)))
        for head in range(heads):
            kept[layer, head] |= {place for _, place in candidates[layer, head][:floor]}
            rest += [(score, head, place) for score, place in candidates[layer, head][floor:]]
        for _, head, place in sorted(rest)[: heads * (slots - floor)]:
            kept[layer, head].add(place)
    return kept


def noted(budgets: str, kv_budget: int = BUDGET) -> CompressingPolicy:
    kind = type("Noted" + budgets, (Noted,), {"scope": Scope.HEAD})
    made: CompressingPolicy = kind(budget=BudgetRule(kv_budget, WINDOW, 0.4, budgets=budgets))
    return made


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("budgets", ["pyramid", "ada"])
def test_choice_and_logits(random_models: dict[str, ModelHandle], budgets: str, backend: str) -> None:
    handle = endless(random_models["llama"])
    LOG.clear()
    prompt = prompts(handle, 1)[0][:30]
    model = handle.load()
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: seen.append(output[0, -1].clone()))
    policy = noted(budgets)
    engine = Engine(handle, model, [policy], Sampling(temperature=0.7, max_new_tokens=NEW), 8, backend)
    (generation,) = engine.run([Request(0, prompt, 3, (policy,))])
    assert generation.usage.compressions == len(LOG) >= 3
    # The mean over the heads is what counts.
    assert generation.usage.peak_kv_tokens == BUDGET

    tokens = prompt + generation.tokens[:-1]
    shape = handle.shape
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril().repeat(shape.layers, shape.kv_heads, 1, 1)
    for number, (positions, scores) in enumerate(LOG):
        fired = int(positions.max())
        assert int((positions >= 0).sum()) == BUDGET * shape.layers * shape.kv_heads
        choice = slow_choice(policy, positions, scores, len(prompt))
        assert len({len(kept) for kept in choice.values()}) > 1
        for (layer, head), kept in choice.items():
            if number + 1 < len(LOG):
                after = LOG[number + 1][0][layer, head]
                assert set(after[(after >= 0) & (after <= fired)].tolist()) == kept
            gone = [place for place in range(fired + 1) if place not in kept]
            visible[layer, head, fired + 1 :, gone] = False
    wanted = _masked(handle, tokens, visible)[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(seen), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("budgets", ["pyramid", "ada"])
def test_traces_depend_on_no_neighbour(random_models: dict[str, ModelHandle], budgets: str) -> None:
    handle = endless(random_models["llama"])
    settings = []
    for name, word in (("snapkv", budgets), ("h2o", budgets), ("random", "equal"), ("rkv", budgets)):
        values = {"kv_budget": 96, "local_window": 16, "ratio": 0.5, "budgets": word}
        settings.append(policies.from_setting(Setting.from_parameters(name, **values)))
    work = requests(handle, settings, 2)
    _, together = run(handle, work, 8)
    alone = [run(handle, [replace(work[1], policies=(policy,))], 1)[1] for policy in settings]
    together = [generation for generation in together if generation.key == 1]
    assert outcome(together) == outcome(one for several in alone for one in several)


def test_heads_with_few_tokens_leave_their_memory_to_others(random_models: dict[str, ModelHandle]) -> None:
    """A sequence has as many pages as the mean of its heads needs, while its longest head alone would need more."""
    handle = endless(random_models["llama"])
    for budgets in ("pyramid", "ada"):
        LOG.clear()
        policy = noted(budgets, kv_budget=640)
        engine = Engine(handle, handle.load(), [policy], Sampling(max_new_tokens=1100), 1)
        compact = engine.cache.compact_unequally
        pages = []
        longest = []

        def compacted(sequence: CachedSequence, kept: torch.Tensor, names: Any) -> None:
            compact(sequence, kept, names)  # noqa: B023
            pages.append(len(sequence.pages))  # noqa: B023
            longest.append(sequence.length)  # noqa: B023
            assert sequence.tokens == int((kept >= 0).sum()) / kept[..., 0].numel()

        engine.cache.compact_unequally = compacted  # type: ignore[method-assign]
        list(engine.run([Request(0, tuple(range(5, 25)), 3, (policy,))]))
        # Parts are rounded up, as pages are, and the last page is not all shared out.
        mean = 20 + WINDOW + math.floor(0.4 * (640 - 20 - WINDOW))
        assert len(pages) >= 2
        assert max(pages) <= pages_for(mean + AHEAD) + 2
        assert min(longest) > mean + 2 * PAGE


def test_pyramid_has_the_mean_and_no_more_than_there_is() -> None:
    for slots in range(40):
        for candidates in ([100] * 6, [slots] * 5, [slots + 3] * 4, [90, 20, 40, 60], [50]):
            if sum(min(candidates) for _ in candidates) < slots * len(candidates):
                continue
            assert pyramid(slots, candidates) == slow_pyramid(slots, candidates)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("snapkv", {"budgets": "ada", "scope": "layer"}),
        ("tova", {"budgets": "ada"}),
        ("keydiff", {"budgets": "pyramid", "scope": "global"}),
        ("vase", {"budgets": "ada"}),
        ("random", {"budgets": "ada", "kv_bits": 4, "residual": 0}),
        ("random", {"budgets": "steep"}),
    ],
)
def test_budgets_that_do_not_fit_are_refused(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(KvatlasError, match="budgets"):
        policies.from_setting(Setting.from_parameters(name, kv_budget=96, local_window=8, ratio=0.5, **values))
