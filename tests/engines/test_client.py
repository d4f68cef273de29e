"""The client of an endpoint: all fields are sent, bad answers end in sentences, the key is in no message."""

import gzip
import json
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvatlas.core import KvatlasError
from kvatlas.engines.client import Endpoint, _retry_after
from tests.engines.standing import MODELS, SAMPLING, Answer, completion, ready, standing

#: A kilobyte of choices that is 64 MB of blanks.
BOMB = gzip.compress(b'{"choices": [' + b" " * 2**26 + b"]}")
KEY = "sk-Secret/Key+1"


def test_all_sampling_fields_are_sent() -> None:
    with standing(lambda _: completion("A: 3")) as (url, asked):
        ready(url).ask("?", {**SAMPLING, "top_k": 0, "stop": ["\n\n"]}, 7)
    sent = asked[-1][2]
    neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "max_tokens": 300, "seed": 7, **neutral}
    assert sent == {
        **expected,
        "model": "tiny",
        "messages": [{"role": "user", "content": "?"}],
        "stop": ["\n\n"],
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        (400, "Unrecognized request argument supplied: {}"),
        (422, '{{"detail": [{{"type": "extra_forbidden", "loc": ["body", "{}"], "msg": "Extra inputs"}}]}}'),
        # The fields that it knows are sent on.
        (400, "unknown field `{}`, expected one of `temperature`, `top_p`, `presence_penalty`, `seed`"),
    ],
)
def test_fields_that_a_server_refuses_are_left_out_for_good(status: int, refusal: str) -> None:
    def strict(body: Mapping[str, Any]) -> Answer:
        unknown = [name for name in ("return_token_ids", "top_k", "min_p", "repetition_penalty") if name in body]
        return (status, {}, refusal.format(unknown[0]).encode()) if unknown else completion("A: 3")

    with standing(strict) as (url, asked):
        endpoint = ready(url)
        assert endpoint.ask("?", SAMPLING, 1).text == "A: 3"
        assert endpoint.left_out == {"return_token_ids", "top_k", "min_p", "repetition_penalty"}
        first = len(asked)
        endpoint.ask("?", SAMPLING, 2)
    assert (first, len(asked)) == (1 + 4 + 1, 7)
    assert {"presence_penalty", "frequency_penalty", "seed"} <= asked[-1][2].keys()


def test_a_field_without_which_another_thing_is_asked_is_never_left_out() -> None:
    with standing(lambda _: (400, {}, b"Unsupported value: temperature; top_p and seed are ignored")) as (url, asked):
        endpoint = ready(url)
        with pytest.raises(KvatlasError, match="refuses the request: Unsupported value: temperature"):
            endpoint.ask("?", SAMPLING, 1)
    assert all("temperature" in body for _, _, body in asked[1:])


def test_a_refusal_for_another_reason_that_names_fields_changes_no_later_request() -> None:
    """As one that repeats the request: later questions would be asked without a seed."""
    replies = {1: (400, {}, b"the prompt is too long: {seed: 1, top_k: 20}")}
    with standing(lambda body: replies.get(body["max_tokens"], completion("A: 3"))) as (url, asked):
        endpoint = ready(url)
        with pytest.raises(KvatlasError, match="too long"):
            endpoint.ask("?", {**SAMPLING, "max_new_tokens": 1}, 1)
        endpoint.ask("?", SAMPLING, 1)
    assert {"seed", "top_k"} <= asked[-1][2].keys()
    assert endpoint.left_out == set()


def test_a_server_of_this_machine_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with standing(lambda _: completion("A: 3")) as (url, _):
        assert ready(url).ask("?", SAMPLING, 1).text == "A: 3"


def test_a_look_at_a_server_is_limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.engines.client.LOOK_SECONDS", 0.3)
    over = threading.Event()

    def late(_: Mapping[str, Any]) -> Answer:
        over.wait(20)
        return completion("A")

    with standing(late) as (url, _):
        with pytest.raises(KvatlasError, match="cannot be reached"):
            Endpoint(url).look("v1/other")
        over.set()


