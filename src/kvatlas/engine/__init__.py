"""Decoding: cache, attention, sampling, and one loop."""

from kvatlas.engine.loop import Engine
from kvatlas.engine.replay import Replay
from kvatlas.engine.rows import Generation, Request

__all__ = ["Engine", "Generation", "Replay", "Request"]
