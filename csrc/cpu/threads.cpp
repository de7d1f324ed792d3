#include "cpu/threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "error.h"

namespace moepool {

namespace {

// numerics.md section 6: other libraries of the process set flush-to-zero, also for threads they did not start.
class FloatEnvironment {
  public:
#if defined(__x86_64__)
    FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~FloatEnvironment() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    FloatEnvironment() {}
#endif
};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// CPUs' worth of time that the cgroup grants, or a large number.
double cgroup_cpus() {
    double cpus = 1e9;
    if (FILE *file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
        double quota = 0, period = 0;
        if (std::fscanf(file, "%lf %lf", &quota, &period) == 2 && period > 0) cpus = quota / period;
        std::fclose(file);
    }
    return cpus;
}

int default_threads() {
    cpu_set_t set;
    int cpus = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
    return std::max(1, static_cast<int>(std::min<double>(cpus, std::ceil(cgroup_cpus()))));
}

constexpr int kSpins = 4000;  // some tens of microseconds: about the gap between two ops of a layer

class Workers {
  public:
    explicit Workers(int threads) : threads_(threads), pid_(getpid()) {
        try {
            for (int i = 1; i < threads; ++i) crew_.emplace_back([this] { work(); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Workers() { stop(); }

    int threads() const { return threads_; }
    bool forked() const { return pid_ != getpid(); }

    void run(int64_t count, void (*body)(void *, int64_t), void *context) {
        std::lock_guard<std::mutex> one_call(call_);
        body_ = body;
        context_ = context;
        count_ = count;
        grain_ = std::max<int64_t>(1, count / (threads_ * int64_t{8}));
        next_.store(0, std::memory_order_relaxed);
        busy_.store(static_cast<int>(crew_.size()), std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            epoch_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take_items();
        for (int spin = 0; busy_.load(std::memory_order_acquire) != 0; ++spin)
            spin < kSpins ? pause() : static_cast<void>(sched_yield());
    }

  private:
    void take_items() {
        const FloatEnvironment environment;
        for (;;) {
            const int64_t first = next_.fetch_add(grain_, std::memory_order_relaxed);
            if (first >= count_) return;
            for (int64_t i = first; i < std::min(count_, first + grain_); ++i) body_(context_, i);
        }
    }

    void work() {
        inside = true;
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) pause();
            if (epoch_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(sleep_);
                wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
            }
            seen = epoch_.load(std::memory_order_acquire);
            if (stopping_) return;
            take_items();
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(sleep_);
            stopping_ = true;
            epoch_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread &thread : crew_) thread.join();
    }

  public:
    static thread_local bool inside;  // a body is running on this thread

  private:
    const int threads_;
    const pid_t pid_;
    std::vector<std::thread> crew_;
    std::mutex call_, sleep_;
    std::condition_variable wake_;
    std::atomic<uint64_t> epoch_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> busy_{0};
    bool stopping_ = false;
    void (*body_)(void *, int64_t) = nullptr;
    void *context_ = nullptr;
    int64_t count_ = 0, grain_ = 1;
};

thread_local bool Workers::inside = false;

std::mutex workers_mutex;
std::shared_ptr<Workers> *workers = nullptr;  // never freed: threads may still compute while the process exits

std::shared_ptr<Workers> current_workers() {
    std::lock_guard<std::mutex> lock(workers_mutex);
    // After a fork the child has none of the parent's threads: the old object is left alone, joining would hang.
    if (!workers || (*workers)->forked())
        workers = new std::shared_ptr<Workers>(std::make_shared<Workers>(default_threads()));
    return *workers;
}

}  // namespace

void parallel_for(int64_t count, void (*body)(void *, int64_t), void *context) {
    if (count < 1) return;
    if (Workers::inside || count == 1) {
        const FloatEnvironment environment;
        for (int64_t i = 0; i < count; ++i) body(context, i);
        return;
    }
    const std::shared_ptr<Workers> crew = current_workers();
    Workers::inside = true;
    crew->run(count, body, context);
    Workers::inside = false;
}

void set_threads(int threads) {
    if (threads < 0 || threads > 4096)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d threads: give 1 to 4096, or 0 for the default", threads);
    auto crew = std::make_shared<Workers>(threads ? threads : default_threads());
    std::shared_ptr<Workers> old = current_workers();
    {
        std::lock_guard<std::mutex> lock(workers_mutex);
        *workers = std::move(crew);
    }
    // `old` stops when the last call that uses it returns.
}

int get_threads() { return current_workers()->threads(); }

}  // namespace moepool
