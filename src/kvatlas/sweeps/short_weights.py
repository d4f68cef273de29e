"""Shorter types for the weights of linear layers on CPUs, and the tokens that they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvatlas.core import Check, CheckResult, KvatlasError
from kvatlas.cpu import native
from kvatlas.machine import free_memory
from kvatlas.models import ModelHandle
from kvatlas.models.handle import SHARED_FROM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What the shorter types save.
_GAIN = "--model-option weights=bfloat16 or int8 takes a half or a quarter of the memory and of the time to read it"


def can_be_short(model: ModelHandle) -> bool:
    """Return True for a large model in float32 whose linear layers may have shorter weights here."""
    if model.device != "cpu" or model.dtype != "float32" or model.config.get("quantization_config"):
        return False
    numbers = (model.measure_weights("float32") or 0) // 4
    return 4 * numbers >= SHARED_FROM and native.load() is not None


def offer(model: ModelHandle) -> str:
    """Return a sentence that offers shorter weights for a model in float32; "" if it has them, or cannot."""
    if model.precision != model.dtype or not can_be_short(model):
        return ""
    return (
        f"The weights of the model {model.name!r} are in float32; {_GAIN}. `kvatlas check MODEL --model-option "
        "weights=int8` counts the tokens that change."
    )


def weights_check(model: ModelHandle, loaded: PreTrainedModel, prompt: int, tokens: Sequence[int]) -> CheckResult:
    """Return a finding on the types of a model's weights, which `can_be_short`: their cost in texts.

    Of `tokens`, a generation behind a prompt of so many tokens, those count that the model in float32 would choose
    otherwise (the most probable one, behind the same tokens). The model is read once more for that.
    """
    import torch

    if model.precision == model.dtype:
        return CheckResult("weights", Check.OK, "in float32", f"{_GAIN}, and counts changes")

    exact = replace(model, options=replace(model.options, weights="auto"))
    needed = exact.weight_bytes or 0
    free = free_memory("cpu")
    message = f"in {model.precision}; not compared with float32"
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
    return CheckResult("weights", Check.OK, f"in {model.precision}: {count}")
