"""The memory of decoding: what a worker will take, what there is, and what running out of it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvatlas.engine.cache import SHELF, roomy
from kvatlas.engine.loop import TREES
from kvatlas.engine.observation import Observers
from kvatlas.engine.replay import LONGEST, TOGETHER

if TYPE_CHECKING:
    from kvatlas.models import Model
    from kvatlas.policies import Policy

#: What memory that cannot be had is called: by torch's CPU allocator on Linux and elsewhere, and by CUDA.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of decoding, without the interpreter and its libraries.

    weights; `slots`: keys, values, columns and rings of all rows; `snapshots` that wait for rows; `workspace`: the
    logits with their copies in double precision, or one layer's shelf that grows, whichever is more.
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


def peak(model: Model, policies: Sequence[Policy], batch_size: int, trees: int, prompt: int, output: int) -> Peak:
    """The peak of one worker that decodes `trees` requests under all `policies`, `batch_size` rows at a time.

    Prompts have `prompt` tokens, traces `output` new ones. Rows that a budget bounds fill shelves from the first place
    on, others (one in each open tree, if any policy has no budget) from the last.
    """
    budgets = sorted({policy.budget for policy in policies if policy.budget is not None})
    open_trees = min(trees, -(-TREES * batch_size // len(policies)))
    longest = prompt + output
    rows = min(batch_size, trees * len(policies))
    unbounded = min(open_trees, rows) if any(policy.budget is None for policy in policies) else 0
    # Beside the newest tokens of all rows, branches are fed what they replay of the full cache.
    lines = rows + (TOGETHER if unbounded and budgets else 0)
    bounded = rows if budgets else 0
    shelves = [min(SHELF, batch_size - start) for start in range(0, batch_size, SHELF)]
    capacities = [roomy(budgets[-1]) if SHELF * shelf < bounded else 0 for shelf in range(len(shelves))]
    for shelf in reversed(range(len(shelves))):
        if unbounded > 0:
            capacities[shelf] = max(capacities[shelf], roomy(longest))
        unbounded -= shelves[shelf]
    shape, observers = model.shape, Observers(policies)
    cached = sum(places * tokens for places, tokens in zip(shelves, capacities, strict=True))
    columns = sum(layers * heads for layers, heads in observers.columns(shape).values())
    size = 4 if model.dtype == "float32" else 2
    ring = (observers.ring + LONGEST if observers.ring else 0) * shape.layers * shape.heads * shape.head_dim * size
    waiting = [budget for budget in budgets if budget < longest] if len(policies) > 1 else []
    return Peak(
        weights=model.weight_bytes or 0,
        slots=cached * model.kv_bytes_per_token + batch_size * (4 * columns * max(capacities) + ring),
        snapshots=open_trees * sum(waiting) * model.kv_bytes_per_token,
        # Never both at a time: shelves grow before a pass, its logits come after it.
        workspace=max(
            lines * model.vocabulary * (size + 2 * 8),
            max(places * tokens for places, tokens in zip(shelves, capacities, strict=True))
            * (model.kv_bytes_per_token // (2 * shape.layers)),
        ),
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


def free(device: str) -> int | None:
    """Bytes that a worker on this device may still take; None where the system does not say."""
    import torch

    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    import resource
    from pathlib import Path

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    found = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return found if limit == resource.RLIM_INFINITY else min(found, limit - pages * resource.getpagesize())


def release() -> None:
    """Give back what nobody holds any more."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
