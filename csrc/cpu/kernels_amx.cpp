// AMX int8 for many activations an expert; for few of them, and for all else, the kernels of AVX-512 with VNNI. That is
// also quicker where a block has two sums, of 16 columns each: tiles of a quarter of their depth.
//
// A word plane of a panel is a row of tdpbssd's second operand as it stands: four columns of each of sixteen rows. So
// the first operand is up to sixteen activations by the 32 columns of a block, the second the block's codes of sixteen
// rows, and the product their exact int32 sums, which then go through the same floats as in every other set. Columns of
// two blocks can not share a product, for each block has its own scales: tiles are half as deep as they could be.
//
// With 8 activations it is not yet as fast as VNNI, with 16 it is 1.04 to 1.2 times as fast (bench/README.md).
#if defined(__x86_64__)

// gcc 12 warns of its own intrinsics, which leave a register undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <asm/unistd.h>
#include <cpuid.h>
#include <immintrin.h>
#include <unistd.h>

#include "cpu/kernels_impl.h"

#ifndef MOEPOOL_AMX_FEWEST
#define MOEPOOL_AMX_FEWEST 10
#endif

namespace moepool {

namespace {

#include "cpu/lanes16.h"

// All processors with AMX are Intel's, which reach a tenth more of the memory's rate where they are told.
struct Lanes : Avx512 {
    static constexpr bool kReadsPages = false;
};

constexpr int kTileRows = 16;

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];

    void set(int tile, int tile_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileConfig) == 64);

// In assembler, for which no compiler has to know AMX.
struct NativeTiles {
    static constexpr int kFewest = MOEPOOL_AMX_FEWEST;  // activations for which tiles are faster than VNNI

