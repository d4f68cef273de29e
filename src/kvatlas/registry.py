"""The one registry class: policies, benchmarks and executors are found by name, third parties' by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Generic, TypeVar, cast

from kvatlas.core import KvatlasError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects, imported when first asked for (`"package.module:attribute"`).

    `noun` is the word for an entry in error sentences, `group` the entry-point group that third parties add to.
    """

    def __init__(self, noun: str, group: str, ours: Mapping[str, str]) -> None:
        self.noun = noun
        self.group = group
        self.ours = dict(ours)

    @cached_property
    def _addresses(self) -> dict[str, str]:
        addresses = dict(self.ours)
        for entry in entry_points(group=self.group):
            if entry.name in addresses:
                raise KvatlasError(
                    f"The {self.noun} {entry.name!r} is registered twice: {addresses[entry.name]} and {entry.value}."
                )
            addresses[entry.name] = entry.value
        return addresses

    def names(self) -> list[str]:
        """All names, ours first, in the order in which they were registered."""
        return list(self._addresses)

    def get(self, name: str) -> T:
        """The object behind a name; KvatlasError lists the valid names when there is none."""
        address = self._addresses.get(name)
        if address is None:
            raise KvatlasError(f"Unknown {self.noun} {name!r}; valid are: {', '.join(self.names())}.")
        module, _, attribute = address.partition(":")
        return cast(T, attrgetter(attribute)(import_module(module)))
