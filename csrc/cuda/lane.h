// The lane of quant/decode.h for CUDA: a thread is a lane, so that a word a row is one 128-byte line a warp.
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
    // prmt looks eight bytes up at once: both halves of the table, then bit 3 of each index chooses.
    template <class Table>
    static __device__ __forceinline__ W lookup(W w) {
        constexpr uint32_t k0 = Table::words[0], k1 = Table::words[1], k2 = Table::words[2], k3 = Table::words[3];
        const uint32_t low = w & 0x07070707u;
        const uint32_t selector = __byte_perm(low | (low >> 4), 0, 0x4420);
        const uint32_t upper = ((w & 0x08080808u) >> 3) * 0xffu;
        return (__byte_perm(k0, k1, selector) & ~upper) | (__byte_perm(k2, k3, selector) & upper);
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
