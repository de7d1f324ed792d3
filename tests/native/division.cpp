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
    return {link, {static_cast<uint32_t>(base), static_cast<uint32_t>(record)}};
}

// No other share ends sooner, but for all.
void best_of_all() {
    for (int i = 0; i < 20000; ++i) {
        const Rates r = rates(1 + below(200000), below(i % 2 ? 100000 : 2000), 1 + below(200000));
        const int missing = static_cast<int>(below(20));
        const int c = best_share(r, missing);
        CHECK(c >= 0 && c <= missing);
        for (int other = 0; other <= missing; ++other)
            CHECK(finished(r, missing, c) <= finished(r, missing, other) * (c == missing ? 9 : 8) / 8);
    }
    CHECK(best_share(rates(50000, 0, 0), 8) == 4);  // nothing is known
    CHECK(best_share(rates(51000, 1000, 20000), 1) == 1);
    CHECK(best_share(rates(20000, 1000, 50000), 1) == 0);
}

// On a machine whose true rates are others than the ones that are known, shares settle within one record of the best,
// and stay.
void corrections_settle() {
    for (int i = 0; i < 400; ++i) {
        const Rates known = rates(30000 + below(40000), below(10000), 10000 + below(40000));
        const Rates truth = rates(known.link_ns * (80 + below(45)) / 100, known.cpu.base_ns,
                                  known.cpu.record_ns * (80 + below(45)) / 100);
        int bias = 0, lowest = kMostBias, highest = -kMostBias;
        for (int step = 0; step < 400; ++step) {
            const int missing = 6 + static_cast<int>(below(3)), c = share(known, missing, bias);
            if (c == 0 || c == missing) continue;
            const int64_t ready = kPassNs + (missing - c) * truth.link_ns + below(2000);
            const int64_t there = kRoundTripNs + truth.cpu.base_ns + c * int64_t{truth.cpu.record_ns} + below(2000);
            const int next = next_bias(known, bias, ready, there);
            CHECK(next >= -kMostBias && next <= kMostBias && std::abs(next - bias) <= 1);
            bias = next;
            if (step >= 200) {
                lowest = std::min(lowest, bias);
                highest = std::max(highest, bias);
                const int64_t best = finished(truth, missing, best_share(truth, missing));
                CHECK(finished(truth, missing, c) <= best + truth.link_ns + truth.cpu.record_ns);
            }
        }
        CHECK(highest - lowest <= 4);  // within one record
    }
    // A bias never makes one side alone of two.
    CHECK(share(rates(50000, 0, 50000), 4, -kMostBias) >= 1);
    CHECK(share(rates(50000, 0, 50000), 4, kMostBias) <= 3);
    CHECK(share(rates(10, 100000, 50000), 4, kMostBias) == 0);
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
    corrections_settle();
    never_slower();
    means();
    std::puts("ok");
}
