#include "cuda/elementwise.h"

#include <algorithm>

#include "cuda/activate.h"
#include "cuda/runtime.h"
#include "numerics.h"
#include "quant/types.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kThreads = 256;

// A warp takes a block of 32 columns, a lane a column.
__global__ void activate_kernel(const void *rows, moepool_dtype dtype, int64_t blocks, float *x, int8_t *q, float *d,
                                float *e, int2 *sums) {
    const int lane = threadIdx.x % 32;
    const int64_t stride = int64_t{gridDim.x} * (kThreads / 32);
    for (int64_t block = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; block < blocks; block += stride) {
        const int64_t i = block * kBlockColumns + lane;
        const float value = widen(rows, dtype, i);
        if (x) x[i] = value;
        const Quantised made = quantise(value);
        q[i] = static_cast<int8_t>(made.code);
        if (lane == 0) {
            d[block] = made.d;
            e[block] = made.e;
            sums[block] = make_int2(made.sum0, made.sum1);
        }
    }
}

__global__ void widen_kernel(const void *rows, moepool_dtype dtype, int64_t count, float *x) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
        x[i] = widen(rows, dtype, i);
}

__global__ void swiglu_kernel(int64_t count, const float *gate, const float *up, float *out) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
        out[i] = num::swiglu(gate[i], up[i]);
}

__global__ void add_kernel(int64_t count, const float *a, const float *b, float *out) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
        out[i] = num::canonical(num::mp_add(a[i], b[i]));
}

__global__ void combine_kernel(int64_t elements, int64_t k, int64_t columns, const int32_t *ids, const float *rows,
                               const void *weights, moepool_dtype weights_dtype, float *out) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < elements; i += int64_t{gridDim.x} * kThreads) {
        const int64_t token = i / columns, column = i % columns;
        float y = 0.0f;
        for (int64_t place = token * k; place < (token + 1) * k; ++place) {
            if (ids[place] == -1) continue;
            const float row = ids[place] < -1 ? num::nan() : rows[place * columns + column];
            y = num::mp_fma(widen(weights, weights_dtype, place), row, y);
        }
        out[i] = num::finish(y);
    }
}

__global__ void clear_kernel(int64_t elements, int64_t columns, const int32_t *ids, float *rows) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < elements; i += int64_t{gridDim.x} * kThreads)
        rows[i] = ids[i / columns] < -1 ? num::nan() : 0.0f;
}

unsigned grid(int64_t threads) {
    return static_cast<unsigned>(std::min<int64_t>(1 << 16, (threads + kThreads - 1) / kThreads));
}

}  // namespace

void activate(const void *rows, moepool_dtype dtype, int64_t count, int64_t columns, float *x, int8_t *q, float *d,
              float *e, int2 *sums, cudaStream_t stream) {
    const int64_t elements = count * columns;
    if (elements == 0) return;
    if (q)
        activate_kernel<<<grid(elements), kThreads, 0, stream>>>(rows, dtype, elements / kBlockColumns, x, q, d, e,
                                                                 sums);
    else if (x)
        widen_kernel<<<grid(elements), kThreads, 0, stream>>>(rows, dtype, elements, x);
    check(cudaGetLastError(), "launching the activation quantiser");
}

void swiglu(int64_t count, const float *gate, const float *up, float *out, cudaStream_t stream) {
    swiglu_kernel<<<grid(count), kThreads, 0, stream>>>(count, gate, up, out);
    check(cudaGetLastError(), "launching swiglu");
}

void add(int64_t count, const float *a, const float *b, float *out, cudaStream_t stream) {
    add_kernel<<<grid(count), kThreads, 0, stream>>>(count, a, b, out);
    check(cudaGetLastError(), "launching add");
}

void combine(int64_t tokens, int64_t k, int64_t columns, const int32_t *ids, const float *rows, const void *weights,
             moepool_dtype weights_dtype, float *out, cudaStream_t stream) {
    combine_kernel<<<grid(tokens * columns), kThreads, 0, stream>>>(tokens * columns, k, columns, ids, rows, weights,
                                                                    weights_dtype, out);
    check(cudaGetLastError(), "launching combine");
}

void clear(int64_t places, int64_t columns, const int32_t *ids, float *rows, cudaStream_t stream) {
    clear_kernel<<<grid(places * columns), kThreads, 0, stream>>>(places * columns, columns, ids, rows);
    check(cudaGetLastError(), "launching clear");
}

}  // namespace cuda
}  // namespace moepool
