"""Reading of CSV maps, which have one row for each cell, with values in percent."""

import csv
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.columns import TRACES, Column, csv_columns
from kvatlas.core import (
    Cell,
    Estimate,
    KvatlasError,
    Map,
    Measure,
    Note,
    NoteKind,
    Setting,
    ascending,
    is_storable_number,
    refusal,
    refuse_problem_file,
    refuse_spec,
)
from kvatlas.core.settings import CAP, CAP_COLUMN, WINDOW_SHARE
from kvatlas.policies.budget_rule import stays
from kvatlas.results.export import MARKS
from kvatlas.results.store import FILE
from kvatlas.text import did_you_mean_file, number, open_csv, unguarded, with_decimal_point

PUBLISHED = "published:"
#: The most characters of a file.
MAX_CHARACTERS = 100_000_000
_FOLDER = resources.files("kvatlas.results") / "published"
#: Policy, KV budget and samples of the published maps (arXiv 2601.18383, section 5), which have no such columns.
_PUBLISHED_AS: Mapping[str, Any] = {"policy": "dynts", "kv_budget": 5000, "samples": 5}
#: The ratio of the published maps is one of all older tokens. The length of their prompts in tokens is not known: any
#: up to 200 give the same tokens that stay.
_PUBLISHED_RULE: Mapping[str, Any] = {"ratio_over": "older"}
_PUBLISHED_PROMPT = 150
#: The columns that hold the values of a metric, in percent.
_VALUES = re.compile(r"progress|pass_at_[1-9]\d*")
#: A limit of counts.
_BELOW = 10**9
#: The largest mean of counts, bytes or seconds.
_MOST = 10**15
#: The most characters of a field: figures and tables have room for a name.
_MAX_FIELD = 500
_MEAN = re.compile(r"mean of (\d+)")
#: Missing cells that an error lists.
_LISTED = 5
#: Rounding may move a value by so many percentage points beyond its own limits.
_ROUNDING = 0.05

#: The name of a map: model, benchmark, policy.
_Name = tuple[str, str, str]
_Coord = tuple[Any, Any]


@dataclass(frozen=True)
class _MapFile:
    """The cells and the baselines of a file by map, its axes, the column of its metric, and columns of measures."""

    axes: tuple[str, str]
    column: str
    measures: tuple[Measure, ...] = ()
    groups: dict[_Name, dict[_Coord, Cell]] = field(default_factory=dict)
    baselines: dict[_Name, Cell] = field(default_factory=dict)

    def add(self, where: str, name: _Name, coord: _Coord | None, cell: Cell) -> None:
        """Add a cell, or a baseline without coordinates; raises KvatlasError for a repeated one."""
        model, benchmark, policy = name
        if coord is None:
            if name in self.baselines:
                raise KvatlasError(f"{where} repeats the baseline {policy!r} of {benchmark}.")
            self.baselines[name] = cell
            return
        group = self.groups.setdefault(name, {})
        if coord in group:
            place = f"{self.axes[0]} {coord[0]}, {self.axes[1]} {coord[1]}"
            raise KvatlasError(f"{where} repeats the cell {place} of {model} on {benchmark}.")
        group[coord] = cell

    def name_in_shares(self) -> _Name | None:
        """Return the name of a map whose values are from 0 to 1, which are shares in place of percent; None without.

        Values that small are percent where each is a whole number of right answers, or if an interval reaches above 1.
        """
        for name, group in self.groups.items():
            cells = [*group.values(), *(self.baselines[each] for each in self.baselines if each[:2] == name[:2])]
            largest = max(cell.estimate.high or cell.estimate.value for cell in cells)
            if 0 < largest <= 0.01 and not (self.column != "progress" and all(map(_is_whole_count, cells))):
                return name
        return None


def _traces_of(estimate: Estimate) -> int | None:
    """Return the number of traces of a cell; None if it is unknown."""
    if estimate.problems is None or estimate.samples is None:
        return None
    return estimate.problems * estimate.samples


def _is_whole_count(cell: Cell) -> bool:
    """Return whether the value of a cell is that of a whole number of right answers, with four decimals in percent."""
    traces = _traces_of(cell.estimate)
    if traces is None:
        return False
    right = cell.estimate.value * traces
    return abs(right - round(right)) <= 1e-6 * traces


def published_names() -> list[str]:
    """Return the names of the maps that come with the package; each is read as `published:NAME`."""
    return sorted(item.name.removesuffix(".csv") for item in _FOLDER.iterdir() if item.name.endswith(".csv"))


