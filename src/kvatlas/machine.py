"""This machine: memory that is free below the limits of the system and of control groups, and the folder of caches."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The environment variable with the folder of kvatlas' caches.
CACHE = "KVATLAS_CACHE"

#: Words of out-of-memory errors: of torch's CPU allocator on Linux and elsewhere, and of CUDA.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def collect_seldom() -> None:
    """Let the collector of this process look at its objects seldom: most are those of libraries, which stay."""
    gc.set_threshold(100_000, 20, 20)


def cache_folder() -> Path:
    """Return the folder for what kvatlas can make again, which may not exist: `KVATLAS_CACHE`, else the system's."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("kvatlas", appauthor=False)


@contextmanager
def being_made(path: Path) -> Iterator[Path]:
    """Lock a file or folder of a cache, and give the path under which to make it; whoever waited may find it made.

    What is under that path afterwards, or was left there by a process that was killed, is removed.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    with FileLock(f"{path}.lock"):
        _remove(unfinished)
        try:
            yield unfinished
        finally:
            _remove(unfinished)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def return_freed_memory() -> None:
    """Give memory that was freed back to the system: the C library may keep it, above all what other threads took."""
    # Others than glibc have no such function.
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of Python or torch, whose errors are RuntimeErrors."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@cache
def compiles(device: torch.device) -> bool:
    """Return True if torch compiles for this GPU, which takes a C compiler; otherwise warn once in a process."""
    import torch

    try:
        torch.compile(lambda numbers: numbers + 1)(torch.zeros(2, device=device))
    except Exception as error:
        if out_of_memory(error):
            raise
        warnings.warn(
            f"torch cannot compile for this GPU ({reason(error)}): decoding goes on in plain torch, several times "
            "slower. Triton needs a C compiler (gcc) and Python's headers.",
            stacklevel=2,
        )
        return False
    return True


def compiled(function: Callable[..., Tensor], dynamic: bool | None = None) -> Callable[..., Tensor]:
    """Return a function compiled for the GPU: for all sizes if `dynamic`, else for the first, then for all others.

    Where torch's compiler fails it is the function itself, after one warning: slower, with the same results. Memory
    that runs out while it works is an error as elsewhere.
    """
    import torch

    fast = torch.compile(function, dynamic=dynamic)
    plain = False

    def call(*tensors: Any) -> Tensor:
        nonlocal plain
        if not plain:
            try:
                return fast(*tensors)
            except Exception as error:
                of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
                if not of_compiler or out_of_memory(error):
                    raise
                plain = True
                name = f"{function.__name__.strip('_')!r} ({reason(error)})"
                warnings.warn(f"torch cannot compile {name}: it is computed in plain torch.", stacklevel=2)
        return function(*tensors)

    return call


def free_memory(device: str = "cpu") -> int | None:
    """Return the bytes that this process may still allocate on a device; None if the system does not tell."""
    if device != "cpu":
        import torch

        # Memory that torch holds and does not use is free for this process alone.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        import resource

        lines = Path("/proc/meminfo").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = available if limit == resource.RLIM_INFINITY else limit - pages * resource.getpagesize()
    grouped = left_in_group()
    return max(0, min(available, left, available if grouped is None else grouped))


#: The files of limit and usage of a control group, and the line of its statistics that counts cached files, by the
#: controller: version 2 has one for all.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def left_in_group(root: Path = Path("/")) -> int | None:
    """Return the bytes left below the memory limits of this process's control groups; None without a limit.

    Containers limit memory this way, in version 1 or 2. Groups above the own one have limits, too; cached files that
    the system may drop count as free.
    """
    remaining = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        controller = next((name for name in _GROUP_FILES if name in controllers.split(",")), None)
        if controller is None:
            continue
        limit, usage, cached = _GROUP_FILES[controller]
        top = root / "sys/fs/cgroup" / controller
        lowest = top / path.strip("/")
        # In a container the path may be that of the host; the container's limit is then at the top.
        for group in [lowest, *lowest.parents][: len(lowest.parts) - len(top.parts) + 1]:
            try:
                most = int((group / limit).read_text())
                taken = int((group / usage).read_text())
                stat = (group / "memory.stat").read_text().split()
            except (OSError, ValueError):
                # The file does not exist, or the limit is "max".
                continue
            dropped = int(stat[stat.index(cached) + 1]) if cached in stat else 0
            remaining.append(most - max(0, taken - dropped))
    return min(remaining, default=None)
