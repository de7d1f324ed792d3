// The one list of quantisation types, and the layout of each as data: sizes, packers and kernels come from here.
//
// A GGUF block is cut into segments. A raw segment is copied byte for byte. A field segment holds one 1-, 2- or 4-bit
// value a column and is rewritten so that in each 32-bit word a byte belongs to one column and neighbouring bytes to
// neighbouring columns: with b bits a word holds 32/b columns, and bits b*j .. b*j+b-1 of byte i belong to column 4*j +
// i of them. docs/quant-types.md says what the bits of a block mean.
//
// A row's words in a panel (up to 256 columns) are its segments one after another, each with the blocks of the panel
// side by side and padded with zero bytes to whole words.
#pragma once

#include <cstdint>

#include "both.h"

namespace moepool {

constexpr int kChunkColumns = 256;  // columns of a full panel, and of one float accumulator (numerics.md section 3)
constexpr int kPanelRows = 32;
constexpr int kBlockColumns = 32;  // columns that share an activation scale

// In rising ggml id.
#define MOEPOOL_QUANT_TYPES(X) \
    X(F32)                     \
    X(F16)                     \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(BF16) X(MXFP4)

struct Segment {
    int bits;    // of a field: 1, 2 or 4; 0: raw bytes
    int source;  // first byte in the GGUF block
    int count;   // of a field: columns; raw: bytes
    int span;    // of a field: column k lies in byte source + k / (span * 8 / bits) * span + k % span, its bits from
                 // bits * (k / span % (8 / bits)) on
    int halves;  // raw: so many float16 scales begin it, which must be finite

    MOEPOOL_BOTH constexpr int bytes() const { return bits ? count * bits / 8 : count; }
};

constexpr Segment raw(int source, int bytes, int halves = 0) { return {0, source, bytes, 0, halves}; }
constexpr Segment field(int bits, int source, int count, int span) { return {bits, source, count, span, 0}; }

struct TypeInfo {
    const char *name;
    int id;
    int block;        // columns
    int block_bytes;  // in a GGUF file
    Segment segments[4];

    // First word of a segment in a panel of `blocks` blocks; segment 4 is the end.
    MOEPOOL_BOTH constexpr int word(int segment, int blocks) const {
        int word = 0;
        for (int i = 0; i < segment; ++i) word += (segments[i].bytes() * blocks + 3) / 4;
        return word;
    }
    MOEPOOL_BOTH constexpr int panel_words(int columns) const { return word(4, columns / block); }
    MOEPOOL_BOTH constexpr int64_t row_bytes(int64_t columns) const { return columns / block * block_bytes; }
};

// Each type by its name in ggml. What its words mean for arithmetic is quant/decode.h.
struct F32 {
    static constexpr TypeInfo info{"f32", 0, 1, 4, {raw(0, 4)}};
};
struct F16 {
    static constexpr TypeInfo info{"f16", 1, 1, 2, {raw(0, 2)}};
};
struct BF16 {
    static constexpr TypeInfo info{"bf16", 30, 1, 2, {raw(0, 2)}};
};
struct Q8_0 {
    static constexpr TypeInfo info{"q8_0", 8, 32, 34, {raw(0, 2, 1), raw(2, 32)}};
};
struct Q4_0 {
    static constexpr TypeInfo info{"q4_0", 2, 32, 18, {raw(0, 2, 1), field(4, 2, 32, 16)}};
};
struct Q4_1 {
    static constexpr TypeInfo info{"q4_1", 3, 32, 20, {raw(0, 4, 2), field(4, 4, 32, 16)}};
};
struct Q5_0 {
    static constexpr TypeInfo info{"q5_0", 6, 32, 22, {raw(0, 2, 1), field(1, 2, 32, 1), field(4, 6, 32, 16)}};
};
struct Q5_1 {
    static constexpr TypeInfo info{"q5_1", 7, 32, 24, {raw(0, 4, 2), field(1, 4, 32, 1), field(4, 8, 32, 16)}};
};
struct Q2_K {
    static constexpr TypeInfo info{"q2_k", 10, 256, 84, {raw(80, 4, 2), raw(0, 16), field(2, 16, 256, 32)}};
};
struct Q3_K {
    static constexpr TypeInfo info{
        "q3_k", 11, 256, 110, {field(2, 32, 256, 32), field(1, 0, 256, 32), raw(96, 12), raw(108, 2, 1)}};
};
struct Q4_K {
    static constexpr TypeInfo info{"q4_k", 12, 256, 144, {raw(0, 4, 2), raw(4, 12), field(4, 16, 256, 32)}};
};
struct Q5_K {
    static constexpr TypeInfo info{
        "q5_k", 13, 256, 176, {raw(0, 4, 2), raw(4, 12), field(1, 16, 256, 32), field(4, 48, 256, 32)}};
};
struct Q6_K {
    static constexpr TypeInfo info{
        "q6_k", 14, 256, 210, {field(4, 0, 256, 64), field(2, 128, 256, 32), raw(192, 16), raw(208, 2, 1)}};
};
struct IQ4_NL {
    static constexpr TypeInfo info{"iq4_nl", 20, 32, 18, {raw(0, 2, 1), field(4, 2, 32, 16)}};
};
struct IQ4_XS {
    static constexpr TypeInfo info{"iq4_xs", 23, 256, 136, {raw(0, 4, 1), raw(4, 4), field(4, 8, 256, 16)}};
};
struct MXFP4 {
    static constexpr TypeInfo info{"mxfp4", 39, 32, 17, {raw(0, 1), field(4, 1, 32, 16)}};
};

// Position in the list: the index of every table that has an entry a type.
enum TypeIndex : int {
#define X(T) k##T,
    MOEPOOL_QUANT_TYPES(X)
#undef X
        kTypeCount
};

// By position, 0 <= index < kTypeCount.
const TypeInfo &type_info(int index);
// Position of a ggml type number, or -1.
int find_type(int id);

}  // namespace moepool
