// Tests of csrc/pool/doorbell.cpp, with a thread in the place of the device. The first argument names the case; "ok" is
// printed if it holds. Run by tests/test_doorbell.py.
#include "pool/doorbell.h"
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "error.h"

using namespace moepool;
using doorbell::Channel;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int64_t kColumns = 24;

// Memory whose release can be seen.
std::mutex live_mutex;
std::set<void *> live;
int refuse_allocations = 0;

void *allocate(size_t bytes) {
    const std::lock_guard<std::mutex> lock(live_mutex);
    if (refuse_allocations) throw std::bad_alloc();
    void *made = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(made, 0xA5, bytes);
    live.insert(made);
    return made;
}
void release(void *memory) {
    const std::lock_guard<std::mutex> lock(live_mutex);
    CHECK(live.erase(memory) == 1);
    std::free(memory);
}
bool lives(const void *memory) {
    const std::lock_guard<std::mutex> lock(live_mutex);
    return live.count(const_cast<void *>(memory)) == 1;
}
const doorbell::Memory memory{allocate, release};

// What a device's runtime does when the process exits, while a worker that nobody stopped would go on.
void take_back() {
    {
        const std::lock_guard<std::mutex> lock(live_mutex);
        for (void *one : live) std::free(one);
        live.clear();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(2 * doorbell::settings().stall_us.load()));
}

// A row that depends on expert, place and input.
float value(int32_t expert, int64_t place, uint8_t input, int64_t column) {
    return static_cast<float>(expert * 1000 + place * 100 + input) + static_cast<float>(column) / 32;
}
void compute(const doorbell::Work &work) {
    for (int64_t p = 0; p < work.tokens * work.k; ++p)
        for (int64_t c = 0; c < kColumns && work.experts[p] >= 0; ++c)
            work.rows[p * kColumns + c] = value(work.experts[p], p, work.input[p / work.per_row], c);
}

// The other side of a channel: what the device keeps, and does.
struct Device {
    std::shared_ptr<Channel> channel;
    uint32_t epoch = 0;
    bool poisoned = false;

    explicit Device(bool polled = true, doorbell::Compute with = compute)
        : channel(Channel::open(memory, kColumns, polled, std::move(with))) {}
    ~Device() { Channel::close(std::move(channel)); }

    void post(int buffer, int tokens, int k, const std::vector<int32_t> &experts, uint8_t input) {
        const doorbell::Buffer &b = channel->buffer(buffer);
        std::copy(experts.begin(), experts.end(), b.experts);
        for (int t = 0; t < tokens; ++t) b.input[t] = static_cast<uint8_t>(input + t);
        doorbell::Request &line = *channel->request();
        line.buffer = buffer;
        line.tokens = tokens;
        line.k = k;
        line.per_row = k;
        __atomic_store_n(&line.epoch, ++epoch, __ATOMIC_RELEASE);
    }
    bool await(milliseconds bound) {
        const auto end = Clock::now() + bound;
        while (doorbell::epoch_of(__atomic_load_n(&channel->answer()->told, __ATOMIC_ACQUIRE)) != epoch) {
            if (Clock::now() < end) {
                std::this_thread::yield();
                continue;
            }
            poisoned = true;
            channel->trouble()->waited_us = static_cast<uint32_t>(bound.count()) * 1000;
            __atomic_store_n(channel->silence(), 1, __ATOMIC_RELEASE);
            __atomic_store_n(&channel->trouble()->timed_out, doorbell::kItself, __ATOMIC_RELEASE);
            return false;
        }
        return true;
    }
    bool silent() const { return __atomic_load_n(channel->silence(), __ATOMIC_ACQUIRE) != 0; }
    void check(int buffer, int k, const std::vector<int32_t> &experts, uint8_t input) const {
        const float *rows = channel->buffer(buffer).rows;
        for (size_t p = 0; p < experts.size(); ++p)
            for (int64_t c = 0; c < kColumns && experts[p] >= 0; ++c) {
                const auto place = static_cast<int64_t>(p);
                const auto in = static_cast<uint8_t>(input + place / k);
                CHECK(rows[place * kColumns + c] == value(experts[p], place, in, c));
            }
    }
};

void step(Device &device, int buffer, uint32_t number) {
    const int tokens = 1 + static_cast<int>(number % 3), k = 1 + static_cast<int>(number / 3 % 4);
    std::vector<int32_t> experts;
    for (int p = 0; p < tokens * k; ++p) experts.push_back(static_cast<int32_t>((number * 7 + p * 5) % 9) - 1);
    const auto input = static_cast<uint8_t>(number);
    device.post(buffer, tokens, k, experts, input);
    CHECK(device.await(milliseconds(20000)));
    device.check(buffer, k, experts, input);
}

