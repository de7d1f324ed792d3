#include "pool/state.h"

#include <cstring>

#include "error.h"

namespace moepool {

namespace {

constexpr char kMagic[8] = {'m', 'o', 'e', 'p', 'o', 'o', 'l', 's'};
constexpr int32_t kVersion = 1;
constexpr int64_t kUseBytes = 16;

// All numbers are little-endian, as on every machine that this runs on.
struct Head {
    char magic[8];
    int32_t version, experts, slots;
    int32_t policy, guard, half_life, weight, period, protected_percent, pinned;
    uint64_t record;  // a hash of what an expert's record holds
    int64_t tick;
    uint32_t election, unused;
    uint64_t check;  // a hash of what follows and of the fields above
};
static_assert(sizeof(Head) == 80, "no padding");

const char *name_of(int32_t policy) {
    switch (policy) {
        case MOEPOOL_POLICY_LRU:
            return "lru";
        case MOEPOOL_POLICY_STATIC:
            return "static";
        case MOEPOOL_POLICY_LFU:
            return "lfu";
        case MOEPOOL_POLICY_LFRU:
            return "lfru";
        case MOEPOOL_POLICY_SLRU:
            return "slru";
        case MOEPOOL_POLICY_REELECT:
            return "reelect";
        case MOEPOOL_POLICY_PINNED:
            return "pinned";
        default:
            return "of a newer build";
    }
}

// FNV-1a.
uint64_t hash(const void *data, size_t size, uint64_t from = 0xcbf29ce484222325u) {
    const auto *bytes = static_cast<const uint8_t *>(data);
    for (size_t i = 0; i < size; ++i) from = (from ^ bytes[i]) * 0x100000001b3u;
    return from;
}

uint64_t record_of(const Layer &layer) {
    uint64_t made = hash(nullptr, 0);
    for (const Matrix &m : layer.matrices()) {
        const int64_t facts[] = {m.type().id, m.rows, m.columns, m.bias, m.scale};
        made = hash(facts, sizeof facts, made);
    }
    return made;
}

uint64_t check_of(const Head &head, const uint8_t *rest, size_t size) {
    return hash(rest, size, hash(&head, offsetof(Head, check)));
}

Head head_of(const PolicyConfig &policy, const Layer &layer, int slots) {
    Head head = {};
    std::memcpy(head.magic, kMagic, sizeof kMagic);
    head.version = kVersion;
    head.experts = layer.experts();
    head.slots = slots;
    head.policy = policy.kind;
    head.guard = policy.guard;
    head.half_life = policy.half_life;
    head.weight = policy.weight;
    head.period = policy.period;
    head.protected_percent = policy.protected_percent;
    head.pinned = policy.pinned;
    head.record = record_of(layer);
    return head;
}

}  // namespace

std::vector<uint8_t> write_state(const Residency::Snapshot &state, const PolicyConfig &policy, const Layer &layer) {
    Head head = head_of(policy, layer, static_cast<int>(state.expert_in.size()));
    head.tick = state.tick;
    head.election = state.election;
    std::vector<uint8_t> made(sizeof head + 4 * state.expert_in.size() + kUseBytes * state.uses.size());
    uint8_t *at = made.data() + sizeof head;
    const auto put = [&](const void *value, size_t size) {
        if (size) std::memcpy(at, value, size);
        at += size;
    };
    put(state.expert_in.data(), 4 * state.expert_in.size());
    for (const Use &use : state.uses) {
        const uint32_t epoch = use.epoch | use.marked << 31;
        put(&use.last, 8);
        put(&use.count, 4);
        put(&epoch, 4);
    }
    head.check = check_of(head, made.data() + sizeof head, made.size() - sizeof head);
    std::memcpy(made.data(), &head, sizeof head);
    return made;
}

Residency::Snapshot read_state(const uint8_t *data, int64_t size, int slots, const PolicyConfig &policy,
                               const Layer &layer) {
    const Head own = head_of(policy, layer, slots);
    Head head = {};
    if (size < static_cast<int64_t>(sizeof head) || std::memcmp(data, kMagic, sizeof kMagic) != 0)
        fail(MOEPOOL_ERROR_ARGUMENT, "%lld bytes that are not the state of a pool", static_cast<long long>(size));
    std::memcpy(&head, data, sizeof head);
    if (head.version != kVersion)
        fail(MOEPOOL_ERROR_ARGUMENT, "a state of version %d: this build reads version %d", head.version, kVersion);
    const auto same = [](int32_t saved, int32_t here, const char *what) {
        if (saved != here)
            fail(MOEPOOL_ERROR_ARGUMENT, "the state is of a pool with %s %d, this one has %d", what, saved, here);
    };
    same(head.experts, own.experts, "experts:");
    same(head.slots, own.slots, "slots:");
    if (head.policy != own.policy)
        fail(MOEPOOL_ERROR_ARGUMENT, "the state is of a pool with policy %s, this one has %s", name_of(head.policy),
             name_of(own.policy));
    same(head.guard, own.guard, "guard");
    same(head.half_life, own.half_life, "half_life");
    same(head.weight, own.weight, "weight");
    same(head.period, own.period, "period");
    same(head.protected_percent, own.protected_percent, "protected_percent");
    same(head.pinned, own.pinned, "pinned experts:");
    if (head.record != own.record)
        fail(MOEPOOL_ERROR_ARGUMENT, "the state is of a layer with other matrices: types, rows or columns differ");
    const auto experts = static_cast<size_t>(own.experts), count = static_cast<size_t>(slots);
    const uint8_t *at = data + sizeof head;
    const size_t rest = 4 * count + kUseBytes * experts;
    if (size != static_cast<int64_t>(sizeof head + rest) || head.check != check_of(head, at, rest))
        fail(MOEPOOL_ERROR_IO, "the state is damaged: %s",
             size == static_cast<int64_t>(sizeof head + rest) ? "its check sum is wrong"
                                                              : "it is cut, or has more bytes than it should");
    // No more than half of the ticks that policies reckon with, so that as many are left.
    if (head.tick < 0 || head.tick > int64_t{1} << (policy::kTickBits - 1) || head.unused != 0)
        fail(MOEPOOL_ERROR_IO, "the state is damaged: its step count is %lld", static_cast<long long>(head.tick));
    Residency::Snapshot state = {};
    state.tick = head.tick;
    state.election = head.election;
    state.slot_of.assign(experts, -1);
    state.expert_in.resize(count);
    state.uses.resize(experts);
    if (count) std::memcpy(state.expert_in.data(), at, 4 * count);
    at += 4 * count;
    for (size_t slot = 0; slot < count; ++slot) {
        const int32_t expert = state.expert_in[slot];
        if (expert < -1 || expert >= own.experts || (expert >= 0 && state.slot_of[static_cast<size_t>(expert)] >= 0))
            fail(MOEPOOL_ERROR_IO, "the state is damaged: expert %d in slot %d", expert, static_cast<int>(slot));
        if (expert >= 0) state.slot_of[static_cast<size_t>(expert)] = static_cast<int32_t>(slot);
    }
    for (size_t expert = 0; expert < experts; ++expert) {
        Use &use = state.uses[expert];
        uint32_t epoch = 0;
        std::memcpy(&use.last, at, 8);
        std::memcpy(&use.count, at + 8, 4);
        std::memcpy(&epoch, at + 12, 4);
        at += kUseBytes;
        use.epoch = epoch & 0x7fffffffu;
        use.marked = epoch >> 31;
        if (use.last < 0 || use.last > state.tick || use.count < 0 || use.count >= policy::kMostCount)
            fail(MOEPOOL_ERROR_IO, "the state is damaged: a use at step %lld of %lld", static_cast<long long>(use.last),
                 static_cast<long long>(state.tick));
        const bool may_be_marked =
            policy.kind == MOEPOOL_POLICY_SLRU ? state.slot_of[expert] >= 0 : policy.kind == MOEPOOL_POLICY_REELECT;
        if (use.marked && !may_be_marked)
            fail(MOEPOOL_ERROR_IO, "the state is damaged: expert %d is protected and not resident",
                 static_cast<int>(expert));
    }
    return state;
}

}  // namespace moepool
