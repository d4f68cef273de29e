"""`kvatlas gate` of endpoints: what is stale, changed, of another model or prompt is said or refused."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvatlas import benchmarks
from kvatlas.core import Costs, Grade, Status, Trace, digest
from kvatlas.engines.asking import served_setting
from kvatlas.engines.client import Endpoint
from kvatlas.results import Expected, Manifest, Store
from tests.command_line import Call
from tests.engines.standing import Answer, Request, completion, standing

PROBLEMS = 40
#: Starts a server whose answers are texts of a function of the question.
Served = Callable[..., tuple[str, list[Request]]]


@pytest.fixture
def serve() -> Any:
    with ExitStack() as servers:

        def begin(text: Callable[[str], str], **more: Any) -> tuple[str, list[Request]]:
            def reply(body: Mapping[str, Any]) -> Answer:
                question = str(body["messages"][0]["content"])
                return completion(text(question), model=more.get("model", "tiny"), prompt=more.get("prompt", 30))

            return servers.enter_context(standing(reply))

        yield begin


def say(question: str) -> str:
    """The right answer to `Say 7 now.`"""
    return f"\\boxed{{{question.split('Say ')[1].split()[0]}}}"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "say.jsonl"
    rows = [{"problem": f"Say {number} now.", "answer": str(number)} for number in range(PROBLEMS)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.fixture
def gate(kvatlas: Call, questions: Path, tmp_path: Path) -> Call:
    """Judges two endpoints on the questions, into one folder."""

    def call(*words: object) -> tuple[int, str, str]:
        common = (questions, "--answers", tmp_path / "answers", "--lose-at-most", 15)
        return kvatlas("gate", *words[:2], *common, *words[2:])

    return call


def test_a_new_deployment_is_judged_when_again_is_said_and_old_answers_are_named(serve: Served, gate: Call) -> None:
    is_broken = False
    first, _ = serve(say)
    second, asked = serve(lambda question: "\\boxed{-1}" if is_broken else say(question))
    code, out, _ = gate(first, second)
    assert (code, "stored before" in out) == (0, False)
    is_broken = True
    before = len(asked)
    code, out, _ = gate(first, second)
    assert code == 0
    assert f"{2 * PROBLEMS} of {2 * PROBLEMS} answers were stored before" in out
    assert "--again asks all anew" in out
    assert len(asked) == before + 1
    assert gate(first, second, "--again")[0] == 1
    assert gate(first, second)[0] == 1


def test_changed_questions_are_asked_anew(serve: Served, gate: Call, questions: Path) -> None:
    first, asked = serve(say)
    second, _ = serve(say)
    assert gate(first, second)[0] == 0
    before = len(asked)
    rows = [{"problem": f"Say {number + 100} now.", "answer": str(number + 100)} for number in range(PROBLEMS)]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, _ = gate(first, second)
    assert code == 0
    assert f"{PROBLEMS} problems changed since they were asked, and were asked anew" in out
    assert len(asked) == before + 1 + PROBLEMS


def test_another_model_other_ends_and_refused_fields_are_said(serve: Served, gate: Call) -> None:
    first, _ = serve(say)
    second, _ = serve(say, model="cheap")
    _, out, _ = gate(first, second)
    assert f"{second}/v1: Of {PROBLEMS} answers {PROBLEMS} are of another model than was asked" in out

    def filtered(body: Mapping[str, Any]) -> Answer:
        if "min_p" in body:
            return 400, {}, b"min_p is unknown"
        return completion(say(body["messages"][0]["content"]), "content_filter")

    with standing(filtered) as (url, _):
        code, out, _ = gate(first, url)
    assert code == 1
    assert f"{PROBLEMS} have a finish reason other than stop and length" in out
    assert f"{url}/v1 refuses min_p, which were left out" in out


def test_other_prompts_are_refused_unless_they_are_allowed(serve: Served, gate: Call) -> None:
    first, _ = serve(say)
    second, _ = serve(say, prompt=45)
    code, _, err = gate(first, second)
    assert code == 2
    assert f"{PROBLEMS} of {PROBLEMS} questions of the task 'say'" in err
    assert "--allow prompts" in err
    assert gate(first, second, "--allow", "prompts")[0] == 0


def test_one_server_under_two_names_is_no_comparison(serve: Served, gate: Call) -> None:
    url, asked = serve(say)
    for name in ("localhost", "0.0.0.0"):
        code, _, err = gate(url, url.replace("127.0.0.1", name))
        assert (code, "Both sides are the model 'tiny' of one endpoint" in err) == (2, True)
    assert not any("chat" in path for path, *_ in asked)


def test_equal_texts_of_drawn_answers_are_asked_about(serve: Served, gate: Call, tmp_path: Path) -> None:
    first, _ = serve(say)
    second, _ = serve(say)
    _, out, _ = gate(first, second)
    assert out.split("\n\n")[1].endswith("is it one server, or is the option not at work?")
    # Of two endpoints the address is what is compared.
    assert "also differ" not in out
    (tmp_path / "answers/run.sqlite").unlink()
    assert "is it one server" not in gate(first, second, "--temperature", 0)[1]


def test_other_models_and_doubtful_questions_are_said_before_the_first_question(gate: Call, questions: Path) -> None:
    rows = [{"problem": "Say 1 now.", "answer": "1"}, {"problem": "Say 1 now.", "answer": "2"}]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    failed: Answer = (400, {}, b"no")
    second = (200, {}, json.dumps({"data": [{"id": "other"}]}).encode())
    with standing(lambda _: failed) as (before, _), standing(lambda _: failed, second) as (after, _):
        code, _, err = gate(before, after)
    assert code == 2
    assert "The endpoints serve 'tiny' and 'other'; prompts of another template need --allow prompts." in err
    assert "1 of them with different reference answers" in err


def test_columns_of_questions_have_any_names(serve: Served, gate: Call, questions: Path) -> None:
    rows = [{"text": f"Say {number} now.", "result": str(number)} for number in range(PROBLEMS)]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sides = serve(say)[0], serve(say)[0]
    assert "--column" in gate(*sides)[2]
    assert gate(*sides, "--column", "question=text", "--column", "answer=result")[0] == 0


def test_two_runs_of_the_base_tell_what_chance_alone_changes(
    serve: Served, kvatlas: Call, questions: Path, tmp_path: Path
) -> None:
    first, _ = serve(say)
    second, _ = serve(lambda question: say(question) + " ")
    for name in ("one", "two"):
        kvatlas.succeed("gate", first, second, questions, "--answers", tmp_path / name, "--lose-at-most", 15)
    runs = [f"{tmp_path / name}@endpoint={first}/v1" for name in ("one", "two")]
    assert "all 40 answers are equal" in kvatlas.succeed("gate", *runs, "--lose-at-most", 15)


def test_answers_go_into_no_run_of_another_command(serve: Served, gate: Call, tmp_path: Path) -> None:
    with Store.create(tmp_path / "answers") as store:
        store.put_manifest(Manifest((), (), {"models": ["m"], "seed": 0}, {}))
    code, _, err = gate(serve(say)[0], serve(say)[0])
    assert (code, err.endswith("is a run of another command, as a sweep; name a new one with --answers.\n")) == (
        2,
        True,
    )
    assert (tmp_path / "answers/run.sqlite").exists()


def test_a_server_that_speaks_http_alone_is_asked_by_http(serve: Served, gate: Call) -> None:
    url, _ = serve(say)
    code, _, err = gate(url.replace("http:", "https:"), url)
    assert (code, "write http://" in err, "earlier answers" in err) == (2, True, False)


def test_answers_that_were_all_cut_say_why_nothing_is_right(gate: Call) -> None:
    def cut(_: Mapping[str, Any]) -> Answer:
        return completion("so", "length", output=100)

    with standing(cut) as (before, _), standing(cut) as (after, _):
        code, out, _ = gate(before, after, "--max-new-tokens", 100)
    assert code == 3
    assert f"{PROBLEMS} of {PROBLEMS} were cut at 100 tokens, allow more" in out
    assert "take easier problems" not in out


def test_one_failed_question_ends_nothing(serve: Served, gate: Call, tmp_path: Path) -> None:
    def cut(body: Mapping[str, Any]) -> Answer:
        text = say(body["messages"][0]["content"])
        return (400, {}, b"<html>no</html>") if text == "\\boxed{7}" else completion(text)

    first, _ = serve(say)
    with standing(cut) as (url, _):
        code, _, err = gate(first, url)
    assert (code, f"Of {2 * PROBLEMS} questions 1 failed, {2 * PROBLEMS - 1} answers were stored." in err) == (2, True)


def test_a_context_that_is_too_short_is_told_and_the_next_try_finds_no_other_comparison(gate: Call) -> None:
    """vLLM's words for it. The folder of answers is free while it holds none, and is not when it has some."""
    room = 512

    def reply(body: Mapping[str, Any]) -> Answer:
        if body["max_tokens"] > room:
            said = f"This model's maximum context length is {room} tokens. However, you requested more."
            return 400, {}, json.dumps({"error": {"message": said}}).encode()
        return completion(say(str(body["messages"][0]["content"])))

    with standing(reply) as (before, _), standing(reply) as (after, _):
        code, _, err = gate(before, after)
        assert code == 2
        assert "maximum context length is 512 tokens" in err
        assert "ask for fewer new tokens, with --max-new-tokens" in err
        assert gate(before, after, "--max-new-tokens", 300)[0] == 0
        code, _, err = gate(before, after, "--max-new-tokens", 400)
        assert code == 2
        assert "holds answers of another comparison (sampling was" in err
        assert err.count("max_new_tokens") == 2


