"""Training of DynTS heads and of heads for `learned` on full-cache traces.

A work folder keeps the traces as a resumable run, from which the next training takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvatlas import __version__, benchmarks
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.models import ModelHandle
from kvatlas.predictor.kv_heads import HeadExamples, evaluate_heads, examples_of, train_heads
from kvatlas.predictor.training import (
    REASONS,
    Examples,
    Quality,
    judge_head,
    label_trace,
    sample_tokens,
    save_head,
    train_head,
    why_left_out,
)
from kvatlas.results import Store
from kvatlas.sweeps.plan import Plan, make_plan
from kvatlas.sweeps.run import sweep
from kvatlas.sweeps.spec import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TrainingData:
    """Traces for training or evaluation: the full cache of one model on the problems from `skip` on.

    The last `held_out` problems of each benchmark are kept for evaluation, which uses all thinking tokens. Training
    samples `tokens_per_trace` of each trace (0: all).
    """

    spec: Spec
    skip: int = 0
    held_out: int = 0
    tokens_per_trace: int = 2048

    def plan(self) -> Plan:
        """Return the plan of the traces; KvatlasError if a benchmark has too few problems."""
        if len(self.spec.models) != 1:
            raise KvatlasError("A predictor is trained for one model; name one.")
        plan = make_plan(self.spec)
        problems: dict[str, list[Problem]] = {}
        for benchmark in plan.benchmarks:
            all_problems = plan.problems[benchmark.name]
            problems[benchmark.name] = list(all_problems[self.skip :])
            if len(problems[benchmark.name]) <= self.held_out:
                raise KvatlasError(
                    f"{benchmark.name} has {len(all_problems)} problems, and none without the first {self.skip} and "
                    f"the last {self.held_out} (held out)."
                )

        prompts = {key: lengths[self.skip :] for key, lengths in plan.prompts.items()}
        return replace(plan, problems=problems, prompts=prompts)


def learn(
    training_data: TrainingData,
    work: Path,
    out: Path,
    *,
    target: str = "answer",
    steps: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
    **options: Any,
) -> dict[str, Any]:
    """Train a head, evaluate it on the held-out problems, write it, and return its provenance.

    The `target` is the attention of the `answer`, for a head of DynTS, or that of all later tokens (`kv_head`), for the
    heads of `learned`. `on_step` is called with the steps of training that are done, and all. `options` are those of
    the sweep of the traces.
    """
    plan = training_data.plan()
    (model,) = plan.models
    if target == "answer":
        _check_thinks(model)
    sweep(plan, work / "run", replace=True, **options)

    traces = FullCacheTraces(training_data, plan, work)
    seed = training_data.spec.seed
    quality: Quality | None = None
    held_out_problems = bool(training_data.held_out)
    if target == "answer":
        examples, left_out = traces.of_answers(held_out=False)
        # Before the training, which takes minutes: this refuses held-out traces that cannot be used.
        judged, judged_left_out = traces.of_answers(held_out=True) if held_out_problems else (None, {})
        head = train_head(examples, steps=steps, seed=seed, device=model.device, on_step=on_step)
        counts = {"traces": int(examples.trace[-1]) + 1, "tokens": examples.label.numel()}
        if judged is not None:
            quality = judge_head(head, judged)
    else:
        examples_of_heads, left_out = traces.of_kv_heads(held_out=False)
        judged_heads, judged_left_out = traces.of_kv_heads(held_out=True) if held_out_problems else ([], {})
        head = train_heads(examples_of_heads, steps=steps, seed=seed, on_step=on_step)
        counts = {
            "traces": len(examples_of_heads),
            "tokens": sum(trace.target.shape[-1] for trace in examples_of_heads),
        }
        if judged_heads:
            quality = evaluate_heads(head, judged_heads)

    held_out = None
    if quality is not None:
        # Traces that were left out before the evaluation, and in it.
        held_out = asdict(quality)
        held_out["left_out"] = judged_left_out | {"one_label": held_out.pop("one_label")}
    provenance = _origin(training_data, plan) | counts
    provenance |= {"target": target, "steps": steps, "left_out": left_out, "held_out": held_out}
    save_head(out, head, provenance)
    return provenance


@dataclass(frozen=True)
class FullCacheTraces:
    """The traces of a plan in a work folder, as examples of either target.

    Methods return the examples of the problems for training, or of those that are held out, and count the traces that
    are left out by reason. They raise KvatlasError if all are.
    """

    training_data: TrainingData
    plan: Plan
    work: Path

    def of_answers(self, *, held_out: bool) -> tuple[Examples, dict[str, int]]:
        """Return the hidden states and labels of the thinking tokens of correct traces."""
        tokens = 0 if held_out else self.training_data.tokens_per_trace
        left_out = dict.fromkeys(REASONS, 0)
        examples = []
        for prompt, trace, reason in self._traces(held_out):
            if reason:
                left_out[reason] += 1
                continue
            labelled = label_trace(self.plan.models[0], self._loaded, prompt, trace.tokens)
            if labelled is not None:
                examples.append(sample_tokens(*labelled, tokens, self.training_data.spec.seed))
        _check_any(examples, left_out, held_out)
        return Examples.joined(examples), left_out

    def of_kv_heads(self, *, held_out: bool) -> tuple[list[HeadExamples], dict[str, int]]:
        """Return keys, values and the later attention to all tokens of traces, of which those of training are drawn."""
        tokens = 0 if held_out else self.training_data.tokens_per_trace
        generator = torch.Generator().manual_seed(self.training_data.spec.seed)
        left_out = dict.fromkeys(REASONS, 0)
        examples = []
        for prompt, trace, reason in self._traces(held_out):
            # All tokens of a text are labelled, so one without thinking tells as much.
            if reason not in ("", "no_thinking"):
                left_out[reason] += 1
                continue
            of_trace = examples_of(self.plan.models[0], self._loaded, [*prompt, *trace.tokens])
            if of_trace is None:
                continue
            count = of_trace.target.shape[-1]
            if tokens and count > tokens:
                sampled = torch.randperm(count, generator=generator)[:tokens].sort().values
                of_trace = HeadExamples(*(numbers[:, :, sampled] for numbers in of_trace))
            examples.append(of_trace)
        _check_any(examples, left_out, held_out)
        return examples, left_out

    @cached_property
    def _loaded(self) -> PreTrainedModel:
        torch.set_num_threads(1)
        return self.plan.models[0].load()

    def _traces(self, held_out: bool) -> Iterator[tuple[tuple[int, ...], Trace, str]]:
        """Yield the tokens of a prompt, its trace, and the reason why it is left out, or ""."""
        chosen: set[str] = set()
        for of_benchmark in self.plan.problems.values():
            first_held_out = len(of_benchmark) - self.training_data.held_out
            selected = of_benchmark[first_held_out:] if held_out else of_benchmark[:first_held_out]
            chosen.update(problem.id for problem in selected)

        (model,) = self.plan.models
        problems = self.plan.problems_by_id()
        by_name = {benchmark.name: benchmarks.for_model(benchmark, model.reads) for benchmark in self.plan.benchmarks}
        keys = set(self.plan.compute_keys().values())
        with Store.open(self.work / "run") as store:
            for key, trace in store.traces():
                problem = problems.get((trace.benchmark, trace.problem))
                if key in keys and problem is not None and trace.problem in chosen:
                    prompt = benchmarks.prompt_of(by_name[trace.benchmark], problem)
                    yield model.encode(prompt), trace, why_left_out(model, trace)


def _check_any(examples: Sequence[object], left_out: Mapping[str, int], held_out: bool) -> None:
    if not examples:
        purpose = "evaluation" if held_out else "training"
        raise KvatlasError(
            f"The predictor has no traces for {purpose}: of {sum(left_out.values())} traces "
            f"{left_out_as_text(left_out)}."
        )


def _check_thinks(model: ModelHandle) -> None:
    """Raise KvatlasError for a model without think tags: labels are the answer's attention to the thinking."""
    if not model.thinking.close:
        raise KvatlasError(
            f"The model {model.name!r} has no think tags, so that a head has no thinking tokens to rank; --target "
            "kv_head trains heads of the policy 'learned', or name the end of its thinking with think_close."
        )


def left_out_as_text(left_out: Mapping[str, int]) -> str:
    """Return the numbers of traces that were left out, with reasons, as a clause."""
    texts = {
        "no_closing_tag": "without a closing think tag",
        "no_answer": "without an answer",
        "wrong": "wrong",
        "no_thinking": "without thinking",
        "one_label": "with one label for all tokens",
    }
    return ", ".join(f"{count} {texts[reason]}" for reason, count in left_out.items() if count) or "none"


def _origin(training_data: TrainingData, plan: Plan) -> dict[str, Any]:
    """Return the origin of traces: versions, model, problems and sampling."""
    (model,) = plan.models
    return {
        "kvatlas": __version__,
        "torch": version("torch"),
        "model": model.name,
        "model_weights": model.weights_digest,
        "dtype": model.dtype,
        "linear_layers": model.precision,
        "benchmarks": [benchmarks.identity(benchmark) for benchmark in plan.benchmarks],
        "skip": training_data.skip,
        "held_out_problems": training_data.held_out,
        "problems": training_data.spec.problems,
        "samples": training_data.spec.samples,
        "sampling": plan.spec.sampling.model_dump(),
        "seed": training_data.spec.seed,
        "tokens_per_trace": training_data.tokens_per_trace,
    }
