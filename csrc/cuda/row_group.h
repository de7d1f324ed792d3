// What a warp does with a tile: 32 rows of a matrix, whose panels come chunk after chunk through a ring of stages,
// times the tile's activation rows. It adds the chunks' sums up in their order, and waits for no other warp.
#pragma once

#include <cstdint>

#include "cuda/decode_parts.h"

namespace moepool {
namespace cuda {
namespace {
namespace tiles {

constexpr int kSums = kMostDecodeTokens * 32;  // of a matrix or row group

// Blocks of x, past L1. Not inlined: it is for places that no tile of an expert in a slot has, and would take registers
// from all the rest.
__device__ __noinline__ void stage_blocks(uint8_t *target, const uint8_t *from, int blocks, int lane) {
    const int bytes = blocks * static_cast<int>(sizeof(ActivationBlock));
    for (int i = 16 * lane; i < bytes; i += 16 * 32)
        *reinterpret_cast<int4 *>(target + i) = __ldcg(reinterpret_cast<const int4 *>(from + i));
}

// Where the activation rows come from: x, some of whose rows come with the panels.
template <class T>
struct Inputs {
    static constexpr int kBeside = tiles::kBeside<T>;
    const Step &step;

    // Written by a kernel in front with plain stores, and read by bulk copies behind the wait for it.
    __device__ const uint8_t *row(int64_t index, const Part &part) const {
        return reinterpret_cast<const uint8_t *>(step.input + index * (part.columns / kBlockColumns));
    }
    __device__ Quad ask(int64_t, const Part &, int, int) const { return {}; }
    // One chunk of a row that did not come with a panel, to shared memory by a warp.
    __device__ void stage(Quad, uint8_t *target, int64_t index, const Part &part, int chunk, int lane) const {
        if constexpr (kFloats<T>)
            stage_floats(target, step, index * part.columns + int64_t{chunk} * kChunkColumns, chunk_width(part, chunk),
                         lane);
        else
            stage_blocks(target, row(index, part) + chunk * kStagedBytes<T>, chunk_width(part, chunk) / kBlockColumns,
                         lane);
    }
};
// Or gate/up, which hands the hidden rows over.
template <class T>
struct Hidden {
    static constexpr int kBeside = 0;
    const Step &step;
    uint32_t number;

    __device__ Quad ask(int64_t place, const Part &part, int chunk, int lane) const {
        return ask_hidden<T>(step, place, part, chunk, lane);
    }
    __device__ void stage(Quad asked, uint8_t *target, int64_t place, const Part &part, int chunk, int lane) const {
        await_hidden<T>(asked, target, step, place, part, chunk, number, lane);
    }
};

// A warp's part of the shared memory of a block, which has `sums` areas of totals. ring: stages of a warp.
template <class T, int kBeside>
struct WarpMemory {
    uint8_t *stages;
    uint8_t *staged;  // [kSubBatch]: chunks of rows that did not come with a panel
    float *totals;    // of the block: [of a matrix or row group][kMostDecodeTokens][32]
    uint64_t *barriers;

    __device__ WarpMemory(uint8_t *memory, int warp, int warps, int ring, int sums)
        : stages(memory + warp * ring * kStageBytes<T, kBeside>),
          staged(memory + warps * ring * kStageBytes<T, kBeside> + warp * kSubBatch * kStagedBytes<T>),
          totals(reinterpret_cast<float *>(memory +
                                           warps * (ring * kStageBytes<T, kBeside> + kSubBatch * kStagedBytes<T>))),
          barriers(reinterpret_cast<uint64_t *>(totals + sums * kSums) + warp * ring) {}
};

// 32 rows of a matrix times the places of a tile, by all lanes of a warp: ask_for_panels, know_tile, and run or keep,
// in this order; then the next, if any. ask_for_hidden comes where it suits in front of run, if the rows are hidden
// ones.
template <class T, class Source>
class RowGroup {
  public:
    __device__ RowGroup(const Part &part, Panels &panels, int lane)
        : part_(part),
          panels_(panels),
          lane_(lane),
          ahead_(min(panels.stages(), part.chunks)),
          panel_last_(chunk_bytes<T>(part.last_width)),
          row_last_(part.last_width / kBlockColumns * static_cast<int>(sizeof(ActivationBlock))) {}

    // Asks for the first panels of the row group, which lies `offset` bytes into a record.
    __device__ void ask_for_panels(const uint8_t *record, int64_t offset) {
        source_ = record + offset;
        offset_ = offset;
        first_ = panels_.next();
#pragma unroll 1
        for (int chunk = 0; chunk < ahead_; ++chunk) fetch(panels_.begin(), 0, 1, chunk);
    }
    // Asks for hidden rows, which do not come with panels. index: of the row of place `lane`.
    __device__ void ask_for_hidden(const Source &source, const DecodeTile &tile, int index) {
        count_ = tile.count;
        index_ = index;
        ask(source, 0);
    }
    // Says what the panels are for, and asks for the rows that come with them.
    __device__ void know_tile(const Source &source, const DecodeTile &tile, int index) {
        fill_ = tile.fill ? tile.fill + offset_ : nullptr;
        count_ = tile.count;
        index_ = index;
        expect_first(min(Source::kBeside, tile.count));
        if constexpr (Source::kBeside > 0) {
            const int mine = __shfl_sync(~0u, index, max(lane_ - 1, 0));
            if (lane_ > 0) source_ = source.row(mine, part_);
#pragma unroll 1
            for (int chunk = 0, stage = first_; chunk < ahead_; ++chunk, stage = panels_.after(stage))
                fetch(stage, 1, 1 + beside_, chunk);
        }
    }

