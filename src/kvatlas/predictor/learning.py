"""Training of DynTS heads and of heads for `learned` on full-cache traces.

A work folder keeps the traces as a resumable run, from which the next training takes them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvatlas import __version__, benchmarks
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.predictor.kv_heads import HeadExamples, evaluate_heads, examples_of, train_heads
from kvatlas.predictor.training import (
    REASONS,
    Quality,
    joined,
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
from kvatlas.text import counted


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
        plan = make_plan(self.spec)
        problems: dict[str, list[Problem]] = {}
        for benchmark in plan.benchmarks:
            all_problems = plan.problems[benchmark.name]
            problems[benchmark.name] = list(all_problems[self.skip :])
            if len(problems[benchmark.name]) <= self.held_out:
                raise KvatlasError(
                    f"Of {counted(len(all_problems), 'problem')} of {benchmark.name} (--problems) none is left for "
                    f"training without the first {self.skip} (--skip) and the last {self.held_out} (--held-out); "
                    "expected more problems, or fewer of these."
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
    spec = training_data.spec
    if len(plan.models) != 1:
        raise KvatlasError("A predictor is trained for one model; name one.")
    (model,) = plan.models
    if target == "answer" and not model.thinking.close:
        # Labels are the answer's attention to the thinking.
        raise KvatlasError(
            f"The model {model.name!r} has no think tags, so that a head has no thinking tokens to rank; --target "
            "kv_head trains heads of the policy 'learned', or name the end of its thinking with think_close."
        )
    sweep(plan, work / "run", replace=True, **options)

    # Before the training, which takes minutes: this refuses held-out traces that cannot be used.
    traces = FullCacheTraces(training_data, plan, work, target)
    examples, left_out = traces.examples(held_out=False)
    judged, judged_left_out = traces.examples(held_out=True) if training_data.held_out else ([], {})
    counts = {"traces": len(examples), "tokens": sum(labels.shape[-1] for *_, labels in examples)}
    quality: Quality | None = None
    if target == "answer":
        tensors = joined(examples)
        # While the head trains, its examples are held once.
        del examples
        head = train_head(*tensors, steps=steps, seed=spec.seed, device=model.device, on_step=on_step)
        if judged:
            quality = judge_head(head, judged)
    else:
        head = train_heads(examples, steps=steps, seed=spec.seed, on_step=on_step)
        if judged:
            quality = evaluate_heads(head, judged)

    held_out = None
    if quality is not None:
        # Traces that were left out before the evaluation, and in it.
        held_out = asdict(quality)
        held_out["left_out"] = judged_left_out | {"one_label": held_out.pop("one_label")}
    provenance = {
        "kvatlas": __version__,
        "torch": version("torch"),
        "model": model.name,
        "model_weights": model.weights_digest,
        "dtype": model.dtype,
        "linear_layers": model.precision,
        "benchmarks": [benchmarks.identity(benchmark) for benchmark in plan.benchmarks],
        "skip": training_data.skip,
        "held_out_problems": training_data.held_out,
        "problems": spec.problems,
        "samples": spec.samples,
        "sampling": plan.spec.sampling.model_dump(),
        "seed": spec.seed,
        "tokens_per_trace": training_data.tokens_per_trace,
        **counts,
        "target": target,
        "steps": steps,
        "left_out": left_out,
        "held_out": held_out,
    }
    save_head(out, head, provenance)
    return provenance


@dataclass(frozen=True)
class FullCacheTraces:
    """The traces of a plan in a work folder, as examples of a target."""

    training_data: TrainingData
    plan: Plan
    work: Path
    target: str

    def examples(self, *, held_out: bool) -> tuple[list[Any], dict[str, int]]:
        """Return the examples of the problems for training or of those that are `held_out`, and count other traces.

        These are counted by the reason why they are left out. Raises KvatlasError if all are.
        """
        tokens = 0 if held_out else self.training_data.tokens_per_trace
        generator = torch.Generator().manual_seed(self.training_data.spec.seed)
        left_out = dict.fromkeys(REASONS, 0)
        examples: list[Any] = []
        for prompt, trace, reason in self._traces(held_out):
            # For `kv_head` all tokens of a text are labelled, so one without thinking tells as much.
            if reason == "no_thinking" and self.target == "kv_head":
                reason = ""
            if reason:
                left_out[reason] += 1
                continue
            example = self._example(prompt, trace.tokens, tokens, generator)
            if example is not None:
                examples.append(example)

        if not examples:
            purpose = "evaluation" if held_out else "training"
            raise KvatlasError(
                f"The predictor has no traces for {purpose}: of {sum(left_out.values())} traces "
                f"{left_out_as_text(left_out)}."
            )
        return examples, left_out

    def _example(
        self, prompt: tuple[int, ...], trace: tuple[int, ...], tokens: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | HeadExamples | None:
        """Return the hidden states and labels of thinking tokens, or for `kv_head` the examples of all tokens.

        They are `tokens` random ones, all for 0. None for a text that is too short.
        """
        model = self.plan.models[0]
        if self.target == "answer":
            labelled = label_trace(model, self._loaded, prompt, trace)
            return sample_tokens(*labelled, tokens, self.training_data.spec.seed)
        of_trace = examples_of(model, self._loaded, [*prompt, *trace])
        if of_trace is None or not 0 < tokens < of_trace.target.shape[-1]:
            return of_trace
        sampled = torch.randperm(of_trace.target.shape[-1], generator=generator)[:tokens].sort().values
        return HeadExamples(*(numbers[:, :, sampled] for numbers in of_trace))

    @cached_property
    def _loaded(self) -> PreTrainedModel:
        torch.set_num_threads(1)
        return self.plan.models[0].load()

    def _traces(self, held_out: bool) -> Iterator[tuple[tuple[int, ...], Trace, str]]:
        """Yield the tokens of a prompt, its trace, and the reason why it is left out, or ""."""
        chosen: dict[tuple[str, str], Problem] = {}
        for name, problems in self.plan.problems.items():
            first_held_out = len(problems) - self.training_data.held_out
            selected = problems[first_held_out:] if held_out else problems[:first_held_out]
            chosen.update(((name, problem.id), problem) for problem in selected)

        (model,) = self.plan.models
        by_name = {benchmark.name: benchmarks.for_model(benchmark, model.reads) for benchmark in self.plan.benchmarks}
        keys = set(self.plan.compute_keys().values())
        with Store.open(self.work / "run") as store:
            for key, trace in store.traces():
                problem = chosen.get((trace.benchmark, trace.problem))
                if key in keys and problem is not None:
                    prompt = benchmarks.prompt_of(by_name[trace.benchmark], problem)
                    yield model.encode(prompt), trace, why_left_out(model, trace)


def left_out_as_text(left_out: Mapping[str, int]) -> str:
    """Return the numbers of traces that were left out, with reasons, as a clause."""
    texts = {**REASONS, "one_label": "with one label for all tokens"}
    return ", ".join(f"{count} {texts[reason]}" for reason, count in left_out.items() if count) or "none"
