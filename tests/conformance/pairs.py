"""The pairs of a policy and a press of kvpress, and how far both agree; a table of all.

    python -m tests.conformance.pairs bench/results/conformance.json

Prints the table, with what the authors' own code keeps (`tests/policies/authors.json`), and writes the file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.policies import CompressingPolicy, select_tokens
from tests.conformance import environment, random_pairs
from tests.conformance.real import Activations, activations, real_model
from tests.policies import authors


@dataclass(frozen=True)
class Pair:
    """A policy's parameters and the press that does the same. kvpress knows no prompt, so none is protected."""

    policy: str
    press: str
    arguments: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    ratio: float = 0.3
    #: Whether the cache lost tokens before.
    again: bool = False
    #: What our score is multiplied by to give theirs; None where theirs says no more than which tokens stay.
    factor: float | None = 1.0
    #: Whether their means over the queries that saw a token are compared as sums.
    as_sums: bool = False

    def __str__(self) -> str:
        return f"{self.policy}-{self.ratio}-{'again' if self.again else 'first'}"

    @property
    def selection(self) -> CompressingPolicy:
        values = {"kv_budget": 300, "local_window": 1, "ratio": self.ratio, "keep_prompt": False, **self.parameters}
        return policies.from_setting(Setting.from_parameters(self.policy, **values))

    @property
    def scene(self) -> str:
        return f"{self.selection.scope}-{self.again}"


def snapkv(queries: int, kernel: int) -> dict[str, Any]:
    """Their SnapKV averages over queries where the paper's listing sums, and over neighbours; so can ours."""
    return {
        "policy": "snapkv",
        "press": "SnapKVPress",
        "arguments": {"window_size": queries, "kernel_size": kernel},
        "parameters": {"queries": queries, "local_window": queries, "kernel": kernel, "pooling": "avg"},
        "factor": 1 / queries,
    }


PAIRS = [
    *(
        Pair(**pair, again=again, ratio=ratio)
        for again in (False, True)
        for ratio in (0.1, 0.5)
        for pair in (
            {"policy": "window", "press": "StreamingLLMPress", "arguments": {"n_sink": 0}, "factor": None},
            {"policy": "streaming", "press": "StreamingLLMPress", "arguments": {"n_sink": 4}, "factor": None},
            snapkv(32, 7),
            snapkv(64, 5),
            {"policy": "tova", "press": "TOVAPress"},
            {"policy": "keydiff", "press": "KeyDiffPress"},
            {"policy": "knorm", "press": "KnormPress"},
        )
    ),
    *(Pair("h2o", "ObservedAttentionPress", ratio=ratio, as_sums=True) for ratio in (0.1, 0.5)),
    *(Pair("h2o", "ObservedAttentionPress", parameters={"per_query": True}, ratio=ratio) for ratio in (0.1, 0.5)),
    # Of the queries of all tokens, as the press takes them; it keeps the first ones by a score of its own.
    *(
        Pair("expected_attention", "ExpectedAttentionPress", {"n_sink": 0}, {"sinks": 0, "queries": 10_000}, ratio)
        for ratio in (0.1, 0.5)
    ),
]


class Theirs(NamedTuple):
    """The tokens that a press keeps: a mask, and the scores [layers, KV heads, cached]."""

    kept: Tensor
    scores: Tensor


def their_results(real: Activations, folder: Path) -> list[Theirs]:
    """Run the press of every pair on the same numbers, with `folder` for files."""
    layers = range(real.model.shape.layers)
    stored = {f"states.{layer}": real.states[layer] for layer in layers}
    stored |= {f"attention.{layer}": real.weights(layer).float() for layer in layers}
    for pair in {pair.scene: pair for pair in PAIRS}.values():
        cached = real.cached(pair.selection, pair.again)
        stored |= {f"{pair.scene}.keys.{layer}": cached.key(layer) for layer in layers}
        stored |= {f"{pair.scene}.values.{layer}": cached.value(layer) for layer in layers}
    asked = {}
    for number, pair in enumerate(PAIRS):
        kept = int(our_mask(real, pair).float().sum(-1).mean())
        asked[number] = (pair.press, pair.arguments, pair.scene, kept)
    save_file(
        {name: numbers.contiguous() for name, numbers in stored.items()}, folder / "in", {"presses": json.dumps(asked)}
    )
    program = Path(__file__).with_name("kvpress_peer.py")
    environment.run(str(program), str(real.model.folder), str(folder / "in"), str(folder / "out"))
    result = load_file(folder / "out")

    def stacked(number: int, what: str) -> Tensor:
        return torch.stack([result[f"{number}.{what}.{layer}"] for layer in layers])

    return [Theirs(stacked(number, "kept").bool(), stacked(number, "scores")) for number in asked]


def our_mask(real: Activations, pair: Pair) -> Tensor:
    """A mask [layers, KV heads, cached] of the kept slots: a head that shares a choice keeps what the others keep."""
    cached = real.cached(pair.selection, pair.again)
    kept = select_tokens(pair.selection, cached).expand(real.model.shape.layers, real.model.shape.kv_heads, -1)
    return mask_of(kept, cached.positions.shape[-1])


