"""Result cards: all that a run rests on and came to in one JSON file, by which it is made again and compared."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvatlas import benchmarks
from kvatlas.core import KvatlasError, Setting, digest, reason
from kvatlas.report.description_json import percent
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.sweeps import Plan, make_plan, parse_spec

KIND, VERSION = "kvatlas card", 1
#: What two cards of one result have in common; the rest may differ and is told.
_RESTS_ON = ("models", "benchmarks", "sampling", "seed", "samples", "spec")


@dataclass(frozen=True)
class CellCheck:
    """One cell of two cards: Pass@1 in percent of both, and the problems whose traces are not the same."""

    name: str
    first: float
    second: float
    problems: tuple[str, ...]


@dataclass(frozen=True)
class CardCheck:
    """What two cards agree in.

    `rests_on` names what the results rest on and is not the same, `told` what else differs (versions, hardware);
    `only` cells that one card alone has, `cells` those of both that differ, `common` counts those of both.
    """

    rests_on: tuple[str, ...]
    told: Mapping[str, tuple[Any, Any]]
    only: tuple[str, ...]
    cells: tuple[CellCheck, ...]
    common: int
    traces: int = 0
    names: tuple[str, str] = field(default=("the first card", "the second card"))

    @property
    def same(self) -> bool:
        """Whether all traces of both are the same, token by token."""
        return not self.cells and not self.only and not self.rests_on


def card_of(folder: Path) -> dict[str, Any]:
    """The card of a finished run, as plain data; KvatlasError for one that misses traces, and for a screen."""
    run = RunData.open(folder)
    if run.manifest.screened:
        raise KvatlasError(f"{str(folder)!r} holds a screen, which has no traces; a card is made of a sweep.")
    missing = sum(cell.promised - cell.stored for cell in run.cells)
    if missing:
        raise KvatlasError(f"{missing:,} traces of {str(folder)!r} are missing; finish the sweep, then make its card.")
    # A card vouches for the tokens, too, which a map does not read.
    with run.store() as store:
        deque(store.traces(texts=False), maxlen=0)
    spec = dict(run.manifest.spec)
    plan = _plan(spec, run)
    card = {
        "kind": KIND,
        "version": VERSION,
        "command": "kvatlas reproduce CARD --out RUN" if spec else None,
        "spec": spec,
        "seed": spec.get("seed"),
        "samples": spec.get("samples"),
        "sampling": spec.get("sampling"),
        "models": _models(plan),
        "benchmarks": _benchmarks(plan),
        "versions": dict(run.manifest.provenance),
        "hardware": hardware(),
        "cells": [_cell(cell) for cell in run.cells],
    }
    return {**card, "digest": digest(card)}


def read_card(path: Path) -> dict[str, Any]:
    """A card from its file; KvatlasError for what is none, and for one of which a byte was changed."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        if card["kind"] != KIND or not isinstance(card["cells"], list):
            raise ValueError("it does not say that it is one")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise KvatlasError(f"{str(path)!r} is no result card ({reason(error)}).") from error
    if card["version"] != VERSION:
        raise KvatlasError(f"The card {str(path)!r} has version {card['version']!r}; this kvatlas reads {VERSION}.")
    content = {name: value for name, value in card.items() if name != "digest"}
    if digest(content) != card.get("digest"):
        raise KvatlasError(f"The card {str(path)!r} is not what was written: its content does not fit its digest.")
    return content


def plan_of(card: Mapping[str, Any]) -> Plan:
    """The plan by which a card's run is made again.

    Raises KvatlasError where the card has no sweep, and where something that it rests on is another one here.
    """
    if not card["spec"]:
        raise KvatlasError("The card has no spec: its run was no sweep (imported or served), and cannot be run again.")
    plan = make_plan(parse_spec(card["spec"], "the card's spec"))
    here = {"models": _models(plan), "benchmarks": _benchmarks(plan)}
    for kind, value in here.items():
        for name, values in (card[kind] or {}).items():
            other = [word for word in values if (value or {}).get(name, {}).get(word) != values[word]]
            if other:
                raise KvatlasError(
                    f"The card's result cannot be reproduced here: of {name} the {', '.join(other)} differ."
                )
    return plan


def compare_cards(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str] = ("A", "B")
) -> CardCheck:
    """What two cards agree in: what they rest on, every trace of every cell."""
    cells = [{_name(cell): cell for cell in card["cells"]} for card in (first, second)]
    common = [name for name in cells[0] if name in cells[1]]
    differing = []
    for name in common:
        mine, other = (cell[name]["traces"] for cell in cells)
        problems = tuple(sorted(problem for problem in {**mine, **other} if mine.get(problem) != other.get(problem)))
        if problems:
            differing.append(CellCheck(name, cells[0][name]["pass_at_1"], cells[1][name]["pass_at_1"], problems))
    told = {
        f"{part} {word}": (first[part].get(word), second[part].get(word))
        for part in ("versions", "hardware")
        for word in {**first[part], **second[part]}
        if first[part].get(word) != second[part].get(word)
    }
    return CardCheck(
        tuple(word for word in _RESTS_ON if first[word] != second[word]),
        told,
        tuple(sorted(cells[0].keys() ^ cells[1].keys())),
        tuple(differing),
        len(common),
        sum(cells[0][name]["n"] for name in common),
        names,
    )


