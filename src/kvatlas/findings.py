"""What checks before a sweep say: one finding for each thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """What a finding means: nothing to do, to be known, or not to be used."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was found, and what to do about it (empty where nothing is to be done)."""

    name: str
    status: Status
    message: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.advice}" if self.advice else self.message
