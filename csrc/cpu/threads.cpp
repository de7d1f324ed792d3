#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
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

constexpr int kMostCpus = 8192;
constexpr int kMostThreads = 4096;

struct CpuSet {
    cpu_set_t sets[kMostCpus / CPU_SETSIZE];

    CpuSet() { CPU_ZERO_S(sizeof sets, sets); }
    // Of a thread; empty if the system does not say.
    static CpuSet allowed(pid_t thread) {
        CpuSet set;
        if (sched_getaffinity(thread, sizeof set.sets, set.sets)) set = CpuSet();
        return set;
    }
    void add(int cpu) { CPU_SET_S(static_cast<size_t>(cpu), sizeof sets, sets); }
    bool has(int cpu) const { return CPU_ISSET_S(static_cast<size_t>(cpu), sizeof sets, sets); }
    int count() const { return CPU_COUNT_S(sizeof sets, sets); }
    // "0-3,8"
    std::string text() const {
        std::string text;
        for (int cpu = 0, last; cpu < kMostCpus; cpu = last + 1) {
            last = cpu;
            if (!has(cpu)) continue;
            while (last + 1 < kMostCpus && has(last + 1)) ++last;
            text += (text.empty() ? "" : ",") + std::to_string(cpu);
            if (last > cpu) text += "-" + std::to_string(last);
        }
        return text;
    }
};

// Of the main thread when the library was loaded: a thread that loads or calls it may have pinned itself to one CPU,
// which says nothing of those that the others may use.
const CpuSet process_cpus = CpuSet::allowed(getpid());

int cpus_to_use() {
    return std::max(1, static_cast<int>(std::min<double>(process_cpus.count(), std::ceil(cgroup_cpus()))));
}

struct Crew {
    int threads;
    std::vector<int> cpus;        // empty: the system chooses
    const char *asked = nullptr;  // what asked for so many; NULL: nobody did
};

Crew checked(int threads, std::vector<int> cpus, const char *threads_name, const char *cpus_name) {
    if (threads < 0 || threads > kMostThreads)
        fail(MOEPOOL_ERROR_ARGUMENT, "%s: %d threads: give 1 to %d, or leave it to the default", threads_name, threads,
             kMostThreads);
    for (const int cpu : cpus)
        if (cpu < 0 || cpu >= kMostCpus || !process_cpus.has(cpu))
            fail(MOEPOOL_ERROR_ARGUMENT, "%s: CPU %d is none of those that this process may use: %s", cpus_name, cpu,
                 process_cpus.text().c_str());
    const char *asked = threads > 0 ? threads_name : cpus.empty() ? nullptr : cpus_name;
    if (threads == 0) threads = cpus.empty() ? cpus_to_use() : static_cast<int>(cpus.size());
    return {threads, std::move(cpus), asked};
}

// A whole number at `text`, which is then behind it; -1: there is none.
int read_number(const char *&text) {
    char *end;
    errno = 0;
    const long number = *text >= '0' && *text <= '9' ? std::strtol(text, &end, 10) : -1;
    if (number < 0 || number > kMostCpus || errno) return -1;
    text = end;
    return static_cast<int>(number);
}

Crew default_crew() {
    constexpr const char *kThreads = "MOEPOOL_THREADS", *kCpus = "MOEPOOL_AFFINITY";
    int threads = 0;
    std::vector<int> cpus;
    if (const char *text = std::getenv(kThreads); text && *text) {
        const char *end = text;
        threads = read_number(end);
        if (threads < 1 || *end) fail(MOEPOOL_ERROR_ARGUMENT, "%s=%s: give 1 to %d", kThreads, text, kMostThreads);
    }
    if (const char *text = std::getenv(kCpus); text && *text) {
        for (const char *at = text;; ++at) {
            const int first = read_number(at);
            const int last = *at == '-' ? read_number(++at) : first;
            if (first < 0 || last < first || (*at && *at != ','))
                fail(MOEPOOL_ERROR_ARGUMENT, "%s=%s: give CPUs as in 0-3,8", kCpus, text);
            for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
            if (!*at) break;
        }
    }
    return checked(threads, std::move(cpus), kThreads, kCpus);
}

// What a thread was told to ask, and when it asks next.
struct Interrupt {
    using Clock = std::chrono::steady_clock;
    static constexpr auto kPause = std::chrono::milliseconds(50);  // asking may mean waiting for Python's lock

    moepool_interrupt check;
    void *data;
    int allowed;  // scopes of Interruptible
    Clock::time_point next;

    bool asks() const { return allowed && check; }
    bool due() {
        if (!asks()) return false;
        const auto now = Clock::now();
        if (now < next) return false;
        const bool stop = check(data) != 0;
        next = Clock::now() + kPause;
        return stop;
    }
};
thread_local Interrupt interrupt{};

