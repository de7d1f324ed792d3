// One chunk of a dot product on a lane: what the matrix kernels have in common.
#pragma once

#include "cuda/lane.h"

namespace moepool {
namespace cuda {
namespace {

// The scale, fl(d * float(sum)) and the sums over each half of an activation block of 32 columns.
struct BlockFacts {
    float d, e;
    uint32_t sum0, sum1;
};

// One chunk of one row of weights, `width` columns of it, times kBatch activation rows (numerics.md section 2). kFull:
// the chunk has all 256 columns. Rows gives, of row t: x(t, column), or q(t, block, half) and facts(t, block).
template <class T, class L, int kBatch, bool kFull, class Rows>
__device__ __forceinline__ void multiply_chunk(const uint32_t *words, int width, const Rows &rows,
                                               float (&sum)[kBatch]) {
    constexpr Form kForm = Decode<T>::kForm;
    const Panel<L> panel{words, kFull ? kChunkColumns / T::info.block : width / T::info.block};
    if constexpr (kForm == Form::kFloat) {
#pragma unroll 8
        for (int k = 0; k < (kFull ? kChunkColumns : width); ++k) {
            const float weight = Decode<T>::weight(panel, k);
#pragma unroll
            for (int t = 0; t < kBatch; ++t) sum[t] = __fmaf_rn(weight, rows.x(t, k), sum[t]);
        }
    } else {
        constexpr bool kSub = kForm == Form::kSubScale || kForm == Form::kAffineSub;
        constexpr uint32_t kOffset = Decode<T>::kOffset;
        // Unrolled whole, what blocks share (scales of a super-block) is decoded once; more rows leave no registers for
        // it.
#pragma unroll(kFull &&kBatch <= 2 ? 8 : kBatch <= 4 ? 2 : 1)
        for (int b = 0; b < (kFull ? kChunkColumns : width) / kBlockColumns; ++b) {
            Scales<L> s;
            Decode<T>::scales(panel, b, s);
            uint32_t codes[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) codes[i] = Decode<T>::codes(panel, b, i);
#pragma unroll
            for (int t = 0; t < kBatch; ++t) {
                const int4 q0 = rows.q(t, b, 0), q1 = rows.q(t, b, 1);
                const BlockFacts facts = rows.facts(t, b);
                uint32_t low = 0, high = 0;
                low = L::dot(low, codes[0], q0.x);
                low = L::dot(low, codes[1], q0.y);
                low = L::dot(low, codes[2], q0.z);
                low = L::dot(low, codes[3], q0.w);
                high = L::dot(high, codes[4], q1.x);
                high = L::dot(high, codes[5], q1.y);
                high = L::dot(high, codes[6], q1.z);
                high = L::dot(high, codes[7], q1.w);
                const uint32_t whole = kSub ? s.s0 * (low - kOffset * facts.sum0) + s.s1 * (high - kOffset * facts.sum1)
                                            : low + high - kOffset * (facts.sum0 + facts.sum1);
                sum[t] = __fmaf_rn(__fmul_rn(s.c, facts.d), L::to_float(whole), sum[t]);
                if constexpr (kForm == Form::kAffine) {
                    sum[t] = __fmaf_rn(-s.m, facts.e, sum[t]);
                } else if constexpr (kForm == Form::kAffineSub) {
                    const uint32_t minimums = s.m0 * facts.sum0 + s.m1 * facts.sum1;
                    sum[t] = __fmaf_rn(-s.m, __fmul_rn(facts.d, L::to_float(minimums)), sum[t]);
                }
            }
        }
    }
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
