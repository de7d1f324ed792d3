// The step that a device takes (cuda/resolve_block.h) against the one that the host takes (pool/residency.cpp), on the
// host, through random traces: maps, uses, counts, tables and the trace's words after every step.
#include "cuda/resolve_block.h"

#include <cstring>
#include <random>
#include <set>
#include <string>
#include <tuple>

using namespace moepool;
using namespace moepool::cuda;

namespace {

std::mt19937 random_numbers;

int below(int bound) { return static_cast<int>(random_numbers() % static_cast<unsigned>(bound)); }

[[noreturn]] void wrong(const std::string &what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}
void check(bool good, const std::string &what) {
    if (!good) wrong(what);
}

template <class T>
std::string bytes_of(const std::vector<T> &all) {
    return std::string(reinterpret_cast<const char *>(all.data()), all.size() * sizeof(T));
}

// What a pool has on the device.
struct Device {
    static constexpr int64_t kRecord = 256;
    static constexpr uint64_t kTraceWords = 1 << 11;

    DeviceState state = {};
    std::vector<int32_t> slot_of, expert_in, leases, ids, order;
    std::vector<Use> uses;
    std::vector<uint8_t> arena, store, shared;
    std::vector<const uint8_t *> records;
    std::vector<DecodeTile> tiles;
    std::vector<Commit> commits;
    std::vector<uint32_t> ring;
    int32_t tile_count = 0, commit_count = 0;
    uint32_t resolved = 0, finished = 0, number = 0;
    DeviceSteps::BadId bad = {0, -1, 1};
    BellState bell = {};
    Step step = {};
    ResolveArguments arguments = {};

    Device(int experts, int room, int slots, const PolicyConfig &policy, int admit)
        : slot_of(experts, -1),
          expert_in(room, -1),
          leases(room, 0),
          ids(kMostDecodePlaces),
          order(kMostDecodePlaces * kMostDecodeTokens),
          uses(experts),
          arena(room * kRecord),
          store(experts * kRecord),
          shared(static_cast<size_t>(resolve_shared_bytes(experts, room)) + 16),
          tiles(kMostDecodePlaces),
          commits(kMostDecodePlaces),
          ring(kTraceWords) {
        std::memset(static_cast<void *>(tiles.data()), 0xA5, tiles.size() * sizeof(DecodeTile));
        for (int e = 0; e < experts; ++e) records.push_back(store.data() + e * kRecord);
        state.slots = slots;
        state.trace = ring.data();
        state.trace_words = kTraceWords;
        step.residents = {experts, slot_of.data(), records.data(), arena.data(), kRecord, 0};
        step.tables = {};
        step.tables.ids = ids.data();
        step.tables.order = order.data();
        step.tables.tiles = tiles.data();
        step.tables.tile_count = &tile_count;
        step.tables.commits = commits.data();
        step.tables.commit_count = &commit_count;
        step.tables.resolved = &resolved;
        step.tables.finished = &finished;
        arguments = {};
        arguments.slots = room;
        arguments.policy = policy;
        arguments.admit = admit;
        arguments.state = &state;
        arguments.expert_in = expert_in.data();
        arguments.uses = uses.data();
        arguments.leases = leases.data();
        arguments.bad_id = &bad;
    }

    void take(const std::vector<int64_t> &wide, int tokens, int k, bool single, bool narrow, int warps) {
        std::vector<int32_t> half(wide.begin(), wide.end());
        step.ids = narrow ? static_cast<const void *>(half.data()) : wide.data();
        step.bits = narrow ? 32 : 64;
        step.tokens = tokens;
        step.k = k;
        step.single = single;
        std::fill(shared.begin(), shared.end(), 0xa5);  // shared memory holds anything
        auto *memory = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(shared.data()) + 15) / 16 * 16);
        const auto tables = [&] { return std::tuple(ids, order, bytes_of(tiles), tile_count); };
        auto published = tables();
        on_publish = [&](const void *at) {
            if (at == &resolved) published = tables();
        };
        resolved = number++;
        block::run(32, static_cast<unsigned>(warps), [&] {
            prepare_books(step, arguments, memory);
            if (step.bell.state)
                single ? resolve_block<true, true>(step, arguments, memory, number)
                       : resolve_block<true, false>(step, arguments, memory, number);
            else
                single ? resolve_block<false, true>(step, arguments, memory, number)
                       : resolve_block<false, false>(step, arguments, memory, number);
        });
        check(resolved == number - !single, "the tables were not published, or for nobody");
        if (single) {
            check(published == tables(), "the tables were published before they were whole");
            for (int i = 0; i < commit_count; ++i) {
                if (commits[i].evicted >= 0) slot_of[commits[i].evicted] = -1;
                slot_of[commits[i].expert] = commits[i].slot;
            }
        }
    }
};

