"""Reading of CSV maps, which have one row for each cell, with values in percent."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind, Setting
from kvatlas.results.store import GRADED
from kvatlas.text import unguarded

#: Other usual names of columns, without letter case, signs and units.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "model": ("model_name", "llm"),
    "benchmark": ("benchmark_name", "bench", "dataset", "data_set", "task"),
    "policy": ("method",),
    "local_window": ("window", "window_size", "local_window_size"),
    "ratio": ("keep_ratio", "kept_ratio", "selection_ratio", "retention_ratio"),
    "pass_at_1": ("pass_1", "pass1", "accuracy", "acc"),
    "problems": ("n_problems", "num_problems", "questions"),
    "samples": ("n_samples", "num_samples"),
    "kv_budget": ("budget",),
}
_SEPARATORS = ",;\t|"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")
PUBLISHED = "published:"
#: Problems of well-known benchmarks, for maps without a column `problems`.
KNOWN_PROBLEMS: Mapping[str, int] = {
    "AIME24": 30,
    "AIME25": 30,
    "AMC23": 40,
    "GPQA_D": 198,
    "MATH500": 500,
    "GAOKAO2023EN": 385,
    "GSM8K": 1319,
    "HMMT25": 30,
    "BRUMO25": 30,
    "AIME26": 30,
    "OLYMPIADBENCH": 674,
    "MINERVA": 272,
}
#: The column that holds the values of a metric, in percent.
VALUE_COLUMNS: Mapping[str, str] = {"pass@1": "pass_at_1", "progress": "progress"}
_AT_K = re.compile(r"(pass|avg|maj)_at_[1-9]\d*")
_MEAN = re.compile(r"mean of (\d+)")
AXES = ("local_window", "ratio")
EXTRAS = (
    "low", "high", "problems", "samples", "kept_tokens_mean", "peak_kv_tokens", "output_tokens_mean", "truncated",
    "seconds_mean",
)  # fmt: skip
#: Policy, KV budget and samples of the published maps (arXiv 2601.18383, section 5), which have no such columns.
_PUBLISHED_AS: Mapping[str, Any] = {"policy": "dynts", "kv_budget": 5000, "samples": 5}
#: Columns of integers, in which a comma groups thousands.
_WHOLE = ("local_window", "kv_budget", "problems", "samples", "peak_kv_tokens", "truncated")
#: Missing cells that an error lists.
_LISTED = 5
#: An upper limit of counts of tokens, problems and samples.
MOST = 10**9


class GuessWarning(UserWarning):
    """A sentence on what was guessed about a file."""


@dataclass(frozen=True)
class _Row:
    line: int
    model: str
    benchmark: str
    policy: str
    coord: tuple[Any, Any] | None
    cell: Cell


def value_column(metric: str) -> str:
    """Return the column of a metric: `pass@1` is `pass_at_1`, `maj@5` is `maj_at_5`."""
    return VALUE_COLUMNS.get(metric, metric.replace("@", "_at_"))


def published_names() -> list[str]:
    """Return the names of the maps that come with the package; each is read as `published:NAME`."""
    folder = resources.files("kvatlas.results") / "published"
    return sorted(item.name.removesuffix(".csv") for item in folder.iterdir() if item.name.endswith(".csv"))


def read_maps(
    source: str | Path, partial: bool = False, problems: int | None = None, samples: int | None = None
) -> list[Map]:
    """Return the maps of a CSV file, or of `published:NAME`, in the order of their first rows; values in [0, 1].

    Columns: model, benchmark, local_window, ratio, pass_at_1 (percent), and optionally policy, problems, samples and
    the others that `write_maps` writes; other axes have their own names. Usual spellings of names, semicolons, percent
    signs, fractions, a single axis, and files without a column model are accepted; a GuessWarning tells the guesses.
    A row without axis values is a baseline of its benchmark. Without a column `problems` the argument counts, else the
    known size of the benchmark; without a column `samples` the argument. A column `kv_budget` belongs to the settings.
    Raises KvatlasError for every fault of the file, and for missing cells unless `partial`, which notes them on the
    map.
    """
    name, text, defaults = _text(str(source))
    given = {key: value for key, value in (("problems", problems), ("samples", samples)) if value is not None}
    table = _Table(name, text, defaults | given)
    rows = [table.row(f"{name}, line {line}", line, record) for line, record in table.records]
    if not any(row.coord for row in rows):
        raise KvatlasError(f"{name} has no cells: no row under the header has values of {' and '.join(table.axes)}.")
    if table.guesses:
        warnings.warn(f"{name}: {'; '.join(table.guesses)}.", GuessWarning, stacklevel=2)
    axes = table.axes if len(table.axes) == 2 else ("policy" if "policy" in table.header else "", table.axes[0])
    return _maps(name, rows, (axes[0], axes[1]), table.metric, partial)


def _text(source: str) -> tuple[str, str, dict[str, Any]]:
    """Return the name of a source for sentences, its text, and the values of columns that it lacks."""
    if source.startswith(PUBLISHED):
        name = source.removeprefix(PUBLISHED)
        if name not in published_names():
            names = ", ".join(PUBLISHED + name for name in published_names())
            raise KvatlasError(f"There is no published map {name!r}; expected: {names}.")
        text = (resources.files("kvatlas.results") / "published" / f"{name}.csv").read_text("utf-8")
        return source, text, dict(_PUBLISHED_AS)
    try:
        text = Path(source).read_text("utf-8-sig")
    except FileNotFoundError:
        raise KvatlasError(f"There is no file {source!r}; name a CSV map, or published:NAME.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KvatlasError(
            f"{source!r} cannot be read as a CSV map ({error}); expected a text file in UTF-8."
        ) from error
    if "\0" in text:
        raise KvatlasError(f"{source!r} cannot be read as a CSV map: it holds null characters, which no text has.")
    return source, text, {}


def _plain(column: str) -> str:
    """Return the name of a column without letter case, spaces, signs and unit: `Pass@1 (%)` is `pass_at_1`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip()).casefold().replace("@", "_at_")
    words = re.sub(r"[\s_(\[]*(%|in percent|percent)[)\]]*$", "", words)
    return re.sub(r"[^\w]+|_+", "_", words).strip("_")


