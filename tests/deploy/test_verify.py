"""`deploy verify`: a sound endpoint is the map's cell, a faulty one is not, and a second start goes on."""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvatlas import class_files
from kvatlas.api import run as decode
from kvatlas.models import find
from kvatlas.results import Store
from kvatlas.stats.run_data import RunData
from tests.command_line import Call
from tests.serve.running import served
from tests.stored import decode_run, traces_of
from tests.web_server import answering

SETTING = {"kv_budget": 150, "local_window": 16, "ratio": 0.3, "ratio_over": "thinking"}
SPEC: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN4", "CHAIN6"],
    "problems": 4,
    "samples": 2,
    "sampling": {"temperature": 0.6, "max_new_tokens": 300},
    "settings": [{"policy": "window", **{name: SETTING[name] for name in ("kv_budget", "ratio_over")}}],
    "axes": {"local_window": [16, 32], "ratio": [0.3]},
}
#: A run whose problems are all compressed, with the served cell, another one and one that draws.
LONG: dict[str, Any] = {
    **SPEC,
    "benchmarks": ["CHAIN10"],
    "problems": 16,
    "samples": 1,
    "axes": {"local_window": [16, 64], "ratio": [0.3]},
    "baseline": [{"policy": "random", **SETTING}],
}
#: A kilobyte of choices that is 64 MB of blanks.
BOMB = gzip.compress(b'{"choices": [' + b" " * 2**26 + b"]}")
MODELS = json.dumps({"data": [{"id": "tiny"}]}).encode()
#: Status, headers and body of the answer to a path and a request.
Reply = Callable[[str, Mapping[str, Any]], tuple[int, Mapping[str, str], bytes]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_run(SPEC, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_run(LONG, tmp_path_factory.mktemp("long") / "run")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(find("embedded:tiny-llama"), "window", **SETTING) as address:
        yield address


@pytest.fixture
def verify(kvatlas: Call, tmp_path: Path) -> Call:
    """Verifies an endpoint against a run; its answers go to `tmp_path / "out"`."""

    def call(url: object, run: Path, *words: object) -> tuple[int, str, str]:
        cell = () if "--policy" in words else ("--policy", "window local_window=16")
        return kvatlas("deploy", "verify", url, "--against", run, "--out", tmp_path / "out", *cell, *words)

    return call


#: Starts a real HTTP server that answers what a test says: its address, and the paths, headers and bodies it was sent.
Stand = Callable[[Reply], tuple[str, list[tuple[str, Mapping[str, str], Mapping[str, Any]]]]]


@pytest.fixture
def stand() -> Iterator[Stand]:
    with ExitStack() as servers:

        def begin(reply: Reply) -> Any:
            asked: list[Any] = []

            def noted(_: str, path: str, headers: Mapping[str, str], content: bytes) -> Any:
                body = json.loads(content or b"{}")
                asked.append((path, headers, body))
                return reply(path, body)

            return servers.enter_context(answering(noted)), asked

        yield begin


def completion(text: str, finish: str = "stop", prompt: int = 30, output: int = 20) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}], "usage": usage}).encode()


def test_a_served_cell_is_asked_graded_and_kept_as_a_run(
    run: Path, server: str, verify: Call, kvatlas: Call, tmp_path: Path
) -> None:
    code, first, err = verify(server, run, "--json")
    assert code in (0, 3), err
    document = json.loads(first)
    assert [check["name"] for check in document["checks"]] == ["prompts", "finish", "lengths"]
    assert all(check["good"] for check in document["checks"]), first
    assert document["cell"]["problems"] == document["full"]["problems"] == 8
    out = tmp_path / "out"
    traces = traces_of(out)
    assert len(traces) == 16
    assert {trace.setting.policy for trace in traces} == {"served"}
    assert all(trace.usage.compressions is not None for trace in traces)
    assert "<think>" in traces[0].text
    # Nothing is asked twice, the sentences are those of the data, and the run stands in every figure.
    assert verify(server, run, "--json")[1] == first
    # The model is served under another name.
    _, *said = verify(server, run)[1].splitlines()
    assert f"{document['cell']['verdict']}. 8 problems, 2 samples of each: " in said[0]
    assert "against the full cache: " in said[1]
    assert document["full"]["verdict"] in said[1]
    assert said[2:] == [f"ok: {check['sentence']}" for check in document["checks"]]
    assert RunData.open(out).cells[0].stored == 8
    kvatlas.succeed("compare", run, out, "served", "full", "--out", tmp_path / "a.png")


