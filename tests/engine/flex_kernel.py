"""What torch makes of our attention for a GPU that is not here: Triton source, compiled by Triton or interpreted.

    python -m tests.engine.flex_kernel emit CASES FOLDER           # sources, compiled for each compute capability
    TRITON_INTERPRET=1 python -m tests.engine.flex_kernel interpret CASES FOLDER

CASES is a JSON list of `Case`s. Both print a JSON list with an object for each. Each needs a process of its own: torch
is told of a GPU, and Triton reads TRITON_INTERPRET once.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvatlas.engine import flex
from kvatlas.engine.attention import ForwardBatch
from kvatlas.engine.cache import KVCache, Layer
from kvatlas.models import Shape
from tests.engine.cuda_device import DEVICE, without_cuda

#: Lengths before the new token, around every border of blocks of 128.
LENGTHS = (0, 1, 127, 128, 129, 255, 325)
#: Of each compute capability: bytes of shared memory that a block may have.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
KV_HEADS = 2
#: Numbers that a program computes of what is not attention: compiled, and interpreted, which costs by the program.
BLOCK, INTERPRETED_BLOCK = 64, 1024


@dataclass(frozen=True)
class Case:
    """One kernel: query heads of a KV head, head size, type; `lengths` are batches that are attended to in turn, whose
    last is kept. Its sequences are split in `splits` (an even number; smaller batches in more). `fault` replaces a text
    of engine/flex.py by another. The source is made for `capability` and, where `compiled`, compiled for it.
    """

    group: int
    size: int
    dtype: str = "float32"
    lengths: tuple[tuple[int, ...], ...] = (LENGTHS,)
    fault: tuple[str, str] | None = None
    splits: int = 2
    capability: int = 80
    compiled: bool = False

    @classmethod
    def read(cls, text: str) -> list[Case]:
        return [cls(**case) for case in json.loads(text)]


@dataclass
class Scene:
    """Sequences in the cache, one new token for each."""

    cache: KVCache
    batch: ForwardBatch
    query: torch.Tensor
    key: torch.Tensor

    @classmethod
    def of(cls, case: Case, lengths: tuple[int, ...], device: torch.device) -> Scene:
        shape = Shape(1, KV_HEADS * case.group, KV_HEADS, case.size, 64)
        cache = KVCache(shape, len(lengths), {}, 0, device, getattr(torch, case.dtype), flex.BLOCK)
        sequences = [cache.begin() for _ in lengths]
        # Page by page in turns, so that those of a sequence are apart.
        for end in range(1, max(lengths) + 2, flex.BLOCK):
            for sequence, length in zip(sequences, lengths, strict=True):
                cache.reserve(sequence, min(end, length + 1))
        for sequence, length in zip(sequences, lengths, strict=True):
            cache.reserve(sequence, length + 1)
            sequence.length = length
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, cache.dtype)

        for pool in (*cache.keys, *cache.values):
            # What nobody wrote must not be seen: it would show.
            pool.copy_(drawn(*pool.shape))
        batch = ForwardBatch(cache, sequences, [[0]] * len(lengths), list(lengths))
        heads = shape.heads, shape.kv_heads
        return cls(cache, batch, *(drawn(len(lengths), head, case.size) for head in heads))

    def attend(self, backend: Any) -> torch.Tensor:
        layer = Layer(0, self.query.shape[-1] ** -0.5)
        result: torch.Tensor = backend.attend(self.batch, layer, self.query, self.key, -self.key)
        return result


def flex_with(fault: tuple[str, str] | None) -> ModuleType:
    """engine/flex.py, with a fault or without."""
    source = inspect.getsource(flex)
    if fault:
        assert source.count(fault[0]) == 1, fault
        source = source.replace(*fault)
    module = ModuleType("flex_with_fault")
    sys.modules[module.__name__] = module
    exec(compile(source, "flex_with_fault.py", "exec"), vars(module))  # noqa: S102
    return module


# -- sources -----------------------------------------------------------------------------------------------------


class Emitted:
    """torch.compile up to the point where it would write and load its source."""

    def __init__(self, case: Case) -> None:
        import torch._inductor.config as config
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor.graph import GraphLowering
        from torch._inductor.runtime.hints import DeviceProperties

        self.sources: list[str] = []
        self.arguments: list[list[Any]] = []
        self.out: torch.Tensor | None = None
        self.named: dict[int, str] = {}
        capability, most = case.capability, max(map(len, case.lengths))
        properties = SimpleNamespace(
            name="stand-in",
            major=capability // 10,
            minor=capability % 10,
            multi_processor_count=most * KV_HEADS * case.splits // 2,
            shared_memory_per_block_optin=SHARED[capability],
            regs_per_multiprocessor=65_536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
            total_memory=80 << 30,
            gcnArchName="",
        )
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda *_: None,
            "_exchange_device": lambda _device: 0,
            "_maybe_exchange_device": lambda _device: 0,
            "synchronize": lambda *_: None,
            "get_device_properties": lambda *_: properties,
            "get_device_capability": lambda *_: (properties.major, properties.minor),
        }.items():
            setattr(torch.cuda, name, value)
        for interface in (CudaInterface, CudaInterface.Worker):
            interface.get_device_properties = staticmethod(lambda *_: properties)
        CudaInterface.get_compute_capability = staticmethod(lambda *_: capability)
        # As without a GPU: constants are not moved there to see what they become.
        FakeTensorMode.avoid_device_init = property(lambda _: True)
        DeviceProperties.create.cache_clear()
        config.fx_graph_cache, config.compile_threads = False, 1
        drive(capability)
        emitted = self

        def written(graph: Any) -> Any:
            emitted.sources.append(graph.codegen()[0].value)
            return SimpleNamespace(call=emitted.call, __file__="emitted.py")

        GraphLowering.compile_to_module = written

    def call(self, given: list[Any]) -> tuple[torch.Tensor | None]:
        """In place of the kernel: notes what it is given."""
        self.arguments.append(
            [self.named[_memory(item)] if isinstance(item, torch.Tensor) else int(item) for item in given]
        )
        given.clear()
        return (self.out,)


def drive(capability: int) -> None:
    """A driver of Triton's, where there is none."""
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    utilities = SimpleNamespace(get_device_properties=lambda _device: {"max_shared_mem": SHARED[capability]})
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, utils=utilities))
    triton_helpers.set_driver_to_gpu = lambda: None


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def arguments(scene: Scene, grouped: torch.Tensor, mask: Any) -> dict[str, torch.Tensor]:
    """All tensors that the kernel may read, by name."""
    captured = inspect.getclosurevars(mask.mask_mod).nonlocals
    return {
        "query": grouped,
        "keys": scene.cache.keys[0][None],
        "values": scene.cache.values[0][None],
        "blocks": mask.kv_num_blocks,
        "indices": mask.kv_indices,
        **{name: value for name, value in captured.items() if isinstance(value, torch.Tensor)},
    }