def _did_you_mean(missing: Sequence[str], others: Sequence[str], likeness: float = 0.6) -> str:
    """Return a question with the column that each missing one resembles; "" without any."""
    guesses = [(name, get_close_matches(name, others, 1, likeness)) for name in missing]
    pairs = [f"{close[0]} for {name}" for name, close in guesses if close]
    return f" Did you mean {', '.join(pairs)}?" if pairs else ""


def _number(where: str, column: str, text: str) -> float:
    """Return a number, with or without a percent sign or decimal comma; commas of integers group thousands."""
    plain = text.strip().removesuffix("%").rstrip()
    if column in _WHOLE and _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    elif _DECIMAL_COMMA.fullmatch(plain):
        plain = plain.replace(",", ".")
    # Python would read digits of any script, and underscores between them.
    try:
        value = float(plain) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise KvatlasError(f"{where}: {column} is {text!r}; it must be a number.")
    return value


class _Table:
    """The header and rows of a CSV map, its axes (two or one), metric and units, and the guesses about them."""

    def __init__(self, name: str, text: str, defaults: dict[str, Any]) -> None:
        self.name, self.defaults = name, defaults
        self.guesses: list[str] = []
        first = next((line for line in text.splitlines() if line.strip()), "")
        delimiter = max(_SEPARATORS, key=first.count)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
        try:
            columns = [column.strip() for column in reader.fieldnames or []]
            if not any(columns):
                raise KvatlasError(
                    f"{name} is empty; a CSV map begins with model,benchmark,local_window,ratio,pass_at_1."
                )
            self.header = reader.fieldnames = self._spelled(columns)
            #: Each row with the line on which it ends; blank rows are skipped.
            self.records = [(reader.line_num, record) for record in reader if any(record.values())]
        except csv.Error as error:
            raise KvatlasError(f"{name} cannot be read as a CSV map ({error}).") from error
        at_k = [column.replace("_at_", "@") for column in self.header if _AT_K.fullmatch(column)]
        named = [metric for metric, column in VALUE_COLUMNS.items() if column in self.header]
        self.metric = next(iter((*named, *at_k)), "pass@1")
        self.column = value_column(self.metric)
        self.axes = self._axes()
        if "model" not in self.header:
            self.defaults["model"] = Path(name).stem
            self.guesses.append(f"there is no column model, so its maps are called {self.defaults['model']!r}")
        self._find_units()

    def _spelled(self, columns: Sequence[str]) -> list[str]:
        """Return the header with known names in their own spelling; KvatlasError if two columns mean the same."""
        known = {"model", "benchmark", "policy", "kv_budget", *AXES, *VALUE_COLUMNS.values(), *EXTRAS}
        known |= {title for title in map(_plain, columns) if _AT_K.fullmatch(title)}
        header = list(columns)
        for number, column in enumerate(columns):
            if column in known:
                continue
            close = _plain(column)
            usual = next((word for word, names in _USUAL.items() if close in names), "")
            if close in known:
                header[number] = close
            elif usual and usual not in {*columns, *map(_plain, columns)}:
                header[number] = usual
                self.guesses.append(f"column {column} is read as {usual}")
        for column in header:
            if column and header.count(column) > 1:
                both = [written for written, meaning in zip(columns, header, strict=True) if meaning == column]
                raise KvatlasError(f"{self.name} has the column {column} twice in its header: {', '.join(both)}.")
        return header

    def _axes(self) -> tuple[str, ...]:
        """Return the axes, two or one; KvatlasError for missing columns."""
        known = {"model", "benchmark", "policy", self.column, *VALUE_COLUMNS.values(), *EXTRAS}
        others = [name for name in self.header if name and name not in known and not name.startswith(GRADED)]
        missing = [name for name in ("benchmark", self.column) if name not in self.header]
        given = tuple(axis for axis in AXES if axis in self.header)
        further = [name for name in others if name not in given]
        lacking = [axis for axis in AXES if axis not in self.header]
        # Columns of another name may be misspelled axes.
        misspelled = _did_you_mean(lacking, further, 0.66 if given else 0.75)
        axes: tuple[str, ...] = given
        if not given and len(others) == 2 and not misspelled:
            axes = (others[0], others[1])
        elif not given or (len(given) == 1 and misspelled):
            missing += lacking
        elif len(given) == 1:
            names = ("model", "benchmark", "policy", given[0])
            cells = [tuple(record.get(name) for name in names) for _, record in self.records]
            if len(set(cells)) < len(cells):
                # Another column must be the second axis.
                axes = (given[0], further[0]) if len(further) == 1 else ()
                missing += [] if axes else lacking
        if missing:
            raise KvatlasError(
                f"{self.name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
                f"{', '.join(self.header)}." + _did_you_mean(missing, further)
            )
        return axes

    def _find_units(self) -> None:
        """Find the value of a whole: 100 for percent, 1 for fractions.

        Values of at most 1 in all rows are fractions, unless they have percent signs or limits above 1.
        """

        def numbers(*columns: str) -> list[float]:
            values = []
            for column, text in ((name, record.get(name) or "") for _, record in self.records for name in columns):
                # Texts that are no numbers are reported later, with their line.
                with suppress(KvatlasError):
                    values.append(math.inf if "%" in text else _number(self.name, column, text))
            return values

        values = numbers(self.column, *(limit for limit in ("low", "high") if limit in self.header))
        self.whole, self.whole_ratio = 100.0, 1.0
        if values and 0 < max(values) <= 1:
            self.whole = 1.0
            self.guesses.append(
                f"all values of {self.column} are at most 1 and read as fractions (percent: write 0.5%)"
            )
        ratios = numbers("ratio") if "ratio" in self.axes else []
        if ratios and min(ratios) >= 1 and 1 < max(ratios) <= 100:
            self.whole_ratio = 100.0
            self.guesses.append("all values of ratio are 1 or more and read as percent")

    def row(self, where: str, line: int, record: Mapping[str, Any]) -> _Row:
        """Return one row; KvatlasError with `where` for a fault."""
        column, defaults, axes = self.column, self.defaults, self.axes
        field = {key: unguarded((value or "").strip()) for key, value in record.items() if isinstance(key, str)}
        if None in record:
            raise KvatlasError(f"{where} has more fields than the header; a value with a separator in it needs quotes.")
        model, benchmark = field.get("model", defaults.get("model", "")), field["benchmark"]
        if not model or not benchmark:
            raise KvatlasError(f"{where} has no {'benchmark' if model else 'model'}; every row names both.")
        policy = field.get("policy") or defaults.get("policy", "")
        value = _number(where, column, field[column])
        if not 0 <= value <= self.whole:
            raise KvatlasError(f"{where}: {column} is {field[column]}; it must be a percentage from 0 to 100.")
        numbers: dict[str, Any] = {name: _number(where, name, field[name]) for name in EXTRAS if field.get(name)}
        for name in ("problems", "samples"):
            if not 1 <= numbers.get(name, 1) < MOST or numbers.get(name, 1) % 1:
                raise KvatlasError(f"{where}: {name} is {field[name]}; expected an integer from 1 to {MOST - 1:,}.")
        numbers |= {name: int(number) for name, number in numbers.items() if name in _WHOLE}
        size = defaults.get("problems", KNOWN_PROBLEMS.get(benchmark.upper().replace("-", "_")))
        low, high = (numbers[name] / self.whole if name in numbers else None for name in ("low", "high"))
        problems, samples = numbers.get("problems", size), numbers.get("samples", defaults.get("samples"))
        given = [axis for axis in axes if field[axis]]
        if 0 < len(given) < len(axes):
            raise KvatlasError(f"{where} has a value of {given[0]} alone; a cell needs both axes, a baseline neither.")
        values = {axis: self._axis(where, axis, field[axis]) for axis in given}
        budget = {name: defaults[name] for name in ("kv_budget",) if name in defaults}
        if field.get("kv_budget"):
            budget = {"kv_budget": int(_number(where, "kv_budget", field["kv_budget"]))}
        setting = Setting.of(policy, **(budget | values)) if values else Setting(policy)
        coord = tuple(values.values())
        if len(coord) == 1:
            # Runs of one axis have policies by its values, too (`flat_maps`).
            coord, policy = (policy or self.metric, *coord), ""
        cell = Cell(
            setting,
            Estimate(value / self.whole, low, high, problems, samples),
            mean_kv_tokens=numbers.get("kept_tokens_mean"),
            **{name: numbers.get(name) for name in EXTRAS[5:]},
        )
        return _Row(line, model, benchmark, policy, (coord[0], coord[1]) if coord else None, cell)

    def _axis(self, where: str, axis: str, text: str) -> Any:
        if axis not in AXES:
            try:
                value = float(text)
            except ValueError:
                return text
            return int(value) if value.is_integer() else value
        value = _number(where, axis, text)
        if axis == "ratio":
            value /= 100 if "%" in text else self.whole_ratio
            if not 0 <= value <= 1:
                raise KvatlasError(f"{where}: ratio is {text}; it must be a share from 0 to 1.")
            return value
        if not 0 <= value < MOST or value % 1:
            raise KvatlasError(f"{where}: local_window is {text}; expected an integer from 0 to {MOST - 1:,}.")
        return int(value)


