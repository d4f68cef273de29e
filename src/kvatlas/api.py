"""The Python API: open or make a run, then read its maps, cells, traces, comparisons and report.

The package `kvatlas` exports it: `import kvatlas; run = kvatlas.open_run("runs/demo")`.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from kvatlas import core, policies
from kvatlas.columns import CELL_COLUMNS, NUMBERS_OF_TRACES, TRACES, Column, frame_row, taken_names
from kvatlas.core import KvatlasError, Setting, Trace, shortened
from kvatlas.core.settings import columns_of
from kvatlas.report.result import Result
from kvatlas.report.sources import ReadOptions, of_policy
from kvatlas.stats.choice import Choice
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, compared_systems, systems_of
from kvatlas.text import margin_question

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvatlas.sweeps import Progress


#: A longer name of a file is refused by most file systems.
MOST_BYTES_OF_NAME = 255
T = TypeVar("T")
P = ParamSpec("P")
#: What stands for a declared type; numbers of numpy are numbers, too.
_ACCEPTED: dict[Any, type] = {int: Integral, float: Real, Path: PathLike, Any: object}


#: Declared types as error sentences have them.
_IN_WORDS = {
    "str": "a text",
    "int": "an integer",
    "float": "a number",
    "bool": "True or False",
    "Path": "a path",
    "Mapping[str, Any]": "a mapping, as {'ratio': 0.3}",
    "Sequence[str]": "a list of texts",
}
#: What is said of arguments whose type alone does not tell their form.
_EXAMPLES = {
    "run.policy": "a name, as policy='rkv', kv_budget=4096, FILE.py, or that of register(CLASS)",
    "run.model": "an address, as 'hf:OWNER/NAME', or a folder; models have generate(custom_generate=kvatlas.generate)",
    "maps.policy": "a name, as 'rkv'; without it all are drawn",
}


def _typed(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function raise KvatlasError for an argument of another type than the declared one."""

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> T:
        # Types of packages that are imported late are those of results and callbacks.
        declared = get_type_hints(function, localns={"Figure": Any, "Progress": Any})
        try:
            arguments = signature(function).bind(*values, **named).arguments
        except TypeError:
            # Python's own error has the name of the function.
            return function(*values, **named)
        for name, value in arguments.items():
            kind = declared.get(name, Any)
            kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            accepted = tuple(_ACCEPTED.get(one, get_origin(one) or one) for one in kinds)
            if not isinstance(value, accepted) or (isinstance(value, bool) and not {bool, Any} & {*kinds}):
                types = function.__annotations__[name].removesuffix(" | None").split(" | ")
                words = " or ".join(_IN_WORDS.get(one, one) for one in types)
                expected = _EXAMPLES.get(f"{function.__name__}.{name}", words)
                raise KvatlasError(f"{name} is {shortened(value)}; expected {expected}.")
            is_text = isinstance(value, str) and (not value or "\n" in value)
            is_text |= isinstance(value, str) and max(map(len, value.split("/"))) > MOST_BYTES_OF_NAME
            if is_text and Path in kinds:
                way_out = "; yaml.safe_load makes a mapping of the text of a spec" if Mapping in accepted else ""
                raise KvatlasError(f"{name} is a text of {len(value):,} characters; expected a path{way_out}.")
        return function(*values, **named)

    return call


class Heatmap(core.Map):
    """A map with a plot; notebooks show it as a heatmap. Values are shares in [0, 1]."""

    @_typed
    def plot(self, path: str | Path | None = None, *, columns: int | None = None, dark: bool = False) -> Figure:
        """Return the heatmap as a matplotlib figure; with `path` (PNG, SVG, PDF) also write it, with a CSV of its data.

        `columns` is 1 or 2 for a figure as wide as that many columns of a paper. Raises KvatlasError for another
        suffix, and for a map without cells.
        """
        from kvatlas.figures.heatmap import map_figure
        from kvatlas.figures.style import FigureOptions, save

        figure = map_figure([self], options=FigureOptions(columns, dark))
        if path is not None:
            save(figure, Path(path), [self])
        return figure

    def _repr_png_(self) -> bytes:
        from kvatlas.figures.style import rendered

        return rendered(self.plot(), ".png", 130)


class Description(Result):
    """A result whose text `str` gives."""

    def to_json(self) -> dict[str, Any]:
        """Return the data of `kvatlas describe --json`."""
        from kvatlas.report.description import as_document

        return as_document(self)

    def __str__(self) -> str:
        from kvatlas.report.description import one_page

        return one_page(self)

    _repr_markdown_ = __str__


