"""`verify`: a sound endpoint is what the map says, a faulty one is not, and bad ones end in sentences, resumable."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.results import Store
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.pairs.verification import Standing, verified
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.command_line import Call
from tests.server.running import serving

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
CELL = ("--cell", "window local_window=16")
#: A run whose problems are all compressed, with the served cell, another one and one that draws.
LONG: dict[str, Any] = {
    **SPEC,
    "benchmarks": ["CHAIN10"],
    "problems": 16,
    "samples": 1,
    "axes": {"local_window": [16, 64], "ratio": [0.3]},
    "baseline": [{"policy": "random", **SETTING}],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "run"
    sweep(make_plan(parse_spec(SPEC)), folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "long"
    sweep(make_plan(parse_spec(LONG)), folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    words = [f"--{name.replace('_', '-')}={SETTING[name]}" for name in ("kv_budget", "local_window", "ratio")]
    with serving("embedded:tiny-llama", "--policy", "window", *words, "--set", "ratio_over=thinking") as result:
        yield result.url


Reply = Callable[[str, Mapping[str, Any]], tuple[int, Mapping[str, str], bytes]]


class Stand:
    """A real HTTP server that answers what a test says."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[tuple[str, dict[str, str], Mapping[str, Any]]] = []
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                stand.asked.append((self.path, dict(self.headers), body))
                code, headers, content = reply(self.path, body)
                self.send_response(code)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def stand() -> Iterator[Callable[[Reply], Stand]]:
    begun: list[Stand] = []

    def begin(reply: Reply) -> Stand:
        begun.append(Stand(reply))
        return begun[-1]

    yield begin
    for item in begun:
        item.server.shutdown()
        item.server.server_close()


MODELS = json.dumps({"data": [{"id": "tiny"}]}).encode()


def completion(text: str, finish: str = "stop", prompt: int = 30, output: int = 20) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}], "usage": usage}).encode()


def test_a_served_cell_is_asked_graded_and_kept_as_a_run(run: Path, server: str, kvatlas: Call, tmp_path: Path) -> None:
    out = tmp_path / "served"
    words = ("verify", server, "--against", run, "--out", out, *CELL, "--quiet")
    code, first, err = kvatlas(*words, "--json")
    assert code in (0, 3), err
    document = json.loads(first)
    assert {check["name"] for check in document["checks"]} == {"prompts", "finish", "lengths", "compressions"}
    assert all(check["good"] for check in document["checks"]), first
    assert document["cell"]["problems"] == document["full"]["problems"] == 8
    with Store.open(out) as store:
        traces = list(store.traces())
    assert len(traces) == 16
    assert {trace.setting.policy for _, trace in traces} == {"served"}
    assert all(trace.usage.compressions is not None for _, trace in traces)
    assert "<think>" in traces[0][1].text
    # Nothing is asked twice, and the run stands in every figure beside its reference.
    assert kvatlas(*words, "--json")[1] == first
    assert RunData.open(out).cells[0].stored == 8
    assert kvatlas("compare", run, out, "--out", tmp_path / "pairs.png", "--only", "served", "--only", "full")[0] == 0


def test_greedy_texts_tell_the_cell_from_another_one(
    long_run: Path, server: str, kvatlas: Call, tmp_path: Path
) -> None:
    words = ("verify", server, "--against", long_run, "--out", tmp_path / "o", "--problems", 2, "--quiet", "--json")
    code, first, err = kvatlas(*words, *CELL, "--texts", 16)
    assert code in (0, 3), err
    document = json.loads(first)
    assert all(check["good"] for check in document["checks"])
    assert {"texts before", "texts after"} <= {check["name"] for check in document["checks"]}
    # The same numerics: every token is the cell's own, behind compressions, too.
    assert len(document["texts"]) == 16
    assert all(entry["tokens"][1] > 20 and entry["near"][0] for entry in document["texts"])
    assert not any(sum(entry["other"]) for entry in document["texts"])
    # What was asked is kept as a run, and asked once.
    with Store.open(tmp_path / "o" / "texts") as store:
        kept = store.keys()
    assert len(kept) == 16
    # Another window keeps other tokens: told though nothing can be said of Pass@1.
    code, out, err = kvatlas(*words, "--cell", "window local_window=64", "--texts", 16)
    assert code == 1, err
    document = json.loads(out)
    assert document["cell"]["verdict"] == "not decided"
    assert [check["name"] for check in document["checks"] if not check["good"]] == ["texts after"]
    with Store.open(tmp_path / "o" / "texts") as store:
        assert store.keys() == kept


