"""Cells of our runs, and Inspect's logs, which are imported into a run first: by the reader of `kvatlas import`."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvatlas.core import SERVED, KvatlasError, Outcome, Setting
from kvatlas.gates.outcomes import (
    AnswerName,
    AnswerTexts,
    GradedAnswer,
    Side,
    SideOptions,
    digest_of,
    file_digest,
    fingerprint_of,
)
from kvatlas.results.records import STATUS
from kvatlas.stats.metrics import rule
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import ModelSetting, choose, systems_of
from kvatlas.stats.table import CellTraces, check_same_problems

#: The digest of what a trace wrote if it is not known.
_UNKNOWN_DIGEST = bytes(16)
#: By the number of a status the ending of a trace without an answer.
_ENDINGS = {code: str(Outcome[status.name]) for status, code in STATUS.items() if not status.answered}


def side_of_run(folder: Path, cell: str, name: str, options: SideOptions) -> Side:
    """Return the side of a cell of a run, named by words as `compare --policy` takes them; "" for the only one."""
    run = RunData.open(folder)
    metric = options.metric or "pass@1"
    if rule(metric) is not None:
        raise KvatlasError(f"{metric} is no grade of single answers; expected pass@1, progress or one of a benchmark.")

    systems = systems_of([run], metric)
    if cell:
        systems = choose(systems, [cell])
    elif len(systems) != 1:
        found = "; ".join(f"{system.model} {system.setting}" for system in systems[:6])
        raise KvatlasError(
            f"{str(folder)!r} has {len(systems)} cells; name one as '{folder}@full' or '{folder}@dynts ratio=0.3'. "
            f"There are: {found}{', ...' if len(systems) > 6 else ''}."
        )
    return side_of_system(run, systems[0], name, options)


def side_of_setting(folder: Path, model: str, setting: Setting, name: str, options: SideOptions) -> Side:
    """Return the side of a model under a setting of a run."""
    run = RunData.open(folder)
    systems = systems_of([run], options.metric or "pass@1")
    found = [system for system in systems if (system.model, system.setting) == (model, setting)]
    return side_of_system(run, found[0], name, options)


def side_of_system(run: RunData, system: ModelSetting, name: str, options: SideOptions) -> Side:
    """Return the side of a system of a run."""
    cells = [cell for cell in system.cells if options.has_task(cell.benchmark)]
    benchmarks_there = {cell.benchmark for cell in cells}
    lacking = [task for task in options.tasks if task not in benchmarks_there]
    if lacking:
        benchmarks = ", ".join(dict.fromkeys(cell.benchmark for cell in system.cells))
        raise KvatlasError(f"{name!r} has no task {', '.join(lacking)!r}; there are: {benchmarks}.")

    check_same_problems(cells)
    sampling: Mapping[str, Any] = run.manifest.spec.get("sampling", {})
    temperature = sampling.get("temperature")
    return Side(
        name,
        "run",
        partial(_run_answers, run, cells),
        partial(_run_texts, run, cells),
        {cell.benchmark: _cell_conditions(run, system, cell.benchmark) for cell in cells},
        length_unit="tokens",
        endings_known=True,
        independent=None if temperature is None else temperature > 0,
        may_copy=system.setting.policy == SERVED.policy,
        identity=f"{run.folder} {system.model} {system.setting.id}",
        clusters=run.manifest.clusters,
    )


def _cell_conditions(run: RunData, system: ModelSetting, benchmark: str) -> dict[str, str]:
    manifest = run.manifest
    values: dict[str, Any] = {"model": system.model, "setting": system.setting, "metric": run.metric}
    versions = {entry[0]: entry[1:] for entry in manifest.provenance.get("benchmarks", ())}
    if benchmark in versions:
        values["task version"] = digest_of(versions[benchmark])[:8]
    names = {"temperature": "temperature", "max_new_tokens": "most new tokens", "top_p": "top-p", "top_k": "top-k"}
    sampling = manifest.spec.get("sampling", {})
    for name, word in names.items():
        values[word] = f"{sampling[name]:g}" if sampling.get(name) is not None else None
    values["kvatlas"] = manifest.provenance.get("kvatlas")
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def _run_answers(run: RunData, cells: Sequence[CellTraces]) -> Iterator[GradedAnswer]:
    """Yield the promised answers of cells; those that are missing have no score."""
    with run.store() as store:
        for cell in cells:
            values = cell.values()
            for row, problem in enumerate(cell.problems):
                grades = values[row].tolist()
                traces = cell.traces[row]
                for sample in range(cell.expected.samples):
                    tokens = cell.token_digest[row, sample].tobytes()
                    fingerprint = hash(tokens)
                    if tokens == _UNKNOWN_DIGEST:
                        # A store of an earlier version has no digests of texts.
                        fingerprint = fingerprint_of(store.text(cell.key(problem, sample)))
                    yield GradedAnswer(
                        cell.benchmark,
                        problem,
                        sample,
                        grades[sample],
                        cell.contents.get(problem, ""),
                        "",
                        fingerprint,
                        _ENDINGS.get(int(traces["status"][sample]), ""),
                        float(traces["output_tokens"][sample]),
                    )


def _run_texts(
    run: RunData, cells: Sequence[CellTraces], names: Collection[AnswerName]
) -> dict[AnswerName, AnswerTexts]:
    by_benchmark = {cell.benchmark: cell for cell in cells}
    with run.store() as store:
        found = {}
        for task, problem, sample in names:
            text = store.text(by_benchmark[task].key(problem, sample))
            if text:
                found[task, problem, sample] = ("", text)
        return found


# -- Inspect -----------------------------------------------------------------------------------------------------------


def side_of_inspect_logs(logs: Sequence[Path], name: str, options: SideOptions) -> Side:
    """Return the side of Inspect's logs, one for each task; they are imported into a run that ends with the process.

    Raises KvatlasError for what `kvatlas import` refuses, and for logs of several models.
    """
    from kvatlas.integrations.inspect_logs import import_log

    scratch = tempfile.TemporaryDirectory(prefix="kvatlas-gate-")
    folder = Path(scratch.name) / "run"
    for log in logs:
        import_log(log, folder, options.metric)
    run = RunData.open(folder)
    systems = systems_of([run], "pass@1")
    if len(systems) != 1:
        models = ", ".join(system.model for system in systems)
        raise KvatlasError(f"{name!r} holds logs of several models ({models}); name those of one.")
    side = side_of_system(run, systems[0], name, replace(options, metric=""))

    # The header of each log: its task, its conditions, and the time of its begin.
    from inspect_ai.log import read_eval_log

    headers = []
    for log in logs:
        header = read_eval_log(str(log), header_only=True)
        about = header.eval
        config = {**about.model_generate_config.model_dump(), **header.plan.config.model_dump(exclude_none=True)}
        values: dict[str, Any] = {
            "task version": about.task_version,
            "task arguments": about.task_args or None,
            "temperature": None if config.get("temperature") is None else f"{config['temperature']:g}",
            "most new tokens": config.get("max_tokens"),
            "system message": digest_of(config["system_message"])[:8] if config.get("system_message") else None,
            **{f"version of {name}": version for name, version in (about.packages or {}).items()},
        }
        plain = {name: str(value) for name, value in values.items() if value not in (None, "")}
        headers.append((about.task, plain, str(about.created)))

    conditions = {}
    for task, of_run in side.conditions.items():
        _, of_log, _ = next((header for header in headers if header[0].endswith(task)), headers[0])
        conditions[task] = {**of_run, **of_log}
    temperatures = [of_task.get("temperature") for of_task in conditions.values()]

    def read() -> Iterator[GradedAnswer]:
        # The folder is deleted with this object, which the function keeps.
        assert scratch.name
        yield from side.read()

    return replace(
        side,
        kind="Inspect log",
        read=read,
        conditions=conditions,
        independent=None if None in temperatures else "0" not in temperatures,
        begun=min(header[2] for header in headers),
        identity=file_digest(logs),
    )
