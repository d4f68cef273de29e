"""The side of logs that hold one task each, whoever wrote them: several of a task are its samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.core import grouped
from kvatlas.gates.cards import NONE, UNKNOWN, Card, is_drawn, shared_card
from kvatlas.gates.outcomes import GradedAnswer, Side, file_sources


@dataclass(frozen=True)
class TaskLog:
    """A log of one task.

    `begun` is its time as text that sorts, `run` tells which run it is of. `read` yields its answers, `samples` of each
    problem, whose numbers begin with the given one.
    """

    path: Path
    task: str
    begun: str
    run: str
    card: Card
    samples: int
    read: Callable[[int], Iterable[GradedAnswer]]
    notes: Sequence[str] = ()


def side_of_logs(logs: Iterable[TaskLog], name: str, kind: str, length_unit: str, endings_known: bool = False) -> Side:
    """Return the side of logs. Raises KvatlasError for logs of a task that are no samples of one thing."""
    by_task = grouped(sorted(logs, key=lambda log: log.begun), lambda log: log.task)
    cards = {}
    tasks_by_note: dict[str, list[str]] = {}
    for task, of_task in by_task.items():
        cards_of_logs = {log.path.name: log.card for log in of_task}
        cards[task] = shared_card(cards_of_logs, [log.run for log in of_task], f"{name!r} ({task})")
        for note in of_task[0].notes:
            tasks_by_note.setdefault(note, []).append(task)

    # Several logs of one seed are perhaps one draw.
    has_one_seed = any(
        len(by_task[task]) > 1 and card.entry("seed") not in (NONE, UNKNOWN) for task, card in cards.items()
    )

    def read() -> Iterator[GradedAnswer]:
        for of_task in by_task.values():
            begin = 0
            for log in of_task:
                yield from log.read(begin)
                begin += log.samples

    every_log = list(itertools.chain.from_iterable(by_task.values()))
    return Side(
        name,
        kind,
        read,
        cards,
        length_unit,
        endings_known,
        independent=None if has_one_seed else is_drawn(cards.values()),
        begun=min(log.begun for log in every_log),
        sources=file_sources(log.path for log in every_log),
        notes=tuple(f"{', '.join(tasks)}: {note}" for note, tasks in tasks_by_note.items()),
    )