void epochs() {
    Device device;
    const int small = device.channel->add_buffer(12, 3), large = device.channel->add_buffer(64, 16);
    for (uint32_t i = 0; i < 3000; ++i) step(device, i % 2 ? small : large, i);
    CHECK(device.channel->failure().empty());
    // Nothing is posted: nothing is answered again.
    device.channel->buffer(small).rows[0] = -7;
    std::this_thread::sleep_for(milliseconds(10));
    CHECK(device.channel->buffer(small).rows[0] == -7);
}

// After a pause of any length a request is answered, and after the largest epoch comes 0.
void pauses_and_wrap() {
    Device device;
    const int buffer = device.channel->add_buffer(12, 3);
    // As if so many had been answered.
    device.epoch = 0xFFFFFFFDu;
    for (uint32_t i = 0; i < 8; ++i) {
        step(device, buffer, i);
        std::this_thread::sleep_for(milliseconds(i % 2 ? 6 : 1));
    }
    CHECK(device.epoch == 5);
}

void many_channels() {
    constexpr int kThreads = 4, kEach = 40;  // more than a board has lines
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([t] {
            std::vector<std::unique_ptr<Device>> devices;
            for (int i = 0; i < kEach; ++i) {
                devices.push_back(std::make_unique<Device>());
                CHECK(devices.back()->channel->add_buffer(12, 3) == 0);
                const size_t last = devices.size();
                for (uint32_t s = 0; s < 5; ++s)
                    step(*devices[(s * 3 + 1) % last], 0, s * 31 + static_cast<uint32_t>(t));
                if (i % 3 == 2) devices.erase(devices.begin() + i / 3);
            }
        });
    for (std::thread &thread : threads) thread.join();
    CHECK(doorbell::quarantined() == 0);
    CHECK(!doorbell::server_runs());
    // All that is left are lines.
    const std::lock_guard<std::mutex> lock(live_mutex);
    CHECK(live.size() <= 3);
}

// A worker that is late, and what it may still write to.
void time_out() {
    doorbell::settings().stall_us = 300000;
    auto kept = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = kept;
    const void *buffer_memory = nullptr;
    {
        Device device(true, [kept](const doorbell::Work &work) { compute(work); });
        kept.reset();
        const int buffer = device.channel->add_buffer(12, 3);
        buffer_memory = device.channel->buffer(buffer).experts;
        device.post(buffer, 1, 2, {3, 4}, 9);
        CHECK(!device.await(milliseconds(60)));
        CHECK(device.poisoned);
        CHECK(device.channel->failure().find("the CPU, which did not answer") != std::string::npos);
        const auto begun = Clock::now();
        Channel::close(std::move(device.channel));
        CHECK(Clock::now() - begun < milliseconds(150));  // nobody waits for the worker
    }
    CHECK(doorbell::quarantined() == 1);
    CHECK(lives(buffer_memory) && !watched.expired());
    doorbell::settings().stall_us = 0;
    // Another channel works meanwhile, with memory of its own.
    Device other;
    const int buffer = other.channel->add_buffer(12, 3);
    CHECK(other.channel->buffer(buffer).experts != buffer_memory);
    for (uint32_t i = 0; i < 20; ++i) step(other, buffer, i);
    CHECK(lives(buffer_memory));
    std::this_thread::sleep_for(milliseconds(400));
    CHECK(doorbell::quarantined() == 1);  // only a call of the host frees it
    {
        Device next;
    }
    CHECK(doorbell::quarantined() == 0);
    CHECK(!lives(buffer_memory) && watched.expired());
}

// A late answer to a channel that nobody closed: the epoch tells that it came, and the failure stays.
void late_answer() {
    doorbell::settings().stall_us = 100000;
    Device device;
    const int buffer = device.channel->add_buffer(12, 3);
    device.post(buffer, 1, 1, {5}, 1);
    CHECK(!device.await(milliseconds(20)));
    CHECK(device.await(milliseconds(20000)));
    device.check(buffer, 1, {5}, 1);
    CHECK(!device.channel->failure().empty());
    doorbell::settings().stall_us = 0;
}

