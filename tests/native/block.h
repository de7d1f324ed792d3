// A thread block on the host: device code of one block runs as it is written, its threads as fibers that change at
// every barrier, in another order each time. So a missing barrier shows, and one that not all threads reach is an
// error. Stands in for what nvcc knows by itself and for cuda_runtime.h.
#pragma once

#include <setjmp.h>
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
struct uint4 {
    unsigned x, y, z, w;
};
typedef struct CUstream_st *cudaStream_t;

namespace block {

// Started once as a context; from then on a jump changes to it, which asks no system for anything.
struct Fiber {
    static constexpr size_t kStack = 64 << 10;
    ucontext_t context;
    jmp_buf at;
    bool started = false, done = false;
    std::unique_ptr<char[]> stack{new char[kStack]};
};

inline std::vector<Fiber> fibers;
inline ucontext_t origin;
inline jmp_buf scheduler;
inline size_t current = 0, threads = 0;
inline dim3 shape;
inline std::vector<int> lines;   // by thread: of the barrier it waits at
inline std::vector<int> values;  // by thread: what it brought there
inline std::function<void()> program;
inline std::mt19937 random(1);

inline void leave() {
    if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}
inline void enter(size_t fiber) {
    current = fiber;
    if (_setjmp(scheduler) != 0) return;
    if (fibers[fiber].started) _longjmp(fibers[fiber].at, 1);
    fibers[fiber].started = true;
    setcontext(&fibers[fiber].context);
}
inline void wait(int line) {
    lines[current] = line;
    leave();
}
inline void live() {
    while (true) {
        program();
        fibers[current].done = true;
        wait(-1);
    }
}

// Runs a block of x by y threads.
inline void run(unsigned x, unsigned y, std::function<void()> body) {
    shape = dim3(x, y);
    threads = size_t{x} * y;
    program = std::move(body);
    if (fibers.empty()) {
        fibers = std::vector<Fiber>(1024);
        for (Fiber &fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = Fiber::kStack;
            fiber.context.uc_link = &origin;
            makecontext(&fiber.context, live, 0);
        }
    }
    lines.assign(threads, 0);
    values.assign(threads, 0);
    std::vector<size_t> order(threads);
    std::iota(order.begin(), order.end(), size_t{0});
    for (const size_t i : order) fibers[i].done = false;
    while (!fibers[0].done) {
        std::shuffle(order.begin(), order.end(), random);
        for (const size_t i : order) enter(i);
        if (std::any_of(lines.begin(), lines.end(), [](int line) { return line != lines[0]; })) {
            std::fprintf(stderr, "threads wait at different barriers, one in line %d\n", lines[0]);
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
template <class T>
T shuffle_up(int line, T value, int by) {
    values[current] = static_cast<int>(value);
    wait(line);
    const size_t lane = current % 32;
    const T other = lane >= static_cast<size_t>(by) ? static_cast<T>(values[current - static_cast<size_t>(by)]) : value;
    wait(-line);
    return other;
}
template <class T>
T shuffle(int line, T value, size_t from) {
    values[current] = static_cast<int>(value);
    wait(line);
    const auto other = static_cast<T>(values[current / 32 * 32 + from]);
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
#define __shfl_sync(mask, value, from) block::shuffle(__LINE__, value, static_cast<size_t>(from) % 32)
#define __shfl_xor_sync(mask, value, by) block::shuffle(__LINE__, value, block::current % 32 ^ static_cast<size_t>(by))
#define __clz(value) __builtin_clz(static_cast<unsigned>(value))
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
