// CUDA devices as pools see them.
#pragma once

#include "moepool.h"
#include "pool/backend.h"

namespace moepool {
namespace cuda {

// Fails with a clear message if the device can not be used.
const Backend &backend(int device);

int device_count();
moepool_device_info device_info(int device);

}  // namespace cuda
}  // namespace moepool
