// A pool (pool/pool.cpp) on a device that is none, whose copies and allocations fail now and then: whatever fails, no
// slot is read for an expert that it does not hold, no lease is broken, and nobody pinned is replaced.
#include "pool/pool.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>

#include "error.h"

using namespace moepool;

namespace {

std::mt19937 random_numbers;
int below(int bound) { return static_cast<int>(random_numbers() % static_cast<unsigned>(bound)); }

std::string history;
void check(bool good, const std::string &what) {
    if (good) return;
    std::fprintf(stderr, "%s%s\n", history.c_str(), what.c_str());
    std::exit(1);
}

// What is to fail, after so many calls that do not.
std::string failing;
int calls_left = 0;
std::map<std::string, int> failures;
void may_fail(const char *what) {
    if (failing != what || calls_left-- > 0) return;
    failing.clear();
    ++failures[what];
    fail(MOEPOOL_ERROR_OUT_OF_MEMORY, "%s fails", what);
}

int room;  // slots that memory is there for

class FakeSlots;

// The device: its map, and steps that take it at its word.
class FakeSteps : public DeviceSteps {
  public:
    FakeSteps(FakeSlots &slots, const Layer &layer, const PolicyConfig &policy, int admit)
        : slots_(slots), layer_(layer), policy_(policy), admit_(admit) {}
    const char *refuses(int64_t, int64_t) const override { return nullptr; }
    std::string describe(int64_t, int64_t, int) const override { return "a device that is none"; }
    void run(const moepool_ids &ids, const moepool_rows &, const void *, moepool_dtype, float *, void *) override;
    void load(const Residency::Snapshot &residency, const std::vector<int> &leases) override {
        require_whole();
        whole_ = false;
        may_fail("load");
        map_ = residency;
        leases_ = leases;
        whole_ = true;
    }
    Counts store(Residency::Snapshot &residency) override {
        require_whole();
        residency = map_;
        return counts_;
    }
    void lease(const std::vector<int> &leases) override { leases_ = leases; }
    void trace(int64_t) override { may_fail("trace"); }
    int64_t take_trace(std::vector<uint32_t> &) override {
        may_fail("take_trace");
        return 0;
    }
    BadId take_bad_id() override { return {0, -1, 1}; }

  private:
    void require_whole() const {
        if (!whole_) fail(MOEPOOL_ERROR_STATE, "half a map");
    }

    FakeSlots &slots_;
    const Layer &layer_;
    const PolicyConfig policy_;
    const int admit_;
    Residency::Snapshot map_ = {};
    std::vector<int> leases_;
    Counts counts_ = {};
    bool whole_ = true;
};

class FakeSlots : public Slots {
  public:
    FakeSlots(const Layer &layer, int count) : memory(layer.experts()), layer_(layer), count_(std::min(count, room)) {}
    int count() const override { return count_; }
    int64_t bytes() const override { return count_; }
    const uint8_t *slot(int index) const override { return &memory[static_cast<size_t>(index)]; }
    void fill(int index, const uint8_t *record) override {
        check(index < count_, "a slot that is none is filled");
        may_fail("fill");
        queued.emplace_back(index, *record);
    }
    std::unique_ptr<DeviceRoute> publish(const Route &) override {
        may_fail("publish");
        return nullptr;
    }
    void resize(int count) override {
        may_fail("resize");
        count_ = std::min(count, std::max(room, count_));
    }
    void settle() override {
        may_fail("settle");
        land();
    }
    DeviceSteps *device_steps(const PolicyConfig &policy, int admit, moepool_miss,
                              const std::shared_ptr<const void> &) override {
        if (!steps_) steps_ = std::make_unique<FakeSteps>(*this, layer_, policy, admit);
        return steps_.get();
    }
    // The copies under way arrive.
    void land() {
        for (const auto &copy : queued) memory[static_cast<size_t>(copy.first)] = copy.second;
        queued.clear();
    }

