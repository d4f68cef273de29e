"""Packed weights in one file, made once and mapped by every process of this machine that runs the model.

Processes that map a file share its memory, and the file of the original weights is not read again: a second worker
costs what its interpreter and its cache take. The file is written by the first process that loads the model; others
wait for it. It names the digest of the weights that it was made from and ends with a checksum of its own bytes, which
each process compares: neither sizes nor times of files tell that a byte was changed.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvatlas.core import KvatlasError, digest
from kvatlas.cpu.native import Linear, Native, load
from kvatlas.cpu.native.panels import LANES, pack_weights
from kvatlas.machine import being_made, return_freed_memory
from kvatlas.text import bytes_text

#: Rises with every change of the file, and of the order in which a model's weights are packed.
FORMAT = 3
#: Tensors begin at multiples of this, so that no vector lies across two lines of the processor's cache.
ALIGNMENT = 64
#: Bytes of tables after whose packing the memory of the weights that they replace is given back.
RETURN_AFTER = 32 * 2**20
#: Bytes of the checksum at the end of a file.
CHECKSUM = 4


class WeightInBytes(nn.Parameter):
    """A weight [outputs, inputs] that lies in a file as packed in int8 (`panels.pack_weights`), and nowhere else.

    Its own numbers are zeros without memory: only packing reads it.
    """

    file: Path
    offset: int

    @classmethod
    def at(cls, file: Path, offset: int, shape: Sequence[int]) -> WeightInBytes:
        weight = cls(torch.zeros(()).expand(*shape), requires_grad=False)
        weight.file = file
        weight.offset = offset
        return weight

    def read(self) -> Tensor:
        """Return the packed table in memory of its own: mapped pages would stay until the model is packed.

        Raises KvatlasError for a file that is cut off.
        """
        outputs, inputs = self.shape
        shape = (-(-outputs // LANES), inputs, LANES + 1)
        content = np.fromfile(self.file, np.uint8, math.prod(shape), offset=self.offset)
        if len(content) < math.prod(shape):
            raise KvatlasError(f"The weights in {str(self.file)!r} are cut off; delete the folder of that file.")
        return torch.from_numpy(content).view(shape)


@dataclass
class PackedTables:
    """The packed tables of a model in the order in which they are asked for: made here, or taken from a file.

    `steps` are the steps of packing that were done, in order; None before a model is packed. Tables that are made here
    are in `dtype`: fp32, bfloat16 or int8.
    """

    dtype: torch.dtype = torch.float32
    stored: Sequence[Tensor] | None = None
    steps: list[bool] | None = None
    used: list[Tensor] = field(default_factory=list)
    #: Bytes of tables that were made since memory was given back.
    bytes_made: int = 0

    @cached_property
    def native(self) -> Native:
        kernels = load()
        assert kernels is not None, "models are packed for native kernels"
        return kernels

    def linear(self, weights: Sequence[Tensor], bias: Tensor | None = None) -> Linear:
        """Return a layer over packed `weights` [outputs, inputs], one below the other."""
        outputs = sum(map(len, weights))
        if self.stored is None:
            packed = self._pack(weights)
            # Weights were read by several threads, whose freed memory no other thread would use again.
            self.bytes_made += packed.nbytes
            if self.bytes_made >= RETURN_AFTER:
                return_freed_memory()
                self.bytes_made = 0
        else:
            packed = self.stored[len(self.used)]
            shape = (-(-outputs // LANES), weights[0].shape[1])
            if packed.shape[:2] != shape:
                raise ValueError(f"a packed table is {tuple(packed.shape)}, expected {shape}")
        self.used.append(packed)
        return self.native.packed_linear(packed, bias, outputs)

    def _pack(self, weights: Sequence[Tensor]) -> Tensor:
        if any(isinstance(weight, WeightInBytes) for weight in weights):
            tables = [
                weight.read() if isinstance(weight, WeightInBytes) else pack_weights(weight, self.dtype)
                for weight in weights
            ]
            return tables[0] if len(tables) == 1 else torch.cat(tables)
        return pack_weights(weights[0] if len(weights) == 1 else torch.cat([*weights]), self.dtype)


#: The content of a file: its packed tables, and the parameters by name that no table replaces.
Content = tuple[PackedTables, dict[str, Tensor]]


class WeightsFile:
    """The file of a model's packed weights in a folder of caches.

    `sources` are the folders from which the model is loaded, whose file is made anew if the digest of their weights is
    not `contents`. Linear layers have their weights in `dtype`. `load` returns the unpacked model, for False without
    reading its weights, and `pack` packs it.
    """

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Path],
        contents: str,
        dtype: torch.dtype,
        load: Callable[[bool], PreTrainedModel],
        pack: Callable[[PreTrainedModel, PackedTables], Any],
    ) -> None:
        self.dtype = dtype
        self.load = load
        self.pack = pack
        # The layers of a model may change with transformers.
        self.identity = digest({"format": FORMAT, "transformers": version("transformers"), "weights": contents})
        kind = "packed" if dtype is torch.float32 else f"packed-{str(dtype).removeprefix('torch.')}"
        self.path = folder / f"{kind}-{digest([str(source.resolve()) for source in sources])[:32]}.bin"

    def model(self) -> PreTrainedModel:
        """Return the packed model; where the file cannot be written, it has its weights for itself."""
        try:
            tables, stored = self._read() or self._made()
        except OSError as error:
            print(f"kvatlas: weights are not shared: {error.strerror or error}", file=sys.stderr, flush=True)
            model = self.load(True)
            self.pack(model, PackedTables(self.dtype))
            return model
        model = self.load(False)
        parameters = dict(model.named_parameters())
        for name, tensor in stored.items():
            parameters[name].data = tensor
        self.pack(model, tables)
        return model

    def _made(self) -> Content:
        """Return the content of the file that one process makes, while others wait."""
        with being_made(self.path) as unfinished:
            # Another process may have been faster.
            if self._read() is None:
                self._make(unfinished, self.load(True))
                # The layers of the model that was packed refer to each other.
                gc.collect()
                return_freed_memory()
        stored = self._read()
        if stored is None:
            raise OSError(f"the file {str(self.path)!r} cannot be read")
        return stored

    def _make(self, unfinished: Path, model: PreTrainedModel) -> None:
        """Pack a model and write its weights, first to the file `unfinished`."""
        parameters = dict(model.named_parameters())
        tables = PackedTables(self.dtype)
        self.pack(model, tables)
        # Packing drops the weights that it replaces.
        left = {name: tensor.data for name, tensor in parameters.items() if tensor.numel()}
        tensors = [*tables.used, *left.values()]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        sentence = (
            f"weights are packed once, to {bytes_text(sum(sizes))} in {self.path}; delete that file to free them."
        )
        print(f"kvatlas: {sentence}", file=sys.stderr, flush=True)

        # The place of each tensor behind the header.
        offsets = [0, *itertools.accumulate(size + -size % ALIGNMENT for size in sizes[:-1])]
        entries = [
            [offset, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]

        count = len(tables.used)
        header = {
            "identity": self.identity,
            "bytes": offsets[-1] + sizes[-1],
            "steps": tables.steps,
            "tables": entries[:count],
            "parameters": dict(zip(left, entries[count:], strict=True)),
        }

        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for offset, tensor in zip(offsets, tensors, strict=True):
                file.seek(8 + len(text) + offset)
                tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tofile(file)
        with unfinished.open("r+b") as file:
            checksum = 0
            while block := file.read(RETURN_AFTER):
                checksum = zlib.crc32(block, checksum)
            file.write(checksum.to_bytes(CHECKSUM, "little"))
        unfinished.replace(self.path)

    def _read(self) -> Content | None:
        """Return the content of the file, mapped; None without an intact one for these weights."""
        try:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                end = 8 + length + header["bytes"]
                if header["identity"] != self.identity or os.fstat(file.fileno()).st_size != end + CHECKSUM:
                    return None
                # Writing to it would copy a page for this process alone.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                if zlib.crc32(memoryview(memory)[:end]) != int.from_bytes(memory[end:], "little"):
                    return None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

        content = torch.frombuffer(memory, dtype=torch.uint8)[8 + length :]
        tables = [_tensor(content, entry) for entry in header["tables"]]
        parameters = {name: _tensor(content, entry) for name, entry in header["parameters"].items()}
        return PackedTables(self.dtype, tables, header["steps"]), parameters


def _tensor(content: Tensor, entry: Sequence[Any]) -> Tensor:
    """Return a tensor of the file by its offset, shape and type."""
    offset, shape, dtype_name = entry
    dtype = getattr(torch, dtype_name)
    size = dtype.itemsize * math.prod(shape)
    return content[offset : offset + size].view(dtype).view(shape)
