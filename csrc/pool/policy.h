// The arithmetic of the policies: what a use of an expert leaves behind, who is worth keeping, and who may come in.
// Integers only, no clocks. The host (residency.cpp), the device (cuda/resolve_block.h) and the simulator call these
// functions and no others, so that they agree to the last eviction. residency.h says what a step does with them.
#pragma once

#include <cstdint>

#include "both.h"
#include "moepool.h"

namespace moepool {

struct PolicyConfig {
    moepool_policy kind = MOEPOOL_POLICY_LRU;
    bool guard = false;          // a miss comes in only if it was wanted more often than the victim
    int half_life = 256;         // steps after which counts are halved
    int weight = 16;             // lfru: steps that one use is worth
    int period = 256;            // reelect: steps from one election to the next
    int protected_percent = 75;  // slru: the most slots that the protected segment takes
    int pinned = 0;              // pinned: so many of the first slots are never victims
};

// What is known of an expert, resident or not. A device reads it in one load.
struct alignas(16) Use {
    int64_t last;         // tick of the last step that wanted it and did not bypass
    int32_t count;        // how often it was wanted, as of `epoch`
    uint32_t epoch : 31;  // epoch_of(that tick)
    uint32_t marked : 1;  // slru: in the protected segment; reelect: elected
};

namespace policy {

constexpr int64_t kEmpty = -1;           // of an empty slot: it goes first
constexpr int64_t kNever = INT64_MAX;    // of a slot that is no victim
constexpr int32_t kMostCount = 1 << 20;  // counts stay below it, so that count and tick fit one integer
constexpr int kTickBits = 43;

// Whether uses are counted.
MOEPOOL_BOTH inline bool counts(const PolicyConfig &p) {
    return p.guard || p.kind == MOEPOOL_POLICY_LFU || p.kind == MOEPOOL_POLICY_LFRU || p.kind == MOEPOOL_POLICY_REELECT;
}
// The most admissions of a step, of so many misses. admit: as many; kNoLimit; or one, until all experts have a slot.
constexpr int kNoLimit = -1, kOneUnlessAll = -2;
MOEPOOL_BOTH inline int most_admissions(int admit, int misses, int slots, int experts) {
    const int most = admit == kOneUnlessAll && slots < experts ? 1 : admit;
    return most < 0 || most > misses ? misses : most;
}
// Whether the missing experts of a step have claims of their own. Where they do not, they come in in rising id.
MOEPOOL_BOTH inline bool ranks_misses(const PolicyConfig &p) { return counts(p); }
// Counts that are halved, or begin anew, all do so when the epoch changes.
MOEPOOL_BOTH inline uint32_t epoch_of(const PolicyConfig &p, int64_t tick) {
    const int steps = p.kind == MOEPOOL_POLICY_REELECT ? p.period : p.half_life;
    return static_cast<uint32_t>(tick / steps) & 0x7fffffffu;
}
// The count as of an epoch.
MOEPOOL_BOTH inline int32_t count_at(const PolicyConfig &p, const Use &use, uint32_t epoch) {
    const uint32_t passed = (epoch - use.epoch) & 0x7fffffffu;
    if (p.kind == MOEPOOL_POLICY_REELECT) return passed ? 0 : use.count;
    return passed < 31 ? use.count >> passed : 0;
}
MOEPOOL_BOTH inline void count_use(const PolicyConfig &p, Use &use, uint32_t epoch) {
    const int32_t count = count_at(p, use, epoch);
    use.count = count < kMostCount - 1 ? count + 1 : count;
    use.epoch = epoch;
}

// What a resident is worth: the least goes first, ties go by slot.
MOEPOOL_BOTH inline int64_t worth(const PolicyConfig &p, const Use &use, uint32_t epoch) {
    switch (p.kind) {
        case MOEPOOL_POLICY_LFU:
            return (int64_t{count_at(p, use, epoch)} << kTickBits) + use.last;
        case MOEPOOL_POLICY_LFRU:
            return use.last + int64_t{p.weight} * count_at(p, use, epoch);
        case MOEPOOL_POLICY_SLRU:
        case MOEPOOL_POLICY_REELECT:
            return (int64_t{use.marked} << 62) + use.last;
        default:
            return use.last;
    }
}

// The claim of a missing expert that was just wanted: the greatest comes in first, ties go by id.
MOEPOOL_BOTH inline int64_t claim(const PolicyConfig &p, const Use &use, uint32_t epoch) {
    return p.kind == MOEPOOL_POLICY_REELECT ? int64_t{use.marked} : int64_t{count_at(p, use, epoch)};
}

// Whether a slot is kept for a pinned expert, also while a copy that failed leaves it empty.
MOEPOOL_BOTH inline bool keeps(const PolicyConfig &p, int slot) {
    return p.kind == MOEPOOL_POLICY_PINNED && slot < p.pinned;
}
// Whether an expert may be evicted at all.
MOEPOOL_BOTH inline bool may_go(const PolicyConfig &p, const Use &use, int slot) {
    return !keeps(p, slot) && !(p.kind == MOEPOOL_POLICY_REELECT && use.marked);
}
// Whether a missing expert may take the place of another.
MOEPOOL_BOTH inline bool may_replace(const PolicyConfig &p, const Use &missing, const Use &victim, uint32_t epoch,
                                     bool elected) {
    if (p.kind == MOEPOOL_POLICY_REELECT && elected && !missing.marked) return false;
    return !p.guard || count_at(p, missing, epoch) > count_at(p, victim, epoch);
}
// The votes of an expert at an election: the more, the better, then the lower id. 0: it does not stand.
MOEPOOL_BOTH inline int64_t votes(const PolicyConfig &p, const Use &use, uint32_t epoch) {
    const int32_t count = count_at(p, use, epoch);
    return count ? (int64_t{count} << kTickBits) + use.last : 0;
}
MOEPOOL_BOTH inline int most_protected(const PolicyConfig &p, int slots) {
    return static_cast<int>(int64_t{slots} * p.protected_percent / 100);
}

}  // namespace policy
}  // namespace moepool
