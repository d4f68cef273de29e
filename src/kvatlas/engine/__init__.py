"""Decoding: cache, attention, sampling, and one loop.

Read `rows` (requests, sequences, compressions), `cache` and `batch`, `attention`, `sampling`, `scheduler`, then the
loop in `engine`. Beside it: `signals` for policies, `probe` of a model, `memory_plan`,
`timing`, and the backends `native_backend`, `reference` and `gpu`, which are found by name.
"""

from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Checkpoint, Generation, Request

__all__ = ["Checkpoint", "Engine", "Generation", "Request"]
