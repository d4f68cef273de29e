"""Steps of fixed shapes, which a GPU replays as CUDA graphs: forward pass and draw, with no word from the host between.

A fixed step feeds all places of the shelves in use, idle ones too, and reads what differs from step to step from
buffers on the device. Attention is FlexAttention, whose decode kernel splits a row's keys and values over the GPU's
processors and reads the blocks that are in use alone (Dong et al., "Flex Attention", arXiv 2412.05496; splitting: Dao
et al., "Flash-Decoding for long-context inference", 2023).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import flex_attention as flex

from kvatlas.engine.cache import SHELF, Slots
from kvatlas.engine.sampling import draw, draw_rows
from kvatlas.policies import Signal

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.core import Sampling
    from kvatlas.engine.observation import Observers
    from kvatlas.engine.rows import Row
    from kvatlas.models import Model

#: Keys and values are read in blocks of so many slots.
BLOCK = 128
#: How often FlexAttention is compiled at most: for the first shape, then once or twice for all capacities to come.
COMPILED = 64


class Fixed:
    """One token for every place of the shelves `shelves`; a pass of the model like `Pass`, of which no tensor moves.

    `inputs` [4, places] are the tokens, their positions, lengths of the cache before them and random streams. Idle
    places have zeros there: what they write into their first slot, nobody reads. `places` [places] are their numbers.
    """

    prefill = None

    def __init__(self, slots: Slots, shelves: tuple[int, ...], kernel: Callable[..., Tensor]) -> None:
        device = slots.device
        self.slots, self.kernel = slots, kernel
        #: Query heads of a KV head; they stand where queries of one head would, so that any number of them is split.
        self.group = slots.shape.heads // slots.shape.kv_heads
        self.numbers = [SHELF * shelf + place for shelf in shelves for place in range(slots.shelves[shelf])]
        self.places = torch.tensor(self.numbers, device=device)
        self.inputs = torch.zeros(4, len(self.numbers), dtype=torch.int64, device=device)
        self.staged = torch.zeros(self.inputs.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.tokens, self.positions, self.lengths, self.streams = self.inputs
        self.blocks = torch.zeros(len(self.numbers), 1, 1, dtype=torch.int32, device=device)
        self.parts: list[tuple[int, slice, Tensor, flex.BlockMask]] = []
        start = 0
        for shelf in shelves:
            part = slice(start, start + slots.shelves[shelf])
            own = torch.arange(slots.shelves[shelf], device=device)
            self.parts.append((shelf, part, own, self._mask(part, slots.capacities[shelf])))
            start = part.stop

    def _mask(self, part: slice, capacity: int) -> flex.BlockMask:
        lengths, blocks = self.lengths[part], self.blocks[part]

        def seen(row: Tensor, _head: Tensor, _query: Tensor, slot: Tensor) -> Tensor:
            near: Tensor = slot <= lengths[row]
            return near

        order = torch.arange(-(-capacity // BLOCK), dtype=torch.int32, device=self.inputs.device)
        order = order.expand(*blocks.shape, -1).contiguous()
        return flex.BlockMask.from_kv_blocks(
            blocks, order, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(self.group, capacity)
        )

    def stage(self, rows: Sequence[Row[Any]]) -> list[int]:
        """Send what the rows feed to the device in one copy; the line of each row."""
        line = {number: line for line, number in enumerate(self.numbers)}
        lines = [line[self.slots.places[index]] for index in range(len(rows))]
        self.staged.zero_()
        fed = [(row.tokens[-1], row.position, self.slots.lengths[i], row.request.stream) for i, row in enumerate(rows)]
        self.staged[:, lines] = torch.tensor(fed).T
        self.inputs.copy_(self.staged, non_blocking=True)
        return lines

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """As `attention.attend`, for one new token in each line: [lines, 1, heads, size]."""
        slots = self.slots
        if slots.ring:
            slots.queries[layer][self.places, :, self.positions % slots.ring] = query[:, :, 0]
        grouped = query.view(len(query), slots.shape.kv_heads, self.group, -1)
        found = []
        for shelf, part, own, mask in self.parts:
            keys, values = slots.keys[layer][shelf], slots.values[layer][shelf]
            keys[own, :, self.lengths[part]] = key[part, :, 0]
            values[own, :, self.lengths[part]] = value[part, :, 0]
            found.append(self.kernel(grouped[part], keys, values, block_mask=mask, scale=scaling))
        return torch.cat(found).reshape(len(query), 1, slots.shape.heads, -1)


class Graphs:
    """Fixed steps of one engine, one for each set of shelves in use; captured as CUDA graphs where there is CUDA.

    `forward` gives logits and last hidden states of a pass, from tokens and positions [lines, 1].
    """

    def __init__(
        self,
        model: Model,
        slots: Slots,
        observers: Observers,
        sampling: Sampling,
        forward: Callable[[Tensor, Tensor, Fixed], tuple[Tensor, Tensor | None]],
    ) -> None:
        self.model, self.slots, self.observers, self.forward = model, slots, observers, forward
        self.sampling = replace(sampling, max_new_tokens=0)
        self.cuda = slots.device.type == "cuda"
        self.kernel = torch.compile(flex.flex_attention) if self.cuda else flex.flex_attention
        #: Whether capturing failed; fixed steps so far.
        self.broken, self.steps = False, 0
        self._made: dict[tuple[int, ...], Graph] = {}
        self._capacities: list[int] = []
        self._pool = torch.cuda.graph_pool_handle() if self.cuda else None

    def draw(self, rows: Sequence[Row[Any]]) -> list[list[int]] | None:
        """Feed the newest token of every row and draw the next; None where a row needs more than a fixed step does.

        Slots must have room for the tokens. What is drawn comes back to the host in one copy.
        """
        asked = [row.asked for row in rows]
        # Layers with a window mask by position, and weights that policies watch have as many slots as are in use.
        if self.broken or self.slots.windows or self.observers.rows(Signal.ATTENTION, asked):
            return None
        found = self._step(rows)
        if found is None:
            return None
        graph, lines = found
        fixed = graph.fixed
        places = fixed.lengths[:, None], fixed.positions[:, None]
        self.observers.show(self.model, fixed, asked, *places, graph.hidden)
        if all(row.sampling == self.sampling and row.request.adjust is None for row in rows):
            numbers = graph.drawn.tolist()
            return [[numbers[line]] for line in lines]
        return [[token] for token in draw_rows(graph.logits[lines], rows, [row.position + 1 for row in rows])]

    def _step(self, rows: Sequence[Row[Any]]) -> tuple[Graph, list[int]] | None:
        """What came out, and the line of each row in it; None if it can't be captured."""
        if self._capacities != self.slots.capacities:
            # Shelves that grew have moved.
            self._made.clear()
            self._capacities = list(self.slots.capacities)
        shelves = tuple(sorted({self.slots.places[index] // SHELF for index in range(len(rows))}))
        graph = self._made.get(shelves)
        if graph is not None:
            lines = graph.fixed.stage(rows)
            graph.run()
            self.steps += 1
            return graph, lines
        fixed = Fixed(self.slots, shelves, self.kernel)
        lines = fixed.stage(rows)
        try:
            graph = self._made[shelves] = Graph(fixed, self.sampling, self.forward, self._capture)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self.cuda:
                raise
            self.broken = True
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"CUDA graphs are off, decoding goes on step by step: {reason}", stacklevel=2)
            return None
        self.steps += 1
        return graph, lines

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work; what does it again. Doing it twice changes nothing: the same values go into the same slots."""
        if not self.cuda:
            work()
            return work
        import torch._dynamo

        graph = torch.cuda.CUDAGraph()

        def replay() -> None:
            with torch.cuda.device(self.slots.device):
                graph.replay()

        with torch.cuda.device(self.slots.device):
            # Before capturing: compiles and allocates, on a stream of its own as CUDA asks for.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside), torch._dynamo.config.patch(recompile_limit=COMPILED):
                work()
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        replay()
        return replay


class Graph:
    """A fixed step with what comes out of it.

    `logits` and `drawn`, by the engine's sampling, belong to the lines; so do the last `hidden` states [lines, 1,
    hidden size], None if nobody asked for them.
    """

    logits: Tensor
    drawn: Tensor
    hidden: Tensor | None

    def __init__(
        self,
        fixed: Fixed,
        sampling: Sampling,
        forward: Callable[[Tensor, Tensor, Fixed], tuple[Tensor, Tensor | None]],
        capture: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self.fixed = fixed

        def work() -> None:
            fixed.blocks[:, 0, 0] = fixed.lengths // BLOCK + 1
            self.logits, self.hidden = forward(fixed.tokens[:, None], fixed.positions[:, None], fixed)
            self.drawn = draw(self.logits, sampling, fixed.streams, fixed.positions + 1)

        self.run = capture(work)
