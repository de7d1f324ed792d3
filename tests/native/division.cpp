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

// No other share ends sooner, but for all, and all ends little later or is not chosen.
void best_of_all() {
    for (int i = 0; i < 20000; ++i) {
        Rates r = rates(1 + below(200000), below(i % 2 ? 100000 : 2000), 1 + below(200000));
        r.beside.link_ns += static_cast<uint32_t>(below(2) * below(100000));
        r.beside.cpu_1024ths += static_cast<uint32_t>(below(2) * below(1000));
        const int missing = 1 + static_cast<int>(below(20));
        const int c = best_share(r, missing);
        CHECK(c >= 0 && c <= missing);
        int64_t least = finished(r, missing, 0);
        for (int other = 0; other <= missing; ++other) least = std::min(least, finished(r, missing, other));
        CHECK(finished(r, missing, c) <= (c == missing ? least * 17 / 16 : least));
        CHECK(c == missing || finished(r, missing, missing) > least * 17 / 16);
    }
    CHECK(best_share(rates(51000, 1000, 20000), 1) == 1);
    CHECK(best_share(rates(20000, 1000, 50000), 1) == 0);
    // Nothing that both sides may be seen to take is an overflow.
    Rates most = rates(UINT32_MAX, 0, 1);
    for (int i = 0; i < 1000; ++i) most.beside = next_beside(most, 1, int64_t{1} << 62, 1, UINT32_MAX);
    CHECK(most.beside.link_ns > UINT32_MAX / 2 && most.beside.cpu_1024ths > kMostSlowed / 2);
    most.cpu = {UINT32_MAX, UINT32_MAX};
    for (int missing = 1; missing <= 512; ++missing) CHECK(best_share(most, missing) >= 0);
}

// A machine whose link and CPU slow one another down, as both read the same memory, and what a pool on it knows.
struct Machine {
    int64_t link, beside_link, base, record, beside_record;
    int busy = 1;  // times that both take while somebody else is at work
    Rates known;
    doorbell::Fit fit;

    Machine(int most_slowed_link, int most_slowed_cpu)
        : link(45000 + below(20000)),
          beside_link(link * (100 + below(most_slowed_link)) / 100),
          base(2000 + below(6000)),
          record(15000 + below(30000)),
          beside_record(record * (100 + below(most_slowed_cpu)) / 100),
          known(rates(link, 0, 0)) {}
    int64_t device(int missing, int c) const { return kPassNs + (missing - c) * (c ? beside_link : link) * busy; }
    int64_t cpu(int missing, int c) const { return (base + c * (c < missing ? beside_record : record)) * busy; }
    int64_t took(int missing, int c) const {
        return larger(c < missing ? device(missing, c) : 0, c ? kRoundTripNs + cpu(missing, c) : 0);
    }
    int64_t least(int missing) const {
        int64_t least = took(missing, 0);
        for (int c = 1; c <= missing; ++c) least = std::min(least, took(missing, c));
        return least;
    }
    // A step, as a device and the CPU take it: the share. Nobody knows what the others' lessons will be in time.
    int step(int missing, int64_t tick) {
        const int c = share(known, missing, tick);
        CHECK(c >= 0 && c <= missing);
        if (c == 0) return c;
        known.cpu = fit.pace;
        if (c == missing)
            fit.add(c, static_cast<double>(cpu(missing, c)));
        else
            known.beside = next_beside(known, missing - c, device(missing, c) + below(2000), c, cpu(missing, c));
        CHECK(known.beside.link_ns >= known.link_ns && known.beside.cpu_1024ths >= 1024);
        return c;
    }
};

// After a while steps take no longer than if the CPU, or the link, had all of their misses, and than the best division
// of each but for a little, whether their misses are always as many or not.
void sides_that_slow_one_another_down() {
    for (int i = 0; i < 800; ++i) {
        Machine machine(90, i % 4 < 2 ? 25 : 60);
        const int most = 1 + static_cast<int>(below(8));
        int64_t all = 0, by_cpu = 0, by_link = 0, best = 0;
        for (int64_t tick = 1; tick < 6000; ++tick) {
            const int missing = i % 2 ? most : static_cast<int>(below(most + 1));
            if (missing == 0) continue;
            const int c = machine.step(missing, tick);
            if (tick <= 1000) continue;
            all += machine.took(missing, c);
            by_cpu += machine.took(missing, missing);
            by_link += machine.took(missing, 0);
            best += machine.least(missing);
        }
        CHECK(all * 100 <= std::min(by_cpu, by_link) * 101);
        CHECK(all * 100 <= best * 107);  // a sixteenth, and what the fit is off
    }
}

// Somebody else is at work for a while, and then no more: what was learnt of that is not believed for ever.
void busy_moments_pass() {
    for (int i = 0; i < 200; ++i) {
        Machine machine(90, 25);
        const int most = 2 + static_cast<int>(below(7));
        int64_t all = 0, best = 0;
        for (int64_t tick = 1; tick < 9000; ++tick) {
            machine.busy = tick >= 2000 && tick < 2300 ? 8 : 1;
            const int missing = 1 + static_cast<int>(below(most));
            const int c = machine.step(missing, tick);
            if (tick < 6000) continue;
            all += machine.took(missing, c);
            best += machine.least(missing);
        }
        CHECK(all * 100 <= best * 112);  // what is off by less than a third is found out slowly
    }
}

// Where the CPU is slower by far it is asked so rarely that it costs little, and is found out if it is quick again.
void a_slow_cpu() {
    for (const int64_t record : {1000000, 5000000}) {
        Machine machine(1, 1);
        machine.record = machine.beside_record = record;
        int64_t all = 0, by_link = 0;
        for (int64_t tick = 1; tick < 100000; ++tick) {
            const int c = machine.step(8, tick);
            if (tick <= 1000) continue;
            all += machine.took(8, c);
            by_link += machine.took(8, 0);
        }
        CHECK(all * 100 <= by_link * 103);  // 5 ms a record: 40 of 1,730, by kRelearn * kRarely steps of the link
        machine.record = machine.beside_record = 20000;
        int asked = 0;
        for (int64_t tick = 100000; tick < 200000; ++tick) asked += machine.step(8, tick) > 0;
        CHECK(asked > 20000);
    }
    // Until its pace is known it computes all, alone.
    CHECK(share(rates(50000, 0, 0), 8, 1) == 8 && share(rates(50000, 0, 0), 0, 1) == 0);
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
    busy_moments_pass();
    a_slow_cpu();
    never_slower();
    means();
    std::puts("ok");
}
