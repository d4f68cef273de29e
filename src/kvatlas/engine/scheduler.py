"""What is decoded next: requests and branches wait, rows run, and trunks fork into branches.

All settings of a request run as one tree. They share the trunk, one row, until the first compression; there the row is
forked into one branch for each setting that compresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvatlas.core import KvatlasError, Sampling
from kvatlas.engine.cache import KVCache, Snapshot
from kvatlas.engine.compression import compress
from kvatlas.engine.rows import Request, Row
from kvatlas.engine.signals import SignalCollector
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy

#: Requests are begun while fewer settings are open than this many times the batch, or fewer requests than one for so
#: many rows: few snapshots wait, yet new trunks reach their forks before branches of others have left their rows.
OPEN_SETTINGS, ROWS_PER_REQUEST = 2, 8
#: The most prompt tokens of one pass: further prompts wait, rows that are being decoded do not.
PROMPT_TOKENS = 1024


class Scheduler:
    """The rows of an engine, and what waits for them."""

    def __init__(
        self, model: ModelHandle, cache: KVCache, collector: SignalCollector, sampling: Sampling, batch_size: int
    ) -> None:
        self.model, self.cache, self.collector = model, cache, collector
        self.sampling, self.batch_size = sampling, batch_size
        self.evicted_tokens = 0
        self.samplings: dict[Sampling, Sampling] = {}
        self.begin(())

    def begin(self, requests: Iterable[Request[Any] | None]) -> None:
        """Start over with a source of requests. Where it has nothing now but may have later it gives None."""
        self.source: Iterator[Request[Any] | None] | None = iter(requests)
        self.rows: list[Row[Any]] = []
        self.branches: list[tuple[Snapshot, Row[Any]]] = []
        #: Settings that are begun and not done, of each request.
        self.open: Counter[int] = Counter()
        self.cache.reset()

    def admit(self) -> bool:
        """Fill free rows: requests while few are open, then branches. Whether there is or may be something to decode.

        A request's trunk is begun before branches of others, so that rows do not wait idle for its fork.
        """
        while len(self.rows) < self.batch_size:
            request = self._next_request()
            if request is not None:
                self.rows.append(self._begin_row(request))
            elif self.branches:
                snapshot, row = self.branches.pop()
                row.cached = self.cache.resume(snapshot)
                self.rows.append(row)
                self.evicted_tokens += compress(self.model, self.cache, row)
            else:
                break
        return bool(self.rows) or self.source is not None

    def _next_request(self) -> Request[Any] | None:
        size = self.batch_size
        many = self.open.total() >= OPEN_SETTINGS * size and len(self.open) >= size // ROWS_PER_REQUEST
        if self.source is None or many:
            return None
        try:
            return next(self.source)
        except StopIteration:
            self.source = None
            return None

    def _begin_row(self, request: Request[Any]) -> Row[Any]:
        sampling = request.sampling or self.sampling
        self.open[id(request)] = len(request.policies)
        # One object for all that sample alike, whose rows are then told apart at once.
        how = replace(sampling, max_new_tokens=0)
        how = self.samplings.setdefault(how, how)
        limit, left = sampling.max_new_tokens, len(request.prompt)
        steady = self.model.steady_positions
        # The last token does not go through the model.
        if steady is not None and left + limit - 1 > steady:
            raise KvatlasError(
                f"A prompt of {left} tokens and {limit} new ones are more than the {steady} positions up to which the "
                f"model {self.model.name!r} rotates short and long texts alike."
            )
        row = Row(request, (), frozenset(), how, limit, self.cache.begin(), prompt_left=left)
        return self._restrict(row, request.policies)

    def next_rows(self) -> list[Row[Any]]:
        """The rows of the next pass: all that are being decoded, and those whose prompts it has room for."""
        chosen, prompt_tokens = [], 0
        for row in self.rows:
            if row.prompt_left:
                more = len(row.next_tokens())
                if prompt_tokens and prompt_tokens + more > PROMPT_TOKENS:
                    continue
                prompt_tokens += more
            chosen.append(row)
        return chosen

    def finish(self, row: Row[Any]) -> None:
        """A row is done: it gives back what it holds."""
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
                branch = replace(row, tokens=list(row.tokens), forked_at=len(row.tokens))
                self.branches.append((snapshot, self._restrict(branch, (policy,))))
        self._restrict(row, rest or due[:1])
        if not rest:
            self.evicted_tokens += compress(self.model, self.cache, row)

    def _restrict(self, row: Row[Any], policies: tuple[Policy, ...]) -> Row[Any]:
        """The row, now under these policies alone."""
        row.policies, row.signals = policies, self.collector.signals(policies)
        row.trigger = row.next_trigger()
        return row
