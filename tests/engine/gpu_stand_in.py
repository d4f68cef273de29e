"""A GPU made of the CPU's memory: tensors on `cuda:0` that compute here and follow the rules that CUDA has.

Every operation is first tried with torch's own fake tensors on a `cuda` device (once for each combination of types and
ranks): what mixes devices, or has no such result on CUDA, fails. What reads values back to the host, or copies between
host and device, is refused while a graph is captured. Graphs record the operations of a step and do
exactly these again: what Python decided at capture stays decided.
Allocation pools follow PyTorch's: see `Pool`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama  # noqa: F401 (asks for GPUs when it is imported)

from kvatlas.models.load_options import Options
from kvatlas.models.weights import load_weights

CAPTURING = "operation not permitted when stream is capturing"
DEVICE = torch.device("cuda:0")
#: Numbers of device types in torch (c10/core/DeviceType.h).
CUDA, META = 1, 14


@contextmanager
def without_cuda() -> Iterator[None]:
    """Provide what fake tensors need without a GPU: a guard of devices, and tensors that are made on the host first.

    Meta tensors have a guard that does nothing; that of a build with CUDA asks for a driver. Devices must be named with
    their number.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guard, lifted = guards[CUDA], torch._C._only_lift_cpu_tensors()
    guards[CUDA] = guards[META]
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        guards[CUDA] = guard
        torch._C._set_only_lift_cpu_tensors(lifted)


