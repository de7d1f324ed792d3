// What the words of a panel mean: codes and scales of every type, written once over the lanes of a processor.
//
// A lane holds one row. The processor is a class L with
//   W, F          a word (uint32) and a float a lane; operators work lane by lane
//   kLanes        lanes of a W
//   load(p)       the words at p, p + 1, ... , one a lane
//   to_float(w)   of w as int32
//   as_float(w)   of w as bits
//   half(w)       of the float16 in w's low 16 bits
//   lookup<T>(w)  each byte of w, 0..15, replaced by that byte of table T; not of CUDA, see unpack.h
//   fma(a, b, c)  fused
//   dot(a, u, q)  a + the four products of u's bytes, unsigned, with q's, signed
// Portable C++ and CUDA have one lane; AVX-512 has sixteen. Every L is in an unnamed namespace, which gives what is
// instantiated here internal linkage: the linker can not hand one instruction set's copy to another (numerics.md 6).
//
// Codes are given as unsigned bytes up to kMostCode, the code plus the type's kOffset: sum(code * q) = dot(codes, q) -
// kOffset * sum(q), exactly.
#pragma once

#include "quant/types.h"

#if defined(__CUDACC__)
#define MOEPOOL_INLINE __device__ __forceinline__
#else
#define MOEPOOL_INLINE inline __attribute__((always_inline))
#endif

namespace moepool {

// How a block of 32 columns is added to the accumulator (numerics.md section 2).
enum class Form {
    kFloat,      // no blocks: weight by weight
    kScale,      // c, and the sum over 32
    kSubScale,   // c, and two sums over 16 with integer scales s0, s1
    kAffine,     // kScale, then the minimum m
    kAffineSub,  // kSubScale, then m with integer factors m0, m1
};

// First word of a segment of type T in a panel of `blocks` GGUF blocks.
template <class T, int kSegment>
MOEPOOL_INLINE constexpr int first_word(int blocks) {
    if constexpr (kSegment == 0) {
        return 0;
    } else {
        constexpr int kBytes = T::info.segments[kSegment - 1].bytes();
        return first_word<T, kSegment - 1>(blocks) + (kBytes * blocks + 3) / 4;
    }
}

template <class L>
struct Scales {
    typename L::F c, m;
    typename L::W s0, s1, m0, m1;
};

// One panel as L sees it: word p of this lane's row.
template <class L>
struct Panel {
    const uint32_t *words;  // already at L's first row
    int blocks;             // GGUF blocks side by side in the panel

    MOEPOOL_INLINE typename L::W word(int p) const { return L::load(words + p * kPanelRows); }
    MOEPOOL_INLINE typename L::F half(int first, int i) const { return L::half(word(first + i / 2) >> (16 * (i & 1))); }
    // Four fields from column `column` (a multiple of 4) on, one a byte, of a segment that begins at word `first`.
    template <int kBits>
    MOEPOOL_INLINE typename L::W fields(int first, int column) const {
        constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);
        return (word(first + column * kBits / 32) >> (column / 4 * kBits % 8)) & kMask;
    }
};

template <class L>
MOEPOOL_INLINE typename L::W unsigned_bits(typename L::W w, int from, int count) {
    return (w >> from) & ((1u << count) - 1);
}
template <class L>
MOEPOOL_INLINE typename L::W signed_byte(typename L::W w, int i) {
    return (((w >> (8 * i)) & 0xffu) ^ 0x80u) - 0x80u;
}

// Codes of a nibble, plus kOffset, four to a word.
struct TableIQ4 {
    static constexpr int kOffset = 127;
    static constexpr int kMostCode = 240;
    static constexpr uint32_t words[4] = {0x3e2c1700, 0x75695c4e, 0xa5988c80, 0xf0d8c4b4};
};
struct TableFP4 {
    static constexpr int kOffset = 12;
    static constexpr int kMostCode = 24;
    static constexpr uint32_t words[4] = {0x0f0e0d0c, 0x18141210, 0x090a0b0c, 0x00040608};
};

template <class T>
struct Decode;

// ---------------------------------------------------------------------------------------------- weight by weight

