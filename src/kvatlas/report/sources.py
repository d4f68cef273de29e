"""The sources of a result, runs and CSV maps, and their maps without tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from kvatlas.core import Claim, KvatlasError, Map, is_of_policy, reference_words
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates import with_binomial_bounds
from kvatlas.stats.maps import maps_of_run, mean_maps
from kvatlas.stats.run_data import RunData, margin_from_points, shown_policies

#: An opened run, or the maps of a file.
Source = RunData | list[Map]


@dataclass(frozen=True)
class ReadOptions:
    """The options under which runs and CSV maps are read.

    Args:
        metric: `pass@1`, `progress`, `pass@K`, `maj@K` or a metric of the benchmark; a run's usual one if None.
        partial: missing traces and cells are noted on maps instead of raising an error.
        fix: axes that are held to one value, which may be written as text.
        policy: the maps and comparisons of this policy alone.
        lose_at_most: the margin in points against the full cache; the run's own if None. KvatlasError out of (0, 100).
        problems: the problems of CSV maps without such a column.
        samples: the samples of CSV maps without such a column.
        claim: what the numbers speak of, in place of the claim that the spec decided. For CSV maps `these_problems`
            declares that the samples were drawn independently.
    """

    metric: str | None = "pass@1"
    partial: bool = False
    fix: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None
    lose_at_most: float | None = None
    problems: int | None = None
    samples: int | None = None
    claim: Claim | None = None

    def __post_init__(self) -> None:
        margin_from_points(self.lose_at_most)

    def open_run(self, folder: str | Path) -> RunData:
        """Return the run in a folder. Raises KvatlasError for a folder without a run."""
        return RunData.open(folder, self.metric, self.partial, self.fix, self.lose_at_most, self.claim)

    def open_source(self, source: str | Path) -> Source:
        """Return a run, or the maps of a CSV file or of `published:NAME` with intervals of the binomial bound."""
        if Path(source).is_dir():
            return self.open_run(source)
        maps = read_maps(source, self.partial, self.problems, self.samples)
        return with_binomial_bounds(maps, self.claim or Claim.LIKE)


@dataclass(frozen=True)
class Sources:
    """Opened runs and CSV maps, read under the same options. Shares in [0, 1]."""

    sources: tuple[Source, ...] = field(repr=False)
    options: ReadOptions = field(default_factory=ReadOptions)

    @cached_property
    def opened_runs(self) -> list[RunData]:
        """The runs among the sources, each with all its policies."""
        return [source for source in self.sources if isinstance(source, RunData)]

    @property
    def only_run(self) -> RunData:
        """The one source, a run; KvatlasError for a CSV map, which has no traces, and for several sources."""
        if len(self.opened_runs) != 1 or len(self.sources) != 1:
            given = "several sources were given" if len(self.sources) > 1 else "the file is a map without traces"
            raise KvatlasError(
                f"A report needs the folder of one run, and {given}: `kvatlas map` and `kvatlas describe` read maps."
            )
        return self.opened_runs[0]

    @cached_property
    def shown_policy(self) -> str | None:
        """The policy that the options name, as maps, lines and comparisons call it; that of a file has other names."""
        return self.shown_as(self.options.policy)

    def shown_as(self, policy: str | None) -> str | None:
        """Return a policy by any of its names as maps, lines and comparisons call it."""
        promised = chain.from_iterable(run.manifest.expected for run in self.opened_runs)
        settings = [cell.setting for cell in promised]
        shown = shown_policies(setting.policy for setting in settings)
        return next((shown[setting.policy] for setting in settings if policy and setting.is_of(policy)), policy)

    @property
    def margin(self) -> float:
        """The loss against the full cache that a setting may have, in (0, 1)."""
        return self.opened_runs[0].margin if self.opened_runs else margin_from_points(self.options.lose_at_most)

    @cached_property
    def reference(self) -> str:
        """The name that sentences give to the full cache, or to the reference of servers."""
        cells = chain.from_iterable(run.manifest.expected for run in self.opened_runs)
        return reference_words(cell.setting for cell in cells)

    @cached_property
    def untested(self) -> list[Map]:
        """The maps of the policy that the options name, without tests; none where no source has maps but a run.

        Raises KvatlasError for runs of which too few axes are held, for missing traces, and for a policy without maps.
        """
        maps = every_map(self.sources)
        if not maps and not all(run.has_maps for run in self.opened_runs):
            return []
        return of_policy(maps, self.shown_policy)

    @cached_property
    def untested_means(self) -> list[Map]:
        """Their means over benchmarks, without tests; raises KvatlasError for maps that cannot be averaged."""
        return mean_maps(self.untested)


def every_map(sources: Sequence[Source]) -> list[Map]:
    """Return the maps of sources, of all policies, without tests; none of a run without maps.

    Raises KvatlasError as `maps_of_run` does.
    """
    with_maps = [source for source in sources if not isinstance(source, RunData) or source.has_maps]
    return list(chain.from_iterable(map(bare_maps, with_maps)))


def bare_maps(source: Source) -> list[Map]:
    """Return the maps of a source, without regions."""
    return maps_of_run(source) if isinstance(source, RunData) else source


def of_policy(maps: Sequence[Map], policy: str | None) -> list[Map]:
    """Return the maps of a policy, all of them without one; raises KvatlasError if there is no map."""
    if not maps:
        raise KvatlasError(
            "There is no map: one needs two parameters that vary, as axes: {local_window: [16, 64], ratio: [0.3, 0.5]}."
            " Run.cells() and `kvatlas describe` have all settings."
        )
    kept = [map_ for map_ in maps if policy is None or is_of_policy(map_.policy, policy)]
    if not kept:
        policies = ", ".join(dict.fromkeys(map_.policy or "none named" for map_ in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {policies}.")
    return kept


def open_sources(sources: Sequence[str | Path | Map | Source], options: ReadOptions) -> tuple[Source, ...]:
    """Open runs (or their folders), CSV maps, `published:NAME`, and single maps.

    Raises KvatlasError for a source that cannot be read, and for options that apply to none of the sources.
    """
    opened: list[Source] = []
    for source in sources:
        if isinstance(source, Map):
            opened.append([source])
        elif isinstance(source, RunData | list):
            opened.append(source)
        else:
            opened.append(options.open_source(source))
    _check_options(opened, options)
    return tuple(opened)


def _check_options(opened: Sequence[Source], options: ReadOptions) -> None:
    """Raise KvatlasError for options that apply to none of the sources, and for CSV maps of another metric."""
    runs = [source for source in opened if isinstance(source, RunData)]
    if options.fix and opened and not runs:
        raise KvatlasError(f"fix is {dict(options.fix)}; expected a run whose axis it holds, only maps were given.")
    if options.problems is not None and len(runs) == len(opened):
        raise KvatlasError(
            f"problems is {options.problems}; expected a CSV map that lacks them, only runs were given, of which all "
            "problems count."
        )

    for source in opened:
        maps = [] if isinstance(source, RunData) else source
        for map_ in maps:
            # The default stands for the metric of the map.
            if options.metric not in (None, "pass@1", map_.metric):
                raise KvatlasError(
                    f"The map of {map_.model} on {map_.benchmark} shows {map_.metric} and no {options.metric!r}."
                )
