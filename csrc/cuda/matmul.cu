#include "cuda/matmul.h"

#include <algorithm>

#include "cuda/chunk.h"
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

// Activation rows in device memory, from a column on.
template <int kBatch>
struct DeviceRows {
    const Activations &a;
    int64_t columns, column;
    const int64_t (&row)[kBatch];

    __device__ __forceinline__ int64_t block(int t, int b) const {
        return (row[t] * columns + column) / kBlockColumns + b;
    }
    __device__ __forceinline__ float x(int t, int k) const { return __ldg(a.x + row[t] * columns + column + k); }
    __device__ __forceinline__ int4 q(int t, int b, int half) const {
        return __ldg(reinterpret_cast<const int4 *>(a.q + block(t, b) * kBlockColumns) + half);
    }
    __device__ __forceinline__ BlockFacts facts(int t, int b) const {
        const int64_t at = block(t, b);
        const int2 sums = __ldg(a.sums + at);
        return {__ldg(a.d + at), __ldg(a.e + at), static_cast<uint32_t>(sums.x), static_cast<uint32_t>(sums.y)};
    }
};

// A block computes one row group of one tile. Each warp takes a chunk, a lane a row; the chunks' sums are then added
// in their order (numerics.md section 3) by the warp that owns the place.
template <class T, int kBatch>
__global__ void __launch_bounds__(32 * kMostWarps) multiply_kernel(const Arguments a) {
    __shared__ float partial[kMostWarps][kBatch][32];
    __shared__ float total[kBatch][32];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const Tile tile = a.tiles[blockIdx.x / a.row_groups];
    const int64_t group = blockIdx.x % a.row_groups;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(tile.record + a.panels + group * a.row_group) + lane;
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;

    int64_t row[kBatch];  // of the activations; a short tile repeats its last place, and drops the copies
#pragma unroll
    for (int t = 0; t < kBatch; ++t) row[t] = a.order[tile.first + min(t, tile.count - 1)] / a.activations.per_row;
    for (int t = warp; t < kBatch; t += warps) total[t][lane] = 0.0f;

    for (int64_t first = 0; first < a.columns; first += int64_t{kChunkColumns} * warps) {
        const int64_t column = first + int64_t{kChunkColumns} * warp;
        float sum[kBatch] = {};
        if (column < a.columns) {
            const uint32_t *panel = words + column / kChunkColumns * kPanelWords;
            const DeviceRows<kBatch> rows{a.activations, a.columns, column, row};
            if (a.columns - column >= kChunkColumns)
                multiply_chunk<T, Lane, kBatch, true>(panel, kChunkColumns, rows, sum);
            else if constexpr (T::info.block < kChunkColumns)
                multiply_chunk<T, Lane, kBatch, false>(panel, static_cast<int>(a.columns - column), rows, sum);
        }
#pragma unroll
        for (int t = 0; t < kBatch; ++t) partial[warp][t][lane] = sum[t];
        __syncthreads();
        const int64_t chunks =
            min(static_cast<int64_t>(warps), (a.columns - first + kChunkColumns - 1) / kChunkColumns);
        for (int t = warp; t < kBatch; t += warps)
            for (int c = 0; c < chunks; ++c) total[t][lane] = __fadd_rn(total[t][lane], partial[c][t][lane]);
        __syncthreads();
    }

    const int64_t r = group * kPanelRows + lane;
    if (r >= a.rows) return;
    for (int t = warp; t < tile.count; t += warps)
        a.out[int64_t{a.order[tile.first + t]} * a.rows + r] =
            finish_row(total[t][lane], tile.record, a.scale, a.bias, r);
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
        const Arguments a{tiles + done,   order,    activations, out,    m.rows, m.columns,
                          m.row_groups(), m.panels, m.row_group, m.bias, m.scale};
        table[m.type_index](a, std::min(tiles_a_launch, count - done) * m.row_groups(), warps, largest, stream);
    }
}

}  // namespace cuda
}  // namespace moepool
