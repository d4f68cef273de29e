"""An endpoint's texts at temperature 0, read here under the cell: would it have written the same tokens?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling
from kvatlas.deploy.answers import ask
from kvatlas.deploy.endpoint import Endpoint
from kvatlas.deploy.reference import Reference
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy, Signal
from kvatlas.stats.losses import NEAR, Departures
from kvatlas.sweeps.plan import run_key
from kvatlas.sweeps.spec import parse_spec

if TYPE_CHECKING:
    from torch import Tensor

#: Texts that are read together.
BATCH_SIZE = 8
#: More new tokens than any text has.
_NEVER = 2**31 - 1


def compare(
    endpoint: Endpoint,
    reference: Reference,
    folder: Path,
    problems: int,
    *,
    concurrency: int = 8,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> list[Departures]:
    """Ask for so many answers at temperature 0, kept as a run in `folder`, and read them here under the cell.

    Raises KvatlasError, before anything is asked, if the model is not here as the run had it, or the policy's choice is
    no function of the text.
    """
    model, policy = _checked(reference)
    greedy = _greedy(reference, policy, problems)
    if not greedy.cells:
        return []
    answers = ask(endpoint, greedy, folder, samples=1, concurrency=concurrency, top_k=False, on_trace=on_trace)
    asked, opening = reference.benchmarks(), "" if model.opens_thinking else model.thinking.open
    texts = []
    for cell in greedy.cells:
        benchmark = asked[cell.benchmark]
        for problem in benchmark.problems(reference.run.manifest.spec["problems"]):
            if problem.id in cell.problems:
                text = answers[cell.benchmark, problem.id, 0].text
                thinking, close, _ = text.removeprefix("<think>").partition("</think>")
                texts.append((model.encode(benchmark.prompt(problem)), f"{opening}{thinking}" if close else text))
    return read(model, policy, texts)


def read(model: ModelHandle, policy: Policy, texts: Sequence[tuple[tuple[int, ...], str]]) -> list[Departures]:
    """Compare texts, each with its prompt's tokens, with the policy's greedy decoding, every token before it given.

    As many tokens are read behind the first compression as before it; texts that end before it are left out. So are the
    first token and the last, where servers strip blanks.
    """
    import torch

    from kvatlas.engine import Engine, Request

    torch.set_num_threads(1)
    sampling = Sampling(0.0, 0, 1.0, _NEVER)
    notes, requests = [], []
    for prompt, text in texts:
        first = _uncompressed(policy, len(prompt))
        script = model.tokens(text)[:-1][: 2 * first]
        if len(script) > first:
            notes.append(_Notes(model, len(prompt), script, first))
            length = replace(sampling, max_new_tokens=len(script))
            requests.append(Request(len(notes), prompt, 0, (policy,), sampling=length, logits_processor=notes[-1]))
    if requests:
        for _ in Engine(model, model.load(), [policy], sampling, min(BATCH_SIZE, len(requests))).run(requests):
            pass
    return [note.departures() for note in notes]


def _uncompressed(policy: Policy, prompt: int) -> int:
    """New tokens up to the first compression, the whole cache in view; `_NEVER` if there is none."""
    return _NEVER if policy.budget is None else policy.budget.due(prompt, prompt, prompt) - prompt + 1


class _Notes:
    """Makes a generation follow a script, and notes what would have been written instead."""

    def __init__(self, model: ModelHandle, prompt: int, script: tuple[int, ...], first: int) -> None:
        self.model, self.prompt, self.script, self.first = model, prompt, script, first
        self.near, self.other, self.far, self.gap = [0, 0], [0, 0], [0, 0], [0.0, 0.0]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [vocabulary] that leave the script's token alone."""
        at = len(tokens) - self.prompt
        written, side = self.script[at], int(at >= self.first)
        (most, second), (likeliest, _) = (part.tolist() for part in logits.float().topk(2))
        if at:
            self.near[side] += most - second < NEAR
            if likeliest != written and not self._same_text(at, likeliest):
                gap = most - float(logits[written])
                self.other[side] += 1
                self.far[side] += gap > NEAR
                self.gap[side] = max(self.gap[side], gap)
        forced = logits.new_full(logits.shape, float("-inf"))
        forced[written] = 0
        return forced

    def _same_text(self, at: int, likeliest: int) -> bool:
        """Whether the text goes on with that token's, so that it was cut into other tokens when it was read again."""
        decode = self.model.tokenizer.decode
        ahead = str(decode(list(self.script[at - 1 : at + 16]), skip_special_tokens=False))
        return ahead.startswith(str(decode([self.script[at - 1], likeliest], skip_special_tokens=False)))

    def departures(self) -> Departures:
        tokens = (self.first - 1, len(self.script) - self.first)
        return Departures(tokens, tuple(self.near), tuple(self.other), tuple(self.far), tuple(self.gap))


def _checked(reference: Reference) -> tuple[ModelHandle, Policy]:
    """The run's model, in the type that the run had, and the cell's policy; KvatlasError where they are not here."""
    spec = parse_spec(dict(reference.run.manifest.spec))
    policy = policies.of(reference.setting)
    fault = ""
    if policy.drawn or Signal.ANSWER in policy.observes:
        fault = (
            f"what {policy.name!r} keeps depends on more than the text (random numbers, or a trace of the full cache)"
        )
    elif policy.budget is None:
        fault = "it never compresses"
    if fault:
        raise KvatlasError(f"The texts of {reference.setting} cannot be compared: {fault}.")
    cell = reference.cells[0]
    benchmark = next(candidate for entry in spec.benchmarks if (candidate := entry.find()).name == cell.benchmark)
    named = [model for entry in spec.models if (model := entry.find()).name == reference.model]
    for model in named:
        model.check()
        for dtype in dict.fromkeys((model.dtype, "float32", "bfloat16", "float16")):
            typed = replace(model, options=replace(model.options, dtype=dtype))
            if run_key(spec, typed, benchmark, policy) == cell.run_key:
                return typed, policy
    raise KvatlasError(
        f"The texts of {reference.model!r} cannot be compared: here its weights, tokenizer or template, or the policy, "
        "are not those of the run."
    )


def _greedy(reference: Reference, policy: Policy, problems: int) -> Reference:
    """The same cell at temperature 0, on so many problems whose traces were compressed, each benchmark its share.

    Answers are as long as they are read.
    """
    traces = reference.traces(reference.setting)
    prompts = {key[:2]: trace.usage.prompt_tokens or 0 for key, trace in traces.items() if trace.usage.compressions}
    most = 2 * max((_uncompressed(policy, prompt) for prompt in prompts.values()), default=0) + 1
    share = -(-problems // len(reference.cells))
    chosen = (
        replace(cell, problems=tuple(islice((id_ for id_ in cell.problems if (cell.benchmark, id_) in prompts), share)))
        for cell in reference.cells
    )
    limit = min(most, int(reference.sampling["max_new_tokens"]))
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": limit}
    return replace(reference, sampling=sampling, cells=tuple(cell for cell in chosen if cell.problems))
