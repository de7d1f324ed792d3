// AVX-VNNI, for processors without AVX-512: eight rows a register; vpdpbusd takes four columns of each.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include "cpu/kernels_impl.h"

namespace moepool {

namespace {

#include "cpu/lanes8.h"

struct AvxVnni : Lanes8 {
    static constexpr int zero(int) { return 0; }
    template <int, int kFirst, int kWords>
    static void dot(W (&a)[1], const W (&u)[1][8], const int8_t *q) {
#pragma GCC unroll 8
        for (int i = kFirst; i < kFirst + kWords; ++i)
            a[0] = (W)_mm256_dpbusd_avx_epi32((__m256i)a[0], (__m256i)u[0][i], columns(q + 4 * i));
    }
};

const char *no_avxvnni() {
    // That the system saves the 256-bit registers is part of the compiler's answer for AVX2. It does not know AVX-VNNI
    // by name before gcc 13: bit 4 of EAX of leaf 7.1, where leaf 7 has a subleaf 1.
    unsigned most, eax, ebx, ecx, edx;
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("f16c") && __get_cpuid_count(7, 0, &most, &ebx, &ecx, &edx) && most >= 1 &&
                     __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
    return has ? nullptr : "this processor lacks AVX-VNNI";
}

}  // namespace

const KernelSet kAvxVnniKernels = make_kernel_set<AvxVnni>("avxvnni", no_avxvnni);

}  // namespace moepool

#endif
