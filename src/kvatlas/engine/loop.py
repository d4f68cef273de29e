"""The one decode loop, for every policy and every caller.

Each turn: (1) fill free rows, with waiting branches first, then with new requests, which are prefilled; (2) feed the
last token of every row through the model; (3) let policies observe; (4) draw the next tokens; (5) hand out finished
rows; (6) fork and compress the rows whose cache reached a KV budget.

All settings of a request run as one tree. They share the trunk, one row, until the first compression; there the row is
forked into one branch per setting. What comes out equals separate runs: on CPU in fp32 bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from kvatlas.core import Fate, Sampling, Usage
from kvatlas.engine.attention import Pass, attend
from kvatlas.engine.cache import Slots, Snapshot
from kvatlas.engine.fates import Record
from kvatlas.engine.observation import Asked, Observers, column_name
from kvatlas.engine.sampling import draw
from kvatlas.policies import Cached, Policy, Reference, Selection, Signal, select

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvatlas.models import Model

K = TypeVar("K")

#: With fewer rows CPU kernels round differently; idle rows pad smaller batches, so that traces never depend on it.
SMALLEST_BATCH = 8
#: Trees are begun while the rows have fewer settings left to decode than this many times the batch.
TREES = 2


@dataclass(frozen=True)
class Request(Generic[K]):
    """One (problem, sample) under all its settings: token ids of the prompt, the random stream, the policies.

    `reference` is the full-cache trace of the same sample, for policies that ask for it (ANSWER); `sampling` is the
    engine's if None. `watch` is told the new tokens so far after each draw, and ends the generation there by True;
    `adjust` changes logits [vocabulary] before the next token is drawn, given prompt and new tokens.
    """

    key: K
    prompt: tuple[int, ...]
    stream: int
    policies: tuple[Policy, ...]
    reference: Reference | None = None
    sampling: Sampling | None = None
    watch: Callable[[Sequence[int]], bool] | None = None
    adjust: Callable[[Sequence[int], Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Generation(Generic[K]):
    """What one policy of a request wrote.

    `tokens` are new tokens, the end token included; `finished` is false for a trace cut at `max_new_tokens` or by
    the request's `watch`;
    `thinking_end` counts the new tokens before the end-of-thinking token, None if it never came; `decoded` is the
    number of tokens that were decoded for this trace alone, without the trunk that it shares.
    """

    key: K
    policy: Policy
    tokens: tuple[int, ...]
    finished: bool
    thinking_end: int | None
    decoded: int
    usage: Usage
    fate: Fate


@dataclass
class _Row(Generic[K]):
    request: Request[K]
    policies: tuple[Policy, ...]
    #: How it draws; `limit` is its `max_new_tokens`, which draws alike do not differ by.
    sampling: Sampling
    limit: int
    #: What these policies want to see.
    asked: Asked
    tokens: list[int] = field(default_factory=list)
    thinking_end: int | None = None
    #: True positions [layers or 1, KV heads or 1, kept] after the last compression; from `since` on all are cached.
    kept: Tensor | None = None
    since: int = 0
    record: Record = field(default_factory=Record)
    forked_at: int = 0
    compressions: int = 0
    kv_peak: int = 0
    kv_sum: int = 0
    seconds: float = 0.0

    @property
    def position(self) -> int:
        """True position of the newest token, which is not yet cached."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def bound(self) -> int | None:
        """Tokens beyond which its cache does not grow while it thinks; None if nothing bounds it."""
        budgets = [policy.budget for policy in self.policies]
        return None if None in budgets else max(budget for budget in budgets if budget is not None)

    def due(self, length: int) -> tuple[Policy, ...]:
        return tuple(policy for policy in self.policies if policy.budget is not None and length >= policy.budget)


