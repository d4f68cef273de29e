"""Decoding: cache, attention, sampling, and one loop."""

from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Generation, Likeness, Request

__all__ = ["Engine", "Generation", "Likeness", "Request"]
