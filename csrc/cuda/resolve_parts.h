// What a step of the residency law works with on a thread block, and the parts of the law that are more than the
// functions of pool/policy.h.
#pragma once

#include <cstdint>

#include "cuda/books.h"
#include "cuda/doorbell_device.h"
#include "cuda/resolve.h"
#include "pool/policy.h"
#include "pool/trace.h"

namespace moepool {
namespace cuda {
namespace {

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value, int lane, int values = 32) {
    for (int step = 1; step < values; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__device__ __forceinline__ int64_t read_id(const Step &step, int place) {
    return step.bits == 64 ? static_cast<const int64_t *>(step.ids)[place]
                           : int64_t{static_cast<const int32_t *>(step.ids)[place]};
}

// A block's threads, as one row of whole warps.
struct Threads {
    int thread, threads;
    __device__ Threads() : thread(blockDim.x * threadIdx.y + threadIdx.x), threads(blockDim.x * blockDim.y) {}
};

// Calls f(i) for each i below n, a thread each. Not unrolled, as the compiler would: mostly a thread has one.
template <class F>
__device__ __forceinline__ void each(int n, const F &f) {
    const Threads t;
#pragma unroll 1
    for (int i = t.thread; i < n; i += t.threads) f(i);
}
// The same, but also for i up to the next multiple of the threads, so that whole warps are there.
template <class F>
__device__ __forceinline__ void each_together(int n, const F &f) {
    const Threads t;
#pragma unroll 1
    for (int base = 0; base < n; base += t.threads) f(base + t.thread);
}

// Counts of two kinds in a word.
struct Pair {
    uint32_t word;
    static __device__ __forceinline__ Pair of(int low, int high) {
        return {static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16};
    }
    __device__ __forceinline__ int low() const { return static_cast<int>(word & 0xffff); }
    __device__ __forceinline__ int high() const { return static_cast<int>(word >> 16); }
};

// What a step works with, in shared memory.
struct Tally {
    unsigned long long bad;  // the first place out of range
    int admissions, evictions;
    uint32_t *ring;          // DeviceState::trace
    uint32_t absentees[32];  // bits, by expert: wanted and in no slot
    Pair found[32];          // by 32 experts: hits and misses
    Pair placed[32];         // places and tiles; of more tokens than one
    // Of a pool with a doorbell:
    Outlook outlook;
    unsigned long long begun;  // when the step began, for its lesson
    Step step;                 // for what is not inlined, to which parameters of the kernel are memory far away
};
static_assert(sizeof(Tally) <= kTallyBytes, "resolve_shared_bytes has room for it");

struct Books {
    Tally &tally;
    Use *uses;               // by expert
    int64_t *worth;          // by slot; of an election, the votes by expert
    const uint8_t **record;  // by expert: in host memory
    int *count;              // by expert: places
    Pair *first;             // places and tiles in front of its own, without those of the 32s before
    int *slot;               // before the step, or -1
    int *meets;              // of a missing expert: which victim
    int *missing;            // experts, rising
    int *claims;             // theirs, negative
    int *ranked;             // the same experts in the order in which they come in
    int *inside;             // by slot: its expert
    int *victims;            // slots; -1: there is none, or the miss that met it may not replace it
    int *id;                 // by place
    int *turn;               // by place: which of its expert's
    uint8_t *host;           // by expert: the CPU computes it, if it computes any

    __device__ Books(uint8_t *memory, int experts, int slots)
        : tally(*reinterpret_cast<Tally *>(memory)),
          uses(reinterpret_cast<Use *>(memory + kTallyBytes)),
          worth(reinterpret_cast<int64_t *>(uses + experts)),
          record(reinterpret_cast<const uint8_t **>(worth + experts)),
          count(reinterpret_cast<int *>(record + experts)),
          first(reinterpret_cast<Pair *>(count + experts)),
          slot(reinterpret_cast<int *>(first + experts)),
          meets(slot + experts),
          missing(meets + experts),
          claims(missing + experts),
          ranked(claims + experts),
          inside(ranked + experts),
          victims(inside + slots),
          id(victims + slots),
          turn(id + kMostDecodePlaces),
          host(reinterpret_cast<uint8_t *>(turn + kMostDecodePlaces)) {}
};
static_assert(sizeof(Use) == 16, "a use is one load");

// Before the step: what it reads was last used a step ago, so let it come to L2 while the kernel in front ends. By all
// threads of the block; the memory is resolve_block's.
__device__ __forceinline__ void prepare_books(const Step &step, const ResolveArguments &a, uint8_t *memory) {
    const int experts = step.residents.experts;
    const Books books(memory, experts, a.slots);
    const auto bring = [](const auto *from, int count) {
        constexpr int kLine = 128;
        const auto *bytes = reinterpret_cast<const char *>(from);
        each((count * static_cast<int>(sizeof(*from)) + kLine - 1) / kLine,
             [&](int line) { prefetch(bytes + kLine * line); });
    };
    bring(a.state, 1);
    bring(step.residents.slot_of, experts);
    bring(a.uses, experts);
    bring(a.expert_in, a.slots);
    bring(step.residents.records, experts);
    if (step.bell.state) bring(step.bell.state, 1);
    if (step.bell.state)
        each(sizeof(Step) / 4, [&](int i) {
            reinterpret_cast<uint32_t *>(&books.tally.step)[i] = reinterpret_cast<const uint32_t *>(&step)[i];
        });
    each(experts, [&](int e) { books.count[e] = 0; });
    if (Threads().thread == 0) {
        books.tally.bad = ~0ull;
        books.tally.admissions = books.tally.evictions = 0;
    }
    __syncthreads();
}

// Calls put(i, rank) for each i below n whose key is not kNever: its rank in rising (key, i). Some lanes a key, as many
// as there are; all threads of the block.
template <class Key, class Put>
__device__ __forceinline__ void rank_rising(const Key *keys, int n, const Put &put) {
    const Threads t;
    if (n == 0) return;
    int shift = min(__clz(n) - __clz(t.threads), 5);
    if (shift > 0 && n << shift > t.threads) --shift;
    shift = max(shift, 0);
    const int lanes = 1 << shift, part = t.thread & (lanes - 1);
#pragma unroll 1
    for (int base = 0; base < n; base += t.threads >> shift) {
        const int i = base + (t.thread >> shift);
        const Key mine = i < n ? keys[i] : Key{};
        const bool ranks = i < n && mine != policy::kNever;
        int rank = 0;
        if (ranks) {
            const Key up_to = mine + 1;  // those in front of it win ties
#pragma unroll 2
            for (int other = part; other < n; other += lanes) rank += keys[other] < (other < i ? up_to : mine);
        }
        for (int step = 1; step < 32; step *= 2) {
            const int others = __shfl_xor_sync(~0u, rank, step);
            if (step < lanes) rank += others;
        }
        if (ranks && part == 0) put(i, rank);
    }
}

// Residency::elect. The uses of all experts change.
__device__ inline void elect(const PolicyConfig &p, const Books &books, int experts, int slots, uint32_t election) {
    each(experts, [&](int e) {
        const int64_t votes = policy::votes(p, books.uses[e], election);
        books.worth[e] = votes > 0 ? -votes : policy::kNever;
        books.uses[e].marked = 0;
    });
    __syncthreads();
    rank_rising(books.worth, experts, [&](int e, int rank) { books.uses[e].marked = rank < slots; });
    __syncthreads();
}

// Residency::protect_fewer, behind the marks of this step's hits.
__device__ inline void protect_fewer(const PolicyConfig &p, const Books &books, int slots, int64_t tick) {
    int marked = 0;
    each_together(slots, [&](int s) {
        const bool mine = s < slots && books.inside[s] >= 0 && books.uses[books.inside[s]].marked;
        if (s < slots) books.worth[s] = mine ? books.uses[books.inside[s]].last : policy::kNever;
        marked += __syncthreads_count(mine);
    });
    const int excess = marked - policy::most_protected(p, slots);
    if (excess <= 0) return;
    rank_rising(books.worth, slots, [&](int s, int rank) {
        if (rank >= excess) return;
        books.uses[books.inside[s]].marked = 0;
        books.uses[books.inside[s]].last = tick;
    });
    __syncthreads();
}

// Whether more than `last` of the wanted experts changes.
__device__ __forceinline__ bool all_change(const PolicyConfig &p) {
    return p.kind == MOEPOOL_POLICY_SLRU || p.kind == MOEPOOL_POLICY_REELECT;
}

// What a step that does not bypass leaves behind of all that it wants, in books.uses. Nothing if it is `last` alone.
__device__ inline void note_uses(const PolicyConfig &p, const Books &books, int experts, int slots, int64_t tick,
                                 uint32_t epoch, uint32_t election) {
    if (p.kind == MOEPOOL_POLICY_REELECT && epoch != election) elect(p, books, experts, slots, election);
    if (!policy::counts(p) && !all_change(p)) return;
    each(experts, [&](int e) {
        if (books.count[e] == 0) return;
        if (policy::counts(p)) policy::count_use(p, books.uses[e], epoch);
        books.uses[e].last = tick;
        if (p.kind == MOEPOOL_POLICY_SLRU && books.slot[e] >= 0) books.uses[e].marked = 1;
    });
    if (p.kind != MOEPOOL_POLICY_SLRU) return;
    __syncthreads();
    protect_fewer(p, books, slots, tick);
}

// Appends a step to the trace: pool/trace.h says what the words mean. Behind all that a single token waits for.
__device__ inline void trace_step(const Step &step, DeviceState *state, uint32_t *ring, const Books &books,
                                  const int *ranked, int64_t tick, bool bypass, int met, int admitted) {
    __shared__ unsigned long long begin;
    const Threads t;
    const int places = step.tokens * step.k;
    const int words = trace::kHeaderWords + places + trace::kAdmissionWords * admitted;
    const uint64_t room = state->trace_words;
    if (t.thread == 0) {
        begin = state->traced;
        const volatile uint64_t *drained = &state->drained;
        if (begin + words - *drained > room) {
            begin = ~0ull;
            ++state->lost;
        }
    }
    __syncthreads();
    if (begin == ~0ull) return;
    const auto put = [&](int at, int64_t value) { ring[(begin + at) & (room - 1)] = static_cast<uint32_t>(value); };
    if (t.thread == 0) {
        const trace::Header header = {static_cast<uint32_t>(words), tick,  step.tokens, step.k, admitted,
                                      MOEPOOL_TRACE_DECODE,         bypass};
#pragma unroll
        for (int i = 0; i < trace::kHeaderWords; ++i) put(i, header.word(i));
    }
    each(places, [&](int place) { put(trace::kHeaderWords + place, books.id[place]); });
    each(met, [&](int i) {
        const int s = books.victims[i];
        if (s < 0) return;
        int at = trace::kHeaderWords + places;
        for (int other = 0; other < i; ++other) at += books.victims[other] >= 0 ? trace::kAdmissionWords : 0;
        put(at, ranked[i]);
        put(at + 1, s);
        put(at + 2, books.inside[s]);
    });
    __threadfence_system();
    __syncthreads();
    if (t.thread == 0) publish(&state->traced, uint64_t{begin + words});
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
