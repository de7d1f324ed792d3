"""GGUF blocks taken apart: docs/quant-types.md, sections 2, 4 and 5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.spec.float32 import ZERO, exact, exactly, fl, mul, negate, scaled, widen_bf16, widen_f16

T4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
T2 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Block:
    """32 columns of a weight row.

    Column i is ``c * s[i // 16] * codes[i] - m * mins[i // 16]``.

    Attributes
    ----------
    c
        Float scale, float32 bits.
    codes
        32 integers.
    s
        Integer sub-scales of the two halves.
    m
        Float scale of the minimums, float32 bits; None for types without minimums.
    mins
        Integer minimums of the two halves.
    """

    c: int
    codes: Sequence[int]
    s: tuple[int, int] = (1, 1)
    m: int | None = None
    mins: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Row:
    """One weight row: blocks of 32, or for F32, F16 and BF16 the weights themselves as float32 bits."""

    blocks: Sequence[Block] = ()
    weights: Sequence[int] = ()


@dataclass(frozen=True)
class Type:
    """A weight type: columns and bytes of a GGUF block, and what takes one apart."""

    id: int
    block: int
    block_bytes: int
    decode: Callable[[bytes], list[Block]]


def _half(b: bytes, at: int) -> int:
    return widen_f16(_word(b, at, 2))


def _word(b: bytes, at: int, size: int) -> int:
    return int.from_bytes(b[at : at + size], "little")


def _nibble(b: bytes, at: int, j: int) -> int:
    return b[at + j // 2] >> 4 * (j % 2) & 15


def _nibbles32(b: bytes, at: int) -> list[int]:
    """Low nibbles are columns 0..15, high nibbles 16..31."""
    return [b[at + k % 16] >> 4 * (k // 16) & 15 for k in range(32)]


def _nibbles64(b: bytes, at: int, k: int) -> int:
    """Low nibbles of 32 bytes are 32 columns, their high nibbles the next 32."""
    return b[at + 32 * (k // 64) + k % 32] >> 4 * (k % 64 // 32) & 15


def _pair(b: bytes, at: int, k: int) -> int:
    """The two-bit field of Q2_K, Q3_K and Q6_K's high bits."""
    return b[at + 32 * (k // 128) + k % 32] >> 2 * (k % 128 // 32) & 3


def _times(h: int, s: int) -> int:
    """c = h * s, which rounds for no type."""
    product = mul(h, exactly(s))
    assert exact(product) == exact(h) * s
    return product


def _columns(block: int) -> range:
    return range(32 * block, 32 * block + 32)


def _q8_0(b: bytes) -> list[Block]:
    return [Block(_half(b, 0), [code - 256 * (code > 127) for code in b[2:34]])]


def _q4_0(b: bytes) -> list[Block]:
    return [Block(_half(b, 0), [n - 8 for n in _nibbles32(b, 2)])]


def _q4_1(b: bytes) -> list[Block]:
    return [Block(_half(b, 0), _nibbles32(b, 4), m=negate(_half(b, 2)))]


def _q5_0(b: bytes) -> list[Block]:
    fifth = _word(b, 2, 4)
    codes = [(n | (fifth >> k & 1) << 4) - 16 for k, n in enumerate(_nibbles32(b, 6))]
    return [Block(_half(b, 0), codes)]


def _q5_1(b: bytes) -> list[Block]:
    fifth = _word(b, 4, 4)
    codes = [n | (fifth >> k & 1) << 4 for k, n in enumerate(_nibbles32(b, 8))]
    return [Block(_half(b, 0), codes, m=negate(_half(b, 2)))]


def _q2_k(b: bytes) -> list[Block]:
    h, h_min = _half(b, 80), _half(b, 82)
    return [
        Block(
            h,
            [_pair(b, 16, k) for k in _columns(i)],
            s=(b[2 * i] & 15, b[2 * i + 1] & 15),
            m=h_min,
            mins=(b[2 * i] >> 4, b[2 * i + 1] >> 4),
        )
        for i in range(8)
    ]


def _q3_k(b: bytes) -> list[Block]:
    def scale(j: int) -> int:
        return (b[96 + j % 8] >> 4 * (j // 8) & 15 | (b[104 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32

    def code(k: int) -> int:
        return _pair(b, 32, k) - (0 if b[k % 32] >> k // 32 & 1 else 4)

    h = _half(b, 108)
    return [Block(h, [code(k) for k in _columns(i)], s=(scale(2 * i), scale(2 * i + 1))) for i in range(8)]


def _scale_and_min(a: bytes, j: int) -> tuple[int, int]:
    """The six-bit pairs of Q4_K and Q5_K."""
    if j < 4:
        return a[j] & 63, a[4 + j] & 63
    return a[4 + j] & 15 | a[j - 4] >> 6 << 4, a[4 + j] >> 4 | a[j] >> 6 << 4


def _q4_k(b: bytes) -> list[Block]:
    blocks = []
    for i in range(8):
        s, least = _scale_and_min(b[4:16], i)
        codes = [_nibbles64(b, 16, k) for k in _columns(i)]
        blocks.append(Block(_times(_half(b, 0), s), codes, m=_times(_half(b, 2), least)))
    return blocks


def _q5_k(b: bytes) -> list[Block]:
    blocks = []
    for i in range(8):
        s, least = _scale_and_min(b[4:16], i)
        codes = [_nibbles64(b, 48, k) | (b[16 + k % 32] >> i & 1) << 4 for k in _columns(i)]
        blocks.append(Block(_times(_half(b, 0), s), codes, m=_times(_half(b, 2), least)))
    return blocks


def _q6_k(b: bytes) -> list[Block]:
    def code(k: int) -> int:
        low = b[64 * (k // 128) + k % 64] >> 4 * (k % 128 // 64) & 15
        return (low | _pair(b, 128, k) << 4) - 32

    def scale(j: int) -> int:
        return b[192 + j] - 256 * (b[192 + j] > 127)

    h = _half(b, 208)
    return [Block(h, [code(k) for k in _columns(i)], s=(scale(2 * i), scale(2 * i + 1))) for i in range(8)]


def _iq4_nl(b: bytes) -> list[Block]:
    return [Block(_half(b, 0), [T4[n] for n in _nibbles32(b, 2)])]


def _iq4_xs(b: bytes) -> list[Block]:
    high = _word(b, 2, 2)
    blocks = []
    for i in range(8):
        s = (_nibble(b, 4, i) | (high >> 2 * i & 3) << 4) - 32
        blocks.append(Block(_times(_half(b, 0), s), [T4[n] for n in _nibbles32(b, 8 + 16 * i)]))
    return blocks


def _mxfp4(b: bytes) -> list[Block]:
    return [Block(exactly(scaled(1, b[0] - 128)), [T2[n] for n in _nibbles32(b, 1)])]


def _no_blocks(b: bytes) -> list[Block]:
    raise AssertionError("float types have no blocks")


TYPES = {
    "f32": Type(0, 1, 4, _no_blocks),
    "f16": Type(1, 1, 2, _no_blocks),
    "q4_0": Type(2, 32, 18, _q4_0),
    "q4_1": Type(3, 32, 20, _q4_1),
    "q5_0": Type(6, 32, 22, _q5_0),
    "q5_1": Type(7, 32, 24, _q5_1),
    "q8_0": Type(8, 32, 34, _q8_0),
    "q2_k": Type(10, 256, 84, _q2_k),
    "q3_k": Type(11, 256, 110, _q3_k),
    "q4_k": Type(12, 256, 144, _q4_k),
    "q5_k": Type(13, 256, 176, _q5_k),
    "q6_k": Type(14, 256, 210, _q6_k),
    "iq4_nl": Type(20, 32, 18, _iq4_nl),
    "iq4_xs": Type(23, 256, 136, _iq4_xs),
    "bf16": Type(30, 1, 2, _no_blocks),
    "mxfp4": Type(39, 32, 17, _mxfp4),
}
_FLOATS: dict[str, Callable[[int], int]] = {"f32": lambda w: w, "f16": widen_f16, "bf16": widen_bf16}


def decode(qtype: str, row: bytes) -> Row:
    """Takes a weight row apart.

    Parameters
    ----------
    qtype
        Name of the type ("q4_k").
    row
        Its bytes in a GGUF file: whole blocks.
    """
    kind = TYPES[qtype]
    size = kind.block_bytes
    assert len(row) % size == 0, (qtype, len(row))
    pieces = [row[at : at + size] for at in range(0, len(row), size)]
    if qtype in _FLOATS:
        return Row(weights=[_FLOATS[qtype](_word(piece, 0, size)) for piece in pieces])
    return Row(blocks=[block for piece in pieces for block in kind.decode(piece)])


def dequantise(row: Row) -> list[int]:
    """The weights as float32 bits: the exact value of each, rounded once."""
    if row.weights:
        return list(row.weights)
    weights = []
    for block in row.blocks:
        m = exact(ZERO if block.m is None else block.m)
        for i, code in enumerate(block.codes):
            weights.append(fl(exact(block.c) * block.s[i // 16] * code - m * block.mins[i // 16]))
    return weights
