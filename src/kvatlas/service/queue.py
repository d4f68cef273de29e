"""Who is next: what waits for a row, fair between requests of unlike size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Group(Generic[T]):
    """The answers that were asked for together: those that wait, and how many have a row."""

    waiting: deque[T] = field(default_factory=deque)
    rows: int = 0


class FairQueue(Generic[T]):
    """Answers in the order of their request; next is the request with the fewest rows, of equal ones by turns.

    So one answer does not wait for 128 that were asked for at once before it, only for the next row that is free.
    """

    def __init__(self) -> None:
        self._groups: deque[Group[T]] = deque()
        self._of: dict[T, Group[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (item for group in self._groups for item in group.waiting)

    def extend(self, items: Iterable[T]) -> None:
        """Add what was asked for together."""
        group = Group(deque(items))
        self._groups.append(group)
        self._count += len(group.waiting)
        self._of |= dict.fromkeys(group.waiting, group)

    def take(self) -> T | None:
        """The next one, which has a row from now on; None where nothing waits."""
        waiting = [group for group in self._groups if group.waiting]
        if not waiting:
            return None
        group = min(waiting, key=lambda candidate: candidate.rows)
        self._groups.remove(group)
        self._groups.append(group)
        group.rows += 1
        self._count -= 1
        return group.waiting.popleft()

    def done(self, item: T) -> None:
        """One that had a row needs it no more."""
        group = self._of.pop(item)
        group.rows -= 1
        self._forget(group)

    def back(self, item: T) -> None:
        """One that had a row waits again, before those of its request that had none."""
        group = self._of[item]
        group.rows -= 1
        group.waiting.appendleft(item)
        self._count += 1

    def drop(self, item: T) -> None:
        """Take one out that waits; nothing happens for one that does not."""
        group = self._of.get(item)
        if group is not None and item in group.waiting:
            group.waiting.remove(item)
            del self._of[item]
            self._count -= 1
            self._forget(group)

    def clear(self) -> list[T]:
        """Take all out that wait."""
        left = list(self)
        for item in left:
            self.drop(item)
        return left

    def _forget(self, group: Group[T]) -> None:
        if not (group.rows or group.waiting):
            self._groups.remove(group)