def test_thinking_in_a_field_is_thinking_in_tags_and_prompts_have_digests() -> None:
    def reply(body: Mapping[str, Any]) -> Answer:
        message = {"content": "A: 3", "reasoning": "sum"} if body["seed"] else {"content": None, "tool_calls": [{}]}
        choice = {"message": message, "finish_reason": "stop", "token_ids": [1, 2]}
        prompt = [1, 2, body["seed"] // 2]
        return 200, {}, json.dumps({"choices": [choice], "prompt_token_ids": prompt}).encode()

    with standing(reply) as (url, _):
        answers = [ready(url).ask("?", SAMPLING, seed) for seed in (0, 1, 2)]
    assert [answer.text for answer in answers] == ["", *2 * ["<think>sum</think>A: 3"]]
    digests = [answer.prompt_digest for answer in answers]
    assert all(digests)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("status", "headers", "body", "sentence"),
    [
        (401, {}, b"{}", "asks for a key in KVATLAS_API_KEY"),
        (302, {"Location": "http://127.0.0.1:1/"}, b"", "redirects to another address"),
        (200, {}, b"data: {\n\ndata: nonsense\n\n", "does not answer as an OpenAI-compatible API"),
        (200, {}, b'{"data": [{"id": "a"}, {"id": "b"}]}', "several models; name one with --served"),
        (200, {}, b'{"data": []}', "lists no model that has a name of printable characters"),
        (204, {}, b"", "/v1/models (HTTP 204) answers without a text"),
        # To questions:
        (200, {}, b'{"choices": [{"delta": {}}]}', "does not answer as an OpenAI-compatible API"),
        (200, {}, b'{"choices": [{"message": {"content": 3}}]}', "does not answer as an OpenAI-compatible API"),
        (200, {}, b'{"choices": [{"message": {"content": [1]}}]}', "does not answer as an OpenAI-compatible API"),
        (200, {"Content-Encoding": "gzip"}, BOMB, "answers more than 16,777,216 bytes"),
        (200, {}, b'{"choices": []}' + b" " * 2**24, "answers more than 16,777,216 bytes"),
        (200, {"Content-Encoding": "gzip"}, b"no gzip; choices", "cannot be reached"),
        (200, {"Content-Type": "application/json; charset=zlib_codec"}, b"\xff choices", "OpenAI-compatible API"),
        (400, {}, b"choices: no such thing", "(HTTP 400) refuses the request: choices: no such thing"),
    ],
)
def test_endpoints_that_cannot_be_asked_end_in_a_sentence(
    status: int, headers: Mapping[str, str], body: bytes, sentence: str
) -> None:
    reply = (status, headers, body)
    late = body is BOMB or b"choices" in body
    with (
        standing(lambda _: reply, MODELS if late else reply) as (url, _),
        pytest.raises(KvatlasError) as told,
    ):
        ready(url).ask("?", SAMPLING, 1)
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://host", "is not an address"),
        ("http://user:secret@host", "keys come from the environment"),
        ("http://127.0.0.1:9", "cannot be reached"),
    ],
)
def test_wrong_addresses_end_in_a_sentence(url: str, sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence) as told:
        ready(url)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"])
def test_an_address_may_end_in_a_path_of_the_api(path: str) -> None:
    assert Endpoint(f"http://host:8000{path}").url == "http://host:8000/v1"


@pytest.mark.parametrize("year", ["99999999999", "9999", "0001", "2015"])
def test_dates_of_any_year_are_times_to_wait_or_none(year: str) -> None:
    wait = _retry_after(f"Wed, 21 Oct {year} 07:28:00 GMT")
    assert wait is None or wait >= 0


def test_a_broken_connection_and_a_date_to_wait_for_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.engines.client._FIRST_PAUSE", 0.0)
    replies = iter([(0, {}, b""), (503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, b""), completion("A: 3")])
    with standing(lambda _: next(replies)) as (url, asked):
        assert ready(url).ask("?", SAMPLING, 1).text == "A: 3"
    assert len(asked) == 4


def test_a_stopped_request_ends_while_it_waits() -> None:
    stopped = threading.Event()
    with standing(lambda _: (429, {"Retry-After": "100"}, b"")) as (url, _):
        endpoint = ready(url)
        threading.Timer(0.3, stopped.set).start()
        with pytest.raises(KvatlasError, match="Stopped"):
            endpoint.ask("?", SAMPLING, 1, stopped)


