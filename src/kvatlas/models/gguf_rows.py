"""Weights of a GGUF in int8: its tensors are read some rows at a time, and never the whole model in float32.

Blocks of Q8_0, Q4_0 and Q5_0 are integers with a scale for 32 of them, as the groups of int8 are, and keep their
integers. Other types are rounded anew, as they are from float32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvatlas.core import digest, refusal
from kvatlas.cpu.native.panels import GROUP, LANES, pack_weights
from kvatlas.cpu.shared_weights import WeightInBytes
from kvatlas.models.weights import check_finite

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel

#: Numbers that are unpacked at a time.
NUMBERS_AT_A_TIME = 2**22
#: The classes of transformers that name the tensors of a GGUF and at most change the order of rows, and vectors.
ROW_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor")


@dataclass(frozen=True)
class RowTensor:
    """A tensor of a GGUF that is the parameter `name` of a model, whose rows have this `order` in the file."""

    file: Path
    stored: Any
    name: str
    shape: tuple[int, ...]
    order: np.ndarray[Any, np.dtype[np.int64]]
    #: Turns the numbers of a vector into those of the model.
    process: Any

    def rows(self) -> Iterator[Tensor]:
        """Yield the numbers in float32, a multiple of 16 rows at a time but for the last; a vector at once."""
        # Mapped pages would stay in memory.
        mapped = self.stored.data
        blocks = np.fromfile(self.file, mapped.dtype, mapped.size, offset=self.stored.data_offset).reshape(mapped.shape)
        if len(self.shape) == 1:
            numbers = self.process(weights=self._unpack(blocks), name=self.stored.name).weights
            yield torch.from_numpy(np.array(numbers, np.float32))
            return

        count = max(1, NUMBERS_AT_A_TIME // self.shape[1] // LANES) * LANES
        for first in range(0, self.shape[0], count):
            numbers = self._unpack(blocks[self.order[first : first + count]])
            yield torch.from_numpy(numbers.astype(np.float32, copy=False))

    def _unpack(self, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        from gguf import dequantize

        with refusal(f"The tensor {self.stored.name!r} of the GGUF {str(self.file)!r} cannot be read"):
            numbers: np.ndarray[Any, Any] = dequantize(blocks, self.stored.tensor_type)
        return numbers


def row_tensors(file: Path, reader: GGUFReader, model: PreTrainedModel) -> list[RowTensor] | None:
    """Return the tensors of a GGUF that are parameters of a model, which needs no weights.

    None if a parameter is not a tensor of the file with rows in some order: tensors may be joined or divided.
    """
    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    except ImportError:
        return None

    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    if type(processor).__name__ not in ROW_PROCESSORS:
        return None
    names = get_gguf_hf_weights_map(model, processor)
    parameters = dict(model.named_parameters())
    # Buffers that are stored are no parameters.
    if set(model.state_dict()) - set(dict(model.named_parameters(remove_duplicate=False))):
        return None

    found = []
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name not in parameters:
            continue
        shape = tuple(parameters[name].shape)
        if shape != tuple(map(int, reversed(tensor.shape))) or len(shape) > 2:
            return None

        # Where the processor would put each row.
        order = np.arange(shape[0])
        if len(shape) == 2:
            order = processor.process(weights=order[:, None], name=tensor.name).weights.reshape(-1)
            if not np.array_equal(np.sort(order), np.arange(shape[0])):
                return None
        found.append(RowTensor(file, tensor, name, shape, order, processor.process))
    return found


def _names_in_bytes(model: PreTrainedModel) -> set[str]:
    """Return the parameters that packing reads alone: weights of one linear layer, one embedding, or one of each."""
    users: dict[int, list[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(type(module))

    allowed = ([nn.Linear], [nn.Embedding], [nn.Embedding, nn.Linear], [nn.Linear, nn.Embedding])
    names = set()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter.shape[1] % GROUP == 0 and users[id(parameter)] in allowed:
            names.add(name)
    return names


def write_rows(tensors: list[RowTensor], model: PreTrainedModel, path: Path) -> str | None:
    """Write the tensors of a model as safetensors: tables in int8 as the kernels read them, all else in float32.

    Returns the digest of the tensors in float32, as `weights.hash_tensors` does for their files; None for
    numbers beyond the range of int8.
    """
    in_bytes = _names_in_bytes(model)
    header: dict[str, Any] = {}
    end = 0
    # Numbers of four bytes come first, so that they stay aligned.
    ordered = sorted(tensors, key=lambda tensor: tensor.name in in_bytes)
    for tensor in ordered:
        kind = "F32"
        shape = tensor.shape
        if tensor.name in in_bytes:
            kind = "U8"
            shape = (-(-shape[0] // LANES), shape[1], LANES + 1)
        size = int(np.prod(shape)) * (1 if kind == "U8" else 4)
        header[tensor.name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    exact: dict[str, list[Any]] = {}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            total = hashlib.sha256()
            for rows in tensor.rows():
                total.update(rows.numpy().data)
                written = rows
                if tensor.name in in_bytes:
                    written = pack_weights(rows, torch.int8)
                    if written.dtype is not torch.uint8:
                        return None
                written.numpy().tofile(file)
            exact[tensor.name] = ["F32", list(tensor.shape), total.hexdigest()]
    return digest(exact)


class WithoutMemory(TorchFunctionMode):
    """Layers that are made have weights without memory; what is computed, such as rotations, is computed."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def load_rows(name: str, folder: Path, file: Path) -> PreTrainedModel:
    """Load the model `name` from its folder and a file of `write_rows`, frozen and in evaluation mode.

    Tables in int8 stay in the file until they are packed. Raises KvatlasError for faulty weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with refusal(f"The weights of the model {name!r} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with WithoutMemory():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
        loaded: dict[int, nn.Parameter] = {}
        for key, parameter in model.named_parameters():
            offset = 8 + length + header[key]["data_offsets"][0]
            if header[key]["dtype"] == "U8":
                loaded[id(parameter)] = WeightInBytes.at(file, offset, parameter.shape)
            else:
                numbers = np.fromfile(file, np.float32, parameter.numel(), offset=offset).reshape(parameter.shape)
                loaded[id(parameter)] = nn.Parameter(torch.from_numpy(numbers), requires_grad=False)
        for module in model.modules():
            for key, empty in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, key, loaded[id(empty)])

    model = model.eval()
    check_finite(name, model)
    return model
