#include "store/store.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/threads.h"
#include "error.h"
#include "store/pack.h"

namespace moepool {

namespace {

constexpr int64_t kPieceBytes = int64_t{64} << 20;  // about; at least one record
constexpr int64_t kLargestDimension = int64_t{1} << 31;
constexpr int64_t kLargestLayer = int64_t{1} << 46;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

std::atomic<int64_t> pinned_limit{INT64_MAX};

Layer::Layer(int experts, const moepool_matrix *matrices, int count) : experts_(experts) {
    int64_t offset = 0;
    for (int i = 0; i < count; ++i) {
        const moepool_matrix &given = matrices[i];
        const int index = find_type(given.type);
        if (index < 0)
            fail(MOEPOOL_ERROR_UNSUPPORTED, "matrix %d: ggml type %d is not a weight type of this build", i,
                 given.type);
        const TypeInfo &type = type_info(index);
        if (given.rows < 1 || given.rows > kLargestDimension || given.columns < 1 || given.columns > kLargestDimension)
            fail(MOEPOOL_ERROR_ARGUMENT, "matrix %d: %lld rows by %lld columns is not a size from 1 to 2^31", i,
                 static_cast<long long>(given.rows), static_cast<long long>(given.columns));
        if (given.columns % type.block)
            fail(MOEPOOL_ERROR_ARGUMENT, "matrix %d: %lld columns are not whole blocks of %s (%d columns)", i,
                 static_cast<long long>(given.columns), type.name, type.block);
        Matrix m{};
        m.type_index = index;
        m.rows = given.rows;
        m.columns = given.columns;
        m.panels = offset;
        m.row_group = row_group_bytes(type, m.columns);
        if (m.row_group > kLargestLayer / m.row_groups())
            fail(MOEPOOL_ERROR_ARGUMENT, "matrix %d: more than 2^46 bytes an expert", i);
        offset += m.row_group * m.row_groups();
        matrices_.push_back(m);
    }
    tail_ = offset;
    for (int i = 0; i < count; ++i) {
        Matrix &m = matrices_[static_cast<size_t>(i)];
        m.bias = matrices[i].has_bias ? offset : -1;
        if (m.bias >= 0) offset += static_cast<int64_t>(sizeof(float)) * kPanelRows * m.row_groups();
        m.scale = matrices[i].has_scale ? offset : -1;
        if (m.scale >= 0) offset += static_cast<int64_t>(sizeof(float));
    }
    record_bytes_ = round_up(offset, kRecordAlignment);
    const int64_t page = sysconf(_SC_PAGESIZE);
    records_per_piece_ = std::min<int64_t>(experts, std::max<int64_t>(1, kPieceBytes / record_bytes_));
    piece_bytes_ = round_up(records_per_piece_ * record_bytes_, page);
    const int64_t pieces = (experts + records_per_piece_ - 1) / records_per_piece_;
    if (piece_bytes_ > kLargestLayer / pieces)
        fail(MOEPOOL_ERROR_ARGUMENT, "a layer of %d experts of %lld bytes is more than 2^46 bytes", experts,
             static_cast<long long>(record_bytes_));
    memory_ = std::make_unique<Pages>(pieces * piece_bytes_);
}

int64_t Layer::pinned_bytes() const {
    const std::lock_guard<std::mutex> lock(pinning_mutex_);
    return pinning_ ? pinning_->bytes() : 0;
}

const Pinning &Layer::pin(Pin make) const {
    const std::lock_guard<std::mutex> lock(pinning_mutex_);
    if (!pinning_) pinning_ = make(memory_->data(), piece_bytes_, memory_->bytes() / piece_bytes_);
    return *pinning_;
}

int Store::add_layer(int experts, const moepool_matrix *matrices, int count) {
    require_open();
    if (experts < 1) fail(MOEPOOL_ERROR_ARGUMENT, "a layer needs at least one expert, not %d", experts);
    if (count < 1 || count > 3 || !matrices) fail(MOEPOOL_ERROR_ARGUMENT, "a layer has 1 to 3 matrices, not %d", count);
    layers_.push_back(std::make_unique<Layer>(experts, matrices, count));
    return layers() - 1;
}

const Layer &Store::layer(int index) const {
    if (index < 0 || index >= layers())
        fail(MOEPOOL_ERROR_ARGUMENT, "layer %d of a store with %d layers", index, layers());
    return *layers_[static_cast<size_t>(index)];
}

void Store::require_open() const {
    if (sealed_) fail(MOEPOOL_ERROR_STATE, "the store is sealed: its layers and records can not change any more");
}

const Matrix &Store::checked_matrix(int index, int matrix, int expert, int count) const {
    const Layer &l = layer(index);
    const int matrices = static_cast<int>(l.matrices().size());
    if (matrix < 0 || matrix >= matrices)
        fail(MOEPOOL_ERROR_ARGUMENT, "matrix %d of a layer with %d matrices", matrix, matrices);
    if (expert < 0 || count < 0 || expert > l.experts() - count)
        fail(MOEPOOL_ERROR_ARGUMENT, "experts %d to %lld of a layer with %d experts", expert,
             static_cast<long long>(expert) + count - 1, l.experts());
    return l.matrices()[static_cast<size_t>(matrix)];
}

void Store::pack(int layer_index, int matrix, int expert, int count, const uint8_t *blocks, int64_t expert_stride) {
    require_open();
    const Matrix &m = checked_matrix(layer_index, matrix, expert, count);
    if (!blocks) fail(MOEPOOL_ERROR_ARGUMENT, "blocks is NULL");
    const Layer &l = layer(layer_index);
    const int64_t groups = m.row_groups();
    const int64_t row_bytes = m.type().row_bytes(m.columns);
    const Interruptible scope;
    std::atomic<int64_t> bad{INT64_MAX};  // expert * rows + row, the smallest
    parallel_for(count * groups, [&](int64_t item) {
        const int64_t e = item / groups, first = item % groups * kPanelRows;
        const int rows = static_cast<int>(std::min<int64_t>(kPanelRows, m.rows - first));
        const int row = pack_row_group(m.type_index, m.columns, rows, blocks + e * expert_stride + first * row_bytes,
                                       l.record(expert + static_cast<int>(e)) + m.panels + item % groups * m.row_group);
        if (row >= 0) {
            const int64_t here = e * m.rows + first + row;
            int64_t seen = bad.load();
            while (here < seen && !bad.compare_exchange_weak(seen, here)) {
            }
        }
    });
    if (bad.load() != INT64_MAX)
        fail(MOEPOOL_ERROR_IO, "expert %lld, row %lld: a float16 scale of a %s block is not finite",
             static_cast<long long>(expert + bad.load() / m.rows), static_cast<long long>(bad.load() % m.rows),
             m.type().name);
}

void Store::unpack(int layer_index, int matrix, int expert, uint8_t *blocks) const {
    const Matrix &m = checked_matrix(layer_index, matrix, expert, 1);
    if (!blocks) fail(MOEPOOL_ERROR_ARGUMENT, "blocks is NULL");
    const uint8_t *record = layer(layer_index).record(expert);
    for (int64_t group = 0; group < m.row_groups(); ++group) {
        const int64_t first = group * kPanelRows;
        unpack_row_group(m.type_index, m.columns, static_cast<int>(std::min<int64_t>(kPanelRows, m.rows - first)),
                         record + m.panels + group * m.row_group, blocks + first * m.type().row_bytes(m.columns));
    }
}

void Store::set_bias(int layer_index, int matrix, int expert, const float *bias) {
    require_open();
    const Matrix &m = checked_matrix(layer_index, matrix, expert, 1);
    if (m.bias < 0) fail(MOEPOOL_ERROR_STATE, "matrix %d was declared without a bias", matrix);
    if (!bias) fail(MOEPOOL_ERROR_ARGUMENT, "bias is NULL");
    std::memcpy(layer(layer_index).record(expert) + m.bias, bias, static_cast<size_t>(m.rows) * sizeof(float));
}

void Store::set_scale(int layer_index, int matrix, int expert, const float *scale) {
    require_open();
    const Matrix &m = checked_matrix(layer_index, matrix, expert, 1);
    if (m.scale < 0) fail(MOEPOOL_ERROR_STATE, "matrix %d was declared without a scale", matrix);
    if (!scale) fail(MOEPOOL_ERROR_ARGUMENT, "scale is NULL");
    // By address: a float argument passes through registers, where a flush-to-zero mode of the caller would take it.
    std::memcpy(layer(layer_index).record(expert) + m.scale, scale, sizeof *scale);
}

}  // namespace moepool