def test_an_endpoint_of_another_model_is_told_first_and_shorter_answers_are_shorter(
    run: Path, stand: Stand, verify: Call
) -> None:
    url, _ = stand(lambda path, _: (200, {}, MODELS if path == "/v1/models" else completion("c = 1", output=3)))
    said = verify(url, run)[1]
    assert said.startswith("The endpoint serves 'tiny', and the run is of 'embedded:tiny-llama': are they one model?")
    assert re.search(r"Answers are \d+ tokens shorter on average than in the run", said)


def test_fewer_problems_than_before_are_all_that_is_reported(run: Path, stand: Stand, verify: Call) -> None:
    url, asked = stand(lambda path, _: (200, {}, MODELS if path == "/v1/models" else completion("c = 1")))
    counts = []
    for problems in ("2", "1"):
        code, out, err = verify(url, run, "--json", "--problems", problems)
        assert code in (1, 3), err
        counts.append(json.loads(out)["cell"]["problems"])
    # Of each of two benchmarks.
    assert counts == [4, 2]
    assert sum(path != "/v1/models" for path, *_ in asked) == 8


def test_greedy_texts_tell_the_cell_from_another_one(long_run: Path, server: str, verify: Call, tmp_path: Path) -> None:
    words = ("--problems", 2, "--texts", 16, "--json")
    code, out, err = verify(server, long_run, *words)
    assert code in (0, 3), err
    document = json.loads(out)
    assert all(check["good"] for check in document["checks"])
    assert {"texts before", "texts after"} <= {check["name"] for check in document["checks"]}
    # The same numerics: every token is the cell's own, behind compressions, too.
    assert len(document["texts"]) == 16
    assert all(entry["tokens"][1] > 20 and entry["near"][0] for entry in document["texts"])
    assert not any(sum(entry["other"]) for entry in document["texts"])
    # What was asked is kept as a run, and asked once.
    kept = traces_of(tmp_path / "out" / "texts")
    assert len(kept) == 16
    # Another window keeps other tokens: told though nothing can be said of Pass@1.
    code, out, err = verify(server, long_run, *words, "--policy", "window local_window=64")
    assert code == 1, err
    document = json.loads(out)
    assert document["cell"]["verdict"] == "not decided"
    assert [check["name"] for check in document["checks"] if not check["good"]] == ["texts after"]
    assert traces_of(tmp_path / "out" / "texts") == kept


