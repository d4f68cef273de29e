"""Counter-based random numbers: a number depends on what it is for, never on what was drawn before it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer tensor arithmetic, so
that the same numbers come out on every device, for any batch and any order.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvatlas import native
from kvatlas.core import canonical

if TYPE_CHECKING:
    from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def stream_key(*parts: str | int) -> int:
    """A 63-bit key of a stream of random numbers, from what identifies it."""
    return int.from_bytes(hashlib.blake2b(canonical(list(parts)).encode(), digest_size=8).digest(), "big") >> 1


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits for each 64-bit key and 128-bit counter (all int64, broadcast together)."""
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        low0, high0 = _multiply(c0, _MULTIPLIERS[0])
        low1, high1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    # Products of two 32-bit words overflow the sign of int64, their 64 bits are right all the same.
    product = word * constant
    return product & _LOW, (product >> 32) & _LOW


def uniform(stream: Tensor, length: int, position: Tensor, choice: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, for tokens at `position` when `length` tokens were written; `choice` from 1 up."""
    import torch

    zero = torch.zeros_like(position)
    word, *_ = philox(stream, zero + length, position, zero + choice, zero)
    return (word.double() + 0.5) / 2.0**32


def gumbel(stream: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, keyed by (stream, position, token id); the arguments broadcast together.

    Keyed by the token's id, not by its place among the candidates, so that two settings whose logits agree choose the
    same token even where top-k or top-p cut differently.
    """
    import torch

    return -torch.log(-torch.log(_token_uniform(stream, position, token)))


def _token_uniform(stream: Tensor, position: Tensor, token: Tensor) -> Tensor:
    import torch

    kernels = native.load()
    rows = token.shape[0] if token.dim() == 2 else -1
    # On a CPU the arithmetic on tensors of int64 costs more than the layers of a small model.
    if kernels and token.is_cpu and stream.shape == position.shape == (rows, 1) and token.stride(1) == 1:
        return kernels.uniform(stream.flatten(), position.flatten(), token)
    zero = torch.zeros_like(position + token)
    word, *_ = philox(stream, zero + position, zero + token, zero, zero)
    return (word.double() + 0.5) / 2.0**32
