"""The seeded table of cases that tests and benchmarks share.

Everything is drawn from SHAKE-256 of a key, so a case has the same bytes with every NumPy, Python and
machine: golden vectors and printed figures can name a case and mean it.

Examples
--------
>>> from tests import cases
>>> case = cases.find("q4_k/short/some/special")
>>> case.weight().shape, case.x().shape, case.ids().shape
((6, 45, 288), (8, 512), (8, 3))
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Stream:
    """Numbers from SHAKE-256: the key names the stream, each call takes the next piece of it.

    Parameters
    ----------
    *key
        Anything whose ``str`` is stable. Different keys give independent streams.
    """

    def __init__(self, *key: object) -> None:
        self._key = "/".join(map(str, key))
        self._calls = 0

    def bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        self._calls += 1
        return hashlib.shake_256(f"{self._key}#{self._calls}".encode()).digest(count)

    def words(self, shape: int | tuple[int, ...], dtype: str = "<u4") -> NDArray[Any]:
        """Unsigned integers with every bit random, of a little-endian `dtype`."""
        size = int(np.prod(shape))
        return np.frombuffer(self.bytes(size * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()

    def below(self, bound: int, shape: int | tuple[int, ...]) -> NDArray[np.int64]:
        """Integers in [0, bound)."""
        return ((self.words(shape).astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)

    def bell(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Bell-shaped values of mean 0 and deviation 1: sums of twelve uniform ones, without libm."""
        draws = self.words((12, *shape), "<u2").astype(np.int64)
        return np.asarray((draws.sum(axis=0) - 12 * 32768 + 6) / 65536.0)


