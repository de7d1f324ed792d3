// The ops of a layer that are not matrix products, on device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "moepool.h"

namespace moepool {
namespace cuda {

// numerics.md section 1: widens `count` rows of `columns` to x (unless NULL), and quantises them (unless q is NULL).
void activate(const void *rows, moepool_dtype dtype, int64_t count, int64_t columns, float *x, int8_t *q, float *d,
              float *e, int2 *sums, cudaStream_t stream);

void swiglu(int64_t count, const float *gate, const float *up, float *out, cudaStream_t stream);
void add(int64_t count, const float *a, const float *b, float *out, cudaStream_t stream);

// ids (tokens, k): -1 skips the place, any other negative number makes its row NaN (the id was no expert's).
void combine(int64_t tokens, int64_t k, int64_t columns, const int32_t *ids, const float *rows, const void *weights,
             moepool_dtype weights_dtype, float *out, cudaStream_t stream);

// Rows (places, columns) become +0, those of ids below -1 NaN.
void clear(int64_t places, int64_t columns, const int32_t *ids, float *rows, cudaStream_t stream);

}  // namespace cuda
}  // namespace moepool
