"""CSV maps: one row per cell in percent, read with every fault named, written so that they read back the same."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind, Setting
from kvatlas.results.store import GRADED
from kvatlas.visible import unguarded

PUBLISHED = "published:"
#: Problems of the benchmarks of the field, for maps that do not tell.
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
#: The column that holds a metric's values, in percent.
VALUE_COLUMNS: Mapping[str, str] = {"pass@1": "pass_at_1", "progress": "progress"}
_AT_K = re.compile(r"(pass|avg|maj)_at_[1-9]\d*|bayes")
_MEAN = re.compile(r"mean of (\d+)")
AXES = ("local_window", "ratio")
EXTRAS = (
    "low", "high", "problems", "samples", "kept_tokens_mean", "peak_kv_tokens", "output_tokens_mean", "truncated",
    "seconds_mean",
)  # fmt: skip
#: What the published maps do not say themselves: policy, KV budget and samples (arXiv 2601.18383, section 5).
_PUBLISHED_AS: Mapping[str, Any] = {"policy": "dynts", "kv_budget": 5000, "samples": 5}
_SHOWN = 5
#: More than any count of tokens, problems or samples.
MOST = 10**9


@dataclass(frozen=True)
class _Row:
    line: int
    model: str
    benchmark: str
    policy: str
    place: tuple[Any, Any] | None
    cell: Cell


def value_column(metric: str) -> str:
    """The column of a metric: `pass@1` is `pass_at_1`, `maj@5` is `maj_at_5`."""
    return VALUE_COLUMNS.get(metric, metric.replace("@", "_at_"))


def _metric(header: Sequence[str]) -> str:
    for metric, column in VALUE_COLUMNS.items():
        if column in header:
            return metric
    made = [column for column in header if _AT_K.fullmatch(column)]
    return made[0].replace("_at_", "@") if made else "pass@1"


def published_names() -> list[str]:
    """The names of the maps that come with the package, each to be read as `published:NAME`."""
    folder = resources.files("kvatlas.results") / "published"
    return sorted(item.name.removesuffix(".csv") for item in folder.iterdir() if item.name.endswith(".csv"))


def read_maps(
    source: str | Path, partial: bool = False, problems: int | None = None, samples: int | None = None
) -> list[Map]:
    """The maps of a CSV file, or of `published:NAME`, in the order in which they begin; fractions inside.

    Columns: model, benchmark, local_window, ratio, pass_at_1 (percent), and optionally policy, problems, samples and
    the others that `write_maps` writes; axes other than local_window and ratio are taken by their own names. A row
    with neither axis value is a baseline of its benchmark. Where there is no column `problems`, the argument is taken,
    else the known size of the benchmark; where there is no column `samples`, the argument. A column `kv_budget` belongs
    to the settings. Raises KvatlasError for whatever is wrong with the file; cells that are missing are refused
    unless `partial`, and then noted on the map.
    """
    name, text, silent = _text(str(source))
    silent |= {key: value for key, value in (("problems", problems), ("samples", samples)) if value is not None}
    header, records = _records(name, text)
    axes, metric = _columns(name, header)
    rows = [_row(f"{name}, line {line}", line, record, axes, value_column(metric), silent) for line, record in records]
    if not any(row.place for row in rows):
        raise KvatlasError(f"{name} has no cells: no row under the header has values of {axes[0]} and {axes[1]}.")
    values = [row.cell.estimate.value for row in rows]
    if 0 < max(values) <= 0.01:
        raise KvatlasError(
            f"All values of {value_column(metric)} in {name} are at most 1; give percent, not fractions."
        )
    return _maps(name, rows, axes, metric, partial)


def _text(source: str) -> tuple[str, str, dict[str, Any]]:
    """The name to say in sentences, the text, and what holds for rows that do not tell."""
    if source.startswith(PUBLISHED):
        name = source.removeprefix(PUBLISHED)
        if name not in published_names():
            valid = ", ".join(PUBLISHED + one for one in published_names())
            raise KvatlasError(f"There is no published map {name!r}; valid are: {valid}.")
        text = (resources.files("kvatlas.results") / "published" / f"{name}.csv").read_text("utf-8")
        return source, text, dict(_PUBLISHED_AS)
    try:
        text = Path(source).read_text("utf-8-sig")
        if "\0" in text:
            raise KvatlasError(f"{source!r} cannot be read as a CSV map: it holds null characters, which no text has.")
        return source, text, {}
    except FileNotFoundError:
        raise KvatlasError(f"There is no file {source!r}; name a CSV map, or published:NAME.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KvatlasError(
            f"{source!r} cannot be read as a CSV map ({error}); it must be a text file in UTF-8."
        ) from error


def _records(name: str, text: str) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """The header, and each row with the line on which it ends; blank rows are passed over."""
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        header = [column.strip() for column in reader.fieldnames or []]
        if not any(header):
            raise KvatlasError(f"{name} is empty; a CSV map begins with model,benchmark,local_window,ratio,pass_at_1.")
        if len(set(header)) < len(header):
            raise KvatlasError(f"{name} has a column twice in its header: {', '.join(header)}.")
        reader.fieldnames = header
        return header, [(reader.line_num, record) for record in reader if any(record.values())]
    except csv.Error as error:
        raise KvatlasError(f"{name} cannot be read as a CSV map ({error}).") from error


def _columns(name: str, header: Sequence[str]) -> tuple[tuple[str, str], str]:
    metric = _metric(header)
    known = {"model", "benchmark", "policy", value_column(metric), *VALUE_COLUMNS.values(), *EXTRAS}
    others = [column for column in header if column and column not in known and not column.startswith(GRADED)]
    missing = [column for column in ("model", "benchmark", value_column(metric)) if column not in header]
    given = tuple(axis for axis in AXES if axis in header)
    likeness = 0.66 if given else 0.75
    misspelt = [axis for axis in AXES if axis not in header and get_close_matches(axis, others, 1, likeness)]
    if len(given) == 2:
        axes = given
    elif len(others) == 2 and not misspelt:
        axes = (others[0], others[1])
    else:
        missing += [axis for axis in AXES if axis not in header]
    if missing:
        raise KvatlasError(
            f"{name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(header)}."
        )
    return (axes[0], axes[1]), metric


def _row(
    where: str,
    line: int,
    record: Mapping[str, Any],
    axes: tuple[str, str],
    column: str,
    silent: Mapping[str, Any],
) -> _Row:
    field = {key: unguarded((value or "").strip()) for key, value in record.items() if isinstance(key, str)}
    if None in record:
        raise KvatlasError(f"{where} has more fields than the header; a value with a comma in it needs quotes.")
    model, benchmark = field["model"], field["benchmark"]
    if not model or not benchmark:
        raise KvatlasError(f"{where} has no {'benchmark' if model else 'model'}; every row names both.")
    policy = field.get("policy") or silent.get("policy", "")
    value = _number(where, column, field[column])
    if not 0 <= value <= 100:
        raise KvatlasError(f"{where}: {column} is {field[column]}; it must be a percentage from 0 to 100.")
    extras = {name: _number(where, name, field[name]) for name in EXTRAS if field.get(name)}
    known = silent.get("problems", KNOWN_PROBLEMS.get(benchmark.upper().replace("-", "_")))
    problems = extras.get("problems", known)
    for name in ("problems", "samples"):
        if not 1 <= extras.get(name, 1) < MOST or extras.get(name, 1) % 1:
            raise KvatlasError(f"{where}: {name} is {field[name]}; it must be a whole number from 1, below {MOST:,}.")
    estimate = Estimate(
        value / 100,
        extras["low"] / 100 if "low" in extras else None,
        extras["high"] / 100 if "high" in extras else None,
        None if problems is None else int(problems),
        _whole(extras.get("samples", silent.get("samples"))),
    )
    given = [axis for axis in axes if field[axis]]
    if len(given) == 1:
        raise KvatlasError(f"{where} has a value of {given[0]} alone; a cell needs both axes, a baseline neither.")
    place = (_axis(where, axes[0], field[axes[0]]), _axis(where, axes[1], field[axes[1]])) if given else None
    setting = (
        Setting.of(policy, **_budget(where, axes, field, silent), **dict(zip(axes, place, strict=True)))
        if place
        else Setting(policy)
    )
    cell = Cell(
        setting,
        estimate,
        mean_kv_tokens=extras.get("kept_tokens_mean"),
        peak_kv_tokens=_whole(extras.get("peak_kv_tokens")),
        output_tokens_mean=extras.get("output_tokens_mean"),
        truncated=_whole(extras.get("truncated")),
        seconds_mean=extras.get("seconds_mean"),
    )
    return _Row(line, model, benchmark, policy, place, cell)


def _budget(where: str, axes: tuple[str, str], field: Mapping[str, str], silent: Mapping[str, Any]) -> dict[str, Any]:
    if "kv_budget" in axes:
        return {}
    if field.get("kv_budget"):
        return {"kv_budget": int(_number(where, "kv_budget", field["kv_budget"]))}
    return {"kv_budget": silent["kv_budget"]} if "kv_budget" in silent else {}


def _number(where: str, column: str, text: str) -> float:
    # Python would read digits of any script, and underscores between them.
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise KvatlasError(f"{where}: {column} is {text!r}; it must be a number.")
    return value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _axis(where: str, axis: str, text: str) -> Any:
    if axis not in AXES:
        try:
            value = float(text)
        except ValueError:
            return text
    else:
        value = _number(where, axis, text)
    if axis == "ratio" and not 0 <= value <= 1:
        raise KvatlasError(f"{where}: ratio is {text}; it must be a share from 0 to 1.")
    if axis == "local_window" and (not 0 <= value < MOST or value % 1):
        raise KvatlasError(f"{where}: local_window is {text}; it must be a whole number of tokens, below {MOST:,}.")
    return int(value) if value.is_integer() and axis != "ratio" else value


def _maps(name: str, rows: Sequence[_Row], axes: tuple[str, str], metric: str, partial: bool) -> list[Map]:
    groups: dict[tuple[str, str, str], dict[tuple[Any, Any], _Row]] = {}
    baselines: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in rows:
        if row.place is None:
            named = baselines.setdefault((row.model, row.benchmark), {})
            if named.setdefault(row.policy, row.cell) is not row.cell:
                raise KvatlasError(
                    f"{name}, line {row.line}: the baseline {row.policy!r} of {row.benchmark} comes twice."
                )
            continue
        group = groups.setdefault((row.model, row.benchmark, row.policy), {})
        earlier = group.setdefault(row.place, row)
        if earlier is not row:
            raise KvatlasError(
                f"{name}, line {row.line}: the cell {axes[0]} {row.place[0]}, {axes[1]} {row.place[1]} of "
                f"{row.model} on {row.benchmark} comes twice; it is on line {earlier.line} already."
            )
    maps = []
    for (model, benchmark, policy), group in groups.items():
        fellows = [other for (m, _, p), other in groups.items() if (m, p) == (model, policy)]
        grid = tuple(
            (axis, ascending([place[i] for other in fellows for place in other])) for i, axis in enumerate(axes)
        )
        notes = _holes(name, f"{model} on {benchmark}", group, (grid[0], grid[1]), partial)
        ordered = {(r, c): group[r, c].cell for r in grid[0][1] for c in grid[1][1] if (r, c) in group}
        named = baselines.get((model, benchmark), {})
        mean = _MEAN.fullmatch(benchmark)
        averaged = int(mean[1]) if mean else 0
        axes_ = (grid[0], grid[1])
        maps.append(Map(model, benchmark, metric, policy, axes_, ordered, named, notes, averaged=averaged))
    return maps


def _holes(
    name: str,
    whose: str,
    group: Mapping[tuple[Any, Any], _Row],
    axes: tuple[tuple[str, tuple[Any, ...]], tuple[str, tuple[Any, ...]]],
    partial: bool,
) -> tuple[Note, ...]:
    """Notes on missing cells, refused unless `partial`; the axes are those of all the model's maps together."""
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
                    "model's other maps have; add the cells, or draw what is there with --partial."
                )
        shown = "; ".join(f"{vertical} {row}, {horizontal} {column}" for row, column in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise KvatlasError(
            f"{whose} in {name} lacks {len(missing)} of {len(rows) * len(columns)} cells ({shown}{more}); "
            "add them, or draw what is there with --partial."
        )
    return (Note(NoteKind.PARTIAL, f"PARTIAL: {len(missing)} of {len(rows) * len(columns)} cells are missing"),)


def ascending(values: Iterable[Any]) -> tuple[Any, ...]:
    """The distinct values in ascending order; values that cannot be compared keep the order in which they came."""
    distinct = list(dict.fromkeys(values))
    try:
        return tuple(sorted(distinct))
    except TypeError:
        return tuple(distinct)
