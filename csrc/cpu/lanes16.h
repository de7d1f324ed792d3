// Sixteen rows a 512-bit register, two registers a panel plane; vpdpbusd takes four columns of each. Included in the
// unnamed namespace of each file that is compiled for AVX-512 with VNNI.

struct Avx512 {
    typedef uint32_t W __attribute__((vector_size(64)));
    typedef float F __attribute__((vector_size(64)));
    static constexpr int kLanes = 16, kSide = 2, kFloatSide = 2;
    static constexpr bool kReadsPages = true;

    static W load(const uint32_t *p) { return (W)_mm512_loadu_si512(p); }
    static void store(float *p, F f) { _mm512_storeu_ps(p, (__m512)f); }
    static void store_codes(uint32_t *p, W w) { _mm512_store_si512(p, (__m512i)w); }
    // Each byte of w less kOffset.
    template <int kOffset>
    static W less(W w) {
        if constexpr (kOffset == 0) return w;
        if constexpr (kOffset == 128) return w ^ 0x80808080u;
        return (W)_mm512_sub_epi8((__m512i)w, _mm512_set1_epi8(static_cast<char>(kOffset)));
    }
    static F broadcast(float f) { return (F)_mm512_set1_ps(f); }
    static W splat(int32_t i) { return (W)_mm512_set1_epi32(i); }
    static F to_float(W w) { return (F)_mm512_cvtepi32_ps((__m512i)w); }
    static F as_float(W w) { return (F)w; }
    static F half(W w) { return (F)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)w)); }
    static F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
    template <class Table>
    static W lookup(W w) {
        const __m128i table = _mm_setr_epi32(static_cast<int>(Table::words[0]), static_cast<int>(Table::words[1]),
                                             static_cast<int>(Table::words[2]), static_cast<int>(Table::words[3]));
        return (W)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)w);
    }
    static constexpr int zero(int) { return 0; }
    template <int, int kFirst, int kWords>
    static void dot(W (&a)[kSide], const W (&u)[kSide][8], const int8_t *q) {
#pragma GCC unroll 8
        for (int i = kFirst; i < kFirst + kWords; ++i) {
            int four;
            __builtin_memcpy(&four, q + 4 * i, sizeof four);
            const __m512i columns = _mm512_set1_epi32(four);
            a[0] = (W)_mm512_dpbusd_epi32((__m512i)a[0], (__m512i)u[0][i], columns);
            a[1] = (W)_mm512_dpbusd_epi32((__m512i)a[1], (__m512i)u[1][i], columns);
        }
    }
};

// The instructions that this processor lacks; NULL: it has them.
const char *no_avx512() {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") &&
                     __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? nullptr : "this processor lacks AVX-512 with VNNI";
}