class Run:
    """The traces of a sweep, measured by one metric; `data` is the input of the statistics.

    Methods raise KvatlasError for missing traces (unless the run was opened as partial), for a metric that the run does
    not have, and for maps of a run without two axes.
    """

    def __init__(self, data: RunData, scratch: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.data = data
        self._result = Description((data,))
        self._scratch = scratch

    def __repr__(self) -> str:
        cells = self.data.manifest.expected
        models = ", ".join(dict.fromkeys(cell.model for cell in cells))
        benchmarks = ", ".join(dict.fromkeys(cell.benchmark for cell in cells))
        return f"Run({str(self.path)!r}: {models} on {benchmarks}, {self.data.metric})"

    def _repr_png_(self) -> bytes | None:
        """Return the means over benchmarks as notebooks show them, else the maps; None where there are none."""
        from kvatlas.figures.heatmap import map_figure
        from kvatlas.figures.style import rendered

        try:
            maps = [one.map for one in self._result.means or self._result.maps]
        except KvatlasError:
            # Without two axes there are no maps.
            return None
        return rendered(map_figure(maps), ".png", 130) if maps else None

    @property
    def path(self) -> Path | None:
        """The folder of the run."""
        return self.data.folder

    @_typed
    def by(self, metric: str) -> Run:
        """Return the same run by another metric."""
        return Run(replace(self.data, metric=metric), self._scratch)

    @_typed
    def maps(self, *, mean: bool = False, policy: str | None = None) -> list[Heatmap]:
        """Return a map for each model, benchmark and policy with its plateau, or with `mean` the benchmarks' means."""
        if mean and not self._result.untested_means:
            raise KvatlasError("mean=True averages two or more benchmarks of one model; maps() has those of one.")
        results = self._result.means if mean else self._result.maps
        maps = of_policy([one.map for one in results], self._result.shown_as(policy))
        return [Heatmap(**vars(map_)) for map_ in maps]

    def cells(self) -> pd.DataFrame:
        """Return a row for each setting of each model and benchmark, baselines included.

        Columns: model, benchmark, policy, the settings' parameters (the cap `thinking_tokens` as thinking_cap),
        baseline, value, low and high (shares in [0, 1], 95 % interval), problems, samples, mean_kv_tokens,
        peak_kv_tokens, output_tokens, truncated (traces), seconds, and those of `kvatlas.add_column`.
        """
        import pandas as pd

        cells = [cell for cell in self.data.cells if cell.measured and self.data.fits(cell)]
        rows = []
        for cell in cells:
            identity = {"model": cell.model, "benchmark": cell.benchmark, "policy": cell.setting.policy}
            rows.append({**identity, **columns_of(cell.setting), "baseline": cell.baseline, **frame_row(cell.cell)})
        return pd.DataFrame(rows)

    def traces(self, *, texts: bool = True) -> Iterator[Trace]:
        """Yield the traces of the run's cells; without their tokens and texts if `texts` is false."""
        with self.data.store() as store:
            yield from (trace for _, trace in store.traces(texts=texts))

    @_typed
    def compare(self, first: str, second: str) -> list[Comparison]:
        """Return first minus second on the same problems and samples, with 95 % interval and p-value, in [-1, 1].

        Two policies (`"dynts", "random"`) or two models are compared over all pairs of cells with equal parameters,
        once for each model or policy. Other names are words that match one setting each, such as `"full"` and
        `"dynts local_window=16 ratio=0.3"`, with the model's name if there are several.
        """
        pairs = self._result.unadjusted_comparisons
        shown = (self._result.shown_as(first), self._result.shown_as(second))
        if found := [pair for pair in pairs if (pair.first, pair.second) == shown]:
            return found
        system, other = choose(systems_of([self.data], self.data.metric), [first, second])
        _, difference = compared_systems(system, other, self.data.claim)
        models = ", ".join(dict.fromkeys((system.model, other.model)))
        benchmarks = dict.fromkeys(cell.benchmark for cell in system.cells if cell.measured)
        return [Comparison(models, ", ".join(benchmarks), self.data.metric, first, second, 1, difference)]

    def recommend(self) -> list[Choice]:
        """Return, for each model, the cheapest settings shown to lose at most a margin against the full cache.

        The margin is `lose_at_most` of `open_run`, by default the sweep's own (3 points). `losses` holds the loss of
        each setting, `by_memory` and `by_time` are cells, or None if a cost is unknown or `vacuous` says why no setting
        can be recommended. Models without a full cache have none.
        """
        return list(self._result.choices)

    def describe(self) -> Description:
        """Return the result of the run: peaks, tests, plateaus, trends, comparisons, recommendations."""
        # Missing traces are refused here, and not where the text is written.
        _ = self._result.untested, self._result.tables
        return self._result

    @_typed
    def report(self, path: str | Path, *, per_cell: int = 2) -> Path:
        """Write the self-contained HTML page and return its path; `per_cell` traces of each cell if not all fit."""
        from kvatlas.report.app.page import write_report

        write_report(self._result, Path(path), per_cell=per_cell)
        return Path(path)


@_typed
def open_run(
    path: str | Path,
    *,
    metric: str | None = None,
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    lose_at_most: float | None = None,
) -> Run:
    """Open the run in a folder.

    `metric` is `pass@1` (the default), `progress`, `pass@K`, `maj@K`, or a metric of the benchmark. With
    `partial` maps note missing traces instead of raising an error. `fix` holds axes to one value each, such
    as `{"kv_budget": 288}`. A recommended setting may lose `lose_at_most` points. Raises KvatlasError for a folder
    without a run.
    """
    if question := margin_question(lose_at_most):
        warnings.warn(question, stacklevel=3)
    options = ReadOptions(metric, partial, fix or {}, lose_at_most=lose_at_most)
    return Run(options.open_run(path))


@_typed
def sweep(
    spec: Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    replace: bool = False,
    allow_code: bool = False,
    executor: str = "local",
    workers: int | None = None,
    batch_size: int | None = None,
    on_trace: Callable[[Progress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
) -> Run:
    """Run a sweep into the folder `out`, resume it, or add it to the run there: only missing traces are decoded.

    `spec` is a spec as data, or the path of a YAML file. Each of the `workers` processes decodes `batch_size` sequences
    at a time; by default as many as pay and fit. `on_trace` is called after each stored trace. With `replace` the run
    contains this spec alone; its other traces stay in the store. With `allow_code` the code of files
    that only the run names, policies and benchmarks FILE.py:CLASS, may be run. Raises KvatlasError before decoding for
    a wrong spec, and for a run of other models, benchmarks, problems or sampling.
    """
    from kvatlas.sweeps import make_plan, parse_spec, read_spec
    from kvatlas.sweeps import sweep as decode
    from kvatlas.sweeps.spec import named_classes

    if isinstance(spec, Mapping):
        policies.permit(*named_classes(spec))
        parsed = parse_spec(dict(spec))
    else:
        parsed = read_spec(Path(spec))
    if parsed.is_served:
        from kvatlas.sweeps.served import make_served_plan, sweep_servers

        folder = Path() if isinstance(spec, Mapping) else Path(spec).parent
        plan = make_served_plan(parsed, folder, "spec" if isinstance(spec, Mapping) else str(spec))
        sweep_servers(plan, Path(out), replace_run=replace, on_message=on_message, on_start=on_message)
        return open_run(out)
    options: dict[str, Any] = {"executor": executor, "workers": workers, "batch_size": batch_size}
    options |= {"replace": replace, "allow_code": allow_code}
    decode(make_plan(parsed), Path(out), **options, on_trace=on_trace, on_message=on_message, on_start=on_message)
    return open_run(out)


@_typed
def run(
    model: str,
    benchmark: str | Sequence[str],
    *,
    policy: str = "full",
    out: str | Path | None = None,
    replace: bool = False,
    allow_code: bool = False,
    problems: int | None = None,
    samples: int = 1,
    seed: int = 0,
    temperature: float = 0.6,
    max_new_tokens: int | None = None,
    model_options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    **parameters: Any,
) -> Run:
    """Decode one setting of a policy on one or more benchmarks.

    `parameters` are those of the policy: `kv_budget` and `local_window` in tokens (a window also as a
    share, `25%`), `ratio` in [0, 1], and its own.
    `problems` limits each benchmark to its first problems. The setting is added to a run in `out` (`allow_code` is that
    of `sweep`), or takes the place of its settings (`replace`); without `out` the traces are deleted with the returned
    run. Raises KvatlasError for a setting that the model, the benchmark or the policy cannot do, for one that keeps the
    same tokens under every policy, and for a run of other models, benchmarks or sampling.
    """
    from kvatlas.policies.audit import check_choice
    from kvatlas.sweeps import make_plan, parse_spec
    from kvatlas.sweeps import sweep as decode
    from kvatlas.sweeps.spec import setting_spec

    policies.permit(policy)
    # A misspelt argument would be taken for a parameter of the policy.
    parameter_names = {field.name for field in fields(policies.policies.get(policy))}
    for name in parameters:
        close = get_close_matches(name, signature(run).parameters, n=1)
        if name not in parameter_names and close:
            raise KvatlasError(f"run has no argument {name!r}, nor the policy {policy!r}. Did you mean {close[0]!r}?")

    benchmarks = [benchmark] if isinstance(benchmark, str) else list(benchmark)
    spec = setting_spec(
        model,
        benchmarks,
        Setting.from_parameters(policy, **parameters),
        problems=problems,
        samples=samples,
        seed=seed,
        sampling={"temperature": temperature, "max_new_tokens": max_new_tokens},
        model_options=model_options or {},
    )
    scratch = tempfile.TemporaryDirectory(prefix="kvatlas-") if out is None else None
    folder = scratch.name if scratch else out or ""
    plan = make_plan(parse_spec(spec))
    check_choice(plan.audit)
    decode(plan, Path(folder), workers=workers, batch_size=batch_size, replace=replace, allow_code=allow_code)
    return Run(open_run(folder).data, scratch)


def register(item: T, name: str = "") -> T:
    """Make a policy, a measure or a family of benchmarks known in this process and its workers.

    It is also a decorator of policies.

    A policy has its name in its class; `name` is that of a family: `register(Sum, "SUM")` makes SUM3 a benchmark.
    Workers import the class by its module, so a class of a notebook needs `workers=1`. Raises KvatlasError for an
    object that is neither, and for a name that is taken.
    """
    from kvatlas.benchmarks import families

    family: Any = item
    if isinstance(item, str):
        raise KvatlasError(f"register takes a class, and not {item!r}; a file needs none: policy='FILE.py'.")
    if isinstance(item, core.Measure):
        from kvatlas.measures import measures

        measures.add(item.name, item)
    elif callable(item) and not isinstance(item, type) and not hasattr(item, "named"):
        raise KvatlasError(f"{item!r} is a function; a measure is made of one, as register(Measure('loops', loops)).")
    elif not hasattr(item, "named"):
        policies.register(family)
    elif name:
        families.add(name, family)
    else:
        raise KvatlasError(f"The benchmark family {item!r} needs a name: register(Sum, 'SUM') makes SUM3 known.")
    return item


@_typed
def add_column(
    name: str,
    source: str | Callable[[core.Cell], Any],
    *,
    unit: str = "",
    digits: int | None = None,
    is_share: bool = False,
    title: str = "",
) -> None:
    """Add a column to the cells: `Run.cells`, `describe --json`, `kvatlas run --json`, CSV maps and their reader.

    With a title figures and pages have it, too: its measure of maps, its column in tables of settings, its fact in the
    hover. Add it before a run is opened.

    Args:
        name: its name everywhere; KvatlasError for one that is taken or is no plain word.
        source: the mean of a number of the traces, such as `traces.thinking_tokens`; the key of another column, such as
            `kv_memory`; or a function of a cell. Unknown values are None.
        unit: what is counted, such as `tokens`, `seconds`, `bytes`.
        digits: decimals in files; all if None.
        is_share: values in [0, 1], in percent in files.
        title: what `kvatlas map --metric NAME` and pages call the column as a cost.
    """
    if not name.isidentifier():
        raise KvatlasError(f"add_column: expected a name in letters, digits and _, got {name!r}.")
    if name in taken_names():
        raise KvatlasError(
            f"add_column: the name {name!r} is taken; expected another one than {', '.join(sorted(taken_names()))}."
        )
    keys = [column.key for column in CELL_COLUMNS]
    if isinstance(source, str) and source not in keys and not source.startswith(TRACES):
        raise KvatlasError(
            f"add_column: unknown source {source!r}; expected a function, traces.NAME, or one of {', '.join(keys)}."
        )
    averaged = source.removeprefix(TRACES) if isinstance(source, str) else ""
    beginnings = [one for one in NUMBERS_OF_TRACES if averaged and one.startswith(f"{averaged}_")]
    close = get_close_matches(averaged, NUMBERS_OF_TRACES, n=1, cutoff=0.9) or beginnings
    if close and averaged not in NUMBERS_OF_TRACES:
        raise KvatlasError(f"add_column: no trace has the number {averaged!r}; did you mean {TRACES}{close[0]}?")
    CELL_COLUMNS.append(Column(name, source, unit, is_share, digits, None, name, name, True, title))


__all__ = ["Description", "Heatmap", "KvatlasError", "Run", "add_column", "open_run", "run", "sweep"]
