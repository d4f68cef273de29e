"""How a model is to be loaded and prompted, as users say it: in a spec's entry, or with `--model-option`."""

from __future__ import annotations

import datetime as calendar
import re
from dataclasses import dataclass, fields
from typing import Any

from kvatlas.core import KvatlasError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """What can be said about a model beside where it is.

    dtype: auto (float32 on a CPU, the checkpoint's own on a GPU), float32, bfloat16 or float16.
    device: auto (a GPU where there is one), cpu, cuda or cuda:N.
    revision: of a hub id: branch, tag or commit.
    cache: folder for what comes from the hub, or is made of a GGUF.
    adapter: folder of a LoRA adapter as peft writes it, added to the weights; its chat template counts.
    think_close: the text that ends thinking, where it is not found; '' for a model without thinking.
    think_open: text put behind the prompt unless it is there, as the R1 model card advises (`<think>`, a line break).
    date: YYYY-MM-DD, the day that chat templates take for today, so that prompts do not change from day to day.
    """

    dtype: str = "auto"
    device: str = "auto"
    revision: str = ""
    cache: str = ""
    adapter: str = ""
    think_close: str | None = None
    think_open: str = ""
    date: str = "2024-07-26"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not (value is None and field.name == "think_close"):
                raise KvatlasError(f"The model option {field.name} is {value!r}; expected texts.")
        if self.dtype not in DTYPES:
            raise KvatlasError(f"The model option dtype is {self.dtype!r}; expected {', '.join(DTYPES)}.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise KvatlasError(f"The model option device is {self.device!r}; expected auto, cpu, cuda and cuda:N.")
        try:
            calendar.date.fromisoformat(self.date)
        except ValueError as error:
            raise KvatlasError(f"The model option date is {self.date!r}; expected days as YYYY-MM-DD.") from error

    @classmethod
    def of(cls, values: dict[str, Any]) -> Options:
        """The options with these values; KvatlasError for one that does not exist."""
        valid = [field.name for field in fields(cls)]
        for name in values:
            if name not in valid:
                raise KvatlasError(f"Unknown model option {name!r}; expected {', '.join(valid)}.")
        return cls(**values)

    def resolved_device(self) -> str:
        """The device: cpu, cuda or cuda:N; KvatlasError where a GPU is asked for and there is none."""
        if self.device == "cpu":
            return "cpu"
        import torch

        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            return "cuda" if there else "cpu"
        number = int(self.device.partition(":")[2] or 0)
        if number >= there:
            raise KvatlasError(
                f"The model option device is {self.device!r}, but this machine has "
                f"{'no GPU' if not there else f'{there} GPUs'} that PyTorch can use."
            )
        return self.device
