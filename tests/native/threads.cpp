// The threads of the core (cpu/threads.cpp): every item of a call is done once, in two lists of which the second waits
// for the first, by several callers at once, and when a call is stopped in the middle.
#include "cpu/threads.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "error.h"

using namespace moepool;

namespace {

using Counts = std::unique_ptr<std::atomic<int32_t>[]>;

Counts counts(int64_t count, int32_t from) {
    Counts made(new std::atomic<int32_t>[static_cast<size_t>(count)]);
    for (int64_t i = 0; i < count; ++i) made[static_cast<size_t>(i)] = from;
    return made;
}

void every_item_is_done_once() {
    for (const int threads : {1, 2, 3, 17}) {
        set_threads(threads, nullptr, 0);
        for (const int64_t count : {0, 1, 2, 5, 33, 64, 1000, 4321})
            for (const int64_t second : {int64_t{0}, count / 3, count}) {
                const Counts done = counts(count, 0);
                parallel_for(count, second, [&](int64_t i) { ++done[static_cast<size_t>(i)]; });
                for (int64_t i = 0; i < count; ++i) CHECK(done[static_cast<size_t>(i)] == 1);
            }
    }
}

void alone_in_rising_order() {
    set_threads(4, nullptr, 0);
    std::vector<int64_t> seen;
    const std::thread::id caller = std::this_thread::get_id();
    alone_for(100, [&](int64_t i) {
        CHECK(std::this_thread::get_id() == caller);
        seen.push_back(i);
    });
    CHECK(seen.size() == 100);
    for (int64_t i = 0; i < 100; ++i) CHECK(seen[static_cast<size_t>(i)] == i);
}

// `groups` of `each` items make what as many items behind them add up.
void add_up(int groups, int each, int rounds) {
    std::vector<int64_t> made(static_cast<size_t>(groups * each)), sums(made.size());
    for (int round = 0; round < rounds; ++round) {
        const Counts left = counts(groups, each);
        const int64_t first = groups * each;
        parallel_for(2 * first, first, [&](int64_t i) {
            if (i < first) {
                made[static_cast<size_t>(i)] = round + i;
                left[static_cast<size_t>(i / each)].fetch_sub(1, std::memory_order_release);
                return;
            }
            i -= first;
            CHECK(await_zero(left[static_cast<size_t>(i / each)]));
            int64_t sum = 0;
            for (int64_t j = i / each * each; j < (i / each + 1) * each; ++j) sum += made[static_cast<size_t>(j)];
            sums[static_cast<size_t>(i)] = sum;
        });
        for (int64_t i = 0; i < first; ++i) {
            const int64_t begin = i / each * each;
            CHECK(sums[static_cast<size_t>(i)] == each * (round + begin) + int64_t{each} * (each - 1) / 2);
        }
    }
}

void later_items_wait_for_earlier_ones() {
    for (const int threads : {1, 2, 9}) {
        set_threads(threads, nullptr, 0);
        std::vector<std::thread> callers;
        for (int caller = 0; caller < 4; ++caller) callers.emplace_back([caller] { add_up(1 + 3 * caller, 5, 200); });
        for (std::thread &caller : callers) caller.join();
    }
}

// Two items that never count down, and one that waits for them: of two threads the caller waits, of three a worker may,
// while the caller asks. In either case it has to learn that the call is stopped.
void who_waits_is_told_that_the_call_is_stopped() {
    const std::thread::id caller = std::this_thread::get_id();
    for (int round = 0; round < 20; ++round) {
        const int threads = 2 + round % 2;
        set_threads(threads, nullptr, 0);
        set_interrupt([](void *) -> int32_t { return 1; }, nullptr);
        const Counts left = counts(1, 2);
        std::atomic<int> begun{0};
        std::atomic<bool> told{false};
        moepool_status status = MOEPOOL_OK;
        try {
            const Interruptible scope;
            parallel_for(3, 2, [&](int64_t i) {
                ++begun;
                if (i == 2) {
                    told = !await_zero(left[0]);
                    return;
                }
                while (begun < threads) std::this_thread::yield();
                if (std::this_thread::get_id() == caller)
                    std::this_thread::sleep_for(std::chrono::milliseconds(threads == 3 ? 60 : 0));
                else
                    while (!told) std::this_thread::yield();
            });
        } catch (const Error &error) {
            status = error.status();
        }
        set_interrupt(nullptr, nullptr);
        CHECK(told && status == MOEPOOL_ERROR_INTERRUPTED);
    }
}

}  // namespace

int main(int, char **argv) {
    const struct {
        const char *name;
        void (*test)();
    } tests[] = {
        {"every_item_is_done_once", every_item_is_done_once},
        {"alone_in_rising_order", alone_in_rising_order},
        {"later_items_wait_for_earlier_ones", later_items_wait_for_earlier_ones},
        {"who_waits_is_told_that_the_call_is_stopped", who_waits_is_told_that_the_call_is_stopped},
    };
    for (const auto &test : tests)
        if (!std::strcmp(test.name, argv[1])) {
            test.test();
            std::puts("ok");
            std::fflush(stdout);
            std::_Exit(0);  // the workers live as long as the process
        }
    return 2;
}
