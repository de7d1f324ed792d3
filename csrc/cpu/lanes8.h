// Eight rows a 256-bit register, four registers a panel plane: the lanes of AVX2, but for the dot product. Included in
// the unnamed namespace of each file that is compiled for them.

struct Lanes8 {
    typedef uint32_t W __attribute__((vector_size(32)));
    typedef float F __attribute__((vector_size(32)));
    static constexpr int kLanes = 8, kSide = 1, kFloatSide = 4;
    static constexpr bool kReadsPages = false;

    static W load(const uint32_t *p) { return (W)_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
    static void store(float *p, F f) { _mm256_storeu_ps(p, (__m256)f); }
    static F broadcast(float f) { return (F)_mm256_set1_ps(f); }
    static W splat(int32_t i) { return (W)_mm256_set1_epi32(i); }
    static F to_float(W w) { return (F)_mm256_cvtepi32_ps((__m256i)w); }
    static F as_float(W w) { return (F)w; }
    static F half(W w) {
        const __m256i low = (__m256i)(w & 0xffffu);
        return (F)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    }
    static F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
    template <class Table>
    static W lookup(W w) {
        const __m128i table = _mm_setr_epi32(static_cast<int>(Table::words[0]), static_cast<int>(Table::words[1]),
                                             static_cast<int>(Table::words[2]), static_cast<int>(Table::words[3]));
        return (W)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)w);
    }
    // The codes of four columns, in all lanes.
    static __m256i columns(const int8_t *q) {
        int four;
        __builtin_memcpy(&four, q, sizeof four);
        return _mm256_set1_epi32(four);
    }
};
