"""The manifest of a run: the cells that its sweeps promised."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pkgutil import resolve_name
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, model_validator

from kvatlas.core import (
    AGAIN,
    KvatlasError,
    Measure,
    Problem,
    Setting,
    SettingFacts,
    changed_problems,
    check_form,
    grouped,
    is_reference,
)
from kvatlas.core.secrets import without_secrets
from kvatlas.results.records import MAX_SAMPLES, check_cell

T = TypeVar("T")
#: A value of a parameter.
Scalar = str | int | float | bool | None
#: Model, benchmark and setting of a cell.
CellName = tuple[str, str, Setting]
#: The most samples of the full cache for each of a setting.
MOST_FULL_SAMPLES = 4
#: The address of the function that asks a setting's policy for its facts.
SETTING_FACTS = "kvatlas.policies.audit:setting_facts"
#: The refusal of a run whose settings have unlike problems, chosen by their outcomes.
ADAPTIVE = (
    "The run is an adaptive sweep (allocate: adaptive); kvatlas 0.1.0 is the last release with them. To read it, sweep "
    "its spec without allocate into the same folder with --replace: stored traces are used, and missing ones decoded."
)
SCREEN = (
    "The run is a screen (sweep --screen); kvatlas 0.1.0 is the last release with them. Sweep its spec on a few "
    "problems, as with --problems 16, into another folder."
)


def contents_of(problems: Iterable[Problem]) -> dict[str, str]:
    """Return the digests of the problems' contents by their ids."""
    return {problem.id: problem.content_digest() for problem in problems}


def clusters_of(problems: Sequence[Problem]) -> dict[str, str]:
    """Return the clusters of problems by their ids, without problems that share nothing.

    Equal problems are a cluster: a file that holds each of 30 questions 32 times has 30 units of problems like these,
    and a setting that fails on a question fails 32 times.
    """

    def asked(problem: Problem) -> tuple[str, ...]:
        # Choices may stand in another order each time, under another letter.
        choices = sorted(map(str, problem.about.get("choices", ())))
        return (problem.question, *(choices or [problem.answer]))

    alike = grouped(problems, asked)
    clusters = {}
    for problem in problems:
        equal = alike[asked(problem)]
        if problem.cluster:
            clusters[problem.id] = problem.cluster
        elif len(equal) > 1:
            clusters[problem.id] = f"the question of {equal[0].id}"
    return clusters


class _StoredCell(BaseModel, strict=True):
    """The form of a cell in a store, a list of these values; manifests of earlier versions lack the last four."""

    model: str
    benchmark: str
    policy: str
    values: dict[str, Scalar]
    run_key: str
    samples: int
    baseline: bool
    count: int | None = None
    kv_bytes: Annotated[tuple[int, int], Field(strict=False)] | None = None
    facts: Annotated[tuple[dict[str, Any], list[str], list[list[int | None]] | None], Field(strict=False)] | None = None
    control: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        return dict(zip(cls.model_fields, values, strict=False)) if isinstance(values, list) else values


