"""The executable specification: docs/numerics.md and docs/quant-types.md in exact rational arithmetic.

Written from those two pages and from nothing else, in plain Python without NumPy, for reading and not for
speed. A float32 is its bits, an int in [0, 2^32); every rounding of the law is one call of `fl`. Kernels must
give the same bits.
"""

from tests.spec.blocks import TYPES, Block, Row, Type, decode, dequantise
from tests.spec.float32 import NAN, add, canonical, div, exact, fl, fma, mul, negate, widen_bf16, widen_f16
from tests.spec.ops import Activation, combine, exp, fold, matmul_id, matmul_row, quantise, silu, swiglu

__all__ = [
    "NAN",
    "TYPES",
    "Activation",
    "Block",
    "Row",
    "Type",
    "add",
    "canonical",
    "combine",
    "decode",
    "dequantise",
    "div",
    "exact",
    "exp",
    "fl",
    "fma",
    "fold",
    "matmul_id",
    "matmul_row",
    "mul",
    "negate",
    "quantise",
    "silu",
    "swiglu",
    "widen_bf16",
    "widen_f16",
]