class Engine:
    """Decodes requests for one model. `policies` are all that requests may name (they decide what is observed)."""

    def __init__(
        self,
        model: Model,
        network: PreTrainedModel,
        policies: Iterable[Policy],
        sampling: Sampling,
        batch_size: int = 64,
    ) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("kvatlas", attend)
        self.model, self.network, self.sampling, self.batch_size = model, network, sampling, batch_size
        self.observers = Observers(policies)
        weight = next(network.parameters())
        self.slots = Slots(
            model.shape,
            batch_size,
            self.observers.columns(model.shape),
            self.observers.ring,
            weight.device,
            weight.dtype,
        )
        self.decoded_tokens = 0
        self.evicted_tokens = 0
        self._open = False
        self._rows: list[_Row[Any]] = []
        self._waiting: list[tuple[Snapshot, _Row[Any]]] = []
        self._hidden: Tensor | None = None

    @property
    def active_rows(self) -> int:
        """Sequences that are being decoded."""
        return len(self._rows)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the caches of these sequences."""
        return sum(self.slots.lengths[: len(self._rows)])

    def run(self, requests: Iterable[Request[K] | None]) -> Iterator[Generation[K]]:
        """Decode all requests, pulled as rows become free; generations come as they finish, in no fixed order.

        A source that has nothing now but may have later gives None: rows that are active go on, and it is asked again.
        """
        source = iter(requests)
        self._rows, self._waiting, self._open = [], [], True
        before = self.network.config._attn_implementation
        self.network.set_attn_implementation("kvatlas")
        decoder = self.network.get_decoder()
        hook = decoder.register_forward_hook(self._keep_hidden) if self.observers.hidden else None
        try:
            while True:
                yield from self._fill(source)
                if self._rows:
                    yield from self._step()
                elif not self._open:
                    return
        finally:
            if hook is not None:
                hook.remove()
            self.network.set_attn_implementation(before)

    def _keep_hidden(self, _module: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
        self._hidden = output[0]

    # -- (1) free rows -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _fill(self, source: Iterator[Request[Any] | None]) -> list[Generation[Any]]:
        generations: list[Generation[Any]] = []
        while len(self._rows) < self.batch_size:
            # Branches before new trunks: depth first, so that few snapshots wait at any time.
            if self._waiting:
                snapshot, row = self._waiting.pop()
                self._rows.append(row)
                self.slots.restore(snapshot, len(self._rows) - 1, row.bound)
                self._compress(len(self._rows) - 1)
                continue
            if self._crowded():
                break
            try:
                request = next(source)
            except StopIteration:
                self._open = False
                break
            if request is None:
                break
            generations += self._prefill(request)
        return generations

    def _crowded(self) -> bool:
        """Whether the open trees have settings enough for all rows: each more would leave a snapshot, and maybe a trunk
        that no KV budget bounds."""
        return sum(len(row.policies) for row in self._rows) >= TREES * self.batch_size

    def _prefill(self, request: Request[Any]) -> list[Generation[Any]]:
        """Start a request in the next free row. One by one, so that its numbers do not depend on its neighbours."""
        began = time.perf_counter()
        index, length = len(self._rows), len(request.prompt)
        sampling = request.sampling or self.sampling
        asked = self.observers.asked(request.policies)
        row = _Row(request, request.policies, replace(sampling, max_new_tokens=0), sampling.max_new_tokens, asked)
        self._rows.append(row)
        self.slots.take(index, row.bound, length)
        step = Pass(self.slots, 1, (length - 1,), index, *self._watched([row.asked], index))
        logits = self._forward([list(request.prompt)], [list(range(length))], step)
        entered = torch.arange(length, device=self.slots.device)[None]
        self.observers.show(self.model, step, [row.asked], entered, entered, self._hidden)
        self.slots.lengths[index] = length
        self._append(row, self._draw(logits, [row], [length])[0])
        self.decoded_tokens += 1
        row.kv_peak = length
        row.seconds += time.perf_counter() - began
        return self._hand_out(index, row) if self._ended(row) else []

    # -- (2) to (6) one token for every row ----------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> list[Generation[Any]]:
        began = time.perf_counter()
        count = len(self._rows)
        padding = max(0, SMALLEST_BATCH - count)
        for index in range(count):
            self.slots.reserve(index, self.slots.lengths[index] + 1)
        tokens = [[row.tokens[-1]] for row in self._rows] + [[0]] * padding
        positions = [row.position for row in self._rows] + [0] * padding
        asked = [row.asked for row in self._rows]
        step = Pass(self.slots, count, positions[:count], None, *self._watched(asked), padding)
        logits = self._forward(tokens, [[position] for position in positions], step)
        at = torch.tensor(positions, device=self.slots.device)[:, None]
        self.observers.show(self.model, step, asked, step.lengths[:, None], at, self._hidden)
        drawn = self._draw(logits[:count], self._rows, [row.position + 1 for row in self._rows])
        share = (time.perf_counter() - began) / count
        self.decoded_tokens += count
        generations: list[Generation[Any]] = []
        for index, (row, token) in enumerate(zip(self._rows, drawn, strict=True)):
            length = self.slots.lengths[index] = self.slots.lengths[index] + 1
            row.kv_peak = max(row.kv_peak, length)
            row.kv_sum += length
            row.seconds += share
            self._append(row, token)
        for index in range(count - 1, -1, -1):
            row = self._rows[index]
            if self._ended(row):
                generations += self._hand_out(index, row)
            elif row.due(self.slots.lengths[index]):
                self._fork(index, row)
        return generations

    def _forward(self, tokens: list[list[int]], positions: list[list[int]], step: Pass) -> Tensor:
        """Logits [rows, vocabulary] after the last of `tokens` [rows][new]; positions are given, never counted."""
        device = self.slots.device
        output = self.network(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=torch.tensor(positions, device=device),
            use_cache=False,
            logits_to_keep=1,
            kvatlas=step,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _watched(self, asked: list[Asked], first: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows that have to show their attention, and rows that have to remember their queries."""
        attention, queries = (
            tuple(first + row for row in self.observers.rows(signal, asked))
            for signal in (Signal.ATTENTION, Signal.QUERIES)
        )
        return attention, queries

    def _draw(self, logits: Tensor, rows: list[_Row[Any]], positions: list[int]) -> list[int]:
        device = self.slots.device
        for index, row in enumerate(rows):
            if row.request.adjust is not None:
                logits[index] = row.request.adjust([*row.request.prompt, *row.tokens], logits[index])
        streams = torch.tensor([row.request.stream for row in rows], device=device)
        places = torch.tensor(positions, device=device)
        drawn = torch.empty_like(streams)
        for sampling in dict.fromkeys(row.sampling for row in rows):
            own = torch.tensor([row.sampling == sampling for row in rows], device=device)
            drawn[own] = draw(logits[own], sampling, streams[own], places[own])
        tokens: list[int] = drawn.tolist()
        return tokens

    def _append(self, row: _Row[Any], token: int) -> None:
        row.tokens.append(token)
        if row.thinking_end is None:
            row.thinking_end = self.model.thinking_end(row.tokens)

    def _ended(self, row: _Row[Any]) -> bool:
        """Whether a row is done with its newest token; asked once for each, so that `watch` sees each once."""
        watch = row.request.watch
        told = watch is not None and watch(row.tokens)
        return told or row.tokens[-1] in self.model.stops or len(row.tokens) >= row.limit

    def _hand_out(self, index: int, row: _Row[Any]) -> list[Generation[Any]]:
        """The generations of a finished row, which leaves: the last row gets its number."""
        last = len(self._rows) - 1
        self.slots.drop(index, last)
        self._rows[index] = self._rows[last]
        self._rows.pop()
        steps = max(1, len(row.tokens) - 1)
        usage = Usage(
            prompt_tokens=len(row.request.prompt),
            output_tokens=len(row.tokens),
            thinking_tokens=len(row.tokens) if row.thinking_end is None else row.thinking_end,
            peak_kv_tokens=row.kv_peak,
            mean_kv_tokens=(row.kv_sum or row.kv_peak) / steps,
            compressions=row.compressions,
            seconds=row.seconds,
        )
        finished = row.tokens[-1] in self.model.stops
        # A trace that ended before any compression is one generation for all its settings: decoded once.
        decoded = [len(row.tokens) - row.forked_at] + [0] * (len(row.policies) - 1)
        fate = row.record.fate(row.position)
        return [
            Generation(row.request.key, policy, tuple(row.tokens), finished, row.thinking_end, own, usage, fate)
            for policy, own in zip(row.policies, decoded, strict=True)
        ]

    def _fork(self, index: int, row: _Row[Any]) -> None:
        """Split a row at a KV budget: settings that compress here become branches, the others go on as the trunk."""
        due = row.due(self.slots.lengths[index])
        rest = tuple(policy for policy in row.policies if policy not in due)
        heirs = due if rest else due[1:]
        if heirs:
            snapshot = self.slots.snapshot(index)
            for policy in reversed(heirs):
                branch = replace(row, tokens=list(row.tokens), forked_at=len(row.tokens))
                self._waiting.append((snapshot, self._bound(branch, (policy,))))
        self._bound(row, rest or due[:1])
        if not rest:
            self._compress(index)

    def _bound(self, row: _Row[Any], policies: tuple[Policy, ...]) -> _Row[Any]:
        """The row, now under these policies alone."""
        row.policies, row.asked = policies, self.observers.asked(policies)
        return row

    def _compress(self, index: int) -> None:
        """Keep what the row's policy selects; positions stay true, so nothing is rotated again."""
        row = self._rows[index]
        (policy,) = row.policies
        assert isinstance(policy, Selection)
        length, place = self.slots.lengths[index], self.slots.places[index]
        prompt_length = len(row.request.prompt)
        layers, heads = policy.scope.width(self.model.shape)
        fresh = torch.arange(row.since, row.position, device=self.slots.device).expand(layers, heads, -1)
        positions = fresh if row.kept is None else torch.cat([row.kept, fresh], dim=-1)
        names = {name: column_name(policy, name) for name in policy.columns}
        recent = torch.arange(max(0, row.position - policy.queries), row.position, device=self.slots.device)
        kept = select(
            policy,
            Cached(
                model=self.model,
                positions=positions,
                prompt_length=prompt_length,
                thinking_end=None if row.thinking_end is None else prompt_length + row.thinking_end,
                length=row.position,
                stream=row.request.stream,
                columns={name: self.slots.columns[column][place, ..., :length] for name, column in names.items()},
                key=lambda layer: self.slots.key(layer, index)[:, :length],
                value=lambda layer: self.slots.value(layer, index)[:, :length],
                query=lambda layer: self.slots.queries[layer][place][:, recent % self.slots.ring],
                window=self.slots.windows.get,
                tokens=lambda: torch.tensor([*row.request.prompt, *row.tokens[:-1]], device=self.slots.device),
                reference=row.request.reference,
            ),
        )
        self.slots.compact(index, kept, tuple(names.values()))
        self.evicted_tokens += length - kept.shape[-1]
        row.kept = positions.gather(-1, kept)
        row.since = row.position
        row.record = row.record.after(row.kept, row.position, len(row.tokens))
        row.compressions += 1