@dataclass(frozen=True)
class Expected:
    """One promised cell: every problem, `samples` times. `baseline` cells are outside the grid.

    `kv_bytes` are the bytes of keys and values of each cached token, and of each sequence besides; None if unknown.
    `facts` are what the plan knew of the setting's policy; runs of earlier versions, and imported logs, lack them.
    Of a `control` nothing is claimed but that it loses more than the margin; None in runs of earlier versions.
    """

    model: str
    benchmark: str
    setting: Setting
    run_key: str
    problems: tuple[str, ...]
    samples: int
    baseline: bool
    kv_bytes: tuple[int, int] | None = None
    facts: SettingFacts | None = field(default=None, compare=False, repr=False)
    control: bool | None = None

    @property
    def name(self) -> CellName:
        """Model, benchmark and setting, which identify a cell of a run."""
        return self.model, self.benchmark, self.setting

    @cached_property
    def all_values(self) -> Mapping[str, Any]:
        """The parameters of its setting, those included that the setting does not name."""
        return self.facts_with(()).values

    def facts_with(self, prompts: Iterable[int]) -> SettingFacts:
        """Return what is known of the setting, for prompts of these lengths.

        Its policy is asked where the plan did not store them. The address is resolved only then, so that statistics
        import no policy.
        """
        lengths = set(prompts)
        facts = self.facts
        if facts is not None and (facts.compressions is None or lengths <= facts.compressions.keys()):
            return facts
        asked: SettingFacts = resolve_name(SETTING_FACTS)(self.setting, lengths, self.kv_bytes)
        return asked

    def to_json(self) -> list[Any]:
        """Return plain data for the store, with the number of problems in place of their ids."""
        stored = {
            **vars(self),
            "policy": self.setting.policy,
            "values": self.setting.values,
            "count": len(self.problems),
            "facts": None if self.facts is None else self.facts.to_json(),
        }
        return [stored[name] for name in _StoredCell.model_fields]

    @classmethod
    def from_stored(cls, stored: _StoredCell, problems: Mapping[str, Sequence[str]]) -> Expected:
        """Return the cell that `to_json` gave; `problems` are the ids of all problems by benchmark.

        Raises KvatlasError for a cell that no store can hold.
        """
        values = dict(stored)
        # Manifests without a number of problems promise all.
        values["problems"] = tuple(problems[stored.benchmark][: values.pop("count")])
        values["setting"] = Setting.from_parameters(values.pop("policy"), **values.pop("values"))
        if stored.facts is not None:
            values["facts"] = SettingFacts.from_json(stored.facts)
        cell = cls(**values)
        check_cell(cell.model, cell.benchmark, cell.setting, cell.problems, cell.samples)
        return cell


def _enlarged(cells: Sequence[Expected], on_grid: Collection[CellName]) -> dict[CellName, Expected]:
    """Return the cells by name with the most problems of each benchmark and the most samples.

    Cells outside the grid are baselines.
    """
    problems: dict[str, tuple[str, ...]] = {}
    most: dict[Setting | None, int] = {}
    for cell in cells:
        problems[cell.benchmark] = max(cell.problems, problems.get(cell.benchmark, ()), key=len)
        # The reference may be sampled more often than the settings, and is asked again for its first sample alone.
        kind = cell.setting if is_reference(cell.setting) or cell.setting == AGAIN else None
        most[kind] = max(most.get(kind, 1), cell.samples)

    enlarged = {}
    for cell in cells:
        samples = most[AGAIN] if cell.setting == AGAIN else max(most.get(None, 1), most.get(cell.setting, 1))
        enlarged[cell.name] = replace(
            cell, problems=problems[cell.benchmark], samples=samples, baseline=cell.name not in on_grid
        )
    return enlarged


def _is_extension(earlier: Manifest, now: Mapping[CellName, Expected]) -> bool:
    """Return whether cells of an earlier sweep get more problems, or samples that it did not declare as looks."""
    declared = max(earlier.spec.get("looks") or [0])
    for cell in earlier.expected:
        larger = now.get(cell.name, cell)
        most = declared * MOST_FULL_SAMPLES if is_reference(cell.setting) else declared
        is_larger = len(larger.problems) > len(cell.problems) or larger.samples > max(cell.samples, most)
        # Under another key the traces are new.
        if is_larger and larger.run_key == cell.run_key:
            return True
    return False


