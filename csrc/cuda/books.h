// What is done with the books of a step in device memory. Publishing: what was written before can be read by whoever
// sees the value.
#pragma once

#include <cstdint>

namespace moepool {
namespace cuda {
namespace {

__device__ __forceinline__ void publish(uint32_t *at, uint32_t value) {
    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void publish(uint64_t *at, uint64_t value) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Alone, without what was written before.
__device__ __forceinline__ void store_relaxed(uint32_t *at, uint32_t value) {
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ uint32_t load_acquired(const uint32_t *at) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