template <>
struct Decode<F32> {
    static constexpr Form kForm = Form::kFloat;
    template <class L>
    static MOEPOOL_INLINE typename L::F weight(Panel<L> p, int column) {
        return L::as_float(p.word(column));
    }
};
template <>
struct Decode<F16> {
    static constexpr Form kForm = Form::kFloat;
    template <class L>
    static MOEPOOL_INLINE typename L::F weight(Panel<L> p, int column) {
        return p.half(0, column);
    }
};
template <>
struct Decode<BF16> {
    static constexpr Form kForm = Form::kFloat;
    template <class L>
    static MOEPOOL_INLINE typename L::F weight(Panel<L> p, int column) {
        return L::as_float((p.word(column / 2) >> (16 * (column & 1))) << 16);
    }
};

// --------------------------------------------------------------------------------------------- blocks of 32 columns
// codes(p, b, g): columns 4g .. 4g+3 of block b of the panel.

template <>
struct Decode<Q8_0> {
    static constexpr Form kForm = Form::kScale;
    static constexpr int kOffset = 128;
    static constexpr int kMostCode = 255;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.word(first_word<Q8_0, 1>(p.blocks) + 8 * b + g) ^ 0x80808080u;
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(0, b);
    }
};

// Q4_0, IQ4_NL and MXFP4 differ in the code of a nibble and in the scale.
template <class T>
struct Nibbles32 {
    template <class L>
    static MOEPOOL_INLINE typename L::W nibbles(Panel<L> p, int b, int g) {
        return p.template fields<4>(first_word<T, 1>(p.blocks), 32 * b + 4 * g);
    }
};

template <>
struct Decode<Q4_0> : Nibbles32<Q4_0> {
    static constexpr Form kForm = Form::kScale;
    static constexpr int kOffset = 8;
    static constexpr int kMostCode = 15;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return nibbles(p, b, g);
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(0, b);
    }
};

template <>
struct Decode<IQ4_NL> : Nibbles32<IQ4_NL> {
    static constexpr Form kForm = Form::kScale;
    static constexpr int kOffset = TableIQ4::kOffset;
    static constexpr int kMostCode = TableIQ4::kMostCode;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return L::template lookup<TableIQ4>(nibbles(p, b, g));
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(0, b);
    }
};

template <>
struct Decode<MXFP4> : Nibbles32<MXFP4> {
    static constexpr Form kForm = Form::kScale;
    static constexpr int kOffset = TableFP4::kOffset;
    static constexpr int kMostCode = TableFP4::kMostCode;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return L::template lookup<TableFP4>(nibbles(p, b, g));
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        // 2^(e-128): a normal number from e = 2 on, 2^-127 and 2^-128 are subnormal.
        const typename L::W e = unsigned_bits<L>(p.word(b / 4), 8 * (b & 3), 8);
        s.c = L::as_float(e < 2u ? (e + 1u) * 0x00200000u : (e - 1u) << 23);
    }
};

template <>
struct Decode<Q4_1> {
    static constexpr Form kForm = Form::kAffine;
    static constexpr int kOffset = 0;
    static constexpr int kMostCode = 15;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<4>(first_word<Q4_1, 1>(p.blocks), 32 * b + 4 * g);
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(b, 0);
        s.m = -p.half(b, 1);
    }
};

// Q5_0 and Q5_1: the fifth bit has a segment of its own.
template <class T>
struct Nibbles32Fifth {
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<4>(first_word<T, 2>(p.blocks), 32 * b + 4 * g) |
               (p.template fields<1>(first_word<T, 1>(p.blocks), 32 * b + 4 * g) << 4);
    }
};
template <>
struct Decode<Q5_0> : Nibbles32Fifth<Q5_0> {
    static constexpr Form kForm = Form::kScale;
    static constexpr int kOffset = 16;
    static constexpr int kMostCode = 31;
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(0, b);
    }
};
template <>
struct Decode<Q5_1> : Nibbles32Fifth<Q5_1> {
    static constexpr Form kForm = Form::kAffine;
    static constexpr int kOffset = 0;
    static constexpr int kMostCode = 31;
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(b, 0);
        s.m = -p.half(b, 1);
    }
};

// -------------------------------------------------------------------------------------------- blocks of 256 columns

template <>
struct Decode<Q2_K> {
    static constexpr Form kForm = Form::kAffineSub;
    static constexpr int kOffset = 0;
    static constexpr int kMostCode = 3;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<2>(first_word<Q2_K, 2>(1), 32 * b + 4 * g);
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        const typename L::W pair = p.word(first_word<Q2_K, 1>(1) + b / 2) >> (16 * (b & 1));
        s.c = p.half(0, 0);
        s.m = p.half(0, 1);
        s.s0 = unsigned_bits<L>(pair, 0, 4);
        s.m0 = unsigned_bits<L>(pair, 4, 4);
        s.s1 = unsigned_bits<L>(pair, 8, 4);
        s.m1 = unsigned_bits<L>(pair, 12, 4);
    }
};

