// A thread block on the host: device code of one block runs as it is written, its threads as fibers that change at
// every barrier, in another order each time. So a missing barrier shows, and one that not all threads reach is an
// error. Stands in for what nvcc knows by itself and for cuda_runtime.h.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct int4 {
    int x, y, z, w;
};
typedef struct CUstream_st *cudaStream_t;

namespace block {

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStack]};
    bool done = false;
    static constexpr size_t kStack = 64 << 10;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline size_t current = 0;
inline dim3 shape;
inline std::vector<int> lines;   // by thread: of the barrier it waits at
inline std::vector<int> values;  // by thread: what it brought there
inline std::function<void()> program;
inline std::mt19937 random(1);

inline void wait(int line) {
    lines[current] = line;
    const size_t me = current;
    swapcontext(&fibers[me].context, &scheduler);
}
inline void begin() {
    program();
    fibers[current].done = true;
    lines[current] = -1;
    while (true) swapcontext(&fibers[current].context, &scheduler);
}

// Runs a block of x by y threads.
inline void run(unsigned x, unsigned y, std::function<void()> body) {
    shape = dim3(x, y);
    program = std::move(body);
    const size_t count = size_t{x} * y;
    if (fibers.size() < count) fibers = std::vector<Fiber>(count);
    lines.assign(count, 0);
    values.assign(count, 0);
    for (size_t i = 0; i < count; ++i) {
        Fiber &fiber = fibers[i];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = Fiber::kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, begin, 0);
    }
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    while (!fibers[0].done) {
        std::shuffle(order.begin(), order.end(), random);
        for (const size_t i : order) {
            current = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        if (std::any_of(lines.begin(), lines.begin() + static_cast<long>(count), [](int l) { return l != lines[0]; })) {
            std::fprintf(stderr, "threads wait at different barriers, lines %d and another\n", lines[0]);
            std::abort();
        }
    }
}

inline int count(int line, bool value) {
    values[current] = value;
    wait(line);
    const int sum = std::accumulate(values.begin(), values.end(), 0);
    wait(-line);
    return sum;
}
inline unsigned ballot(int line, bool value) {
    values[current] = value;
    wait(line);
    unsigned bits = 0;
    for (size_t lane = 0; lane < 32; ++lane) bits |= unsigned(values[current / 32 * 32 + lane] != 0) << lane;
    wait(-line);
    return bits;
}
inline int shuffle_up(int line, int value, int by) {
    values[current] = value;
    wait(line);
    const size_t lane = current % 32;
    const int other = lane >= static_cast<size_t>(by) ? values[current - static_cast<size_t>(by)] : value;
    wait(-line);
    return other;
}
inline dim3 index() { return dim3(static_cast<unsigned>(current % shape.x), static_cast<unsigned>(current / shape.x)); }

}  // namespace block

#define threadIdx (block::index())
#define blockDim (block::shape)
#define __syncthreads() block::wait(__LINE__)
#define __syncthreads_count(value) block::count(__LINE__, value)
#define __ballot_sync(mask, value) block::ballot(__LINE__, value)
#define __shfl_up_sync(mask, value, by) block::shuffle_up(__LINE__, value, by)
#define __popc(value) __builtin_popcount(value)
#define __threadfence() ((void)0)
#define __threadfence_system() ((void)0)

template <class T>
T atomicAdd(T *at, T value) {
    const T before = *at;
    *at += value;
    return before;
}
template <class T>
T atomicMin(T *at, T value) {
    const T before = *at;
    *at = std::min(before, value);
    return before;
}
using std::max;
using std::min;
