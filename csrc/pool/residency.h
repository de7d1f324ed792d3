// clang-format off: it folds the list below.
// The residency law: which expert is in which slot, and what one step changes. Integers only, no clocks: whoever
// follows it counts the same hits. This is its definition, for the pools of every device and for the simulator, with
// the arithmetic of the policies in policy.h. cuda/resolve_block.h takes the same step on the device, where the host
// can not be asked; tests replay traces through both.
//
// * One resolve that wants at least one expert is one step; its tick is the number of steps so far, from 1.
// * A step bypasses if it is a prompt step or wants more distinct experts than there are slots: nothing is admitted,
//   evicted, stamped or counted, residents are used where they are.
// * Otherwise, in this order:
//   - reelect: if an election is due, the experts with the most votes, as many as there are slots, are elected.
//   - Every wanted expert, resident or not, takes the tick, and counts a use.
//   - slru: hits become protected. While more than the segment takes are, the one used longest ago (ties by slot) is so
//     no more, and takes the tick.
//   - The missing experts, by falling claim, then rising id, and at most `admit` of them, meet the victims, by rising
//     worth, then rising slot, empty slots first; the i-th of these the i-th of those. Each that may replace its victim
//     is admitted; an empty slot takes any. A wanted expert is never a victim, nor is one that a lease pins, nor one
//     that the policy keeps, nor an empty slot of a pinned expert: if that leaves too few victims, the rest of the
//     missing are not admitted.
// * Static admits nobody: its residents are set when the pool is made.
// * A caller may choose a step's admissions, the rest of the step being the same.
// * A prefetch is no step: it takes no tick and counts nothing. The experts that it names take the tick of the last
//   step; those that are missing, in the order in which they are named, take the victims in theirs, whatever admit,
//   guard or an election say. Static admits nobody then either.
// * A change of the number of slots keeps the residents that would be the last to go; static keeps its first slots. A
//   slot that is leased or pinned stays; the elected go last. Of those kept the ones in slots that go move to the free
//   ones, both in rising slot. Into slots that are added static and pinned take the hot experts that had none.
// clang-format on
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "moepool.h"
#include "pool/policy.h"

namespace moepool {

class Residency {
  public:
    struct Admission {
        int expert, slot;
        int evicted;  // the expert that was in the slot, or -1
    };
    struct Choice {
        int expert, slot;
    };
    struct Step {
        int64_t tick = 0;
        bool bypass = false;
        int hits = 0, misses = 0;
        std::vector<Admission> admissions;  // in the order of the law
    };

    // All that a step depends on.
    struct Snapshot {
        int64_t tick;
        uint32_t election;
        std::vector<int32_t> slot_of, expert_in;
        std::vector<Use> uses;
    };

    // admit: of policy::most_admissions.
    Residency(int experts, int slots, const PolicyConfig &policy, int admit);

    int experts() const { return static_cast<int>(slot_of_.size()); }
    int slots() const { return static_cast<int>(expert_in_.size()); }
    int slot_of(int expert) const { return slot_of_[static_cast<size_t>(expert)]; }
    int expert_in(int slot) const { return expert_in_[static_cast<size_t>(slot)]; }
    int resident() const;
    int64_t tick() const { return tick_; }
    const PolicyConfig &policy() const { return policy_; }

    // Puts an expert into a slot outside of any step.
    void place(int expert, int slot);
    // Takes back an admission whose record could not be copied: the slot is empty.
    void clear(int slot);

    // wanted: `count` of them, at least one, distinct, rising. leases: how often each slot is pinned; NULL: none is.
    // chosen: whom this step admits, and where, instead of the policy; NULL: the policy. What it gives holds until the
    // next step.
    const Step &step(const int *wanted, int count, bool prompt, const int *leases = nullptr,
                     const std::vector<Choice> *chosen = nullptr);
    const Step &step(const std::vector<int> &wanted, bool prompt, const std::vector<int> &leases) {
        return step(wanted.data(), static_cast<int>(wanted.size()), prompt, leases.data());
    }

    // experts: distinct.
    const std::vector<Admission> &prefetch(const std::vector<int> &experts, const std::vector<int> &leases);

    // Experts that moved: their new slot holds nothing of theirs yet. No leased slot goes, nor one that holds a pinned
    // expert. If memory runs out, nothing has changed but for experts that are not resident any more.
    std::vector<Admission> resize(int slots, const std::vector<int> &leases);

    Snapshot snapshot() const { return {tick_, election_, slot_of_, expert_in_, uses_}; }
    void restore(const Snapshot &snapshot);

  private:
    Use &use(int expert) { return uses_[static_cast<size_t>(expert)]; }
    template <moepool_policy kKind>
    void take(const int *wanted, int count, const int *leases, const std::vector<Choice> *chosen);
    template <moepool_policy kKind>
    void admit(const int *leases, uint32_t epoch);
    uint32_t epoch() const { return policy::counts(policy_) ? policy::epoch_of(policy_, tick_) : 0; }
    void weigh(const PolicyConfig &p, const int *leases, uint32_t epoch);
    void admit_to(int expert, int slot);
    void elect(uint32_t epoch);
    void protect_fewer(int most);
    int find_victims(int most);

    const PolicyConfig policy_;
    const int admit_;
    int64_t tick_ = 0;
    int protected_ = 0;               // slru: experts in that segment
    uint32_t election_ = 0;           // reelect: epoch of the last one; 0: there was none
    std::vector<int32_t> slot_of_;    // by expert, -1: not resident
    std::vector<int32_t> expert_in_;  // by slot, -1: empty
    std::vector<Use> uses_;           // by expert

    // Of the step under way; kept, so that a step allocates nothing.
    Step step_;
    std::vector<int> missing_;
    std::vector<uint8_t> taken_;  // by slot: wanted
    std::vector<int64_t> worth_;  // by slot
    std::vector<std::pair<int64_t, int>> order_;
};

}  // namespace moepool
