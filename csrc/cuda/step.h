// What the kernels of a decode step share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/activate.h"
#include "cuda/doorbell.h"
#include "moepool.h"

namespace moepool {
namespace cuda {

constexpr int kMostDecodeTokens = 16;   // also the most places of a tile
constexpr int kResidentPlaces = 2;      // the most of a tile whose expert is in a slot
constexpr int kMostDecodePlaces = 512;  // tokens * k

// Places of one expert that are computed together. What crosses the link does so once for sixteen of them; of an expert
// in a slot a few are enough for a tile, for its other tiles find it in the level-2 cache.
struct alignas(16) DecodeTile {
    const uint8_t *record;  // where it is read; NULL: a skipped place of a single token
    uint8_t *fill;          // the slot it goes to as well, or NULL
    int32_t count;          // of places
    int32_t host;           // the CPU computes it: it is read only to fill the slot
    int32_t streamed;       // it is computed, and comes over the link
    int32_t zero;           // 0: a tile is read whole
};

// So many places of an expert, cut.
__host__ __device__ constexpr int tiles_of(int places, bool resident) {
    return resident ? (places + kResidentPlaces - 1) / kResidentPlaces
                    : (places + kMostDecodeTokens - 1) / kMostDecodeTokens;
}
// The most that there can be: each expert's last tile may be short.
constexpr int most_tiles_of(int places, int experts) {
    return (places + (kResidentPlaces - 1) * (places < experts ? places : experts)) / kResidentPlaces;
}

// An expert that this step brings into a slot. While a single token's kernels look slots up by themselves, the map must
// not change: the last of them makes it so.
struct Commit {
    int32_t evicted, expert, slot;
};

// Where the weights are.
struct Residents {
    int32_t experts;
    int32_t *slot_of;               // by expert, or -1
    const uint8_t *const *records;  // by expert, in host memory, as the device addresses it
    uint8_t *arena;
    int64_t record_bytes, tail;
};

// What resolve writes for the kernels behind it.
struct StepTables {
    int32_t *ids;    // as int32, Route::kInvalid if out of range
    int32_t *order;  // places of a tile, kMostDecodeTokens each
    DecodeTile *tiles;
    int32_t *tile_count;
    Commit *commits;  // with their count, not before resolve's kernel has ended
    int32_t *commit_count;
    unsigned long long *steps;  // those that have ended, times 2^32, and blocks of this one's last kernel that have
    uint32_t *resolved;         // the number of the last single step whose tables are written
    uint32_t *finished;         // blocks of the last kernel; 0 between steps
};

// One step.
struct Step {
    const void *ids;
    int32_t bits, tokens, k;
    int32_t most_tiles;
    bool single;  // of a single token, by kernels that look slots up themselves: every place is a tile
    Residents residents;
    StepTables tables;
    const void *x;  // activation rows
    moepool_dtype x_dtype;
    int32_t x_per_row;       // places that share a row
    ActivationBlock *input;  // the same quantised, if gate or up is
    float *gated;            // (places, rows of gate), if up is of another type
    uint4 *handed;           // hidden rows, of handover.h: (places, blocks, 4), or
    uint64_t *handed_x;      // (places, columns)
    float *rows;             // (places, rows of down), unless single, and of the CPU
    const void *weights;
    moepool_dtype weights_dtype;
    float *out;
    Bell bell;
};

}  // namespace cuda
}  // namespace moepool
