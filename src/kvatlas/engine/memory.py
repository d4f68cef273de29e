"""The memory of decoding: what a worker will take, what there is, and what running out of it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvatlas.engine.cache import GROWTH, PAGE, pages_for
from kvatlas.engine.scheduler import OPEN_SETTINGS, PROMPT_TOKENS, ROWS_PER_REQUEST
from kvatlas.engine.signals import SignalCollector

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle
    from kvatlas.policies import Policy

#: What memory that cannot be had is called: by torch's CPU allocator on Linux and elsewhere, and by CUDA.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of decoding, without the interpreter and its libraries.

    weights; `slots`: pages, token states and recent queries of all rows; `snapshots`: pages of branches that wait for
    rows, where no trunk has them, too; `workspace`: the logits with their copies in double precision and what a pass
    of prompts computes, or one layer of the cache that grows, whichever is more.
    """

    weights: int
    slots: int
    snapshots: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.slots + self.snapshots + self.workspace

    def to_json(self) -> dict[str, int]:
        """As `plan --json` prints it."""
        return {**asdict(self), "total": self.total}


def peak(model: ModelHandle, policies: Sequence[Policy], batch_size: int, trees: int, prompt: int, output: int) -> Peak:
    """The peak of one worker that decodes `trees` requests under all `policies`, `batch_size` rows at a time.

    Prompts have `prompt` tokens, traces `output` new ones.
    """
    budgets = sorted({policy.budget.most(prompt) for policy in policies if policy.budget is not None})
    # A request is begun where one setting fewer than the limit is open.
    most = max(OPEN_SETTINGS * batch_size - 1 + len(policies), batch_size // ROWS_PER_REQUEST * len(policies))
    open_trees = min(trees, -(-most // len(policies)))
    longest, rows = prompt + output, min(batch_size, trees * len(policies))
    unbounded = min(open_trees, rows) if any(policy.budget is None for policy in policies) else 0
    bounded = rows - unbounded if budgets else 0
    # A snapshot that has outlived the trunk whose pages it shares stays as long as a branch of its tree has no row.
    open_settings = min(trees * len(policies), most)
    forked = round((open_settings - rows) / max(1, len(policies) - 1))
    waiting = sum(pages_for(budget) for budget in budgets if budget < longest) if len(policies) > 1 else 0
    shape, collector, size = model.shape, SignalCollector(policies), 4 if model.dtype == "float32" else 2
    page = PAGE * model.kv_bytes_per_token
    pages = unbounded * pages_for(longest) + bounded * pages_for(min(longest, budgets[-1] if budgets else longest))
    noted = sum(layers * heads for layers, heads in collector.token_state(shape).values())
    queries = collector.query_window * shape.layers * shape.heads * shape.head_dim * size
    capacity = longest if unbounded else budgets[-1] if budgets else 0
    # While one layer grows, its old pages stand beside the new ones; logits and states of a pass come after that.
    grown = pages * page // (2 * shape.layers)
    states = min(prompt * rows, PROMPT_TOKENS) * 8 * shape.hidden * size
    return Peak(
        weights=model.weight_bytes or 0,
        slots=int(pages * page * (1 + 1 / (2 * GROWTH))) + rows * (4 * noted * capacity + queries),
        snapshots=max(0, forked - unbounded) * waiting * page,
        workspace=max(rows * model.vocabulary * (size + 2 * 8) + states, grown),
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


def release() -> None:
    """Give back what nobody holds any more."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
