// The residency law: which expert is in which slot, and what one step changes. Integers only, no clocks: whoever
// follows it counts the same hits. This is its definition, for the pools of every device and for whoever simulates
// them. cuda/resolve_block.h takes the same step on the device, where the host can not be asked; tests replay traces
// through both.
//
// * One resolve that wants at least one expert is one step; its tick is the number of steps so far, from 1.
// * A step bypasses if it is a prompt step or wants more distinct experts than there are slots: nothing is admitted,
//   evicted or stamped, residents are used where they are.
// * Otherwise hits take the tick. The missing experts, in rising id and at most `admit` of them, take the victims in
//   rising (stamp, slot), empty slots first. A wanted expert is never a victim, nor is one that a lease pins: if that
//   leaves too few victims, the rest of the missing are not admitted.
// * LRU stamps with the tick. Static admits nobody: its residents are set when the pool is made.
#pragma once

#include <cstdint>
#include <vector>

#include "moepool.h"

namespace moepool {

class Residency {
  public:
    struct Admission {
        int expert, slot;
        int evicted;  // the expert that was in the slot, or -1
    };
    struct Step {
        int64_t tick = 0;
        bool bypass = false;
        int hits = 0, misses = 0;
        std::vector<Admission> admissions;  // in rising expert
    };

    // All that a step depends on.
    struct Snapshot {
        int64_t tick;
        std::vector<int32_t> slot_of, expert_in;
        std::vector<int64_t> stamp;
    };

    // admit: the most experts admitted a step; -1: no limit.
    Residency(int experts, int slots, moepool_policy policy, int admit);

    int experts() const { return static_cast<int>(slot_of_.size()); }
    int slots() const { return static_cast<int>(expert_in_.size()); }
    int slot_of(int expert) const { return slot_of_[static_cast<size_t>(expert)]; }
    int expert_in(int slot) const { return expert_in_[static_cast<size_t>(slot)]; }
    int resident() const;

    // Puts an expert into a slot outside of any step.
    void place(int expert, int slot);
    // Takes back an admission whose record could not be copied: the slot is empty.
    void clear(int slot);

    // wanted: distinct, rising, not empty. leases: how often each slot is pinned.
    Step step(const std::vector<int> &wanted, bool prompt, const std::vector<int> &leases);

    Snapshot snapshot() const { return {tick_, slot_of_, expert_in_, stamp_}; }
    void restore(const Snapshot &snapshot) {
        tick_ = snapshot.tick;
        slot_of_ = snapshot.slot_of;
        expert_in_ = snapshot.expert_in;
        stamp_ = snapshot.stamp;
    }

  private:
    moepool_policy policy_;
    int admit_;
    int64_t tick_ = 0;
    std::vector<int> slot_of_;    // by expert, -1: not resident
    std::vector<int> expert_in_;  // by slot, -1: empty
    std::vector<int64_t> stamp_;  // by slot; 0: empty
};

}  // namespace moepool