def test_a_faulty_endpoint_is_told_by_what_it_answers(run: Path, long_run: Path, stand: Stand, verify: Call) -> None:
    def wrong(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        text = body.get("messages", [{}])[-1].get("content", "") * 20
        answer = completion(text, "length", 999, 7).replace(b"{", b'{"model": "giant", ', 1)
        return (200, {}, MODELS if path.endswith("models") else answer)

    url, _ = stand(wrong)
    code, out, _ = verify(url, run)
    assert code == 1
    assert "worse by more than 3 points" in out
    assert "prompts are not as long as in the run" in out
    assert "Of 16 answers 16 are of another model than was asked, by name: 16 'giant'." in out
    assert "were cut (finish reason length) before 300 tokens" in out
    # Its texts are those of another model.
    code, out, _ = verify(url, long_run, "--problems", 2, "--texts", 2)
    assert code == 1
    assert "other weights, or not greedy" in out


def test_rate_limits_are_waited_for_and_a_second_start_goes_on(
    run: Path, stand: Stand, verify: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_API_KEY", "sk-secret-key")
    answers, patient = 0, False

    def limited(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        nonlocal answers
        if path.endswith("models"):
            return 200, {}, MODELS
        answers += 1
        if answers % 3 == 0:
            return 429, {"Retry-After": "0"}, b"slow down, sk-secret-key"
        if answers > 6 and not patient:
            return 429, {"Retry-After": "3600"}, b""
        return 200, {}, completion("sk-secret-key A: 3")

    (url, asked), out = stand(limited), tmp_path / "out"
    code, _, err = verify(url, run, "--concurrency", 1)
    assert code == 2
    assert "asks to wait for 3600 s; earlier answers are kept" in err
    assert len(traces_of(out)) == 4
    patient, before = True, len(asked)
    assert verify(url, run, "--concurrency", 1)[0] == 1
    assert len(traces_of(out)) == 16
    fresh = [body["messages"][0]["content"] + str(body["seed"]) for path, _, body in asked[before:] if "chat" in path]
    assert len(set(fresh)) == 12
    assert {headers["Authorization"] for _, headers, _ in asked} == {"Bearer sk-secret-key"}
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files
    assert all(b"sk-secret-key" not in path.read_bytes() for path in files)
    # What a model writes stays as it is, whatever the key is.
    assert all(trace.text == "sk-secret-key A: 3" for trace in traces_of(out))


def test_all_sampling_fields_are_sent_and_those_that_a_server_refuses_are_left_out(
    run: Path, stand: Stand, verify: Call, tmp_path: Path
) -> None:
    def strict(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        if path.endswith("models"):
            return 200, {}, MODELS
        for name in ("top_k", "min_p"):
            if name in body:
                known = "expected one of temperature, top_p, presence_penalty"
                return 422, {}, f"unknown field `{name}`, {known}".encode()
        return 200, {}, completion("A: 3")

    url, asked = stand(strict)
    _, _, err = verify(url, run, "--concurrency", 1)
    assert f"{url}/v1 refuses min_p, top_k, which were left out." in err
    first, last = asked[1][2], asked[-1][2]
    neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 300, **neutral}
    assert {name: first[name] for name in sampling} == sampling
    assert first.keys() - last.keys() == {"top_k", "min_p"}
    # Models, two refusals, and each question once.
    assert len(asked) == 1 + 2 + 16


def test_code_of_the_run_is_run_only_where_it_is_allowed(
    kvatlas: Call, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a benchmark of a file."""
    guide = Path(__file__).parents[2] / "docs" / "adding-a-benchmark.md"
    file = tmp_path / "sums.py"
    file.write_text(guide.read_text("utf-8").split("```python\n")[1].split("```")[0])
    run = tmp_path / "run"
    decode("embedded:tiny-llama", f"{file}:Sum3", out=run, problems=1, max_new_tokens=20, workers=1)
    url, _ = stand(lambda path, _: (200, {}, MODELS if path.endswith("models") else completion("6")))

    words = ("deploy", "verify", url, "--against", run, "--policy", "full", "--out", tmp_path / "served")
    monkeypatch.setattr(class_files, "_permitted", set())
    # As written by somebody else.
    file.touch()
    class_files.run_file.cache_clear()
    assert "add --allow-code" in kvatlas.refuse(*words)
    assert kvatlas(*words, "--allow-code")[0] in (0, 1, 3)


NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("ftp://host",), "is not an address"),
        (("http://user:secret@host",), "keys come from the environment"),
        ((NOWHERE,), "cannot be reached"),
        ((NOWHERE, "--policy", "random", "--texts", 4), "the choice of 'random' depends on more than the text"),
        ((NOWHERE, "--policy", "full", "--texts", 4), "never compresses"),
    ],
)
def test_wrong_words_end_in_a_sentence(
    run: Path, long_run: Path, verify: Call, words: tuple[object, ...], sentence: str
) -> None:
    code, _, err = verify(words[0], long_run if "random" in words else run, *words[1:])
    assert (code, sentence in err, "secret" in err) == (2, True, False), err


def test_answers_of_an_endpoint_enter_no_measured_run(run: Path, stand: Stand, kvatlas: Call) -> None:
    url, _ = stand(lambda path, _: (200, {}, MODELS if path.endswith("models") else completion("6")))
    before = len(traces_of(run))
    sentence = kvatlas.refuse("deploy", "verify", url, "--against", run, "--policy", "full", "--out", run)
    assert f"'{run}' is a measured run; expected a folder for answers of endpoints alone" in sentence
    assert len(traces_of(run)) == before


def test_answers_of_a_gate_are_no_place_for_a_verification(
    run: Path, stand: Stand, kvatlas: Call, tmp_path: Path
) -> None:
    urls = [stand(lambda path, _: (200, {}, MODELS if path.endswith("models") else completion("6")))[0] for _ in "ab"]
    folder = tmp_path / "gate-answers"
    kvatlas("gate", *urls, "CHAIN3", "--problems", 1, "--answers", folder)
    before = len(traces_of(folder))
    words = ("deploy", "verify", urls[0], "--against", run, "--policy", "full", "--out", folder)
    assert f"'{folder}' has answers of another command" in kvatlas.refuse(*words)
    assert len(traces_of(folder)) == before == 2


def test_a_second_verification_says_what_is_old_and_again_asks_anew(
    run: Path, stand: Stand, verify: Call, tmp_path: Path
) -> None:
    text = "A: 3"
    about = b'{"data": [{"id": "tiny", "created": 17, "owned_by": "us", "more": {"a": 1}}]}'

    def reply(path: str, _: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        if path.endswith("models"):
            return 200, {}, about
        body = json.loads(completion(text)) | {"system_fingerprint": "fp_1"}
        return 200, {"Server": "standing"}, json.dumps(body).encode()

    url, asked = stand(reply)
    out = tmp_path / "out"
    assert "All 16 answers are new." in verify(url, run)[2]
    text = "A: 4"
    _, _, err = verify(url, run)
    today = json.loads(traces_of(out)[0].made_with)["day"]
    assert f"16 of 16 answers were stored before (16 of {today}); --again asks all anew." in err
    assert {trace.text for trace in traces_of(out)} == {"A: 3"}
    assert "All 16 answers are new." in verify(url, run, "--again")[2]
    assert len(asked) == 3 + 32
    # Without --again the last attempt counts; problems that are not asked now do not count.
    _, report, err = verify(url, run, "--problems", 1, "--json")
    assert "4 of 4 answers were stored before" in err
    assert json.loads(report)["cell"]["problems"] == 2
    with Store.open(out) as store:
        promised = [trace for _, trace in store.traces()]
        manifest = store.manifest()
    assert {trace.text for trace in promised} == {"A: 4"}
    said = json.loads(promised[0].made_with)
    assert said["system_fingerprint"] == "fp_1"
    assert said["server"].endswith("standing")
    assert manifest.provenance["verified"]["server"] == {"id": "tiny", "created": 17, "owned_by": "us"}


def test_an_endpoint_that_ignores_the_seed_is_not_judged_on_these_problems(
    run: Path, stand: Stand, verify: Call
) -> None:
    def limits(tokens: int) -> Mapping[str, Any]:
        def same(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
            text = f"{body.get('messages')} A: 3"
            return 200, {}, MODELS if path.endswith("models") else completion(text, output=tokens)

        document = json.loads(verify(stand(same)[0], run, "--json")[1])
        return document["cell"]["limits"]["these_problems"]  # type: ignore[no-any-return]

    assert "copies of one long text" in limits(60)["refused"]
    # Short texts may be equal by chance.
    assert "refused" not in limits(49)
