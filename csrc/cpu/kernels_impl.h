// The kernels, once, over the lanes L of a processor. Included by the kernels_*.cpp, each compiled for its instruction
// set; L is in an unnamed namespace there, so nothing of this is shared between them. For the same reason nothing of
// the standard library is used here.
//
// Beside what quant/decode.h asks of it, L has
//   store(p, f)         a float a lane
//   broadcast(x)        a float in all lanes
//   splat(x)            an int32 in all lanes
//   kSide               vectors of rows that its registers hold the codes of a block for: what is loaded of an
//                       activation then serves them all. kFloatSide: the same for the float types, for one column
//   kReadsPages         whether pages are left to its processors, which read them ahead as fast as memory gives them
//   zero(most)          the code that dot takes for zero, if codes go up to `most`
//   dot<kMost, from, n>(a, u, q)   adds to each a[i], i < kSide, the sum over the words u[i][from], ... (n of them) of
//                       each of their bytes (up to kMost) less zero(kMost), times the q of its column, -127 .. 127
#pragma once

#include "cpu/kernels.h"
#include "cpu/panel_scales.h"
#include "numerics.h"
#include "quant/decode.h"

namespace moepool {

// The steps of section 3 behind the sum over chunks.
template <class L>
void finish_rows(const PanelJob &job) {
    for (int t = 0; t < job.count; ++t) {
        float *y = job.out[t];
        if (job.scale)
            for (int r = 0; r < kPanelRows; ++r) y[r] = num::mp_mul(y[r], *job.scale);
        if (job.bias)
            for (int r = 0; r < kPanelRows; ++r) y[r] = num::mp_add(y[r], job.bias[r]);
        for (int r = 0; r < kPanelRows; ++r) y[r] = num::finish(y[r]);
    }
}

// Panels are read one after another, but the words of one not quite in their order, which spoils the processor's own
// prefetching. So every step of a panel asks for the next few lines of the panel after the next, of job.next behind the
// last ones. What some processors do better (L::kReadsPages) is a last segment of pages, read for few activations: then
// only what lies before that segment is asked for.
template <class T, class L, int kSteps>
struct Prefetch {
    static constexpr int kLineWords = 16;
    static constexpr int kWords = T::info.panel_words(kChunkColumns) * kPanelRows;
    static constexpr int kFirst = T::info.word(1, kChunkColumns / T::info.block) * kPanelRows;
    static constexpr bool kPages = L::kReadsPages && (kWords - kFirst) * 4 >= 8192;
    static constexpr int kLines = (kWords / kLineWords + kSteps - 1) / kSteps;
    const uint32_t *second;  // the panel after the next
    const bool ahead;

