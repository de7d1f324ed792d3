// A decode step of more tokens than one, or of gate and up of two types, on the device.
//
// A warp multiplies 32 rows of a matrix with the places of a tile, chunk after chunk, and adds the chunks' sums up in
// their order. So no warp waits for another one, but where gate's rows and up's make hidden ones.
#include "cuda/decode_parts.h"
#include "cuda/doorbell_device.h"

namespace moepool {
namespace cuda {

namespace {

using namespace tiles;

constexpr unsigned kAnswerBlocks = 8;  // of down_tiles, that take the CPU's answer
constexpr int kSums = kMostDecodeTokens * 32;

// Activation rows: blocks, or floats if the matrix is of floats.
template <class T>
struct Inputs {
    const ActivationBlock *blocks;
    const void *x;
    moepool_dtype dtype;

    __device__ const uint8_t *row(int64_t index, const Part &part) const {
        return reinterpret_cast<const uint8_t *>(blocks + index * (part.columns / kBlockColumns));
    }
    // One chunk of a row, to shared memory by a warp. Past L1: what wrote it may have been running when this kernel
    // began.
    __device__ void stage(uint8_t *target, int64_t index, const Part &part, int chunk, int lane) const {
        const int width = chunk_width(part, chunk);
        if constexpr (kFloats<T>) {
            // A row of floats need not be aligned to 16 bytes.
            const int64_t first = index * part.columns + int64_t{chunk} * kChunkColumns;
            for (int i = lane; i < width; i += 32)
                reinterpret_cast<float *>(target)[i] = widen_past_l1(x, dtype, first + i);
        } else {
            stage_copy(target, row(index, part) + chunk * kStagedBytes<T>,
                       width / kBlockColumns * static_cast<int>(sizeof(ActivationBlock)), lane);
        }
    }
};
template <class T>
__device__ Inputs<T> input_of(const Step &step) {
    return {step.input, step.x, step.x_dtype};
}
template <class T>
__device__ Inputs<T> hidden_of(const Step &step) {
    return {step.hidden, step.hidden_x, MOEPOOL_F32};
}

// A warp's part of the shared memory of a block, which has sums for so many matrices or row groups.
template <class T>
struct WarpMemory {
    uint8_t *stages;
    uint8_t *staged;  // [kSubBatch]: chunks of rows that did not come with a panel
    float *totals;    // of the block: [of a matrix or row group][kMostDecodeTokens][32]
    uint64_t *barriers;

    __device__ WarpMemory(uint8_t *memory, int warp, int warps, int count, int sums)
        : stages(memory + warp * count * kStageBytes<T>),
          staged(memory + warps * count * kStageBytes<T> + warp * kSubBatch * kStagedBytes<T>),
          totals(reinterpret_cast<float *>(memory + warps * (count * kStageBytes<T> + kSubBatch * kStagedBytes<T>))),
          barriers(reinterpret_cast<uint64_t *>(totals + sums * kSums) + warp * count) {}
};

// 32 rows of a matrix, `offset` bytes into a record, times the places of a tile. All lanes of a warp.
template <class T>
class RowGroup {
  public:
    __device__ RowGroup(const DecodeTile &tile, int64_t offset, const Part &part, Panels &panels, int lane)
        : tile_(tile),
          part_(part),
          panels_(panels),
          lane_(lane),
          beside_(kFloats<T> || tile.host ? 0 : min(kSubBatch, tile.count)),
          offset_(offset),
          ahead_(min(panels.stages(), part.chunks)),
          panel_last_(chunk_bytes<T>(part.last_width)),
          row_last_(part.last_width / kBlockColumns * static_cast<int>(sizeof(ActivationBlock))),
          source_(tile.record + offset) {}

    // Asks for the first panels.
    __device__ void begin() {
        first_ = panels_.next();
#pragma unroll 1
        for (int chunk = 0; chunk < ahead_; ++chunk) {
            const bool last = chunk + 1 == part_.chunks;
            const int stage = panels_.expect(last ? panel_last_ + beside_ * row_last_ : kPanel + beside_ * kRow);
            fetch(stage, 0, 1, last);
        }
    }
    // And for the rows that come with them, when they are there. index: of the row of place `lane`.
    __device__ void begin(const Inputs<T> &inputs, int index) {
        index_ = index;
        const int mine = __shfl_sync(~0u, index, max(lane_ - 1, 0));
        if (beside_ == 0) return;
        if (lane_ > 0) source_ = inputs.row(mine, part_);
#pragma unroll 1
        for (int chunk = 0, stage = first_; chunk < ahead_; ++chunk, stage = panels_.after(stage))
            fetch(stage, 1, 1 + beside_, chunk + 1 == part_.chunks);
    }

