// Tests of csrc/pool/division.h. Run by tests/test_doorbell.py.
#include "pool/division.h"
#include "check.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

using namespace moepool;
using namespace moepool::division;

namespace {

uint64_t state = 1;
int64_t below(int64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(bound));
}
Rates rates(int64_t link, int64_t base, int64_t record) {
    return {link, link, {static_cast<uint32_t>(base), static_cast<uint32_t>(record)}, begin_beside(link), false};
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
    // One side behind the other: no division is better than the better side.
    for (int i = 0; i < 2000; ++i) {
        Rates turns = rates(1 + below(200000), below(20000), 1 + below(200000));
        turns.in_turn = true;
        const int missing = 1 + static_cast<int>(below(20)), c = best_share(turns, missing);
        CHECK(c == missing || (c == 0 && finished(turns, missing, 0) < finished(turns, missing, missing)));
    }
    // Nobody is quicker beside another than alone; what a busy moment had taught goes soon, or with the trials.
    Rates r = rates(50000, 8000, 20000);
    r.beside = next_beside(r, 2, kPassNs - 1, 2, 1, false);
    CHECK(r.beside.link_ns == 50000 && r.beside.cpu_1024ths == 1024);
    r.beside = {400000, 8192};
    for (int i = 0; i < 6; ++i) r.beside = next_beside(r, 2, kPassNs + 100000, 2, 48000, false);
    CHECK(r.beside.link_ns < 70000 && r.beside.cpu_1024ths < 1400);
    for (const bool trial : {true, false}) {
        r.beside = {60000, 1300};
        for (int i = 0; i < 6; ++i) r.beside = next_beside(r, 2, kPassNs + 100000, 2, 48000, trial);
        CHECK((r.beside.link_ns < 52000) == trial && (r.beside.cpu_1024ths < 1100) == trial);
        CHECK(r.beside.link_ns < 57500 && r.beside.cpu_1024ths < 1230);
    }
    // Nothing that both sides may be seen to take is an overflow.
    Rates most = rates(UINT32_MAX, 1, 1);
    for (int i = 0; i < 1000; ++i) most.beside = next_beside(most, 1, int64_t{1} << 62, 1, UINT32_MAX, i % 2 > 0);
    CHECK(most.beside.link_ns > UINT32_MAX / 2 && most.beside.cpu_1024ths > kMostSlowed / 2);
    most.cpu = {UINT32_MAX, UINT32_MAX};
    for (int missing = 1; missing <= 512; ++missing) CHECK(best_share(most, missing) >= 0);
}

// A machine whose link and CPU slow one another down, as both read the same memory, and what a pool on it knows.
struct Machine {
    int64_t link, beside_link, base, record, beside_record;
    int busy = 1, link_busy = 1;  // times that both, or the link, take while somebody else is at work
    int noise = 0;                // percent
    Rates known;
    Fit fit{};

