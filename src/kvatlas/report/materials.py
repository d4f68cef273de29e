"""The materials of a run as far as they can still be found: models, benchmarks and questions; tokens as texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvatlas.benchmarks import Benchmark, for_model, grade_answer, problems_of, prompt_of
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.models import ModelHandle
from kvatlas.models.token_texts import quick_tokenizer, token_texts
from kvatlas.results import Manifest


@dataclass(frozen=True)
class RunMaterials:
    """Models by name, benchmarks by name with their problems by id, as far as they can still be found."""

    models: Mapping[str, ModelHandle] = field(default_factory=dict)
    benchmarks: Mapping[str, Benchmark] = field(default_factory=dict)
    problems: Mapping[str, Mapping[str, Problem]] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> RunMaterials:
        """Find the models and problems of the run's spec; nothing for a spec that cannot be read."""
        from kvatlas.sweeps.spec import parse_spec

        models: dict[str, ModelHandle] = {}
        benchmarks: dict[str, Benchmark] = {}
        problems: dict[str, dict[str, Problem]] = {}
        try:
            spec = parse_spec(dict(manifest.spec))
        except KvatlasError:
            return cls()
        for entry in spec.models:
            with suppress(KvatlasError):
                model = entry.find()
                models[model.name] = model
        for benchmark_spec in spec.benchmarks:
            with suppress(KvatlasError):
                benchmark = benchmark_spec.find()
                problems[benchmark.name] = {
                    problem.id: problem
                    for problem in problems_of(benchmark, spec.problems)
                    if manifest.has_problem(benchmark.name, problem)
                }
                benchmarks[benchmark.name] = benchmark
        return cls(models, benchmarks, problems)

    def problem(self, trace: Trace) -> Problem | None:
        """Return the question of a trace."""
        return self.problems.get(trace.benchmark, {}).get(trace.problem)

    def reference(self, benchmark_name: str, problem: Problem) -> str:
        """Return the right answer in the form in which answers are stored: as the benchmark reads it.

        A reference with its working, or in words, is read like a text of the model; one that cannot be read so is
        returned whole.
        """
        try:
            grade = grade_answer(self.benchmarks[benchmark_name], problem, problem.answer)
        except (KeyError, KvatlasError):
            return problem.answer
        return grade.answer if grade.correct and grade.answer else problem.answer

    def prompt(self, trace: Trace) -> tuple[int, ...] | None:
        """Return the token ids of a trace's prompt; None where model or question are gone or have changed."""
        model = self.models.get(trace.model)
        problem = self.problem(trace)
        if model is None or problem is None:
            return None
        try:
            benchmark = for_model(self.benchmarks[trace.benchmark], model.reads)
            ids = model.encode(prompt_of(benchmark, problem))
        except KvatlasError:
            return None
        return ids if len(ids) == trace.usage.prompt_tokens else None

    def pieces(self, model_name: str, tokens: tuple[int, ...]) -> list[str] | None:
        """Return the text of each token, which joined are the whole text; None without the tokenizer."""
        model = self.models.get(model_name)
        if model is None:
            return None
        try:
            return token_texts(quick_tokenizer(model.folder) or model.tokenizer, tokens)
        except KvatlasError:
            return None
