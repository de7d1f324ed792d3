// The residency law's step, taken by one thread block.
#pragma once

#include <cstdint>

#include "cuda/books.h"
#include "cuda/doorbell_device.h"
#include "cuda/resolve.h"
#include "pool/policy.h"
#include "pool/route.h"
#include "pool/trace.h"

namespace moepool {
namespace cuda {
namespace {

__device__ int warp_inclusive_sum(int value, int lane) {
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__device__ int64_t read_id(const Step &step, int place) {
    return step.bits == 64 ? static_cast<const int64_t *>(step.ids)[place]
                           : int64_t{static_cast<const int32_t *>(step.ids)[place]};
}

// What a step works with, in shared memory.
struct Books {
    Use *uses;       // by expert
    int64_t *worth;  // by slot; of an election, the votes by expert
    int *count;      // by expert: places
    int *first;      // in order
    int *tile;       // first tile
    int *slot;       // before the step, or -1
    int *fill;       // the slot that the step gives it, or -1
    int *missing;    // experts, rising
    int *ranked;     // the same in the order in which they come in
    int *inside;     // by slot: its expert
    int *victims;    // slots; -1: the miss that met it may not replace it
    int *id;         // by place
    uint8_t *host;   // by expert: the CPU computes it

    __device__ Books(uint8_t *memory, int experts, int slots)
        : uses(reinterpret_cast<Use *>(memory)),
          worth(reinterpret_cast<int64_t *>(uses + experts)),
          count(reinterpret_cast<int *>(worth + experts)),
          first(count + experts),
          tile(first + experts),
          slot(tile + experts),
          fill(slot + experts),
          missing(fill + experts),
          ranked(missing + experts),
          inside(ranked + experts),
          victims(inside + slots),
          id(victims + slots),
          host(reinterpret_cast<uint8_t *>(id + kMostDecodePlaces)) {}
};
static_assert(sizeof(Use) == 16, "a use is one load");

// A block's threads, as one row of whole warps.
struct Threads {
    int thread, threads;
    __device__ Threads() : thread(blockDim.x * threadIdx.y + threadIdx.x), threads(blockDim.x * blockDim.y) {}
};

// Residency::elect. The uses of all experts change.
__device__ inline void elect(const PolicyConfig &p, const Books &books, int experts, int slots, uint32_t election) {
    const Threads t;
    for (int e = t.thread; e < experts; e += t.threads) books.worth[e] = policy::votes(p, books.uses[e], election);
    __syncthreads();
    for (int e = t.thread; e < experts; e += t.threads) {
        const int64_t mine = books.worth[e];
        int rank = 0;
        for (int other = 0; other < experts; ++other)
            rank += books.worth[other] > mine || (books.worth[other] == mine && other < e);
        books.uses[e].marked = mine > 0 && rank < slots;
    }
    __syncthreads();
}

// Residency::protect_fewer, behind the marks of this step's hits.
__device__ inline void protect_fewer(const PolicyConfig &p, const Books &books, int slots, int64_t tick) {
    const Threads t;
    int marked = 0;
    for (int base = 0; base < slots; base += t.threads) {
        const int s = base + t.thread;
        const bool mine = s < slots && books.inside[s] >= 0 && books.uses[books.inside[s]].marked;
        if (s < slots) books.worth[s] = mine ? books.uses[books.inside[s]].last : policy::kNever;
        marked += __syncthreads_count(mine);
    }
    const int excess = marked - policy::most_protected(p, slots);
    if (excess <= 0) return;
    for (int s = t.thread; s < slots; s += t.threads) {
        const int64_t mine = books.worth[s];
        if (mine == policy::kNever) continue;
        int rank = 0;
        for (int other = 0; other < slots; ++other)
            rank += books.worth[other] < mine || (books.worth[other] == mine && other < s);
        if (rank >= excess) continue;
        books.uses[books.inside[s]].marked = 0;
        books.uses[books.inside[s]].last = tick;
    }
    __syncthreads();
}

// The first `misses` of books.missing, by falling claim, to books.ranked.
__device__ inline void rank_misses(const PolicyConfig &p, const Books &books, int misses, uint32_t epoch) {
    const Threads t;
    for (int i = t.thread; i < misses; i += t.threads) {
        const int64_t mine = policy::claim(p, books.uses[books.missing[i]], epoch);
        int rank = 0;
        for (int other = 0; other < misses; ++other) {
            const int64_t claim = policy::claim(p, books.uses[books.missing[other]], epoch);
            rank += claim > mine || (claim == mine && other < i);
        }
        books.ranked[rank] = books.missing[i];
    }
    __syncthreads();
}

// Appends a step to the trace: pool/trace.h says what the words mean. Off the way of all that waits for the step.
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
        for (int i = 0; i < trace::kHeaderWords; ++i) put(i, header.word(i));
    }
    for (int p = t.thread; p < places; p += t.threads) put(trace::kHeaderWords + p, books.id[p]);
    for (int i = t.thread; i < met; i += t.threads) {
        const int s = books.victims[i];
        if (s < 0) continue;
        int at = trace::kHeaderWords + places;
        for (int other = 0; other < i; ++other) at += books.victims[other] >= 0 ? trace::kAdmissionWords : 0;
        put(at, ranked[i]);
        put(at + 1, s);
        put(at + 2, books.inside[s]);
    }
    __threadfence_system();
    __syncthreads();
    if (t.thread == 0) publish(&state->traced, uint64_t{begin + words});
}

// memory: shared, resolve_shared_bytes(experts, slots) of it. sequence: the number of this step, which is published
// when the tables are written. kBell: the pool has a doorbell; others bear nothing of it. All threads of the block;
// whole warps.
template <bool kBell>
__device__ __forceinline__ void resolve_block(const Step &step, const ResolveArguments &a, uint8_t *memory,
                                              uint32_t sequence) {
    const Residents &residents = step.residents;
    const StepTables &tables = step.tables;
    const int experts = residents.experts, places = step.tokens * step.k;
    const bool single = step.single;
    const Books books(memory, experts, a.slots);
    int *const count = books.count, *const first = books.first, *const tile = books.tile, *const slot = books.slot;
    int *const fill = books.fill, *const missing = books.missing, *const inside = books.inside, *const id = books.id;
    uint8_t *const host = books.host;
    __shared__ int4 warp_counts[32];
    __shared__ unsigned long long bad;  // the first place out of range
    __shared__ int evictions, admissions;
    __shared__ Outlook outlook;  // if kBell

    const int thread = blockDim.x * threadIdx.y + threadIdx.x, threads = blockDim.x * blockDim.y, lane = thread % 32;
    const int64_t tick_before = a.state->tick;
    const int slots = a.state->slots;
    const bool leased = a.state->leased > 0;
    uint32_t *const ring = a.state->trace;
    for (int e = thread; e < experts; e += threads) {
        count[e] = 0;
        fill[e] = -1;
        slot[e] = residents.slot_of[e];
        books.uses[e] = a.uses[e];
        host[e] = 0;
    }
    for (int s = thread; s < slots; s += threads) inside[s] = a.expert_in[s];
    if (thread == 0) {
        evictions = 0, admissions = 0, bad = ~0ull;
        if constexpr (kBell) outlook = begin_books(step);
    }
    __syncthreads();

    for (int p = thread; p < places; p += threads) {
        const int64_t wide = read_id(step, p);
        const bool valid = wide >= -1 && wide < experts;
        if (!valid) atomicMin(&bad, static_cast<unsigned long long>(p));
        id[p] = valid ? static_cast<int>(wide) : Route::kInvalid;
        tables.ids[p] = id[p];
        if (id[p] >= 0) atomicAdd(&count[id[p]], 1);
    }
    __syncthreads();

    // In rising order of the experts: hits, the missing, and, for more tokens, where each one's places and tiles begin.
    // A warp counts 32 of them; what the warps in front have counted is added behind a barrier.
    int hits = 0, misses = 0, tiles = 0, placed = 0;  // of the experts before this round
    for (int base = 0; base < experts; base += threads) {
        const int e = base + thread, warp = thread / 32;
        const int n = e < experts ? count[e] : 0;
        const bool absent = n > 0 && slot[e] < 0;
        const unsigned absentees = __ballot_sync(~0u, absent), present = __ballot_sync(~0u, n > 0 && !absent);
        const int tiles_here = (n + kMostDecodeTokens - 1) / kMostDecodeTokens;
        int places_up_to = 0, tiles_up_to = 0;
        if (!single) {
            places_up_to = warp_inclusive_sum(n, lane);
            tiles_up_to = warp_inclusive_sum(tiles_here, lane);
        }
        if (lane == 31) warp_counts[warp] = {__popc(present), __popc(absentees), places_up_to, tiles_up_to};
        __syncthreads();
        int miss = misses, place = placed, cut = tiles;
        for (int w = 0; w < threads / 32; ++w) {
            const int4 counted = warp_counts[w];
            hits += counted.x;
            misses += counted.y;
            placed += counted.z;
            tiles += counted.w;
            if (w >= warp) continue;
            miss += counted.y;
            place += counted.z;
            cut += counted.w;
        }
        if (absent) missing[miss + __popc(absentees & ((1u << lane) - 1))] = e;
        if (e < experts) {
            first[e] = place + places_up_to - n;
            tile[e] = cut + tiles_up_to - tiles_here;
        }
        __syncthreads();
    }

    const bool bypass = hits + misses > slots;
    const int64_t tick = tick_before + (hits + misses > 0);
    const PolicyConfig &p = a.policy;
    const bool divides = kBell && step.bell.divides;
    const int placed_valid = single ? hits + misses : placed;
    int hosted_misses = 0, hosted = 0;
    const bool counting = policy::counts(p),
               all_change = p.kind == MOEPOOL_POLICY_SLRU || p.kind == MOEPOOL_POLICY_REELECT;
    uint32_t epoch = 0, election = 0;
    int met = 0;  // misses that met a victim
    const bool advances = !bypass && hits + misses > 0;
    if (advances) {
        if (counting) epoch = policy::epoch_of(p, tick);
        if (p.kind == MOEPOOL_POLICY_REELECT) {
            election = a.state->election;
            if (epoch != election) elect(p, books, experts, slots, election);
        }
        for (int e = thread; e < experts; e += threads) {
            if (count[e] == 0) continue;
            if (counting) policy::count_use(p, books.uses[e], epoch);
            books.uses[e].last = tick;
            if (p.kind == MOEPOOL_POLICY_SLRU && slot[e] >= 0) books.uses[e].marked = 1;
        }
        if (p.kind == MOEPOOL_POLICY_SLRU || misses > 0) __syncthreads();
        if (p.kind == MOEPOOL_POLICY_SLRU) protect_fewer(p, books, slots, tick);
    }
    const int *ranked = missing;
    if (advances && p.kind != MOEPOOL_POLICY_STATIC && misses > 0 && policy::ranks_misses(p)) {
        rank_misses(p, books, misses, epoch);
        ranked = books.ranked;
    }
    if constexpr (kBell) {
        // The CPU computes the last ones of the order in which the missing come in, and is told at once.
        hosted_misses = records_for_host(step, outlook, misses, hits + misses, placed_valid, tick);
        hosted = hosted_misses + (outlook.all_host ? hits : 0);
        for (int i = misses - hosted_misses + thread; i < misses; i += threads) host[ranked[i]] = 1;
        if (outlook.all_host)
            for (int e = thread; e < experts; e += threads) host[e] = count[e] > 0;
        __syncthreads();
        if (hosted > 0)
            post(step, a.columns, a.quantised, a.floats, id, host);
        else
            post_nothing(step.bell);
    }
    if (advances && p.kind != MOEPOOL_POLICY_STATIC && misses > 0) {
        // A slot's rank among the victims, in rising (worth, slot): the law's order.
        int available = 0;
        bool empty = false;
        for (int base = 0; base < slots; base += threads) {
            const int s = base + thread;
            int64_t worth = policy::kNever;
            if (s < slots && !(leased && a.leases[s] > 0)) {
                const int e = inside[s];
                if (e < 0)
                    worth = policy::keeps(p, s) ? policy::kNever : policy::kEmpty;
                else if (count[e] == 0 && policy::may_go(p, books.uses[e], s))
                    worth = policy::worth(p, books.uses[e], epoch);
            }
            if (s < slots) books.worth[s] = worth;
            available += __syncthreads_count(worth != policy::kNever);
            if (divides) empty |= __syncthreads_count(worth == policy::kEmpty) > 0;
        }
        met = min(a.admit < 0 ? misses : min(misses, a.admit), available);
        if (divides) met = min(met, division::most_admitted(misses - hosted_misses, empty, tick_before));
        for (int s = thread; s < slots; s += threads) {
            const int64_t mine = books.worth[s];
            if (mine == policy::kNever) continue;
            int rank = 0;
#pragma unroll 8
            for (int other = 0; other < slots; ++other)
                rank += books.worth[other] < mine || (books.worth[other] == mine && other < s);
            if (rank < met) books.victims[rank] = s;
        }
        __syncthreads();
        const bool beside = divides && counting && hosted_misses == misses;  // what comes in is only copied
        for (int i = thread; i < met; i += threads) {
            const int s = books.victims[i], e = ranked[i], evicted = inside[s];
            if (evicted >= 0) {
                if (!policy::may_replace(p, books.uses[e], books.uses[evicted], epoch, epoch != 0) ||
                    (beside && !division::worth_a_copy(policy::count_at(p, books.uses[e], epoch),
                                                       policy::count_at(p, books.uses[evicted], epoch)))) {
                    books.victims[i] = -1;
                    continue;
                }
                atomicAdd(&evictions, 1);
                if (p.kind == MOEPOOL_POLICY_SLRU) books.uses[evicted].marked = 0;
            }
            const int n = atomicAdd(&admissions, 1);
            if (single) {
                tables.commits[n] = {evicted, e, s};
            } else {
                if (evicted >= 0) residents.slot_of[evicted] = -1;
                residents.slot_of[e] = s;
            }
            a.expert_in[s] = e;
            fill[e] = s;
        }
        __syncthreads();
    }
    const int admitted = admissions;
    const auto slot_address = [&](int s) { return residents.arena + s * residents.record_bytes; };
    const auto tile_of = [&](int e, int begin, int n) {
        const DecodeTile made{slot[e] >= 0 ? slot_address(slot[e]) : residents.records[e],
                              fill[e] >= 0 ? slot_address(fill[e]) : nullptr,
                              begin,
                              n,
                              host[e],
                              0};
        return made;
    };
    if (!single)
        for (int e = thread; e < experts; e += threads)
            for (int i = 0; i * kMostDecodeTokens < count[e]; ++i)
                tables.tiles[tile[e] + i] = tile_of(e, first[e] + i * kMostDecodeTokens,
                                                    min(kMostDecodeTokens, count[e] - i * kMostDecodeTokens));
    for (int p = thread; p < places; p += threads) {
        if (single) {
            tables.order[p] = p;
            tables.tiles[p] = id[p] >= 0 ? tile_of(id[p], p, 1) : DecodeTile{nullptr, nullptr, p, 0, 0, 0};
        } else if (id[p] >= 0) {
            int rank = 0;
            for (int other = 0; other < p; ++other) rank += id[other] == id[p];
            tables.order[first[id[p]] + rank] = p;
        }
    }
    if (thread == 0) {
        *tables.tile_count = single ? places : tiles;
        if (single) *tables.commit_count = admitted;
    }
    // Others wait for the tables.
    __threadfence();
    __syncthreads();
    if (thread == 0) publish(tables.resolved, sequence);

    if (advances)
        for (int e = thread; e < experts; e += threads) {
            if (all_change || (counting && count[e] > 0))
                a.uses[e] = books.uses[e];
            else if (count[e] > 0)
                a.uses[e].last = tick;
        }
    if (thread == 0) {
        a.state->tick = tick;
        if (divides) note_step(step.bell, misses - hosted_misses, hosted, hits + misses, placed_valid);
        if (advances && p.kind == MOEPOOL_POLICY_REELECT) a.state->election = epoch;
        DeviceSteps::Counts &counts = a.state->counts;
        // Atomic, so that nobody waits for the sums.
        const auto count_up = [](int64_t &total, int64_t by) {
            atomicAdd(reinterpret_cast<unsigned long long *>(&total), static_cast<unsigned long long>(by));
        };
        if (hits + misses > 0) {
            count_up(counts.steps, 1);
            count_up(counts.bypasses, bypass);
            count_up(counts.hits, hits);
            count_up(counts.misses, misses);
            count_up(counts.evictions, static_cast<int64_t>(evictions));
            count_up(counts.admissions, admitted);
            count_up(counts.hosted, hosted);
            count_up(counts.in_place, max(0, misses - hosted_misses - admitted));
        }
        volatile DeviceSteps::BadId *told = a.bad_id;
        if (bad != ~0ull && told->place < 0) {
            const int at = static_cast<int>(bad);
            told->id = read_id(step, at);
            told->k = step.k;
            __threadfence_system();
            told->place = at;
        }
    }
    if (ring) trace_step(step, a.state, ring, books, ranked, tick, bypass, met, admitted);
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