template <>
struct Decode<Q3_K> {
    static constexpr Form kForm = Form::kSubScale;
    static constexpr int kOffset = 4;
    static constexpr int kMostCode = 7;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<2>(0, 32 * b + 4 * g) |
               (p.template fields<1>(first_word<Q3_K, 1>(1), 32 * b + 4 * g) << 2);
    }
    template <class L>
    static MOEPOOL_INLINE typename L::W sub_scale(Panel<L> p, int j) {
        const int first = first_word<Q3_K, 2>(1);
        const typename L::W low = unsigned_bits<L>(p.word(first + j % 8 / 4), 8 * (j % 4) + 4 * (j / 8), 4);
        const typename L::W high = unsigned_bits<L>(p.word(first + 2), 8 * (j % 4) + 2 * (j / 4), 2);
        return (low | (high << 4)) - 32u;
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        s.c = p.half(first_word<Q3_K, 3>(1), 0);
        s.s0 = sub_scale(p, 2 * b);
        s.s1 = sub_scale(p, 2 * b + 1);
    }
};

// Q4_K and Q5_K share the packing of their 6-bit scales and minimums.
template <class L>
MOEPOOL_INLINE void scales_and_minimums(Panel<L> p, int b, Scales<L> &s) {
    const int j = 8 * (b & 3);
    typename L::W scale, minimum;
    if (b < 4) {
        scale = unsigned_bits<L>(p.word(1), j, 6);
        minimum = unsigned_bits<L>(p.word(2), j, 6);
    } else {
        scale = unsigned_bits<L>(p.word(3), j, 4) | (unsigned_bits<L>(p.word(1), j + 6, 2) << 4);
        minimum = unsigned_bits<L>(p.word(3), j + 4, 4) | (unsigned_bits<L>(p.word(2), j + 6, 2) << 4);
    }
    s.c = p.half(0, 0) * L::to_float(scale);
    s.m = p.half(0, 1) * L::to_float(minimum);
}

template <>
struct Decode<Q4_K> {
    static constexpr Form kForm = Form::kAffine;
    static constexpr int kOffset = 0;
    static constexpr int kMostCode = 15;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<4>(first_word<Q4_K, 2>(1), 32 * b + 4 * g);
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        scales_and_minimums(p, b, s);
    }
};

template <>
struct Decode<Q5_K> {
    static constexpr Form kForm = Form::kAffine;
    static constexpr int kOffset = 0;
    static constexpr int kMostCode = 31;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<4>(first_word<Q5_K, 3>(1), 32 * b + 4 * g) |
               (p.template fields<1>(first_word<Q5_K, 2>(1), 32 * b + 4 * g) << 4);
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        scales_and_minimums(p, b, s);
    }
};

template <>
struct Decode<Q6_K> {
    static constexpr Form kForm = Form::kSubScale;
    static constexpr int kOffset = 32;
    static constexpr int kMostCode = 63;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return p.template fields<4>(0, 32 * b + 4 * g) |
               (p.template fields<2>(first_word<Q6_K, 1>(1), 32 * b + 4 * g) << 4);
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        const typename L::W four = p.word(first_word<Q6_K, 2>(1) + b / 2);
        s.c = p.half(first_word<Q6_K, 3>(1), 0);
        s.s0 = signed_byte<L>(four, 2 * (b & 1));
        s.s1 = signed_byte<L>(four, 2 * (b & 1) + 1);
    }
};

template <>
struct Decode<IQ4_XS> {
    static constexpr Form kForm = Form::kScale;
    static constexpr int kOffset = TableIQ4::kOffset;
    static constexpr int kMostCode = TableIQ4::kMostCode;
    template <class L>
    static MOEPOOL_INLINE typename L::W codes(Panel<L> p, int b, int g) {
        return L::template lookup<TableIQ4>(p.template fields<4>(first_word<IQ4_XS, 2>(1), 32 * b + 4 * g));
    }
    template <class L>
    static MOEPOOL_INLINE void scales(Panel<L> p, int b, Scales<L> &s) {
        const typename L::W low = unsigned_bits<L>(p.word(1), 4 * b, 4);
        const typename L::W high = unsigned_bits<L>(p.word(0), 16 + 2 * b, 2);
        s.c = p.half(0, 0) * L::to_float((low | (high << 4)) - 32u);
    }
};

}  // namespace moepool
