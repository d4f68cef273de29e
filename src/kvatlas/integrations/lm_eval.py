"""Local models under token selection as the model class `kvatlas` of EleutherAI's lm-evaluation-harness.

    python -m kvatlas.integrations.lm_eval run --model kvatlas --tasks T \\
        --model_args pretrained=hf:OWNER/NAME,policy=dynts,kv_budget=5000,...

`generate_until` runs on the engine, all requests of a task as one stream of batches. `loglikelihood` scores texts
without generation, so no compression can fire: it is the harness's own, with the full cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from kvatlas.core import KvatlasError, Sampling
from kvatlas.engine import Engine, Request
from kvatlas.serve.service import model_and_policy, next_stream, room_for, sampling_with
from kvatlas.serve.text_stream import Detokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

#: The default number of sequences to decode together: answers do not depend on it.
ROWS = 32
_log = logging.getLogger("kvatlas")
#: The supported generation arguments of the harness.
_SUPPORTED = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}


@register_model("kvatlas")
class SelectedLM(HFLM):
    """A local model under one setting. Token ids, chat templates and log-likelihoods are the harness's.

    Arguments (`--model_args`): `pretrained` (embedded:NAME, a folder, FILE.gguf or hf:OWNER/NAME), `policy`,
    `kv_budget`, `local_window`, `ratio` and every other parameter of the policy; the model options (`dtype`, `device`,
    `think_close`, ...); `batch_size` (1, the harness's default, and auto stand for 32: answers are the same); `seed`;
    `max_gen_toks` for tasks without their own.
    Answers exclude the thinking, as tasks grade them; stop texts are searched for in the answer.
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
        # The harness passes cuda:0 by default, also on machines without a GPU.
        if device and torch.cuda.is_available():
            arguments["device"] = device
        self.atlas, self.policy = model_and_policy(pretrained, policy, arguments)
        # 1 is the harness's default.
        self.rows = ROWS if str(batch_size) in ("1", "auto") else int(batch_size)
        self.seed = seed
        self.new_tokens = max_gen_toks
        super().__init__(
            self.atlas.load(),
            tokenizer=self.atlas.tokenizer,
            batch_size=self.rows,
            add_bos_token=add_bos_token,
            max_length=self.atlas.positions,
        )

    @property
    def max_gen_toks(self) -> int:
        return self.new_tokens or int(super().max_gen_toks)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to (context, generation arguments), in order; equal contexts get successive samples.

        Raises KvatlasError for unsupported generation arguments.
        """
        seen: Counter[tuple[int, ...]] = Counter()
        work = []
        for index, request in enumerate(requests):
            context, arguments = request.args
            prompt = tuple(self.tok_encode(context))
            sampling, stop = self._sampling(prompt, arguments)
            opened = context.rstrip().endswith(self.atlas.thinking.open or "\0")
            stopping_criterion = Detokenizer(self.atlas, stop, opened=opened).stops if stop else None
            work.append(
                Request(
                    # The finished text is read by a second detokenizer, from its beginning.
                    (index, Detokenizer(self.atlas, stop, opened=opened)),
                    prompt,
                    next_stream(self.seed, prompt, seen),
                    (self.policy,),
                    sampling=sampling,
                    stopping_criterion=stopping_criterion,
                )
            )
        answers = ["" for _ in work]
        engine = Engine(self.atlas, self.model, [self.policy], Sampling(), min(self.rows, max(1, len(work))))
        for generation in tqdm(engine.run(work), total=len(work), disable=disable_tqdm, desc="generate_until"):
            index, detokenizer = generation.key
            _, answer = detokenizer.push(generation.tokens, last=True)
            # Tasks do not expect the space between thinking and answer.
            answers[index] = answer.lstrip() if self.atlas.thinking.close else answer
            self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
        return answers

    def _sampling(self, prompt: tuple[int, ...], arguments: dict[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
        """Return sampling and stop texts of one request."""
        values = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        others = sorted(name for name, value in values.items() if name not in _SUPPORTED and value is not None)
        if others:
            raise KvatlasError(
                f"The generation argument {others[0]} is not supported; expected {', '.join(_SUPPORTED)}."
            )
        sampling = sampling_with(
            Sampling(top_k=0, top_p=1.0),
            temperature=values.get("temperature", 0.0),
            top_p=values.get("top_p"),
            top_k=values.get("top_k"),
            max_new_tokens=min(room_for(self.atlas, self.policy, prompt, None), values["max_gen_toks"]),
        )
        return sampling, tuple(text for text in handle_stop_sequences(values.get("until"), eos=None) if text)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._note()
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        self._note()
        return list(super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm))

    def _note(self) -> None:
        if self.policy.budget is not None:
            _log.warning(
                "Log-likelihoods are of the full cache: nothing is generated, so %s never compresses.", self.policy.name
            )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