[[noreturn]] void fail_interrupted() {
    fail(MOEPOOL_ERROR_INTERRUPTED, "the call was interrupted: what it was to write is unspecified");
}

// Polls for a moment, longer than what lies between two layers mostly takes: waking sleepers costs a call a twentieth
// of its time. False: it has not come.
template <class Come>
bool spin(Come come) {
    constexpr auto kMoment = std::chrono::microseconds(200);
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 32; ++i) {
            if (come()) return true;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
    } while (std::chrono::steady_clock::now() - start < kMoment);
    return false;
}

// How the items of a call are handed out: by lots, which are numbered. A round is a lot for each thread, together half
// of what was left before; the last one is of single items. Two lists of items follow one another.
class Lots {
  public:
    void divide(int64_t count, int64_t second, int64_t threads) {
        rounds_ = lots_ = 0;
        count_ = count;
        add(0, second, threads);
        add(second, count, threads);
    }
    int64_t count() const { return lots_; }
    int64_t begin(int64_t lot) const {
        if (lot >= lots_) return count_;
        int i = rounds_ - 1;
        while (round_[i].lot > lot) --i;
        return round_[i].begin + (lot - round_[i].lot) * round_[i].size;
    }

  private:
    struct Round {
        int64_t lot, begin, size;  // the first lot and its first item; items of each lot
    };

    void add(int64_t begin, int64_t end, int64_t threads) {
        while (begin < end) {
            const int64_t size = std::max<int64_t>(1, (end - begin) / (2 * threads));
            const int64_t lots = size > 1 ? threads : end - begin;
            round_[rounds_++] = {lots_, begin, size};
            lots_ += lots;
            begin += lots * size;
        }
    }

    int rounds_ = 0;
    int64_t lots_ = 0, count_ = 0;
    Round round_[2 * 64];  // each halves what is left
};

// One call of parallel_for. The caller waits for items, not for threads: who comes late finds nothing left and touches
// nothing else. So `body` and what follows are written while nothing is left, and read only with a lot claimed; a claim
// made after a look at an earlier call of the same place is as good as any other. Claims are plain subtractions:
// sixteen threads that begin together would disturb one another's comparisons for long.
struct alignas(64) Job {
    std::mutex taken;
    void (*body)(void *, int64_t);
    void *context;
    Lots lots;
    std::atomic<bool> sleeping{false};           // the caller, until all is done
    std::atomic<bool> stopped{false};            // lots are still claimed and counted, but not done
    alignas(64) std::atomic<int64_t> left{0};    // lots that nobody has claimed; below 0: somebody found none
    alignas(64) std::atomic<int64_t> undone{0};  // lots that are not done
};