    // totals[t][lane]: of place t of the tile.
    __device__ void run(const Inputs<T> &inputs, uint8_t *staged, float *totals) {
#pragma unroll 1
        for (int chunk = 0; chunk < part_.chunks; ++chunk) {
            const int width = chunk_width(part_, chunk);
            const uint8_t *panel = panels_.take();
            if (tile_.fill) copy_out(panel, chunk);
#pragma unroll 1
            for (int t = 0; t < tile_.count; t += kSubBatch) {
                const int n = min(kSubBatch, tile_.count - t);
                const uint8_t *rows = panel + kPanel;
                if (t >= beside_) {
                    __syncwarp();  // the last ones are multiplied
#pragma unroll 1
                    for (int i = 0; i < n; ++i)
                        inputs.stage(staged + i * kRow, __shfl_sync(~0u, index_, t + i), part_, chunk, lane_);
                    __syncwarp();
                    rows = staged;
                }
                float *total = totals + t * 32 + lane_;
                if (n == 1)
                    add<1>(panel, width, rows, chunk == 0, total);
                else
                    add<kSubBatch>(panel, width, rows, chunk == 0, total);
            }
            release(chunk);
        }
    }
    // In place of run: the CPU computes it, it is only kept.
    __device__ void keep() {
#pragma unroll 1
        for (int chunk = 0; chunk < part_.chunks; ++chunk) {
            copy_out(panels_.take(), chunk);
            release(chunk);
        }
    }

  private:
    static constexpr int kPanel = kPanelBytes<T>, kRow = kStagedBytes<T>;

    // Pieces of a stage: lane 0 has the panel, those behind it a row each.
    __device__ void fetch(int stage, int first, int end, bool last) {
        const int whole = lane_ == 0 ? kPanel : kRow, at = lane_ == 0 ? 0 : kPanel + (lane_ - 1) * kRow;
        const int bytes = !last ? whole : lane_ == 0 ? panel_last_ : row_last_;
        panels_.fetch(stage, first, end, source_, at, bytes);
        if (lane_ >= first) source_ += whole;
    }
    template <int kBatch>
    __device__ void add(const uint8_t *panel, int width, const uint8_t *rows, bool first, float *total) {
        float sum[kBatch] = {};
        multiply_panel<T, kBatch>(panel, width, rows, lane_, sum);
#pragma unroll
        for (int t = 0; t < kBatch; ++t) total[t * 32] = __fadd_rn(first ? 0.0f : total[t * 32], sum[t]);
    }
    __device__ void copy_out(const uint8_t *panel, int chunk) {
        panels_.copy_out(panel, tile_.fill + offset_ + int64_t{chunk} * kPanel,
                         chunk + 1 == part_.chunks ? panel_last_ : kPanel);
    }
    __device__ void release(int chunk) {
        if (tile_.fill) panels_.finish_stores();
        __syncwarp();
        if (chunk + ahead_ >= part_.chunks) return;
        const bool last = chunk + ahead_ + 1 == part_.chunks;
        const int stage = panels_.expect(last ? panel_last_ + beside_ * row_last_ : kPanel + beside_ * kRow);
        fetch(stage, 0, 1 + beside_, last);
    }

