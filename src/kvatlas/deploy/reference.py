"""A cell of a run that is exported, or that an endpoint is held against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas import benchmarks
from kvatlas.benchmarks import Benchmark
from kvatlas.core import KvatlasError, Setting, Trace
from kvatlas.results import Expected
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, systems_of
from kvatlas.sweeps.spec import BenchmarkSpec, ModelSpec


@dataclass(frozen=True)
class Reference:
    """A model and a setting of a run, with the cells that hold its problems, and how they are sampled."""

    run: RunData
    model: str
    setting: Setting
    cells: tuple[Expected, ...]
    sampling: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, name: str = "") -> Reference:
        """Return the cell that words name (as `compare --only`), else the recommended one.

        Raises KvatlasError if there is not exactly one, or the run was no sweep.
        """
        run = RunData.open(folder)
        if not run.manifest.spec:
            raise KvatlasError(f"{str(folder)!r} was no sweep: how its problems were asked is not known.")
        if name:
            (system,) = choose(systems_of([run], "pass@1"), [name])
            model, setting = system.model, system.setting
        else:
            model, setting = _recommended(run)
        cells = tuple(cell for cell in run.manifest.expected if (cell.model, cell.setting) == (model, setting))
        return cls(run, model, setting, cells, run.manifest.spec["sampling"])

    def traces(self, setting: Setting) -> dict[tuple[str, str, int], Trace]:
        """Return the run's traces of a setting by benchmark, problem and sample; empty if it has none."""
        cells = [cell for cell in self.run.manifest.expected if (cell.model, cell.setting) == (self.model, setting)]
        keys = {(cell.run_key, cell.benchmark) for cell in cells}
        columns = self.run.columns
        rows = columns.records["setting"] == columns.number.get(setting.id, -1)
        with self.run.store() as store:
            return {key[2:]: store.trace(key) for key in sorted(columns.keys(rows)) if (key[0], key[2]) in keys}

    def benchmarks(self) -> dict[str, Benchmark]:
        """Return the benchmarks as the run asked them; raises KvatlasError if this version asks or grades otherwise."""
        recorded = {entry[0]: list(entry) for entry in self.run.manifest.provenance.get("benchmarks", ())}
        by_name = {}
        for entry in self.run.manifest.spec["benchmarks"]:
            benchmark = BenchmarkSpec(**entry).find()
            if benchmark.name in recorded and list(benchmarks.identity(benchmark)) != recorded[benchmark.name]:
                raise KvatlasError(f"{benchmark.name} is asked or graded otherwise here than in the run; sweep anew.")
            by_name[benchmark.name] = benchmarks.asked_of(benchmark, self._reads())
        return by_name

    def _reads(self) -> Callable[[str], bool]:
        for entry in self.run.manifest.spec["models"]:
            with contextlib.suppress(KvatlasError):
                model = ModelSpec(**entry).find()
                if model.name == self.model:
                    return model.reads
        return lambda _: True


def _recommended(run: RunData) -> tuple[str, Setting]:
    from kvatlas.stats.run_analysis import RunAnalysis

    choices = RunAnalysis(run).choices
    settings = [(choice.model, choice.by_memory.setting) for choice in choices if choice.by_memory is not None]
    if len(settings) != 1:
        there = "; ".join(f"{model} {setting}" for model, setting in settings) or "none"
        raise KvatlasError(f"The run recommends not one setting but: {there}. Name a cell with --cell.")
    return settings[0]