    std::vector<uint8_t> memory;  // by slot: its record's first byte, which is the expert's number
    std::vector<std::pair<int, uint8_t>> queued;

  private:
    const Layer &layer_;
    int count_;
    std::unique_ptr<FakeSteps> steps_;
};

FakeSlots *slots_made;

class FakeBackend : public Backend {
  public:
    std::unique_ptr<Slots> make_slots(const Layer &layer, int count, int, int64_t) const override {
        auto made = std::make_unique<FakeSlots>(layer, count);
        slots_made = made.get();
        return made;
    }
    void require_host(void *, const char *) const override {}
    void read(void *host, const void *device, int64_t bytes, void *) const override {
        std::memcpy(host, device, static_cast<size_t>(bytes));
    }
    void matmul_id(const Route &, int, moepool_half, const moepool_rows &, float *, void *) const override {}
    void ffn(const Route &, const moepool_rows &, const void *, moepool_dtype, float *, void *) const override {}
    void combine(const Route &, int64_t, const float *, const void *, moepool_dtype, float *, void *) const override {}
    void swiglu(int64_t, const float *, const float *, float *, void *) const override {}
    void add(int64_t, const float *, const float *, float *, void *) const override {}
};

void FakeSteps::run(const moepool_ids &ids, const moepool_rows &, const void *, moepool_dtype, float *, void *) {
    require_whole();
    check(slots_.queued.empty(), "a step of the device begins while slots are being filled");
    Residency law(layer_.experts(), static_cast<int>(map_.expert_in.size()), policy_, admit_);
    law.restore(map_);
    std::vector<int> wanted;
    for (int expert = 0; expert < layer_.experts(); ++expert)
        for (int64_t i = 0; i < ids.tokens * ids.k; ++i)
            if (static_cast<const int32_t *>(ids.data)[i] == expert && (wanted.empty() || wanted.back() != expert))
                wanted.push_back(expert);
    for (const int expert : wanted)
        if (const int slot = law.slot_of(expert); slot >= 0)
            check(*slots_.slot(slot) == expert, "the device reads a slot of another expert");
    if (!wanted.empty())
        for (const Residency::Admission &a : law.step(wanted, false, leases_).admissions) {
            check(!leases_[static_cast<size_t>(a.slot)], "the device fills a leased slot");
            slots_.memory[static_cast<size_t>(a.slot)] = static_cast<uint8_t>(a.expert);
        }
    map_ = law.snapshot();
    ++counts_.steps;
}

// A pool, its open routes, and all that may be done with them.
void play(unsigned seed) {
    random_numbers.seed(seed);
    history = "seed " + std::to_string(seed) + "\n";
    const int experts = 6 + below(6);
    auto store = std::make_shared<Store>();
    const moepool_matrix matrix = {0, 0, 0, 1, 4};
    store->add_layer(experts, &matrix, 1);
    const Layer &layer = store->layer(0);
    for (int e = 0; e < experts; ++e) *layer.record(e) = static_cast<uint8_t>(e);
    store->seal();

    moepool_pool_config config = {};
    config.device = 0;
    config.policy = below(MOEPOOL_POLICY_PINNED + 1);
    config.slots = 1 + below(experts);
    config.max_slots = experts;
    config.admit = -1;
    config.prompt_tokens = 4;
    config.half_life = 1 + below(9);
    config.period = 1 + below(9);
    config.protected_percent = 60;
    std::vector<int32_t> hot;
    if (config.policy == MOEPOOL_POLICY_PINNED) {
        for (int i = below(config.slots + 1); i > 0; --i) hot.push_back(experts - i);
        config.hot = hot.data();
        config.hot_count = static_cast<int>(hot.size());
        if (hot.empty()) config.policy = MOEPOOL_POLICY_LRU, config.hot = nullptr;
    }
    room = below(4) ? experts : below(config.slots + 1);
    failing.clear();
    auto pool = std::make_shared<Pool>(store, config);
    FakeSlots &slots = *slots_made;
    std::vector<std::unique_ptr<Route>> routes;
    std::vector<uint8_t> state;
    for (int number = 0; number < 150; ++number) {
        if (below(3) == 0) {
            const char *const kinds[] = {"fill", "publish", "load", "trace", "take_trace", "settle", "resize"};
            failing = kinds[below(7)];
            calls_left = below(3);
        }
        int32_t values[6];
        for (int32_t &value : values) value = below(experts + 1) - 1;
        moepool_ids ids = {values, 32, MOEPOOL_CPU, 1 + below(2), 1 + below(3), 0, 4};
        ids.token_stride = 4 * ids.k;
        const int kind = below(12);
        history += std::to_string(kind) + (failing.empty() ? "" : " with a failing " + failing) + "\n";
        const auto step = [&](const std::vector<Residency::Choice> *chosen) {
            routes.push_back(pool->resolve(ids, MOEPOOL_PHASE_DECODE, nullptr, chosen));
        };
        try {
            if (kind < 2) {
                step(nullptr);
            } else if (kind == 2) {
                const std::vector<Residency::Choice> chosen = {{values[0], below(experts)}};
                step(&chosen);
            } else if (kind == 3 || kind == 4) {
                if (!routes.empty()) routes.erase(routes.begin() + below(static_cast<int>(routes.size())));
            } else if (kind == 5) {
                const int32_t experts_wanted[] = {std::max(0, values[0])};
                pool->prefetch(experts_wanted, 1);
            } else if (kind == 6) {
                room = below(3) ? experts : below(experts + 1);
                pool->resize(below(experts + 1));
            } else if (kind == 7) {
                if (state.empty() || below(2))
                    state = pool->save();
                else
                    pool->load(state.data(), static_cast<int64_t>(state.size()));
            } else if (kind == 8) {
                if (below(2))
                    pool->start_trace(0);
                else
                    pool->stop_trace();
            } else {
                ids.device = 0;
                pool->ffn(ids, MOEPOOL_PHASE_DECODE, {}, nullptr, MOEPOOL_F32, nullptr, nullptr);
            }
        } catch (const Error &) {
        }
        failing.clear();
        std::vector<int32_t> slot_of(static_cast<size_t>(experts)), expert_in(static_cast<size_t>(experts), -2);
        try {
            pool->tables(slot_of.data(), expert_in.data());
        } catch (const Error &error) {
            check(std::string(error.what()) == "half a map", error.what());
            return;  // nobody takes a step any more
        }
        const auto pending = slots.queued;
        const auto before = slots.memory;
        slots.land();  // as whoever reads after the copies sees it
        for (int s = 0; s < pool->stats().slots; ++s) {
            const int expert = expert_in[static_cast<size_t>(s)];
            check(expert < 0 || slots.memory[static_cast<size_t>(s)] == expert, "a slot holds another expert");
            check(s >= static_cast<int>(hot.size()) || expert < 0 || expert == hot[static_cast<size_t>(s)],
                  "a pinned expert was replaced");
        }
        for (const auto &route : routes)
            for (const Route::Group &group : route->groups)
                check(group.slot < 0 || slots.memory[static_cast<size_t>(group.slot)] == group.expert,
                      "a leased slot was filled");
        slots.memory = before;
        slots.queued = pending;
    }
}

}  // namespace

namespace moepool {
const Backend &backend(int) {
    static const FakeBackend made;
    return made;
}
}  // namespace moepool

int main(int count, char **arguments) {
    const int first = count > 1 ? std::atoi(arguments[1]) : 0, rounds = count > 2 ? std::atoi(arguments[2]) : 300;
    for (int i = first; i < first + rounds; ++i) play(static_cast<unsigned>(i));
    for (const auto &failure : failures) std::printf("%d %s\n", failure.second, failure.first.c_str());
    return 0;
}
