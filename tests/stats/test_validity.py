"""Validity of traces: nothing is recommended where nothing was compressed, answered or different."""

from dataclasses import replace
from typing import Any

import pytest

from kvatlas.core import Grade, Status, grouped
from kvatlas.core.maps import Vacuous
from kvatlas.report.result import Result
from kvatlas.results.records import answer_digest
from kvatlas.stats.maps import maps_of_run, mean_maps
from kvatlas.stats.run_data import RunData
from kvatlas.stats.validity import Kind, Validity, findings, validity_of
from tests.stats.synthetic import grid, manifest, run_of, traces

NO_ANSWER = Grade(False, 0.0, None, Status.NO_ANSWER)


def cells(change: Any = lambda trace: trace, **plan: Any) -> Any:
    made = manifest(grid("dynts", "random", ratio_over="older"), **plan)
    return run_of(made, [(key, change(trace)) for key, trace in traces(made)])


def validities(run: RunData) -> list[Validity]:
    """Return the validity of each benchmark, which has cells of one model."""
    by_benchmark = grouped(run.cells, lambda cell: cell.benchmark)
    return [checked for group in by_benchmark.values() if (checked := validity_of(group)) is not None]


def texts(trace: Any, per: str) -> Any:
    """With a digest that differs by setting, by policy, or not at all."""
    told = {"setting": trace.setting.id, "policy": trace.setting.policy, "": ""}[per]
    return replace(trace, token_digest=answer_digest(f"{told} {trace.problem} {trace.sample}".encode(), b""))


def uncompressed(trace: Any) -> Any:
    return replace(trace, usage=replace(trace.usage, compressions=0))


@pytest.mark.parametrize(
    ("status", "thinking_tokens", "is_told"),
    [(Status.NO_ANSWER, 100, True), (Status.NO_ANSWER, 80, False), (Status.TRUNCATED, 100, False)],
)
def test_an_end_of_thinking_that_no_trace_has_is_told(status: Status, thinking_tokens: int, is_told: bool) -> None:
    def change(trace: Any) -> Any:
        usage = replace(trace.usage, thinking_tokens=thinking_tokens)
        return replace(trace, usage=usage, grade=Grade(False, 0.0, None, status))

    unanswered = [one.text for one in findings(cells(change).cells) if one.kind is Kind.UNANSWERED]
    assert unanswered
    assert all(("does think_close name" in text) == is_told for text in unanswered)


def test_a_sound_run_has_nothing_to_say() -> None:
    result = cells(lambda trace: texts(trace, "setting"))
    (first, second) = validities(result)
    assert first.traces == second.traces == 19 * 24
    assert (first.bounded, first.compressed, first.settings) == (18 * 24, 18 * 24, 18)
    assert first.truncated + sum(c.cell.estimate.value * 24 for c in result.cells[:19]) == pytest.approx(19 * 24)
    assert (first.identical, first.vacuous, first.no_answer) == ((), None, 0)
    assert {finding.kind for finding in findings(result.cells)} <= {Kind.UNANSWERED, Kind.NO_CHOICE}


@pytest.mark.parametrize(
    ("change", "reason", "kind", "clause"),
    [
        (
            uncompressed,
            Vacuous.UNCOMPRESSED, Kind.UNCOMPRESSED, "none of the 864 traces under a KV budget was compressed",
        ),
        (
            lambda trace: replace(trace, grade=NO_ANSWER),
            Vacuous.UNANSWERED, Kind.UNANSWERED, "none of the 864 traces has an answer",
        ),
    ],
)  # fmt: skip
def test_nothing_is_recommended_from_a_vacuous_map(change: Any, reason: Vacuous, kind: Kind, clause: str) -> None:
    result = cells(change)
    assert {checked.vacuous for checked in validities(result)} == {reason}
    (choice,) = Result((result,)).choices
    assert (choice.by_memory, choice.by_time, choice.vacuous) == (None, None, clause)
    assert choice.candidates == 18
    assert [finding.benchmark for finding in findings(result.cells) if finding.kind is kind] == ["CHAIN6", "CHAIN8"]
    for item in (*maps_of_run(result), *mean_maps(maps_of_run(result))):
        assert item.validity.vacuous is reason


def test_one_benchmark_that_shows_something_is_enough_to_choose() -> None:
    result = cells(lambda trace: uncompressed(trace) if trace.benchmark == "CHAIN6" else texts(trace, "setting"))
    assert [checked.vacuous for checked in validities(result)] == [Vacuous.UNCOMPRESSED, None]
    (choice,) = Result((result,)).choices
    assert choice.vacuous is None
    assert len(choice.losses) == choice.candidates
    (finding,) = [finding for finding in findings(result.cells) if finding.kind is Kind.UNCOMPRESSED]
    assert finding.text == ("CHAIN6: 0 of 432 traces under a KV budget were compressed; all equal the full cache's.")


def test_settings_with_identical_texts_are_grouped() -> None:
    result = cells(lambda trace: texts(trace, "policy"))
    checked = validity_of(result.cells)
    assert sorted(map(len, checked.identical)) == [9, 9]
    assert not checked.same
    (mean,) = (mean_map for mean_map in mean_maps(maps_of_run(result)) if mean_map.policy == "dynts")
    assert mean.validity.same


def test_equal_texts_of_compressed_traces_can_show_a_loss_and_are_a_finding() -> None:
    result = cells(lambda trace: texts(trace, ""))
    assert {checked.vacuous for checked in validities(result)} == {None}
    (choice,) = Result((result,)).choices
    assert (choice.vacuous, len(choice.losses)) == (None, 18)
    assert [finding.text for finding in findings(result.cells) if finding.kind is Kind.IDENTICAL] == [
        f"{name}: all 18 settings with a KV budget wrote identical texts, those of the full cache; harsher settings "
        "show where answers are lost."
        for name in ("CHAIN6", "CHAIN8")
    ]


def test_missing_traces_and_unknown_texts_are_never_identical() -> None:
    made = manifest(grid("dynts"))
    kept = [(key, texts(trace, "")) for key, trace in traces(made) if trace.problem != "p0"]
    checked = validity_of(run_of(made, kept).cells)
    assert checked.identical == ()
    assert validity_of(run_of(made).cells) is None


def test_cells_whose_prompts_leave_no_choice_are_a_finding() -> None:
    # 20 prompt tokens: of 96 - 32 older tokens a tenth is 6.
    result = cells(lambda trace: texts(trace, "setting"))
    (finding,) = [finding for finding in findings(result.cells) if finding.kind is Kind.NO_CHOICE]
    assert "local_window 32, ratio 0.1 on CHAIN6 (100 %)" in finding.text
    audits = {cell.coord(result.axes): cell.audit for cell in result.cells[:9]}
    assert (audits[8, 0.5].median, audits[8, 0.5].none) == (24, 0)
