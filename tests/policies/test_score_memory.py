"""Scores that outlive compressions, and the plan that stays: the kept sets against slow readings."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request, rows
from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, select_tokens
from kvatlas.policies.selection import Selection, make_selection
from tests.decoding import endless, prompts
from tests.policies import formulas
from tests.policies.scenes import assert_keeps, make, places, rule, scene

#: Compressions about every 6 tokens.
COMMON = {"kv_budget": 60, "local_window": 5, "ratio": 0.8, "ratio_over": "thinking"}


@dataclass
class Event:
    """A compression: the positions before and after, by unit of choice, and the policy's own scores if it gave any."""

    length: int
    before: list[list[int]]
    after: list[list[int]]
    scores: list[list[float]] | None = None


def events_of(
    model: ModelHandle, policy: CompressingPolicy, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[Event]]:
    """Decode a trace and return the length of its prompt and its compressions."""
    kind = type(policy)
    score = kind.score
    given: list[torch.Tensor] = []
    events = []

    def spy(self: CompressingPolicy, cached: CacheView) -> torch.Tensor:
        given.append(score(self, cached).double().expand(cached.positions.shape))
        return given[-1]

    def watched(own: CompressingPolicy, cached: CacheView, put_back: Any = None) -> Selection:
        given.clear()
        selection = make_selection(own, cached, put_back)
        event = Event(
            cached.length,
            cached.positions.flatten(0, 1).tolist(),
            cached.positions.gather(-1, selection.kept).flatten(0, 1).tolist(),
        )
        if given:
            event.scores = given[0].flatten(0, 1).tolist()
        events.append(event)
        return selection

    monkeypatch.setattr(kind, "score", spy)
    monkeypatch.setattr(rows, "make_selection", watched)
    prompt = prompts(model, 1)[0][:25]
    engine = Engine(model, model.load(), [policy], Sampling(temperature=0.8, max_new_tokens=100), 8)
    list(engine.run([Request(0, prompt, 5, (policy,))]))
    return len(prompt), events


def carried(new: list[float], old: list[float], competing: list[int], share: float) -> list[float]:
    """max(share * old, new / max new), after the lowest score, if that is below 0, became 0."""
    finite = [new[slot] for slot in competing if math.isfinite(new[slot])]
    lowest = min(0.0, *finite)
    span = max(finite) - lowest
    return [max(share * before, (now - lowest) / span) for now, before in zip(new, old, strict=True)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("snapkv", {"carry": 0.8, "queries": 4}),
        ("snapkv", {"carry": 0.5, "queries": 9, "keep_prompt": False}),
        ("rkv", {"carry": 0.8, "scope": "kv_head"}),
        ("keydiff", {"carry": 0.9, "scope": "layer"}),
        ("keydiff", {"carry": 0.9, "refresh": 15}),
        ("rkv", {"refresh": 20}),
        ("snapkv", {"refresh": 20, "queries": 9}),
        ("random", {"refresh": 30, "scope": "global"}),
        ("window", {"refresh": 13}),
    ],
)
def test_remembered_scores_are_those_of_a_dictionary(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch, name: str, values: dict[str, Any]
) -> None:
    model = endless(random_models["llama"])
    policy = policies.from_setting(Setting.from_parameters(name, **COMMON, **values))
    prompt, events = events_of(model, policy, monkeypatch)
    assert len(events) > 5
    scored_at = 0
    computations = 0
    remembered: list[dict[int, float]] = [{} for _ in events[0].before]
    for event in events:
        entered = event.length - scored_at
        _, quota = places(policy, event.before[0], prompt)
        is_stale = not scored_at or entered >= policy.budget.refresh or entered > quota
        assert (event.scores is not None) == is_stale
        for unit, positions in enumerate(event.before):
            older = positions[: -policy.budget.window]
            if event.scores is None:
                ranks = [remembered[unit].get(at, math.inf) for at in older]
            else:
                ranks = event.scores[unit][: len(older)]
                certain, _ = places(policy, positions, prompt)
                competing = [slot for slot in range(len(older)) if slot not in certain]
                old = [remembered[unit].get(at, 0.0) for at in older]
                old = [score if math.isfinite(score) else 0.0 for score in old]
                if policy.budget.carry:
                    scaled = carried(ranks, old, competing, policy.budget.carry)
                    ranks = [own if math.isinf(own) else new for own, new in zip(ranks, scaled, strict=True)]
                single = torch.tensor(ranks).tolist()
                remembered[unit] = dict(zip(older, single, strict=True))
            ranks = ranks + [0.0] * policy.budget.window
            kept = rule(policy, positions, ranks, prompt)
            assert event.after[unit] == [positions[slot] for slot in kept]
        if event.scores is not None:
            scored_at = event.length
            computations += 1
    assert computations < len(events) or policy.budget.refresh == 1


