"""Decoding: cache, attention, sampling, and one loop."""

from kvatlas.engine.loop import Engine, Generation, Request

__all__ = ["Engine", "Generation", "Request"]
