"""Shorter types for the weights of linear layers on CPUs: the gain on this machine, and the tokens that change."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvatlas.core import Check, CheckResult, KvatlasError
from kvatlas.cpu import native
from kvatlas.cpu.native.panels import GROUP
from kvatlas.machine import free_memory, return_freed_memory
from kvatlas.models import ModelHandle
from kvatlas.models.handle import SHARED_FROM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The values of the option `weights` beside auto.
SHORT_TYPES = ("bfloat16", "int8")
#: Numbers of a layer for measurements: in float32 more bytes than most processors cache.
NUMBERS = 2**24
#: Rows of products that are measured: a sequence alone, and a batch.
ROWS = (1, 16)
ROUNDS = 5
#: The inputs of a layer for a machine without a model.
USUAL_INPUTS = 2048


def can_be_short(model: ModelHandle) -> bool:
    """Return True for a large model in float32 whose linear layers may have shorter weights here."""
    if model.device != "cpu" or model.dtype != "float32" or model.config.get("quantization_config"):
        return False
    numbers = (model.files.measure_weights("float32") or 0) // 4
    return 4 * numbers >= SHARED_FROM and native.load() is not None


@functools.cache
def measured_gains(inputs: int) -> dict[tuple[str, int], float]:
    """Return the speed of products with short weights relative to float32, by type and number of rows.

    Types take turns, and the least CPU time of each counts: other work on the machine only takes time. So much memory
    is read in between that no weights stay in the processor's cache.
    """
    import torch

    kernels = native.load()
    if kernels is None:
        return {}
    source = torch.Generator().manual_seed(0)
    weight = torch.rand(NUMBERS // inputs, inputs, generator=source)
    layers = {name: kernels.linear(weight, None, getattr(torch, name)) for name in ("float32", *SHORT_TYPES)}
    del weight

    gains = {}
    for rows in ROWS:
        x = torch.rand(rows, inputs, generator=source)
        seconds = dict.fromkeys(layers, float("inf"))
        for _ in range(ROUNDS):
            for name, layer in layers.items():
                began = time.thread_time()
                layer(x)
                seconds[name] = min(seconds[name], time.thread_time() - began)
        for name in SHORT_TYPES:
            gains[name, rows] = seconds["float32"] / max(seconds[name], 1e-9)

    # The process may wait for its workers for hours.
    layers.clear()
    return_freed_memory()
    return gains


def gain_text(inputs: int) -> str:
    """Return the gain of each type on this machine, measured with so many inputs."""
    gains = measured_gains(inputs)
    alone, batch = ROWS
    half, quarter = SHORT_TYPES
    return (
        f"here linear layers are {gains[half, alone]:.1f} times as fast in {half} and {gains[quarter, alone]:.1f} in "
        f"{quarter} with one row, {gains[half, batch]:.1f} and {gains[quarter, batch]:.1f} with {batch} rows"
    )


def offer(model: ModelHandle) -> str:
    """Return a sentence that offers shorter weights for a model in float32; "" if it has them, or cannot."""
    if model.precision != model.dtype or not can_be_short(model):
        return ""
    return (
        f"The weights of the model {model.name!r} are in float32: {gain_text(_inputs(model))}, and take a half and a "
        "quarter of the memory. Choose them with the model option weights; `kvatlas check MODEL --model-option "
        "weights=int8` counts the tokens that change."
    )


def weights_check(model: ModelHandle, loaded: PreTrainedModel, prompt: int, tokens: Sequence[int]) -> CheckResult:
    """Return a finding on the types of a model's weights, which `can_be_short`: their gain, and their cost in texts.

    Of `tokens`, a generation behind a prompt of so many tokens, those count that the model in float32 would choose
    otherwise (the most probable one, behind the same tokens). The model is read once more for that.
    """
    import torch

    text = gain_text(_inputs(model))
    if model.precision == model.dtype:
        advice = "--model-option weights=bfloat16 or int8 takes a half or a quarter of the memory, and counts changes"
        return CheckResult("weights", Check.OK, f"in float32; {text}", advice)

    exact = replace(model, options=replace(model.options, weights="auto"))
    needed = exact.weight_bytes or 0
    free = free_memory("cpu")
    message = f"in {model.precision}; {text}; not compared with float32"
    if free is not None and needed > 0.8 * free:
        return CheckResult("weights", Check.WARNING, message, f"that takes {needed / 2**30:.1f} GiB of memory")

    try:
        whole = exact.load_unpacked()
    except KvatlasError as error:
        # The GGUF of a model in int8 may have moved.
        return CheckResult("weights", Check.WARNING, message, str(error))

    written = len(tokens) - prompt
    chosen = []
    with torch.inference_mode():
        ids = torch.tensor([list(tokens)])
        for each in (loaded, whole):
            logits = each(input_ids=ids, use_cache=False, logits_to_keep=written + 1).logits[0, :-1]
            chosen.append(logits.argmax(-1))
    changed = (chosen[0] != chosen[1]).nonzero().flatten().tolist()
    if changed:
        count = f"{len(changed)} of {written} tokens would be others in float32, the first is number {changed[0] + 1}"
    else:
        count = f"all {written} tokens would be the same in float32"
    return CheckResult("weights", Check.OK, f"in {model.precision}: {count}; {text}")


def _inputs(model: ModelHandle) -> int:
    """Return the inputs of most linear layers, in whole groups of int8."""
    size = int(model.config.get("hidden_size") or USUAL_INPUTS)
    return max(GROUP, size // GROUP * GROUP)