    static void configure(const TileConfig &config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
    static void release() { asm volatile("tilerelease"); }
    template <int kTile>
    static void load(const void *from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    static void store(void *to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }
    // sum = a times b, signed bytes.
    template <int kSum, int kA, int kB>
    static void product() {
        asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
    }
};

// The same in plain C++, so that all but the five instructions above is tested on every machine with AVX-512.
struct EmulatedTiles {
    static constexpr int kFewest = 1;

    struct Tile {
        int rows, row_bytes;
        int8_t bytes[kTileRows][64];
    };
    static thread_local Tile tiles[8];

    static void require(bool legal) {
        if (!legal) __builtin_trap();
    }
    static void configure(const TileConfig &config) {
        require(config.palette == 1 && config.start_row == 0);
        for (int i = 0; i < 8; ++i) {
            require(config.rows[i] <= kTileRows && config.row_bytes[i] <= 64);
            require(!config.rows[i] == !config.row_bytes[i]);
            tiles[i] = {config.rows[i], config.row_bytes[i], {}};
        }
    }
    static void release() {
        for (Tile &tile : tiles) tile = {};
    }
    template <int kTile>
    static void load(const void *from, int64_t stride) {
        Tile &tile = tiles[kTile];
        require(tile.rows > 0);
        for (int row = 0; row < tile.rows; ++row)
            __builtin_memcpy(tile.bytes[row], static_cast<const char *>(from) + row * stride,
                             static_cast<size_t>(tile.row_bytes));
    }
    template <int kTile>
    static void store(void *to, int64_t stride) {
        const Tile &tile = tiles[kTile];
        require(tile.rows > 0);
        for (int row = 0; row < tile.rows; ++row)
            __builtin_memcpy(static_cast<char *>(to) + row * stride, tile.bytes[row],
                             static_cast<size_t>(tile.row_bytes));
    }
    template <int kSum, int kA, int kB>
    static void product() {
        const Tile &a = tiles[kA], &b = tiles[kB];
        Tile &sum = tiles[kSum];
        require(sum.rows > 0 && sum.rows == a.rows && sum.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
        for (int row = 0; row < sum.rows; ++row) {
            int32_t dots[16] = {};
            for (int k = 0; k < b.rows; ++k)
                for (int n = 0; n < b.row_bytes / 4; ++n)
                    for (int i = 0; i < 4; ++i) dots[n] += a.bytes[row][4 * k + i] * b.bytes[k][4 * n + i];
            __builtin_memcpy(sum.bytes[row], dots, static_cast<size_t>(sum.row_bytes));
        }
    }
};
thread_local EmulatedTiles::Tile EmulatedTiles::tiles[8];

// Rows of a panel over up to kMostRows activations: tiles 0 and 1 hold the codes of sixteen activations each, 2 and 3
// those of sixteen rows each, 4 to 7 the products of the former with the latter.
template <class T, class Tiles>
void multiply_tiles(const PanelJob &job) {
    using L = Lanes;
    using F = L::F;
    constexpr Form kForm = Decode<T>::kForm;
    constexpr int kSide = kPanelRows / L::kLanes;
    constexpr int kPanelWords = T::info.panel_words(kChunkColumns) * kPanelRows;
    static_assert(kSide == 2 && L::kLanes == kTileRows && kMostRows <= 2 * kTileRows);

    const int count = job.count, first = count < kTileRows ? count : kTileRows;
    TileConfig config{};
    config.palette = 1;
    config.set(0, first, kBlockColumns);
    if (count > first) config.set(1, count - first, kBlockColumns);
    for (int i = 0; i < kSide; ++i) {
        config.set(2 + i, kBlockColumns / 4, 4 * kTileRows);
        config.set(4 + i, first, 4 * kTileRows);
        if (count > first) config.set(6 + i, count - first, 4 * kTileRows);
    }
    Tiles::configure(config);

    // Codes and sums of two blocks: one is multiplied while the other goes through the floats.
    struct alignas(64) Block {
        uint32_t codes[kSide][8][kTileRows];
        int32_t sums[kMostRows][kPanelRows];
    };
    Block ring[2];
    alignas(64) int8_t q[kMostRows][kChunkColumns];
    F total[kMostRows][kSide];
    for (int t = 0; t < count; ++t)
        for (int i = 0; i < kSide; ++i) total[t][i] = F{};
    const uint32_t *words = job.panels;
    for (int64_t chunk = 0; chunk * kChunkColumns < job.columns; ++chunk, words += kPanelWords) {
        const int64_t left = job.columns - chunk * kChunkColumns;
        const int width =
            T::info.block < kChunkColumns && left < kChunkColumns ? static_cast<int>(left) : kChunkColumns;
        const Prefetch<T, L, kChunkBlocks> prefetch(job, words, chunk * kChunkColumns);
        for (int t = 0; t < count; ++t) __builtin_memcpy(q[t], job.rows[t].chunks[chunk].q, kChunkColumns);
        F sum[kMostRows][kSide];
        for (int t = 0; t < count; ++t)
            for (int i = 0; i < kSide; ++i) sum[t][i] = F{};
        const auto panel = [&](int i) { return Panel<L>{words + i * L::kLanes, width / T::info.block}; };
        const SideScales<T, L, kSide> scales{panel};

        const auto multiply = [&](int b) __attribute__((always_inline)) {
            Block &block = ring[b & 1];
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                prefetch(b, j);
#pragma GCC unroll 2
                for (int i = 0; i < kSide; ++i)
                    L::store_codes(block.codes[i][j], L::less<Decode<T>::kOffset>(Decode<T>::codes(panel(i), b, j)));
            }
            const int8_t *columns = q[0] + b * kBlockColumns;
            Tiles::template load<2>(block.codes[0], 4 * kTileRows);
            Tiles::template load<3>(block.codes[1], 4 * kTileRows);
            Tiles::template load<0>(columns, kChunkColumns);
            Tiles::template product<4, 0, 2>();
            Tiles::template product<5, 0, 3>();
            Tiles::template store<4>(block.sums[0], sizeof block.sums[0]);
            Tiles::template store<5>(block.sums[0] + kTileRows, sizeof block.sums[0]);
            if (count == first) return;
            Tiles::template load<1>(columns + kTileRows * kChunkColumns, kChunkColumns);
            Tiles::template product<6, 1, 2>();
            Tiles::template product<7, 1, 3>();
            Tiles::template store<6>(block.sums[kTileRows], sizeof block.sums[0]);
            Tiles::template store<7>(block.sums[kTileRows] + kTileRows, sizeof block.sums[0]);
        };
        const auto add = [&](int b) __attribute__((always_inline)) {
            const Block &block = ring[b & 1];
            Scales<L> s[kSide];
#pragma GCC unroll 2
            for (int i = 0; i < kSide; ++i) scales.side[i](b, s[i]);
            for (int t = 0; t < count; ++t) {
                const ActivationChunk &a = job.rows[t].chunks[chunk];
#pragma GCC unroll 2
                for (int i = 0; i < kSide; ++i) {
                    const auto *whole = reinterpret_cast<const uint32_t *>(block.sums[t]) + i * L::kLanes;
                    sum[t][i] = add_block<kForm, L>(s[i], L::load(whole), a, b, sum[t][i]);
                }
            }
        };
        const int blocks = width / kBlockColumns;
        multiply(0);
        if constexpr (T::info.block == kChunkColumns) {
#pragma GCC unroll 8
            for (int b = 0; b < kChunkBlocks; ++b) {
                if (b + 1 < kChunkBlocks) multiply(b + 1);
                add(b);
            }
        } else {
            for (int b = 0; b < blocks; ++b) {
                if (b + 1 < blocks) multiply(b + 1);
                add(b);
            }
        }
        for (int t = 0; t < count; ++t)
            for (int i = 0; i < kSide; ++i) total[t][i] = total[t][i] + sum[t][i];
    }
    Tiles::release();
    for (int t = 0; t < count; ++t)
        for (int i = 0; i < kSide; ++i) L::store(job.out[t] + i * L::kLanes, total[t][i]);
}

template <class T, class Tiles>
void tile_panel(const PanelJob &job) {
    constexpr Form kForm = Decode<T>::kForm;
    if constexpr (kForm == Form::kScale || kForm == Form::kAffine) {
        if (job.count >= Tiles::kFewest) {
            multiply_tiles<T, Tiles>(job);
            finish_rows<Lanes>(job);
            return;
        }
    }
    panel<T, Lanes>(job);
}

template <class Tiles>
constexpr KernelSet make_tile_set(const char *name, const char *(*lacks)()) {
    KernelSet set = make_kernel_set<Lanes>(name, lacks);
#define X(T) set.panel[k##T] = tile_panel<T, Tiles>;
    MOEPOOL_QUANT_TYPES(X)
#undef X
    return set;
}

// The processor must have AMX, the system must save its registers, and must let this process use them.
const char *no_amx() {
    static const char *const why = []() -> const char * {
        if (const char *lacking = no_avx512()) return lacking;
        unsigned eax, ebx, ecx, edx;
        constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;  // leaf 7, EDX
        if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & (kTile | kInt8)) != (kTile | kInt8))
            return "this processor lacks AMX int8";
        unsigned low, high;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        constexpr unsigned kTileState = 3u << 17;  // of XCR0: configuration and data
        if ((low & kTileState) != kTileState) return "the system does not save AMX's registers";
        constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of Linux 5.16, XFEATURE_XTILEDATA
        if (syscall(__NR_arch_prctl, kRequest, kTileData)) return "the system does not let this process use AMX";
        return nullptr;
    }();
    return why;
}

}  // namespace

const KernelSet kEmulatedAmxKernels = make_tile_set<EmulatedTiles>("amx-emulated", no_avx512);
const KernelSet kAmxKernels = make_tile_set<NativeTiles>("amx", no_amx);

}  // namespace moepool

#endif
