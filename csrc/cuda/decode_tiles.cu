// A decode step of more tokens than one, or of gate and up of two types, on the device.
#include "cuda/decode_parts.h"
#include "cuda/doorbell_device.h"

namespace moepool {
namespace cuda {

namespace {

using namespace tiles;

constexpr unsigned kAnswerBlocks = 8;  // of down_tiles, that take the CPU's answer

// The panels of kMatrices parts of a tile's row group: unit u is chunk u / kMatrices of part u % kMatrices.
// total[part][t] gathers the chunks in their order. stage(target, place, chunk) brings an activation row to shared
// memory.
template <class T, int kMatrices>
class TileProduct {
  public:
    __device__ TileProduct(const DecodeTile &tile, const int64_t (&base)[kMatrices], const Part &part, int stages,
                           Panels &panels, const Shared &shared)
        : tile_(tile), part_(part), stages_(stages), panels_(panels), shared_(shared) {
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) base_[i] = base[i];
    }

    __device__ void begin() {
        for (int s = 0; s < stages_; ++s) fetch(threadIdx.y + s * blockDim.y);
    }

    template <class Stage>
    __device__ void run(const int *places, const Stage &stage) {
        const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, units = kMatrices * part_.chunks;
        uint8_t *staged = shared_.staged + warp * kSubBatch * kStagedBytes<T>;
        for (int t = warp; t < kMatrices * kMostDecodeTokens; t += warps) shared_.total[t * 32 + lane] = 0.0f;
        for (int first = 0; first < units; first += warps) {
            const int unit = first + warp;
            if (unit < units) {
                const int chunk = unit / kMatrices, width = chunk_width(part_, chunk);
                float *out = shared_.partial + warp * kMostDecodeTokens * 32 + lane;
                const uint8_t *panel = nullptr;
                for (int t = 0; t < tile_.count; t += kSubBatch) {
                    const int n = min(kSubBatch, tile_.count - t);
                    for (int i = 0; i < n; ++i) stage(staged + i * kStagedBytes<T>, places[t + i], chunk);
                    __syncwarp();
                    if (!panel) {
                        panel = panels_.take();
                        if (tile_.fill) panels_.copy_out(panel, tile_.fill + offset(unit), chunk_bytes<T>(width));
                    }
                    if (n == 1)
                        multiply_panel<T, 1>(panel, width, staged, lane, out + t * 32);
                    else
                        multiply_panel<T, kSubBatch>(panel, width, staged, lane, out + t * 32);
                    __syncwarp();
                }
                if (tile_.fill) panels_.finish_stores();
                fetch(unit + warps * stages_);
            }
            __syncthreads();
            const int round = min(warps, units - first);
            for (int i = warp; i < kMatrices * tile_.count; i += warps) {
                const int matrix = i / tile_.count, t = i % tile_.count;
                float *at = shared_.total + (matrix * kMostDecodeTokens + t) * 32 + lane, total = *at;
                for (int w = (matrix + kMatrices - first % kMatrices) % kMatrices; w < round; w += kMatrices)
                    total = __fadd_rn(total, shared_.partial[(w * kMostDecodeTokens + t) * 32 + lane]);
                *at = total;
            }
            __syncthreads();
        }
    }

    // In place of run: the CPU computes it, it is only kept.
    __device__ void keep() {
        const int warps = blockDim.y, units = kMatrices * part_.chunks;
        for (int unit = threadIdx.y; unit < units; unit += warps) {
            const uint8_t *panel = panels_.take();
            panels_.copy_out(panel, tile_.fill + offset(unit), chunk_bytes<T>(chunk_width(part_, unit / kMatrices)));
            panels_.finish_stores();
            fetch(unit + warps * stages_);
        }
    }

  private:
    __device__ int64_t offset(int unit) const {
        return (kMatrices > 1 && unit % kMatrices ? base_[kMatrices - 1] : base_[0]) +
               int64_t{unit / kMatrices} * kPanelBytes<T>;
    }
    __device__ void fetch(int unit) {
        if (unit < kMatrices * part_.chunks)
            panels_.fetch(tile_.record + offset(unit), chunk_bytes<T>(chunk_width(part_, unit / kMatrices)));
    }

