"""The verdict of `kvatlas gate` on files of answers: what it says, by which claim, and that numpy says the same."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

import kvatlas
from kvatlas.core import Claim
from kvatlas.gates.gate import GateResult
from kvatlas.gates.judgement import Judgement, Verdict, judge_pairs
from tests.command_line import Call
from tests.gates.answer_files import Floats, numpy_verdict, write_answers


def draw(share: float, problems: int, samples: int, lost: float, seed: int) -> tuple[Floats, Floats]:
    """Scores of both sides; a share of right answers becomes wrong."""
    generator = np.random.default_rng(seed)
    before = (generator.random((problems, samples)) < share).astype(float)
    after = before * (generator.random((problems, samples)) >= lost)
    return before, after


def judged(folder: Path, before: Floats, after: Floats, points: float, **options: str) -> GateResult:
    first = write_answers(folder / "before.csv", {"math": before})
    second = write_answers(folder / "after.csv", {"math": after}, note="after")
    return kvatlas.gate(first, second, lose_at_most=points, **options)


@pytest.mark.parametrize("claim", ["these_problems", "problems_like_these"])
@pytest.mark.parametrize(("lost", "seed"), [(0.0, 1), (0.02, 2), (0.05, 3), (0.3, 4), (0.12, 5)])
def test_verdicts_and_limits_are_those_of_numpy(tmp_path: Path, claim: str, lost: float, seed: int) -> None:
    before, after = draw(0.8, 70, 4, lost, seed)
    result = judged(tmp_path, before, after, 6.0, claim=claim).to_dict()
    unit = "pair" if claim == "these_problems" else "problem"
    verdict, low, high = numpy_verdict(before, after, 0.06, unit)
    assert result["verdict"] == verdict
    assert (result["loses_low"], result["loses_high"]) == pytest.approx((100 * low, 100 * high), abs=0.12)
    assert result["units"] == {"pair": 280, "problem": 70}[unit]
    assert (result["lost"], result["gained"]) == (int((before > after).sum()), 0)


def test_the_exit_code_is_the_verdict(kvatlas: Call, tmp_path: Path) -> None:
    before, same = draw(0.8, 200, 1, 0.0, 1)
    first = write_answers(tmp_path / "before.csv", {"math": before})
    kept = write_answers(tmp_path / "kept.csv", {"math": same}, note="after")
    worse = write_answers(tmp_path / "worse.csv", {"math": same * 0})
    code, out, err = kvatlas("gate", first, kept, "--lose-at-most", 2)
    assert (code, err) == (0, "")
    assert out.startswith("# Keeps: all 200 answers are equal by their scores; at most 1.5 points (margin 2 points)\n")
    assert kvatlas("gate", first, kept, "--lose-at-most", 1)[0] == 3
    code, out, _ = kvatlas("gate", first, worse, "--lose-at-most", 2, "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["verdict"]) == (1, 1, "loses")
    assert document["loses"] == pytest.approx(100 * before.mean(), abs=1e-3)


def test_an_open_verdict_says_what_would_tell(tmp_path: Path) -> None:
    before, after = draw(0.8, 60, 2, 0.02, 7)
    result = judged(tmp_path, before, after, 3.0, claim="these_problems")
    needed = result.to_dict()["needed"]
    assert result.verdict == "cannot tell"
    assert needed["samples"] > 2
    assert needed["problems"] > 60
    assert f"about {needed['samples']} samples of each of these problems (now 2)" in str(result)
    # So many samples tell in about 80 % of comparisons with this loss.
    told = 0
    loss = float((before - after).mean())
    for seed in range(20):
        many = draw(0.8, 60, needed["samples"], loss / 0.8, 100 + seed)
        told += judged(tmp_path, *many, 3.0, claim="these_problems").verdict == "keeps"
    assert 12 <= told <= 20


@pytest.mark.parametrize("problems", [1, 3, 4, 6, 40])
def test_few_problems_without_a_loss_say_how_many_would_tell(tmp_path: Path, problems: int) -> None:
    """99 without a loss prove 3 points; nothing is near to the margin."""
    scores = np.ones((problems, 1))
    result = judged(tmp_path, scores, scores.copy(), 3.0)
    assert result.judgement.needed == 99
    assert f"about 99 problems (now {problems}) would tell" in str(result)


def test_few_problems_that_lose_all_say_how_many_would_tell(tmp_path: Path) -> None:
    scores = np.ones((2, 1))
    needed = judged(tmp_path, scores, 0 * scores, 3.0).judgement.needed
    assert needed is not None
    verdicts = [judged(tmp_path, np.ones((n, 1)), np.zeros((n, 1)), 3.0).verdict for n in (needed - 1, needed)]
    assert verdicts == ["cannot tell", "loses"]


def test_a_loss_beside_the_margin_takes_thousands_of_problems(tmp_path: Path) -> None:
    scores = np.ones((40, 1))
    text = str(judged(tmp_path, scores, (np.arange(40) > 0).astype(float)[:, None], 3.0))
    assert "If this is its loss, only more than 4,000 problems would tell." in text
    assert "1 answer was lost and 0 gained" in text


def test_missing_answers_are_completed_first(tmp_path: Path) -> None:
    scores = np.ones((200, 1))
    lacking = scores.copy()
    lacking[:10] = np.nan
    text = str(judged(tmp_path, scores, lacking, 6.0))
    assert "First complete the 10 missing answers, which may all be lost; if they are, about " in text


def test_gains_are_said_to_be_gains(tmp_path: Path) -> None:
    before, after = draw(0.5, 200, 1, 0.0, 3)
    text = str(judged(tmp_path, before, np.maximum(after, 0.8), 3.0))
    least = re.search(r"# Keeps: gains at least (\d+\.\d) points", text)
    assert least is not None
    assert re.search(rf"it gains \d+\.\d points, at least {least[1]} and at most \d+\.\d \(95 %", text)
    unchanged = str(judged(tmp_path, before, before.copy(), 3.0))
    assert "it loses 0.0 points, at most 1.5 lost or 1.5 gained (95 %, 200 problems)" in unchanged


def test_claims_follow_what_samples_allow(tmp_path: Path) -> None:
    before, after = draw(0.8, 120, 4, 0.01, 8)
    plain = judged(tmp_path, before, after, 6.0).to_dict()
    assert plain["claim"] == "problems_like_these"
    assert "temperature is unknown" in plain["limits"]["these_problems"]["refused"]
    declared = judged(tmp_path, before, after, 6.0, claim="these_problems").to_dict()
    assert declared["limits"]["these_problems"]["loses_high"] < declared["limits"]["problems_like_these"]["loses_high"]
    single = judged(tmp_path, before[:, :1], after[:, :1], 6.0).to_dict()["limits"]
    assert single["these_problems"]["loses_high"] == single["problems_like_these"]["loses_high"]


def test_copies_are_no_samples(tmp_path: Path) -> None:
    """Each problem has one text, whatever its sample."""
    sides = []
    for name, value in (("before", 1), ("after", 0)):
        path = tmp_path / f"{name}.jsonl"
        rows = [
            {"problem": problem, "sample": sample, "correct": value or problem % 9, "text": f"{name} {problem} " * 40}
            for problem in range(40)
            for sample in range(4)
        ]
        path.write_text("".join(f"{json.dumps({**row, 'correct': bool(row['correct'])})}\n" for row in rows))
        sides.append(path)
    assert "copies of one long text" in kvatlas.gate(*sides).to_dict()["limits"]["these_problems"]["refused"]
    with pytest.raises(kvatlas.KvatlasError, match=r"copies of one long text on 100.0 % of the problems"):
        kvatlas.gate(*sides, claim="these_problems")


def test_several_tasks_by_holm_and_in_the_mean(tmp_path: Path) -> None:
    """One task collapses; the mean of four alone would not show it."""
    before = {name: draw(0.9, 100, 1, 0.0, seed)[0] for seed, name in enumerate("abcd")}
    after = {**before, "d": before["d"] * (np.arange(100)[:, None] >= 30)}
    first = write_answers(tmp_path / "before.csv", before)
    second = write_answers(tmp_path / "after.csv", after)
    result = kvatlas.gate(first, second, lose_at_most=9)
    document = result.to_dict()
    assert [task["verdict"] for task in document["tasks"]] == ["keeps", "keeps", "keeps", "loses"]
    assert document["loses"] < 9
    assert result.verdict == "loses"
    assert "More than the margin is lost on d (Holm over 4 tasks)" in str(result)
    chosen = kvatlas.gate(first, second, lose_at_most=9, tasks=["a", "b"])
    assert (chosen.verdict, len(chosen.judgement.tasks)) == ("keeps", 2)


def test_missing_pairs_count_as_the_worst_case(tmp_path: Path) -> None:
    before, after = draw(0.8, 300, 1, 0.0, 9)
    whole = judged(tmp_path, before, after, 3.0)
    lacking = after.copy()
    lacking[:9] = np.nan
    result = judged(tmp_path, before, lacking, 3.0)
    assert (whole.verdict, result.verdict) == ("keeps", "cannot tell")
    assert result.to_dict()["missing"] == 3.0
    filled = after.copy()
    filled[:9] = 0
    at_worst = judged(tmp_path, np.where(np.arange(300)[:, None] < 9, 1, before), filled, 3.0)
    assert result.to_dict()["loses_high"] == at_worst.to_dict()["loses_high"]


def test_nothing_is_proven_where_nothing_could_be_lost(tmp_path: Path) -> None:
    before = np.zeros((400, 1))
    result = judged(tmp_path, before, before.copy(), 3.0)
    assert result.verdict == "cannot tell"
    assert "could not have been seen" in result.to_dict()["reasons"][0]


def as_one_thing(folder: Path, before: Floats, after: Floats, margin: float, claim: Claim | None = None) -> Judgement:
    result = judged(folder, before, after, 100 * margin)
    return judge_pairs(result.pairs, margin, claim, both_ways=True)


@pytest.mark.parametrize(
    ("before", "after", "problems", "decided"),
    [
        (0.6, 0.6, 4000, Verdict.KEEPS),
        (0.6, 0.4, 400, Verdict.LOSES),
        (0.4, 0.6, 400, Verdict.LOSES),
        # Answers that were all wrong cannot be lost, and a gain is seen all the same.
        (0.0, 0.6, 400, Verdict.LOSES),
        (0.0, 0.0, 400, Verdict.CANNOT_TELL),
        (0.6, 0.6, 40, Verdict.CANNOT_TELL),
    ],
)
def test_two_sides_that_should_be_one_thing_may_not_gain_either(
    tmp_path: Path, before: float, after: float, problems: int, decided: Verdict
) -> None:
    sides = [draw(share, problems, 1, 0.0, seed)[0] for seed, share in enumerate((before, after))]
    judgement = as_one_thing(tmp_path, *sides, 0.05)
    assert judgement.verdict is decided
    # How many problems it takes is said where it is open, and nowhere else.
    is_open = decided is Verdict.CANNOT_TELL and not judgement.reasons
    assert (judgement.needed is not None) == is_open
    assert judgement.needed is None or judgement.needed > problems


def test_both_ways_each_limit_has_half_of_the_level_and_a_gain_is_as_far_from_its_margin(tmp_path: Path) -> None:
    before, after = draw(0.8, 60, 2, 0.05, 7)
    lost = as_one_thing(tmp_path, before, after, 0.1, Claim.THESE)
    gained = as_one_thing(tmp_path, after, before, 0.1, Claim.THESE)
    one_way = judged(tmp_path, before, after, 10, claim="these_problems").judgement
    for claim in Claim:
        first = lost.losses[claim]
        second = gained.losses[claim]
        assert (first.low, first.high) == pytest.approx((-second.high, -second.low))
        assert first.low < one_way.losses[claim].low < one_way.losses[claim].high < first.high
    assert lost.needed == gained.needed
    assert lost.needed_other == gained.needed_other


def test_many_samples_prove_equality_on_these_problems_alone(tmp_path: Path) -> None:
    """Thirty problems of sixteen samples, nothing lost; missing pairs count at worst on both sides."""
    scores = np.repeat(np.arange(30)[:, None] % 2, 16, axis=1).astype(float)
    on_these = as_one_thing(tmp_path, scores, scores, 0.03, Claim.THESE)
    assert on_these.verdict is Verdict.KEEPS
    assert on_these.losses[Claim.THESE].high < 0.01 < 0.09 < on_these.losses[Claim.LIKE].high
    assert as_one_thing(tmp_path, scores, scores, 0.03, Claim.LIKE).verdict is Verdict.CANNOT_TELL

    lacking = scores.copy()
    lacking[::5, 0] = np.nan
    partly = as_one_thing(tmp_path, lacking, scores, 0.015, Claim.THESE)
    assert partly.verdict is Verdict.CANNOT_TELL
    assert partly.losses[Claim.THESE].high > 6 / 480
    assert partly.losses[Claim.THESE].low < -6 / 480


def test_lengths_and_endings_are_compared(tmp_path: Path) -> None:
    before, after = draw(0.8, 100, 1, 0.0, 3)
    first = write_answers(tmp_path / "before.csv", {"math": before}, tokens=200, truncated=False)
    second = write_answers(tmp_path / "after.csv", {"math": after}, tokens=260, truncated=True)
    document = kvatlas.gate(first, second).to_dict()
    assert document["length"]["change"] == pytest.approx(60)
    assert document["length"]["low"] > 0
    assert (document["before"]["truncated"], document["after"]["truncated"]) == (0, 100)
    for tokens, words in ((200, "as long"), (201, "1 token longer"), (199, "1 token shorter")):
        third = write_answers(tmp_path / "third.csv", {"math": after}, tokens=tokens, truncated=False)
        assert f"Answers are {words} on average (95 %: " in str(kvatlas.gate(first, third))


@pytest.mark.parametrize("problems", [10_000, pytest.param(250_000, marks=pytest.mark.deep)])
def test_a_million_rows_take_less_than_half_a_minute(kvatlas: Call, tmp_path: Path, problems: int) -> None:
    generator = np.random.default_rng(2)
    paths = []
    for name in ("before", "after"):
        right = generator.random((problems, 4)) < 0.7
        path = tmp_path / f"{name}.csv"
        lines = [f"p{row},{sample},b{row % 3},{int(value)}\n" for (row, sample), value in np.ndenumerate(right)]
        path.write_text("problem,sample,benchmark,correct\n" + "".join(lines))
        paths.append(path)
    began = time.process_time()
    code, out, err = kvatlas("gate", *paths, "--lose-at-most", 1, "--claim", "these_problems", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["units"] == 4 * problems
    # Imports, and time that grows no faster than the rows.
    assert time.process_time() - began < 5 + 25 * problems / 250_000
