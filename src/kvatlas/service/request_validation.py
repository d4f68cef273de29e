"""What can be asked for: one prompt under one policy, checked before anything is decoded."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import CompressingPolicy, Policy, Signal
from kvatlas.service.detokenizer import Detokenizer
from kvatlas.service.logits import Steerer, Steering
from kvatlas.text import read_value

#: New tokens where nobody says how many: the published number.
MOST_NEW_TOKENS = Sampling().max_new_tokens


class LengthError(KvatlasError):
    """Prompt and new tokens are more than the model has positions for."""


@dataclass(frozen=True)
class GenerationRequest:
    """One generation to be made: token ids of the prompt, how to draw, its random stream, texts that end it.

    With `split` thinking is told apart from the answer, and only the answer is searched for the texts of `stop`;
    without it all that the model writes is searched. `opened` says whether the prompt opens thinking, by default
    whether the chat template does; `steering` is what is done to its logits.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stream: int
    stop: tuple[str, ...] = ()
    split: bool = True
    opened: bool | None = None
    steering: Steering = field(default_factory=Steering)

    def detokenizer(self, model: ModelHandle) -> Detokenizer:
        """What tells its thinking, its answer and its stop texts apart, at the beginning."""
        return Detokenizer(model, self.stop, self.split, self.opened)

    def steerer(self) -> Steerer | None:
        """What changes its logits and notes them; None where nothing does."""
        return Steerer(self.steering, len(self.prompt)) if self.steering else None


def chosen(model: ModelHandle, policy: str, values: dict[str, Any]) -> Policy:
    """The policy of that name for this model; values that are None are left out, texts are read by their type.

    Raises KvatlasError for unknown or missing parameters, and for policies that look at a finished trace.
    """
    owner = policies.policies.get(policy)
    given = {
        name: read_value(owner, name, value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }
    if policy == "full":
        # So that one command line serves for the full cache too, as a baseline of the others.
        shared = {field.name for field in fields(CompressingPolicy)}
        given = {name: value for name, value in given.items() if name not in shared}
    made = policies.of(Setting.of(policy, **given))
    if Signal.ANSWER in made.observes:
        raise KvatlasError(
            f"The policy {policy!r} looks at the finished full-cache trace of the same sample, which only a sweep has."
        )
    made.check(model)
    return made


def stream_of(seed: int | None, prompt: tuple[int, ...], sample: int) -> int:
    """The random stream of the `sample`-th answer (from 0) to a prompt; without a seed one that nobody can predict."""
    if seed is None:
        return secrets.randbits(63)
    return stream_key("ask", seed, " ".join(map(str, prompt)), sample)


def drawing(sampling: Sampling, **changes: Any) -> Sampling:
    """The sampling with what is not None among `changes`; KvatlasError names what is out of its range."""
    changed = replace(sampling, **{name: value for name, value in changes.items() if value is not None})
    limits = {
        "temperature": (changed.temperature, 0 <= changed.temperature <= 10, "numbers from 0 to 10"),
        "top_p": (changed.top_p, 0 < changed.top_p <= 1, "numbers above 0, up to 1"),
        "top_k": (changed.top_k, changed.top_k >= 0, "whole numbers from 0 (off) up"),
        "max_new_tokens": (changed.max_new_tokens, changed.max_new_tokens >= 1, "whole numbers from 1 up"),
    }
    for name, (value, fits, valid) in limits.items():
        if not fits:
            raise KvatlasError(f"{name} is {value!r}; valid are {valid}.")
    return changed


def room_for(model: ModelHandle, policy: Policy, prompt: tuple[int, ...], wanted: int | None) -> int:
    """New tokens for this prompt: `wanted`, else as many as the model has positions for, at most the published number.

    Raises LengthError if prompt and new tokens are more than the model has positions for, KvatlasError if the prompt is
    empty or no compression could get below the KV budget.
    """
    if not prompt:
        raise KvatlasError("The prompt is empty; valid are prompts of one token or more.")
    known = model.positions
    left = MOST_NEW_TOKENS if known is None else known - len(prompt)
    if left < 1 or (wanted is not None and known is not None and wanted > left):
        raise LengthError(
            f"The model has {known} positions: a prompt of {len(prompt)} tokens and {wanted or 1} new tokens are more."
        )
    if isinstance(policy, CompressingPolicy):
        policy.check_prompt(len(prompt), "this prompt")
    return min(MOST_NEW_TOKENS, left) if wanted is None else wanted
