"""The user's options for loading and prompting a model, from a spec's entry or `--model-option`."""

import datetime as calendar
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvatlas.core import KvatlasError
from kvatlas.text import did_you_mean

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "bfloat16", "int8")
#: A value of a variable of a chat template.
Value = str | int | float | bool | None
#: Variables of a chat template that stand for the conversation and for the model.
OWN_VALUES = ("messages", "documents", "tools", "add_generation_prompt", "strftime_now")


@dataclass(frozen=True)
class Options:
    """The options of a model.

    dtype: auto (float32 on a CPU, the checkpoint's own on a GPU), float32, bfloat16 or float16.
    weights: auto (in dtype), or bfloat16 or int8 for linear layers of a model that is else float32 on a CPU: half or a
        quarter of the memory, and about two or three times as fast with one row, where reading the weights takes the
        time. What enters these layers is rounded, too; int8 has a scale for 32 numbers.
    device: auto (a GPU if there is one), cpu, cuda or cuda:N.
    revision: branch, tag or commit of a hub id.
    cache: folder for downloads from the hub and converted GGUF files.
    adapter: folder of a LoRA adapter as peft writes it, added to the weights; its chat template replaces the model's.
    think_close: the text that ends thinking, if it is not found; '' for a model without thinking.
    think_open: text added to the prompt unless it is there, as the R1 model card advises (`<think>`, a line break).
    date: YYYY-MM-DD, the date of today in chat templates, so that prompts do not change from day to day.
    template: file of a Jinja chat template, in place of the tokenizer's own; a base model needs one.
    system: text of a system message before every conversation without one.
    template_values: values of the chat template's own variables by name (enable_thinking, reasoning_effort).
    """

    dtype: str = "auto"
    weights: str = "auto"
    device: str = "auto"
    revision: str = ""
    cache: str = ""
    adapter: str = ""
    think_close: str | None = None
    think_open: str = ""
    date: str = "2024-07-26"
    template: str = ""
    system: str = ""
    #: Names and values in the order of the names, so that options stay hashable; given as a mapping.
    template_values: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "template_values", _ordered_template_values(self.template_values))
        for name, value in vars(self).items():
            may_be_other = name == "template_values" or (name == "think_close" and value is None)
            if not isinstance(value, str) and not may_be_other:
                raise KvatlasError(f"The model option {name} is {value!r}; expected a text.")

        if self.dtype not in DTYPES:
            raise KvatlasError(f"The model option dtype is {self.dtype!r}; expected {', '.join(DTYPES)}.")
        if self.weights not in WEIGHTS:
            raise KvatlasError(f"The model option weights is {self.weights!r}; expected {', '.join(WEIGHTS)}.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise KvatlasError(f"The model option device is {self.device!r}; expected auto, cpu, cuda and cuda:N.")
        try:
            calendar.date.fromisoformat(self.date)
        except ValueError as error:
            raise KvatlasError(f"The model option date is {self.date!r}; expected days as YYYY-MM-DD.") from error

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Return the options with these values by name. Raises KvatlasError for an unknown option."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise KvatlasError(
                    f"Unknown model option {name!r}; expected {', '.join(names)}.{did_you_mean(name, names)}"
                )
        return cls(**values)

    def resolved_device(self) -> str:
        """Return the device: cpu, cuda or cuda:N. Raises KvatlasError for a GPU that does not exist."""
        if self.device == "cpu":
            return "cpu"
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            return "cuda" if count else "cpu"
        if int(self.device.partition(":")[2] or 0) >= count:
            raise KvatlasError(
                f"The model option device is {self.device!r}, but this machine has "
                f"{f'{count} GPUs' if count else 'no GPU'} that PyTorch can use."
            )
        return self.device


def _ordered_template_values(given: Any) -> tuple[tuple[str, Value], ...]:
    """Return the values for a chat template in the order of their names. Raises KvatlasError for other data."""
    expected = "expected a mapping of names to texts, numbers, true, false and null, as {enable_thinking: true}"
    if isinstance(given, tuple):
        given = dict(given)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise KvatlasError(f"The model option template_values is {given!r}; {expected}.")
    for name, value in given.items():
        if not isinstance(value, Value):
            raise KvatlasError(f"The model option template_values has {name} {value!r}; {expected}.")
        if name in OWN_VALUES:
            raise KvatlasError(f"The model option template_values has {name}, which kvatlas sets itself.")
    return tuple(sorted(given.items()))
