"""Shared by the programs here: options, documents, models with random weights, engines that are filled by hand."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvatlas.core import Sampling
from kvatlas.engine import Engine, Request
from kvatlas.engine.cache import Layer
from kvatlas.engine.rows import Row, compress
from kvatlas.models import ENDLESS, ModelHandle
from kvatlas.policies import Policy

if TYPE_CHECKING:
    from kvatlas.engine.batch import ForwardBatch


def arguments(text: str | None, *files: str, **options: Any) -> argparse.Namespace:
    """Parse the command line of a program that `text` describes: files, options, and `--out` for the document.

    An option is its default, a list of defaults, the type of a value without one, or what argparse takes.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in files:
        parser.add_argument(name, type=Path)
    for name, option in options.items():
        if option is False:
            option = {"action": "store_true"}
        elif isinstance(option, type):
            option = {"type": option}
        elif isinstance(option, list):
            option = {"nargs": "*", "type": type(option[0]), "default": option}
        elif not isinstance(option, dict):
            option = {"type": type(option), "default": option}
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    return parser.parse_args()


def keep(options: argparse.Namespace, /, **document: Any) -> None:
    """Print the document with options, torch and machine as the last line, and keep it in the file `--out`."""
    asked = {name: without_folder(value) for name, value in vars(options).items()}
    asked.pop("out", None)
    out = vars(options).get("out")
    about = {"options": asked, "torch": torch.__version__, "machine": machine_name()}
    text = json.dumps(about | document)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text + "\n")
    print(text)


def without_folder(value: Any) -> Any:
    """Return an option for a document: of an absolute path its name alone, since folders belong to one machine."""
    if isinstance(value, list | tuple):
        return [without_folder(item) for item in value]
    if isinstance(value, Path):
        return value.name if value.is_absolute() else str(value)
    if isinstance(value, str) and "/" in value:
        # As in MATH500@/folder/panel.jsonl.
        return "@".join(Path(word).name if Path(word).is_absolute() else word for word in value.split("@"))
    return value


def machine_name() -> str:
    """Return the processor of this machine and the number of its cores."""
    processor = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = ", ".join([processor, *dict.fromkeys(models)])
    return f"{processor}, {os.cpu_count()} cores"


def resident(name: str, process: int | str = "self") -> int:
    """Bytes that the system counts for a process: VmRSS now, VmHWM at its peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far, of all its threads (Linux)."""
    # What clock_getcpuclockid(3) returns.
    return time.clock_gettime((~pid << 3) | 2)


PROMPT = tuple(5 + i % 50 for i in range(64))


def endless(folder: Path) -> ModelHandle:
    """The model in a folder without a tokenizer: it never ends a trace, nor its thinking."""
    return ModelHandle(f"hf:{folder}", folder, overrides=replace(ENDLESS, opens_thinking=True))


def bench_model(folder: Path, shape: dict[str, Any]) -> ModelHandle:
    """A Llama with random weights that never ends a trace."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    return endless(folder)


class FilledEngine(Engine):
    """An engine with `batch_size` sequences of random keys and values, and room for `room` tokens in each."""

    def __init__(
        self, model: ModelHandle, policies: Iterable[Policy], sampling: Sampling, batch_size: int, room: int
    ) -> None:
        super().__init__(model, model.load(), policies, sampling, batch_size)
        self.room = room
        self.sequences = [self.cache.begin() for _ in range(batch_size)]
        for sequence in self.sequences:
            self.cache.reserve(sequence, room)
        torch.manual_seed(0)
        slots, shape = torch.arange(self.cache.keys[0].shape[1]), model.shape
        for number, (_, *sizes) in enumerate(shape.cached_layers):
            self.cache.write(number, slots, *(torch.randn(len(slots), shape.kv_heads, size) for size in sizes))
        for table in self.cache.rings:
            table.normal_()
        self.cache.layers = {n: Layer(n, model.shape.head_dim**-0.5) for n in range(model.shape.layers)}
        #: Processor seconds inside of the model's forward pass.
        self.forward_seconds = 0.0

    def put(self, length: int, policy: Policy) -> None:
        """Every sequence has `length` tokens cached under this policy, and goes on from there."""
        written = [5 + i % 50 for i in range(length - len(PROMPT) + 1)]
        for state in self.cache.token_state.values():
            state.zero_()
            state[..., :length].uniform_()
        self.scheduler.rows = []
        # One object for all rows, as the scheduler has it.
        sampling = replace(self.sampling, max_new_tokens=0)
        for number, sequence in enumerate(self.sequences):
            # A compression gave pages back.
            self.cache.reserve(sequence, self.room)
            sequence.length = length
            row = Row(
                Request(number, PROMPT, number, (policy,)),
                (policy,),
                self.collector.signals((policy,)),
                sampling,
                self.sampling.max_new_tokens,
                sequence,
                tokens=list(written),
                position=length,
            )
            self.scheduler.rows.append(row)

    def step(self, count: int = 1) -> float:
        """Processor seconds of so many decoding steps."""
        key = self._next_key()
        key.zero_()
        with self.attending():
            began = time.thread_time()
            for _ in range(count):
                self._step()
            taken = time.thread_time() - began
        assert key.any(), "the step wrote no key into the cache"
        return taken

    def _next_key(self) -> Tensor:
        """Return the slot of the first layer's key of the first sequence's next token."""
        sequence, size = self.sequences[0], self.cache.page_size
        slot = sequence.pages[sequence.length // size] * size + sequence.length % size
        return self.cache.keys[0][:, slot]

    def compression(self, rows: int) -> float:
        """Processor seconds of compressing so many of the sequences."""
        began = time.thread_time()
        with torch.inference_mode():
            for row in self.scheduler.rows[:rows]:
                compress(self.handle, self.cache, row)
        return time.thread_time() - began

    def forward(self, batch: ForwardBatch, wanted: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        began = time.thread_time()
        result = super().forward(batch, wanted)
        self.forward_seconds += time.thread_time() - began
        return result
