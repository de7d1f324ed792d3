#include "cuda/pinning.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace moepool {
namespace cuda {

namespace {

constexpr int64_t kRingBytes = int64_t{4} << 20;

std::atomic<int64_t> pinned_now{0};

class Pieces : public Pinning {
  public:
    Pieces(uint8_t *pieces, int64_t piece_bytes, int64_t count) : pieces_(pieces), piece_bytes_(piece_bytes) {
        for (int64_t i = 0; i < count; ++i) {
            // A limit hits this piece and those behind it; a refusal would be repeated for each.
            if (pinned_now.fetch_add(piece_bytes) + piece_bytes > pinned_limit.load() ||
                cudaHostRegister(pieces + i * piece_bytes, static_cast<size_t>(piece_bytes),
                                 cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess) {
                cudaGetLastError();
                pinned_now.fetch_sub(piece_bytes);
                return;
            }
            ++registered_;
        }
    }
    ~Pieces() override {
        const RelaxedCapture relaxed;
        for (int64_t i = 0; i < registered_; ++i) cudaHostUnregister(pieces_ + i * piece_bytes_);
        cudaGetLastError();
        pinned_now.fetch_sub(bytes());
    }
    bool pinned(const uint8_t *record) const override { return record < pieces_ + registered_ * piece_bytes_; }
    int64_t bytes() const override { return registered_ * piece_bytes_; }

  private:
    uint8_t *const pieces_;
    const int64_t piece_bytes_;
    int64_t registered_ = 0;
};

}  // namespace

std::unique_ptr<Pinning> pin_pieces(uint8_t *pieces, int64_t piece_bytes, int64_t count) {
    return std::make_unique<Pieces>(pieces, piece_bytes, count);
}

Uploader::~Uploader() {
    const RelaxedCapture relaxed;
    for (Buffer &buffer : ring_) {
        if (!buffer.data) continue;
        if (buffer.free) try {
                buffer.free->wait();
            } catch (...) {  // the driver is gone
            }
        cudaFreeHost(buffer.data);
    }
}

void Uploader::upload(uint8_t *device, const uint8_t *source, int64_t bytes, const uint8_t *record,
                      cudaStream_t stream) {
    constexpr const char *kWhat = "copying a record to the device";
    if (pinning_.pinned(record)) {
        check(cudaMemcpyAsync(device, source, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream), kWhat);
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t done = 0; done < bytes; done += kRingBytes) {
        Buffer &buffer = ring_[next_];
        next_ = 1 - next_;
        const int64_t part = std::min(kRingBytes, bytes - done);
        if (!buffer.data && cudaHostAlloc(reinterpret_cast<void **>(&buffer.data), kRingBytes, 0) != cudaSuccess) {
            cudaGetLastError();
            buffer.data = nullptr;
        }
        const void *from = source + done;
        if (buffer.data) {
            if (buffer.free)
                buffer.free->wait();
            else
                buffer.free = std::make_unique<Event>();
            std::memcpy(buffer.data, from, static_cast<size_t>(part));
            from = buffer.data;
        }
        check(cudaMemcpyAsync(device + done, from, static_cast<size_t>(part), cudaMemcpyHostToDevice, stream), kWhat);
        if (buffer.data) buffer.free->record(stream);
    }
}

}  // namespace cuda
}  // namespace moepool
