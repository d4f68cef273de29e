"""The problems of a sweep: what a run says of them, whoever answers them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas import benchmarks, measures
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.public import Questions
from kvatlas.core import MAX_NEW_TOKENS, Claim, KvatlasError, Measure, Problem
from kvatlas.results import Expected, Manifest
from kvatlas.results.manifest import clusters_of, contents_of
from kvatlas.stats.orders import TestedSetting
from kvatlas.stats.power import Provable
from kvatlas.sweeps.spec import Spec


def with_limit(spec: Spec, positions: Iterable[int | None]) -> Spec:
    """Return a spec that names its most new tokens: by default those for which models of these positions have room.

    A quarter of the positions is left for prompts.
    """
    if spec.sampling.max_new_tokens:
        return spec
    limits = [count // 4 * 3 for count in positions if count]
    sampling = spec.sampling.model_copy(update={"max_new_tokens": min([MAX_NEW_TOKENS, *limits])})
    return spec.model_copy(update={"sampling": sampling})


def other_run(folder: Path, unlike: str) -> KvatlasError:
    """Return the refusal of a run in a folder that is `unlike` the sweep."""
    return KvatlasError(
        f"The run in {str(folder)!r} has {unlike}; name another folder, or replace its settings by this spec with "
        "--replace (its traces stay in the store)."
    )


@dataclass(frozen=True, kw_only=True)
class PlannedProblems(ABC):
    """A spec, its benchmarks, and the problems of each by its name.

    `changes` are the keys of the spec's file that were given another value.
    """

    spec: Spec
    benchmarks: tuple[Benchmark, ...]
    problems: Mapping[str, Sequence[Problem]]
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def claim(self) -> Claim:
        """The claim of the run, decided before its data.

        Left to the plan, it is these problems where they are sampled more than once, and are whole files.
        """
        spec = self.spec
        if spec.claim != "auto":
            return Claim(spec.claim)
        is_drawn = spec.samples > 1 and spec.sampling.temperature > 0
        if not is_drawn:
            return Claim.LIKE

        for benchmark in self.benchmarks:
            if spec.problems is None or len(self.problems[benchmark.name]) < spec.problems:
                continue
            # Generated problems are a sample without end.
            if not isinstance(benchmark, Questions) or len(benchmark.problems(spec.problems + 1)) != spec.problems:
                return Claim.LIKE
        return Claim.THESE

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """The measures of the spec; raises KvatlasError for one that cannot be used."""
        return tuple(measures.find(name) for name in self.spec.measures)

    def kept_beside(self, run: Manifest) -> Iterator[str]:
        """Yield a sentence on each benchmark of which a run has more problems, and on more samples."""
        for name, problems in self.problems.items():
            count = len(run.contents.get(name, ()))
            if count > len(problems):
                yield f"The run keeps its {count:,} problems of {name}; this sweep asks the first {len(problems):,}."
        samples = run.spec.get("samples", 1)
        if samples > self.spec.samples:
            yield f"The run keeps its {samples:,} samples of each problem; this sweep asks {self.spec.samples:,}."

    @property
    def sizes(self) -> list[int]:
        """The units of problems like these of each benchmark: its problems, of which those of a cluster are one."""
        sizes = []
        for problems in self.problems.values():
            clusters = clusters_of(problems)
            sizes.append(len(problems) - len(clusters) + len(set(clusters.values())))
        return sizes

    @property
    def problem_counts(self) -> list[int]:
        """The problems of each benchmark."""
        return [len(problems) for problems in self.problems.values()]

    def output_tokens(self, benchmark: Benchmark) -> int:
        """Return the expected length of an answer in tokens."""
        expected = self.spec.expected_output_tokens or benchmark.typical_output_tokens
        return min(expected, self.spec.sampling.max_new_tokens)

    def promise(
        self, expected: Iterable[Expected], axes: Mapping[str, Sequence[Any]], provenance: Mapping[str, Any]
    ) -> Manifest:
        """Return the manifest of a run that promises these cells."""
        identities = [benchmarks.identity(benchmark) for benchmark in self.benchmarks]
        # Numbers and texts about problems: difficulties, seeds of permuted choices.
        about: dict[str, dict[str, dict[str, Any]]] = {}
        for name, problems in self.problems.items():
            for problem in problems:
                plain = {key: value for key, value in problem.about.items() if isinstance(value, str | int | float)}
                if plain:
                    about.setdefault(name, {})[problem.id] = plain
        return Manifest(
            axes=tuple((name, tuple(values)) for name, values in axes.items()),
            expected=tuple(expected),
            spec={**self.spec.model_dump(mode="json"), "claim": self.claim.value},
            provenance={**provenance, "benchmarks": identities, "changes": dict(self.changes)},
            about=about,
            contents={name: contents_of(problems) for name, problems in self.problems.items()},
            clusters={name: found for name, problems in self.problems.items() if (found := clusters_of(problems))},
            measures=self.measures,
        )

    @abstractmethod
    def tested_settings(self) -> tuple[list[TestedSetting], list[str]]:
        """Return the settings of which something is claimed, on the first model, and the axes of their order."""

    def provable(self) -> Provable:
        """Return what this many problems can prove of the settings, in the order in which they will be tested."""
        from kvatlas.stats.orders import orders_of_claims
        from kvatlas.stats.power import provable
        from kvatlas.stats.run_data import margin_from_points

        spec = self.spec
        tested, axes = self.tested_settings()
        margin = margin_from_points(spec.lose_at_most)
        samples = max([spec.samples, *spec.looks])
        orders = orders_of_claims(tested, self.problem_counts, self.sizes, samples, margin, spec.tests, axes)
        return provable(self.sizes, margin, orders, spec.samples, self.problem_counts)
