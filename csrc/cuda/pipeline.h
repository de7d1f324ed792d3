// Panels on their way to shared memory, and kernels that begin before the one in front of them has ended.
//
// From compute capability 9.0 on, a panel is one bulk copy that completes on a barrier in shared memory: it takes no
// registers and one thread's time. Older devices load and store it word by word. Programmatic dependent launch exists
// from 9.0 on too; elsewhere kernels follow one another, and both calls do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moepool {
namespace cuda {
namespace {

// All that the kernels in front wrote can be read from here on. Some block of every kernel of a chain calls it before
// it ends, for the kernel behind waits for that kernel alone, and relies on all in front of it.
__device__ __forceinline__ void wait_for_kernels_in_front() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind may be started: what it does before its own wait runs beside what is left of this one.
__device__ __forceinline__ void let_the_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// One warp's buffers: `stages` panels in flight. All lanes call every function.
class Panels {
  public:
    // Whether a warp may ask for another one's.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    static constexpr bool kAsynchronous = false;
#else
    static constexpr bool kAsynchronous = true;
#endif

    // memory: stages * bytes, 128-byte aligned. barriers: stages of them.
    __device__ Panels(uint8_t *memory, uint64_t *barriers, int stages, int bytes, int lane)
        : memory_(memory), barriers_(barriers), stages_(stages), bytes_(bytes), lane_(lane) {
#if __CUDA_ARCH__ >= 900
        if (lane_ < stages_)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers_ + lane_)) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
#endif
    }

    // Those of the warp `distance` further, whose first panels this one asks for. It must have made them, in front of a
    // barrier.
    __device__ Panels of_warp(int distance) const {
        Panels theirs(*this);
        theirs.memory_ += distance * stages_ * bytes_;
        theirs.barriers_ += distance * stages_;
        theirs.fetched_ = 0;
        return theirs;
    }

    // The next stage to be filled. If it was in use, it must have been released.
    __device__ int begin() {
        const int stage = fetched_;
        fetched_ = after(stage);
        return stage;
    }
    // So many bytes come into a stage in all: it can be taken when they are there. Once for each filling of it, before
    // or behind the copies are started.
    __device__ void expect(int stage, int bytes) {
        if (kAsynchronous && lane_ == 0) arrive(shared_address(barriers_ + stage), bytes);
    }
    // Starts a copy into a stage by each lane from `first` up to `end`: `bytes` from `source` to `at` in it.
    __device__ void fetch(int stage, int first, int end, const uint8_t *source, int at, int bytes) {
        uint8_t *const target = memory_ + stage * bytes_;
        if constexpr (kAsynchronous) {
            if (lane_ >= first && lane_ < end) copy(target + at, source, bytes, shared_address(barriers_ + stage));
        } else {
            for (int who = first; who < end; ++who)
                load(target + __shfl_sync(~0u, at, who),
                     reinterpret_cast<const uint8_t *>(
                         __shfl_sync(~0u, reinterpret_cast<unsigned long long>(source), who)),
                     __shfl_sync(~0u, bytes, who));
        }
    }
    // Starts the copy of the warp's next panel, which is a stage.
    __device__ void fetch(const uint8_t *source, int bytes) {
        const int stage = begin();
        uint8_t *const target = memory_ + stage * bytes_;
        if constexpr (!kAsynchronous) {
            load(target, source, bytes);
        } else if (lane_ == 0) {
            const uint32_t barrier = shared_address(barriers_ + stage);
            arrive(barrier, bytes);
            copy(target, source, bytes, barrier);
        }
    }
    __device__ int stages() const { return stages_; }
    // The stage that is begun next, and the one behind a stage.
    __device__ int next() const { return fetched_; }
    __device__ int after(int stage) const { return stage + 1 == stages_ ? 0 : stage + 1; }

    // Waits until all is there of the stage begun first of those not yet taken.
    __device__ const uint8_t *take() {
        const int stage = taken_;
        taken_ = after(stage);
#if __CUDA_ARCH__ >= 900
        const uint32_t barrier = shared_address(barriers_ + stage);
        asm volatile(
            "{.reg .pred done;\n"
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;}" ::"r"(barrier),
            "r"(parity_)
            : "memory");
        parity_ ^= taken_ == 0;
#endif
        return memory_ + stage * bytes_;
    }

    // Writes the panel just taken to device memory. finish_stores() is due before the stage is released.
    __device__ void copy_out(const uint8_t *panel, uint8_t *target, int bytes) {
#if __CUDA_ARCH__ >= 900
        if (lane_ == 0) {
            asm volatile(
                "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(target)),
                "r"(shared_address(panel)), "r"(bytes)
                : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
#else
        for (int i = 16 * lane_; i < bytes; i += 16 * 32)
            *reinterpret_cast<int4 *>(target + i) = *reinterpret_cast<const int4 *>(panel + i);
#endif
    }
    __device__ void finish_stores() {
#if __CUDA_ARCH__ >= 900
        if (lane_ == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
        __syncwarp();
    }

  private:
    // By one lane.
    static __device__ void arrive(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
    }
    static __device__ void copy(uint8_t *target, const uint8_t *source, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(target)),
                     "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                     : "memory");
#endif
    }
    // By all lanes, where nothing is asynchronous.
    __device__ void load(uint8_t *target, const uint8_t *source, int bytes) const {
        for (int i = 16 * lane_; i < bytes; i += 16 * 32)
            *reinterpret_cast<int4 *>(target + i) = *reinterpret_cast<const int4 *>(source + i);
        __syncwarp();
    }

    uint8_t *memory_;
    uint64_t *barriers_;
    const int stages_, bytes_, lane_;
    int fetched_ = 0, taken_ = 0;  // the stage of the next
    uint32_t parity_ = 0;          // of the barriers, for what is taken next
};

}  // namespace
}  // namespace cuda
}  // namespace moepool
