// How gate/up hands the hidden rows to down, which runs beside it: in words that carry the number of the step, three of
// data and the number in 16 bytes that are stored and loaded at once. Who finds the number has the data, so nobody
// needs a fence, a count or a flag, and each warp waits for what it needs alone.
//
// Quantised, a block of 32 columns is four such quads: the twelve words of an ActivationBlock in their order. Of floats
// a column is a word beside the number, 8 bytes.
//
// Every place that down waits for is written in the step, and what it waits for has this step's number. An older one is
// of an older step: numbers are 32 bits, and a place would have to be left out for 2^32 - 1 steps to meet one again.
#pragma once

#include <cstdint>

#include "cuda/activate.h"
#include "cuda/step.h"

namespace moepool {
namespace cuda {
namespace {

constexpr int kQuads = sizeof(ActivationBlock) / 12;  // of a block

// The step's number, as every block of gate/up and down sees it that has not ended yet: StepTables::steps.
__device__ __forceinline__ uint32_t number_of(const Step &step) {
    return static_cast<uint32_t>(__ldcg(step.tables.steps) >> 32) + 1;
}
// By one thread of each block of the last kernel, at its end. Together they add 2^32.
__device__ __forceinline__ void count_step(const Step &step) {
    const bool first = blockIdx.x == 0 && blockIdx.y == 0;
    atomicAdd(step.tables.steps, first ? (1ull << 32) - (gridDim.x * gridDim.y - 1) : 1ull);
}

__device__ __forceinline__ void store_quad(uint4 *at, uint32_t a, uint32_t b, uint32_t c, uint32_t number) {
    asm volatile(
        "{.reg .b128 quad;\n"
        "mov.b128 quad, {%1, %2};\n"
        "st.relaxed.gpu.global.b128 [%0], quad;}" ::"l"(__cvta_generic_to_global(at)),
        "l"(uint64_t{b} << 32 | a), "l"(uint64_t{number} << 32 | c)
        : "memory");
}
struct Quad {
    uint64_t low, high;
    __device__ __forceinline__ uint32_t number() const { return static_cast<uint32_t>(high >> 32); }
};
__device__ __forceinline__ Quad load_quad(const uint4 *at) {
    Quad quad;
    asm volatile(
        "{.reg .b128 quad;\n"
        "ld.relaxed.gpu.global.b128 quad, [%2];\n"
        "mov.b128 {%0, %1}, quad;}"
        : "=l"(quad.low), "=l"(quad.high)
        : "l"(__cvta_generic_to_global(at))
        : "memory");
    return quad;
}

// A block of 32 columns, one a lane.
__device__ __forceinline__ void hand_over(const Quantised &made, int lane, uint4 *block, uint32_t number) {
    const uint32_t code = static_cast<uint32_t>(made.code) & 0xffu;
    // Codes of four lanes, in the first of them; words of three such.
    const uint32_t word = code | __shfl_down_sync(~0u, code, 1) << 8 | __shfl_down_sync(~0u, code, 2) << 16 |
                          __shfl_down_sync(~0u, code, 3) << 24;
    const uint32_t second = __shfl_down_sync(~0u, word, 4), third = __shfl_down_sync(~0u, word, 8);
    // Lanes 0, 12 and 24 have a quad of the codes, the last of them with d; lane 28 has the facts.
    const bool facts = lane == 28;
    const int quad = facts ? 3 : lane / 12;
    if (facts || lane == 12 * quad)
        store_quad(block + quad, facts ? num::bits(made.e) : word, facts ? static_cast<uint32_t>(made.sum0) : second,
                   facts        ? static_cast<uint32_t>(made.sum1)
                   : lane == 24 ? num::bits(made.d)
                                : third,
                   number);
}
// `blocks` of them, at most 8, to shared memory by one warp: a quad a lane, which may have been asked for ahead.
__device__ __forceinline__ Quad ask_blocks(const uint4 *from, int blocks, int lane) {
    return lane < kQuads * blocks ? load_quad(from + lane) : Quad{};
}
__device__ __forceinline__ void await_blocks(Quad quad, const uint4 *from, int blocks, uint32_t number, int lane,
                                             uint8_t *to) {
    if (lane >= kQuads * blocks) return;
    while (quad.number() != number) quad = load_quad(from + lane);
    uint32_t *const words = reinterpret_cast<uint32_t *>(to) + 3 * lane;
    words[0] = static_cast<uint32_t>(quad.low);
    words[1] = static_cast<uint32_t>(quad.low >> 32);
    words[2] = static_cast<uint32_t>(quad.high);
}

__device__ __forceinline__ void hand_over(float value, uint64_t *at, uint32_t number) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)),
                 "l"(uint64_t{number} << 32 | num::bits(value))
                 : "memory");
}
__device__ __forceinline__ float await_float(const uint64_t *at, uint32_t number) {
    uint64_t both;
    do asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(__cvta_generic_to_global(at)) : "memory");
    while (static_cast<uint32_t>(both >> 32) != number);
    return num::from_bits(static_cast<uint32_t>(both));
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
