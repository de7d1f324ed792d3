// A decode step of a single token on the device.
#include <algorithm>

#include "cuda/decode_parts.h"
#include "cuda/doorbell_device.h"
#include "cuda/resolve_block.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kGateUpWarps = 16;  // of a block, at most
constexpr int kDownWarps = 16;
constexpr int kMostRounds = 4;  // of panels that a warp multiplies before the block adds sums up
// Bytes of panels in flight in a block. Two blocks fit a multiprocessor.
constexpr int kBudget = 112 << 10;
constexpr int kQuickExperts = 128;  // of which a warp reads the whole map at once

// The expert of a place, looked up here so that its weights are asked for at once: hits need nothing from the books.
struct Looked {
    const uint8_t *record;  // NULL: skipped
    bool missing;           // the books are to be asked
    bool invalid;
    bool host;  // the CPU computes it: only the books say so
};
__device__ __forceinline__ int64_t id_of(const Step &step, int place) {
    return step.bits == 64 ? __ldcg(static_cast<const long long *>(step.ids) + place)
                           : int64_t{__ldcg(static_cast<const int *>(step.ids) + place)};
}
__device__ __forceinline__ Looked found(const Step &step, int64_t id, int slot, bool host_has_all) {
    return {slot >= 0 ? step.residents.arena + slot * step.residents.record_bytes : step.residents.records[id],
            slot < 0 || host_has_all, false, false};
}
__device__ __forceinline__ Looked look_up(const Step &step, int place) {
    const bool host_has_all = hosts_all(step.bell);  // asked for beside the others
    const int64_t id = id_of(step, place);
    if (id < 0 || id >= step.residents.experts) return {nullptr, false, id != -1, false};
    return found(step, id, __ldcg(step.residents.slot_of + id), host_has_all);
}
// The same by a warp, which does not wait for the id before it asks for the slot.
__device__ __forceinline__ Looked look_up_together(const Step &step, int place, int lane) {
    const int experts = step.residents.experts;
    if (experts > kQuickExperts) return look_up(step, place);
    const bool host_has_all = hosts_all(step.bell);
    int slots[kQuickExperts / 32];
#pragma unroll
    for (int i = 0; i < kQuickExperts / 32; ++i)
        slots[i] = 32 * i + lane < experts ? __ldcg(step.residents.slot_of + 32 * i + lane) : -1;
    const int64_t id = id_of(step, place);
    if (id < 0 || id >= experts) return {nullptr, false, id != -1, false};
    int mine = slots[0];
#pragma unroll
    for (int i = 1; i < kQuickExperts / 32; ++i) mine = id / 32 == i ? slots[i] : mine;
    return found(step, id, __shfl_sync(~0u, mine, static_cast<int>(id % 32)), host_has_all);
}

// Gate/up hands over to down, which runs beside it: a count of the blocks of both, 0 between steps. What the block
// wrote in front of a barrier, or this thread did, is seen by those who have waited.
__device__ __forceinline__ void arrive(const Step &step) {
    __threadfence();
    atomicInc(step.tables.arrived, step.parties - 1);
}
__device__ __forceinline__ void wait_for_all_ahead(const Step &step) {
    uint32_t arrived = 0;
    do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(arrived) : "l"(step.tables.arrived) : "memory");
    while (arrived < step.ahead);
    atomicInc(step.tables.arrived, step.parties - 1);
}

// The slot that a place's record goes into, or NULL. L1 may still hold an earlier step's.
__device__ __forceinline__ uint8_t *fill_of(const Step &step, int place) {
    return reinterpret_cast<uint8_t *>(
        __ldcg(reinterpret_cast<const unsigned long long *>(&step.tables.tiles[place].fill)));
}

// Columns 128 * piece .. of the row, four a lane.
__device__ __forceinline__ void read_piece(const Step &step, int64_t row, const Part &part, int piece, int lane,
                                           float (&value)[4]) {
    const int64_t column = 128 * int64_t{piece} + 4 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        value[i] = column < part.columns ? widen(step.x, step.x_dtype, row * part.columns + column + i) : 0.0f;
}
__device__ __forceinline__ void quantise_piece(const float (&value)[4], const Part &part, int piece, int lane,
                                               uint8_t *staged) {
    const int block = 4 * piece + lane / 8;
    quantise_four(value, block < part.columns / kBlockColumns, lane,
                  reinterpret_cast<ActivationBlock *>(staged) + block);
}

// Bytes of the staged row: whole, or of floats a chunk a warp.
template <class T>
MOEPOOL_BOTH int input_bytes(const Part &part, int warps) {
    return (kFloats<T> ? warps : part.chunks) * kStagedBytes<T>;
}

