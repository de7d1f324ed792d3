// Tests of csrc/pool/division.h. Run by tests/test_doorbell.py.
#include "pool/division.h"
#include "check.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

using namespace moepool;
using namespace moepool::division;

namespace {

uint64_t state = 1;
int64_t below(int64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(bound));
}
Rates rates(int64_t link, int64_t base, int64_t record) {
    return {link, {static_cast<uint32_t>(base), static_cast<uint32_t>(record)}, begin_beside(link)};
}

// No other share ends sooner, but for all.
void best_of_all() {
    for (int i = 0; i < 20000; ++i) {
        Rates r = rates(1 + below(200000), below(i % 2 ? 100000 : 2000), 1 + below(200000));
        r.beside.link_ns += static_cast<uint32_t>(below(2) * below(100000));
        r.beside.cpu_1024ths += static_cast<uint32_t>(below(2) * below(1000));
        const int missing = static_cast<int>(below(20));
        const int c = best_share(r, missing);
        CHECK(c >= 0 && c <= missing);
        for (int other = 0; other <= missing; ++other)
            CHECK(finished(r, missing, c) <= finished(r, missing, other) * (c == missing ? 17 : 16) / 16);
    }
    CHECK(best_share(rates(50000, 0, 0), 8) == 4);  // nothing is known
    CHECK(best_share(rates(51000, 1000, 20000), 1) == 1);
    CHECK(best_share(rates(20000, 1000, 50000), 1) == 0);
}

// A machine whose link and CPU slow one another down, as both read the same memory: after a while steps take no longer
// than if the CPU, or the link, had all of their misses, and than the best division of each but for a little.
void sides_that_slow_one_another_down() {
    for (int i = 0; i < 400; ++i) {
        Rates known = rates(45000 + below(20000), 2000 + below(6000), 15000 + below(30000));
        const int64_t link = known.link_ns * (100 + below(90)) / 100;
        const int64_t record = int64_t{known.cpu.record_ns} * (100 + below(25)) / 100;
        const int most = 1 + static_cast<int>(below(8));
        const auto device = [&](int missing, int c) { return kPassNs + (missing - c) * (c ? link : known.link_ns); };
        const auto cpu = [&](int missing, int c) {
            return kRoundTripNs + known.cpu.base_ns + c * (c < missing ? record : int64_t{known.cpu.record_ns});
        };
        const auto took = [&](int missing, int c) {
            return larger(c < missing ? device(missing, c) : 0, c ? cpu(missing, c) : 0);
        };
        int64_t all = 0, by_cpu = 0, by_link = 0, best = 0;
        for (int64_t tick = 1; tick < 4000; ++tick) {
            const int missing = static_cast<int>(below(most + 1));
            if (missing == 0) continue;
            const int c = share(known, missing, tick);
            if (tick > 1000) {
                int64_t least = took(missing, 0);
                for (int other = 1; other <= missing; ++other) least = std::min(least, took(missing, other));
                all += took(missing, c);
                by_cpu += took(missing, missing);
                by_link += took(missing, 0);
                best += least;
            }
            if (c == 0 || c == missing) continue;
            const int64_t ready = device(missing, c) + below(2000);
            known.beside = next_beside(known, missing - c, ready, c, cpu(missing, c) - kRoundTripNs);
            CHECK(known.beside.link_ns >= known.link_ns && known.beside.cpu_1024ths >= 1024);
        }
        CHECK(all * 100 <= std::min(by_cpu, by_link) * 101);
        CHECK(all * 100 <= best * 105);
    }
}

struct Run {
    int alone = 0, back = 0;
    Course course;
};
Run run(int64_t slots_ns, int64_t cpu_ns, int64_t predicted, int steps, int period = 2048) {
    Run r;
    r.course = begin_course(period < 0 ? -period : period);
    bool all = false;
    for (int i = 0; i < steps; ++i) {
        const int64_t took = (all ? cpu_ns : slots_ns) * (97 + below(7)) / 100;
        all = advance(r.course, took, predicted, period);
        r.alone += all;
        r.back += r.course.phase == kBack;
    }
    return r;
}

void never_slower() {
    // Slots are far quicker: nothing is ever tried.
    CHECK(run(1000, 9000, 9000, 100000).alone == 0);
    CHECK(run(1000, 9000, 0, 100000).alone == 0);
    // A little quicker: comparisons cost little, and are never lost for long.
    const Run close = run(1000, 1100, 1100, 100000);
    CHECK(close.course.step_backs == 0 && close.alone > 0 && close.alone < 1000);
    // Slower: it steps back soon, and stays there but for short trials.
    const Run slower = run(2000, 1000, 1100, 100000);
    CHECK(slower.course.step_backs >= 1 && slower.course.step_backs < 3);
    CHECK(slower.back > 95000);
    // The CPU was quicker for a while.
    Run r = run(2000, 1000, 1100, 10000);
    CHECK(r.course.phase == kBack || r.course.phase == kRetry);
    bool all = true;
    int served = 0;
    for (int i = 0; i < 20000; ++i) {
        all = advance(r.course, all ? 3000 : 1500, 3000, 2048);
        served += !all;
    }
    CHECK(served > 17000);
    // For tests: without a prospect, too.
    CHECK(run(1000, 9000, 0, 10000, -64).alone > 500);
}

// A step that took seconds stays a slow one.
void means() {
    constexpr int64_t kLargest = UINT32_MAX;
    CHECK(mean(0, kLargest + 6, 32) == kLargest);
    CHECK(mean(0, 1000, 32) == 1000);
    CHECK(mean(1000, 2000, 4) == 1250);
    CHECK(mean(1000, 1000000, 4) == 1750);
    for (int i = 0; i < 10000; ++i) {
        const int64_t old = 1 + below(kLargest), sample = 1 + below(int64_t{1} << 40), part = i % 2 ? 4 : 32;
        const int64_t made = mean(static_cast<uint32_t>(old), sample, static_cast<int>(part));
        CHECK(made >= std::min(old, sample) && made <= std::max(old, std::min(sample, kLargest)));
    }
}

}  // namespace

int main() {
    best_of_all();
    sides_that_slow_one_another_down();
    never_slower();
    means();
    std::puts("ok");
}