    MOEPOOL_INLINE Prefetch(const PanelJob &job, const uint32_t *panel, int64_t column)
        : second(panel + 2 * kWords), ahead(!kPages || job.count > 3) {
        if (!ahead) {
            for (int word = 0; word < kFirst; word += kLineWords) __builtin_prefetch(panel + word);
        } else if (column + 2 * kChunkColumns >= job.columns) {
            second = column + kChunkColumns >= job.columns ? job.next + kWords : job.next;
        }
    }
    // Part 0 .. 7 of a step. The compiler moves no load from one step to another, which would bunch them; within one
    // it may, so that what several parts need is loaded and decoded once.
    MOEPOOL_INLINE void operator()(int step, int part) const {
        if (!kPages || ahead) {
            const uint32_t *line = second + step * kLines * kLineWords;
#pragma GCC unroll 4
            for (int i = kLines * part / 8; i < kLines * (part + 1) / 8; ++i)
                __builtin_prefetch(line + i * kLineWords, 0, 2);
        }
        if (part == 0) asm volatile("" ::: "memory");
    }
};

// What section 2 makes of a block's integer `whole`.
template <Form kForm, class L>
MOEPOOL_INLINE typename L::F add_block(const Scales<L> &s, typename L::W whole, const ActivationChunk &a, int b,
                                       typename L::F acc) {
    acc = L::fma(s.c * a.d[b], L::to_float(whole), acc);
    if constexpr (kForm == Form::kAffine) {
        acc = L::fma(-s.m, L::broadcast(a.e[b]), acc);
    } else if constexpr (kForm == Form::kAffineSub) {
        const typename L::W minimum = s.m0 * L::splat(a.sums[0][b]) + s.m1 * L::splat(a.sums[1][b]);
        acc = L::fma(-s.m, a.d[b] * L::to_float(minimum), acc);
    }
    return acc;
}

template <bool kValue>
struct Flag {
    static constexpr bool value = kValue;
};

// Types whose panels are unrolled for one activation, too: decoding is the limit, or, for super-blocks where pages are
// asked for ahead, a loop was slower.
template <class T, class L>
constexpr bool kAlwaysUnrolled = T::info.block == kChunkColumns && !L::kReadsPages;
template <class L>
constexpr bool kAlwaysUnrolled<Q2_K, L> = true;
template <class L>
constexpr bool kAlwaysUnrolled<Q3_K, L> = true;
template <class L>
constexpr bool kAlwaysUnrolled<Q5_K, L> = true;
template <class L>
constexpr bool kAlwaysUnrolled<IQ4_XS, L> = true;
template <class L>
constexpr bool kAlwaysUnrolled<MXFP4, L> = L::kLanes == 16;  // eight lanes take longer unrolled

// The activations are the innermost loop: the codes of a block are decoded once, into registers, for all of them.
template <class T, class L>
void multiply_blocks(const PanelJob &job) {
    using W = typename L::W;
    using F = typename L::F;
    constexpr Form kForm = Decode<T>::kForm;
    constexpr bool kSub = kForm == Form::kSubScale || kForm == Form::kAffineSub;
    constexpr int kMost = Decode<T>::kMostCode;
    constexpr int kOffset = Decode<T>::kOffset - L::zero(kMost);
    constexpr int kSide = L::kSide;
    constexpr int kGroups = kPanelRows / (L::kLanes * kSide);
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;

    F total[kGroups][kMostRows][kSide];  // +0 + acc_0 is acc_0, but for a -0, which no output keeps
    for (int g = 0; g < kGroups; ++g)
        for (int t = 0; t < job.count; ++t)
            for (int i = 0; i < kSide; ++i) total[g][t][i] = F{};
    const auto add_panel = [&](int64_t chunk, auto flag) __attribute__((always_inline)) {
        constexpr bool kUnrolled = decltype(flag)::value;
        const int64_t left = job.columns - chunk * kChunkColumns;
        const int width = kUnrolled || left >= kChunkColumns ? kChunkColumns : static_cast<int>(left);
        const uint32_t *words = job.panels + chunk * kPanelWords;
        const Prefetch<T, L, kGroups * kChunkBlocks> prefetch(job, words, chunk * kChunkColumns);
        // What the sums of a block begin with: it takes the offset back.
        int32_t start[kMostRows][2][kChunkBlocks];
        for (int t = 0; t < job.count; ++t) {
            const ActivationChunk &a = job.rows[t].chunks[chunk];
            for (int b = 0; b < width / kBlockColumns; ++b) {
                start[t][0][b] = -kOffset * (kSub ? a.sums[0][b] : a.sums[0][b] + a.sums[1][b]);
                start[t][1][b] = -kOffset * a.sums[1][b];
            }
        }
        for (int g = 0; g < kGroups; ++g) {
            F sum[kMostRows][kSide];
            for (int t = 0; t < job.count; ++t)
                for (int i = 0; i < kSide; ++i) sum[t][i] = F{};
            const auto panel = [&](int i) {
                return Panel<L>{words + (g * kSide + i) * L::kLanes, width / T::info.block};
            };
            const SideScales<T, L, L::kSide> scales{panel};
            const auto block = [&](int b) __attribute__((always_inline)) {
                Scales<L> s[kSide];
                W codes[kSide][8];
#pragma GCC unroll 2
                for (int i = 0; i < kSide; ++i) scales.side[i](b, s[i]);
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) {
                    prefetch(g * kChunkBlocks + b, j);
#pragma GCC unroll 2
                    for (int i = 0; i < kSide; ++i) codes[i][j] = Decode<T>::codes(panel(i), b, j);
                }
                for (int t = 0; t < job.count; ++t) {
                    const ActivationChunk &a = job.rows[t].chunks[chunk];
                    const int8_t *q = a.q + b * kBlockColumns;
                    W low[kSide], high[kSide];
#pragma GCC unroll 2
                    for (int i = 0; i < kSide; ++i) {
                        low[i] = L::splat(start[t][0][b]);
                        high[i] = L::splat(start[t][1][b]);
                    }
                    if constexpr (kSub) {
                        L::template dot<kMost, 0, 4>(low, codes, q);
                        L::template dot<kMost, 4, 4>(high, codes, q);
                    } else {
                        L::template dot<kMost, 0, 8>(low, codes, q);
                    }
#pragma GCC unroll 2
                    for (int i = 0; i < kSide; ++i) {
                        W whole = low[i];
                        if constexpr (kSub) whole = s[i].s0 * low[i] + s[i].s1 * high[i];
                        sum[t][i] = add_block<kForm, L>(s[i], whole, a, b, sum[t][i]);
                    }
                }
            };
            if constexpr (kUnrolled) {
#pragma GCC unroll 8
                for (int b = 0; b < kChunkBlocks; ++b) block(b);
            } else {
                for (int b = 0; b < width / kBlockColumns; ++b) block(b);
            }
            for (int t = 0; t < job.count; ++t)
                for (int i = 0; i < kSide; ++i) total[g][t][i] = total[g][t][i] + sum[t][i];
        }
    };
    // Unrolled, the places of all words are constants. But what a processor reads ahead by itself are the loads of a
    // loop, and for one activation memory is the limit.
    int64_t chunk = 0;
    if (kAlwaysUnrolled<T, L> || job.count > 1)
        for (; (chunk + 1) * kChunkColumns <= job.columns; ++chunk) add_panel(chunk, Flag<true>{});
    if constexpr (!kAlwaysUnrolled<T, L> || T::info.block < kChunkColumns)
        for (; chunk * kChunkColumns < job.columns; ++chunk) add_panel(chunk, Flag<false>{});
    for (int g = 0; g < kGroups; ++g)
        for (int t = 0; t < job.count; ++t)
            for (int i = 0; i < kSide; ++i) L::store(job.out[t] + (g * kSide + i) * L::kLanes, total[g][t][i]);
}

