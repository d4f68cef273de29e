"""The one registry class: policies, benchmarks and executors are found by name, third parties' by entry points."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Generic, TypeVar, cast

from kvatlas.core import KvatlasError

T = TypeVar("T")


class PluginWarning(UserWarning):
    """A third party's entry point cannot be used and is left out."""


class Registry(Generic[T]):
    """Names to objects, imported when first asked for (`"package.module:attribute"`).

    `noun` is the word for an entry in error sentences, `group` the entry-point group that third parties add to,
    `fault(name, object)` says what is wrong with an object of theirs, or nothing.
    """

    def __init__(
        self, noun: str, group: str, ours: Mapping[str, str], fault: Callable[[str, object], str] = lambda *_: ""
    ) -> None:
        self.noun = noun
        self.group = group
        self.ours = dict(ours)
        self._fault = fault

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
        """All names, ours first, in the order in which they were registered; nothing is imported for them."""
        return list(self._addresses)

    def items(self) -> Iterator[tuple[str, T]]:
        """Names and objects; a plug-in that cannot be used is left out with a warning that names it."""
        for name in self.names():
            try:
                item = self.get(name)
            except KvatlasError as error:
                warnings.warn(f"{error} It is left out.", PluginWarning, stacklevel=2)
            else:
                yield name, item

    def listed(self) -> str:
        """All names that `get` takes, for an error sentence."""
        return ", ".join(name for name, _ in self.items())

    def get(self, name: str) -> T:
        """The object behind a name; KvatlasError lists the valid names when there is none, and says why a plug-in
        cannot be used."""
        address = self._addresses.get(name)
        if address is None:
            raise KvatlasError(f"Unknown {self.noun} {name!r}; expected: {self.listed()}.")
        if name in self.ours:
            return cast(T, _load(address))
        try:
            loaded = _load(address)
            fault = self._fault(name, loaded)
        except Exception as error:
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if fault:
            raise KvatlasError(f"The {self.noun} {name!r} of the plug-in {address} cannot be used ({fault}).")
        return cast(T, loaded)


def _load(address: str) -> object:
    module, _, attribute = address.partition(":")
    return attrgetter(attribute)(import_module(module))
