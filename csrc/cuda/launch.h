// Launching a kernel of a decode step, so that it may start before the one in front has ended where that exists.
#pragma once

#include <cuda_runtime.h>

#include "cuda/runtime.h"

namespace moepool {
namespace cuda {

// The device's compute capability is 9.0 or more: bulk copies and programmatic dependent launch.
bool overlaps_kernels();

// The most shared memory that a block can have on the device.
int most_shared_bytes();

// Allows a kernel more dynamic shared memory than the 48 KB that every kernel has. This also loads it. All kernels of a
// step ask for the same split of L1, the largest shared memory: a multiprocessor has to drain before it changes its
// split.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), int bytes) {
    const auto *function = reinterpret_cast<const void *>(kernel);
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "asking for shared memory");
    check(
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "asking for shared memory");
}

template <class... Parameters, class... Arguments>
void launch_behind(bool overlapping, void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes,
                   cudaStream_t stream, const Arguments &...arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = overlapping && overlaps_kernels() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a decode kernel");
}
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes, cudaStream_t stream,
            const Arguments &...arguments) {
    launch_behind(true, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace cuda
}  // namespace moepool
