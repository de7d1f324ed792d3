// How the decode kernels divide their blocks, and the shared memory that these take. Of the host alone, for a device
// with whatever room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/step.h"
#include "quant/types.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

// How a kernel of the step is launched.
struct DecodeConfig {
    int warps;         // of a block
    int stages;        // panels that a warp has in flight
    int rounds;        // of a single token: panels that it multiplies before the block adds sums up
    int shared_bytes;  // of a block
    std::string text() const;
};

namespace {

// Where a matrix lies in a record.
struct Part {
    int64_t rows, columns, panels, row_group, bias, scale;
    int row_groups, chunks;
    int last_width;  // of the last chunk
    explicit Part(const Matrix &m)
        : rows(m.rows),
          columns(m.columns),
          panels(m.panels),
          row_group(m.row_group),
          bias(m.bias),
          scale(m.scale),
          row_groups(static_cast<int>(m.row_groups())),
          chunks(static_cast<int>((m.columns + kChunkColumns - 1) / kChunkColumns)),
          last_width(static_cast<int>(m.columns - int64_t{chunks - 1} * kChunkColumns)) {}
};

template <class T>
constexpr bool kFloats = T::info.block == 1;

// Bytes of one chunk of one activation row in shared memory.
constexpr int kActivationBlockBytes = 48;
template <class T>
constexpr int kStagedBytes = kFloats<T> ? kChunkColumns * 4 : kChunkColumns / kBlockColumns * kActivationBlockBytes;

template <class T>
constexpr int kPanelBytes = 4 * kPanelRows * T::info.panel_words(kChunkColumns);

// Of a single token.
namespace single_token {

constexpr int kGateUpWarps = 16;  // of a block, at most
constexpr int kDownWarps = 16;
constexpr int kMostRounds = 4;  // of panels that a warp multiplies before the block adds sums up
// Bytes of panels in flight in a block: of most types a block of down then fits beside one of gate/up.
constexpr int kBudget = 112 << 10;
constexpr int kPlaceBytes = 20;  // of down: where its expert lies, and its weight

// How a block is divided, so that each warp has the same number of turns. units: panels of a job; room: bytes of
// shared memory that a block may take; bytes(warps, stages, rounds, panel): that it takes.
template <class Bytes>
DecodeConfig configure(int units, int most_warps, int room, int panel_bytes, const Bytes &bytes) {
    room -= bytes(most_warps, 1, kMostRounds, 0);
    const int panels = std::max(1, std::min(kBudget, room) / panel_bytes);
    DecodeConfig c{};
    const int most = std::min({most_warps, units, panels});
    const int rounds = (units + most - 1) / most;
    c.warps = (units + rounds - 1) / rounds;
    c.stages = std::min({rounds, std::max(1, panels / c.warps), 32});
    c.rounds = std::min(rounds, kMostRounds);
    c.shared_bytes = bytes(c.warps, c.stages, c.rounds, panel_bytes);
    return c;
}

inline int shared_bytes(int warps, int stages, int panel_bytes, int staged_bytes, int partials, int totals) {
    return warps * stages * (panel_bytes + 8) + staged_bytes + (partials + totals) * 128;
}

// Bytes of the staged row: whole, or of floats a chunk a warp.
template <class T>
MOEPOOL_BOTH int input_bytes(const Part &part, int warps) {
    return (kFloats<T> ? warps : part.chunks) * kStagedBytes<T>;
}

template <class T>
DecodeConfig gate_up_config(const Matrix &gate, int room) {
    const Part part(gate);
    return configure(2 * part.chunks, kGateUpWarps, room, kPanelBytes<T>,
                     [&](int warps, int stages, int rounds, int panel) {
                         return shared_bytes(warps, stages, panel, input_bytes<T>(part, warps), warps * rounds, 0);
                     });
}
template <class T>
DecodeConfig down_config(const Matrix &down, int64_t k, int room) {
    const int places = static_cast<int>(k);
    return configure(places * Part(down).chunks, kDownWarps, room, kPanelBytes<T>,
                     [&](int warps, int stages, int rounds, int panel) {
                         return shared_bytes(warps, stages, panel, warps * kStagedBytes<T>, warps * rounds, places) +
                                places * kPlaceBytes;
                     });
}

}  // namespace single_token

// Of more, whose places are cut into tiles. A warp has 32 rows of a matrix to itself.
namespace tiles {

constexpr int kGateUpWarps = 2;  // of a block: one for gate, one for up
constexpr int kDownWarps = 2;    // also of a pass of gate or up alone
constexpr int kSubBatch = 2;     // places that a panel is multiplied with at once
// Panels that a warp has in flight, bytes of them in a block, and blocks of a multiprocessor that registers suffice
// for: enough to hide the memory's latency, and no more than lets many blocks take turns.
constexpr int kMostStages = 2;
constexpr int kBudget = 64 << 10;
constexpr int kBlocks = 8;

// Rows of x that come with a panel.
template <class T>
constexpr int kBeside = kFloats<T> ? 0 : kResidentPlaces;
// A panel, and rows that come with it.
template <class T, int kRows>
constexpr int kStageBytes = kPanelBytes<T> + kRows * kStagedBytes<T>;

// chunks: of a matrix; sums: matrices or row groups of which a block sums up, at least.
template <class T, int kRows>
DecodeConfig config(int chunks, int most_warps, int sums, int room) {
    constexpr int kStage = kStageBytes<T, kRows> + 8, kStaged = kSubBatch * kStagedBytes<T>;
    const auto bytes = [&](int warps, int stages) {
        return warps * (stages * kStage + kStaged) + std::max(sums, warps) * kMostDecodeTokens * 128;
    };
    const int panels = std::max(1, kBudget / kStageBytes<T, kRows>);
    DecodeConfig c{};
    c.rounds = 1;
    c.warps = std::min(most_warps, panels);
    while (c.warps > 1 && bytes(c.warps, 1) > room) --c.warps;
    c.stages = std::max(1, std::min({kMostStages, chunks, panels / c.warps}));
    while (c.stages > 1 && bytes(c.warps, c.stages) > room) --c.stages;
    c.shared_bytes = bytes(c.warps, c.stages);
    return c;
}
template <class T>
DecodeConfig gate_up_config(const Matrix &gate, int room) {
    return config<T, kBeside<T>>(Part(gate).chunks, kGateUpWarps, 2, room);
}
// Gate or up, as a pass of its own.
template <class T>
DecodeConfig half_config(const Matrix &matrix, int room) {
    return config<T, kBeside<T>>(Part(matrix).chunks, kDownWarps, 1, room);
}
template <class T>
DecodeConfig down_config(const Matrix &down, int64_t, int room) {
    return config<T, 0>(Part(down).chunks, kDownWarps, 1, room);
}

}  // namespace tiles

}  // namespace
}  // namespace cuda
}  // namespace moepool
