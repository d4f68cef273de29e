"""The KV cache: keys and values in pages that sequences take, share and release (PagedAttention, arXiv 2309.06180).

A sequence's tokens fill its pages in their original order, keys with the rotation of their true position. Forked
sequences share their pages until one of them compresses; compaction writes into separate pages.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvatlas.bits.key_biases import KeyBiases
from kvatlas.bits.storage import PackedRows
from kvatlas.core import POSITION_BYTES, Shape, Storage
from kvatlas.cpu.native import PagedLayer, PageTables, load
from kvatlas.forward import RowStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens of a page.
PAGE = 64
#: The same on GPUs: the block that FlexAttention reads at a time.
GPU_PAGE = 128
#: The cache grows by at least one part in so many of its size, because growth copies it.
GROWTH = 16
#: The same on CPUs while the cache has fewer bytes than `SMALL`: it would be copied every few steps.
SMALL_GROWTH = 2
SMALL = 2**27
#: Bytes of a large page of Linux.
HUGE_PAGE = 2**21


class Layer(NamedTuple):
    """A layer in a call of attention.

    `place` is its index among the cached layers, `scaling` the factor of its scores. It has a sliding `window` in
    tokens, a `softcap` c, by which scores become c tanh(score / c), and `sinks` [heads], logits that take a share of
    the softmax and have no value, or None.
    """

    place: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_softmax(self) -> bool:
        """True if the weights are a softmax of the scores, without soft cap or sinks."""
        return self.softcap is None and self.sinks is None

    @property
    def plain(self) -> bool:
        """True for a softmax over all earlier tokens without window, soft cap or sinks."""
        return self.window is None and self.is_softmax

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Return the weights of scaled scores [KV heads, query heads of each, new, cached], 0 unless `visible`."""
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def pages_for(tokens: int, page_size: int = PAGE) -> int:
    """Return the number of pages for so many tokens."""
    return -(-tokens // page_size)


def growth(cached_bytes: int, device: str) -> int:
    """Return the `GROWTH` of a cache with so many bytes of keys and values on a device of this type."""
    return SMALL_GROWTH if device == "cpu" and cached_bytes < SMALL else GROWTH


@dataclass(eq=False)
class CachedSequence:
    """A sequence in the cache: `length` tokens in `pages`; `row` is its index in the tensors per sequence."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(eq=False)
class Snapshot:
    """A sequence at a fork: its shared pages, and copies of the tensors that change while others continue.

    `token_state` [layers, KV heads, length] by name, `rings` those of its row; `state` belongs to layers with a state.
    """

    pages: tuple[int, ...]
    length: int
    token_state: dict[str, Tensor]
    rings: list[Tensor]
    state: Any = None


class KVCache:
    """Keys and values of up to `rows` sequences, and the notes of policies beside cached tokens.

    Layers are those that `shape` caches. `keys` are [layers][KV heads, slots, key size], `values` likewise; slot s is
    token s % page_size of page s // page_size. Pools of a packed `storage` hold rows of bytes (`bits.storage`);
    `recent` [layers] has for keys and for values the newest tokens unpacked, [rows + 1, KV heads, residual, size], that
    at position p in place p % residual, or None. Page 0 belongs to no sequence and pads tables. `table` [rows + 1,
    pages] int32 lists each sequence's pages, last those of `idle`, a sequence that pads batches and is never read.
    `token_state` [rows, layers, KV heads, capacity] by name, in the widths of its policy's scope, holds 0 past a
    sequence's length. `queries` [layers][rows + 1, heads, window, head size] are rings of the last `query_window`
    queries: that of the token at position p is in place p % query_window. `layers` are the layers of the last call of
    attention, `positions` [KV heads, slots] int32 the true positions of tokens in layers with a window.
    """

    def __init__(
        self,
        shape: Shape,
        rows: int,
        token_state: dict[str, tuple[int, int]],
        query_window: int,
        device: torch.device,
        dtype: torch.dtype,
        page_size: int = PAGE,
        states: RowStates | None = None,
        storage: Storage = Storage(),  # noqa: B008
        key_biases: KeyBiases | None = None,
        loaded: PreTrainedModel | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        #: The model whose keys and values these are, which policies may look at.
        self.loaded = loaded
        self.rows = rows
        self.device = device
        #: The type of keys and values as policies read them, and that of unpacked pools.
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.page_size = page_size
        self.query_window = query_window
        #: The states of rows, for models with such layers.
        self.states = states
        self.storage = storage
        self.packed = storage.packed
        #: The form of its rows, and the biases that packed keys are without.
        self.form = PackedRows(storage, key_biases)
        self.key_biases = self.form.key_biases

        key_sizes = [layer.key for layer in shape.cached_layers]
        value_sizes = [layer.value for layer in shape.cached_layers]
        key_bytes = 0 if self.key_biases is None else POSITION_BYTES
        self.keys, recent_keys = self._empty_pools(storage.key_bits, key_sizes, key_bytes)
        self.values, recent_values = self._empty_pools(storage.value_bits, value_sizes, 0)
        self.recent = list(zip(recent_keys, recent_values, strict=True))

        self.positions: dict[int, Tensor] = {}
        self.layers: dict[int, Layer] = {}
        self.idle = CachedSequence(rows)
        self.table = torch.zeros(rows + 1, 1, dtype=torch.int32, device=device)
        self.token_state = {
            name: torch.zeros(rows, layers, heads, 0, device=device) for name, (layers, heads) in token_state.items()
        }
        #: The number of tokens of a sequence with room for notes.
        self.capacity = 0
        self.queries = [
            torch.zeros(rows + 1, shape.heads, query_window, layer.key, device=device, dtype=dtype)
            for layer in (shape.cached_layers if query_window else ())
        ]

        #: The number of replacements of a tensor by a larger one.
        self.moves = 0
        #: The layers over these pools as native code takes them, until the pools are replaced.
        self.paged_layers: Sequence[PagedLayer] | None = None
        #: All that a token has in the pools, until one of them is replaced or added.
        self.tables: PageTables | None = None
        #: The number of sequences and snapshots that hold each page.
        self.holders = [1]
        self.reset()

    def _empty_pools(
        self, bits: int, sizes: Sequence[int], more_bytes: int
    ) -> tuple[list[Tensor], list[Tensor] | list[None]]:
        """Return for keys or values of these sizes pools without pages, and the rings of unpacked tokens, by layer.

        Packed rows have room for `more_bytes`; rings that are not needed are None.
        """
        if bits == 16:
            return [self._pool(0, size, self.kv_dtype) for size in sizes], [None for _ in sizes]
        pools = [self._pool(0, self.storage.row_bytes(bits, size) + more_bytes, torch.uint8) for size in sizes]
        residual = self.storage.residual
        if not residual:
            return pools, [None for _ in sizes]
        ring = (self.rows + 1, self.shape.kv_heads, residual)
        return pools, [torch.zeros(*ring, size, device=self.device, dtype=self.dtype) for size in sizes]

    def _pool(self, pages: int, width: int, dtype: torch.dtype) -> Tensor:
        shape = (self.shape.kv_heads, pages * self.page_size, width)
        size = math.prod(shape) * dtype.itemsize
        if self.device.type != "cpu" or not size:
            return torch.zeros(shape, device=self.device, dtype=dtype)
        # A separate mapping returns the old memory of a grown cache to the system at once. It is private, because Linux
        # by default gives large pages, which are faster to fill and to read, to private mappings only.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

        # A large page is filled with zeros as a whole, which takes longer than a small pool is read faster.
        is_large = size >= 2 * HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
        try:
            memory = mmap.mmap(-1, size + (HUGE_PAGE if is_large else 0), **private)
        except OSError as error:
            raise MemoryError(f"{size} bytes of the cache: {error}") from error

        mapped = torch.frombuffer(memory, dtype=torch.uint8)
        start = 0
        if is_large:
            # The first large page begins where the pool does.
            start = -mapped.data_ptr() % HUGE_PAGE
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return mapped[start : start + size].view(dtype).view(shape)

    @property
    def rings(self) -> list[Tensor]:
        """Queries and unpacked tokens by row: tensors [rows + 1, ...] that a fork copies."""
        unpacked = itertools.chain.from_iterable(self.recent)
        return [*self.queries, *(ring for ring in unpacked if ring is not None)]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor, positions: Tensor | None = None) -> None:
        """Write new keys and values [tokens, KV heads, size] into their slots, packed as the storage is.

        Keys with biases need their `positions` [tokens].
        """
        for side, pools, numbers in ((0, self.keys, key), (1, self.values, value)):
            rows = self.form.pack(side, layer, numbers, positions)
            pools[layer][:, slots] = rows.transpose(0, 1).to(pools[layer].dtype)

    def read(self, side: int, layer: int, slots: Tensor) -> Tensor:
        """Return the keys (side 0) or the values (side 1) of slots [...] as they are read: [KV heads, ..., size]."""
        pool = (self.keys, self.values)[side][layer]
        cached_layer = self.shape.cached_layers[layer]
        size = (cached_layer.key, cached_layer.value)[side]
        return self.form.unpack(side, layer, pool[:, slots], size, self.dtype)

    def reset(self) -> None:
        """Forget every sequence; the memory stays."""
        self.holders = [1] + [0] * (len(self.holders) - 1)
        self._free_pages = list(range(len(self.holders) - 1, 0, -1))
        self._free_rows = list(range(self.rows - 1, -1, -1))

    def begin(self) -> CachedSequence:
        sequence = CachedSequence(self._free_rows.pop())
        for state in self.token_state.values():
            # Remove the notes about the last sequence.
            state[sequence.row] = 0
        if self.states is not None:
            self.states.rows.pop(sequence.row, None)
        return sequence

    def reserve(self, sequence: CachedSequence, tokens: int) -> None:
        if tokens > len(sequence.pages) * self.page_size:
            missing = pages_for(tokens, self.page_size) - len(sequence.pages)
            self._give(sequence, self._take(missing))
        if tokens > self.capacity:
            self._widen_states(tokens + self.capacity // GROWTH)

    def make_room(self, tokens: int, longest: int) -> None:
        """Take the memory for so many tokens of all sequences at once, and for notes of the `longest` one."""
        missing = pages_for(tokens, self.page_size) + 1 - len(self.holders)
        if missing > 0:
            self._grow(missing)
        self._widen_table(pages_for(longest, self.page_size))
        self._widen_states(longest)

    def end(self, sequence: CachedSequence) -> None:
        self.release(sequence.pages)
        self._free_rows.append(sequence.row)

    def fork(self, sequence: CachedSequence, branches: int) -> Snapshot:
        """Return a snapshot for so many branches, each with one `resume`; the sequence itself continues, too."""
        pages = sequence.pages[: pages_for(sequence.length, self.page_size)]
        for page in pages:
            self.holders[page] += branches
        states = {name: state[sequence.row, ..., : sequence.length].clone() for name, state in self.token_state.items()}
        rings = [ring[sequence.row].clone() for ring in self.rings]
        layer_state = None if self.states is None else copy.deepcopy(self.states.of(sequence.row))
        return Snapshot(tuple(pages), sequence.length, states, rings, layer_state)

    def resume(self, snapshot: Snapshot) -> CachedSequence:
        """Return a sequence that continues a snapshot. Its pages are shared: it has to be compacted before it grows."""
        sequence = self.begin()
        sequence.length = snapshot.length
        self._give(sequence, snapshot.pages)
        self.reserve(sequence, snapshot.length)
        for name, state in snapshot.token_state.items():
            self.token_state[name][sequence.row, ..., : snapshot.length] = state
        for ring, copied in zip(self.rings, snapshot.rings, strict=True):
            ring[sequence.row] = copied
        if self.states is not None:
            self.states.rows[sequence.row] = copy.deepcopy(snapshot.state)
        return sequence

    def reopen(self, snapshot: Snapshot) -> CachedSequence:
        """Return a sequence that continues a snapshot in pages of its own; the snapshot may be continued again."""
        for page in snapshot.pages:
            self.holders[page] += 1
        return self.resume_apart(snapshot)

    def resume_apart(self, snapshot: Snapshot) -> CachedSequence:
        """Return a sequence that continues a snapshot in pages of its own, once for each of its branches."""
        sequence = self.resume(snapshot)
        everything = torch.arange(snapshot.length, device=self.device)
        self.compact(sequence, everything.expand(1, 1, -1), ())
        return sequence

    def compact(self, sequence: CachedSequence, kept: Tensor, names: Sequence[str]) -> None:
        """Keep only the tokens `kept` [layers or 1, KV heads or 1, kept] of a sequence, in that order.

        `names` are the token states of its policy; the notes of other policies are no longer aligned.
        """
        count = kept.shape[-1]
        before = sequence.pages
        needed = pages_for(count, self.page_size)
        if max((self.holders[page] for page in before), default=1) == 1:
            # Pages of its own stay, so that tokens move forward in them.
            sequence.pages = before[:needed]
            self.release(before[needed:])
        else:
            self.release(before)
            sequence.pages = []
            self._give(sequence, self._take(needed))
        sequence.length = count

        if self.tables is None:
            by_layer = [*enumerate(self.keys), *enumerate(self.values), *self.positions.items()]
            self.tables = PageTables(by_layer)
        native = load() if self.device.type == "cpu" else None
        if native is not None:
            native.compact(self.tables, kept, before, sequence.pages, self.page_size)
        else:
            slots_before = self._slots_of(before)
            slots_after = self._slots_of(sequence.pages)[:count]
            heads = torch.arange(self.shape.kv_heads, device=self.device)[:, None]
            for layer, pool in self.tables.by_layer:
                # Rows of the pool with its heads one after the other: whole rows are copied faster than numbers.
                rows = slots_before[kept[min(layer, len(kept) - 1)]] + heads * pool.shape[1]
                kept_rows = pool.flatten(0, 1).index_select(0, rows.flatten())
                pool.index_copy_(1, slots_after, kept_rows.view(len(heads), -1, *pool.shape[2:]))

        for name in names:
            state = self.token_state[name][sequence.row]
            state[..., :count] = state.gather(-1, kept)
            state[..., count:] = 0

    def slots(self, sequence: CachedSequence) -> Tensor:
        return self._slots_of(sequence.pages)[: sequence.length]

    def _slots_of(self, pages: Sequence[int]) -> Tensor:
        first = torch.tensor(pages, dtype=torch.long, device=self.device)[:, None] * self.page_size
        return (first + torch.arange(self.page_size, device=self.device)).flatten()

    def watch_window(self, layer: int) -> Tensor:
        """Return the positions of a layer with a sliding window, stored from its first token on."""
        if layer not in self.positions:
            self.tables = None
            self.positions[layer] = self.keys[layer].new_zeros(self.keys[layer].shape[:2], dtype=torch.int32)
        return self.positions[layer]

    @property
    def bytes(self) -> int:
        """Bytes allocated for keys, values, token states, rings and positions."""
        tables = [*self.keys, *self.values, *self.token_state.values(), *self.rings, *self.positions.values()]
        return sum(table.numel() * table.element_size() for table in tables)

    def _give(self, sequence: CachedSequence, pages: Sequence[int]) -> None:
        start = len(sequence.pages)
        stop = start + len(pages)
        sequence.pages.extend(pages)
        if stop > self.table.shape[1]:
            self._widen_table(stop + stop // GROWTH)
        self.table[sequence.row, start:stop] = torch.tensor(pages, dtype=torch.int32)

    def _widen_table(self, pages: int) -> None:
        more = pages - self.table.shape[1]
        if more > 0:
            self.table = torch.nn.functional.pad(self.table, (0, more))
            self.moves += 1

    def _widen_states(self, tokens: int) -> None:
        more = pages_for(tokens, self.page_size) * self.page_size - self.capacity
        if more > 0 and self.token_state:
            self.capacity += more
            self.token_state = {name: torch.nn.functional.pad(old, (0, more)) for name, old in self.token_state.items()}
            self.moves += 1

    def _take(self, pages: int) -> list[int]:
        if pages > len(self._free_pages):
            self._grow(pages - len(self._free_pages))
        new = [self._free_pages.pop() for _ in range(pages)]
        for page in new:
            self.holders[page] = 1
        return new

    def release(self, pages: Sequence[int]) -> None:
        """Give back pages that a sequence or a snapshot holds, which no other one will read by it."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free_pages.append(page)

    def _grow(self, missing: int) -> None:
        self.moves += 1
        self.paged_layers = None
        self.tables = None
        used = self.keys[0].shape[1]
        cached_bytes = sum(pool.numel() * pool.element_size() for pool in (*self.keys, *self.values))
        pages = len(self.holders) + max(missing, len(self.holders) // growth(cached_bytes, self.device.type))

        for pools in (self.keys, self.values):
            for layer, old in enumerate(pools):
                pools[layer] = self._pool(pages, old.shape[-1], old.dtype)
                pools[layer][:, :used] = old

        wider = self.keys[0].shape[1] - used
        self.positions = {layer: torch.nn.functional.pad(old, (0, wider)) for layer, old in self.positions.items()}
        self._free_pages += range(pages - 1, len(self.holders) - 1, -1)
        self.holders += [0] * (pages - len(self.holders))
