"""Reading of CSV maps, which have one row for each cell, with values in percent."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.public import SOURCES
from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind, Setting
from kvatlas.text import number, unguarded

PUBLISHED = "published:"
#: The most characters of a file.
MAX_CHARACTERS = 100_000_000
_FOLDER = resources.files("kvatlas.results") / "published"
#: Policy, KV budget and samples of the published maps (arXiv 2601.18383, section 5), which have no such columns.
_PUBLISHED_AS: Mapping[str, Any] = {"policy": "dynts", "kv_budget": 5000, "samples": 5}
#: The columns that hold the values of a metric, in percent.
_VALUES = re.compile(r"progress|pass_at_[1-9]\d*")
EXTRAS = (
    "low", "high", "problems", "samples", "kept_tokens_mean", "peak_kv_tokens", "output_tokens_mean", "truncated",
    "seconds_mean",
)  # fmt: skip
#: The smallest values of the columns that hold integers, and a limit of all of them.
_INTEGERS = {"local_window": 0, "problems": 1, "samples": 1, "peak_kv_tokens": 0, "truncated": 0}
_BELOW = 10**9
_MEAN = re.compile(r"mean of (\d+)")
#: Missing cells that an error lists.
_LISTED = 5

#: The name of a map: model, benchmark, policy.
_Name = tuple[str, str, str]
_Coord = tuple[Any, Any]


def value_column(metric: str) -> str:
    """Return the column of a metric: `pass@1` is `pass_at_1`."""
    return metric.replace("@", "_at_")


def published_names() -> list[str]:
    """Return the names of the maps that come with the package; each is read as `published:NAME`."""
    return sorted(item.name.removesuffix(".csv") for item in _FOLDER.iterdir() if item.name.endswith(".csv"))


def read_maps(
    source: str | Path, partial: bool = False, problems: int | None = None, samples: int | None = None
) -> list[Map]:
    """Return the maps of a CSV file, or of `published:NAME`, in the order of their first rows; values in [0, 1].

    The form is that of `write_maps`: UTF-8, fields separated by commas, the columns model, benchmark, two axes
    (local_window and ratio, or two others; the first is vertical), the metric in percent (pass_at_1), and optionally
    policy and `EXTRAS`. A row without axis values is a baseline of its benchmark. Without a column `problems` the
    argument counts, else the known size of the benchmark; without a column `samples` the argument. Raises KvatlasError
    for every fault of the file, and for missing cells unless `partial`, which notes them on the map.
    """
    name = str(source)
    defaults = dict(_PUBLISHED_AS) if name.startswith(PUBLISHED) else {}
    defaults |= {key: value for key, value in (("problems", problems), ("samples", samples)) if value is not None}
    reader = csv.DictReader(io.StringIO(_text(name), newline=""))
    groups: dict[_Name, dict[_Coord, Cell]] = {}
    baselines: dict[_Name, Cell] = {}
    try:
        axes, column = _columns(name, list(reader.fieldnames or ()))
        for record in reader:
            where = f"{name}, line {reader.line_num}"
            if None in record:
                raise KvatlasError(f"{where} has more fields than the header; a value with a comma in it needs quotes.")
            fields = {key: unguarded((value or "").strip()) for key, value in record.items()}
            coord, cell = _cell(where, fields, axes, column, defaults)
            map_name = fields["model"], fields["benchmark"], cell.setting.policy
            if coord is None:
                if baselines.setdefault(map_name, cell) is not cell:
                    raise KvatlasError(f"{where} repeats the baseline {map_name[2]!r} of {map_name[1]}.")
            elif groups.setdefault(map_name, {}).setdefault(coord, cell) is not cell:
                place = f"{axes[0]} {coord[0]}, {axes[1]} {coord[1]}"
                raise KvatlasError(f"{where} repeats the cell {place} of {map_name[0]} on {map_name[1]}.")
    except csv.Error as error:
        raise KvatlasError(f"{name} cannot be read as a CSV map ({error}).") from error
    if not groups:
        raise KvatlasError(f"{name} has no cells; expected rows with values of {axes[0]} and {axes[1]}.")
    cells = [*baselines.values(), *(cell for group in groups.values() for cell in group.values())]
    if 0 < max(cell.estimate.high or cell.estimate.value for cell in cells) <= 0.01:
        raise KvatlasError(f"{name} has values of {column} from 0 to 1; expected percent, from 0 to 100.")
    return _maps(name, groups, baselines, axes, column.replace("_at_", "@"), partial)


def _text(name: str) -> str:
    if name.startswith(PUBLISHED):
        if name.removeprefix(PUBLISHED) not in published_names():
            names = ", ".join(PUBLISHED + each for each in published_names())
            raise KvatlasError(f"There is no published map {name.removeprefix(PUBLISHED)!r}; expected: {names}.")
        return (_FOLDER / f"{name.removeprefix(PUBLISHED)}.csv").read_text("utf-8")
    try:
        with Path(name).open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise KvatlasError(f"There is no file {name!r}; name a CSV map, or published:NAME.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KvatlasError(f"{name!r} cannot be read as a CSV map ({error}); expected a text file in UTF-8.") from error
    if len(text) > MAX_CHARACTERS:
        raise KvatlasError(f"{name!r} is longer than {MAX_CHARACTERS:,} characters; expected a CSV map.")
    return text


def _columns(name: str, header: list[str]) -> tuple[tuple[str, str], str]:
    """Return the two axes and the column of the metric."""
    values = [column for column in header if _VALUES.fullmatch(column)]
    axes = [column for column in header if column not in ("model", "benchmark", "policy", *values, *EXTRAS)]
    named = {"model", "benchmark"} <= set(header) and len(set(header)) == len(header)
    if not named or len(values) != 1 or len(axes) != 2 or not all(axes):
        raise KvatlasError(
            f"{name} has the columns {', '.join(header) or 'none'}; expected each once: model, benchmark, two axes "
            f"(local_window, ratio), one metric in percent (pass_at_1), and any of policy, {', '.join(EXTRAS)}."
        )
    return (axes[0], axes[1]), values[0]


def _cell(
    where: str, fields: Mapping[str, str], axes: tuple[str, str], column: str, defaults: Mapping[str, Any]
) -> tuple[_Coord | None, Cell]:
    """Return the coordinates of a row, None for a baseline, and its cell."""
    if not fields["model"] or not fields["benchmark"]:
        raise KvatlasError(f"{where} has no {'benchmark' if fields['model'] else 'model'}; expected both in every row.")
    given = [axis for axis in axes if fields[axis]]
    if len(given) == 1:
        raise KvatlasError(f"{where} has a value of {given[0]} alone; a cell needs both axes, a baseline neither.")
    values = {
        axis: _number(where, axis, fields[axis]) if axis in ("local_window", "ratio") else number(fields[axis])
        for axis in given
    }
    value = _number(where, column, fields[column])
    if not 0 <= value <= 100:
        raise KvatlasError(f"{where}: {column} is {fields[column]}; expected a percentage from 0 to 100.")
    known = SOURCES.get(fields["benchmark"])
    numbers: dict[str, Any] = {"problems": known.size if known else None, "samples": None, **defaults}
    numbers |= {name: _number(where, name, fields[name]) for name in EXTRAS if fields.get(name)}
    low, high = (numbers[limit] / 100 if limit in numbers else None for limit in ("low", "high"))
    policy = fields.get("policy") or defaults.get("policy", "")
    budget = {name: defaults[name] for name in ("kv_budget",) if values and name in defaults}
    cell = Cell(
        Setting.of(policy, **budget, **values),
        Estimate(value / 100, low, high, numbers["problems"], numbers["samples"]),
        mean_kv_tokens=numbers.get("kept_tokens_mean"),
        **{name: numbers.get(name) for name in EXTRAS[5:]},
    )
    return (values[axes[0]], values[axes[1]]) if values else None, cell


def _number(where: str, column: str, text: str) -> float:
    """Return the finite number in a field; an integer for columns of integers."""
    value = number(text)
    if isinstance(value, str) or not math.isfinite(value) or "_" in text:
        raise KvatlasError(f"{where}: {column} is {text!r}; expected a number.")
    if column == "ratio" and not 0 <= value <= 1:
        raise KvatlasError(f"{where}: ratio is {text}; expected a share from 0 to 1.")
    if column in _INTEGERS:
        if not _INTEGERS[column] <= value < _BELOW or value % 1:
            raise KvatlasError(
                f"{where}: {column} is {text}; expected an integer from {_INTEGERS[column]} to {_BELOW - 1:,}."
            )
        return int(value)
    return value


def _maps(
    name: str,
    groups: Mapping[_Name, Mapping[_Coord, Cell]],
    baselines: Mapping[_Name, Cell],
    axes: tuple[str, str],
    metric: str,
    partial: bool,
) -> list[Map]:
    """Return the maps; those of one model and policy have the same axes."""
    maps = []
    for (model, benchmark, policy), cells in groups.items():
        coords = [at for (own, _, other), group in groups.items() if (own, other) == (model, policy) for at in group]
        rows, columns = (ascending(coord[place] for coord in coords) for place in (0, 1))
        places = [(row, column) for row in rows for column in columns]
        missing = [place for place in places if place not in cells]
        if missing and not partial:
            listed = "; ".join(f"{axes[0]} {row}, {axes[1]} {column}" for row, column in missing[:_LISTED])
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise KvatlasError(
                f"{model} on {benchmark} in {name} lacks {len(missing)} of {len(places)} cells ({listed}{more}); "
                "add them, or accept missing ones with --partial."
            )
        note = Note(NoteKind.PARTIAL, f"PARTIAL: {len(missing)} of {len(places)} cells are missing")
        mean = _MEAN.fullmatch(benchmark)
        maps.append(
            Map(
                *(model, benchmark, metric, policy, ((axes[0], rows), (axes[1], columns))),
                {place: cells[place] for place in places if place in cells},
                {other: cell for (*own, other), cell in baselines.items() if own == [model, benchmark]},
                (note,) if missing else (),
                averaged=int(mean[1]) if mean else 0,
            )
        )
    return maps


def ascending(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the distinct values in ascending order; values that cannot be compared keep their order."""
    distinct = list(dict.fromkeys(values))
    try:
        return tuple(sorted(distinct))
    except TypeError:
        return tuple(distinct)
