"""Decoding: cache, attention, sampling, and one loop."""

from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Checkpoint, Generation, Likeness, Request

__all__ = ["Checkpoint", "Engine", "Generation", "Likeness", "Request"]
