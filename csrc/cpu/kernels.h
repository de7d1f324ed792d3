// Kernel sets: the same arithmetic for each instruction set, picked at run time.
#pragma once

#include <cstdint>

#include "quant/types.h"

namespace moepool {

constexpr int kChunkBlocks = kChunkColumns / kBlockColumns;

// 256 columns of a quantised activation row (numerics.md section 1), in one piece so that a kernel has one pointer a
// row.
struct alignas(64) ActivationChunk {
    int8_t q[kChunkColumns];
    float d[kChunkBlocks];          // a block: the scale,
    float e[kChunkBlocks];          // fl(d * float(sum of the codes)),
    int32_t sums[2][kChunkBlocks];  // and the sums of its first and of its last 16 codes
};

// One activation row as a matrix reads it: of a float type as floats, else quantised.
struct Activation {
    const float *x;
    const ActivationChunk *chunks;
};

constexpr int kMostRows = 32;  // activation rows of one PanelJob

// One row group of one matrix, times some activation rows.
struct PanelJob {
    const uint32_t *panels;
    const uint32_t *next;  // where panels will most likely be read after these: a hint
    int64_t columns;
    const float *scale;  // of the expert, or NULL
    const float *bias;   // kPanelRows of them, or NULL
    int count;           // 1 .. kMostRows
    const Activation *rows;
    float (*out)[kPanelRows];  // a row of numerics.md section 3 for each activation row
};

struct KernelSet {
    const char *name;
    const char *(*lacks)();  // why this machine can not run it; NULL: it can
    void (*panel[kTypeCount])(const PanelJob &job);
    // Quantises `count` blocks of 32 floats, the first of which is block `first` of the row.
    void (*quantise)(const float *x, int64_t first, int64_t count, ActivationChunk *row);
    void (*swiglu)(const float *gate, const float *up, float *out, int64_t count);
    void (*add)(const float *a, const float *b, float *out, int64_t count);
    // y: `columns` of the sum over a token's k places. rows: those of its first place, `stride` before the next one's.
    void (*combine)(const int32_t *ids, const float *weights, int64_t k, const float *rows, int64_t stride, float *y,
                    int64_t columns);
};

// In rising order of preference.
extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kEmulatedAmxKernels;  // for tests: the tiles of AMX in plain C++
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvxVnniKernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAmxKernels;
#endif

int kernel_set_count();
const KernelSet &kernel_set(int index);
const KernelSet &kernels();  // the set in use
void select_kernels(const char *name);

}  // namespace moepool
