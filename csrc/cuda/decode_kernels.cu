#include "cuda/decode_kernels.h"

#include <algorithm>

#include "cuda/launch.h"

namespace moepool {
namespace cuda {

namespace {

const DecodeKernels &kernels(const Matrix &matrix, bool single) {
    return (single ? single_kernels : tile_kernels)[matrix.type_index];
}

constexpr int kStaticShared = 8 << 10;  // more than any of the kernels has besides

}  // namespace

int most_dynamic_bytes() { return most_shared_bytes() - kStaticShared; }

void load_decode_kernels(const Matrix &matrix) {
    for (const DecodeKernels *table : {single_kernels, tile_kernels})
        table[matrix.type_index].load(most_dynamic_bytes());
}

StepConfig configure_step(const Matrix &gate, const Matrix &up, const Matrix &down, int64_t tokens, int64_t k) {
    const bool single = tokens == 1;
    const int room = most_dynamic_bytes();
    if (together(gate, up))
        return {kernels(gate, single).gate_up_config(gate, room), kernels(down, single).down_config(down, k, room), {}};
    const auto half = [&](const Matrix &m) { return half_kernels[m.type_index].config(m, room); };
    return {half(gate), kernels(down, false).down_config(down, k, room), half(up)};
}

bool StepConfig::fits() const {
    return std::max({gate_up.shared_bytes, up.shared_bytes, down.shared_bytes}) <= most_dynamic_bytes();
}

std::string DecodeConfig::text() const {
    return std::to_string(warps) + " warps a block, " + std::to_string(stages) + " panels each in flight, " +
           std::to_string(shared_bytes) + " bytes of shared memory";
}

void gate_up(const Matrix &gate, const Matrix &up, const Step &step, const ResolveArguments &arguments,
             cudaStream_t stream) {
    if (together(gate, up)) return kernels(gate, step.single).gate_up(gate, up, step, arguments, stream);
    half_kernels[gate.type_index].launch(gate, false, step, stream);
    half_kernels[up.type_index].launch(up, true, step, stream);
}

void down_and_combine(const Matrix &down, const Step &step, cudaStream_t stream) {
    kernels(down, step.single).down(down, step, stream);
}

}  // namespace cuda
}  // namespace moepool
