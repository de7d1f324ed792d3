// The scalar arithmetic of docs/numerics.md, for every C++ and CUDA file that computes: one text, so that no two
// kernels can round differently.
//
// Everything here has internal linkage. The files of the library are compiled for different instruction sets, and of
// an inline function with external linkage the linker keeps one copy for all: perhaps the AVX-512 one.
#ifndef MOEPOOL_CSRC_NUMERICS_H
#define MOEPOOL_CSRC_NUMERICS_H

#include <stdint.h>

#if defined(__FAST_MATH__)
#error "moepool's results are defined to the last bit: build without -ffast-math and -Ofast"
#endif

#if defined(__CUDACC__)
#define MOEPOOL_NUM static __host__ __device__ __forceinline__
#else
#define MOEPOOL_NUM static inline
#endif

namespace moepool {
namespace num {

MOEPOOL_NUM uint32_t bits(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    uint32_t result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
#endif
}

MOEPOOL_NUM float from_bits(uint32_t value) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(value);
#else
    float result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
#endif
}

// One rounding each, to nearest even. On the device the intrinsics also keep nvcc from contracting them.
MOEPOOL_NUM float mp_fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

MOEPOOL_NUM float mp_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

MOEPOOL_NUM float mp_add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

MOEPOOL_NUM float mp_div(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// Infinite or NaN, decided on bits: a maximum of floats drops NaN on some machines and keeps it on others.
MOEPOOL_NUM bool nonfinite(uint32_t value_bits) { return (value_bits & 0x7FFFFFFFu) >= 0x7F800000u; }
MOEPOOL_NUM bool nonfinite(float value) { return nonfinite(bits(value)); }
MOEPOOL_NUM bool is_nan(float value) { return (bits(value) & 0x7FFFFFFFu) > 0x7F800000u; }

// `when ? a : b` as arithmetic, for gcc does not vectorise a loop over nested `?:` for AVX2.
MOEPOOL_NUM uint32_t select(bool when, uint32_t a, uint32_t b) {
    return b ^ ((a ^ b) & (0u - static_cast<uint32_t>(when)));
}

// The one NaN of all outputs. CUDA makes it by itself; x86 makes 0xFFC00000 and keeps payloads.
MOEPOOL_NUM float nan() { return from_bits(0x7FFFFFFFu); }

// N(t)
MOEPOOL_NUM float canonical(float t) { return from_bits(select(is_nan(t), 0x7FFFFFFFu, bits(t))); }

// N(fl(t + 0.0)): the last step of a row and of a combine. No -0.0 comes out.
MOEPOOL_NUM float finish(float t) { return canonical(mp_add(t, 0.0f)); }

// 1.5 * 2^23: adding it leaves no bits below 1, so that one addition rounds to the nearest integer, ties to even, and
// the low bits of the sum are that integer. For |t| <= 2^22.
MOEPOOL_NUM float rint_magic() { return 12582912.0f; }
MOEPOOL_NUM float rint(float t) { return mp_add(mp_add(t, rint_magic()), -rint_magic()); }
MOEPOOL_NUM int32_t rint_int(float t) {
    return static_cast<int32_t>(bits(mp_add(t, rint_magic())) - bits(rint_magic()));
}

MOEPOOL_NUM float widen_bf16(uint16_t b) { return from_bits(static_cast<uint32_t>(b) << 16); }

// Exact for all 65536 values. NaN keeps its payload.
MOEPOOL_NUM float widen_f16(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16;
    const uint32_t magnitude = (h & 0x7FFFu) << 13;
    const uint32_t rebias = 112u << 23;
    // A subnormal m * 2^-24, set behind the leading 1 of 2^-14, less that 2^-14: an exact difference.
    const uint32_t subnormal = bits(mp_add(from_bits(magnitude + rebias + (1u << 23)), -0x1p-14f));
    const uint32_t normal = magnitude + rebias;
    const uint32_t special = normal + rebias;  // exponent 31 becomes 255
    const uint32_t finite = select(magnitude < (0x0400u << 13), subnormal, normal);
    return from_bits(sign | select(magnitude >= (0x7C00u << 13), special, finite));
}

// E(x) of section 4: exp(x) to 0.951 ulp, measured over every float32 between the limits. +inf from 0x42B17218
// (88.72283935546875) up; +0 below 0xC2AEAC4F (-87.33654022216797), where the result would be subnormal; NaN for NaN.
// Without branches, so that compilers vectorise a loop over it.
MOEPOOL_NUM float exp(float x) {
    const float shifted = mp_fma(x, 0x1.715476p+0f, rint_magic());  // rint(x / ln 2)
    const float n = mp_add(shifted, -rint_magic());
    float r = mp_fma(-n, 0x1.62e430p-1f, x);  // the float nearest to ln 2: without error
    r = mp_fma(-n, -0x1.05c610p-29f, r);      // and what it lacks; now |r| < 0.3466
    float p = 0x1.6b44acp-10f;
    p = mp_fma(p, r, 0x1.123de0p-7f);
    p = mp_fma(p, r, 0x1.555858p-5f);
    p = mp_fma(p, r, 0x1.55548cp-3f);
    p = mp_fma(p, r, 0x1.fffffcp-2f);
    p = mp_fma(p, r, 1.0f);
    p = mp_fma(p, r, 1.0f);
    // 2^n in two factors, for 2^128 is no float. Both products are exact.
    const uint32_t k = bits(shifted) - bits(rint_magic());
    const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(k) >> 1);
    p = mp_mul(p, from_bits((half + 127u) << 23));
    p = mp_mul(p, from_bits((k - half + 127u) << 23));
    const uint32_t upper = select(x > 0x1.62e42ep+6f, 0x7F800000u, bits(p));
    return from_bits(select(x < -0x1.5d589ep+6f, 0u, upper));
}

MOEPOOL_NUM float silu(float g) { return mp_div(g, mp_add(1.0f, exp(-g))); }

// One element of the hidden row.
MOEPOOL_NUM float swiglu(float g, float u) { return canonical(mp_mul(silu(g), u)); }

}  // namespace num
}  // namespace moepool

#undef MOEPOOL_NUM

#endif  // MOEPOOL_CSRC_NUMERICS_H
