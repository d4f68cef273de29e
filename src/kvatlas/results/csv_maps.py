"""CSV maps: one row per cell in percent, read with every fault named, written so that they read back the same."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind, Setting
from kvatlas.results.store import GRADED
from kvatlas.text import unguarded

#: Other names that people give to columns, once letter case, signs and units are left out.
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


class GuessWarning(UserWarning):
    """What was understood in a file without being sure, in one sentence."""


def separator(text: str) -> str:
    """What separates the fields: of comma, semicolon, tab and bar the one that the first line has most of."""
    head = next((line for line in text.splitlines() if line.strip()), "")
    return max(_SEPARATORS, key=head.count)


def plain(column: str) -> str:
    """A column's name without letter case, spaces, signs and unit: `Pass@1 (%)` is `pass_at_1`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip()).casefold().replace("@", "_at_")
    words = re.sub(r"[\s_(\[]*(%|in percent|percent)[)\]]*$", "", words)
    return re.sub(r"[^\w]+|_+", "_", words).strip("_")


def spelt(name: str, header: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The header with the names that are meant, and what is told of those that were not plain.

    Names that are no spelling of a known column stay. KvatlasError where two columns mean the same.
    """
    meant, told = list(header), []
    for number, column in enumerate(header):
        if column in known:
            continue
        close = plain(column)
        usual = next((word for word, names in _USUAL.items() if close in names), "")
        if close in known:
            meant[number] = close
        elif usual and usual not in {*header, *map(plain, header)}:
            meant[number] = usual
            told.append(f"column {column} is read as {usual}")
    for column in meant:
        if column and meant.count(column) > 1:
            both = [written for written, meaning in zip(header, meant, strict=True) if meaning == column]
            raise KvatlasError(f"{name} has the column {column} twice in its header: {', '.join(both)}.")
    return meant, told


def did_you_mean(missing: Sequence[str], others: Sequence[str], likeness: float = 0.6) -> str:
    """A question for every missing column that another one resembles; "" where none does."""
    guesses = [(name, get_close_matches(name, others, 1, likeness)) for name in missing]
    said = [f"{close[0]} for {name}" for name, close in guesses if close]
    return f" Did you mean {', '.join(said)}?" if said else ""


def number(where: str, column: str, text: str, whole: bool = False) -> float:
    """A number, with or without a percent sign or decimal comma; in `whole` columns a comma groups thousands."""
    plain_text = text.strip().removesuffix("%").rstrip()
    if whole and _THOUSANDS.fullmatch(plain_text):
        plain_text = plain_text.replace(",", "")
    elif _DECIMAL_COMMA.fullmatch(plain_text):
        plain_text = plain_text.replace(",", ".")
    # Python would read digits of any script, and underscores between them.
    try:
        value = float(plain_text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise KvatlasError(f"{where}: {column} is {text!r}; it must be a number.")
    return value


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
_AT_K = re.compile(r"(pass|avg|maj)_at_[1-9]\d*")
_MEAN = re.compile(r"mean of (\d+)")
AXES = ("local_window", "ratio")
EXTRAS = (
    "low", "high", "problems", "samples", "kept_tokens_mean", "peak_kv_tokens", "output_tokens_mean", "truncated",
    "seconds_mean",
)  # fmt: skip
#: What the published maps do not say themselves: policy, KV budget and samples (arXiv 2601.18383, section 5).
_PUBLISHED_AS: Mapping[str, Any] = {"policy": "dynts", "kv_budget": 5000, "samples": 5}
#: Columns of whole numbers, in which a comma groups thousands.
_WHOLE = ("local_window", "kv_budget", "problems", "samples", "peak_kv_tokens", "truncated")
_SHOWN = 5
#: More than any count of tokens, problems or samples.
MOST = 10**9


@dataclass(frozen=True)
class _Row:
    line: int
    model: str
    benchmark: str
    policy: str
    coord: tuple[Any, Any] | None
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
    the others that `write_maps` writes; axes other than local_window and ratio are taken by their own names. Names in
    any case and usual spelling are understood, and so are semicolons, percent signs and fractions, one axis alone and
    a file without a column model; what had to be guessed is told by a GuessWarning. A row
    with neither axis value is a baseline of its benchmark. Where there is no column `problems`, the argument is taken,
    else the known size of the benchmark; where there is no column `samples`, the argument. A column `kv_budget` belongs
    to the settings. Raises KvatlasError for whatever is wrong with the file; cells that are missing are refused
    unless `partial`, and then noted on the map.
    """
    name, text, silent = _text(str(source))
    silent |= {key: value for key, value in (("problems", problems), ("samples", samples)) if value is not None}
    header, records, told = _records(name, text)
    axes, metric = _columns(name, header, records)
    if "model" not in header:
        silent["model"] = Path(name).stem
        told.append(f"there is no column model, so its maps are called {silent['model']!r}")
    column = value_column(metric)
    units = _units(name, header, [record for _, record in records], column, axes, told)
    rows = [_row(f"{name}, line {line}", line, record, axes, metric, silent, units) for line, record in records]
    if not any(row.coord for row in rows):
        raise KvatlasError(f"{name} has no cells: no row under the header has values of {' and '.join(axes)}.")
    if told:
        warnings.warn(f"{name}: {'; '.join(told)}.", GuessWarning, stacklevel=2)
    both = (axes[0], axes[1]) if len(axes) == 2 else ("policy" if "policy" in header else "", axes[0])
    return _maps(name, rows, both, metric, partial)


def _text(source: str) -> tuple[str, str, dict[str, Any]]:
    """The name to say in sentences, the text, and what holds for rows that do not tell."""
    if source.startswith(PUBLISHED):
        name = source.removeprefix(PUBLISHED)
        if name not in published_names():
            valid = ", ".join(PUBLISHED + name for name in published_names())
            raise KvatlasError(f"There is no published map {name!r}; expected: {valid}.")
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


def _records(name: str, text: str) -> tuple[list[str], list[tuple[int, dict[str, Any]]], list[str]]:
    """The header, each row with the line on which it ends (blank ones are passed over), and what is told of it."""
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator(text), skipinitialspace=True)
    try:
        header = [column.strip() for column in reader.fieldnames or []]
        if not any(header):
            raise KvatlasError(f"{name} is empty; a CSV map begins with model,benchmark,local_window,ratio,pass_at_1.")
        known = {"model", "benchmark", "policy", "kv_budget", *AXES, *VALUE_COLUMNS.values(), *EXTRAS}
        header, told = spelt(name, header, known | {title for title in map(plain, header) if _AT_K.fullmatch(title)})
        reader.fieldnames = header
        return header, [(reader.line_num, record) for record in reader if any(record.values())], told
    except csv.Error as error:
        raise KvatlasError(f"{name} cannot be read as a CSV map ({error}).") from error