class Workers {
  public:
    explicit Workers(const Crew &crew) : threads_(crew.threads) {
        try {
            while (static_cast<int>(crew_.size()) + 1 < threads_ && add_thread(crew)) continue;
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Workers() { stop(); }

    int threads() const { return threads_; }

    enum Outcome { kDone, kStopped, kBusy };  // busy: too many others are calling
    Outcome run(int64_t count, int64_t second, void (*body)(void *, int64_t), void *context) {
        for (Job &job : jobs_) {
            const std::unique_lock<std::mutex> lock(job.taken, std::try_to_lock);
            if (!lock) continue;
            job.body = body;
            job.context = context;
            job.lots.divide(count, second, threads_);
            job.stopped.store(false, std::memory_order_relaxed);
            job.undone.store(job.lots.count(), std::memory_order_relaxed);
            job.left.store(job.lots.count());
            wake(job.lots.count() - 1);
            take_items(job, interrupt.asks());
            wait(job);
            return job.stopped.load() ? kStopped : kDone;
        }
        return kBusy;
    }

    static thread_local bool inside;                 // a body is running on this thread
    static thread_local std::atomic<bool> *stopped;  // of the call whose items it takes; NULL: of none

  private:
    // False: the system starts no more, and nobody asked for more.
    bool add_thread(const Crew &crew) {
        const int started = static_cast<int>(crew_.size()) + 1;  // the caller is one
        try {
            crew_.emplace_back([this] { work(); });
        } catch (const std::system_error &error) {
            if (crew.asked)
                fail(MOEPOOL_ERROR_ARGUMENT, "%s: the system starts no more than %d of %d threads (%s): ask for fewer",
                     crew.asked, started, crew.threads, error.what());
            threads_ = started;
            return false;
        }
        const pthread_t thread = crew_.back().native_handle();
        if (crew.cpus.empty()) {
            // A new thread has the CPUs of the one that makes it. Where they can not be set they stay.
            pthread_setaffinity_np(thread, sizeof process_cpus.sets, process_cpus.sets);
            return true;
        }
        const int cpu = crew.cpus[static_cast<size_t>(started) % crew.cpus.size()];
        CpuSet set;
        set.add(cpu);
        if (const int error = pthread_setaffinity_np(thread, sizeof set.sets, set.sets))
            fail(MOEPOOL_ERROR_ARGUMENT, "the system does not let a thread run on CPU %d: %s", cpu,
                 std::strerror(error));
        return true;
    }

    // True if there was any. The caller asks whether to stop.
    bool take_items(Job &job, bool asks) {
        int64_t done = 0;
        stopped = &job.stopped;
        while (job.left.load(std::memory_order_relaxed) > 0) {
            const int64_t left = job.left.fetch_sub(1, std::memory_order_acquire);
            if (left <= 0) break;
            const int64_t lot = job.lots.count() - left, end = job.lots.begin(lot + 1);
            for (int64_t i = job.lots.begin(lot); i < end && !job.stopped.load(std::memory_order_relaxed); ++i) {
                job.body(job.context, i);
                if (asks && interrupt.due()) job.stopped.store(true);
            }
            ++done;
        }
        stopped = nullptr;
        if (done && job.undone.fetch_sub(done) == done && job.sleeping.load()) {
            const std::lock_guard<std::mutex> lock(mutex_);
            done_.notify_all();
        }
        return done > 0;
    }

    void wait(Job &job) {
        const auto done = [&] { return job.undone.load() == 0; };
        if (spin(done)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        job.sleeping.store(true);
        while (interrupt.asks() && !job.stopped.load() && !done_.wait_for(lock, Interrupt::kPause, done)) {
            lock.unlock();
            if (interrupt.due()) job.stopped.store(true);
            lock.lock();
        }
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
            for (Job &job : jobs_) any |= take_items(job, false);
            if (any || spin(called)) continue;
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

    int threads_;              // does not change once there is a job
    std::array<Job, 8> jobs_;  // a ninth caller at once works alone
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<int64_t> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> crew_;
};

thread_local bool Workers::inside = false;
thread_local std::atomic<bool> *Workers::stopped = nullptr;

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
    if (!workers) workers = new std::shared_ptr<Workers>(std::make_shared<Workers>(default_crew()));
    return *workers;
}

void use_crew(const Crew &wanted) {
    auto crew = std::make_shared<Workers>(wanted);
    std::shared_ptr<Workers> old;  // stops when the last call that uses it returns, and not under the lock
    const std::lock_guard<std::mutex> lock(workers_mutex);
    if (workers)
        old = std::exchange(*workers, std::move(crew));
    else
        workers = new std::shared_ptr<Workers>(std::move(crew));
}

}  // namespace

void parallel_for(int64_t count, int64_t second, void (*body)(void *, int64_t), void *context) {
    if (count > 1 && !Workers::inside) {
        const std::shared_ptr<Workers> crew = current_workers();
        const FloatEnvironment environment;
        Workers::inside = true;
        const Workers::Outcome outcome = crew->run(count, second, body, context);
        Workers::inside = false;
        if (outcome == Workers::kStopped) fail_interrupted();
        if (outcome == Workers::kDone) return;
    }
    alone_for(count, body, context);
}

void alone_for(int64_t count, void (*body)(void *, int64_t), void *context) {
    const FloatEnvironment environment;
    const bool asks = interrupt.asks();
    for (int64_t i = 0; i < count; ++i) {
        body(context, i);
        if (asks && interrupt.due()) fail_interrupted();
    }
}

bool await_zero(const std::atomic<int32_t> &count) {
    const auto zero = [&] { return count.load(std::memory_order_acquire) == 0; };
    if (zero()) return true;  // always, where a call runs on its caller alone: in rising order
    while (!spin([&] { return zero() || Workers::stopped->load(std::memory_order_relaxed); })) {
        if (interrupt.due()) Workers::stopped->store(true);
        std::this_thread::yield();  // whoever works at it may have lost its CPU to this thread
    }
    return zero();
}

Interruptible::Interruptible() {
    if (interrupt.allowed++ == 0 && interrupt.check) interrupt.next = Interrupt::Clock::now() + Interrupt::kPause;
}
Interruptible::~Interruptible() { --interrupt.allowed; }

void set_interrupt(moepool_interrupt check, void *data) {
    interrupt.check = check;
    interrupt.data = data;
}

void set_threads(int threads, const int32_t *cpus, int count) {
    if (count < 0 || (count && !cpus)) fail(MOEPOOL_ERROR_ARGUMENT, "cpus is NULL, or a list of %d CPUs", count);
    if (threads == 0 && count == 0) return use_crew(default_crew());
    use_crew(checked(threads, std::vector<int>(cpus, cpus + count), "threads", "cpus"));
}

int get_threads() { return current_workers()->threads(); }

bool process_may_use(int cpu) { return cpu >= 0 && cpu < kMostCpus && process_cpus.has(cpu); }

void use_every_cpu() { sched_setaffinity(0, sizeof process_cpus.sets, process_cpus.sets); }

}  // namespace moepool
