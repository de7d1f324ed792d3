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
// Four bytes of a and b, those of the lower eight entries of a table that the nibbles of a selector name. A nibble with
// bit 3 set gives the sign of its byte eight times.
__device__ __forceinline__ uint32_t look_up(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t found;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(selector));
    return found;
}
// A constant that the compiler does not know: in front of each prmt that wants a known one in a register it would make
// it anew. Blocks of threads have no depth.
__device__ __forceinline__ uint32_t kept(uint32_t constant) { return constant * blockDim.z; }
template <class T, class Table, int kSegment>
struct LookedUpNibbles : Nibbles<T, kSegment> {
    // Four nibbles, as they follow one another, are a selector into half of the table; bit 3 chooses the half.
    static __device__ __forceinline__ uint32_t four(uint32_t w, uint32_t other, uint32_t half) {
        const uint32_t k0 = kept(Table::words[0]), k2 = kept(Table::words[2]);
        const uint32_t lower = look_up(k0, Table::words[1], w), upper = look_up(k2, Table::words[3], other);
        // Codes below 128 have no sign: what is of the other half is 0.
        return Table::kMostCode < 128 ? lower | upper : look_up(lower, upper, half);
    }
    template <class L>
    static __device__ __forceinline__ void codes(Panel<L> p, int b, uint32_t (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t w = Nibbles<T, kSegment>::eight(p, b, i);
            uint32_t own = w, other = w ^ 0x88888888u, half = 0;
            if (Table::kMostCode >= 128) {
                own = other = w & 0x77777777u;
                half = ((w >> 1) & 0x44444444u) | 0x32103210u;
            }
            const uint32_t first = four(own, other, half), last = four(own >> 16, other >> 16, half >> 16);
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
