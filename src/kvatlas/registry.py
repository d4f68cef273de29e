"""The registry of policies, benchmarks and features by name; third parties add theirs by entry points."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar, cast

from kvatlas.core import KvatlasError, described
from kvatlas.text import did_you_mean

T = TypeVar("T")


class PluginWarning(UserWarning):
    """The entry point of a third party cannot be used and is left out."""


class MissingFeatureError(KvatlasError):
    """The folder of a feature is not part of this installation."""


class Registry(Generic[T]):
    """Objects by name, imported at first use from addresses `"package.module:attribute"`.

    `noun` names an entry in error sentences, `group` is the entry-point group of third parties (empty: none), and
    `fault(name, object)` returns what is wrong with their object as a clause, or "".
    """

    def __init__(
        self, noun: str, group: str, ours: Mapping[str, str], fault: Callable[[str, object], str] = lambda *_: ""
    ) -> None:
        self.noun = noun
        self.group = group
        self.ours = dict(ours)
        self.added: dict[str, T] = {}
        self._fault = fault

    def add(self, name: str, item: T) -> None:
        """Register an object in this process; KvatlasError if it is faulty or the name is taken."""
        fault = self._fault(name, item)
        if not fault and name in self._addresses:
            fault = f"the name is taken by {self._addresses[name]}"
        if fault:
            raise KvatlasError(f"The {self.noun} {name!r} cannot be registered ({fault}).")
        self.added[name] = item

    @cached_property
    def _addresses(self) -> dict[str, str]:
        addresses = dict(self.ours)
        for entry in entry_points(group=self.group) if self.group else ():
            if entry.name in addresses:
                raise KvatlasError(
                    f"The {self.noun} {entry.name!r} is registered twice: {addresses[entry.name]} and {entry.value}."
                )
            addresses[entry.name] = entry.value
        return addresses

    def names(self) -> list[str]:
        """Return all names in the order of registration, our own first, without importing the objects."""
        return [*self._addresses, *self.added]

    def available(self) -> Iterator[tuple[str, T]]:
        """Yield names and objects of this installation; plug-ins that cannot be used are left out with a warning."""
        for name in self.names():
            try:
                item = self.get(name)
            except MissingFeatureError:
                continue
            except KvatlasError as error:
                warnings.warn(f"{error} It is left out.", PluginWarning, stacklevel=2)
            else:
                yield name, item

    def listed(self) -> str:
        """Return the names that `get` accepts, for an error sentence."""
        return ", ".join(name for name, _ in self.available())

    def get(self, name: str) -> T:
        """Return the object of a name.

        Raises KvatlasError for an unknown name or a plug-in that cannot be used, and MissingFeatureError for one of
        ours whose folder is not there.
        """
        if name in self.added:
            return self.added[name]
        address = self._addresses.get(name)
        if address is None:
            guess = did_you_mean(name, self.names())
            raise KvatlasError(f"Unknown {self.noun} {name!r}; expected: {self.listed() or 'FILE.py:NAME'}.{guess}")
        if name in self.ours:
            try:
                return cast(T, resolve_name(address))
            except ModuleNotFoundError as error:
                # Policies and benchmarks are files of a room, which is there; a feature is a room of its own.
                package, _, feature = (error.name or "").partition(".")
                if package != "kvatlas" or not address.startswith(f"kvatlas.{feature}."):
                    raise
                raise MissingFeatureError(f"The feature {feature} is not part of this installation.") from None
        try:
            loaded = resolve_name(address)
            fault = self._fault(name, loaded)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # A module may call sys.exit, and panics of libraries written in Rust derive from BaseException only.
            fault = described(error)
        if fault:
            raise KvatlasError(f"The {self.noun} {name!r} of the plug-in {address} cannot be used ({fault}).")
        return cast(T, loaded)

    def find(self, name: str) -> T | None:
        """Return the object of a name; None for one of ours whose folder is not there."""
        try:
            return self.get(name)
        except MissingFeatureError:
            return None


#: What features, each in a folder of its own, add to the rest of the package, which works without them.
features: Registry[Any] = Registry(
    "part of a feature",
    "",
    {
        "autopsy.commands": "kvatlas.autopsy.autopsy_command:app",
        "autopsy.deaths": "kvatlas.autopsy.lost_answers:deaths_of",
        "autopsy.deaths_table": "kvatlas.autopsy.lost_answers:deaths_table",
        "autopsy.page": "kvatlas.autopsy.summary:AutopsiesOnPage",
        "predictor.commands": "kvatlas.predictor.predictor_commands:app",
    },
)
