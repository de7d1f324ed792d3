// One chunk of a dot product on a lane: what the matrix kernels have in common.
#pragma once

#include "cuda/unpack.h"

namespace moepool {
namespace cuda {
namespace {

// The scale, fl(d * float(sum)) and the sums over each half of an activation block of 32 columns.
struct BlockFacts {
    float d, e;
    uint32_t sum0, sum1;
};

// The largest integer sub-scale, and the largest |I| of a block (numerics.md section 2).
template <class T>
constexpr int kMostFactor = 1;
template <>
constexpr int kMostFactor<Q2_K> = 15;
template <>
constexpr int kMostFactor<Q3_K> = 32;
template <>
constexpr int kMostFactor<Q6_K> = 128;
template <class T>
constexpr int kMostWhole =
    32 * 127 * kMostFactor<T> *
    (Decode<T>::kMostCode > 2 * Decode<T>::kOffset ? Decode<T>::kMostCode - Decode<T>::kOffset : Decode<T>::kOffset);

template <class L, bool kSigned>
__device__ __forceinline__ uint32_t dot(uint32_t sum, uint32_t codes, int q) {
    if constexpr (kSigned)
        return static_cast<uint32_t>(L::signed_dot(static_cast<int>(sum), static_cast<int>(codes), q));
    return L::dot(sum, codes, q);
}

// kMagic: sum stands above 1.5 * 2^23.
template <class L, bool kMagic>
__device__ __forceinline__ float integer(uint32_t sum) {
    if constexpr (kMagic) return __fadd_rn(L::as_float(sum), -0x1.8p23f);
    return L::to_float(sum);
}

// One chunk of one row of weights, `width` columns of it, times kBatch activation rows (numerics.md section 2). kFull:
// the chunk has all 256 columns. Rows gives, of row t: x(t, column), or q(t, block, half) and facts(t, block).
template <class T, class L, int kBatch, bool kFull, class Rows>
__device__ __forceinline__ void multiply_chunk(const uint32_t *words, int width, const Rows &rows,
                                               float (&sum)[kBatch]) {
    constexpr Form kForm = Decode<T>::kForm;
    const Panel<L> panel{words, kFull ? kChunkColumns / T::info.block : width / T::info.block};
    if constexpr (kForm == Form::kFloat) {
        // A sum's additions wait for one another: enough of them in a row hide the loads of those behind.
#pragma unroll(kBatch <= 2 ? 32 : 8)
        for (int k = 0; k < (kFull ? kChunkColumns : width); ++k) {
            const float weight = Decode<T>::weight(panel, k);
#pragma unroll
            for (int t = 0; t < kBatch; ++t) sum[t] = __fmaf_rn(weight, rows.x(t, k), sum[t]);
        }
    } else {
        using U = Unpack<T>;
        constexpr bool kSub = kForm == Form::kSubScale || kForm == Form::kAffineSub;
        constexpr uint32_t kOffset = U::kSigned ? 0 : Decode<T>::kOffset;
        // Sums begin at the bits of 1.5 * 2^23: what is added to them, if less than 2^22, is then the float's fraction.
        constexpr bool kMagic = kMostWhole<T> < 1 << 22;
        constexpr uint32_t kZero = kMagic ? 0x4b400000u : 0u;
        // Unrolled whole, what blocks share (scales of a super-block) is decoded once; more rows leave no registers for
        // it.
#pragma unroll(kFull &&kBatch <= 2 ? 8 : kBatch <= 4 ? 2 : 1)
        for (int b = 0; b < (kFull ? kChunkColumns : width) / kBlockColumns; ++b) {
            Scales<L> s;
            U::scales(panel, b, s);
            uint32_t codes[8];
            U::codes(panel, b, codes);
#pragma unroll
            for (int t = 0; t < kBatch; ++t) {
                const int4 q0 = rows.q(t, b, 0), q1 = rows.q(t, b, 1);
                const BlockFacts facts = rows.facts(t, b);
                float whole;
                if constexpr (U::kSixteenfold) {
                    static_assert(kMagic && !kSub);
                    uint32_t even = kZero - kOffset * (facts.sum0 + facts.sum1), odd = kZero;
                    even = L::dot(even, codes[0], q0.x);
                    odd = L::dot(odd, codes[1], q0.y);
                    even = L::dot(even, codes[2], q0.z);
                    odd = L::dot(odd, codes[3], q0.w);
                    even = L::dot(even, codes[4], q1.x);
                    odd = L::dot(odd, codes[5], q1.y);
                    even = L::dot(even, codes[6], q1.z);
                    odd = L::dot(odd, codes[7], q1.w);
                    // Every step is exact.
                    whole =
                        __fmaf_rn(L::as_float(odd), 0.0625f, __fadd_rn(L::as_float(even), -(0x1.8p23f + 0x1.8p19f)));
                } else {
                    uint32_t low = kSub ? 0u - kOffset * facts.sum0 : kZero - kOffset * (facts.sum0 + facts.sum1);
                    uint32_t high = kSub ? 0u - kOffset * facts.sum1 : 0u;
                    low = dot<L, U::kSigned>(low, codes[0], q0.x);
                    high = dot<L, U::kSigned>(high, codes[4], q1.x);
                    low = dot<L, U::kSigned>(low, codes[1], q0.y);
                    high = dot<L, U::kSigned>(high, codes[5], q1.y);
                    low = dot<L, U::kSigned>(low, codes[2], q0.z);
                    high = dot<L, U::kSigned>(high, codes[6], q1.z);
                    low = dot<L, U::kSigned>(low, codes[3], q0.w);
                    high = dot<L, U::kSigned>(high, codes[7], q1.w);
                    const uint32_t sum_of_both = kSub ? s.s0 * low + (s.s1 * high + kZero) : low + high;
                    whole = integer<L, kMagic>(sum_of_both);
                }
                sum[t] = __fmaf_rn(__fmul_rn(s.c, facts.d), whole, sum[t]);
                if constexpr (kForm == Form::kAffine) {
                    sum[t] = __fmaf_rn(-s.m, facts.e, sum[t]);
                } else if constexpr (kForm == Form::kAffineSub) {
                    const uint32_t minimums = s.m0 * facts.sum0 + (s.m1 * facts.sum1 + 0x4b400000u);
                    sum[t] = __fmaf_rn(-s.m, __fmul_rn(facts.d, integer<L, true>(minimums)), sum[t]);
                }
            }
        }
    }
}

// Scale, bias and the last step of a row (numerics.md section 3): their offsets in the record, or -1. Past L1, which
// may hold what was in the slot before.
__device__ __forceinline__ float finish_row(float t, const uint8_t *record, int64_t scale, int64_t bias, int64_t row) {
    if (scale >= 0) t = __fmul_rn(t, __ldcg(reinterpret_cast<const float *>(record + scale)));
    if (bias >= 0) t = __fadd_rn(t, __ldcg(reinterpret_cast<const float *>(record + bias) + row));
    return num::finish(t);
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
