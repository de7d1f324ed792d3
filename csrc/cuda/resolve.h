// The residency law's step on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/step.h"
#include "pool/backend.h"

namespace moepool {
namespace cuda {

// The residency of a pool and what its steps count, in device memory.
struct DeviceState {
    int64_t tick;
    DeviceSteps::Counts counts;
};

struct ResolveArguments {
    int slots;
    bool static_policy;
    int admit;  // the most admissions; -1: no limit
    DeviceState *state;
    int32_t *expert_in;
    int64_t *stamp;
    DeviceSteps::BadId *bad_id;  // in host memory
    int64_t row_elements;        // of step.x, to be quantised into step.input; 0: not wanted
    int64_t columns;             // of gate
    bool quantised;              // gate
};

// Takes a step of more tokens than one: residency, counts, and the step's tables. A single token's is part of gate/up.
void resolve(const Step &step, const ResolveArguments &arguments, cudaStream_t stream);
int resolve_shared_bytes(int experts, int slots);
// Loads the kernel.
void load_resolve_kernel();

}  // namespace cuda
}  // namespace moepool
