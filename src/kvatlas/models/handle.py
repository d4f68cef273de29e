"""A Hugging Face model: facts known before its weights are loaded, and loading them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.benchmarks.reading import Tags, read_tokens
from kvatlas.core import KvatlasError, Storage, digest, reason, refusal
from kvatlas.hub import Repository, is_id
from kvatlas.models import weights
from kvatlas.models.options import OWN_VALUES, Options
from kvatlas.models.thinking import Thinking, thinking

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The files to fetch for planning, and those for decoding.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "dynts.safetensors")
WEIGHTS = ("model*.safetensors",)
#: Messages of `role`, `content` and further fields of a chat template; further values for it.
Messages = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Entries of a config about the program that wrote it, and not about the model.
_WRITER = ("transformers_version", "_name_or_path")
#: The random streams of the published figures of the embedded models, by the beginning of their digests.
_STREAMS = {
    "7b234a9900dd8837": "3778a6a33c7d9d616c9b5765295eb7b57ed2bc14eb9495a8d8af9e87082b31dd",
}
#: More layers are a mistake in config.json, and planning would list them all.
MAX_LAYERS = 10_000
#: Kinds of layers that the engine decodes: with a KV cache, with a state, or with neither.
_CACHED = ("full_attention", "sliding_attention", "attention", "hybrid")
_LAYERS = (*_CACHED, "linear_attention", "conv", "mamba", "moe", "mlp")
#: Rotations of positions with frequencies that do not depend on the length of the text.
STEADY = ("default", "linear", "llama3", "yarn", "proportional")


class CachedLayer(NamedTuple):
    """A layer with a KV cache: its number in the model, and the sizes of a head's key and value."""

    number: int
    key: int
    value: int


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the memory of a cached token.

    `layers` counts the layers with a KV cache, `head_dim` is the size of their keys: those of config.json until the
    model is loaded, then the true ones. `by_layer` are the cached layers if they are not all alike, `state_bytes` is
    the size of the states of one row.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    by_layer: tuple[CachedLayer, ...] = ()
    state_bytes: int = 0

    @cached_property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """The layers with a KV cache, in order."""
        return self.by_layer or tuple(CachedLayer(n, self.head_dim, self.head_dim) for n in range(self.layers))

    @cached_property
    def place(self) -> dict[int, int]:
        """The place of each cached layer in the cache, by its number in the model."""
        return {layer.number: place for place, layer in enumerate(self.cached_layers)}

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        """Return the bytes of keys and values of one token over all layers and heads."""
        return self.kv_bytes(Storage(), bytes_per_value)[0]

    def kv_bytes(self, storage: Storage, bytes_per_value: int = 4) -> tuple[int, int]:
        """Return the bytes of keys and values over all layers and heads: of each token, and of each sequence besides.

        The latter are the unpacked copies of its newest tokens.
        """
        token = sequence = 0
        for layer in self.cached_layers:
            for size, bits in ((layer.key, storage.key_bits), (layer.value, storage.value_bits)):
                packed = bits < 16
                token += storage.row_bytes(bits, size) if packed else size * bytes_per_value
                sequence += storage.residual * size * bytes_per_value if packed else 0
        return self.kv_heads * token, self.kv_heads * sequence


