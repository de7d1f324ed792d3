// What the decode kernels of a single token and of more have in common.
#pragma once

#include <cstdint>

#include "cuda/chunk.h"
#include "cuda/decode_config.h"
#include "cuda/decode_kernels.h"
#include "cuda/handover.h"
#include "cuda/launch.h"
#include "cuda/pipeline.h"
#include "cuda/step.h"

namespace moepool {
namespace cuda {
namespace {

static_assert(sizeof(ActivationBlock) == kActivationBlockBytes);

template <class T>
__device__ __forceinline__ int chunk_bytes(int width) {
    return 4 * kPanelRows * first_word<T, 4>(width / T::info.block);
}
__device__ __forceinline__ int chunk_width(const Part &part, int chunk) {
    return chunk + 1 < part.chunks ? kChunkColumns : part.last_width;
}

// Activations of one chunk, staged by the warp that uses them.
template <class T>
struct StagedRows {
    const uint8_t *base;
    __device__ __forceinline__ const ActivationBlock &block(int t, int b) const {
        return reinterpret_cast<const ActivationBlock *>(base + t * kStagedBytes<T>)[b];
    }
    __device__ __forceinline__ float x(int t, int k) const {
        return reinterpret_cast<const float *>(base + t * kStagedBytes<T>)[k];
    }
    __device__ __forceinline__ int4 q(int t, int b, int half) const {
        return reinterpret_cast<const int4 *>(block(t, b).q)[half];
    }
    __device__ __forceinline__ BlockFacts facts(int t, int b) const {
        const float4 f = *reinterpret_cast<const float4 *>(&block(t, b).d);
        return {f.x, f.y, __float_as_uint(f.z), __float_as_uint(f.w)};
    }
};

// Columns of x from an index on, as floats, to shared memory by a warp. Past L1: what wrote them may have been running
// when this kernel began.
__device__ __forceinline__ void stage_floats(uint8_t *target, const Step &step, int64_t first, int width, int lane) {
    for (int i = lane; i < width; i += 32)
        reinterpret_cast<float *>(target)[i] = widen_past_l1(step.x, step.x_dtype, first + i);
}

// Where a block of 32 hidden columns of a place is handed over.
template <class Index>
__device__ __forceinline__ uint4 *handed_block(const Step &step, Index place, Index blocks, Index block) {
    return step.handed + (place * blocks + block) * kQuads;
}
// One chunk of the hidden row of a place, by the warp that uses it: its blocks may be asked for ahead; they come to
// shared memory when gate/up has handed them over, and then __syncwarp is due.
template <class T>
__device__ __forceinline__ Quad ask_hidden(const Step &step, int64_t place, const Part &part, int chunk, int lane) {
    if constexpr (kFloats<T>) {
        return {};
    } else {
        const int64_t blocks = part.columns / kBlockColumns;
        return ask_blocks(handed_block(step, place, blocks, chunk * int64_t{kChunkColumns / kBlockColumns}),
                          chunk_width(part, chunk) / kBlockColumns, lane);
    }
}
template <class T>
__device__ __forceinline__ void await_hidden(Quad asked, uint8_t *target, const Step &step, int64_t place,
                                             const Part &part, int chunk, uint32_t number, int lane) {
    const int width = chunk_width(part, chunk);
    if constexpr (kFloats<T>) {
        const uint64_t *from = step.handed_x + place * part.columns + int64_t{chunk} * kChunkColumns;
        for (int i = lane; i < width; i += 32) reinterpret_cast<float *>(target)[i] = await_float(from + i, number);
    } else {
        const int64_t blocks = part.columns / kBlockColumns;
        await_blocks(asked, handed_block(step, place, blocks, chunk * int64_t{kChunkColumns / kBlockColumns}),
                     width / kBlockColumns, number, lane, target);
    }
}

// A panel in shared memory times kBatch staged rows, this lane's row of weights, added to the sums.
template <class T, int kBatch>
__device__ __forceinline__ void multiply_panel(const uint8_t *panel, int width, const uint8_t *staged, int lane,
                                               float (&sum)[kBatch]) {
    const auto *words = reinterpret_cast<const uint32_t *>(panel) + lane;
    const StagedRows<T> rows{staged};
    if (width == kChunkColumns)
        multiply_chunk<T, SharedLane, kBatch, true>(words, width, rows, sum);
    else if constexpr (T::info.block < kChunkColumns)
        multiply_chunk<T, SharedLane, kBatch, false>(words, width, rows, sum);
}
inline dim3 threads(const DecodeConfig &c) { return dim3(32, static_cast<unsigned>(c.warps)); }

__device__ __forceinline__ void copy_tail(const Residents &residents, const DecodeTile &tile) {
    const int threads = 32 * blockDim.y;
    for (int64_t i = residents.tail + 16 * (32 * threadIdx.y + threadIdx.x); i < residents.record_bytes;
         i += 16 * threads)
        *reinterpret_cast<int4 *>(tile.fill + i) = *reinterpret_cast<const int4 *>(tile.record + i);
}

// Hidden columns 32 * group .. of a place, one a lane: column r, 0 if it is of padding. Index: int, where there is no
// register to spare.
template <class Index>
__device__ __forceinline__ void hand_hidden(const Step &step, const Part &part, Index place, int group, int64_t r,
                                            float hidden, uint32_t number) {
    const int lane = threadIdx.x;
    if (step.handed)
        hand_over(quantise(hidden), lane, handed_block<Index>(step, place, part.row_groups, group), number);
    else if (r < part.rows)
        hand_over(hidden, step.handed_x + place * part.rows + r, number);
}

// From a lane's sums of gate and up. The padding rows of the last panel enter no sum.
__device__ __forceinline__ float hidden_of(const Part &gate, const Part &up, const uint8_t *record, int64_t r, float g,
                                           float u) {
    return r < gate.rows ? num::swiglu(finish_row(g, record, gate.scale, gate.bias, r),
                                       finish_row(u, record, up.scale, up.bias, r))
                         : 0.0f;
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