template <class T, class L, int kBatch>
void multiply_floats(const PanelJob &job, int first) {
    using F = typename L::F;
    constexpr int kSide = L::kFloatSide;
    constexpr int kGroups = kPanelRows / (L::kLanes * kSide);
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;
    F total[kGroups][kBatch][kSide] = {};
    const uint32_t *words = job.panels;
    for (int64_t column = 0; column < job.columns; column += kChunkColumns, words += kPanelWords) {
        const int64_t left = job.columns - column;
        const int width = left < kChunkColumns ? static_cast<int>(left) : kChunkColumns;
        for (int g = 0; g < kGroups; ++g) {
            F sum[kBatch][kSide] = {};
            for (int k = 0; k < width; ++k) {
                F weight[kSide];
                for (int i = 0; i < kSide; ++i)
                    weight[i] = Decode<T>::weight(Panel<L>{words + (g * kSide + i) * L::kLanes, width}, k);
                for (int t = 0; t < kBatch; ++t)
                    for (int i = 0; i < kSide; ++i)
                        sum[t][i] = L::fma(weight[i], L::broadcast(job.rows[first + t].x[column + k]), sum[t][i]);
            }
            for (int t = 0; t < kBatch; ++t)
                for (int i = 0; i < kSide; ++i) total[g][t][i] = total[g][t][i] + sum[t][i];
        }
    }
    for (int g = 0; g < kGroups; ++g)
        for (int t = 0; t < kBatch; ++t)
            for (int i = 0; i < kSide; ++i) L::store(job.out[first + t] + (g * kSide + i) * L::kLanes, total[g][t][i]);
}

