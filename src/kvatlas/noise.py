"""Counter-based random numbers, which depend on their key and counter and not on earlier draws.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer tensor arithmetic, so
that the numbers are the same on every device, for any batch and any order.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvatlas.core import canonical
from kvatlas.cpu import native

if TYPE_CHECKING:
    from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def stream_key(*parts: str | int) -> int:
    """Return the 63-bit key of the random stream that `parts` identify."""
    return int.from_bytes(hashlib.blake2b(canonical(list(parts)).encode(), digest_size=8).digest(), "big") >> 1


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words for each 64-bit key and 128-bit counter (all int64, broadcast together)."""
    k0 = key & _LOW
    k1 = (key >> 32) & _LOW
    for _ in range(10):
        low0, high0 = _multiply(c0, _MULTIPLIERS[0])
        low1, high1 = _multiply(c2, _MULTIPLIERS[1])
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    # Products of two 32-bit words may overflow int64; their 64 bits are correct nevertheless.
    product = word * constant
    return product & _LOW, (product >> 32) & _LOW


def uniform(stream: Tensor, length: int | Tensor, position: Tensor, choice: int | Tensor) -> Tensor:
    """Return numbers in (0, 1), float64, for tokens at `position` after `length` new tokens; `choice` is >= 1."""
    import torch

    zero = torch.zeros_like(position)
    word, *_ = philox(stream, zero + length, position, zero + choice, zero)
    return (word.double() + 0.5) / 2.0**32


def uniform_by_choice(stream: int, length: int, position: Tensor) -> Tensor:
    """Return `uniform` for tokens at `position` [..., tokens]: the choices 1, 2, 3 ... are its rows in order."""
    import torch

    rows = position.flatten(0, -2)
    choices = torch.arange(1, len(rows) + 1, device=position.device)
    streams = torch.full_like(choices, stream)
    kernels = native.load()
    if kernels and position.is_cpu:
        numbers = kernels.uniform(streams, torch.full_like(choices, length), rows.contiguous(), choices)
    else:
        numbers = uniform(streams[:, None], length, rows, choices[:, None])
    return numbers.view(position.shape)


def gumbel(stream: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64, keyed by (stream, position, token id); the arguments broadcast together.

    The key is the id of a token and not its rank, so that two settings with equal logits choose the same token even if
    top-k or top-p cut differently.
    """
    kernels = native.load()
    rows = token.shape[0] if token.dim() == 2 else -1
    # On a CPU the arithmetic on tensors of int64 costs more than the layers of a small model.
    if kernels and token.is_cpu and stream.shape == position.shape == (rows, 1) and token.stride(1) == 1:
        return kernels.uniform(stream.flatten(), position.flatten(), token).log_().neg_().log_().neg_()
    return gumbel_in_torch(stream, position, token)


def gumbel_in_torch(stream: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Return what `gumbel` returns, by operations of torch alone, which can be compiled."""
    import torch

    # The choice 0, which `uniform` never gets from policies.
    return -torch.log(-torch.log(uniform(stream, position, token, 0)))
