"""The CPU kernels (`kernels.c`) over ctypes: linear layers, attention over a paged cache, normalisation, noise.

`hatch_build.py` compiles the libraries in `lib/`, one for each target, when the package is built or installed; the best
one for this processor is loaded. Without one `load` returns None, `why_not` the reason, and callers fall back to torch.
The environment variable KVATLAS_NATIVE=off switches them off.

Numbers never depend on the target, the number of rows or their neighbours: see the contract in `kernels.c`.
All tensors are fp32 on the CPU unless otherwise stated, contiguous in their last dimension. Layers check the widths of
their inputs; `engine.attention.attend` checks the shapes of attention. Weights of linear layers may be bfloat16: what
is multiplied by them is rounded to bfloat16, too, and sums stay fp32. They may also be int8, in groups of 32 inputs
with a scale: what is multiplied by them is rounded to 8 bits in the same groups, and sums of a group are exact.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.cpu.native.panels import LANES, pack_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The most candidates of `Native.sample`: a row of them is put into its order one by one.
MOST_SAMPLED = 240
VARIABLE = "KVATLAS_NATIVE"
_FOLDER = Path(__file__).parent / "lib"
_SUFFIXES = {"linux": ".so", "darwin": ".dylib", "windows": ".dll"}
_MACHINES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}


def load() -> Native | None:
    """Return the kernels, or None if they cannot be loaded or are switched off."""
    return _loaded()[0]


def why_not() -> str | None:
    """Return the reason of `load` for None, as a sentence."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Native | None, str | None]:
    if os.environ.get(VARIABLE) == "off":
        return None, f"The native CPU kernels are switched off ({VARIABLE}=off)."
    system = platform.system().lower()
    machine = platform.machine().lower()
    family = _MACHINES.get(machine)
    files = sorted(_FOLDER.glob(f"{system}-{family}*{_SUFFIXES.get(system, '.so')}"))
    if not files:
        return None, f"The native CPU kernels were not built for {system} on {machine}."

    targets = {file.stem.removeprefix(f"{system}-"): file for file in files}
    try:
        usable = list(targets)
        if "aarch64" not in targets:
            # To load a library runs nothing of it, and its test of the processor is compiled for any.
            level = ctypes.CDLL(str(files[0])).kvatlas_x86_level()
            usable = [target for target in targets if int(target[-1]) <= level]
        if not usable:
            return None, f"The native CPU kernels need a processor with AVX2 and FMA ({', '.join(targets)})."
        return Native(targets[usable[-1]], usable[-1]), None
    except (OSError, AttributeError) as error:
        return None, f"The native CPU kernels could not be loaded: {error}."


def _check_width(fits: bool, tensor: Tensor, width: int) -> None:
    # A kernel would read beyond the tensor.
    if not fits:
        raise ValueError(f"a tensor {tuple(tensor.shape)} does not fit a width of {width}")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("sequences", "page_size", "table_width", "watched_width")),
        *((name, c_void_p) for name in ("table", "starts", "lengths", "watched", "rows", "first", "scratch")),
    ]


_SIDE: dict[str, Any] = {
    **dict.fromkeys(("size", "stride"), c_int64),
    **dict.fromkeys(("fresh", "pool"), c_void_p),
    **dict.fromkeys(("bits", "bytes", "group", "residual"), c_int64),
    "recent": c_void_p,
}
#: Values of `kind` in `kernels.c`.
FLOATS, PAIRS, PAIRS_AT_ONCE, BYTES, BYTES_AT_ONCE = range(5)