// The books of the step, kept by the first block, and the hidden rows: a block computes 32 columns of one place. Unit u
// is chunk u / 2 of gate (u even) or up; a warp takes units warp, warp + warps, ... . The row is quantised in every
// block, which is quicker than waiting for a kernel that does it once.
template <class T>
__global__ void __launch_bounds__(32 * kGateUpWarps, 2)
    gate_up_single(const __grid_constant__ Step step, const ResolveArguments arguments, const Part gate, const Part up,
                   int stages, int rounds) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    if (blockIdx.x == 0) prepare_books(step, arguments, memory);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (blockIdx.x == 0) {
        const uint32_t sequence = __ldcg(step.tables.sequence) + 1;
        if (step.bell.state)  // beside the others
            resolve_block<true, true>(step, arguments, memory, sequence);
        else
            resolve_block<false, true>(step, arguments, memory, sequence);
        if (warp == 0 && lane == 0 && !step.bell.by_nodes && has_answer(step.bell)) poll_answer(step.bell);
        return;
    }
    __shared__ Looked found_here;
    const Shared shared(memory, warps, stages, kPanelBytes<T>, input_bytes<T>(gate, warps), warps * rounds);
    const unsigned job = blockIdx.x - 1;
    const int place = static_cast<int>(job / gate.row_groups), group = static_cast<int>(job % gate.row_groups);
    const int units = 2 * gate.chunks;
    const int64_t row = place / step.x_per_row;
    const auto offset = [&](int unit) {
        return (unit % 2 ? up.panels + group * up.row_group : gate.panels + group * gate.row_group) +
               unit / 2 * kPanelBytes<T>;
    };
    const auto bytes = [&](int unit) { return chunk_bytes<T>(chunk_width(gate, unit / 2)); };
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    // One warp of a block looks up: all of them at the same lines at once would wait for one another.
    if (warp == 0) {
        const Looked looked = look_up_together(step, place, lane);
        if (lane == 0) found_here = looked;
    }
    float piece[4];
    if constexpr (!kFloats<T>) read_piece(step, row, gate, warp, lane, piece);
    __syncthreads();
    const Looked looked = found_here;
    if (!looked.record) {
        if (warp == 0 && lane == 0) arrive(step);
        return;
    }
    uint8_t *fill = nullptr;
    bool host = false;
    const auto ask_the_books = [&] {  // only they say whether it is to be kept
        // The books' block runs: it is block 0, and blocks are begun in the order of their numbers. CUDA promises that
        // nowhere, but every device does it, and other libraries count on it as well.
        const uint32_t sequence = __ldcg(step.tables.sequence) + 1;
        while (load_acquired(step.tables.resolved) != sequence) {
        }
        fill = step.tables.tiles[place].fill;
        host = step.tables.tiles[place].host;
        if (fill && group == 0) copy_tail(step.residents, {looked.record, fill, 0, 0, 0, 0});
    };
    // With a CPU to compute it, it may not have to be read at all.
    const bool asks_first = looked.missing && step.bell.state;
    if (asks_first) ask_the_books();
    if (host && !fill) {
        if (warp == 0 && lane == 0) arrive(step);
        return;
    }
    for (int s = 0; s < stages; ++s)
        if (const int unit = warp + s * warps; unit < units) panels.fetch(looked.record + offset(unit), bytes(unit));
    if constexpr (!kFloats<T>) {
        for (int p = warp; 128 * p < gate.columns; p += warps) {
            if (p != warp) read_piece(step, row, gate, p, lane, piece);
            quantise_piece(piece, gate, p, lane, shared.staged);
        }
        __syncthreads();
    }
    if (looked.missing && !asks_first) ask_the_books();
    float sums[2] = {};  // of warp 0
    for (int first = 0; first < units; first += warps * rounds) {
        const int end = min(units, first + warps * rounds);
        for (int unit = first + warp; unit < end; unit += warps) {
            const int chunk = unit / 2, width = chunk_width(gate, chunk);
            const uint8_t *staged = shared.staged + (kFloats<T> ? warp : chunk) * kStagedBytes<T>;
            if constexpr (kFloats<T>) {
                stage_input<T>(shared.staged + warp * kStagedBytes<T>, step, place, gate, chunk, lane);
                __syncwarp();
            }
            const uint8_t *panel = panels.take();
            if (fill) panels.copy_out(panel, fill + offset(unit), bytes(unit));
            if (!host) multiply_panel<T, 1>(panel, width, staged, lane, shared.partial + (unit - first) * 32 + lane);
            if (fill) panels.finish_stores();
            __syncwarp();
            const int next = unit + warps * stages;
            if (next < units) panels.fetch(looked.record + offset(next), bytes(next));
        }
        __syncthreads();
        if (warp == 0) {
#pragma unroll 8
            for (int u = 0; u < end - first; u += 2) {
                const int g = u + first % 2, other = u + 1 - first % 2;
                if (g < end - first) sums[0] = __fadd_rn(sums[0], shared.partial[g * 32 + lane]);
                if (other < end - first) sums[1] = __fadd_rn(sums[1], shared.partial[other * 32 + lane]);
            }
        }
        if (end < units) __syncthreads();
    }
    if (warp == 0 && !host) write_hidden(step, gate, up, looked.record, place, group, sums[0], sums[1]);
    __syncwarp();
    if (warp == 0 && lane == 0) arrive(step);
}

