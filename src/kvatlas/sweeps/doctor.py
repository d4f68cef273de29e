"""What `kvatlas doctor` looks at: this machine, what decodes on it, whether that is right, and how fast memory is."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from kvatlas import models, native, policies
from kvatlas.core import Check, Finding, KvatlasError, Sampling, Setting
from kvatlas.machine import free_memory
from kvatlas.models import ModelHandle, Shape
from kvatlas.models.options import Options

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PACKAGES = ("torch", "triton", "transformers", "numpy")
#: Steps that are decoded twice.
STEPS = 64
#: Attention of a step that is timed: Llama-3.1-8B's, of sequences of so many tokens; repeated so often.
SHAPE = Shape(layers=1, heads=32, kv_heads=8, head_dim=128, hidden=4096)
TOKENS, REPEATS = 4096, 5
#: Its sequences, and the bytes that are read for the bandwidth.
SIZES = {"cpu": (4, 256 << 20), "cuda": (32, 1 << 30)}


def check_machine(where: str = "auto") -> Iterator[Finding]:
    """Findings about this machine and the device `where` (as the model option says it), as they are made."""
    import torch

    model = models.find("embedded:tiny-llama", device=Options(device=where).resolved_device())
    # Its traces go on to the limit.
    vars(model).update(stops=frozenset(), think_close=-1)
    device = torch.device(model.device)
    yield _versions()
    yield _device(device)
    yield _kernels(device)
    try:
        yield from _decoding(model, model.load())
        yield _memory(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    except (KvatlasError, RuntimeError) as error:
        yield Finding("decoding", Check.FAILED, " ".join(str(error).split())[:500])


def _versions() -> Finding:
    versions, untested = [f"kvatlas {version('kvatlas')}", f"Python {platform.python_version()}"], []
    tested = {item.name: item.specifier for item in map(Requirement, requires("kvatlas") or ()) if item.marker is None}
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
        else:
            if name in tested and not tested[name].contains(version(name), prereleases=True):
                untested.append(f"{name}{tested[name]}")
    message = f"{', '.join(versions)}; {platform.platform()}"
    if untested:
        return Finding("versions", Check.WARNING, message, f"kvatlas was tested with {', '.join(untested)}")
    return Finding("versions", Check.OK, message)


def _device(device: torch.device) -> Finding:
    import os

    import torch

    there = free_memory(str(device))
    memory = "memory unknown" if there is None else f"{there / 2**30:.1f} GiB free"
    if device.type == "cpu":
        processor = platform.processor() or platform.machine()
        return Finding("device", Check.OK, f"CPU ({processor}, {os.cpu_count()} cores), {memory}; no GPU in use")
    properties = torch.cuda.get_device_properties(device)
    return Finding(
        "device",
        Check.OK,
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}, "
        f"{memory} of {properties.total_memory / 2**30:.1f}; GPUs: {torch.cuda.device_count()}",
    )


def _kernels(device: torch.device) -> Finding:
    if device.type != "cpu":
        return Finding("kernels", Check.OK, "FlexAttention, compiled by Triton for this GPU")
    kernels = native.load()
    if kernels is None:
        return Finding("kernels", Check.WARNING, (native.why_not() or "").rstrip("."), "torch computes instead, slower")
    return Finding("kernels", Check.OK, f"native, for {kernels.target}")


def _decoding(handle: ModelHandle, model: PreTrainedModel) -> Iterator[Finding]:
    """The same tokens from the fastest way and from plain torch, step by step; on a GPU whether steps are graphs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, fast = _decode(handle, model, None)
    _, plain = _decode(handle, model, "reference")
    if engine.graphs is not None:
        if engine.graphs.broken or not engine.graphs.steps:
            why = engine.graphs.broken or "no step was fit to be captured"
            yield Finding("CUDA graphs", Check.WARNING, f"off: {why}", "decoding works without them, slower")
        else:
            yield Finding("CUDA graphs", Check.OK, f"captured: {engine.graphs.steps} of {engine.passes} passes")
    name = f"{engine.backend.name} against reference, {handle.name.removeprefix('embedded:')} in {handle.dtype}"
    pairs = list(zip(fast, plain, strict=True))
    differ = [_first_difference(*pair) for pair in pairs if pair[0] != pair[1]]
    if differ:
        message = f"{len(differ)} of {len(pairs)} sequences differ, the first from new token {min(differ)} on ({name})"
        yield Finding("tokens", Check.FAILED, message, "do not trust this machine's traces; please report this")
    else:
        yield Finding("tokens", Check.OK, f"equal in {len(pairs)} sequences of {STEPS} steps ({name})")


