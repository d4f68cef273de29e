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
#: Places that share one allocation; each such shelf is as long as its own longest row alone.
SHELF = 16


def aligned(tokens: int) -> int:
    """The smallest capacity that holds so many tokens."""
    return -(-max(tokens, 1) // ALIGNMENT) * ALIGNMENT


def roomy(tokens: int) -> int:
    """The capacity of a shelf that has to hold `tokens`: up to a quarter more, because growing copies it."""
    step = max(ALIGNMENT, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


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

    Slots hold tokens in their original order, keys with the rotation of their true position. Row r has the place
    `places[r]`; places stand on shelves of `SHELF`, each an allocation of its own that grows with its longest row, so
    that short rows do not pay for long ones: rows that a KV budget bounds take places from the first on, others from
    the last. Columns hold 0 in every slot past a row's length. Where policies look at recent queries, rows have rings
    for the last `ring` of them: the query of the token at position p is in place p % ring.
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
        #: Places on each shelf, and the tokens that each of them can hold.
        self.shelves = [min(SHELF, rows - start) for start in range(0, rows, SHELF)]
        self.capacities = [0] * len(self.shelves)
        #: [layers][shelves] of [places, KV heads, capacity, head size].
        self.keys = [[self._empty(places, 0) for places in self.shelves] for _ in range(shape.layers)]
        self.values = [[self._empty(places, 0) for places in self.shelves] for _ in range(shape.layers)]
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
        #: What each layer multiplies q k by before its softmax, kept from its first prefill on.
        self.scalings: dict[int, float] = {}
        self.lengths = [0] * rows
        self.places = list(range(rows))

    def _empty(self, places: int, tokens: int) -> Tensor:
        shape = (places, self.shape.kv_heads, tokens, self.shape.head_dim)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    @property
    def capacity(self) -> int:
        """Tokens that the longest shelf can hold."""
        return max(self.capacities)

    def positions_of(self, layer: int) -> Tensor:
        """True positions of what a layer has cached; kept from the first time that it asks, at its first prefill."""
        if layer not in self.positions:
            shape = (self.rows, self.shape.kv_heads, self.capacity)
            self.positions[layer] = torch.zeros(shape, device=self.device, dtype=torch.int32)
        return self.positions[layer]

    def key(self, layer: int, row: int) -> Tensor:
        """The keys [KV heads, capacity, head size] of a row."""
        shelf, place = divmod(self.places[row], SHELF)
        return self.keys[layer][shelf][place]

    def value(self, layer: int, row: int) -> Tensor:
        """The values [KV heads, capacity, head size] of a row."""
        shelf, place = divmod(self.places[row], SHELF)
        return self.values[layer][shelf][place]

    def take(self, row: int, bound: int | None, tokens: int) -> None:
        """Give the free row `row` a place with room for `tokens`, and for its `bound` if its length has one."""
        choose = max if bound is None else min
        other = choose(range(row, self.rows), key=self.places.__getitem__)
        self.places[row], self.places[other] = self.places[other], self.places[row]
        self.reserve(row, max(tokens, bound or 0))
        for column in self.columns.values():
            # Nothing of the last sequence may show in what policies noted.
            column[self.places[row]] = 0
        self.lengths[row] = 0

    def reserve(self, row: int, tokens: int) -> None:
        """Make room for `tokens` in a row, and so on its whole shelf."""
        shelf = self.places[row] // SHELF
        if tokens > self.capacities[shelf]:
            self._grow(shelf, roomy(tokens))

    def _grow(self, shelf: int, wanted: int) -> None:
        had, before = self.capacities[shelf], self.capacity
        for table in (self.keys, self.values):
            for layer in table:
                more = self._empty(self.shelves[shelf], wanted)
                more[:, :, :had] = layer[shelf]
                layer[shelf] = more
        self.capacities[shelf] = wanted
        wider = self.capacity - before
        if wider:
            self.columns = {name: torch.nn.functional.pad(old, (0, wider)) for name, old in self.columns.items()}
            self.positions = {layer: torch.nn.functional.pad(old, (0, wider)) for layer, old in self.positions.items()}

    def drop(self, row: int, last: int) -> None:
        """Free a row: the row `last`, the last in use, becomes row `row`, where it stands."""
        self.places[row], self.places[last] = self.places[last], self.places[row]
        self.lengths[row], self.lengths[last] = self.lengths[last], self.lengths[row]

    def snapshot(self, row: int) -> Snapshot:
        """A copy of a row, to start other rows from."""
        length, place = self.lengths[row], self.places[row]
        layers = range(self.shape.layers)
        return Snapshot(
            [self.key(layer, row)[:, :length].clone() for layer in layers],
            [self.value(layer, row)[:, :length].clone() for layer in layers],
            {name: column[place, ..., :length].clone() for name, column in self.columns.items()},
            [queries[place].clone() for queries in self.queries],
            {layer: positions[place, :, :length].clone() for layer, positions in self.positions.items()},
            length,
        )

    def restore(self, snapshot: Snapshot, row: int, bound: int | None) -> None:
        """Fill a free row from a snapshot."""
        length = snapshot.length
        self.take(row, bound, length)
        place = self.places[row]
        for layer in range(self.shape.layers):
            self.key(layer, row)[:, :length] = snapshot.keys[layer]
            self.value(layer, row)[:, :length] = snapshot.values[layer]
        for layer, positions in snapshot.positions.items():
            self.positions[layer][place, :, :length] = positions
        for name, column in snapshot.columns.items():
            self.columns[name][place, ..., :length] = column
        for queries, copied in zip(self.queries, snapshot.queries, strict=True):
            queries[place] = copied
        self.lengths[row] = length

    def compact(self, row: int, kept: Tensor, columns: tuple[str, ...]) -> None:
        """Keep only the slots `kept` [layers or 1, KV heads or 1, kept] of a row, in that order.

        `columns` are those of the row's policy; what other policies noted about the row is no longer aligned.
        """
        count, place = kept.shape[-1], self.places[row]
        for layer in range(self.shape.layers):
            slots = kept[min(layer, kept.shape[0] - 1)].expand(self.shape.kv_heads, count)
            if layer in self.positions:
                positions = self.positions[layer][place]
                positions[:, :count] = positions.gather(1, slots)
            chosen = slots.unsqueeze(-1).expand(-1, -1, self.shape.head_dim)
            for table in (self.key(layer, row), self.value(layer, row)):
                table[:, :count] = table.gather(1, chosen)
        for name in columns:
            column = self.columns[name][place]
            column[..., :count] = column.gather(-1, kept)
            column[..., count:] = 0
        self.lengths[row] = count

    @property
    def bytes(self) -> int:
        """Bytes allocated for keys, values, columns, recent queries and positions."""
        cached = [shelf for table in (self.keys, self.values) for layer in table for shelf in layer]
        tables = [*cached, *self.columns.values(), *self.queries, *self.positions.values()]
        return sum(table.numel() * table.element_size() for table in tables)
