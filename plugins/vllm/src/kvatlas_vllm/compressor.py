"""The requests of a model runner: after a step their policy observes it, and their caches are compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvatlas import models, policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine.cache import CachedSequence
from kvatlas.engine.rows import Request, Row
from kvatlas.policies import CacheView, CompressingPolicy, Signal, Step, select_tokens
from kvatlas_vllm.layout import LayerCache

#: The signals that are collected.
SIGNALS = frozenset({Signal.HIDDEN, Signal.QUERIES})


class Compression(NamedTuple):
    """A compression of a request, for the scheduler: the tokens of the sequence so far, and those in its cache."""

    position: int
    cached: int


def policy_of(values: Mapping[str, Any], model: models.ModelHandle) -> CompressingPolicy:
    """Return the policy of a setting for a model. Raises KvatlasError for one that cannot run in vLLM."""
    named = dict(values)
    policy = policies.from_setting(Setting.from_parameters(named.pop("policy"), **named))
    if not isinstance(policy, CompressingPolicy):
        raise KvatlasError(f"The policy {policy.name!r} compresses nothing; leave the setting out for the full cache.")
    faults = {
        "random choices": policy.random,
        "keys and values of few bits": policy.storage.packed,
        "thinking_tokens": policy.cap is not None,
        "the signal attention": bool(policy.observes - SIGNALS),
    }
    refused = [name for name, is_asked in faults.items() if is_asked]
    if refused:
        raise KvatlasError(f"The setting {policy.setting} needs {', '.join(refused)}, which the plug-in does not have.")
    fitted = policies.fit_policy(policy, model)
    assert isinstance(fitted, CompressingPolicy)
    return fitted


@dataclass
class Notes:
    """A policy's columns of one sequence [cached], by name, while `entered` tokens enter (`PolicyNotes`)."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    cached: int = 0

    def enter(self, name: str, values: Tensor) -> None:
        before = self.columns.get(name, values.new_zeros(0))
        self.columns[name] = torch.cat([before[: self.cached], values[0]])

    def read(self, name: str) -> Tensor:
        return self.columns[name][None, None, None]

    def write(self, name: str, values: Tensor) -> None:
        self.columns[name] = values[0, 0, 0]


@dataclass
class Sequence:
    """A running request: kvatlas's row, the notes of its policy, and its recent queries by layer."""

    row: Row[str]
    notes: Notes = field(default_factory=Notes)
    queries: dict[int, Tensor] = field(default_factory=dict)

    @property
    def evicted(self) -> int:
        return self.row.position - self.row.cached.length


class BlocksView(CacheView):
    """The cache of a sequence in vLLM's blocks, as its policy sees it at a compression."""

    def __init__(
        self,
        model: models.ModelHandle,
        layers: list[LayerCache],
        sequence: Sequence,
        policy: CompressingPolicy,
        contents: list[tuple[Tensor, Tensor]],
    ) -> None:
        row = sequence.row
        device = contents[0][0].device
        self.model = model
        self.positions = row.cached_positions(policy.scope.width(model.shape), device)
        self.columns = {name: column[None, None] for name, column in sequence.notes.columns.items()}
        self.prompt_length = len(row.request.prompt)
        self.thinking_end = None if row.thinking_end is None else self.prompt_length + row.thinking_end
        self.length = row.position
        self.stream = row.request.stream
        self._layers = layers
        self._sequence = sequence
        self._contents = contents

    def key(self, layer: int) -> Tensor:
        return self._contents[layer][0].transpose(0, 1)

    def value(self, layer: int) -> Tensor:
        return self._contents[layer][1].transpose(0, 1)

    def query(self, layer: int) -> Tensor:
        return self._sequence.queries[layer]

    def tokens(self) -> Tensor:
        row = self._sequence.row
        return torch.tensor([*row.request.prompt, *row.tokens[:-1]], device=self.positions.device)

    def scaling(self, layer: int) -> float:
        return self._layers[layer].scaling