    const DecodeTile &tile_;
    const Part &part_;
    Panels &panels_;
    const int lane_;
    const int beside_;  // rows that come with a panel: of the first places
    const int64_t offset_;
    const int ahead_, panel_last_, row_last_;
    const uint8_t *source_;  // of the lane's next piece
    int first_ = 0, index_ = 0;
};

// Written by a kernel in front, which may have been running when this one began: past L1.
__device__ __forceinline__ DecodeTile read_tile(const Step &step, int index) {
    static_assert(sizeof(DecodeTile) == 32, "two loads");
    DecodeTile tile;
    auto *words = reinterpret_cast<ulonglong2 *>(&tile);
    const auto *from = reinterpret_cast<const ulonglong2 *>(step.tables.tiles + index);
    words[0] = __ldcg(from);
    words[1] = __ldcg(from + 1);
    return tile;
}
// The tile of a block, count 0 if there is nothing to be done.
__device__ __forceinline__ DecodeTile tile_of(const Step &step, int index) {
    const int tiles = __ldcg(step.tables.tile_count);
    DecodeTile tile = read_tile(step, index);  // beside the count: what is behind the last one is of another step
    if (index >= tiles || (tile.host && !tile.fill)) tile.count = 0;
    return tile;
}
// Of place `lane` of a tile.
__device__ __forceinline__ int place_of(const Step &step, const DecodeTile &tile, int lane) {
    return lane < tile.count ? __ldcg(step.tables.order + tile.first + lane) : 0;
}
__device__ __forceinline__ int input_row(const Step &step, int place) {
    return step.x_per_row == 1 ? place : place / step.x_per_row;
}

template <class T>
__global__ void __launch_bounds__(32 * kGateUpWarps, GU_BLOCKS)
    gate_up_tiles(const __grid_constant__ Step step, const Part gate, const Part up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x);
    const WarpMemory<T> mine(memory, warp, warps, stages, 2);
    Panels panels(mine.stages, mine.barriers, stages, kStageBytes<T>, lane);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    const DecodeTile tile = tile_of(step, static_cast<int>(blockIdx.y));
    if (tile.count == 0) return;
    const Inputs<T> inputs = input_of<T>(step);
    int place = 0;
    // Mostly a warp has gate or up; where there is little shared memory, the only one has both.
#pragma unroll 1
    for (int matrix = warp; matrix < 2; matrix += warps) {
        const int64_t offset = matrix ? up.panels + group * up.row_group : gate.panels + group * gate.row_group;
        RowGroup<T> rows(tile, offset, gate, panels, lane);
        rows.begin();
        if (tile.fill && group == 0 && matrix == warp) copy_tail(step.residents, tile);
        if (tile.host) {
            rows.keep();
            continue;
        }
        place = place_of(step, tile, lane);
        rows.begin(inputs, input_row(step, place));
        rows.run(inputs, mine.staged, mine.totals + matrix * kSums);
    }
    if (tile.host) return;
    __syncthreads();
#pragma unroll 1
    for (int t = warp; t < tile.count; t += warps)
        write_hidden(step, gate, up, tile.record, __shfl_sync(~0u, place, t), group, mine.totals[t * 32 + lane],
                     mine.totals[kSums + t * 32 + lane]);
}

// Gate or up, if they differ in type. Gate leaves its rows to up, which makes the hidden ones.
template <class T>
__global__ void __launch_bounds__(32 * kDownWarps, DN_BLOCKS)
    half_tiles(const __grid_constant__ Step step, const Part part, bool is_up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x) * warps + warp;
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const WarpMemory<T> mine(memory, warp, warps, stages, warps);
    Panels panels(mine.stages, mine.barriers, stages, kStageBytes<T>, lane);
    // Gate lets up start only when it has seen the end of resolve: for up, the tiles are there.
    const auto wait = [] {
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
    };
    if (!is_up) wait();
    const DecodeTile tile = tile_of(step, static_cast<int>(blockIdx.y));
    const bool empty = tile.count == 0 || group >= part.row_groups;
    float *const total = mine.totals + warp * kSums;
    RowGroup<T> rows(tile, part.panels + group * part.row_group, part, panels, lane);
    if (!empty) rows.begin();
    if (is_up) wait();
    if (tile.count > 0 && tile.fill && blockIdx.x == 0 && !is_up) copy_tail(step.residents, tile);
    if (empty) return;
    if (tile.host) return rows.keep();
    const int place = place_of(step, tile, lane);
    const Inputs<T> inputs = input_of<T>(step);
    rows.begin(inputs, input_row(step, place));
    rows.run(inputs, mine.staged, total);
#pragma unroll 1
    for (int t = 0; t < tile.count; ++t) {
        const int64_t to = __shfl_sync(~0u, place, t);
        float row = 0.0f;  // as the padding of the last panel, which enters no sum
        if (r < part.rows) row = finish_row(total[t * 32 + lane], tile.record, part.scale, part.bias, r);
        if (is_up) {
            if (r < part.rows) row = num::swiglu(__ldcg(step.gated + to * part.rows + r), row);
            store_hidden(step, part, to, group, row);
        } else if (r < part.rows) {
            step.gated[to * part.rows + r] = row;
        }
    }
}

// Of a pool with a doorbell, the first row of blocks takes the CPU's answer.
template <class T>
__global__ void __launch_bounds__(32 * kDownWarps, DN_BLOCKS)
    down_tiles(const __grid_constant__ Step step, const Part down, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    int index = static_cast<int>(blockIdx.y);
    if (step.bell.state && index-- == 0) {
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
        const int blocks = static_cast<int>(min(kAnswerBlocks, gridDim.x));
        if (blockIdx.x < kAnswerBlocks) take_answer(step, down.rows, static_cast<int>(blockIdx.x), blocks);
        return;
    }
    const int group = static_cast<int>(blockIdx.x) * warps + warp;
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const WarpMemory<T> mine(memory, warp, warps, stages, warps);
    Panels panels(mine.stages, mine.barriers, stages, kStageBytes<T>, lane);
    // Gate/up lets this kernel start only when it has seen the end of resolve: the tiles are there.
    const DecodeTile tile = tile_of(step, index);
    const bool empty = tile.count == 0 || group >= down.row_groups;
    float *const total = mine.totals + warp * kSums;
    RowGroup<T> rows(tile, down.panels + group * down.row_group, down, panels, lane);
    if (!empty) rows.begin();
    const int place = empty ? 0 : place_of(step, tile, lane);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (empty) return;
    if (tile.host) {
        rows.keep();
    } else {
        const Inputs<T> inputs = hidden_of<T>(step);
        rows.begin(inputs, place);
        rows.run(inputs, mine.staged, total);
    }
    if (warp == 0 && lane == 0) note_ready(step.bell);
    if (tile.host) return;
#pragma unroll 1
    for (int t = 0; t < tile.count; ++t) {
        const int64_t to = __shfl_sync(~0u, place, t);
        if (r < down.rows)
            step.rows[to * down.rows + r] =
                finish_row(total[t * 32 + lane], tile.record, down.scale, down.bias, r);
    }
}

__global__ void combine_tiles(const Step step, int64_t columns) {
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= step.tokens * columns) return;
    const int64_t token = i / columns, column = i % columns;
    float y = 0.0f;
#pragma unroll 8
    for (int64_t place = token * step.k; place < (token + 1) * step.k; ++place) {
        // No branch around the loads: those of all places are in flight at once.
        const int id = __ldcg(step.tables.ids + place);
        const float row = id >= 0 ? __ldcg(step.rows + place * columns + column) : num::nan();
        const float next = num::mp_fma(widen(step.weights, step.weights_dtype, place), row, y);
        y = id == -1 ? y : next;
    }
    step.out[i] = num::finish(y);
    if (threadIdx.x == 0) note_end(step.bell);
}