def mask_of(kept: Tensor, length: int) -> Tensor:
    """A mask [..., length] of slots; -1 stands for no slot."""
    # The last column takes what is no slot.
    mask = torch.zeros(*kept.shape[:-1], length + 1, dtype=torch.bool)
    return mask.scatter_(-1, kept.where(kept >= 0, length), True)[..., :length]


class Compared(NamedTuple):
    """Both choices of a pair by head under our rule that the local window stays, and both scores of older tokens."""

    ours: Tensor
    theirs: Tensor
    our_scores: Tensor
    their_scores: Tensor


def compare(real: Activations, pair: Pair, theirs: Theirs) -> Compared:
    policy = pair.selection
    cached = real.cached(policy, pair.again)
    length = cached.positions.shape[-1]
    older = length - policy.budget.window
    ours = our_mask(real, pair)
    their_scores = theirs.scores.double()
    wanted = theirs.kept
    if pair.as_sums:
        their_scores = their_scores * torch.arange(length, 0, -1)
        order = their_scores.argsort(-1, descending=True)[..., : int(ours[0, 0].sum())]
        wanted = mask_of(order, length)
    wanted = under_contract(wanted, their_scores, policy.budget.window)
    scores = policy.score(cached).double().expand(*their_scores.shape)
    return Compared(ours, wanted, scores[..., :older], their_scores[..., :older])


def under_contract(kept: Tensor, scores: Tensor, window: int) -> Tensor:
    """Return what a press keeps under the rule that the local window stays in any case, in place of the worst."""
    older = kept.shape[-1] - window
    result = []
    for row, score in zip(kept.flatten(0, 1), scores.flatten(0, 1), strict=True):
        slots = row.nonzero().flatten().tolist()
        chosen = sorted((slot for slot in slots if slot < older), key=lambda slot: -float(score[slot]))
        mask = torch.zeros_like(row)
        mask[chosen[: len(slots) - window]] = True
        mask[older:] = True
        result.append(mask)
    return torch.stack(result).view(kept.shape)


def jaccard(ours: Tensor, theirs: Tensor) -> Tensor:
    """The share of tokens that both keep in those that one of them keeps, by head."""
    return (ours & theirs).sum(-1) / (ours | theirs).sum(-1)


def row(real: Activations, pair: Pair, theirs: Theirs) -> dict[str, Any]:
    """A line of the table; the difference of scores is a share of their greatest, over all layers and heads."""
    compared = compare(real, pair, theirs)
    shares = jaccard(compared.ours, compared.theirs)
    difference = None
    if pair.factor is not None:
        finite = compared.our_scores.isfinite()
        apart = (compared.our_scores * pair.factor - compared.their_scores)[finite].abs().max()
        difference = float(apart / compared.their_scores[finite].abs().max())
    return {
        "policy": pair.policy,
        "parameters": pair.parameters,
        "peer": f"kvpress {pair.press}",
        "ratio": pair.ratio,
        "compressed_before": pair.again,
        "jaccard": round(float(shares.mean()), 4),
        "least_jaccard": round(float(shares.min()), 4),
        "kept_apart": int((compared.ours.sum(-1) - compared.theirs.sum(-1)).abs().max()),
        "score_difference": None if difference is None else float(f"{difference:.2g}"),
    }


def authors_rows() -> list[dict[str, Any]]:
    """The same for what the authors' own code keeps, of which no scores are stored."""
    rows = []
    for fact in authors.FACTS:
        tokens = fact["input"]["tokens"]
        with tempfile.TemporaryDirectory() as folder:
            ours = mask_of(select_tokens(*authors.choosing(fact, Path(folder)))[0], tokens)
        theirs = torch.stack([mask_of(torch.tensor(head), tokens) for head in fact["kept"]])
        shares = jaccard(ours, theirs)
        rows.append(
            {
                "policy": fact["policy"],
                "parameters": fact["parameters"],
                "peer": f"{fact['origin']['repository']} at {fact['origin']['commit'][:7]}",
                "jaccard": round(float(shares.mean()), 4),
                "least_jaccard": round(float(shares.min()), 4),
                "score_difference": None,
            }
        )
    return rows


def main() -> None:
    real = activations(real_model(environment.CACHE / "smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        results = their_results(real, Path(folder))
    rows = [row(real, pair, theirs) for pair, theirs in zip(PAIRS, results, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        rows += random_pairs.rows(Path(folder))
    rows += authors_rows()
    for line in rows:
        print(
            f"{line['policy']:20} {line['peer']:46} Jaccard {line['jaccard']:.4f} (least {line['least_jaccard']:.4f}), "
            f"scores {line['score_difference']}"
        )
    document = {"model": real.model.name, "tokens": len(real.tokens), "kvpress": "0.5.5", "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