    Machine(int most_slowed_link, int most_slowed_cpu)
        : link(45000 + below(20000)),
          beside_link(link * (100 + below(most_slowed_link)) / 100),
          base(2000 + below(6000)),
          record(15000 + below(30000)),
          beside_record(record * (100 + below(most_slowed_cpu)) / 100),
          known(rates(link, 0, 0)) {}
    int64_t device(int missing, int c) const {
        return kPassNs + (missing - c) * (c ? beside_link : link) * busy * link_busy;
    }
    int64_t cpu(int missing, int c) const { return (base + c * (c < missing ? beside_record : record)) * busy; }
    int64_t took(int missing, int c) const {
        return larger(c < missing ? device(missing, c) : 0, c ? kRoundTripNs + cpu(missing, c) : 0);
    }
    int64_t least(int missing) const {
        int64_t least = took(missing, 0);
        for (int c = 1; c <= missing; ++c) least = std::min(least, took(missing, c));
        return least;
    }
    // A step, as a device and the CPU take it: the share. What is told of the link is off by up to a microsecond.
    // Nobody knows what the others' lessons will be in time.
    int step(int missing, int64_t tick) {
        const int c = share(known, missing, tick);
        CHECK(c >= 0 && c <= missing);
        const bool trial = trial_of(tick) != kNoTrial;
        if (c == 0 && missing > 0)
            known.link_ns = next_link(known, missing, device(missing, 0) + below(2001) - 1000, trial);
        if (c == 0) return c;
        const int64_t took = cpu(missing, c) * (noise ? 100 - noise + below(2 * noise + 1) : 100) / 100;
        if (c < missing)
            known.beside = next_beside(known, missing - c, device(missing, c) + below(2001) - 1000, c, took, trial);
        learn(fit, c, static_cast<uint32_t>(took), c < missing, trial);
        known.cpu = fit.pace;
        CHECK(known.beside.link_ns >= known.measured_ns && known.beside.cpu_1024ths >= 1024);
        CHECK(known.link_ns >= known.measured_ns);
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
    // At a trial of it alone it has all; one record if all takes more than four times as long as what is best; and if
    // that one does, too, none but in a few trials.
    int64_t alone = 200, dear = 200;
    while (trial_of(alone) != kAlone) ++alone;
    while (trial_of(dear) != kAloneIfDear) ++dear;
    for (const auto &[record, at_most, at_some] : {std::tuple{130000, 4, 4}, {170000, 1, 1}, {1000000, 0, 1}}) {
        const Rates slow = rates(30000, 8000, record);
        CHECK(best_share(slow, 4) == 0);
        CHECK((finished(slow, 4, 4) <= 4 * finished(slow, 4, 0)) == (at_most == 4));
        CHECK((finished(slow, 4, 1) <= 4 * finished(slow, 4, 0)) == (at_most > 0));
        CHECK(share(slow, 4, alone) == at_most && share(slow, 4, dear) == at_some);
    }
    // Until its pace is known it computes all, alone.
    CHECK(share(rates(50000, 0, 0), 8, 1) == 8 && share(rates(50000, 0, 0), 0, 1) == 0);
}

// A new pool misses all of its experts, dozens a step with several tokens, and soon few. What it learns of the many,
// with a processor that is never as quick twice, is no reason to leave the few to the side that is slower.
void many_misses_become_few() {
    for (int i = 0; i < 400; ++i) {
        Machine machine(40, 25);
        machine.noise = 15;
        const int many = 20 + static_cast<int>(below(80)), few = 1 + static_cast<int>(below(6));
        int64_t all = 0, by_cpu = 0, by_link = 0;
        for (int64_t tick = 1; tick < 3000; ++tick) {
            const int missing = tick < many ? many - static_cast<int>(tick) : static_cast<int>(below(few + 1));
            const int c = machine.step(missing, tick);
            if (missing == 0 || tick <= 500) continue;
            all += machine.took(missing, c);
            by_cpu += machine.took(missing, missing);
            by_link += machine.took(missing, 0);
        }
        CHECK(all * 100 <= std::min(by_cpu, by_link) * 103);
    }
}

// Whatever happened, and whichever of the steps miss: in the end a pool is no slower than the better of its sides.
void nothing_is_learnt_for_ever() {
    enum { kSlowAtFirst, kBusyLink, kLinkWasBusy, kLinkAtHalf };
    for (const int what : {kSlowAtFirst, kBusyLink, kLinkWasBusy, kLinkAtHalf})
        for (int i = 0; i < 300; ++i) {
            Machine machine(40, 25);
            if (what == kLinkWasBusy) machine.record = machine.beside_record = 2 * machine.link;
            if (what == kLinkAtHalf) machine.known.measured_ns = machine.known.link_ns = machine.link / 2;
            const int turns = 1 + i % 5, turn = static_cast<int>(below(turns)), most = 1 + static_cast<int>(below(6));
            int64_t all = 0, by_cpu = 0, by_link = 0;
            for (int64_t tick = 1; tick < 30000; ++tick) {
                if (what == kSlowAtFirst) machine.busy = tick < 300 ? 5 : 1;
                if (what == kBusyLink) machine.link_busy = tick < 3000 ? 1 : 3;
                if (what == kLinkWasBusy) machine.link_busy = tick > 1000 && tick < 5000 ? 4 : 1;
                const int missing = tick % turns == turn ? 1 + static_cast<int>(below(most)) : 0;
                if (missing == 0) continue;
                const int c = machine.step(missing, tick);
                if (tick <= 15000) continue;
                all += machine.took(missing, c);
                by_cpu += machine.took(missing, missing);
                by_link += machine.took(missing, 0);
            }
            CHECK(all * 100 <= std::min(by_cpu, by_link) * 102);
        }
}

// The pace is that of the CPU alone, told by whatever says something of it.
void paces() {
    const auto at = [](const Fit &fit, int n) { return fit.pace.base_ns + n * int64_t{fit.pace.record_ns}; };
    const auto near = [&](const Fit &fit, int n, int64_t ns, int percent) {
        return std::abs(at(fit, n) - ns) * 100 <= ns * percent;
    };
    // The first answers are no measure; a slow one hardly is, and a quick one soon shows.
    Fit fit{};
    for (int i = 0; i < kFirst; ++i) learn(fit, 1, 20000000, false, false);
    CHECK(fit.pace.record_ns == 0);
    for (int i = 0; i < 10; ++i) learn(fit, 1, 30000, false, false);
    CHECK(near(fit, 1, 30000, 1) && near(fit, 4, 102000, 1));  // kUsualBase and 24 us
    learn(fit, 1, 5000000, false, false);
    CHECK(at(fit, 1) < 50000);
    for (int i = 0; i < 200; ++i) learn(fit, 1, 5000000, false, false);
    CHECK(at(fit, 1) > 4000000);
    for (int i = 0; i < 12; ++i) learn(fit, 1, 30000, false, false);
    CHECK(at(fit, 1) < 100000);
    // A line, of which both parts are found.
    fit = {};
    for (int i = 0; i < 100; ++i)
        learn(fit, 1 + i % 7, static_cast<uint32_t>(12000 + (1 + i % 7) * 20000), false, false);
    CHECK(near(fit, 1, 32000, 2) && near(fit, 7, 152000, 2) && fit.pace.base_ns > 10000 && fit.pace.base_ns < 14000);
    // Few answers of many records, which by chance take the same: not as if one took as long.
    fit = {};
    for (int i = 0; i < kFirst + 6; ++i) learn(fit, 25 + i % 6, 700000, false, false);
    CHECK(fit.pace.base_ns <= 16000 && at(fit, 2) < 80000);
    // Nor if many took less than few: both parts stay what they can be.
    fit = {};
    for (int i = 0; i < 100; ++i) learn(fit, i % 2 ? 1 : 2, i % 2 ? 120000 : 110000, false, false);
    CHECK(fit.pace.base_ns > 50000 && fit.pace.base_ns < 62000 && fit.pace.record_ns > 30000);
    // A trial's counts more.
    for (const bool trial : {false, true}) {
        fit = {};
        for (int i = 0; i < 40; ++i) learn(fit, 2, 60000, false, false);
        for (int i = 0; i < 4; ++i) learn(fit, 2, 50000, false, trial);
        CHECK((at(fit, 2) < 54000) == trial && at(fit, 2) < 58000);
    }
    // Beside a busy link the CPU is slower, so that tells nothing, unless it was far quicker than thought.
    fit = {};
    for (int i = 0; i < 20; ++i) learn(fit, 2, 60000, false, false);
    for (int i = 0; i < 100; ++i) learn(fit, 2, 90000, true, false);
    for (int i = 0; i < 100; ++i) learn(fit, 2, 50000, true, false);
    CHECK(near(fit, 2, 60000, 1));
    for (int i = 0; i < 100; ++i) learn(fit, 2, 40000, true, false);
    CHECK(near(fit, 2, 40000, 34));
    // But where nothing else is known.
    fit = {};
    for (int i = 0; i < kFirst + 1; ++i) learn(fit, 2, 90000, true, false);
    CHECK(near(fit, 2, 90000, 1));
    // No answer is too long, and no number of them too large.
    fit = {};
    fit.answers = INT32_MAX - 1;
    for (int i = 0; i < 1000; ++i) {
        learn(fit, i % 2 ? 1 : 512, UINT32_MAX, false, false);
        CHECK(fit.pace.record_ns > 0 && fit.pace.record_ns <= 4000000000u);
    }
    fit = {};
    for (int i = 0; i < 10; ++i) learn(fit, 1, UINT32_MAX, false, false);
    CHECK(fit.pace.record_ns == 4000000000u);
    fit = {};
    for (int i = 0; i < 100; ++i) learn(fit, 512, 0, false, false);
    CHECK(fit.pace.record_ns == 1);

    CHECK(load_of(0, 0) == 0 && load_of(8, 8) == 0 && load_of(9, 8) == 1 && load_of(16, 8) == 1);
    CHECK(load_of(17, 8) == 2 && load_of(32, 8) == 2 && load_of(33, 8) == 3 && load_of(64, 8) == 3);
    CHECK(load_of(65, 8) == 4 && load_of(512, 1) == 4);
}

// Pairs of steps, soon and then at times, in whatever pattern the steps come: the CPU alone, though a division is
// better, and a division as if nobody was slowed down, though the CPU alone is.
void trials() {
    const Rates divide = rates(30000, 8000, 30000);
    Rates together = rates(30000, 8000, 14000);
    together.beside = {200000, 4096};
    CHECK(best_share(divide, 4) < 4 && best_share(together, 4) == 4);
    int early = 0;
    for (int64_t tick = 2; tick < 200; ++tick) early += trial_of(tick) != kNoTrial;
    CHECK(early >= 8 && early <= 12);
    constexpr int64_t kSteps = 400000;
    int64_t times[4] = {};
    for (int64_t tick = 200; tick < kSteps; ++tick) {
        const Trial trial = trial_of(tick);
        ++times[trial];
        CHECK(trial == trial_of(tick ^ 1));
        CHECK(share(divide, 4, tick) == (trial == kAlone || trial == kAloneIfDear ? 4 : best_share(divide, 4)));
        CHECK((share(together, 4, tick) == 4) == (trial != kUnslowed));
    }
    CHECK(times[kUnslowed] > kSteps / 265 && times[kUnslowed] < kSteps / 247);
    CHECK(times[kAlone] + times[kAloneIfDear] > kSteps / 265 && times[kAlone] + times[kAloneIfDear] < kSteps / 247);
    CHECK(times[kAloneIfDear] * 7 > times[kAlone] * 9 / 10 && times[kAloneIfDear] * 7 < times[kAlone] * 11 / 10);
    for (int turns = 2; turns <= 16; ++turns)
        for (int turn = 0; turn < turns; ++turn) {
            int64_t alone = 0, unslowed = 0;
            for (int64_t tick = 200 - 200 % turns + turn; tick < kSteps; tick += turns) {
                alone += trial_of(tick) == kAlone || trial_of(tick) == kAloneIfDear;
                unslowed += trial_of(tick) == kUnslowed;
            }
            const int64_t even = kSteps / (256 * turns);
            CHECK(alone > even * 9 / 10 && unslowed > even * 9 / 10);
        }
}

// What comes in beside what the CPU computes.
void admissions() {
    CHECK(most_admitted(3, true, 1) == 3 && most_admitted(3, false, 1) == 3);
    int trials = 0;
    for (int64_t tick = 0; tick < 800; ++tick) {
        CHECK(most_admitted(0, true, tick) == 1);
        trials += most_admitted(0, false, tick);
    }
    CHECK(trials == 100);
    CHECK(!outweighs(1, 0) && outweighs(2, 0) && !outweighs(101, 80) && outweighs(102, 80));
    CHECK(!outweighs(0, 5) && !outweighs(5, 5));
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
        all = advance(r.course, took, may_compare(r.course) ? predicted : 0, period);
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

// The CPU has to be quicker by more than 2 %, three times in a row.
void step_backs() {
    // What the CPU takes in each comparison, in percent of the slots; the comparison behind which it stepped back, or
    // -1.
    const auto back_behind = [](const std::vector<int> &percents) {
        Course course = begin_course(64);
        bool all = false;
        for (size_t i = 0; i < percents.size();) {
            const Phase before = static_cast<Phase>(course.phase);
            // The first steps of a comparison take long: its threads were asleep.
            const bool settling = before == kCompare && course.left > kWindow - 4;
            all = advance(course, settling ? 100000 : all ? percents[i] * 100 : 10000, 10000, 64);
            CHECK(all == (course.phase == kCompare || course.phase == kBack));
            if (before != kCompare || course.phase == kCompare) continue;
            if (course.phase == kBack) return static_cast<int>(i);
            ++i;
        }
        return -1;
    };
    CHECK(back_behind({97, 97, 97}) == 2);
    CHECK(back_behind({97, 97, 99, 97, 97, 97, 97}) == 5);
    CHECK(back_behind(std::vector<int>(40, 99)) == -1 && back_behind(std::vector<int>(40, 101)) == -1);
    CHECK(back_behind({97, 97}) == -1);
    // How long slots take is learnt anew all the time.
    Course course = begin_course(64);
    for (int i = 0; i < 63; ++i) advance(course, 10000, 0, 64);
    for (int i = 0; i < 640; ++i) advance(course, 20000, 0, 64);
    CHECK(course.slots_ns > 19000 && course.slots_ns <= 20000);
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
    many_misses_become_few();
    nothing_is_learnt_for_ever();
    paces();
    trials();
    admissions();
    never_slower();
    step_backs();
    means();
    std::puts("ok");
}
