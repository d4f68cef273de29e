"""The order of tests: chains by the spec alone, settings without an order, controls, more samples of the full cache."""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special

from kvatlas.core import FULL, REFERENCE, Claim, KvatlasError, Setting
from kvatlas.figures.heatmap_layout import name_of
from kvatlas.figures.panels import metric_panels
from kvatlas.report.description import one_page
from kvatlas.report.result import analyse
from kvatlas.results import Expected, Manifest
from kvatlas.stats.numerics.arrays import holm
from kvatlas.stats.numerics.bounded import score
from kvatlas.stats.orders import IN_ORDER, TestedSetting, orders_of_claims
from kvatlas.stats.pairs import folded_samples
from kvatlas.sweeps import make_plan, parse_spec
from tests.stats.synthetic import losses
from tests.stats.test_claims import losses as losses_of
from tests.stored import store_outcomes


def setting(policy: str, **values: Any) -> Setting:
    return Setting.from_parameters(policy, **{"kv_budget": 96, **values})


def chains(settings: list[Setting], sizes: Sequence[int] = (4000,), **others: Any) -> list[list[Setting]]:
    by_id = {one.id: one for one in settings}
    tested = [TestedSetting(one, None) for one in settings]
    found = orders_of_claims(tested, sizes, sizes, 1, 0.03, **others)[Claim.LIKE]
    assert sorted(id_ for of_chain in found for id_ in of_chain) == sorted(by_id)
    return [[by_id[id_] for id_ in of_chain] for of_chain in found]


def values_of(found: list[list[Setting]], *names: str) -> list[list[tuple[Any, ...]]]:
    return [[tuple(one.values.get(name) for name in names) for one in of_chain] for of_chain in found]


GRID = [setting("rkv", local_window=window, ratio=ratio) for window, ratio in product((8, 32), (0.1, 0.3, 0.5))]


def test_a_chain_for_each_window_from_most_tokens_down() -> None:
    assert values_of(chains(GRID), "local_window", "ratio") == [
        [(8, 0.5), (8, 0.3), (8, 0.1)],
        [(32, 0.5), (32, 0.3), (32, 0.1)],
    ]
    # So few problems prove nothing at a half of 5 %: one chain, and no more where even that is too much.
    assert len(chains(GRID, [110])) == 1
    assert len(chains(GRID, [20])) == 1
    assert len(chains(GRID, [130])) == 2


def test_chains_go_along_what_moves_bytes_most() -> None:
    budgets = [
        setting("rkv", kv_budget=budget, local_window=8, ratio=r) for budget, r in product((64, 512), (0.4, 0.5))
    ]
    assert values_of(chains(budgets), "kv_budget") == [[(512,), (64,)], [(512,), (64,)]]
    # Parameters of the policy itself move none, whatever their order.
    own = [setting("rkv", local_window=8, ratio=ratio, alpha=alpha) for alpha, ratio in product((1, 2), (0.1, 0.5))]
    assert values_of(chains(own), "alpha", "ratio") == [[(1, 0.5), (1, 0.1)], [(2, 0.5), (2, 0.1)]]
    bits = [Setting.from_parameters("full", kv_bits=bits) for bits in (2, 8, 4)]
    tested = [TestedSetting(one, (one.values["kv_bits"], 0)) for one in bits]
    found = orders_of_claims(tested, [4000], [4000], 1, 0.03)
    assert found[Claim.LIKE] == [[bits[1].id, bits[2].id, bits[0].id]]
    caps = [Setting.from_parameters("full", thinking_tokens=cap) for cap in (256, 1024, 512)]
    assert values_of(chains(caps), "thinking_tokens") == [[(1024,), (512,), (256,)]]
    # Budgets and windows that are no grid have one order.
    listed = [setting("rkv", kv_budget=budget, local_window=8, ratio=r) for budget, r in ((64, 0.4), (512, 0.5))]
    assert values_of(chains(listed), "kv_budget") == [[(512,), (64,)]]


