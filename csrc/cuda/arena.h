// The memory of a pool's slots.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/runtime.h"

namespace moepool {
namespace cuda {

// Device memory at addresses that do not change while its size does: CUDA graphs hold them. Addresses are reserved for
// the largest size; memory is taken and given back in chunks, where the driver can do so. Where it can not, and for an
// arena that was not asked to change, it is plain memory of the first size.
class Arena {
  public:
    Arena() = default;
    // most: bytes that it may grow to; 0: it keeps its size.
    Arena(int device, int64_t bytes, int64_t most);
    ~Arena();
    Arena(Arena &&other) noexcept;
    Arena &operator=(Arena &&other) noexcept;

    uint8_t *get() const { return base_ ? base_ : plain_.get(); }
    // What may be used.
    int64_t bytes() const { return bytes_; }
    // What is taken from the device.
    int64_t taken() const { return base_ ? static_cast<int64_t>(chunks_.size()) * chunk_ : plain_bytes_; }
    // What resize may ask for.
    int64_t most() const { return base_ ? reserved_ : plain_bytes_; }
    // Fails with MOEPOOL_ERROR_OUT_OF_MEMORY, and is as it was, if there is not so much. Nothing reads what goes.
    void resize(int64_t bytes);

  private:
    void reserve(int64_t most);
    void release() noexcept;

    int device_ = 0;
    int64_t bytes_ = 0;
    DeviceMemory<uint8_t> plain_;
    int64_t plain_bytes_ = 0;
    uint8_t *base_ = nullptr;  // of the reserved addresses; NULL: plain memory
    int64_t reserved_ = 0, chunk_ = 0;
    std::vector<unsigned long long> chunks_;  // CUmemGenericAllocationHandle, in the order of their addresses
};

}  // namespace cuda
}  // namespace moepool
