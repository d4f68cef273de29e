"""Forced reading: every setting reads a finished full-cache trace, and what it would have chosen is compared.

The same loop with the same compressions, but the next tokens are always those of the trace (teacher forcing). All
settings of a sample and the full cache itself read it side by side, so that their distributions meet position by
position and none has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvatlas import policies
from kvatlas.core import Setting, Usage
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Request, Row
from kvatlas.engine.sampling import sample_rows
from kvatlas.policies import Policy, Signal

if TYPE_CHECKING:
    from torch import Tensor

#: Logits of one pass, in numbers: what bounds its tokens where the vocabulary is large; and the most tokens.
LOGITS, TOKENS = 2**26, 2048

FULL = policies.of(Setting.of("full"))


@dataclass
class Tally:
    """What one setting would have chosen along a trace, after its first compression.

    `departs_at` is the number of new tokens before the first that it would have sampled otherwise, None if none. `kl`
    is the sum over `thinking` tokens of KL(full cache || setting) in nats, of the model's own distributions (without
    temperature and cuts), `top1` counts those with the same likeliest token; `answer_change` is the change of the
    answer's log-likelihood, over `answer` tokens.
    """

    departs_at: int | None = None
    thinking: int = 0
    kl: float = 0.0
    top1: int = 0
    answer: int = 0
    answer_change: float = 0.0


@dataclass(frozen=True)
class Screened:
    """A setting's tally along a trace, and what reading it cost."""

    policy: Policy
    tally: Tally
    usage: Usage


class ForcedReader(Engine):
    """Reads finished traces under many settings; made like an engine. One sample at a time."""

    _split: tuple[int, int]
    _tallies: dict[Policy, Tally]

    def screen(self, request: Request[Any]) -> list[Screened]:
        """What every policy of a request that compresses would have chosen along the request's script.

        Settings are read in as many groups as the batch size asks for.
        """
        end = len(request.script)
        self._split = self.handle.split(request.script) or (end, end)
        compressing = [policy for policy in request.policies if policy.budget is not None]
        screened: list[Screened] = []
        size = max(1, self.batch_size - 1)
        for start in range(0, len(compressing), size):
            group = compressing[start : start + size]
            self._tallies = {policy: Tally() for policy in group}
            screened += [
                Screened(generation.policy, self._tallies[generation.policy], generation.usage)
                for generation in self.run([replace(request, policies=(*group, FULL))])
                if generation.policy in self._tallies
            ]
        return screened

    def _next_tokens(self, row: Row[Any]) -> Sequence[int]:
        """The same part of the trace for all rows: up to the next compression of any."""
        tokens = row.next_tokens()
        if row.prompt_left:
            return tokens
        rows, written = self.scheduler.rows, len(row.tokens)
        # Attention is shown to policies one token at a time, as in decoding.
        if self.collector.asking(Signal.ATTENTION, [row.signals for row in rows]):
            return tokens
        most = max(1, min(TOKENS, LOGITS // self.model.config.get_text_config().vocab_size) // len(rows))
        rooms = [room for room in (row.room() for row in rows) if room is not None]
        # The script's last token never goes through the model.
        more = max(0, min([most, *rooms, len(row.request.script) - written]) - 1)
        return [*tokens, *row.request.script[written : written + more]]

    def _wanted(self, rows: Sequence[Row[Any]], batch: ForwardBatch) -> list[int]:
        """All tokens of the trace; of the prompt the last alone."""
        return super()._wanted(rows, batch) if rows[0].prompt_left else list(range(batch.starts[-1]))

    def _sample(
        self, rows: Sequence[Row[Any]], batch: ForwardBatch, logits: Tensor, drawn: Tensor | None
    ) -> list[list[int]]:
        """What the trace goes on with, for every row, after seeing what each would have chosen."""
        self._check_finite(logits)
        (first, *_), count = rows, batch.counts[0]
        if first.prompt_left > count:
            return [[] for _ in rows]
        new = 1 if first.prompt_left else count
        written = len(first.tokens)
        following = list(first.request.script[written : written + new])
        compressed = [index for index, row in enumerate(rows) if row.compressions]
        if compressed:
            full = next(index for index, row in enumerate(rows) if not row.compressions)
            own = logits.view(len(rows), new, -1)
            self._compare(own[full], own[compressed], [rows[index] for index in compressed], following)
        return [following for _ in rows]

    def _compare(self, full: Tensor, own: Tensor, rows: Sequence[Row[Any]], following: list[int]) -> None:
        """Add up what rows [rows, new, vocabulary] would have chosen beside the full cache [new, vocabulary]."""
        first, count = rows[0], len(following)
        start = len(first.tokens)
        positions = [first.position + 1 + number for number in range(count)] * len(rows)
        owners = [row for row in rows for _ in following]
        sampled = torch.tensor(sample_rows(own.flatten(0, 1), owners, positions)).view(len(rows), count)
        likely, likely_own = full.float().log_softmax(-1), own.float().log_softmax(-1)
        kl = (likely.exp() * (likely - likely_own)).sum(-1).tolist()
        top1 = (full.argmax(-1) == own.argmax(-1)).tolist()
        said = torch.tensor(following, device=full.device)[:, None]
        own_said = likely_own.gather(-1, said.expand(len(rows), -1, -1)).squeeze(-1)
        change = (own_said - likely.gather(-1, said).squeeze(-1)).tolist()
        differs = (sampled != torch.tensor(following)).tolist()
        thinking, answer = self._split
        for number, row in enumerate(rows):
            tally = self._tallies[row.policies[0]]
            for index in range(count):
                if differs[number][index] and tally.departs_at is None:
                    tally.departs_at = start + index
                if start + index < thinking:
                    tally.thinking += 1
                    tally.kl += kl[number][index]
                    tally.top1 += top1[number][index]
                elif start + index >= answer:
                    tally.answer += 1
                    tally.answer_change += change[number][index]
