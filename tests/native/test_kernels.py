"""The CPU kernels beside attention against plain torch in float64, and to the bit on every target."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kvatlas import noise
from kvatlas.cpu import native
from kvatlas.cpu.native.decoder import DecoderLayer, DecoderPass, Products
from kvatlas.cpu.native.panels import unpack_weights
from tests.native.targets import ALL, BEST, FILES, ROOT

QUICK = settings(max_examples=25, derandomize=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@QUICK
@given(
    st.integers(0, 2**31),
    st.integers(1, 90),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from((1, 2, 3, 7, 8, 13, 64)),
)
def test_linear(dtype: torch.dtype, seed: int, words: int, outputs: int, biased: bool, rows: int) -> None:
    """In bfloat16 numbers are rounded, sums are not: on processors that multiply pairs at once, and on others."""
    source = torch.Generator().manual_seed(seed)
    inputs = words * 4 // dtype.itemsize
    weight, bias = torch.randn(outputs, inputs, generator=source), torch.randn(outputs, generator=source)
    x = torch.randn(64, inputs, generator=source)
    layers = [kernels.linear(weight, bias if biased else None, dtype) for kernels in ALL]
    result = layers[0](x)
    expected = F.linear(x.to(dtype).double(), weight.to(dtype).double(), bias.double() if biased else None)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)
    if dtype is torch.bfloat16:
        assert layers[0].kind == (native.PAIRS_AT_ONCE if BEST.library.kvatlas_multiplies_pairs() else native.PAIRS)
        layers[0].kind = native.PAIRS
    for layer in layers:
        assert torch.equal(layer(x[-rows:]), result[-rows:])
    assert torch.equal(unpack_weights(layers[0].weight, outputs), weight.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_many_inputs_are_added_in_one_order_for_every_number_of_rows(dtype: torch.dtype) -> None:
    """Rows beside others are computed in blocks of inputs on some targets."""
    source = torch.Generator().manual_seed(8)
    x = torch.randn(40, 1344, generator=source)
    weight, bias = torch.randn(37, 1344, generator=source), torch.randn(37, generator=source)
    layers = [kernels.linear(weight, bias, dtype) for kernels in ALL]
    alone = torch.cat([layers[0](row[None]) for row in x])
    for layer in layers:
        for rows in (*range(1, 18), 23, 40):
            assert torch.equal(layer(x[:rows]), alone[:rows])


def read_in_bytes(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """A layer in int8 in plain numpy: codes of groups of 32, exact sums, one multiply-add a group from the bias up."""
    single = np.float32
    outputs, inputs = weight.shape
    groups = inputs // 32
    weight_groups = weight.reshape(outputs, groups, 32)
    weight_scales = (np.abs(weight_groups).max(-1) / single(127)).astype(np.float16).astype(single)
    weight_codes = np.rint(weight_groups / weight_scales[..., None]).clip(-127, 127).astype(np.int64)
    x_groups = x.reshape(len(x), groups, 32)
    largest = np.abs(x_groups).max(-1)
    x_codes = np.rint(x_groups * (single(127) / largest)[..., None]).astype(np.int64)
    x_scales = largest / single(127)

    result = np.zeros((len(x), outputs), single) if bias is None else np.tile(bias, (len(x), 1))
    for group in range(groups):
        sums = x_codes[:, group] @ weight_codes[:, group].T
        scales = weight_scales[None, :, group] * x_scales[:, group, None]
        # In float64 the product is exact, so that the sum is rounded once.
        result = (sums.astype(np.float64) * scales + result).astype(single)
    return result


@QUICK
@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from((1, 2, 3, 5, 7, 8, 13, 16, 17, 45)),
)
def test_linear_in_int8(seed: int, groups: int, outputs: int, biased: bool, rows: int) -> None:
    """The bits of the slow reading, on processors that multiply four bytes at once, and on others."""
    source = torch.Generator().manual_seed(seed)
    inputs = 32 * groups
    weight, bias = torch.randn(outputs, inputs, generator=source), torch.randn(outputs, generator=source)
    # Some numbers are far larger than their neighbours.
    x = torch.randn(45, inputs, generator=source) ** 5
    layers = [kernels.linear(weight, bias if biased else None, torch.int8) for kernels in ALL]
    expected = read_in_bytes(x.numpy(), weight.numpy(), bias.numpy() if biased else None)
    result = layers[0](x)
    assert np.array_equal(result.numpy(), expected)
    assert layers[0].kind == (native.BYTES_AT_ONCE if BEST.library.kvatlas_multiplies_bytes() else native.BYTES)
    again = BEST.packed_linear(layers[0].weight, bias if biased else None, outputs)
    again.kind = native.BYTES
    for layer in (*layers, again):
        assert torch.equal(layer(x[-rows:]), result[-rows:])
    # Columns of a wider table, as the halves of one product are.
    assert torch.equal(layers[0](torch.cat([x, x], 1)[:, :inputs]), result)


def test_weights_in_int8_are_near_the_original_and_stay_where_bytes_do_not_suit() -> None:
    source = torch.Generator().manual_seed(3)
    weight = torch.randn(50, 96, generator=source)
    weight[7] = 0.0
    # Numbers that are codes times a scale already, as in a file of 8 bits, are kept.
    scales = torch.rand(50, 3, 1, generator=source).half().float()
    codes = torch.randint(-127, 128, (50, 3, 32), generator=source)
    codes[..., 0] = 127
    exact = (codes * scales).view(50, 96)
    for kernels in ALL:
        near = unpack_weights(kernels.linear(weight, None, torch.int8).weight, 50)
        largest = weight.view(50, 3, 32).abs().amax(-1, keepdim=True)
        assert ((near - weight).view(50, 3, 32).abs() <= largest * (0.501 / 127)).all()
        assert torch.equal(unpack_weights(kernels.linear(exact, None, torch.int8).weight, 50), exact)
    for other in (weight[:, :40], weight * 1e8):
        assert BEST.linear(other, None, torch.int8).kind == native.FLOATS


def test_inputs_that_are_no_numbers_stay_none_in_int8() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    x[1, 3] = float("nan")
    x[2, 40] = float("inf")
    x[3, 40] = -float("inf")
    x[4] = 0.0
    x[5] = 1e-36
    weight, bias = torch.randn(20, 64), torch.randn(20)
    for kernels in ALL:
        result = kernels.linear(weight, bias, torch.int8)(x)
        assert result[1:4].isnan().all()
        assert result[0].isfinite().all()
        assert torch.equal(result[4:], bias.expand(2, -1))


def test_an_odd_number_of_inputs_stays_in_fp32() -> None:
    weight = torch.randn(20, 7)
    layer = BEST.linear(weight, None, torch.bfloat16)
    assert layer.kind == native.FLOATS
    assert torch.equal(layer.rows(torch.arange(20)), weight)


def test_numbers_that_are_none_stay_none_in_bfloat16() -> None:
    """Inputs of a whole layer are rounded in C: to the nearest, halves to the even one, as torch does."""
    bits = torch.randint(-(2**31), 2**31, (40, 64), generator=torch.Generator().manual_seed(5)).int()
    # Halves between two numbers, the largest number, infinities, and several that are no numbers.
    bits[0, :8] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0, 0x7F800001, 0x7FFFFFFF, 0x3F807FFF])
    numbers = bits.view(torch.float32)
    rounded = numbers.clone()
    for kernels in ALL:
        rounded.copy_(numbers)
        kernels.library.kvatlas_shorten(rounded.data_ptr(), len(rounded), rounded.shape[1])
        halves = rounded.view(torch.bfloat16)[:, :64]
        torch.testing.assert_close(halves, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)


@QUICK
@given(
    st.integers(0, 2**31),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from((torch.float32, torch.bfloat16, torch.int8)),
)
def test_rows_of_packed_weights(seed: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(seed)
    if dtype is torch.int8:
        inputs = -(-inputs // 32) * 32
    weight = torch.randn(outputs, inputs, generator=source)
    chosen = torch.randint(0, outputs, (2, 7), generator=source)
    layer = BEST.linear(weight, None, dtype)
    assert torch.equal(layer.rows(chosen), unpack_weights(layer.weight, outputs).float()[chosen])
    if dtype is not torch.int8:
        assert torch.equal(layer.rows(chosen), weight.to(layer.weight.dtype).float()[chosen])
    for outside in (-1, outputs):
        with pytest.raises(IndexError, match="is not one of"):
            layer.rows(torch.tensor([outside]))


@QUICK
@given(
    st.integers(0, 2**31),
    st.integers(2, 300),
    st.integers(1, 240),
    st.sampled_from((0.2, 0.6, 1.5)),
    st.sampled_from((0.3, 0.95, 1.0)),
    st.sampled_from((0.01, 1.0, 20.0)),
)
def test_sampled_tokens_equal_those_of_torch(
    seed: int, width: int, top: int, temperature: float, top_p: float, spread: float
) -> None:
    """Rows with equal logits at the border of `top`, or without numbers, are left to torch."""
    source = torch.Generator().manual_seed(seed)
    top = min(top, width - 1)
    # All logits are different.
    logits = (torch.rand(200, width + 3, generator=source).argsort(-1) * spread / width)[:, :width]
    streams = torch.randint(0, 2**62, (200,), generator=source)
    positions = torch.randint(0, 2**31, (200,), generator=source)

    values, tokens = logits.topk(top)
    scores = values.double() / temperature
    shares = scores.softmax(-1)
    scores = scores.masked_fill(shares.cumsum(-1) - shares >= top_p, float("-inf"))
    drawn = (scores + noise.gumbel_in_torch(streams[:, None], positions[:, None], tokens)).argmax(-1, keepdim=True)
    expected = tokens.gather(-1, drawn).squeeze(-1)
    for kernels in ALL:
        sampled = kernels.sample(logits, top, temperature, top_p, streams, positions)
        assert sampled is not None
        assert torch.equal(sampled, expected)

    for places, value in (((-1, slice(2)), spread + 9.0), ((-1, -1), float("nan")), ((0, 0), float("inf"))):
        odd = logits.clone()
        odd[places] = value
        for kernels in ALL:
            assert kernels.sample(odd, top, temperature, top_p, streams, positions) is None


@QUICK
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 200))
def test_norm_and_gate(seed: int, rows: int, width: int) -> None:
    source = torch.Generator().manual_seed(seed)
    table, weight = torch.randn(rows, 2 * width, generator=source) * 20, torch.randn(width, generator=source)
    a, b = table.split(width, 1)
    x = a.contiguous()
    norm, gate = BEST.rms_norm(x, weight, 1e-6), BEST.silu_mul(a, b)
    torch.testing.assert_close(
        norm.double(), F.rms_norm(x.double(), (width,), weight.double(), 1e-6), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(gate.double(), F.silu(a.double()) * b.double(), rtol=1e-5, atol=1e-6)
    for kernels in ALL:
        assert torch.equal(kernels.rms_norm(x[-1:], weight, 1e-6), norm[-1:])
        assert torch.equal(kernels.silu_mul(a[-1:], b[-1:]), gate[-1:])


def rotate(
    kernels: native.Native, table: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, size: int
) -> None:
    """Rotate the first heads of each row of a table in place, as decoder layers do."""
    angles = (cos.data_ptr(), sin.data_ptr())
    kernels.library.kvatlas_rotate(table.data_ptr(), table.stride(0), *angles, len(table), heads, size)


@QUICK
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 4), st.sampled_from((2, 6, 16, 32, 36, 64, 80, 128)))
def test_rotation_is_that_of_transformers_to_the_bit(seed: int, rows: int, heads: int, size: int) -> None:
    from transformers.models.llama.modeling_llama import rotate_half

    source = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, (heads + 1) * size + 3, generator=source)
    angles = torch.randn(rows, size, generator=source) * 9
    cos, sin = angles.cos(), angles.sin()
    own = table[:, : heads * size].view(rows, heads, size)
    expected = own * cos[:, None] + rotate_half(own) * sin[:, None]
    for kernels in ALL:
        turned = table.clone()
        rotate(kernels, turned, cos, sin, heads, size)
        assert torch.equal(turned[:, : heads * size].view(rows, heads, size), expected)
        assert torch.equal(turned[:, heads * size :], table[:, heads * size :])


@QUICK
@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.sampled_from((1, 2)),
    st.sampled_from((6, 16, 36)),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.int8)),
)
def test_a_decoder_layer_is_its_parts_to_the_bit(
    seed: int, rows: int, group: int, size: int, rotary: bool, dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(seed)
    hidden, inner, kv_heads, cached = (64, 96, 2, 30) if dtype is torch.int8 else (40, 48, 2, 30)
    heads = group * kv_heads
    shapes = [((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)]
    weights = [torch.randn(shape, generator=source) for shape in shapes]
    norms = tuple((torch.rand(hidden, generator=source), eps) for eps in (1e-6, 1e-5))
    states = torch.randn(rows, hidden, generator=source)
    cos, sin = (torch.randn(1, rows, size, generator=source) for _ in range(2))
    pools = [torch.randn(kv_heads, (rows + 1) * 64, size, generator=source) for _ in range(2)]
    table = torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
    counts = torch.arange(rows + 1, dtype=torch.int32), torch.full((rows,), cached, dtype=torch.int32)
    rotary_heads = heads + kv_heads if rotary else 0
    results = []
    for kernels in ALL:
        products = Products(*(kernels.linear(weight, None, dtype) for weight in weights))
        own = [pool.clone() for pool in pools]
        batch = native.PagedBatch(table, *counts, page_size=64, longest=cached + 1)
        paged = kernels.paged_layer(batch, heads, (size, size), *own, 0.3)
        tokens = DecoderPass(states, cos, sin, products)
        layer = DecoderLayer(norms, products, rotary_heads, size)
        DecoderLayer.compute([layer], tokens, batch, [paged])
        results.append([tokens.states, *own])

        parts = [pool.clone() for pool in pools]
        table_of_heads = products.projections(kernels.rms_norm(states, *norms[0]))
        rotate(kernels, table_of_heads, cos, sin, rotary_heads, size)
        query, key, value = table_of_heads.view(rows, -1, size).split((heads, kv_heads, kv_heads), 1)
        paged = kernels.paged_layer(batch, heads, (size, size), *parts, 0.3)
        seen = kernels.attention(batch, paged, query, key, value)
        x = states + products.output(seen.flatten(1))
        gate, up = products.inner(kernels.rms_norm(x, *norms[1])).chunk(2, 1)
        results.append([x + products.down(kernels.silu_mul(gate, up)), *parts])
    for result in results:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))


def test_gate_at_the_ends() -> None:
    a = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.9, 1e30, float("inf"), float("nan")]])
    result, expected = BEST.silu_mul(a, torch.ones_like(a)), F.silu(a)
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=1e-30)


@QUICK
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 40))
def test_noise_is_that_of_torch_to_the_bit(seed: int, rows: int, width: int) -> None:
    source = torch.Generator().manual_seed(seed)
    streams, positions = (torch.randint(0, 2**top - 1, (rows,), generator=source) for top in (63, 31))
    tokens = torch.randint(0, 2**32, (rows, width), generator=source)
    for own in (tokens, torch.arange(width).expand(rows, -1)):
        zero = torch.zeros_like(own)
        word, *_ = noise.philox(streams[:, None], zero + positions[:, None], own, zero, zero)
        expected = (word.double() + 0.5) / 2.0**32
        for kernels in ALL:
            assert torch.equal(kernels.uniform(streams, positions, own), expected)
        assert torch.equal(noise.gumbel(streams[:, None], positions[:, None], own), -torch.log(-torch.log(expected)))


def test_without_a_library_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    kernels, why = native._loaded.__wrapped__()
    assert kernels is None
    assert "were not built" in why
    (tmp_path / FILES[min(FILES)].name).write_bytes(b"no library")
    assert "could not be loaded" in native._loaded.__wrapped__()[1]


@pytest.mark.deep
def test_other_processors_compute_the_same_bits(tmp_path: Path) -> None:
    if not shutil.which("qemu-aarch64") or not importlib.util.find_spec("ziglang"):
        pytest.skip("there is no qemu-aarch64 (package qemu-user) or no ziglang")
    said = {}
    for target, processor, run in (
        ("x86_64-linux-gnu", "x86_64_v3", []),
        ("aarch64-linux-gnu", "generic", ["qemu-aarch64"]),
    ):
        file, room = tmp_path / target, ROOT / "src/kvatlas/cpu/native"
        words = f"cc -target {target} -mcpu={processor} -O3 -std=gnu11 -ffp-contract=off -fno-math-errno".split()
        words += ["-ffreestanding", "-nostdlib", "-static", "-I", str(room), "-o", str(file)]
        words.append(str(ROOT / "tests/native/digest.c"))
        subprocess.run([sys.executable, "-m", "ziglang", *words], check=True, capture_output=True)
        said[target] = subprocess.run([*run, str(file)], check=True, capture_output=True, text=True).stdout
    assert len(set(said["x86_64-linux-gnu"].splitlines())) > 50
    assert said["x86_64-linux-gnu"] == said["aarch64-linux-gnu"]


def test_widths_that_do_not_fit_are_refused_before_a_kernel_reads_beyond() -> None:
    wide = torch.zeros(3, 32)
    for call in (
        lambda: BEST.linear(torch.zeros(16, 16), None)(wide),
        lambda: BEST.rms_norm(wide, torch.ones(16), 1e-6),
        lambda: BEST.silu_mul(wide, wide[:, :16]),
    ):
        with pytest.raises(ValueError, match="does not fit a width of"):
            call()
