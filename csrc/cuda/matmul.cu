#include "cuda/matmul.h"

#include <algorithm>

#include "cuda/lane.h"
#include "cuda/runtime.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kMostWarps = 8;  // of a block: chunks of a row group that are computed side by side

struct Arguments {
    const Tile *tiles;
    const int32_t *order;
    Activations activations;
    float *out;
    int64_t rows, columns, row_groups;
    int64_t panels, row_group, bias, scale;  // of the matrix in a record, bytes
};

// One chunk of one row, times the tile's activation rows: numerics.md section 2. kFull: all 256 columns.
template <class T, int kBatch, bool kFull>
__device__ __forceinline__ void multiply_chunk(const uint32_t *words, int width, int64_t column,
                                               const Arguments &a, const int64_t (&row)[kBatch],
                                               float (&sum)[kBatch]) {
    constexpr Form kForm = Decode<T>::kForm;
    const Panel<Lane> panel{words, kFull ? kChunkColumns / T::info.block : width / T::info.block};
    if constexpr (kForm == Form::kFloat) {
#pragma unroll 8
        for (int k = 0; k < (kFull ? kChunkColumns : width); ++k) {
            const float weight = Decode<T>::weight(panel, k);
#pragma unroll
            for (int t = 0; t < kBatch; ++t)
                sum[t] = __fmaf_rn(weight, __ldg(a.activations.x + row[t] * a.columns + column + k), sum[t]);
        }
    } else {
        constexpr bool kSub = kForm == Form::kSubScale || kForm == Form::kAffineSub;
        constexpr uint32_t kOffset = Decode<T>::kOffset;
#pragma unroll 2
        for (int b = 0; b < (kFull ? kChunkColumns : width) / kBlockColumns; ++b) {
            Scales<Lane> s;
            Decode<T>::scales(panel, b, s);
            uint32_t codes[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) codes[i] = Decode<T>::codes(panel, b, i);
#pragma unroll
            for (int t = 0; t < kBatch; ++t) {
                const int64_t block = row[t] * (a.columns / kBlockColumns) + column / kBlockColumns + b;
                const int4 *q = reinterpret_cast<const int4 *>(a.activations.q + block * kBlockColumns);
                const int4 q0 = __ldg(q), q1 = __ldg(q + 1);
                const int2 sums = __ldg(a.activations.sums + block);
                const uint32_t sum0 = static_cast<uint32_t>(sums.x), sum1 = static_cast<uint32_t>(sums.y);
                const float d = __ldg(a.activations.d + block);
                uint32_t low = 0, high = 0;
                low = Lane::dot(low, codes[0], q0.x);
                low = Lane::dot(low, codes[1], q0.y);
                low = Lane::dot(low, codes[2], q0.z);
                low = Lane::dot(low, codes[3], q0.w);
                high = Lane::dot(high, codes[4], q1.x);
                high = Lane::dot(high, codes[5], q1.y);
                high = Lane::dot(high, codes[6], q1.z);
                high = Lane::dot(high, codes[7], q1.w);
                const uint32_t whole = kSub ? s.s0 * (low - kOffset * sum0) + s.s1 * (high - kOffset * sum1)
                                            : low + high - kOffset * (sum0 + sum1);
                sum[t] = __fmaf_rn(__fmul_rn(s.c, d), Lane::to_float(whole), sum[t]);
                if constexpr (kForm == Form::kAffine) {
                    sum[t] = __fmaf_rn(-s.m, __ldg(a.activations.e + block), sum[t]);
                } else if constexpr (kForm == Form::kAffineSub) {
                    sum[t] = __fmaf_rn(-s.m, __fmul_rn(d, Lane::to_float(s.m0 * sum0 + s.m1 * sum1)), sum[t]);
                }
            }
        }
    }
}