    const DecodeTile &tile_;
    int64_t base_[kMatrices];
    const Part &part_;
    const int stages_;
    Panels &panels_;
    const Shared &shared_;
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

__device__ __forceinline__ void read_places(const Step &step, const DecodeTile &tile, int *places) {
    const int thread = 32 * threadIdx.y + threadIdx.x;
    if (thread < tile.count) places[thread] = __ldcg(step.tables.order + tile.first + thread);
    __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps, 3)
    gate_up_tiles(const Step step, const Part gate, const Part up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ int places[kMostDecodeTokens];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x % gate.row_groups);
    const int index = static_cast<int>(blockIdx.x / gate.row_groups);
    const Shared shared(memory, warps, stages, kPanelBytes<T>, warps * kSubBatch * kStagedBytes<T>,
                        warps * kMostDecodeTokens);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (index >= __ldcg(step.tables.tile_count)) return;
    const DecodeTile tile = read_tile(step, index);
    if (tile.host && !tile.fill) return;
    const int64_t base[2] = {gate.panels + group * gate.row_group, up.panels + group * up.row_group};
    TileProduct<T, 2> product(tile, base, gate, stages, panels, shared);
    product.begin();
    if (tile.fill && group == 0) copy_tail(step.residents, tile);
    if (tile.host) return product.keep();
    read_places(step, tile, places);
    product.run(places,
                [&](uint8_t *target, int place, int chunk) { stage_input<T>(target, step, place, gate, chunk, lane); });
    for (int t = warp; t < tile.count; t += warps)
        write_hidden(step, gate, up, tile.record, places[t], group, shared.total[t * 32 + lane],
                     shared.total[(kMostDecodeTokens + t) * 32 + lane]);
}

// Gate or up, if they differ in type. Gate leaves its rows to up, which makes the hidden ones.
template <class T>
__global__ void __launch_bounds__(32 * kWarps, 3) half_tiles(const Step step, const Part part, bool is_up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ int places[kMostDecodeTokens];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x % part.row_groups);
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const int index = static_cast<int>(blockIdx.x / part.row_groups);
    const Shared shared(memory, warps, stages, kPanelBytes<T>, warps * kSubBatch * kStagedBytes<T>,
                        warps * kMostDecodeTokens);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    // Gate lets up start only when it has seen the end of resolve: for up, the tiles are there.
    const auto wait = [] {
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
    };
    if (!is_up) wait();
    bool empty = index >= __ldcg(step.tables.tile_count);
    const DecodeTile tile = read_tile(step, empty ? 0 : index);
    empty = empty || (tile.host && !tile.fill);
    const int64_t base[1] = {part.panels + group * part.row_group};
    TileProduct<T, 1> product(tile, base, part, stages, panels, shared);
    if (!empty) product.begin();
    if (is_up) wait();
    if (empty) return;
    if (tile.fill && group == 0 && !is_up) copy_tail(step.residents, tile);
    if (tile.host) return product.keep();
    read_places(step, tile, places);
    product.run(places,
                [&](uint8_t *target, int place, int chunk) { stage_input<T>(target, step, place, part, chunk, lane); });
    for (int t = warp; t < tile.count; t += warps) {
        const int64_t place = places[t];
        float row = 0.0f;  // as the padding of the last panel, which enters no sum
        if (r < part.rows) row = finish_row(shared.total[t * 32 + lane], tile.record, part.scale, part.bias, r);
        if (is_up) {
            if (r < part.rows) row = num::swiglu(__ldcg(step.gated + place * part.rows + r), row);
            store_hidden(step, part, place, group, row);
        } else if (r < part.rows) {
            step.gated[place * part.rows + r] = row;
        }
    }
}

// The first `answer_blocks` blocks take the CPU's answer.
template <class T>
__global__ void __launch_bounds__(32 * kWarps, 3)
    down_tiles(const Step step, const Part down, int stages, unsigned answer_blocks) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ int places[kMostDecodeTokens];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    if (blockIdx.x < answer_blocks) {
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
        return take_answer(step, down.rows, static_cast<int>(blockIdx.x), static_cast<int>(answer_blocks));
    }
    const unsigned job = blockIdx.x - answer_blocks;
    const int group = static_cast<int>(job % down.row_groups);
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const int index = static_cast<int>(job / down.row_groups);
    const Shared shared(memory, warps, stages, kPanelBytes<T>, warps * kSubBatch * kStagedBytes<T>,
                        warps * kMostDecodeTokens);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    // Gate/up lets this kernel start only when it has seen the end of resolve: the tiles are there.
    const bool none = index >= __ldcg(step.tables.tile_count);
    const DecodeTile tile = read_tile(step, none ? 0 : index);
    const bool empty = none || (tile.host && !tile.fill);
    const int64_t base[1] = {down.panels + group * down.row_group};
    TileProduct<T, 1> product(tile, base, down, stages, panels, shared);
    if (!empty) product.begin();
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (empty) return;
    if (tile.host) {
        product.keep();
        if (warp == 0 && lane == 0) note_ready(step.bell);
        return;
    }
    read_places(step, tile, places);
    product.run(places, [&](uint8_t *target, int place, int chunk) {
        stage_hidden<T>(target, step, place, down, chunk, lane);
    });
    if (warp == 0 && lane == 0) note_ready(step.bell);
    if (r >= down.rows) return;
    for (int t = warp; t < tile.count; t += warps)
        step.rows[places[t] * down.rows + r] =
            finish_row(shared.total[t * 32 + lane], tile.record, down.scale, down.bias, r);
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
    launch(gate_up_tiles<T>, static_cast<unsigned>(step.most_tiles * gate.row_groups()), threads(c), c.shared_bytes,
           stream, step, Part(gate), Part(up), c.stages);
}

template <class T>
void launch_half(const Matrix &matrix, bool is_up, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(matrix, step.k, most_dynamic_bytes());
    launch(half_tiles<T>, static_cast<unsigned>(step.most_tiles * matrix.row_groups()), threads(c), c.shared_bytes,
           stream, step, Part(matrix), is_up, c.stages);
}

template <class T>
void launch_down(const Matrix &down, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(down, step.k, most_dynamic_bytes());
    const unsigned answers = step.bell.state ? kAnswerBlocks : 0;
    launch_behind(!step.bell.by_nodes, down_tiles<T>,
                  answers + static_cast<unsigned>(step.most_tiles * down.row_groups()), threads(c), c.shared_bytes,
                  stream, step, Part(down), c.stages, answers);
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
