#include "cuda/resolve.h"

#include <algorithm>

#include "cuda/activate.h"
#include "cuda/launch.h"
#include "cuda/pipeline.h"
#include "cuda/resolve_block.h"
#include "quant/types.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kStaticShared = 1 << 10;
constexpr int kThreads = 512;
constexpr int kActivationBlocks = 64;  // thread blocks that quantise, at most

__device__ void quantise_rows(const Step &step, int64_t elements) {
    const int lane = threadIdx.x % 32;
    const int64_t warps = int64_t{gridDim.x - 1} * (kThreads / 32);
    for (int64_t block = int64_t{blockIdx.x - 1} * (kThreads / 32) + threadIdx.x / 32; block < elements / kBlockColumns;
         block += warps)
        store_block(quantise(widen(step.x, step.x_dtype, block * kBlockColumns + lane)), lane, step.input + block);
}

template <bool kBell>
__global__ void __launch_bounds__(kThreads)
    resolve_kernel(const __grid_constant__ Step step, const ResolveArguments a) {
    extern __shared__ __align__(16) uint8_t memory[];
    if (blockIdx.x == 0) prepare_books(step, a, memory);
    wait_for_kernels_in_front();
    let_the_next_kernel_start();
    if (blockIdx.x > 0) return quantise_rows(step, a.row_elements);

    resolve_block<kBell, false>(step, a, memory, 0);
}

}  // namespace

void load_resolve_kernel() {
    allow_shared(resolve_kernel<false>, most_shared_bytes() - kStaticShared);
    allow_shared(resolve_kernel<true>, most_shared_bytes() - kStaticShared);
}

void resolve(const Step &step, const ResolveArguments &a, cudaStream_t stream) {
    constexpr int kWarps = kThreads / 32;
    const int64_t helpers =
        std::min<int64_t>(kActivationBlocks, (a.row_elements / kBlockColumns + kWarps - 1) / kWarps);
    launch(step.bell.state ? resolve_kernel<true> : resolve_kernel<false>, static_cast<unsigned>(1 + helpers),
           dim3(kThreads), resolve_shared_bytes(step.residents.experts, a.slots), stream, step, a);
}

}  // namespace cuda
}  // namespace moepool
