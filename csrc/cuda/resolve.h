// The residency law's step on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/step.h"
#include "pool/backend.h"
#include "pool/policy.h"

namespace moepool {
namespace cuda {

// The residency of a pool and what its steps count, in device memory: a graph holds none of it fixed.
struct DeviceState {
    int64_t tick;
    int32_t slots;      // in use
    int32_t leased;     // how many of these open routes of the host pin
    uint32_t election;  // Residency::Snapshot
    uint32_t *trace;    // a ring of words, trace.h; NULL: nobody asks for it
    uint64_t trace_words;
    uint64_t traced, drained;  // words that were written so far, and that the host has taken
    int64_t lost;              // steps that the ring had no room for
    DeviceSteps::Counts counts;
};

struct ResolveArguments {
    int slots;  // the most that state->slots can be
    PolicyConfig policy;
    int admit;  // of policy::most_admissions
    DeviceState *state;
    int32_t *expert_in;
    Use *uses;                   // by expert
    const int32_t *leases;       // by slot: how many open routes pin it
    DeviceSteps::BadId *bad_id;  // in host memory
    int64_t row_elements;        // of step.x, to be quantised into step.input; 0: not wanted
    int64_t columns;             // of gate
    bool quantised, floats;      // gate or up is so
};

// Takes a step: residency, counts, and the step's tables. If it is single, that is part of gate/up.
void resolve(const Step &step, const ResolveArguments &arguments, cudaStream_t stream);
constexpr int kTallyBytes = 1088;
inline int resolve_shared_bytes(int experts, int slots) {
    return kTallyBytes + 32 * experts + 4 * (7 * experts + 2 * slots + 2 * kMostDecodePlaces) + experts;
}
// Loads the kernel.
void load_resolve_kernel();

}  // namespace cuda
}  // namespace moepool
