// The persistent worker threads of the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "moepool.h"

namespace moepool {

// Calls body(context, i) once for each i in [0, count), on the caller and on those workers that come in time, and
// returns when all are done. Items are handed out in rising order, many at first, then fewer and fewer, so that all
// threads end together. Items from `second` on may be longer or shorter than those before: they are divided for
// themselves. The body must not throw. Calls from several threads share the workers; a call from within a body runs on
// its own thread. Each thread computes with subnormals kept and round to nearest, whatever its caller had set.
void parallel_for(int64_t count, int64_t second, void (*body)(void *, int64_t), void *context);

template <class Body>
void parallel_for(int64_t count, int64_t second, Body &&body) {
    parallel_for(
        count, second, [](void *context, int64_t i) { (*static_cast<std::remove_reference_t<Body> *>(context))(i); },
        &body);
}
template <class Body>
void parallel_for(int64_t count, Body &&body) {
    parallel_for(count, count, std::forward<Body>(body));
}

// The same by the caller alone, in rising order: for what takes less time than others need to begin with it.
void alone_for(int64_t count, void (*body)(void *, int64_t), void *context);
template <class Body>
void alone_for(int64_t count, Body &&body) {
    alone_for(
        count, [](void *context, int64_t i) { (*static_cast<std::remove_reference_t<Body> *>(context))(i); }, &body);
}

// For a body that needs what earlier items of its call make: these are in somebody's hands, for items are handed out in
// rising order. To be called within a body. Waits until they have counted down to 0; false: the call is stopped, and
// they may never do.
bool await_zero(const std::atomic<int32_t> &count);

// While one lives, parallel_for on its thread may ask what set_interrupt was given, and then fails with
// MOEPOOL_ERROR_INTERRUPTED: what is not begun is left undone. Only where no lock is held, for what is asked may run
// anything, such as a signal handler of Python that calls moepool.
class Interruptible {
  public:
    Interruptible();
    ~Interruptible();
    Interruptible(const Interruptible &) = delete;
    Interruptible &operator=(const Interruptible &) = delete;
};
// Of this thread. NULL: its calls run to their end.
void set_interrupt(moepool_interrupt check, void *data);

// The caller included; 0 restores the default: the CPUs this process may use, by its affinity when the library was
// loaded and its cgroup limit, or as many of them as the system starts threads for, unless the environment says
// otherwise. Thread i runs on CPU cpus[i % count] alone, but for the caller, number 0, which is left
// where it is; without cpus the system chooses.
void set_threads(int threads, const int32_t *cpus, int count);
int get_threads();

// Whether the process might use the CPU when the library was loaded, wherever its threads have pinned themselves.
bool process_may_use(int cpu);
// Lets the calling thread run on all of these: it has inherited the CPUs of the one that made it.
void use_every_cpu();

}  // namespace moepool
