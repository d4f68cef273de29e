"""The order of decoding: requests and branches wait, rows run, trunks fork into branches; and their memory.

All settings of a request run as one tree. They share the trunk, one row, until the first compression; there the row is
forked into one branch for each setting that compresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kvatlas.core import KvatlasError, Sampling, Storage
from kvatlas.engine.cache import GROWTH, PAGE, KVCache, Snapshot, pages_for
from kvatlas.engine.rows import Likeness, Request, Row, compress
from kvatlas.engine.signals import SignalCollector
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy, Signal

#: A request starts while fewer settings are open than this many times the batch, or fewer requests than one for so many
#: rows: few snapshots wait, yet new trunks reach their forks before branches of others have left their rows.
OPEN_SETTINGS, ROWS_PER_REQUEST = 2, 8
#: The most prompt tokens of one pass: further prompts wait, rows in decoding do not.
PROMPT_TOKENS = 1024
#: The most logits of one pass over scripts, in numbers, and its most tokens.
SCRIPT_LOGITS, SCRIPT_TOKENS = 2**26, 2048


class Scheduler:
    """The rows of an engine, and the requests and branches that wait for them."""

    def __init__(
        self, model: ModelHandle, cache: KVCache, collector: SignalCollector, sampling: Sampling, batch_size: int
    ) -> None:
        self.model, self.cache, self.collector = model, cache, collector
        self.sampling, self.batch_size = sampling, batch_size
        self.evicted_tokens = 0
        self.samplings: dict[Sampling, Sampling] = {}
        self.begin(())

    def begin(self, requests: Iterable[Request[Any] | None]) -> None:
        """Start over with a source of requests, which gives None without a request now but perhaps later."""
        self.source: Iterator[Request[Any] | None] | None = iter(requests)
        self.rows: list[Row[Any]] = []
        self.branches: list[tuple[Snapshot, Row[Any]]] = []
        #: The number of unfinished settings of each started request.
        self.open: Counter[int] = Counter()
        self.cache.reset()

    def unfinished(self) -> list[Request[Any]]:
        """Return the started, unfinished requests, each with its remaining policies."""
        left: dict[int, tuple[Request[Any], set[Policy]]] = {}
        for row in [*self.rows, *(row for _, row in self.branches)]:
            left.setdefault(id(row.request), (row.request, set()))[1].update(row.policies)
        return [
            replace(request, policies=tuple(policy for policy in request.policies if policy in policies))
            for request, policies in left.values()
        ]

    @torch.inference_mode()
    def admit(self) -> bool:
        """Fill free rows: requests while few are open, then branches. Return False after the last request.

        A request's trunk starts before branches of others, so that rows do not wait idle for its fork.
        """
        while len(self.rows) < self.batch_size:
            request = self._next_request()
            if request is not None:
                self.rows.append(self._begin_row(request))
            elif self.branches:
                snapshot, row = self.branches[-1]
                row.cached = self.cache.resume(snapshot)
                self.rows.append(row)
                self.branches.pop()
                self.evicted_tokens += compress(self.model, self.cache, row)
            else:
                break
        return bool(self.rows) or self.source is not None

    def _next_request(self) -> Request[Any] | None:
        size = self.batch_size
        many = self.open.total() >= OPEN_SETTINGS * size and len(self.open) >= size // ROWS_PER_REQUEST
        # The rows of a script are compared in the same pass, so it has the batch for itself.
        if self.source is None or many or (self.rows and self.rows[0].request.script):
            return None
        try:
            return next(self.source)
        except StopIteration:
            self.source = None
            return None

    def _begin_row(self, request: Request[Any]) -> Row[Any]:
        sampling, script = request.sampling or self.sampling, request.script
        if script and (self.rows or len(request.policies) > self.batch_size):
            raise ValueError(f"a request with a script needs a run and {len(request.policies)} rows for itself")
        self.open[id(request)] = len(request.policies)
        # One object for equal samplings, so that rows can be grouped by identity.
        how = replace(sampling, max_new_tokens=0)
        how = self.samplings.setdefault(how, how)
        # A script without an end token ends the generation as well.
        limit = min(sampling.max_new_tokens, len(script)) if script else sampling.max_new_tokens
        left = len(request.prompt)
        steady = self.model.steady_positions
        # The last token does not go through the model.
        if steady is not None and left + limit - 1 > steady:
            raise KvatlasError(
                f"A prompt of {left} tokens and {limit} new ones are more than the {steady} positions up to which the "
                f"model {self.model.name!r} rotates short and long texts alike."
            )
        row = Row(request, (), frozenset(), how, limit, self.cache.begin(), prompt_left=left)
        if script:
            row.likeness, row.split = Likeness(), self.model.split(script) or (len(script), len(script))
        return self._restrict(row, request.policies)

    def next_step(self) -> tuple[list[Row[Any]], list[Sequence[int]]]:
        """Return the rows of the next pass, all rows in decoding and prompts while there is room, and their tokens."""
        ahead, prompt_tokens = self._ahead(), 0
        rows, tokens = [], []
        for row in self.rows:
            new = row.next_tokens(ahead)
            if row.prompt_left:
                if prompt_tokens and prompt_tokens + len(new) > PROMPT_TOKENS:
                    continue
                prompt_tokens += len(new)
            rows.append(row)
            tokens.append(new)
        return rows, tokens

    def _ahead(self) -> int:
        """Return the number of script tokens behind the newest one in the next pass: up to the next compression."""
        rows, first = self.rows, self.rows[0]
        script, written = first.request.script, len(first.tokens)
        # Policies observe attention one token at a time, as in decoding.
        if not script or first.prompt_left or self.collector.asking(Signal.ATTENTION, [row.signals for row in rows]):
            return 0
        most = max(1, min(SCRIPT_TOKENS, SCRIPT_LOGITS // self.model.vocabulary) // len(rows))
        room = [row.trigger - row.cached.length for row in rows if row.trigger is not None]
        # The script's last token never goes through the model.
        return max(0, min([most, *room, len(script) - written]) - 1)

    def finish(self, row: Row[Any]) -> None:
        self.rows.remove(row)
        self.cache.end(row.cached)
        key = id(row.request)
        self.open[key] -= len(row.policies)
        if not self.open[key]:
            del self.open[key]

    def fork(self, row: Row[Any], due: tuple[Policy, ...]) -> None:
        """Split a row at a KV budget: settings that compress here become branches, the others go on as the trunk."""
        rest = tuple(policy for policy in row.policies if policy not in due)
        branches = due if rest else due[1:]
        if branches:
            snapshot = self.cache.fork(row.cached, len(branches))
            for policy in reversed(branches):
                self.branches.append((snapshot, self._restrict(row.branch(), (policy,))))
        self._restrict(row, rest or due[:1])
        if not rest:
            self.evicted_tokens += compress(self.model, self.cache, row)

    def _restrict(self, row: Row[Any], policies: tuple[Policy, ...]) -> Row[Any]:
        row.policies, row.signals = policies, self.collector.signals(policies)
        row.trigger = row.next_trigger()
        return row


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of decoding, without the interpreter and its libraries.

    `slots`: pages, token states and recent queries of all rows; `snapshots`: pages of waiting branches that no trunk
    shares; `workspace`: the logits with their copies in double precision and the states of a pass of prompts, or one
    layer of a growing cache, whichever is more.
    """

    weights: int
    slots: int
    snapshots: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.slots + self.snapshots + self.workspace

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def peak(model: ModelHandle, policies: Sequence[Policy], batch_size: int, trees: int, prompt: int, output: int) -> Peak:
    """Return the peak of one worker that decodes `trees` requests under all `policies`, `batch_size` rows at a time.

    Prompts have `prompt` tokens, traces `output` new ones. Settings of unlike storage are decoded one after the other.
    """
    by_storage: dict[Storage, list[Policy]] = {}
    for policy in policies:
        by_storage.setdefault(policy.storage, []).append(policy)
    peaks = [_peak(model, storage, own, batch_size, trees, prompt, output) for storage, own in by_storage.items()]
    return max(peaks, key=lambda peak: peak.total)


