#include "cpu/rows.h"

#include "cpu/threads.h"
#include "numerics.h"

namespace moepool {

float widen(const void *data, moepool_dtype dtype, int64_t index) {
    switch (dtype) {
        case MOEPOOL_F16: return num::widen_f16(static_cast<const uint16_t *>(data)[index]);
        case MOEPOOL_BF16: return num::widen_bf16(static_cast<const uint16_t *>(data)[index]);
        case MOEPOOL_F32: break;
    }
    return static_cast<const float *>(data)[index];
}

ActivationRows::ActivationRows(const moepool_rows &x, int64_t first, int64_t count, int64_t columns, bool quantised)
    : columns_(columns) {
    const auto elements = static_cast<size_t>(count * columns);
    const size_t blocks = elements / kBlockColumns;
    if (x.dtype == MOEPOOL_F32) {
        x_ = static_cast<const float *>(x.data) + first * columns;
    } else {
        widened_.reset(new float[elements]);
        x_ = widened_.get();
    }
    if (quantised) {
        q_.reset(new int8_t[elements]);
        d_.reset(new float[blocks]);
        e_.reset(new float[blocks]);
        sums_.reset(new int32_t[2 * blocks]);
    }
    if (!widened_ && !quantised) return;
    parallel_for(count, [&](int64_t row) {
        for (int64_t i = row * columns; widened_ && i < (row + 1) * columns; ++i)
            widened_[static_cast<size_t>(i)] = widen(x.data, x.dtype, first * columns + i);
        if (!quantised) return;
        const Activation a = (*this)[row];
        kernels().quantise(a.x, columns, const_cast<int8_t *>(a.q), const_cast<float *>(a.d),
                           const_cast<float *>(a.e), const_cast<int32_t *>(a.sums));
    });
}

}  // namespace moepool