class Compressor:
    """The compressions of a model runner of vLLM.

    `layers` are the model's attention layers, in order. A row's position counts the tokens of the sequence, as vLLM's
    number of computed tokens does; its cached length is what lies in the blocks.
    """

    def __init__(self, runner: Any, folder: str, values: Mapping[str, Any], layers: list[Any]) -> None:
        self.runner = runner
        self.model = models.find(folder)
        self.policy = policy_of(values, self.model)
        self.layers = [LayerCache(layer) for layer in layers]
        self.sequences: dict[str, Sequence] = {}
        self.captured: dict[int, Tensor] = {}
        if Signal.QUERIES in self.policy.observes:
            for index, layer in enumerate(layers):
                self._capture_queries(index, layer.impl)

    def _capture_queries(self, index: int, implementation: Any) -> None:
        forward = implementation.forward

        def capturing(layer: Any, query: Tensor, *others: Any, **more: Any) -> Any:
            self.captured[index] = query
            return forward(layer, query, *others, **more)

        implementation.forward = capturing

    def sequence(self, request_id: str) -> Sequence:
        """Return the sequence of a request, begun if it is new."""
        if request_id not in self.sequences:
            prompt = tuple(self.runner.requests[request_id].prompt_token_ids)
            request = Request(request_id, prompt, 0, (self.policy,))
            row = Row(request, (self.policy,), frozenset(), Sampling(), 0, CachedSequence(0))
            row.trigger = row.next_trigger()
            self.sequences[request_id] = Sequence(row)
        return self.sequences[request_id]

    def forget(self, request_id: str) -> None:
        """Forget a request that ended, or begins again."""
        self.sequences.pop(request_id, None)

    def shift_slots(self, tokens: int) -> None:
        """Change the prepared inputs of a step, whose slots and lengths count evicted tokens, too.

        Positions, which rotate queries and keys, stay.
        """
        runner = self.runner
        count = runner.input_batch.num_reqs
        evicted = [self.sequence(request_id).evicted for request_id in runner.input_batch.req_ids[:count]]
        if not any(evicted):
            return
        shift = torch.tensor(evicted, dtype=runner.seq_lens.dtype)
        runner.optimistic_seq_lens_cpu[:count] -= shift
        shift = shift.to(runner.device)
        runner.seq_lens[:count] -= shift
        slots = runner.positions[:tokens] - shift[runner.req_indices.gpu[:tokens].long()]
        starts = runner.query_start_loc.gpu[: count + 1]
        runner.input_batch.block_table.compute_slot_mapping(count, starts, slots)

    @torch.inference_mode()
    def after_step(self, scheduled: Mapping[str, int], hidden: Tensor) -> dict[str, Compression]:
        """Observe a step, and compress the caches that have reached their budget."""
        compressions = {}
        start = 0
        for request_id in self.runner.input_batch.req_ids:
            stop = start + scheduled[request_id]
            sequence = self.sequence(request_id)
            self._observe(sequence, hidden[start:stop], start, stop)
            self._advance(sequence, stop - start)
            row = sequence.row
            if row.position > len(row.request.prompt) and row.due() and self._compress(sequence):
                compressions[request_id] = Compression(row.position, row.cached.length)
            start = stop
        self.captured.clear()
        return compressions

    def _observe(self, sequence: Sequence, hidden: Tensor, start: int, stop: int) -> None:
        for layer, queries in self.captured.items():
            new = queries[start:stop].view(stop - start, -1, self.layers[layer].size[1]).transpose(0, 1)
            old = sequence.queries.get(layer, new[:, :0])
            sequence.queries[layer] = torch.cat([old, new], 1)[:, -self.policy.queries :]
        if Signal.HIDDEN not in self.policy.observes:
            return

        row = sequence.row
        prompt = len(row.request.prompt)
        sequence.notes.cached = row.cached.length
        positions = torch.arange(row.position, row.position + stop - start, device=hidden.device)[None]
        length = prompt if row.position < prompt else None
        self.policy.observe(Step(self.model, positions, hidden[None], None, sequence.notes, length))

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Note that tokens entered the cache, and the end of thinking, with the token that was written after them."""
        row = sequence.row
        row.cached.length += count
        row.position += count
        written = self.runner.requests[row.request.key].output_token_ids
        known = row.position + 1 - len(row.request.prompt)
        for token in written[len(row.tokens) : max(0, known)]:
            row.tokens.append(token)
            if row.thinking_end is None:
                row.thinking_end = self.model.thinking_end(row.tokens)

    def _compress(self, sequence: Sequence) -> bool:
        """Move the keys and values of the tokens that stay to the front; return False if all stay."""
        row = sequence.row
        state = self.runner.requests[row.request.key]
        block_ids = torch.tensor(state.block_ids[0], device=self.runner.device)
        contents = [layer.read(block_ids, row.cached.length) for layer in self.layers]
        view = BlocksView(self.model, self.layers, sequence, self.policy, contents)
        kept = select_tokens(self.policy, view)
        count = kept.shape[-1]
        if count == row.cached.length:
            return False

        # Slots before the first evicted token stay as they are.
        table = self.runner.input_batch.block_table[0]
        size = table.block_size
        moved = (kept != torch.arange(count, device=kept.device)).any(0).any(0)
        first = int(moved.int().argmax())
        places = torch.arange(first, count, device=kept.device)
        slots = block_ids[places // size] * size + places % size
        shape = self.model.shape
        sources = kept.expand(shape.layers, shape.kv_heads, -1)[..., first:]
        for layer, source, (key, value) in zip(self.layers, sources, contents, strict=True):
            index = source.T[..., None].expand(-1, -1, key.shape[-1])
            layer.write(layer.blocks, slots, key.gather(0, index), value.gather(0, index))

        positions = view.positions.gather(-1, kept)
        sequence.notes.columns = {name: old[kept[0, 0]] for name, old in sequence.notes.columns.items()}
        row.cached.length = count
        row.note_compression(positions, self.policy.budget.window)

        # The tail blocks belong to the request no more.
        blocks = -(-count // size)
        del state.block_ids[0][blocks:]
        table.num_blocks_per_row[self.runner.input_batch.req_id_to_index[row.request.key]] = blocks
        return True
