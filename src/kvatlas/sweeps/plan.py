"""The plan of a sweep: settings checked, traces listed, costs estimated, without loading weights."""

from __future__ import annotations

import itertools
import json
import platform
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvatlas import __version__, benchmarks, policies
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.file_checks import notes_on
from kvatlas.core import (
    AuditedCell,
    KvatlasError,
    Problem,
    Setting,
    digest,
    is_reference,
    no_choice_sentence,
    usual_controls,
)
from kvatlas.models import ModelHandle
from kvatlas.models.checks import Claims, notes_for
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.policies.audit import audit_policy, narrow_sentence, setting_facts, uncompressed_sentence
from kvatlas.results import Expected, Manifest, ProblemKey
from kvatlas.sweeps.plan_notes import cap_notes, cluster_notes, settings_notes, window_sentence
from kvatlas.sweeps.planned_problems import PlannedProblems, with_limit
from kvatlas.sweeps.spec import Spec

if TYPE_CHECKING:
    from kvatlas.engine.memory_plan import Peak
    from kvatlas.stats.orders import TestedSetting

#: Part of every run key; rises with every change of the meaning of a key.
RUN_KEY_VERSION = 4
#: The share of the traces of weak settings that repeat themselves up to the limit, as SmolLM2's did
#: (docs/findings/thinking-cap.md), and the share of the settings that are weak.
LOOPING = 0.3
WEAK = 0.5
#: The format of prompts: one user message through the model's chat template.
PROMPT_FORMAT = "chat-1"
#: The most characters of a wrong setting that a sentence shows.
SHOWN = 500
FULL = policies.from_setting(Setting.from_parameters("full"))
PACKED_ON_GPU = (
    "Keys and values in fewer than 16 bits save no memory and no time on a GPU yet: every step unpacks all of them, "
    "beside the packed ones, and takes many times as long. Their maps are right; short runs on a CPU are faster."
)


