"""The loop that asks: every answer that arrives is stored, what is missing is asked, changes are seen."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Status, Trace
from kvatlas.engines import client
from kvatlas.engines.asking import (
    AskedAnswers,
    ask_in_folder,
    ask_missing,
    differing_prompts,
    finish_faults,
    other_models,
    probe_seeds,
    questions_of,
)
from kvatlas.engines.client import Endpoint
from kvatlas.noise import stream_key
from kvatlas.results import Store
from tests.command_line import Call
from tests.engines.standing import SAMPLING, Answer, Reply, cells_of, completion, manifest, ready, standing


def ask(folder: Path, *endpoints: Endpoint, again: bool = False, concurrency: int = 4, **how: Any) -> AskedAnswers:
    cells = cells_of(*endpoints, **how)
    answers, _ = ask_in_folder(folder, manifest(), cells, again=again, concurrency=concurrency)
    return answers


def stored(folder: Path) -> list[Trace]:
    """The answers that the folder promises."""
    with Store.open(folder) as store:
        return [trace for _, trace in store.traces()]


def numbered(faults: Mapping[int, Answer | Exception], otherwise: Reply) -> Reply:
    """Replies by the number of the request, from 0."""
    lock = threading.Lock()
    count = -1

    def reply(body: Mapping[str, Any]) -> Answer:
        nonlocal count
        with lock:
            count += 1
            number = count
        fault = faults.get(number)
        return fault if isinstance(fault, tuple) else otherwise(body)

    return reply


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_first_samples_come_first_endpoints_in_turn_and_seeds_are_those_of_every_setting(tmp_path: Path) -> None:
    with standing(lambda _: completion("A: 3")) as (first, asked), standing(lambda _: completion("A")) as (second, _):
        cells = cells_of(ready(first), ready(second), problems=2, samples=2)
        order = [(question.sample, question.problem.id, question.cell.endpoint.url) for question in questions_of(cells)]
        ids = [problem.id for problem in cells[0].problems]
        urls = [f"{first}/v1", f"{second}/v1"]
        assert order == [(sample, id_, url) for sample in (0, 1) for id_ in ids for url in urls]
        ask(tmp_path / "out", ready(first), ready(second), problems=2, samples=2, concurrency=1)
    seeds = [body["seed"] for path, _, body in asked if "chat" in path]
    assert seeds == [stream_key(0, "CHAIN4", id_, sample) >> 32 for sample in (0, 1) for id_ in ids]
    assert max(seeds) < 2**31


def test_a_second_start_says_what_is_old_and_again_asks_anew(tmp_path: Path) -> None:
    text = "A: 3"
    out = tmp_path / "out"
    with standing(lambda _: completion(text, model="tiny", system_fingerprint="fp_1")) as (url, asked):
        assert str(ask(out, ready(url))) == "All 16 answers are new."
        text = "A: 4"
        answers = ask(out, ready(url))
        today = json.loads(stored(out)[0].made_with)["day"]
        told = f"16 of 16 answers were stored before (16 of {today}); --again asks all anew."
        assert str(answers) == told
        assert {trace.text for trace in stored(out)} == {"A: 3"}
        assert str(ask(out, ready(url), again=True)) == "All 16 answers are new."
        assert {trace.text for trace in stored(out)} == {"A: 4"}
        # Without `again` the last attempt counts.
        assert sum(ask(out, ready(url), problems=2).earlier.values()) == 4
        questions = [body for path, _, body in asked if "chat" in path]
    assert len(questions) == 32
    made_with = json.loads(stored(out)[0].made_with)
    assert (made_with["model"], made_with["system_fingerprint"]) == ("tiny", "fp_1")


def test_questions_that_change_under_their_names_are_asked_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    out = tmp_path / "out"

    def write(**changes: str) -> None:
        rows = [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)]
        rows[2] |= changes
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    with standing(lambda body: completion(str(body["messages"][0]["content"]))) as (url, asked):

        def asked_now() -> int:
            before = len(asked)
            told = ask(out, ready(url), problems=4, samples=1, benchmark=str(file))
            assert len(stored(out)) == 4
            assert told.changed == len(asked) - before - 1 or before == 0
            return len(asked) - before - 1

        write()
        assert asked_now() == 4
        write(problem="2 + 2?", answer="4")
        assert asked_now() == 1
        assert [trace.text for trace in stored(out)][2].startswith("2 + 2?")
        # Another reference would be another grade of the same text.
        write(problem="2 + 2?", answer="5")
        assert asked_now() == 1
        # The first questions have their first answers.
        write()
        assert ask(out, ready(url), problems=4, samples=1, benchmark=str(file)).now == 0
        assert [trace.text for trace in stored(out)][2].startswith("2 + 1?")


def test_other_sampling_is_asked_anew_and_says_so(tmp_path: Path) -> None:
    with standing(lambda _: completion("A: 3")) as (url, _):
        ask(tmp_path / "out", ready(url))
        answers = ask(tmp_path / "out", ready(url), temperature=1.0)
    assert (answers.now, answers.unused) == (16, 16)
    assert "16 stored answers are of another sampling or an earlier version, and do not count." in str(answers)


# -- what fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        (400, {}, b"this prompt is too long"),
        (429, {"Retry-After": "inf"}, b""),
        completion("\ud83d"),
        (200, {}, b'{"choices": [{"message": {"content": {}}, "finish_reason": "stop"}]}'),
        (200, {}, b"<html>"),
        (422, {}, b""),
        completion("overflow"),
    ],
)
def test_answers_that_arrive_are_stored_whatever_becomes_of_the_others(
    tmp_path: Path, fault: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault comes first, while the other questions are open."""
    text_of_content = client._text_of_content

    def text_of(content: Any) -> str:
        if content == "overflow":
            raise OverflowError("beyond all that anybody thought of")
        return text_of_content(content)

    monkeypatch.setattr(client, "_text_of_content", text_of)
    out = tmp_path / "out"
    with standing(numbered({0: fault}, lambda _: completion("A: 3"))) as (url, asked):
        with pytest.raises(KvatlasError, match=r"Of 16 questions 1 failed, 15 answers were stored\."):
            ask(out, ready(url))
        assert len(stored(out)) == 15
        assert ask(out, ready(url)).now == 1
    assert len(stored(out)) == 16
    assert sum("chat" in path for path, *_ in asked) == 17


