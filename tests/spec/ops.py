"""The operations: docs/numerics.md, sections 1 to 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.spec.blocks import Block, Row, decode
from tests.spec.float32 import (
    INFINITY,
    NAN,
    ONE,
    ZERO,
    add,
    canonical,
    div,
    exact,
    exactly,
    fl,
    fma,
    is_finite,
    is_nan,
    mul,
    negate,
    scaled,
)

CHUNK = 256


@dataclass(frozen=True)
class Activation:
    """32 quantised columns: scale `d` as float32 bits, and integers of at most 127."""

    d: int
    q: Sequence[int]


# ------------------------------------------------------------------------------------------- 1. activations


def quantise(x: Sequence[int]) -> list[Activation]:
    """Quantises a row of float32 bits, its length a multiple of 32."""
    assert len(x) % 32 == 0, len(x)
    return [_quantise_block(x[at : at + 32]) for at in range(0, len(x), 32)]


def _quantise_block(x: Sequence[int]) -> Activation:
    if not all(map(is_finite, x)):
        return Activation(NAN, [0] * 32)
    a = max(abs(exact(value)) for value in x)
    if a < scaled(1, -118):
        return Activation(ZERO, [0] * 32)
    r = fl(127 / a)
    q = [round(exact(mul(value, r))) for value in x]  # Python rounds ties to even
    assert max(map(abs, q)) <= 127
    return Activation(fl(a / 127), q)


# ----------------------------------------------------------------------------------- 2. weights and 3. rows


def _add_block(block: Block, activation: Activation, acc: int) -> int:
    d, q = activation.d, activation.q
    halves = (range(16), range(16, 32))
    total = sum(block.s[j] * sum(block.codes[i] * q[i] for i in half) for j, half in enumerate(halves))
    acc = fma(mul(block.c, d), exactly(total), acc)
    if block.m is not None:
        least = sum(block.mins[j] * sum(q[i] for i in half) for j, half in enumerate(halves))
        acc = fma(negate(block.m), mul(d, exactly(least)), acc)
    return acc


def _chunks(row: Row, x: Sequence[int], activations: Sequence[Activation]) -> list[int]:
    """The sum of each chunk of 256 columns."""
    sums = []
    for first in range(0, len(x), CHUNK):
        acc = ZERO
        if row.weights:
            for w, value in zip(row.weights[first : first + CHUNK], x[first : first + CHUNK], strict=True):
                acc = fma(w, value, acc)
        else:
            of_chunk = slice(first // 32, (first + CHUNK) // 32)
            for block, activation in zip(row.blocks[of_chunk], activations[of_chunk], strict=True):
                acc = _add_block(block, activation, acc)
        sums.append(acc)
    return sums


def fold(
    row: Row,
    x: Sequence[int],
    activations: Sequence[Activation],
    scale: int | None = None,
    bias: int | None = None,
) -> int:
    """One output: a row taken apart, times the row `x` (bits), whose blocks are `activations`.

    `activations` is not looked at for F32, F16 and BF16.
    """
    first, *others = _chunks(row, x, activations)
    t = first
    for acc in others:
        t = add(t, acc)
    if scale is not None:
        t = mul(t, scale)
    if bias is not None:
        t = add(t, bias)
    return canonical(add(t, ZERO))


def matmul_row(
    qtype: str, row: bytes, x: Sequence[int], scale: int | None = None, bias: int | None = None
) -> int:
    """The product of one weight row and one activation row.

    Parameters
    ----------
    qtype
        Name of the weight type ("q4_k").
    row
        The weight row as GGUF holds it.
    x
        Float32 bits, one a column.
    scale, bias
        The expert's scale and the row's bias, float32 bits; None where the tensor has none.

    Returns
    -------
    int
        Float32 bits.
    """
    taken = decode(qtype, row)
    return fold(taken, x, quantise(x) if taken.blocks else (), scale, bias)


def matmul_id(
    qtype: str,
    weight: Sequence[Sequence[bytes]],
    x: Sequence[Sequence[Sequence[int]]],
    ids: Sequence[Sequence[int]],
    scale: Sequence[int] | None = None,
    bias: Sequence[Sequence[int]] | None = None,
) -> list[list[list[int]]]:
    """Every place's row: weight[id] times its x, or +0 where the id is -1.

    Parameters
    ----------
    qtype
        Name of the weight type.
    weight
        [E][N] rows of GGUF bytes.
    x
        [T][k][K] float32 bits: the row of each place.
    ids
        [T][k] experts.
    scale, bias
        [E] and [E][N] float32 bits, or None.

    Returns
    -------
    list
        [T][k][N] float32 bits.
    """
    rows = {
        expert: [decode(qtype, row) for row in weight[expert]]
        for expert in {e for t in ids for e in t if e >= 0}
    }

    def place(expert: int, values: Sequence[int]) -> list[int]:
        if expert < 0:
            return [ZERO] * len(weight[0])
        activations = quantise(values) if rows[expert][0].blocks else []
        s = None if scale is None else scale[expert]
        biases = [None] * len(weight[expert]) if bias is None else bias[expert]
        return [fold(row, values, activations, s, b) for row, b in zip(rows[expert], biases, strict=True)]

    return [
        [place(expert, values) for expert, values in zip(*token, strict=True)]
        for token in zip(ids, x, strict=True)
    ]


# ----------------------------------------------------------------------------------- 4. activation function

UPPER = 0x42B17217  # 88.72283172607422, the last x with a finite E(x)
LOWER = 0xC2AEAC4F  # -87.33654022216797, the last x with a normal E(x)
LOG2E = exactly(Fraction(float.fromhex("0x1.715476p+0")))
LN2_HIGH = exactly(Fraction(float.fromhex("0x1.62e430p-1")))
LN2_LOW = exactly(Fraction(float.fromhex("-0x1.05c610p-29")))
MAGIC = exactly(12582912)
COEFFICIENTS = [
    exactly(Fraction(float.fromhex(text)))
    for text in (
        "0x1.6b44acp-10",
        "0x1.123de0p-7",
        "0x1.555858p-5",
        "0x1.55548cp-3",
        "0x1.fffffcp-2",
        "0x1p+0",
        "0x1p+0",
    )
]


def exp(x: int) -> int:
    """E(x)."""
    if is_nan(x):
        return NAN
    if x == INFINITY or (is_finite(x) and exact(x) > exact(UPPER)):
        return INFINITY
    if not is_finite(x) or exact(x) < exact(LOWER):
        return ZERO
    n = add(fma(x, LOG2E, MAGIC), negate(MAGIC))
    r = fma(negate(n), LN2_HIGH, x)
    r = fma(negate(n), LN2_LOW, r)
    p = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        p = fma(p, r, coefficient)
    return exactly(scaled(exact(p), int(exact(n))))


def silu(g: int) -> int:
    """fl(g / fl(1 + E(-g)))."""
    return div(g, add(ONE, exp(negate(g))))


def swiglu(g: int, u: int) -> int:
    """One element of the hidden row, from gate's and up's."""
    return canonical(mul(silu(g), u))


# ----------------------------------------------------------------------------------------------- 5. combine


def combine(rows: Sequence[Sequence[int]], ids: Sequence[int], weights: Sequence[int]) -> list[int]:
    """One token's output row.

    Parameters
    ----------
    rows
        [k][N] float32 bits: the place rows.
    ids
        [k] experts; a place of -1 is left out.
    weights
        [k] router weights, float32 bits.
    """
    outputs = []
    for column in range(len(rows[0])):
        y = ZERO
        for row, expert, w in zip(rows, ids, weights, strict=True):
            if expert != -1:
                y = fma(w, row[column], y)
        outputs.append(canonical(add(y, ZERO)))
    return outputs
