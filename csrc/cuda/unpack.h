// Codes and scales of a block of 32 columns with the instructions that this processor has: what quant/decode.h says in
// words that suit every one, said again for types where it pays. Integer logic has half the rate of float arithmetic
// here and conversions an eighth, so that bytes are moved by prmt, several fields are masked at once, and small
// integers become floats as the low bits of one.
#pragma once

#include "cuda/lane.h"

namespace moepool {
namespace cuda {
namespace {

// Byte i of w as a float, plus 2^23.
__device__ __forceinline__ float byte_above_2_23(uint32_t w, int i) {
    return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7650u + i));
}
__device__ __forceinline__ uint32_t unsigned_byte(uint32_t w, int i) { return __byte_perm(w, 0, 0x4440u + i); }
// In the selector, bit 3 asks for the sign of a byte.
__device__ __forceinline__ uint32_t signed_byte_of(uint32_t w, int i) {
    uint32_t byte;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(byte) : "r"(w), "r"(0x8880u + 0x1111u * i));
    return byte;
}
// fl(d * byte i of w), d a finite float16: d * 2^23 is a float, and one fma rounds once.
__device__ __forceinline__ float times_byte(float d, uint32_t w, int i) {
    return __fmaf_rn(d, byte_above_2_23(w, i), -__fmul_rn(d, 0x1p23f));
}

// kSixteenfold: words 1, 3, 5, 7 of the codes hold sixteen times the code: the upper nibbles where they lie.
// kSigned: codes are signed bytes without an offset.
template <class T>
struct AsDecoded {
    static constexpr bool kSixteenfold = false, kSigned = false;
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        Decode<T>::scales(p, b, s);
    }
    template <class L>
    static __device__ __forceinline__ void codes(Panel<L> p, int b, uint32_t (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = Decode<T>::codes(p, b, i);
    }
};

// Segment kSegment holds the block's nibbles.
template <class T, int kSegment>
struct Nibbles : AsDecoded<T> {
    template <class L>
    static __device__ __forceinline__ uint32_t eight(Panel<L> p, int b, int i) {
        return p.word(first_word<T, kSegment>(p.blocks) + 4 * b + i);
    }
};
template <class T, int kSegment>
struct PlainNibbles : Nibbles<T, kSegment> {
    static constexpr bool kSixteenfold = true;
    template <class L>
    static __device__ __forceinline__ void codes(Panel<L> p, int b, uint32_t (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t w = Nibbles<T, kSegment>::eight(p, b, i);
            out[2 * i] = w & 0x0f0f0f0fu;
            out[2 * i + 1] = w & 0xf0f0f0f0u;
        }
    }
};
// The bytes of a and b that four nibbles name. A nibble with bit 3 set gives the sign of its byte eight times.
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t nibbles) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(nibbles));
    return bytes;
}
// A constant that the compiler does not know: one that it knows it would move into a register anew for each prmt.
// Blocks of threads have no depth.
__device__ __forceinline__ uint32_t kept(uint32_t constant) { return constant * blockDim.z; }
template <class T, class Table, int kSegment>
struct LookedUpNibbles : Nibbles<T, kSegment> {
    // Of codes below 128, whose sign is 0, one half of the table gives 0 where the other one is meant.
    static constexpr bool kSmall = Table::kMostCode < 128;

    // The codes of four nibbles that follow one another: what they name in the lower half of the table, and in the
    // upper one; `half` chooses.
    static __device__ __forceinline__ uint32_t four(uint32_t in_lower, uint32_t in_upper, uint32_t half) {
        const uint32_t lower = bytes_of(kept(Table::words[0]), Table::words[1], in_lower);
        const uint32_t upper = bytes_of(kept(Table::words[2]), Table::words[3], in_upper);
        return kSmall ? lower | upper : bytes_of(lower, upper, half);
    }
    template <class L>
    static __device__ __forceinline__ void codes(Panel<L> p, int b, uint32_t (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t w = Nibbles<T, kSegment>::eight(p, b, i), within = w & 0x77777777u;
            const uint32_t in_lower = kSmall ? w : within, in_upper = kSmall ? w ^ 0x88888888u : within;
            const uint32_t half = ((w >> 1) & 0x44444444u) | 0x32103210u;
            const uint32_t first = four(in_lower, in_upper, half),
                           last = four(in_lower >> 16, in_upper >> 16, half >> 16);
            out[2 * i] = __byte_perm(first, last, 0x6420);
            out[2 * i + 1] = __byte_perm(first, last, 0x7531);
        }
    }
};