class PagedLayer(ctypes.Structure):
    """A layer's pages and its rule of attention, made by `Native.paged_layer`; a call adds the new tokens.

    Scores become softcap tanh(score / softcap) if it is not 0; `sinks` [heads] are logits that take a share of the
    softmax and have no value. With a `window`, a token sees those slots with position > own - window: `positions`
    [tokens] int32 of the new tokens are written into `places` [kv_heads, slots] int32. The attention of watched
    sequences to each slot, the mean of a group's heads, is added to `mass` [watched, kv_heads, watched_width]. With a
    `bias` [kv_heads, size], rows of keys are without it, and `angles` [positions_known, size] has a row for each
    position.
    """

    # Both sides are in it as single fields: a structure for each would take the interpreter as long as the rest.
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "slots")),
        ("query", c_void_p),
        ("query_stride", c_int64),
        *((f"key_{name}", kind) for name, kind in _SIDE.items()),
        *((f"value_{name}", kind) for name, kind in _SIDE.items()),
        *((name, c_void_p) for name in ("out", "places", "positions", "mass", "sinks")),
        ("window", c_int64),
        *((name, c_double) for name in ("scaling", "softcap")),
        *((name, c_void_p) for name in ("bias", "angles")),
        ("positions_known", c_int64),
    ]


class _KeptPool(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        *((name, c_int64) for name in ("bytes", "slots")),
        ("kept", c_void_p),
        ("head_stride", c_int64),
    ]


class PageTables:
    """Tables [kv_heads, slots, ...] of a cache, contiguous and of any type, with the numbers of their layers."""

    def __init__(self, by_layer: Sequence[tuple[int, Tensor]]) -> None:
        self.by_layer = by_layer
        self.structs = (_KeptPool * len(by_layer))()
        for struct, (_, table) in zip(self.structs, by_layer, strict=True):
            struct.rows = table.data_ptr()
            struct.slots = table.shape[1]
            struct.bytes = table.stride(1) * table.element_size()
        self.widest = max(struct.bytes for struct in self.structs)
        self.address = ctypes.addressof(self.structs)


@dataclass(eq=False)
class PagedBatch:
    """A ragged batch of sequences on pages for attention, the same for every layer.

    `table` [sequences, width] int32: the pages of each sequence, of `page_size` slots (a multiple of 16);
    `starts` [sequences + 1] int32: the first of each sequence's new tokens; `lengths` [sequences] int32: tokens cached
    before. `longest` is the largest length, new tokens included. `watched` [sequences] int32: the row of `mass` for a
    sequence's attention, -1 for no row; `watched_width`: its last dimension. `rows` [sequences] int32 are their rows in
    the tensors of recent tokens, `first` [sequences] int32 the positions of their first new tokens; only packed pools
    need them. The `scratch` is the working memory of layers with at most `scratch_size` numbers in a key or value.
    """

    table: Tensor
    starts: Tensor
    lengths: Tensor
    page_size: int
    longest: int
    watched: Tensor | None = None
    watched_width: int = 0
    rows: Tensor | None = None
    first: Tensor | None = None
    scratch: Tensor | None = None
    scratch_size: int = 0

    def __post_init__(self) -> None:
        tensors = (self.table, self.starts, self.lengths, self.watched, self.rows, self.first)
        sizes = (len(self.lengths), self.page_size, self.table.shape[1], self.watched_width)
        self.struct = _Batch(*sizes, *map(_pointer, tensors))
        self.address = ctypes.addressof(self.struct)