def read_maps(
    source: str | Path, partial: bool = False, problems: int | None = None, samples: int | None = None
) -> list[Map]:
    """Return the maps of a CSV file, or of `published:NAME`, in the order of their first rows; values in [0, 1].

    The form is that of `write_maps`: UTF-8, fields separated by commas, semicolons or tabs, the columns model,
    benchmark, two axes (local_window and ratio, or two others; the first is vertical), the metric in percent
    (pass_at_1), and optionally policy and the declared `csv_columns`. Columns behind the metric that no one declared
    are measures, numbers that are kept as they are. A row without axis values is a baseline of its benchmark. Without a
    column `problems` the argument counts, else the known size of the benchmark; without a column `samples` the
    argument. Raises KvatlasError for every fault of the file, and for missing cells unless `partial`, which notes them
    on the map.
    """
    name = str(source)
    defaults = dict(_PUBLISHED_AS) if name.startswith(PUBLISHED) else {}
    defaults |= {key: value for key, value in (("problems", problems), ("samples", samples)) if value is not None}

    reader = open_csv(io.StringIO(_file_text(name), newline=""))
    separator = reader.reader.dialect.delimiter
    with refusal(f"{name} cannot be read as a CSV map", csv.Error):
        # Files of earlier versions have the cap under the name of the parameter.
        reader.fieldnames = [CAP if column == CAP_COLUMN else column for column in reader.fieldnames or ()]
        table = _MapFile(*_axes_and_metric(name, list(reader.fieldnames)))
        for record in reader:
            where = f"{name}, line {reader.line_num}"
            fields = _fields(where, record, separator, ("model", "benchmark", *table.axes, table.column))
            coord, cell = _cell_of_row(where, fields, table, defaults)
            table.add(where, (fields["model"], fields["benchmark"], cell.setting.policy), coord, cell)

    if not table.groups:
        raise KvatlasError(f"{name} has no cells; expected rows with values of {table.axes[0]} and {table.axes[1]}.")
    in_shares = table.name_in_shares()
    if in_shares is not None:
        where = f"{name}, {in_shares[0]} on {in_shares[1]}:" if len(table.groups) > 1 else name
        raise KvatlasError(f"{where} has values of {table.column} from 0 to 1; expected percent, from 0 to 100.")
    return [_map_of_file(name, map_name, table, partial) for map_name in table.groups]


def _file_text(name: str) -> str:
    if name.startswith(PUBLISHED):
        if name.removeprefix(PUBLISHED) not in published_names():
            names = ", ".join(PUBLISHED + each for each in published_names())
            raise KvatlasError(f"There is no published map {name.removeprefix(PUBLISHED)!r}; expected: {names}.")
        return (_FOLDER / f"{name.removeprefix(PUBLISHED)}.csv").read_text("utf-8")

    if Path(name).name == FILE:
        raise KvatlasError(f"{name!r} is the store of a run; name its folder, {str(Path(name).parent)!r}.")
    refuse_spec(name)
    if not name.lower().endswith(".csv"):
        refuse_problem_file(name, "a run or a CSV map", f"`kvatlas run MODEL {name} --out runs/mine` makes a run.")
    with refusal(f"{name!r} cannot be read as a CSV map", OSError, UnicodeDecodeError):
        if not Path(name).exists():
            raise KvatlasError(
                f"There is no run and no CSV map {name!r}; expected the folder of a run, a CSV map, or published:NAME."
                f"{did_you_mean_file(Path(name))}"
            )
        with Path(name).open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise KvatlasError(f"{name!r} is longer than {MAX_CHARACTERS:,} characters; expected a CSV map.")
    return text


def _axes_and_metric(name: str, header: list[str]) -> tuple[tuple[str, str], str, tuple[Measure, ...]]:
    """Return the two axes, the column of the metric, and measures: unknown columns behind the metric."""
    values = [column for column in header if _VALUES.fullmatch(column)]
    others = ["model", "benchmark", "policy", *values, *(column.name for column in csv_columns()), *MARKS]
    axes = [column for column in header if column not in others]
    measures: list[str] = []
    if len(axes) > 2 and len(values) == 1:
        metric = header.index(values[0])
        measures = [column for column in axes if header.index(column) > metric]
        axes = axes[: -len(measures)] if measures else axes
    named = {"model", "benchmark"} <= set(header) and len(set(header)) == len(header)
    if not named or len(values) != 1 or len(axes) != 2 or not all(axes):
        raise KvatlasError(
            f"{name} has the columns {', '.join(header) or 'none'}; expected each once: model, benchmark, two axes "
            f"(local_window, ratio), one metric in percent (pass_at_1), and any of policy, "
            f"{', '.join(column.name for column in csv_columns())}."
        )
    return (axes[0], axes[1]), values[0], tuple(map(Measure, measures))


