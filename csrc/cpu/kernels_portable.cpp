// The reference: one row at a time in plain C++. Every other kernel is held to its bits.
#include "cpu/kernels_impl.h"

namespace moepool {

namespace {

struct Scalar {
    using W = uint32_t;
    using F = float;
    static constexpr int kLanes = 1, kSide = 1, kFloatSide = 1;
    static constexpr bool kReadsPages = false;

    static W load(const uint32_t *p) { return *p; }
    static void store(float *p, F f) { *p = f; }
    static F broadcast(float f) { return f; }
    static W splat(int32_t i) { return static_cast<W>(i); }
    static F to_float(W w) { return static_cast<float>(static_cast<int32_t>(w)); }
    static F as_float(W w) { return num::from_bits(w); }
    static F half(W w) { return num::widen_f16(static_cast<uint16_t>(w)); }
    static F fma(F a, F b, F c) { return num::mp_fma(a, b, c); }
    template <class Table>
    static W lookup(W w) {
        W result = 0;
        for (int i = 0; i < 4; ++i) {
            const uint32_t index = (w >> (8 * i)) & 15u;
            result |= ((Table::words[index / 4] >> (8 * (index % 4))) & 0xffu) << (8 * i);
        }
        return result;
    }
    static constexpr int zero(int) { return 0; }
    template <int, int kFirst, int kWords>
    static void dot(W (&a)[1], const W (&u)[1][8], const int8_t *q) {
        for (int i = 4 * kFirst; i < 4 * (kFirst + kWords); ++i)
            a[0] += ((u[0][i / 4] >> (8 * (i % 4))) & 0xffu) * static_cast<uint32_t>(static_cast<int32_t>(q[i]));
    }
};

const char *nothing() { return nullptr; }

}  // namespace

const KernelSet kPortableKernels = make_kernel_set<Scalar>("portable", nothing);

}  // namespace moepool