PolicyConfig draw_policy() {
    PolicyConfig policy;
    policy.kind = below(7);
    policy.guard = policy.kind != MOEPOOL_POLICY_STATIC && policy.kind != MOEPOOL_POLICY_REELECT && below(3) == 0;
    policy.half_life = 1 + below(60);
    policy.weight = below(30);
    policy.period = 1 + below(40);
    policy.protected_percent = below(101);
    return policy;
}

// How a step with miss = auto has to go: whom the CPU computes of the missing, and whom it brings in, as the law of
// division says it.
struct Divided {
    std::set<int> hosted;
    std::vector<Residency::Choice> chosen;
};
Divided divide(const Residency &law, int admit, const std::vector<int> &wanted, const std::vector<int> &leases,
               int hosted_misses) {
    const PolicyConfig &p = law.policy();
    const Residency::Snapshot before = law.snapshot();
    std::vector<int> missing;
    for (const int e : wanted)
        if (before.slot_of[e] < 0) missing.push_back(e);
    const int misses = static_cast<int>(missing.size());
    bool empty = false;
    for (int s = 0; s < law.slots(); ++s) empty |= before.expert_in[s] < 0 && !leases[s] && !policy::keeps(p, s);
    const int most = std::min(policy::most_admissions(admit, misses, law.slots(), law.experts()),
                              division::most_admitted(misses - hosted_misses, empty, before.tick));
    Residency probe(law.experts(), law.slots(), p, most);
    probe.restore(before);
    const Residency::Step &step = probe.step(wanted, false, leases);
    const std::vector<Use> uses = probe.snapshot().uses;
    const uint32_t epoch = policy::counts(p) ? policy::epoch_of(p, before.tick + 1) : 0;
    Divided d;
    for (const auto &a : step.admissions) {
        const bool outweighs = p.guard || (policy::counts(p) && hosted_misses == misses);
        if (!outweighs || a.evicted < 0 ||
            division::outweighs(policy::count_at(p, uses[a.expert], epoch),
                                policy::count_at(p, uses[a.evicted], epoch)))
            d.chosen.push_back({a.expert, a.slot});
    }
    // The CPU has the last of the order in which they come in.
    if (policy::ranks_misses(p) && !step.bypass && p.kind != MOEPOOL_POLICY_STATIC)
        std::stable_sort(missing.begin(), missing.end(), [&](int a, int b) {
            return policy::claim(p, uses[a], epoch) > policy::claim(p, uses[b], epoch);
        });
    d.hosted.insert(missing.end() - hosted_misses, missing.end());
    return d;
}

struct Totals {
    int64_t steps = 0, admissions = 0, evictions = 0, bypasses = 0, bad = 0, leased = 0, refused = 0, lost = 0;
    int64_t hosted = 0, divided = 0, copied = 0;
};