def test_an_answer_that_trickles_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes soon after the one before it."""
    monkeypatch.setattr("kvatlas.engines.client.SECONDS", 1.0)
    over = threading.Event()

    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            with suppress(OSError):
                while not over.wait(0.2):
                    self.wfile.write(b" ")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Trickle) as trickle:
        threading.Thread(target=trickle.serve_forever, daemon=True).start()
        with pytest.raises(KvatlasError, match="needs more than 1 s for an answer"):
            ready(f"http://127.0.0.1:{trickle.server_port}")
        over.set()
        trickle.shutdown()


def test_costs_that_cannot_be_are_unknown() -> None:
    choice = '{"message": {"content": "A: 3"}, "finish_reason": {"a": "\\ud800"}, "kvatlas": {"mean_kv_tokens": %s, '
    choice += '"peak_kv_tokens": %s, "compressions": %s}}'
    for value in ["NaN", "1e999", "-1", "true", '"3"', "[1]", "9" * 400, str(2**60)]:
        usage = f'{{"prompt_tokens": {value}, "completion_tokens": {value}}}'
        body = f'{{"choices": [{choice % (value, value, value)}], "usage": {usage}}}'.encode()
        with standing(lambda _, body=body: (200, {}, body)) as (url, _):
            answer = ready(url).ask("?", SAMPLING, 1)
        costs = vars(answer.costs)
        assert {name for name, cost in costs.items() if cost is not None} == {"seconds"}, value
        assert answer.finish.isprintable()


# -- the key -----------------------------------------------------------------------------------------------------------

#: The key as servers may repeat it.
SPELLINGS = [
    KEY,
    KEY.lower(),
    KEY.upper(),
    urllib.parse.quote(KEY, safe=""),
    urllib.parse.quote(KEY, safe="").lower(),
    "".join(f"\\u{ord(character):04x}" for character in KEY),
    KEY.replace("/", "\\/"),
    "s\\u006b-" + KEY[3:],
]


def holds_key(text: object) -> bool:
    """Return whether a text has the key in any of its spellings."""
    return any(spelling.lower() in str(text).lower() for spelling in SPELLINGS)


@pytest.mark.parametrize("said", SPELLINGS)
def test_the_key_is_in_no_message_and_no_name_however_a_server_spells_it(said: str) -> None:
    errors: list[Answer] = [
        (400, {}, json.dumps({"error": {"message": f"bad key {said}"}}).encode()),
        (400, {}, f"bad key {said}".encode()),
        (400, {}, b" " * 250 + said.encode()),
        (500, {"Retry-After": "1e9"}, said.encode()),
        (200, {}, said.encode()),
        (200, {}, b'{"x": "' + b" " * 100 + json.dumps(said).encode()[1:] + b"}"),
        (200, {"Content-Encoding": said.replace("\\", "")}, b"{}"),
    ]
    for reply in errors:
        with standing(lambda _, reply=reply: reply) as (url, _):
            endpoint = ready(url, KEY)
            with pytest.raises(KvatlasError) as told:
                endpoint.ask("?", SAMPLING, 1)
        assert not holds_key(told.value), told.value
        with standing(lambda _: completion("A"), reply) as (url, _), pytest.raises(KvatlasError) as told:
            ready(url, KEY)
        assert not holds_key(told.value), told.value

    # Names that are stored with an answer; its text stays.
    with standing(lambda _: completion(f"A {said}", said, model=f"x{said}", system_fingerprint=said)) as (url, _):
        answer = ready(url, KEY).ask("?", SAMPLING, 1)
    assert not holds_key([answer.finish, answer.server])
    assert answer.text == f"A {said}"

    # A model is never named by it, and is described without it.
    rows = [{"id": f"m {said}"}, {"id": "tiny", "root": said, said: 1}]
    with standing(lambda _: completion("A"), (200, {}, json.dumps({"data": rows}).encode())) as (url, _):
        endpoint = ready(url, KEY)
        assert endpoint.model == "tiny"
        assert not holds_key(endpoint.about)
        with pytest.raises(KvatlasError) as told:
            ready(url, KEY, "other")
    assert not holds_key(told.value)


@pytest.mark.parametrize("key", ["content", "stop", "choices", "length"])
def test_a_key_that_is_a_word_of_the_api_changes_no_answer(key: str) -> None:
    with standing(lambda _: completion("stop content choices length", key)) as (url, _):
        answer = ready(url, key).ask("?", SAMPLING, 1)
    assert answer.text == "stop content choices length"
    assert answer.finish == (key if key in ("stop", "length") else "***")


def test_keys_that_no_header_can_have_are_refused_and_keys_go_in_a_header_alone() -> None:
    with pytest.raises(KvatlasError, match="holds characters that no header can have"):
        Endpoint("http://127.0.0.1:9", key="sk-se cret")
    with standing(lambda _: completion("A")) as (url, asked):
        ready(url, KEY).ask("?", SAMPLING, 1)
    assert {headers["Authorization"] for _, headers, _ in asked} == {f"Bearer {KEY}"}
    assert not any(holds_key(body) or holds_key(path) for path, _, body in asked)
