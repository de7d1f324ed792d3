#include "pool/backend.h"

#include "error.h"
#if MOEPOOL_CUDA
#include "cuda/backend.h"
#endif

namespace moepool {

const Backend &backend(int device) {
    if (device == MOEPOOL_CPU) return cpu_backend();
    if (device < 0) fail(MOEPOOL_ERROR_ARGUMENT, "device %d: give MOEPOOL_CPU or a CUDA device's number", device);
#if MOEPOOL_CUDA
    return cuda::backend(device);
#else
    fail(MOEPOOL_ERROR_UNSUPPORTED, "CUDA device %d: this build of moepool has no CUDA", device);
#endif
}

}  // namespace moepool
