#include "cuda/slots.h"

#include <algorithm>
#include <map>

#include "error.h"

namespace moepool {
namespace cuda {

namespace {

std::mutex budget_mutex;
std::map<int, int64_t> slot_bytes;  // by device: of all pools

}  // namespace

CudaRoute::CudaRoute(const Route &route, int device, cudaStream_t staging)
    : device_(device),
      staging_(staging),
      ids_(route.places(), staging),
      order_(static_cast<int64_t>(route.order().size()), staging) {
    const auto upload = [&](int32_t *target, const std::vector<int32_t> &source) {
        if (!source.empty())
            check(cudaMemcpyAsync(target, source.data(), source.size() * sizeof(int32_t), cudaMemcpyHostToDevice,
                                  staging),
                  "copying a route to the device");
    };
    upload(ids_.get(), route.ids());
    upload(order_.get(), route.order());
    std::vector<Route::Group> hot;
    for (const Route::Group &group : route.groups)
        if (group.slot >= 0) hot.push_back(group);
    hot_ = make_tiles(hot, [](const Route::Group &group) { return group.record; }, staging);
    ready_.record(staging);
}

CudaRoute::~CudaRoute() {
    try {
        const OnDevice on(device_);
        for (const auto &read : reads_) read.second.hold(staging_);
    } catch (...) {  // the driver is gone
    }
}

void CudaRoute::begin(cudaStream_t stream) const {
    // A graph can not wait for what was queued outside of it; the host waits instead, once, while it is captured.
    if (capturing(stream))
        ready_.wait();
    else
        ready_.hold(stream);
}

void CudaRoute::end(cudaStream_t stream) {
    // The launches of a captured graph happen later: whoever replays it keeps the route open.
    if (capturing(stream)) return;
    for (auto &read : reads_) {
        if (read.first != stream) continue;
        // Equal handles need not be one stream: it may be another in each thread, or a new one at an old address.
        read.second.hold(stream);
        return read.second.record(stream);
    }
    reads_.emplace_back(stream, Event());
    reads_.back().second.record(stream);
}

CudaSlots::CudaSlots(int device, const Layer &layer, int count, int most, int64_t budget_bytes)
    : device_(device),
      layer_(layer),
      most_(std::max(count, most)),
      budget_bytes_(budget_bytes),
      pinning_(layer.pin(pin_pieces)),
      uploader_(pinning_) {
    const int64_t record = layer.record_bytes();
    fit(count, [&](int slots) { arena_ = Arena(device, slots * record, most * record); });
    try {
        if (count_)
            check(cudaMemsetAsync(arena_.get(), 0, static_cast<size_t>(count_ * record), staging_), "clearing slots");
    } catch (...) {
        give_back_budget();
        throw;
    }
}

CudaSlots::~CudaSlots() {
    try {
        const OnDevice on(device_);
        const RelaxedCapture relaxed;
        cudaStreamSynchronize(staging_);
        cudaStreamSynchronize(copies_);
        decoder_.reset();
    } catch (...) {  // the driver is gone
    }
    give_back_budget();
}

void CudaSlots::give_back_budget() const {
    const std::lock_guard<std::mutex> lock(budget_mutex);
    slot_bytes[device_] -= bytes();
}

template <class Take>
void CudaSlots::fit(int count, const Take &take) {
    const std::lock_guard<std::mutex> lock(budget_mutex);
    int64_t &taken = slot_bytes[device_];
    const int64_t others = taken - bytes(), record = layer_.record_bytes();
    int64_t budget = budget_bytes_;
    if (budget == 0) {
        size_t free = 0, total = 0;
        check(cudaMemGetInfo(&free, &total), "asking for free memory");
        budget = std::max<int64_t>(0, (static_cast<int64_t>(free) + taken) / 2 - others);
    }
    count = std::max(count_, static_cast<int>(std::min<int64_t>(count, budget / record)));
    // Somebody else may take memory between the question and the answer: then with fewer slots, down to what there was.
    for (; count > count_; count = std::max(count_, count * 3 / 4)) {
        try {
            take(count);
            break;
        } catch (const Error &error) {
            if (error.status() != MOEPOOL_ERROR_OUT_OF_MEMORY) throw;
        }
    }
    count_ = count;
    taken = others + bytes();
}

void CudaSlots::resize(int count) {
    const OnDevice on(device_);
    const int64_t record = layer_.record_bytes();
    count = static_cast<int>(std::min<int64_t>({count, most_, arena_.most() / record}));
    if (count > count_) {
        const int before = count_;
        fit(count, [&](int slots) { arena_.resize(slots * record); });
        if (count_ > before)
            check(cudaMemsetAsync(arena_.get() + before * record, 0, static_cast<size_t>((count_ - before) * record),
                                  staging_),
                  "clearing slots");
        return;
    }
    const std::lock_guard<std::mutex> lock(budget_mutex);
    const int64_t before = bytes();
    arena_.resize(count * record);
    count_ = count;
    slot_bytes[device_] += bytes() - before;
}

void CudaSlots::fill(int index, const uint8_t *record) {
    const OnDevice on(device_);
    uploader_.upload(arena_.get() + index * layer_.record_bytes(), record, layer_.record_bytes(), record, staging_);
}

std::unique_ptr<DeviceRoute> CudaSlots::publish(const Route &route) {
    const OnDevice on(device_);
    return std::make_unique<CudaRoute>(route, device_, staging_);
}

void CudaSlots::settle() {
    const OnDevice on(device_);
    const RelaxedCapture relaxed;
    check(cudaStreamSynchronize(staging_), "waiting for copies");
}

DeviceSteps *CudaSlots::device_steps(const PolicyConfig &policy, int admit, moepool_miss miss,
                                     const std::shared_ptr<const void> &keep) {
    if (decoder_ || !no_decoder_.empty()) return decoder_.get();
    if (const char *why = Decoder::refuses(layer_, most_))
        no_decoder_ = why;
    else if (!pinning_.pinned(layer_.record(layer_.experts() - 1)))
        no_decoder_ = "not all records are page-locked";
    if (!no_decoder_.empty()) return nullptr;
    const OnDevice on(device_);
    try {
        std::vector<const uint8_t *> records;
        for (int expert = 0; expert < layer_.experts(); ++expert) {
            void *address = nullptr;
            check(cudaHostGetDevicePointer(&address, layer_.record(expert), 0), "asking for the address of a record");
            records.push_back(static_cast<const uint8_t *>(address));
        }
        std::unique_ptr<Doorbell> doorbell;
        if (miss != MOEPOOL_MISS_STREAM) {
            const bool divides = miss == MOEPOOL_MISS_AUTO;
            doorbell = std::make_unique<Doorbell>(layer_, keep, divides, needs_nodes(),
                                                  divides ? measure_link(records[0], layer_.record_bytes()) : 0);
        }
        decoder_ = std::make_unique<Decoder>(device_, layer_, records, most_, arena_.get(), policy, admit,
                                             std::move(doorbell));
    } catch (const Error &error) {
        // The host can take the steps all the same.
        if (error.status() != MOEPOOL_ERROR_OUT_OF_MEMORY && error.status() != MOEPOOL_ERROR_UNSUPPORTED) throw;
        no_decoder_ = error.what();
    }
    return decoder_.get();
}

}  // namespace cuda
}  // namespace moepool