void follow(int seed, Totals &totals) {
    random_numbers.seed(static_cast<unsigned>(seed));
    PolicyConfig policy = draw_policy();
    const int experts = 1 + below(seed % 5 ? 40 : 200), room = 1 + below(experts), slots = 1 + below(room);
    const int admit = below(3) == 0 ? below(4) : below(2) ? policy::kNoLimit : policy::kOneUnlessAll;
    const int hot = policy.kind == MOEPOOL_POLICY_STATIC   ? slots
                    : policy.kind == MOEPOOL_POLICY_PINNED ? below(slots + 1)
                                                           : 0;
    policy.pinned = policy.kind == MOEPOOL_POLICY_PINNED ? hot : 0;
    Residency law(experts, slots, policy, admit);
    Device device(experts, room, slots, policy, admit);
    for (int i = 0; i < hot; ++i) {
        if (policy.pinned && below(8) == 0) continue;  // its copy failed: the slot stays its own
        law.place(i, i);
        device.slot_of[i] = i;
        device.expert_in[i] = i;
    }
    std::vector<int> leases(static_cast<size_t>(slots), 0);
    DeviceSteps::Counts counts = {};
    // Misses over the link, by the CPU, or both.
    const int miss = below(3);
    if (miss != MOEPOOL_MISS_STREAM) device.step.bell = {&device.bell, miss == MOEPOOL_MISS_AUTO};
    const int many = seed % 3;
    for (int number = 0; number < 60; ++number) {
        const std::string what = "trace " + std::to_string(seed) + ", policy " + std::to_string(policy.kind) +
                                 (policy.guard ? " with guard" : "") + ", step " + std::to_string(number) + ": ";
        if (below(4) == 0) {
            const int slot = below(slots), lease = below(2);
            leases[slot] = lease;
            device.leases[slot] = lease;
            device.state.leased = 0;
            for (const int l : leases) device.state.leased += l;
        }
        totals.leased += device.state.leased > 0;
        const int tokens = many == 0 ? 1 : 1 + below(16);
        const int k = 1 + below(std::min(many == 2 ? 8 : 4, kMostDecodePlaces / tokens));
        std::vector<int64_t> ids(static_cast<size_t>(tokens * k));
        std::set<int> wanted;
        bool bad = false;
        for (int64_t &id : ids) {
            id = below(12) == 0 ? -1 : std::min(below(experts), below(experts));
            if (below(60) == 0) {
                id = below(2) ? experts : -2;
                bad = true;
            }
            if (id >= 0 && id < experts) wanted.insert(static_cast<int>(id));
        }
        const std::vector<int32_t> before = device.slot_of;
        device.bell.share = below(experts + 1);
        device.bell.all_host = below(6) == 0;
        if (miss == MOEPOOL_MISS_AUTO) device.state.drained = device.state.traced;
        // A layer with gate and up of two types takes a single token as several.
        const bool single = tokens == 1 && seed % 4 != 1;
        device.take(ids, tokens, k, single, below(2) == 0, 1 + below(16));

        Residency::Step step;
        step.tick = law.snapshot().tick;
        const std::vector<int> all(wanted.begin(), wanted.end());
        const auto absent = static_cast<int>(
            std::count_if(all.begin(), all.end(), [&](int e) { return before[static_cast<size_t>(e)] < 0; }));
        const bool all_host = miss == MOEPOOL_MISS_AUTO && device.bell.all_host;
        const int hosted_misses = miss == MOEPOOL_MISS_STREAM             ? 0
                                  : miss == MOEPOOL_MISS_HOST || all_host ? absent
                                                                          : device.bell.share % (absent + 1);
        Divided divided;
        if (miss == MOEPOOL_MISS_AUTO && !all.empty()) divided = divide(law, admit, all, leases, hosted_misses);
        if (!wanted.empty())
            step = law.step(all.data(), static_cast<int>(all.size()), false, leases.data(),
                            miss == MOEPOOL_MISS_AUTO ? &divided.chosen : nullptr);
        const Residency::Snapshot after = law.snapshot();
        check(device.state.tick == after.tick, what + "tick");
        check(device.state.election == after.election, what + "election");
        check(device.slot_of == after.slot_of, what + "slot_of");
        for (int slot = 0; slot < room; ++slot)
            check(device.expert_in[slot] == (slot < slots ? after.expert_in[slot] : -1), what + "expert_in");
        for (int e = 0; e < experts; ++e) {
            const Use &ours = device.uses[e], &theirs = after.uses[e];
            check(ours.last == theirs.last, what + "last of " + std::to_string(e));
            check(ours.count == theirs.count && ours.epoch == theirs.epoch, what + "count of " + std::to_string(e));
            check(ours.marked == theirs.marked, what + "mark of " + std::to_string(e));
        }
        counts.steps += !wanted.empty();
        counts.bypasses += step.bypass;
        counts.hits += step.hits;
        counts.misses += step.misses;
        counts.admissions += static_cast<int64_t>(step.admissions.size());
        // Whom the CPU computes: the misses, all or as many as the division says, and with all of them the hits.
        std::set<int> hosted;
        for (const int expert : device.bell.asked)
            if (expert >= 0) hosted.insert(expert);
        std::set<int> asked = all_host ? wanted : divided.hosted;
        if (miss == MOEPOOL_MISS_HOST)
            std::copy_if(all.begin(), all.end(), std::inserter(asked, asked.end()),
                         [&](int e) { return before[e] < 0; });
        check(hosted == asked, what + "whom the CPU computes");
        if (miss == MOEPOOL_MISS_AUTO) {
            const int streamed = step.misses - hosted_misses, admitted = static_cast<int>(step.admissions.size());
            check(device.bell.trial == (division::trial_of(after.tick - !wanted.empty()) != division::kNoTrial),
                  what + "trial");
            check(device.bell.streamed == streamed, what + "streamed");
            check(device.bell.copied == std::max(0, admitted - streamed), what + "copied");
            check(device.bell.hosted == static_cast<int>(hosted.size()), what + "noted for the lesson");
            check(device.bell.wanted == step.hits + step.misses, what + "wanted");
            totals.copied += device.bell.copied;
            if (step.misses > 0) {
                const auto valid =
                    std::count_if(ids.begin(), ids.end(), [&](int64_t e) { return e >= 0 && e < experts; });
                check(device.bell.offered == step.hits + step.misses, what + "experts of a share");
                check(device.bell.places == (single ? device.bell.offered : valid), what + "places of a share");
                check(device.bell.noted_places == device.bell.places, what + "places of the lesson");
            }
        }
        counts.hosted += static_cast<int64_t>(hosted.size());
        counts.in_place +=
            std::max<int64_t>(0, step.misses - hosted_misses - static_cast<int64_t>(step.admissions.size()));
        for (const auto &admission : step.admissions) counts.evictions += admission.evicted >= 0;
        check(std::memcmp(&counts, &device.state.counts, sizeof counts) == 0, what + "counts");
        check((device.bad.place >= 0) == bad, what + "an id out of range");
        device.bad.place = -1;

        // Every place is in one tile, which reads where the expert lay and fills where it lies now. A single token's
        // are a tile each.
        check(single || device.tile_count <= most_tiles_of(tokens * k, experts), what + "number of tiles");
        std::vector<int> seen(ids.size(), 0);
        for (int i = 0; i < (single ? k : device.tile_count); ++i) {
            const DecodeTile &tile = device.tiles[i];
            check(tile.zero == 0, what + "a tile of which a part is not written");
            for (int j = 0; j < tile.count; ++j) {
                const int place = single ? i : device.order[kMostDecodeTokens * i + j];
                ++seen[place];
                const int64_t id = ids[place];
                const auto address = [&](int slot) { return device.arena.data() + slot * Device::kRecord; };
                check(tile.count <= (before[id] >= 0 ? kResidentPlaces : kMostDecodeTokens), what + "places of a tile");
                check(tile.record == (before[id] >= 0 ? address(before[id]) : device.records[id]), what + "record");
                const uint8_t *fill = nullptr;
                for (const auto &a : step.admissions)
                    if (a.expert == id) fill = address(a.slot);
                check(tile.fill == fill, what + "fill");
                check(tile.host == static_cast<int>(hosted.count(static_cast<int>(id))), what + "host");
                check(tile.streamed == (before[id] < 0 && !tile.host), what + "streamed");
                if (!hosted.empty()) check(device.bell.asked[place] == (tile.host ? id : -1), what + "asked");
            }
        }
        for (size_t place = 0; place < ids.size(); ++place)
            check(seen[place] == (ids[place] >= 0 && ids[place] < experts), what + "places of the tiles");

        // The trace, of which the host takes what is there now and then.
        if (device.state.lost == 0) {
            std::vector<uint32_t> words;
            const int admitted = static_cast<int>(step.admissions.size());
            const int size = trace::kHeaderWords + tokens * k + trace::kAdmissionWords * admitted;
            const trace::Header header = {static_cast<uint32_t>(size), after.tick, tokens, k, admitted,
                                          MOEPOOL_TRACE_DECODE,        step.bypass};
            for (int i = 0; i < trace::kHeaderWords; ++i) words.push_back(header.word(i));
            for (const int64_t id : ids)
                words.push_back(static_cast<uint32_t>(id < -1 || id >= experts ? Route::kInvalid : id));
            for (const auto &a : step.admissions)
                for (const int value : {a.expert, a.slot, a.evicted}) words.push_back(static_cast<uint32_t>(value));
            const uint64_t begin = device.state.traced - words.size();
            for (size_t i = 0; i < words.size(); ++i)
                check(device.ring[(begin + i) % Device::kTraceWords] == words[i],
                      what + "trace, word " + std::to_string(i));
        }
        if (below(20) == 0) device.state.drained = device.state.traced;
        check(device.state.traced - device.state.drained <= Device::kTraceWords, what + "the ring overran");
        ++totals.steps;
        totals.admissions += static_cast<int64_t>(step.admissions.size());
        totals.refused += step.misses > static_cast<int>(step.admissions.size());
        totals.bypasses += step.bypass;
        totals.bad += bad;
        totals.hosted += !hosted.empty();
        totals.divided += hosted_misses > 0 && hosted_misses < step.misses;
    }
    totals.evictions += counts.evictions;
    totals.lost += device.state.lost;
}

}  // namespace

int main(int count, char **arguments) {
    const int first = count > 2 ? std::atoi(arguments[1]) : 0, last = count > 2 ? std::atoi(arguments[2]) : 200;
    Totals totals;
    for (int seed = first; seed < last; ++seed) follow(seed, totals);
    std::printf(
        "%lld steps, %lld admissions, %lld evictions, %lld bypasses, %lld with bad ids, %lld with leases, "
        "%lld with misses left out, %lld lost to the trace, %lld asked the CPU, %lld divided, %lld copied beside\n",
        static_cast<long long>(totals.steps), static_cast<long long>(totals.admissions),
        static_cast<long long>(totals.evictions), static_cast<long long>(totals.bypasses),
        static_cast<long long>(totals.bad), static_cast<long long>(totals.leased),
        static_cast<long long>(totals.refused), static_cast<long long>(totals.lost),
        static_cast<long long>(totals.hosted), static_cast<long long>(totals.divided),
        static_cast<long long>(totals.copied));
}