def _fields(where: str, record: Mapping[str | None, Any], separator: str, needed: Sequence[str]) -> dict[str, str]:
    """Return the fields of a row by column; those at its end may be missing, unless they are `needed`.

    Raises KvatlasError for a row with more fields than the header, and for a row that was cut off.
    """
    fields = {}
    for column, text in record.items():
        if column is None:
            raise KvatlasError(
                f"{where} has more fields than the header; a text with {separator!r} in it needs quotes."
            )
        if text is None and column in needed:
            raise KvatlasError(f"{where} ends before its field of {column}; expected as many fields as in the header.")
        fields[column] = unguarded(with_decimal_point(text or "", separator).strip())
        if len(fields[column]) > _MAX_FIELD or len(fields[column].splitlines()) > 1:
            raise KvatlasError(
                f"{where}: {column} is {fields[column]!r:.60}; expected one line of up to {_MAX_FIELD:,} characters."
            )
    return fields


def _cell_of_row(
    where: str, fields: Mapping[str, str], table: _MapFile, defaults: Mapping[str, Any]
) -> tuple[_Coord | None, Cell]:
    """Return the coordinates of a row, None for a baseline, and its cell."""
    if not fields["model"] or not fields["benchmark"]:
        raise KvatlasError(f"{where} has no {'benchmark' if fields['model'] else 'model'}; expected both in every row.")
    values = _axis_values(where, fields, table.axes)
    value = _field_number(where, table.column, fields[table.column])
    if not 0 <= value <= 100:
        raise KvatlasError(f"{where}: {table.column} is {fields[table.column]}; expected a percentage from 0 to 100.")

    estimate, numbers = _numbers_of_row(where, fields, value / 100, table.measures, defaults)
    low = 0.0 if estimate.low is None else 100 * estimate.low
    high = 100.0 if estimate.high is None else 100 * estimate.high
    if not low - _ROUNDING <= value <= high + _ROUNDING:
        order = f"low <= {table.column} <= high"
        raise KvatlasError(
            f"{where}: {table.column} is {value:g} with low {low:g} and high {high:g}; expected {order}."
        )
    traces = _traces_of(estimate)
    truncated = numbers.get("truncated")
    if truncated is not None and traces is not None and truncated > traces:
        raise KvatlasError(f"{where}: truncated is {truncated:,}; expected up to {traces:,}, problems x samples.")

    policy = fields.get("policy") or defaults.get("policy", "")
    if not values:
        return None, Cell(Setting(policy), estimate, numbers, table.measures)
    coord = (values[table.axes[0]], values[table.axes[1]])
    parameters = values
    if "kv_budget" in defaults:
        # A published map, whose rule tells the tokens that stay.
        parameters = {"kv_budget": defaults["kv_budget"], **values}
        kept = stays(Setting.from_parameters(policy, **{**parameters, **_PUBLISHED_RULE}), [_PUBLISHED_PROMPT])
        if kept is not None:
            numbers |= {"stays_tokens": kept.tokens, "stays_share": kept.share}
    return coord, Cell(Setting.from_parameters(policy, **parameters), estimate, numbers, table.measures)


def _axis_values(where: str, fields: Mapping[str, str], axes: tuple[str, str]) -> dict[str, Any]:
    """Return the values of a row on the axes, none for a baseline; raises KvatlasError for a value of one axis."""
    given = [axis for axis in axes if fields[axis]]
    if len(given) == 1:
        raise KvatlasError(f"{where} has a value of {given[0]} alone; a cell needs both axes, a baseline neither.")

    values: dict[str, Any] = {}
    for axis in given:
        text = fields[axis]
        if axis == "local_window" and WINDOW_SHARE.fullmatch(text):
            values[axis] = _window_share(where, text)
        elif axis in ("local_window", "ratio"):
            values[axis] = _field_number(where, axis, text, 0 if axis == "local_window" else None)
        else:
            values[axis] = _number_or_text(where, axis, text)
    return values


def _window_share(where: str, text: str) -> str:
    """Return a local window that is a share of the KV budget, equal ones in one form: `25.0%` is `25%`."""
    share = float(text.removesuffix("%"))
    if not 0 <= share < 100:
        raise KvatlasError(f"{where}: local_window is {text}; expected a share below 100%.")
    return f"{share:.6f}".rstrip("0").rstrip(".") + "%"


