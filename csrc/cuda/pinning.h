// Page-locked host memory: the store's pieces, and the ring that unpinned records go through.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "cuda/runtime.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

// Registers the pieces of a layer one by one, until the driver or the limit refuses one: the rest stay pageable.
std::unique_ptr<Pinning> pin_pieces(uint8_t *pieces, int64_t piece_bytes, int64_t count);

// Copies host memory to the device. Page-locked sources go straight; others through two small page-locked buffers, so
// that the driver need not stage them itself, or straight if even those are refused.
class Uploader {
  public:
    explicit Uploader(const Pinning &pinning) : pinning_(pinning) {}
    ~Uploader();
    // `record` says whether the source is page-locked. The source may be freed once the stream has passed the copy.
    void upload(uint8_t *device, const uint8_t *source, int64_t bytes, const uint8_t *record, cudaStream_t stream);

  private:
    struct Buffer {
        uint8_t *data = nullptr;
        std::unique_ptr<Event> free;  // NULL: never used
    };
    const Pinning &pinning_;
    std::mutex mutex_;
    Buffer ring_[2];
    int next_ = 0;
};

}  // namespace cuda
}  // namespace moepool