def test_an_endpoint_that_only_fails_is_asked_no_more_and_the_other_one_is_asked_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with standing(lambda _: (401, {}, b"")) as (closed, refused), standing(lambda _: completion("A")) as (good, _):
        with pytest.raises(KvatlasError, match="asks for a key"):
            ask(out, ready(closed), ready(good), problems=20, concurrency=2)
        assert sum("chat" in path for path, *_ in refused) <= 2 * 3
    assert len(stored(out)) == 40


def test_a_server_that_ends_ends_the_asking_at_once(tmp_path: Path) -> None:
    """Its connections break; the client alone would try again for half a minute."""
    ended = threading.Event()
    is_new = False

    def reply(body: Mapping[str, Any]) -> Answer:
        if body["seed"] % 3 == 0 and not is_new:
            ended.set()
        return (0, {}, b"") if ended.is_set() else completion("A: 3")

    out = tmp_path / "out"
    with standing(reply) as (url, _):
        cells = cells_of(ready(url), problems=30)
        with Store.create(out) as store:
            store.put_manifest(manifest().with_cells([cell.expected for cell in cells]))
            began = time.monotonic()
            answers = ask_missing(store, cells, stopped=ended)
            assert time.monotonic() - began < 5
            count = len(stored(out))
            assert answers.now == count < 60
            # Started again, it is asked for the rest.
            ended.clear()
            is_new = True
            answers = ask_missing(store, cells, stopped=ended)
            assert (sum(answers.earlier.values()), answers.now) == (count, 60 - count)


def test_asking_that_is_stopped_keeps_what_arrived(tmp_path: Path) -> None:
    stopped = threading.Event()
    out = tmp_path / "out"
    hang = threading.Event()

    def reply(body: Mapping[str, Any]) -> Answer:
        if body["seed"] % 2:
            hang.wait(30)
        return completion("A: 3")

    with standing(reply) as (url, _):
        cells = cells_of(ready(url), problems=10)
        with Store.create(out) as store:
            store.put_manifest(manifest().with_cells([cell.expected for cell in cells]))
            threading.Timer(1.0, stopped.set).start()
            began = time.monotonic()
            answers = ask_missing(store, cells, concurrency=8, stopped=stopped)
            assert time.monotonic() - began < 5
        hang.set()
    assert len(stored(out)) == answers.now


@pytest.mark.parametrize("command", ["gate", "verify"])
def test_ctrl_c_ends_at_once_and_keeps_what_arrived(
    command: str, tmp_path: Path, kvatlas: Call, request: pytest.FixtureRequest
) -> None:
    hanging, over = threading.Event(), threading.Event()

    def hang(_: Mapping[str, Any]) -> Answer:
        hanging.set()
        over.wait(60)
        return completion("A: 3")

    out = tmp_path / "out"
    with standing(numbered({number: completion("A: 3") for number in range(5)}, hang)) as (url, _):
        words: list[object] = ["gate", f"{url}/a", f"{url}/b", "CHAIN4", "--problems", 8, "--answers", out]
        if command == "verify":
            run = tmp_path / "run"
            model = "embedded:tiny-llama"
            kvatlas.succeed("run", model, "CHAIN4", "--problems", 8, "--max-new-tokens", 20, "--out", run)
            words = ["deploy", "verify", url, "--against", run, "--out", out, "--policy", "full"]
        with subprocess.Popen(
            [sys.executable, "-m", "kvatlas", *map(str, words)], stderr=subprocess.PIPE, text=True
        ) as process:
            assert hanging.wait(120)
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            begin = time.monotonic()
            _, err = process.communicate(timeout=60)
            seconds = time.monotonic() - begin
        over.set()
    assert process.returncode == 130, err
    # A second is meant; this machine may be busy with other work.
    assert seconds < 5
    assert len(stored(out)) == 5


