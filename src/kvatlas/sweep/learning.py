"""Training and judging a DynTS predictor: full-cache traces by a sweep, labels of the correct ones, the head.

Everything made on the way stays in a work folder: the traces as a run that resumes, the hidden states as shards that
the next training reads again. One model on one device at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import __version__, benchmarks
from kvatlas.core import KvatlasError, Problem, Trace, digest
from kvatlas.models import Model
from kvatlas.results import Store
from kvatlas.sweep.plan import Plan, make_plan
from kvatlas.sweep.run import Progress, sweep
from kvatlas.sweep.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.predictor import Examples, Quality


@dataclass(frozen=True)
class Material:
    """Traces to learn from or to be judged on: the full cache of one model on the problems from `skip` on.

    `held_out` of the last problems of each benchmark are kept for judging. `tokens_per_trace` thinking tokens of a
    trace are sampled for learning (0: all); for judging all are used.
    """

    spec: Spec
    skip: int = 0
    held_out: int = 0
    tokens_per_trace: int = 2048

    def plan(self) -> Plan:
        """The sweep that makes the traces; KvatlasError where a benchmark has too few problems."""
        if len(self.spec.models) != 1:
            raise KvatlasError("A predictor is trained for one model; name one.")
        plan = make_plan(self.spec)
        problems: dict[str, list[Problem]] = {}
        for benchmark in plan.benchmarks:
            there = plan.problems[benchmark.name]
            problems[benchmark.name] = list(there[self.skip :])
            if len(problems[benchmark.name]) <= self.held_out:
                raise KvatlasError(
                    f"{benchmark.name} has {len(there)} problems; without the first {self.skip} and the last "
                    f"{self.held_out} (held out) none is left to learn from."
                )
        prompts = {key: lengths[self.skip :] for key, lengths in plan.prompts.items()}
        return replace(plan, problems=problems, prompts=prompts)


def learn(
    material: Material,
    work: Path,
    out: Path,
    *,
    steps: int,
    workers: int | None = None,
    batch_size: int | None = None,
    tell: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a head, judge it on the held-out problems, and write it with its provenance, which is returned."""
    from kvatlas.predictor import evaluate, save_head, train

    plan = material.plan()
    (model,) = plan.models
    sweep(plan, work / "run", workers=workers, batch_size=batch_size, tell=tell)
    learned = _examples(material, plan, work, held_out=False)
    head = train(learned, steps=steps, seed=material.spec.seed, device=model.device)
    quality = evaluate(head, _examples(material, plan, work, held_out=True)) if material.held_out else None
    traces = int(learned.trace[-1]) + 1
    provenance = _provenance(material, plan) | {
        "steps": steps,
        "traces": traces,
        "tokens": learned.label.numel(),
        "loss": "mean squared error + pairwise ranking",
        "held_out": asdict(quality) if quality else None,
    }
    save_head(out, head, provenance)
    return provenance


def judge(
    head: Path,
    material: Material,
    work: Path,
    *,
    workers: int | None = None,
    batch_size: int | None = None,
    tell: Callable[[Progress], None] = lambda _: None,
) -> Quality:
    """How well a head ranks the thinking tokens of correct traces of all the material's problems."""
    from kvatlas.policies.dynts import load_head
    from kvatlas.predictor import evaluate

    weights = load_head(str(head))
    plan = material.plan()
    sweep(plan, work / "run", workers=workers, batch_size=batch_size, tell=tell)
    whole = replace(material, tokens_per_trace=0)
    return evaluate(weights, _examples(whole, plan, work, held_out=False))


def _examples(material: Material, plan: Plan, work: Path, *, held_out: bool) -> Examples:
    """The labelled tokens of correct traces, from their shards, which are made unless they are there."""
    from kvatlas.predictor import shards

    tokens = 0 if held_out else material.tokens_per_trace
    chosen = _chosen(plan, material.held_out, held_out)
    made_from = _provenance(material, plan) | {"tokens_per_trace": tokens, "problems": digest(sorted(chosen))}
    folder = work / ("held-out" if held_out else "hidden-states")
    if not shards.is_made_from(folder, made_from):
        shards.write(folder, _labelled(plan, work, chosen, tokens, material.spec.seed), made_from)
    return shards.read(folder)


def _chosen(plan: Plan, last: int, held_out: bool) -> set[str]:
    """Ids of the problems of one side of the split."""
    found: set[str] = set()
    for problems in plan.problems.values():
        cut = len(problems) - last
        found |= {problem.id for problem in (problems[cut:] if held_out else problems[:cut])}
    return found


def _labelled(plan: Plan, work: Path, chosen: set[str], tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    import torch

    from kvatlas.predictor import label_trace
    from kvatlas.predictor.shards import sampled

    torch.set_num_threads(1)
    (model,) = plan.models
    network = model.network()
    for prompt, trace in _correct(plan, work, model, chosen):
        found = label_trace(model, network, prompt, trace.tokens)
        if found is not None:
            yield sampled(*found, tokens, seed)


def _correct(plan: Plan, work: Path, model: Model, chosen: set[str]) -> Iterator[tuple[tuple[int, ...], Trace]]:
    """Correct traces of this plan with the ids of their prompts."""
    asked = {b.name: {p.id: p for p in plan.problems[b.name]} for b in plan.benchmarks}
    found = {b.name: b for b in plan.benchmarks}
    keys = set(plan.keys.values())
    with Store.open(work / "run") as store:
        for key, trace in store.traces():
            problem = asked.get(trace.benchmark, {}).get(trace.problem)
            if key in keys and problem is not None and trace.problem in chosen and trace.grade.correct:
                yield model.encode(found[trace.benchmark].prompt(problem)), trace


def _provenance(material: Material, plan: Plan) -> dict[str, Any]:
    (model,) = plan.models
    return {
        "kvatlas": __version__,
        "torch": version("torch"),
        "model": model.name,
        "model_weights": model.weights_digest,
        "dtype": model.dtype,
        "benchmarks": [benchmarks.identity(each) for each in plan.benchmarks],
        "skip": material.skip,
        "held_out_problems": material.held_out,
        "problems": material.spec.problems,
        "samples": material.spec.samples,
        "sampling": material.spec.sampling.model_dump(),
        "seed": material.spec.seed,
        "tokens_per_trace": material.tokens_per_trace,
    }
