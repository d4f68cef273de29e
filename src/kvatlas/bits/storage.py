"""Keys and values in few bits: packed rows of codes, with a scale and a zero point for each group of channels.

A token's row depends on the token alone, so it is written once, and a compression copies it as it is. KIVI (arXiv
2402.02750) shares the scales of keys among neighbouring tokens; docs/findings/bytes.md says why they are not shared
here. Keys with biases are packed without them, with their position beside them.
"""

import torch
from torch import Tensor

from kvatlas.bits.key_biases import KeyBiases
from kvatlas.core import CODES, POSITION_BYTES, Storage


class PackedRows:
    """Keys and values of a cache in the form of its storage; numbers of 16 bits have the pools' type.

    `key_biases` are those that packed keys are without.
    """

    def __init__(self, storage: Storage, key_biases: KeyBiases | None) -> None:
        self.storage = storage
        #: Bits of a number in keys and in values.
        self.bits = (storage.key_bits, storage.value_bits)
        self.key_biases = key_biases if storage.key_bits < 16 else None

    def pack(self, side: int, layer: int, numbers: Tensor, positions: Tensor | None) -> Tensor:
        """Return the rows of keys (side 0) or values (side 1) [tokens, KV heads, size] of a layer.

        Keys with biases need the `positions` [tokens].
        """
        bits = self.bits[side]
        if bits == 16:
            return numbers
        if side == 1 or self.key_biases is None or positions is None:
            return pack_bits(numbers, bits, self.storage.group)
        # Turned, without their rotated biases, and with their positions behind them.
        biases = self.key_biases.rotated(layer, positions[None]).transpose(0, 1)
        rows = pack_bits(turn(numbers.float() - biases), bits, self.storage.group)
        stored = positions.int()[:, None, None].expand(*rows.shape[:-1], 1).contiguous()
        return torch.cat([rows, stored.view(torch.uint8)], -1)

    def unpack(self, side: int, layer: int, rows: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return the keys or values [KV heads, ..., size] of rows of a layer, as attention reads them."""
        bits = self.bits[side]
        if bits == 16:
            return rows.to(dtype)
        if side == 1 or self.key_biases is None:
            return unpack_bits(rows, size, bits, self.storage.group).to(dtype)
        positions = rows[..., -POSITION_BYTES:].contiguous().view(torch.int32)[..., 0]
        biases = self.key_biases.rotated(layer, positions)
        turned = unpack_bits(rows[..., :-POSITION_BYTES], size, bits, self.storage.group)
        return (turn(turned) + biases).to(dtype)


def pack_bits(numbers: Tensor, bits: int, group: int) -> Tensor:
    """Return [..., size] as rows of bytes [..., row]: codes, then the scale and the zero point (fp16) of each group.

    x has the code round((x - zero) / scale), where zero is the minimum of its group and scale the range of the group /
    (2^bits - 1), both rounded to fp16 before. The last channel fills up the last group. The lowest bits of a byte are
    the first code. Of 16 codes of 4 bits those with even numbers come first; of 3 bits the two low ones of all codes
    come before the high ones. Codes fill whole words of 32 bits.
    """
    head = numbers.shape[:-1]
    size = numbers.shape[-1]
    largest_code = 2**bits - 1
    filler = numbers[..., -1:].expand(*head, -size % group)
    groups = torch.cat([numbers, filler], -1).float().view(*head, -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales = torch.cat([(high - low) / largest_code, low], -1).half()
    scale = scales[..., :1].float()
    zero = scales[..., 1:].float()

    # All numbers of a group without a range have the code 0.
    codes = ((groups - zero) / scale).round().nan_to_num(0.0).clamp(0, largest_code).to(torch.uint8)
    codes = codes.flatten(-2)[..., : size + -size % CODES]
    if bits == 4:
        codes = codes.reshape(*head, -1, CODES // 2, 2).transpose(-1, -2).flatten(-3)
    if bits == 3:
        # The two low bits of all codes, then the high bit of all codes.
        packed = torch.cat([_join_codes(codes & 3, 2), _join_codes(codes >> 2, 1)], -1)
    else:
        packed = _join_codes(codes, bits)

    whole_words = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4))
    return torch.cat([whole_words, scales.flatten(-2).view(torch.uint8)], -1)


def unpack_bits(rows: Tensor, size: int, bits: int, group: int) -> Tensor:
    """Return the numbers [..., size] of rows of bytes [..., row], in fp32."""
    head = rows.shape[:-1]
    padded = size + -size % CODES
    # The scale and the zero point of a group have 4 bytes.
    code_bytes = rows.shape[-1] - 4 * -(-size // group)
    low_bits = 2 if bits == 3 else bits
    low_bytes = padded * low_bits // 8
    codes = _split_codes(rows[..., :low_bytes], low_bits)
    if bits == 3:
        codes = codes | _split_codes(rows[..., low_bytes : low_bytes + padded // 8], 1) << 2
    if bits == 4:
        codes = codes.reshape(*head, -1, 2, CODES // 2).transpose(-1, -2).flatten(-3)

    scales = rows[..., code_bytes:].contiguous().view(torch.float16).float().view(*head, -1, 2)
    scale, zero = (each.repeat_interleave(group, -1)[..., :size] for each in scales.unbind(-1))
    numbers: Tensor = codes[..., :size] * scale + zero
    return numbers


def turn(numbers: Tensor) -> Tensor:
    """Return numbers times the orthonormal Hadamard matrix, in blocks of the largest power of two that divides [size].

    It spreads a large channel over all of them. Turning twice gives the numbers back.
    """
    size = numbers.shape[-1]
    block = size & -size
    half = 1
    while half < block:
        # The kernels add in the same order.
        first, second = numbers.reshape(*numbers.shape[:-1], -1, 2, half).unbind(-2)
        numbers = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return numbers * (1 / numbers.new_tensor(block).sqrt())


def _join_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., codes] as bytes, the first one in the lowest bits."""
    several = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    joined = several[..., 0]
    for place in range(1, 8 // bits):
        joined = joined | several[..., place] << bits * place
    return joined


def _split_codes(joined: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=joined.device)
    codes: Tensor = joined.unsqueeze(-1) >> shifts & 2**bits - 1
    return codes.flatten(-2)
