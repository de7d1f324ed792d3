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

// See moepool.h.
int pointer_device(const void *pointer);
bool stream_capturing(int device, void *stream);
void stream_order(int device, void *earlier, void *later);
void stream_wait(int device, void *stream);

}  // namespace cuda
}  // namespace moepool
