// Kernel sets: the same arithmetic for each instruction set, picked at run time.
#pragma once

#include <cstdint>

#include "quant/types.h"

namespace moepool {

// One activation row: as floats for the float types, else quantised by blocks of 32 columns (numerics.md section 1).
struct Activation {
    const float *x;
    const int8_t *q;        // the codes, a column each
    const float *d;         // a block: the scale,
    const float *e;         // fl(d * float(sum of the codes)),
    const int32_t *sums;    // and the sums of its first and its last 16 codes
};

// One row group of one matrix, times some activation rows.
struct PanelJob {
    const uint32_t *panels;
    int64_t columns;
    int count;
    const Activation *const *rows;  // count of them
    float *const *out;              // count pointers to kPanelRows floats: the sum over chunks, numerics.md section 3
};

struct KernelSet {
    const char *name;
    bool (*usable)();
    void (*panel[kTypeCount])(const PanelJob &job);
    // The quantised parts of an Activation; columns is a multiple of 32.
    void (*quantise)(const float *x, int64_t columns, int8_t *q, float *d, float *e, int32_t *sums);
    void (*swiglu)(const float *gate, const float *up, float *out, int64_t count);
    void (*add)(const float *a, const float *b, float *out, int64_t count);
    // y = fma(weight, row, y), and the last step of section 5.
    void (*accumulate)(float weight, const float *row, float *y, int64_t count);
    void (*finish)(float *y, int64_t count);
};

// In rising order of preference.
extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx512Kernels;
#endif

int kernel_set_count();
const KernelSet &kernel_set(int index);
const KernelSet &kernels();  // the set in use
void select_kernels(const char *name);

}  // namespace moepool
