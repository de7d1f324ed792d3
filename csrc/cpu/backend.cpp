// The CPU as a device: slots in ordinary memory, ops on all threads. Every op is a schedule of the arithmetic of
// docs/numerics.md; the work is divided so that no division shows in a result.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"
#include "error.h"
#include "numerics.h"
#include "pool/backend.h"
#include "pool/pool.h"

namespace moepool {

namespace {

constexpr int64_t kSliceTokens = 512;   // tokens that ffn keeps intermediate rows for
constexpr int64_t kItemPlaces = 1024;   // of an expert in one item: so long a call goes on when it is to end
constexpr int64_t kElements = 1 << 14;  // of an elementwise op in one item

class CpuSlots : public Slots {
  public:
    CpuSlots(const Layer &layer, int count, int most)
        : count_(count),
          record_bytes_(layer.record_bytes()),
          memory_(std::max(count, most) ? new Pages(std::max(count, most) * record_bytes_) : nullptr) {}
    int count() const override { return count_; }
    int64_t bytes() const override { return count_ * record_bytes_; }
    // Pages that nothing was written to take no memory.
    void resize(int count) override {
        if (count < count_) memory_->forget(count * record_bytes_, count_ * record_bytes_);
        count_ = count;
    }
    const uint8_t *slot(int index) const override { return memory_->data() + index * record_bytes_; }
    std::unique_ptr<DeviceRoute> publish(const Route &) override { return nullptr; }
    void fill(int index, const uint8_t *record) override {
        constexpr int64_t kPart = 1 << 18;
        uint8_t *slot = memory_->data() + index * record_bytes_;
        parallel_for((record_bytes_ + kPart - 1) / kPart, [&](int64_t i) {
            std::memcpy(slot + i * kPart, record + i * kPart,
                        static_cast<size_t>(std::min(kPart, record_bytes_ - i * kPart)));
        });
    }

  private:
    int count_;
    const int64_t record_bytes_;
    const std::unique_ptr<Pages> memory_;
};

// The tokens [first, last) of a route, and of these the places of one half.
struct Slice {
    const Route &route;
    int64_t first, last;
    moepool_half half;

    int64_t tokens() const { return last - first; }
    int64_t places() const { return tokens() * route.k(); }
    const int32_t *order() const { return route.order().data(); }
    int64_t base() const { return first * route.k(); }  // the first place, as order() counts
    int32_t id(int64_t place) const { return route.ids()[static_cast<size_t>(first * route.k() + place)]; }

    // Each expert of the slice with its places, as positions of order(); one with very many is there several times.
    std::vector<Route::Group> groups() const {
        std::vector<Route::Group> groups;
        const int32_t *order = route.order().data();
        for (Route::Group group : route.groups) {
            if (half != MOEPOOL_ALL && (half == MOEPOOL_HOT) != (group.slot >= 0)) continue;
            const int32_t *begin = order + group.first, *end = begin + group.count;
            const int32_t *from = std::lower_bound(begin, end, first * route.k());
            const int32_t *to = std::lower_bound(from, end, last * route.k());
            for (; from < to; from += group.count) {
                group.first = from - order;
                group.count = std::min<int64_t>(kItemPlaces, to - from);
                groups.push_back(group);
            }
        }
        return groups;
    }
};

bool is_quantised(const Matrix &m) { return m.type().block > 1; }

// Rows of one row group of an expert's matrix for the activations of up to kMostRows places.
struct Tile {
    float rows[kMostRows][kPanelRows];

