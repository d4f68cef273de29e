"""Local models under token selection as the model class `kvatlas` of EleutherAI's lm-evaluation-harness.

    kvatlas lm-eval run --model kvatlas --model_args pretrained=hf:OWNER/NAME,policy=dynts,kv_budget=5000,... --tasks T

`generate_until` runs on the engine, all requests of a task as one stream of batches. `loglikelihood` scores given
texts and generates nothing, so no compression can fire: it is the harness's own, with the full cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from kvatlas.core import KvatlasError, Sampling
from kvatlas.engine import Engine, Request
from kvatlas.models import Options, embedded, find
from kvatlas.models.gguf import PACKAGED
from kvatlas.serve.service import find_policy, room_for, sampling_with, stream_of
from kvatlas.serve.text import Detokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from kvatlas.engine import Generation

#: Sequences decoded together where nobody says how many: answers do not depend on it.
ROWS = 32
_log = logging.getLogger("kvatlas")
#: The harness's own words for how to generate; others are refused by name.
_KNOWN = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}


@register_model("kvatlas")
class SelectedLM(HFLM):
    """A model of ours under one setting. Token ids, chat templates and log-likelihoods are the harness's.

    Arguments (`--model_args`): `pretrained` (embedded:NAME, hf:FOLDER or hf:OWNER/NAME; without a prefix a folder or
    hub id), `policy`, `kv_budget`, `local_window`, `ratio` and every other parameter of the policy; the model options
    (`dtype`, `device`, `think_close`, ...); `batch_size` (1, the harness's default, and auto stand for 32: answers are
    the same); `seed`; `max_gen_toks` where a task names no number.
    What the model thinks is left out of its answers, as tasks grade them; stop texts are searched for in the answer.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str = "full",
        batch_size: int | str = ROWS,
        max_batch_size: int | None = None,
        device: str | None = None,
        seed: int = 0,
        max_gen_toks: int | None = None,
        add_bos_token: bool = False,
        **arguments: Any,
    ) -> None:
        known = {field.name for field in fields(Options)} - {"device"}
        options = {name: value for name, value in arguments.items() if name in known}
        address = pretrained if pretrained.startswith(("hf:", *embedded(), *PACKAGED)) else f"hf:{pretrained}"
        # The harness says cuda:0 where its user says nothing, also on machines without a GPU.
        if device and not (device.startswith("cuda") and not torch.cuda.is_available()):
            options["device"] = device
        self.atlas = find(address, **options)
        self.atlas.check()
        for note in self.atlas.notes:
            _log.warning(note)
        self.policy = find_policy(self.atlas, policy, {n: v for n, v in arguments.items() if n not in known})
        self.rows, self.seed, self.wanted = _rows(batch_size), seed, max_gen_toks
        super().__init__(
            self.atlas.load(),
            tokenizer=self.atlas.tokenizer,
            batch_size=self.rows,
            add_bos_token=add_bos_token,
            max_length=self.atlas.positions,
        )

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task names no number."""
        return self.wanted or int(super().max_gen_toks)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to (context, generation arguments), in their order; equal contexts get one sample after another.

        Raises KvatlasError for generation arguments that are not honoured.
        """
        seen: Counter[tuple[int, ...]] = Counter()
        asked: list[tuple[Request[int], Detokenizer]] = []
        for number, request in enumerate(requests):
            context, arguments = request.args
            prompt = tuple(self.tok_encode(context))
            sampling, stop = self._how(prompt, arguments)
            opened = context.rstrip().endswith(self.atlas.thinking.open or "\0")
            text, until = (Detokenizer(self.atlas, stop, opened=opened) for _ in range(2))
            request_ = Request(
                number,
                prompt,
                stream_of(self.seed, prompt, seen[prompt]),
                (self.policy,),
                sampling=sampling,
                stopping_criterion=_until(until) if stop else None,
            )
            seen[prompt] += 1
            asked.append((request_, text))
        answers = [""] * len(asked)
        for generation in tqdm(self._run(asked), total=len(asked), disable=disable_tqdm, desc="generate_until"):
            _, text = asked[generation.key]
            _, answer = text.push(generation.tokens, last=True)
            # Right after thinking comes the space between it and the answer, which tasks do not expect.
            answers[generation.key] = answer.lstrip() if self.atlas.thinking.close else answer
            self.cache_hook.add_partial("generate_until", requests[generation.key].args, answers[generation.key])
        return answers

    def _run(self, asked: Sequence[tuple[Request[int], Detokenizer]]) -> Iterator[Generation[int]]:
        engine = Engine(self.atlas, self.model, [self.policy], Sampling(), min(self.rows, max(1, len(asked))))
        return engine.run(request for request, _ in asked)

    def _how(self, prompt: tuple[int, ...], arguments: dict[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
        """Sampling and stop texts of one request."""
        given = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        others = sorted(name for name, value in given.items() if name not in _KNOWN and value is not None)
        if others:
            raise KvatlasError(f"The generation argument {others[0]} is not supported; expected {', '.join(_KNOWN)}.")
        most = room_for(self.atlas, self.policy, prompt, None)
        sampling = sampling_with(
            Sampling(top_k=0, top_p=1.0),
            temperature=given.get("temperature", 0.0),
            top_p=given.get("top_p"),
            top_k=given.get("top_k"),
            max_new_tokens=min(most, given["max_gen_toks"]),
        )
        return sampling, tuple(text for text in handle_stop_sequences(given.get("until"), eos=None) if text)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probabilities of given texts, with the full cache."""
        self._note()
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The same of whole texts."""
        self._note()
        return list(super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm))

    def _note(self) -> None:
        if self.policy.budget is not None:
            _log.warning(
                "Log-likelihoods are of the full cache: nothing is generated, so %s never compresses.", self.policy.name
            )


def _rows(batch_size: int | str) -> int:
    """Sequences decoded together. 1 is what the harness says where its user says nothing."""
    if str(batch_size) in ("1", "auto"):
        return ROWS
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise KvatlasError(f"batch_size is {batch_size!r}; expected whole numbers from 2 up, 1 and auto for {ROWS}.")
    return int(batch_size)


def _until(text: Detokenizer) -> Callable[[Sequence[int]], bool]:
    def stopping_criterion(tokens: Sequence[int]) -> bool:
        text.push(tokens)
        return text.stopped

    return stopping_criterion