@dataclass(frozen=True)
class WorkItem:
    """A problem and a sample with all settings whose trace is missing."""

    benchmark: str
    problem: Problem
    sample: int
    settings: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class Plan(PlannedProblems):
    """A checked spec.

    Each policy comes with True if it is a baseline. `prompts` are token counts by (model, benchmark), `contents`
    digests of the prompt and the reference of each problem. `notes` are sentences for the user, `changes` the keys of
    the spec's file that were given another value.
    """

    models: tuple[ModelHandle, ...]
    policies: tuple[tuple[Policy, bool], ...]
    prompts: Mapping[tuple[str, str], Sequence[int]]
    contents: Mapping[tuple[str, str], Mapping[str, str]]
    notes: tuple[str, ...] = ()

    def bind_cells(self) -> Iterator[tuple[ModelHandle, Benchmark, Policy, bool]]:
        """Yield model, benchmark and policy of every cell, and True if it is a baseline."""
        for model, benchmark in itertools.product(self.models, self.benchmarks):
            for policy, (_, baseline) in zip(self.policies_on(model), self.policies, strict=True):
                yield model, benchmark, policy, baseline

    def policies_on(self, model: ModelHandle) -> list[Policy]:
        """Return the policies, with budgets in tokens of this model."""
        return [policy.bind(model) for policy, _ in self.policies]

    def compute_keys(self) -> Mapping[tuple[str, str, Setting], str]:
        """Return the run keys by (model, benchmark, setting); the first call reads all weights."""
        return {cell.name: cell.run_key for cell in self.expected()}

    @property
    def traces(self) -> int:
        """The number of traces of the sweep."""
        pairs = itertools.product(self.models, self.policies)
        return sum(self.problem_counts) * sum(self.samples_of(model, policy.setting) for model, (policy, _) in pairs)

    def samples_of(self, model: ModelHandle, setting: Setting) -> int:
        """Return the samples of each problem: the full cache may have more than the settings beside it.

        Left to the plan, it has twice as many where draws are independent. On a CPU most traces equal the full cache's,
        and a mean of more of these only adds noise to a pair.
        """
        samples = self.spec.samples
        is_drawn = self.spec.sampling.temperature > 0 and len(self.policies) > 1
        if not is_drawn or not is_reference(setting):
            return samples
        return self.spec.full_samples or (samples if model.device == "cpu" else 2 * samples)

    def is_control(self, setting: Setting) -> bool:
        """Return whether nothing is claimed of a setting but that it loses."""
        controls: Collection[str] | None = self.spec.controls
        if controls is None:
            controls = usual_controls(policy.setting.policy for policy, baseline in self.policies if not baseline)
        return setting.policy in controls

    def tested_settings(self) -> tuple[list[TestedSetting], list[str]]:
        from kvatlas.stats.orders import TestedSetting

        model = self.models[0]
        tested = []
        for policy, (_, is_baseline) in zip(self.policies_on(model), self.policies, strict=True):
            if not is_baseline and not self.is_control(policy.setting):
                tested.append(TestedSetting(policy.setting, model.kv_bytes(policy.storage)))
        return tested, []

    def manifest(self) -> Manifest:
        """Return the manifest of a run with this plan alone."""
        # Traces are read with them where the models are not.
        tags = {model.name: asdict(model.tags) for model in self.models}
        return self.promise(self.expected(), self.spec.axes, {**provenance(), "tags": tags})

    def expected(self) -> tuple[Expected, ...]:
        """Return the cells that this plan promises; the first call reads all weights."""
        return self._expected

    @cached_property
    def _expected(self) -> tuple[Expected, ...]:
        expected = []
        for model, benchmark, policy, baseline in self.bind_cells():
            kv_bytes = model.kv_bytes(policy.storage)
            cell = Expected(
                model=model.name,
                benchmark=benchmark.name,
                setting=policy.setting,
                run_key=run_key(self.spec, model, benchmark, policy),
                problems=tuple(problem.id for problem in self.problems[benchmark.name]),
                samples=self.samples_of(model, policy.setting),
                baseline=baseline,
                kv_bytes=kv_bytes,
                # Statistics need these, which import no policy.
                facts=setting_facts(policy.setting, self.prompts[model.name, benchmark.name], kv_bytes),
                control=self.is_control(policy.setting),
            )
            expected.append(cell)
        return tuple(expected)

    def units(self, cells: Iterable[Expected], done: Mapping[ProblemKey, Collection[int]]) -> list[WorkItem]:
        """Return the work that one model's promised `cells` lack; `done` are the stored samples (`Store.samples`).

        Samples vary slowest, so that a stopped sweep has traces of every problem. Beside a sample of the settings stand
        those of the full cache whose mean it is compared with.
        """
        # All settings of a problem and a sample share a trunk, so they are one unit.
        missing: dict[tuple[str, str, int], list[Setting]] = {}
        for cell in cells:
            for problem in cell.problems:
                stored = done.get((cell.run_key, cell.setting.id, cell.benchmark, problem), ())
                for sample in range(cell.samples):
                    if sample not in stored:
                        missing.setdefault((cell.benchmark, problem, sample), []).append(cell.setting)

        problems: dict[tuple[str, str], Problem] = {}
        for benchmark, of_benchmark in self.problems.items():
            problems |= {(benchmark, problem.id): problem for problem in of_benchmark}
        places = {name: place for place, name in enumerate(problems)}
        units = [
            WorkItem(benchmark, problems[benchmark, problem], sample, tuple(settings))
            for (benchmark, problem, sample), settings in missing.items()
        ]

        def turn(unit: WorkItem) -> tuple[int, int, int]:
            return unit.sample % self.spec.samples, places[unit.benchmark, unit.problem.id], unit.sample

        return sorted(units, key=turn)

    def missing(self, done: Mapping[ProblemKey, Collection[int]]) -> int:
        """Return the number of traces that are not among the stored samples."""
        return sum(len(unit.settings) for unit in self.units(self.expected(), done))

    def estimate(
        self, tokens_per_second: float | None = None, memory: int | None = None, batch_size: int = 64
    ) -> dict[str, Any]:
        """Return the cost of the sweep in the form of `plan --json`.

        With `memory` in bytes the batch size is the largest that fits (0 if no sequence does), else `batch_size`.
        `peak_bytes` are those of one worker with that batch. Trace lengths are `expected_output_tokens`, else the
        benchmark's typical length, at most `max_new_tokens`; memory is estimated for traces of `max_new_tokens`.
        `seconds_with_loops`: if 3 in 10 traces of half of the compressing settings, those that keep least, run to
        `max_new_tokens`.
        """
        # If every setting decodes alone, and if settings share trunks.
        separate = 0
        shared = 0
        looping = 0.0
        samples = self.spec.samples
        compressing = sum(isinstance(policy, CompressingPolicy) for policy, _ in self.policies)
        for model, benchmark in itertools.product(self.models, self.benchmarks):
            output = self.output_tokens(benchmark)
            prompts = self.prompts[model.name, benchmark.name]
            bound_policies = self.policies_on(model)
            surplus = sum(self.samples_of(model, policy.setting) - samples for policy in bound_policies)
            surplus_tokens = output * surplus * len(prompts)
            separate += output * len(self.policies) * samples * len(prompts) + surplus_tokens
            shared += sum(_tree_tokens(bound_policies, prompt, output) for prompt in prompts) * samples + surplus_tokens
            beyond = (self.spec.sampling.max_new_tokens - output) * len(prompts)
            looping += LOOPING * WEAK * compressing * beyond * samples

        size = batch_size
        if memory:
            from kvatlas.engine.memory_plan import GPU_BATCH, largest_batch

            size = min(largest_batch(memory, GPU_BATCH, partial(self._peak, model)) for model in self.models)
        peaks = [self._peak(model, max(1, size)) for model in self.models]
        return {
            "settings": len(self.policies),
            "traces": self.traces,
            "decoded_tokens": {"separate": separate, "shared": shared},
            "kv_bytes_per_sequence": max(self._kv_bytes(model) for model in self.models),
            "batch_size": size if memory else None,
            "peak_bytes": max(peaks, key=lambda peak: peak.total).to_json(),
            "seconds": round(shared / tokens_per_second, 1) if tokens_per_second else None,
            "seconds_with_loops": round((shared + looping) / tokens_per_second, 1) if tokens_per_second else None,
            "budget_audit": [
                {"model": cell.model, "benchmark": cell.benchmark, "setting": str(cell.setting), **asdict(cell.audit)}
                for cell in self.audit
            ],
            "warnings": self.warnings,
        }

    @cached_property
    def audit(self) -> tuple[AuditedCell, ...]:
        """The budget audit of each setting on each benchmark, from the lengths of the prompts."""
        cells = []
        for model, benchmark, policy, _ in self.bind_cells():
            audited = audit_policy(policy, self.prompts[model.name, benchmark.name])
            if audited is not None:
                cells.append(AuditedCell(model.name, benchmark.name, policy.setting, audited))
        return tuple(cells)

    @property
    def warnings(self) -> list[str]:
        """Sentences on differences that this sweep cannot show."""
        sentences = [
            window_sentence(self.spec.axes, self.models, self.policies, self.prompts),
            no_choice_sentence(self.audit),
        ]
        has_few_bits = any(policy.storage.packed for policy, _ in self.policies)
        for model in self.models:
            # Problems that a model is not made for.
            claims = Claims.read(model.folder)
            outside = {name: claims.outside(name, problems) for name, problems in self.problems.items()}
            counted = [f"{count} of {len(self.problems[name])} of {name}" for name, count in outside.items() if count]
            if counted:
                sentences.append(
                    f"{model.name} is made for {claims}. These problems lie outside, so many of them may be wrong with "
                    f"every setting: {', '.join(counted)}."
                )

            for benchmark in self.benchmarks:
                prompt = max(self.prompts[model.name, benchmark.name])
                where = (self.policies_on(model), model.name, benchmark.name, prompt)
                sentences.append(uncompressed_sentence(*where, prompt + self.output_tokens(benchmark)))
                sentences.append(narrow_sentence(*where))

            if has_few_bits and model.device != "cpu":
                sentences.append(PACKED_ON_GPU)
        return [sentence for sentence in sentences if sentence]

    def mean_cached(self, model: ModelHandle) -> int:
        """Return the mean number of cached tokens of a row, from the expected lengths of traces.

        Between two compressions a cache grows evenly from what was kept to the budget.
        """
        prompt = self.longest_prompt(model)
        longest = self.longest_trace(model)
        means = []
        for policy in self.policies_on(model):
            first = prompt
            last = longest
            if isinstance(policy, CompressingPolicy) and policy.budget.most(prompt) < longest:
                last = policy.budget.most(prompt)
                first = policy.budget.window + round(policy.budget.ratio * max(0, last - policy.budget.window))
            means.append((first + last) / 2)
        return round(statistics.mean(means))

    def longest_prompt(self, model: ModelHandle) -> int:
        """Return the length of the longest prompt of a model in tokens."""
        return max(max(self.prompts[model.name, benchmark.name]) for benchmark in self.benchmarks)

    def longest_trace(self, model: ModelHandle) -> int:
        """Return the length of the longest prompt with the longest expected output of a model in tokens."""
        return self.longest_prompt(model) + max(map(self.output_tokens, self.benchmarks))

    def _kv_bytes(self, model: ModelHandle) -> int:
        """Return the most bytes of keys and values of one sequence at its budget, else of the longest sequence."""
        prompt = self.longest_prompt(model)
        longest = prompt + self.spec.sampling.max_new_tokens
        bound_policies = self.policies_on(model)
        sizes = []
        for policy in [policy for policy in bound_policies if policy.budget is not None] or bound_policies:
            tokens = longest if policy.budget is None else policy.budget.most(prompt)
            token_bytes, tail_bytes = model.kv_bytes(policy.storage)
            sizes.append(tokens * token_bytes + tail_bytes)
        return max(sizes)

    @property
    def trees(self) -> int:
        """The number of pairs of problem and sample of a model, each decoded as one tree of settings."""
        return self.spec.samples * sum(self.problem_counts)

    def _peak(self, model: ModelHandle, batch_size: int) -> Peak:
        from kvatlas.engine.memory_plan import peak

        output = self.spec.sampling.max_new_tokens
        return peak(model, self.policies_on(model), batch_size, self.trees, self.longest_prompt(model), output)


