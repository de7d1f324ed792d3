// The residency law's step, taken by one thread block.
#pragma once

#include <cstdint>

#include "cuda/doorbell_device.h"
#include "cuda/resolve.h"
#include "pool/route.h"

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

// memory: shared, resolve_shared_bytes(experts, slots) of it. All threads of the block; whole warps.
__device__ __forceinline__ void resolve_block(const Step &step, const ResolveArguments &a, uint8_t *memory) {
    const Residents &residents = step.residents;
    const StepTables &tables = step.tables;
    const int experts = residents.experts, places = step.tokens * step.k;
    const bool single = step.tokens == 1;
    int64_t *stamps = reinterpret_cast<int64_t *>(memory);   // by slot
    int *count = reinterpret_cast<int *>(stamps + a.slots);  // by expert: places
    int *first = count + experts;                            // in order
    int *tile = first + experts;                             // first tile
    int *slot = tile + experts;                              // before the step, or -1
    int *fill = slot + experts;                              // the slot that the step gives it, or -1
    int *missing = fill + experts;                           // experts, rising
    int *inside = missing + experts;                         // by slot: its expert
    int *victims = inside + a.slots;
    int *id = victims + a.slots;                                          // by place
    uint8_t *host = reinterpret_cast<uint8_t *>(id + kMostDecodePlaces);  // by expert: the CPU computes it
    __shared__ Outlook outlook;
    __shared__ int4 warp_counts[32];
    __shared__ unsigned long long evictions, bad;  // bad: the first place out of range

    const int thread = blockDim.x * threadIdx.y + threadIdx.x, threads = blockDim.x * blockDim.y, lane = thread % 32;
    const int64_t tick_before = a.state->tick;
    for (int e = thread; e < experts; e += threads) {
        count[e] = 0;
        fill[e] = -1;
        slot[e] = residents.slot_of[e];
        host[e] = 0;
    }
    for (int s = thread; s < a.slots; s += threads) {
        stamps[s] = a.stamp[s];
        inside[s] = a.expert_in[s];
    }
    if (thread == 0) {
        evictions = 0;
        bad = ~0ull;
        outlook = begin_books(step);
    }
    bool empty = false;
    for (int s = thread; s < a.slots; s += threads) empty |= inside[s] < 0;
    empty = __syncthreads_or(empty);

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

    // What the CPU computes it is told first of all.
    const int placed_valid = single ? hits + misses : placed;
    const bool bypass = hits + misses > a.slots;
    const bool comes_in = !bypass && !a.static_policy && a.admit != 0 && (empty || tick_before % division::kTrial == 0);
    const int hosted_misses = records_for_host(step, outlook, misses, hits + misses, placed_valid, comes_in);
    const int hosted = hosted_misses + (outlook.all_host ? hits : 0);
    if (hosted > 0) {
        for (int i = misses - hosted_misses + thread; i < misses; i += threads) host[missing[i]] = 1;
        if (outlook.all_host)
            for (int e = thread; e < experts; e += threads) host[e] = count[e] > 0;
        __syncthreads();
        post(step, a.columns, a.quantised, [&](int p) { return id[p] >= 0 && host[id[p]] ? id[p] : -1; });
    } else {
        post_nothing(step.bell);
    }

    const int64_t tick = tick_before + (hits + misses > 0);
    int admitted = 0;
    if (!bypass && !a.static_policy && misses > 0) {
        // Records that cross the link anyway are admitted, where that is left to the step; else as the law says.
        const int most = step.bell.state && step.bell.divides ? misses - hosted_misses : misses;
        admitted = a.admit < 0 ? most : min(most, a.admit);
        // A slot's rank among the victims, in rising (stamp, slot): the law's order. An empty slot's stamp is 0.
        int available = 0;
        for (int base = 0; base < a.slots; base += threads) {
            const int s = base + thread;
            const bool victim = s < a.slots && (inside[s] < 0 || count[inside[s]] == 0);
            if (s < a.slots) stamps[s] = !victim ? INT64_MAX : inside[s] < 0 ? 0 : stamps[s];
            available += __syncthreads_count(victim);
        }
        admitted = min(admitted, available);
        for (int s = thread; s < a.slots; s += threads) {
            const int64_t mine = stamps[s];
            if (mine == INT64_MAX) continue;
            int rank = 0;
#pragma unroll 8
            for (int other = 0; other < a.slots; ++other)
                rank += stamps[other] < mine || (stamps[other] == mine && other < s);
            if (rank < admitted) victims[rank] = s;
        }
        __syncthreads();
        for (int i = thread; i < admitted; i += threads) {
            const int s = victims[i], e = missing[i];
            if (inside[s] >= 0) atomicAdd(&evictions, 1ull);
            if (single) {
                tables.commits[i] = {inside[s], e, s};
            } else {
                if (inside[s] >= 0) residents.slot_of[inside[s]] = -1;
                residents.slot_of[e] = s;
            }
            a.expert_in[s] = e;
            a.stamp[s] = tick;
            fill[e] = s;
        }
        __syncthreads();
    }
    const auto slot_address = [&](int s) { return residents.arena + s * residents.record_bytes; };
    const auto tile_of = [&](int e, int begin, int n) {
        const DecodeTile made{slot[e] >= 0 ? slot_address(slot[e]) : residents.records[e],
                              fill[e] >= 0 ? slot_address(fill[e]) : nullptr, begin, n, host[e]};
        return made;
    };
    for (int e = thread; e < experts; e += threads) {
        if (count[e] == 0) continue;
        if (!bypass && slot[e] >= 0) a.stamp[slot[e]] = tick;
        if (!single)
            for (int i = 0; i * kMostDecodeTokens < count[e]; ++i)
                tables.tiles[tile[e] + i] = tile_of(e, first[e] + i * kMostDecodeTokens,
                                                    min(kMostDecodeTokens, count[e] - i * kMostDecodeTokens));
    }
    for (int p = thread; p < places; p += threads) {
        if (single) {
            tables.order[p] = p;
            tables.tiles[p] = id[p] >= 0 ? tile_of(id[p], p, 1) : DecodeTile{nullptr, nullptr, p, 0, 0};
        } else if (id[p] >= 0) {
            int rank = 0;
            for (int other = 0; other < p; ++other) rank += id[other] == id[p];
            tables.order[first[id[p]] + rank] = p;
        }
    }
    if (single) {  // others of this grid wait for the tiles
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            *tables.commit_count = admitted;
            asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(tables.resolved) : "memory");
        }
    }
    if (thread == 0) {
        *tables.tile_count = single ? places : tiles;
        a.state->tick = tick;
        if (step.bell.state && step.bell.divides)
            note_step(step.bell, misses - hosted_misses, hosted, hits + misses, placed_valid);
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
            count_up(counts.in_place, !step.bell.state    ? misses - admitted
                                      : step.bell.divides ? misses - hosted_misses - admitted
                                                          : 0);
        }
        volatile DeviceSteps::BadId *told = a.bad_id;
        if (bad != ~0ull && told->place < 0) {
            const int p = static_cast<int>(bad);
            told->id = read_id(step, p);
            told->k = step.k;
            __threadfence_system();
            told->place = p;
        }
    }
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