template <class T>
struct Unpack : AsDecoded<T> {};

template <>
struct Unpack<Q4_0> : PlainNibbles<Q4_0, 1> {};
template <>
struct Unpack<Q4_1> : PlainNibbles<Q4_1, 1> {};
template <>
struct Unpack<IQ4_NL> : LookedUpNibbles<IQ4_NL, TableIQ4, 1> {};
template <>
struct Unpack<MXFP4> : LookedUpNibbles<MXFP4, TableFP4, 1> {};

template <>
struct Unpack<Q8_0> : AsDecoded<Q8_0> {
    static constexpr bool kSigned = true;
    template <class L>
    static __device__ __forceinline__ void codes(Panel<L> p, int b, uint32_t (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = p.word(first_word<Q8_0, 1>(p.blocks) + 8 * b + i);
    }
};

// Scales and minimums of four blocks at a time, a byte each.
template <class L>
__device__ __forceinline__ void quick_scales_and_minimums(Panel<L> p, int b, Scales<L> &s) {
    const uint32_t w1 = p.word(1), w2 = p.word(2);
    uint32_t scales, minimums;
    if (b < 4) {
        scales = w1 & 0x3f3f3f3fu;
        minimums = w2 & 0x3f3f3f3fu;
    } else {
        const uint32_t w3 = p.word(3);
        scales = (w3 & 0x0f0f0f0fu) | ((w1 >> 2) & 0x30303030u);
        minimums = ((w3 >> 4) & 0x0f0f0f0fu) | ((w2 >> 2) & 0x30303030u);
    }
    s.c = times_byte(p.half(0, 0), scales, b & 3);
    s.m = times_byte(p.half(0, 1), minimums, b & 3);
}
template <>
struct Unpack<Q4_K> : PlainNibbles<Q4_K, 2> {
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        quick_scales_and_minimums(p, b, s);
    }
};
template <>
struct Unpack<Q5_K> : AsDecoded<Q5_K> {
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        quick_scales_and_minimums(p, b, s);
    }
};

template <>
struct Unpack<Q2_K> : AsDecoded<Q2_K> {
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        const uint32_t w = p.word(first_word<Q2_K, 1>(1) + b / 2);
        const uint32_t scales = w & 0x0f0f0f0fu, minimums = (w >> 4) & 0x0f0f0f0fu;
        const int i = 2 * (b & 1);
        s.c = p.half(0, 0);
        s.m = p.half(0, 1);
        s.s0 = unsigned_byte(scales, i);
        s.s1 = unsigned_byte(scales, i + 1);
        s.m0 = unsigned_byte(minimums, i);
        s.m1 = unsigned_byte(minimums, i + 1);
    }
};
template <>
struct Unpack<Q3_K> : AsDecoded<Q3_K> {
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        constexpr int kFirst = first_word<Q3_K, 2>(1);
        const int quad = b / 2, i = 2 * (b & 1);  // of the 16 scales, four a word
        const uint32_t four = ((p.word(kFirst + quad % 2) >> (4 * (quad / 2))) & 0x0f0f0f0fu) |
                              (((p.word(kFirst + 2) >> (2 * quad)) & 0x03030303u) << 4);
        s.c = p.half(first_word<Q3_K, 3>(1), 0);
        s.s0 = unsigned_byte(four, i) - 32u;
        s.s1 = unsigned_byte(four, i + 1) - 32u;
    }
};
template <>
struct Unpack<Q6_K> : AsDecoded<Q6_K> {
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        const uint32_t four = p.word(first_word<Q6_K, 2>(1) + b / 2);
        const int i = 2 * (b & 1);
        s.c = p.half(first_word<Q6_K, 3>(1), 0);
        s.s0 = signed_byte_of(four, i);
        s.s1 = signed_byte_of(four, i + 1);
    }
};

template <>
struct Unpack<IQ4_XS> : LookedUpNibbles<IQ4_XS, TableIQ4, 2> {
    template <class L>
    static __device__ __forceinline__ void scales(Panel<L> p, int b, Scales<L> &s) {
        const uint32_t low = (p.word(1) >> (4 * b)) & 0xfu, high = (p.word(0) >> (12 + 2 * b)) & 0x30u;
        s.c = __fmul_rn(p.half(0, 0), __fadd_rn(__uint_as_float(low | high | 0x4b000000u), -(0x1p23f + 32.0f)));
    }
};

}  // namespace
}  // namespace cuda
}  // namespace moepool
