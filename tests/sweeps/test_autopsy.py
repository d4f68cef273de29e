"""Autopsies of a decoded run: what they find is true when it is decoded again, and they are resumed."""

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvatlas.autopsy.autopsies import FILE, Autopsy, key_of, read_autopsies, token_kind
from kvatlas.autopsy.driver import LostCell, Replayer, find_lost, perform
from kvatlas.autopsy.search import HELD_OUT_STREAMS, AutopsySearch, shrink
from kvatlas.autopsy.summary import ARMS, summarise
from kvatlas.core import KvatlasError
from kvatlas.engine import Engine, Generation, Request
from kvatlas.policies.selection import PutBack
from kvatlas.results import Store
from tests.command_line import Call
from tests.stored import decode_run

SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN8-12"],
    "problems": 10,
    "seed": 7,
    "sampling": {"max_new_tokens": 500},
    "settings": [{"policy": "dynts", "kv_budget": 288}],
    "axes": {"local_window": [32], "ratio": [0.1, 0.2]},
}
MOST = 3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_run(SPEC, tmp_path_factory.mktemp("autopsy") / "run")


def cell_of(run: Path) -> LostCell:
    (cell,) = find_lost(run, "tiny-llama dynts ratio=0.1")
    return cell


@pytest.fixture(scope="module")
def autopsies(run: Path) -> list[Autopsy]:
    (autopsies,) = perform([cell_of(run)], run, MOST, lambda *_: None)
    return autopsies


def decode(
    replayer: Replayer, cases: Sequence[AutopsySearch], forks: Callable[[], Sequence[Request[Any]]] = list
) -> list[Generation[Any]]:
    """Return the generations of the trunks of cases and of what starts from them, in their order, of one engine."""
    sampling = replayer.spec.sampling.sampling()
    engine = Engine(replayer.model, replayer.model.load(), [replayer.policy], sampling, 4)
    found: dict[object, Generation[Any]] = {}
    order: list[object] = []

    def requests() -> Iterator[Request[Any] | None]:
        trunks = [case.trunk() for case in cases]
        yield from trunks
        while len(found) < len(trunks):
            yield None
        # Forks start at the checkpoints of the trunks.
        started = forks()
        order.extend(request.key for request in (*trunks, *started))
        yield from started

    for generation in engine.run(requests()):
        found[generation.key] = generation
    for case in cases:
        case.close()
    # All pages were given back but that of no sequence.
    assert sum(engine.cache.holders) == 1
    return [found[key] for key in order]


def test_a_fork_decodes_what_a_replay_from_the_start_does(run: Path) -> None:
    cell = cell_of(run)
    trace = cell.lost[0].trace
    replayer = Replayer(cell)
    case = replayer.search(cell.lost[0])
    assert trace.eviction_trace is not None
    put_backs = []
    prompt = len(case.prompt)
    evicted_at = trace.eviction_trace.evicted_at
    compressions = sorted({step + prompt - 1 for step in evicted_at if step})
    for length in compressions:
        evicted = [position for position, step in enumerate(evicted_at) if step == length - prompt + 1]
        put_backs += [(length, PutBack(tokens)) for tokens in ((), evicted[:5], evicted[::7])]
    # Without compression until a later token.
    put_backs.append((compressions[0], PutBack(until=compressions[0] - prompt + 40)))

    def forks() -> list[Request[Any]]:
        starts = [case.fork(put_back, length) for length, put_back in put_backs]
        return starts + [
            case.request(object(), put_back=PutBack(whole.positions, whole.until)) for _, whole in put_backs
        ]

    trunk, *generations = decode(replayer, [case], forks)
    assert trunk.tokens == trace.tokens
    pairs = list(zip(generations[: len(put_backs)], generations[len(put_backs) :], strict=True))
    assert all(fork.tokens == whole.tokens for fork, whole in pairs)
    assert all(fork.eviction_trace == whole.eviction_trace for fork, whole in pairs)
    assert all(fork.decoded < whole.decoded for fork, whole in pairs)
    assert len({fork.tokens for fork, _ in pairs}) > 1


