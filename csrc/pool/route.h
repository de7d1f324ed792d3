// A route: for the ids of one step, where each place's expert is read. It is a lease on the slots it reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moepool.h"
#include "pool/backend.h"

namespace moepool {

class Pool;

class Route {
  public:
    // The places that want one expert.
    struct Group {
        int expert;
        int slot;               // that serves it, or -1: it is cold
        const uint8_t *record;  // where the serving processor reads it
        int64_t first, count;   // of order()
    };

    // ids: tokens * k of them, each an expert, -1, or, if it was out of range in device memory, kInvalid.
    static constexpr int32_t kInvalid = -2;
    Route(std::shared_ptr<Pool> pool, std::vector<int32_t> ids, int64_t tokens, int64_t k);
    ~Route();
    Route(const Route &) = delete;
    Route &operator=(const Route &) = delete;

    const Pool &pool() const { return *pool_; }
    int64_t tokens() const { return info.tokens; }
    int64_t k() const { return info.k; }
    int64_t places() const { return info.tokens * info.k; }
    const std::vector<int32_t> &ids() const { return ids_; }
    // Places (token * k + j) sorted by expert, then place; skipped ones have no position.
    const std::vector<int32_t> &order() const { return order_; }
    std::vector<int> wanted() const;  // distinct experts, rising

    void tables(int32_t *hot, int32_t *cold) const;

    std::vector<Group> groups;  // in rising expert; slot and record are set by the pool
    moepool_route_info info{};
    bool counted = false;  // the pool knows of this open route
    bool leased = false;   // the groups' slots count this route
    std::unique_ptr<DeviceRoute> device;

  private:
    const std::shared_ptr<Pool> pool_;
    const std::vector<int32_t> ids_;
    std::vector<int32_t> order_;
};

}  // namespace moepool