def test_a_folder_of_an_earlier_version_is_asked_anew_and_says_so(
    serve: Served, gate: Call, questions: Path, tmp_path: Path
) -> None:
    """It had other run keys, a spec without the fields that are sent now, and no days."""
    first, asked = serve(say)
    second, _ = serve(say)
    benchmark = benchmarks.find(str(questions))
    sampling = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 16_384}
    ids = tuple(problem.id for problem in benchmark.problems(None))
    cells = []
    for url in (first, second):
        setting = served_setting(Endpoint(url, "tiny"))
        key = digest(["gate", setting.id, benchmarks.identity(benchmark), sampling, 0])[:32]
        cells.append(Expected("tiny", benchmark.name, setting, key, ids, 1, True))
    manifest = Manifest((), tuple(cells), {"sampling": sampling, "seed": 0}, {"kvatlas": "0.2.0.dev0"})
    with Store.create(tmp_path / "answers") as store:
        store.put_manifest(manifest)
        grade = Grade(False, 0.0, "9", Status.OK, {"finish": "stop"})
        costs = Costs(30, 20, None, None, None, None, 1.0)
        for cell in cells:
            names = [("tiny", benchmark.name, id_, 0, cell.setting) for id_ in ids]
            store.add_all((cell.run_key, Trace(*name, (), "old", grade, costs)) for name in names)
    code, out, _ = gate(first, second)
    assert code == 0
    told = f"{2 * PROBLEMS} stored answers are of another sampling or an earlier version, and do not count"
    assert told in out
    assert sum("chat" in path for path, *_ in asked) == PROBLEMS