# -------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Layout:
    """What a test has to know of a ggml block to draw one: sizes, and where its float16 scales lie."""

    name: str
    id: int
    block: int
    block_bytes: int
    scales: tuple[int, ...] = ()

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` columns in a GGUF file."""
        assert columns % self.block == 0, (self.name, columns)
        return columns // self.block * self.block_bytes


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("f32", 0, 1, 4),
        Layout("f16", 1, 1, 2),
        Layout("q4_0", 2, 32, 18, (0,)),
        Layout("q4_1", 3, 32, 20, (0, 2)),
        Layout("q5_0", 6, 32, 22, (0,)),
        Layout("q5_1", 7, 32, 24, (0, 2)),
        Layout("q8_0", 8, 32, 34, (0,)),
        Layout("q2_k", 10, 256, 84, (80, 82)),
        Layout("q3_k", 11, 256, 110, (108,)),
        Layout("q4_k", 12, 256, 144, (0, 2)),
        Layout("q5_k", 13, 256, 176, (0, 2)),
        Layout("q6_k", 14, 256, 210, (208,)),
        Layout("iq4_nl", 20, 32, 18, (0,)),
        Layout("iq4_xs", 23, 256, 136, (0,)),
        Layout("bf16", 30, 1, 2),
        Layout("mxfp4", 39, 32, 17),
    )
}
TYPES = tuple(LAYOUTS)


def _float16_bits(stream: Stream, shape: tuple[int, ...], odds: int = 8) -> NDArray[Any]:
    """Finite float16 bits, mostly the scales of real files (2^-12 to 2^-5).

    One in `odds` is anything: zero, -0, subnormal, 65504.
    """
    words = stream.words(shape, "<u2")
    usual = (words & 0x83FF) | ((3 + stream.below(8, shape)) << 10).astype(np.uint16)
    exponent = words & 0x7C00
    wild = np.where(exponent == 0x7C00, words & 0x83FF, words)
    edge = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x0400, 0x3C00], np.uint16)
    pick = stream.below(2 * odds, shape)
    odd = np.where(pick > 0, wild, edge[stream.below(8, shape)])
    return np.where(pick > 1, usual, odd).astype("<u2")


def raw_blocks(qtype: str, rows: int, columns: int, *key: object, limit: int = 255) -> U8:
    """Random rows of a type as a GGUF file holds them: every bit random, every scale finite.

    Parameters
    ----------
    qtype
        Name of the type ("q4_k").
    rows, columns
        Shape of the matrix; for several experts let `rows` be experts * rows and reshape.
    *key
        Names the stream.
    limit
        The highest E8M0 scale byte of MXFP4. Past 252 the ``gguf`` package overflows float32.

    Returns
    -------
    numpy.ndarray
        (rows, row_bytes) uint8. Scales are negative, zero and subnormal among others. Float weights are
        finite, with -0 and subnormals among them.
    """
    layout = LAYOUTS[qtype]
    stream = Stream("weights", qtype, rows, columns, *key)
    if qtype in ("f32", "f16", "bf16"):
        return _float_rows(qtype, rows, columns, stream)
    count = rows * columns // layout.block
    blocks = stream.words((count, layout.block_bytes), "u1")
    for offset in layout.scales:
        blocks[:, offset : offset + 2] = _float16_bits(stream, (count, 1)).view(np.uint8)
    if qtype == "mxfp4":
        usual = 116 + stream.below(10, count)
        edge = np.array([0, 1, 2, 64, 190, 252, limit, min(limit, 254)])[stream.below(8, count)]
        blocks[:, 0] = np.minimum(np.where(stream.below(16, count) > 0, usual, edge), limit)
    return blocks.reshape(rows, layout.row_bytes(columns))


def _float_rows(qtype: str, rows: int, columns: int, stream: Stream) -> U8:
    shape = (rows, columns)
    if qtype == "f16":
        return _float16_bits(stream, shape, 1024).view(np.uint8)
    # Sign and significand at random, exponent 2^-14..2^1, and now and then 0, a subnormal or a large power.
    exponent = 113 + stream.below(16, shape)
    edge = np.array([0, 0, 1, 64, 150, 190, 127, 126])[stream.below(8, shape)]
    exponent = np.where(stream.below(1024, shape) > 0, exponent, edge).astype(np.uint32)
    words = (stream.words(shape) & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    words = np.where(stream.below(256, shape) == 0, words & np.uint32(0x80000000), words)
    if qtype == "bf16":
        return (words >> np.uint32(16)).astype("<u2").view(np.uint8)
    return words.astype("<u4").view(np.uint8)


# ---------------------------------------------------------------------------------------------- activations

X_KINDS = ("plain", "special")
TINY = np.float32(2.0**-118)  # below it a block's scale is 0


def activations(kind: str, rows: int, columns: int, *key: object) -> F32:
    """Activation rows (rows, columns) float32.

    "plain" is what a network makes: bell-shaped, of another size in each block of 32, with outliers.
    "special" gives each row one trouble, in turn: see `SPECIALS`. Blocks without their row's trouble stay
    plain.
    """
    stream = Stream("x", kind, rows, columns, *key)
    blocks = -(-columns // 32)
    size = np.exp2(stream.below(6, (rows, blocks)) - 3.0).repeat(32, axis=1)[:, :columns]
    outlier = np.where(stream.below(64, (rows, columns)) == 0, 16.0, 1.0)
    x = (stream.bell((rows, columns)) * size * outlier).astype(np.float32)
    if kind == "special":
        for row in range(rows):
            first = 32 * int(stream.below(blocks, 1)[0])
            _trouble(SPECIALS[row % len(SPECIALS)], x[row], slice(first, min(first + 32, columns)), stream)
    else:
        assert kind == "plain", kind
    return np.asarray(x)


SPECIALS = (
    "nan",  # one NaN: the whole row is NaN, no other row notices
    "zero",  # +0 and -0
    "inf",
    "tiny",  # maxima on both sides of 2^-118, below which d is 0; blocks of subnormals and of -0
    "3000",  # sums past float16's 65504
    "ties",  # halves of the quantisation step: rounds to even
    "near",  # an ulp or two from such halves, where x * (127 / a), x * 127 / a and x / d round apart
    "edge",  # a maximum of 2^-118 and those just below and above: the largest r, the smallest d
    "1e38",  # fl(c * d) may overflow; an I of 0 then gives NaN
    "-inf",
    "payload",  # a NaN with sign and payload, which must not come through
)


def _trouble(name: str, row: F32, block: slice, stream: Stream) -> None:
    """Puts the trouble `name` into a row, most of them into one block."""
    words = row.view(np.uint32)
    width = block.stop - block.start
    signs = np.where(stream.below(2, width) > 0, -1.0, 1.0).astype(np.float32)
    at = block.start + int(stream.below(width, 1)[0])
    if name in ("tiny", "edge"):
        row *= np.float32(2.0**-120)  # the whole row, or other blocks would hide the small ones
    if name in ("nan", "inf", "-inf"):
        row[at] = np.float32(name)
        words[at] = {"nan": 0x7FC00000, "inf": 0x7F800000, "-inf": 0xFF800000}[name]
    elif name == "payload":
        words[at] = 0xFFABCDEF
        words[block.start] = 0x7F800001
    elif name == "tiny":
        words[block] = stream.words(width) & np.uint32(0x807FFFFF)
        words[32:64] = 0x80000000
    elif name == "edge":
        maxima = [-TINY, np.nextafter(TINY, np.float32(0)), np.nextafter(TINY, np.float32(1))]
        for i, first in enumerate(range(0, row.size, 32)):
            part = slice(first, min(first + 32, row.size))
            row[part] = (
                (stream.below(201, part.stop - first) - 100.0).astype(np.float32) * TINY / np.float32(128)
            )
            row[first + i % (part.stop - first)] = maxima[(i + at) % 3]
    elif name == "3000":
        row[:] = 3000.0
    elif name == "ties":
        row[block] = signs * (stream.below(127, width) + 0.5).astype(np.float32)
        row[at] = 127.0
    elif name == "near":
        a = np.float32(1.0 + stream.below(1 << 23, 1)[0] * 2.0**-23)
        half = signs * (stream.below(127, width) + 0.5) * float(a) / 127.0
        steps = stream.below(5, width).astype(np.uint32) - np.uint32(2)
        words[block] = half.astype(np.float32).view(np.uint32) + steps
        row[at] = a
    elif name == "1e38":
        row[block] = signs * np.float32(1e38)
        row[at] = np.finfo(np.float32).max
    elif name == "zero":
        row[:] = 0.0
        row[block] *= signs
    else:
        raise AssertionError(name)


# ------------------------------------------------------------------------------------------------------ ids

ID_KINDS = ("plain", "some", "all", "repeats")


def expert_ids(kind: str, tokens: int, k: int, experts: int, *key: object) -> I32:
    """Ids (tokens, k) int32.

    "plain": distinct experts a token, as a router gives them. "some": the same with -1 in a third of the
    places, the whole first token of several among them. "all": nothing but -1. "repeats": experts named
    several times within and between tokens, and -1 among them.
    """
    stream = Stream("ids", kind, tokens, k, experts, *key)
    if kind == "all":
        return np.full((tokens, k), -1, np.int32)
    if kind == "repeats":
        few = max(1, min(experts, 2 * k // 3))
        chosen = stream.below(few, (tokens, k)) * (experts // few)
        return np.where(stream.below(8, (tokens, k)) == 0, -1, chosen).astype(np.int32)
    order = np.argsort(stream.words((tokens, experts)), axis=1, kind="stable")
    chosen = np.tile(order, (1, -(-k // experts)))[:, :k]
    if kind == "some":
        skip = stream.below(3, (tokens, k)) == 0
        skip[:1] |= tokens > 1
        chosen = np.where(skip, -1, chosen)
    else:
        assert kind == "plain", kind
    return chosen.astype(np.int32)


def router_weights(tokens: int, k: int, *key: object) -> F32:
    """Positive weights (tokens, k) float32 that sum to about 1 a token."""
    draws = Stream("router", tokens, k, *key).below(1 << 20, (tokens, k)) + 1.0
    return np.asarray(draws / draws.sum(axis=1, keepdims=True), np.float32)


# ---------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, with a K for small and one for large blocks so that it fits all types.

    Attributes
    ----------
    name
        Word in the case's name.
    experts, rows, tokens, k
        E, N, T, k.
    columns_32, columns_256
        K for types with blocks of up to 32 columns and for those of 256.
    per_place
        x is (T, k, K) and not (T, K).
    scale, bias
        Each expert has a scale / a bias row.
    """

    name: str
    experts: int
    rows: int
    columns_32: int
    columns_256: int
    tokens: int
    k: int
    per_place: bool = False
    scale: bool = False
    bias: bool = False


SHAPES = (
    Shape("one", 1, 1, 32, 256, 1, 1),
    Shape("row", 4, 33, 256, 256, 1, 2, bias=True),
    Shape("short", 6, 45, 288, 512, 8, 3, scale=True),
    Shape("place", 5, 64, 544, 768, 10, 4, per_place=True, scale=True, bias=True),
    Shape("batch", 8, 70, 352, 512, 40, 2),
    Shape("wide", 3, 32, 1408, 1536, 3, 2, bias=True),
    Shape("more", 2, 31, 64, 256, 17, 5, per_place=True),
)


@dataclass(frozen=True)
class Case:
    """One call of ``matmul_id``. Arrays are made anew by each call, so a test may write into them."""

    qtype: str
    shape: Shape
    id_kind: str
    x_kind: str

    @property
    def name(self) -> str:
        """What `find` takes: type/shape/ids/x."""
        return f"{self.qtype}/{self.shape.name}/{self.id_kind}/{self.x_kind}"

    @property
    def columns(self) -> int:
        """K for the case's type."""
        return self.shape.columns_256 if LAYOUTS[self.qtype].block > 32 else self.shape.columns_32

    def weight(self, *, limit: int = 255) -> U8:
        """Raw ggml blocks (E, N, row_bytes) uint8; `limit` as in `raw_blocks`."""
        shape = self.shape
        flat = raw_blocks(self.qtype, shape.experts * shape.rows, self.columns, shape.name, limit=limit)
        return flat.reshape(shape.experts, shape.rows, -1)

    def x(self) -> F32:
        """Activations (T, K), or (T, k, K) if the shape is per place, float32."""
        shape = self.shape
        rows = shape.tokens * (shape.k if shape.per_place else 1)
        flat = activations(self.x_kind, rows, self.columns, self.name)
        return flat.reshape(shape.tokens, shape.k, -1) if shape.per_place else flat

    def ids(self) -> I32:
        """Ids (T, k) int32."""
        return expert_ids(self.id_kind, self.shape.tokens, self.shape.k, self.shape.experts, self.name)

    def scale(self) -> F32 | None:
        """One scale an expert (E,), every other one negative, or None."""
        if not self.shape.scale:
            return None
        scale = Stream("scale", self.name).bell((self.shape.experts,)).astype(np.float32)
        scale[::2] = -np.abs(scale[::2])
        return scale

    def bias(self) -> F32 | None:
        """Bias rows (E, N) with a -0 in every eighth column, or None."""
        if not self.shape.bias:
            return None
        bias = Stream("bias", self.name).bell((self.shape.experts, self.shape.rows)).astype(np.float32)
        bias[:, ::8] = -0.0
        return bias


@lru_cache
def _table() -> dict[str, Case]:
    pairs = [
        ("plain", "plain"),
        ("some", "special"),
        ("repeats", "plain"),
        ("plain", "special"),
        ("all", "plain"),
    ]
    cases: dict[str, Case] = {}
    for qtype in TYPES:
        for shape in SHAPES:
            for id_kind, x_kind in pairs:
                case = Case(qtype, shape, id_kind, x_kind)
                cases[case.name] = case
    return cases


def all_cases(qtype: str | None = None, shape: str | None = None) -> Iterator[Case]:
    """The cases of the table, of one type and one shape if they are named."""
    for case in _table().values():
        if qtype in (None, case.qtype) and shape in (None, case.shape.name):
            yield case


def find(name: str) -> Case:
    """The case of that name; KeyError if the table has none."""
    return _table()[name]


# --------------------------------------------------------------------------------------------- whole layers


@dataclass(frozen=True)
class Ffn:
    """An expert layer: gate and up (width, hidden), down (hidden, width), each with its own type."""

    name: str
    hidden: int
    width: int
    experts: int
    k: int
    gate: str
    up: str
    down: str

    def weights(self, experts: int | None = None) -> dict[str, U8]:
        """Raw blocks of "gate", "up" and "down", (E, N, row_bytes) uint8 each.

        Scales are small and usual, so that finite activations stay finite through the three products.
        """
        count = self.experts if experts is None else experts
        sizes = {
            "gate": (self.gate, self.width, self.hidden),
            "up": (self.up, self.width, self.hidden),
            "down": (self.down, self.hidden, self.width),
        }
        return {
            part: tame_blocks(qtype, count * rows, columns, self.name, part).reshape(count, rows, -1)
            for part, (qtype, rows, columns) in sizes.items()
        }

    def x(self, tokens: int) -> F32:
        """Plain activations (tokens, hidden) float32."""
        return activations("plain", tokens, self.hidden, self.name)

    def ids(self, tokens: int, kind: str = "plain") -> I32:
        """Ids (tokens, k) int32."""
        return expert_ids(kind, tokens, self.k, self.experts, self.name)

    def router(self, tokens: int) -> F32:
        """Router weights (tokens, k) float32."""
        return router_weights(tokens, self.k, self.name)


def tame_blocks(qtype: str, rows: int, columns: int, *key: object) -> U8:
    """As `raw_blocks`, with weights about as large as a trained network's, for chains and for timing."""
    layout = LAYOUTS[qtype]
    stream = Stream("tame", qtype, rows, columns, *key)
    if qtype in ("f32", "f16", "bf16"):
        # To draw more takes long, so they come again: at other columns, for the number is a prime.
        values = (stream.bell((min(rows * columns, 4_194_301),)) * 0.0625).astype(np.float32)
        if qtype == "bf16":
            values = (values.view("<u4") >> np.uint32(16)).astype("<u2")
        elif qtype == "f16":
            values = values.astype("<f2")
        return np.resize(values, (rows, columns)).view(np.uint8)
    count = rows * columns // layout.block
    blocks = stream.words((count, layout.block_bytes), "u1")
    exponent = _TAME[qtype] if layout.scales else 0
    for offset in layout.scales:
        bits = (stream.words((count, 1), "<u2") & 0x83FF) | np.uint16(exponent << 10)
        blocks[:, offset : offset + 2] = bits.astype("<u2").view(np.uint8)
    if qtype == "mxfp4":
        blocks[:, 0] = 120 + stream.below(4, count)
    return blocks.reshape(rows, layout.row_bytes(columns))


# float16 exponent field of a tame scale, by how large codes and sub-scales grow
_TAME = {"q4_0": 7, "q4_1": 7, "q5_0": 6, "q5_1": 6, "q8_0": 3, "q2_k": 5, "q3_k": 3}
_TAME |= {"q4_k": 2, "q5_k": 1, "q6_k": 1, "iq4_nl": 3, "iq4_xs": 1}

FFNS = (
    Ffn("small", 256, 512, 8, 2, "q4_k", "q4_k", "q6_k"),
    Ffn("mixed", 512, 256, 6, 3, "q4_k", "iq4_xs", "q8_0"),
    Ffn("odd", 96, 352, 5, 2, "mxfp4", "q5_1", "f16"),
)

# What published figures are measured on: Qwen3-30B-A3B, one line a type.
BENCH_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "mxfp4", "iq4_xs")
BENCH = {
    qtype: Ffn(f"qwen3-30b-a3b/{qtype}", 2048, 768, 128, 8, qtype, qtype, qtype) for qtype in BENCH_TYPES
}
