// Launching a kernel of a decode step, so that it may start before the one in front has ended where that exists.
#pragma once

#include <cuda_runtime.h>

#include "cuda/runtime.h"

namespace moepool {
namespace cuda {

// The device's compute capability is 9.0 or more: bulk copies, programmatic dependent launch, clusters.
bool overlaps_kernels();

// The most shared memory that a block can have on the device.
int most_shared_bytes();

// Allows a kernel more dynamic shared memory than the 48 KB that every kernel has. This also loads it.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), int bytes) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes),
          "asking for shared memory");
}

// cluster: blocks that share a job and run at the same time, 1 where there are none; `blocks` is a multiple of it.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, dim3 threads, int shared_bytes, unsigned cluster,
            cudaStream_t stream, const Arguments &...arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster, 1, 1};
    config.attrs = attributes;
    config.numAttrs = overlaps_kernels() ? cluster > 1 ? 2 : 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a decode kernel");
}

}  // namespace cuda
}  // namespace moepool