template <class T, class L>
void panel(const PanelJob &job) {
    if constexpr (Decode<T>::kForm == Form::kFloat) {
        int first = 0;
        for (; first + 4 <= job.count; first += 4) multiply_floats<T, L, 4>(job, first);
        if (job.count - first >= 2) multiply_floats<T, L, 2>(job, first), first += 2;
        if (first < job.count) multiply_floats<T, L, 1>(job, first);
    } else {
        multiply_blocks<T, L>(job);
    }
    finish_rows<L>(job);
}

// numerics.md section 1.
template <class L>
void quantise(const float *x, int64_t first, int64_t count, ActivationChunk *row) {
    for (int64_t block = first; block < first + count; ++block, x += kBlockColumns) {
        ActivationChunk &a = row[block / kChunkBlocks];
        const int b = static_cast<int>(block % kChunkBlocks);
        int8_t *q = a.q + b * kBlockColumns;
        uint32_t largest = 0;  // of the magnitudes as bits, which are ordered as the floats are
        for (int i = 0; i < kBlockColumns; ++i) {
            const uint32_t magnitude = num::bits(x[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float most = num::from_bits(largest);
        a.sums[0][b] = a.sums[1][b] = 0;
        if (num::nonfinite(largest) || most < 0x1p-118f) {
            for (int i = 0; i < kBlockColumns; ++i) q[i] = 0;
            a.d[b] = num::nonfinite(largest) ? num::nan() : 0.0f;
            a.e[b] = num::mp_mul(a.d[b], 0.0f);
            continue;
        }
        const float r = num::mp_div(127.0f, most);
        a.d[b] = num::mp_div(most, 127.0f);
        int32_t codes[kBlockColumns];
        for (int i = 0; i < kBlockColumns; ++i) codes[i] = num::rint_int(num::mp_mul(x[i], r));
        for (int i = 0; i < kBlockColumns; ++i) q[i] = static_cast<int8_t>(codes[i]);
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 16; ++i) a.sums[half][b] += codes[16 * half + i];
        a.e[b] = num::mp_mul(a.d[b], static_cast<float>(a.sums[0][b] + a.sums[1][b]));
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

// numerics.md section 5.
template <class L>
void combine(const int32_t *ids, const float *weights, int64_t k, const float *rows, int64_t stride, float *y,
             int64_t columns) {
    // So many vectors of a row at once: rows may lie so that no two of their lines stay in the first cache.
    constexpr int kVectors = 4, kStep = kVectors * L::kLanes;
    const auto lanes = [](const float *f) { return L::as_float(L::load(reinterpret_cast<const uint32_t *>(f))); };
    int64_t column = 0;
    for (; column + kStep <= columns; column += kStep) {
        typename L::F sum[kVectors] = {};
        for (int64_t j = 0; j < k; ++j) {
            if (ids[j] < 0) continue;
            const float *row = rows + j * stride + column;
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v)
                sum[v] = L::fma(L::broadcast(weights[j]), lanes(row + v * L::kLanes), sum[v]);
        }
        for (int v = 0; v < kVectors; ++v) L::store(y + column + v * L::kLanes, sum[v]);
    }
    for (; column < columns; ++column) {
        y[column] = 0.0f;
        for (int64_t j = 0; j < k; ++j)
            if (ids[j] >= 0) y[column] = num::mp_fma(weights[j], rows[j * stride + column], y[column]);
    }
    for (column = 0; column < columns; ++column) y[column] = num::finish(y[column]);
}

template <class L>
constexpr KernelSet make_kernel_set(const char *name, const char *(*lacks)()) {
    return {name,
            lacks,
            {
#define X(T) panel<T, L>,
                MOEPOOL_QUANT_TYPES(X)
#undef X
            },
            quantise<L>,
            swiglu<L>,
            add<L>,
            combine<L>};
}

}  // namespace moepool
