// How the misses of a step are divided between the device and the CPU, and whether slots pay at all: the arithmetic of
// miss = auto. The device calls it while it keeps the books of a step. Whatever it decides, results have the same bits.
#pragma once

#include <cstdint>

#include "both.h"

namespace moepool {
namespace division {

constexpr int64_t kRoundTripNs = 8000;  // of a request and its answer, besides what the CPU is at work
constexpr int64_t kPassNs = 15000;      // of records that are read over the link, besides what the link is at work
constexpr int kRelearn = 256;           // steps from a trial of what was learnt to the next, on average
constexpr int kTrialSteps = 2;          // of a trial: not every step misses as many experts as it takes
constexpr int kDear = 4, kRarely = 8;   // the CPU alone, if it takes so many times as long; of its trials every so many
constexpr int kMostSlowed = 1 << 20;    // of Beside::cpu_1024ths: products stay in 64 bits
constexpr int kTrial = 8;               // every so many steps a record may come in though the CPU computes all

// What some records take the CPU: base_ns + n * record_ns. record_ns 0: not known yet.
struct Pace {
    uint32_t base_ns, record_ns;
};
// What both sides take longer beside one another, as they read the same memory. It is learnt from divided steps.
struct Beside {
    uint32_t link_ns;      // a record over the link
    uint32_t cpu_1024ths;  // of the CPU's pace
};
// What a record takes, over the link and by the CPU.
struct Rates {
    int64_t measured_ns;  // over the link, by copies when the pool was made: it is never quicker
    int64_t link_ns;      // as the steps in which the CPU had nothing to do took of late
    Pace cpu;
    Beside beside;
    bool in_turn;  // the CPU begins when the link is done: a node of the graph asks it
};
MOEPOOL_BOTH inline Beside begin_beside(int64_t link_ns) { return {static_cast<uint32_t>(link_ns), 1024}; }

MOEPOOL_BOTH inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
MOEPOOL_BOTH inline int64_t beside_link(const Rates &r, int64_t cpu_ns) { return cpu_ns * r.beside.cpu_1024ths / 1024; }
MOEPOOL_BOTH inline int64_t finished(const Rates &r, int missing, int hosted) {
    // Alone the link is no slower than beside the CPU.
    const int64_t link = r.link_ns < r.beside.link_ns ? r.link_ns : r.beside.link_ns;
    if (hosted == 0) return missing ? kPassNs + missing * link : 0;
    const int64_t cpu = r.cpu.base_ns + hosted * int64_t{r.cpu.record_ns};
    if (hosted == missing) return kRoundTripNs + cpu;
    if (r.in_turn) return kPassNs + (missing - hosted) * link + kRoundTripNs + cpu;
    return larger(kPassNs + (missing - hosted) * int64_t{r.beside.link_ns}, kRoundTripNs + beside_link(r, cpu));
}

// How many of so many missing records the CPU computes, at these rates. Both sides begin together and the step waits
// for the later one, so one of the two numbers beside the point where they meet is best. All, if that takes little
// longer.
MOEPOOL_BOTH inline int best_share(const Rates &r, int missing) {
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

// Whether the step of a tick tries anew what was learnt, for it may be of a moment in which somebody else was at work:
// by leaving all to the CPU, if that is not dear or in some of these trials even then, or by a division as if nothing
// slowed the link or the CPU down. A new pool knows little, so it tries more often. The others are spread evenly, by
// multiples of the golden ratio, and over whichever of the steps, so that none escape them, as of sequences that take
// turns.
enum Trial { kNoTrial, kAlone, kAloneIfDear, kUnslowed };
MOEPOOL_BOTH inline Trial trial_of(int64_t tick) {
    const int64_t number = tick / kTrialSteps;
    if (number == 8 || number == 32) return kAloneIfDear;
    if (number == 16 || number == 64) return kUnslowed;
    constexpr uint32_t kShare = UINT32_MAX / (kRelearn / kTrialSteps);
    const uint32_t place = static_cast<uint32_t>(number) * 2654435769u;
    if (place >= kShare) return kNoTrial;
    return place >= kShare / 2 ? kUnslowed : place >= kShare / (2 * kRarely) ? kAlone : kAloneIfDear;
}

// The share in the step of a tick. All, until the CPU's pace is known, which is learnt where it is alone. If that is
// dear, a single record tells enough of it.
MOEPOOL_BOTH inline int share(Rates r, int missing, int64_t tick) {
    if (missing <= 0 || r.cpu.record_ns == 0) return missing;
    const int best = best_share(r, missing);
    const Trial trial = trial_of(tick);
    if (trial == kNoTrial) return best;
    if (trial == kUnslowed) {
        r.beside = begin_beside(r.measured_ns);
        return best_share(r, missing);
    }
    const int64_t most = kDear * finished(r, missing, best);
    if (finished(r, missing, missing) <= most) return missing;
    return trial == kAloneIfDear || finished(r, missing, 1) <= most ? 1 : best;
}

// A mean of which the newest sample is one part.
MOEPOOL_BOTH inline uint32_t mean(uint32_t old, int64_t sample, int part) {
    if (sample > int64_t{UINT32_MAX}) sample = UINT32_MAX;  // so no mean is larger either
    if (old == 0) return static_cast<uint32_t>(sample);
    if (sample > 4 * int64_t{old}) sample = 4 * int64_t{old};  // somebody else had the device for a moment
    return static_cast<uint32_t>(old + (sample - int64_t{old}) / part);
}

// Steps whose work on the CPU is alike: by how many places share a record that they want, 1, 2, 3-4, 5-8, more.
constexpr int kLoads = 5;
MOEPOOL_BOTH inline int load_of(int places, int wanted) {
    const int each = wanted > 0 ? (places + wanted - 1) / wanted : 1;
    return each <= 1 ? 0 : each <= 2 ? 1 : each <= 4 ? 2 : each <= 8 ? 3 : 4;
}

// The CPU's pace: a line through what its answers took, the newest counting most.
struct Fit {
    Pace pace;
    int32_t answers;                  // up to kSettled
    float n, took, spread, together;  // means, the variance of n, the covariance of both
};
constexpr int kFirst = 3;    // answers that are no measure: threads start, memory is touched
constexpr int kNewest = 16;  // of which the newest is one part; one of a trial, maybe the only one in a long while,
constexpr int kNewestOfTrial = 4;
constexpr int kSettled = 64;                            // enough to be counted as many
constexpr float kUsualBase = 6000, kBaseVaries = 8000;  // of a pace: from machine to machine
constexpr float kAnswersVary = 0.1f;                    // from one answer to the next
constexpr float kMost = 4e9f;

// Such as is far quicker than it was thought to be, which is believed soon.
MOEPOOL_BOTH inline bool far_quicker(float sample, float thought) { return sample < thought * 0.75f; }

// An answer's lesson. link_busy: records crossed the link meanwhile, so it took longer than the CPU alone, and counts
// only if it did not.
MOEPOOL_BOTH inline void learn(Fit &fit, int records, uint32_t took_ns, bool link_busy, bool trial) {
    const bool known = fit.pace.record_ns > 0;
    const float n = static_cast<float>(records), sample = static_cast<float>(took_ns);
    const float thought =
        known ? static_cast<float>(fit.pace.base_ns) + n * static_cast<float>(fit.pace.record_ns) : sample;
    if (known && link_busy && !far_quicker(sample, thought)) return;
    if (fit.answers < kSettled) ++fit.answers;
    if (fit.answers <= kFirst) return;
    // A moment in which somebody else had the processor is no measure.
    const float t = sample < 4 * thought ? sample : 4 * thought;
    const int newest = far_quicker(t, thought) ? 2 : trial ? kNewestOfTrial : kNewest, counted = fit.answers - kFirst;
    const float part = 1.0f / static_cast<float>(counted < newest ? counted : newest);
    const float off_n = n - fit.n, off_t = t - fit.took;
    fit.n += off_n * part;
    fit.took += off_t * part;
    fit.spread = (1 - part) * (fit.spread + part * off_n * off_n);
    fit.together = (1 - part) * (fit.together + part * off_n * off_t);
    // The line goes through the mean, and its base is believed as far as the answers can tell it: those of dozens of
    // records, or always of as many, say next to nothing of none.
    const float half = fit.took / 2, usual = half < kUsualBase ? half : kUsualBase;
    const float off = kAnswersVary * fit.took * fit.n;
    const float told = 2 * kNewest * fit.spread * kBaseVaries * kBaseVaries, believed = told / (told + off * off + 1);
    const float drawn = fit.spread > 0 ? fit.took - fit.together / fit.spread * fit.n : usual;
    const float line = usual + believed * (drawn - usual), base = line < 0 ? 0 : line > half ? half : line;
    const float record = (fit.took - base) / fit.n;
    fit.pace = {static_cast<uint32_t>(base), record < 1       ? 1
                                             : record < kMost ? static_cast<uint32_t>(record)
                                                              : static_cast<uint32_t>(kMost)};
}

// The lesson of what was learnt so far and another sample.
MOEPOOL_BOTH inline uint32_t next_mean(int64_t old, int64_t sample, bool trial) {
    return mean(static_cast<uint32_t>(old), sample, sample < old * 3 / 4 ? 2 : trial ? kNewestOfTrial : kNewest);
}
// Of a step whose misses all crossed the link, that it took so long.
MOEPOOL_BOTH inline uint32_t next_link(const Rates &r, int streamed, int64_t took, bool trial) {
    return next_mean(r.link_ns, larger((took - kPassNs) / streamed, r.measured_ns), trial);
}
// Of a divided step, that the device was ready at one time, and the CPU so long at work. Its pace is known.
MOEPOOL_BOTH inline Beside next_beside(const Rates &r, int streamed, int64_t ready, int hosted, int64_t cpu_ns,
                                       bool trial) {
    const int64_t slowed = cpu_ns * 1024 / (r.cpu.base_ns + hosted * int64_t{r.cpu.record_ns});
    return {next_mean(r.beside.link_ns, larger((ready - kPassNs) / streamed, r.measured_ns), trial),
            next_mean(r.beside.cpu_1024ths,
                      slowed < 1024          ? 1024
                      : slowed > kMostSlowed ? kMostSlowed
                                             : slowed,
                      trial)};
}

// Whether one that was wanted so often may take the place of one that was wanted so often. Nearly as often is not
// enough: such would take turns, each come in when it was just wanted, and the slots would hold what is past.
MOEPOOL_BOTH inline bool outweighs(int64_t count, int64_t victim) { return count > victim + victim / 4 + 1; }

// How many records a step may bring in besides what the policy and `admit` say. One that crosses the link anyway costs
// nothing more; one that the CPU computes is copied beside, which is worth it now and then, or into an empty slot.
MOEPOOL_BOTH inline int most_admitted(int streamed, bool empty, int64_t tick) {
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
MOEPOOL_BOTH inline Course begin_course(int period) { return {kSlots, period, 0, 0, 0, 0}; }

// Whether a comparison may begin with the next step: only then what is predicted matters.
MOEPOOL_BOTH inline bool may_compare(const Course &c) { return c.phase == kSlots && c.left <= 1; }

// After a step that took so long; predicted: what the CPU alone would have taken, 0 if not known. True: the CPU
// computes everything in the next step. Comparing costs something, so it is left where the CPU has no prospect, unless
// period is negative (for tests).
MOEPOOL_BOTH inline bool advance(Course &c, int64_t took, int64_t predicted, int period) {
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
