// MUL_MAT_ID on panels in device memory: any type, any number of tokens, skip-aware by construction (a skipped place is
// in no tile).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "store/store.h"

namespace moepool {
namespace cuda {

constexpr int kTilePlaces = 8;

// Up to kTilePlaces places of one expert: its weights are read once for all of them.
struct Tile {
    const uint8_t *record;
    int32_t first, count;  // of the route's order
};

// Activation rows in device memory, quantised (q, d, e, sums) or not (x); layout as in cpu/kernels.h.
struct Activations {
    const float *x;
    const int8_t *q;
    const float *d, *e;
    const int2 *sums;
    int64_t per_row;  // places that share a row: row = place / per_row
};

// out (places, rows) for the places of the tiles. `largest`: the most places in one tile.
void multiply(const Matrix &matrix, const Tile *tiles, int64_t count, int largest, const int32_t *order,
              const Activations &activations, float *out, cudaStream_t stream);

}  // namespace cuda
}  // namespace moepool