def test_settings_without_numbers_have_no_order_but_the_declared_one() -> None:
    served = [Setting.from_parameters("served", dtype=dtype, window=w) for dtype, w in product("ab", (1, 2))]
    assert all(len(of_chain) == 1 for of_chain in chains(served))
    assert len(chains(served, [10])) == 4
    in_order = chains(served, tests=IN_ORDER, axes=["dtype", "window"])
    assert values_of(in_order, "dtype", "window") == [[("a", 1), ("a", 2)], [("b", 1), ("b", 2)]]
    assert chains(served[::2], tests=IN_ORDER, axes=["dtype"]) == [served[::2]]
    # Declared bytes decide before the order of the spec.
    tested = [TestedSetting(one, (size, 0)) for one, size in zip(served[:2], (512, 1024), strict=True)]
    found = orders_of_claims(tested, [400], [400], 1, 0.03, IN_ORDER, ["window"])
    assert found[Claim.LIKE] == [[served[1].id, served[0].id]]


def test_single_settings_are_tested_by_holm() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        lost = rng.random(6)[:, None] * 0.05
        differences = np.where(rng.random((6, 300)) < lost, -1.0, np.where(rng.random((6, 300)) < 0.02, 1.0, 0.0))
        found = losses(differences, np.zeros(300, int), 0.03, [[row] for row in range(6)])
        p = special.ndtr(score(-differences, 0.03, -1.0, 1.0))
        assert [one is not None and one.is_kept for one in found] == [adjusted <= 0.05 for adjusted in holm(p.tolist())]
        # The limit that decides is on the side of the margin that the verdict says.
        assert all(one is not None and (one.limit <= 0.03) == one.is_kept for one in found)