def _numbers_of_row(
    where: str, fields: Mapping[str, str], value: float, measures: tuple[Measure, ...], defaults: Mapping[str, Any]
) -> tuple[Estimate, dict[str, Any]]:
    """Return the estimate of this value, and the numbers in the other columns of the row.

    The problems and samples of rows that do not say them are the defaults, else the known size of the benchmark.
    """
    source = SOURCES.get(fields["benchmark"])
    problems = defaults.get("problems", source.size if source else None)
    of_estimate = {"low": None, "high": None, "problems": problems, "samples": defaults.get("samples")}

    of_cell: dict[str, Any] = {}
    for column in csv_columns(measures):
        if not fields.get(column.name):
            continue
        if column.estimate_field:
            of_estimate[column.estimate_field] = _column_value(where, column, fields)
        else:
            of_cell[column.key] = _column_value(where, column, fields)
    return Estimate(value, **of_estimate), of_cell


def _column_value(where: str, column: Column, fields: Mapping[str, str]) -> Any:
    """Return the value of a declared column in a row, shares in [0, 1]."""
    text = fields[column.name]
    if callable(column.source):
        # A function may have any value.
        value = _number_or_text(where, column.name, text)
    else:
        value = _field_number(where, column.name, text, column.least)
        least, most = (-_ROUNDING, 100 + _ROUNDING) if column.is_share else (0, _MOST)
        if column.source == TRACES + column.name and column.least is None:
            # A measure may be below 0.
            least = -_MOST
        if not least <= value <= most:
            expected = "a percentage from 0 to 100" if column.is_share else f"a number from 0 to {_MOST:,}"
            raise KvatlasError(f"{where}: {column.name} is {text}; expected {expected}.")
    return value / 100 if column.is_share and not isinstance(value, str) else value


def _number_or_text(where: str, name: str, text: str) -> float | str:
    """Return the finite number that a field spells, else its text."""
    value = number(text)
    if isinstance(value, str):
        return value
    if not is_storable_number(value) or "_" in text:
        raise KvatlasError(f"{where}: {name} is {text!r:.60}; expected a finite number or a text.")
    # 0.0 for -0.0.
    return value + 0


def _field_number(where: str, name: str, text: str, least: int | None = None) -> float:
    """Return the finite number in a field; an integer from `least` up, if that is given."""
    value = number(text)
    if isinstance(value, str) or not is_storable_number(value) or "_" in text:
        raise KvatlasError(f"{where}: {name} is {text!r:.60}; expected a number.")
    if name == "ratio" and not 0 <= value <= 1:
        raise KvatlasError(f"{where}: ratio is {text}; expected a share from 0 to 1.")
    if least is not None:
        if not least <= value < _BELOW or value % 1:
            raise KvatlasError(f"{where}: {name} is {text}; expected an integer from {least} to {_BELOW - 1:,}.")
        return int(value)
    # 0.0 for -0.0.
    return value + 0


def _map_of_file(name: str, map_name: _Name, table: _MapFile, partial: bool) -> Map:
    """Return one map of a file, with the axes of all maps of its model and policy."""
    model, benchmark, policy = map_name
    coords: list[_Coord] = []
    for (other_model, _, other_policy), group in table.groups.items():
        if (other_model, other_policy) == (model, policy):
            coords += group
    rows = ascending(coord[0] for coord in coords)
    columns = ascending(coord[1] for coord in coords)
    places = list(itertools.product(rows, columns))

    cells = table.groups[map_name]
    missing = [place for place in places if place not in cells]
    notes: tuple[Note, ...] = ()
    if missing:
        if not partial:
            down, across = table.axes
            listed = "; ".join(f"{down} {row}, {across} {column}" for row, column in missing[:_LISTED])
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise KvatlasError(
                f"{model} on {benchmark} in {name} lacks {len(missing)} of {len(places)} cells ({listed}{more}); add "
                "them, or accept missing ones with --partial."
            )
        notes = (Note(NoteKind.PARTIAL, f"PARTIAL: {len(missing)} of {len(places)} cells are missing"),)

    mean = _MEAN.fullmatch(benchmark)
    return Map(
        model,
        benchmark,
        table.column.replace("_at_", "@"),
        policy,
        ((table.axes[0], rows), (table.axes[1], columns)),
        {place: cells[place] for place in places if place in cells},
        {other[2]: cell for other, cell in table.baselines.items() if other[:2] == (model, benchmark)},
        notes,
        averaged=int(mean[1]) if mean else 0,
    )
