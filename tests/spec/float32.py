"""IEEE-754 binary32 on bits, each operation exact and then rounded once."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

SIGN = 0x80000000
INFINITY = 0x7F800000
NAN = 0x7FFFFFFF  # the only NaN that this specification makes: N of the law
ZERO = 0
ONE = 0x3F800000


def is_nan(a: int) -> bool:
    """Whether the bits are those of a NaN."""
    return a & ~SIGN > INFINITY


def is_finite(a: int) -> bool:
    """Neither infinite nor NaN, decided on bits."""
    return a & ~SIGN < INFINITY


def is_zero(a: int) -> bool:
    """+0 or -0."""
    return a & ~SIGN == 0


def negate(a: int) -> int:
    """-a: the sign bit turned, also of zero and NaN."""
    return a ^ SIGN


def canonical(a: int) -> int:
    """N(a)."""
    return NAN if is_nan(a) else a


def scaled(value: Fraction | int, exponent: int) -> Fraction:
    """value * 2^exponent."""
    power = 1 << abs(exponent)
    return Fraction(value * power) if exponent >= 0 else Fraction(value, power)


@lru_cache(1 << 17)
def exact(a: int) -> Fraction:
    """The value of finite bits."""
    assert is_finite(a), hex(a)
    exponent, significand = a >> 23 & 0xFF, a & 0x7FFFFF
    if exponent:
        significand += 1 << 23
    return scaled(-significand if a & SIGN else significand, max(exponent, 1) - 150)


def fl(value: Fraction | int) -> int:
    """One rounding to float32: nearest, ties to even, subnormals kept, overflow to infinity; +0 for 0."""
    value = Fraction(value)
    sign = SIGN if value < 0 else 0
    value = abs(value)
    if value == 0:
        return ZERO
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < scaled(1, exponent):
        exponent -= 1
    exponent = max(exponent, -126)
    significand = round(scaled(value, 23 - exponent))  # Python rounds ties to even
    # A significand of 2^24 carries into the exponent, one below 2^23 is a subnormal of exponent field 0.
    return sign | min((exponent + 126 << 23) + significand, INFINITY)


def exactly(value: Fraction | int) -> int:
    """`fl` of a value that must be a float32 already."""
    bits = fl(value)
    assert exact(bits) == value, value
    return bits


def fma(a: int, b: int, c: int) -> int:
    """fl(a * b + c), with IEEE's rules for infinities, NaN and signed zeros."""
    if is_nan(a) or is_nan(b) or is_nan(c):
        return NAN
    sign = (a ^ b) & SIGN
    if not (is_finite(a) and is_finite(b)):
        if is_zero(a) or is_zero(b) or (not is_finite(c) and c & SIGN != sign):
            return NAN
        return INFINITY | sign
    if not is_finite(c):
        return c
    product = exact(a) * exact(b)
    total = product + exact(c)
    if total == 0:
        return sign if product == 0 and c & SIGN == sign else ZERO
    return fl(total)


def mul(a: int, b: int) -> int:
    """fl(a * b)."""
    return fma(a, b, SIGN)  # adding -0 changes no product, not even a zero's sign


def add(a: int, b: int) -> int:
    """fl(a + b)."""
    return fma(a, ONE, b)


def div(a: int, b: int) -> int:
    """fl(a / b)."""
    sign = (a ^ b) & SIGN
    if is_nan(a) or is_nan(b) or (is_zero(a) and is_zero(b)):
        return NAN
    if not is_finite(a):
        return INFINITY | sign if is_finite(b) else NAN
    if is_zero(b):
        return INFINITY | sign
    if is_zero(a) or not is_finite(b):
        return sign
    return fl(exact(a) / exact(b)) | sign


def widen_f16(h: int) -> int:
    """The float32 of float16 bits, exact."""
    sign, exponent, significand = (h & 0x8000) << 16, h >> 10 & 31, h & 0x3FF
    if exponent == 31:
        return NAN if significand else sign | INFINITY
    if exponent:
        significand += 1 << 10
    return sign | exactly(scaled(significand, max(exponent, 1) - 25))


def widen_bf16(b: int) -> int:
    """The float32 of bfloat16 bits, exact."""
    return b << 16
