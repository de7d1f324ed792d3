// Activation rows as the kernels read them: widened to float32, and quantised where a matrix is (numerics.md section 1).
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/kernels.h"
#include "moepool.h"

namespace moepool {

// Element `index` of an array, widened exactly.
float widen(const void *data, moepool_dtype dtype, int64_t index);

class ActivationRows {
public:
    // Rows first .. first + count - 1 of x, each of `columns`. Keeps x.data.
    ActivationRows(const moepool_rows &x, int64_t first, int64_t count, int64_t columns, bool quantised);

    Activation operator[](int64_t row) const {
        const int64_t blocks = columns_ / kBlockColumns;
        return {x_ + row * columns_, q_.get() + row * columns_, d_.get() + row * blocks, e_.get() + row * blocks,
                sums_.get() + 2 * row * blocks};
    }

private:
    const int64_t columns_;
    std::unique_ptr<float[]> widened_;
    const float *x_;
    std::unique_ptr<int8_t[]> q_;
    std::unique_ptr<float[]> d_, e_;
    std::unique_ptr<int32_t[]> sums_;
};

}  // namespace moepool