def make_plan(spec: Spec) -> Plan:
    """Return the plan of a spec, checked without loading weights. Raises KvatlasError for the first fault."""
    found_models = tuple(entry.find() for entry in spec.models)
    found_benchmarks = tuple(entry.find() for entry in spec.benchmarks)

    spec = with_limit(spec, [model.positions for model in found_models])
    for kind, found in (("model", found_models), ("benchmark", found_benchmarks)):
        names = [item.name for item in found]
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise KvatlasError(f"Two entries of the spec are the {kind} {twice!r}; name it once.")

    cells = _policies_of(spec)
    chosen = [policy for policy, _ in cells]
    problems = {item.name: benchmarks.problems_of(item, spec.problems) for item in found_benchmarks}
    notes = settings_notes(found_models, chosen)
    notes += cap_notes(chosen, spec.sampling.max_new_tokens)
    notes += spec.notes
    for benchmark in found_benchmarks:
        count = len(problems[benchmark.name])
        if not type(benchmark).__module__.startswith("kvatlas."):
            # A benchmark of a third party that cannot be graded is refused before decoding.
            first = problems[benchmark.name][0]
            benchmarks.grade_answer(benchmark, first, first.answer)
        notes += notes_on(benchmark, spec.problems)
        if spec.problems is not None and count < spec.problems:
            fewer = f"{count:,} problems, fewer than the {spec.problems:,} of the spec"
            notes.append(f"Warning: {benchmark.name} has {fewer}.")
        notes += cluster_notes(benchmark.name, problems[benchmark.name])

    prompts = {}
    contents = {}
    for model in found_models:
        model.check()
        notes += model.notes
        for policy in chosen:
            policies.fit_policy(policy, model)
        for benchmark in found_benchmarks:
            adapted = benchmarks.for_model(benchmark, model.reads)
            texts = [model.prompt(benchmarks.prompt_of(adapted, problem)) for problem in problems[benchmark.name]]
            notes += notes_for(model, texts, benchmark.name)
            lengths = [len(model.tokens(text)) for text in texts]
            prompts[model.name, benchmark.name] = lengths
            # All that a grade depends on: the prompt, the reference answer, and other data of the grader.
            digests = {}
            for text, problem in zip(texts, problems[benchmark.name], strict=True):
                about = json.dumps(dict(problem.about), sort_keys=True, default=lambda value: type(value).__qualname__)
                digests[problem.id] = digest([text, problem.answer, about])[:32]
            contents[model.name, benchmark.name] = digests
            _check_room(spec, model, benchmark, max(lengths))
            for policy in chosen:
                policies.fit_policy(policy, model, max(lengths), f"the longest prompt of {benchmark.name}")

    return Plan(
        spec=spec,
        models=found_models,
        benchmarks=found_benchmarks,
        policies=cells,
        problems=problems,
        prompts=prompts,
        contents=contents,
        notes=tuple(notes),
    )


