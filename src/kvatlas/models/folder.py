"""A Hugging Face model folder: what can be known before the weights are loaded, and loading them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """The sizes that decide what a cached token costs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        """Bytes of keys and values of one token over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True)
class Model:
    """A causal language model in a local folder, with its tokenizer, chat template and think tags.

    `name` is what the user wrote: `embedded:tiny-llama`, `hf:/models/r1`.
    """

    name: str
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it is."""
        try:
            config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise KvatlasError(f"The model {self.name!r} has no readable config.json ({error}).") from error
        return config

    @cached_property
    def shape(self) -> Shape:
        """Layers, KV heads, head size and hidden size, from config.json."""
        try:
            heads, hidden = self.config["num_attention_heads"], self.config["hidden_size"]
            return Shape(
                layers=self.config["num_hidden_layers"],
                heads=heads,
                kv_heads=self.config.get("num_key_value_heads") or heads,
                head_dim=self.config.get("head_dim") or hidden // heads,
                hidden=hidden,
            )
        except KeyError as error:
            raise KvatlasError(f"The config.json of the model {self.name!r} lacks {error}.") from error

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 over config and weights: part of the run key."""
        weights = sorted(self.folder.glob("*.safetensors"), key=lambda path: path.name)
        weights = [path for path in weights if path.name.startswith("model")]
        if not weights:
            raise KvatlasError(
                f"The model {self.name!r} has no weights: model*.safetensors is missing (no other format)."
            )
        return _digest([self.folder / "config.json", *weights])

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 over the tokenizer files and the chat template: part of the run key."""
        return _digest([self.folder / name for name in _TOKENIZER_FILES if (self.folder / name).is_file()])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; loaded from the folder alone, never from the network."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if not tokenizer.chat_template:
            raise KvatlasError(f"The tokenizer of the model {self.name!r} has no chat template.")
        return tokenizer

    @cached_property
    def think_close(self) -> int:
        """Id of the token that ends thinking."""
        ids = self.tokenizer.convert_tokens_to_ids([THINK_CLOSE])
        if ids[0] is None or ids[0] == self.tokenizer.unk_token_id:
            raise KvatlasError(f"The tokenizer of the model {self.name!r} has no {THINK_CLOSE} token.")
        return int(ids[0])

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids of the tokens that end a trace: the generation config's, else the tokenizer's."""
        path = self.folder / "generation_config.json"
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found = self.tokenizer.eos_token_id if found is None else found
        if found is None:
            raise KvatlasError(f"The model {self.name!r} names no end-of-text token (eos_token_id).")
        return frozenset(found if isinstance(found, list) else [found])

    def encode(self, message: str) -> tuple[int, ...]:
        """Token ids of one user message through the chat template, up to where the model begins to write."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return tuple(int(i) for i in ids)

    def text(self, tokens: tuple[int, ...]) -> str:
        """The text of new tokens without the end token."""
        visible = tokens[:-1] if tokens and tokens[-1] in self.stops else tokens
        return str(self.tokenizer.decode(list(visible), skip_special_tokens=False))

    def network(self) -> PreTrainedModel:
        """Load the weights (fp32 on CPU, frozen, evaluation mode)."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            network = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise KvatlasError(f"The weights of the model {self.name!r} cannot be loaded ({reason}).") from error
        return network.eval().requires_grad_(False)


def _digest(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