def test_held_out_arms_are_forks_with_random_numbers_of_their_own(run: Path, autopsies: list[Autopsy]) -> None:
    autopsy = next(item for item in autopsies if item.held_out)
    assert {len(results) for results in autopsy.held_out.values()} == {HELD_OUT_STREAMS}
    assert tuple(autopsy.held_out) == ARMS
    cell = cell_of(run)
    lost = next(item for item in cell.lost if key_of(item) == autopsy.key)
    replayer = Replayer(cell)
    case = replayer.search(lost)
    length = autopsy.tokens[0].position + autopsy.tokens[0].distance
    cause = [token.position for token in autopsy.tokens]

    def forks() -> list[Request[Any]]:
        put_backs = [PutBack(), PutBack(cause)] * 4
        return [case.fork(put_back, length, index // 2) for index, put_back in enumerate(put_backs)]

    _, *generations = decode(replayer, [case], forks)
    results = list(map(case.restored, generations))
    assert results[::2] == list(autopsy.held_out["nothing"][:4])
    assert results[1::2] == list(autopsy.held_out["cause"][:4])
    # The beginning is the stored one, what follows is not.
    written = length - len(case.prompt) + 1
    assert {generation.tokens[:written] for generation in generations} == {lost.trace.tokens[:written]}
    assert len({generation.tokens for generation in generations[::2]}) > 1


def test_causes_restore_the_answer_when_they_are_decoded_again(run: Path, autopsies: list[Autopsy]) -> None:
    assert all(autopsy.reproduced for autopsy in autopsies)
    found = [autopsy for autopsy in autopsies if autopsy.tokens]
    assert found
    cell = cell_of(run)
    replayer = Replayer(cell)
    by_key = {key_of(item): item for item in cell.lost}
    for autopsy in found:
        case = replayer.search(by_key[autopsy.key])
        positions = [token.position for token in autopsy.tokens]
        whole = case.request(object(), put_back=PutBack(positions))
        (generation,) = decode(replayer, [], lambda whole=whole: [whole])
        assert case.restored(generation)
        # The policy ranked them behind its slots.
        assert all(token.slots <= token.rank < token.slots + token.evicted for token in autopsy.tokens)


def test_a_second_start_does_what_is_missing_and_finds_the_same(run: Path, autopsies: list[Autopsy]) -> None:
    lines = (run / FILE).read_text().splitlines(keepends=True)
    assert len(lines) == len(autopsies) == MOST
    # A killed process leaves half a line.
    (run / FILE).write_text("".join(lines[:-2]) + lines[-2][:40])
    done = []
    (again,) = perform([cell_of(run)], run, MOST, lambda *counts: done.append(counts))
    assert done == [(2, 3), (3, 3)]
    assert again == autopsies
    assert read_autopsies(run) == {autopsy.key: autopsy for autopsy in autopsies}


def test_the_command_prints_a_paragraph_for_each_answer_and_data(
    run: Path, autopsies: list[Autopsy], kvatlas: Call
) -> None:
    arguments = ("autopsy", run, "--policy", "tiny-llama dynts ratio=0.1", "--most", MOST)
    (document,) = json.loads(kvatlas.succeed(*arguments, "--json"))["cells"]
    expected = summarise(autopsies, len(cell_of(run).lost) / SPEC["problems"])
    assert document["summary"] == json.loads(json.dumps(expected))
    paragraphs = [line for line in kvatlas.succeed(*arguments).splitlines() if line.startswith("CHAIN")]
    assert paragraphs == document["answers"]
    lost = cell_of(run).lost
    for autopsy, answer, paragraph in zip(autopsies, lost, paragraphs, strict=True):
        assert paragraph.startswith(f"{autopsy.problem}: {autopsy.death}. ")
        if not autopsy.tokens:
            assert f"Of {autopsy.spans} spans of evicted tokens none" in paragraph
            continue
        # The tokens stand in their lines, which are lines of the trace, and left when the trace says.
        lines = re.findall('of the line "(.*?)"', paragraph)
        assert lines
        assert all(line in answer.trace.text for line in lines)
        for token in autopsy.tokens:
            assert repr(token.text.strip()) in paragraph
            assert answer.trace.eviction_trace is not None
            step = answer.trace.eviction_trace.evicted_at[token.position]
            assert f"evicted after {step} new tokens" in paragraph
        right = {arm: sum(outcomes) for arm, outcomes in autopsy.held_out.items()}
        assert f"of {HELD_OUT_STREAMS} other random streams {right['cause']} are right with" in paragraph


def test_another_setting_that_kept_the_tokens_is_named(run: Path, autopsies: list[Autopsy], kvatlas: Call) -> None:
    arguments = ("autopsy", run, "--policy", "dynts ratio=0.1", "--most", MOST, "--json")
    (document,) = json.loads(kvatlas.succeed(*arguments))["cells"]
    cell = cell_of(run)
    with Store.open(run) as store:
        traces = {trace.problem: trace for _, trace in store.traces() if trace.setting.values.get("ratio") == 0.2}
    kept_counts = []
    for autopsy, answer, paragraph in zip(autopsies, cell.lost, document["answers"], strict=True):
        other = traces[autopsy.problem]
        assert other.eviction_trace is not None
        prompt = answer.trace.usage.prompt_tokens or 0
        is_kept = bool(autopsy.tokens)
        for token in autopsy.tokens:
            alike = other.tokens[: token.position - prompt + 1] == answer.trace.tokens[: token.position - prompt + 1]
            step = other.eviction_trace.evicted_at[token.position]
            is_kept = is_kept and alike and (step == 0 or step > answer.death.token)
        verdict = "right" if other.grade.correct else "wrong"
        assert (f"and stayed until then with dynts(ratio=0.2) ({verdict})" in paragraph) == is_kept
        kept_counts.append(is_kept)
    assert any(kept_counts)


def test_a_cell_that_names_several_settings_is_refused_with_their_names(run: Path) -> None:
    with pytest.raises(KvatlasError, match=r"names 2 settings; expected one: dynts ratio=0\.1; dynts"):
        find_lost(run, "dynts")
    with pytest.raises(KvatlasError, match=r"compresses by itself: dynts ratio=0\.1; dynts ratio=0\.2\.$"):
        find_lost(run, "full")


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
