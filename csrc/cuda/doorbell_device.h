// What the kernels of a step do with the doorbell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.h"
#include "cuda/activate.h"
#include "cuda/books.h"
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
__device__ __forceinline__ uint64_t load_from_host(const uint64_t *at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_to_host(uint32_t *at, uint32_t value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// ------------------------------------------------------------------------------------------------------ the division

// What the books know of the doorbell, in shared memory: the state as the step before has left it. Read a word a
// thread, beside all else that they ask for.
struct Outlook {
    BellState seen;
};
constexpr int kOutlookWords = sizeof(BellState) / sizeof(uint32_t);
__device__ __forceinline__ uint32_t outlook_word(const Bell &bell, int index) {
    return index < kOutlookWords ? __ldcg(reinterpret_cast<const uint32_t *>(bell.state) + index) : 0;
}
__device__ __forceinline__ void keep_word(Outlook &outlook, int index, uint32_t word) {
    if (index < kOutlookWords) reinterpret_cast<uint32_t *>(&outlook.seen)[index] = word;
}

// Whether the CPU computes every place of the step. Looked up by the blocks of a single token's kernels as well, so
// that there the last of them changes it.
__device__ __forceinline__ bool hosts_all(const Step &step, const Outlook &outlook) {
    return step.bell.divides && (step.single ? outlook.seen.all_host : outlook.seen.next_all_host);
}
__device__ __forceinline__ division::Rates rates_of(const Bell &bell, const BellState &state, int load) {
    return {state.measured_ns, state.link_ns, state.fits[load].pace, state.beside, bell.by_nodes};
}

// A step's time for each expert that it wants, times 16. Mostly in 32 bits: the device divides slowly.
__device__ __forceinline__ int64_t for_each(int64_t ns, int wanted) {
    constexpr int64_t kFew = int64_t{1} << 28;
    return ns < kFew ? static_cast<uint32_t>(ns) * 16u / static_cast<uint32_t>(wanted) : ns * 16 / wanted;
}

// The lesson of the step before, which was a trial or not, for the next one. By one thread, when nobody waits for the
// books. Not inlined: its divisions would take registers from all the rest.
__device__ __noinline__ void learn(const Step &step, const Outlook &outlook, bool trial) {
    const BellState &seen = outlook.seen;
    BellState &state = *step.bell.state;
    if (!step.single) state.all_host = seen.next_all_host;
    if (seen.wanted <= 0 || seen.ended <= seen.begun) return;
    const division::Rates rates = rates_of(step.bell, seen, seen.load);
    const auto took = static_cast<int64_t>(seen.ended - seen.begun),
               ready = static_cast<int64_t>(seen.ready - seen.begun);
    if (seen.hosted == 0 && seen.streamed > 0) state.link_ns = division::next_link(rates, seen.streamed, took, trial);
    if (seen.hosted > 0 && !seen.poisoned) {
        // Of a clock that was set back, `ready` is the latest of all for a while.
        if (seen.streamed > 0 && ready > 0 && ready < 2 * took)
            state.beside =
                division::next_beside(rates, seen.streamed, ready, seen.hosted, int64_t{seen.took_ns}, trial);
        division::Fit fit = seen.fits[seen.load];
        division::learn(fit, seen.hosted, seen.took_ns, seen.streamed + seen.copied > 0, trial);
        state.fits[seen.load] = fit;
    }
    division::Course course = seen.course;
    int64_t alone = 0;
    if (division::may_compare(course) && rates.cpu.record_ns)
        alone = for_each(division::finished(rates, seen.wanted, seen.wanted), seen.wanted);
    const bool next = division::advance(course, for_each(took, seen.wanted), alone, step.bell.period);
    state.next_all_host = next;
    state.course_due = course.left <= 1 || seen.course.left <= 1 || seen.next_all_host != seen.all_host;
    state.course = course;
}

// For the lesson, what the step was. Times before `begun` are of an earlier one.
__device__ __forceinline__ void note_step(const Bell &bell, int streamed, int copied, int hosted, int wanted,
                                          int places, unsigned long long begun) {
    BellState &state = *bell.state;
    state.streamed = streamed;
    state.copied = copied;
    state.hosted = hosted;
    state.wanted = wanted;
    state.load = division::load_of(places, wanted);
    state.begun = begun;
}

// How many of the missing experts the CPU computes.
__device__ __forceinline__ int records_for_host(const Step &step, const Outlook &outlook, int missing, int wanted,
                                                int places, int64_t tick) {
    const Bell &bell = step.bell;
    if (missing == 0) return 0;
    if (!bell.divides || hosts_all(step, outlook)) return missing;
    return division::share(rates_of(bell, outlook.seen, division::load_of(places, wanted)), missing, tick);
}

// For the lesson of the next step. By one thread of each block that has done what crossed the link, and at the end:
// there one block's will do, for nobody is to wait for the others' words.
__device__ __forceinline__ void note_ready(const Bell &bell) {
    if (bell.state && bell.divides) atomicMax(&bell.state->ready, device_ns());
}
__device__ __forceinline__ void note_end(const Bell &bell) {
    if (bell.state && bell.divides && blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y)
        bell.state->ended = device_ns();
}
// Whether the CPU computes hits as well, and whether the step may be the last of its course: that is as all blocks see
// it that ask before the step ends, if it is. Others may see that of the step before or behind, which is none. Only
// blocks of a single token's kernels ask. In one word, at which nobody looks before it is used: others are on their
// way.
__device__ __forceinline__ int2 course_of(const Bell &bell) {
    static_assert(offsetof(BellState, course_due) == offsetof(BellState, all_host) + 4);
    return __ldcg(reinterpret_cast<const int2 *>(&bell.state->all_host));
}
__device__ __forceinline__ bool changes_course(const Bell &bell) {
    return __ldcg(&bell.state->next_all_host) != __ldcg(&bell.state->all_host);
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

// Asks the CPU for the rows of the places (expert ids[p]) whose experts `host` marks. By all threads of the block that
// keeps the books. Places are listed in rising order. columns: of gate. Not inlined: it would take registers from steps
// that ask nobody.
__device__ __noinline__ void post(const Step &step, const Outlook &outlook, int64_t columns, bool quantised,
                                  bool floats, const int *ids, const uint8_t *host) {
    const Bell &bell = step.bell;
    __shared__ int listed;
    __shared__ uint32_t tokens_asked[kMostDecodePlaces / 32];  // bits, by activation row
    const int thread = blockDim.x * threadIdx.y + threadIdx.x, threads = blockDim.x * blockDim.y, lane = thread % 32;
    const int places = step.tokens * step.k, warp = thread / 32, warps = threads / 32;
    const unsigned rows = static_cast<unsigned>((places + step.x_per_row - 1) / step.x_per_row);
    const bool ring = !outlook.seen.poisoned;
    const bool single = rows == 1;  // it is asked for in any case
    if (!single) {
        for (int i = thread; i < kMostDecodePlaces / 32; i += threads) tokens_asked[i] = 0;
        __syncthreads();
    }
    if (thread < 32) {
        int count = 0;
        for (int base = 0; base < places; base += 32) {
            const int p = base + lane, id = p < places ? ids[p] : -1, expert = id >= 0 && host[id] ? id : -1;
            const unsigned asked = __ballot_sync(~0u, expert >= 0);
            if (expert >= 0) {
                bell.hosted[count + __popc(asked & ((1u << lane) - 1))] = p;
                if (!single) {
                    const int row = p / step.x_per_row;
                    atomicOr(tokens_asked + row / 32, 1u << row % 32);
                }
            }
            if (ring && p < places) __stcg(bell.experts + p, expert);
            count += __popc(asked);
        }
        if (lane == 0) listed = count;
    }
    if (!single) __syncthreads();
    if (ring) {
        const auto is_asked = [&](unsigned row) { return single || tokens_asked[row / 32] >> row % 32 & 1; };
        // In 32 bits: the device divides slowly.
        const auto pieces = static_cast<unsigned>((columns + kPieceColumns - 1) / kPieceColumns);
        const unsigned chunks = (pieces + 1) / 2, units = rows * pieces;
        if (quantised) {
            auto *input = reinterpret_cast<ActivationChunk *>(bell.input);
            constexpr int kFlight = 2;  // pieces whose floats are loaded at once
            for (unsigned first = warp; first < units; first += kFlight * warps) {
                float value[kFlight][4];
                unsigned row[kFlight], piece[kFlight];
                bool wanted[kFlight];
#pragma unroll
                for (int j = 0; j < kFlight; ++j) {
                    const unsigned unit = first + j * warps;
                    row[j] = single ? 0 : unit / pieces;
                    piece[j] = unit - row[j] * pieces;
                    wanted[j] = unit < units && is_asked(row[j]);
                    const int64_t column = int64_t{piece[j]} * kPieceColumns + 4 * lane;
                    widen_four(step.x, step.x_dtype, row[j] * columns + column, wanted[j] && column < columns,
                               value[j]);
                }
#pragma unroll
                for (int j = 0; j < kFlight; ++j)
                    if (wanted[j])
                        store_piece(quantise_four(value[j]), lane, piece[j], columns, input + row[j] * chunks);
            }
        }
        if (floats) {
            auto *input = reinterpret_cast<float *>(
                bell.input + (quantised ? int64_t{rows} * chunks * static_cast<int64_t>(sizeof(ActivationChunk)) : 0));
            for (unsigned row = 0; row < rows; ++row)
                for (int64_t i = row * columns + thread; i < (row + 1) * columns && is_asked(row); i += threads)
                    input[i] = widen(step.x, step.x_dtype, i);
        }
    }
    __syncthreads();
    if (thread == 0) {
        BellState &state = *bell.state;
        const uint32_t epoch = outlook.seen.epoch + 1;
        state.epoch = epoch;
        state.places = listed;
        if (ring) {
            *reinterpret_cast<int4 *>(bell.request) = {bell.buffer, step.tokens, step.k, step.x_per_row};
            store_to_host(&bell.request->epoch, epoch);
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

// Waits for the answer, or gives it up, and tells all who wait on BellState::arrived. By one thread of the step: if all
// who wait look over the link, the CPU takes four times as long to answer.
__device__ __forceinline__ void poll_answer(const Bell &bell) {
    BellState &state = *bell.state;
    const uint32_t epoch = __ldcg(&state.epoch);
    bool lost = __ldcg(&state.poisoned);
    uint64_t told = 0;
    if (!lost) {
        const unsigned long long begun = device_ns();
        while (doorbell::epoch_of(told = load_from_host(&bell.answer->told)) != epoch) {
            const auto waited = static_cast<int64_t>(device_ns() - begun);  // a clock may be set back
            if (waited < min(bell.timeout_ns, bell.give_up_ns)) continue;
            const bool itself = waited >= bell.timeout_ns;
            if (!itself && !load_from_host(bell.silence)) continue;
            lost = true;
            state.poisoned = 1;
            if (itself) store_to_host(bell.silence, 1);
            bell.trouble->waited_us = static_cast<uint32_t>(min(waited / 1000, int64_t{UINT32_MAX}));
            store_to_host(&bell.trouble->timed_out, itself ? doorbell::kItself : doorbell::kLikeOthers);
            break;
        }
    }
    // Who waits need not see with it what this thread wrote. The rows are read over the link where the CPU wrote them,
    // before it released the epoch that this thread acquired, and lie in no cache of the device: a release would add
    // nothing to that, and take as long as the books' writes do.
    if (lost)
        publish(&state.arrived, epoch);
    else
        store_relaxed(&state.arrived, epoch);
    // A look over a link that is full of records takes as long as these do, so the CPU says how long it took.
    if (bell.divides && !lost) state.took_ns = doorbell::took_of(told);
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
