// The kernels of a decode step behind resolve: gate/up with swiglu, down, combine.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_config.h"
#include "cuda/resolve.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

struct StepConfig {
    DecodeConfig gate_up, down;
    DecodeConfig up;  // if it is a pass of its own: gate_up is gate's then
    // Whether the current device has the shared memory.
    bool fits() const;
};

// Loads the kernels of a matrix' type, so that no capture meets one that is not loaded.
void load_decode_kernels(const Matrix &matrix);
// Gate and up of one type are multiplied together. Else each is a pass over tiles, also of a single token.
inline bool together(const Matrix &gate, const Matrix &up) { return gate.type_index == up.type_index; }
StepConfig configure_step(const Matrix &gate, const Matrix &up, const Matrix &down, int64_t tokens, int64_t k);
// If the step is single, this resolves too.
void gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
             cudaStream_t stream);
void down_and_combine(const Matrix &down, const Step &step, cudaStream_t stream);

// What these do for one type of weights: single steps, and tiles.
struct DecodeKernels {
    void (*load)(int shared_bytes);
    void (*gate_up)(const Matrix &, const Matrix &, const Step &, const ResolveArguments &, cudaStream_t);
    void (*down)(const Matrix &, const Step &, cudaStream_t);
    DecodeConfig (*gate_up_config)(const Matrix &, int room);
    DecodeConfig (*down_config)(const Matrix &, int64_t k, int room);
};
extern const DecodeKernels single_kernels[kTypeCount], tile_kernels[kTypeCount];
// Gate, or up behind it, as a pass over tiles.
struct HalfKernel {
    void (*launch)(const Matrix &, bool is_up, const Step &, cudaStream_t);
    DecodeConfig (*config)(const Matrix &, int room);
};
extern const HalfKernel half_kernels[kTypeCount];
// The most dynamic shared memory that a block of them can have on the current device.
int most_dynamic_bytes();

}  // namespace cuda
}  // namespace moepool
