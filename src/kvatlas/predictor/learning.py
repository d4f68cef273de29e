"""Training of DynTS heads and of heads for `learned` on full-cache traces.

A work folder keeps the traces as a resumable run, and the hidden states for the next training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvatlas import __version__, benchmarks
from kvatlas.core import KvatlasError, Problem, Trace, digest
from kvatlas.models import ModelHandle
from kvatlas.predictor.kv_heads import HeadExamples, evaluate_heads, examples_of, train_heads
from kvatlas.predictor.labels import (
    REASONS,
    Examples,
    LabelledTrace,
    has_origin,
    label_trace,
    read_examples,
    sample_tokens,
    why_left_out,
    write_examples,
)
from kvatlas.predictor.training import judge_head, save_head, train_head
from kvatlas.results import Store
from kvatlas.sweeps.plan import Plan, make_plan
from kvatlas.sweeps.run import sweep
from kvatlas.sweeps.spec import Spec


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
    steps: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
    **options: Any,
) -> dict[str, Any]:
    """Train a head, evaluate it on the held-out problems, write it, and return its provenance.

    `on_step` is called with the steps of training that are done, and all. `options` are those of the sweep of the
    traces.
    """
    plan = training_data.plan()
    (model,) = plan.models
    _check_thinks(model)
    sweep(plan, work / "run", replace=True, **options)

    examples, left_out = _labelled_examples(training_data, plan, work, held_out=False)
    # Before the training, which takes minutes: this refuses held-out traces that cannot be used.
    held_out = _labelled_examples(training_data, plan, work, held_out=True) if training_data.held_out else None
    head = train_head(examples, steps=steps, seed=training_data.spec.seed, device=model.device, on_step=on_step)
    quality = None if held_out is None else _head_quality(head, *held_out)

    provenance = _origin(training_data, plan) | {
        "steps": steps,
        "traces": int(examples.trace[-1]) + 1,
        "tokens": examples.label.numel(),
        "left_out": left_out,
        "held_out": quality,
    }
    save_head(out, head, provenance)
    return provenance


def learn_kv_heads(
    training_data: TrainingData,
    work: Path,
    out: Path,
    *,
    steps: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
    **options: Any,
) -> dict[str, Any]:
    """Train the heads of the policy `learned`, evaluate them on the held-out problems, write them, and return their
    provenance.

    `on_step` is called with the steps of training that are done, and all. `options` are those of the sweep of the
    traces.
    """
    plan = training_data.plan()
    sweep(plan, work / "run", replace=True, **options)

    left_out = dict.fromkeys(REASONS, 0)
    tokens = training_data.tokens_per_trace
    seed = training_data.spec.seed
    training = _chosen_problems(training_data, plan, held_out=False)
    examples = list(_head_examples(plan, work, training, tokens, seed, left_out))
    if not examples:
        count = sum(left_out.values())
        raise KvatlasError(f"The heads have no traces for training: of {count} traces {left_out_as_text(left_out)}.")

    scorer = train_heads(examples, steps=steps, seed=seed, on_step=on_step)
    quality = None
    if training_data.held_out:
        judged = _chosen_problems(training_data, plan, held_out=True)
        left_out_there = dict.fromkeys(REASONS, 0)
        held_out = list(_head_examples(plan, work, judged, 0, seed, left_out_there))
        quality = asdict(evaluate_heads(scorer, held_out)) | {"left_out": left_out_there}

    provenance = _origin(training_data, plan) | {
        "target": "kv_head",
        "steps": steps,
        "traces": len(examples),
        "tokens": sum(trace.target.shape[-1] for trace in examples),
        "left_out": left_out,
        "held_out": quality,
    }
    save_head(out, scorer, provenance)
    return provenance


def _head_examples(
    plan: Plan, work: Path, chosen: set[str], tokens: int, seed: int, left_out: dict[str, int]
) -> Iterator[HeadExamples]:
    """Yield the examples of the traces that are not left out, of which it counts the reasons; `tokens` of each, all if
    it is 0."""
    torch.set_num_threads(1)
    (handle,) = plan.models
    model = handle.load()
    generator = torch.Generator().manual_seed(seed)
    for prompt, trace, reason in _prompts_and_traces(plan, work, handle, chosen):
        # All tokens of a text are labelled, so one without thinking tells as much.
        if reason not in ("", "no_thinking"):
            left_out[reason] += 1
            continue
        examples = examples_of(handle, model, [*prompt, *trace.tokens])
        if examples is None:
            continue

        count = examples.target.shape[-1]
        if tokens and count > tokens:
            sampled = torch.randperm(count, generator=generator)[:tokens].sort().values
            examples = type(examples)(*(numbers[:, :, sampled] for numbers in examples))
        yield examples


def _check_thinks(model: ModelHandle) -> None:
    """Raise KvatlasError for a model without think tags: labels are the answer's attention to the thinking."""
    if not model.thinking.close:
        raise KvatlasError(
            f"The model {model.name!r} has no think tags, so that a head has no thinking tokens to rank; --target "
            "kv_head trains heads of the policy 'learned', or name the end of its thinking with think_close."
        )