def _spec_of_settings(cells: Iterable[Expected], axes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the part of a spec that names the setting of each cell alone."""
    settings = dict.fromkeys((cell.setting, cell.baseline) for cell in cells)

    return {
        # Null keeps a setting of the grid from being crossed with axes that it lacks.
        "settings": [
            {"policy": setting.policy, **dict.fromkeys(axes), **setting.values}
            for setting, is_baseline in settings
            if not is_baseline
        ],
        "baseline": [{"policy": setting.policy, **setting.values} for setting, is_baseline in settings if is_baseline],
        "axes": {name: list(values) for name, values in axes.items()},
        "strict_budget": False,
    }


def _merged(earlier: Mapping[str, Mapping[str, T]], now: Mapping[str, Mapping[str, T]]) -> dict[str, Mapping[str, T]]:
    """Return the entries of both by benchmark and problem; those of `now` replace earlier ones."""
    merged = {benchmark: {**earlier.get(benchmark, {}), **entries} for benchmark, entries in now.items()}
    return {**earlier, **merged}


def _units(problems: Iterable[str], clusters: Mapping[str, str]) -> set[frozenset[str]]:
    """Return the problems in their clusters; one without a cluster stands alone."""
    groups = grouped(problems, lambda problem: (clusters.get(problem, problem), problem in clusters))
    return set(map(frozenset, groups.values()))


class _StoredModel(BaseModel, extra="allow", strict=True):
    """The names of a model in a stored spec."""

    #: Empty for a server that its command or its address names.
    model: str
    name: str | None = None


class _StoredSpec(BaseModel, extra="allow", strict=True):
    """The entries of a stored spec that every reader of a run uses."""

    models: list[str | _StoredModel] = []
    benchmarks: list[str | dict[str, Any]] = []
    problems: int | None = None
    sampling: dict[str, Any] = {}
    looks: list[Annotated[int, Field(ge=1, le=MAX_SAMPLES)]] = []
    claim: str = ""


class _StoredTags(BaseModel, extra="forbid", strict=True):
    """Stored think tags."""

    open: str = ""
    close: str = ""
    opened: bool = False


class _StoredProvenance(BaseModel, extra="allow", strict=True):
    """The entries of a stored provenance that readers of a run use."""

    benchmarks: list[Annotated[list[Any], Field(min_length=1)]] = []
    tags: dict[str, _StoredTags] = {}
    imported: dict[str, dict[str, Any]] = {}
    attempts: dict[str, int] = {}
    #: Settings of a served run that could not be asked, each with the reason.
    left_out: dict[str, str] = {}
    #: Benchmarks whose clusters were changed after the first traces.
    reclustered: list[str] = []
    #: Whether this manifest took the place of another one after its first traces.
    replaced: bool = False
    extensions: int = 0


class _StoredMeasure(BaseModel, strict=True):
    """The form of a measure in a store."""

    name: str
    title: str = ""
    unit: str = ""
    is_share: bool = False
    counts: bool = False


class _StoredManifest(BaseModel, strict=True):
    """The form of a manifest in a store, whoever wrote it: what `Manifest.to_json` gives."""

    axes: list[Annotated[tuple[str, list[Scalar]], Field(strict=False)]]
    expected: list[_StoredCell]
    problems: dict[str, list[str]]
    spec: _StoredSpec
    provenance: _StoredProvenance
    about: dict[str, dict[str, dict[str, Any]]] = {}
    contents: dict[str, dict[str, str]] = {}
    clusters: dict[str, dict[str, str]] = {}
    measures: list[_StoredMeasure] = []


@dataclass(frozen=True)
class Manifest:
    """The promise of a sweep. `axes` are the parameters of the grid with their values, the vertical one first.

    `about[benchmark][problem]` describes the difficulty of a problem (L, B, N, S of a maze).
    `contents[benchmark][problem]` is the digest of a problem's content; a run has one version of each problem.
    `clusters[benchmark][problem]` names what a problem shares with others; it lacks problems without.
    `measures` are the numbers that its traces have beside costs and grades.
    `spec` and `provenance` hold no secrets: every manifest, also one that is read, has `***` in their place.
    """

    axes: tuple[tuple[str, tuple[Any, ...]], ...]
    expected: tuple[Expected, ...]
    spec: Mapping[str, Any]
    provenance: Mapping[str, Any]
    about: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    contents: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    clusters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    measures: tuple[Measure, ...] = ()

    def __post_init__(self) -> None:
        for name in ("spec", "provenance"):
            object.__setattr__(self, name, without_secrets(getattr(self, name)))

    @property
    def decided(self) -> tuple[Any, ...]:
        """The entries of a spec that decide the tests of a run before its data, besides the cells."""
        return tuple(self.spec.get(name) for name in ("claim", "looks", "tests", "lose_at_most"))

    def has_problem(self, benchmark: str, problem: Problem) -> bool:
        """Return whether this is the run's problem of that id, and not one of another version of the benchmark."""
        content = self.contents.get(benchmark, {}).get(problem.id)
        return content is None or content == problem.content_digest()

    def changed_problems(self, benchmark: str, problems: Iterable[Problem]) -> str:
        """Return number and names of the problems of the run that today's benchmark lacks or changes, or ""."""
        return changed_problems(benchmark, self.contents.get(benchmark, {}), contents_of(problems))

    def changed_units(self, earlier: Manifest) -> dict[str, tuple[int, int, int]]:
        """Return how clusters join the problems of both otherwise than in an earlier sweep, by benchmark.

        The numbers are those of the shared problems, and of their units before and now. Other names of the same
        clusters are no change.
        """
        changed = {}
        for benchmark, contents in self.contents.items():
            shared = contents.keys() & earlier.contents.get(benchmark, {}).keys()
            before = _units(shared, earlier.clusters.get(benchmark, {}))
            now = _units(shared, self.clusters.get(benchmark, {}))
            if before != now:
                changed[benchmark] = (len(shared), len(before), len(now))
        return changed

    def unlike(self, earlier: Manifest) -> str:
        """Return the differences in models, benchmarks, sampling and seed as a clause, or ""."""
        now = self._shared()
        before = earlier._shared()
        differing = [name for name in now if now[name] != before.get(name, now[name])]
        return " and ".join(f"{name} {before[name]} (this spec: {now[name]})" for name in differing)

    def _shared(self) -> dict[str, Any]:
        """Return the values that all sweeps of one run share, by the names of a spec."""
        entries = [{"model": entry} if isinstance(entry, str) else entry for entry in self.spec.get("models", ())]
        models = sorted(entry.get("name") or entry["model"] for entry in entries)
        benchmarks = sorted(str(name) for name, *_ in self.provenance.get("benchmarks", ()))
        return {
            "models": ", ".join(models) or "none",
            "benchmarks": ", ".join(benchmarks) or "none",
            **{f"sampling.{name}": value for name, value in self.spec.get("sampling", {}).items()},
            "seed": self.spec.get("seed"),
        }

    def others(self, earlier: Manifest) -> list[Expected]:
        """Return the cells of an earlier sweep that this one lacks, without those of imported logs."""
        names = {cell.name for cell in self.expected}
        imported = earlier.provenance.get("imported", {})
        lacking = [cell for cell in earlier.expected if cell.name not in names]
        return [cell for cell in lacking if f"{cell.model} {cell.benchmark}" not in imported]

    def with_measures(self, measures: Iterable[Measure]) -> Manifest:
        """Return this promise with further measures, in place of those of the same names."""
        by_name = {measure.name: measure for measure in (*self.measures, *measures)}
        return replace(self, measures=tuple(by_name.values()))

    def with_cells(self, cells: Sequence[Expected], **provenance: Any) -> Manifest:
        """Return this promise with cells in place of those of the same names, and with further provenance."""
        names = {cell.name for cell in cells}
        others = (cell for cell in self.expected if cell.name not in names)
        return replace(self, expected=(*others, *cells), provenance={**self.provenance, **provenance})

    def merge_with(self, earlier: Manifest) -> Manifest:
        """Return this promise merged with that of an earlier sweep that is not `unlike`.

        All cells have the problems and samples of the larger sweep; a cell on the grid of one sweep stays on it.
        """
        others = self.others(earlier)
        # Cells of both sweeps whose run key changed are replaced by those of this one.
        run_keys = {cell.name: cell.run_key for cell in self.expected}
        kept = [*others, *(cell for cell in earlier.expected if run_keys.get(cell.name) == cell.run_key)]

        # A sweep that has all cells of the earlier one decides alone which cells are on the grid.
        deciding = (*kept, *self.expected) if others else self.expected
        on_grid = {cell.name for cell in deciding if not cell.baseline}
        swept = _enlarged([*kept, *self.expected], on_grid)
        # Cells of imported logs are not in `swept`; they stay as they are. Controls were declared before the data.
        cells = {cell.name: cell for cell in earlier.expected} | swept
        for cell in earlier.expected:
            cells[cell.name] = replace(cells[cell.name], control=cell.control)

        # The axes of both sweeps, with the values of both.
        axes = dict(self.axes)
        if others:
            axes = dict(earlier.axes)
            for name, values in self.axes:
                axes[name] = tuple(dict.fromkeys((*axes.get(name, ()), *values)))

        spec = dict(self.spec)
        if kept:
            # None means all problems.
            problem_limits: list[Any] = [spec.get("problems"), earlier.spec.get("problems")]
            spec["problems"] = None if None in problem_limits else max(problem_limits)
            # All cells of `swept` but those of the reference have the same number of samples.
            of_settings = [cell.samples for cell in swept.values() if cell.setting != AGAIN]
            spec["samples"] = min(of_settings)
        if others:
            swept_cells = [cell for name, cell in cells.items() if name in swept]
            spec |= _spec_of_settings(swept_cells, axes)
        # The claim and the looks are those that were decided before the first data.
        spec |= {"claim": earlier.spec.get("claim", "problems_like_these"), "looks": earlier.spec.get("looks", [])}

        extensions = earlier.provenance.get("extensions", 0) + int(_is_extension(earlier, swept))
        tags = {**earlier.provenance.get("tags", {}), **self.provenance.get("tags", {})}
        merged = {**earlier.provenance, **self.provenance, "tags": tags}
        if extensions:
            merged["extensions"] = extensions
        reclustered = sorted({*earlier.provenance.get("reclustered", ()), *self.changed_units(earlier)})
        if reclustered:
            merged["reclustered"] = reclustered
        return replace(
            self,
            axes=tuple(axes.items()),
            expected=tuple(cells.values()),
            spec=spec,
            provenance=merged,
            about=_merged(earlier.about, self.about),
            contents=_merged(earlier.contents, self.contents),
            clusters=self._clusters_with(earlier),
            measures=earlier.with_measures(self.measures).measures,
        )

    def _clusters_with(self, earlier: Manifest) -> dict[str, dict[str, str]]:
        """Return the clusters of both: of the problems of this plan its own, or none."""
        clusters = {benchmark: dict(named) for benchmark, named in earlier.clusters.items()}
        for benchmark, contents in self.contents.items():
            others = {id_: name for id_, name in clusters.pop(benchmark, {}).items() if id_ not in contents}
            named = {**others, **self.clusters.get(benchmark, {})}
            if named:
                clusters[benchmark] = named
        return clusters

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the store: problem lists once for each benchmark, and their number for each cell."""
        problems: dict[str, list[str]] = {}
        for cell in self.expected:
            if len(cell.problems) > len(problems.get(cell.benchmark, ())):
                problems[cell.benchmark] = list(cell.problems)
        return {
            **vars(self),
            "axes": [[name, list(values)] for name, values in self.axes],
            "expected": [cell.to_json() for cell in self.expected],
            "problems": problems,
            "measures": [dict(_StoredMeasure(**vars(measure))) for measure in self.measures],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Return the manifest that `to_json` gave.

        Raises ValueError, with the field, for data of another form, and KvatlasError for an adaptive sweep or a screen.
        """
        stored: _StoredManifest = check_form(_StoredManifest, data, "its manifest")
        if data.get("allocation"):
            raise KvatlasError(ADAPTIVE)
        if data.get("screened"):
            raise KvatlasError(SCREEN)
        # All other sweeps of earlier versions gave every setting all problems.
        spec = {name: value for name, value in data["spec"].items() if name != "allocate"}
        expected = tuple(Expected.from_stored(cell, stored.problems) for cell in stored.expected)
        axes = tuple((name, tuple(values)) for name, values in stored.axes)
        measures = tuple(Measure(**dict(measure)) for measure in stored.measures)
        return cls(axes, expected, spec, data["provenance"], stored.about, stored.contents, stored.clusters, measures)
