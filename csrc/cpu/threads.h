// The persistent worker threads of the process.
#pragma once

#include <chrono>
#include <cstdint>

namespace moepool {

// Calls body(context, i) once for each i in [0, count), on the caller and on those workers that come in time, and
// returns when all are done. Items are handed out in rising order, a few at a time. The body must not throw. Calls from
// several threads share the workers; a call from within a body runs on its own thread. Each thread computes with
// subnormals kept and round to nearest, whatever its caller had set.
void parallel_for(int64_t count, void (*body)(void *, int64_t), void *context);

template <class Body>
void parallel_for(int64_t count, Body &&body) {
    parallel_for(count, [](void *context, int64_t i) { (*static_cast<Body *>(context))(i); }, &body);
}

// The workers poll for at least so long before they sleep: waking them takes longer than a small call.
void keep_awake(std::chrono::microseconds time);

// The caller included; 0 restores the default: the CPUs this process may use, by affinity and cgroup limit.
void set_threads(int threads);
int get_threads();

}  // namespace moepool
