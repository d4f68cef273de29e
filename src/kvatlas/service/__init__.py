"""One engine for many who ask at once: an answer is the same whoever else asks (server, Inspect, lm-eval)."""

from kvatlas.service.asking import Ask, chosen, stream_of
from kvatlas.service.service import BusyError, ClosedError, Service, Ticket
from kvatlas.service.writing import Decoder, Writing, written

__all__ = [
    "Ask",
    "BusyError",
    "ClosedError",
    "Decoder",
    "Service",
    "Ticket",
    "Writing",
    "chosen",
    "stream_of",
    "written",
]
