"""What a request does to its logits: biases, penalties, a grammar that its answer follows; what it notes of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle

if TYPE_CHECKING:
    from torch import Tensor

#: Characters of a JSON schema.
MOST_SCHEMA = 100_000
#: What may stand between the tokens of JSON: enough to indent it, and no end of blanks.
_BETWEEN = r"[ \n]{1,16}"


@dataclass(frozen=True)
class Steering:
    """Added to logits: `bias` by token; `frequency` times as often as a token was written, `presence` once if it was.

    `grammar` is one of llguidance, from `json_grammar`; thinking is left out of it. With `top_logprobs` the
    log-probabilities of the drawn token and of so many of the likeliest are noted, as the model has them.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    frequency: float = 0.0
    presence: float = 0.0
    grammar: str = ""
    top_logprobs: int | None = None

    def __bool__(self) -> bool:
        return self != Steering()


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability (natural) of a drawn token, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Steerer:
    """The logits of one generation while it is decoded, by the engine's thread alone."""

    def __init__(self, steering: Steering, model: ModelHandle, prompt: int, split: bool, opened: bool) -> None:
        self.steering, self.prompt = steering, prompt
        self.logprobs: list[TokenLogprob] = []
        self._grammar = _Grammar(steering.grammar, model, split, opened) if steering.grammar else None
        self._seen: Tensor | None = None

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """The logits [vocabulary] of the next token, given prompt and new tokens."""
        steering, new = self.steering, tokens[self.prompt :]
        if steering.top_logprobs is not None:
            self._seen = logits.float().log_softmax(-1)
        if steering.bias:
            ids = list(steering.bias)
            logits[ids] += logits.new_tensor(list(steering.bias.values()))
        if new and (steering.frequency or steering.presence):
            counts = Counter(new)
            logits[list(counts)] -= steering.frequency * logits.new_tensor(list(counts.values())) + steering.presence
        return logits if self._grammar is None else self._grammar(new, logits)

    def note(self, token: int) -> None:
        """A token was drawn."""
        if self._seen is not None:
            best = self._seen.topk(self.steering.top_logprobs or 0)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self.logprobs.append(TokenLogprob(token, float(self._seen[token]), top))
            self._seen = None


class _Grammar:
    """Keeps an answer to a grammar; thinking before it is free."""

    def __init__(self, grammar: str, model: ModelHandle, split: bool, opened: bool) -> None:
        self._matcher = _library().LLMatcher(_tokenizer(model), grammar, log_level=0)
        self._stops, self._unwritten = sorted(model.stops), _unwritten(model)
        self._tags, self._consumed = model.thinking, 0
        # Without an opening tag in the prompt the first token says whether the model thinks.
        may_think = split and bool(self._tags.close)
        self._opening = (
            {model.tokenizer.encode(self._tags.open, add_special_tokens=False)[0]}
            if (may_think and self._tags.open and not opened)
            else set()
        )
        self._thinking = may_think and (opened or not self._tags.open)

    def __call__(self, new: Sequence[int], logits: Tensor) -> Tensor:
        import numpy as np
        import torch

        if len(new) == 1 and new[0] in self._opening:
            self._thinking = True
        if self._thinking:
            begin = self._answer(new)
            if begin is None:
                return logits
            self._thinking, self._consumed = False, begin
        for token in new[self._consumed :]:
            self._matcher.consume_token(token)
        self._consumed = len(new)
        allowed = np.zeros(len(logits), dtype=bool)
        if not (self._matcher.is_stopped() or self._matcher.is_error()):
            bits = _next_tokens(self._matcher, self._unwritten)
            allowed[: len(bits)] = bits[: len(logits)]
            if not new:
                allowed[list(self._opening)] = True
        if not allowed.any():
            # Whatever stands there is finished.
            allowed[self._stops] = True
        return logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))

    def _answer(self, new: Sequence[int]) -> int | None:
        """Where the answer begins; None while the model thinks."""
        if self._tags.token is not None:
            return len(new) if new and new[-1] == self._tags.token else None
        return len(new) if new and self._tags.end(new) is not None else None


def _next_tokens(matcher: Any, unwritten: list[int]) -> Any:
    """Which tokens may come next, as an array of truth values by token (and a few more, for whole bytes)."""
    import numpy as np

    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").astype(bool)
    allowed[unwritten] = False
    return allowed


def _unwritten(model: ModelHandle) -> list[int]:
    """Tokens that stand for no text, which the library takes for the text of their names."""
    unwritten = {model.tokenizer.unk_token_id, model.tokenizer.pad_token_id} - {None, *model.stops}
    return sorted(unwritten)


def json_grammar(schema: Mapping[str, Any] | bool, model: ModelHandle) -> str:
    """The grammar of JSON texts that a schema allows (`{"type": "object"}` for any object).

    Raises KvatlasError for a schema that is none or not supported, for a tokenizer whose tokens are no bytes, and
    without the library.
    """
    if len(json.dumps(schema)) > MOST_SCHEMA:
        raise KvatlasError(f"The JSON schema has more than {MOST_SCHEMA:,} characters, the most that is read.")
    try:
        grammar = _library().LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _BETWEEN})
    except ValueError as error:
        raise KvatlasError(f"The JSON schema is not valid ({error}).") from error
    return _checked(grammar, model)


def lark_grammar(grammar: str, model: ModelHandle) -> str:
    """A grammar in the Lark dialect of llguidance; KvatlasError as `json_grammar`."""
    if len(grammar) > MOST_SCHEMA:
        raise KvatlasError(f"The tools have more than {MOST_SCHEMA:,} characters, the most that is read.")
    return _checked(str(_library().LLMatcher.grammar_from_lark(grammar)), model)


@lru_cache(maxsize=64)
def _checked(grammar: str, model: ModelHandle) -> str:
    matcher = _library().LLMatcher
    failed, said = matcher.validate_grammar_with_warnings(grammar, _tokenizer(model))
    if failed:
        raise KvatlasError(f"The JSON schema is not supported ({said[0].splitlines()[0]}).")
    if not _next_tokens(matcher(_tokenizer(model), grammar, log_level=0), _unwritten(model)).any():
        raise KvatlasError(f"The tokenizer of {model.name!r} cannot write JSON: none of its tokens begins it.")
    return grammar


@lru_cache(maxsize=4)
def _tokenizer(model: ModelHandle) -> Any:
    _library()
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(model.tokenizer, eos_token=sorted(model.stops))
    except Exception as error:
        raise KvatlasError(
            f"The tokenizer of {model.name!r} cannot write constrained JSON ({str(error).splitlines()[0]})."
        ) from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise KvatlasError("JSON output needs the extra: pip install 'kvatlas[serve]'.") from error
    return llguidance
