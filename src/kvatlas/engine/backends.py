"""Which attention backend serves a device and a type."""

from __future__ import annotations

import torch

from kvatlas.core import KvatlasError
from kvatlas.engine.attention import AttentionBackend, CpuBackend, ReferenceBackend
from kvatlas.engine.flex import FlexBackend
from kvatlas.native import load


def backend_for(device: torch.device, dtype: torch.dtype, name: str | None = None) -> AttentionBackend:
    """The backend called `name` (cpu, flex, reference), or the fastest one for this device and type."""
    native = load() if device.type == "cpu" and dtype is torch.float32 else None
    if name is None:
        name = "flex" if device.type == "cuda" else "reference" if native is None else "cpu"
    if name == "cpu" and native is not None:
        return CpuBackend(native)
    if name == "flex":
        return FlexBackend(compiled=device.type == "cuda")
    if name == "reference":
        return ReferenceBackend()
    raise KvatlasError(f"The attention backend is {name!r}; valid here are 'reference' and 'flex'.")
