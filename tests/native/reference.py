"""What the kernels compute, in plain torch and float64, and ragged inputs to try it on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvatlas.native import Native, PagedBatch


@dataclass
class Scene:
    """Sequences with tokens that are cached (`lengths`) and new ones (`news`), of one layer."""

    lengths: list[int]
    news: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    positions: list[Tensor]
    page_size: int = 16
    window: int = 0
    watched: tuple[int, ...] = ()

    @classmethod
    def random(
        cls, seed: int, lengths: list[int], news: list[int], heads: int, kv_heads: int, size: int, **rest: object
    ) -> Scene:
        made = torch.Generator().manual_seed(seed)
        totals = [a + b for a, b in zip(lengths, news, strict=True)]
        return cls(
            lengths,
            news,
            [torch.randn(kv_heads, total, size, generator=made) for total in totals],
            [torch.randn(kv_heads, total, size, generator=made) for total in totals],
            [2 * torch.randn(new, heads, size, generator=made) for new in news],
            [
                (torch.rand(kv_heads, total, generator=made) < 0.7).int().cumsum(1).int().contiguous()
                for total in totals
            ],
            **rest,  # type: ignore[arg-type]
        )

    @property
    def scaling(self) -> float:
        return float(self.queries[0].shape[-1] ** -0.5)

    def only(self, chosen: list[int]) -> Scene:
        """Some of the sequences."""
        parts = {name: [getattr(self, name)[i] for i in chosen] for name in PARTS}
        return replace(self, **parts, watched=tuple(range(len([i for i in chosen if i in self.watched]))))

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and attention mass of each sequence."""
        found, masses = [], []
        for keys, values, queries, positions, length, new in zip(
            self.keys, self.values, self.queries, self.positions, self.lengths, self.news, strict=True
        ):
            group = queries.shape[1] // keys.shape[0]
            k, v = (each.double().repeat_interleave(group, 0) for each in (keys, values))
            scores = torch.einsum("thd,hsd->hts", queries.double(), k) * self.scaling
            seen = torch.arange(keys.shape[1]) <= length + torch.arange(new)[:, None]
            seen = seen.expand(keys.shape[0], new, -1)
            if self.window:
                own = positions[:1, length:]
                seen = seen & (with_own(positions, own, length)[:, None] > own.mT - self.window)
            weights = scores.masked_fill(~seen.repeat_interleave(group, 0), float("-inf")).softmax(-1)
            found.append(torch.einsum("hts,hsd->thd", weights, v))
            masses.append(weights.unflatten(0, (-1, group)).mean(1).sum(1))
        return found, masses

    def run(self, native: Native, seed: int = 0, chunk: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The same by the kernels, pages dealt at random, new tokens in chunks."""
        made = torch.Generator().manual_seed(seed)
        kv_heads, _, size = self.keys[0].shape
        counts = [-(-each.shape[1] // self.page_size) for each in self.keys]
        order = torch.randperm(sum(counts) + 3, generator=made).int()
        table = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)
        slots = len(order) * self.page_size
        pools = [torch.full((kv_heads, slots, size), float("nan")) for _ in range(2)]
        places = torch.full((kv_heads, slots), 2**30, dtype=torch.int32)
        for i, count in enumerate(counts):
            table[i, :count] = order[sum(counts[:i]) : sum(counts[:i]) + count]
            at = (table[i, :count, None] * self.page_size + torch.arange(self.page_size)).flatten()
            at = at[: self.lengths[i]]
            for pool, own in zip(pools, (self.keys, self.values), strict=True):
                pool[:, at] = own[i][:, : self.lengths[i]]
            places[:, at] = self.positions[i][:, : self.lengths[i]]
        found: list[list[Tensor]] = [[] for _ in counts]
        width = max(each.shape[1] for each in self.keys)
        mass = torch.zeros(max(len(self.watched), 1), kv_heads, width)
        rows = torch.tensor([self.watched.index(i) if i in self.watched else -1 for i in range(len(counts))]).int()
        chunk = chunk or max(self.news)
        for begin in range(0, max(self.news), chunk):
            turn = [i for i, new in enumerate(self.news) if begin < new]
            ends = [min(begin + chunk, self.news[i]) for i in turn]
            lengths = torch.tensor([self.lengths[i] + begin for i in turn]).int()
            starts = torch.tensor([0, *torch.tensor([end - begin for end in ends]).cumsum(0)]).int()
            own = table[turn].contiguous()
            batch = PagedBatch(
                own,
                starts,
                lengths,
                page_size=self.page_size,
                longest=max(self.lengths[i] + end for i, end in zip(turn, ends, strict=True)),
                watched=rows[turn].contiguous() if self.watched else None,
                watched_width=width,
            )
            pairs = list(zip(turn, ends, strict=True))
            new = [
                torch.cat(
                    [own[i][:, self.lengths[i] + begin : self.lengths[i] + end].transpose(0, 1) for i, end in pairs]
                )
                for own in (self.keys, self.values)
            ]
            out = native.attention(
                batch,
                torch.cat([self.queries[i][begin:end] for i, end in pairs]),
                *(each.contiguous() for each in new),
                *pools,
                self.scaling,
                window=self.window,
                places=places if self.window else None,
                positions=torch.cat(
                    [self.positions[i][0, self.lengths[i] + begin : self.lengths[i] + end] for i, end in pairs]
                )
                if self.window
                else None,
                mass=mass if self.watched else None,
            )
            for i, part in zip(turn, out.split([end - begin for end in ends]), strict=True):
                found[i].append(part)
        masses = [
            mass[self.watched.index(i), :, : self.keys[i].shape[1]] if i in self.watched else mass
            for i in range(len(counts))
        ]
        return [torch.cat(each) for each in found], masses


PARTS = ("lengths", "news", "keys", "values", "queries", "positions")


def with_own(positions: Tensor, own: Tensor, length: int) -> Tensor:
    """Positions of all slots: every head has its own for cached tokens, and the same for new ones."""
    return torch.cat([positions[:, :length], own.expand(len(positions), -1)], 1)
