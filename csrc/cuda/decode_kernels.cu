#include "cuda/decode_kernels.h"

#include <algorithm>

#include "cuda/chunk.h"
#include "cuda/doorbell_device.h"
#include "cuda/launch.h"
#include "cuda/pipeline.h"
#include "cuda/resolve_block.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kSinglePlaceWarps = 16;    // of gate/up for a single token,
constexpr int kSingleDownWarps = 24;     // of down for a single token,
constexpr int kTileWarps = 8;            // and of both for more
constexpr int kStaticShared = 20 << 10;  // more than any of the kernels has besides
constexpr int kSubBatch = 2;             // places that a panel is multiplied with at once
constexpr unsigned kAnswerBlocks = 8;    // of down_tiles, that take the CPU's answer

// Where a matrix lies in a record.
struct Part {
    int64_t rows, columns, panels, row_group, bias, scale;
    int row_groups, chunks;
    explicit Part(const Matrix &m)
        : rows(m.rows),
          columns(m.columns),
          panels(m.panels),
          row_group(m.row_group),
          bias(m.bias),
          scale(m.scale),
          row_groups(static_cast<int>(m.row_groups())),
          chunks(static_cast<int>((m.columns + kChunkColumns - 1) / kChunkColumns)) {}
};

template <class T>
constexpr bool kFloats = Decode<T>::kForm == Form::kFloat;

// Bytes of one chunk of one activation row in shared memory.
template <class T>
constexpr int kStagedBytes =
    kFloats<T> ? kChunkColumns * 4 : kChunkColumns / kBlockColumns * static_cast<int>(sizeof(ActivationBlock));

template <class T>
constexpr int kPanelBytes = 4 * kPanelRows * T::info.panel_words(kChunkColumns);

