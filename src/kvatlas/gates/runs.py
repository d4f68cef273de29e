"""Cells of our runs, and what `kvatlas import` reads: Inspect's logs and files of answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.benchmarks.problem_files import read_rows
from kvatlas.core import SERVED, KvatlasError, Setting, Status
from kvatlas.gates.cards import (
    MOST_NEW_TOKENS,
    NONE,
    UNKNOWN,
    Card,
    card_entries,
    check_direction,
    entry_text,
    is_drawn,
    more_is_better,
)
from kvatlas.gates.outcomes import (
    AnswerName,
    AnswerTexts,
    GradedAnswer,
    Side,
    SideOptions,
    TaskLog,
    digest_of,
    file_sources,
    reference_digest,
    side_of_logs,
)
from kvatlas.integrations.answer_rows import NOUN, read_answers
from kvatlas.results.records import STATUS
from kvatlas.stats.estimates import rule
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import ModelSetting, choose, names_to_choose, systems_of
from kvatlas.stats.table import CellTraces, check_same_problems

if TYPE_CHECKING:
    from kvatlas.integrations.inspect_logs import GradedLog

#: The digest of what a trace wrote if it is not known.
_UNKNOWN_DIGEST = bytes(16)
_STATUSES = {code: status for status, code in STATUS.items()}


def side_of_run(folder: Path, cell: str, name: str, options: SideOptions) -> Side:
    """Return the side of a cell of a run, named by words as `compare` takes them; "" for the only one."""
    run = RunData.open(folder)
    metric = options.metric or "pass@1"
    if rule(metric) is not None:
        raise KvatlasError(f"{metric} is no grade of single answers; expected pass@1, progress or one of a benchmark.")

    systems = systems_of([run], metric)
    if cell:
        systems = choose(systems, [cell])
    elif len(systems) != 1:
        raise KvatlasError(
            f"{str(folder)!r} has {len(systems)} cells; name one as '{folder}@{systems[-1].setting.policy_name}'. "
            f"There are: {names_to_choose(systems)}."
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
    options.check_tasks(name, [cell.benchmark for cell in system.cells])
    check_same_problems(cells)
    cards = {cell.benchmark: _cell_card(run, system, cell.benchmark) for cell in cells}
    return Side(
        name,
        "run",
        partial(_run_answers, run, cells),
        cards,
        length_unit="tokens",
        endings_known=True,
        independent=is_drawn(cards.values()),
        may_copy=system.setting.policy == SERVED.policy,
        sources=frozenset({f"{Path(run.folder or '').resolve()} {system.model} {system.setting.id}"}),
        clusters=run.manifest.clusters,
        stored_texts=partial(_run_texts, run, cells),
    )


def _cell_card(run: RunData, system: ModelSetting, benchmark: str) -> Card:
    """Return the card of a cell; of an imported one what its log said."""
    manifest = run.manifest
    entries = {"model": system.model, "setting": str(system.setting), "metric": str(run.metric), "filter": NONE}
    imported = manifest.provenance.get("imported", {}).get(f"{system.model} {benchmark}")
    if imported is not None:
        # Of most conditions a run has digests.
        sampling = imported.get("sampling", {})
        conditions = imported.get("conditions", {})
        entries |= {name: str(value) for name, value in conditions.items() if name not in (*sampling, MOST_NEW_TOKENS)}
        return Card(entries, card_entries(sampling), complete=bool(conditions))

    versions = {entry[0]: entry[1:] for entry in manifest.provenance.get("benchmarks", ())}
    if benchmark in versions:
        entries["task version"] = digest_of(versions[benchmark])[:8]
    # The options of models and benchmarks that a spec names: templates, system messages, columns.
    spec = manifest.spec
    for name, called in (("model", system.model), ("benchmark", benchmark)):
        options = [each for each in spec.get(f"{name}s", ()) if isinstance(each, dict) and called in each.values()]
        entries[f"options of the {name}"] = digest_of(options)[:8] if options else NONE
    entries |= {"task arguments": NONE, "few-shot examples": NONE, "system message": NONE, "solver": NONE}
    entries |= {"grading rules": NONE, "kvatlas": entry_text(manifest.provenance.get("kvatlas"))}

    sampling = spec.get("sampling")
    if sampling is not None:
        named = {MOST_NEW_TOKENS if name == "max_new_tokens" else name: value for name, value in sampling.items()}
        sampling = {name: value for name, value in card_entries(named).items() if value != NONE}
    return Card(entries, sampling)


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
                    is_known = tokens != _UNKNOWN_DIGEST
                    yield GradedAnswer(
                        cell.benchmark,
                        problem,
                        sample,
                        grades[sample],
                        cell.contents.get(problem, ""),
                        status=_STATUSES.get(int(traces["status"][sample]), Status.OK),
                        length=float(traces["output_tokens"][sample]),
                        # A store of an earlier version has no digests of texts.
                        text="" if is_known else store.text(cell.key(problem, sample)),
                        fingerprint=hash(tokens) if is_known else 0,
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


def side_of_inspect_logs(paths: Sequence[Path], name: str, options: SideOptions) -> Side:
    """Return the side of Inspect's logs; several logs of a task under equal conditions are its epochs.

    Raises KvatlasError for what `kvatlas import` refuses, and for logs of several models.
    """
    from kvatlas.integrations.inspect_logs import read_graded_log

    logs = [read_graded_log(path, options.metric) for path in paths]
    options.check_tasks(name, [log.cell.benchmark for log in logs])
    models = {log.cell.model for log in logs}
    if len(models) > 1:
        raise KvatlasError(f"{name!r} holds logs of several models ({', '.join(sorted(models))}); name those of one.")

    task_logs = []
    for log in logs:
        task = log.cell.benchmark
        if options.has_task(task):
            card = _log_card(log, options)
            read = partial(_logged_answers, log)
            others = ", ".join(log.task.other_scorers)
            notes = [f"compared by the scorer {log.task.scorer}; the log also has {others}"] if others else []
            task_logs.append(
                TaskLog(log.path, task, str(log.about.created), log.about.eval_id, card, log.cell.samples, read, notes)
            )
    return side_of_logs(task_logs, name, "Inspect log", "tokens", endings_known=True)


def _log_card(log: GradedLog, options: SideOptions) -> Card:
    """Return the card of a log, which names all that was set."""
    entries = {**card_entries(log.conditions), "model": log.cell.model, "filter": NONE}
    if not log.task.is_verdict:
        if more_is_better(log.task.scorer) is None and not log.task.metric:
            # Scores of 0 and 1 by a name that tells nothing.
            entries["whether more is better"] = UNKNOWN
        else:
            check_direction(log.task.scorer, log.cell.benchmark, options.allow)
    return Card(entries, card_entries(log.generation), complete=True)


def _logged_answers(log: GradedLog, begin: int) -> Iterator[GradedAnswer]:
    """Yield the promised answers of a log; missing ones have no score."""
    cell = log.cell
    traces = {(trace.problem, trace.sample): trace for trace in log.traces}
    for problem, epoch in itertools.product(cell.problems, range(cell.samples)):
        name = (cell.benchmark, problem, begin + epoch)
        question = log.task.contents.get(problem, "")
        prompt = log.prompts.get((problem, epoch), "")
        asked = log.questions.get(problem, "")
        promised = GradedAnswer(*name, math.nan, question, prompt=prompt, asked=asked)
        trace = traces.get((problem, epoch))
        if trace is None:
            yield promised
            continue

        score = trace.grade.progress if log.task.metric else float(trace.grade.correct)
        tokens = trace.usage.output_tokens
        length = math.nan if tokens is None else float(tokens)
        yield promised._replace(score=score, status=trace.grade.status, length=length, text=trace.text)


# -- files of answers --------------------------------------------------------------------------------------------------


_GRADES = ("correct", "score")


def side_of_answer_file(path: Path, name: str, options: SideOptions) -> Side:
    """Return the side of a file of answers. Raises KvatlasError if it lacks a column that is needed."""
    where = f"The {NOUN} {str(path)!r}"
    first = next(read_rows(path, NOUN), None)
    if first is None:
        raise KvatlasError(f"{where} is empty.")

    # The column with the grades.
    columns = ", ".join(map(str, first))
    if "problem" not in first:
        raise KvatlasError(
            f"{where} has no column 'problem'; its columns are: {columns}; rename the one of the problems."
        )
    grades = [options.metric] if options.metric else [name for name in _GRADES if name in first]
    if options.metric and options.metric not in first:
        raise KvatlasError(f"{where} has no column {options.metric!r}; its columns are: {columns}.")
    if len(grades) != 1:
        expected = "expected one of 'correct' and 'score'"
        raise KvatlasError(f"{where} has {' and '.join(grades) or 'neither'}; {expected}, its columns are: {columns}.")
    if grades[0] not in _GRADES:
        check_direction(grades[0], path.name, options.allow)

    unit = ""
    if {"tokens", "output_tokens"} & first.keys():
        unit = "tokens"
    elif "text" in first:
        unit = "characters"
    return Side(
        name,
        "file of answers",
        partial(_file_answers, path, name, grades[0], unit, options),
        length_unit=unit,
        endings_known=bool({"truncated", "finish"} & first.keys()),
        sources=file_sources([path]),
    )


def _file_answers(path: Path, name: str, grade: str, unit: str, options: SideOptions) -> Iterator[GradedAnswer]:
    """Yield the answers of a file. Raises KvatlasError for one without a task that is compared, or without grades."""
    tasks: dict[str, None] = {}
    has_grades = False
    for row in read_answers(path, grade):
        tasks[row.benchmark] = None
        if not options.has_task(row.benchmark):
            continue
        has_grades |= not math.isnan(row.score)
        asked = row.values.get("question") or ""
        question = digest_of(asked) if asked else ""
        reference = reference_digest(row.values.get("reference"))
        length = float(len(row.text)) if unit == "characters" else row.tokens
        answer = GradedAnswer(row.benchmark, row.problem, row.sample, row.score, question, reference)
        yield answer._replace(status=row.status, length=length, asked=str(asked), text=row.text)
    options.check_tasks(name, tasks)
    if not has_grades:
        raise KvatlasError(f"{name}: {grade!r} is blank in row 1 and all others; expected a score from 0 to 1.")