def _peak(
    model: ModelHandle,
    storage: Storage,
    policies: Sequence[Policy],
    batch_size: int,
    trees: int,
    prompt: int,
    output: int,
) -> Peak:
    budgets = sorted({policy.budget.most(prompt) for policy in policies if policy.budget is not None})
    # A request starts while one setting fewer than the limit is open.
    most = max(OPEN_SETTINGS * batch_size - 1 + len(policies), batch_size // ROWS_PER_REQUEST * len(policies))
    open_trees = min(trees, -(-most // len(policies)))
    longest, rows = prompt + output, min(batch_size, trees * len(policies))
    unbounded = min(open_trees, rows) if any(policy.budget is None for policy in policies) else 0
    bounded = rows - unbounded if budgets else 0
    # A snapshot that outlives its trunk stays until every branch of its tree has a row.
    open_settings = min(trees * len(policies), most)
    forked = round((open_settings - rows) / max(1, len(policies) - 1))
    waiting = sum(pages_for(budget) for budget in budgets if budget < longest) if len(policies) > 1 else 0
    shape, collector, size = model.shape, SignalCollector(policies), 4 if model.dtype == "float32" else 2
    token, beside = shape.kv_bytes(storage, size)
    page = PAGE * token
    pages = unbounded * pages_for(longest) + bounded * pages_for(min(longest, budgets[-1] if budgets else longest))
    noted = sum(layers * heads for layers, heads in collector.token_state(shape).values())
    queries = collector.query_window * shape.layers * shape.heads * shape.head_dim * size
    capacity = longest if unbounded else budgets[-1] if budgets else 0
    # While one layer grows, its old pages stand beside the new ones; logits and states of a pass come after that.
    grown = pages * page // (2 * shape.layers)
    states = min(prompt * rows, PROMPT_TOKENS) * 8 * shape.hidden * size
    return Peak(
        weights=model.weight_bytes or 0,
        slots=int(pages * page * (1 + 1 / (2 * GROWTH)))
        + rows * (4 * noted * capacity + queries + beside + shape.state_bytes),
        snapshots=max(0, forked - unbounded) * waiting * page,
        workspace=max(rows * model.vocabulary * (size + 2 * 8) + states, grown),
    )
