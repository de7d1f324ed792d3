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
    Outlook outlook;         // of a pool with a doorbell
};
static_assert(sizeof(Tally) <= kTallyBytes, "resolve_shared_bytes has room for it");

struct Books {
    Tally &tally;
    Use *uses;               // by expert
    int64_t *worth;          // by slot; of an election, the votes by expert
    const uint8_t **record;  // by expert: in host memory
    int *count;              // by expert: places
    Pair *first;             // its first place in order, and its first tile, without those of the 32s before its own
    int *slot;               // before the step, or -1
    int *meets;              // of a missing expert: which victim
    int *missing;            // experts, rising
    int *claims;             // theirs, negative
    int *ranked;             // the same experts in the order in which they come in
    int *inside;             // by slot: its expert
    int *victims;            // slots; -1: there is none, or the miss that met it may not replace it
    int *id;                 // by place
    int *turn;               // by place: which of its expert's
    uint8_t *host;           // by expert: the CPU computes it

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
    each(experts, [&](int e) { books.count[e] = books.host[e] = 0; });
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

// memory: shared, resolve_shared_bytes(experts, slots) of it, prepared. number: of this step, if it is single, which is
// published when the tables are written; what nobody waits for is done behind that. kBell: the pool has a doorbell;
// others bear nothing of it. kSingle: Step::single. All threads of the block; whole warps.
template <bool kBell, bool kSingle>
__device__ __forceinline__ void resolve_block(const Step &step, const ResolveArguments &a, uint8_t *memory,
                                              uint32_t number) {
    const Residents &residents = step.residents;
    const StepTables &tables = step.tables;
    const PolicyConfig &p = a.policy;
    const int experts = residents.experts, places = kSingle ? step.k : step.tokens * step.k;
    const Books books(memory, experts, a.slots);
    Tally &tally = books.tally;
    Outlook &outlook = tally.outlook;
    int *const count = books.count, *const slot = books.slot, *const inside = books.inside, *const id = books.id;

    const int thread = Threads().thread, lane = thread & 31;
    const int64_t tick_before = a.state->tick;
    const int slots = a.state->slots;
    const bool leased = a.state->leased > 0;
    // All is asked for at once, and nothing is looked at before.
    const int most = max(max(experts, a.slots), max(places, kBell ? kOutlookWords : 0));
    each(most, [&](int i) {
        const bool is_expert = i < experts, is_slot = i < a.slots, is_place = i < places, is_wide = step.bits == 64;
        int narrow = -1;
        int64_t wide = -1;
        if (is_place && !is_wide) narrow = static_cast<const int32_t *>(step.ids)[i];
        if (is_place && is_wide) wide = static_cast<const int64_t *>(step.ids)[i];
        const int in_slot = is_expert ? residents.slot_of[i] : -1, in_here = is_slot ? a.expert_in[i] : -1;
        const int4 used = is_expert ? reinterpret_cast<const int4 *>(a.uses)[i] : int4{};
        const uint8_t *record = is_expert ? residents.records[i] : nullptr;
        uint32_t *const ring = i == 0 ? a.state->trace : nullptr;
        uint32_t word = 0;
        if constexpr (kBell) word = outlook_word(step.bell, i);
        if (is_expert) {
            slot[i] = in_slot;
            reinterpret_cast<int4 *>(books.uses)[i] = used;
            books.record[i] = record;
        }
        if (is_slot) inside[i] = in_here;
        if (i == 0) tally.ring = ring;
        if constexpr (kBell) keep_word(outlook, i, word);
        if (!is_place) return;
        if (!is_wide) wide = narrow;
        const bool valid = wide >= -1 && wide < experts;
        const int expert = valid ? static_cast<int>(wide) : Route::kInvalid;
        if (!valid) atomicMin(&tally.bad, static_cast<unsigned long long>(i));
        id[i] = expert;
        if constexpr (!kSingle) tables.ids[i] = expert;
        if (expert < 0) return;
        const int turn = atomicAdd(&count[expert], 1);
        if constexpr (!kSingle) books.turn[i] = turn;
    });
    __syncthreads();

    // In rising order of the experts: hits, the missing, and, for more tokens, where each one's places and tiles begin.
    // A warp counts 32 of them, and then adds up what all have counted.
    const int chunks = (experts + 31) >> 5;
    each_together(experts, [&](int e) {
        const int n = e < experts ? count[e] : 0, chunk = e >> 5;
        const bool absent = n > 0 && slot[e] < 0;
        const unsigned absentees = __ballot_sync(~0u, absent), present = __ballot_sync(~0u, n > 0 && !absent);
        const uint32_t here = Pair::of(n, (n + kMostDecodeTokens - 1) / kMostDecodeTokens).word;
        const uint32_t up_to = kSingle ? 0 : warp_inclusive_sum(here, lane);
        if (!kSingle && e < experts) books.first[e] = {up_to - here};
        if (lane < 31 || chunk >= chunks) return;
        tally.absentees[chunk] = absentees;
        tally.found[chunk] = Pair::of(__popc(present), __popc(absentees));
        tally.placed[chunk] = {up_to};
    });
    __syncthreads();
    const uint32_t found_here = lane < chunks ? tally.found[lane].word : 0;
    const uint32_t placed_here = !kSingle && lane < chunks ? tally.placed[lane].word : 0;
    const uint32_t found_up_to = warp_inclusive_sum(found_here, lane, chunks);
    const uint32_t placed_up_to = kSingle ? 0 : warp_inclusive_sum(placed_here, lane, chunks);
    const Pair found = {__shfl_sync(~0u, found_up_to, chunks - 1)};
    const Pair placed = {kSingle ? 0 : __shfl_sync(~0u, placed_up_to, chunks - 1)};
    const int hits = found.low(), misses = found.high();

    const bool bypass = hits + misses > slots, advances = !bypass && hits + misses > 0;
    const int64_t tick = tick_before + (hits + misses > 0);
    const bool admits = advances && misses > 0 && p.kind != MOEPOOL_POLICY_STATIC;
    const bool ranks = admits && policy::ranks_misses(p);
    const bool divides = kBell && step.bell.divides;
    const int wanted_places = kSingle ? hits + misses : placed.low();
    int met = admits ? a.admit < 0 ? misses : min(misses, a.admit) : 0;  // misses that may meet a victim
    int hosted_misses = 0, hosted = 0;
    const int *const ranked = ranks ? books.ranked : books.missing;
    const bool by_last = p.kind == MOEPOOL_POLICY_LRU;  // without the jump that policy::worth is
    uint32_t epoch = 0;
    const auto keep_law = [&] {
        if (!advances) return;
        if (policy::counts(p)) epoch = policy::epoch_of(p, tick);
        note_uses(p, books, experts, slots, tick, epoch, p.kind == MOEPOOL_POLICY_REELECT ? a.state->election : 0);
    };

    if (misses > 0) {
        keep_law();
        each_together(experts, [&](int e) {
            const int chunk = min(e >> 5, chunks - 1);
            const Pair before = {__shfl_sync(~0u, found_up_to - found_here, chunk)};
            const uint32_t absentees = tally.absentees[chunk];
            if (e >= experts || !(absentees >> lane & 1)) return;
            const int i = before.high() + __popc(absentees & ((1u << lane) - 1));
            books.missing[i] = e;
            books.meets[e] = i;
            if (ranks) books.claims[i] = -static_cast<int>(policy::claim(p, books.uses[e], epoch));
        });
        if (admits)
            each(slots, [&](int s) {
                int64_t worth = policy::kNever;
                if (!leased || a.leases[s] == 0) {
                    const int e = inside[s];
                    if (e < 0)
                        worth = policy::keeps(p, s) ? policy::kNever : policy::kEmpty;
                    else if (count[e] == 0 && policy::may_go(p, books.uses[e], s))
                        worth = by_last ? books.uses[e].last : policy::worth(p, books.uses[e], epoch);
                }
                books.worth[s] = worth;
                books.victims[s] = -1;
            });
        __syncthreads();
        if (ranks) {
            rank_rising(books.claims, misses, [&](int i, int rank) {
                books.ranked[rank] = books.missing[i];
                books.meets[books.missing[i]] = rank;
            });
            if (kBell) __syncthreads();
        }
    }
    if constexpr (kBell) {
        // The CPU computes the last ones of the order in which the missing come in, and is told at once.
        const bool all_host = hosts_all(step, outlook);
        hosted_misses = records_for_host(step, outlook, misses, hits + misses, wanted_places, tick);
        hosted = hosted_misses + (all_host ? hits : 0);
        if (thread == 0) begin_times(step, hits + misses, wanted_places);
        if (hosted > 0) {
            if (all_host)
                each(experts, [&](int e) { books.host[e] = count[e] > 0; });
            else
                each(hosted_misses, [&](int i) { books.host[ranked[misses - 1 - i]] = 1; });
            __syncthreads();
            post(step, outlook, a.columns, a.quantised, a.floats, id, books.host);
        } else {
            post_nothing(step.bell);
        }
    }
    if (met > 0) {
        // The law's order of the victims: rising (worth, slot).
        rank_rising(books.worth, slots, [&](int s, int rank) {
            if (rank < met) books.victims[rank] = s;
        });
        __syncthreads();
        met = min(met, slots);
        if (divides) {
            const bool empty = books.victims[0] >= 0 && inside[books.victims[0]] < 0;
            met = min(met, division::most_admitted(misses - hosted_misses, empty, tick_before));
        }
    }
    const bool beside = divides && policy::counts(p) && hosted_misses == misses;  // what comes in is only copied
    // The slot that a missing expert gets, or -1.
    const auto slot_for = [&](int e) {
        const int s = books.meets[e] < met ? books.victims[books.meets[e]] : -1;
        if (s < 0 || inside[s] < 0) return s;
        const Use &missing = books.uses[e], &victim = books.uses[inside[s]];
        if (!policy::may_replace(p, missing, victim, epoch, epoch != 0)) return -1;
        if (beside && !division::worth_a_copy(policy::count_at(p, missing, epoch), policy::count_at(p, victim, epoch)))
            return -1;
        return s;
    };
    const auto slot_address = [&](int s) { return residents.arena + s * residents.record_bytes; };
    const auto tile_of = [&](int e, int begin, int n) {
        const int fill = slot[e] < 0 && met > 0 ? slot_for(e) : -1;
        return DecodeTile{slot[e] >= 0 ? slot_address(slot[e]) : books.record[e],
                          fill >= 0 ? slot_address(fill) : nullptr,
                          begin,
                          n,
                          kBell ? books.host[e] : 0,
                          0};
    };
    if constexpr (kSingle) {
        each(places, [&](int j) {
            tables.tiles[j] = id[j] >= 0 ? tile_of(id[j], j, 1) : DecodeTile{nullptr, nullptr, j, 0, 0, 0};
        });
    } else {
        const uint32_t before = placed_up_to - placed_here;
        each_together(experts, [&](int e) {
            const uint32_t begin = __shfl_sync(~0u, before, min(e >> 5, chunks - 1));
            if (e >= experts || count[e] == 0) return;
            const Pair first = {begin + books.first[e].word};
            DecodeTile tile = tile_of(e, first.low(), 0);
#pragma unroll 1
            for (int i = 0, left = count[e]; left > 0; ++i, left -= kMostDecodeTokens) {
                tile.count = min(kMostDecodeTokens, left);
                tables.tiles[first.high() + i] = tile;
                tile.first += kMostDecodeTokens;
            }
        });
        each_together(places, [&](int j) {
            const int e = j < places ? max(id[j], 0) : 0;
            const uint32_t begin = __shfl_sync(~0u, before, e >> 5);
            if (j < places && id[j] >= 0) tables.order[Pair{begin + books.first[e].word}.low() + books.turn[j]] = j;
        });
    }
    if (!kSingle && thread == 0) *tables.tile_count = placed.high();
    __syncthreads();
    if (kSingle && thread == 0) publish(tables.resolved, number);

    // Nobody of a single token's step waits for what follows.
    if (misses == 0) keep_law();
    if (met > 0) {
        each(met, [&](int i) {
            const int e = ranked[i], s = slot_for(e), evicted = s >= 0 ? inside[s] : -1;
            books.victims[i] = s;
            if (s < 0) return;
            if (evicted >= 0) atomicAdd(&tally.evictions, 1);
            const int n = atomicAdd(&tally.admissions, 1);
            if (kSingle) {
                tables.commits[n] = {evicted, e, s};
            } else {
                if (evicted >= 0) residents.slot_of[evicted] = -1;
                residents.slot_of[e] = s;
            }
            a.expert_in[s] = e;
        });
        __syncthreads();
        if (p.kind == MOEPOOL_POLICY_SLRU) {
            each(met, [&](int i) {
                if (const int s = books.victims[i]; s >= 0 && inside[s] >= 0) books.uses[inside[s]].marked = 0;
            });
            __syncthreads();
        }
    }
    if (advances)
        each(experts, [&](int e) {
            if (all_change(p) || (policy::counts(p) && count[e] > 0))
                a.uses[e] = books.uses[e];
            else if (count[e] > 0)
                a.uses[e].last = tick;
        });
    const int admitted = tally.admissions;
    if (thread == (Threads().threads > 32 ? 32 : 0)) {  // not who publishes: that takes as long as all of this
        if (kSingle) *tables.commit_count = admitted;
        a.state->tick = tick;
        if (advances && p.kind == MOEPOOL_POLICY_REELECT) a.state->election = epoch;
        if constexpr (kBell) {
            learn(step, outlook);
            if (divides) note_step(step.bell, misses - hosted_misses, hosted, hits + misses);
        }
        DeviceSteps::Counts &counts = a.state->counts;
        // Atomic, so that nobody waits for the sums.
        const auto count_up = [](int64_t &total, int64_t by) {
            if (by) atomicAdd(reinterpret_cast<unsigned long long *>(&total), static_cast<unsigned long long>(by));
        };
        count_up(counts.steps, hits + misses > 0);
        count_up(counts.bypasses, bypass);
        count_up(counts.hits, hits);
        count_up(counts.misses, misses);
        count_up(counts.evictions, tally.evictions);
        count_up(counts.admissions, admitted);
        count_up(counts.hosted, hosted);
        count_up(counts.in_place, max(0, misses - hosted_misses - admitted));
        const unsigned long long bad = tally.bad;
        volatile DeviceSteps::BadId *told = a.bad_id;
        if (bad != ~0ull && told->place < 0) {
            const int at = static_cast<int>(bad);
            told->id = read_id(step, at);
            told->k = step.k;
            __threadfence_system();
            told->place = at;
        }
    }
    if (tally.ring) trace_step(step, a.state, tally.ring, books, ranked, tick, bypass, met, admitted);
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
