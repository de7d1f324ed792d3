// The state of a pool as bytes, and back: moepool_pool_save, moepool_pool_load.
#pragma once

#include <cstdint>
#include <vector>

#include "pool/residency.h"
#include "store/store.h"

namespace moepool {

std::vector<uint8_t> write_state(const Residency::Snapshot &state, const PolicyConfig &policy, const Layer &layer);
// Fails unless the bytes are the state of a pool of this layer's shape, with this policy and so many slots.
Residency::Snapshot read_state(const uint8_t *data, int64_t size, int slots, const PolicyConfig &policy,
                               const Layer &layer);

}  // namespace moepool
