// Memory for what a call computes in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace moepool {

struct alignas(64) CacheLine {
    std::byte bytes[64];
};

// Not initialised. A thread keeps the memory of past calls for its next ones, up to a limit: fresh pages cost a prompt
// a tenth of its time.
class ScratchBlock {
  public:
    explicit ScratchBlock(size_t bytes);
    ~ScratchBlock();
    void *data() const { return lines_.get(); }

  private:
    size_t count_;
    std::unique_ptr<CacheLine[]> lines_;
};

// An array of `count` elements; get() is NULL if there are none.
template <class E>
class Scratch {
  public:
    explicit Scratch(int64_t count) : block_(static_cast<size_t>(count) * sizeof(E)) {}
    E *get() const { return static_cast<E *>(block_.data()); }

  private:
    ScratchBlock block_;
};

}  // namespace moepool
