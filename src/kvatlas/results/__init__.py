"""The SQLite store of a run, its manifest of promised traces, and its export."""

from kvatlas.results.manifest import Expected, Manifest
from kvatlas.results.records import Key, TraceColumns
from kvatlas.results.store import ProblemKey, Store

__all__ = ["Expected", "Key", "Manifest", "ProblemKey", "Store", "TraceColumns"]
