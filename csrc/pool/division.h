// How the misses of a step are divided between the device and the CPU, and whether slots pay at all: the arithmetic of
// miss = auto. Integers only; the device calls it while it keeps the books of a step. Whatever it decides, results have
// the same bits.
#pragma once

#include <cstdint>

#include "pool/doorbell.h"

namespace moepool {
namespace division {

constexpr int64_t kRoundTripNs = 8000;  // of a request and its answer, besides what the CPU is at work
constexpr int64_t kPassNs = 15000;      // of records that are read over the link, besides what the link is at work
constexpr int kRelearn = 256;           // steps from one that tries anew what was learnt to the next
constexpr int kDear = 8, kRarely = 16;  // the CPU alone, if it takes so many times as long, only every so many times
constexpr int kMostSlowed = 1 << 20;    // of Beside::cpu_1024ths: products stay in 64 bits
constexpr int kTrial = 8;               // every so many steps a record may come in though the CPU computes all

// What both sides take longer beside one another, as they read the same memory. It is learnt from divided steps.
struct Beside {
    uint32_t link_ns;      // a record over the link
    uint32_t cpu_1024ths;  // of the CPU's pace
};
// What a record takes, over the link and by the CPU.
struct Rates {
    int64_t link_ns;
    doorbell::Pace cpu;  // record_ns 0: not known yet
    Beside beside;
};
MOEPOOL_HD inline Beside begin_beside(int64_t link_ns) { return {static_cast<uint32_t>(link_ns), 1024}; }

MOEPOOL_HD inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
MOEPOOL_HD inline int64_t beside_link(const Rates &r, int64_t cpu_ns) { return cpu_ns * r.beside.cpu_1024ths / 1024; }
MOEPOOL_HD inline int64_t finished(const Rates &r, int missing, int hosted) {
    if (hosted == 0) return missing ? kPassNs + missing * r.link_ns : 0;
    const int64_t cpu = r.cpu.base_ns + hosted * int64_t{r.cpu.record_ns};
    if (hosted == missing) return kRoundTripNs + cpu;
    return larger(kPassNs + (missing - hosted) * int64_t{r.beside.link_ns}, kRoundTripNs + beside_link(r, cpu));
}

// How many of so many missing records the CPU computes, at these rates. Both sides begin together and the step waits
// for the later one, so one of the two numbers beside the point where they meet is best. All, if that takes little
// longer.
MOEPOOL_HD inline int best_share(const Rates &r, int missing) {
    const int64_t link = r.beside.link_ns, before = kRoundTripNs + beside_link(r, r.cpu.base_ns);
    const int64_t meet =
        missing == 1 ? 0 : (missing * link + kPassNs - before) / (link + beside_link(r, r.cpu.record_ns));
    int best = 0;
    const auto better = [&](int64_t c) {
        if (c > 0 && c <= missing && finished(r, missing, static_cast<int>(c)) < finished(r, missing, best))
            best = static_cast<int>(c);
    };
    for (int64_t c = larger(meet, 1); c <= meet + 1 || c == 1; ++c) better(c);
    return finished(r, missing, missing) <= finished(r, missing, best) * 17 / 16 ? missing : best;
}

// The share in the step of a tick. All, until the CPU's pace is known, which is learnt where it is alone. Now and then
// what was learnt is tried anew, for it may be of a moment in which somebody else was at work: by turns a division as
// if the sides did not slow one another down, and the CPU alone, which is left out mostly where that takes far longer.
MOEPOOL_HD inline int share(Rates r, int missing, int64_t tick) {
    if (missing <= 0 || r.cpu.record_ns == 0) return missing;
    const int best = best_share(r, missing);
    if (tick % kRelearn) return best;
    const int64_t turn = tick / kRelearn;
    if (turn % 2) {
        r.beside = begin_beside(r.link_ns);
        return best_share(r, missing);
    }
    const bool dear = finished(r, missing, missing) > kDear * finished(r, missing, best);
    return dear && turn % kRarely ? best : missing;
}

// A mean of which the newest sample is one part.
MOEPOOL_HD inline uint32_t mean(uint32_t old, int64_t sample, int part) {
    if (sample > int64_t{UINT32_MAX}) sample = UINT32_MAX;  // so no mean is larger either
    if (old == 0) return static_cast<uint32_t>(sample);
    if (sample > 4 * int64_t{old}) sample = 4 * int64_t{old};  // somebody else had the device for a moment
    return static_cast<uint32_t>(old + (sample - int64_t{old}) / part);
}

// The lesson of a divided step: that the device was ready at one time, and the CPU so long at work. What is far quicker
// is believed soon.
MOEPOOL_HD inline Beside next_beside(const Rates &r, int streamed, int64_t ready, int hosted, int64_t cpu_ns) {
    const auto learnt = [](uint32_t old, int64_t sample) {
        return mean(old, sample, sample < int64_t{old} * 3 / 4 ? 2 : 16);
    };
    Beside next = r.beside;
    next.link_ns = learnt(next.link_ns, larger((ready - kPassNs) / streamed, r.link_ns));
    if (r.cpu.record_ns == 0) return next;
    const int64_t slowed = cpu_ns * 1024 / (r.cpu.base_ns + hosted * int64_t{r.cpu.record_ns});
    next.cpu_1024ths = learnt(next.cpu_1024ths, slowed < 1024 ? 1024 : slowed > kMostSlowed ? kMostSlowed : slowed);
    return next;
}

// Whether one that was wanted so often is worth a copy over one wanted so often.
MOEPOOL_HD inline bool worth_a_copy(int64_t count, int64_t victim) { return count > victim + victim / 4 + 1; }

// How many records a step may bring in besides what the policy and `admit` say. One that crosses the link anyway costs
// nothing more; one that the CPU computes is copied beside, which is worth it now and then, or into an empty slot.
MOEPOOL_HD inline int most_admitted(int streamed, bool empty, int64_t tick) {
    return streamed > 0 ? streamed : empty || tick % kTrial == 0;
}

// ------------------------------------------------------------------------------------------------------- never slower

enum Phase : int32_t {
    kSlots = 0,    // served through slots, as asked for
    kCompare = 1,  // for some steps the CPU computes everything
    kBack = 2,     // slots have lost for long: the CPU computes everything
    kRetry = 3     // for some steps through slots again
};
constexpr int kWindow = 12;     // steps of a comparison,
constexpr int kSettling = 4;    // of which the first do not count
constexpr int kMostLosses = 3;  // in a row; then it is for long

// Times are nanoseconds of a step for each expert that it wants, times 16.
struct Course {
    int32_t phase, left, losses;
    uint32_t slots_ns, cpu_ns, step_backs;
};
MOEPOOL_HD inline Course begin_course(int period) { return {kSlots, period, 0, 0, 0, 0}; }

// After a step that took so long; predicted: what the CPU alone would have taken, 0 if not known. True: the CPU
// computes everything in the next step. Comparing costs something, so it is left where the CPU has no prospect, unless
// period is negative (for tests).
MOEPOOL_HD inline bool advance(Course &c, int64_t took, int64_t predicted, int period) {
    const bool always = period < 0;
    if (always) period = -period;
    --c.left;
    const bool settled = c.left < kWindow - kSettling;
    if (c.phase == kSlots) c.slots_ns = mean(c.slots_ns, took, 32);
    if (c.phase == kBack) c.cpu_ns = mean(c.cpu_ns, took, 32);
    if (c.phase == kCompare && settled) c.cpu_ns = mean(c.cpu_ns, took, 4);
    if (c.phase == kRetry && settled) c.slots_ns = mean(c.slots_ns, took, 4);
    if (c.left > 0) return c.phase == kCompare || c.phase == kBack;
    const bool lost = int64_t{c.cpu_ns} * 50 < int64_t{c.slots_ns} * 49;
    switch (c.phase) {
        case kSlots:
            if (always || (predicted > 0 && predicted * 4 < int64_t{c.slots_ns} * 5)) {
                c.phase = kCompare;
                c.left = kWindow;
                c.cpu_ns = 0;
            } else {
                c.left = period;
            }
            break;
        case kCompare:
            c.losses = lost ? c.losses + 1 : 0;
            c.phase = c.losses < kMostLosses ? kSlots : kBack;
            c.left = c.phase == kBack || !lost ? period : period / 16 + 1;
            if (c.phase == kBack) {
                ++c.step_backs;
                c.losses = 0;
            }
            break;
        case kBack:
            c.phase = kRetry;
            c.left = kWindow;
            c.slots_ns = 0;
            break;
        default:
            c.phase = lost ? kBack : kSlots;
            c.left = period;
    }
    return c.phase == kCompare || c.phase == kBack;
}

}  // namespace division
}  // namespace moepool
