#include "cpu/rows.h"

#include <algorithm>

#include "cpu/threads.h"
#include "numerics.h"

namespace moepool {

float widen(const void *data, moepool_dtype dtype, int64_t index) {
    switch (dtype) {
        case MOEPOOL_F16:
            return num::widen_f16(static_cast<const uint16_t *>(data)[index]);
        case MOEPOOL_BF16:
            return num::widen_bf16(static_cast<const uint16_t *>(data)[index]);
        case MOEPOOL_F32:
            break;
    }
    return static_cast<const float *>(data)[index];
}

ActivationRows::ActivationRows(int64_t count, int64_t columns, bool floats, bool quantised)
    : columns_(columns),
      chunks_((columns + kChunkColumns - 1) / kChunkColumns),
      floats_(floats ? count * columns : 0),
      quantised_(quantised ? count * chunks_ : 0),
      x_(floats_.get()) {}

ActivationRows::ActivationRows(const moepool_rows &x, int64_t first, int64_t count, int64_t columns, bool floats,
                               bool quantised)
    : ActivationRows(count, columns, floats && x.dtype != MOEPOOL_F32, quantised) {
    if (x.dtype == MOEPOOL_F32) x_ = static_cast<const float *>(x.data) + first * columns;
    if (!floats_.get() && !quantised_.get()) return;
    parallel_for(count, [&](int64_t row) {
        if (x.dtype == MOEPOOL_F32) return put(row, 0, columns, x_ + row * columns);
        for (int64_t column = 0; column < columns; column += kChunkColumns) {
            float part[kChunkColumns];
            const int64_t width = std::min<int64_t>(kChunkColumns, columns - column);
            for (int64_t i = 0; i < width; ++i) part[i] = widen(x.data, x.dtype, (first + row) * columns + column + i);
            put(row, column, width, part);
        }
    });
}

void ActivationRows::put(int64_t row, int64_t column, int64_t count, const float *x) {
    if (floats_.get()) std::copy_n(x, count, floats_.get() + row * columns_ + column);
    if (quantised_.get())
        kernels().quantise(x, column / kBlockColumns, count / kBlockColumns, quantised_.get() + row * chunks_);
}

}  // namespace moepool