def _head_quality(head: dict[str, Tensor], examples: Examples, left_out: dict[str, int]) -> dict[str, Any]:
    """Return the quality of a head, with the traces that were left out before and in the evaluation."""
    quality = asdict(judge_head(head, examples))
    return quality | {"left_out": left_out | {"one_label": quality.pop("one_label")}}


def left_out_as_text(left_out: dict[str, int]) -> str:
    """Return the numbers of traces that were left out, with reasons, as a clause."""
    texts = {
        "no_closing_tag": "without a closing think tag",
        "no_answer": "without an answer",
        "wrong": "wrong",
        "no_thinking": "without thinking",
        "one_label": "with one label for all tokens",
    }
    return ", ".join(f"{count} {texts[reason]}" for reason, count in left_out.items() if count) or "none"


def _labelled_examples(
    training_data: TrainingData, plan: Plan, work: Path, *, held_out: bool
) -> tuple[Examples, dict[str, int]]:
    """Return the labelled tokens of correct traces from a file, which is written if missing, and the traces left out.

    Raises KvatlasError if all traces are left out.
    """
    tokens = 0 if held_out else training_data.tokens_per_trace
    chosen = _chosen_problems(training_data, plan, held_out=held_out)
    (handle,) = plan.models

    # A file of other traces, or of other tokens of them, is written anew.
    contents: list[tuple[str, str, str, str]] = []
    for (model_name, benchmark), digests in plan.contents.items():
        contents += [(model_name, benchmark, name, content) for name, content in digests.items() if name in chosen]
    origin = _origin(training_data, plan) | {
        "tokens_per_trace": tokens,
        "run_keys": sorted(plan.compute_keys().values()),
        "problems": digest(sorted(contents)),
    }
    file = work / ("held-out.safetensors" if held_out else "hidden-states.safetensors")
    is_stored = has_origin(file, origin)
    model = None
    if not is_stored:
        torch.set_num_threads(1)
        model = handle.load()

    left_out = dict.fromkeys(REASONS, 0)
    labelled_traces = []
    for prompt, trace, reason in _prompts_and_traces(plan, work, handle, chosen):
        if reason:
            left_out[reason] += 1
            continue
        labelled = None if model is None else label_trace(handle, model, prompt, trace.tokens)
        if labelled is not None:
            hidden, label = labelled
            labelled_traces.append(LabelledTrace(*sample_tokens(hidden, label, tokens, training_data.spec.seed)))
    if not is_stored:
        write_examples(file, labelled_traces, origin)

    stored = read_examples(file)
    if not stored.label.numel():
        purpose = "evaluation" if held_out else "training"
        raise KvatlasError(
            f"The predictor has no traces for {purpose}: of {sum(left_out.values())} traces "
            f"{left_out_as_text(left_out)}."
        )
    return stored, left_out


def _chosen_problems(training_data: TrainingData, plan: Plan, *, held_out: bool) -> set[str]:
    """Return the ids of the problems that are held out, or of all others."""
    chosen: set[str] = set()
    for problems in plan.problems.values():
        first_held_out = len(problems) - training_data.held_out
        selected = problems[first_held_out:] if held_out else problems[:first_held_out]
        chosen.update(problem.id for problem in selected)
    return chosen


def _prompts_and_traces(
    plan: Plan, work: Path, model: ModelHandle, chosen: set[str]
) -> Iterator[tuple[tuple[int, ...], Trace, str]]:
    """Yield the tokens of a prompt, its trace, and the reason why it is left out, or ""."""
    problems = plan.problems_by_id()
    by_name = {benchmark.name: benchmarks.for_model(benchmark, model.reads) for benchmark in plan.benchmarks}

    keys = set(plan.compute_keys().values())
    with Store.open(work / "run") as store:
        for key, trace in store.traces():
            problem = problems.get((trace.benchmark, trace.problem))
            if key in keys and problem is not None and trace.problem in chosen:
                yield model.encode(by_name[trace.benchmark].prompt(problem)), trace, why_left_out(model, trace)


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
