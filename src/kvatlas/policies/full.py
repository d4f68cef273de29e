"""`full`: nothing is ever evicted; the reference that every setting is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from kvatlas.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """The full cache. It has no parameters and never compresses."""

    name = "full"
    summary = "keeps every token (no compression)"