def _policies_of(spec: Spec) -> tuple[tuple[Policy, bool], ...]:
    """Return the policy of each setting, with True if it is a baseline.

    Raises KvatlasError for a repeated setting, and, with the setting, for parameters that do not fit their policy.
    """
    cells: dict[Setting, tuple[Policy, bool]] = {}
    for setting, baseline in spec.cells():
        try:
            policy = policies.from_setting(setting)
        except KvatlasError as error:
            shown = str(setting)
            if len(shown) > SHOWN:
                shown = f"{shown[:SHOWN]}..."
            several = [name for name, value in setting.values.items() if isinstance(value, list | tuple)]
            way_out = "".join(f" Several values of a parameter are an axis: axes: {{{name}: ...}}." for name in several)
            with suppress(KvatlasError):
                names = [item.name for item in policies.parameters(policies.policies.get(setting.policy))]
                others = [entry.policy for entry in spec.settings if entry.policy != setting.policy]
                for axis in sorted(spec.axes.keys() & setting.values.keys() - {*names} if others else ()):
                    example = f"{{policy: {others[0]}, {axis}: {setting.values[axis]}}}"
                    way_out += f" An axis is crossed with every setting: give {axis} to settings: {example}."
            raise KvatlasError(f"The setting {shown} cannot be used: {error}{way_out}") from error

        if spec.strict_budget and isinstance(policy, CompressingPolicy):
            values = {**setting.values, "strict_budget": True}
            policy = policies.from_setting(Setting.from_parameters(setting.policy, **values))
        if policy.setting in cells:
            raise KvatlasError(f"The setting {policy.setting} is repeated; name it once, in settings or in baseline.")
        cells[policy.setting] = (policy, baseline)
    return tuple(cells.values())


