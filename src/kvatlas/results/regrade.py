"""Further numbers of the stored traces of a run: verdicts of another grader or version, and measures.

The first grade of a trace stays; the new verdict is a further metric, `graded:NAME`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas import benchmarks, measures
from kvatlas.answers.grading import OWN
from kvatlas.answers.reading import Reading, Tags, read_trace
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.base import grade_reading
from kvatlas.benchmarks.public import Questions
from kvatlas.class_files import permit
from kvatlas.core import Grade, KvatlasError, Measure, Problem, Setting, Status
from kvatlas.measures import TraceMeasurer
from kvatlas.results.manifest import Manifest
from kvatlas.results.records import Key
from kvatlas.results.store import Store


def regrade(folder: Path, grader: str = OWN, allow_code: bool = False) -> list[dict[str, Any]]:
    """Grade all traces of a run again, store the verdicts as the metric `graded:NAME`, and return a row for each cell.

    A row has the shares of right traces before and after in percent, and how many changed to right and to wrong. With
    `allow_code` the files of its benchmarks may be run. Raises KvatlasError if problems of the run are missing, or if
    its benchmarks have only one grader.
    """
    with Store.open(folder) as store:
        manifest = store.manifest()
        tags = _think_tags(manifest)
        by_name = _benchmarks(manifest, grader, allow_code)
        problems: dict[tuple[str, str], Problem] = {}
        for benchmark in by_name.values():
            of_benchmark = benchmarks.problems_of(benchmark, manifest.spec.get("problems"))
            changed = manifest.changed_problems(benchmark.name, of_benchmark)
            if changed:
                raise KvatlasError(f"The run has {changed} that its file lacks or changes; put back the file.")
            problems |= {(benchmark.name, problem.id): problem for problem in of_benchmark}

        verdicts: dict[tuple[str, str, Setting], list[tuple[bool, bool]]] = {}
        grades: dict[tuple[str, str, Reading], Grade] = {}
        metrics: dict[Key, dict[str, Any]] = {}
        for run_key, trace in store.traces():
            problem = problems.get((trace.benchmark, trace.problem))
            if problem is None:
                raise KvatlasError(
                    f"The problem {trace.problem!r} is not in {trace.benchmark} any more; put back the file that the "
                    "run was made with."
                )
            if trace.grade.status is Status.UNKNOWN:
                raise KvatlasError(
                    f"A later kvatlas wrote sample {trace.sample} of {trace.problem} with a status that this version "
                    "does not know; grade the run with that version."
                )
            if trace.grade.correct and not trace.text:
                raise KvatlasError(f"Sample {trace.sample} of {trace.problem} was imported with a grade and no text.")

            read = read_trace(trace, tags.get(trace.model))
            # Many traces of a problem have the same answer, which is graded once.
            graded = (trace.benchmark, trace.problem, read)
            if graded not in grades:
                grades[graded] = grade_reading(by_name[trace.benchmark], problem, read)

            before_and_after = _is_right(trace.grade), _is_right(grades[graded])
            key = run_key, trace.setting.id, trace.benchmark, trace.problem, trace.sample
            metrics[key] = {**trace.grade.metrics, f"graded:{grader}": float(before_and_after[1])}
            verdicts.setdefault((trace.model, trace.benchmark, trace.setting), []).append(before_and_after)
    if not metrics:
        raise KvatlasError(f"The run {str(folder)!r} has no traces to grade yet.")

    with Store.create(folder) as store:
        store.put_metrics(metrics)
    rows = []
    for (model, benchmark_name, setting), pairs in verdicts.items():
        right_before, right_after = map(sum, zip(*pairs, strict=True))
        rows.append(
            {
                "model": model,
                "benchmark": benchmark_name,
                "setting": str(setting),
                "traces": len(pairs),
                "pass@1": round(100 * right_before / len(pairs), 1),
                f"graded:{grader}": round(100 * right_after / len(pairs), 1),
                "to_right": pairs.count((False, True)),
                "to_wrong": pairs.count((True, False)),
            }
        )
    return rows


def measure(folder: Path, names: Sequence[str]) -> int:
    """Compute measures for all traces of a run and return their number; `names` are theirs, or FILE.py:NAME.

    Raises KvatlasError for a measure that cannot be used, and for a run without traces.
    """
    permit(*names)
    found = [measures.find(name) for name in names]
    with Store.create(folder) as store:
        manifest = store.manifest()
        count = fill_measures(store, manifest, found)
        if not count:
            raise KvatlasError(f"The run {str(folder)!r} has no traces to measure yet.")
        store.put_manifest(manifest.with_measures(found))
    return count


def start_measuring(store: Store, manifest: Manifest, found: Sequence[Measure]) -> None:
    """Compute measures for each trace that is added to a store from now on, and for those that lack them."""
    if found:
        store.measured = TraceMeasurer(found, _think_tags(manifest)).measured
        declared = store.manifest(empty=manifest).measures
        fill_measures(store, manifest, [one for one in found if one not in declared])


def fill_measures(store: Store, manifest: Manifest, found: Sequence[Measure]) -> int:
    """Compute measures for the traces of a store in one transaction, and return the number of traces."""
    if not found:
        return 0
    measurer = TraceMeasurer(found, _think_tags(manifest))
    again = {one.name for one in store.manifest(empty=manifest).measures} & {one.name for one in found}
    metrics: dict[Key, Mapping[str, Any]] = {}
    for run_key, trace in store.traces():
        others = {name: value for name, value in trace.grade.metrics.items() if name not in again}
        measured = measurer.measured(replace(trace, grade=replace(trace.grade, metrics=others)))
        key = run_key, trace.setting.id, trace.benchmark, trace.problem, trace.sample
        metrics[key] = measured.grade.metrics
    store.put_metrics(metrics)
    return len(metrics)


def _is_right(grade: Grade) -> bool:
    """Return True for a correct answer; a truncated trace has none."""
    return grade.correct and grade.status is Status.OK


def _benchmarks(manifest: Manifest, grader: str, allow_code: bool) -> Mapping[str, Benchmark]:
    """Return the benchmarks of the run with the grader."""
    names = dict.fromkeys(cell.benchmark for cell in manifest.expected)
    entries = manifest.spec.get("benchmarks") or [{"name": name} for name in names]
    if allow_code:
        permit(*(entry["name"] for entry in entries))
    graded: dict[str, Benchmark] = {}
    for benchmark in (benchmarks.find(**entry) for entry in entries):
        if isinstance(benchmark, Questions):
            benchmark = replace(benchmark, grader=grader)
        elif grader != OWN:
            raise KvatlasError(f"{benchmark.name} has one grader, its own, and no {grader!r}; leave --grader out.")
        graded[benchmark.name] = benchmark
    return graded


def _think_tags(manifest: Manifest) -> dict[str, Tags]:
    """Return the think tags of the models of a run; those of servers and of imported logs are not known."""
    return {name: Tags(**tags) for name, tags in manifest.provenance.get("tags", {}).items()}
