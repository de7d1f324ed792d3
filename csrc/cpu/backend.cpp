// The CPU as a device: slots in ordinary memory, ops on all threads. Every op is a schedule of the arithmetic of
// docs/numerics.md; the work is divided so that no division shows in a result.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
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

constexpr int64_t kSliceTokens = 512;  // tokens that ffn keeps intermediate rows for
constexpr int64_t kItemPlaces = 1024;  // of an expert in one item: so long a call goes on when it is to end
constexpr int64_t kPartRowGroups = 4;  // of down in one item of few places: to count one costs a tenth of a microsecond
constexpr int64_t kAloneBytes = 32 << 10;  // of records, a row each, that one thread multiplies sooner than several
constexpr int64_t kElements = 1 << 14;     // of an elementwise op in one item

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

const uint32_t *panels_of(const Matrix &m, const uint8_t *record, int64_t row_group) {
    return reinterpret_cast<const uint32_t *>(record + m.panels + row_group * m.row_group);
}

// Rows of one row group of an expert's matrix for the activations of up to kMostRows places.
struct Tile {
    float rows[kMostRows][kPanelRows];

    // next: the panels that this thread most likely reads next.
    void multiply(const Matrix &m, const uint8_t *record, int64_t row_group, const Activation *activations, int count,
                  const uint32_t *next) {
        const auto floats = [&](int64_t at) { return at < 0 ? nullptr : reinterpret_cast<const float *>(record + at); };
        const float *bias = floats(m.bias);
        kernels().panel[m.type_index]({panels_of(m, record, row_group), next, m.columns, floats(m.scale),
                                       bias ? bias + row_group * kPanelRows : nullptr, count, activations, rows});
    }
};

// Calls body(places of the slice, their number) for the places of a group, at most kMostRows at once.
template <class Places, class Body>
void each_tile(const Places &slice, const Route::Group &group, const Body &body) {
    const int32_t *order = slice.order() + group.first;
    for (int64_t done = 0; done < group.count; done += kMostRows) {
        int64_t places[kMostRows];
        const int count = static_cast<int>(std::min<int64_t>(kMostRows, group.count - done));
        for (int i = 0; i < count; ++i) places[i] = order[done + i] - slice.base();
        body(places, count);
    }
}

int64_t rows_of(const Matrix &m, int64_t row_group) {
    return std::min<int64_t>(kPanelRows, m.rows - row_group * kPanelRows);
}