def _maps(name: str, rows: Sequence[_Row], axes: tuple[str, str], metric: str, partial: bool) -> list[Map]:
    groups: dict[tuple[str, str, str], dict[tuple[Any, Any], _Row]] = {}
    baselines: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in rows:
        if row.coord is None:
            named = baselines.setdefault((row.model, row.benchmark), {})
            if named.setdefault(row.policy, row.cell) is not row.cell:
                raise KvatlasError(
                    f"{name}, line {row.line}: the baseline {row.policy!r} of {row.benchmark} comes twice."
                )
            continue
        group = groups.setdefault((row.model, row.benchmark, row.policy), {})
        earlier = group.setdefault(row.coord, row)
        if earlier is not row:
            raise KvatlasError(
                f"{name}, line {row.line}: the cell {axes[0]} {row.coord[0]}, {axes[1]} {row.coord[1]} of "
                f"{row.model} on {row.benchmark} comes twice; it is on line {earlier.line} already."
            )
    maps = []
    for (model, benchmark, policy), group in groups.items():
        coords = [c for (m, _, p), other in groups.items() if (m, p) == (model, policy) for c in other]
        rows_, columns = (ascending(coord[place] for coord in coords) for place in (0, 1))
        grid = (axes[0], rows_), (axes[1], columns)
        notes = _holes(name, f"{model} on {benchmark}", group, grid, partial)
        ordered = {(r, c): group[r, c].cell for r in rows_ for c in columns if (r, c) in group}
        named = baselines.get((model, benchmark), {})
        mean = _MEAN.fullmatch(benchmark)
        averaged = int(mean[1]) if mean else 0
        maps.append(Map(model, benchmark, metric, policy, grid, ordered, named, notes, averaged=averaged))
    return maps


