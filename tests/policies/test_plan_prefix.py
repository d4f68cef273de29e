"""The plan of a thinking, which takes the first places among the tokens that stay."""

import math

import pytest

from kvatlas import policies
from kvatlas.core import KvatlasError
from kvatlas.policies import CacheView, select_tokens
from tests.policies import formulas
from tests.policies.scenes import assert_keeps, make, scene


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


def test_settings_name_the_plan_only_if_there_is_one() -> None:
    plain = make("rkv")
    assert make("rkv", plan_prefix=0) == plain
    assert "plan_prefix" not in plain.setting.values
    changed = make("rkv", plan_prefix=7)
    assert changed.setting.values["plan_prefix"] == 7
    assert policies.from_setting(changed.setting) == changed
    # It shares its observations with the plain policy.
    assert make("h2o", plan_prefix=7).observer == make("h2o").observer
    with pytest.raises(KvatlasError, match="plan_prefix"):
        make("rkv", plan_prefix=-1)