class GpuTensor(torch.Tensor):
    """A tensor on `cuda:0` whose numbers are in `held`, on the CPU."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> GpuTensor:
        # Views of what was made before inference mode want tensors like it.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, stored.size(), stored.stride(), stored.storage_offset(), dtype=stored.dtype, device=DEVICE
            )
        made.held = stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the stand-in for a GPU while that is switched off")

    def tolist(self) -> Any:
        return self.cpu().tolist()


@dataclass(eq=False)
class Pool:
    """Memory of graphs. cuBLAS takes a workspace for its stream at its first product and keeps it until it is cleared.

    PyTorch's allocator refuses to capture into a pool that all its graphs have left while something still lives in it
    (`use_count > 0`). A pool that is left with a workspace in it can never be given back, either.
    """

    graphs: WeakSet[Graph] = field(default_factory=WeakSet)
    used: bool = False

    @property
    def retired(self) -> bool:
        return self.used and not self.graphs


class Graph:
    """A stand-in for `torch.cuda.CUDAGraph`: operations on memory that never moves."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []

    def replay(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            for func, args, kwargs, outs in self.tape:
                result = func(*args, **kwargs)
                for out, new in zip(outs, _listed(result), strict=True):
                    if out is not None:
                        out.copy_(new)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments with all that is in their lists changed."""
    if isinstance(value, dict):
        return {name: _each(change, own) for name, own in value.items()}
    if isinstance(value, tuple | list):
        changed = [_each(change, own) for own in value]
        return tuple(changed) if isinstance(value, tuple) else changed
    return change(value)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


class Gpu(TorchDispatchMode):
    """Computes every operation with tensors on `cuda:0`."""

    #: Operations that were tried, by any of these machines, and whether the host waits at them.
    known: ClassVar[dict[Any, bool]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.captured = 0
        #: Operations that a GPU starts a kernel for, and those at which the host waits for it.
        self.launches = 0
        self.waits = 0
        self.graph: Graph | None = None
        self.pool: Pool | None = None
        self.pools: list[Pool] = []
        #: The pool in which cuBLAS has its workspace for the stream that captures.
        self.workspace: Pool | None = None

    # -- operations ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        flat: list[Any] = []
        _each(flat.append, (args, kwargs))
        asked = [torch.device(item) for item in flat if isinstance(item, torch.device)]
        there = [item for item in flat if isinstance(item, GpuTensor)]
        if not there and not any(device.type == "cuda" for device in asked):
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # In inference mode these come whole: which of them copy, their parts know.
            with self:
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten._fused_sdp_choice.default:
            # CUDA's fused kernels are not here; all of them are softmax(q k) v.
            return 0
        reads = self._reads(func, flat, args, kwargs)
        if reads and self.graph is not None:
            raise RuntimeError(f"{func}: {CAPTURING}")
        self.waits += reads
        self.launches += not _is_view(func)
        own_args, own_kwargs = _each(_on_cpu, args), _each(_on_cpu, kwargs)
        result = func(*own_args, **own_kwargs)
        goes = asked[0].type == "cuda" if asked else bool(there)
        if func is torch.ops.aten.copy_.default:
            goes = isinstance(args[0], GpuTensor)
        outs = _listed(result)
        if self.graph is not None:
            self._record(func, own_args, own_kwargs, outs)
        wrapped = [_wrapped(item, flat) if isinstance(item, torch.Tensor) and goes else item for item in outs]
        return type(result)(wrapped) if isinstance(result, tuple | list) else wrapped[0]

    def _reads(self, func: Any, flat: list[Any], args: Any, kwargs: Any) -> bool:
        """Return whether the host waits for the device; raises what torch raises for these tensors on CUDA."""
        key = (func, *kwargs, *map(_outline, flat))
        if key not in self.known:
            with torch.utils._python_dispatch._disable_current_modes(), self.fake:
                try:
                    func(*_each(_hollow, args), **_each(_hollow, kwargs))
                    self.known[key] = _crosses(func, flat)
                except (DataDependentOutputException, DynamicOutputShapeException):
                    self.known[key] = True
        return self.known[key]

    def _record(self, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> None:
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm") and self.workspace is None:
            self.workspace = self.pool
        if _is_view(func):
            # The memory is there.
            return
        kinds = [item.alias_info for item in func._schema.returns]
        fresh = [None if kind is not None else out for out, kind in zip(outs, kinds, strict=True)] if kinds else [None]
        self.graph.tape.append((func, args, kwargs, fresh))

    # -- graphs, as torch.cuda has them ---------------------------------------------------------------------------

    def new_pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    def clear_workspaces(self) -> None:
        self.workspace = None

    @contextmanager
    def capture(self, graph: Graph, pool: Pool) -> Iterator[None]:
        if pool.retired and self.workspace is pool:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
        if self.workspace is not None and self.workspace is not pool and self.workspace.retired:
            raise AssertionError("a pool was left with the workspaces of cuBLAS in it")
        pool.used = True
        pool.graphs.add(graph)
        self.graph, self.pool = graph, pool
        try:
            yield
        finally:
            self.graph = self.pool = None
        self.captured += 1


def _is_view(func: Any) -> bool:
    kinds = [item.alias_info for item in func._schema.returns]
    return bool(kinds) and all(kind is not None and not kind.is_write for kind in kinds)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrapped(result: torch.Tensor, flat: list[Any]) -> GpuTensor:
    """A result; of an operation in place its argument."""
    same = [item for item in flat if isinstance(item, GpuTensor) and item.held is result]
    return same[0] if same else GpuTensor(result)


def _outline(value: Any) -> Any:
    """All of a value that decides whether CUDA takes it: sizes are checked where it is computed."""
    if isinstance(value, torch.Tensor):
        return value.device.type, value.dtype, value.dim()
    return value if isinstance(value, torch.dtype | torch.device) else type(value)


def _hollow(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    device = DEVICE if isinstance(value, GpuTensor) else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _crosses(func: Any, flat: list[Any]) -> bool:
    """Return whether an operation copies between host and device: CUDA captures none from or to pageable memory."""
    moves = "copy" in str(func)
    places = {item.device.type for item in flat if isinstance(item, torch.Tensor) and (item.dim() or moves)}
    asked = {torch.device(item).type for item in flat if isinstance(item, torch.device)}
    return len(places | asked) > 1


def paged_attention(
    query: Any, key: Any, value: Any, block_mask: Any, scale: float, return_aux: Any, **_options: Any
) -> Any:
    """Compute FlexAttention: of the blocks that its mask lists, the slots that its mask sees."""
    count, slots, size = len(query), key.shape[2], block_mask.BLOCK_SIZE[1]
    number = torch.arange(slots // size, device=query.device)
    wanted = number < block_mask.kv_num_blocks[:, 0, 0, None]
    listed = torch.where(wanted, block_mask.kv_indices[:, 0, 0], slots // size).long()
    blocks = torch.zeros(count, slots // size + 1, dtype=torch.bool, device=query.device).scatter(1, listed, wanted)
    row, slot = torch.arange(count, device=query.device)[:, None], torch.arange(slots, device=query.device)
    zero = torch.zeros_like(row)
    visible = block_mask.mask_mod(row, zero, zero, slot) & blocks[:, :-1].repeat_interleave(size, 1, output_size=slots)
    weights = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible[:, None, None], float("-inf"))
    # Sequences that see nothing get zeros, as there.
    lse = weights.logsumexp(-1) if return_aux.lse else None
    return torch._safe_softmax(weights, -1) @ value, SimpleNamespace(lse=lse)


def compiled(function: Any, **_: Any) -> Any:
    return paged_attention if function is flex_attention else function


def install(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Put the stand-in where torch has CUDA."""

    def stream() -> Any:
        """One that does all at once."""
        return SimpleNamespace(wait_stream=lambda _other: None)

    names = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "device": lambda _device: nullcontext(),
        "Stream": stream,
        "current_stream": stream,
        "stream": lambda _stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": gpu.capture,
        "graph_pool_handle": gpu.new_pool,
        "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "get_device_properties": lambda *_: SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=80 << 30),
        "_lazy_init": lambda: None,
    }
    for name, stand_in in names.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", gpu.clear_workspaces, raising=False)
    # A build of torch with CUDA would ask for a driver.
    patch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None)
    patch.setattr(torch, "compile", compiled)
    patch.setattr(Options, "resolved_device", lambda self: "cpu" if self.device == "cpu" else str(DEVICE))
    patch.setattr("kvatlas.models.weights.load_weights", loaded_there)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A machine with one GPU. The test is skipped on a machine that has one."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, and torch would use it beside its stand-in")
    made = Gpu()
    with without_cuda(), made:
        install(monkeypatch, made)
        yield made


def loaded_there(name: str, folder: Path, dtype: str, device: str, check: bool = True, mapped: bool = True) -> Any:
    """As `load_weights`, in whose place it is put."""
    model = load_weights(name, folder, dtype, "cpu", check=check, mapped=mapped)
    return model if device == "cpu" else moved(model)


def moved(model: Any) -> Any:
    """A model's weights on the GPU."""
    stored: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and not isinstance(tensor, GpuTensor):
                    item = stored.setdefault(id(tensor), GpuTensor(tensor.detach()))
                    table[name] = torch.nn.Parameter(item, requires_grad=False) if table is module._parameters else item
    return model
