"""The kernels in plain torch and float64, and ragged inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from kvatlas.native import Native, PagedBatch


@dataclass
class Sequence:
    """Keys, values, positions [kv_heads, tokens, ...] of all tokens; queries [new, heads, size] of the new ones."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor

    @property
    def cached(self) -> int:
        """Tokens before the new ones."""
        return self.keys.shape[1] - len(self.queries)


@dataclass
class Scene:
    """Sequences of one layer, some of them watched."""

    sequences: list[Sequence]
    window: int = 0
    page_size: int = 16
    watched: list[int] = field(default_factory=list)
    softcap: float = 0.0
    sinks: Tensor | None = None

    @classmethod
    def random(
        cls,
        seed: int,
        cached: list[int],
        new: list[int],
        *,
        kv_heads: int,
        group: int,
        size: int,
        window: int = 0,
        page_size: int = 16,
        watched: list[int] | None = None,
        value_size: int | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
    ) -> Scene:
        """Numbers from `seed`. Cached tokens of every KV head have positions of their own, with gaps."""
        source = torch.Generator().manual_seed(seed)
        sequences = []
        for before, now in zip(cached, new, strict=True):
            steps = torch.rand(kv_heads, before + now, generator=source) < 0.6
            steps[:, before:] = True
            positions = (steps + steps.cumsum(1)).int()
            positions[:, before:] = before * 2 + torch.arange(now).int()
            keys, values = (
                torch.randn(kv_heads, before + now, width, generator=source) for width in (size, value_size or size)
            )
            queries = 2 * torch.randn(now, kv_heads * group, size, generator=source)
            sequences.append(Sequence(keys, values, positions, queries))
        logits = torch.randn(kv_heads * group, generator=source) if sinks else None
        return cls(sequences, window, page_size, watched or [], softcap, logits)

    def only(self, index: int) -> Scene:
        """One sequence without its neighbours."""
        return replace(self, sequences=[self.sequences[index]], watched=[0] if index in self.watched else [])

    @property
    def scaling(self) -> float:
        return float(self.sequences[0].queries.shape[-1] ** -0.5)

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of all sequences, and the attention mass of those that are watched."""
        outputs, masses = [], []
        for sequence in self.sequences:
            group = sequence.queries.shape[1] // sequence.keys.shape[0]
            keys, values = (table.double().repeat_interleave(group, 0) for table in (sequence.keys, sequence.values))
            scores = torch.einsum("thd,hsd->hts", sequence.queries.double(), keys) * self.scaling
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            count = sequence.keys.shape[1]
            seen = (torch.arange(count) <= torch.arange(sequence.cached, count)[:, None]).expand(
                len(sequence.keys), -1, -1
            )
            if self.window:
                own = sequence.positions[:, sequence.cached :, None]
                seen = seen & (sequence.positions[:, None] > own - self.window)
            scores = scores.masked_fill(~seen.repeat_interleave(group, 0), float("-inf"))
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(*scores.shape[:2], 1)], -1)
            weights = scores.softmax(-1)[..., :count]
            outputs.append(torch.einsum("hts,hsd->thd", weights, values))
            masses.append(weights.unflatten(0, (-1, group)).mean(1).sum(1))
        return outputs, [masses[index] for index in self.watched]

    def run(self, native: Native, pages: int = 0, chunk: int = 10**6) -> tuple[list[Tensor], list[Tensor]]:
        """The same by the kernels: pages dealt out by the seed `pages`, new tokens in chunks."""
        kv_heads = self.sequences[0].keys.shape[0]
        sizes = [table.shape[2] for table in (self.sequences[0].keys, self.sequences[0].values)]
        counts = [-(-sequence.keys.shape[1] // self.page_size) for sequence in self.sequences]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(pages)).int()
        # Slots that were never written are NaN; missing pages have a number that no page has.
        table = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)
        slots = len(order) * self.page_size
        keys, values = (torch.full((kv_heads, slots, size), float("nan")) for size in sizes)
        places = torch.full((kv_heads, slots), 2**30, dtype=torch.int32)
        for row, dealt, sequence in zip(table, order[: sum(counts)].split(counts), self.sequences, strict=True):
            row[: len(dealt)] = dealt
            at = (dealt[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[: sequence.cached]
            keys[:, at], values[:, at] = sequence.keys[:, : sequence.cached], sequence.values[:, : sequence.cached]
            places[:, at] = sequence.positions[:, : sequence.cached]
        width = max(sequence.keys.shape[1] for sequence in self.sequences)
        mass = torch.zeros(len(self.watched), kv_heads, width)
        outputs: list[list[Tensor]] = [[] for _ in self.sequences]
        for begin in range(0, max(len(sequence.queries) for sequence in self.sequences), chunk):
            turn = [index for index, sequence in enumerate(self.sequences) if begin < len(sequence.queries)]
            ends = [min(begin + chunk, len(self.sequences[index].queries)) for index in turn]
            parts = [(self.sequences[index], begin, end) for index, end in zip(turn, ends, strict=True)]
            batch = PagedBatch(
                table[turn],
                torch.tensor([0, *accumulate(end - begin for end in ends)]).int(),
                torch.tensor([item.cached + begin for item, *_ in parts]).int(),
                page_size=self.page_size,
                longest=max(item.cached + end for item, _, end in parts),
                watched=torch.tensor([self.watched.index(i) if i in self.watched else -1 for i in turn]).int()
                if self.watched
                else None,
                watched_width=width,
            )
            new = [slice(item.cached + begin, item.cached + end) for item, begin, end in parts]
            rows = list(zip(parts, new, strict=True))
            result = native.attention(
                batch,
                torch.cat([item.queries[begin:end] for item, begin, end in parts]),
                torch.cat([item.keys[:, own].transpose(0, 1) for (item, *_), own in rows]),
                torch.cat([item.values[:, own].transpose(0, 1) for (item, *_), own in rows]),
                keys,
                values,
                self.scaling,
                window=self.window,
                places=places if self.window else None,
                positions=torch.cat([item.positions[0, own] for (item, *_), own in rows]) if self.window else None,
                mass=mass if self.watched else None,
                softcap=self.softcap,
                sinks=self.sinks,
            )
            for index, part in zip(turn, result.split([end - begin for end in ends]), strict=True):
                outputs[index].append(part)
        masses = [own[:, : self.sequences[index].keys.shape[1]] for own, index in zip(mass, self.watched, strict=True)]
        return [torch.cat(output) for output in outputs], masses
