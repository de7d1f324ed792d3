#include "pool/residency.h"

#include <algorithm>

namespace moepool {

Residency::Residency(int experts, int slots, moepool_policy policy, int admit)
    : policy_(policy),
      admit_(admit),
      slot_of_(static_cast<size_t>(experts), -1),
      expert_in_(static_cast<size_t>(slots), -1),
      stamp_(static_cast<size_t>(slots), 0) {}

int Residency::resident() const {
    return slots() - static_cast<int>(std::count(expert_in_.begin(), expert_in_.end(), -1));
}

void Residency::place(int expert, int slot) {
    slot_of_[static_cast<size_t>(expert)] = slot;
    expert_in_[static_cast<size_t>(slot)] = expert;
}

void Residency::clear(int slot) {
    const int expert = expert_in(slot);
    if (expert >= 0) slot_of_[static_cast<size_t>(expert)] = -1;
    expert_in_[static_cast<size_t>(slot)] = -1;
    stamp_[static_cast<size_t>(slot)] = 0;
}

Residency::Step Residency::step(const std::vector<int> &wanted, bool prompt, const std::vector<int> &leases) {
    Step step;
    step.tick = ++tick_;
    step.bypass = prompt || static_cast<int>(wanted.size()) > slots();

    std::vector<int> missing;
    std::vector<bool> taken(expert_in_.size(), false);  // no victim: wanted, or pinned
    for (const int expert : wanted) {
        const int slot = slot_of(expert);
        if (slot < 0) {
            missing.push_back(expert);
            continue;
        }
        ++step.hits;
        taken[static_cast<size_t>(slot)] = true;
        if (!step.bypass) stamp_[static_cast<size_t>(slot)] = step.tick;
    }
    step.misses = static_cast<int>(missing.size());
    if (step.bypass || policy_ == MOEPOOL_POLICY_STATIC) return step;
    if (admit_ >= 0 && step.misses > admit_) missing.resize(static_cast<size_t>(admit_));
    if (missing.empty()) return step;

    std::vector<int> victims;
    for (int slot = 0; slot < slots(); ++slot)
        if (!taken[static_cast<size_t>(slot)] && leases[static_cast<size_t>(slot)] == 0) victims.push_back(slot);
    const size_t admitted = std::min(victims.size(), missing.size());
    std::partial_sort(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(admitted), victims.end(),
                      [&](int a, int b) {
                          const auto key = [&](int slot) { return stamp_[static_cast<size_t>(slot)]; };
                          return key(a) != key(b) ? key(a) < key(b) : a < b;
                      });
    for (size_t i = 0; i < admitted; ++i) {
        const int slot = victims[i], evicted = expert_in(slot);
        clear(slot);
        place(missing[i], slot);
        stamp_[static_cast<size_t>(slot)] = step.tick;
        step.admissions.push_back({missing[i], slot, evicted});
    }
    return step;
}

}  // namespace moepool