def _check_room(spec: Spec, model: ModelHandle, benchmark: Benchmark, prompt: int) -> None:
    """Raise KvatlasError if the longest prompt and its answer do not fit into the positions of the model."""
    room = model.positions
    most = spec.sampling.max_new_tokens
    if room is None or prompt + most <= room:
        return
    if prompt >= room:
        raise KvatlasError(
            f"The longest prompt of {benchmark.name} has {prompt:,} tokens, and the model {model.name!r} reads at most "
            f"{room:,}, its answer included; choose shorter problems (of mazes a smaller grid, or less of L and N)."
        )
    raise KvatlasError(
        f"sampling.max_new_tokens {most} and the longest prompt of {benchmark.name} ({prompt} tokens) do not fit "
        f"into the {room} positions of the model {model.name!r}; expected at most {room - prompt} new tokens."
    )


def _tree_tokens(bound_policies: Sequence[Policy], prompt: int, output: int) -> int:
    """Return the tokens decoded for one problem and sample.

    Settings that differ in their caps on thinking alone share their tokens; the answers behind caps are not counted.
    """
    lengths: dict[Policy, int] = {}
    for policy in bound_policies:
        length = output if policy.cap is None else min(output, policy.cap)
        lengths[policy.uncapped] = max(length, lengths.get(policy.uncapped, 0))

    # The token count at which each setting leaves the trunk and decodes the rest alone. Compressions come after a step,
    # so the second token is drawn before the first of them.
    forks = []
    rest = 0
    for policy, length in lengths.items():
        fork = length
        if policy.budget is not None:
            fork = min(length, max(2, policy.budget.first(prompt) - prompt + 1))
        forks.append(fork)
        rest += length - fork
    return max(forks) + rest


def run_key(spec: Spec, model: ModelHandle, benchmark: Benchmark, policy: Policy) -> str:
    """Return the versioned hash of everything that can change an answer, besides setting, problem and sample."""
    # Logits tie in short types: then the treatment of ties is part of the key.
    ties = {} if model.dtype == "float32" else {"top_k_ties": "kept"}
    rounded = {} if model.precision == model.dtype else {"linear_layers": model.precision, "cache": model.kv_dtype}
    return digest(
        {
            "version": RUN_KEY_VERSION,
            "weights": model.weights_digest,
            "tokenizer": model.tokenizer_digest,
            "dtype": model.dtype,
            "prompt_format": [PROMPT_FORMAT, model.prompt_identity],
            "stops": sorted(model.stops),
            "thinking": [model.thinking.open, model.thinking.close],
            "benchmark": benchmarks.identity(benchmark),
            "sampling": spec.sampling.model_dump(),
            "seed": spec.seed,
            "policy": policy.identity(model),
            **ties,
            **rounded,
        }
    )[:32]


def provenance() -> dict[str, str]:
    """Return the versions that can change results."""
    return {
        "kvatlas": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