// The server's thread ends in the middle: requests are late, then a host call starts another.
void killed() {
    Device device, beside;
    const int buffer = device.channel->add_buffer(12, 3);
    CHECK(beside.channel->add_buffer(12, 3) == buffer);
    step(device, buffer, 1);
    doorbell::settings().stall_us = -1;
    device.post(buffer, 1, 1, {5}, 1);
    CHECK(!device.await(milliseconds(50)));
    while (doorbell::server_runs()) std::this_thread::yield();
    doorbell::settings().stall_us = 0;
    beside.channel->wake();
    CHECK(device.await(milliseconds(20000)));
    for (uint32_t i = 0; i < 20; ++i) step(beside, buffer, i);
}

// A silence that all channels share: broken when a server takes up a request, when it answers, and by a new channel.
void silence() {
    const auto pause = [] { std::this_thread::sleep_for(milliseconds(50)); };
    Device device, beside;
    const int buffer = device.channel->add_buffer(12, 3);
    CHECK(beside.channel->add_buffer(12, 3) == buffer);
    CHECK(device.channel->silence() == beside.channel->silence());
    step(device, buffer, 1);
    CHECK(!device.silent());
    doorbell::settings().stall_us = 300000;
    device.post(buffer, 1, 1, {5}, 1);
    CHECK(!device.await(milliseconds(50)));
    CHECK(beside.silent());
    CHECK(device.channel->failure().find(" 50 ms") != std::string::npos);
    CHECK(device.await(milliseconds(20000)));  // late
    CHECK(!beside.silent());
    __atomic_store_n(device.channel->silence(), 1, __ATOMIC_RELEASE);
    beside.post(buffer, 1, 1, {5}, 1);
    pause();
    CHECK(!beside.silent());  // it is at work
    CHECK(beside.await(milliseconds(20000)));

    doorbell::settings().stall_us = -1;
    beside.post(buffer, 1, 1, {5}, 1);
    CHECK(!beside.await(milliseconds(50)));
    while (doorbell::server_runs()) std::this_thread::yield();
    doorbell::settings().stall_us = 0;
    CHECK(device.silent());
    Device third(false);
    CHECK(!device.silent());
    __atomic_store_n(device.channel->silence(), 1, __ATOMIC_RELEASE);
    beside.channel->wake();
    CHECK(beside.await(milliseconds(20000)));
    CHECK(!device.silent());
}

// Rows are NaN, and of more failures the first one is told.
void throws(const std::function<void(int)> &failure, const std::string &why) {
    int number = 0;
    Device device(true, [&](const doorbell::Work &) { failure(++number); });
    const int buffer = device.channel->add_buffer(4, 1);
    for (int i = 0; i < 2; ++i) {
        device.post(buffer, 1, 2, {1, -1}, 0);
        CHECK(device.await(milliseconds(20000)));
        for (int64_t c = 0; c < 2 * kColumns; ++c) {
            uint32_t bits;
            std::memcpy(&bits, device.channel->buffer(buffer).rows + c, sizeof bits);
            CHECK(bits == 0x7FFFFFFFu);
        }
        device.channel->buffer(buffer).rows[0] = 0;
        const std::string told = device.channel->failure();
        CHECK(told.size() > why.size() && told.compare(told.size() - why.size(), why.size(), why) == 0);
    }
}
void a_compute_that_throws() {
    throws([](int) { throw std::bad_alloc(); }, ": host memory ran out");
    throws([](int) { throw 1; }, ": an exception of an unknown type");
    throws([](int number) { throw std::runtime_error("no. " + std::to_string(number)); }, ": no. 1");
    throws([](int) { throw std::runtime_error(std::string(1000, 'x')); }, ": " + std::string(255, 'x'));
}

void refused_memory() {
    {
        Device device;
        refuse_allocations = 1;
        bool refused = false;
        try {
            device.channel->add_buffer(4, 1);
        } catch (const std::bad_alloc &) {
            refused = true;
        }
        CHECK(refused);
        refuse_allocations = 0;
        step(device, device.channel->add_buffer(12, 3), 3);
    }
    CHECK(doorbell::quarantined() == 0 && !doorbell::server_runs());
}

// Not looked after by the server: answered by who asks, as a host function of a graph does.
void by_host_calls() {
    Device device(false);
    const int buffer = device.channel->add_buffer(12, 3);
    CHECK(!doorbell::server_runs());
    CHECK(!device.channel->serve());
    device.post(buffer, 1, 1, {5}, 1);
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(device.channel->answer()->told == 0);
    CHECK(device.channel->serve());
    CHECK(device.await(milliseconds(0)));
    device.check(buffer, 1, {5}, 1);
    CHECK(!device.channel->serve());
}

