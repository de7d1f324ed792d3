#include "pool/doorbell.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/threads.h"
#include "error.h"
#include "numerics.h"

namespace moepool {
namespace doorbell {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLines = 64;                                // of a kind on a board: a page
constexpr size_t kAlignment = 256;                        // of the parts of a buffer
constexpr auto kClosing = std::chrono::milliseconds(20);  // a worker that has answered needs no more to be done

// Lines of all kinds for so many channels. Kept for the life of the process: a line may be looked at once more when its
// channel is gone.
struct Board {
    Request requests[kLines];
    Answer answers[kLines];
    Trouble troubles[kLines];
    alignas(64) uint32_t silence;  // the first board's is that of all with memory of its kind
};

struct Boards {
    struct One {
        void *(*allocate)(size_t);
        Board *board;
        std::set<int> free;
    };
    std::vector<One> all;
};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Mostly there is none: that is seen without writing to the line, which a device may be looking at.
void break_silence(uint32_t *silence) {
    if (__atomic_load_n(silence, __ATOMIC_RELAXED)) __atomic_store_n(silence, 0, __ATOMIC_RELAXED);
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// The thread, and the channels that it looks at.
class Server {
  public:
    ~Server() {
        if (thread_.joinable()) thread_.join();
    }

    void start() {
        // Signals are for the threads of the program.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread_ = std::thread([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void add(std::shared_ptr<Channel> channel) {
        const std::lock_guard<std::mutex> lock(mutex_);
        channels_.push_back(std::move(channel));
        version_.fetch_add(1);
        wake_.notify_one();
    }
    std::vector<std::shared_ptr<Channel>> channels() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return channels_;
    }
    // True if none is left.
    bool remove(const Channel *channel) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto at =
            std::find_if(channels_.begin(), channels_.end(), [&](const auto &one) { return one.get() == channel; });
        if (at != channels_.end()) channels_.erase(at);
        version_.fetch_add(1);
        return channels_.empty();
    }
    void stop() {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_.store(true);
        wake_.notify_one();
    }
    void wake() {
        if (!napping_.load()) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_one();
    }
    bool finished() const { return finished_.load(); }

