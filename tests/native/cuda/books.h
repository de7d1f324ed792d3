// Publishing, where there is nobody but the test to see it early.
#pragma once

#include <cstdint>
#include <functional>

namespace moepool {
namespace cuda {

inline std::function<void(const void *at)> on_publish;  // looks at what has been written

template <class T>
void publish(T *at, T value) {
    *at = value;
    on_publish(at);
}

inline void prefetch(const void *) {}

}  // namespace cuda
}  // namespace moepool