def _holes(
    name: str,
    whose: str,
    group: Mapping[tuple[Any, Any], _Row],
    axes: tuple[tuple[str, tuple[Any, ...]], tuple[str, tuple[Any, ...]]],
    partial: bool,
) -> tuple[Note, ...]:
    """Return notes on missing cells, or raise KvatlasError unless `partial`; the axes cover all maps of a model."""
    (vertical, rows), (horizontal, columns) = axes
    missing = [(row, column) for row in rows for column in columns if (row, column) not in group]
    if not missing:
        return ()
    if not partial:
        for axis, values, own in (
            (vertical, rows, {r for r, _ in group}),
            (horizontal, columns, {c for _, c in group}),
        ):
            lacking = [str(value) for value in values if value not in own]
            if lacking:
                raise KvatlasError(
                    f"The maps in {name} have unequal axes: {whose} lacks {axis} {', '.join(lacking)}, which the "
                    "model's other maps have; add the cells, or accept missing ones with --partial."
                )
        listed = "; ".join(f"{vertical} {row}, {horizontal} {column}" for row, column in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise KvatlasError(
            f"{whose} in {name} lacks {len(missing)} of {len(rows) * len(columns)} cells ({listed}{more}); "
            "add them, or accept missing ones with --partial."
        )
    return (Note(NoteKind.PARTIAL, f"PARTIAL: {len(missing)} of {len(rows) * len(columns)} cells are missing"),)


def ascending(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the distinct values in ascending order; values that cannot be compared keep their order."""
    distinct = list(dict.fromkeys(values))
    try:
        return tuple(sorted(distinct))
    except TypeError:
        return tuple(distinct)