def emit(case: Case, path: Path) -> dict[str, Any]:
    """The source for a case, written to `path`, with how it is called."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    torch._dynamo.reset()
    emitted, module = Emitted(case), flex_with(case.fault)
    with without_cuda(), FakeTensorMode(shape_env=ShapeEnv()):
        backend = module.FlexBackend(compiled=True)
        kernel = backend.kernel
        for lengths in case.lengths:
            scene = Scene.of(case, lengths, DEVICE)

            def called(grouped: Any, *given: Any, scene: Scene = scene, **named: Any) -> Any:
                emitted.out = torch.empty_like(grouped)
                there = arguments(scene, grouped, named["block_mask"])
                emitted.named = {_memory(value): name for name, value in there.items()}
                return kernel(grouped, *given, **named)

            backend.kernel = called
            scene.attend(backend)
    path.write_text(emitted.sources[-1])
    return {
        "splits": ["SPLIT_KV" in source for source in emitted.sources],
        "file": str(path),
        "arguments": emitted.arguments[-1],
        "machine_code": machine_code(path, case.capability) if case.compiled else {},
    }


# -- kernels in a source -----------------------------------------------------------------------------------------


def kernels(path: Path, launched: Any) -> ModuleType:
    """A source, loaded where there is no GPU: `launched(name, module, options)` stands for each kernel."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_heuristics

    options: dict[str, Any] = {}

    def noted(**given: Any) -> Any:
        options.update(given)
        return lambda function: function

    def loaded(_self: Any, name: str, source: str, **_named: Any) -> Any:
        options.clear()
        own = path.with_name(f"{path.stem}_{name}.py")
        own.write_text(source)
        return launched(name, _imported(own), dict(options))

    for kind in ("template", "pointwise", "reduction", "persistent_reduction"):
        setattr(triton_heuristics, kind, noted)
    AsyncCompile.triton = loaded
    AsyncCompile.wait = lambda *_: None
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    torch.cuda._DeviceGuard = lambda _device: nullcontext()
    torch.cuda.set_device = lambda _device: None
    return _imported(path)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine_code(path: Path, capability: int) -> dict[str, dict[str, int]]:
    """Bytes of machine code and of shared memory of each kernel, by Triton's own compiler and assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    by_name: dict[str, dict[str, int]] = {}

    def compiled(name: str, module: ModuleType, options: dict[str, Any]) -> None:
        function = getattr(module, name)
        signature = options["triton_meta"]["signature"]
        constants = {
            arg_name: BLOCK for arg_name in function.arg_names if signature.get(arg_name, "constexpr") == "constexpr"
        }
        constants |= options["triton_meta"].get("constants", {})
        types = {
            arg_name: "constexpr" if arg_name in constants else signature[arg_name] for arg_name in function.arg_names
        }
        source = ASTSource(function, types, constants)
        chosen = {item: options[item] for item in ("num_warps", "num_stages") if item in options}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
        by_name[name] = {"bytes": len(made.asm["cubin"]), "shared": made.metadata.shared}

    kernels(path, compiled)
    return by_name


class Launcher:
    """A kernel that Triton's interpreter runs."""

    def __init__(self, name: str, module: ModuleType, options: dict[str, Any]) -> None:
        self.function, self.template = getattr(module, name), options["inductor_meta"].get("grid_type") == "FixedGrid"
        _plain(module, but=name)

    def run(self, *given: Any, stream: int) -> None:
        if self.template:
            *given, x, y, z = given
            self.function[x, y, z](*given)
        else:
            count = given[self.function.arg_names.index("xnumel")]
            self.function[-(-count // INTERPRETED_BLOCK), 1, 1](*given, XBLOCK=INTERPRETED_BLOCK)


def _plain(module: ModuleType, but: str = "") -> None:
    """Have the functions that a module's kernels call called as what they are."""
    from triton.runtime.interpreter import InterpretedFunction

    for name, value in list(vars(module).items()):
        if name != but and isinstance(value, InterpretedFunction):
            plain = value.rewrite()
            plain.fn = plain
            setattr(module, name, plain)


def interpret(case: Case, emitted: dict[str, Any]) -> dict[str, Any]:
    """The largest error of each sequence against plain torch in float32."""
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from triton.runtime import interpreter

    from kvatlas.engine.attention import ReferenceBackend

    drive(case.capability)
    _plain(triton_helpers)
    # As on a GPU, overflow is not looked for.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # What NVIDIA's library computes, which has no source.
    triton_helpers.libdevice = SimpleNamespace(exp2=lambda x: tl.exp2(x), log2=lambda x: tl.log2(x))
    module = flex_with(case.fault)
    call = kernels(Path(emitted["file"]), Launcher).call
    scene = Scene.of(case, case.lengths[-1], torch.device("cpu"))
    backend = module.FlexBackend(compiled=False)

    def kernel(grouped: Any, *_given: Any, block_mask: Any, **_named: Any) -> Any:
        there = arguments(scene, grouped, block_mask)
        return call([there[item] if isinstance(item, str) else item for item in emitted["arguments"]])[0]

    backend.kernel = kernel
    result = scene.attend(backend)
    exact = Scene.of(case, case.lengths[-1], torch.device("cpu"))
    exact.cache.keys, exact.cache.values = [exact.cache.keys[0].float()], [exact.cache.values[0].float()]
    exact.query, exact.key = exact.query.float(), exact.key.float()
    wanted = exact.attend(ReferenceBackend())
    return {"errors": (result - wanted).abs().amax((1, 2)).nan_to_num(9e9).tolist()}


def main() -> None:
    verb, cases, folder = sys.argv[1], Case.read(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    known = folder / "emitted.json"
    with torch.inference_mode():
        if verb == "emit":
            results = [emit(case, folder / f"source{number}.py") for number, case in enumerate(cases)]
            known.write_text(json.dumps(results))
        else:
            results = [interpret(*pair) for pair in zip(cases, json.loads(known.read_text()), strict=True)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
