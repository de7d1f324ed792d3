"""The bound of docs/numerics.md on the distance from float64, over the gguf package's dequantised weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests import cases
from tests.backends import BACKENDS, Backend

F64 = NDArray[np.float64]

# Offset of the float16 scale of the minimums.
MINIMUM = {"q4_1": 2, "q5_1": 2, "q2_k": 82, "q4_k": 2, "q5_k": 2}


def dequantised(qtype: str, weight: NDArray[np.uint8], without: int | None = None) -> F64:
    """Raw blocks (..., row_bytes) as gguf's weights (..., K), the float16 at offset `without` taken for 0."""
    layout = cases.LAYOUTS[qtype]
    blocks = weight.reshape(-1, layout.block_bytes).copy()
    if without is not None:
        blocks[:, without : without + 2] = 0
    kind = gguf.GGMLQuantizationType[qtype.upper()]
    return gguf.quants.dequantize(blocks.reshape(weight.shape), kind).astype(np.float64)


def terms(qtype: str, weight: NDArray[np.uint8]) -> F64:
    """|c * code| + |m| of every weight, sub-scales included."""
    if qtype not in MINIMUM:
        return np.abs(dequantised(qtype, weight))
    scale = 80 if qtype == "q2_k" else 0
    scaled = dequantised(qtype, weight, without=MINIMUM[qtype])
    return np.abs(scaled) + np.abs(dequantised(qtype, weight, without=scale))


def bound(qtype: str, weight: NDArray[np.uint8], x: NDArray[np.float32]) -> F64:
    """The largest error allowed of every output, (T, E, N), for x (T, K) and weight (E, N, row_bytes)."""
    w, size = np.abs(dequantised(qtype, weight)), np.abs(x.astype(np.float64))
    product = np.einsum("tk,enk->ten", size, w)
    if cases.LAYOUTS[qtype].block == 1:
        return np.asarray((x.shape[1] / 256 + 257) * 2.0**-24 * product)
    a = size.reshape(len(x), -1, 32).max(axis=2)
    d = np.where(a < 2.0**-118, 0, a / 127).repeat(32, axis=1)
    dropped = np.where(a < 2.0**-118, 1.0, 0.0).repeat(32, axis=1) * size
    step = np.einsum("tk,enk->ten", 0.51 * d, w)
    rest = 2.0**-14 * np.einsum("tk,enk->ten", size, terms(qtype, weight))
    return np.asarray(step + rest + np.einsum("tk,enk->ten", dropped, w))


def activation_rows(rows: int, columns: int, key: str) -> NDArray[np.float32]:
    """Plain rows, and among them rows of 3000, of ties, of zeros and with a block too small to count."""
    x = cases.activations("plain", rows, columns, "bound", key)
    x[1] = 3000.0
    x[2] = cases.activations("special", 6, columns, "bound", key)[cases.SPECIALS.index("ties")]
    x[3] = 0.0
    x[4, :32] *= np.float32(2.0**-124)
    return x


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("drawn", ["raw", "tame"])
@pytest.mark.parametrize("qtype", cases.TYPES)
def test_error_is_within_the_bound(qtype: str, drawn: str, backend: Backend) -> None:
    """For every output of random experts, with scales of every finite size and with those of real models."""
    experts, rows, tokens = 3, 48, 12
    columns = 768 if cases.LAYOUTS[qtype].block > 32 else 800
    flat = (
        cases.raw_blocks(qtype, experts * rows, columns, "bound", limit=252)
        if drawn == "raw"
        else cases.tame_blocks(qtype, experts * rows, columns, "bound")
    )
    weight = flat.reshape(experts, rows, -1)
    x = activation_rows(tokens, columns, qtype)
    if qtype == "mxfp4" and drawn == "raw":
        x *= np.float32(2.0**-24)  # weights of up to 2.5e38: keeps the outputs finite
    ids = np.tile(np.arange(experts, dtype=np.int32), (tokens, 1))
    expected = np.einsum("tk,enk->ten", x.astype(np.float64), dequantised(qtype, weight))
    error = np.abs(backend.matmul_id(qtype, weight, x, ids).astype(np.float64) - expected)
    allowed = bound(qtype, weight, x)
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert (error <= allowed).all(), f"{worst}: {error[worst]} > {allowed[worst]}, of {expected[worst]}"
    # A bound that any result meets proves nothing: most outputs are larger than their bound.
    assert (np.abs(expected) > allowed).mean() > 0.7
