"""Maps of runs made of numbers: what counts, what is missing, which axes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvatlas.core import Grade, KvatlasError, Map, Note, NoteKind, Setting, Status
from kvatlas.results import Store
from kvatlas.stats.maps import LOOKED_EARLY, curves_of_run, maps_of_run, mean_map, mean_maps
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import TraceTable, check_distinct, missing
from tests.counting import calls
from tests.stats.synthetic import AXES, RATIOS, WINDOWS, columns_of, grid, manifest, run_of, setting, trace, traces
from tests.stored import change_store


def test_one_map_for_each_model_benchmark_and_policy():
    plan = manifest(grid("dynts", "random"), models=("one", "two"))
    maps = maps_of_run(run_of(plan, traces(plan)))
    assert [(m.model, m.benchmark, m.policy) for m in maps] == [
        (model, benchmark, policy)
        for model in ("one", "two")
        for benchmark in ("CHAIN6", "CHAIN8")
        for policy in ("dynts", "random")
    ]
    first = maps[0]
    assert first.axes == AXES
    assert set(first.cells) == {(w, r) for w in WINDOWS for r in RATIOS}
    assert list(first.baselines) == ["full"]
    assert first.notes == ()
    cell = first.cells[8, 0.1]
    assert cell.setting == setting("dynts", 8, 0.1)
    assert (cell.estimate.problems, cell.estimate.samples) == (12, 2)
    assert [cell.number(key) for key in ("mean_kv_tokens", "peak_kv_tokens", "output_tokens")] == [60.5, 96, 100]


def test_a_grade_that_is_not_ok_counts_as_wrong():
    plan = manifest(grid("dynts"))
    lenient = Grade(True, 1.0, "7", Status.GRADER_TIMEOUT)
    (first, _) = maps_of_run(run_of(plan, [(key, replace(trace, grade=lenient)) for key, trace in traces(plan)]))
    assert first.cells[8, 0.1].estimate.value == 0
    (first, _) = maps_of_run(run_of(plan, traces(plan, lambda _: 0.0), metric="progress"))
    assert (first.cells[8, 0.1].estimate.value, first.cells[8, 0.1].number("truncated")) == (0.5, 24)


def test_foreign_traces_do_not_count():
    plan = manifest(grid("dynts"))
    own = list(traces(plan, lambda _: 0.0))
    some = plan.expected[0]
    foreign = [
        ("another-key", trace(some, "p0", 0, True)),
        (some.run_key, trace(some, "p99", 0, True)),
        (some.run_key, trace(some, "p0", 2, True)),
        (some.run_key, trace(replace(some, setting=Setting.from_parameters("dynts", ratio=0.9)), "p0", 0, True)),
        (some.run_key, trace(some, "p0", 0, True)),
    ]
    # The last one comes twice: what was written later counts, as in a store.
    assert maps_of_run(run_of(plan, foreign + own)) == maps_of_run(run_of(plan, own))
    with pytest.raises(KvatlasError, match="1 of 480 traces are missing"):
        maps_of_run(run_of(plan, own[1:] + foreign[:-1]))


def test_a_table_grows_by_parts_and_counts_what_is_missing():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=4, samples=3)
    every = list(traces(plan))
    table, whole = TraceTable(plan), TraceTable(plan, [columns_of(every)])
    assert missing(table.cells()) == (120, 120, 10)
    for begin in range(0, len(every), 50):
        table.add(columns_of(every[begin : begin + 50]))
        cells = table.cells()
        assert missing(cells)[0] == max(0, 120 - begin - 50)
        assert cells[0].cell == whole.cells()[0].cell
    assert (table.records == whole.records).all()
    assert [cell.cell for cell in cells] == [cell.cell for cell in whole.cells()]
    assert table.records.nbytes <= 100 * len(every)
    with pytest.raises(KvatlasError, match="Two of the runs hold sample 0 of p0 for tiny under dynts"):
        check_distinct([*cells, *whole.cells()])


def _maps_in(folder: Path) -> list[Map]:
    return maps_of_run(RunData.open(folder))


def test_a_map_of_many_traces_reads_no_texts_and_does_little_for_each(tmp_path: Path) -> None:
    counts = {}
    for samples in (1, 50):
        folder = tmp_path / str(samples)
        plan = manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=20, samples=samples)
        every = list(traces(plan))
        with Store.create(folder) as store:
            store.put_manifest(plan)
            store.add_all(every)
        # That its texts are not what was written is told where they are read.
        change_store(folder, "UPDATE traces SET text = x'00'")
        expected = maps_of_run(run_of(plan, every))
        maps, counts[len(every)] = calls(partial(_maps_in, folder))
        assert maps == expected

    # Without the work for each setting.
    assert list(counts) == [200, 10_000]
    assert counts[10_000] - counts[200] < 5_000
    with Store.open(folder) as store, pytest.raises(KvatlasError, match="not what was written"):
        next(store.traces())


def test_missing_traces_are_refused_with_numbers_unless_partial():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",))
    kept = [
        (key, item)
        for key, item in traces(plan)
        if item.setting != setting("dynts", 8, 0.1) and not (item.setting.policy == "full" and item.problem == "p3")
    ]
    with pytest.raises(KvatlasError, match=r"26 of 240 traces are missing, in 2 of 10 cells; .*--partial"):
        maps_of_run(run_of(plan, kept))
    (partial,) = maps_of_run(run_of(plan, kept, partial=True))
    assert partial.notes == (
        Note(NoteKind.PARTIAL, "PARTIAL: 26 of 240 traces of a map are missing, in 2 cells"),
        LOOKED_EARLY,
    )
    # A run with declared looks says itself what its limits allow for.
    with_looks = replace(plan, spec={"samples": 2, "looks": [1, 2]})
    (partial,) = maps_of_run(run_of(with_looks, kept, partial=True))
    assert LOOKED_EARLY not in partial.notes
    assert (8, 0.1) not in partial.cells
    assert len(partial.cells) == 8
    assert partial.axes == AXES
    assert partial.baselines["full"].estimate.problems == 11


def test_a_map_without_any_trace_is_left_out_and_an_empty_run_refused():
    plan = manifest(grid("dynts"))
    (only,) = maps_of_run(run_of(plan, (t for t in traces(plan) if t[1].benchmark == "CHAIN8"), partial=True))
    assert only.benchmark == "CHAIN8"
    with pytest.raises(KvatlasError, match="none of its 480 traces"):
        maps_of_run(run_of(plan, [], partial=True))


def test_each_value_of_a_third_axis_has_a_map_of_its_own():
    budgets = (64, 96)
    settings = [
        Setting.from_parameters("dynts", kv_budget=b, local_window=w, ratio=r)
        for b in budgets
        for w in WINDOWS
        for r in RATIOS
    ]
    plan = manifest(settings, axes=(*AXES, ("kv_budget", budgets)))
    every = maps_of_run(run_of(plan, traces(plan)))
    assert [(m.benchmark, m.policy) for m in every] == [
        (benchmark, f"dynts(kv_budget={budget})") for benchmark in ("CHAIN6", "CHAIN8") for budget in budgets
    ]
    assert all(m.axes == AXES for m in every)
    maps = maps_of_run(run_of(plan, traces(plan), fix={"kv_budget": 96}))
    assert [[*map(str, m.notes)] for m in maps] == [["kv_budget=96"]] * 2
    assert maps[0].cells[8, 0.1].setting.values["kv_budget"] == 96
    assert maps[0].policy == "dynts"
    with pytest.raises(KvatlasError, match="window cannot be fixed to 8; the run has: local_window: 8, 16, 32; ratio"):
        maps_of_run(run_of(plan, [], fix={"window": 8}))
    with pytest.raises(KvatlasError, match=r"cannot be fixed to 80; the run has: .*kv_budget: 64, 96"):
        maps_of_run(run_of(plan, [], fix={"kv_budget": 80}))


def test_fewer_than_two_axes_are_refused():
    plan = manifest(grid("dynts"), axes=(("ratio", (0.1, 0.3)), ("local_window", (8,))))
    with pytest.raises(KvatlasError, match="two axes with at least two values each; this run varies ratio"):
        maps_of_run(run_of(plan, []))


def test_policies_without_both_axes_have_no_map():
    beside = [Setting.from_parameters("window", kv_budget=96, local_window=w) for w in WINDOWS]
    plan = manifest([*grid("dynts"), *beside])
    assert {m.policy for m in maps_of_run(run_of(plan, traces(plan)))} == {"dynts"}
    plan = manifest(beside)
    with pytest.raises(KvatlasError, match="No policy of this run has two or more values of both"):
        maps_of_run(run_of(plan, traces(plan)))


def test_variants_of_a_policy_are_told_apart():
    names = ["dynts(ratio_over=older)", "dynts(ratio_over=thinking)"]
    settings = [one for over in ("older", "thinking") for one in grid("dynts", ratio_over=over)]
    plan = manifest(settings, benchmarks=("CHAIN6",))
    assert [m.policy for m in maps_of_run(run_of(plan, traces(plan)))] == names


def test_mean_map_averages_cells_and_baselines():
    plan = manifest(grid("dynts"))
    first, second = maps_of_run(run_of(plan, traces(plan)))
    mean = mean_map([first, second])
    assert (mean.model, mean.benchmark, mean.policy) == ("tiny", "mean of 2", "dynts")
    for coord, cell in mean.cells.items():
        pair = first.cells[coord], second.cells[coord]
        assert cell.estimate.value == pytest.approx(sum(c.estimate.value for c in pair) / 2)
        assert cell.estimate.problems == 24
        assert cell.number("truncated") == sum(c.number("truncated") for c in pair)
    assert mean.baselines["full"].number("mean_kv_tokens") == 60.5
    assert mean_maps([first, second, mean]) == mean_maps([mean]) == [mean]
    assert mean_maps([first]) == []


def test_mean_map_refuses_what_does_not_belong_together():
    plan = manifest(grid("dynts", "random"), models=("one", "two"))
    maps = {(m.model, m.benchmark, m.policy): m for m in maps_of_run(run_of(plan, traces(plan)))}
    first = maps["one", "CHAIN6", "dynts"]
    for other, said in (
        (maps["two", "CHAIN8", "dynts"], "equal model"),
        (replace(maps["one", "CHAIN8", "dynts"], axes=(("local_window", (8,)), AXES[1])), "equal axes"),
        (first, "every benchmark once"),
    ):
        with pytest.raises(KvatlasError, match=said):
            mean_map([first, other])


def test_mean_of_partial_maps_says_so():
    plan = manifest(grid("dynts"))
    kept = [
        (key, trace)
        for key, trace in traces(plan)
        if (trace.benchmark, trace.setting) != ("CHAIN8", setting("dynts", 8, 0.1))
    ]
    mean = mean_map(maps_of_run(run_of(plan, kept, partial=True)))
    assert len(mean.cells) == 8
    assert [*map(str, mean.notes)] == [
        "PARTIAL: some of the averaged maps lack traces",
        LOOKED_EARLY.text,
        "cells that not every benchmark has are left out",
    ]


def test_traces_of_several_versions_are_told_on_the_map():
    plan = manifest(grid("dynts"))
    old, new = (json.dumps({"kvatlas": "0.1.0", "python": "3.11.1", "torch": torch}) for torch in ("2.7.0", "2.8.0"))

    def notes(*made_with: str) -> list[str]:
        made = [(key, replace(item, made_with=made_with[n % len(made_with)])) for n, (key, item) in enumerate(kept)]
        (only,) = maps_of_run(run_of(plan, made, partial=True))
        assert all(note.is_warning for note in only.notes)
        return [str(note) for note in only.notes if note.kind is NoteKind.MIXED]

    kept = [trace for trace in traces(plan) if trace[1].benchmark == "CHAIN8"]
    assert notes(old) == notes("") == []
    # Python's version decides nothing.
    assert notes(old, old.replace("3.11.1", "3.12.0")) == []
    half = len(kept) // 2
    assert notes(old, new) == [f"MIXED: {half} traces by torch 2.7.0; {half} traces by torch 2.8.0"]
    # Traces of older stores, without versions.
    (told,) = notes("", new)
    assert f"{half} traces by kvatlas unknown, torch unknown" in told


def test_settings_on_no_map_are_counted_and_shown_with_an_axis_held():
    alone = [setting("window", 64, ratio) for ratio in (0.1, 0.3)]
    without_ratio = [Setting.from_parameters("h2o", kv_budget=96, local_window=8, every=32)]
    axes = (("local_window", (8, 16, 32, 64)), ("ratio", (0.1, 0.3, 0.5)))
    plan = manifest([*grid("dynts"), *alone, *without_ratio], benchmarks=("CHAIN6",), axes=axes)
    run = run_of(plan, list(traces(plan)))
    (only,) = maps_of_run(run)
    text = (
        "3 settings of window, h2o on no map, with fewer than two values of local_window or ratio: "
        "--fix local_window=64 shows such settings"
    )
    assert only.notes == (Note(NoteKind.LEFT_OUT, text),)
    (held,) = curves_of_run(replace(run, fix={"local_window": "64"}))
    assert set(held.cells) == {("window", 0.1), ("window", 0.3)}
    (held,) = curves_of_run(replace(run, fix={"local_window": "8"}))
    # It has no ratio, so that it is the same at each.
    assert list(held.baselines) == ["h2o", "full"]


def test_a_value_that_only_a_setting_fixes_can_be_held():
    plan = manifest([*grid("dynts"), setting("rkv", 8, 0.9), setting("rkv", 16, 0.9)], benchmarks=("CHAIN6",))
    run = run_of(plan, list(traces(plan)))
    (only,) = maps_of_run(run)
    assert "--fix ratio=0.9" in only.notes[0].text
    (held,) = curves_of_run(replace(run, fix={"ratio": "0.9"}))
    assert set(held.cells) == {("rkv", 8), ("rkv", 16)}
    with pytest.raises(KvatlasError, match=r"ratio cannot be fixed to 0\.8"):
        maps_of_run(replace(run, fix={"ratio": "0.8"}))


@pytest.mark.parametrize(
    ("policy", "axis", "values"),
    [("snapkv", "plan_prefix", (0, 2, 4)), ("snapkv", "scope", ("head", "layer", "global"))],
)
def test_a_value_that_settings_do_not_name_is_on_its_axis(policy, axis, values):
    named = {values[0]: {}, **{value: {axis: value} for value in values[1:]}}
    settings = [setting(policy, 8, ratio, **others) for others in named.values() for ratio in (0.1, 0.3)]
    plan = manifest(settings, benchmarks=("CHAIN6",), axes=(("ratio", (0.1, 0.3)), (axis, values)))
    run = run_of(plan, list(traces(plan)))
    (whole,) = maps_of_run(run)
    assert {column for _, column in whole.cells} == set(values)
    assert not whole.notes
    for value in values:
        (held,) = curves_of_run(replace(run, fix={axis: value}))
        assert {cell.setting.values.get(axis, values[0]) for cell in held.cells.values()} == {value}


def test_bits_of_keys_and_values_are_axes():
    """Equal ones are stored as `kv_bits`."""
    bits = [{}, {"key_bits": 16, "value_bits": 4}, {"key_bits": 4, "value_bits": 16}, {"kv_bits": 4}]
    settings = [Setting.from_parameters("snapkv", kv_budget=96, local_window=32, **of_bits) for of_bits in bits]
    axes = (("key_bits", (4, 16)), ("value_bits", (4, 16)))
    plan = manifest(settings, benchmarks=("CHAIN6",), axes=axes)
    run = run_of(plan, list(traces(plan)))
    (whole,) = maps_of_run(run)
    assert whole.axes == axes
    assert whole.policy == "snapkv"
    assert len(whole.cells) == 4
    assert whole.cells[4, 4].setting.values["kv_bits"] == 4
    assert not whole.notes
    (held,) = curves_of_run(replace(run, fix={"value_bits": 4}))
    assert list(held.cells) == [("snapkv", 4), ("snapkv", 16)]


def test_settings_of_one_policy_that_differ_beside_the_axis_are_lines_of_their_own():
    settings = [setting("rkv", window, ratio) for window in (8, 16) for ratio in (0.1, 0.3)]
    plan = manifest(settings, benchmarks=("CHAIN6",), axes=(("ratio", (0.1, 0.3)),))
    (curve,) = curves_of_run(run_of(plan, list(traces(plan))))
    lines = ("rkv(local_window=8)", "rkv(local_window=16)")
    assert curve.axes == (("policy", lines), ("ratio", (0.1, 0.3)))
    for (line, ratio), cell in curve.cells.items():
        assert f"local_window={cell.setting.values['local_window']})" in line
        assert cell.setting.values["ratio"] == ratio
    assert len(curve.cells) == 4
