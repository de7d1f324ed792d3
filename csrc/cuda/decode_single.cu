// A decode step of a single token on the device.
#include <algorithm>

#include "cuda/decode_parts.h"
#include "cuda/doorbell_device.h"
#include "cuda/look_up.h"
#include "cuda/resolve_block.h"

namespace moepool {
namespace cuda {

namespace {

using namespace single_token;

// The dynamic shared memory of a block.
struct Shared {
    uint8_t *panels;     // [warps][stages][panel]
    uint8_t *staged;     // chunks of activation rows
    uint64_t *barriers;  // [warps][stages]
    float *partial;      // [partials][32]: sums of chunks
    float *total;        // [matrices * places][32]

    __device__ Shared(uint8_t *memory, int warps, int stages, int panel_bytes, int staged_bytes, int partials)
        : panels(memory),
          staged(panels + warps * stages * panel_bytes),
          barriers(reinterpret_cast<uint64_t *>(staged + staged_bytes)),
          partial(reinterpret_cast<float *>(barriers + warps * stages)),
          total(partial + partials * 32) {}
};

// A panel in shared memory times one staged row: its sum goes to *out.
template <class T>
__device__ __forceinline__ void multiply_row(const uint8_t *panel, int width, const uint8_t *staged, int lane,
                                             float *out) {
    float sum[1] = {};
    multiply_panel<T, 1>(panel, width, staged, lane, sum);
    *out = sum[0];
}

// Waits for the books. Their block runs: it is block 0 of gate/up, and blocks are begun in the order of their numbers.
// CUDA promises that nowhere, but every device does it, and other libraries count on it as well.
__device__ __forceinline__ void wait_for_books(const Step &step, uint32_t number) {
    while (load_acquired(step.tables.resolved) != number) {
    }
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
    widen_four(step.x, step.x_dtype, row * part.columns + column, column < part.columns, value);
}
__device__ __forceinline__ void quantise_piece(const float (&value)[4], const Part &part, int piece, int lane,
                                               uint8_t *staged) {
    const int block = 4 * piece + lane / 8;
    quantise_four(value, block < part.columns / kBlockColumns, lane,
                  reinterpret_cast<ActivationBlock *>(staged) + block);
}

// The books of the step, kept by the first block, and the hidden rows: a block computes 32 columns of one place. Unit u
// is chunk u / 2 of gate (u even) or up; a warp takes units warp, warp + warps, ... . The row is quantised in every
// block, which is quicker than waiting for a kernel that does it once. kBell: the pool has a doorbell.
template <class T, bool kBell>
__global__ void __launch_bounds__(32 * kGateUpWarps, 2)
    gate_up_single(const __grid_constant__ Step step, const ResolveArguments arguments, const Part gate, const Part up,
                   int stages, int rounds) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    if (blockIdx.x == 0) {
        prepare_books(step, arguments, memory);
        wait_for_kernels_in_front();
        let_the_next_kernel_start();
        resolve_block<kBell, true>(step, arguments, memory, number_of(step));  // beside the others
        if (kBell && warp == 0 && lane == 0 && !step.bell.by_nodes && has_answer(step.bell)) poll_answer(step.bell);
        return;
    }
    const int job = static_cast<int>(blockIdx.x) - 1, row_groups = gate.row_groups;
    const int place = job / row_groups, group = job % row_groups;
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    // One warp of a block looks up: all of them at the same lines at once would wait for one another.
    __shared__ Looked found_here;
    Asked asked;
    if (warp == 0) asked = ask<kBell>(step, place, lane);
    const Shared shared(memory, warps, stages, kPanelBytes<T>, input_bytes<T>(gate, warps), warps * rounds);
    const int units = 2 * gate.chunks;
    const int64_t row = step.x_per_row == 1 ? place : 0;
    const int64_t gate_offset = gate.panels + group * gate.row_group, up_offset = up.panels + group * up.row_group;
    const auto offset = [&](int unit) { return (unit & 1 ? up_offset : gate_offset) + (unit >> 1) * kPanelBytes<T>; };
    const int full = chunk_bytes<T>(kChunkColumns), last = chunk_bytes<T>(gate.last_width);
    const auto bytes = [&](int unit) { return (unit >> 1) + 1 < gate.chunks ? full : last; };
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    if (warp == 0) {
        const Looked looked = take<kBell>(step, place, asked);
        if (lane == 0) found_here = looked;
    }
    float piece[4];
    if constexpr (!kFloats<T>) read_piece(step, row, gate, warp, lane, piece);
    __syncthreads();
    const Looked looked = found_here;
    if (!looked.record) return;
    uint8_t *fill = nullptr;
    bool host = false;
    const auto ask_the_books = [&] {  // only they say whether it is to be kept
        wait_for_books(step, number_of(step));
        fill = step.tables.tiles[place].fill;
        if (kBell) host = step.tables.tiles[place].host;
        if (fill && group == 0) copy_tail(step.residents, {looked.record, fill, 0, 0, 0});
    };
    // With a CPU to compute it, it may not have to be read at all.
    if (kBell && looked.missing) ask_the_books();
    if (kBell && host && !fill) return;
    // A warp's first panels. It asks for more only if these fill its stages, so its own count need not know.
    const auto start = [&](Panels theirs, int of) {
        for (int unit = of; unit < min(units, of + stages * warps); unit += warps)
            theirs.fetch(looked.record + offset(unit), bytes(unit));
    };
    // Half of the warps begin, and each lets another begin when its first panel is there. All at once would fill the
    // memory's queues: down, which looks its experts up meanwhile, would wait behind all of them.
    const int beginners = Panels::kAsynchronous ? (warps + 1) / 2 : warps;
    if (warp < beginners) start(panels, warp);
    const uint32_t number = number_of(step);
    if constexpr (!kFloats<T>) {
        for (int p = warp; 128 * p < gate.columns; p += warps) {
            if (p != warp) read_piece(step, row, gate, p, lane, piece);
            quantise_piece(piece, gate, p, lane, shared.staged);
        }
        __syncthreads();
    }
    if (!kBell && looked.missing) ask_the_books();
    float sums[2] = {};  // of warp 0
    for (int first = 0; first < units; first += warps * rounds) {
        const int end = min(units, first + warps * rounds);
        for (int unit = first + warp; unit < end; unit += warps) {
            const int chunk = unit >> 1, width = chunk_width(gate, chunk);
            const uint8_t *staged = shared.staged + (kFloats<T> ? warp : chunk) * kStagedBytes<T>;
            if constexpr (kFloats<T>) {
                stage_floats(shared.staged + warp * kStagedBytes<T>, step,
                             row * gate.columns + int64_t{chunk} * kChunkColumns, width, lane);
                __syncwarp();
            }
            const uint8_t *panel = panels.take();
            if (unit == warp && warp + beginners < warps) start(panels.of_warp(beginners), warp + beginners);
            if (fill) panels.copy_out(panel, fill + offset(unit), bytes(unit));
            if (!kBell || !host)
                multiply_row<T>(panel, width, staged, lane, shared.partial + (unit - first) * 32 + lane);
            if (fill) panels.finish_stores();
            __syncwarp();
            const int next = unit + warps * stages;
            if (next < units) panels.fetch(looked.record + offset(next), bytes(next));
        }
        __syncthreads();
        static_assert(kMostRounds % 2 == 0, "a unit of gate comes first in each of the rounds");
        if (warp == 0) {
#pragma unroll 4
            for (int u = 0; u < end - first; u += 2) {
                sums[0] = __fadd_rn(sums[0], shared.partial[u * 32 + lane]);
                sums[1] = __fadd_rn(sums[1], shared.partial[(u + 1) * 32 + lane]);
            }
        }
        if (end < units) __syncthreads();
    }
    if (warp > 0 || (kBell && host)) return;
    const int64_t r = group * kPanelRows + lane;
    hand_hidden(step, gate, place, group, r, hidden_of(gate, up, looked.record, r, sums[0], sums[1]), number);
}

// A unit of down: chunk `chunk` of place `place`, or the distance of two.
struct Unit {
    int place, chunk;
    __device__ Unit(int number, int chunks) : place(number / chunks), chunk(number % chunks) {}
    __device__ __forceinline__ void add(const Unit &other, int chunks) {
        place += other.place;
        chunk += other.chunk;
        if (chunk < chunks) return;
        chunk -= chunks;
        ++place;
    }
};

// A block computes 32 outputs: of every place, then their weighted sum. Unit u is chunk u % chunks of place u / chunks.
// The kernel starts when all blocks of gate/up run, and waits only for what these hand over.
template <class T, bool kBell>
__global__ void __launch_bounds__(32 * kDownWarps, 2)
    down_single(const __grid_constant__ Step step, const Part down, int stages, int rounds) {
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, k = step.k, chunks = down.chunks;
    // Before all else: soon the weights of gate/up are on their way, and loads behind them take long. What is read here
    // was written before gate/up: each of its blocks had waited for that before it let this kernel start.
    Asked asked;
    float weight = 0.0f;
    if (warp == 0) {
        asked = ask<kBell>(step, lane < k ? lane : -1, lane);
        if (lane < k) weight = widen_past_l1(step.weights, step.weights_dtype, lane);
    }
    const uint32_t number = number_of(step);
    const int group = blockIdx.x, units = k * chunks;
    const int r = group * kPanelRows + lane;
    const Shared shared(memory, warps, stages, kPanelBytes<T>, warps * kStagedBytes<T>, warps * rounds);
    uint8_t *const staged = shared.staged + warp * kStagedBytes<T>;
    auto *const looked = reinterpret_cast<Looked *>(shared.total + k * 32);
    auto *const weights = reinterpret_cast<float *>(looked + k);
    __shared__ bool may_change_course;
    __shared__ uint2 awaited;  // places that the CPU computes, and the epoch of the request
    const int64_t group_offset = down.panels + group * down.row_group;
    const int full = chunk_bytes<T>(kChunkColumns), last = chunk_bytes<T>(down.last_width);
    const auto offset = [&](const Unit &unit) { return group_offset + unit.chunk * kPanelBytes<T>; };
    const auto bytes = [&](const Unit &unit) { return unit.chunk + 1 < chunks ? full : last; };
    const Unit stride(warps, chunks), stride_of_round(warps * rounds, chunks);
    Unit mine(warp, chunks);  // the unit that this warp multiplies next
    Unit next = mine;         // and asks for
    // What the CPU computes is read only to be kept.
    const auto reads = [&](const Looked &one, int place) {
        return one.record && (!kBell || !one.host || fill_of(step, place));
    };
    Panels panels(shared.panels + warp * stages * kPanelBytes<T>, shared.barriers + warp * stages, stages,
                  kPanelBytes<T>, lane);
    bool absent = false;
    if (warp == 0) {
        if (kBell && lane == 0) may_change_course = asked.course.y != 0;
        for (int base = 0; base < k; base += 32) {
            const int j = base + lane < k ? base + lane : -1;
            if (base > 0) {
                asked = ask<kBell>(step, j, lane);
                if (j >= 0) weight = widen_past_l1(step.weights, step.weights_dtype, j);
            }
            const Looked one = take<kBell>(step, j, asked);
            if (j < 0) continue;
            absent |= one.missing;
            looked[j] = one;
            weights[j] = weight;
        }
    }
    const bool missing = __syncthreads_or(absent), asks = kBell && missing;
    const auto fetch = [&] {
        if (next.place >= k) return;
        const Looked one = looked[next.place];
        if (reads(one, next.place)) panels.fetch(one.record + offset(next), bytes(next));
        next.add(stride, chunks);
    };
    // The weights are asked for while gate/up is still at work, unless the CPU may have them.
    int begun = 0;
#pragma unroll 1
    for (; begun < stages && !(kBell && next.place < k && looked[next.place].missing); ++begun) fetch();
    if (asks) {
        if (warp == 0 && lane == 0) wait_for_books(step, number);
        __syncthreads();
        if (warp == warps - 1 && lane == 31)
            awaited = {static_cast<uint32_t>(__ldcg(&step.bell.state->places)), __ldcg(&step.bell.state->epoch)};
        for (int j = 32 * warp + lane; j < k; j += 32 * warps)
            if (looked[j].missing) looked[j].host = __ldcg(&step.tables.tiles[j].host);
        __syncthreads();
    }
    if constexpr (kBell) {
#pragma unroll 1
        for (; begun < stages; ++begun) fetch();
    }
    let_the_next_kernel_start();
    // Places that take no part: a weight of 0 leaves a sum as it is, but for the sign of a zero, which finish() takes.
    for (int j = warp; j < k; j += warps) {
        if (looked[j].record) continue;
        shared.total[j * 32 + lane] = looked[j].invalid ? num::nan() : 0.0f;
        if (lane == 0) weights[j] = 0.0f;
    }
    Unit round(0, 1);  // the first of these rounds
#pragma unroll 1
    for (int first = 0; first < units; first += warps * rounds) {
        const int end = min(units, first + warps * rounds);
        float *partial = shared.partial + warp * 32 + lane;
#pragma unroll 1
        for (int unit = first + warp; unit < end; unit += warps) {
            const Looked one = looked[mine.place];
            uint8_t *fill = nullptr;
            if (one.missing && one.record) {
                if (!kBell) wait_for_books(step, number);
                fill = fill_of(step, mine.place);
            }
            const bool computes = one.record && (!kBell || !one.host);
            // What gate/up hands over is mostly there before the weights.
            if (computes) {
                const Quad quad = ask_hidden<T>(step, mine.place, down, mine.chunk, lane);
                await_hidden<T>(quad, staged, step, mine.place, down, mine.chunk, number, lane);
                __syncwarp();
            }
            if (computes || fill) {
                const uint8_t *panel = panels.take();
                if (fill) panels.copy_out(panel, fill + offset(mine), bytes(mine));
                if (computes) multiply_row<T>(panel, chunk_width(down, mine.chunk), staged, lane, partial);
                if (fill) panels.finish_stores();
                __syncwarp();
            }
            partial += warps * 32;
            mine.add(stride, chunks);
            fetch();
        }
        __syncthreads();
        // Each place's chunks of these rounds, in their order; behind the last of them, its output.
#pragma unroll 1
        for (int j = round.place + warp, u = j * chunks; u < end; j += warps, u += warps * chunks) {
            const Looked one = looked[j];
            if (!one.record || (kBell && one.host)) continue;
            const bool whole = u + chunks <= end;
            float total = u < first ? shared.total[j * 32 + lane] : 0.0f;
            const float *from = shared.partial + (max(first, u) - first) * 32 + lane;
            const float *const to = shared.partial + (min(end, u + chunks) - first) * 32 + lane;
#pragma unroll 1
            for (; from < to; from += 32) total = __fadd_rn(total, *from);
            if (whole && r < down.rows) total = finish_row(total, one.record, down.scale, down.bias, r);
            shared.total[j * 32 + lane] = total;
        }
        round.add(stride_of_round, chunks);
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
    if (kBell && warp == warps - 1 && lane == 0) note_end(step.bell);
    if (warp == 0) {
        float y = 0.0f;
#pragma unroll 4
        for (int j = 0; j < k; ++j) y = num::mp_fma(weights[j], shared.total[j * 32 + lane], y);
        if (r < down.rows) step.out[r] = num::finish(y);
    }
    wait_for_kernels_in_front();  // for the kernel behind, which waits for this one alone
    // Every block has looked its slots up and filled its part when the last one is here: now the map may change.
    if (warp == warps - 1 && lane == 0) count_step(step);
    const bool course_changes = kBell && may_change_course && changes_course(step.bell);
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

static_assert(sizeof(Looked) + sizeof(float) == kPlaceBytes);

template <class T>
void launch_gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
                    cudaStream_t stream) {
    const DecodeConfig c = gate_up_config<T>(gate, most_dynamic_bytes());
    const int shared = std::max(c.shared_bytes, resolve_shared_bytes(step.residents.experts, arguments.slots));
    launch(step.bell.state ? gate_up_single<T, true> : gate_up_single<T, false>,
           static_cast<unsigned>(1 + step.k * gate.row_groups()), threads(c), shared, stream, step, arguments,
           Part(gate), Part(up), c.stages, c.rounds);
}
template <class T>
void launch_down(const Matrix &down, const Step &step, cudaStream_t stream) {
    const DecodeConfig c = down_config<T>(down, step.k, most_dynamic_bytes());
    launch_behind(!step.bell.by_nodes, step.bell.state ? down_single<T, true> : down_single<T, false>,
                  static_cast<unsigned>(down.row_groups()), threads(c), c.shared_bytes, stream, step, Part(down),
                  c.stages, c.rounds);
}

template <class T>
void load(int shared_bytes) {
    allow_shared(gate_up_single<T, false>, shared_bytes);
    allow_shared(gate_up_single<T, true>, shared_bytes);
    allow_shared(down_single<T, false>, shared_bytes);
    allow_shared(down_single<T, true>, shared_bytes);
}

}  // namespace

const DecodeKernels single_kernels[kTypeCount] = {
#define X(T) {load<T>, launch_gate_up<T>, launch_down<T>, gate_up_config<T>, down_config<T>},
    MOEPOOL_QUANT_TYPES(X)
#undef X
};

}  // namespace cuda
}  // namespace moepool