  private:
    void run() {
        prctl(PR_SET_NAME, "moepool-bell");
        use_every_cpu();              // not those of set_threads: it is the caller of what it computes
        prctl(PR_SET_TIMERSLACK, 1);  // ns; the default makes a nap half as long again
        std::vector<std::shared_ptr<Channel>> seen;
        uint64_t version = 0;
        size_t next = 0, looks = 0;
        Clock::time_point busy = Clock::now();
        while (!stopping_.load()) {
            if (version != version_.load()) {
                const std::lock_guard<std::mutex> lock(mutex_);
                seen = channels_;
                version = version_.load();
                next = 0;
            }
            // Pools are used in turn, as the layers of a model: who comes behind the last one is looked at first.
            bool any = false;
            for (size_t i = 0; i < seen.size() && !any; ++i) {
                const size_t at = (next + i) % seen.size();
                if (!seen[at]->pending()) continue;
                if (settings().stall_us.load() < 0) {
                    finished_.store(true);
                    return;
                }
                any = seen[at]->serve();
                next = at + 1;
            }
            if (any) {
                busy = Clock::now();
                continue;
            }
            pause();
            if (++looks % 16 || Clock::now() - busy < kSpin) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            napping_.store(true);
            if (wake_.wait_for(lock, kNap) == std::cv_status::no_timeout) busy = Clock::now();
            napping_.store(false);
        }
        finished_.store(true);
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::shared_ptr<Channel>> channels_;
    std::atomic<uint64_t> version_{1};
    std::atomic<bool> stopping_{false}, finished_{false}, napping_{false};
    std::thread thread_;
};

namespace {

// All that the process has. Never freed: a thread may run while the process exits.
struct Process {
    Boards boards;
    std::unique_ptr<Server> server;
    std::vector<std::unique_ptr<Server>> leaving;  // told to stop while they were at work
    std::vector<std::shared_ptr<Channel>> quarantine;
};
std::mutex process_mutex;
Process *process = new Process;

// A forked child has none of the parent's threads and can not use its devices: it leaves all of it alone.
const int at_fork = pthread_atfork([] { process_mutex.lock(); }, [] { process_mutex.unlock(); },
                                   [] {
                                       process = new Process;
                                       process_mutex.unlock();
                                   });

// Before a device's runtime takes its memory back. Registered when the first thread starts, so after the runtime's own.
// A thread that is leaving may still be at work on the last request of a channel in quarantine.
void stop_at_exit() {
    std::vector<std::unique_ptr<Server>> servers;  // joined without the mutex
    {
        const std::lock_guard<std::mutex> lock(process_mutex);
        servers = std::move(process->leaving);
        process->leaving.clear();
        if (process->server) servers.push_back(std::move(process->server));
    }
    for (const auto &server : servers) server->stop();
}

// With the mutex held. The channels of a thread that has ended go to a new one.
Server &running() {
    std::unique_ptr<Server> &server = process->server;
    if (server && !server->finished()) return *server;
    auto made = std::make_unique<Server>();
    if (server)
        for (const auto &channel : server->channels()) made->add(channel);
    made->start();
    static const int registered = std::atexit(stop_at_exit);
    (void)registered;
    if (server) process->leaving.push_back(std::move(server));
    server = std::move(made);
    return *server;
}

}  // namespace

Settings &settings() {
    static auto *one = new Settings;
    return *one;
}

// ------------------------------------------------------------------------------------------------------- a channel

Channel::Channel(const Memory &memory, int64_t columns, bool polled, Compute compute)
    : memory_(memory),
      columns_(columns),
      polled_(polled),
      owner_(static_cast<int>(getpid())),
      compute_(std::move(compute)) {
    const std::lock_guard<std::mutex> lock(process_mutex);
    std::vector<Boards::One> &boards = process->boards.all;
    auto at = std::find_if(boards.begin(), boards.end(), [&](const Boards::One &one) {
        return one.allocate == memory.allocate && !one.free.empty();
    });
    if (at == boards.end()) {
        Boards::One made{memory.allocate, static_cast<Board *>(memory.allocate(sizeof(Board))), {}};
        made.board->silence = 0;
        for (int i = 0; i < kLines; ++i) made.free.insert(i);
        boards.push_back(std::move(made));
        at = boards.end() - 1;
    }
    line_ = *at->free.begin();
    at->free.erase(at->free.begin());
    board_ = at->board;
    request_ = at->board->requests + line_;
    answer_ = at->board->answers + line_;
    trouble_ = at->board->troubles + line_;
    silence_ = &std::find_if(boards.begin(), boards.end(), [&](const Boards::One &one) {
                    return one.allocate == memory.allocate;
                })->board->silence;
    break_silence(silence_);
    // Whoever looked at the line for the channel before may look once more.
    __atomic_store_n(&request_->epoch, 0, __ATOMIC_RELEASE);
    *answer_ = {};
    *trouble_ = {};
}

std::shared_ptr<Channel> Channel::open(const Memory &memory, int64_t columns, bool polled, Compute compute) {
    sweep();
    std::shared_ptr<Channel> channel(new Channel(memory, columns, polled, std::move(compute)));
    if (polled) {
        const std::lock_guard<std::mutex> lock(process_mutex);
        running().add(channel);
    }
    return channel;
}

Channel::~Channel() { free(); }

int Channel::add_buffer(int64_t places, int64_t input_bytes) {
    if (count_ == kMostBuffers) fail(MOEPOOL_ERROR_INTERNAL, "a doorbell has too many buffers");
    const auto n = static_cast<size_t>(places);
    const size_t taken = aligned(n * sizeof(int32_t)), input = 2 * taken,
                 rows = input + aligned(static_cast<size_t>(input_bytes));
    auto *base = static_cast<uint8_t *>(memory_.allocate(rows + n * static_cast<size_t>(columns_) * sizeof(float)));
    memories_[static_cast<size_t>(count_)] = base;
    buffers_[static_cast<size_t>(count_)] = {places, reinterpret_cast<int32_t *>(base),
                                             reinterpret_cast<int32_t *>(base + taken), base + input,
                                             reinterpret_cast<float *>(base + rows)};
    return count_++;
}

void Channel::free() {
    if (line_ < 0 || owner_ != static_cast<int>(getpid())) return;
    for (int i = 0; i < count_; ++i) memory_.release(memories_[static_cast<size_t>(i)]);
    count_ = 0;
    compute_ = nullptr;
    const std::lock_guard<std::mutex> lock(process_mutex);
    for (Boards::One &one : process->boards.all)
        if (one.board == board_) one.free.insert(line_);
    line_ = -1;
}

bool Channel::serve() {
    const uint32_t epoch = __atomic_load_n(&request_->epoch, __ATOMIC_ACQUIRE);
    if (epoch == served_) return false;
    busy_.store(true);
    if (!closed_.load()) answer_now(epoch);
    busy_.store(false);
    return true;
}

// Does not allocate. Who reads may have seen an earlier one, which stays.
void Channel::note_failure(const char *why) {
    if (failed_.load()) return;
    std::snprintf(why_.data(), why_.size(), "%s", why);
    failed_.store(true);
}

void Channel::answer_now(uint32_t epoch) {
    served_ = epoch;
    break_silence(silence_);
    if (const int64_t stall = settings().stall_us.load(); stall > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(stall));
    const Request &request = *request_;
    const Buffer &buffer = buffers_[static_cast<size_t>(request.buffer)];
    const int64_t places = int64_t{request.tokens} * request.k;
    std::copy_n(buffer.experts, places, buffer.taken);
    const Work work{request.tokens, request.k, request.per_row, buffer.taken, buffer.input, buffer.rows};
    const Clock::time_point begun = Clock::now();
    const auto failed = [&](const char *why) {
        std::fill_n(work.rows, places * columns_, num::nan());
        note_failure(why);
    };
    try {
        compute_(work);
    } catch (const std::bad_alloc &) {
        failed("host memory ran out");
    } catch (const std::exception &error) {
        failed(error.what());
    } catch (...) {
        failed("an exception of an unknown type");
    }
    const double took = std::chrono::duration<double, std::nano>(Clock::now() - begun).count();
    break_silence(silence_);  // the answer may be late: then this request has begun it
    __atomic_store_n(&answer_->told, told_of(epoch, static_cast<uint32_t>(std::min(took, 4e9))), __ATOMIC_RELEASE);
}

void Channel::wake() {
    if (!polled_ || closed_.load()) return;
    const std::lock_guard<std::mutex> lock(process_mutex);
    running().wake();
}

std::string Channel::failure() const {
    if (const uint32_t how = __atomic_load_n(&trouble_->timed_out, __ATOMIC_ACQUIRE))
        return "a step waited " + std::to_string(trouble_->waited_us / 1000) + " ms for the CPU, which did not answer" +
               (how == kLikeOthers ? ", nor had it answered another pool in time" : "") +
               "; the rows of that step and of later ones are NaN";
    if (failed_.load())
        return std::string("the CPU could not compute the rows of a step, which are NaN: ") + why_.data();
    return {};
}

void Channel::close(std::shared_ptr<Channel> channel) {
    if (!channel || channel->owner_ != static_cast<int>(getpid())) return;
    channel->closed_.store(true);
    {
        const std::lock_guard<std::mutex> lock(process_mutex);
        if (process->server && process->server->remove(channel.get())) {
            process->server->stop();
            process->leaving.push_back(std::move(process->server));
        }
    }
    for (const auto until = Clock::now() + kClosing; channel->busy_.load() && Clock::now() < until;)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    {
        const std::lock_guard<std::mutex> lock(process_mutex);
        process->quarantine.push_back(std::move(channel));
    }
    sweep();
}

// Frees what no worker uses any more.
void Channel::sweep() {
    std::vector<std::shared_ptr<Channel>> done;  // freed and joined without the mutex
    std::vector<std::unique_ptr<Server>> ended;
    const auto move_out = [](auto &from, auto &to, const auto &is_done) {
        const auto at = std::partition(from.begin(), from.end(), [&](const auto &one) { return !is_done(one); });
        std::move(at, from.end(), std::back_inserter(to));
        from.erase(at, from.end());
    };
    {
        const std::lock_guard<std::mutex> lock(process_mutex);
        move_out(process->quarantine, done, [](const auto &one) { return !one->busy_.load(); });
        // An idle thread ends at once; one that computes for a channel in quarantine later.
        const bool idle = process->quarantine.empty();
        move_out(process->leaving, ended, [&](const auto &one) { return idle || one->finished(); });
    }
    for (const auto &one : done) one->free();
}

int quarantined() {
    const std::lock_guard<std::mutex> lock(process_mutex);
    return static_cast<int>(process->quarantine.size());
}

bool server_runs() {
    const std::lock_guard<std::mutex> lock(process_mutex);
    return process->server && !process->server->finished();
}

}  // namespace doorbell
}  // namespace moepool