template <class T>
__device__ __forceinline__ int chunk_bytes(int width) {
    return 4 * kPanelRows * first_word<T, 4>(width / T::info.block);
}
__device__ __forceinline__ int chunk_width(const Part &part, int chunk) {
    return static_cast<int>(min(int64_t{kChunkColumns}, part.columns - int64_t{chunk} * kChunkColumns));
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

// From what a kernel in front wrote. It may still have been running when this one began, so L1 is passed by.
__device__ __forceinline__ void stage_copy(uint8_t *target, const void *source, int bytes, int lane) {
    for (int i = 16 * lane; i < bytes; i += 16 * 32)
        *reinterpret_cast<int4 *>(target + i) =
            __ldcg(reinterpret_cast<const int4 *>(static_cast<const uint8_t *>(source) + i));
}

// One chunk of the activation row of a place.
template <class T>
__device__ __forceinline__ void stage_input(uint8_t *target, const Step &step, int place, const Part &part, int chunk,
                                            int lane) {
    const int64_t column = place / step.x_per_row * part.columns + int64_t{chunk} * kChunkColumns;
    const int width = chunk_width(part, chunk);
    if constexpr (kFloats<T>) {
        for (int i = lane; i < width; i += 32)
            reinterpret_cast<float *>(target)[i] = widen(step.x, step.x_dtype, column + i);
    } else if (step.tokens == 1) {
        // Quantising it anew in every block is quicker than waiting for a kernel that does it once.
        quantise_chunk([&](int i) { return widen(step.x, step.x_dtype, column + i); }, width / kBlockColumns, lane,
                       reinterpret_cast<ActivationBlock *>(target));
    } else {
        stage_copy(target, step.input + column / kBlockColumns,
                   width / kBlockColumns * static_cast<int>(sizeof(ActivationBlock)), lane);
    }
}

// One chunk of the hidden row of a place.
template <class T>
__device__ __forceinline__ void stage_hidden(uint8_t *target, const Step &step, int64_t place, const Part &part,
                                             int chunk, int lane) {
    const int64_t column = place * part.columns + int64_t{chunk} * kChunkColumns;
    const int width = chunk_width(part, chunk);
    if constexpr (kFloats<T>) {
        // A row of floats need not be aligned to 16 bytes.
        for (int i = lane; i < width; i += 32)
            reinterpret_cast<float *>(target)[i] = __ldcg(step.hidden_x + column + i);
    } else {
        stage_copy(target, step.hidden + column / kBlockColumns,
                   width / kBlockColumns * static_cast<int>(sizeof(ActivationBlock)), lane);
    }
}

// A panel in shared memory times kBatch staged rows, this lane's row of weights: sums go to out[t * 32].
template <class T, int kBatch>
__device__ __forceinline__ void multiply_panel(const uint8_t *panel, int width, const uint8_t *staged, int lane,
                                               float *out) {
    const auto *words = reinterpret_cast<const uint32_t *>(panel) + lane;
    const StagedRows<T> rows{staged};
    float sum[kBatch] = {};
    if (width == kChunkColumns)
        multiply_chunk<T, SharedLane, kBatch, true>(words, width, rows, sum);
    else if constexpr (T::info.block < kChunkColumns)
        multiply_chunk<T, SharedLane, kBatch, false>(words, width, rows, sum);
#pragma unroll
    for (int t = 0; t < kBatch; ++t) out[t * 32] = sum[t];
}

// Scale, bias and the last step of a row: numerics.md section 3.
__device__ __forceinline__ float finish_row(float t, const uint8_t *record, const Part &part, int64_t row) {
    if (part.scale >= 0) t = __fmul_rn(t, *reinterpret_cast<const float *>(record + part.scale));
    if (part.bias >= 0) t = __fadd_rn(t, reinterpret_cast<const float *>(record + part.bias)[row]);
    return num::finish(t);
}

// The dynamic shared memory of a block.
struct Shared {
    uint8_t *panels;     // [warps][stages][panel]
    uint8_t *staged;     // [warps][rows][chunk of an activation row]
    uint64_t *barriers;  // [warps][stages]
    float *partial;      // [warps][places][32]: of a round
    float *total;        // [matrices * places][32]

    __device__ Shared(uint8_t *memory, int warps, int stages, int panel_bytes, int staged_bytes, int places)
        : panels(memory),
          staged(panels + warps * stages * panel_bytes),
          barriers(reinterpret_cast<uint64_t *>(staged + warps * staged_bytes)),
          partial(reinterpret_cast<float *>(barriers + warps * stages)),
          total(partial + warps * places * 32) {}
};
int shared_bytes(int warps, int stages, int panel_bytes, int staged_bytes, int places, int totals) {
    return warps * (stages * (panel_bytes + 8) + staged_bytes + places * 128) + totals * 128;
}

__device__ __forceinline__ void copy_tail(const Residents &residents, const DecodeTile &tile) {
    const int threads = 32 * blockDim.y;
    for (int64_t i = residents.tail + 16 * (32 * threadIdx.y + threadIdx.x); i < residents.record_bytes;
         i += 16 * threads)
        *reinterpret_cast<int4 *>(tile.fill + i) = *reinterpret_cast<const int4 *>(tile.record + i);
}

// Hidden columns 32 * group .. of a place: swiglu of a lane's two sums, then their block.
__device__ __forceinline__ void write_hidden(const Step &step, const Part &gate, const Part &up, const uint8_t *record,
                                             int64_t place, int64_t group, float g, float u) {
    const int lane = threadIdx.x;
    const int64_t r = group * kPanelRows + lane;
    // The padding rows of the last panel enter no sum.
    const float hidden =
        r < gate.rows ? num::swiglu(finish_row(g, record, gate, r), finish_row(u, record, up, r)) : 0.0f;
    if (step.hidden_x && r < gate.rows) step.hidden_x[place * gate.rows + r] = hidden;
    if (step.hidden) store_block(quantise(hidden), lane, step.hidden + place * gate.row_groups + group);
}

// ----------------------------------------------------------------------------------------------------- a single token

// The expert of a place, looked up here so that its weights are asked for at once: hits need nothing from the books.
struct Looked {
    const uint8_t *record;  // NULL: skipped
    bool missing;           // the books are to be asked
    bool invalid;
    bool host;  // the CPU computes it
};
__device__ __forceinline__ Looked look_up(const Step &step, int place) {
    const int64_t id = step.bits == 64 ? __ldcg(static_cast<const long long *>(step.ids) + place)
                                       : int64_t{__ldcg(static_cast<const int *>(step.ids) + place)};
    const bool host_has_all = hosts_all(step.bell);
    if (id < 0 || id >= step.residents.experts) return {nullptr, false, id != -1, false};
    const int slot = __ldcg(step.residents.slot_of + id);
    return {slot >= 0 ? step.residents.arena + slot * step.residents.record_bytes : step.residents.records[id],
            slot < 0 || host_has_all, false, false};
}

// The books of the step, kept by the first block, and the hidden rows: a block computes 32 columns of one place. Unit u
// is chunk u / 2 of gate (u even) or up; a warp takes units warp, warp + warps, ...
template <class T>
__global__ void __launch_bounds__(32 * kSinglePlaceWarps, 2)
    gate_up_single(const Step step, const ResolveArguments arguments, const Part gate, const Part up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (blockIdx.x == 0) return resolve_block(step, arguments, memory);  // beside the others
    const unsigned job = blockIdx.x - 1;
    const int place = static_cast<int>(job / gate.row_groups), group = static_cast<int>(job % gate.row_groups);
    const int units = 2 * gate.chunks;
    const Shared shared(memory, warps, stages, kPanelBytes<T>, kStagedBytes<T>, 1);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    uint8_t *staged = shared.staged + warp * kStagedBytes<T>;
    const Looked looked = look_up(step, place);
    if (!looked.record) return;
    uint8_t *fill = nullptr;
    bool host = false;  // the CPU computes it
    const auto ask_the_books = [&] {
        while (!load_acquired(step.tables.resolved)) {
        }
        fill = step.tables.tiles[place].fill;
        host = step.tables.tiles[place].host;
        if (fill && group == 0) copy_tail(step.residents, {looked.record, fill, 0, 0, 0});
    };
    // What the CPU computes is not asked for, unless it is to be kept.
    const bool asks_first = step.bell.state && looked.missing;
    if (asks_first) ask_the_books();
    if (host && !fill) return;
    const auto offset = [&](int unit) {
        return (unit % 2 ? up.panels + group * up.row_group : gate.panels + group * gate.row_group) +
               unit / 2 * kPanelBytes<T>;
    };
    const auto bytes = [&](int unit) { return chunk_bytes<T>(chunk_width(gate, unit / 2)); };
    for (int s = 0; s < stages; ++s)
        if (const int unit = warp + s * warps; unit < units) panels.fetch(looked.record + offset(unit), bytes(unit));
    if (warp == 0) shared.total[lane] = shared.total[32 + lane] = 0.0f;
    if (looked.missing && !asks_first) ask_the_books();  // only they say whether it is to be kept
    for (int first = 0; first < units; first += warps) {
        const int unit = first + warp;
        if (unit < units) {
            const int width = chunk_width(gate, unit / 2);
            if (!host) stage_input<T>(staged, step, place, gate, unit / 2, lane);
            __syncwarp();
            const uint8_t *panel = panels.take();
            if (fill) panels.copy_out(panel, fill + offset(unit), bytes(unit));
            if (!host) multiply_panel<T, 1>(panel, width, staged, lane, shared.partial + warp * 32 + lane);
            if (fill) panels.finish_stores();
            __syncwarp();
            const int next = unit + warps * stages;
            if (next < units) panels.fetch(looked.record + offset(next), bytes(next));
        }
        __syncthreads();
        for (int m = warp; m < 2; m += warps) {
            float *at = shared.total + m * 32 + lane, total = *at;
            for (int w = (m + first) % 2; w < min(warps, units - first); w += 2)
                total = __fadd_rn(total, shared.partial[w * 32 + lane]);
            *at = total;
        }
        __syncthreads();
    }
    if (warp == 0 && !host)
        write_hidden(step, gate, up, looked.record, place, group, shared.total[lane], shared.total[32 + lane]);
}

// A block computes 32 outputs: of every place, then their weighted sum. Unit u is chunk u % chunks of place u / chunks.
template <class T>
__global__ void __launch_bounds__(32 * kSingleDownWarps) down_single(const Step step, const Part down, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Looked looked[kMostDecodePlaces];
    __shared__ float weights[kMostDecodePlaces];
    __shared__ bool answered;
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, k = step.k;
    // With a doorbell the first block takes the answer: it is there before those that wait for it.
    const int group = static_cast<int>(blockIdx.x) - (step.bell.state ? 1 : 0), units = k * down.chunks;
    if (group < 0) {
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
        if (warp == 0 && lane == 0 && has_answer(step.bell)) poll_answer(step.bell);
        return;
    }
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const Shared shared(memory, warps, stages, kPanelBytes<T>, kStagedBytes<T>, 1);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    uint8_t *staged = shared.staged + warp * kStagedBytes<T>;
    bool asks = false;
    for (int j = 32 * warp + lane; j < k; j += 32 * warps) {
        looked[j] = look_up(step, j);
        weights[j] = widen(step.weights, step.weights_dtype, j);
        asks |= step.bell.state && looked[j].missing;
    }
    for (int j = warp; j < k; j += warps) shared.total[j * 32 + lane] = 0.0f;
    if (__syncthreads_or(asks)) {
        wait_for_kernels_in_front();
        for (int j = 32 * warp + lane; j < k; j += 32 * warps)
            if (looked[j].missing) looked[j].host = step.tables.tiles[j].host;
        __syncthreads();
    }
    const auto offset = [&](int unit) {
        return down.panels + group * down.row_group + unit % down.chunks * kPanelBytes<T>;
    };
    const auto bytes = [&](int unit) { return chunk_bytes<T>(chunk_width(down, unit % down.chunks)); };
    const auto fill_of = [&](int place) { return looked[place].missing ? step.tables.tiles[place].fill : nullptr; };
    // Whether the place's weights are read here: to be multiplied, or to be kept.
    const auto reads = [&](int place) { return looked[place].record && (!looked[place].host || fill_of(place)); };
    const auto fetch = [&](int unit) {
        const int place = unit / down.chunks;
        if (reads(place)) panels.fetch(looked[place].record + offset(unit), bytes(unit));
    };
    // The weights are asked for while gate/up is still at work.
    for (int s = 0; s < stages; ++s)
        if (warp + s * warps < units) fetch(warp + s * warps);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    const int commit_count = __ldcg(step.tables.commit_count);
    const bool course_changes = changes_course(step.bell), waits = has_answer(step.bell);
    if (group == 0 && warp == 0 && lane == 0) *step.tables.resolved = 0;

    for (int first = 0; first < units; first += warps) {
        const int unit = first + warp;
        if (unit < units) {
            const int place = unit / down.chunks, chunk = unit % down.chunks;
            if (reads(place)) {
                uint8_t *fill = fill_of(place);
                const bool host = looked[place].host;
                if (!host) stage_hidden<T>(staged, step, place, down, chunk, lane);
                __syncwarp();
                const uint8_t *panel = panels.take();
                if (fill) panels.copy_out(panel, fill + offset(unit), bytes(unit));
                if (!host)
                    multiply_panel<T, 1>(panel, chunk_width(down, chunk), staged, lane,
                                         shared.partial + warp * 32 + lane);
                if (fill) panels.finish_stores();
                __syncwarp();
            }
            if (unit + warps * stages < units) fetch(unit + warps * stages);
        }
        __syncthreads();
        // Each place's chunks of this round, in their order.
        const int round = min(warps, units - first);
        for (int j = warp; j < k; j += warps) {
            if (!looked[j].record || looked[j].host) continue;
            float total = shared.total[j * 32 + lane];
            for (int w = max(0, j * down.chunks - first); w < min(round, (j + 1) * down.chunks - first); ++w)
                total = __fadd_rn(total, shared.partial[w * 32 + lane]);
            shared.total[j * 32 + lane] = total;
        }
        __syncthreads();
    }
    if (waits) {
        if (warp == 0 && lane == 0) {
            note_ready(step.bell);
            answered = await_answer(step.bell);
        }
        __syncthreads();
        for (int j = warp; j < k; j += warps)
            if (looked[j].host && r < down.rows)
                shared.total[j * 32 + lane] = answered ? cold_row(step.bell, j, down.rows, r) : num::nan();
        __syncthreads();
    }
    if (warp == 0 && r < down.rows) {
        float y = 0.0f;
        for (int j = 0; j < k; ++j) {
            if (!looked[j].record && !looked[j].invalid) continue;
            const float o = looked[j].host     ? shared.total[j * 32 + lane]
                            : looked[j].record ? finish_row(shared.total[j * 32 + lane], looked[j].record, down, r)
                                               : num::nan();
            y = num::mp_fma(weights[j], o, y);
        }
        step.out[r] = num::finish(y);
    }
    // Every block has looked its slots up and filled its part when the last one is here: now the map may change.
    if (warp == 0 && lane == 0) note_end(step.bell);
    if (commit_count == 0 && !course_changes) return;
    __threadfence();
    __syncthreads();
    if (warp > 0 || lane > 0 || atomicAdd(step.tables.finished, 1u) + 1 < static_cast<unsigned>(down.row_groups))
        return;
    *step.tables.finished = 0;
    if (course_changes) step.bell.state->all_host = step.bell.state->next_all_host;
    for (int i = 0; i < commit_count; ++i) {
        const Commit commit = step.tables.commits[i];
        if (commit.evicted >= 0) step.residents.slot_of[commit.evicted] = -1;
        step.residents.slot_of[commit.expert] = commit.slot;
    }
}

// ------------------------------------------------------------------------------------------------------- more tokens

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
                    const int n = tile_.host ? 0 : min(kSubBatch, tile_.count - t);
                    for (int i = 0; i < n; ++i) stage(staged + i * kStagedBytes<T>, places[t + i], chunk);
                    __syncwarp();
                    if (!panel) {
                        panel = panels_.take();
                        if (tile_.fill) panels_.copy_out(panel, tile_.fill + offset(unit), chunk_bytes<T>(width));
                    }
                    if (n == 0) break;  // the CPU computes it: it is only kept
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

__device__ __forceinline__ void read_places(const Step &step, const DecodeTile &tile, int *places) {
    const int thread = 32 * threadIdx.y + threadIdx.x;
    if (thread < tile.count) places[thread] = __ldcg(step.tables.order + tile.first + thread);
    __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(32 * kTileWarps, 3)
    gate_up_tiles(const Step step, const Part gate, const Part up, int stages) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ int places[kMostDecodeTokens];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int group = static_cast<int>(blockIdx.x % gate.row_groups);
    const int index = static_cast<int>(blockIdx.x / gate.row_groups);
    const Shared shared(memory, warps, stages, kPanelBytes<T>, kSubBatch * kStagedBytes<T>, kMostDecodeTokens);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (index >= *step.tables.tile_count) return;
    const DecodeTile tile = step.tables.tiles[index];
    if (tile.host && !tile.fill) return;
    const int64_t base[2] = {gate.panels + group * gate.row_group, up.panels + group * up.row_group};
    TileProduct<T, 2> product(tile, base, gate, stages, panels, shared);
    product.begin();
    read_places(step, tile, places);
    if (tile.fill && group == 0) copy_tail(step.residents, tile);
    product.run(places,
                [&](uint8_t *target, int place, int chunk) { stage_input<T>(target, step, place, gate, chunk, lane); });
    if (tile.host) return;
    for (int t = warp; t < tile.count; t += warps)
        write_hidden(step, gate, up, tile.record, places[t], group, shared.total[t * 32 + lane],
                     shared.total[(kMostDecodeTokens + t) * 32 + lane]);
}

// The first `answer_blocks` blocks take the CPU's answer.
template <class T>
__global__ void __launch_bounds__(32 * kTileWarps, 3)
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
    const Shared shared(memory, warps, stages, kPanelBytes<T>, kSubBatch * kStagedBytes<T>, kMostDecodeTokens);
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    // Gate/up lets this kernel start only when it has seen the end of resolve: the tiles are there.
    const bool none = index >= __ldcg(step.tables.tile_count);
    const DecodeTile tile = step.tables.tiles[none ? 0 : index];
    const bool empty = none || (tile.host && !tile.fill);
    const int64_t base[1] = {down.panels + group * down.row_group};
    TileProduct<T, 1> product(tile, base, down, stages, panels, shared);
    if (!empty) product.begin();
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (empty) return;
    read_places(step, tile, places);
    product.run(places, [&](uint8_t *target, int place, int chunk) {
        stage_hidden<T>(target, step, place, down, chunk, lane);
    });
    if (warp == 0 && lane == 0) note_ready(step.bell);
    if (tile.host || r >= down.rows) return;
    for (int t = warp; t < tile.count; t += warps)
        step.rows[places[t] * down.rows + r] = finish_row(shared.total[t * 32 + lane], tile.record, down, r);
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

// ----------------------------------------------------------------------------------------------------------- launches

// budget: bytes of panels in flight in a block. Enough to hide the memory's latency, little enough that several blocks,
// of this kernel and of the next, fit a multiprocessor.
constexpr int kSingleBudget = 112 << 10;
constexpr int kTileBudget = 40 << 10;
template <class T>
DecodeConfig configure(int units, int most_warps, int budget, int staged_rows, int places, int totals) {
    const int others = shared_bytes(most_warps, 1, 0, staged_rows * kStagedBytes<T>, places, totals);
    const int panels = std::max(1, std::min(budget, most_shared_bytes() - kStaticShared - others) / kPanelBytes<T>);
    DecodeConfig c{};
    const int most = std::min({most_warps, units, panels});
    const int rounds = (units + most - 1) / most;
    c.warps = (units + rounds - 1) / rounds;
    c.stages = std::min({rounds, std::max(1, panels / c.warps), 32});
    c.shared_bytes = shared_bytes(c.warps, c.stages, kPanelBytes<T>, staged_rows * kStagedBytes<T>, places, totals);
    return c;
}

dim3 threads(const DecodeConfig &c) { return dim3(32, static_cast<unsigned>(c.warps)); }

template <class T>
DecodeConfig gate_up_config(const Part &gate, int64_t tokens) {
    return tokens == 1 ? configure<T>(2 * gate.chunks, kSinglePlaceWarps, kSingleBudget, 1, 1, 2)
                       : configure<T>(2 * gate.chunks, kTileWarps, kTileBudget, kSubBatch, kMostDecodeTokens,
                                      2 * kMostDecodeTokens);
}
template <class T>
DecodeConfig down_config(const Part &down, int64_t tokens, int64_t k) {
    return tokens == 1
               ? configure<T>(static_cast<int>(k) * down.chunks, kSingleDownWarps, kSingleBudget, 1, 1,
                              static_cast<int>(k))
               : configure<T>(down.chunks, kTileWarps, kTileBudget, kSubBatch, kMostDecodeTokens, kMostDecodeTokens);
}

template <class T>
void launch_gate_up(const Part &gate, const Part &up, const Step &step, const ResolveArguments &arguments,
                    cudaStream_t stream) {
    const auto jobs = static_cast<unsigned>(step.most_tiles * gate.row_groups);
    const DecodeConfig c = gate_up_config<T>(gate, step.tokens);
    if (step.tokens == 1) {
        const int shared = std::max(c.shared_bytes, resolve_shared_bytes(step.residents.experts, arguments.slots));
        launch(gate_up_single<T>, 1 + jobs, threads(c), shared, stream, step, arguments, gate, up, c.stages);
    } else {
        launch(gate_up_tiles<T>, jobs, threads(c), c.shared_bytes, stream, step, gate, up, c.stages);
    }
}

template <class T>
void launch_down(const Part &down, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(down, step.tokens, step.k);
    if (step.tokens == 1) {
        const unsigned jobs = static_cast<unsigned>(down.row_groups) + (step.bell.state ? 1 : 0);
        launch_behind(!step.bell.by_nodes, down_single<T>, jobs, threads(c), c.shared_bytes, stream, step, down,
                      c.stages);
        return;
    }
    const unsigned answers = step.bell.state ? kAnswerBlocks : 0;
    launch_behind(!step.bell.by_nodes, down_tiles<T>,
                  answers + static_cast<unsigned>(step.most_tiles * down.row_groups), threads(c), c.shared_bytes,
                  stream, step, down, c.stages, answers);
    launch(combine_tiles, static_cast<unsigned>((step.tokens * down.rows + 255) / 256), dim3(256), 0, stream, step,
           down.rows);
}

template <class T>
void load(int shared_bytes) {
    allow_shared(gate_up_single<T>, shared_bytes);
    allow_shared(gate_up_tiles<T>, shared_bytes);
    allow_shared(down_single<T>, shared_bytes);
    allow_shared(down_tiles<T>, shared_bytes);
}

struct Kernels {
    void (*load)(int shared_bytes);
    void (*gate_up)(const Part &, const Part &, const Step &, const ResolveArguments &, cudaStream_t);
    void (*down)(const Part &, const Step &, cudaStream_t);
    DecodeConfig (*gate_up_config)(const Part &, int64_t tokens);
    DecodeConfig (*down_config)(const Part &, int64_t tokens, int64_t k);
};
const Kernels kernels[] = {
#define X(T) {load<T>, launch_gate_up<T>, launch_down<T>, gate_up_config<T>, down_config<T>},
    MOEPOOL_QUANT_TYPES(X)
#undef X
};

}  // namespace

void load_decode_kernels(const Matrix &matrix) {
    kernels[matrix.type_index].load(most_shared_bytes() - kStaticShared);
    allow_shared(combine_tiles, 0);
}

StepConfig configure_step(const Matrix &gate, const Matrix &down, int64_t tokens, int64_t k) {
    return {kernels[gate.type_index].gate_up_config(Part(gate), tokens),
            kernels[down.type_index].down_config(Part(down), tokens, k)};
}

bool StepConfig::fits() const {
    const int limit = most_shared_bytes() - kStaticShared;
    return gate_up.shared_bytes <= limit && down.shared_bytes <= limit;
}

std::string DecodeConfig::text() const {
    return std::to_string(warps) + " warps a block, " + std::to_string(stages) + " panels each in flight, " +
           std::to_string(shared_bytes) + " bytes of shared memory";
}

void gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
             cudaStream_t stream) {
    kernels[gate.type_index].gate_up(Part(gate), Part(up), step, arguments, stream);
}

void down_and_combine(const Matrix &down, const Step &step, cudaStream_t stream) {
    kernels[down.type_index].down(Part(down), step, stream);
}

}  // namespace cuda
}  // namespace moepool
