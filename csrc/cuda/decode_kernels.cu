#include "cuda/decode_kernels.h"

#include "cuda/launch.h"

namespace moepool {
namespace cuda {

namespace {

const DecodeKernels &kernels(const Matrix &matrix, int64_t tokens) {
    return (tokens == 1 ? single_kernels : tile_kernels)[matrix.type_index];
}

constexpr int kStaticShared = 8 << 10;  // more than any of the kernels has besides

}  // namespace

int most_dynamic_bytes() { return most_shared_bytes() - kStaticShared; }

void load_decode_kernels(const Matrix &matrix) {
    for (const DecodeKernels *table : {single_kernels, tile_kernels})
        table[matrix.type_index].load(most_dynamic_bytes());
}

StepConfig configure_step(const Matrix &gate, const Matrix &down, int64_t tokens, int64_t k) {
    return {kernels(gate, tokens).gate_up_config(gate), kernels(down, tokens).down_config(down, k)};
}

bool StepConfig::fits() const {
    return gate_up.shared_bytes <= most_dynamic_bytes() && down.shared_bytes <= most_dynamic_bytes();
}

std::string DecodeConfig::text() const {
    return std::to_string(warps) + " warps a block, " + std::to_string(stages) + " panels each in flight, " +
           std::to_string(shared_bytes) + " bytes of shared memory";
}

void gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
             cudaStream_t stream) {
    kernels(gate, step.tokens).gate_up(gate, up, step, arguments, stream);
}

void down_and_combine(const Matrix &down, const Step &step, cudaStream_t stream) {
    kernels(down, step.tokens).down(down, step, stream);
}

}  // namespace cuda
}  // namespace moepool