// A block computes one row group of one tile. Each warp takes a chunk, a lane a row; the chunks' sums are then added
// in their order (numerics.md section 3) by the warp that owns the place.
template <class T, int kBatch>
__global__ void __launch_bounds__(32 * kMostWarps) multiply_kernel(const Arguments a) {
    __shared__ float partial[kMostWarps][kBatch][32];
    __shared__ float total[kBatch][32];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const Tile tile = a.tiles[blockIdx.x / a.row_groups];
    const int64_t group = blockIdx.x % a.row_groups;
    const uint32_t *words =
        reinterpret_cast<const uint32_t *>(tile.record + a.panels + group * a.row_group) + lane;
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;

    int64_t row[kBatch];  // of the activations; a short tile repeats its last place, and drops the copies
#pragma unroll
    for (int t = 0; t < kBatch; ++t)
        row[t] = a.order[tile.first + min(t, tile.count - 1)] / a.activations.per_row;
    for (int t = warp; t < kBatch; t += warps) total[t][lane] = 0.0f;

    for (int64_t first = 0; first < a.columns; first += int64_t{kChunkColumns} * warps) {
        const int64_t column = first + int64_t{kChunkColumns} * warp;
        float sum[kBatch] = {};
        if (column < a.columns) {
            const uint32_t *panel = words + column / kChunkColumns * kPanelWords;
            if (a.columns - column >= kChunkColumns)
                multiply_chunk<T, kBatch, true>(panel, kChunkColumns, column, a, row, sum);
            else if constexpr (T::info.block < kChunkColumns)
                multiply_chunk<T, kBatch, false>(panel, static_cast<int>(a.columns - column), column, a, row, sum);
        }
#pragma unroll
        for (int t = 0; t < kBatch; ++t) partial[warp][t][lane] = sum[t];
        __syncthreads();
        const int64_t chunks = min(static_cast<int64_t>(warps), (a.columns - first + kChunkColumns - 1) / kChunkColumns);
        for (int t = warp; t < kBatch; t += warps)
            for (int c = 0; c < chunks; ++c) total[t][lane] = __fadd_rn(total[t][lane], partial[c][t][lane]);
        __syncthreads();
    }

    const int64_t r = group * kPanelRows + lane;
    if (r >= a.rows) return;
    for (int t = warp; t < tile.count; t += warps) {
        float y = total[t][lane];
        if (a.scale >= 0) y = __fmul_rn(y, *reinterpret_cast<const float *>(tile.record + a.scale));
        if (a.bias >= 0) y = __fadd_rn(y, reinterpret_cast<const float *>(tile.record + a.bias)[r]);
        a.out[int64_t{a.order[tile.first + t]} * a.rows + r] = num::finish(y);
    }
}

template <class T>
void launch(const Arguments &a, int64_t blocks, int warps, int largest, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(blocks)), threads(32, static_cast<unsigned>(warps));
    if (largest <= 1)
        multiply_kernel<T, 1><<<grid, threads, 0, stream>>>(a);
    else if (largest <= 2)
        multiply_kernel<T, 2><<<grid, threads, 0, stream>>>(a);
    else if (largest <= 4)
        multiply_kernel<T, 4><<<grid, threads, 0, stream>>>(a);
    else
        multiply_kernel<T, kTilePlaces><<<grid, threads, 0, stream>>>(a);
    check(cudaGetLastError(), "launching matmul_id");
}

}  // namespace

void multiply(const Matrix &m, const Tile *tiles, int64_t count, int largest, const int32_t *order,
              const Activations &activations, float *out, cudaStream_t stream) {
    if (count == 0) return;
    using Launch = void (*)(const Arguments &, int64_t, int, int, cudaStream_t);
    static constexpr Launch table[] = {
#define X(T) launch<T>,
        MOEPOOL_QUANT_TYPES(X)
#undef X
    };
    const int64_t chunks = (m.columns + kChunkColumns - 1) / kChunkColumns;
    const int warps = static_cast<int>(std::min<int64_t>(kMostWarps, chunks));
    // The grid's x axis alone: the others end at 65,535 blocks. Its own end is 2^31 - 1.
    const int64_t tiles_a_launch = std::max<int64_t>(1, INT32_MAX / m.row_groups());
    for (int64_t done = 0; done < count; done += tiles_a_launch) {
        const Arguments a{tiles + done, order,       activations, out,    m.rows, m.columns, m.row_groups(),
                          m.panels,     m.row_group, m.bias,      m.scale};
        table[m.type_index](a, std::min(tiles_a_launch, count - done) * m.row_groups(), warps, largest, stream);
    }
}

}  // namespace cuda
}  // namespace moepool
