"""The executable specification against what others say, and the kernels against the specification."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from collections.abc import Callable

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests import cases, golden, spec
from tests.backends import BACKENDS, Backend
from tests.golden import make
from tests.spec import float32
from tests.support import assert_same, usable_kernels

F32 = NDArray[np.float32]

PORTABLE = Backend("cpu", "portable")
OTHERS = [backend for backend in BACKENDS if backend != PORTABLE]

EDGES = [
    0x00000000,
    0x00000001,
    0x007FFFFF,
    0x00800000,
    0x3F800000,
    0x7F7FFFFF,
    0x7F800000,
    0x7F800001,
    0x7FC00000,
]


def some_bits(stream: cases.Stream, count: int) -> list[int]:
    """Float32 bits: edges with either sign, values near 1, and any."""
    edge = np.array(EDGES, np.uint32)[stream.below(len(EDGES), count)] | (
        stream.words(count) & np.uint32(1 << 31)
    )
    near = (stream.words(count) & np.uint32(0x80FFFFFF)) | np.uint32(0x3F000000)
    kind = stream.below(3, count)
    return [int(word) for word in np.select([kind == 0, kind == 1], [edge, near], stream.words(count))]


def value(bits: int) -> np.float32:
    """The float of bits."""
    return np.float32(np.array(bits, np.uint32).view(np.float32)[()])


def bits_of(number: float | np.floating) -> int:
    """The bits of a float, every NaN as the specification's."""
    return spec.canonical(int(np.float32(number).view(np.uint32)))


# --------------------------------------------------------------------------------- the specification itself


@pytest.mark.parametrize(
    ("operation", "reference"),
    [(spec.mul, np.multiply), (spec.add, np.add), (spec.div, np.divide)],
    ids=["mul", "add", "div"],
)
def test_arithmetic_is_ieee(
    operation: Callable[[int, int], int], reference: Callable[..., np.float32]
) -> None:
    """NumPy's float32 operations round once, as the specification does."""
    stream = cases.Stream("ieee")
    with np.errstate(all="ignore"):
        for a, b in zip(some_bits(stream, 3000), some_bits(stream, 3000), strict=True):
            assert operation(a, b) == bits_of(reference(value(a), value(b))), (hex(a), hex(b))


def test_fma_is_ieee() -> None:
    """The C library's fmaf."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    stream = cases.Stream("fma")
    for a, b, c in zip(*(some_bits(stream, 5000) for _ in range(3)), strict=True):
        expected = bits_of(fmaf(value(a), value(b), value(c)))
        assert spec.fma(a, b, c) == expected, (hex(a), hex(b), hex(c))


def test_float16_widens_exactly() -> None:
    """All 65,536 values."""
    wide = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert [spec.widen_f16(h) for h in range(1 << 16)] == [bits_of(f) for f in wide]


@pytest.mark.parametrize("qtype", cases.TYPES)
def test_decoder_agrees_with_gguf(qtype: str) -> None:
    """Weights have the bits of the gguf package's, and the table of types its sizes."""
    kind = gguf.GGMLQuantizationType[qtype.upper()]
    layout, described = cases.LAYOUTS[qtype], spec.TYPES[qtype]
    assert (described.id, described.block, described.block_bytes) == (int(kind), *gguf.GGML_QUANT_SIZES[kind])
    assert (layout.id, layout.block, layout.block_bytes) == (
        described.id,
        described.block,
        described.block_bytes,
    )
    rows = cases.raw_blocks(qtype, 40, 512, "decoder", limit=252)
    expected = gguf.quants.dequantize(rows, kind).astype(np.float32)
    actual = make.floats([spec.dequantise(spec.decode(qtype, row.tobytes())) for row in rows])
    assert_same(actual + np.float32(0), expected + np.float32(0), qtype)  # gguf may keep the sign of a zero


@pytest.mark.parametrize("qtype", [name for name in cases.TYPES if cases.LAYOUTS[name].block > 1])
def test_integers_stay_exact(qtype: str) -> None:
    """I and M of any block fit into a float's 24 bits, whatever the activations are."""
    for row in cases.raw_blocks(qtype, 20, 512, "exact"):
        for block in spec.decode(qtype, row.tobytes()).blocks:
            halves = [sum(abs(code) for code in block.codes[at : at + 16]) for at in (0, 16)]
            assert 127 * sum(abs(s) * half for s, half in zip(block.s, halves, strict=True)) < 1 << 24
            assert 127 * 16 * sum(map(abs, block.mins)) < 1 << 24


