"""The order of decoding: requests and branches wait, rows run, trunks fork into branches.

All settings of a request run as one tree. They share the trunk, one row, until the first compression; there the row is
forked into one branch for each setting that compresses.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvatlas.core import KvatlasError, Sampling, Storage, grouped
from kvatlas.engine.cache import KVCache, Snapshot
from kvatlas.engine.rows import K, Request, Row, compress
from kvatlas.engine.signals import SignalCollector
from kvatlas.policies.contract import Policy

#: A request starts while fewer settings are open than OPEN_SETTINGS times the batch, or fewer requests than one for
#: ROWS_PER_REQUEST rows: few snapshots wait, yet new trunks reach their forks before branches of others have left their
#: rows.
OPEN_SETTINGS = 2
ROWS_PER_REQUEST = 8
#: Parts of prompts begin at multiples of this, so that sums over a part depend on the prompt alone.
PROMPT_CHUNK = 512
#: The most prompt tokens of one pass: further prompts wait, rows in decoding do not.
PROMPT_TOKENS = 1024
#: The most passes of prompts alone in a row, while others are in decoding.
PROMPT_PASSES = 4


def requests_of_storage(
    requests: Iterable[Request[K] | None], storage: Storage, later: dict[Storage, list[Request[K]]]
) -> Iterator[Request[K] | None]:
    """Yield requests with their settings of one storage; put the other settings into `later`, by storage."""
    for request in requests:
        if request is None:
            yield None
            continue

        by_storage = grouped(request.policies, lambda policy: policy.storage)
        current = by_storage.pop(storage, None)
        for other, policies in by_storage.items():
            later.setdefault(other, []).append(replace(request, policies=tuple(policies)))
        if by_storage and current:
            request = replace(request, policies=tuple(current))
        yield request if current else None


class Branch(NamedTuple):
    """A row that waits for a place, and the snapshot that it continues; `due` are its policies that compress first."""

    snapshot: Snapshot
    row: Row[Any]
    due: tuple[Policy, ...]


class Scheduler:
    """The rows of an engine, and the requests and branches that wait for them.

    With `prompts_alone` no pass has prompts beside rows in decoding, whose steps are captured.
    """

    def __init__(
        self, cache: KVCache, collector: SignalCollector, sampling: Sampling, prompts_alone: bool = False
    ) -> None:
        self.model = collector.model
        self.cache = cache
        self.collector = collector
        self.sampling = sampling
        self.prompts_alone = prompts_alone
        self.evicted_tokens = 0
        self.samplings: dict[Sampling, Sampling] = {}
        self.begin(())

    def begin(self, requests: Iterable[Request[Any] | None]) -> None:
        """Start over with a source of requests, which gives None without a request now but perhaps later."""
        self.source: Iterator[Request[Any] | None] | None = iter(requests)
        self.rows: list[Row[Any]] = []
        self.branches: deque[Branch] = deque()
        #: The number of unfinished settings of each started request.
        self.open: Counter[int] = Counter()
        #: The number of passes of prompts alone since the last one in decoding.
        self.prompt_passes = 0
        self.cache.reset()

    def unfinished(self) -> list[Request[Any]]:
        """Return the started, unfinished requests, each with its remaining policies."""
        requests: dict[int, Request[Any]] = {}
        remaining: dict[int, set[Policy]] = {}
        for row in [*self.rows, *(branch.row for branch in self.branches)]:
            key = id(row.request)
            requests[key] = row.request
            remaining.setdefault(key, set()).update(row.policies)
        unfinished = []
        for key, request in requests.items():
            policies = tuple(policy for policy in request.policies if policy in remaining[key])
            unfinished.append(replace(request, policies=policies))
        return unfinished

    @torch.inference_mode()
    def admit(self) -> bool:
        """Fill free rows: requests while few are open, then branches. Return False after the last request.

        A request's trunk starts before branches of others, so that rows do not wait idle for its fork. The branches
        that waited longest come first, so that requests are whole in about the order in which they started.
        """
        while len(self.rows) < self.cache.rows:
            request = self._next_request()
            if request is not None:
                row = self._begin_row(request)
                self.rows.append(row)
                if request.start is not None:
                    self.evicted_tokens += compress(self.model, self.cache, row)
            elif self.branches:
                snapshot, row, due = self.branches[0]
                # A compression at once leaves the shared pages.
                compresses = set(due) == set(row.policies)
                row.cached = self.cache.resume(snapshot) if compresses else self.cache.resume_apart(snapshot)
                self.rows.append(row)
                self.branches.popleft()
                if due:
                    self.fork(row, due)
            else:
                break
        return bool(self.rows) or self.source is not None

    def _next_request(self) -> Request[Any] | None:
        if self.source is None:
            return None
        size = self.cache.rows
        if self.open.total() >= OPEN_SETTINGS * size and len(self.open) >= size // ROWS_PER_REQUEST:
            return None
        try:
            return next(self.source)
        except StopIteration:
            self.source = None
            return None

    def _begin_row(self, request: Request[Any]) -> Row[Any]:
        sampling = request.sampling or self.sampling
        self.open[id(request)] = len(request.policies)
        # One object for equal samplings, so that rows can be grouped by identity.
        unlimited = replace(sampling, max_new_tokens=0)
        unlimited = self.samplings.setdefault(unlimited, unlimited)

        limit = sampling.max_new_tokens
        if request.start is not None:
            if request.start.cache is not self.cache:
                raise KvatlasError(
                    "The memory of this machine does not suffice for the checkpoints; use smaller batches."
                )
            cached = self.cache.reopen(request.start.snapshot)
            row = replace(request.start.row.branch(), request=request, cached=cached)
            self._restrict(row, request.policies)
            row.trigger = row.next_trigger()
            return row

        prompt_length = len(request.prompt)
        steady = self.model.steady_positions
        # The last token does not go through the model.
        if steady is not None and prompt_length + limit - 1 > steady:
            raise KvatlasError(
                f"A prompt of {prompt_length} tokens and {limit} new ones are more than the {steady} positions up to "
                f"which the model {self.model.name!r} rotates short and long texts alike."
            )

        row = Row(request, (), frozenset(), unlimited, limit, self.cache.begin(), prompt_left=prompt_length)
        return self._restrict(row, request.policies)

    def next_step(self) -> tuple[list[Row[Any]], list[Sequence[int]]]:
        """Return the rows of the next pass, all rows in decoding and prompts while there is room, and their tokens."""
        prompt_tokens = 0
        rows = []
        tokens = []
        for row in self._candidates():
            new: Sequence[int] = row.tokens[-1:]
            if row.prompt_left:
                stop = (row.position // PROMPT_CHUNK + 1) * PROMPT_CHUNK
                new = row.request.prompt[row.position : stop]
                if prompt_tokens and prompt_tokens + len(new) > PROMPT_TOKENS:
                    continue
                prompt_tokens += len(new)
            rows.append(row)
            tokens.append(new)
        return rows, tokens

    def _candidates(self) -> list[Row[Any]]:
        """Return the rows of which the next pass may consist: all, or prompts alone, or those in decoding."""
        prompts = [row for row in self.rows if row.prompt_left]
        if not self.prompts_alone or not 0 < len(prompts) < len(self.rows):
            self.prompt_passes = 0
            return self.rows

        # New rows join the others soon, and no stream of new prompts stops the others.
        if self.prompt_passes < PROMPT_PASSES:
            self.prompt_passes += 1
            return prompts
        self.prompt_passes = 0
        return [row for row in self.rows if not row.prompt_left]

    def finish(self, row: Row[Any]) -> None:
        self.rows.remove(row)
        self.cache.end(row.cached)
        self.close(row)

    def close(self, row: Row[Any]) -> None:
        """Count the settings of a row as finished."""
        key = id(row.request)
        self.open[key] -= len(row.policies)
        if not self.open[key]:
            del self.open[key]

    def fork(self, row: Row[Any], due: tuple[Policy, ...]) -> None:
        """Split a row at a KV budget: settings that compress here become branches, the others go on as the trunk.

        Settings that differ in their caps on thinking alone are one branch.
        """
        rest = tuple(policy for policy in row.policies if policy not in due)
        of_branch = grouped(due, lambda policy: policy.uncapped)
        groups = list(map(tuple, of_branch.values()))
        branches = groups if rest else groups[1:]
        if branches:
            snapshot = self.cache.fork(row.cached, len(branches))
            for policies in branches:
                self.branches.append(Branch(snapshot, self._restrict(row.branch(), policies), policies))
        self._restrict(row, rest or groups[0])
        if not rest:
            self.evicted_tokens += compress(self.model, self.cache, row)

    def begin_cut(self, row: Row[Any], capped: tuple[Policy, ...]) -> Row[Any]:
        """Split the policies whose cap ends the thinking of a row here off, before its next token; return their row."""
        branch = self._restrict(row.branch(), capped)
        branch.cached = replace(row.cached)
        self._restrict(row, tuple(policy for policy in row.policies if policy not in capped))
        return branch

    def end_cut(self, row: Row[Any], branch: Row[Any], due: tuple[Policy, ...]) -> None:
        """Let the row of `begin_cut` wait as a branch of the other, after the next token of both."""
        self.branches.append(Branch(self.cache.fork(row.cached, 1), branch, due))

    def _restrict(self, row: Row[Any], policies: tuple[Policy, ...]) -> Row[Any]:
        row.policies = policies
        row.signals = self.collector.signals(policies)
        row.cap = min((policy.cap for policy in policies if policy.cap is not None), default=None)
        # Policies with the same compressions behind them have the same trigger.
        if not row.compressions:
            row.trigger = row.next_trigger()
        return row
