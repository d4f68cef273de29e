"""From a spec to a plan: every setting checked, every trace named, the cost foretold, no weights loaded."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

from kvatlas import __version__, benchmarks, policies
from kvatlas.benchmarks import Benchmark
from kvatlas.core import KvatlasError, Problem, Setting, digest
from kvatlas.models import Model
from kvatlas.policies import Policy, Selection
from kvatlas.results import Expected, Key, Manifest
from kvatlas.sweep.spec import Spec

#: Part of every run key: rises whenever the meaning of a key changes.
RUN_KEY_VERSION = 2
#: How a problem becomes tokens: one user message through the model's chat template.
PROMPT_FORMAT = "chat-1"
#: Part of the run keys of screening records: rises whenever what a screen measures changes.
SCREEN_VERSION = 1


@dataclass(frozen=True)
class Unit:
    """One tree of work: a problem and a sample, under all settings that are still to run.

    `script` is what the full cache wrote for it, where an earlier session stored that.
    """

    benchmark: str
    problem: Problem
    sample: int
    settings: tuple[Setting, ...]
    script: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """A checked spec.

    `policies` come with whether they are baselines; `prompts` are token counts by (model, benchmark). A `screened` plan
    asks for screening records instead of traces.
    """

    spec: Spec
    models: tuple[Model, ...]
    benchmarks: tuple[Benchmark, ...]
    policies: tuple[tuple[Policy, bool], ...]
    problems: Mapping[str, Sequence[Problem]]
    prompts: Mapping[tuple[str, str], Sequence[int]]
    screened: bool = False

    @cached_property
    def keys(self) -> Mapping[tuple[str, str, Setting], str]:
        """Run keys by (model, benchmark, setting). Made when first asked for: digests read all weights."""
        return {
            (model.name, benchmark.name, policy.setting): self._key(model, benchmark, policy)
            for model in self.models
            for benchmark in self.benchmarks
            for policy, _ in self.policies
        }

    def _key(self, model: Model, benchmark: Benchmark, policy: Policy) -> str:
        key = run_key(self.spec, model, benchmark, policy)
        return digest({"screen": SCREEN_VERSION, "key": key})[:32] if self.screened else key

    @property
    def traces(self) -> int:
        """Number of traces of the whole sweep."""
        problems = sum(len(found) for found in self.problems.values())
        return len(self.models) * problems * self.spec.samples * len(self.policies)

    def manifest(self) -> Manifest:
        """What the store is to hold."""
        expected = tuple(
            Expected(
                model=model.name,
                benchmark=benchmark.name,
                setting=policy.setting,
                run_key=self.keys[model.name, benchmark.name, policy.setting],
                problems=tuple(problem.id for problem in self.problems[benchmark.name]),
                samples=self.spec.samples,
                baseline=baseline,
            )
            for model in self.models
            for benchmark in self.benchmarks
            for policy, baseline in self.policies
        )
        axes = tuple((name, tuple(values)) for name, values in self.spec.axes.items())
        asked = {"benchmarks": [benchmarks.identity(benchmark) for benchmark in self.benchmarks]}
        spec = self.spec.model_dump(mode="json")
        return Manifest(axes, expected, spec, {**provenance(), **asked}, self._about(), screened=self.screened)

    def _about(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What benchmarks say about their problems in numbers and words: difficulties, seeds of permuted choices."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, problems in self.problems.items():
            for problem in problems:
                plain = {key: value for key, value in problem.about.items() if isinstance(value, str | int | float)}
                if plain:
                    found.setdefault(name, {})[problem.id] = plain
        return found

    def units(self, model: Model, done: set[Key]) -> list[Unit]:
        """The trees of one model that still lack traces, each with the settings that it lacks.

        Samples vary slowest, so that a sweep that is stopped early has seen every problem.
        """
        units = []
        for sample in range(self.spec.samples):
            for benchmark in self.benchmarks:
                for problem in self.problems[benchmark.name]:
                    missing = tuple(
                        policy.setting
                        for policy, _ in self.policies
                        if (
                            self.keys[model.name, benchmark.name, policy.setting],
                            policy.setting.id,
                            benchmark.name,
                            problem.id,
                            sample,
                        )
                        not in done
                    )
                    if missing:
                        units.append(Unit(benchmark.name, problem, sample, missing))
        return units

    def estimate(self, tokens_per_second: float | None = None, memory: int | None = None) -> dict[str, Any]:
        """What the sweep will cost, as `plan --json` prints it.

        `memory` is in bytes, the batch size what fits into it beside the weights (0 if not one sequence does). Trace
        lengths are expectations (`expected_output_tokens`, else the benchmark's typical length), cut at
        `max_new_tokens`.
        """
        separate = shared = 0
        for model in self.models:
            for benchmark in self.benchmarks:
                expected = self.spec.expected_output_tokens or benchmark.typical_output_tokens
                output = min(expected, self.spec.sampling.max_new_tokens)
                for prompt in self.prompts[model.name, benchmark.name]:
                    # The token count at which each setting leaves the trunk; it then decodes the rest alone.
                    forks = [
                        min(output, policy.budget - prompt + 1) if policy.budget else output
                        for policy, _ in self.policies
                    ]
                    separate += output * len(forks) * self.spec.samples
                    shared += (max(forks) + sum(output - fork for fork in forks)) * self.spec.samples
        return {
            "settings": len(self.policies),
            "traces": self.traces,
            "decoded_tokens": {"separate": separate, "shared": shared},
            "kv_bytes_per_sequence": max(self._kv_bytes(model)[0] for model in self.models),
            "batch_size": min(self._batch_size(model, memory) for model in self.models) if memory else None,
            "seconds": round(shared / tokens_per_second, 1) if tokens_per_second else None,
        }

    def _kv_bytes(self, model: Model) -> tuple[int, int]:
        """Bytes of keys and values of one sequence at the largest budget, and of the longest one that may be cached."""
        longest = max(max(self.prompts[model.name, b.name]) for b in self.benchmarks)
        longest += self.spec.sampling.max_new_tokens
        budgets = [policy.budget for policy, _ in self.policies if policy.budget is not None]
        unlimited = len(budgets) < len(self.policies)
        at_budget = max(budgets, default=longest)
        return (
            at_budget * model.kv_bytes_per_token,
            (max(at_budget, longest) if unlimited else at_budget) * model.kv_bytes_per_token,
        )

    def _batch_size(self, model: Model, memory: int) -> int:
        """Sequences that fit beside the weights, with a tenth of the memory left for all else.

        All rows of the cache are as long as the longest, and grow in steps of a quarter. Where several settings fork
        from one trunk, a copy of it waits for them.
        """
        at_budget, largest = self._kv_bytes(model)
        compressing = sum(policy.budget is not None for policy, _ in self.policies)
        row = 1.25 * largest + (at_budget if compressing > 1 else 0)
        return max(0, int((0.9 * memory - (model.weight_bytes or 0)) / row))


def make_plan(spec: Spec) -> Plan:
    """Check everything that can be checked before a weight is loaded; KvatlasError for the first thing wrong."""
    found_models = tuple(entry.find() for entry in spec.models)
    found_benchmarks = tuple(entry.find() for entry in spec.benchmarks)
    for what, names in (("model", [m.name for m in found_models]), ("benchmark", [b.name for b in found_benchmarks])):
        if len(set(names)) < len(names):
            raise KvatlasError(f"Two entries of the spec are the {what} {max(names, key=names.count)!r}; name it once.")
    cells = [(policies.of(setting), baseline) for setting, baseline in spec.cells()]
    seen: set[Setting] = set()
    for policy, _ in cells:
        if policy.setting in seen:
            raise KvatlasError(
                f"The setting {policy.setting} is there twice; name it once, in settings or in baseline."
            )
        seen.add(policy.setting)
    problems = {benchmark.name: benchmark.problems(spec.problems) for benchmark in found_benchmarks}
    prompts = {}
    for model in found_models:
        model.check()
        for policy, _ in cells:
            policy.check(model)
        for benchmark in found_benchmarks:
            lengths = [len(model.encode(benchmark.prompt(problem))) for problem in problems[benchmark.name]]
            prompts[model.name, benchmark.name] = lengths
            _check_room(spec, model, benchmark, max(lengths))
            for policy, _ in cells:
                if isinstance(policy, Selection):
                    policy.check_prompt(max(lengths), f"the longest prompt of {benchmark.name}")
    return Plan(spec, found_models, found_benchmarks, tuple(cells), problems, prompts)


def _check_room(spec: Spec, model: Model, benchmark: Benchmark, prompt: int) -> None:
    room = model.positions
    wanted = spec.sampling.max_new_tokens
    if room is not None and prompt + wanted > room:
        raise KvatlasError(
            f"sampling.max_new_tokens {wanted} and the longest prompt of {benchmark.name} ({prompt} tokens) do not fit "
            f"into the {room} positions of the model {model.name!r}; valid are at most {room - prompt} new tokens."
        )


def run_key(spec: Spec, model: Model, benchmark: Benchmark, policy: Policy) -> str:
    """Versioned hash of all that can change an answer beside setting, problem and sample, and of nothing else."""
    return digest(
        {
            "version": RUN_KEY_VERSION,
            "weights": model.weights_digest,
            "tokenizer": model.tokenizer_digest,
            "dtype": model.dtype,
            "prompt_format": [PROMPT_FORMAT, model.options.think_open],
            "thinking": [model.thinking.open, model.thinking.close],
            "benchmark": benchmarks.identity(benchmark),
            "sampling": spec.sampling.model_dump(),
            "seed": spec.seed,
            "policy": policy.identity(model),
        }
    )[:32]


def provenance() -> dict[str, str]:
    """What the results were made with."""
    return {
        "kvatlas": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