@dataclass(frozen=True)
class ModelHandle:
    """A causal language model with its tokenizer, chat template and think tags.

    `name` is the user's name for it. `folder` holds its small files, and its weights unless they come from
    `repository`, from which they are fetched when they are loaded.
    """

    name: str
    folder: Path
    options: Options = field(default_factory=Options)
    repository: Repository | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        # Workers read tokenizers and digests again. The type is fixed, since workers may have other devices.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**state, "options": replace(self.options, dtype=self.dtype)}

    @property
    def adapter(self) -> weights.Adapter:
        return weights.Adapter(self.options.adapter)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; of a multimodal model the part about text."""
        config = self._read("config.json")
        text = config.get("text_config")
        return {**config, **text, "model_type": config.get("model_type")} if isinstance(text, dict) else config

    def _read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file of the folder, without the entries about the program that wrote it."""

        def plain(content: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in content.items() if key not in _WRITER}

        try:
            return plain(json.loads((self.folder / name).read_text("utf-8"), object_hook=plain))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise KvatlasError(f"The model {self.name!r} has no readable {name} ({reason(error)}).") from error

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """config.json with the defaults of its model type."""
        from transformers import AutoConfig

        defaults: dict[str, Any] = {}
        with suppress(KvatlasError), refusal(""):
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
            text = config.get_text_config()
            # Some types have other names for these.
            defaults = {name: getattr(text, name, None) for name in _SIZES} | text.to_dict()
        return {**defaults, **self.config}

    @cached_property
    def shape(self) -> Shape:
        config = self.config if all(self.config.get(name) for name in _SIZES) else self._settings

        def size(name: str, default: int | None = None) -> int:
            value = config.get(name) if default is None else config.get(name) or default
            if value is None:
                raise KvatlasError(f"The config.json of the model {self.name!r} lacks {name!r}.")
            if type(value) is not int or value < 1:
                raise KvatlasError(f"The model {self.name!r} has {name} {value!r}; expected an integer >= 1.")
            return value

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", hidden // heads)
        layers: Sequence[int] = range(size("num_hidden_layers"))
        if len(layers) > MAX_LAYERS:
            raise KvatlasError(
                f"The model {self.name!r} has num_hidden_layers {len(layers)}; expected at most {MAX_LAYERS:,}."
            )
        kinds = config.get("layer_types")
        if isinstance(kinds, list) and set(kinds) - set(_CACHED):
            layers = [number for number, kind in enumerate(kinds) if kind in _CACHED]
        own = tuple(CachedLayer(number, head_dim, head_dim) for number in layers)
        return Shape(len(own), heads, kv_heads, head_dim, hidden, own)

    @property
    def positions(self) -> int | None:
        """The number of positions that the model supports with one rotation for all lengths; None if unknown."""
        limits = self.config.get("max_position_embeddings"), self.steady_positions
        return min((limit for limit in limits if isinstance(limit, int)), default=None)

    @property
    def steady_positions(self) -> int | None:
        """The longest text with a rotation that does not depend on the length (dynamic, longrope); None for any."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
        if all((part.get("rope_type") or part.get("type") or "default") in STEADY for part in parts):
            return None
        names = "original_max_position_embeddings", "max_position_embeddings"
        limits = [part.get(name) for part in (self._settings, *parts) for name in names]
        return min((limit for limit in limits if isinstance(limit, int)), default=0)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get("vocab_size") or self._settings["vocab_size"])

    @cached_property
    def device(self) -> str:
        return self.options.resolved_device()

    @property
    def _own_dtype(self) -> str | None:
        return self.config.get("dtype") or self.config.get("torch_dtype")

    @cached_property
    def dtype(self) -> str:
        """The name of the type of its weights and its cache: part of the run key."""
        if self.options.dtype != "auto":
            return self.options.dtype
        if self.device == "cpu":
            return "float32"
        own = str(self._own_dtype)
        return own if own in ("float32", "float16", "bfloat16") else "bfloat16"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, in the type in which the model runs."""
        return self.kv_bytes(Storage())[0]

    def kv_bytes(self, storage: Storage) -> tuple[int, int]:
        """Return the bytes of keys and values of each token, and of each sequence besides."""
        return self.shape.kv_bytes(storage, 4 if self.dtype == "float32" else 2)

    @cached_property
    def weight_bytes(self) -> int | None:
        """Bytes of the weights in the type in which they run, from the sizes of their files; None if unknown."""
        size = sum(path.stat().st_size for path in self._weight_files()) or self._index()[1]
        # Quantised weights may be turned into floating-point numbers or not.
        if size is None or self.config.get("quantization_config"):
            return None
        stored = str(self._own_dtype or "float32")
        return size * (4 if self.dtype == "float32" else 2) // (4 if stored == "float32" else 2)

    def check(self) -> None:
        """Raise KvatlasError for every fault that can be found before the weights are loaded."""
        # Checks without imports come first, so that a wrong folder is reported at once.
        self._check_weights()
        self.adapter.check()
        self.check_type()
        _ = self.shape, self.device, self.tokenizer, self.thinking, self.stops
        text, again = (self.rendered([{"role": "user", "content": "x"}]) for _ in range(2))
        # Addresses of objects and random words may repeat in one process, but not in the next.
        unread = [name for name, _ in self.options.template_values if name not in self.template_variables]
        if unread:
            read = ", ".join(sorted(self.template_variables)) or "none"
            raise KvatlasError(
                f"The chat template of the model {self.name!r} does not read {unread[0]!r} of template_values; it "
                f"reads {read}."
            )
        varies = text != again or " at 0x" in text or _RANDOM.search(self._template)
        if varies or not text.strip():
            fault = "another prompt each time" if varies else "an empty prompt"
            raise KvatlasError(f"The chat template of the model {self.name!r} renders {fault}.")

    def check_type(self) -> None:
        """Raise KvatlasError for model types and layers that the engine cannot decode."""
        config = self.config
        kind = str(config.get("model_type"))
        if not weights.is_known(kind):
            raise KvatlasError(
                f"The model {self.name!r} has the unknown model type {kind!r}; expected causal language models of the "
                "installed transformers (code that comes with a model is never run)."
            )
        others = set(config.get("layer_types") or ()) - set(_LAYERS)
        if others:
            raise KvatlasError(
                f"The model {self.name!r} has {min(others)} layers; expected layers that attend to all earlier tokens "
                "or to a sliding window, or that keep a state."
            )

    def _check_weights(self) -> None:
        if self.repository is None and not self._weight_files():
            raise self._no_weights

    @property
    def _no_weights(self) -> KvatlasError:
        return KvatlasError(
            f"The model {self.name!r} has no weights: {_WHOLE} is missing, and so is {_INDEX}. No other format is "
            "read (pickled weights can run code; convert them to safetensors)."
        )

    def _weight_files(self) -> list[Path]:
        """Return the local safetensors that are loaded. Raises KvatlasError if one that the index names is missing."""
        present = {path.name for path in self.folder.glob("*")}
        names = self._weight_names(present)
        missing = [name for name in names if name not in present]
        if missing and self.repository is None:
            raise KvatlasError(f"The model {self.name!r} lacks {len(missing)} of its weight files: {missing[0]}.")
        return [self.folder / name for name in names] if not missing else []

    def _weight_names(self, present: Collection[str]) -> list[str]:
        """Return the weight files that transformers loads: a whole one if it is `present`, else those of the index."""
        names, _ = self._index()
        return [_WHOLE] if _WHOLE in present else sorted(names or ())

    def _index(self) -> tuple[set[str] | None, int | None]:
        """Return the weight files that the index names, and their bytes; None without an index."""
        try:
            content = json.loads((self.folder / _INDEX).read_text("utf-8"))
            return set(map(str, content["weight_map"].values())), int(content.get("metadata", {}).get("total_size", 0))
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            where = f"The weight index of the model {self.name!r}"
            raise KvatlasError(f"{where} cannot be read ({reason(error)}).") from error

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 over config and tensors, whatever the names of files: part of the run key.

        For a model on the hub it is that of the files, since weights are not fetched for it.
        """
        if self.repository is not None:
            return self.files_digest
        self._check_weights()
        tensors = weights.tensors_digest(self._weight_files())
        return digest({"config": self._read("config.json"), "tensors": tensors, "adapter": self.adapter.content()})

    @property
    def stream(self) -> str:
        """The name of the random streams: the digest of the weights, except for models with published figures."""
        return _STREAMS.get(self.weights_digest[:16], self.weights_digest)

    @cached_property
    def files_digest(self) -> str:
        """SHA-256 over the files of config and weights: the key of a model in earlier versions."""
        sums = {path.name: weights.sha256(path) for path in self._weight_files()}
        if not sums and self.repository is not None:
            files = self.repository.files()
            sums = {name: files[name] for name in self._weight_names(files) if name in files}
            if not sums:
                raise self._no_weights
        config = weights.sha256(self.folder / "config.json")
        return weights.combined({"config.json": config, **sums, **self.adapter.digests()})

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 over the loaded tokenizer, whatever its files, and its template: part of the run key."""
        return digest([_encoding(self.tokenizer), self._special, self._template])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded from the folder alone, never from the network."""
        from transformers import AutoTokenizer

        with refusal(f"The tokenizer of the model {self.name!r} cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        for path in self.adapter.templates.values():
            tokenizer.chat_template = path.read_text("utf-8")
        if self.options.template:
            file = Path(self.options.template).expanduser()
            try:
                if file.exists() and not file.is_file():
                    raise OSError("it is no regular file")
                tokenizer.chat_template = file.read_text("utf-8")
            except (OSError, ValueError) as error:
                raise KvatlasError(f"template: {self.options.template!r} cannot be read ({reason(error)}).") from error
        if not tokenizer.chat_template:
            raise KvatlasError(
                f"The tokenizer of the model {self.name!r} has no chat template; give a Jinja file with --template, or "
                "the model option template."
            )
        return tokenizer

    @cached_property
    def thinking(self) -> Thinking:
        return thinking(self.tokenizer, self.options.think_close)

    @property
    def notes(self) -> list[str]:
        """Notes for the user: layers without a cache, a template with a date, fewer positions, no think tags."""
        notes = []
        kinds = self.config.get("layer_types") or ()
        if without := sum(kind not in _CACHED for kind in kinds):
            notes.append(
                f"{without} of the {len(kinds)} layers of the model {self.name!r} have no KV cache: compressions act "
                f"on the other {len(kinds) - without}."
            )
        if "strftime_now" in self._template:
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
                "thinking, name it with think_close)."
            )
        return notes

    @cached_property
    def think_close(self) -> int | None:
        """The id of the token that ends thinking; None if several tokens end it, -1 if there are no think tags."""
        return self.thinking.token if self.thinking.close else -1

    def thinking_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens before the end of thinking if the newest token completes it, else None."""
        if self.think_close is None:
            return self.thinking.end(tokens)
        return len(tokens) - 1 if tokens[-1] == self.think_close else None

    def split(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the end of thinking and the start of the answer in `tokens`; None if thinking does not end."""
        if self.think_close is None:
            return self.thinking.split(tokens)
        return next(((i, i + 1) for i, token in enumerate(tokens) if token == self.think_close), None)

    @cached_property
    def opens_thinking(self) -> bool:
        """True if the prompt itself opens thinking."""
        opening = self.thinking.open
        return bool(opening) and self.prompt("x").rstrip().endswith(opening)

    @property
    def tags(self) -> Tags:
        """The think tags, with which texts of the model are read."""
        return Tags(self.thinking.open, self.thinking.close, self.opens_thinking)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids of the tokens that end a trace: the generation config's, else the tokenizer's."""
        name = "generation_config.json"
        ends = self._read(name).get("eos_token_id") if (self.folder / name).is_file() else None
        ends = self.tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise KvatlasError(f"The model {self.name!r} names no end-of-text token (eos_token_id).")
        stops = ends if isinstance(ends, list) else [ends]
        if not stops or any(type(token) is not int for token in stops):
            raise KvatlasError(f"The model {self.name!r} has eos_token_id {ends!r}; expected token ids.")
        return frozenset(stops)

    def prompt(self, message: str) -> str:
        """Return one user message through the chat template, up to where the model begins to write."""
        return self.conversation([{"role": "user", "content": message}])

    def conversation(self, messages: Messages, values: Values | None = None) -> str:
        """Return the prompt of several messages, with further `values` for the template."""
        if self.options.system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        text, opening = self.rendered(messages, values=values), self.options.think_open
        return text if not opening or text.endswith(opening) else f"{text}{opening}"

    def rendered(self, messages: Messages, *, answering: bool = True, values: Values | None = None) -> str:
        """Render messages by the chat template in Jinja's sandbox, up to where an answer begins if `answering`.

        Raises KvatlasError if the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        defaults = {
            "tools": None,
            "strftime_now": date.fromisoformat(self.options.date).strftime,
            **self.tokenizer.special_tokens_map,
            **dict(self.options.template_values),
        }
        own = {"messages": messages, "documents": None, "add_generation_prompt": answering}
        try:
            return str(_compile_jinja_template(self._template).render({**defaults, **(values or {}), **own}))
        # A template may raise anything.
        except Exception as error:
            raise KvatlasError(
                f"The chat template of {self.name!r} refuses these messages ({reason(error)})."
            ) from error

    @cached_property
    def prompt_identity(self) -> dict[str, Any]:
        """All that decides the prompt of messages, besides the tokenizer: part of the run key."""
        date = self.options.date if "strftime_now" in self._template else None
        # Without a system message and values of one's own the keys of earlier runs stay.
        system = {"system": self.options.system} if self.options.system else {}
        values = {"values": dict(self.options.template_values)} if self.options.template_values else {}
        opening = self.options.think_open
        own = {"template": self._template, "special": self._special, "date": date, "opening": opening}
        return {**own, **system, **values}

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads and that template_values can set."""
        from jinja2 import TemplateError, meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            environment = _compile_jinja_template(self._template).environment
            names = meta.find_undeclared_variables(environment.parse(self._template))
        except TemplateError as error:
            raise KvatlasError(f"The chat template of {self.name!r} cannot be read ({reason(error)}).") from error
        return frozenset(names - {*OWN_VALUES, *self.tokenizer.special_tokens_map, *environment.globals})

    @property
    def _special(self) -> dict[str, str]:
        return {name: str(text) for name, text in self.tokenizer.special_tokens_map.items()}

    @cached_property
    def _template(self) -> str:
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError as error:
            raise KvatlasError(f"The tokenizer of the model {self.name!r} has no default chat template.") from error

    def encode(self, message: str) -> tuple[int, ...]:
        return self.tokens(self.prompt(message))

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without chat template and special tokens."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(i) for i in ids)

    def reads(self, text: str) -> bool:
        """Return True if a text is the same after encoding and decoding, apart from case and spaces."""
        # Not `tokens`, which warns of texts that are longer than the context.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        back = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return "".join(back.casefold().split()) == "".join(text.casefold().split())

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of new tokens without the end token."""
        visible = tokens[:-1] if tokens and tokens[-1] in self.stops else tokens
        return str(self.tokenizer.decode(list(visible), skip_special_tokens=False))

    def answer(self, tokens: Sequence[int]) -> str | None:
        """Return the text after the end of thinking; None if thinking does not end.

        If neither the prompt nor the model opened thinking, the whole trace is an answer.
        """
        return read_tokens(self, tokens).answer

    def thinking_tokens(self, tokens: Sequence[int], end: int | None) -> int:
        """Return the number of thinking tokens: `end`, or without an end all if thinking was opened, else 0."""
        if end is not None:
            return end
        return len(tokens) if self.tags.leaves_open(self.text(tokens)) else 0

    def load(self) -> PreTrainedModel:
        """Load the weights (frozen, evaluation mode, on the device); weights on the hub are fetched first."""
        from kvatlas.models.packing import pack

        folder = self.folder
        weights.check_fits(self.name, self.weight_bytes, self.device)
        if self.repository is not None and not self._weight_files():
            folder = self.repository.folder((*SMALL_FILES, *WEIGHTS), show=True)
        model = weights.load_weights(self.name, folder, self.dtype, self.device)
        self.adapter.merge(self.name, model)
        pack(model)
        return model


def handle_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stops: frozenset[int], **options: Any
) -> ModelHandle:
    """Return the handle of a loaded model; `stops` are the tokens that end a trace.

    Without a `tokenizer` it is read from the origin of the weights. Raises KvatlasError if that is neither a folder nor
    a repository in the cache (a policy has to know how thinking ends), and for weights on several devices.
    """
    name = str(model.config.name_or_path)
    weights.check_whole(name, model)
    folder = Path(name)
    if not (folder / "config.json").is_file() and is_id(name):
        folder = Repository(name).cached() or folder
    handle = ModelHandle(name, folder, Options.of({**options, "device": str(model.device)}))
    vars(handle).update(
        config=model.config.get_text_config().to_dict(), stops=stops, dtype=str(model.dtype).removeprefix("torch.")
    )
    if tokenizer is not None:
        vars(handle)["tokenizer"] = tokenizer
    elif not (folder / "tokenizer_config.json").is_file():
        raise KvatlasError(f"The model {name!r} was not loaded from a folder: its tokenizer has to be given.")
    handle.check_type()
    return handle


def _encoding(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return all that changes how a tokenizer encodes and decodes, as plain data."""
    plain = [getattr(tokenizer, name, None) for name in ("clean_up_tokenization_spaces", "split_special_tokens")]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Each call sets truncation and padding.
        return [{**json.loads(backend.to_str()), "truncation": None, "padding": None}, *plain]
    with TemporaryDirectory() as folder:
        vocabulary = sorted(weights.sha256(Path(file)) for file in tokenizer.save_vocabulary(folder))
    added = {token: repr(text) for token, text in tokenizer.added_tokens_decoder.items()}
    values = {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool | int | float)}
    return [type(tokenizer).__name__, vocabulary, added, values, *plain]