def _columns(
    name: str, header: Sequence[str], records: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[tuple[str, ...], str]:
    """The axes, two or one, and the metric."""
    metric = _metric(header)
    known = {"model", "benchmark", "policy", value_column(metric), *VALUE_COLUMNS.values(), *EXTRAS}
    others = [column for column in header if column and column not in known and not column.startswith(GRADED)]
    missing = [column for column in ("benchmark", value_column(metric)) if column not in header]
    given = tuple(axis for axis in AXES if axis in header)
    further = [column for column in others if column not in given]
    lacking = [axis for axis in AXES if axis not in header]
    # Columns of another name may be misspelt axes.
    misspelt = did_you_mean(lacking, further, 0.66 if given else 0.75)
    axes: tuple[str, ...] = given
    if not given and len(others) == 2 and not misspelt:
        axes = (others[0], others[1])
    elif not given or (len(given) == 1 and misspelt):
        missing += lacking
    elif len(given) == 1:
        names = ("model", "benchmark", "policy", given[0])
        cells = [tuple(record.get(column) for column in names) for _, record in records]
        if len(set(cells)) < len(cells):
            # Something else varies, too.
            axes = (given[0], further[0]) if len(further) == 1 else ()
            missing += [] if axes else lacking
    if missing:
        raise KvatlasError(
            f"{name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(header)}."
            + did_you_mean(missing, further)
        )
    return axes, metric


def _units(
    name: str,
    header: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    column: str,
    axes: Sequence[str],
    told: list[str],
) -> Mapping[str, float]:
    """By how much values and ratios are divided: 100 where they are percent, 1 where they are fractions.

    Percentages of at most 1 all over are taken for fractions, unless they have percent signs or limits above 1.
    """

    def numbers(*columns: str) -> list[float]:
        values = []
        for text in (record.get(column) or "" for record in records for column in columns):
            # What is no number is told with its line.
            with suppress(KvatlasError):
                values.append(math.inf if "%" in text else number(name, column, text))
        return values

    values = numbers(column, *(limit for limit in ("low", "high") if limit in header))
    fractions = bool(values) and 0 < max(values) <= 1
    if fractions:
        told.append(f"all values of {column} are at most 1 and read as fractions (percent: write 0.5%)")
    ratios = numbers("ratio") if "ratio" in axes else []
    percent = bool(ratios) and min(ratios) >= 1 and 1 < max(ratios) <= 100
    if percent:
        told.append("all values of ratio are 1 or more and read as percent")
    return {column: 1.0 if fractions else 100.0, "ratio": 100.0 if percent else 1.0}


def _row(
    where: str,
    line: int,
    record: Mapping[str, Any],
    axes: Sequence[str],
    metric: str,
    silent: Mapping[str, Any],
    units: Mapping[str, float],
) -> _Row:
    column = value_column(metric)
    field = {key: unguarded((value or "").strip()) for key, value in record.items() if isinstance(key, str)}
    if None in record:
        raise KvatlasError(f"{where} has more fields than the header; a value with a separator in it needs quotes.")
    model, benchmark = field.get("model", silent.get("model", "")), field["benchmark"]
    if not model or not benchmark:
        raise KvatlasError(f"{where} has no {'benchmark' if model else 'model'}; every row names both.")
    policy = field.get("policy") or silent.get("policy", "")
    hundred = units[column]
    value = number(where, column, field[column])
    if not 0 <= value <= hundred:
        raise KvatlasError(f"{where}: {column} is {field[column]}; it must be a percentage from 0 to 100.")
    extras = {name: number(where, name, field[name], name in _WHOLE) for name in EXTRAS if field.get(name)}
    known = silent.get("problems", KNOWN_PROBLEMS.get(benchmark.upper().replace("-", "_")))
    problems = extras.get("problems", known)
    for name in ("problems", "samples"):
        if not 1 <= extras.get(name, 1) < MOST or extras.get(name, 1) % 1:
            raise KvatlasError(f"{where}: {name} is {field[name]}; it must be a whole number from 1, below {MOST:,}.")
    estimate = Estimate(
        value / hundred,
        extras["low"] / hundred if "low" in extras else None,
        extras["high"] / hundred if "high" in extras else None,
        None if problems is None else int(problems),
        _whole(extras.get("samples", silent.get("samples"))),
    )
    given = [axis for axis in axes if field[axis]]
    if 0 < len(given) < len(axes):
        raise KvatlasError(f"{where} has a value of {given[0]} alone; a cell needs both axes, a baseline neither.")
    values = {axis: _axis(where, axis, field[axis], units) for axis in given}
    setting = Setting.of(policy, **_budget(where, axes, field, silent), **values) if values else Setting(policy)
    coord = tuple(values.values())
    if len(coord) == 1:
        # As `flat_maps` has runs of one axis: policies by its values.
        coord, policy = (policy or metric, *coord), ""
    cell = Cell(
        setting,
        estimate,
        mean_kv_tokens=extras.get("kept_tokens_mean"),
        peak_kv_tokens=_whole(extras.get("peak_kv_tokens")),
        output_tokens_mean=extras.get("output_tokens_mean"),
        truncated=_whole(extras.get("truncated")),
        seconds_mean=extras.get("seconds_mean"),
    )
    return _Row(line, model, benchmark, policy, (coord[0], coord[1]) if coord else None, cell)


def _budget(where: str, axes: Sequence[str], field: Mapping[str, str], silent: Mapping[str, Any]) -> dict[str, Any]:
    if "kv_budget" in axes:
        return {}
    if field.get("kv_budget"):
        return {"kv_budget": int(number(where, "kv_budget", field["kv_budget"], whole=True))}
    return {"kv_budget": silent["kv_budget"]} if "kv_budget" in silent else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _axis(where: str, axis: str, text: str, units: Mapping[str, float]) -> Any:
    if axis not in AXES:
        try:
            value = float(text)
        except ValueError:
            return text
    else:
        value = number(where, axis, text, axis in _WHOLE)
    if axis == "ratio":
        value /= 100 if "%" in text else units[axis]
    if axis == "ratio" and not 0 <= value <= 1:
        raise KvatlasError(f"{where}: ratio is {text}; it must be a share from 0 to 1.")
    if axis == "local_window" and (not 0 <= value < MOST or value % 1):
        raise KvatlasError(f"{where}: local_window is {text}; it must be a whole number of tokens, below {MOST:,}.")
    return int(value) if value.is_integer() and axis != "ratio" else value


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
        fellows = [other for (m, _, p), other in groups.items() if (m, p) == (model, policy)]
        grid = tuple(
            (axis, ascending([coord[i] for other in fellows for coord in other])) for i, axis in enumerate(axes)
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
