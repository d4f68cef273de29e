"""Measure what few bits of keys cost, by scheme, and how long packed caches write the text of the full one.

    python bench/key_bits.py --models embedded:tiny-llama=CHAIN10 smollm2-135m-think=WORDS6-8 --problems 8

Each model answers so many problems greedily with the full cache at 16 bits, and again with keys and values at 8, 4 and
3 bits: `shares` is the share of a text before the first token that differs, mean over problems. Then the texts go
through the model with keys alone packed and unpacked by each scheme, in groups of 32 channels, none of them exempt:
`nats` is the mean divergence of the next token from that of exact keys (Kullback-Leibler). Schemes: `plain` packs a key
as it is, `bias` without the bias of its layer, rotated to its position, `bias+turn` turns the rest by a Hadamard matrix
before, `turn` does so with the whole key, and `channels` has scales for each channel over 32 tokens (KIVI, arXiv
2402.02750).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common import arguments, keep
from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.bits.storage import pack_bits, unpack_bits
from kvatlas.core import Sampling, Setting, first_difference
from kvatlas.engine import Engine, Request
from kvatlas.forward import attention_function, own_attention
from kvatlas.serve.service import stream_of

GROUP = 32
BITS = (8, 4, 3)
#: A scheme gives keys [KV heads, tokens, size] back as they are read; it gets their rotated biases as well, and bits.
Scheme = Callable[[Tensor, Tensor, int], Tensor]


def rounded(numbers: Tensor, bits: int) -> Tensor:
    return unpack_bits(pack_bits(numbers, bits, GROUP), numbers.shape[-1], bits, GROUP)


def turned(numbers: Tensor) -> Tensor:
    """Return numbers times the orthonormal Hadamard matrix of their last dimension."""
    size = numbers.shape[-1]
    block = size & -size
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = numbers.unflatten(-1, (-1, block)) @ (matrix / block**0.5)
    return blocks.flatten(-2)


def by_channel(keys: Tensor, _biases: Tensor, bits: int) -> Tensor:
    """Return keys with scales for each channel over 32 tokens; the last ones that fill no group stay as they are."""
    whole = keys.shape[1] // GROUP * GROUP
    read = rounded(keys[:, :whole].mT, bits).mT
    return torch.cat([read, keys[:, whole:]], 1)


SCHEMES: dict[str, Scheme] = {
    "plain": lambda keys, _, bits: rounded(keys, bits),
    "bias": lambda keys, biases, bits: rounded(keys - biases, bits) + biases,
    "bias+turn": lambda keys, biases, bits: turned(rounded(turned(keys - biases), bits)) + biases,
    "turn": lambda keys, _, bits: turned(rounded(turned(keys), bits)),
    "channels": by_channel,
}


def rotated_biases(model: Any, tokens: int) -> dict[int, Tensor]:
    """Return the key bias [KV heads, tokens, size] of each layer at each position, by the layer's number."""
    decoder = model.get_decoder()
    cos, sin = decoder.rotary_emb(torch.zeros(1), position_ids=torch.arange(tokens)[None])
    size = cos.shape[-1]
    biases = {}
    for layer in decoder.layers:
        projection = layer.self_attn.k_proj
        bias = projection.packed.bias if hasattr(projection, "packed") else projection.bias
        if bias is None:
            bias = torch.zeros(projection.out_features)
        heads = bias.view(-1, 1, size)
        half = torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], -1)
        biases[layer.self_attn.layer_idx] = heads * cos + half * sin
    return biases


@torch.inference_mode()
def log_probabilities(model: Any, tokens: list[int], biases: dict[int, Tensor], scheme: Scheme, bits: int) -> Tensor:
    """Return those of the next token at each place of a text, with keys that went through a scheme."""

    def seen(layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any) -> Any:
        read = scheme(key[0], biases[layer.layer_idx], bits)[None]
        many = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, read, value, is_causal=True, scale=scaling, enable_gqa=many)
        return out.transpose(1, 2), None

    positions = torch.arange(len(tokens))[None]
    with own_attention(model), attention_function(seen):
        logits = model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0]
    return logits.log_softmax(-1)


def nats(model: Any, texts: list[list[int]]) -> dict[str, list[float]]:
    """Return the mean divergence by scheme at each number of bits, over all places of the texts."""
    totals = {name: [0.0] * len(BITS) for name in SCHEMES}
    for text in texts:
        biases = rotated_biases(model, len(text))
        exact = log_probabilities(model, text, biases, lambda keys, *_: keys, 16)
        for name, scheme in SCHEMES.items():
            for place, bits in enumerate(BITS):
                packed = log_probabilities(model, text, biases, scheme, bits)
                totals[name][place] += float((exact.exp() * (exact - packed)).sum(-1).mean())
    return {name: [round(total / len(texts), 4) for total in row] for name, row in totals.items()}


def measured(name: str, benchmark: str, options: Any) -> dict[str, Any]:
    handle = models.find(name)
    asked = find(benchmark)
    model = handle.load()
    by_bits = {bits: policies.from_setting(Setting.from_parameters("full", kv_bits=bits)) for bits in (16, *BITS)}
    requests = []
    prompts: dict[str, tuple[int, ...]] = {}
    for problem in asked.problems(options.problems):
        prompt = handle.encode(asked.prompt(problem))
        prompts[problem.id] = prompt
        requests.append(Request(problem.id, prompt, stream_of(0, prompt, 0), tuple(by_bits.values())))
    sampling = Sampling(temperature=0.0, max_new_tokens=options.max_new_tokens)
    engine = Engine(handle, model, by_bits.values(), sampling, options.batch)
    texts = {(done.key, done.policy.storage.key_bits): list(done.tokens) for done in engine.run(iter(requests))}
    shares = []
    for bits in BITS:
        found = []
        for key in prompts:
            exact = texts[key, 16]
            first = first_difference(exact, texts[key, bits])
            found.append(1.0 if first is None else first / len(exact))
        shares.append(round(sum(found) / len(found), 4))
    told: dict[str, Any] = {"model": name, "benchmark": benchmark, "problems": len(prompts), "shares": shares}
    print(told, flush=True)
    if options.texts:
        whole = [[*prompt, *texts[key, 16]][: options.length] for key, prompt in prompts.items()]
        told["nats"] = nats(model, whole[: options.texts])
        print(told["nats"], flush=True)
    return told


def main() -> None:
    options = arguments(
        __doc__,
        models=["embedded:tiny-llama=CHAIN10", "embedded:tiny-qwen=CHAIN10"],
        problems=16,
        max_new_tokens=400,
        batch=64,
        texts=6,
        length=400,
    )
    torch.set_num_threads(1)
    results = [measured(*model.split("="), options) for model in options.models]
    keep(options, bench="key_bits", bits=BITS, models=results)


if __name__ == "__main__":
    main()
