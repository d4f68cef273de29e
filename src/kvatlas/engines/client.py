"""The client of an OpenAI-compatible endpoint: one request, its limits, and what a server may say.

An answer is limited in size and time. The key is replaced in every message and name that comes from a server, before
it is printed or stored; only the text of an answer stays as it was written.
"""

import json
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvatlas.answers import reading
from kvatlas.core import Costs, KvatlasError, digest, reason

#: Names of this machine in addresses.
LOOPBACK = re.compile(r"//(localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)(?=[:/])", re.IGNORECASE)
#: The most seconds of a request, from its sending to the end of its answer.
SECONDS = 1800.0
#: The most seconds of a connection's beginning.
CONNECT_SECONDS = 60.0
#: The most seconds of a request that only looks at a server.
LOOK_SECONDS = 20.0
#: The most bytes of an answer, unpacked.
MAX_BODY = 2**24
#: The longest Retry-After that is waited for, in seconds.
LONGEST_WAIT = 120.0
#: Sampling fields without effect. Engines take those that a request lacks from the model's generation_config.json.
NEUTRAL: Mapping[str, Any] = {
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
#: Fields that are left out for a server that refuses them; with others a request would ask for something else.
_OPTIONAL = re.compile(rf"\b({'|'.join((*NEUTRAL, 'seed', 'return_token_ids'))})\b")
#: HTTP statuses after which the same request is sent again.
_AGAIN = (429, 500, 502, 503, 504)
#: The most times that a request is sent.
_TRIES = 6
#: The seconds before the second attempt.
_FIRST_PAUSE = 1.0
#: The longest finish reason and name of a server that is stored, in characters.
_LONGEST_NAME = 200
#: Larger counts and costs are unknown ones.
_MAX_COUNT = 2**53
#: What servers say where prompt and new tokens are more than the context.
_TOO_LONG = re.compile(r"context.length|maximum context|positions", re.IGNORECASE)
_KEPT = "earlier answers are kept, and the same command goes on from there"


@dataclass(frozen=True)
class EndpointAnswer:
    """The text of an answer with its thinking in tags, its finish reason, its costs, and what the server says.

    `prompt_digest` is a digest of the prompt's tokens, empty if the server does not return them.
    """

    text: str
    finish: str
    costs: Costs
    server: Mapping[str, str] = field(default_factory=dict)
    prompt_digest: str = ""


@dataclass
class Endpoint:
    """An endpoint by its address (`http://host:port`, with or without `/v1`), a model it serves, and a key."""

    url: str
    model: str = ""
    key: str | None = field(default=None, repr=False)
    #: What the endpoint says of the model.
    about: Mapping[str, Any] = field(default_factory=dict, init=False)
    #: The fields that it refused, which are sent no more.
    left_out: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError
        except ValueError:
            expected = "expected http://HOST:PORT or https://HOST, with or without /v1"
            raise KvatlasError(f"{self.url!r} is not an address; {expected}.") from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise KvatlasError("The address has a user, a query or a fragment; keys come from the environment alone.")
        if self.key and not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise KvatlasError("The key in KVATLAS_API_KEY holds characters that no header can have.")
        path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{path}/v1"

    @property
    def refused_fields(self) -> list[str]:
        """The sampling fields that it refused."""
        return sorted(self.left_out - {"return_token_ids"})

    def check_model(self) -> None:
        """Find the only model of the endpoint, or check the given one; KvatlasError lists the models it has."""
        by_name = self.models(*self._exchange("models")[:2])
        names = list(by_name)
        if not self.model and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            if not names:
                raise KvatlasError(f"{self.url} lists no model that has a name of printable characters.")
            fault = f"no model {self.model!r}" if self.model else "several models"
            raise self._error(f"{self.url} has {fault}; name one with --served: {', '.join(names)}.")
        self.about = by_name[self.model]

    def models(self, status: int, body: Any) -> dict[str, dict[str, int | str]]:
        """Return what the list of models says of each, by its name, in short texts and numbers."""
        rows = self._checked("models", status, body).get("data")
        if not isinstance(rows, list):
            raise self._nonsense("models", body)
        by_name: dict[str, dict[str, int | str]] = {}
        for row in rows:
            model = row.get("id") if isinstance(row, dict) else None
            # A name that holds the key, or is long or unprintable, cannot be stored and asked for.
            if not model or self.short_text(model) != model:
                continue
            about = by_name[model] = {}
            for name, value in row.items():
                if isinstance(value, int | str) and value != "":
                    about[self.short_text(name)] = value if isinstance(value, int) else self.short_text(value)
        return by_name

    def look(self, path: str) -> tuple[int, Any]:
        """Return status and body at a path of the server, asked once. Raises KvatlasError if it cannot be reached."""
        address = f"{self.url.removesuffix('/v1')}/{path.lstrip('/')}"
        try:
            status, _, raw = self._send(address, None, threading.Event(), LOOK_SECONDS)
        except (httpx.HTTPError, ValueError, ImportError) as error:
            raise self._error(f"{address} cannot be reached ({reason(error)})") from None
        return status, _json_or_text(raw)

    def ask(
        self, question: str, sampling: Mapping[str, Any], seed: int, stopped: threading.Event | None = None
    ) -> EndpointAnswer:
        """Return the answer to one user message; KvatlasError soon after `stopped` is set.

        `sampling` has the names of `core.Sampling`; other names are fields of the request. Optional fields that the
        endpoint refuses are left out from then on, once the request without them is answered: a refusal for another
        reason may name any field. Cache costs are read from the field that `kvatlas serve` adds.
        """
        fields = {"model": self.model, "messages": [{"role": "user", "content": question}], "seed": seed}
        # All sampling fields, those without effect included.
        fields |= {"return_token_ids": True, **NEUTRAL, **sampling}
        fields["max_tokens"] = fields.pop("max_new_tokens")
        # Off is -1 for vLLM, SGLang and llama.cpp; SGLang refuses 0.
        fields["top_k"] = fields["top_k"] or -1
        left_out = set(self.left_out)
        while True:
            content = {name: value for name, value in fields.items() if name not in left_out}
            began = time.monotonic()
            status, body, server_name = self._exchange("chat/completions", content, stopped)
            seconds = time.monotonic() - began
            if status not in (400, 422):
                break
            # The first optional field that the refusal names.
            refused = _OPTIONAL.search(body if isinstance(body, str) else json.dumps(body))
            if refused is None or refused[0] not in content:
                break
            left_out.add(refused[0])

        body = self._checked("chat/completions", status, body)
        self.left_out |= left_out
        try:
            (choice,) = body["choices"]
            message = choice["message"]
            thinking = _text_of_content(message.get("reasoning_content")) or _text_of_content(message.get("reasoning"))
            text = reading.join_thinking(thinking, _text_of_content(message.get("content")))
            # Half a character cannot be stored: UnicodeEncodeError is a ValueError.
            text.encode()

            usage = body.get("usage") or {}
            details = usage.get("completion_tokens_details") or {}
            cache = choice.get("kvatlas") or {}
            mean: Any = cache.get("mean_kv_tokens")
            costs = Costs(
                prompt_tokens=_known_count(usage.get("prompt_tokens")),
                output_tokens=_known_count(usage.get("completion_tokens")),
                thinking_tokens=_known_count(details.get("reasoning_tokens")),
                peak_kv_tokens=_known_count(cache.get("peak_kv_tokens")),
                mean_kv_tokens=float(mean) if type(mean) in (int, float) and 0 <= mean < _MAX_COUNT else None,
                compressions=_known_count(cache.get("compressions")),
                seconds=seconds,
            )
            said = {name: body.get(name) for name in ("model", "system_fingerprint")} | {"server": server_name}
            server = {name: self.short_text(value) for name, value in said.items() if isinstance(value, str) and value}
            prompt = body.get("prompt_token_ids")
            prompt_digest = digest(prompt)[:16] if isinstance(prompt, list) and prompt else ""
            return EndpointAnswer(text, self.short_text(choice.get("finish_reason")), costs, server, prompt_digest)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._nonsense("chat/completions", body) from None

    # -- requests ------------------------------------------------------------------------------------------------------

    def _exchange(
        self, path: str, content: Mapping[str, Any] | None = None, stopped: threading.Event | None = None
    ) -> tuple[int, Any, str]:
        """Send a request, again while the endpoint is busy or a connection breaks.

        Return status, body and the name of the server. The key goes to this address alone, without redirects. The
        request for the models fails at once if the endpoint cannot be reached.
        """
        stopped = stopped or threading.Event()
        for attempt in range(1, _TRIES + 1):
            # Twice the seconds before the attempt before.
            wait = _FIRST_PAUSE * 2.0 ** (attempt - 1)
            try:
                status, headers, raw = self._send(f"{self.url}/{path}", content, stopped, SECONDS)
            except (httpx.HTTPError, ValueError, ImportError) as error:
                is_broken = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
                if is_broken and content is not None and attempt < _TRIES:
                    _pause(wait, stopped)
                    continue
                way_out = _KEPT if content is not None else "expected http://HOST:PORT/v1 of a server that runs"
                if "WRONG_VERSION_NUMBER" in str(error):
                    way_out = "write http://, as it does not speak https"
                raise self._error(f"{self.url} cannot be reached ({reason(error)}); {way_out}.") from None
            if status not in _AGAIN or attempt == _TRIES:
                break
            asked_wait = _retry_after(headers.get("Retry-After", ""))
            wait = wait if asked_wait is None else asked_wait
            if not wait <= LONGEST_WAIT:
                raise KvatlasError(f"{self.url} asks to wait for {wait:g} s; {_KEPT}.")
            _pause(wait, stopped)
        return status, _json_or_text(raw), headers.get("Server", "")

    @cached_property
    def _client(self) -> httpx.Client:
        """One client for all requests, each with a connection of its own: servers close idle ones at any time.

        A server on this machine is never asked through the proxy of the environment. Reading certificates takes longer
        than a request, and without TLS there is nothing to verify.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        is_local = LOOPBACK.search(self.url) is not None
        has_certificates = self.url.startswith("https") or not is_local
        return httpx.Client(limits=limits, trust_env=not is_local, verify=has_certificates)

    def _send(
        self, address: str, content: Mapping[str, Any] | None, stopped: threading.Event, seconds: float
    ) -> tuple[int, httpx.Headers, bytes]:
        """Send a request once; return status, headers and the unpacked body, which are limited in size and time."""
        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        method = "GET" if content is None else "POST"

        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        end = time.monotonic() + seconds
        raw = bytearray()
        with self._client.stream(method, address, json=content, headers=headers, timeout=timeout) as answer:
            for piece in answer.iter_bytes():
                raw += piece
                if len(raw) > MAX_BODY:
                    raise KvatlasError(f"{address} answers more than {MAX_BODY:,} bytes; {_KEPT}.")
                if time.monotonic() > end:
                    raise KvatlasError(f"{address} needs more than {seconds:g} s for an answer; {_KEPT}.")
                if stopped.is_set():
                    raise KvatlasError("Stopped.")
        return answer.status_code, answer.headers, bytes(raw)

    # -- what a server says --------------------------------------------------------------------------------------------

    def _checked(self, path: str, status: int, body: Any) -> dict[str, Any]:
        """Return a body that is a JSON object of a request that was answered; KvatlasError for others."""
        if status == httpx.codes.OK:
            if isinstance(body, dict):
                return body
            raise self._nonsense(path, body)

        # Of JSON without its escapes; masked before it is cut.
        message = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        said = self.masked(message).strip()
        refusal = f"refuses the request: {reason(ValueError(said))}" if said else "answers without a text"
        if status in (401, 403):
            refusal = "does not accept the key in KVATLAS_API_KEY" if self.key else "asks for a key in KVATLAS_API_KEY"
        elif 300 <= status < 400:
            refusal = "redirects to another address; give that one, keys are not sent on"
        elif status == 404 and path == "models":
            refusal = "does not exist, so this is not an OpenAI-compatible API; expected http://HOST:PORT/v1"
        elif said and _TOO_LONG.search(said):
            refusal += "; ask for fewer new tokens, with --max-new-tokens or sampling.max_new_tokens of a spec"
        elif status in _AGAIN:
            refusal = f"is busy or failed {_TRIES} times; {_KEPT}"
        raise self._error(f"{self.url}/{path} (HTTP {status}) {refusal}.")

    def _nonsense(self, path: str, body: object) -> KvatlasError:
        message = self.masked(str(body))[:120]
        return self._error(
            f"{self.url}/{path} does not answer as an OpenAI-compatible API at http://HOST:PORT/v1: {message!r}."
        )

    def _error(self, sentence: str) -> KvatlasError:
        """Return an error whose sentence holds words of the server."""
        return KvatlasError(self.masked(sentence))

    def short_text(self, value: object) -> str:
        """Return a value of the server as a short text that can be stored and printed."""
        text = self.masked(str(value))
        return (text if text.isprintable() else ascii(text)[1:-1])[:_LONGEST_NAME]

    def masked(self, text: str) -> str:
        """Return words of the server without the key, however it is written; usual finish reasons are no keys."""
        if not self.key or len(self.key) < 4 or text in ("stop", "length"):
            return text
        return self._key_spellings.sub("***", text)

    @cached_property
    def _key_spellings(self) -> re.Pattern[str]:
        """The key in any case, with each character as it is or escaped, as in addresses and in JSON."""
        characters = []
        for character in self.key or "":
            plain = re.escape(character)
            characters.append(f"(?:{plain}|%{ord(character):02x}|\\\\+u{ord(character):04x}|\\\\+{plain})")
        return re.compile("".join(characters), re.IGNORECASE)


def _retry_after(header: str) -> float | None:
    """Return the seconds that a Retry-After asks for, as a number or as a date; None if it says neither."""
    with suppress(ValueError):
        return max(0.0, float(header))
    # Dates of any year, which a clock may not have.
    with suppress(ValueError, OverflowError, OSError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _pause(seconds: float, stopped: threading.Event) -> None:
    """Wait; raise KvatlasError at once if asking is stopped."""
    if stopped.wait(seconds):
        raise KvatlasError("Stopped.")


def _json_or_text(raw: bytes) -> Any:
    """Return the value of a body in JSON, or its text; NaN and infinite numbers are None."""
    try:
        return json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return raw.decode(errors="backslashreplace")


def _text_of_content(content: Any) -> str:
    """Return the text of a message, which may be missing or come in parts; TypeError for content that is no text."""
    if content is None:
        return ""
    if isinstance(content, list):
        content = "".join(piece["text"] for piece in content)
    if not isinstance(content, str):
        raise TypeError(f"the content is {content!r}")
    return content


def _known_count(value: Any) -> int | None:
    """Return the value if it is an integer that a count can be; None for others, which servers may send."""
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None
