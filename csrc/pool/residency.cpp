#include "pool/residency.h"

#include <algorithm>

namespace moepool {

namespace {

constexpr int kFewVictims = 16;  // up to here they are found in one pass over the slots

}  // namespace

Residency::Residency(int experts, int slots, const PolicyConfig &policy, int admit)
    : policy_(policy),
      admit_(admit),
      slot_of_(static_cast<size_t>(experts), -1),
      expert_in_(static_cast<size_t>(slots), -1),
      uses_(static_cast<size_t>(experts), Use{}),
      taken_(static_cast<size_t>(slots), 0),
      worth_(static_cast<size_t>(slots), 0) {}

int Residency::resident() const {
    return slots() - static_cast<int>(std::count(expert_in_.begin(), expert_in_.end(), -1));
}

void Residency::place(int expert, int slot) {
    slot_of_[static_cast<size_t>(expert)] = slot;
    expert_in_[static_cast<size_t>(slot)] = expert;
}

void Residency::clear(int slot) {
    const int expert = expert_in(slot);
    if (expert >= 0) {
        slot_of_[static_cast<size_t>(expert)] = -1;
        if (policy_.kind == MOEPOOL_POLICY_SLRU) {
            protected_ -= use(expert).marked;
            use(expert).marked = 0;
        }
    }
    expert_in_[static_cast<size_t>(slot)] = -1;
}

void Residency::restore(const Snapshot &snapshot) {
    tick_ = snapshot.tick;
    election_ = snapshot.election;
    slot_of_ = snapshot.slot_of;
    expert_in_ = snapshot.expert_in;
    uses_ = snapshot.uses;
    protected_ = 0;
    if (policy_.kind == MOEPOOL_POLICY_SLRU)
        for (const Use &used : uses_) protected_ += used.marked;
}

const Residency::Step &Residency::step(const int *wanted, int count, bool prompt, const int *leases,
                                       const std::vector<Choice> *chosen) {
    step_.tick = ++tick_;
    step_.bypass = prompt || count > slots();
    step_.hits = 0;
    step_.admissions.clear();
    step_.admissions.reserve(expert_in_.size());  // no failure half way
    missing_.clear();
    for (int i = 0; i < count; ++i) {
        if (slot_of(wanted[i]) >= 0)
            ++step_.hits;
        else
            missing_.push_back(wanted[i]);
    }
    step_.misses = static_cast<int>(missing_.size());
    if (step_.bypass) return step_;
    switch (policy_.kind) {
        case MOEPOOL_POLICY_STATIC:
            take<MOEPOOL_POLICY_STATIC>(wanted, count, leases, chosen);
            break;
        case MOEPOOL_POLICY_LFU:
            take<MOEPOOL_POLICY_LFU>(wanted, count, leases, chosen);
            break;
        case MOEPOOL_POLICY_LFRU:
            take<MOEPOOL_POLICY_LFRU>(wanted, count, leases, chosen);
            break;
        case MOEPOOL_POLICY_SLRU:
            take<MOEPOOL_POLICY_SLRU>(wanted, count, leases, chosen);
            break;
        case MOEPOOL_POLICY_REELECT:
            take<MOEPOOL_POLICY_REELECT>(wanted, count, leases, chosen);
            break;
        case MOEPOOL_POLICY_PINNED:
            take<MOEPOOL_POLICY_PINNED>(wanted, count, leases, chosen);
            break;
        default:
            take<MOEPOOL_POLICY_LRU>(wanted, count, leases, chosen);
    }
    return step_;
}

// The step of one kind of policy, known at compile time: simulations take millions.
template <moepool_policy kKind>
void Residency::take(const int *wanted, int count, const int *leases, const std::vector<Choice> *chosen) {
    PolicyConfig p = policy_;
    p.kind = kKind;
    uint32_t epoch = 0;
    if (policy::counts(p)) epoch = policy::epoch_of(p, tick_);
    if (kKind == MOEPOOL_POLICY_REELECT && epoch != election_) elect(epoch);
    for (int i = 0; i < count; ++i) {
        Use &used = use(wanted[i]);
        if (policy::counts(p)) policy::count_use(p, used, epoch);
        used.last = tick_;
        if (kKind == MOEPOOL_POLICY_SLRU && slot_of(wanted[i]) >= 0) {
            protected_ += !used.marked;
            used.marked = 1;
        }
    }
    if (kKind == MOEPOOL_POLICY_SLRU) protect_fewer(policy::most_protected(p, slots()));
    if (chosen) {
        for (const Choice &choice : *chosen) admit_to(choice.expert, choice.slot);
        return;
    }
    if (kKind == MOEPOOL_POLICY_STATIC || missing_.empty() || admit_ == 0) return;

    for (int i = 0; i < count; ++i)
        if (const int slot = slot_of(wanted[i]); slot >= 0) taken_[static_cast<size_t>(slot)] = 1;
    admit<kKind>(leases, epoch);
    for (int i = 0; i < count; ++i)
        if (const int slot = slot_of(wanted[i]); slot >= 0) taken_[static_cast<size_t>(slot)] = 0;
}

// What every slot is worth as a victim.
__attribute__((always_inline)) inline void Residency::weigh(const PolicyConfig &p, const int *leases, uint32_t epoch) {
    const int count = slots();
    for (int slot = 0; slot < count; ++slot) {
        const auto s = static_cast<size_t>(slot);
        const int expert = expert_in_[s];
        int64_t worth = policy::keeps(p, slot) ? policy::kNever : policy::kEmpty;
        if (expert >= 0) {
            worth = policy::worth(p, use(expert), epoch);
            if (taken_[s] || !policy::may_go(p, use(expert), slot)) worth = policy::kNever;
        }
        if (leases && leases[s]) worth = policy::kNever;
        worth_[s] = worth;
    }
}

template <moepool_policy kKind>
void Residency::admit(const int *leases, uint32_t epoch) {
    PolicyConfig p = policy_;
    p.kind = kKind;
    if (policy::ranks_misses(p) && missing_.size() > 1)
        std::stable_sort(missing_.begin(), missing_.end(), [&](int a, int b) {
            return policy::claim(p, use(a), epoch) > policy::claim(p, use(b), epoch);
        });
    weigh(p, leases, epoch);
    const int found = find_victims(policy::most_admissions(admit_, step_.misses, slots(), experts()));
    for (int i = 0; i < found; ++i) {
        const int expert = missing_[static_cast<size_t>(i)], slot = order_[static_cast<size_t>(i)].second;
        const int evicted = expert_in(slot);
        if (evicted < 0 || policy::may_replace(p, use(expert), use(evicted), epoch, election_ != 0))
            admit_to(expert, slot);
    }
}

void Residency::admit_to(int expert, int slot) {
    const int evicted = expert_in(slot);
    clear(slot);
    place(expert, slot);
    step_.admissions.push_back({expert, slot, evicted});
}

const std::vector<Residency::Admission> &Residency::prefetch(const std::vector<int> &experts,
                                                             const std::vector<int> &leases) {
    step_ = {};
    step_.admissions.reserve(expert_in_.size());
    if (policy_.kind == MOEPOOL_POLICY_STATIC) return step_.admissions;
    missing_.clear();
    for (const int expert : experts) {
        use(expert).last = tick_;
        if (const int slot = slot_of(expert); slot >= 0)
            taken_[static_cast<size_t>(slot)] = 1;
        else
            missing_.push_back(expert);
    }
    weigh(policy_, leases.data(), epoch());
    const int found = find_victims(static_cast<int>(missing_.size()));
    for (int i = 0; i < found; ++i) admit_to(missing_[static_cast<size_t>(i)], order_[static_cast<size_t>(i)].second);
    std::fill(taken_.begin(), taken_.end(), uint8_t{0});
    return step_.admissions;
}

std::vector<Residency::Admission> Residency::resize(int slots, const std::vector<int> &leases) {
    const auto count = static_cast<size_t>(slots);
    std::vector<Admission> moves;
    if (count < expert_in_.size()) {
        std::vector<std::pair<int64_t, int>> residents;
        for (int slot = 0; slot < this->slots(); ++slot) {
            const int expert = expert_in(slot);
            if (expert < 0) continue;
            const bool stays = leases[static_cast<size_t>(slot)] > 0 || policy::keeps(policy_, slot);
            int64_t worth = policy::worth(policy_, use(expert), epoch());
            if (policy_.kind == MOEPOOL_POLICY_STATIC) worth = -slot;
            residents.emplace_back(-(stays ? policy::kNever : worth), -slot);  // the last to go first
        }
        std::sort(residents.begin(), residents.end());
        size_t stay = count;
        for (int slot = 0; slot < slots; ++slot) stay -= policy::keeps(policy_, slot) && expert_in(slot) < 0;
        std::vector<int> moving;
        moving.reserve(residents.size());
        moves.reserve(residents.size());
        for (size_t i = 0; i < residents.size(); ++i) {
            const int slot = -residents[i].second;
            if (i < stay && slot < slots) continue;
            if (i < stay) moving.push_back(slot);
            if (i >= stay) clear(slot);
        }
        std::sort(moving.begin(), moving.end());
        int next = 0;
        for (const int from : moving) {
            while (expert_in(next) >= 0 || policy::keeps(policy_, next)) ++next;
            const int expert = expert_in(from);
            expert_in_[static_cast<size_t>(from)] = -1;
            place(expert, next);
            moves.push_back({expert, next, -1});
        }
    }
    taken_.resize(count, 0);
    worth_.resize(count, 0);
    expert_in_.resize(count, -1);
    return moves;
}

// The first `most` victims in rising (worth, slot), or as many as there are, to order_.
int Residency::find_victims(int most) {
    order_.clear();
    if (most == 0) return 0;
    const int count = slots();
    if (most > kFewVictims) {
        for (int slot = 0; slot < count; ++slot)
            if (const int64_t worth = worth_[static_cast<size_t>(slot)]; worth != policy::kNever)
                order_.emplace_back(worth, slot);
        const auto found = std::min(order_.size(), static_cast<size_t>(most));
        std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(found), order_.end());
        return static_cast<int>(found);
    }
    order_.resize(static_cast<size_t>(most));
    int found = 0;
    int64_t last = policy::kNever;  // of those found; the next one must be worth less, once there are enough
    for (int slot = 0; slot < count; ++slot) {
        const int64_t worth = worth_[static_cast<size_t>(slot)];
        if (worth >= last) continue;
        int at = found < most ? found++ : most - 1;
        for (; at > 0 && order_[static_cast<size_t>(at - 1)].first > worth; --at)
            order_[static_cast<size_t>(at)] = order_[static_cast<size_t>(at - 1)];
        order_[static_cast<size_t>(at)] = {worth, slot};
        if (found == most) last = order_[static_cast<size_t>(most - 1)].first;
    }
    return found;
}

void Residency::elect(uint32_t epoch) {
    order_.clear();
    for (int expert = 0; expert < experts(); ++expert) {
        if (const int64_t votes = policy::votes(policy_, use(expert), election_)) order_.emplace_back(-votes, expert);
        use(expert).marked = 0;
    }
    const auto elected = std::min(order_.size(), expert_in_.size());
    std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(elected), order_.end());
    for (size_t i = 0; i < elected; ++i) use(order_[i].second).marked = 1;
    election_ = epoch;
}

void Residency::protect_fewer(int most) {
    if (protected_ <= most) return;
    order_.clear();
    for (int slot = 0; slot < slots(); ++slot)
        if (const int expert = expert_in(slot); expert >= 0 && use(expert).marked)
            order_.emplace_back(use(expert).last, slot);
    const int excess = protected_ - most;
    std::partial_sort(order_.begin(), order_.begin() + excess, order_.end());
    for (int i = 0; i < excess; ++i) {
        Use &used = use(expert_in(order_[static_cast<size_t>(i)].second));
        used.marked = 0;
        used.last = tick_;
    }
    protected_ = most;
}

}  // namespace moepool
