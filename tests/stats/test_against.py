"""Settings of a run without maps against one policy, each with the policy's setting of the same values."""

import numpy as np
import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.figures.setting_rows import against_csv, against_figure, against_title
from kvatlas.stats.pairs import against_policy, partner_of, rows_of_policy
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import manifest, run_of, trace

AXES = (("keep_prompt", (True, False)),)


def setting(policy: str, keep_prompt: bool, **own: object) -> Setting:
    return Setting.from_parameters(policy, kv_budget=96, keep_prompt=keep_prompt, **own)


def arena(chances: dict[str, float], problems: int = 150) -> RunData:
    """A run of policies with the prompt and without, right with these chances; `rkv` has two settings."""
    settings = [setting(policy, keeps) for policy in chances if policy != "rkv" for keeps in (True, False)]
    if "rkv" in chances:
        settings += [setting("rkv", keeps, mix=mix) for mix in (0.1, 0.5) for keeps in (True, False)]
    plan = manifest(settings, problems=problems, samples=1, axes=AXES)
    rng = np.random.default_rng(1)
    made = []
    for cell in plan.expected:
        chance = chances.get(cell.setting.policy, 1.0)
        made += [(cell.run_key, trace(cell, problem, 0, rng.random() < chance)) for problem in cell.problems]
    return run_of(plan, made)


def test_each_setting_meets_the_policy_with_the_same_values() -> None:
    run = arena({"random": 0.5, "rkv": 0.9, "window": 0.5})
    (table,) = against_policy(run, "random")
    assert table.benchmarks == ("CHAIN6", "CHAIN8")
    assert table.problems == 300
    assert all(row.setting.values["keep_prompt"] == row.partner.values["keep_prompt"] for row in table.rows)
    assert {row.partner.policy for row in table.rows} == {"random"}
    assert [row.name for row in table.rows] == ["window", "window", *["rkv(mix=0.1)"] * 2, *["rkv(mix=0.5)"] * 2]
    assert [row.group for row in table.rows] == [(("keep_prompt", keeps),) for keeps in (True, False)] * 3
    assert [row.contrast.excludes_zero for row in table.rows] == [False, False, True, True, True, True]
    assert against_title([table]) == "Of 6 settings 4 are proven above random and 0 below it"
    means = {cell.setting: cell.cell.estimate.value for cell in run.cells if cell.benchmark == "CHAIN6"}
    assert 0.2 < means[setting("rkv", True, mix=0.1)] - means[setting("random", True)] < 0.6


def test_limits_hold_for_all_settings_at_once() -> None:
    """The more settings, the wider: here those of two and of six."""
    few = against_policy(arena({"random": 0.5, "window": 0.5}), "random")[0]
    many = against_policy(arena({"random": 0.5, "window": 0.5, "rkv": 0.5}), "random")[0]

    def width(table: object) -> float:
        first = table.rows[0].contrast  # type: ignore[attr-defined]
        return float(first.high - first.low)

    assert width(many) > 1.1 * width(few)
    assert 0.05 < few.detectable < 0.3


def test_the_closest_setting_is_the_partner() -> None:
    plain = setting("random", True)
    planned = setting("random", True, plan_prefix=32)
    other = setting("random", False)
    settings = [plain, planned, other]
    assert partner_of(setting("rkv", True, mix=0.1), "random", settings) == plain
    assert partner_of(setting("rkv", True, plan_prefix=32), "random", settings) == planned
    assert partner_of(planned, "random", settings) == plain
    assert partner_of(plain, "random", settings) is None
    assert partner_of(Setting.from_parameters("full"), "random", settings) is None


def test_a_policy_without_partners_is_said() -> None:
    run = arena({"random": 0.5, "window": 0.5})
    with pytest.raises(
        KvatlasError, match=r"No setting has one of the policy 'h2o' .*; there are: random, window, full"
    ):
        against_policy(run, "h2o")
    # The full cache has no parameters, so it is the partner of all.
    (table,) = against_policy(run, "full")
    assert len(table.rows) == 4


def test_one_name_of_two_files_is_refused_and_their_settings_stay_apart() -> None:
    """Each setting has the partner that was meant, and the data say the file."""
    run = arena({"a.py:Sinks": 0.5, "b.py:Sinks": 0.9, "window": 0.5})
    with pytest.raises(KvatlasError, match=r"Several policies are named 'Sinks'; expected one of: a.py:Sinks, b.py"):
        against_policy(run, "Sinks")
    (table,) = against_policy(run, "b.py:Sinks")
    assert {row.partner.policy for row in table.rows} == {"b.py:Sinks"}
    rows = against_csv([table]).splitlines()[1:]
    assert sum("a.py:Sinks(" in row for row in rows) == 2
    assert all("b.py:Sinks(" in row for row in rows)


def test_the_rows_of_one_policy_keep_their_limits() -> None:
    tables = against_policy(arena({"random": 0.5, "rkv": 0.9, "window": 0.5}), "random")
    (table,) = rows_of_policy(tables, "window")
    assert table.rows == tables[0].rows[:2]
    with pytest.raises(KvatlasError, match="No setting of the policy 'h2o' is compared; there are: window, rkv"):
        rows_of_policy(tables, "h2o")


def test_the_figure_has_a_filled_mark_for_each_proven_setting() -> None:
    (table,) = against_policy(arena({"random": 0.5, "rkv": 0.95, "window": 0.5}), "random")
    figure = against_figure([table])
    (panel,) = figure.axes
    marks = [line for line in panel.lines if line.get_marker() not in ("None", None, "")]
    filled = [line for line in marks if line.get_markerfacecolor() == line.get_color()]
    assert len(marks) == 6
    assert len(filled) == sum(row.contrast.excludes_zero for row in table.rows) == 4
    # Rows are in the order of their mean differences, the highest on top.
    names = [text for text in panel.texts if text.get_text() in {row.name for row in table.rows}]
    lowest = max(names, key=lambda text: text.xy[1])
    assert lowest.get_text() == "window"
    assert panel.get_ylim()[0] > panel.get_ylim()[1]
    rows = against_csv([table]).splitlines()
    assert rows[0] == "model,setting,against,difference,low,high,proven"
    assert len(rows) == 7
    assert sum(row.endswith(",1") for row in rows) == 4
