"""The summary of autopsies whose outcomes are known."""

import pytest

from kvatlas.autopsy.autopsies import Autopsy, SavingToken, key_of
from kvatlas.autopsy.autopsy_command import autopsies_text, work_text
from kvatlas.autopsy.driver import LostCell
from kvatlas.autopsy.kinds_of_death import Death, LocatedDeath
from kvatlas.autopsy.lost_answers import LostAnswer
from kvatlas.autopsy.summary import FEWEST, luck_chance, summarise
from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.report.materials import RunMaterials

STREAMS = 16


def outcomes(right: int) -> tuple[bool, ...]:
    """So many right answers, and wrong ones."""
    return (True,) * right + (False,) * (STREAMS - right)


def autopsy(problem: int, tokens: int, cause: int = 12, random: int = 4) -> Autopsy:
    """An autopsy whose cause makes so many of the held-out answers right, and other sets so many."""
    found = Autopsy(("run", "setting", "CHAIN", str(problem), "0"), "loop", 40, reproduced=True, spans=10)
    if tokens:
        found.tokens = tuple(SavingToken(index, "7", 50, 20, 10, 100) for index in range(tokens))
        found.random = (False,) * 4
        arms = {"nothing": 2, "random": random, "kind": random, "cause": cause, "no_compression": 14}
        arms |= {"cause_until_death": 6, "no_compression_until_death": 8}
        found.held_out = {arm: outcomes(right) for arm, right in arms.items()}
    return found


AUTOPSIES = [autopsy(problem, 1 + problem % 3) for problem in range(30)] + [autopsy(30 + i, 0) for i in range(30)]


def test_differences_are_those_of_the_arms_with_intervals_over_problems() -> None:
    test = summarise(AUTOPSIES, 0.25)["held_out"]
    assert test["answers"] == 30
    assert test["right"]["cause"]["value"] == 75
    assert test["cause_over_random"]["value"] == 50
    assert test["cause_over_random"]["low"] > 25
    assert test["cause_over_random"]["p"] < 0.001
    assert test["random_over_nothing"]["value"] == 12.5
    assert test["cause_over_kind"]["value"] == 50
    assert test["no_compression_over_cause"]["value"] == 12.5
    assert test["cause_until_death_over_no_compression_until_death"]["value"] == -12.5
    # Eight streams are better and none is worse in each: p = 1/256, times 30 answers.
    assert test["proven_alone"] == 0
    # Half of the lost answers have no cause, and a quarter of all answers is lost.
    assert test["of_all_lost"]["value"] == 25
    assert test["room"]["value"] == 6.25
    assert test["room"]["low"] == pytest.approx(test["of_all_lost"]["low"] / 4, abs=1e-3)


def test_causes_that_save_no_more_than_random_sets_show_nothing() -> None:
    test = summarise([autopsy(problem, 1, cause=4) for problem in range(30)])["held_out"]
    assert test["cause_over_random"]["value"] == 0
    assert test["cause_over_random"]["low"] < 0 < test["cause_over_random"]["high"]
    assert test["room"] is None


def test_answers_with_a_clear_cause_are_proven_one_by_one() -> None:
    clear = [autopsy(problem, 1, cause=16, random=1) for problem in range(5)]
    others = [autopsy(problem, 1, cause=5, random=4) for problem in range(5, 30)]
    assert summarise(clear + others)["held_out"]["proven_alone"] == 5


def test_a_cause_is_judged_against_like_tokens_under_the_same_streams() -> None:
    assert luck_chance(autopsy(0, 1, cause=16, random=1)) == pytest.approx(2**-15)
    assert luck_chance(autopsy(0, 1, cause=9, random=9)) == 1


def lost_cell(answers: int, seconds: float | None) -> LostCell:
    """A cell with so many lost answers, each of which took so many seconds."""
    setting = Setting.from_parameters("dynts", ratio=0.1)
    lost = []
    for problem in range(answers):
        usage = Usage(9, 9, 9, 9, 9, 1, seconds)
        grade = Grade(False, 0.0, "1", Status.OK)
        trace = Trace("embedded:tiny-llama", "CHAIN8-12", str(problem), 0, setting, (), "", grade, usage)
        key = ("run", setting.id, trace.benchmark, trace.problem, 0)
        lost.append(LostAnswer(key, trace, LocatedDeath(Death.LOOP)))
    return LostCell(None, RunMaterials(), "embedded:tiny-llama", "CHAIN8-12", setting, lost, 30)


def test_the_work_is_told_before_it_begins() -> None:
    cell = lost_cell(24, 8 / 17)
    done = set(map(key_of, cell.lost[:3]))
    expected = "tiny-llama | CHAIN8-12: 24 lost answers, 17 to examine, 3 are done"
    assert work_text(cell, done, 20) == expected
    assert work_text(lost_cell(1, None), (), 20) == "tiny-llama | CHAIN8-12: 1 lost answer, 1 to examine"


def test_large_causes_are_no_part_of_the_main_figures() -> None:
    assert summarise([autopsy(0, 9), autopsy(1, 8)])["held_out"]["answers"] == 1
    assert summarise([autopsy(0, 9)])["held_out"] is None


def lines_of(examined: list[Autopsy]) -> list[str]:
    """The lines of a cell with a few more lost answers."""
    paragraphs = [f"{item.problem}: {item.death}." for item in examined]
    cell = {"model": "tiny", "benchmark": "CHAIN", "setting": "random", "all_lost": 17, "answers": paragraphs}
    return autopsies_text([cell | {"summary": summarise(examined)}]).splitlines()


def test_shares_are_told_of_ten_answers_and_not_of_fewer() -> None:
    few = lines_of([autopsy(problem, 1) for problem in range(FEWEST - 1)])
    assert [line for line in few if line.startswith("0: ")] == ["0: loop."]
    assert not any("%" in line for line in few)
    assert few[-1] == "9 of 17 lost answers; shares come from 10 answers on."
    enough = lines_of([autopsy(problem, 1) for problem in range(FEWEST)])
    # The search may examine the first ones alone.
    assert [line.split()[-1] for line in enough if line.startswith("lost answers")] == ["17"]
    assert any(line.startswith("examined") and "10, of which 10 were" in line for line in enough)
    assert any("the causes put back" in line and "%" in line for line in enough)
