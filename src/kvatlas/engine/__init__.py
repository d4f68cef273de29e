"""Decoding: cache, attention, sampling, and one loop."""

from kvatlas.engine.loop import Engine, Generation, Request
from kvatlas.engine.replay import Replay

__all__ = ["Engine", "Generation", "Replay", "Request"]
