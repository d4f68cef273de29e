"""The one decode loop, for every policy and every caller.

Each turn: (1) fill free rows, with waiting branches first, then with new requests, which are prefilled; (2) feed the
last token of every row through the model; (3) let policies observe; (4) draw the next tokens; (5) hand out finished
rows; (6) fork and compress the rows whose cache reached a KV budget.

All settings of a request run as one tree. They share the trunk, one row, until the first compression; there the row is
forked into one branch per setting. Branches of a request that the full cache decodes, too, wait for its tokens and
replay them in chunks as long as they choose the same. What comes out equals separate runs: on CPU in fp32 bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvatlas.core import Sampling, Usage
from kvatlas.engine.attention import Pass, attend
from kvatlas.engine.cache import SMALLEST_BATCH, Slots, Snapshot
from kvatlas.engine.chunks import Chunks
from kvatlas.engine.graphs import Fixed, Graphs
from kvatlas.engine.observation import Asked, Observers, column_name
from kvatlas.engine.replay import LONGEST, TOGETHER, Replay, Tree, taken_over
from kvatlas.engine.rows import Generation, K, Request, Row
from kvatlas.engine.sampling import draw_rows, each, near_ties
from kvatlas.policies import Cached, Policy, Selection, Signal, select

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvatlas.models import Model

#: Trees are begun while fewer settings are begun and not done than this many times the batch.
TREES = 2
#: No prompt is begun in a turn that has read so many tokens of prompts, while other rows wait for their next token.
PREFILL = 1024


class Engine:
    """Decodes requests for one model. `policies` are all that requests may name (they decide what is observed).

    `graphs`: steps have fixed shapes where that is possible, as CUDA graphs; None: on CUDA devices.
    """

    def __init__(
        self,
        model: Model,
        network: PreTrainedModel,
        policies: Iterable[Policy],
        sampling: Sampling,
        batch_size: int = 64,
        replay: Replay = Replay.AUTO,
        graphs: bool | None = None,
    ) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("kvatlas", attend)
        self.model, self.network, self.sampling, self.batch_size = model, network, sampling, batch_size
        self.observers = Observers(policies)
        weight = next(network.parameters())
        # Rejected tokens may have been remembered: what they replaced must not be needed any more.
        ring = self.observers.ring + LONGEST if self.observers.ring else 0
        columns = self.observers.columns(model.shape)
        self.slots = Slots(model.shape, batch_size, columns, ring, weight.device, weight.dtype)
        self.replay, self.exact = replay, weight.device.type == "cpu"
        self.wary = replay is Replay.STRICT and not (self.exact and weight.dtype is torch.float32)
        wanted = weight.device.type == "cuda" if graphs is None else graphs
        self.graphs = Graphs(model, self.slots, self.observers, sampling, self._fixed) if wanted else None
        self.decoded_tokens = self.replayed_tokens = self.passes = self.evicted_tokens = 0
        #: Whether the source may have more requests; settings that are begun and not done.
        self._open, self._begun = False, 0
        self._rows: list[Row[Any]] = []
        self._waiting: list[tuple[Snapshot, Row[Any]]] = []
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
        self._rows, self._waiting, self._open, self._begun = [], [], True, 0
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
        stalled, read = bool(self._rows), 0
        while len(self._rows) < self.batch_size and not (stalled and read >= PREFILL):
            request = self._next(source)
            if request is not None:
                read += len(request.prompt)
                generations += self._prefill(request)
            elif self._waiting:
                snapshot, row = self._waiting.pop()
                self._rows.append(row)
                self.slots.restore(snapshot, len(self._rows) - 1, row.bound)
                self._compress(len(self._rows) - 1)
            else:
                break
        return generations

    def _next(self, source: Iterator[Request[Any] | None]) -> Request[Any] | None:
        """The next request, if there is one now. Trunks are begun in time, because branches wait for their full cache;
        yet few of them, so that few snapshots wait."""
        if not self._open or self._begun >= TREES * self.batch_size:
            return None
        try:
            return next(source)
        except StopIteration:
            self._open = False
            return None

    def _prefill(self, request: Request[Any]) -> list[Generation[Any]]:
        """Start a request in the next free row. One by one, so that its numbers do not depend on its neighbours."""
        began = time.perf_counter()
        index, length = len(self._rows), len(request.prompt)
        script = None if self.replay is Replay.OFF or request.adjust else request.script
        sampling, asked = request.sampling or self.sampling, self.observers.asked(request.policies)
        how, limit = replace(sampling, max_new_tokens=0), sampling.max_new_tokens
        row = Row(request, request.policies, asked, how, limit, Tree(script))
        self._rows.append(row)
        self._begun += len(row.policies)
        self.slots.take(index, row.bound, length)
        step = Pass(self.slots, 1, (length - 1,), index, *self._watched([row.asked], index))
        logits = self._forward([list(request.prompt)], [list(range(length))], step)
        entered = torch.arange(length, device=self.slots.device)[None]
        self.observers.show(self.model, step, [row.asked], entered, entered, self._hidden)
        self.slots.lengths[index] = length
        self._append(row, draw_rows(logits, [row], [length])[0])
        self.decoded_tokens += 1
        row.kv_peak = length
        row.seconds += time.perf_counter() - began
        return self._hand_out(index, row) if self._ended(row) else []

    # -- (2) to (6) one token for every row, and what is proposed after it ---------------------------------------

    @torch.inference_mode()
    def _step(self) -> list[Generation[Any]]:
        began = time.perf_counter()
        count = len(self._rows)
        proposals = self._proposals()
        fed = [1 + len(each) for each in proposals]
        for index, new in enumerate(fed):
            self.slots.reserve(index, self.slots.lengths[index] + new)
        drawn = self.graphs.draw(self._rows) if self.graphs is not None and not any(proposals) else None
        if drawn is None:
            drawn = self._feed(proposals)
        share = (time.perf_counter() - began) / sum(fed)
        self.passes += 1
        ended = [self._take(index, own, share * fed[index]) for index, own in enumerate(drawn)]
        generations: list[Generation[Any]] = []
        for index in range(count - 1, -1, -1):
            row = self._rows[index]
            if ended[index]:
                generations += self._hand_out(index, row)
            elif row.due(self.slots.lengths[index]):
                self._fork(index, row)
        return generations

    def _feed(self, proposals: list[list[int]]) -> list[list[int]]:
        """The new tokens of each row, from a pass of just the shapes that it needs."""
        count = len(self._rows)
        padding = max(0, SMALLEST_BATCH - count)
        tokens = [[row.tokens[-1]] for row in self._rows] + [[0]] * padding
        positions = [row.position for row in self._rows] + [0] * padding
        asked = [row.asked for row in self._rows]
        step = Pass(self.slots, count, positions[:count], None, *self._watched(asked), padding)
        if any(proposals):
            step.ahead = Chunks(self.slots, [len(each) for each in proposals], step, self.exact)
            tokens += [[token] for proposal in proposals for token in proposal]
        places = positions + (step.ahead.now.tolist() if step.ahead else [])
        logits = self._forward(tokens, [[place] for place in places], step)
        hidden, at = self._hidden, torch.tensor(positions, device=self.slots.device)[:, None]
        newest = None if hidden is None else hidden[: step.batch]
        self.observers.show(self.model, step, asked, step.lengths[:, None], at, newest)
        drawn = self._choose(logits, step, proposals)
        if step.ahead is not None:
            self.observers.show_ahead(self.model, step.ahead, asked, [len(own) - 1 for own in drawn], hidden)
        return drawn

    def _fixed(self, tokens: Tensor, positions: Tensor, step: Fixed) -> tuple[Tensor, Tensor | None]:
        logits = self._logits(tokens, positions, step)
        return logits, self._hidden

    def _proposals(self) -> list[list[int]]:
        """What each row replays in this step."""
        most = min(LONGEST, TOGETHER // len(self._rows))
        rooms = [min(most, row.room(length)) for row, length in zip(self._rows, self.slots.lengths, strict=False)]
        return [
            row.reader.proposal(row.tree.script, len(row.tokens), room)
            for row, room in zip(self._rows, rooms, strict=True)
        ]

    def _choose(self, logits: Tensor, step: Pass, proposals: list[list[int]]) -> list[list[int]]:
        """The new tokens of each row: its draws up to the first that is no proposed one, that included."""
        drawn = draw_rows(logits[: len(self._rows)], self._rows, [row.position + 1 for row in self._rows])
        if step.ahead is None:
            return [[token] for token in drawn]
        ahead = logits[step.batch :], [self._rows[row] for row in step.ahead.rows], (step.ahead.now + 1).tolist()
        near = each(near_ties, *ahead)
        chosen = taken_over([row.reader for row in self._rows], proposals, drawn, draw_rows(*ahead), near, self.wary)
        self.replayed_tokens += sum(map(len, chosen)) - len(chosen)
        return chosen

    def _take(self, index: int, tokens: list[int], seconds: float) -> bool:
        """Add the new tokens of a row; whether it is done."""
        row = self._rows[index]
        row.seconds += seconds
        for token in tokens:
            length = self.slots.lengths[index] = self.slots.lengths[index] + 1
            row.kv_peak = max(row.kv_peak, length)
            row.kv_sum += length
            self.decoded_tokens += 1
            self._append(row, token)
            if self._ended(row):
                return True
        return False

    def _forward(self, tokens: list[list[int]], positions: list[list[int]], step: Pass) -> Tensor:
        """Logits [rows, vocabulary] after the last of `tokens` [rows][new]; positions are given, never counted."""
        device = self.slots.device
        return self._logits(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), step)

    def _logits(self, tokens: Tensor, positions: Tensor, step: Pass | Fixed) -> Tensor:
        output = self.network(
            input_ids=tokens,
            position_ids=positions,
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

    def _append(self, row: Row[Any], token: int) -> None:
        row.reader.note(row.tree.script, len(row.tokens), token)
        row.tokens.append(token)
        if row.thinking_end is None:
            row.thinking_end = self.model.thinking_end(row.tokens)

    def _ended(self, row: Row[Any]) -> bool:
        """Whether a row is done with its newest token; asked once for each, so that `watch` sees each once."""
        watch = row.request.watch
        told = watch is not None and watch(row.tokens)
        return told or row.tokens[-1] in self.model.stops or len(row.tokens) >= row.limit

    def _hand_out(self, index: int, row: Row[Any]) -> list[Generation[Any]]:
        """The generations of a finished row, which leaves: the last row gets its number."""
        last = len(self._rows) - 1
        self.slots.drop(index, last)
        self._rows[index] = self._rows[last]
        self._rows.pop()
        self._begun -= len(row.policies)
        steps = max(1, len(row.tokens) - 1)
        usage = Usage(
            prompt_tokens=len(row.request.prompt),
            output_tokens=len(row.tokens),
            thinking_tokens=len(row.tokens) if row.thinking_end is None else row.thinking_end,
            peak_kv_tokens=row.kv_peak,
            mean_kv_tokens=(row.kv_sum or row.kv_peak) / steps,
            compressions=row.compressions,
            seconds=row.seconds,
            replayed_tokens=row.reader.replayed,
            near_ties=row.reader.near_ties,
        )
        if self._replays(row, row.policies):
            row.tree.script = tuple(row.tokens)
            self._waiting += row.tree.held
            row.tree.held = []
        finished = row.tokens[-1] in self.model.stops
        # A trace that ended before any compression is one generation for all its settings: decoded once.
        decoded = [len(row.tokens) - row.forked_at] + [0] * (len(row.policies) - 1)
        fate = row.record.fate(row.position)
        return [
            Generation(row.request.key, policy, tuple(row.tokens), finished, row.thinking_end, own, usage, fate)
            for policy, own in zip(row.policies, decoded, strict=True)
        ]

    def _fork(self, index: int, row: Row[Any]) -> None:
        """Split a row at a KV budget: settings that compress here become branches, the others go on as the trunk."""
        due = row.due(self.slots.lengths[index])
        rest = tuple(policy for policy in row.policies if policy not in due)
        heirs = due if rest else due[1:]
        if heirs:
            snapshot = self.slots.snapshot(index)
            # The full cache among the others goes on to write what the branches can replay.
            awaited = row.tree.script is None and self._replays(row, rest)
            waiting = row.tree.held if awaited else self._waiting
            for policy in reversed(heirs):
                branch = replace(row, tokens=list(row.tokens), forked_at=len(row.tokens), reader=replace(row.reader))
                waiting.append((snapshot, self._bound(branch, (policy,))))
        self._bound(row, rest or due[:1])
        if not rest:
            self._compress(index)

    def _replays(self, row: Row[Any], policies: tuple[Policy, ...]) -> bool:
        """Whether what a row writes under these policies is what its branches replay."""
        asked = self.replay is not Replay.OFF and row.request.adjust is None
        return asked and any(policy.budget is None for policy in policies)

    def _bound(self, row: Row[Any], policies: tuple[Policy, ...]) -> Row[Any]:
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
                scaling=self.slots.scalings.__getitem__,
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
        row.reader.compressed()
