// The activation quantiser on a warp: numerics.md section 1.
#pragma once

#include <cstdint>

#include "moepool.h"
#include "numerics.h"

namespace moepool {
namespace cuda {

// A quantised block of 32 columns of the decode kernels: what they stage in shared memory, side by side.
struct ActivationBlock {
    int8_t q[32];
    float d, e;
    int32_t sum0, sum1;
};
static_assert(sizeof(ActivationBlock) == 48, "whole 16-byte words");

namespace {

__device__ __forceinline__ float widen(const void *data, moepool_dtype dtype, int64_t index) {
    if (dtype == MOEPOOL_F32) return static_cast<const float *>(data)[index];
    const uint16_t raw = static_cast<const uint16_t *>(data)[index];
    return dtype == MOEPOOL_F16 ? num::widen_f16(raw) : num::widen_bf16(raw);
}

// Four in a row; zeros if they are not `inside`.
__device__ __forceinline__ void widen_four(const void *data, moepool_dtype dtype, int64_t index, bool inside,
                                           float (&value)[4]) {
#pragma unroll
    for (float &v : value) v = 0.0f;
    if (!inside) return;
    if (dtype == MOEPOOL_F32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = static_cast<const float *>(data)[index + i];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = widen(data, dtype, index + i);
    }
}

// One past L1, for what is read in front of the kernel's own wait.
__device__ __forceinline__ float widen_past_l1(const void *data, moepool_dtype dtype, int64_t index) {
    if (dtype == MOEPOOL_F32) return __ldcg(static_cast<const float *>(data) + index);
    const uint16_t raw = __ldcg(static_cast<const unsigned short *>(data) + index);
    return dtype == MOEPOOL_F16 ? num::widen_f16(raw) : num::widen_bf16(raw);
}

// A block of 32 columns, one a lane. Every lane gets the block's facts and its own code.
struct Quantised {
    int code, sum0, sum1;
    float d, e;
};
__device__ __forceinline__ Quantised quantise(float value) {
    uint32_t largest = num::bits(value) & 0x7fffffffu;
#if __CUDA_ARCH__ >= 800
    largest = __reduce_max_sync(~0u, largest);
#else
    for (int step = 16; step; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
#endif
    const float a = num::from_bits(largest);
    const bool plain = !num::nonfinite(largest) && a >= 0x1p-118f;
    Quantised made;
    made.d = plain ? num::mp_div(a, 127.0f) : num::nonfinite(largest) ? num::nan() : 0.0f;
    made.code = plain ? num::rint_int(num::mp_mul(value, num::mp_div(127.0f, a))) : 0;
#if __CUDA_ARCH__ >= 800
    made.sum0 = __reduce_add_sync(~0u, threadIdx.x % 32 < 16 ? made.code : 0);
    made.sum1 = __reduce_add_sync(~0u, threadIdx.x % 32 < 16 ? 0 : made.code);
#else
    int sum = made.code;
    for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    made.sum0 = __shfl_sync(~0u, sum, 0);
    made.sum1 = __shfl_sync(~0u, sum, 16);
#endif
    made.e = num::mp_mul(made.d, static_cast<float>(made.sum0 + made.sum1));
    return made;
}

__device__ __forceinline__ void store_block(const Quantised &made, int lane, ActivationBlock *block) {
    block->q[lane] = static_cast<int8_t>(made.code);
    if (lane == 0) {
        block->d = made.d;
        block->e = made.e;
        block->sum0 = made.sum0;
        block->sum1 = made.sum1;
    }
}

// Four neighbouring blocks by one warp, a lane four columns of a block: the lane's codes as a word, and the facts of
// its block, of which `sum` and `other` are right in the first of its eight lanes.
struct QuantisedFour {
    uint32_t codes;
    int sum, other;
    float d, e;
};
__device__ __forceinline__ QuantisedFour quantise_four(const float (&value)[4]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, num::bits(value[i]) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    const float a = num::from_bits(largest);
    const bool plain = !num::nonfinite(largest) && a >= 0x1p-118f;
    const float r = plain ? num::mp_div(127.0f, a) : 0.0f;
    QuantisedFour made = {};
    made.d = plain ? num::mp_div(a, 127.0f) : num::nonfinite(largest) ? num::nan() : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int code = plain ? num::rint_int(num::mp_mul(value[i], r)) : 0;
        made.codes |= (static_cast<uint32_t>(code) & 0xffu) << (8 * i);
        made.sum += code;
    }
    made.sum += __shfl_xor_sync(~0u, made.sum, 1);
    made.sum += __shfl_xor_sync(~0u, made.sum, 2);
    made.other = __shfl_xor_sync(~0u, made.sum, 4);
    made.e = num::mp_mul(made.d, static_cast<float>(made.sum + made.other));
    return made;
}

// The same, stored. inside: the lane's block is there.
__device__ __forceinline__ void quantise_four(const float (&value)[4], bool inside, int lane, ActivationBlock *block) {
    const QuantisedFour made = quantise_four(value);
    if (!inside) return;
    reinterpret_cast<uint32_t *>(block->q)[lane % 8] = made.codes;
    if (lane % 8 == 0) {
        block->d = made.d;
        block->e = made.e;
        block->sum0 = made.sum;
        block->sum1 = made.other;
    }
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
