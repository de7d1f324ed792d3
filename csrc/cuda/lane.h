// The lane of quant/decode.h for CUDA: a thread is a lane, so that a word a row is one 128-byte line a warp. Nibbles
// are looked up by unpack.h.
#pragma once

#include "numerics.h"
#include "quant/decode.h"

namespace moepool {
namespace cuda {
namespace {

struct Lane {
    using W = uint32_t;
    using F = float;

    static __device__ __forceinline__ W load(const uint32_t *p) { return __ldg(p); }
    static __device__ __forceinline__ F to_float(W w) { return __int2float_rn(static_cast<int>(w)); }
    static __device__ __forceinline__ F as_float(W w) { return __uint_as_float(w); }
    static __device__ __forceinline__ F half(W w) {
        float f;
        asm("{.reg .f16 h; .reg .b16 l, u; mov.b32 {l, u}, %1; mov.b16 h, l; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(w));
        return f;
    }
    // a + the four products of u's bytes, unsigned, with q's, signed.
    static __device__ __forceinline__ W dot(W a, W u, int q) {
        asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(a) : "r"(u), "r"(q));
        return a;
    }
    // The same of signed bytes.
    static __device__ __forceinline__ int signed_dot(int a, int codes, int q) { return __dp4a(codes, q, a); }
};

// Panels in shared memory.
struct SharedLane : Lane {
    static __device__ __forceinline__ W load(const uint32_t *p) { return *p; }
};

}  // namespace
}  // namespace cuda
}  // namespace moepool
