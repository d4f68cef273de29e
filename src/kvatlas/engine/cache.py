"""The slot cache: preallocated keys and values per layer, written in place and compacted in place between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import Shape

#: Capacities are multiples of this: masked attention over slots is then bitwise the same for every capacity.
ALIGNMENT = 64
#: With fewer rows CPU kernels round differently; idle rows pad smaller batches, so that traces never depend on it.
SMALLEST_BATCH = 8


def aligned(tokens: int) -> int:
    """The smallest capacity that holds so many tokens."""
    return -(-max(tokens, 1) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Snapshot:
    """A copy of one row: keys and values [layers][KV heads, tokens, head size], columns [layers, KV heads, tokens].

    `positions` [KV heads, tokens] are those of the layers that keep them, `queries` [layers][heads, ring, head size]
    the recent ones.
    """

    keys: list[Tensor]
    values: list[Tensor]
    columns: dict[str, Tensor]
    queries: list[Tensor]
    positions: dict[int, Tensor]
    length: int


class Slots:
    """Keys, values and policies' columns of up to `rows` sequences; row r holds `lengths[r]` tokens in its first slots.

    Slots hold tokens in their original order, keys with the rotation of their true position. Capacity grows in steps,
    so that memory follows what is cached: under a KV budget it stays constant once the budget was reached. Columns
    hold 0 in every slot past a row's length. Where policies look at recent queries, rows have rings for the last `ring`
    of them: the query of the token at position p is in place p % ring.
    """

    def __init__(
        self,
        shape: Shape,
        rows: int,
        columns: dict[str, tuple[int, int]],
        ring: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.rows, self.device, self.dtype = shape, rows, device, dtype
        self.capacity = 0
        self.keys = [self._empty(dtype) for _ in range(shape.layers)]
        self.values = [self._empty(dtype) for _ in range(shape.layers)]
        self.columns = {
            name: torch.zeros(rows, layers, heads, 0, device=device) for name, (layers, heads) in columns.items()
        }
        self.ring = ring
        self.queries = [
            torch.zeros(rows, shape.heads, ring, shape.head_dim, device=device, dtype=dtype)
            for _ in range(shape.layers if ring else 0)
        ]
        #: True positions [rows, KV heads, capacity] of cached tokens, for layers with a sliding window alone.
        self.positions: dict[int, Tensor] = {}
        #: How many positions these layers see.
        self.windows: dict[int, int] = {}
        self.lengths = [0] * rows

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.rows, self.shape.kv_heads, 0, self.shape.head_dim, device=self.device, dtype=dtype)

    def positions_of(self, layer: int) -> Tensor:
        """True positions of what a layer has cached; kept from the first time that it asks, at its first prefill."""
        if layer not in self.positions:
            shape = (self.rows, self.shape.kv_heads, self.capacity)
            self.positions[layer] = torch.zeros(shape, device=self.device, dtype=torch.int32)
        return self.positions[layer]

    def key(self, layer: int, row: int) -> Tensor:
        """The keys [KV heads, capacity, head size] of a row."""
        return self.keys[layer][row]

    def value(self, layer: int, row: int) -> Tensor:
        """The values [KV heads, capacity, head size] of a row."""
        return self.values[layer][row]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in every row."""
        if tokens <= self.capacity:
            return
        # A quarter more than asked for: growing copies everything, so it must stay rare.
        wanted = aligned(tokens if self.capacity == 0 else max(tokens, self.capacity + self.capacity // 4))
        more = wanted - self.capacity
        for table in (self.keys, self.values):
            for layer, old in enumerate(table):
                table[layer] = torch.nn.functional.pad(old, (0, 0, 0, more))
        self.columns = {name: torch.nn.functional.pad(old, (0, more)) for name, old in self.columns.items()}
        self.positions = {layer: torch.nn.functional.pad(old, (0, more)) for layer, old in self.positions.items()}
        self.capacity = wanted

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        length = self.lengths[source]
        for table in (*self.keys, *self.values):
            table[target, :, :length] = table[source, :, :length]
        for positions in self.positions.values():
            positions[target, :, :length] = positions[source, :, :length]
        for whole in (*self.columns.values(), *self.queries):
            whole[target] = whole[source]
        self.lengths[target] = length

    def clear(self, row: int) -> None:
        """Make a row ready for a new sequence: nothing of the last one may show in what policies noted."""
        for column in self.columns.values():
            column[row] = 0
        self.lengths[row] = 0

    def snapshot(self, row: int) -> Snapshot:
        """A copy of a row, to start other rows from."""
        length = self.lengths[row]
        return Snapshot(
            [keys[row, :, :length].clone() for keys in self.keys],
            [values[row, :, :length].clone() for values in self.values],
            {name: column[row, ..., :length].clone() for name, column in self.columns.items()},
            [queries[row].clone() for queries in self.queries],
            {layer: positions[row, :, :length].clone() for layer, positions in self.positions.items()},
            length,
        )

    def restore(self, snapshot: Snapshot, row: int) -> None:
        """Fill a row from a snapshot."""
        self.reserve(snapshot.length)
        for layer in range(self.shape.layers):
            self.keys[layer][row, :, : snapshot.length] = snapshot.keys[layer]
            self.values[layer][row, :, : snapshot.length] = snapshot.values[layer]
        for layer, positions in snapshot.positions.items():
            self.positions[layer][row, :, : snapshot.length] = positions
        self.clear(row)
        for name, column in snapshot.columns.items():
            self.columns[name][row, ..., : snapshot.length] = column
        for queries, copied in zip(self.queries, snapshot.queries, strict=True):
            queries[row] = copied
        self.lengths[row] = snapshot.length

    def compact(self, row: int, kept: Tensor, columns: tuple[str, ...]) -> None:
        """Keep only the slots `kept` [layers or 1, KV heads or 1, kept] of a row, in that order.

        `columns` are those of the row's policy; what other policies noted about the row is no longer aligned.
        """
        count = kept.shape[-1]
        for layer in range(self.shape.layers):
            slots = kept[min(layer, kept.shape[0] - 1)].expand(self.shape.kv_heads, count)
            if layer in self.positions:
                self.positions[layer][row, :, :count] = self.positions[layer][row].gather(1, slots)
            chosen = slots.unsqueeze(-1).expand(-1, -1, self.shape.head_dim)
            for table in (self.keys[layer], self.values[layer]):
                table[row, :, :count] = table[row].gather(1, chosen)
        for name in columns:
            column = self.columns[name]
            column[row, ..., :count] = column[row].gather(-1, kept)
            column[row, ..., count:] = 0
        self.lengths[row] = count

    @property
    def bytes(self) -> int:
        """Bytes allocated for keys, values, columns, recent queries and positions."""
        tables = [*self.keys, *self.values, *self.columns.values(), *self.queries, *self.positions.values()]
        return sum(table.numel() * table.element_size() for table in tables)