def test_texts_of_another_model_depart_at_once(
    long_run: Path, stand: Callable[[Reply], Stand], kvatlas: Call, tmp_path: Path
) -> None:
    def other(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        asked = body.get("messages", [{}])[-1].get("content", "")
        return (200, {}, MODELS if path.endswith("models") else completion(asked * 20, "length", output=300))

    words = ("--against", long_run, "--out", tmp_path / "o", *CELL, "--problems", 2, "--texts", 2, "--quiet")
    code, out, err = kvatlas("verify", stand(other).url, *words)
    assert code == 1, err
    assert "other weights, or not greedy" in out


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [("random", "what 'random' keeps depends on more than the text"), ("full", "never compresses")],
)
def test_texts_that_cannot_be_compared_end_in_a_sentence(
    run: Path, long_run: Path, kvatlas: Call, tmp_path: Path, cell: str, sentence: str
) -> None:
    against = run if cell == "full" else long_run
    words = ("--against", against, "--cell", cell, "--out", tmp_path / "o", "--texts", 4)
    code, _, err = kvatlas("verify", "http://127.0.0.1:9", *words)
    assert code == 2
    assert sentence in err


def test_texts_need_the_model_of_the_run(long_run: Path, kvatlas: Call, tmp_path: Path) -> None:
    with Store.open(long_run) as store:
        manifest, traces = store.manifest(), [trace for _, trace in store.traces()]
    changed = tmp_path / "changed"
    cells = tuple(replace(cell, run_key="0" * 32) for cell in manifest.expected)
    with Store.create(changed) as store:
        store.put_manifest(replace(manifest, expected=cells))
        for trace in traces:
            store.add("0" * 32, trace)
    words = ("--against", changed, *CELL, "--out", tmp_path / "o", "--texts", 4)
    code, _, err = kvatlas("verify", "http://127.0.0.1:9", *words)
    assert code == 2
    assert "are not those of the run" in err


