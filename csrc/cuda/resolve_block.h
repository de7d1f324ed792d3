// The residency law's step, taken by one thread block.
#pragma once

#include <cstdint>

#include "cuda/books.h"
#include "cuda/doorbell_device.h"
#include "cuda/resolve.h"
#include "cuda/resolve_parts.h"
#include "pool/policy.h"
#include "pool/route.h"

namespace moepool {
namespace cuda {
namespace {

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

    // In rising order of the experts: hits, the missing, and, for more tokens, where each one's tiles begin.
    // A warp counts 32 of them, and then adds up what all have counted.
    const int chunks = (experts + 31) >> 5;
    each_together(experts, [&](int e) {
        const int n = e < experts ? count[e] : 0, chunk = e >> 5;
        const bool absent = n > 0 && slot[e] < 0;
        const unsigned absentees = __ballot_sync(~0u, absent), present = __ballot_sync(~0u, n > 0 && !absent);
        const uint32_t here = Pair::of(n, tiles_of(n, !absent)).word;
        const uint32_t up_to = kSingle ? 0 : warp_inclusive_sum(here, lane);
        if (!kSingle && e < experts) books.first[e] = {up_to - here};
        if (kBell && e < experts) books.host[e] = absent;
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
    int met = admits ? policy::most_admissions(a.admit, misses, slots, experts) : 0;  // misses that may meet a victim
    int hosted_misses = 0, hosted = 0;
    const int *const ranked = ranks ? books.ranked : books.missing;
    const bool by_last = p.kind == MOEPOOL_POLICY_LRU;  // without the jump that policy::worth is
    uint32_t epoch = 0;
    const auto keep_law = [&] {
        if (!advances) return;
        if (policy::counts(p)) epoch = policy::epoch_of(p, tick);
        note_uses(p, books, experts, slots, tick, epoch, p.kind == MOEPOOL_POLICY_REELECT ? a.state->election : 0);
    };

    bool shares = false;
    // Who counts at the end, and who keeps the lesson: not who publishes, for that takes as long as all of this.
    const int counting = Threads().threads > 32 ? 32 : 0, noting = Threads().threads > 64 ? 64 : counting;
    const auto ask_the_cpu = [&] { post(tally.step, outlook, a.columns, a.quantised, a.floats, id, books.host); };
    if constexpr (kBell) {
        if (divides && thread == noting) tally.begun = device_ns();  // takes a while
        // The CPU is told at once, unless it computes some of the missing experts alone: these are the last ones of the
        // order in which they come in, which is not known yet.
        const bool all_host = hosts_all(step, outlook);
        hosted_misses = records_for_host(step, outlook, misses, hits + misses, wanted_places, tick);
        hosted = hosted_misses + (all_host ? hits : 0);
        shares = hosted_misses > 0 && hosted_misses < misses;
        if (all_host) {
            each(experts, [&](int e) { books.host[e] = count[e] > 0; });
            __syncthreads();
        }
        if (hosted == 0)
            post_nothing(step.bell);
        else if (!shares)
            ask_the_cpu();
    }

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
        if (shares) {
            each(misses, [&](int i) { books.host[ranked[i]] = i >= misses - hosted_misses; });
            __syncthreads();
            ask_the_cpu();
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
    const bool only_copied = hosted_misses == misses;  // what comes in
    const bool asks_for_more = divides && (p.guard || (policy::counts(p) && only_copied));
    // The slot that a missing expert gets, or -1.
    const auto slot_for = [&](int e) {
        const int s = books.meets[e] < met ? books.victims[books.meets[e]] : -1;
        if (s < 0 || inside[s] < 0) return s;
        const Use &missing = books.uses[e], &victim = books.uses[inside[s]];
        if (!policy::may_replace(p, missing, victim, epoch, epoch != 0)) return -1;
        if (asks_for_more &&
            !division::outweighs(policy::count_at(p, missing, epoch), policy::count_at(p, victim, epoch)))
            return -1;
        return s;
    };
    const auto slot_address = [&](int s) { return residents.arena + s * residents.record_bytes; };
    const auto tile_of = [&](int e, int n) {
        const bool here = slot[e] >= 0;
        const int fill = !here && met > 0 ? slot_for(e) : -1, host = kBell && hosted > 0 ? books.host[e] : 0;
        return DecodeTile{here ? slot_address(slot[e]) : books.record[e],
                          fill >= 0 ? slot_address(fill) : nullptr,
                          n,
                          host,
                          !here && !host,
                          0};
    };
    if constexpr (kSingle) {
        each(places, [&](int j) { tables.tiles[j] = id[j] >= 0 ? tile_of(id[j], 1) : DecodeTile{}; });
    } else {
        const uint32_t before = placed_up_to - placed_here;
        each_together(experts, [&](int e) {
            const uint32_t begin = __shfl_sync(~0u, before, min(e >> 5, chunks - 1));
            if (e >= experts || count[e] == 0) return;
            const Pair first = {begin + books.first[e].word};
            const int most = slot[e] < 0 ? kMostDecodeTokens : kResidentPlaces;
            DecodeTile tile = tile_of(e, 0);
#pragma unroll 1
            for (int i = 0, left = count[e]; left > 0; ++i, left -= most) {
                tile.count = min(most, left);
                tables.tiles[first.high() + i] = tile;
            }
        });
        each_together(places, [&](int j) {
            const int e = j < places ? max(id[j], 0) : 0;
            const uint32_t begin = __shfl_sync(~0u, before, e >> 5);
            if (j >= places || id[j] < 0) return;
            const int turn = books.turn[j], tile = tiles_of(turn + 1, slot[e] >= 0) - 1;  // of its expert's
            const int within = turn - tile * (slot[e] >= 0 ? kResidentPlaces : kMostDecodeTokens);
            tables.order[kMostDecodeTokens * (Pair{begin + books.first[e].word}.high() + tile) + within] = j;
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
    if (thread == counting) {
        if (kSingle) *tables.commit_count = admitted;
        a.state->tick = tick;
        if (advances && p.kind == MOEPOOL_POLICY_REELECT) a.state->election = epoch;
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
    if constexpr (kBell) {
        if (divides && thread == noting) {
            const int streamed = misses - hosted_misses;
            learn(tally.step, outlook, division::trial_of(tick_before) != division::kNoTrial);
            note_step(step.bell, streamed, max(0, admitted - streamed), hosted, hits + misses, wanted_places,
                      tally.begun);
        }
    }
    if (tally.ring) trace_step(step, a.state, tally.ring, books, ranked, tick, bypass, met, admitted);
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
