// Slots in device memory, and what a route keeps there.
//
// Order. A pool has one staging stream. Fills go there, and so do a route's tables; `ready`, recorded behind them, is
// what the route's ops wait for, on whatever stream they run. When the route ends, the staging stream waits for those
// ops. So everything that is put on the staging stream later, a fill of one of the route's slots or the freeing of its
// tables, comes after the last reader; and no slot is filled while an open route leases it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/arena.h"
#include "cuda/decode.h"
#include "cuda/matmul.h"
#include "cuda/pinning.h"
#include "cuda/runtime.h"
#include "pool/backend.h"
#include "pool/route.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

// Tiles in device memory.
struct Tiles {
    Scratch<Tile> data;
    int64_t count = 0;
    int largest = 0;  // places in one
};

// Cuts groups into tiles; `record` gives the device address of a group's record.
template <class Record>
Tiles make_tiles(const std::vector<Route::Group> &groups, const Record &record, cudaStream_t stream) {
    std::vector<Tile> tiles;
    Tiles made;
    for (const Route::Group &group : groups)
        for (int64_t done = 0; done < group.count; done += kTilePlaces) {
            const int count = static_cast<int>(std::min<int64_t>(kTilePlaces, group.count - done));
            tiles.push_back({record(group), static_cast<int32_t>(group.first + done), count});
            made.largest = std::max(made.largest, count);
        }
    made.count = static_cast<int64_t>(tiles.size());
    made.data = Scratch<Tile>(made.count, stream);
    // Pageable memory is copied before the call returns.
    if (made.count)
        check(
            cudaMemcpyAsync(made.data.get(), tiles.data(), tiles.size() * sizeof(Tile), cudaMemcpyHostToDevice, stream),
            "copying a route to the device");
    return made;
}

class CudaRoute : public DeviceRoute {
  public:
    CudaRoute(const Route &route, int device, cudaStream_t staging);
    ~CudaRoute() override;

    // Before and after the launches of an op.
    void begin(cudaStream_t stream) const;
    void end(cudaStream_t stream);

    const int32_t *ids() const { return ids_.get(); }
    const int32_t *order() const { return order_.get(); }
    const Tiles &hot() const { return hot_; }

  private:
    const int device_;
    const cudaStream_t staging_;
    Scratch<int32_t> ids_, order_;
    Tiles hot_;  // of the groups that slots serve
    Event ready_;
    std::vector<std::pair<cudaStream_t, Event>> reads_;  // the last op of each stream
};

class CudaSlots : public Slots {
  public:
    CudaSlots(int device, const Layer &layer, int count, int most, int64_t budget_bytes);
    ~CudaSlots() override;

    int count() const override { return count_; }
    int64_t bytes() const override { return arena_.taken(); }
    const uint8_t *slot(int index) const override { return arena_.get() + index * layer_.record_bytes(); }
    void fill(int index, const uint8_t *record) override;
    std::unique_ptr<DeviceRoute> publish(const Route &route) override;
    void resize(int count) override;
    void settle() override;
    DeviceSteps *device_steps(const PolicyConfig &policy, int admit, moepool_miss miss,
                              const std::shared_ptr<const void> &keep) override;
    std::string why_no_device_steps() const override { return no_decoder_; }

    // Brings bytes [from, to) of the groups' records, and the tail that holds biases and scales, to scratch memory,
    // some groups at a time, and calls compute(tiles) on `stream` for each lot: each record crosses the link once.
    // Copies run beside the computing of the lot before.
    template <class Compute>
    void stage(const std::vector<Route::Group> &groups, int64_t from, int64_t to, cudaStream_t stream,
               const Compute &compute);

  private:
    // Calls take(slots) with as many as the budget and the memory have room for, at most `count`.
    template <class Take>
    void fit(int count, const Take &take);
    void give_back_budget() const;

    const int device_;
    const Layer &layer_;
    const int most_;  // slots that there may be
    const int64_t budget_bytes_;
    int count_ = 0;
    Arena arena_;
    const Pinning &pinning_;
    Uploader uploader_;
    Stream staging_, copies_;
    std::unique_ptr<Decoder> decoder_;
    std::string no_decoder_;  // why there is none
};

template <class Compute>
void CudaSlots::stage(const std::vector<Route::Group> &groups, int64_t from, int64_t to, cudaStream_t stream,
                      const Compute &compute) {
    if (groups.empty()) return;
    constexpr int64_t kLotBytes = int64_t{32} << 20;
    const int64_t record = layer_.record_bytes(), tail = layer_.tail();
    const auto lot = static_cast<size_t>(
        std::min<int64_t>(static_cast<int64_t>(groups.size()), std::max<int64_t>(1, kLotBytes / record)));
    const bool twice = lot < groups.size();
    const Scratch<uint8_t> buffer((twice ? 2 : 1) * static_cast<int64_t>(lot) * record, stream);
    // Should a lot fail, the copies under way end before the buffer is freed.
    struct Guard {
        cudaStream_t copies, stream;
        ~Guard() {
            try {
                Event copied;
                copied.record(copies);
                copied.hold(stream);
            } catch (...) {  // the device is lost
            }
        }
    } const guard{copies_, stream};
    Event allocated, arrived[2], done[2];
    allocated.record(stream);
    allocated.hold(copies_);
    for (size_t first = 0, i = 0; first < groups.size(); first += lot, ++i) {
        const int half = static_cast<int>(i % 2);
        uint8_t *base = buffer.get() + half * static_cast<int64_t>(lot) * record;
        const std::vector<Route::Group> some(
            groups.begin() + static_cast<std::ptrdiff_t>(first),
            groups.begin() + static_cast<std::ptrdiff_t>(std::min(groups.size(), first + lot)));
        if (i >= 2) done[half].hold(copies_);
        for (size_t j = 0; j < some.size(); ++j) {
            uint8_t *target = base + static_cast<int64_t>(j) * record;
            const uint8_t *source = some[j].record;
            uploader_.upload(target + from, source + from, to - from, source, copies_);
            if (tail < record && to < record)
                uploader_.upload(target + tail, source + tail, record - tail, source, copies_);
        }
        arrived[half].record(copies_);
        arrived[half].hold(stream);
        const Route::Group *begin = some.data();
        const Tiles tiles =
            make_tiles(some, [&](const Route::Group &group) { return base + (&group - begin) * record; }, stream);
        compute(tiles);
        done[half].record(stream);
    }
}

}  // namespace cuda
}  // namespace moepool
