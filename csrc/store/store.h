// The store: every expert's packed record in host memory, layer by layer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "moepool.h"
#include "quant/types.h"

namespace moepool {

constexpr int64_t kRecordAlignment = 256;

// Where one matrix lies in a record, and its shape.
struct Matrix {
    int type_index;
    int64_t rows, columns;
    int64_t panels;     // byte offset of the first row group
    int64_t row_group;  // bytes of a row group
    int64_t bias;       // byte offset of `rows` floats, padded with zeros to whole row groups; -1: none
    int64_t scale;      // byte offset of a float; -1: none

    const TypeInfo &type() const { return type_info(type_index); }
    bool quantised() const { return type().block > 1; }
    int64_t row_groups() const { return (rows + kPanelRows - 1) / kPanelRows; }
};

// Zeroed memory of whole pages.
class Pages {
  public:
    explicit Pages(int64_t bytes);
    ~Pages();
    Pages(const Pages &) = delete;
    Pages &operator=(const Pages &) = delete;
    uint8_t *data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    // Gives the pages that lie within bytes [from, to) back to the system: they are zero again.
    void forget(int64_t from, int64_t to);

  private:
    uint8_t *data_;
    int64_t bytes_;
};

// Page-locks the pieces of a layer, all or some, while it lives.
class Pinning {
  public:
    virtual ~Pinning() = default;
    virtual bool pinned(const uint8_t *record) const = 0;
    virtual int64_t bytes() const = 0;
};

// The most that all layers together page-lock, in bytes.
extern std::atomic<int64_t> pinned_limit;

// Records of one layer. They lie in pieces of whole pages, none split, so that a limit on page-locked memory hits a
// piece and not the layer.
class Layer {
  public:
    Layer(int experts, const moepool_matrix *matrices, int count);

    int experts() const { return experts_; }
    const std::vector<Matrix> &matrices() const { return matrices_; }
    int64_t record_bytes() const { return record_bytes_; }
    int64_t tail() const { return tail_; }  // byte offset of the biases and scales in a record
    int64_t bytes() const { return memory_->bytes(); }
    int64_t pinned_bytes() const;
    // Page-locks the records, once: later calls return what the first made.
    using Pin = std::unique_ptr<Pinning> (*)(uint8_t *pieces, int64_t piece_bytes, int64_t count);
    const Pinning &pin(Pin make) const;
    uint8_t *record(int expert) const {
        return memory_->data() + expert / records_per_piece_ * piece_bytes_ +
               expert % records_per_piece_ * record_bytes_;
    }

  private:
    int experts_;
    std::vector<Matrix> matrices_;
    int64_t record_bytes_, tail_;
    int64_t records_per_piece_, piece_bytes_;
    std::unique_ptr<Pages> memory_;
    mutable std::mutex pinning_mutex_;
    mutable std::unique_ptr<Pinning> pinning_;
};

class Store {
  public:
    int add_layer(int experts, const moepool_matrix *matrices, int count);
    void pack(int layer, int matrix, int expert, int count, const uint8_t *blocks, int64_t expert_stride);
    void unpack(int layer, int matrix, int expert, uint8_t *blocks) const;
    void set_bias(int layer, int matrix, int expert, const float *bias);
    void set_scale(int layer, int matrix, int expert, const float *scale);
    void seal() { sealed_ = true; }
    bool sealed() const { return sealed_; }
    int layers() const { return static_cast<int>(layers_.size()); }
    const Layer &layer(int index) const;

  private:
    const Matrix &checked_matrix(int layer, int matrix, int expert, int count) const;
    void require_open() const;

    std::vector<std::unique_ptr<Layer>> layers_;
    bool sealed_ = false;
};

}  // namespace moepool