def test_the_share_of_a_finished_chain_passes_on() -> None:
    """120 problems prove 3 points at 2.5 %, and 2.6 at 5 %: a chain that is proven leaves its share to the other."""
    lost = np.zeros((2, 320))
    lost[1, :5] = -1.0
    zeros = np.zeros(320, int)
    alone = losses(lost[1:], zeros, 0.034, [[0]])[0]
    shared = losses(lost, zeros, 0.034, [[0], [1]])[1]
    beside_open = losses(np.stack([lost[1], lost[1] - (np.arange(320) > 310)]), zeros, 0.034, [[0], [1]])[0]
    assert alone is not None
    assert shared is not None
    assert beside_open is not None
    assert alone.limit == shared.limit <= 0.034 < beside_open.limit


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (2, 3))])
def test_the_order_of_a_list_of_commands_changes_nothing_that_is_said(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(1)
    outcomes = {REFERENCE: {"A": np.ones((400, 1))}}
    for name, lost in (("auto", 0.0), ("fp8", 0.004), ("int4", 0.012), ("int2", 0.1)):
        outcomes[Setting.from_parameters("served", dtype=name)] = {"A": (rng.random((400, 1)) >= lost).astype(float)}
    named = list(outcomes.items())
    random.Random(seed).shuffle(named)
    one = analyse([store_outcomes(tmp_path / "one", outcomes)])
    other = analyse([store_outcomes(tmp_path / "other", dict(named))])

    def decided(result: Any) -> dict[str, Any]:
        return {loss["setting"]: loss for loss in losses_of(result)}

    assert decided(one) == decided(other)
    assert sum(loss["shown"] for loss in losses_of(one)) == 3
    (choice,) = other.choices
    assert not choice.untested


def test_a_wide_window_of_a_small_ratio_ends_its_own_chain_alone(tmp_path: Path) -> None:
    full = {"A": np.ones((400, 1))}
    outcomes = {FULL: full, **{one: {"A": full["A"].copy()} for one in GRID}}
    outcomes[GRID[3]]["A"][:100] = 0.0
    outcomes[GRID[4]]["A"][:9] = 0.0
    result = analyse([store_outcomes(tmp_path / "run", outcomes)])
    shown = {loss["setting"]: loss["shown"] for loss in losses_of(result)}
    assert [shown[str(one)] for one in GRID] == [True, True, True, False, False, True]
    page = one_page(result)
    assert "rkv local_window 8, ratio 0.1 is the cheapest setting proven" in page
    assert "rkv local_window 32 at ratio 0.3." not in page


def test_an_effect_and_a_missed_difference_do_not_stand_together(tmp_path: Path) -> None:
    """Ratio 0.1 is proven below the others where the permutation of all cells does not reject."""
    findings = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        full = {"A": (rng.random((150, 1)) < 0.85).astype(float)}
        outcomes = {FULL: full}
        for one in GRID:
            lost = 0.06 if one.values["ratio"] == 0.1 else 0.0
            outcomes[one] = {"A": np.where(rng.random((150, 1)) < lost, 0.0, full["A"])}
        result = analyse([store_outcomes(tmp_path / str(seed), outcomes)])
        page = one_page(result)
        findings.append(any(effect.is_found for effect in result.effects))
        has_finding = findings[-1] or result.choices[0].shown
        assert not (has_finding and "no difference between the settings is found" in page)
        assert not (any(effect.is_proven for effect in result.effects) and "that it can see a loss" in page)
    assert set(findings) == {False, True}


def test_a_setting_behind_the_end_of_its_chain_is_named(tmp_path: Path) -> None:
    """The setting that keeps most loses two points, those behind it nothing: what they lack is told."""
    full = {"A": np.ones((240, 1))}
    outcomes = {FULL: full, **{one: {"A": full["A"].copy()} for one in GRID[:3]}}
    outcomes[GRID[2]]["A"][:4] = 0.0
    result = analyse([store_outcomes(tmp_path / "run", outcomes)])
    page = one_page(result)
    assert (
        "On these 240 problems nothing is proven. rkv ratio 0.1 is within 3 points by its own limit (at most 1.2), but "
        "it is not tested: rkv ratio 0.5 before it in its chain is not proven. rkv ratio 0.5 lost 1.7, at most"
    ) in page
    assert "As a trial take rkv ratio 0.1" in page
    assert "Of these 2 are not tested" in page
    assert "rkv at ratio 0.5." in page
    assert result.to_dict()["recommendation"]["required"]["setting"] == str(GRID[2])


def test_controls_get_no_share_and_no_frame(tmp_path: Path) -> None:
    full = {"A": np.ones((130, 1))}
    randoms = [Setting.from_parameters("random", **one.values) for one in GRID]
    outcomes = {FULL: full, **{one: {"A": full["A"].copy()} for one in (*GRID, *randoms)}}
    outcomes[randoms[0]]["A"][:40] = 0.0
    result = analyse([store_outcomes(tmp_path / "run", outcomes)])
    by_name = {loss["setting"]: loss for loss in losses_of(result)}
    assert all(by_name[str(one)]["shown"] for one in GRID)
    assert not any(by_name[str(one)]["shown"] for one in randoms)
    assert [by_name[str(one)]["broken"] for one in randoms] == [True] + 5 * [False]
    assert all(by_name[str(one)]["loses_limit"] is None for one in randoms)
    page = one_page(result)
    assert "random is a control, tested for a larger loss alone." in page
    assert "of 6 settings 6 are proven" in page
    assert "tiny random (control)" in page
    names = [name_of(panel).policy for panel in metric_panels([one.map for one in result.maps])]
    assert names == ["rkv", "random (control)"]
    # Alone, and where the spec says so, the same policy is studied.
    alone = analyse([store_outcomes(tmp_path / "alone", {one: outcomes[one] for one in (FULL, *randoms[1:])})])
    assert all(loss["shown"] for loss in losses_of(alone))


def test_a_plan_declares_controls_and_later_ones_change_none() -> None:
    base = {
        "models": ["embedded:tiny-llama"],
        "benchmarks": ["CHAIN6"],
        "problems": 4,
        "settings": [{"policy": name, "kv_budget": 96, "local_window": 8} for name in ("rkv", "random", "knorm")],
        "axes": {"ratio": [0.1, 0.5]},
    }

    def controls(manifest: Manifest) -> set[str]:
        return {cell.setting.policy for cell in manifest.expected if cell.control}

    manifest = make_plan(parse_spec(base)).manifest()
    assert controls(manifest) == {"random"}
    assert controls(Manifest.from_json(manifest.to_json())) == {"random"}
    named = make_plan(parse_spec({**base, "controls": ["knorm"]})).manifest()
    assert controls(named) == {"knorm"}
    assert controls(make_plan(parse_spec({**base, "controls": []})).manifest()) == set()
    assert controls(named.merge_with(manifest)) == {"random"}
    with pytest.raises(KvatlasError, match=r"controls: expected policies of the settings \(.*\), h2o was given"):
        parse_spec({**base, "controls": ["h2o"]})


def test_more_samples_of_the_full_cache_are_averaged_and_none_is_in_two_pairs() -> None:
    values = np.arange(7.0)
    assert folded_samples(values, 7).tolist() == values.tolist()
    assert folded_samples(values, 3).tolist() == [(0 + 3 + 6) / 3, (1 + 4) / 2, (2 + 5) / 2]
    assert folded_samples(values[:6], 3).tolist() == [1.5, 2.5, 3.5]
    lacking = values.copy()
    lacking[4] = np.nan
    assert np.isnan(folded_samples(lacking, 3)).tolist() == [False, True, False]


def test_a_run_uses_all_samples_of_the_full_cache(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    grades = (rng.random((60, 8)) < 0.7).astype(float)
    one = GRID[0]
    outcomes = {FULL: {"A": grades}, one: {"A": grades[:, :4].copy()}}
    result = analyse([store_outcomes(tmp_path / "run", outcomes, claim="these_problems")])
    (loss,) = losses_of(result)
    assert (loss["pairs"], loss["units"]) == (240, 240)
    assert loss["loses"] == pytest.approx(100 * (grades.mean() - grades[:, :4].mean()), abs=1e-3)
    assert loss["loses"] != 0


def test_a_plan_samples_the_full_cache_more_often_where_that_is_said() -> None:
    base = {
        "models": ["embedded:tiny-llama"],
        "benchmarks": ["CHAIN6"],
        "problems": 3,
        "samples": 2,
        "settings": [{"policy": "rkv", "kv_budget": 96, "local_window": 8, "ratio": 0.5}],
    }
    assert {cell.samples for cell in make_plan(parse_spec(base)).expected()} == {2}
    plan = make_plan(parse_spec({**base, "full_samples": 6}))
    assert {cell.setting.policy: cell.samples for cell in plan.expected()} == {"rkv": 2, "full": 6}
    assert plan.traces == 3 * (2 + 6)
    units = plan.units(plan.expected(), {})
    assert sum(len(unit.settings) for unit in units) == plan.traces
    # The samples that make a pair are decoded together.
    assert [unit.sample for unit in units[:4]] == [0, 2, 4, 0]
    manifest = plan.manifest()
    again = make_plan(parse_spec({**base, "full_samples": 6, "problems": 4})).manifest().merge_with(manifest)
    assert {cell.setting.policy: cell.samples for cell in again.expected} == {"rkv": 2, "full": 6}
    assert again.spec["samples"] == 2
    for wrong, words in (({"full_samples": 1}, "one to 4 times"), ({"full_samples": 9}, "one to 4 times")):
        with pytest.raises(KvatlasError, match=words):
            parse_spec({**base, **wrong})
    with pytest.raises(KvatlasError, match="copies"):
        parse_spec({**base, "samples": 1, "full_samples": 2, "sampling": {"temperature": 0}})


def test_declared_looks_keep_their_chains_and_are_no_extension() -> None:
    base = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "problems": 3, "looks": [1, 2]}
    grid = {"settings": [{"policy": "rkv", "kv_budget": 96, "local_window": 8, "ratio": 0.5}]}
    first = make_plan(parse_spec({**base, **grid, "full_samples": 2})).manifest()
    second = make_plan(parse_spec({**base, **grid, "samples": 2, "full_samples": 4})).manifest().merge_with(first)
    assert second.provenance.get("extensions", 0) == 0
    assert {cell.samples for cell in second.expected} == {2, 4}


def test_clusters_count_with_one_sample(tmp_path: Path) -> None:
    """With one sample the two claims have the same units only where no problems share a cluster."""
    from dataclasses import replace

    from kvatlas.results import Store
    from kvatlas.stats.losses import losses_of as families
    from kvatlas.stats.run_data import RunData

    ones = np.ones((100, 1))
    run = RunData.open(store_outcomes(tmp_path / "run", {FULL: {"A": ones}, GRID[0]: {"A": ones.copy()}}))
    clusters = {"A": {f"p{number:04d}": str(number // 10) for number in range(100)}}
    with Store.open(tmp_path / "run") as store:
        store.put_manifest(replace(run.manifest, clusters=clusters))
    (family,) = families(RunData.open(tmp_path / "run")).values()
    (loss,) = family.by_setting.values()
    limits = [loss.limit_of(claim) for claim in Claim]
    assert limits[0] is not None
    assert limits[1] is not None
    assert limits[0] < 0.04 < 0.2 < limits[1]
    assert isinstance(run.manifest.expected[0], Expected)