@pytest.mark.parametrize("keep_prompt", [True, False])
@pytest.mark.parametrize("name", ["keydiff", "random", "streaming", "vase", "snapkv"])
def test_the_plan_takes_the_first_places(name: str, keep_prompt: bool) -> None:
    """As many tokens stay as without a plan; the plan is ahead of tokens with an infinite score, too."""
    values = {"keep_prompt": keep_prompt, "ratio": 0.3, **({"queries": 8} if name in ("vase", "snapkv") else {})}
    policy = make(name, plan_prefix=12, **values)
    plain = make(name, **values)
    cached = scene(policy, 1)
    own = getattr(formulas, name)(policy, cached)

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        at = formulas.position(cached, layer, head, slot)
        # Above infinite scores.
        if 9 <= at < 21:
            return math.inf
        return min(own(cached, layer, head, slot), 1e300)

    if name == "vase":
        kept = select_tokens(policy, cached)
        assert kept.shape == select_tokens(plain, cached).shape
        for positions, slots in zip(cached.positions.flatten(0, 1), kept.flatten(0, 1), strict=True):
            plan = {at for at in positions.tolist() if 9 <= at < 21}
            assert plan <= set(positions[slots].tolist())
    else:
        assert_keeps(policy, cached, score)
        assert select_tokens(policy, cached).shape == select_tokens(plain, cached).shape


def test_a_plan_longer_than_the_places_keeps_its_beginning() -> None:
    policy = make("random", plan_prefix=80, ratio=0.2)
    cached = scene(policy, 2)
    kept = cached.positions.gather(-1, select_tokens(policy, cached))
    for before, after in zip(cached.positions.flatten(0, 1), kept.flatten(0, 1), strict=True):
        # Of 41 older thinking tokens 8 stay, beside the prompt of 9.
        assert after[:17].tolist() == before[:17].tolist()


def test_settings_name_these_parameters_only_if_they_change_something() -> None:
    plain = make("rkv")
    assert make("rkv", refresh=1, carry=0, plan_prefix=0) == plain
    assert not {"refresh", "carry", "plan_prefix"} & set(plain.setting.values)
    changed = make("rkv", refresh=32, carry=0.8, plan_prefix=7)
    assert {"refresh": 32, "carry": 0.8, "plan_prefix": 7}.items() <= changed.setting.values.items()
    assert policies.from_setting(changed.setting) == changed
    # They share their observations with the plain policy.
    assert make("h2o", carry=0.8).observer == make("h2o").observer
    for wrong in ({"refresh": 0}, {"carry": 1.5}, {"plan_prefix": -1}):
        with pytest.raises(KvatlasError, match=next(iter(wrong))):
            make("rkv", **wrong)


#: Settings of one scope, which share their column, and one without memory.
REMEMBERING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rkv", {"carry": 0.8}),
    ("rkv", {"refresh": 20}),
    ("snapkv", {"queries": 8}),
    ("keydiff", {"carry": 0.5}),
)


def test_each_request_begins_without_scores(random_models: dict[str, ModelHandle]) -> None:
    """Batches, orders and slots of other sequences change nothing."""
    model = endless(random_models["llama"])
    chosen = [policies.from_setting(Setting.from_parameters(name, **COMMON, **values)) for name, values in REMEMBERING]
    work = []
    for key, prompt in enumerate(prompts(model, 3)):
        work += [Request(key, prompt[:25], 100 + key, (policy,)) for policy in chosen]

    def tokens(requests: list[Request[int]], batch: int) -> dict[tuple[int, str], tuple[int, ...]]:
        engine = Engine(model, model.load(), chosen, Sampling(temperature=0.8, max_new_tokens=80), batch)
        return {(item.key, item.policy.setting.id): item.tokens for item in engine.run(requests)}

    together = [replace(work[4 * i], policies=tuple(chosen)) for i in range(3)]
    alone = tokens(work, 1)
    assert len(set(alone.values())) > 3
    assert tokens(work[::-1], 5) == alone
    assert tokens(together, 8) == alone