@pytest.mark.parametrize("problems", [300, pytest.param(1000, marks=pytest.mark.deep)])
def test_large_answers_take_no_memory_that_grows_with_their_number(tmp_path: Path, problems: int) -> None:
    """100 kB each, in a process of its own; the server answers faster than answers are stored."""
    program = """
import resource, sys
from pathlib import Path
from tests.engines.standing import cells_of, manifest, ready
from kvatlas.engines.asking import ask_in_folder
def peak(problems):
    cells = cells_of(ready(sys.argv[1]), problems=problems, samples=1)
    answers, traces = ask_in_folder(Path(sys.argv[2]), manifest(), cells, concurrency=8)
    assert len(traces) == problems
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(peak(50), peak(int(sys.argv[3])))
"""
    bodies = [completion(f"{number} " + os.urandom(50_000).hex()) for number in range(10)]
    with standing(lambda body: bodies[body["seed"] % 10]) as (url, _):
        command = [sys.executable, "-c", program, url, str(tmp_path / "out"), str(problems)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    first, whole = map(int, done.stdout.split())
    # A third of their texts would be 10 MB, of a thousand 33.
    assert whole - first < 0.1 * problems / 3, done.stdout


# -- what answers tell -------------------------------------------------------------------------------------------------


def test_a_filtered_answer_and_a_call_of_tools_are_no_answers(tmp_path: Path) -> None:
    replies = {0: completion("c = 1", "content_filter"), 1: completion(None, "tool_calls")}
    with standing(numbered(replies, lambda _: completion("c = 1"))) as (url, _):
        ask(tmp_path / "out", ready(url), problems=4, samples=1, concurrency=1)
    traces = stored(tmp_path / "out")
    assert [trace.grade.status for trace in traces] == [*2 * [Status.NO_ANSWER], *2 * [Status.OK]]
    faults = finish_faults(traces, 300)
    assert faults == "Of 4 answers 2 have a finish reason other than stop and length."


def test_texts_with_thinking_in_a_field_and_in_tags_are_equal(tmp_path: Path) -> None:
    def in_field(_: Mapping[str, Any]) -> Answer:
        message = {"content": "A: 3", "reasoning": "sum"}
        return 200, {}, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()

    texts = ("<think>\nsum\n</think>\n\nA: 3", "sum\n</think>\n\nA: 3", "<think>sum</think>A: 4", "A: 3")
    digests = []
    for number, reply in enumerate([in_field, *(lambda _, text=text: completion(text) for text in texts)]):
        with standing(reply) as (url, _):
            ask(tmp_path / str(number), ready(url), problems=1, samples=1)
        with Store.open(tmp_path / str(number)) as store:
            (columns,) = [columns for columns in store.columns() if len(columns)]
        (trace,) = stored(tmp_path / str(number))
        digests.append(trace.token_digest)
        assert columns.records["token_digest"][0].tobytes().hex() == trace.token_digest
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("reply", "seeds"),
    [
        (lambda body: completion(str(body["seed"])), "honoured"),
        (lambda _: completion(os.urandom(8).hex()), "ignored"),
        (lambda _: completion("A: 3"), "constant"),
    ],
)
def test_a_probe_tells_what_becomes_of_seeds(reply: Reply, seeds: str) -> None:
    with standing(reply) as (url, asked):
        assert probe_seeds(ready(url), "?", SAMPLING) == seeds
    assert len(asked) == 1 + 3


@pytest.mark.parametrize("has_tokens", [True, False])
def test_prompts_that_differ_between_endpoints_are_found(tmp_path: Path, has_tokens: bool) -> None:
    """By their tokens, where their number is the same, and else by their number."""

    def reply(change: int) -> Reply:
        def answer(body: Mapping[str, Any]) -> Answer:
            question = body["messages"][0]["content"]
            is_changed = change if question.count("+") % 2 else 0
            if has_tokens:
                return completion("A: 3", prompt_token_ids=[is_changed, *question.encode()])
            return completion("A: 3", prompt=30 + is_changed)

        return answer

    with standing(reply(0)) as (first, _), standing(reply(0)) as (same, _), standing(reply(5)) as (other, _):
        for url, differ in ((same, False), (other, True)):
            cells = cells_of(ready(first), ready(url), samples=1)
            _, traces = ask_in_folder(tmp_path / "out", manifest(), cells)
            found = differing_prompts(traces)
            odd = [p.id for p in cells[0].problems if cells[0].benchmark.prompt(p).count("+") % 2]
            assert found == ([("CHAIN4", id_) for id_ in odd] if differ else [])
            assert odd


def test_another_model_is_told(tmp_path: Path) -> None:
    for name, told in (("tiny-2026-01-01", ""), ("giant", "Of 4 answers 4 are of another model than was asked")):
        with standing(lambda _, name=name: completion("A: 3", model=name)) as (url, _):
            ask(tmp_path / name, ready(url), problems=2)
        assert other_models(stored(tmp_path / name)).startswith(told)
        assert bool(other_models(stored(tmp_path / name))) is bool(told)


def test_asking_needs_no_torch() -> None:
    program = "import sys; import kvatlas.engines.asking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