    void multiply(const Matrix &m, const uint8_t *record, int64_t row_group, const Activation *activations, int count) {
        const auto floats = [&](int64_t at) { return at < 0 ? nullptr : reinterpret_cast<const float *>(record + at); };
        const float *bias = floats(m.bias);
        kernels().panel[m.type_index]({reinterpret_cast<const uint32_t *>(record + m.panels + row_group * m.row_group),
                                       m.columns, floats(m.scale), bias ? bias + row_group * kPanelRows : nullptr,
                                       count, activations, rows});
    }
};

// Calls body(group, row group, places of the slice, their number) for every row group of each group's expert, at most
// kMostRows places at once.
template <class Places, class Body>
void each_tile(const Places &slice, const std::vector<Route::Group> &groups, int64_t row_groups, const Body &body) {
    const int64_t base = slice.base();
    parallel_for(static_cast<int64_t>(groups.size()) * row_groups, [&](int64_t item) {
        const Route::Group &group = groups[static_cast<size_t>(item / row_groups)];
        const int32_t *order = slice.order() + group.first;
        for (int64_t done = 0; done < group.count; done += kMostRows) {
            int64_t places[kMostRows];
            const int count = static_cast<int>(std::min<int64_t>(kMostRows, group.count - done));
            for (int i = 0; i < count; ++i) places[i] = order[done + i] - base;
            body(group, item % row_groups, places, count);
        }
    });
}

// out (places of the slice, rows) of one matrix for the given experts. `of` gives the activation row of a place.
template <class Places, class Of>
void multiply(const Places &slice, const std::vector<Route::Group> &groups, const Matrix &m, const Of &of, float *out) {
    each_tile(slice, groups, m.row_groups(),
              [&](const Route::Group &group, int64_t r, const int64_t *places, int count) {
                  Activation activations[kMostRows];
                  for (int i = 0; i < count; ++i) activations[i] = of(places[i]);
                  Tile tile;
                  tile.multiply(m, group.record, r, activations, count);
                  const int64_t row = r * kPanelRows, rows = std::min<int64_t>(kPanelRows, m.rows - row);
                  for (int i = 0; i < count; ++i) std::copy_n(tile.rows[i], rows, out + places[i] * m.rows + row);
              });
}

// Sets the rows of all places that no group computes to +0.
void clear_others(const Slice &slice, const std::vector<Route::Group> &groups, int64_t columns, float *out) {
    std::vector<bool> computed(static_cast<size_t>(slice.places()), false);
    for (const Route::Group &group : groups)
        for (int64_t i = group.first; i < group.first + group.count; ++i)
            computed[static_cast<size_t>(slice.route.order()[static_cast<size_t>(i)] - slice.first * slice.route.k())] =
                true;
    for (int64_t place = 0; place < slice.places(); ++place)
        if (!computed[static_cast<size_t>(place)]) std::fill_n(out + place * columns, columns, 0.0f);
}

template <class Body>
void elementwise(int64_t count, const Body &body) {
    const Interruptible scope;
    parallel_for((count + kElements - 1) / kElements,
                 [&](int64_t i) { body(i * kElements, std::min(kElements, count - i * kElements)); });
}

// gate, up, swiglu, down for the groups: out (places of the slice, rows of down). Rows of other places are not written.
// per_row places share a row of the input.
template <class Places, class Input>
void chain(const Places &slice, const std::vector<Route::Group> &groups, const std::vector<Matrix> &matrices,
           const Input &input, int64_t per_row, float *out) {
    const Matrix &gate = matrices[0], &up = matrices[1], &down = matrices[2];
    // A row group of gate and up is a block of the hidden row, so one item takes both to a piece of down's activations.
    ActivationRows hidden(slice.places(), down.columns, !is_quantised(down), is_quantised(down));
    each_tile(slice, groups, gate.row_groups(),
              [&](const Route::Group &group, int64_t r, const int64_t *places, int count) {
                  Activation activations[kMostRows];
                  for (int i = 0; i < count; ++i) activations[i] = input[places[i] / per_row];
                  Tile g, u;
                  g.multiply(gate, group.record, r, activations, count);
                  u.multiply(up, group.record, r, activations, count);
                  kernels().swiglu(*g.rows, *u.rows, *g.rows, int64_t{count} * kPanelRows);
                  const int64_t row = r * kPanelRows, rows = std::min<int64_t>(kPanelRows, gate.rows - row);
                  for (int i = 0; i < count; ++i) hidden.put(places[i], row, rows, g.rows[i]);
              });
    multiply(slice, groups, down, [&](int64_t place) { return hidden[place]; }, out);
}

void chain(const Slice &slice, const std::vector<Route::Group> &groups, const moepool_rows &x, float *out) {
    const std::vector<Matrix> &matrices = slice.route.pool().layer().matrices();
    const bool quantised = is_quantised(matrices[0]), other = is_quantised(matrices[1]);
    const int64_t per_row = x.per_place ? 1 : slice.route.k();
    const ActivationRows input(x, slice.base() / per_row, slice.places() / per_row, matrices[0].columns,
                               !quantised || !other, quantised || other);
    chain(slice, groups, matrices, input, per_row, out);
}

// Calls body(slice, its groups) for slices of the route's tokens, so that no prompt is too long.
template <class Body>
void each_slice(const Route &route, moepool_half half, const Body &body) {
    for (int64_t first = 0; first < route.tokens(); first += kSliceTokens) {
        const Slice slice{route, first, std::min(route.tokens(), first + kSliceTokens), half};
        body(slice, slice.groups());
    }
}

// rows and out begin at the slice, weights at the route.
void combine_slice(const Slice &slice, int64_t columns, const float *rows, const void *weights,
                   moepool_dtype weights_dtype, float *out) {
    const int64_t k = slice.route.k();
    parallel_for(slice.tokens(), [&](int64_t token) {
        float *y = out + token * columns;
        std::fill_n(y, columns, 0.0f);
        for (int64_t place = token * k; place < (token + 1) * k; ++place)
            if (slice.id(place) >= 0)
                kernels().accumulate(widen(weights, weights_dtype, slice.first * k + place), rows + place * columns, y,
                                     columns);
        kernels().finish(y, columns);
    });
}

class CpuBackend : public Backend {
  public:
    std::unique_ptr<Slots> make_slots(const Layer &layer, int count, int most, int64_t) const override {
        return std::make_unique<CpuSlots>(layer, count, most);
    }

