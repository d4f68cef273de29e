"""The files of a model: what its config says, its weight files, and the digests of what is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from kvatlas.core import CachedLayer, KvatlasError, Shape, check_form, digest, refusal, refuse_pointer
from kvatlas.hub import Repository
from kvatlas.models import weights
from kvatlas.models.load_options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")
#: The entry of a config whose model has latent attention.
_LATENT = "kv_lora_rank"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Entries of a config about the program that wrote it, and not about the model.
_WRITER = ("transformers_version", "_name_or_path")
#: More layers are a mistake in config.json, and planning would list them all.
MAX_LAYERS = 10_000
#: Kinds of layers that the engine decodes: with a KV cache, with a state, or with neither.
CACHED_KINDS = ("full_attention", "sliding_attention", "attention", "hybrid")
_KINDS = (*CACHED_KINDS, "linear_attention", "conv", "mamba", "moe", "mlp")
#: Types of models whose keys have biases though their config does not say so.
BIASED = ("qwen2", "qwen2_moe")
#: Rotations of positions with frequencies that do not depend on the length of the text.
STEADY = ("default", "linear", "llama3", "yarn", "proportional")


class _Config(BaseModel, extra="allow", strict=True):
    """The entries of a config.json that are no numbers; sizes are read by `ModelFiles.shape`."""

    model_type: str | None = None
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Overrides:
    """Facts that replace those of a model's files, as for a model that is loaded already.

    With empty `stops` and the `think_close` -1 a trace ends at its limit alone, and is read as an answer.
    """

    config: Mapping[str, Any] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    stops: frozenset[int] | None = None
    think_close: int | None = None
    opens_thinking: bool | None = None
    dtype: str | None = None
    weight_bytes: int | None = None


#: A model that never ends a trace, nor its thinking: a trace goes on to its limit.
ENDLESS = Overrides(stops=frozenset(), think_close=-1)


# Not frozen: the shape is replaced by that of the loaded model. No field is ever set anew.
@dataclass(unsafe_hash=True)
class ModelFiles:
    """The files of the model `name`: the small ones in `folder`, and the weights unless a `repository` holds them.

    From a repository weights are fetched when they are loaded. `overrides` replace facts of the files.
    """

    name: str
    folder: Path
    options: Options = field(default_factory=Options)
    repository: Repository | None = None
    overrides: Overrides = field(default=Overrides(), kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Each stands where the cached property of its name would keep what it reads.
        vars(self).update({name: value for name, value in vars(self.overrides).items() if value is not None})

    @property
    def adapter(self) -> weights.Adapter:
        return weights.Adapter(self.options.adapter)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; of a multimodal model the part about text."""
        config = self.read_json("config.json")
        text = config.get("text_config")
        if isinstance(text, dict):
            config = {**config, **text, "model_type": config.get("model_type")}
        with refusal(f"The model {self.name!r} has no readable config.json"):
            check_form(_Config, config, "it")
        return config

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file of the folder, without the entries about the program that wrote it."""

        def plain(content: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in content.items() if key not in _WRITER}

        faults = (OSError, ValueError, AttributeError, RecursionError)
        with refusal(f"The model {self.name!r} has no readable {name}", *faults):
            return plain(json.loads((self.folder / name).read_text("utf-8"), object_hook=plain))

    @cached_property
    def complete_config(self) -> dict[str, Any]:
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
        """The sizes in config.json, or those that the engine measured on the loaded model.

        Raises KvatlasError for missing and impossible ones.
        """
        complete = all(self.config.get(name) for name in _SIZES) and not self.config.get(_LATENT)
        config = self.config if complete else self.complete_config
        heads = self._size(config, "num_attention_heads")
        hidden = self._size(config, "hidden_size")

        if config.get(_LATENT):
            # Keys and values of all heads are made of the latent ones before they are cached.
            kv_heads = heads
            head_dim = self._size(config, "qk_nope_head_dim") + self._size(config, "qk_rope_head_dim")
            value_dim = self._size(config, "v_head_dim", head_dim)
        else:
            kv_heads = self._size(config, "num_key_value_heads", heads)
            head_dim = value_dim = self._size(config, "head_dim", hidden // heads)

        count = self._size(config, "num_hidden_layers")
        if count > MAX_LAYERS:
            raise KvatlasError(
                f"The model {self.name!r} has num_hidden_layers {count}; expected at most {MAX_LAYERS:,}."
            )
        kinds = config.get("layer_types") or CACHED_KINDS[:1] * count
        numbers = [layer for layer, kind in enumerate(kinds) if kind in CACHED_KINDS]
        layers = tuple(CachedLayer(layer, head_dim, value_dim) for layer in numbers)

        biased = bool(config.get("attention_bias")) or config.get("model_type") in BIASED
        return Shape(len(layers), heads, kv_heads, head_dim, hidden, layers, key_biases=biased)

    def _size(self, config: Mapping[str, Any], name: str, default: int | None = None) -> int:
        """Return a size of a config. Raises KvatlasError unless it is an integer >= 1."""
        value = config.get(name)
        if default is not None:
            value = value or default
        if value is None:
            raise KvatlasError(
                f"The config.json of the model {self.name!r} (model_type {config.get('model_type')!r}) lacks {name!r}; "
                "expected that of a causal language model with attention: models that keep a state alone, as Mamba, "
                "have no KV cache."
            )
        if type(value) is not int or value < 1:
            raise KvatlasError(f"The model {self.name!r} has {name} {value!r}; expected an integer >= 1.")
        return value

    @property
    def positions(self) -> int | None:
        """The number of positions that the model supports with one rotation for all lengths; None if unknown."""
        limits = (self.config.get("max_position_embeddings"), self.steady_positions)
        return min((limit for limit in limits if isinstance(limit, int)), default=None)

    @property
    def steady_positions(self) -> int | None:
        """The longest text with a rotation that does not depend on the length (dynamic, longrope); None for any."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        # Some models have a rotation for each kind of layers.
        rotations = [rope, *(entry for entry in rope.values() if isinstance(entry, dict))]
        if all((rotation.get("rope_type") or rotation.get("type") or "default") in STEADY for rotation in rotations):
            return None
        limits = []
        for entries in (self.complete_config, *rotations):
            limits += [entries.get("original_max_position_embeddings"), entries.get("max_position_embeddings")]
        return min((limit for limit in limits if isinstance(limit, int)), default=0)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get("vocab_size") or self.complete_config["vocab_size"])

    @cached_property
    def in_bytes(self) -> dict[str, Any] | None:
        """Facts of a GGUF whose weights were written in int8, else None.

        They are the `numbers`, the digest of the `tensors` in float32, and that of the file as `written`.
        """
        with suppress(OSError, ValueError, TypeError, KeyError):
            return dict(json.loads((self.folder / weights.CONVERTED).read_text("utf-8"))["in_bytes"])
        return None

    @property
    def stored_dtype(self) -> str | None:
        """The name of the type in which the weights are stored, if config.json has it."""
        return self.config.get("dtype") or self.config.get("torch_dtype")

    def count_weights(self) -> int | None:
        """Return the numbers in the weights, from the sizes of their files; None if unknown."""
        if self.in_bytes is not None:
            return int(self.in_bytes["numbers"])
        size = sum(path.stat().st_size for path in self.weight_files()) or self._index()[1]
        # Quantised weights may be turned into floating-point numbers or not.
        if size is None or self.config.get("quantization_config"):
            return None
        return size // (4 if (self.stored_dtype or "float32") == "float32" else 2)

    def check_type(self) -> None:
        """Raise KvatlasError for model types and layers that the engine cannot decode."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = self.config
        kind = str(config.get("model_type"))
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise KvatlasError(
                f"The model {self.name!r} has the unknown model type {kind!r}; expected causal language models of the "
                "installed transformers (code that comes with a model is never run)."
            )
        others = set(config.get("layer_types") or ()) - set(_KINDS)
        if others:
            raise KvatlasError(
                f"The model {self.name!r} has {min(others)} layers; expected layers that attend to all earlier tokens "
                "or to a sliding window, or that keep a state."
            )

    def check_weights(self) -> None:
        """Raise KvatlasError if there are neither weights nor a repository to fetch them from."""
        if self.repository is None and not self.weight_files():
            raise self._no_weights()

    def _no_weights(self) -> KvatlasError:
        return KvatlasError(
            f"The model {self.name!r} has no weights: {_WHOLE} is missing, and so is {_INDEX}. No other format is "
            "read (pickled weights can run code; convert them to safetensors)."
        )

    def weight_files(self) -> list[Path]:
        """Return the local safetensors that are loaded. Raises KvatlasError if one that the index names is missing."""
        present = {path.name for path in self.folder.glob("*")}
        names = self._weight_names(present)
        missing = [name for name in names if name not in present]
        if missing and self.repository is None:
            raise KvatlasError(f"The model {self.name!r} lacks {len(missing)} of its weight files: {missing[0]}.")
        files = [self.folder / name for name in names] if not missing else []
        for file in files:
            refuse_pointer(file)
        return files

    def _weight_names(self, present: Collection[str]) -> list[str]:
        """Return the weight files that transformers loads: a whole one if it is `present`, else those of the index."""
        names, _ = self._index()
        return [_WHOLE] if _WHOLE in present else sorted(names or ())

    def _index(self) -> tuple[set[str] | None, int | None]:
        """Return the weight files that the index names, and their bytes; None without an index."""
        faults = (OSError, ValueError, KeyError, TypeError, AttributeError)
        with refusal(f"The weight index of the model {self.name!r} cannot be read", *faults):
            if not (self.folder / _INDEX).exists():
                return None, None
            content = json.loads((self.folder / _INDEX).read_text("utf-8"))
            return set(map(str, content["weight_map"].values())), int(content.get("metadata", {}).get("total_size", 0))

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 over config and tensors, whatever the names of files: part of the run key.

        For a model on the hub it is that of the files, since weights are not fetched for it.
        """
        if self.repository is not None:
            return self.hash_files()
        self.check_weights()
        self.check_written()
        contents = {
            "config": self.read_json("config.json"),
            "tensors": self.in_bytes["tensors"] if self.in_bytes else weights.hash_tensors(self.weight_files()),
            "adapter": self.adapter.hash_contents(),
        }
        return digest(contents)

    def check_written(self) -> None:
        """Raise KvatlasError if weights in int8 are not those that were written: their digest is of other tensors."""
        if self.in_bytes is None:
            return
        (file,) = self.weight_files()
        if weights.sha256(file) != self.in_bytes.get("written"):
            raise KvatlasError(
                f"The weights in {str(file)!r} are not those that were written from the GGUF; delete the folder of "
                "that file, and the GGUF is converted again."
            )

    def hash_files(self) -> str:
        """Return the SHA-256 over the files of config and weights, as files of importance heads may name a model."""
        weight_digests = {path.name: weights.sha256(path) for path in self.weight_files()}
        if not weight_digests and self.repository is not None:
            # The hub gives the digests of its files without their contents.
            stored = self.repository.files()
            weight_digests = {name: stored[name] for name in self._weight_names(stored) if name in stored}
            if not weight_digests:
                raise self._no_weights()

        # The config comes first, then the others by their names.
        config_digest = weights.sha256(self.folder / "config.json")
        others = {**weight_digests, **self.adapter.hash_files()}
        total = hashlib.sha256()
        for name, file_digest in [("config.json", config_digest), *sorted(others.items())]:
            total.update(name.encode() + b"\0" + bytes.fromhex(file_digest))
        return total.hexdigest()
