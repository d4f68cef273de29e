"""A Hugging Face model: facts known before its weights are loaded, and loading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.answers.reading import HARMONY, NEXT_MESSAGE
from kvatlas.core import KvatlasError, Shape, Storage
from kvatlas.cpu import native
from kvatlas.hub import Repository, is_id
from kvatlas.machine import cache_folder
from kvatlas.models import weights
from kvatlas.models.chat import Chat
from kvatlas.models.files import CACHED_KINDS, Overrides
from kvatlas.models.load_options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The files to fetch for planning, and those for decoding.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", f"{weights.SUBFOLDER}/*.safetensors", "dynts.safetensors")
WEIGHTS = ("model*.safetensors",)
#: Bytes of weights from which processes share them; smaller ones load as fast without a file.
SHARED_FROM = 64 * 2**20
#: The random streams of the published figures of the embedded models, by the beginning of their digests.
_STREAMS = {"7b234a9900dd8837": "3778a6a33c7d9d616c9b5765295eb7b57ed2bc14eb9495a8d8af9e87082b31dd"}


class ModelHandle(Chat):
    """A causal language model under the user's `name`: its files, its chat, and the form in which it runs."""

    def __getstate__(self) -> Mapping[str, Any]:
        # Workers read tokenizers again. The type is fixed, since workers may have other devices.
        state = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "overrides"}
        state["options"] = replace(self.options, dtype=self.dtype)
        # Weights that were packed under this digest are not hashed again by each worker.
        if "weights_digest" in vars(self):
            state["weights_digest"] = self.weights_digest
        return state

    def keep_shape(self, shape: Shape) -> None:
        """Keep the shape that was measured on the loaded model: config.json may differ."""
        self.shape = shape

    @cached_property
    def device(self) -> str:
        return self.options.resolved_device()

    @cached_property
    def dtype(self) -> str:
        """The name of the type in which it computes: part of the run key."""
        if self.options.dtype != "auto":
            return self.options.dtype
        if self.device == "cpu":
            return "float32"
        stored = str(self.stored_dtype)
        return stored if stored in ("float32", "float16", "bfloat16") else "bfloat16"

    @property
    def precision(self) -> str:
        """The name of the type of the weights of its linear layers, to which all that enters them is rounded."""
        return self.dtype if self.options.weights == "auto" else self.options.weights

    @property
    def kv_dtype(self) -> str:
        """The name of the type of cached keys and values: bfloat16 beside linear layers in bfloat16 or int8."""
        return self.dtype if self.precision == self.dtype else "bfloat16"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, in the type in which they are cached."""
        return self.kv_bytes(Storage())[0]

    def kv_bytes(self, storage: Storage) -> tuple[int, int]:
        """Return the bytes of keys and values of each token, and of each sequence besides."""
        token_bytes, _ = self.shape.kv_bytes(storage, 4 if self.kv_dtype == "float32" else 2)
        # The newest tokens of packed pools are in the type in which the model computes.
        _, sequence_bytes = self.shape.kv_bytes(storage, 4 if self.dtype == "float32" else 2)
        return token_bytes, sequence_bytes

    @cached_property
    def weight_bytes(self) -> int | None:
        """Bytes of the weights in the type in which they run, from the sizes of their files; None if unknown."""
        numbers = self.count_weights()
        if numbers is None:
            return None
        if self.precision == self.dtype:
            return numbers * (4 if self.dtype == "float32" else 2)
        if self.precision == "int8":
            # A byte for each, and two for the scale of 32.
            return numbers * 17 // 16
        # An embedding of its own is no linear layer, and stays in fp32.
        is_shared = self.config.get("tie_word_embeddings")
        embedded = 0 if is_shared else self.vocabulary * int(self.config.get("hidden_size", 0))
        return 2 * (numbers - embedded) + 4 * embedded

    @property
    def stream(self) -> str:
        """The name of the random streams: the digest of the weights, except for models with published figures."""
        return _STREAMS.get(self.weights_digest[:16], self.weights_digest)

    def check(self) -> None:
        """Raise KvatlasError for every fault that can be found before the weights are loaded."""
        # Checks without imports come first, so that a wrong folder is reported at once.
        self.check_weights()
        if self.options.adapter:
            self.adapter.terms()
        self.check_type()
        _ = self.shape
        self.options.resolved_device()
        self._check_short_weights()
        self.check_chat()

    def _check_short_weights(self) -> None:
        """Raise KvatlasError if the option `weights` asks for what only native kernels can do, and they cannot."""
        if self.in_bytes and self.precision != "int8":
            raise KvatlasError(
                f"The folder {str(self.folder)!r} has the weights of a GGUF in int8 alone; expected the model option "
                "weights=int8, or the GGUF as the model."
            )
        if self.in_bytes and self.options.adapter:
            raise KvatlasError(
                f"The folder {str(self.folder)!r} has the weights of a GGUF in int8 alone, to which no adapter is "
                "added; expected the GGUF as the model."
            )
        if self.precision == self.dtype:
            return
        if self.device != "cpu" or self.dtype != "float32":
            raise KvatlasError(
                f"The model option weights is {self.options.weights!r}, for {self.dtype} on {self.device}; expected "
                "float32 on cpu. (dtype=bfloat16 has the whole model in that type.)"
            )
        if native.load() is None:
            raise KvatlasError(f"The model option weights is {self.options.weights!r}. {native.why_not()}")

    @property
    def notes(self) -> list[str]:
        """Notes for the user: layers without a cache, a template with a date, fewer positions, no think tags."""
        notes = []
        kinds = self.config.get("layer_types") or ()
        without = sum(kind not in CACHED_KINDS for kind in kinds)
        if without:
            notes.append(
                f"{without} of the {len(kinds)} layers of the model {self.name!r} have no KV cache: compressions act "
                f"on the other {len(kinds) - without}."
            )

        if self.asks_for_date:
            notes.append(
                f"The chat template of the model {self.name!r} asks for the date: it is told {self.options.date} every "
                "day, so that prompts stay the same (the option date sets another)."
            )

        if self.steady_positions is not None:
            notes.append(
                f"Beyond {self.steady_positions} positions the model {self.name!r} rotates a whole text by other "
                "factors: prompt and new tokens together are at most as many here."
            )

        if not self.thinking.close and self.options.think_close is None:
            notes.append(
                f"The model {self.name!r} has no think tags: its whole output is its answer (if a text ends its "
                "thinking, name it with think_close). For compressions all of it is thinking: ratio_over thinking and "
                "budget_over thinking count all new tokens."
            )
        return notes

    def load(self) -> PreTrainedModel:
        """Load the weights (frozen, evaluation mode, on the device); weights on the hub are fetched first.

        Raises KvatlasError if they do not fit, are faulty, or cannot have the type of the option `weights` here.
        """
        import torch

        from kvatlas.cpu.packing import pack_model
        from kvatlas.cpu.shared_weights import PackedTables, WeightsFile

        # Workers on other machines, and callers that check nothing, would take them in fp32.
        self._check_short_weights()
        weights.check_fits(self.name, self.weight_bytes, self.device)

        # Half precision has no kernels of its own.
        packed_dtype = getattr(torch, self.precision) if self.precision in ("bfloat16", "int8") else torch.float32
        if self.shares_weights:
            sources = [self._fetched_folder()]
            if self.adapter.address:
                sources.append(self.adapter.folder)
            home = Path(self.options.cache).expanduser() if self.options.cache else cache_folder()

            def load(read: bool) -> PreTrainedModel:
                if read and replace(self).weights_digest != self.weights_digest:
                    raise KvatlasError(f"The weights of the model {self.name!r} were changed meanwhile; start again.")
                # What is read is packed, and what is packed is freed.
                return self.load_unpacked(read, mapped=not read)

            return WeightsFile(home, sources, self.weights_digest, packed_dtype, load, pack_model).model()
        model = self.load_unpacked()
        pack_model(model, PackedTables(packed_dtype))
        return model

    def load_unpacked(self, read: bool = True, mapped: bool = True) -> PreTrainedModel:
        """Load the weights as transformers has them, in `dtype`, or as a GGUF was written in int8.

        Without `read` no weight is read, only mapped. Weights that are not `mapped` have memory of their own, which
        packing frees one by one.
        """
        if self.in_bytes:
            from kvatlas.models.gguf_rows import load_rows

            self.check_written()
            return load_rows(self.name, self.folder, *self.weight_files())
        folder = self._fetched_folder()
        model = weights.load_weights(self.name, folder, self.dtype, self.device, check=read, mapped=mapped)
        # Unless they are read, other weights will replace those of the model.
        if read:
            self.adapter.merge(self.name, model)
        return model

    def _fetched_folder(self) -> Path:
        """Return the folder with the weights, which are fetched if they are on the hub."""
        if self.repository is None or self.weight_files():
            return self.folder
        promised = self.weights_digest
        folder = self.repository.folder((*SMALL_FILES, *WEIGHTS), show=True)
        # So far the digest is what the hub said of its files.
        if replace(self, folder=folder).hash_files() != promised:
            raise KvatlasError(
                f"The files of the model {self.name!r} in {str(folder)!r} are not those that the hub names; delete "
                "that folder, and they are fetched again."
            )
        return folder

    @property
    def shares_weights(self) -> bool:
        """True if all processes of this machine map one file with the packed weights."""
        if self.device != "cpu" or self.dtype != "float32" or self.config.get("quantization_config"):
            return False
        return (self.weight_bytes or 0) >= SHARED_FROM and native.load() is not None

    def split(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the end of thinking and the start of the answer in `tokens`; None if thinking does not end."""
        if self.think_close is None:
            return self.thinking.split(tokens)
        return next(((i, i + 1) for i, token in enumerate(tokens) if token == self.think_close), None)

    def thinking_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens before the end of thinking if the newest token completes it, else None."""
        if self.think_close is None:
            return self.thinking.before(self.thinking.close, tokens, len(tokens))
        return len(tokens) - 1 if tokens[-1] == self.think_close else None

    def thinking_start(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the beginning of thinking, 0 if the prompt opens it.

        None if it is not open yet, or began before the newest token.
        """
        if self.opens_thinking or not self.thinking.open:
            return None if tokens else 0
        if not tokens or self.thinking.before(self.thinking.open, tokens, len(tokens)) is None:
            return None
        return len(tokens)

    @cached_property
    def closing_tokens(self) -> tuple[int, ...]:
        """The tokens that end thinking where a cap does; empty without think tags."""
        if self.think_close is not None:
            return (self.think_close,) if self.think_close >= 0 else ()
        is_channel = (self.thinking.open, self.thinking.close) == HARMONY
        return self.tokens(f"{NEXT_MESSAGE if is_channel else ''}{self.thinking.close}")

    def thinking_tokens(self, tokens: Sequence[int], end: int | None) -> int:
        """Return the number of thinking tokens: `end`, or without an end all if thinking was opened, else 0."""
        if end is not None:
            return end
        # If the prompt opens it, without the text: a model for measurements may have no tokenizer.
        is_thinking = self.opens_thinking or self.tags.leaves_open(self.text(tokens))
        return len(tokens) if is_thinking else 0


def handle_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stops: frozenset[int], **options: Any
) -> ModelHandle:
    """Return the handle of a loaded model; `stops` are the tokens that end a trace.

    Without a `tokenizer` it is read from the origin of the weights. Raises KvatlasError if that is neither a folder nor
    a repository in the cache (a policy has to know how thinking ends), and for weights on several devices.
    """
    name = str(model.config.name_or_path)
    weights.check_one_device(name, model)
    folder = Path(name)
    if not (folder / "config.json").is_file() and is_id(name):
        folder = Repository(name).cached() or folder
    loaded = Overrides(
        config=model.config.get_text_config().to_dict(),
        tokenizer=tokenizer,
        stops=stops,
        dtype=str(model.dtype).removeprefix("torch."),
    )

    chosen = Options.from_values({**options, "device": str(model.device)})
    handle = ModelHandle(name, folder, chosen, overrides=loaded)
    if tokenizer is None and not (folder / "tokenizer_config.json").is_file():
        raise KvatlasError(f"The model {name!r} was not loaded from a folder: its tokenizer has to be given.")
    handle.check_type()
    return handle