// A block computes 32 outputs: of every place, then their weighted sum. Unit u is chunk u % chunks of place u / chunks.
// The kernel starts when all blocks of gate/up run, and waits only for what these hand over.
template <class T>
__global__ void __launch_bounds__(32 * kDownWarps, 2)
    down_single(const Step step, const Part down, int stages, int rounds) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, k = step.k;
    const int group = blockIdx.x, units = k * down.chunks;
    const int64_t r = int64_t{group} * kPanelRows + lane;
    const Shared shared(memory, warps, stages, kPanelBytes<T>, warps * rounds * kStagedBytes<T>, warps * rounds);
    auto *const looked = reinterpret_cast<Looked *>(shared.total + k * 32);
    auto *const weights = reinterpret_cast<float *>(looked + k);
    const auto offset = [&](int unit) {
        return down.panels + group * down.row_group + unit % down.chunks * kPanelBytes<T>;
    };
    const auto bytes = [&](int unit) { return chunk_bytes<T>(chunk_width(down, unit % down.chunks)); };
    // What the CPU computes is read only to be kept.
    const auto reads = [&](int place) { return looked[place].record && (!looked[place].host || fill_of(step, place)); };
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    const bool may_change_course = course_is_due(step.bell);
    for (int j = 32 * warp + lane; j < k; j += 32 * warps) {
        looked[j] = look_up(step, j);
        weights[j] = widen_past_l1(step.weights, step.weights_dtype, j);
    }
    for (int j = warp; j < k; j += warps) shared.total[j * 32 + lane] = 0.0f;
    __syncthreads();
    bool missing = false;
    for (int j = 0; j < k; ++j) missing |= looked[j].missing;
    // The weights are asked for while gate/up is still at work, unless the CPU may have them.
    const bool asks = missing && step.bell.state;
    __shared__ uint2 awaited;  // places that the CPU computes, and the epoch of the request
    if (asks) {
        if (warp == 0 && lane == 0) wait_for_all_ahead(step);
        __syncthreads();
        if (warp == warps - 1 && lane == 31)
            awaited = {static_cast<uint32_t>(__ldcg(&step.bell.state->places)), __ldcg(&step.bell.state->epoch)};
        for (int j = 32 * warp + lane; j < k; j += 32 * warps)
            if (looked[j].missing) looked[j].host = __ldcg(&step.tables.tiles[j].host);
        __syncthreads();
    }
    const auto fetch = [&](int unit) {
        const int place = unit / down.chunks;
        if (reads(place)) panels.fetch(looked[place].record + offset(unit), bytes(unit));
    };
    for (int s = 0; s < stages; ++s)
        if (warp + s * warps < units) fetch(warp + s * warps);
    let_the_next_kernel_start();
    if (!asks && warp == 0 && lane == 0) wait_for_all_ahead(step);
    __syncthreads();
    for (int first = 0; first < units; first += warps * rounds) {
        const int end = min(units, first + warps * rounds);
        for (int unit = first + warp; unit < end; unit += warps)
            if (looked[unit / down.chunks].record && !looked[unit / down.chunks].host)
                stage_hidden<T>(shared.staged + (unit - first) * kStagedBytes<T>, step, unit / down.chunks, down,
                                unit % down.chunks, lane);
        __syncwarp();
        for (int unit = first + warp; unit < end; unit += warps) {
            const int place = unit / down.chunks, chunk = unit % down.chunks;
            if (reads(place)) {
                uint8_t *fill = looked[place].missing ? fill_of(step, place) : nullptr;
                const uint8_t *panel = panels.take();
                if (fill) panels.copy_out(panel, fill + offset(unit), bytes(unit));
                if (!looked[place].host)
                    multiply_panel<T, 1>(panel, chunk_width(down, chunk),
                                         shared.staged + (unit - first) * kStagedBytes<T>, lane,
                                         shared.partial + (unit - first) * 32 + lane);
                if (fill) panels.finish_stores();
                __syncwarp();
            }
            const int next = unit + warps * stages;
            if (next < units) fetch(next);
        }
        __syncthreads();
        // Each place's chunks of these rounds, in their order; behind the last of them, its output.
        for (int j = first / down.chunks + warp; j * down.chunks < end; j += warps) {
            if (!looked[j].record || looked[j].host) continue;
            float total = shared.total[j * 32 + lane];
            for (int u = max(first, j * down.chunks); u < min(end, (j + 1) * down.chunks); ++u)
                total = __fadd_rn(total, shared.partial[(u - first) * 32 + lane]);
            if ((j + 1) * down.chunks <= end && r < down.rows)
                total = finish_row(total, looked[j].record, down.scale, down.bias, r);
            shared.total[j * 32 + lane] = total;
        }
        __syncthreads();
    }
    if (asks && awaited.x) {
        if (warp == 0 && lane == 0) {
            note_ready(step.bell);
            if (step.bell.by_nodes && group == 0) poll_answer(step.bell);
            await_answer(step.bell, awaited.y);
        }
        __syncthreads();
        for (int j = warp; j < k; j += warps)
            if (looked[j].host && r < down.rows) shared.total[j * 32 + lane] = cold_row(step.bell, j, down.rows, r);
        __syncthreads();
    }
    if (warp == 0 && r < down.rows) {
        float y = 0.0f;
        for (int j = 0; j < k; ++j) {
            if (!looked[j].record && !looked[j].invalid) continue;
            y = num::mp_fma(weights[j], looked[j].record ? shared.total[j * 32 + lane] : num::nan(), y);
        }
        y = num::finish(y);
        step.out[r] = y;
    }
    wait_for_kernels_in_front();  // for the kernel behind, which waits for this one alone
    // Every block has looked its slots up and filled its part when the last one is here: now the map may change.
    if (warp == 0 && lane == 0) note_end(step.bell);
    if (group == 0 && warp == 0 && lane == 0) ++*step.tables.sequence;
    const bool course_changes = may_change_course && changes_course(step.bell);
    const int commit_count = missing ? __ldcg(step.tables.commit_count) : 0;
    if (commit_count == 0 && !course_changes) return;
    __threadfence();
    __syncthreads();
    if (warp > 0 || lane > 0 || atomicAdd(step.tables.finished, 1u) + 1 < gridDim.x) return;
    *step.tables.finished = 0;
    if (course_changes) step.bell.state->all_host = step.bell.state->next_all_host;
    for (int i = 0; i < commit_count; ++i) {
        const Commit commit = step.tables.commits[i];
        if (commit.evicted >= 0) step.residents.slot_of[commit.evicted] = -1;
        step.residents.slot_of[commit.expert] = commit.slot;
    }
}

