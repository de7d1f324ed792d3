// The step of a block on the host quantises nothing.
#pragma once
namespace moepool {
namespace cuda {
struct ActivationBlock;
}
}  // namespace moepool
