"""Measures: functions of a stored trace, declared once, that runs store beside costs and grades.

A package names its measures in entry points of the group `kvatlas.measures`; FILE.py:NAME is a measure in a file. A
sweep fills those of its spec, `kvatlas grade RUN --measure NAME` those of a finished run.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from kvatlas.answers.reading import Tags, read_trace
from kvatlas.class_files import absolute_name, class_file, load_named
from kvatlas.columns import taken_names
from kvatlas.core import KvatlasError, Measure, Trace, is_storable_number, refusal
from kvatlas.registry import Registry


def _fault(name: str, value: object) -> str:
    """Return why an object cannot be the measure of a name; empty if it can."""
    if not isinstance(value, Measure):
        return f"it is {value!r}; expected a kvatlas.Measure"
    if value.name != name:
        return f"its name is {value.name!r}; expected {name!r}"
    if not name.isidentifier() or name in taken_names():
        return "expected a name in letters, digits and _ that no column and no number of a trace has"
    words = (value.title, value.unit)
    if not all(isinstance(one, str) for one in words) or {type(value.is_share), type(value.counts)} != {bool}:
        return "expected texts as title and unit, and true or false as is_share and counts"
    if not callable(value.of):
        return f"its function is {value.of!r}; expected one of a trace and its reading"
    try:
        inspect.signature(value.of).bind(None, None)
    except TypeError as error:
        return f"its function does not take (trace, reading): {error}"
    return ""


measures: Registry[Measure] = Registry("measure", "kvatlas.measures", {}, _fault)


def find(name: str) -> Measure:
    """Return the measure of a name, or of FILE.py:NAME; raises KvatlasError for one that cannot be used."""
    return measures.get(name) if class_file(name) is None else _measure_in_file(absolute_name(name))


@cache
def _measure_in_file(name: str) -> Measure:
    """Return a measure of a permitted file, which is run once; FILE.py alone names the only one of the file."""
    measure, _ = load_named(name, "measure", lambda value: isinstance(value, Measure))
    if callable(measure):
        word = name.rpartition(":")[2]
        raise KvatlasError(
            f"The measure {name} cannot be used ({word} is a function); write the measure below it, as share = "
            f"Measure('share', {word}), and name {class_file(name)}:share."
        )
    fault = _fault(getattr(measure, "name", ""), measure)
    if fault:
        raise KvatlasError(f"The measure {name} cannot be used ({fault}).")
    return cast(Measure, measure)


@dataclass(frozen=True)
class TraceMeasurer:
    """The measures of a run, and the think tags of its models by name, by which its traces are read."""

    measures: Sequence[Measure]
    tags: Mapping[str, Tags]

    def measured(self, trace: Trace) -> Trace:
        """Return a trace with its measures among its metrics, without those that are unknown of it.

        Raises KvatlasError for a measure that fails, that gives another value than it declares, or that has the name of
        a metric of the benchmark.
        """
        reading = read_trace(trace, self.tags.get(trace.model))
        numbers = dict(trace.grade.metrics)
        for measure in self.measures:
            about = f"sample {trace.sample} of {trace.problem} under {trace.setting}"
            with refusal(f"The measure {measure.name!r} cannot be used for {about}"):
                if measure.name in numbers:
                    raise ValueError(f"{trace.benchmark} has a metric of this name; give the measure another one")
                value = measure.of(trace, reading) if measure.of else None
                if value is not None:
                    numbers[measure.name] = _checked(measure, float(value))
        return replace(trace, grade=replace(trace.grade, metrics=numbers))


def _checked(measure: Measure, value: float) -> float:
    """Return a value that a measure declares; ValueError for another one."""
    if measure.is_share or measure.counts:
        if 0 <= value <= 1:
            return value
        raise ValueError(f"it is {value!r}, expected a number from 0 to 1 or None")
    if not is_storable_number(value):
        raise ValueError(f"it is {value!r}, expected a finite number or None")
    return value
