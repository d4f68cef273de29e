"""Weights: loading with checks that every tensor exists and is finite; LoRA adapters; digests of files and tensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvatlas.core import KvatlasError, digest, refusal
from kvatlas.machine import free_memory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

#: Bytes to read at a time.
_CHUNK = 2**20
#: The longest header of a safetensors file, in bytes.
_HEADER = 100_000_000
#: Errors of reading a file of another form.
_READING_FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError)
#: The files of an adapter, and its chat template, which replaces the model's own.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TEMPLATE = "chat_template.jinja"
#: The subfolder for heads and statistics of policies: engines that load every safetensors file of a model's folder
#: would take them for weights.
SUBFOLDER = "kvatlas"
#: The file of a converted GGUF that lists its files with their sizes; written last.
CONVERTED = "converted.json"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(\.default)?\.weight")
#: Entries that change the formula of an adapter, with their supported values.
_PLAIN_ADAPTER: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    # Other starts take their tensors out of the model's weights, which the adapter then replaces.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
#: Entries with any value: what the two numbers of the formula are, where an adapter acts, and how it was trained.
_FREE_ADAPTER = (
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "lora_dropout", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "peft_version", "megatron_config", "megatron_core"),
    *("eva_config", "qalora_group_size", "ensure_weight_tying"),
)


def load_weights(
    name: str, folder: Path, dtype: str, device: str, check: bool = True, mapped: bool = True
) -> PreTrainedModel:
    """Load the model `name` from its folder, frozen and in evaluation mode. Raises KvatlasError for faulty weights.

    Without `check` no weight is read: their files are mapped. Unless they may stay `mapped`, each weight has memory of
    its own, which is free as soon as the weight is replaced; a mapped file stays until its last weight is gone.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The report below replaces the table of transformers.
    logging.set_verbosity_error()
    # Its type does not cover the second result, the report.
    load: Any = AutoModelForCausalLM.from_pretrained
    model: PreTrainedModel

    with refusal(f"The weights of the model {name!r} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # A config.json may name repositories of kernels in these fields, which would be fetched and run.
        config._attn_implementation = config._experts_implementation = None
        # Another file of weights than the one in the run key.
        config.transformers_weights = None
        if not getattr(config, "quantization_config", None):
            _check_types(f"The weights of the model {name!r} have", sorted(folder.glob("*.safetensors")))
        with nullcontext() if mapped else _reading_weights():
            model, report = load(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )

    check_sizes(f"The weights of the model {name!r} hold", report["mismatched_keys"])
    missing = report["missing_keys"]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise KvatlasError(f"The weights of the model {name!r} lack the tensor {min(missing)!r}{more}.")
    model = model.to(device).eval().requires_grad_(False)
    if getattr(config, "quantization_config", None):
        # compressed-tensors unpacks weights in the first pass.
        with refusal(f"The weights of the model {name!r} cannot be unpacked"), torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    if check:
        check_finite(name, model)
    return model


def check_sizes(subject: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise KvatlasError for the first tensor of transformers' report whose sizes are not those of the config."""
    for tensor, stored, expected in sorted(mismatched):
        raise KvatlasError(
            f"{subject} the tensor {tensor!r} with the sizes {tuple(stored)}; its config has {tuple(expected)}."
        )


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of another package's module another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _reading_weights() -> AbstractContextManager[None]:
    """Let transformers read weights one by one, as it does on systems without copies of mapped pages."""
    from safetensors import safe_open
    from transformers import modeling_utils

    def open_unmapped(file: Any, *_: Any, **options: Any) -> Any:
        return safe_open(file, **{**options, "framework": "pt", "backend": "pread"})

    return patched(modeling_utils, "safe_open", open_unmapped)


def _check_types(subject: str, files: Iterable[Path]) -> None:
    """Raise KvatlasError for weights that are no real numbers, which would be read as such; the `subject` has them."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118
                dtype = file.get_slice(tensor).get_dtype()
                if tensor.endswith(".weight") and not dtype.startswith(("F", "BF")):
                    raise KvatlasError(f"{subject} the tensor {tensor!r} in {dtype}; expected floating-point numbers.")


def check_fits(name: str, size: int | None, device: str) -> None:
    """Raise KvatlasError if weights of `size` bytes do not fit the free memory of a GPU."""
    if size is None or device == "cpu":
        return
    import torch

    free = free_memory(device)
    if free is not None and size > free:
        total = torch.cuda.get_device_properties(device).total_memory
        raise KvatlasError(
            f"The model {name!r} has {size / 2**30:.1f} GiB of weights, {device} has {free / 2**30:.1f} GiB free of "
            f"{total / 2**30:.1f}; expected models that fit one GPU (none is split over several) or device=cpu."
        )


def check_one_device(name: str, model: PreTrainedModel) -> None:
    """Raise KvatlasError if a model's weights lie on several devices, as with `device_map`."""
    places: dict[str, int] = {}
    for tensor in model.parameters():
        places[str(tensor.device)] = places.get(str(tensor.device), 0) + tensor.numel() * tensor.element_size()
    if len(places) > 1:
        where = ", ".join(f"{size / 2**30:.1f} GiB on {device}" for device, size in sorted(places.items()))
        raise KvatlasError(
            f"The weights of the model {name!r} lie on several devices ({where}); expected models on one device "
            "(load it without device_map, or with device_map='cuda:0')."
        )


def check_finite(name: str, model: PreTrainedModel) -> None:
    """Raise KvatlasError for a tensor with NaN or infinite values; packages' own types of tensors are not looked at."""
    import torch

    for key, tensor in model.state_dict().items():
        if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.numel():
            least, most = tensor.aminmax()
            if not (least.isfinite() and most.isfinite()):
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise KvatlasError(
                    f"The weights of the model {name!r} hold values in the tensor {key!r} that are no finite numbers "
                    f"in {dtype}."
                )


def check_numbers(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise KvatlasError, a sentence about the file that is its `subject`, for a tensor with NaN or infinite values."""
    for name, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise KvatlasError(f"{subject} holds values in the tensor {name!r} that are no finite numbers.")


def sha256(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensors(files: Iterable[Path]) -> str:
    """Return the SHA-256 over names, types, shapes and data of tensors, however they are split over safetensors files.

    Raises KvatlasError for another file.
    """
    tensors: dict[str, list[Any]] = {}
    for path in files:
        with refusal(f"The weight file {str(path)!r} is no safetensors file", *_READING_FAULTS):
            if not path.is_file():
                # A pipe would wait for its writer.
                raise OSError("it is no regular file")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _HEADER)))
                header.pop("__metadata__", None)
                for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                    begin, end = entry["data_offsets"]
                    file.seek(8 + length + begin)
                    tensors[name] = [entry["dtype"], entry["shape"], _hash_bytes(file, end - begin)]
    return digest(tensors)


def _hash_bytes(file: BinaryIO, count: int) -> str:
    """Return the SHA-256 of the next `count` bytes of a file, or of fewer at its end."""
    total = hashlib.sha256()
    while count > 0 and (chunk := file.read(min(count, _CHUNK))):
        total.update(chunk)
        count -= len(chunk)
    return total.hexdigest()


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter in a folder as peft writes it, to be added to the weights of a model; "" for no adapter.

    W + s B A with s = lora_alpha / r (Hu et al. 2021, arXiv 2106.09685, section 4.1), or lora_alpha / sqrt(r) with
    `use_rslora` (arXiv 2312.03732).
    """

    address: str

    @property
    def folder(self) -> Path:
        return Path(self.address).expanduser()

    def hash_files(self) -> dict[str, str]:
        """Return the SHA-256 of each file of the adapter by its name; empty for no adapter."""
        return {name: sha256(self.folder / name) for name in ADAPTER_FILES} if self.address else {}

    def hash_contents(self) -> list[Any]:
        """Return rank, factor and the SHA-256 of the tensors, all that changes the weights; empty for no adapter."""
        return [*self.terms(), hash_tensors([self.folder / ADAPTER_FILES[1]])] if self.address else []

    def terms(self) -> tuple[int, float]:
        """Return rank and factor. Raises KvatlasError for missing files and unsupported entries."""
        missing = [name for name in ADAPTER_FILES if not (self.folder / name).is_file()]
        if missing:
            raise KvatlasError(f"The adapter {self.address!r} lacks {missing[0]}; expected a folder of a LoRA adapter.")
        with refusal(f"The adapter {self.address!r} has no readable {ADAPTER_FILES[0]}", *_READING_FAULTS):
            config: dict[str, Any] = dict(json.loads((self.folder / ADAPTER_FILES[0]).read_text("utf-8")).items())
            rank = int(config["r"])
            alpha = float(config["lora_alpha"])

        # Entries that change the formula, by name, and further ones of later versions of peft unless they are empty.
        for name, values in _PLAIN_ADAPTER.items():
            if config.get(name, values[0]) not in values:
                raise KvatlasError(f"The adapter {self.address!r} has {name} {config[name]!r}; expected {values[0]!r}.")
        for name, value in config.items():
            if value and name not in _PLAIN_ADAPTER and name not in _FREE_ADAPTER:
                raise KvatlasError(f"The adapter {self.address!r} has {name} {value!r}; expected none.")
        if rank < 1:
            raise KvatlasError(f"The adapter {self.address!r} has r {rank}; expected an integer >= 1.")
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def merge(self, name: str, model: PreTrainedModel) -> None:
        """Add it to the weights of the model `name`. Raises KvatlasError if it belongs to another model."""
        if not self.address:
            return
        rank, factor = self.terms()
        weights = model.state_dict()
        for layer, a, b in self._pairs():
            weight = weights.get(f"{layer}.weight")
            if weight is None or (b.shape[1], a.shape[0]) != (rank, rank) or weight.shape != (b.shape[0], a.shape[1]):
                sizes = f"{tuple(b.shape)} and {tuple(a.shape)} with r {rank}"
                raise KvatlasError(f"The adapter {self.address!r} does not fit the model {name!r}: {layer!r}, {sizes}.")
            update = factor * (b @ a)
            if not update.isfinite().all():
                raise KvatlasError(
                    f"The adapter {self.address!r} holds values for {layer!r} that are no finite numbers."
                )
            weight.copy_(weight.float() + update.to(weight.device))
        check_finite(name, model)

    def _pairs(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return (layer, A, B) in single precision."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        with refusal(f"The adapter {self.address!r} has no readable {ADAPTER_FILES[1]}", OSError, SafetensorError):
            tensors = load_file(self.folder / ADAPTER_FILES[1])

        _check_types(f"The adapter {self.address!r} has", [self.folder / ADAPTER_FILES[1]])
        check_numbers(f"The adapter {self.address!r}", tensors)
        pairs: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            if match is None or tensor.dim() != 2 or match[2] in pairs.get(match[1], {}):
                raise KvatlasError(
                    f"The adapter {self.address!r} holds {key!r}; expected pairs of matrices, lora_A and lora_B."
                )
            pairs.setdefault(match[1], {})[match[2]] = tensor.float()
        whole = [(layer, pair["A"], pair["B"]) for layer, pair in pairs.items() if len(pair) == 2]
        if not whole or len(whole) < len(pairs):
            raise KvatlasError(f"The adapter {self.address!r} has no pairs of lora_A and lora_B, or half ones.")
        return whole