// One row group of out (places of the slice, rows of a matrix) for the places of a group. `of` gives the activation row
// of a place.
template <class Places, class Of>
void multiply(const Places &slice, const Route::Group &group, const Matrix &m, int64_t row_group, const Of &of,
              float *out) {
    each_tile(slice, group, [&](const int64_t *places, int count) {
        Activation activations[kMostRows];
        for (int i = 0; i < count; ++i) activations[i] = of(places[i]);
        Tile tile;
        tile.multiply(m, group.record, row_group, activations, count, panels_of(m, group.record, row_group + 1));
        for (int i = 0; i < count; ++i)
            std::copy_n(tile.rows[i], rows_of(m, row_group), out + places[i] * m.rows + row_group * kPanelRows);
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

// So many counts, for threads to count down.
class Countdowns {
  public:
    Countdowns(int64_t counts, int64_t from) : counts_(counts) {
        for (int64_t i = 0; i < counts; ++i) new (counts_.get() + i) std::atomic<int32_t>(static_cast<int32_t>(from));
    }
    const std::atomic<int32_t> &operator[](int64_t i) const { return counts_.get()[i]; }
    // Whether it was the last.
    bool done(int64_t i) const { return counts_.get()[i].fetch_sub(1, std::memory_order_acq_rel) == 1; }

  private:
    const Scratch<std::atomic<int32_t>> counts_;
};

// gate, up, swiglu, down for the groups: out (places of the slice, rows of down). Rows of other places are not written.
// per_row places share a row of the input. Of each column of out `finish(first, end)` is told once, when it is
// complete.
//
// It is one call of all threads, in which they never wait for one another if they need not: memory is not to rest.
// First come the items of gate and up, expert after expert, then those of down in the same order, which wait for their
// own expert's hidden rows.
template <class Places, class Input, class Finish>
void chain(const Places &slice, const std::vector<Route::Group> &groups, const std::vector<Matrix> &matrices,
           const Input &input, int64_t per_row, float *out, const Finish &finish) {
    const Matrix &gate = matrices[0], &up = matrices[1], &down = matrices[2];
    const auto count = static_cast<int64_t>(groups.size());
    const int64_t size = slice.places() > kMostRows * count ? 1 : kPartRowGroups;  // row groups of a part
    const int64_t parts = (down.row_groups() + size - 1) / size;
    ActivationRows hidden(slice.places(), down.columns, !is_quantised(down), is_quantised(down));
    const Countdowns hidden_left(count, gate.row_groups()), part_left(parts, count);

    // A row group of gate and up is a block of the hidden row, so one item takes both to a piece of down's activations.
    const auto gate_up = [&](const Route::Group &group, int64_t r) {
        each_tile(slice, group, [&](const int64_t *places, int tokens) {
            Activation activations[kMostRows];
            for (int i = 0; i < tokens; ++i) activations[i] = input[places[i] / per_row];
            Tile g, u;
            g.multiply(gate, group.record, r, activations, tokens, panels_of(up, group.record, r));
            u.multiply(up, group.record, r, activations, tokens, panels_of(gate, group.record, r + 1));
            kernels().swiglu(*g.rows, *u.rows, *g.rows, int64_t{tokens} * kPanelRows);
            for (int i = 0; i < tokens; ++i) hidden.put(places[i], r * kPanelRows, rows_of(gate, r), g.rows[i]);
        });
    };
    const auto down_part = [&](int64_t g, int64_t part) {
        const int64_t begin = part * size, end = std::min(begin + size, down.row_groups());
        if (!await_zero(hidden_left[g])) return;
        for (int64_t r = begin; r < end; ++r)
            multiply(slice, groups[static_cast<size_t>(g)], down, r, [&](int64_t place) { return hidden[place]; }, out);
        if (part_left.done(part)) finish(begin * kPanelRows, std::min(end * kPanelRows, down.rows));
    };
    const int64_t first = count * gate.row_groups(), items = first + count * parts;  // first: of down
    auto take = [&](int64_t item) {
        if (item < first) {
            gate_up(groups[static_cast<size_t>(item / gate.row_groups())], item % gate.row_groups());
            hidden_left.done(item / gate.row_groups());
        } else {
            down_part((item - first) / parts, (item - first) % parts);
        }
    };
    int64_t rows = 0, bytes = 0;
    for (const Route::Group &group : groups) rows += group.count;
    for (const Matrix &m : matrices) bytes += m.row_groups() * m.row_group;
    if (rows * bytes <= kAloneBytes)
        alone_for(items, take);
    else
        parallel_for(items, first, take);
}

template <class Finish>
void chain(const Slice &slice, const std::vector<Route::Group> &groups, const moepool_rows &x, float *out,
           const Finish &finish) {
    const std::vector<Matrix> &matrices = slice.route.pool().layer().matrices();
    const bool quantised = is_quantised(matrices[0]), other = is_quantised(matrices[1]);
    const int64_t per_row = x.per_place ? 1 : slice.route.k();
    const ActivationRows input(x, slice.base() / per_row, slice.places() / per_row, matrices[0].columns,
                               !quantised || !other, quantised || other);
    chain(slice, groups, matrices, input, per_row, out, finish);
}

constexpr auto nothing_more = [](int64_t, int64_t) {};

// Calls body(slice, its groups) for slices of the route's tokens, so that no prompt is too long.
template <class Body>
void each_slice(const Route &route, moepool_half half, const Body &body) {
    for (int64_t first = 0; first < route.tokens(); first += kSliceTokens) {
        const Slice slice{route, first, std::min(route.tokens(), first + kSliceTokens), half};
        body(slice, slice.groups());
    }
}

// Router weights of a route's places, widened.
class Weights {
  public:
    Weights(const Route &route, const void *data, moepool_dtype dtype)
        : widened_(dtype == MOEPOOL_F32 ? 0 : route.places()) {
        if (widened_.get())
            elementwise(route.places(), [&](int64_t first, int64_t count) {
                for (int64_t i = first; i < first + count; ++i) widened_.get()[i] = widen(data, dtype, i);
            });
        weights_ = widened_.get() ? widened_.get() : static_cast<const float *>(data);
    }
    const float *get() const { return weights_; }

  private:
    const Scratch<float> widened_;
    const float *weights_;
};

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
        const int64_t per_row = x.per_place ? 1 : route.k(), row_groups = m.row_groups();
        const ActivationRows rows(x, 0, slice.places() / per_row, m.columns, !is_quantised(m), is_quantised(m));
        parallel_for(static_cast<int64_t>(groups.size()) * row_groups, [&](int64_t item) {
            multiply(
                slice, groups[static_cast<size_t>(item / row_groups)], m, item % row_groups,
                [&](int64_t place) { return rows[place / per_row]; }, out);
        });
    }

    void ffn(const Route &route, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype, float *out,
             void *) const override {
        const Interruptible scope;
        const int64_t columns = route.pool().layer().matrices()[2].rows, k = route.k();
        const Scratch<float> rows(std::min(kSliceTokens, route.tokens()) * k * columns);
        const Weights router(route, weights, weights_dtype);
        each_slice(route, MOEPOOL_ALL, [&](const Slice &slice, const auto &groups) {
            if (groups.empty()) {
                std::fill_n(out + slice.first * columns, slice.tokens() * columns, 0.0f);
                return;
            }
            chain(slice, groups, x, rows.get(), [&](int64_t begin, int64_t end) {
                for (int64_t token = slice.first; token < slice.last; ++token)
                    kernels().combine(route.ids().data() + token * k, router.get() + token * k, k,
                                      rows.get() + (token - slice.first) * k * columns + begin, columns,
                                      out + token * columns + begin, end - begin);
            });
        });
    }

    void combine(const Route &route, int64_t columns, const float *rows, const void *weights,
                 moepool_dtype weights_dtype, float *out, void *) const override {
        const Interruptible scope;
        const Weights router(route, weights, weights_dtype);
        parallel_for(route.tokens(), [&](int64_t token) {
            const int64_t place = token * route.k();
            kernels().combine(route.ids().data() + place, router.get() + place, route.k(), rows + place * columns,
                              columns, out + token * columns, columns);
        });
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
        chain(slice, groups, x, rows, nothing_more);
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
    const float *x = nullptr;            // NULL: neither gate nor up is of floats
    const ActivationChunk *q = nullptr;  // NULL: neither is quantised
    const int64_t columns, chunks;
    RequestedRows(const uint8_t *input, int64_t rows, const Matrix &gate, const Matrix &up)
        : columns(gate.columns), chunks((columns + kChunkColumns - 1) / kChunkColumns) {
        if (is_quantised(gate) || is_quantised(up)) {
            q = reinterpret_cast<const ActivationChunk *>(input);
            input += rows * chunks * static_cast<int64_t>(sizeof(ActivationChunk));
        }
        if (!is_quantised(gate) || !is_quantised(up)) x = reinterpret_cast<const float *>(input);
    }
    Activation operator[](int64_t row) const {
        return {x ? x + row * columns : nullptr, q ? q + row * chunks : nullptr};
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
    const RequestedRows input(work.input, (places + work.per_row - 1) / work.per_row, layer.matrices()[0],
                              layer.matrices()[1]);
    const std::vector<Matrix> &matrices = layer.matrices();
    chain(Requested{order, places}, groups, matrices, input, work.per_row, work.rows, nothing_more);
}

}  // namespace moepool