def as_text(check: CardCheck) -> str:
    """The comparison as sentences."""
    first, second = check.names
    agreeing = check.common - len(check.cells)
    lines = [
        f"{agreeing} of {check.common} cells agree token by token, of {check.traces:,} traces in all."
        if check.cells
        else f"All {check.common} cells agree token by token ({check.traces:,} traces)."
    ]
    for cell in check.cells[:20]:
        listed = ", ".join(cell.problems[:5]) + (" ..." if len(cell.problems) > 5 else "")
        lines.append(
            f"- {cell.name}: other traces on {len(cell.problems)} problems ({listed}); Pass@1 {cell.first:g} % in "
            f"{first}, {cell.second:g} % in {second}."
        )
    if len(check.cells) > 20:
        lines.append(f"- and {len(check.cells) - 20} more cells.")
    lines += [f"- only one of them has {name}." for name in check.only[:20]]
    if check.rests_on:
        lines.append(f"They rest on other {', '.join(check.rests_on)}.")
    lines += [f"{name}: {mine} in {first}, {other} in {second}." for name, (mine, other) in check.told.items()]
    return "\n".join(lines)


def to_json(check: CardCheck) -> dict[str, Any]:
    """The comparison as data."""
    return {
        "same": check.same,
        "cells": check.common,
        "traces": check.traces,
        "rests_on": list(check.rests_on),
        "only": list(check.only),
        "differing": [
            {"cell": cell.name, "first": cell.first, "second": cell.second, "problems": list(cell.problems)}
            for cell in check.cells
        ],
        "told": {name: list(values) for name, values in check.told.items()},
    }


def hardware() -> dict[str, Any]:
    """The machine on which a card is written."""
    about = {"machine": platform.machine(), "system": platform.system(), "processors": os.cpu_count()}
    cpu = Path("/proc/cpuinfo")
    names = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.is_file() else []
    return {**about, "processor": names[0].partition(":")[2].strip() if names else platform.processor()}


def _plan(spec: Mapping[str, Any], run: RunData) -> Plan | None:
    """The plan of a run's sweep; None where its model or data are not here any more, or are others."""
    try:
        plan = make_plan(parse_spec(dict(spec)))
        keys = plan.keys
    except KvatlasError:
        return None
    expected = {(cell.model, cell.benchmark, cell.setting): cell.run_key for cell in run.manifest.expected}
    return plan if all(keys.get(name) == key for name, key in expected.items()) else None


def _models(plan: Plan | None) -> dict[str, dict[str, Any]] | None:
    if plan is None:
        return None
    return {
        model.name: {"weights": model.weights_digest, "tokenizer": model.tokenizer_digest, "dtype": model.dtype}
        for model in plan.models
    }


def _benchmarks(plan: Plan | None) -> dict[str, dict[str, Any]] | None:
    if plan is None:
        return None
    by_name = {}
    for benchmark in plan.benchmarks:
        problems = plan.problems[benchmark.name]
        prompts = {
            model.name: [
                model.prompt(benchmarks.asked_of(benchmark, model.reads).prompt(problem)) for problem in problems
            ]
            for model in plan.models
        }
        by_name[benchmark.name] = {
            "identity": benchmarks.identity(benchmark),
            "data": digest([[problem.id, problem.question, problem.answer] for problem in problems]),
            "prompts": {name: digest(texts) for name, texts in prompts.items()},
        }
    return by_name


def _cell(cell: CellTraces) -> dict[str, Any]:
    expected, shown = cell.expected, cell.cell()
    traces: dict[str, list[Any]] = {}
    for problem, grades, written in zip(cell.problems, cell.grades.tolist(), cell.traces["written"], strict=True):
        known = [
            [sample, bytes(text).hex() if any(bytes(text)) else None, grade]
            for sample, (text, grade) in enumerate(zip(written, grades, strict=True))
            if not math.isnan(grade)
        ]
        traces |= {problem: known} if known else {}
    return {
        "model": expected.model,
        "benchmark": expected.benchmark,
        "policy": expected.setting.policy,
        "parameters": expected.setting.values,
        "run_key": expected.run_key,
        "n": cell.stored,
        "problems": len(expected.problems),
        "samples": expected.samples,
        "pass_at_1": percent(shown.estimate.value),
        "low": percent(shown.estimate.low),
        "high": percent(shown.estimate.high),
        "truncated": shown.truncated,
        "traces": {problem: digest(sorted(own))[:16] for problem, own in sorted(traces.items())},
    }


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['model']} {cell['benchmark']} {Setting.of(cell['policy'], **cell['parameters'])}"
