// Activation rows as the kernels read them: as floats for matrices of a float type, else quantised (numerics.md
// section 1).
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "moepool.h"

namespace moepool {

// Element `index` of an array, widened exactly.
float widen(const void *data, moepool_dtype dtype, int64_t index);

class ActivationRows {
  public:
    // Room for `count` rows in either form or both.
    ActivationRows(int64_t count, int64_t columns, bool floats, bool quantised);
    // Rows first .. first + count - 1 of x. Keeps x.data.
    ActivationRows(const moepool_rows &x, int64_t first, int64_t count, int64_t columns, bool floats, bool quantised);

    Activation operator[](int64_t row) const { return {x_ + row * columns_, quantised_.get() + row * chunks_}; }

    // Sets columns [column, column + count) of a row: whole blocks of 32 where rows are quantised.
    void put(int64_t row, int64_t column, int64_t count, const float *x);

  private:
    const int64_t columns_, chunks_;  // of a row
    const Scratch<float> floats_;
    const Scratch<ActivationChunk> quantised_;
    const float *x_;
};

}  // namespace moepool