template <class T>
void launch_gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &,
                    cudaStream_t stream) {
    const DecodeConfig c = gate_up_config<T>(gate, most_dynamic_bytes());
    const dim3 blocks(static_cast<unsigned>(gate.row_groups()), static_cast<unsigned>(step.most_tiles));
    launch(gate_up_tiles<T>, blocks, threads(c), c.shared_bytes, stream, step, Part(gate), Part(up), c.stages);
}

// The blocks of a pass over tiles, a warp a row group.
dim3 blocks_of(const Matrix &matrix, const DecodeConfig &c, int tiles) {
    return dim3(static_cast<unsigned>((matrix.row_groups() + c.warps - 1) / c.warps), static_cast<unsigned>(tiles));
}
template <class T>
void launch_half(const Matrix &matrix, bool is_up, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(matrix, step.k, most_dynamic_bytes());
    launch(half_tiles<T>, blocks_of(matrix, c, step.most_tiles), threads(c), c.shared_bytes, stream, step,
           Part(matrix), is_up, c.stages);
}
template <class T>
void launch_down(const Matrix &down, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(down, step.k, most_dynamic_bytes());
    launch_behind(!step.bell.by_nodes, down_tiles<T>, blocks_of(down, c, step.most_tiles + (step.bell.state ? 1 : 0)),
                  threads(c), c.shared_bytes, stream, step, Part(down), c.stages);
    launch(combine_tiles, static_cast<unsigned>((step.tokens * down.rows + 255) / 256), dim3(256), 0, stream, step,
           down.rows);
}

template <class T>
void load(int shared_bytes) {
    allow_shared(gate_up_tiles<T>, shared_bytes);
    allow_shared(half_tiles<T>, shared_bytes);
    allow_shared(down_tiles<T>, shared_bytes);
    allow_shared(combine_tiles, 0);
}

}  // namespace

const DecodeKernels tile_kernels[kTypeCount] = {
#define X(T) {load<T>, launch_gate_up<T>, launch_down<T>, gate_up_config<T>, down_config<T>},
    MOEPOOL_QUANT_TYPES(X)
#undef X
};

const LaunchHalf half_kernels[kTypeCount] = {
#define X(T) launch_half<T>,
    MOEPOOL_QUANT_TYPES(X)
#undef X
};

}  // namespace cuda
}  // namespace moepool