template <class T>
DecodeConfig gate_up_config(const Matrix &gate) {
    const Part part(gate);
    return configure(2 * part.chunks, kGateUpWarps, kMostRounds, kBudget, kPanelBytes<T>,
                     [&](int warps, int stages, int rounds, int panel) {
                         return shared_bytes(warps, stages, panel, input_bytes<T>(part, warps), warps * rounds, 0);
                     });
}
template <class T>
DecodeConfig down_config(const Matrix &down, int64_t k) {
    const int places = static_cast<int>(k);
    return configure(places * Part(down).chunks, kDownWarps, kMostRounds, kBudget, kPanelBytes<T>,
                     [&](int warps, int stages, int rounds, int panel) {
                         return shared_bytes(warps, stages, panel, warps * rounds * kStagedBytes<T>, warps * rounds,
                                             places) +
                                places * static_cast<int>(sizeof(Looked) + sizeof(float));
                     });
}

template <class T>
void launch_gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
                    cudaStream_t stream) {
    const DecodeConfig c = gate_up_config<T>(gate);
    const int shared = std::max(c.shared_bytes, resolve_shared_bytes(step.residents.experts, arguments.slots));
    launch(gate_up_single<T>, 1 + step.ahead, threads(c), shared, stream, step, arguments, Part(gate), Part(up),
           c.stages, c.rounds);
}
template <class T>
void launch_down(const Matrix &down, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(down, step.k);
    launch_behind(!step.bell.by_nodes, down_single<T>, step.parties - step.ahead, threads(c), c.shared_bytes, stream,
                  step, Part(down), c.stages, c.rounds);
}

template <class T>
void load(int shared_bytes) {
    allow_shared(gate_up_single<T>, shared_bytes);
    allow_shared(down_single<T>, shared_bytes);
}

}  // namespace

const DecodeKernels single_kernels[kTypeCount] = {
#define X(T) {load<T>, launch_gate_up<T>, launch_down<T>, gate_up_config<T>, down_config<T>},
    MOEPOOL_QUANT_TYPES(X)
#undef X
};

}  // namespace cuda
}  // namespace moepool
