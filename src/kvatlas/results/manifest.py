"""The manifest of a run: the cells that its sweeps promised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvatlas.core import Problem, Setting

#: Problems that a sentence names.
NAMED = 3


def contents_of(problems: Iterable[Problem]) -> dict[str, str]:
    """Return the digests of the problems' contents by their ids."""
    return {problem.id: problem.content_digest() for problem in problems}


def changed_problems(benchmark: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return number and names of the problems `before` that are missing or have another content `now`, or "".

    Both map the ids of problems to digests of their contents.
    """
    changed = [name for name, content in before.items() if now.get(name) != content]
    if not changed:
        return ""
    named = ", ".join(changed[:NAMED]) + (", ..." if len(changed) > NAMED else "")
    return f"{len(changed)} of {len(before)} problems of {benchmark} ({named})"


@dataclass(frozen=True)
class Expected:
    """One promised cell: every problem, `samples` times. `baseline` cells are outside the grid.

    `kv_bytes` are the bytes of keys and values of each cached token, and of each sequence besides; None if unknown.
    """

    model: str
    benchmark: str
    setting: Setting
    run_key: str
    problems: tuple[str, ...]
    samples: int
    baseline: bool
    kv_bytes: tuple[int, int] | None = None

    @property
    def name(self) -> tuple[str, str, Setting]:
        """Model, benchmark and setting, which identify a cell of a run."""
        return self.model, self.benchmark, self.setting


@dataclass(frozen=True)
class Manifest:
    """The promise of a sweep. `axes` are the parameters of the grid with their values, the vertical one first.

    `about[benchmark][problem]` describes the difficulty of a problem (L, B, N, S of a maze). `allocation` is empty if
    all cells have all problems. For an adaptive sweep it holds `blocks`, the number of `problems` of each benchmark,
    and `stopped`, the reason of the end by model; each cell then has the first problems of one order, more of them as
    the sweep goes on. `contents[benchmark][problem]` is the digest of a problem's content; a run has one version of
    each problem.
    """

    axes: tuple[tuple[str, tuple[Any, ...]], ...]
    expected: tuple[Expected, ...]
    spec: Mapping[str, Any]
    provenance: Mapping[str, Any]
    about: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    allocation: Mapping[str, Any] = field(default_factory=dict)
    screened: bool = False
    contents: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def has_problem(self, benchmark: str, problem: Problem) -> bool:
        """Return whether this is the run's problem of that id, and not one of another version of the benchmark."""
        known = self.contents.get(benchmark, {}).get(problem.id)
        return known is None or known == problem.content_digest()

    def changed_problems(self, benchmark: str, problems: Iterable[Problem]) -> str:
        """Return number and names of the problems of the run that today's benchmark lacks or changes, or ""."""
        return changed_problems(benchmark, self.contents.get(benchmark, {}), contents_of(problems))

    def unlike(self, earlier: Manifest) -> str:
        """Return the differences in models, benchmarks, sampling, seed and allocation as a clause, or ""."""
        here, there = self._shared(), earlier._shared()
        differing = [name for name in here if here[name] != there.get(name, here[name])]
        return " and ".join(f"{name} {there[name]} (this spec: {here[name]})" for name in differing)

    def _shared(self) -> dict[str, Any]:
        models = sorted(entry.get("name") or entry["model"] for entry in self.spec.get("models", ()))
        return {
            "models": ", ".join(models) or "none",
            "benchmarks": ", ".join(sorted(name for name, *_ in self.provenance.get("benchmarks", ()))) or "none",
            **{f"sampling.{name}": value for name, value in self.spec.get("sampling", {}).items()},
            "seed": self.spec.get("seed"),
            "allocate": self.spec.get("allocate", {}).get("kind", "full"),
        }

    def others(self, earlier: Manifest) -> list[Expected]:
        """Return the cells of an earlier sweep that this one lacks, without those of imported logs."""
        mine, imported = {cell.name for cell in self.expected}, earlier.provenance.get("imported", {})
        lacking = [cell for cell in earlier.expected if cell.name not in mine]
        return [cell for cell in lacking if f"{cell.model} {cell.benchmark}" not in imported]

    def with_cells(self, cells: Sequence[Expected], **provenance: Any) -> Manifest:
        """Return this promise with cells in place of those of the same names, and with further provenance."""
        names = {cell.name for cell in cells}
        others = (cell for cell in self.expected if cell.name not in names)
        return replace(self, expected=(*others, *cells), provenance={**self.provenance, **provenance})

    def joined(self, earlier: Manifest) -> Manifest:
        """Return this promise joined with that of an earlier sweep that is not `unlike`.

        All cells have the problems and samples of the larger sweep; a cell on the grid of one sweep stays on it.
        """
        others, spec, axes = self.others(earlier), dict(self.spec), dict(self.axes)
        old, mine = ({cell.name: cell for cell in manifest.expected} for manifest in (earlier, self))
        kept = others + [cell for name, cell in old.items() if name in mine and cell.run_key == mine[name].run_key]
        swept = sorted((*kept, *self.expected), key=lambda cell: len(cell.problems))
        names, problems = {cell.name for cell in swept}, {cell.benchmark: cell.problems for cell in swept}
        samples = max(cell.samples for cell in swept)
        grid = {cell.name for cell in (*self.expected, *(kept if others else ())) if not cell.baseline}
        cells = {
            name: replace(cell, problems=problems[cell.benchmark], samples=samples, baseline=name not in grid)
            if name in names
            else cell
            for name, cell in {**old, **mine}.items()
        }
        if kept:
            limits: list[Any] = [spec.get("problems"), earlier.spec.get("problems")]
            spec |= {"problems": None if None in limits else max(limits), "samples": samples}
        if others:
            axes = dict(earlier.axes)
            for name, values in self.axes:
                axes[name] = tuple(dict.fromkeys((*axes.get(name, ()), *values)))
            # Each cell alone: null keeps cells of the grid from being crossed with axes that they lack.
            alone = dict.fromkeys((name in grid, cell.setting) for name, cell in cells.items() if name in names)
            spec |= {
                "settings": [
                    {"policy": s.policy, **dict.fromkeys(axes), **s.values} for on_grid, s in alone if on_grid
                ],
                "baseline": [{"policy": s.policy, **s.values} for on_grid, s in alone if not on_grid],
                "axes": {name: list(values) for name, values in axes.items()},
                "strict_budget": False,
            }
        about = {name: {**earlier.about.get(name, {}), **known} for name, known in self.about.items()}
        contents = {name: {**earlier.contents.get(name, {}), **known} for name, known in self.contents.items()}
        return replace(
            self,
            axes=tuple(axes.items()),
            expected=tuple(cells.values()),
            spec=spec,
            provenance={
                **earlier.provenance,
                **self.provenance,
                "tags": {**earlier.provenance.get("tags", {}), **self.provenance.get("tags", {})},
            },
            about={**earlier.about, **about},
            contents={**earlier.contents, **contents},
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the store: problem lists once for each benchmark, and their number for each cell."""
        problems: dict[str, list[str]] = {}
        for cell in self.expected:
            if len(cell.problems) > len(problems.get(cell.benchmark, ())):
                problems[cell.benchmark] = list(cell.problems)
        return {
            **vars(self),
            "axes": [[name, list(values)] for name, values in self.axes],
            "expected": [
                [
                    *(c.model, c.benchmark, c.setting.policy, c.setting.values, c.run_key, c.samples, c.baseline),
                    *(len(c.problems), c.kv_bytes),
                ]
                for c in self.expected
            ],
            "problems": problems,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Return the manifest that `to_json` gave."""
        problems = {benchmark: tuple(ids) for benchmark, ids in data["problems"].items()}
        expected = tuple(
            Expected(
                *(model, benchmark, Setting.of(policy, **values), key),
                problems[benchmark][: rest[0] if rest else None],
                *(samples, baseline, tuple(rest[1]) if rest[1:] and rest[1] else None),
            )
            for model, benchmark, policy, values, key, samples, baseline, *rest in data["expected"]
        )
        axes = tuple((name, tuple(values)) for name, values in data["axes"])
        known = {own.name: data[own.name] for own in fields(cls) if own.name in data}
        return cls(**{**known, "axes": axes, "expected": expected})
