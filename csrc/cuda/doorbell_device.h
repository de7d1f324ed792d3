// What the kernels of a step do with the doorbell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.h"
#include "cuda/activate.h"
#include "cuda/doorbell.h"
#include "cuda/step.h"
#include "numerics.h"

namespace moepool {
namespace cuda {
namespace {

static_assert(sizeof(ActivationChunk) == 384 && offsetof(ActivationChunk, d) == 256 &&
                  offsetof(ActivationChunk, e) == 288 && offsetof(ActivationChunk, sums) == 320,
              "store_chunk_block writes what the CPU kernels read");

__device__ __forceinline__ unsigned long long device_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ uint32_t load_from_host(const uint32_t *at) {
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_to_host(uint32_t *at, uint32_t value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquired(const uint32_t *at) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_released(uint32_t *at, uint32_t value) {
    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// ------------------------------------------------------------------------------------------------------ the division

// What the books of a step begin with. By one thread.
struct Outlook {
    bool all_host;
    int bias;
};
__device__ __forceinline__ division::Rates rates_of(const BellState &state, int load) {
    return {__ldcg(&state.link_ns), {__ldcg(&state.pace[load].base_ns), __ldcg(&state.pace[load].record_ns)}};
}
__device__ __forceinline__ Outlook begin_books(const Step &step) {
    const Bell &bell = step.bell;
    if (!bell.state || !bell.divides) return {false, 0};
    BellState &state = *bell.state;
    const auto last = [](const auto &field) { return __ldcg(&field); };  // written by other multiprocessors, too
    // Looked up by the blocks of a single token's kernels as well, so that there the last of them changes it.
    const int next_all_host = last(state.next_all_host);
    if (!step.single) state.all_host = next_all_host;
    const bool all_host = step.single ? last(state.all_host) : next_all_host;
    const division::Rates rates = rates_of(state, last(state.load));
    const auto begun = static_cast<int64_t>(last(state.begun)), ended = static_cast<int64_t>(last(state.ended));
    const auto ready = static_cast<int64_t>(last(state.ready)), answered = static_cast<int64_t>(last(state.answered));
    const int wanted = last(state.wanted), streamed = last(state.streamed), hosted = last(state.hosted);
    int bias = last(state.bias);
    if (wanted > 0 && ended > begun) {
        if (streamed > 0 && hosted > 0 && ready && answered)
            state.bias = bias = division::next_bias(rates, bias, ready, answered);
        const int64_t alone = division::finished(rates, wanted, wanted) * 16 / wanted;
        division::Course course{last(state.course.phase),    last(state.course.left),   last(state.course.losses),
                                last(state.course.slots_ns), last(state.course.cpu_ns), last(state.course.step_backs)};
        const int left_before = course.left;
        state.next_all_host =
            division::advance(course, (ended - begun) * 16 / wanted, rates.cpu.record_ns ? alone : 0, bell.period);
        state.course_due = course.left <= 1 || left_before <= 1 || next_all_host != int{all_host};
        state.course = course;
    }
    state.begun = device_ns();
    state.ready = state.answered = state.ended = 0;
    return {all_host, bias};
}

// And end with.
__device__ __forceinline__ void note_step(const Bell &bell, int streamed, int hosted, int wanted, int places) {
    bell.state->streamed = streamed;
    bell.state->hosted = hosted;
    bell.state->wanted = wanted;
    bell.state->load = doorbell::load_class((places + wanted - 1) / max(wanted, 1));
}

// How many of the missing experts the CPU computes.
__device__ __forceinline__ int records_for_host(const Step &step, const Outlook &outlook, int missing, int wanted,
                                                int places, int64_t tick) {
    const Bell &bell = step.bell;
    if (!bell.state || missing == 0) return 0;
    if (!bell.divides || outlook.all_host) return missing;
    const int load = doorbell::load_class((places + wanted - 1) / max(wanted, 1));
    const int share = division::share(rates_of(*bell.state, load), missing, outlook.bias);
    return share ? share : tick % division::kRelearn == 0;
}

// For the lesson of the next step. By one thread of each block, when it has done its hot part, and at its end.
__device__ __forceinline__ void note_ready(const Bell &bell) {
    if (bell.state && bell.divides) atomicMax(&bell.state->ready, device_ns());
}
__device__ __forceinline__ void note_end(const Bell &bell) {
    if (bell.state && bell.divides) atomicMax(&bell.state->ended, device_ns());
}
// Whether the CPU computes hits as well. Only blocks of a single token's kernels ask.
__device__ __forceinline__ bool hosts_all(const Bell &bell) {
    return bell.state && bell.divides && __ldcg(&bell.state->all_host);
}
// Whether this step may be the last of its course: as all blocks see it that ask before it ends, if it is. Others may
// see that of the step before or behind, which is none.
__device__ __forceinline__ bool course_is_due(const Bell &bell) {
    return bell.state && bell.divides && __ldcg(&bell.state->course_due);
}
__device__ __forceinline__ bool changes_course(const Bell &bell) {
    return bell.state && bell.divides && __ldcg(&bell.state->next_all_host) != __ldcg(&bell.state->all_host);
}

// ---------------------------------------------------------------------------------------------------------- the post

constexpr int kPieceColumns = 128;

// Columns 128 * piece .. of a row, as the CPU kernels want them, by one warp. A few whole lines: the link carries what
// an instruction stores to one line at once.
__device__ __forceinline__ void store_piece(const QuantisedFour &made, int lane, int64_t piece, int64_t columns,
                                            ActivationChunk *row) {
    ActivationChunk &chunk = row[piece / 2];
    const int first = static_cast<int>(piece % 2) * 4;  // block of the chunk
    const bool inside = piece * kPieceColumns + lane / 8 * kBlockColumns < columns;
    if (inside) reinterpret_cast<uint32_t *>(chunk.q + first * kBlockColumns)[lane] = made.codes;
    // d, e and both sums of the four blocks: a lane one of them.
    const int from = lane % 4 * 8;
    const uint32_t d = __shfl_sync(~0u, num::bits(made.d), from), e = __shfl_sync(~0u, num::bits(made.e), from);
    const int sum = __shfl_sync(~0u, made.sum, from), other = __shfl_sync(~0u, made.other, from);
    const int kind = lane / 4;
    if (kind > 3 || piece * kPieceColumns + lane % 4 * kBlockColumns >= columns) return;
    reinterpret_cast<uint32_t *>(chunk.d)[kind * kChunkBlocks + first + lane % 4] = kind == 0   ? d
                                                                                    : kind == 1 ? e
                                                                                    : kind == 2
                                                                                        ? static_cast<uint32_t>(sum)
                                                                                        : static_cast<uint32_t>(other);
}

// Asks the CPU for the rows of the places that `wants` names (an expert, or -1). By all threads of the block that keeps
// the books. Places are listed in rising order. columns: of gate.
template <class Wants>
__device__ __forceinline__ void post(const Step &step, int64_t columns, bool quantised, const Wants &wants) {
    const Bell &bell = step.bell;
    __shared__ int listed;
    __shared__ uint32_t tokens_asked[kMostDecodePlaces / 32];  // bits, by activation row
    const int thread = blockDim.x * threadIdx.y + threadIdx.x, threads = blockDim.x * blockDim.y, lane = thread % 32;
    const int places = step.tokens * step.k, warp = thread / 32, warps = threads / 32;
    const int64_t rows = (places + step.x_per_row - 1) / step.x_per_row;
    const bool ring = !__ldcg(&bell.state->poisoned);
    const bool single = rows == 1;  // it is asked for in any case
    for (int i = thread; i < kMostDecodePlaces / 32; i += threads) tokens_asked[i] = 0;
    __syncthreads();
    if (thread < 32) {
        int count = 0;
        for (int base = 0; base < places; base += 32) {
            const int p = base + lane, expert = p < places ? wants(p) : -1;
            const unsigned asked = __ballot_sync(~0u, expert >= 0);
            if (expert >= 0) {
                bell.hosted[count + __popc(asked & ((1u << lane) - 1))] = p;
                const int row = p / step.x_per_row;
                atomicOr(tokens_asked + row / 32, 1u << row % 32);
            }
            if (ring && p < places) __stcg(bell.experts + p, expert);
            count += __popc(asked);
        }
        if (lane == 0) listed = count;
    }
    if (!single) __syncthreads();
    if (ring) {
        const auto is_asked = [&](int64_t row) { return single || tokens_asked[row / 32] >> row % 32 & 1; };
        if (quantised) {
            const int64_t pieces = (columns + kPieceColumns - 1) / kPieceColumns, chunks = (pieces + 1) / 2;
            auto *input = reinterpret_cast<ActivationChunk *>(bell.input);
            constexpr int kFlight = 2;  // pieces whose floats are loaded at once
            for (int64_t unit = warp; unit < rows * pieces; unit += kFlight * warps) {
                float value[kFlight][4];
#pragma unroll
                for (int j = 0; j < kFlight; ++j) {
                    const int64_t at = unit + j * warps, row = at / pieces;
                    const int64_t column = at % pieces * kPieceColumns + 4 * lane;
                    const bool wanted = at < rows * pieces && column < columns && is_asked(row);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        value[j][i] = wanted ? widen(step.x, step.x_dtype, row * columns + column + i) : 0.0f;
                }
#pragma unroll
                for (int j = 0; j < kFlight; ++j) {
                    const int64_t at = unit + j * warps, row = at / pieces;
                    if (at < rows * pieces && is_asked(row))
                        store_piece(quantise_four(value[j]), lane, at % pieces, columns, input + row * chunks);
                }
            }
        } else {
            auto *input = reinterpret_cast<float *>(bell.input);
            for (int64_t i = thread; i < rows * columns; i += threads)
                if (is_asked(i / columns)) input[i] = widen(step.x, step.x_dtype, i);
        }
    }
    __syncthreads();
    if (thread == 0) {
        BellState &state = *bell.state;
        const uint32_t epoch = __ldcg(&state.epoch) + 1;
        state.epoch = epoch;
        state.places = listed;
        if (ring) {
            *reinterpret_cast<int4 *>(bell.request) = {bell.buffer, step.tokens, step.k, step.x_per_row};
            store_to_host(&bell.request->epoch, epoch);
            if (bell.divides) state.posted = device_ns();
        }
    }
}
// In place of a post.
__device__ __forceinline__ void post_nothing(const Bell &bell) {
    if (bell.state && threadIdx.x == 0 && threadIdx.y == 0) bell.state->places = 0;
}

// -------------------------------------------------------------------------------------------------------- the answer

// Whether the step waits for the CPU. To be asked behind the kernel that posts.
__device__ __forceinline__ bool has_answer(const Bell &bell) { return bell.state && __ldcg(&bell.state->places) > 0; }

// Waits for the answer, or gives it up, and tells all who wait on BellState::arrived. By one thread of the step: nobody
// else looks over the link.
__device__ __forceinline__ void poll_answer(const Bell &bell) {
    BellState &state = *bell.state;
    const uint32_t epoch = __ldcg(&state.epoch);
    const int load = __ldcg(&state.load);
    bool lost = __ldcg(&state.poisoned);
    if (!lost) {
        const unsigned long long begun = device_ns();
        while (load_from_host(&bell.answer->epoch) != epoch) {
            if (device_ns() - begun < bell.timeout_ns) continue;
            lost = true;
            state.poisoned = 1;
            bell.trouble->epoch = epoch;
            store_to_host(&bell.trouble->timed_out, 1);
            break;
        }
    }
    store_released(&state.arrived, epoch);
    if (!bell.divides || lost) return;
    // A look over a link that is full of records takes as long as these do, so the CPU says when it was done.
    const uint2 pace = __ldcv(reinterpret_cast<const uint2 *>(bell.answer->pace + load));
    const uint32_t took = __ldcv(&bell.answer->took_ns);
    state.pace[load] = {pace.x, pace.y};
    state.answered = __ldcg(&state.posted) + division::kRoundTripNs + took;
}

// Waits until the answer to the step's request is there, or lost. By one thread of a block; a barrier of the block has
// to follow.
__device__ __forceinline__ void await_answer(const Bell &bell, uint32_t epoch) {
    while (load_acquired(&bell.state->arrived) != epoch) {
    }
}
__device__ __forceinline__ bool is_lost(const Bell &bell) { return __ldcg(&bell.state->poisoned); }

// Element `row` of what the CPU computed of a place, read over the link; NaN if it is lost.
__device__ __forceinline__ float cold_row(const Bell &bell, int64_t place, int64_t columns, int64_t row) {
    const float value = __ldcv(bell.rows + place * columns + row);  // beside the question whether it is lost
    return is_lost(bell) ? num::nan() : value;
}

// Brings the rows of the CPU to Step::rows, NaN in their place if they do not come. By all threads of blocks 0 ..
// blocks - 1, behind the kernel that posts.
__device__ __forceinline__ void take_answer(const Step &step, int64_t columns, int block, int blocks) {
    const Bell &bell = step.bell;
    __shared__ bool lost;
    const int count = __ldcg(&bell.state->places);
    if (count == 0) return;
    const int thread = blockDim.x * threadIdx.y + threadIdx.x, threads = blockDim.x * blockDim.y;
    if (thread == 0) {
        if (block == 0) poll_answer(bell);
        await_answer(bell, __ldcg(&bell.state->epoch));
        lost = is_lost(bell);
    }
    __syncthreads();
    // Many reads are in flight, for each takes a microsecond.
    const auto copy = [&](auto *target, const auto *source, int size, const auto &nothing) {
        using Piece = std::remove_reference_t<decltype(*target)>;
        const int total = count * size, stride = blocks * threads;
        constexpr int kFlight = 8;
        for (int first = block * threads + thread; first < total; first += kFlight * stride) {
            Piece piece[kFlight];
            int64_t at[kFlight];
#pragma unroll
            for (int j = 0; j < kFlight; ++j) {
                const int i = first + j * stride;
                at[j] = i < total ? int64_t{__ldcg(bell.hosted + i / size)} * size + i % size : -1;
            }
#pragma unroll
            for (int j = 0; j < kFlight; ++j)
                if (at[j] >= 0) piece[j] = lost ? nothing : __ldcv(source + at[j]);
#pragma unroll
            for (int j = 0; j < kFlight; ++j)
                if (at[j] >= 0) target[at[j]] = piece[j];
        }
    };
    const float none = num::nan();
    if (columns % 4 == 0)
        copy(reinterpret_cast<float4 *>(step.rows), reinterpret_cast<const float4 *>(bell.rows),
             static_cast<int>(columns / 4), float4{none, none, none, none});
    else
        copy(step.rows, bell.rows, static_cast<int>(columns), none);
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
