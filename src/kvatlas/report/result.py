"""The result in words and as data: text, JSON, pages and the API read it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from kvatlas.core import FULL, REFERENCE, KvatlasError, Map, Note
from kvatlas.report.as_data import Json, comparison_document, pooled_document, recommendation_document, table_document
from kvatlas.report.evidence import Evidence, MapResult
from kvatlas.report.sentences import headline
from kvatlas.report.sources import ReadOptions, open_sources
from kvatlas.stats.run_data import RunData

__all__ = ["Evidence", "MapResult", "Result", "analyse", "open_result"]


class Result(Evidence):
    """All that is known of runs and CSV maps, in words and as data."""

    @cached_property
    def headline(self) -> str:
        """The finding in one sentence; empty where nothing is proven of settings and policies."""
        return headline(self.choices, self.comparisons)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on the whole result, and on its tables of settings."""
        _, notes = self._means_and_notes
        of_tables = chain.from_iterable(table.notes for table in self.tables)
        of_runs = chain.from_iterable(run.claim_notes for run in self.runs)
        return tuple(dict.fromkeys([*notes, *of_tables, *of_runs]))

    @property
    def map_notes(self) -> dict[str, list[MapResult]]:
        """The notes of maps and means, each once, with the maps that have it."""
        by_text: dict[str, list[MapResult]] = {}
        for one in (*self.maps, *self.means):
            for note in one.notes:
                by_text.setdefault(note.text, []).append(one)
        return by_text

    @property
    def without_finding(self) -> list[MapResult]:
        """Maps of one benchmark of which nothing is found: no difference, effect of an axis or pair, and no mark."""
        found = set().union(*(effect.names for effect in self.effects if effect.is_found))
        maps = []
        for one in self.maps:
            if one.map.is_mean or one.verdict.omnibus is None or one.verdict.evidence:
                continue
            has_mark = any(loss.keeps_any or loss.breaks_any for loss in one.losses.values())
            if not has_mark and not _has_pair(one) and one.map.name not in found:
                maps.append(one)
        return maps

    @property
    def has_two_families(self) -> bool:
        """Return whether a setting is proven to lose more while its difference from the full cache is not proven."""
        rows = chain.from_iterable(table.rows for table in self.tables)
        broken = {row.name for row in rows if row.loss is not None and row.loss.breaks_any}
        open_pairs = [one for one in self.comparisons if not one.difference.is_proven]
        names = {str(FULL), str(REFERENCE)}
        return any(names & {one.first, one.second} and broken & {one.first, one.second} for one in open_pairs)

    @property
    def models_with_differences(self) -> set[str]:
        """The models of which a difference between settings is proven: by an axis, at equal memory, or of a pair."""
        names = chain.from_iterable(effect.names for effect in self.effects if effect.is_proven)
        models = {name.model for name in names}
        models |= {one.map.model for one in self.grids if _has_pair(one)}
        return models | {one.model for one in self.comparisons if one.difference.is_proven}

    def comparison_documents(self) -> list[Json]:
        """Return the comparisons as data: first minus second, in points."""
        return [comparison_document(comparison) for comparison in self.comparisons]

    def to_dict(self) -> Json:
        """Return the result as data: percent scale, unknown values None.

        `headline`: the finding in a sentence. `claim`: what the numbers speak of, `these_problems` or
        `problems_like_these`. `tables`: for runs without
        maps one object per model with model, benchmark, metric, settings (the highest first; each as an estimate of a
        map, with its values by benchmark) and notes.

        `maps`: one object per map with model, benchmark, metric, policy, axes, cells (how many), problems, samples,
        mean, min, max, peaks, lowest, estimates (every cell, see `columns.cell_document`, with what it loses against
        the full cache), baselines, omnibus,
        evidence_of_difference, plateau, may_lose, effects, stability, equal_memory (local windows that keep the same
        number of tokens), method, notes. `means`: the same for the means
        over benchmarks. `comparisons`: first minus second, in points, p-values adjusted over all of them.
        `recommendation`: the first model's choice, with that of every model under `all`; `vacuous` says why there is
        none, `proven_cheapest` is proven by the claim, `deployable` by both; `losses` have `limits` by each claim. With
        caps on thinking `ways` has the cheapest proven setting that keeps fewer tokens, writes fewer, or both.
        `findings`: what limits what the runs can show, the gravest first. `effects`: one joint test for each axis
        over all benchmarks (and models, for CSV maps), each level against the mean of the others.
        """
        return {
            "headline": self.headline or None,
            "claim": self.claim.value,
            "findings": [asdict(finding) for finding in self.findings],
            "tables": [table_document(table) for table in self.tables],
            "maps": [one.to_dict() for one in self.maps],
            "means": [one.to_dict() for one in self.means],
            "comparisons": self.comparison_documents(),
            "recommendation": recommendation_document(self.choices),
            "effects": [pooled_document(effect) for effect in self.effects],
            "notes": [note.text for note in self.notes],
        }


def _has_pair(one: MapResult) -> bool:
    """Return whether a setting of a map is proven better than another at equal memory."""
    return one.verdict.memory is not None and one.verdict.memory.best is not None


def open_result(sources: Sequence[str | Path | RunData | Map], options: ReadOptions | None = None) -> Result:
    """Return the result of runs (or their folders), CSV maps, `published:NAME`, and single maps.

    Raises KvatlasError for a source that cannot be read, and for options that apply to none of the sources.
    """
    options = options or ReadOptions()
    return Result(open_sources(sources, options), options)


def analyse(sources: Sequence[str | Path | RunData | Map], options: ReadOptions | None = None, **named: Any) -> Result:
    """Return the result of sources (see `open_result`) that have maps, no two of them of one name.

    `named` are fields of `ReadOptions` by their names, in place of those of `options`. Raises KvatlasError for a source
    that cannot be read, no map, and a map that comes twice.
    """
    result = open_result(sources, replace(options or ReadOptions(), **named))
    for name, count in Counter(map_.name for map_ in result.untested).items():
        if count > 1:
            raise KvatlasError(
                f"The map {' | '.join(filter(None, name))} was given twice; compare two readings of one map with "
                "`kvatlas compare`."
            )
    return result