    void require_host(void *, const char *) const override {}
    void read(void *host, const void *device, int64_t bytes, void *) const override {
        std::memcpy(host, device, static_cast<size_t>(bytes));
    }

    void matmul_id(const Route &route, int matrix, moepool_half half, const moepool_rows &x, float *out,
                   void *) const override {
        const Interruptible scope;
        const Matrix &m = route.pool().layer().matrices()[static_cast<size_t>(matrix)];
        const Slice slice{route, 0, route.tokens(), half};
        const std::vector<Route::Group> groups = slice.groups();
        clear_others(slice, groups, m.rows, out);
        const int64_t per_row = x.per_place ? 1 : route.k();
        const ActivationRows rows(x, 0, slice.places() / per_row, m.columns, !is_quantised(m), is_quantised(m));
        multiply(slice, groups, m, [&](int64_t place) { return rows[place / per_row]; }, out);
    }

    void ffn(const Route &route, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype, float *out,
             void *) const override {
        const Interruptible scope;
        const int64_t columns = route.pool().layer().matrices()[2].rows;
        const int64_t places = std::min(kSliceTokens, route.tokens()) * route.k();
        const Scratch<float> rows(places * columns);
        each_slice(route, MOEPOOL_ALL, [&](const Slice &slice, const auto &groups) {
            chain(slice, groups, x, rows.get());
            combine_slice(slice, columns, rows.get(), weights, weights_dtype, out + slice.first * columns);
        });
    }

    void combine(const Route &route, int64_t columns, const float *rows, const void *weights,
                 moepool_dtype weights_dtype, float *out, void *) const override {
        const Interruptible scope;
        combine_slice({route, 0, route.tokens(), MOEPOOL_ALL}, columns, rows, weights, weights_dtype, out);
    }

    void swiglu(int64_t count, const float *gate, const float *up, float *out, void *) const override {
        elementwise(count, [&](int64_t i, int64_t n) { kernels().swiglu(gate + i, up + i, out + i, n); });
    }

    void add(int64_t count, const float *a, const float *b, float *out, void *) const override {
        elementwise(count, [&](int64_t i, int64_t n) { kernels().add(a + i, b + i, out + i, n); });
    }
};

}  // namespace

const Backend &cpu_backend() {
    static const CpuBackend backend;
    return backend;
}

void cpu_cold_chain(const Route &route, const moepool_rows &x, float *out) {
    const int64_t columns = route.pool().layer().matrices()[2].rows;
    each_slice(route, MOEPOOL_COLD, [&](const Slice &slice, const auto &groups) {
        float *rows = out + slice.first * route.k() * columns;
        clear_others(slice, groups, columns, rows);
        chain(slice, groups, x, rows);
    });
}

// The places of a device's request, and its activation rows as the device has made them.
struct Requested {
    const std::vector<int32_t> &sorted;
    int64_t count;
    int64_t places() const { return count; }
    const int32_t *order() const { return sorted.data(); }
    int64_t base() const { return 0; }
};
struct RequestedRows {
    const uint8_t *input;
    int64_t columns;
    bool quantised;
    Activation operator[](int64_t row) const {
        const int64_t chunks = (columns + kChunkColumns - 1) / kChunkColumns;
        return quantised ? Activation{nullptr, reinterpret_cast<const ActivationChunk *>(input) + row * chunks}
                         : Activation{reinterpret_cast<const float *>(input) + row * columns, nullptr};
    }
};

void cpu_answer(const Layer &layer, const doorbell::Work &work) {
    const int64_t places = work.tokens * work.k;
    thread_local std::vector<int32_t> order;  // of the places, by expert
    thread_local std::vector<Route::Group> groups;
    order.clear();
    groups.clear();
    for (int64_t p = 0; p < places; ++p)
        if (work.experts[p] >= 0 && work.experts[p] < layer.experts()) order.push_back(static_cast<int32_t>(p));
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return work.experts[a] != work.experts[b] ? work.experts[a] < work.experts[b] : a < b;
    });
    for (size_t i = 0; i < order.size(); ++i) {
        const int32_t expert = work.experts[order[i]];
        if (i == 0 || work.experts[order[i - 1]] != expert)
            groups.push_back({expert, -1, layer.record(expert), static_cast<int64_t>(i), 0});
        ++groups.back().count;
    }
    const Matrix &gate = layer.matrices()[0];
    chain(Requested{order, places}, groups, layer.matrices(),
          RequestedRows{work.input, gate.columns, is_quantised(gate)}, work.per_row, work.rows);
}

}  // namespace moepool