def test_exp_is_within_an_ulp() -> None:
    """Against float64's exp, over the whole range; the law prints the exhaustive figure, 0.951."""
    span = np.linspace(value(0xC2AEAC4F), value(0x42B17217), 20001).astype(np.float32)
    tiny = np.float32(2.0) ** np.arange(-149, -2, dtype=np.float32)
    for x in np.concatenate([span, tiny, -tiny, [value(0x40A65E59)]]):
        true = math.exp(float(x))
        ulp = math.ldexp(1.0, math.frexp(true)[1] - 24)
        assert abs(float(value(spec.exp(bits_of(x)))) - true) < 0.951 * ulp, x


def test_exp_at_its_limits() -> None:
    """The last finite and the last normal result, and what lies past them."""
    upper, lower = 0x42B17217, 0xC2AEAC4F
    assert spec.exp(upper) < float32.INFINITY == spec.exp(upper + 1) == spec.exp(float32.INFINITY)
    assert spec.exp(lower) >= 0x00800000
    assert spec.exp(lower + 1) == spec.exp(0xFF800000) == spec.exp(0xFF7FFFFF) == float32.ZERO
    assert spec.exp(0) == spec.exp(0x80000000) == float32.ONE
    assert spec.exp(0xFF800001) == spec.NAN


# --------------------------------------------------------------------------------------- kernels held to it


def small(
    qtype: str, seed: int, x_kind: str
) -> tuple[NDArray[np.uint8], F32, NDArray[np.int32], F32 | None, F32 | None]:
    """weight, x, ids, scale and bias of a small call, sizes drawn from the seed."""
    draw = cases.Stream("small", qtype, seed, x_kind)
    experts, rows, tokens, k = (1 + int(n) for n in draw.below(5, 4))
    block = cases.LAYOUTS[qtype].block
    if block > 32:
        columns = 256 * (1 + int(draw.below(2, 1)[0]))
    elif block == 32:
        columns = 32 * int((1, 2, 3, 8, 9)[int(draw.below(5, 1)[0])])
    else:
        columns = int((1, 7, 33, 255, 257)[int(draw.below(5, 1)[0])])
    tokens += 6 * (x_kind == "special")
    weight = cases.raw_blocks(qtype, experts * rows, columns, "small", seed).reshape(experts, rows, -1)
    x = cases.activations(x_kind, tokens * (k if seed % 2 else 1), columns, "small", qtype, seed)
    ids = cases.expert_ids(("plain", "some", "repeats")[seed % 3], tokens, k, experts, "small", seed)
    scale = draw.bell((experts,)).astype(np.float32) if seed % 4 > 1 else None
    bias = draw.bell((experts, rows)).astype(np.float32) if seed % 4 in (1, 2) else None
    return weight, x.reshape(tokens, k, -1) if seed % 2 else x, ids, scale, bias


@pytest.mark.parametrize("x_kind", cases.X_KINDS)
@pytest.mark.parametrize("qtype", cases.TYPES)
def test_portable_is_the_specification(qtype: str, x_kind: str) -> None:
    """Bit for bit: scales, biases, skips, repeats, short last chunks, special values."""
    for seed in range(6):
        call = small(qtype, seed, x_kind)
        assert_same(PORTABLE.matmul_id(qtype, *call), make.matmul_id(qtype, *call), f"{qtype}, seed {seed}")


