#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
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

constexpr double kNoLimit = 1e9;

// CPUs' worth of time that one control group grants.
double group_cpus(const std::string &folder) {
    double quota = -1, period = 0;
    std::ifstream version2(folder + "/cpu.max");
    if (version2 >> quota >> period) return quota / period;  // "max" is no number
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    return quota > 0 && period > 0 ? quota / period : kNoLimit;
}

// The least that the groups of this process and those around them grant.
double cgroup_cpus() {
    double cpus = kNoLimit;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool version2 = controllers == ",,";
        if (!version2 && controllers.find(",cpu,") == std::string::npos) continue;
        const std::string mount = version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
        // In a container the path may be the host's, of which only the mount itself is visible.
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            cpus = std::min(cpus, group_cpus(mount + path));
            if (path.find('/') == std::string::npos) break;
        }
    }
    return cpus;
}

int default_threads() {
    cpu_set_t sets[8];  // of 1024 CPUs each
    const int cpus = sched_getaffinity(0, sizeof sets, sets) == 0 ? CPU_COUNT_S(sizeof sets, sets) : 1;
    return std::max(1, static_cast<int>(std::min<double>(cpus, std::ceil(cgroup_cpus()))));
}

std::atomic<int64_t> awake_until{0};  // of the steady clock: no helper sleeps before

// Polls for a moment, about the gap between two ops of a layer. False: it has not come.
template <class Come>
bool spin(Come come, bool stays_awake = false) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kMoment = std::chrono::microseconds(50);
    const Clock::time_point until = Clock::now() + kMoment;
    Clock::time_point now;
    do {
        for (int i = 0; i < 32; ++i) {
            if (come()) return true;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        now = Clock::now();
    } while (now < until || (stays_awake && now.time_since_epoch().count() < awake_until.load()));
    return false;
}

// One call of parallel_for. The caller waits for items, not for threads: who comes late finds nothing left and touches
// nothing else. So `body` and what follows are written while nothing is left, and read only with an item claimed; a
// claim made after a look at an earlier call of the same place is as good as any other.
struct alignas(64) Job {
    std::mutex taken;
    void (*body)(void *, int64_t);
    void *context;
    int64_t count;
    std::atomic<bool> sleeping{false};           // the caller, until all is done
    alignas(64) std::atomic<int64_t> left{0};    // items that nobody has claimed
    alignas(64) std::atomic<int64_t> undone{0};  // items that are not done
};

class Workers {
  public:
    explicit Workers(int threads) : threads_(threads) {
        try {
            for (int i = 1; i < threads; ++i) crew_.emplace_back([this] { work(); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Workers() { stop(); }

    int threads() const { return threads_; }

    // False: too many others are calling.
    bool run(int64_t count, void (*body)(void *, int64_t), void *context) {
        for (Job &job : jobs_) {
            const std::unique_lock<std::mutex> lock(job.taken, std::try_to_lock);
            if (!lock) continue;
            job.body = body;
            job.context = context;
            job.count = count;
            job.undone.store(count, std::memory_order_relaxed);
            job.left.store(count);
            wake(count - 1);
            take_items(job);
            wait(job);
            return true;
        }
        return false;
    }

    static thread_local bool inside;  // a body is running on this thread

  private:
    // True if there was any.
    bool take_items(Job &job) {
        bool any = false;
        for (int64_t left = job.left.load(std::memory_order_relaxed); left > 0;) {
            const int64_t items = std::max<int64_t>(1, left / (int64_t{2} * threads_));
            if (!job.left.compare_exchange_weak(left, left - items, std::memory_order_acquire,
                                                std::memory_order_relaxed))
                continue;
            any = true;
            for (int64_t i = job.count - left; i < job.count - left + items; ++i) job.body(job.context, i);
            if (job.undone.fetch_sub(items) == items && job.sleeping.load()) {
                const std::lock_guard<std::mutex> lock(mutex_);
                done_.notify_all();
            }
            left = job.left.load(std::memory_order_relaxed);
        }
        return any;
    }

    void wait(Job &job) {
        const auto done = [&] { return job.undone.load() == 0; };
        if (spin(done)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        job.sleeping.store(true);
        done_.wait(lock, done);
        job.sleeping.store(false);
    }

    // A thread goes to sleep in the order sleepers_, left; a caller publishes in the order left, sleepers_: one of the
    // two sees the other.
    void wake(int64_t helpers) {
        const int64_t sleepers = sleepers_.load();
        if (sleepers == 0) return;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
        }  // who has seen nothing left now waits
        if (helpers >= sleepers) return wake_.notify_all();
        for (; helpers > 0; --helpers) wake_.notify_one();
    }

    void work() {
        const FloatEnvironment environment;
        inside = true;
        const auto called = [this] {
            return stopping_.load() ||
                   std::any_of(jobs_.begin(), jobs_.end(), [](const Job &job) { return job.left.load() > 0; });
        };
        while (!stopping_.load()) {
            bool any = false;
            for (Job &job : jobs_) any |= take_items(job);
            if (any || spin(called, true)) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, called);
            sleepers_.fetch_sub(1);
        }
    }

    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_.store(true);
        }
        wake_.notify_all();
        for (std::thread &thread : crew_) thread.join();
    }

    const int threads_;
    std::array<Job, 8> jobs_;  // a ninth caller at once works alone
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<int64_t> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> crew_;
};

thread_local bool Workers::inside = false;

std::mutex workers_mutex;
std::shared_ptr<Workers> *workers = nullptr;  // never freed: threads may still compute while the process exits

// A forked child has none of the parent's threads: it leaves the old object alone, joining would hang.
const int at_fork = pthread_atfork([] { workers_mutex.lock(); }, [] { workers_mutex.unlock(); },
                                   [] {
                                       workers = nullptr;
                                       workers_mutex.unlock();
                                   });

std::shared_ptr<Workers> current_workers() {
    const std::lock_guard<std::mutex> lock(workers_mutex);
    if (!workers) workers = new std::shared_ptr<Workers>(std::make_shared<Workers>(default_threads()));
    return *workers;
}

}  // namespace

void parallel_for(int64_t count, void (*body)(void *, int64_t), void *context) {
    if (count > 1 && !Workers::inside) {
        const std::shared_ptr<Workers> crew = current_workers();
        const FloatEnvironment environment;
        Workers::inside = true;
        const bool done = crew->run(count, body, context);
        Workers::inside = false;
        if (done) return;
    }
    const FloatEnvironment environment;
    for (int64_t i = 0; i < count; ++i) body(context, i);
}

void keep_awake(std::chrono::microseconds time) {
    awake_until.store((std::chrono::steady_clock::now() + time).time_since_epoch().count());
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
