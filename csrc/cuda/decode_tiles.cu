// A decode step of more tokens than one, or of gate and up of two types, on the device.
//
// A warp has 32 rows of a matrix and a tile to itself (row_group.h), and waits for another one only where gate's rows
// and up's make hidden ones.
#include "cuda/doorbell_device.h"
#include "cuda/row_group.h"

namespace moepool {
namespace cuda {

namespace {

using namespace tiles;

constexpr unsigned kAnswerBlocks = 8;  // of down_tiles, that take the CPU's answer

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
// Of place `lane` of a tile, asked for beside it.
__device__ __forceinline__ int place_of(const Step &step, int index, int lane) {
    return __ldcg(step.tables.order + kMostDecodeTokens * index + min(lane, kMostDecodeTokens - 1));
}
__device__ __forceinline__ int input_row(const Step &step, int place) {
    return step.x_per_row == 1 ? place : place / step.x_per_row;
}

template <class T>
__global__ void __launch_bounds__(32 * kGateUpWarps, kBlocks)
    gate_up_tiles(const __grid_constant__ Step step, const __grid_constant__ Part gate, const __grid_constant__ Part up,
                  int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr int kBeside = Inputs<T>::kBeside;
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x), index = static_cast<int>(blockIdx.y);
    const WarpMemory<T, kBeside> mine(memory, warp, warps, stages, 2);
    Panels panels(mine.stages, mine.barriers, stages, kStageBytes<T, kBeside>, lane);
    RowGroup<T, Inputs<T>> rows(gate, panels, lane);
    const uint32_t number = number_of(step);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    const int place = place_of(step, index, lane);
    const DecodeTile tile = tile_of(step, index);
    if (tile.count == 0) return;
    const Inputs<T> inputs = {step};
    // Mostly a warp has gate or up; where there is little shared memory, the only one has both.
    for (int matrix = warp; matrix < 2; matrix += warps) {
        rows.ask_for_panels(tile.record,
                            matrix ? up.panels + group * up.row_group : gate.panels + group * gate.row_group);
        if (tile.fill && group == 0 && matrix == warp) copy_tail(step.residents, tile);
        if (tile.host) {
            rows.keep(tile);
            continue;
        }
        rows.know_tile(inputs, tile, input_row(step, place));
        rows.run(inputs, mine.staged, mine.totals + matrix * kSums);
    }
    if (tile.host) return;
    __syncthreads();
    const int64_t r = int64_t{group} * kPanelRows + lane;
#pragma unroll 1
    for (int t = warp; t < tile.count; t += warps) {
        const float *sums = mine.totals + t * 32 + lane;
        hand_hidden<int64_t>(step, gate, __shfl_sync(~0u, place, t), group, r,
                             hidden_of(gate, up, tile.record, r, sums[0], sums[kSums]), number);
    }
}

// Gate or up, if they differ in type. Gate leaves its rows to up, which makes the hidden ones.
template <class T>
__global__ void __launch_bounds__(32 * kDownWarps, kBlocks)
    half_tiles(const __grid_constant__ Step step, const __grid_constant__ Part part, bool is_up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x) * warps + warp;
    const int64_t r = int64_t{group} * kPanelRows + lane;
    constexpr int kBeside = Inputs<T>::kBeside;
    const WarpMemory<T, kBeside> mine(memory, warp, warps, stages, warps);
    Panels panels(mine.stages, mine.barriers, stages, kStageBytes<T, kBeside>, lane);
    // Gate lets up start only when it has seen the end of resolve: for up, the tiles are there.
    const auto wait = [] {
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
    };
    if (!is_up) wait();
    const int place = place_of(step, static_cast<int>(blockIdx.y), lane);
    const DecodeTile tile = tile_of(step, static_cast<int>(blockIdx.y));
    const bool empty = tile.count == 0 || group >= part.row_groups;
    float *const total = mine.totals + warp * kSums;
    RowGroup<T, Inputs<T>> rows(part, panels, lane);
    if (!empty) rows.ask_for_panels(tile.record, part.panels + group * part.row_group);
    if (is_up) wait();
    if (tile.count > 0 && tile.fill && blockIdx.x == 0 && !is_up) copy_tail(step.residents, tile);
    if (empty) return;
    if (tile.host) return rows.keep(tile);
    const uint32_t number = number_of(step);
    const Inputs<T> inputs = {step};
    rows.know_tile(inputs, tile, input_row(step, place));
    rows.run(inputs, mine.staged, total);
#pragma unroll 1
    for (int t = 0; t < tile.count; ++t) {
        const int64_t to = __shfl_sync(~0u, place, t);
        float row = 0.0f;  // as the padding of the last panel, which enters no sum
        if (r < part.rows) row = finish_row(total[t * 32 + lane], tile.record, part.scale, part.bias, r);
        if (is_up) {
            if (r < part.rows) row = num::swiglu(__ldcg(step.gated + to * part.rows + r), row);
            hand_hidden(step, part, to, group, r, row, number);
        } else if (r < part.rows) {
            step.gated[to * part.rows + r] = row;
        }
    }
}

// Of a pool with a doorbell, the first row of blocks takes the CPU's answer. The kernel starts when all blocks of
// gate/up run, and waits only for what these hand over; one block is there until gate/up has ended, for the kernel
// behind, which waits for this one alone.
template <class T>
__global__ void __launch_bounds__(32 * kDownWarps, kBlocks)
    down_tiles(const __grid_constant__ Step step, const __grid_constant__ Part down, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr int kBeside = Hidden<T>::kBeside;
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    let_the_next_kernel_start();
    int index = static_cast<int>(blockIdx.y);
    if (step.bell.state && index-- == 0) {
        const int blocks = static_cast<int>(min(kAnswerBlocks, gridDim.x));
        if (blockIdx.x < kAnswerBlocks) take_answer(step, down.rows, static_cast<int>(blockIdx.x), blocks);
        if (blockIdx.x == 0) wait_for_kernels_in_front();
        return;
    }
    const int group = static_cast<int>(blockIdx.x) * warps + warp;
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const WarpMemory<T, kBeside> mine(memory, warp, warps, stages, warps);
    float *const total = mine.totals + warp * kSums;
    Panels panels(mine.stages, mine.barriers, stages, kStageBytes<T, kBeside>, lane);
    // Gate/up lets this kernel start only when it has seen the end of resolve: the tiles are there.
    const Hidden<T> hidden = {step, number_of(step)};
    const int place = place_of(step, index, lane);
    const DecodeTile tile = tile_of(step, index);
    if (tile.count > 0 && group < down.row_groups) {
        RowGroup<T, Hidden<T>> rows(down, panels, lane);
        if (!tile.host) rows.ask_for_hidden(hidden, tile, place);  // behind the panels it would wait for these
        rows.ask_for_panels(tile.record, down.panels + group * down.row_group);
        if (tile.host) {
            rows.keep(tile);
        } else {
            rows.know_tile(hidden, tile, place);
            rows.run(hidden, mine.staged, total);
        }
        if (tile.streamed && warp == 0 && lane == 0) note_ready(step.bell);
#pragma unroll 1
        for (int t = 0; t < tile.count && !tile.host; ++t) {
            const int64_t to = __shfl_sync(~0u, place, t);
            if (r < down.rows)
                step.rows[to * down.rows + r] = finish_row(total[t * 32 + lane], tile.record, down.scale, down.bias, r);
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0) wait_for_kernels_in_front();
}

// A block has some columns of a token.
__global__ void combine_tiles(const __grid_constant__ Step step, int64_t columns) {
    constexpr int kTurn = 8;
    __shared__ int ids[kMostDecodePlaces];
    __shared__ float weights[kMostDecodePlaces];
    const int thread = threadIdx.x, threads = blockDim.x, k = step.k;
    const int64_t token = blockIdx.y, column = int64_t{blockIdx.x} * threads + thread;
    // What resolve and the kernels in front of it wrote is there: down lets this kernel start only then.
    for (int j = thread; j < k; j += threads) {
        ids[j] = __ldcg(step.tables.ids + token * k + j);
        weights[j] = widen_past_l1(step.weights, step.weights_dtype, token * k + j);
    }
    __syncthreads();
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (column < columns) {
        const float *from = step.rows + token * k * columns + column;
        float y = 0.0f;
        for (int base = 0; base < k; base += kTurn) {
            float row[kTurn];  // in flight at once
#pragma unroll
            for (int i = 0; i < kTurn; ++i)
                row[i] = base + i < k && ids[base + i] >= 0 ? __ldcg(from + (base + i) * columns) : num::nan();
#pragma unroll
            for (int i = 0; i < kTurn; ++i)
                if (base + i < k && ids[base + i] != -1) y = num::mp_fma(weights[base + i], row[i], y);
        }
        step.out[token * columns + column] = num::finish(y);
    }
    if (thread > 0) return;
    note_end(step.bell);
    count_step(step);
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
    const DecodeConfig c = half_config<T>(matrix, most_dynamic_bytes());
    launch(half_tiles<T>, blocks_of(matrix, c, step.most_tiles), threads(c), c.shared_bytes, stream, step, Part(matrix),
           is_up, c.stages);
}
template <class T>
void launch_down(const Matrix &down, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(down, step.k, most_dynamic_bytes());
    launch_behind(!step.bell.by_nodes, down_tiles<T>, blocks_of(down, c, step.most_tiles + (step.bell.state ? 1 : 0)),
                  threads(c), c.shared_bytes, stream, step, Part(down), c.stages);
    constexpr int kColumns = 256;
    launch(combine_tiles,
           dim3(static_cast<unsigned>((down.rows + kColumns - 1) / kColumns), static_cast<unsigned>(step.tokens)),
           dim3(kColumns), 0, stream, step, down.rows);
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

const HalfKernel half_kernels[kTypeCount] = {
#define X(T) {launch_half<T>, half_config<T>},
    MOEPOOL_QUANT_TYPES(X)
#undef X
};

}  // namespace cuda
}  // namespace moepool