def _first_difference(tokens: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(position for position, (a, b) in enumerate(zip(tokens, other, strict=True), 1) if a != b)


def _decode(handle: ModelHandle, model: PreTrainedModel, backend: str | None) -> tuple[Any, list[tuple[int, ...]]]:
    """Greedy decoding under the full cache and two policies that compress on the way."""
    from kvatlas.engine import Engine, Request

    values = {"kv_budget": 48, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
    settings = [Setting.of("full"), Setting.of("window", **values), Setting.of("random", **values)]
    chosen = [policies.of(setting) for setting in settings]
    engine = Engine(handle, model, chosen, Sampling(temperature=0, max_new_tokens=STEPS), 16, backend)
    prompts = [tuple(5 + (7 * row + 3 * i) % (handle.vocabulary - 5) for i in range(8 + row)) for row in range(3)]
    work = [Request(row, prompt, row, tuple(chosen)) for row, prompt in enumerate(prompts)]
    generated = {(generation.key, generation.policy.setting.id): generation.tokens for generation in engine.run(work)}
    return engine, [generated[key] for key in sorted(generated)]


def _memory(device: torch.device, dtype: torch.dtype) -> Finding:
    """Bytes per second that are read at best, and the share of it that attention of a decoding step reaches."""
    import torch

    from kvatlas.engine.backends import backend_for
    from kvatlas.engine.batch import ForwardBatch
    from kvatlas.engine.cache import KVCache

    rows, size = SIZES[device.type]
    bandwidth = size / _reading(device, size)
    backend = backend_for(device, dtype)
    cache = KVCache(SHAPE, rows, {}, 0, device, dtype, backend.page_size)
    sequences = [cache.begin() for _ in range(rows)]
    for sequence in sequences:
        cache.reserve(sequence, TOKENS)
        sequence.length = TOKENS - 1
    batch = ForwardBatch(cache, sequences, [[0]] * rows, [TOKENS - 1] * rows)
    query = torch.ones(rows, SHAPE.heads, SHAPE.head_dim, device=device, dtype=dtype)
    key = query[:, : SHAPE.kv_heads]
    with torch.inference_mode():
        seconds = _seconds(device, lambda: backend.attend(batch, 0, query, key, key, 0.1, None))
    reached = rows * TOKENS * SHAPE.kv_bytes_per_token(dtype.itemsize) / seconds
    return Finding(
        "memory",
        Check.OK,
        f"read at {bandwidth / 1e9:.1f} GB/s; by attention ({backend.name}) to {rows} x {TOKENS} tokens in "
        f"{str(dtype).removeprefix('torch.')} at {reached / 1e9:.1f} GB/s, {reached / bandwidth:.0%} of it",
    )


def _reading(device: torch.device, size: int) -> float:
    """Seconds for so many bytes: a sum or a product with a vector, whichever takes fewer."""
    import torch

    table = torch.ones(size // (4 * SHAPE.hidden), SHAPE.hidden, device=device)
    vector = table[0].clone()
    return min(_seconds(device, table.sum), _seconds(device, lambda: table @ vector))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The fewest seconds of some repeats, after one to warm up."""
    import torch

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(REPEATS))