class Linear:
    """A linear layer over weights in the form of `pack_weights`; the originals are no longer needed."""

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, outputs: int, whole: Linear | None = None
    ) -> None:
        self.library = library
        self.weight = weight
        self.bias = bias
        #: The layer of which this one is a part.
        self.whole = whole
        self.inputs = weight.shape[1]
        self.outputs = outputs
        #: Words of weights and inputs are floats, pairs of bfloat16 numbers, or four bytes.
        self.kind = FLOATS
        if weight.element_size() == 2:
            self.kind = PAIRS_AT_ONCE if library.kvatlas_multiplies_pairs() else PAIRS
        elif weight.element_size() == 1:
            self.kind = BYTES_AT_ONCE if library.kvatlas_multiplies_bytes() else BYTES
        #: Words of a row.
        self.words = self.inputs * weight.element_size() // 4
        #: Of the weights and the bias.
        self.addresses = (weight.data_ptr(), _pointer(bias))

    @property
    def in_bytes(self) -> bool:
        """True for weights in int8."""
        return self.kind in (BYTES, BYTES_AT_ONCE)

    def part(self, first: int, outputs: int) -> Linear:
        """Return so many outputs from `first` (a multiple of 16) on as a layer on the same memory."""
        weight = self.weight[first // LANES : -(-(first + outputs) // LANES)]
        bias = None if self.bias is None else self.bias[first : first + outputs]
        return Linear(self.library, weight, bias, outputs, self)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., inputs] W^T + bias, [..., outputs]; x may be columns of a wider table [rows, columns].

        It is rounded to bfloat16 or int8 if the weights are.
        """
        inputs = self.inputs
        outputs = self.outputs
        _check_width(x.shape[-1] == inputs, x, inputs)
        if x.dim() != 2 and not x.is_contiguous():
            x = x.contiguous()

        y = x.new_empty((*x.shape[:-1], outputs))
        output = (y.data_ptr(), y.stride(-2))
        rows = x.numel() // inputs
        x_stride = x.stride(-2)
        if self.in_bytes:
            codes = x.new_empty(self.library.kvatlas_byte_words(rows, inputs))
            self.library.kvatlas_to_bytes(x.data_ptr(), x_stride, rows, inputs, codes.data_ptr(), self.kind)
            self.library.kvatlas_linear_bytes(
                codes.data_ptr(), *self.addresses, *output, rows, inputs, outputs, self.kind
            )
            return y
        if self.kind != FLOATS:
            x = x.to(self.weight.dtype).contiguous()
            x_stride = self.words
        pointers = (x.data_ptr(), x_stride, *self.addresses, *output)
        self.library.kvatlas_linear(*pointers, rows, self.words, outputs, self.kind)
        return y

    def rows(self, chosen: Tensor) -> Tensor:
        """Return the weights [..., inputs] of the outputs `chosen` [...], int64."""
        import torch

        chosen = chosen.contiguous()
        rows = torch.empty((*chosen.shape, self.inputs))
        weight, _ = self.addresses
        pointers = (weight, self.outputs, chosen.data_ptr(), rows.data_ptr(), chosen.numel())
        if self.in_bytes:
            found = self.library.kvatlas_unpack_bytes(*pointers, self.inputs)
        else:
            found = self.library.kvatlas_unpack(*pointers, self.words, self.kind)
        if not found:
            raise IndexError(f"an output is not one of {self.outputs}")
        return rows


def _side(bits: int, pool: Tensor, group: int, recent: Tensor | None) -> tuple[int, int, int, int, int | None]:
    """Return bits, bytes of a row, group, residual and recent tokens of keys or values for `PagedLayer`."""
    row_bytes = pool.shape[2] * pool.element_size()
    if bits == 16:
        return bits if pool.element_size() == 2 else 0, row_bytes, 0, 0, None
    residual = 0 if recent is None else recent.shape[2]
    return bits, row_bytes, group, residual, _pointer(recent)


#: The types of the kernels that return something.
_RESULTS: dict[str, Any] = {
    **dict.fromkeys(("attention_scratch", "byte_words", "unpack_bytes", "unpack", "sample"), c_int64),
    **dict.fromkeys(("multiplies_pairs", "multiplies_bytes"), ctypes.c_int),
}


class Native:
    """The loaded library."""

    def __init__(self, file: Path, target: str) -> None:
        self.target = target
        self.library = library = ctypes.CDLL(str(file))
        pointer = c_void_p
        integer = c_int64
        for name, arguments in {
            "linear": [pointer, integer, pointer, pointer, pointer, *[integer] * 5],
            "multiplies_pairs": [],
            "multiplies_bytes": [],
            "byte_words": [integer, integer],
            "to_bytes": [pointer, integer, integer, integer, pointer, integer],
            "linear_bytes": [pointer, pointer, pointer, pointer, *[integer] * 5],
            "unpack_bytes": [pointer, integer, pointer, pointer, integer, integer],
            "shorten": [pointer, integer, integer],
            "unpack": [pointer, integer, pointer, pointer, *[integer] * 3],
            "paged_attention": [pointer, pointer],
            "attention_scratch": [integer] * 3,
            "project": [pointer] * 2,
            "feed_forward": [pointer] * 2,
            "decoder_layers": [pointer, pointer, integer, pointer, pointer],
            "compact": [pointer, integer, integer, integer, pointer, pointer, integer, pointer],
            "rms_norm": [pointer, pointer, pointer, integer, integer, c_double],
            "silu_mul": [pointer, integer, pointer, integer, pointer, integer, integer],
            "rotate": [pointer, integer, pointer, pointer, integer, integer, integer],
            "sample": [pointer, *[integer] * 4, c_double, c_double, *[pointer] * 3],
            "uniform": [*[pointer] * 4, integer, pointer, integer, integer],
        }.items():
            function = getattr(library, f"kvatlas_{name}")
            function.argtypes = arguments
            function.restype = _RESULTS.get(name)

    def linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Linear:
        """Return a layer with a packed copy of `weight` [outputs, inputs]; `dtype` is fp32 (None), bfloat16 or int8."""
        return self.packed_linear(pack_weights(weight, dtype), bias, weight.shape[0])

    def packed_linear(self, weight: Tensor, bias: Tensor | None, outputs: int) -> Linear:
        """Return a layer over weights in the form of `pack_weights`."""
        bias = bias.detach().float().contiguous() if bias is not None else None
        return Linear(self.library, weight, bias, outputs)

    def paged_layer(
        self,
        batch: PagedBatch,
        heads: int,
        sizes: tuple[int, int],
        keys: Tensor,
        values: Tensor,
        scaling: float,
        bits: tuple[int, int] = (16, 16),
        group: int = 0,
        recent: Sequence[Tensor | None] = (None, None),
    ) -> PagedLayer:
        """Return a layer with so many query heads over its pools, for a call with this batch.

        `keys` [kv_heads, slots, size] and `values` [kv_heads, slots, value size] are the pools, fp32 or bfloat16, and
        `sizes` those of a key and a value. Pools of fewer `bits` than 16 (of keys, of values) hold rows of
        `bits.storage.PackedRows`; `recent` [rows, kv_heads, residual, size] has the newest tokens before the new ones
        unpacked. The caller may set more fields: see `PagedLayer`.
        """
        kv_heads, slots, _ = keys.shape
        size, value_size = sizes
        self.make_scratch(batch, max(sizes))
        return PagedLayer(
            *(heads, kv_heads, slots, None, 0),
            *(size, 0, None, keys.data_ptr(), *_side(bits[0], keys, group, recent[0])),
            *(value_size, 0, None, values.data_ptr(), *_side(bits[1], values, group, recent[1])),
            scaling=scaling,
        )

    def make_scratch(self, batch: PagedBatch, largest: int) -> None:
        """Give a batch the working memory of its layers, whose keys and values have at most so many numbers."""
        if batch.scratch is None or batch.scratch_size < largest:
            floats = self.library.kvatlas_attention_scratch(largest, batch.longest, batch.watched is not None)
            # Of four bytes each, as the numbers of the table have.
            batch.scratch = batch.table.new_empty(floats)
            batch.scratch_size = largest
            batch.struct.scratch = batch.scratch.data_ptr()

    def attention(self, batch: PagedBatch, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write new keys and values into the pages of a layer, then return the attention [tokens, heads, value size].

        `query` [tokens, heads, size], `key` [tokens, kv_heads, size], `value` [tokens, kv_heads, value size], heads
        side by side. Every new token sees its sequence up to its own slot.
        """
        tokens, heads, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[2])
        layer.query = query.data_ptr()
        layer.query_stride = query.stride(0)
        layer.key_fresh = key.data_ptr()
        layer.key_stride = key.stride(0)
        layer.value_fresh = value.data_ptr()
        layer.value_stride = value.stride(0)
        layer.out = out.data_ptr()
        self.library.kvatlas_paged_attention(batch.address, ctypes.addressof(layer))
        return out

    def compact(
        self, tables: PageTables, kept: Tensor, before: Sequence[int], after: Sequence[int], page_size: int
    ) -> None:
        """Move the tokens of a sequence that are `kept` from its pages `before` to the pages `after`, of `page_size`.

        `kept` [layers or 1, kv_heads or 1, tokens] int64. The pages may be the same.
        """
        kept = kept.contiguous()
        layers, heads, count = kept.shape
        first = kept.data_ptr()
        for struct, (layer, _) in zip(tables.structs, tables.by_layer, strict=True):
            struct.kept = first + (layer * heads * count * kept.itemsize if layers > 1 else 0)
            struct.head_stride = count if heads > 1 else 0

        scratch = kept.new_empty(-(-count * tables.widest // kept.itemsize))
        self.library.kvatlas_compact(
            tables.address,
            len(tables.structs),
            len(tables.by_layer[0][1]),
            count,
            (c_int32 * len(before))(*before),
            (c_int32 * len(after))(*after),
            page_size,
            scratch.data_ptr(),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, contiguous."""
        y = x.new_empty(x.shape)
        width = weight.shape[0]
        _check_width(x.shape[-1] == width, x, width)
        self.library.kvatlas_rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, eps)
        return y

    def silu_mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return silu(a) * b for [rows, width]; a and b may be the halves of one table."""
        rows, width = a.shape
        _check_width(a.shape == b.shape, b, width)
        y = a.new_empty(rows, width)
        self.library.kvatlas_silu_mul(a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), y.data_ptr(), rows, width)
        return y

    def sample(
        self, logits: Tensor, top: int, temperature: float, top_p: float, streams: Tensor, positions: Tensor
    ) -> Tensor | None:
        """Return the next tokens [rows] from logits [rows, width] as `engine.sampling.sample` does.

        `top` is less than the width and at most `MOST_SAMPLED`; `streams` and `positions` [rows] int64. Returns None if
        some of a row's `top` + 1 largest logits are equal, because their order is open, or not finite.
        """
        rows, width = logits.shape
        _check_width(0 < top <= min(width - 1, MOST_SAMPLED) and logits.stride(1) == 1, logits, top)
        streams = streams.contiguous()
        positions = positions.contiguous()
        sampled = positions.new_empty(rows)
        pointers = (streams.data_ptr(), positions.data_ptr(), sampled.data_ptr())
        found = self.library.kvatlas_sample(
            logits.data_ptr(), logits.stride(0), rows, width, top, temperature, top_p, *pointers
        )
        return sampled if found else None

    def uniform(self, streams: Tensor, positions: Tensor, tokens: Tensor, choices: Tensor | None = None) -> Tensor:
        """Return numbers in (0, 1), float64 [rows, width]: first words of `noise.philox` of (position, token, choice).

        `streams`, `positions` and `choices` (0 if None) [rows] int64; `tokens` [rows, width] int64, rows side by side.
        """
        import torch

        rows, width = tokens.shape
        out = torch.empty((rows, width), dtype=torch.float64)
        # The kernel reads the numbers of rows one after the other.
        streams = streams.contiguous()
        positions = positions.contiguous()
        choices = None if choices is None else choices.contiguous()
        pointers = (streams.data_ptr(), positions.data_ptr(), _pointer(choices), tokens.data_ptr())
        self.library.kvatlas_uniform(*pointers, tokens.stride(0), out.data_ptr(), rows, width)
        return out