@pytest.mark.parametrize("backend", OTHERS, ids=str)
@pytest.mark.parametrize("qtype", cases.TYPES)
def test_others_are_portable(qtype: str, backend: Backend) -> None:
    """On more of the same small calls."""
    for seed in range(40):
        call = small(qtype, seed, cases.X_KINDS[seed // 2 % 2])
        expected = PORTABLE.matmul_id(qtype, *call)
        assert_same(backend.matmul_id(qtype, *call), expected, f"{backend}, {qtype}, seed {seed}")


@pytest.mark.parametrize("trouble", cases.SPECIALS)
@pytest.mark.parametrize("qtype", ["f16", "q4_0", "q2_k", "q4_k", "q6_k", "mxfp4"])
def test_trouble(qtype: str, trouble: str) -> None:
    """One row with one trouble between two plain ones, which do not notice."""
    columns = 512 if cases.LAYOUTS[qtype].block > 32 else 288
    at = cases.SPECIALS.index(trouble)
    weight = cases.tame_blocks(qtype, 5, columns, "trouble").reshape(1, 5, -1)
    x = cases.activations("plain", 3, columns, "trouble")
    x[1] = cases.activations("special", at + 1, columns, "trouble")[at]
    ids = np.zeros((3, 1), np.int32)
    out = PORTABLE.matmul_id(qtype, weight, x, ids)
    assert_same(out, make.matmul_id(qtype, weight, x, ids), trouble)
    assert np.isfinite(out[[0, 2]]).all()
    words = out[1].view(np.uint32)
    if trouble in ("inf", "-inf") and qtype == "f16":
        assert np.isinf(out[1]).all()
    elif trouble in ("nan", "payload", "inf", "-inf"):
        assert (words == spec.NAN).all()
    elif trouble == "zero":
        assert (words == 0).all()  # never -0
    elif trouble != "1e38":
        assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("qtype", [name for name in cases.TYPES if cases.LAYOUTS[name].block > 1])
def test_zero_times_infinity(qtype: str, backend: Backend) -> None:
    """A block whose c * d overflows and whose I is 0 gives NaN: no kernel leaves it out."""
    layout = cases.LAYOUTS[qtype]
    columns = max(layout.block, 64)
    # The same code in neighbouring columns, no sub-scale 0; activations that cancel in pairs.
    block = np.full(layout.block_bytes, 0x33, np.uint8)
    for offset in layout.scales:
        block[offset : offset + 2] = (0xFF, 0x7B)
    if qtype == "mxfp4":
        block[0] = 255
    weight = np.tile(block, columns // layout.block * 20).reshape(1, 20, -1)
    largest = np.finfo(np.float32).max
    x = np.tile(np.array([largest, -largest], np.float32), (1, columns // 2))
    ids = np.zeros((1, 1), np.int32)
    activations = spec.quantise(make.bits(x[0]))
    taken = spec.decode(qtype, weight[0, 0].tobytes()).blocks[0]
    assert sum(code * q for code, q in zip(taken.codes, activations[0].q, strict=True)) == 0
    assert spec.mul(taken.c, activations[0].d) & 0x7FFFFFFF == float32.INFINITY
    assert (backend.matmul_id(qtype, weight, x, ids).view(np.uint32) == spec.NAN).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("qtype", ["f32", "q8_0", "q5_k"])
def test_float16_activations_are_widened(qtype: str, backend: Backend) -> None:
    """All float16 values, finite and not, give what their float32 gives."""
    columns = 256
    weight = cases.raw_blocks(qtype, 3, columns, "half").reshape(1, 3, -1)
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, columns)
    ids = np.zeros((len(x), 1), np.int32)
    expected = backend.matmul_id(qtype, weight, x.astype(np.float32), ids)
    assert_same(backend.matmul_id(qtype, weight, x, ids), expected, qtype)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_swiglu(backend: Backend) -> None:
    """Bit for bit, in every position of a vector."""
    stream = cases.Stream("test_swiglu")
    gate, up = (make.floats(some_bits(stream, 1500)) for _ in range(2))
    gate[:700] = (stream.bell((700,)) * 30).astype(np.float32)
    sensitive = slice(700, 700 + len(golden.SENSITIVE))
    gate[sensitive], up[sensitive] = make.floats(golden.SENSITIVE), 1.0
    expected = make.swiglu(gate, up)
    assert_same(backend.swiglu(gate, up), expected, "all")
    for first in range(0, 1500, 97):
        for size in (1, 7, 16, 33):
            part = slice(first, first + size)
            assert_same(backend.swiglu(gate[part], up[part]), expected[part], (first, size))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("columns", [1, 15, 16, 37])
def test_combine(columns: int, backend: Backend) -> None:
    """Bit for bit; a NaN weight beside a skipped place does no harm, and a token of skips is +0."""
    rows = cases.activations("special", 5 * 3, columns, "test_combine").reshape(5, 3, columns)
    ids = cases.expert_ids("some", 5, 3, 4, "test_combine")
    weights = np.where(ids < 0, np.float32("nan"), cases.router_weights(5, 3, "test_combine")).astype(
        np.float32
    )
    weights[1, ids[1] >= 0] = -0.0
    out = backend.combine(rows, ids, weights, experts=4)
    assert_same(out, make.combine(rows, ids, weights), columns)
    assert (out[0].view(np.uint32) == 0).all()


def test_portable_is_among_the_kernels() -> None:
    """What all of the above rests on."""
    assert usable_kernels()[0] == "portable"
