#include "store/pack.h"

#include <algorithm>
#include <cstring>

namespace moepool {

namespace {

uint32_t load32(const uint8_t *p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// A row of a panel: its words lie kPanelRows words apart.
struct PanelRow {
    uint8_t *words;
    uint8_t *byte(int i) const { return words + i / 4 * (4 * kPanelRows) + i % 4; }
    uint8_t *word(int i) const { return words + i * (4 * kPanelRows); }
};

constexpr uint32_t field_mask(int bits) { return 0x01010101u * ((1u << bits) - 1); }

// Byte of a block that holds a field's column, and the bit it begins at.
constexpr int field_byte(const Segment &s, int column) {
    return s.source + column / (s.span * 8 / s.bits) * s.span + column % s.span;
}
constexpr int field_shift(const Segment &s, int column) { return s.bits * (column / s.span % (8 / s.bits)); }

// Four neighbouring columns of a field, one a byte.
template <class T, int kSegment>
uint32_t gather(const uint8_t *block, int column) {
    constexpr Segment s = T::info.segments[kSegment];
    if constexpr (s.span >= 4) {
        return (load32(block + field_byte(s, column)) >> field_shift(s, column)) & field_mask(s.bits);
    } else {
        uint32_t four = 0;
        for (int i = 0; i < 4; ++i) {
            const uint32_t value = block[field_byte(s, column + i)] >> field_shift(s, column + i);
            four |= (value & ((1u << s.bits) - 1)) << (8 * i);
        }
        return four;
    }
}

template <class T, int kSegment>
void scatter(uint32_t four, uint8_t *block, int column) {
    constexpr Segment s = T::info.segments[kSegment];
    for (int i = 0; i < 4; ++i)
        block[field_byte(s, column + i)] |= ((four >> (8 * i)) & ((1u << s.bits) - 1)) << field_shift(s, column + i);
}

bool finite_half(const uint8_t *half) { return (half[1] & 0x7c) != 0x7c; }

// One segment of the `blocks` blocks that a row has in a panel. False if a scale is not finite.
template <class T, int kSegment>
bool pack_segment(const uint8_t *source, int blocks, PanelRow row) {
    constexpr Segment s = T::info.segments[kSegment];
    const int first = T::info.word(kSegment, blocks);
    bool finite = true;
    for (int b = 0; b < blocks; ++b, source += T::info.block_bytes) {
        if constexpr (s.bits == 0) {
            for (int i = 0; i < s.halves; ++i) finite &= finite_half(source + s.source + 2 * i);
            for (int i = 0; i < s.count; ++i) *row.byte(4 * first + b * s.count + i) = source[s.source + i];
        } else {
            constexpr int kColumns = 32 / s.bits;
            for (int w = 0; w < s.count / kColumns; ++w) {
                uint32_t word = 0;
                for (int j = 0; j < 8 / s.bits; ++j)
                    word |= gather<T, kSegment>(source, w * kColumns + 4 * j) << (s.bits * j);
                std::memcpy(row.word(first + b * (s.count / kColumns) + w), &word, sizeof word);
            }
        }
    }
    return finite;
}

template <class T, int kSegment>
void unpack_segment(PanelRow row, int blocks, uint8_t *target) {
    constexpr Segment s = T::info.segments[kSegment];
    const int first = T::info.word(kSegment, blocks);
    for (int b = 0; b < blocks; ++b, target += T::info.block_bytes) {
        if constexpr (s.bits == 0) {
            for (int i = 0; i < s.count; ++i) target[s.source + i] = *row.byte(4 * first + b * s.count + i);
        } else {
            constexpr int kColumns = 32 / s.bits;
            for (int w = 0; w < s.count / kColumns; ++w) {
                const uint32_t word = load32(row.word(first + b * (s.count / kColumns) + w));
                for (int j = 0; j < 8 / s.bits; ++j)
                    scatter<T, kSegment>((word >> (s.bits * j)) & field_mask(s.bits), target, w * kColumns + 4 * j);
            }
        }
    }
}

// The row's part in one panel, all segments.
template <class T>
bool pack_row(const uint8_t *source, int blocks, PanelRow row) {
    const bool ok0 = pack_segment<T, 0>(source, blocks, row);
    const bool ok1 = pack_segment<T, 1>(source, blocks, row);
    const bool ok2 = pack_segment<T, 2>(source, blocks, row);
    const bool ok3 = pack_segment<T, 3>(source, blocks, row);
    return ok0 && ok1 && ok2 && ok3;
}
template <class T>
void unpack_row(PanelRow row, int blocks, uint8_t *target) {
    std::memset(target, 0, static_cast<size_t>(blocks) * T::info.block_bytes);
    unpack_segment<T, 0>(row, blocks, target);
    unpack_segment<T, 1>(row, blocks, target);
    unpack_segment<T, 2>(row, blocks, target);
    unpack_segment<T, 3>(row, blocks, target);
}

// Calls visit(row, GGUF blocks of the row's chunk, their number, the row's words in the panel) for each row and chunk.
template <class T, class Visit>
void each_panel_row(int64_t columns, int rows, Visit visit) {
    int64_t panel = 0, source = 0;
    for (int64_t column = 0; column < columns; column += kChunkColumns) {
        const int width = static_cast<int>(std::min<int64_t>(kChunkColumns, columns - column));
        for (int row = 0; row < rows; ++row)
            visit(row, row * T::info.row_bytes(columns) + source, width / T::info.block, panel + 4 * row);
        panel += panel_bytes(T::info, width);
        source += T::info.row_bytes(width);
    }
}

template <class T>
int pack_group(int64_t columns, int rows, const uint8_t *blocks, uint8_t *group) {
    int bad = -1;
    each_panel_row<T>(columns, rows, [&](int row, int64_t source, int count, int64_t words) {
        if (!pack_row<T>(blocks + source, count, PanelRow{group + words}) && (bad < 0 || row < bad)) bad = row;
    });
    return bad;
}

template <class T>
void unpack_group(int64_t columns, int rows, const uint8_t *group, uint8_t *blocks) {
    each_panel_row<T>(columns, rows, [&](int, int64_t target, int count, int64_t words) {
        unpack_row<T>(PanelRow{const_cast<uint8_t *>(group) + words}, count, blocks + target);
    });
}

}  // namespace

int64_t panel_bytes(const TypeInfo &type, int64_t columns) {
    return int64_t{4} * kPanelRows * type.panel_words(static_cast<int>(columns));
}

int64_t row_group_bytes(const TypeInfo &type, int64_t columns) {
    return columns / kChunkColumns * panel_bytes(type, kChunkColumns) + panel_bytes(type, columns % kChunkColumns);
}

int pack_row_group(int type_index, int64_t columns, int rows, const uint8_t *blocks, uint8_t *group) {
    using Pack = int (*)(int64_t, int, const uint8_t *, uint8_t *);
    static constexpr Pack table[] = {
#define X(T) pack_group<T>,
        MOEPOOL_QUANT_TYPES(X)
#undef X
    };
    return table[type_index](columns, rows, blocks, group);
}

void unpack_row_group(int type_index, int64_t columns, int rows, const uint8_t *group, uint8_t *blocks) {
    using Unpack = void (*)(int64_t, int, const uint8_t *, uint8_t *);
    static constexpr Unpack table[] = {
#define X(T) unpack_group<T>,
        MOEPOOL_QUANT_TYPES(X)
#undef X
    };
    table[type_index](columns, rows, group, blocks);
}

}  // namespace moepool
