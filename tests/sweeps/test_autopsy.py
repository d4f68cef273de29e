"""Autopsies of a decoded run: what they find is true when it is decoded again, and they are resumed."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.policies.put_back import PutBack
from kvatlas.stats.deaths import Lost
from kvatlas.sweeps import Plan
from kvatlas.sweeps.autopsy import FILE, Autopsy, Replayer, find_lost, perform, read_autopsies, shrink
from kvatlas.sweeps.autopsy_summary import summarise, token_kind
from tests.command_line import Call
from tests.stored import decode_run

SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN8-12"],
    "problems": 24,
    "seed": 7,
    "sampling": {"max_new_tokens": 500},
    "settings": [{"policy": "dynts", "kv_budget": 288}],
    "axes": {"local_window": [32], "ratio": [0.1, 0.2]},
}
MOST = 6
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_run(SPEC, tmp_path_factory.mktemp("autopsy") / "run")


def lost_of(run: Path) -> tuple[Plan, list[Lost]]:
    plan, lost = find_lost(run, Setting.from_parameters("dynts", ratio=0.1))
    return plan, lost[:MOST]


@pytest.fixture(scope="module")
def autopsies(run: Path) -> list[Autopsy]:
    plan, lost = lost_of(run)
    return perform(plan, run, lost, lambda *_: None)


def test_causes_restore_the_answer_when_they_are_decoded_again(run: Path, autopsies: list[Autopsy]) -> None:
    assert all(autopsy.reproduced for autopsy in autopsies)
    found = [autopsy for autopsy in autopsies if autopsy.tokens]
    assert found
    plan, lost = lost_of(run)
    replayer = Replayer(plan, lost)
    by_key = {tuple(map(str, item.key)): item for item in lost}
    from kvatlas.engine import Engine

    engine = Engine(replayer.model, replayer.model.load(), [replayer.policy], plan.spec.sampling.sampling(), 4)
    for autopsy in found:
        case = replayer.case(by_key[autopsy.key])
        positions = [token.position for token in autopsy.tokens]
        (generation,) = engine.run([case.requests(PutBack(positions))])
        assert case.restored(generation)
        # The policy ranked them behind its slots.
        assert all(token.slots <= token.rank < token.slots + token.evicted for token in autopsy.tokens)


def test_a_second_start_does_what_is_missing_and_finds_the_same(run: Path, autopsies: list[Autopsy]) -> None:
    lines = (run / FILE).read_text().splitlines(keepends=True)
    assert len(lines) == len(autopsies) == MOST
    # A killed process leaves half a line.
    (run / FILE).write_text("".join(lines[:-2]) + lines[-2][:40])
    plan, lost = lost_of(run)
    done = []
    again = perform(plan, run, lost, lambda autopsy, *_: done.append(autopsy.key))
    assert len(done) == 2
    assert again == autopsies
    assert read_autopsies(run) == {autopsy.key: autopsy for autopsy in autopsies}


def test_the_command_prints_the_summary_and_data(run: Path, autopsies: list[Autopsy], kvatlas: Call) -> None:
    arguments = ("autopsy", run, "--policy", "dynts ratio=0.1", "--most", MOST)
    document = json.loads(kvatlas.succeed(*arguments, "--json"))
    expected = summarise(autopsies)
    assert document["summary"] == json.loads(json.dumps(expected))
    share = expected["any_cause"]
    assert share["low"] <= share["value"] <= share["high"]
    text = kvatlas.succeed(*arguments)
    assert f"{MOST}, of which {MOST} were decoded again alike" in text


def test_a_cell_that_names_several_settings_is_refused_with_their_names(run: Path) -> None:
    with pytest.raises(KvatlasError, match=r"names 2 settings of the run; expected one.*ratio=0\.2"):
        find_lost(run, Setting.from_parameters("dynts"))


@pytest.mark.parametrize("cause", [(3,), (2, 11), (0, 1, 15), (5, 6, 7, 8)])
def test_halving_ends_at_the_smallest_set(cause: tuple[int, ...]) -> None:
    search = shrink(tuple(range(16)), (), lambda: 100)
    assert outcome_of(search, set(cause)) == set(cause)


def outcome_of(search: Generator[list[PutBack], list[bool], tuple[int, ...]], cause: set[int]) -> set[Any]:
    """Return what a search finds where exactly the sets that hold the cause restore the answer."""
    results = None
    try:
        while True:
            trials = next(search) if results is None else search.send(results)
            results = [cause <= trial.positions for trial in trials]
    except StopIteration as finished:
        return set(finished.value)


@pytest.mark.parametrize(
    ("text", "kind"), [(" 12", "digits"), ("x", "letter"), (" so", "word"), (" = ", "sign"), ("\n", "white space")]
)
def test_kinds_of_tokens(text: str, kind: str) -> None:
    assert token_kind(text) == kind
