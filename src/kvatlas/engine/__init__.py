"""Decoding: cache, attention, sampling, and one loop."""

from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Generation, Request

__all__ = ["Engine", "Generation", "Request"]