    // totals[t][lane]: of place t of the tile.
    __device__ void run(const Source &source, uint8_t *staged, float *totals) {
#pragma unroll 1
        for (int chunk = 0; chunk < part_.chunks; ++chunk) {
            const uint8_t *panel = nullptr;
#pragma unroll 1
            for (int t = 0; t < count_; t += kSubBatch) {
                if (t + 1 == count_)
                    multiply<1>(panel, chunk, t, source, staged, totals);
                else
                    multiply<kSubBatch>(panel, chunk, t, source, staged, totals);
            }
            release(chunk);
        }
    }
    // In place of know_tile and run: the CPU computes it, it is only kept.
    __device__ void keep(const DecodeTile &tile) {
        fill_ = tile.fill + offset_;
        expect_first(0);
        for (int chunk = 0; chunk < part_.chunks; ++chunk) {
            take(chunk);
            release(chunk);
        }
    }

  private:
    static constexpr int kPanel = kPanelBytes<T>, kRow = kStagedBytes<T>;
    static_assert(kSubBatch == 2, "places by pairs, then one");

    __device__ bool is_last(int chunk) const { return chunk + 1 == part_.chunks; }
    __device__ void expect(int stage, int chunk) {
        panels_.expect(stage, is_last(chunk) ? panel_last_ + beside_ * row_last_ : kPanel + beside_ * kRow);
    }
    __device__ void expect_first(int beside) {
        beside_ = beside;
#pragma unroll 1
        for (int chunk = 0, stage = first_; chunk < ahead_; ++chunk, stage = panels_.after(stage)) expect(stage, chunk);
    }
    // Rows of the first places that do not come with panels are asked for a chunk ahead.
    __device__ void ask(const Source &source, int chunk) {
#pragma unroll
        for (int i = 0; i < kSubBatch; ++i)
            if (i < count_) asked_[i] = source.ask(__shfl_sync(~0u, index_, i), part_, chunk, lane_);
    }
    // Pieces of a stage: lane 0 has the panel, those behind it a row each.
    __device__ void fetch(int stage, int first, int end, int chunk) {
        const int whole = lane_ == 0 ? kPanel : kRow, at = lane_ == 0 ? 0 : kPanel + (lane_ - 1) * kRow;
        const int bytes = !is_last(chunk) ? whole : lane_ == 0 ? panel_last_ : row_last_;
        panels_.fetch(stage, first, end, source_, at, bytes);
        if (lane_ >= first) source_ += whole;
    }
    __device__ const uint8_t *take(int chunk) {
        const uint8_t *panel = panels_.take();
        if (fill_) panels_.copy_out(panel, fill_ + int64_t{chunk} * kPanel, is_last(chunk) ? panel_last_ : kPanel);
        return panel;
    }
    __device__ void release(int chunk) {
        if (fill_) panels_.finish_stores();
        __syncwarp();
        if (chunk + ahead_ >= part_.chunks) return;
        const int stage = panels_.begin();
        expect(stage, chunk + ahead_);
        fetch(stage, 0, 1 + beside_, chunk + ahead_);
    }
    // The panel, taken if it is not yet, with places t and those behind it.
    template <int kBatch>
    __device__ void multiply(const uint8_t *&panel, int chunk, int t, const Source &source, uint8_t *staged,
                             float *totals) {
        const bool beside = t < beside_;
        if (!beside) {
            __syncwarp();  // those in front of them are multiplied
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int index = __shfl_sync(~0u, index_, t + i);
                const Quad asked = t == 0 ? asked_[i] : source.ask(index, part_, chunk, lane_);
                source.stage(asked, staged + i * kRow, index, part_, chunk, lane_);
            }
            if (t == 0 && !is_last(chunk)) ask(source, chunk + 1);
            __syncwarp();
        }
        if (!panel) panel = take(chunk);
        float sum[kBatch] = {}, *total = totals + t * 32 + lane_;
        multiply_panel<T, kBatch>(panel, chunk_width(part_, chunk), beside ? panel + kPanel + t * kRow : staged, lane_,
                                  sum);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) total[i * 32] = __fadd_rn(chunk == 0 ? 0.0f : total[i * 32], sum[i]);
    }

    const Part &part_;
    Panels &panels_;
    const int lane_, ahead_, panel_last_, row_last_;
    const uint8_t *source_ = nullptr;  // of the lane's next piece
    int64_t offset_ = 0;
    uint8_t *fill_ = nullptr;
    int first_ = 0, count_ = 0, index_ = 0;
    int beside_ = 0;  // rows that come with a panel: of the first places
    Quad asked_[kSubBatch] = {};
};

}  // namespace tiles
}  // namespace
}  // namespace cuda
}  // namespace moepool