// How long the CPU was at work is told with the answer.
void times() {
    Device device(true, [](const doorbell::Work &work) {
        std::this_thread::sleep_for(std::chrono::microseconds(1000 * (work.experts[0] + 1)));
    });
    const int buffer = device.channel->add_buffer(64, 16);
    for (int i = 0; i < 20; ++i) {
        device.post(buffer, 1, 1, {i % 7}, 0);
        CHECK(device.await(milliseconds(20000)));
        const uint64_t answer = __atomic_load_n(&device.channel->answer()->told, __ATOMIC_ACQUIRE);
        const uint32_t least = static_cast<uint32_t>(i % 7 + 1) * 1000000;  // ns
        CHECK(doorbell::took_of(answer) >= least && doorbell::took_of(answer) < 4000000000u);
        CHECK(doorbell::told_of(doorbell::epoch_of(answer), doorbell::took_of(answer)) == answer);
    }
}

// A child has no thread of its parent's: it starts its own, and leaves the parent's channels alone.
void forks() {
    Device inherited;
    const int buffer = inherited.channel->add_buffer(12, 3);
    step(inherited, buffer, 1);
    for (int round = 0; round < 5; ++round) {
        const pid_t child = fork();
        if (child == 0) {
            CHECK(!doorbell::server_runs());
            Channel::close(std::move(inherited.channel));
            {
                Device own;
                const int mine = own.channel->add_buffer(12, 3);
                for (uint32_t i = 0; i < 50; ++i) step(own, mine, i);
            }
            CHECK(doorbell::quarantined() == 0 && !doorbell::server_runs());
            std::_Exit(0);
        }
        for (uint32_t i = 0; i < 50; ++i) step(inherited, buffer, i);
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

// An exit with an open channel, and a request under way, ends.
void exit_while_open() {
    static auto *device = new Device;
    const int buffer = device->channel->add_buffer(12, 3);
    step(*device, buffer, 1);
    doorbell::settings().stall_us = 100000;
    device->post(buffer, 1, 1, {5}, 1);
    std::this_thread::sleep_for(milliseconds(10));
}

// An exit while the worker is late with the answer to a channel that is closed.
void exit_while_late() {
    doorbell::settings().stall_us = 300000;
    Device device;
    const int buffer = device.channel->add_buffer(12, 3);
    device.post(buffer, 1, 2, {3, 4}, 9);
    CHECK(!device.await(milliseconds(60)));
}

// Requests of all sizes from four threads, whose channels come and go, some while they are answered late.
void soak(int requests) {
    constexpr int kThreads = 4;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([t, requests] {
            uint32_t random = static_cast<uint32_t>(t) + 1;
            const auto below = [&](uint32_t bound) {
                random = random * 1664525u + 1013904223u;
                return (random >> 8) % bound;
            };
            for (int done = 0; done < requests / kThreads;) {
                Device device;
                const int small = device.channel->add_buffer(12, 3), large = device.channel->add_buffer(64, 16);
                for (uint32_t left = 1 + below(500); left > 0; --left, ++done)
                    step(device, below(2) ? small : large, below(1u << 20));
                if (below(8) == 0) device.post(small, 1, 2, {3, 4}, 9);  // closed with it under way
            }
        });
    for (std::thread &thread : threads) thread.join();
    for (int i = 0; i < 100 && doorbell::quarantined(); ++i) Device();
    CHECK(doorbell::quarantined() == 0);
    CHECK(!doorbell::server_runs());
    const std::lock_guard<std::mutex> lock(live_mutex);
    CHECK(live.size() <= 3);
}

const std::map<std::string, void (*)()> cases{
    {"epochs", epochs},
    {"pauses_and_wrap", pauses_and_wrap},
    {"many_channels", many_channels},
    {"time_out", time_out},
    {"times", times},
    {"late_answer", late_answer},
    {"killed", killed},
    {"a_compute_that_throws", a_compute_that_throws},
    {"refused_memory", refused_memory},
    {"silence", silence},
    {"by_host_calls", by_host_calls},
    {"forks", forks},
    {"exit_while_late", exit_while_late},
    {"exit_while_open", exit_while_open},
};

}  // namespace

int main(int count, char **arguments) {
    if (count < 2) {
        for (const auto &one : cases) std::puts(one.first.c_str());
        return 0;
    }
    std::atexit(take_back);
    if (count > 2)
        soak(std::atoi(arguments[2]));
    else
        cases.at(arguments[1])();
    std::puts("ok");
    return 0;
}
