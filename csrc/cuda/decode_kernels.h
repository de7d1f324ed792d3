// The kernels of a decode step behind resolve: gate/up with swiglu, down, combine.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/resolve.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

// How a kernel of the step is launched.
struct DecodeConfig {
    int warps;         // of a block
    int stages;        // panels that a warp has in flight
    int rounds;        // panels that it multiplies before the block adds sums up
    int shared_bytes;  // of a block
    std::string text() const;
};

struct StepConfig {
    DecodeConfig gate_up, down;
    // Whether the current device has the shared memory.
    bool fits() const;
};

// Loads the kernels of a matrix' type, so that no capture meets one that is not loaded.
void load_decode_kernels(const Matrix &matrix);
StepConfig configure_step(const Matrix &gate, const Matrix &down, int64_t tokens, int64_t k);
// Of a single token this resolves too.
void gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
             cudaStream_t stream);
void down_and_combine(const Matrix &down, const Step &step, cudaStream_t stream);

// What these do for one type of weights, of a single token and of more.
struct DecodeKernels {
    void (*load)(int shared_bytes);
    void (*gate_up)(const Matrix &, const Matrix &, const Step &, const ResolveArguments &, cudaStream_t);
    void (*down)(const Matrix &, const Step &, cudaStream_t);
    DecodeConfig (*gate_up_config)(const Matrix &);
    DecodeConfig (*down_config)(const Matrix &, int64_t k);
};
extern const DecodeKernels single_kernels[kTypeCount], tile_kernels[kTypeCount];
// The most dynamic shared memory that a block of them can have on the current device.
int most_dynamic_bytes();

}  // namespace cuda
}  // namespace moepool
