"""Autopsies of a decoded run: what they find is true when it is decoded again, and they are resumed."""

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.engine import Engine, Generation, Request
from kvatlas.policies.put_back import PutBack
from kvatlas.sweeps.autopsies import FILE, Autopsy, key_of, read_autopsies, token_kind
from kvatlas.sweeps.autopsy import LostCell, Replayer, find_lost, perform
from kvatlas.sweeps.autopsy_search import HELD_OUT_STREAMS, Case, Fork, Replay, Trunk, shrink
from kvatlas.sweeps.autopsy_summary import summarise
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


def cell_of(run: Path) -> LostCell:
    return find_lost(run, Setting.from_parameters("dynts", ratio=0.1))


@pytest.fixture(scope="module")
def autopsies(run: Path) -> list[Autopsy]:
    return perform(cell_of(run), run, MOST, lambda *_: None)


def decode(replayer: Replayer, replays: Sequence[Replay]) -> list[Generation[Any]]:
    """Return the generations of replays in their order, trunks first, in one engine."""
    policies = [replayer.policy, *replayer.rivals.values()]
    engine = Engine(replayer.model, replayer.model.load(), policies, replayer.plan.spec.sampling.sampling(), 4)
    waiting = list(replays)
    trunks = sum(isinstance(replay, Trunk) for replay in replays)

    def requests() -> Iterator[Request[Any] | None]:
        while waiting:
            # Checkpoints come with the trunks.
            if not isinstance(waiting[0], Trunk) and len(found) < trunks:
                yield None
            else:
                yield waiting.pop(0).request()

    found: dict[Replay, Generation[Any]] = {}
    for generation in engine.run(requests()):
        found[generation.key] = generation
    return [found[replay] for replay in replays]


@dataclass(frozen=True, eq=False)
class FromTheStart:
    """A replay of a whole case, with tokens put back."""

    case: Case
    put_back: PutBack

    def request(self) -> Request[Any]:
        return self.case.request(self, put_back=self.put_back)

    def result(self, generation: Generation[Any]) -> bool:
        return self.case.restored(generation)


def test_a_fork_decodes_what_a_replay_from_the_start_does(run: Path) -> None:
    cell = cell_of(run)
    replayer = Replayer(cell, cell.lost[0].trace)
    case = replayer.case(cell.lost[0].trace)
    (trunk,) = decode(replayer, [Trunk(case)])
    assert trunk.tokens == cell.lost[0].trace.tokens
    compressions = sorted(case.checkpoints)
    case.checkpoints.clear()
    prompt = len(case.prompt)
    evicted_at = trunk.eviction_trace.evicted_at
    replays: list[Replay] = [Trunk(case)]
    for length in compressions:
        evicted = [position for position, step in enumerate(evicted_at) if step == length - prompt + 1]
        for put_back in (PutBack(), PutBack(evicted[:5]), PutBack(evicted[::7]), PutBack(until=length - prompt + 40)):
            replays += [Fork(case, put_back, length), FromTheStart(case, PutBack(put_back.positions, put_back.until))]
    # A delay of all compressions is a fork at the first one.
    replays = [item for item in replays if not _delays_later(item, compressions[0])]
    generations = decode(replayer, replays)
    forks = generations[1::2]
    wholes = generations[2::2]
    assert len(forks) == 3 * len(compressions) + 1
    assert [fork.tokens for fork in forks] == [whole.tokens for whole in wholes]
    assert [fork.eviction_trace for fork in forks] == [whole.eviction_trace for whole in wholes]
    assert all(fork.decoded < whole.decoded for fork, whole in zip(forks, wholes, strict=True))
    assert len({fork.tokens for fork in forks}) > 1


def _delays_later(replay: Replay, first: int) -> bool:
    """Return whether a replay delays another compression than the first."""
    put_back = getattr(replay, "put_back", None)
    case = getattr(replay, "case")
    return put_back is not None and put_back.until > first - len(case.prompt) + 40


def test_causes_restore_the_answer_when_they_are_decoded_again(run: Path, autopsies: list[Autopsy]) -> None:
    assert all(autopsy.reproduced for autopsy in autopsies)
    found = [autopsy for autopsy in autopsies if autopsy.tokens]
    assert found
    cell = cell_of(run)
    replayer = Replayer(cell, cell.lost[0].trace)
    by_key = {key_of(item): item for item in cell.lost}
    for autopsy in found:
        case = replayer.case(by_key[autopsy.key].trace)
        positions = [token.position for token in autopsy.tokens]
        (generation,) = decode(replayer, [FromTheStart(case, PutBack(positions))])
        assert case.restored(generation)
        # The policy ranked them behind its slots.
        assert all(token.slots <= token.rank < token.slots + token.evicted for token in autopsy.tokens)


def test_a_second_start_does_what_is_missing_and_finds_the_same(run: Path, autopsies: list[Autopsy]) -> None:
    lines = (run / FILE).read_text().splitlines(keepends=True)
    assert len(lines) == len(autopsies) == MOST
    # A killed process leaves half a line.
    (run / FILE).write_text("".join(lines[:-2]) + lines[-2][:40])
    done = []
    again = perform(cell_of(run), run, MOST, lambda autopsy, *_: done.append(autopsy.key))
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
    search = shrink(tuple(range(16)), (), lambda: 100, PutBack)
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
