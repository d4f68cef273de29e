"""Weights in panels, the form in which native code reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Outputs in a panel of packed weights, tokens in the smallest page.
LANES = 16
#: Inputs in a row that share a scale in int8, and the largest code.
GROUP = 32
LARGEST_CODE = 127
#: Largest codes of the groups of GGUF files in 4 and 5 bits (Q4_0, Q5_0), which keep their integers.
FEWER_CODES = (8, 16)
#: Panels that are packed in int8 at a time: their numbers take some memory.
PANELS_AT_A_TIME = 256


def pack_weights(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return weights [outputs, inputs] as panels [ceil(outputs / 16), inputs, 16], zeros behind the last output.

    They are fp32 unless the `dtype` is bfloat16 or int8.

    In bfloat16 the two inputs of a pair lie side by side, [ceil(outputs / 16), inputs / 2, 16, 2] in the same memory.
    An odd number of inputs has no pairs, so such weights stay fp32. In int8 they are bytes [ceil(outputs / 16), inputs,
    17]: the codes of each group and its scales (see `kernels.c`). Inputs that are no multiple of 32 stay fp32, and
    so do weights beyond the range of scales in half precision. Numbers that were integers with a scale for 32 of them,
    as in GGUF files in Q8_0, Q4_0 and Q5_0, are the same integers here.
    """
    import torch
    from torch.nn.functional import pad

    outputs, inputs = weight.shape
    if dtype is torch.int8:
        packed = _pack_bytes(weight.detach()) if inputs % GROUP == 0 else None
        return pack_weights(weight, None) if packed is None else packed
    numbers = 2 if dtype is torch.bfloat16 and inputs % 2 == 0 else 1
    rows = pad(weight.detach().to(dtype if numbers == 2 else torch.float32), (0, 0, 0, -outputs % LANES))
    words = rows.view(-1, LANES, inputs // numbers, numbers).transpose(1, 2)
    return words.reshape(-1, inputs, LANES).contiguous()


def _pack_bytes(weight: Tensor) -> Tensor | None:
    """Return weights in int8 as `pack_weights` does; None if a scale is beyond half precision."""
    import torch
    from torch.nn.functional import pad

    outputs, inputs = weight.shape
    groups = inputs // GROUP
    packed = torch.empty(-(-outputs // LANES), groups, GROUP * (LANES + 1), dtype=torch.uint8)
    at_a_time = PANELS_AT_A_TIME * LANES
    for first in range(0, outputs, at_a_time):
        rows = weight[first : first + at_a_time].float()
        numbers = pad(rows, (0, 0, 0, -len(rows) % LANES)).view(-1, LANES, groups, GROUP)
        largest = numbers.abs().amax(-1)
        scales = (largest / LARGEST_CODE).half()
        if not scales.isfinite().all():
            return None
        for code in FEWER_CODES:
            _keep_multiples(numbers, largest, code, scales)
        codes = (numbers / scales.float()[..., None]).nan_to_num_(0.0, 0.0, 0.0).round_()
        # A word of a panel has four codes of each output.
        codes = codes.clamp_(-LARGEST_CODE, LARGEST_CODE).view(-1, LANES, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        panels = packed[first // LANES :][: len(codes)]
        panels[:, :, : GROUP * LANES] = (codes + 128).to(torch.uint8).flatten(2)
        panels[:, :, GROUP * LANES :] = scales.transpose(1, 2).contiguous().view(torch.uint8)
    return packed.view(-1, inputs, LANES + 1)


def _keep_multiples(numbers: Tensor, largest: Tensor, code: int, scales: Tensor) -> None:
    """Replace the scales of groups that are multiples of another one, with which the `largest` number has this code."""
    candidates = (largest / code).half()
    # The largest number and the first one rule out most groups.
    first = numbers[..., 0] / candidates.float()
    possible = (candidates.float() * code == largest) & (largest > 0) & (first == first.round())
    groups = numbers[possible]
    before = scales[possible]
    after = candidates[possible]
    better = _are_multiples(groups, after) & ~_are_multiples(groups, before)
    scales[possible] = before.where(~better, after)


def _are_multiples(groups: Tensor, scales: Tensor) -> Tensor:
    """Return for each of some groups [groups, 32] whether its numbers are integers times its scale."""
    multiples = groups / scales.float()[:, None]
    return (multiples == multiples.round()).all(-1)


def _unpack_bytes(packed: Tensor, outputs: int) -> Tensor:
    import torch

    panels, inputs, _ = packed.shape
    groups = packed.reshape(panels, -1, GROUP * (LANES + 1))
    shape = (*groups.shape[:2], GROUP // 4, LANES, 4)
    codes = groups[:, :, : GROUP * LANES].reshape(shape).permute(0, 3, 1, 2, 4)
    scales = groups[:, :, GROUP * LANES :].contiguous().view(torch.float16).transpose(1, 2)
    numbers: Tensor = (codes.float() - 128).flatten(3) * scales.float()[..., None]
    return numbers.view(-1, inputs)[:outputs]


def unpack_weights(packed: Tensor, outputs: int) -> Tensor:
    """Return the weights [outputs, inputs] of `pack_weights`: in their type, or in fp32 for those in int8."""
    panels, inputs, _ = packed.shape
    if packed.element_size() == 1:
        return _unpack_bytes(packed, outputs)
    numbers = 4 // packed.element_size()
    words = packed.view(panels, inputs // numbers, LANES, numbers).transpose(1, 2)
    return words.reshape(-1, inputs)[:outputs].contiguous()
