"""`kvatlas compare RUN RUN`: do two runs hold the same tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, changed_problems
from kvatlas.results import Store
from kvatlas.text import counted

#: Problems that a sentence names before it only counts them.
_NAMED = 5


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare the tokens of two runs, trace by trace: the document of `compare RUN RUN --json`.

    Returns `same`, the number of `common` traces, how many one run alone has (`only`), and `differing`: for each cell
    whose tokens differ its name and its problems. Models are compared by the name that the spec gives them. Raises
    KvatlasError for runs that mean different problems by the same name.
    """
    before, first_digests = _digests_of(first)
    now, second_digests = _digests_of(second)
    for benchmark in before.keys() & now.keys():
        changed = changed_problems(benchmark, before[benchmark], {**before[benchmark], **now[benchmark]})
        if changed:
            raise KvatlasError(f"The runs have other contents of {changed}; compare runs of the same problems.")

    common = first_digests.keys() & second_digests.keys()
    differing: dict[str, set[str]] = {}
    for name in common:
        if first_digests[name] != second_digests[name]:
            model, benchmark, setting, problem, _ = name
            differing.setdefault(f"{model} {benchmark} {setting}", set()).add(problem)

    only = [len(first_digests) - len(common), len(second_digests) - len(common)]
    return {
        "first": str(first),
        "second": str(second),
        "same": not differing and only == [0, 0],
        "common": len(common),
        "only": only,
        "differing": [{"cell": cell, "problems": sorted(problems)} for cell, problems in sorted(differing.items())],
    }


def _digests_of(folder: Path) -> tuple[Mapping[str, Mapping[str, str]], dict[tuple[Any, ...], str]]:
    """Return the digests of a run's problems by benchmark and name, and of the tokens of each of its traces."""
    digests = {}
    with Store.open(folder) as store:
        for _, trace in store.traces(texts=False):
            name = (trace.model, trace.benchmark, trace.setting, trace.problem, trace.sample)
            digests[name] = trace.token_digest
        return store.manifest().contents, digests


def runs_as_text(compared: Mapping[str, Any]) -> str:
    """Return the comparison of two runs as sentences."""
    lines = []
    if not compared["common"]:
        lines.append("No trace is in both: the runs share no model, benchmark and setting with the same problems.")
    elif not compared["differing"]:
        lines.append(f"All {compared['common']:,} common traces hold the same tokens.")
    for cell in compared["differing"]:
        problems = ", ".join(cell["problems"][:_NAMED])
        if len(cell["problems"]) > _NAMED:
            problems += " ..."
        lines.append(f"- {cell['cell']}: other tokens on {counted(len(cell['problems']), 'problem')} ({problems})")

    for name, count in zip((compared["first"], compared["second"]), compared["only"], strict=True):
        if count:
            lines.append(f"{count:,} traces are in {name} alone.")
    return "\n".join(lines) + "\n"