def test_a_faulty_endpoint_is_told_by_what_it_answers(
    run: Path, stand: Callable[[Reply], Stand], kvatlas: Call, tmp_path: Path
) -> None:
    def wrong(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        return (200, {}, MODELS if path.endswith("models") else completion("I do not know", "length", 999, 7))

    url = stand(wrong).url
    code, out, _ = kvatlas("verify", url, "--against", run, "--out", tmp_path / "o", *CELL, "--quiet")
    assert code == 1
    assert "worse by more than 3 points" in out
    assert "prompts are not as long as in the run" in out
    assert "were cut (finish reason length) before 300 tokens" in out


def test_two_endpoints_tell_whether_a_knob_does_anything(
    run: Path, stand: Callable[[Reply], Stand], server: str, kvatlas: Call, tmp_path: Path
) -> None:
    same = stand(lambda path, _: (200, {}, MODELS if path.endswith("models") else completion("A: 3"))).url
    other = stand(lambda path, _: (200, {}, MODELS if path.endswith("models") else completion("A: 3"))).url
    words = ("--against", run, *CELL, "--quiet", "--json")
    document = json.loads(kvatlas("verify", same, "--versus", other, "--out", tmp_path / "a", *words)[1])
    assert document["knob"]["works"] is False
    assert document["knob"]["identical"] == 16
    document = json.loads(kvatlas("verify", server, "--versus", other, "--out", tmp_path / "b", *words)[1])
    assert document["knob"]["works"] is True


def test_rate_limits_are_waited_for_and_a_second_start_goes_on(
    run: Path, stand: Callable[[Reply], Stand], kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    begun = stand(limited)
    out = tmp_path / "o"
    words = ("verify", begun.url, "--against", run, "--out", out, *CELL, "--quiet", "--concurrency", 1)
    code, _, err = kvatlas(*words)
    assert code == 2
    assert "asks to wait for 3600 s; what was answered before is kept" in err
    with Store.open(out) as store:
        kept = len(store.keys())
    assert kept == 4
    patient, before = True, len(begun.asked)
    assert kvatlas(*words)[0] == 1
    with Store.open(out) as store:
        assert len(store.keys()) == 16
    fresh = [
        body["messages"][0]["content"] + str(body["seed"]) for path, _, body in begun.asked[before:] if "chat" in path
    ]
    assert len(set(fresh)) == 12
    assert {headers["Authorization"] for _, headers, _ in begun.asked} == {"Bearer sk-secret-key"}
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files
    assert all(b"sk-secret-key" not in path.read_bytes() for path in files)
    with Store.open(out) as store:
        assert all("sk-secret" not in trace.text for _, trace in store.traces())


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (lambda path, _: (401, {}, b"{}"), "asks for a key; name its variable with --key-env"),
        (lambda path, _: (404, {}, b"no"), "There is no OpenAI-compatible API at"),
        (lambda path, _: (302, {"Location": "http://127.0.0.1:1/"}, b""), "leads to another address"),
        (lambda path, _: (200, {}, b"data: {\n\ndata: nonsense\n\n"), "answers what no OpenAI-compatible API does"),
        (lambda path, _: (200, {}, b"[" * 100_000), "answers what no OpenAI-compatible API does"),
        (lambda path, _: (200, {}, b'{"data": [{"id": "a"}, {"id": "b"}]}'), "several models; name one with --served"),
        (
            lambda path, _: (200, {}, MODELS if path.endswith("models") else b'{"choices": [{"delta": {}}]}'),
            "answers what no OpenAI-compatible API does",
        ),
        (
            lambda path, _: (200, {}, MODELS) if path.endswith("models") else (400, {}, b"top_k is unknown"),
            "refuses the request (HTTP 400): top_k is unknown",
        ),
    ],
)  # fmt: skip
def test_endpoints_that_cannot_be_asked_end_in_a_sentence(
    run: Path, stand: Callable[[Reply], Stand], kvatlas: Call, tmp_path: Path, reply: Reply, sentence: str
) -> None:
    code, _, err = kvatlas("verify", stand(reply).url, "--against", run, "--out", tmp_path / "o", *CELL)
    assert code == 2
    assert sentence in err
    assert err.startswith("kvatlas: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("ftp://host",), "is no address"),
        (("http://host:99999",), "is no address"),
        (("http://user:secret@host",), "keys come from the environment"),
        (("http://127.0.0.1:9",), "cannot be asked"),
        (("http://127.0.0.1:9", "--key-env", "NOT_THERE"), "The environment has no variable 'NOT_THERE'"),
        (("http://127.0.0.1:9", "--cell", "h2o"), "fits none of the"),
        (("http://127.0.0.1:9", "--lose-at-most", "0"), "lose_at_most is a number of points"),
    ],
)
def test_wrong_words_end_in_a_sentence(
    run: Path, kvatlas: Call, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    cell = () if "--cell" in words else CELL
    code, _, err = kvatlas("verify", *words, *cell, "--against", run, "--out", tmp_path / "o")
    assert code == 2
    assert sentence in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("reference", "served", "problems", "standing"),
    [
        (0.6, 0.6, 4000, Standing.EQUIVALENT),
        (0.6, 0.4, 400, Standing.WORSE),
        (0.4, 0.6, 400, Standing.BETTER),
        (0.6, 0.6, 40, Standing.UNDECIDED),
    ],
)
def test_the_interval_decides(reference: float, served: float, problems: int, standing: Standing) -> None:
    draw = np.random.default_rng(5)
    sides = [
        {("CHAIN", str(n)): {0: float(draw.random() < share)} for n in range(problems)} for share in (reference, served)
    ]
    result = verified(sides[0], sides[1], 0.05)
    assert result.standing is standing
    assert result.problems == problems
    # How many problems more it takes is said where it is open, and nowhere else.
    if result.needed is not None:
        assert standing is Standing.UNDECIDED
        assert result.needed > problems
