"""Asking an OpenAI-compatible endpoint: one question at a time, whatever it answers, and no key in what is said."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvatlas.core import KvatlasError, reason

#: Bytes of an answer; seconds for one; seconds that an endpoint may ask to wait.
MOST_BYTES, SECONDS, LONGEST_WAIT = 2**26, 1800.0, 120.0
#: The server is busy or fails for a moment.
_AGAIN = (429, 500, 502, 503, 504)
_TRIES = 6
_KEPT = "what was answered before is kept, and the same command goes on from there"


@dataclass(frozen=True)
class Answer:
    """What an endpoint answered: thinking (None where it does not tell it apart), text, why it stopped, and its usage.

    `cache` is what `kvatlas serve` adds about the answer's cache.
    """

    thinking: str | None
    text: str
    finish: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    cache: Mapping[str, Any]
    seconds: float


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to the address that was given and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass
class Endpoint:
    """An endpoint by its address (`http://host:port`, with or without `/v1`), a model it serves, and a key.

    Raises KvatlasError for an address that is none, or one with a user or a query in it.
    """

    url: str
    model: str = ""
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            valid = False
        if not valid:
            raise KvatlasError(f"{self.url!r} is no address; valid are http://HOST:PORT and https://HOST, /v1 or not.")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise KvatlasError("The address has a user, a query or a fragment; keys come from the environment alone.")
        path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"
        self._open = urllib.request.build_opener(_NoRedirect).open

    def check_model(self) -> None:
        """Find the only model that is served, or the one that was named; KvatlasError names those that are there."""
        body = self._json("models")
        rows = body.get("data")
        if not isinstance(rows, list):
            raise self._nonsense("models", body)
        names = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
        if not self.model and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            asked = f"no model {self.model!r}" if self.model else "several models"
            raise KvatlasError(f"{self.url} has {asked}; name one with --served: {', '.join(names) or 'none'}.")

    def ask(self, question: str, sampling: Mapping[str, Any], seed: int) -> Answer:
        """The answer to one user message; `sampling` are fields of the request. KvatlasError in one sentence."""
        asked = {"model": self.model, "messages": [{"role": "user", "content": question}], "seed": seed, **sampling}
        began = time.monotonic()
        body = self._json("chat/completions", asked)
        try:
            (choice,) = body["choices"]
            message, usage = choice["message"], body.get("usage") or {}
            thinking = message.get("reasoning_content") or message.get("reasoning")
            text = message.get("content") or ""
            if not isinstance(text, str) or not isinstance(thinking, str | None):
                raise TypeError("content is no text")
            details = usage.get("completion_tokens_details") or {}
            counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("reasoning_tokens"))
            finish, cache = choice.get("finish_reason"), choice.get("kvatlas") or {}
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._nonsense("chat/completions", body) from None
        prompt, output, thought = (count if isinstance(count, int) and count >= 0 else None for count in counts)
        return Answer(thinking, text, finish, prompt, output, thought, cache, time.monotonic() - began)

    def _json(self, path: str, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
        for attempt in range(_TRIES):
            text, wait = self._once(path, asked, last=attempt == _TRIES - 1)
            if text is not None:
                break
            self._sleep(wait if wait is not None else 2.0**attempt)
        try:
            body = json.loads(text or "")
        except (ValueError, RecursionError):
            body = text
        if not isinstance(body, dict):
            raise self._nonsense(path, body)
        return body

    def _once(self, path: str, asked: Mapping[str, Any] | None, last: bool) -> tuple[str | None, float | None]:
        """The body of an answer, or how long to wait before the next try (None: as long as tries make it)."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        try:
            with self._open(request, timeout=SECONDS) as answer:
                body = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            said = self._hidden(error.read(2000).decode(errors="replace"))
            if error.code in _AGAIN and not last:
                return None, _retry_after(error.headers.get("Retry-After"))
            raise KvatlasError(self._refusal(path, error.code, said)) from None
        except (OSError, ValueError) as error:
            cause = self._hidden(reason(getattr(error, "reason", error)))
            raise KvatlasError(f"{self.url} cannot be asked ({cause}); {_KEPT}.") from None
        if len(body) > MOST_BYTES:
            raise KvatlasError(f"{self.url}/{path} answers with more than {MOST_BYTES:,} bytes.")
        return self._hidden(body.decode(errors="replace")), None

    def _sleep(self, seconds: float) -> None:
        if seconds > LONGEST_WAIT:
            raise KvatlasError(f"{self.url} asks to wait for {seconds:g} s; {_KEPT}.")
        time.sleep(seconds)

    def _refusal(self, path: str, code: int, said: str) -> str:
        if code in (401, 403):
            given = "does not take the key" if self.key else "asks for a key; name its variable with --key-env"
            return f"{self.url} {given} (HTTP {code})."
        if 300 <= code < 400:
            return f"{self.url} leads to another address (HTTP {code}); give that one, keys are not sent on."
        if code == 404 and path == "models":
            return f"There is no OpenAI-compatible API at {self.url} (HTTP 404 for /models)."
        if code in _AGAIN:
            return f"{self.url}/{path} is busy or fails (HTTP {code}, {_TRIES} times); {_KEPT}."
        return f"{self.url}/{path} refuses the request (HTTP {code}): {reason(ValueError(said))}."

    def _nonsense(self, path: str, body: object) -> KvatlasError:
        return KvatlasError(f"{self.url}/{path} answers what no OpenAI-compatible API does: {str(body)[:120]!r}.")

    def _hidden(self, text: str) -> str:
        """Without the key, should a server repeat it."""
        return text.replace(self.key, "***") if self.key and len(self.key) > 3 else text


def _retry_after(header: str | None) -> float | None:
    """Seconds of a `Retry-After` header; None where there is none or it is a date."""
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None
