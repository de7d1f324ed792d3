// The doorbell: how a step on a device hands work to the CPU, and gets its rows back, without a call between them.
//
// A channel belongs to one pool. It has three lines in memory that both sides see (on CUDA page-locked and mapped), of
// 64 bytes each, and some buffers:
//
//   Request   the device writes a buffer, then the rest of the line, then, released, `epoch`
//   Answer    the CPU writes the rows, then, released, the epoch and how long it took, in one word that one look over a
//             link tells
//   Trouble   the device writes it once, when an answer did not come in time
//
// and shares one word with the others:
//
//   silence   the device sets it when a request has run out of time; the CPU clears it when it takes one up, and for a
//             new channel
//
//   buffer    int32 experts[places]     of each place the expert that the CPU is to compute, or -1       device -> CPU
//             input[input_bytes]        the activation rows of the request                               device -> CPU
//             float rows[places][columns]                                                                CPU -> device
//
// Order. Epochs are compared for equality alone, so they may wrap. A device posts epoch n + 1 only after it has taken
// answer n, so one request is under way a channel, and a buffer is never written while the other side reads it. After a
// request that ran out of time the channel is poisoned: the device posts no more, so a late worker may read and write
// its buffer as long as it likes. Closing the channel then leaves the buffers, and what the work reads, in quarantine:
// they are freed by a later open or close, once the worker is seen to be done; a process that exits waits for it.
// While the silence lasts, other channels give up after kGiveUp: if nobody answers, a graph of many layers waits for
// the time-out once. A thread that takes a request up breaks the silence, and again when it has answered it, late or
// not.
//
// One thread a process, the server, looks at the lines of all open channels. It spins while there is work and for
// kSpin after; then it sleeps kNap between looks, for a device can not wake a thread: the first request after a pause
// waits up to kNap, and a process whose channels are idle spends some 2 % of one core on looking. It computes on all
// threads of parallel_for and makes no call into a device's runtime.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "both.h"

namespace moepool {
namespace doorbell {

constexpr std::chrono::microseconds kSpin{2000}, kNap{100};
constexpr std::chrono::milliseconds kGiveUp{10};
constexpr int kMostBuffers = 16;

struct alignas(64) Request {
    int32_t buffer, tokens, k;
    int32_t per_row;  // places that share an activation row: k or 1
    uint32_t epoch;
};

struct alignas(64) Answer {
    uint64_t told;  // the epoch, and above it the nanoseconds at work
};
MOEPOOL_BOTH constexpr uint64_t told_of(uint32_t epoch, uint32_t took_ns) { return uint64_t{took_ns} << 32 | epoch; }
MOEPOOL_BOTH constexpr uint32_t epoch_of(uint64_t told) { return static_cast<uint32_t>(told); }
MOEPOOL_BOTH constexpr uint32_t took_of(uint64_t told) { return static_cast<uint32_t>(told >> 32); }

struct alignas(64) Trouble {
    uint32_t waited_us;  // for an answer
    uint32_t timed_out;  // kItself or kLikeOthers; set last
};
constexpr uint32_t kItself = 1, kLikeOthers = 2;  // waited for the whole time-out, or gave up in a silence

static_assert(sizeof(Request) == 64 && sizeof(Answer) == 64 && sizeof(Trouble) == 64, "a line each");

// Memory that both sides see at the same address. `allocate` throws if it is refused.
struct Memory {
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
};

// One request, as the computing side sees it.
struct Work {
    int64_t tokens, k, per_row;
    const int32_t *experts;  // by place
    const uint8_t *input;
    float *rows;
};
// Writes the rows of every place with an expert. Whatever it reads is kept alive by it.
using Compute = std::function<void(const Work &work)>;

struct Buffer {
    int64_t places;
    int32_t *experts;
    int32_t *taken;  // the CPU's copy of experts: when it has answered, the device may write these
    uint8_t *input;
    float *rows;
};

class Channel {
  public:
    // columns: of an answer's row. polled: the server looks after it; else whoever calls serve().
    static std::shared_ptr<Channel> open(const Memory &memory, int64_t columns, bool polled, Compute compute);
    ~Channel();
    Channel(const Channel &) = delete;
    Channel &operator=(const Channel &) = delete;

    // Room for requests of up to so many places; the index of the buffer.
    int add_buffer(int64_t places, int64_t input_bytes);
    const Buffer &buffer(int index) const { return buffers_[static_cast<size_t>(index)]; }

    Request *request() const { return request_; }
    Answer *answer() const { return answer_; }
    Trouble *trouble() const { return trouble_; }
    uint32_t *silence() const { return silence_; }

    // Answers a request that waits, on this thread. False: there was none.
    bool serve();
    // Makes sure that somebody looks, soon: before a host call that posts.
    void wake();
    // Why the channel is of no use any more; empty: it is.
    std::string failure() const;

    // The device is done with the channel, or has given up on it. Does not wait for a late worker.
    static void close(std::shared_ptr<Channel> channel);

  private:
    friend class Server;
    Channel(const Memory &memory, int64_t columns, bool polled, Compute compute);
    bool pending() const { return __atomic_load_n(&request_->epoch, __ATOMIC_ACQUIRE) != served_; }
    void answer_now(uint32_t epoch);
    void note_failure(const char *why);
    void free();
    static void sweep();

    const Memory memory_;
    const int64_t columns_;
    const bool polled_;
    const int owner_;  // process
    Compute compute_;
    void *board_ = nullptr;
    int line_ = -1;
    Request *request_ = nullptr;
    Answer *answer_ = nullptr;
    Trouble *trouble_ = nullptr;
    uint32_t *silence_ = nullptr;
    std::array<Buffer, kMostBuffers> buffers_{};
    std::array<void *, kMostBuffers> memories_{};
    int count_ = 0;
    uint32_t served_ = 0;  // of whoever serves
    // Whoever serves sets busy_, then looks at closed_; who closes sets closed_, then looks at busy_: one of the two
    // sees the other.
    std::atomic<bool> busy_{false}, closed_{false}, failed_{false};
    std::array<char, 256> why_{};  // of the first failure; written before failed_
};

// Of the process.
struct Settings {
    std::atomic<int64_t> timeout_us{1000000};  // above the throttling of a cgroup, below a display's watchdog of 2 s
    std::atomic<int> host_nodes{-1};           // 1: always, 0: never, -1: where a kernel that waits is not safe
    std::atomic<int64_t> stall_us{0};          // for tests: wait before computing; -1: the server's thread ends instead
    std::atomic<int> period{2048};             // of division::advance
};
Settings &settings();

// For tests: channels in quarantine, and whether the server's thread runs.
int quarantined();
bool server_runs();

}  // namespace doorbell
}  // namespace moepool
