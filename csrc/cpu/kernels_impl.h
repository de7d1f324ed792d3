// The kernels, once, over the lanes L of a processor (quant/decode.h). Included by the kernels_*.cpp, each compiled for
// its instruction set; L is in an unnamed namespace there, so nothing of this is shared between them. For the same
// reason nothing of the standard library is used here.
#pragma once

#include "cpu/kernels.h"
#include "numerics.h"
#include "quant/decode.h"

namespace moepool {

// kBatch activation rows at once: the codes of a block are decoded once for all of them.
template <class T, class L, int kBatch>
void multiply_blocks(const PanelJob &job, int first) {
    using W = typename L::W;
    using F = typename L::F;
    constexpr Form kForm = Decode<T>::kForm;
    constexpr bool kSub = kForm == Form::kSubScale || kForm == Form::kAffineSub;
    constexpr int kGroups = kPanelRows / L::kLanes;
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;

    F total[kGroups][kBatch] = {};  // +0 + acc_0 is acc_0, but for a -0, which no output keeps
    const uint32_t *words = job.panels;
    int64_t block = 0;  // of the activations
    for (int64_t column = 0; column < job.columns; column += kChunkColumns, words += kPanelWords) {
        const int64_t left = job.columns - column;
        const int width = left < kChunkColumns ? static_cast<int>(left) : kChunkColumns;
        F sum[kGroups][kBatch] = {};
        for (int b = 0; b < width / kBlockColumns; ++b, ++block) {
            for (int g = 0; g < kGroups; ++g) {
                const Panel<L> panel{words + g * L::kLanes, width / T::info.block};
                Scales<L> s;
                Decode<T>::scales(panel, b, s);
                W codes[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) codes[i] = Decode<T>::codes(panel, b, i);
#pragma GCC unroll 8
                for (int t = 0; t < kBatch; ++t) {
                    const Activation &a = *job.rows[first + t];
                    const int8_t *q = a.q + block * kBlockColumns;
                    const uint32_t sum0 = static_cast<uint32_t>(a.sums[2 * block]);
                    const uint32_t sum1 = static_cast<uint32_t>(a.sums[2 * block + 1]);
                    W low = {}, high = {};
#pragma GCC unroll 4
                    for (int i = 0; i < 4; ++i) {
                        low = L::dot(low, codes[i], q + 4 * i);
                        high = L::dot(high, codes[4 + i], q + 16 + 4 * i);
                    }
                    W whole;
                    if constexpr (kSub) {
                        whole = s.s0 * (low - Decode<T>::kOffset * sum0) + s.s1 * (high - Decode<T>::kOffset * sum1);
                    } else {
                        whole = low + high - Decode<T>::kOffset * (sum0 + sum1);
                    }
                    F &acc = sum[g][t];
                    acc = L::fma(s.c * a.d[block], L::to_float(whole), acc);
                    if constexpr (kForm == Form::kAffine) {
                        acc = L::fma(-s.m, L::broadcast(a.e[block]), acc);
                    } else if constexpr (kForm == Form::kAffineSub) {
                        acc = L::fma(-s.m, a.d[block] * L::to_float(s.m0 * sum0 + s.m1 * sum1), acc);
                    }
                }
            }
        }
        for (int g = 0; g < kGroups; ++g)
            for (int t = 0; t < kBatch; ++t) total[g][t] = total[g][t] + sum[g][t];
    }
    for (int g = 0; g < kGroups; ++g)
        for (int t = 0; t < kBatch; ++t) L::store(job.out[first + t] + g * L::kLanes, total[g][t]);
}

template <class T, class L, int kBatch>
void multiply_floats(const PanelJob &job, int first) {
    using F = typename L::F;
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;
    for (int g = 0; g < kPanelRows; g += L::kLanes) {
        F total[kBatch] = {};
        const uint32_t *words = job.panels + g;
        for (int64_t column = 0; column < job.columns; column += kChunkColumns, words += kPanelWords) {
            const int64_t left = job.columns - column;
            const int width = left < kChunkColumns ? static_cast<int>(left) : kChunkColumns;
            const Panel<L> panel{words, width};
            F sum[kBatch] = {};
            for (int k = 0; k < width; ++k) {
                const F weight = Decode<T>::weight(panel, k);
                for (int t = 0; t < kBatch; ++t)
                    sum[t] = L::fma(weight, L::broadcast(job.rows[first + t]->x[column + k]), sum[t]);
            }
            for (int t = 0; t < kBatch; ++t) total[t] = total[t] + sum[t];
        }
        for (int t = 0; t < kBatch; ++t) L::store(job.out[first + t] + g, total[t]);
    }
}

template <class T, class L, int kBatch>
void multiply(const PanelJob &job, int first) {
    if constexpr (Decode<T>::kForm == Form::kFloat)
        multiply_floats<T, L, kBatch>(job, first);
    else
        multiply_blocks<T, L, kBatch>(job, first);
}

template <class T, class L>
void panel(const PanelJob &job) {
    int first = 0;
    for (; first + 4 <= job.count; first += 4) multiply<T, L, 4>(job, first);
    if (job.count - first >= 2) multiply<T, L, 2>(job, first), first += 2;
    if (first < job.count) multiply<T, L, 1>(job, first);
}

// numerics.md section 1.
template <class L>
void quantise(const float *x, int64_t columns, int8_t *q, float *d, float *e, int32_t *sums) {
    for (int64_t b = 0; b < columns / kBlockColumns; ++b, x += kBlockColumns, q += kBlockColumns) {
        uint32_t largest = 0;  // of the magnitudes as bits, which are ordered as the floats are
        for (int i = 0; i < kBlockColumns; ++i) {
            const uint32_t magnitude = num::bits(x[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float a = num::from_bits(largest);
        sums[2 * b] = sums[2 * b + 1] = 0;
        if (num::nonfinite(largest) || a < 0x1p-118f) {
            for (int i = 0; i < kBlockColumns; ++i) q[i] = 0;
            d[b] = num::nonfinite(largest) ? num::nan() : 0.0f;
            e[b] = num::mp_mul(d[b], 0.0f);
            continue;
        }
        const float r = num::mp_div(127.0f, a);
        d[b] = num::mp_div(a, 127.0f);
        int32_t codes[kBlockColumns];
        for (int i = 0; i < kBlockColumns; ++i) codes[i] = num::rint_int(num::mp_mul(x[i], r));
        for (int i = 0; i < kBlockColumns; ++i) q[i] = static_cast<int8_t>(codes[i]);
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 16; ++i) sums[2 * b + half] += codes[16 * half + i];
        e[b] = num::mp_mul(d[b], static_cast<float>(sums[2 * b] + sums[2 * b + 1]));
    }
}

template <class L>
void swiglu(const float *gate, const float *up, float *out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = num::swiglu(gate[i], up[i]);
}

template <class L>
void add(const float *a, const float *b, float *out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = num::canonical(num::mp_add(a[i], b[i]));
}

template <class L>
void accumulate(float weight, const float *row, float *y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = num::mp_fma(weight, row[i], y[i]);
}

template <class L>
void finish(float *y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = num::finish(y[i]);
}

template <class L>
constexpr KernelSet make_kernel_set(const char *name, bool (*usable)()) {
    return {name,
            usable,
            {
#define X(T) panel<T, L>,
                MOEPOOL_QUANT_TYPES(X)
#undef X
            },
            quantise<L>,
            swiglu<L>,
            add<L>,
            accumulate<L>,
            finish<L>};
}

}  // namespace moepool
