// AVX2 with FMA and F16C: eight rows a register. vpmaddubsw adds two products into 16 bits and saturates, so each type
// takes the form that stays below 2^15.
#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/kernels_impl.h"

namespace moepool {

namespace {

#include "cpu/lanes8.h"

struct Avx2 : Lanes8 {
    // How many words a 16-bit sum holds: each adds two products of up to 127 * most.
    static constexpr int words(int most) {
        int words = 8;
        while (words * 2 * 127 * most > 32767) words /= 2;
        return words;
    }
    // Codes that are too large for one word are taken as signed: a magnitude is at most 128, and its sign moves to q.
    static constexpr int zero(int most) { return words(most) ? 0 : 128; }

    template <int kMost, int kFirst, int kWords>
    static void dot(W (&a)[1], const W (&u)[1][8], const int8_t *q) {
        constexpr int kHeld = words(kMost) ? words(kMost) : 1, kStep = kHeld < kWords ? kHeld : kWords;
#pragma GCC unroll 8
        for (int i = kFirst; i < kFirst + kWords; i += kStep) {
            __m256i sum = products<kMost>(u[0][i], q + 4 * i);
#pragma GCC unroll 8
            for (int j = i + 1; j < i + kStep; ++j) sum = _mm256_add_epi16(sum, products<kMost>(u[0][j], q + 4 * j));
            a[0] += (W)_mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        }
    }

  private:
    template <int kMost>
    static __m256i products(W u, const int8_t *q) {
        if constexpr (zero(kMost) == 0) {
            return _mm256_maddubs_epi16((__m256i)u, columns(q));
        } else {
            const __m256i code = (__m256i)(u ^ 0x80808080u);
            return _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(columns(q), code));
        }
    }
};

const char *no_avx2() {
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? nullptr : "this processor lacks AVX2, FMA or F16C";
}

}  // namespace

const KernelSet kAvx2Kernels = make_kernel_set<Avx2>("avx2", no_avx2);

}  // namespace moepool

#endif
