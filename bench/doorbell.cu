// The round trip from a CUDA graph to a CPU thread and back, by the means that CUDA offers. Built and run by
// doorbell.py; prints a name and microseconds a round trip on each line.
//
//   kernels      two kernels with nothing to wait for: what every means pays besides
//   flag         the first kernel writes a flag in mapped memory, the second waits for another; a thread spins
//   flag, 64 KB  the same, with 3 KB of activations to the CPU and 64 KB of rows back, read by the second kernel
//   host node    cudaLaunchHostFunc between the two
//   memory ops   cuStreamWriteValue32 and cuStreamWaitValue32 nodes between the two; a thread spins
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int kTrips = 32;  // in a graph
constexpr int kReplays = 60;
constexpr int kOut = 3072, kBack = 65536;

void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

struct alignas(64) Line {
    uint32_t value;
};
struct Shared {
    Line asked, answered, ops[kTrips], replies[kTrips];
    alignas(256) uint8_t out[kOut];
    alignas(256) uint8_t back[kBack];
};

__global__ void ask(Shared *shared, uint32_t *epoch, int bytes) {
    for (int i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x) *reinterpret_cast<uint32_t *>(shared->out + i) = i;
    __syncthreads();
    if (threadIdx.x == 0 && epoch) {
        const uint32_t next = *epoch + 1;
        *epoch = next;
        asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(&shared->asked.value), "r"(next) : "memory");
    }
}

__global__ void await(Shared *shared, const uint32_t *epoch, int bytes, float4 *rows) {
    if (threadIdx.x == 0 && epoch) {
        uint32_t seen;
        do asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(seen) : "l"(&shared->answered.value) : "memory");
        while (seen != *epoch);
    }
    __syncthreads();
    float4 piece[8];
    for (int first = threadIdx.x; first < bytes / 16; first += 8 * blockDim.x) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (first + j * blockDim.x < bytes / 16)
                piece[j] = __ldcv(reinterpret_cast<const float4 *>(shared->back) + first + j * blockDim.x);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (first + j * blockDim.x < bytes / 16) rows[first + j * blockDim.x] = piece[j];
    }
}

void CUDART_CB answer(void *context) {
    auto *shared = static_cast<Shared *>(context);
    __atomic_store_n(&shared->answered.value, __atomic_load_n(&shared->asked.value, __ATOMIC_ACQUIRE),
                     __ATOMIC_RELEASE);
}

template <class Function>
Function driver(const char *name, int version) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    return reinterpret_cast<Function>(found);
}

}  // namespace

int main() {
    Shared *shared = nullptr;
    check(cudaHostAlloc(reinterpret_cast<void **>(&shared), sizeof(Shared), cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(shared, 0, sizeof(Shared));
    uint32_t *epoch = nullptr;
    float4 *rows = nullptr;
    check(cudaMalloc(&epoch, 4), "cudaMalloc");
    check(cudaMemset(epoch, 0, 4), "cudaMemset");
    check(cudaMalloc(&rows, kBack), "cudaMalloc");
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");

    std::atomic<bool> stop{false};
    std::thread server([&] {
        uint32_t served = 0, ops[kTrips] = {};
        while (!stop.load(std::memory_order_relaxed)) {
            const uint32_t asked = __atomic_load_n(&shared->asked.value, __ATOMIC_ACQUIRE);
            if (asked != served) __atomic_store_n(&shared->answered.value, served = asked, __ATOMIC_RELEASE);
            for (int i = 0; i < kTrips; ++i) {
                const uint32_t value = __atomic_load_n(&shared->ops[i].value, __ATOMIC_ACQUIRE);
                if (value != ops[i]) __atomic_store_n(&shared->replies[i].value, ops[i] = value, __ATOMIC_RELEASE);
            }
        }
    });

    const auto measure = [&](const char *name, const std::function<bool(int)> &trip) {
        cudaGraph_t graph;
        cudaGraphExec_t made;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        bool captured = true;
        for (int i = 0; i < kTrips && captured; ++i) captured = trip(i);
        if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || !captured) {
            cudaGetLastError();
            std::printf("%s: not possible here\n", name);
            return;
        }
        check(cudaGraphInstantiate(&made, graph, 0), "instantiate");
        cudaEvent_t first, last;
        check(cudaEventCreate(&first), "event");
        check(cudaEventCreate(&last), "event");
        std::vector<float> times;
        for (int i = 0; i < kReplays; ++i) {
            check(cudaEventRecord(first, stream), "event");
            check(cudaGraphLaunch(made, stream), "launch");
            check(cudaEventRecord(last, stream), "event");
            check(cudaEventSynchronize(last), "wait");
            float ms = 0;
            check(cudaEventElapsedTime(&ms, first, last), "elapsed");
            times.push_back(ms * 1000 / kTrips);
        }
        std::sort(times.begin(), times.end());
        std::printf("%s: %.2f %.2f %.2f\n", name, times[kReplays / 2], times[kReplays / 10], times[kReplays * 9 / 10]);
        std::fflush(stdout);
    };

    uint32_t *const nobody = nullptr;
    measure("kernels", [&](int) {
        ask<<<1, 512, 0, stream>>>(shared, nobody, 0);
        await<<<1, 1024, 0, stream>>>(shared, nobody, 0, rows);
        return true;
    });
    measure("flag", [&](int) {
        ask<<<1, 512, 0, stream>>>(shared, epoch, 0);
        await<<<1, 1024, 0, stream>>>(shared, epoch, 0, rows);
        return true;
    });
    measure("flag, 64 KB", [&](int) {
        ask<<<1, 512, 0, stream>>>(shared, epoch, kOut);
        await<<<1, 1024, 0, stream>>>(shared, epoch, kBack, rows);
        return true;
    });
    measure("host node", [&](int) {
        ask<<<1, 512, 0, stream>>>(shared, nobody, 0);
        check(cudaLaunchHostFunc(stream, answer, shared), "host function");
        await<<<1, 1024, 0, stream>>>(shared, nobody, 0, rows);
        return true;
    });
    using ValueOp = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    const auto write = driver<ValueOp>("cuStreamWriteValue32", 12000),
               wait = driver<ValueOp>("cuStreamWaitValue32", 12000);
    // An odd and an even number by turns: two in a graph, so that a replay does not find the last one's.
    const auto at = [](Line *line) { return reinterpret_cast<CUdeviceptr>(&line->value); };
    measure("memory ops", [&](int i) {
        if (!write || !wait) return false;
        const auto number = static_cast<cuuint32_t>(1 + i % 2);
        ask<<<1, 512, 0, stream>>>(shared, nobody, 0);
        const bool done =
            write(stream, at(shared->ops + i / 2), number, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS &&
            wait(stream, at(shared->replies + i / 2), number, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS;
        await<<<1, 1024, 0, stream>>>(shared, nobody, 0, rows);
        return done;
    });
    stop.store(true);
    server.join();
    return 0;
}
