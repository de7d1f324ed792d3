#include "pool/pool.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace moepool {

namespace {

moepool_miss checked_miss(moepool_miss miss) {
    if (miss < MOEPOOL_MISS_STREAM || miss > MOEPOOL_MISS_AUTO)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d is not a way to serve misses", static_cast<int>(miss));
    return miss;
}

int64_t checked_budget(int64_t bytes) {
    if (bytes < 0) fail(MOEPOOL_ERROR_ARGUMENT, "a budget of %lld bytes: at least 0", static_cast<long long>(bytes));
    return bytes;
}

int at_least(int value, int least, const char *name) {
    if (value < least) fail(MOEPOOL_ERROR_ARGUMENT, "%s is %d: it must be at least %d", name, value, least);
    return value;
}

int between(int value, int least, int most, const char *name) {
    if (value < least || value > most)
        fail(MOEPOOL_ERROR_ARGUMENT, "%s is %d: it must be %d to %d", name, value, least, most);
    return value;
}

PolicyConfig checked_policy(const moepool_pool_config &config) {
    const moepool_policy kind = config.policy;
    if (kind < MOEPOOL_POLICY_LRU || kind > MOEPOOL_POLICY_PINNED)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d is not a policy", static_cast<int>(kind));
    PolicyConfig policy;
    policy.kind = kind;
    policy.guard = between(config.guard, 0, 1, "guard") == 1;
    if (policy.guard && (kind == MOEPOOL_POLICY_STATIC || kind == MOEPOOL_POLICY_REELECT))
        fail(MOEPOOL_ERROR_ARGUMENT, "guard has no meaning with %s",
             kind == MOEPOOL_POLICY_STATIC ? "the static policy, which admits nobody"
                                           : "reelect, whose elections decide who comes in");
    policy.half_life = at_least(config.half_life, 1, "half_life");
    policy.weight = between(config.weight, 0, 1 << 20, "weight");
    policy.period = at_least(config.period, 1, "period");
    policy.protected_percent = between(config.protected_percent, 0, 100, "protected_percent");
    const bool takes_hot = kind == MOEPOOL_POLICY_STATIC || kind == MOEPOOL_POLICY_PINNED;
    if (config.hot && !takes_hot)
        fail(MOEPOOL_ERROR_ARGUMENT, "hot experts are only for the policies static and pinned");
    if (kind == MOEPOOL_POLICY_PINNED && !config.hot)
        fail(MOEPOOL_ERROR_ARGUMENT, "the policy pinned needs hot experts: those that stay");
    if (takes_hot && !config.hot && config.hot_count)
        fail(MOEPOOL_ERROR_ARGUMENT, "hot_count is %d, but hot is NULL", config.hot_count);
    if (config.hot && at_least(config.hot_count, 0, "hot_count") > config.slots)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d hot experts do not fit %d slots", config.hot_count, config.slots);
    policy.pinned = kind == MOEPOOL_POLICY_PINNED ? config.hot_count : 0;
    return policy;
}

const Store &sealed(const Store &store) {
    if (!store.sealed()) fail(MOEPOOL_ERROR_STATE, "the store is still being packed: seal it before making pools");
    return store;
}

// The stride of a dimension of one element says nothing.
bool packed(const moepool_ids &ids) {
    const int64_t bytes = ids.bits / 8;
    return (ids.k == 1 || ids.place_stride == bytes) && (ids.tokens == 1 || ids.token_stride == ids.k * bytes);
}

Error bad_id(int64_t id, int64_t token, int64_t place, int experts) {
    return make_error(MOEPOOL_ERROR_INDEX, "id %lld at token %lld, place %lld is outside [-1, %d)",
                      static_cast<long long>(id), static_cast<long long>(token), static_cast<long long>(place),
                      experts);
}

[[noreturn]] void fail_for_good(const std::string &why) {
    fail(MOEPOOL_ERROR_STATE,
         "%s. Make a new pool; if the CPU is not its own, give it more time (set_doorbell), or take miss=\"stream\"",
         why.c_str());
}

constexpr int64_t kMostPlaces = INT32_MAX;

}  // namespace

Pool::Pool(std::shared_ptr<const Store> store, const moepool_pool_config &config)
    : store_(std::move(store)),
      layer_(sealed(*store_).layer(config.layer)),
      device_(config.device),
      backend_(backend(config.device)),
      policy_(checked_policy(config)),
      miss_(checked_miss(config.miss)),
      admit_(config.miss == MOEPOOL_MISS_AUTO && config.admit == -1 ? 1 : at_least(config.admit, -1, "admit")),
      prompt_tokens_(at_least(config.prompt_tokens, 0, "prompt_tokens")),
      slots_(backend_.make_slots(layer_, std::min(at_least(config.slots, 0, "slots"), layer_.experts()),
                                 checked_budget(config.budget_bytes))),
      residency_(layer_.experts(), slots_->count(), policy_, admit_),
      leases_(static_cast<size_t>(residency_.slots()), 0) {
    std::vector<Residency::Admission> hot;
    if (policy_.kind == MOEPOOL_POLICY_STATIC || policy_.kind == MOEPOOL_POLICY_PINNED) {
        const int count = config.hot ? config.hot_count : residency_.slots();
        for (int i = 0; i < count; ++i) {
            const int expert = config.hot ? config.hot[i] : i;
            if (expert < 0 || expert >= layer_.experts())
                fail(MOEPOOL_ERROR_INDEX, "hot expert %d at position %d is outside [0, %d)", expert, i,
                     layer_.experts());
            if (residency_.slot_of(expert) >= 0)
                fail(MOEPOOL_ERROR_ARGUMENT, "hot expert %d at position %d is given twice", expert, i);
            if (i >= residency_.slots()) continue;  // memory was short: the first ones are the hottest
            residency_.place(expert, i);
            hot.push_back({expert, i, -1});
        }
    }
    fill(hot);
    stats_.copied_bytes = 0;  // counts what steps copy
    stats_.slots = residency_.slots();
    stats_.experts = layer_.experts();
}

// All ids are checked before anything changes.
std::vector<int32_t> Pool::read_ids(const moepool_ids &ids, void *stream) {
    if (ids.bits != 32 && ids.bits != 64) fail(MOEPOOL_ERROR_ARGUMENT, "ids of %d bits: give int32 or int64", ids.bits);
    if (ids.tokens < 0 || ids.k < 1)
        fail(MOEPOOL_ERROR_ARGUMENT, "ids of shape (%lld, %lld): tokens must be at least 0 and k at least 1",
             static_cast<long long>(ids.tokens), static_cast<long long>(ids.k));
    if (ids.tokens > kMostPlaces / ids.k)
        fail(MOEPOOL_ERROR_ARGUMENT, "ids of shape (%lld, %lld): more than 2^31 - 1 places in one call",
             static_cast<long long>(ids.tokens), static_cast<long long>(ids.k));
    if (ids.tokens && !ids.data) fail(MOEPOOL_ERROR_ARGUMENT, "ids is NULL");
    const bool on_device = ids.device != MOEPOOL_CPU;
    if (on_device && device_ == MOEPOOL_CPU)
        fail(MOEPOOL_ERROR_ARGUMENT, "ids are on CUDA device %d, the pool is on the CPU", ids.device);
    if (on_device && ids.device != device_)
        fail(MOEPOOL_ERROR_ARGUMENT, "ids are on CUDA device %d, the pool is on CUDA device %d", ids.device, device_);
    std::vector<int32_t> read(static_cast<size_t>(ids.tokens * ids.k));
    const auto *base = static_cast<const uint8_t *>(ids.data);
    std::vector<uint8_t> copy;
    if (on_device && !read.empty()) {
        if (!packed(ids)) fail(MOEPOOL_ERROR_ARGUMENT, "ids in device memory must be packed");
        copy.resize(read.size() * static_cast<size_t>(ids.bits / 8));
        backend_.read(copy.data(), ids.data, static_cast<int64_t>(copy.size()), stream);
        base = copy.data();
    }
    int32_t *next = read.data();
    for (int64_t t = 0; t < ids.tokens; ++t) {
        for (int64_t j = 0; j < ids.k; ++j) {
            const uint8_t *at = base + t * ids.token_stride + j * ids.place_stride;
            int64_t id = 0;
            if (ids.bits == 64) {
                std::memcpy(&id, at, sizeof id);
            } else {
                int32_t narrow;
                std::memcpy(&narrow, at, sizeof narrow);
                id = narrow;
            }
            if (id < -1 || id >= layer_.experts()) {
                const Error error = bad_id(id, t, j, layer_.experts());
                if (!on_device) throw error;
                // The caller's kernels may be far ahead of the host: the row says so now, the host at its next call.
                if (pending_.empty()) pending_ = error.what();
                id = Route::kInvalid;
            }
            *next++ = static_cast<int32_t>(id);
        }
    }
    return read;
}

void Pool::raise_pending() const {
    if (device_steps_) {
        const DeviceSteps::BadId bad = device_steps_->take_bad_id();
        if (bad.place >= 0 && pending_.empty())
            pending_ = bad_id(bad.id, bad.place / bad.k, bad.place % bad.k, layer_.experts()).what();
    }
    if (device_steps_ && !told_of_failure_) {
        const std::string why = device_steps_->failure();
        told_of_failure_ = !why.empty();
        if (told_of_failure_) fail_for_good(why);
    }
    if (pending_.empty()) return;
    const Error error(MOEPOOL_ERROR_INDEX, "in an earlier step: " + pending_);
    pending_.clear();
    throw error;
}

void Pool::fill(const std::vector<Residency::Admission> &admissions) {
    for (size_t i = 0; i < admissions.size(); ++i) {
        try {
            slots_->fill(admissions[i].slot, layer_.record(admissions[i].expert));
        } catch (...) {
            // The map must not promise what no slot holds.
            for (; i < admissions.size(); ++i) residency_.clear(admissions[i].slot);
            throw;
        }
        stats_.copied_bytes += layer_.record_bytes();
    }
}

bool Pool::is_prompt(int64_t tokens, moepool_phase phase) const {
    if (phase < MOEPOOL_PHASE_AUTO || phase > MOEPOOL_PHASE_PROMPT)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d is not a phase", static_cast<int>(phase));
    return phase == MOEPOOL_PHASE_PROMPT || (phase == MOEPOOL_PHASE_AUTO && tokens > prompt_tokens_);
}

void Pool::fetch_residency() const {
    if (!device_steps_) return;
    Residency::Snapshot snapshot = {};
    device_counts_ = device_steps_->store(snapshot);
    residency_.restore(snapshot);
}

void Pool::ffn(const moepool_ids &ids, moepool_phase phase, const moepool_rows &x, const void *weights,
               moepool_dtype weights_dtype, float *out, void *stream) {
    if (ffn_on_device(ids, phase, x, weights, weights_dtype, out, stream)) return;
    const std::unique_ptr<Route> route = resolve(ids, phase, stream);
    if (route->places()) backend_.ffn(*route, x, weights, weights_dtype, out, stream);
}

// False: this step is not one that the device takes.
bool Pool::ffn_on_device(const moepool_ids &ids, moepool_phase phase, const moepool_rows &x, const void *weights,
                         moepool_dtype weights_dtype, float *out, void *stream) {
    if (device_ == MOEPOOL_CPU || ids.device != device_ || is_prompt(ids.tokens, phase) ||
        (ids.bits != 32 && ids.bits != 64) || !ids.data || ids.tokens < 1 || ids.k < 1 || !packed(ids))
        return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    DeviceSteps *steps = slots_->device_steps(policy_, admit_, miss_, store_);
    if (!steps || open_routes_ > 0 || steps->refuses(ids.tokens, ids.k)) return false;
    raise_pending();
    if (told_of_failure_) fail_for_good(steps->failure());
    if (must_settle_) {
        slots_->settle();
        must_settle_ = false;
    }
    if (!device_steps_) {
        steps->load(residency_.snapshot());
        device_steps_ = steps;
    }
    steps->run(ids, x, weights, weights_dtype, out, stream);
    return true;
}

std::string Pool::describe(int64_t tokens, int64_t k) {
    if (device_ == MOEPOOL_CPU) return "host: the pool is on the CPU";
    if (is_prompt(tokens, MOEPOOL_PHASE_AUTO)) return "host: a prompt, of more than prompt_tokens tokens";
    const std::lock_guard<std::mutex> lock(mutex_);
    DeviceSteps *steps = slots_->device_steps(policy_, admit_, miss_, store_);
    if (!steps) return "host: not all records are page-locked, or gate and up differ in type, or it is no FFN";
    if (const char *why = steps->refuses(tokens, k)) return std::string("host: ") + why;
    return "device: " + steps->describe(tokens, k) + (open_routes_ ? "; but the host while a route is open" : "");
}

std::unique_ptr<Route> Pool::resolve(const moepool_ids &ids, moepool_phase phase, void *stream) {
    const bool prompt = is_prompt(ids.tokens, phase);
    backend_.require_host(stream, "resolving ids");
    std::unique_ptr<Route> route;
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_pending();
    route = std::make_unique<Route>(shared_from_this(), read_ids(ids, stream), ids.tokens, ids.k);
    ++open_routes_;
    route->counted = true;
    if (route->groups.empty()) {
        route->device = slots_->publish(*route);
        return route;
    }
    fetch_residency();
    std::vector<bool> hit;
    for (const Route::Group &group : route->groups) hit.push_back(residency_.slot_of(group.expert) >= 0);
    const Residency::Step step = residency_.step(route->wanted(), prompt, leases_);
    try {
        fill(step.admissions);
    } catch (...) {
        if (device_steps_) device_steps_->load(residency_.snapshot());  // without what could not be filled
        throw;
    }
    if (device_steps_) {
        device_steps_->load(residency_.snapshot());
        slots_->settle();
    }

    // The map is as the step left it: only now is it read.
    for (size_t i = 0; i < route->groups.size(); ++i) {
        Route::Group &group = route->groups[i];
        // A host miss that was given a slot is computed where it lies all the same: the slot is for later steps.
        const bool hot = hit[i] || miss_ == MOEPOOL_MISS_STREAM;
        group.slot = hot ? residency_.slot_of(group.expert) : -1;
        group.record = group.slot >= 0 ? slots_->slot(group.slot) : layer_.record(group.expert);
    }
    route->device = slots_->publish(*route);

    // From here on nothing fails.
    for (const Route::Group &group : route->groups) {
        if (group.slot >= 0)
            ++leases_[static_cast<size_t>(group.slot)];
        else
            (miss_ != MOEPOOL_MISS_STREAM ? stats_.host_bytes : stats_.in_place_bytes) += layer_.record_bytes();
    }
    route->leased = true;
    ++stats_.steps;
    stats_.bypasses += step.bypass;
    (prompt ? stats_.prompt_hits : stats_.hits) += step.hits;
    (prompt ? stats_.prompt_misses : stats_.misses) += step.misses;
    for (const Residency::Admission &admission : step.admissions) stats_.evictions += admission.evicted >= 0;
    route->info.tick = step.tick;
    route->info.bypass = step.bypass;
    route->info.prompt = prompt;
    route->info.hits = step.hits;
    route->info.misses = step.misses;
    route->info.admitted = static_cast<int32_t>(step.admissions.size());
    return route;
}

void Pool::release(const Route &route) {
    if (!route.counted) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    --open_routes_;
    must_settle_ = true;  // its ops end before the device fills a slot
    if (!route.leased) return;
    for (const Route::Group &group : route.groups)
        if (group.slot >= 0) --leases_[static_cast<size_t>(group.slot)];
}

moepool_pool_stats Pool::stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    fetch_residency();
    raise_pending();
    moepool_pool_stats stats = stats_;
    stats.steps += device_counts_.steps;
    stats.bypasses += device_counts_.bypasses;
    stats.hits += device_counts_.hits;
    stats.misses += device_counts_.misses;
    stats.evictions += device_counts_.evictions;
    stats.copied_bytes += device_counts_.admissions * layer_.record_bytes();
    stats.in_place_bytes += device_counts_.in_place * layer_.record_bytes();
    stats.host_bytes += device_counts_.hosted * layer_.record_bytes();
    stats.step_backs = device_counts_.step_backs;
    stats.slot_bytes = slots_->bytes();
    stats.pinned_bytes = layer_.pinned_bytes();
    stats.resident = residency_.resident();
    stats.leased =
        static_cast<int32_t>(leases_.size() - static_cast<size_t>(std::count(leases_.begin(), leases_.end(), 0)));
    return stats;
}

void Pool::tables(int32_t *slot_of, int32_t *expert_in) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    fetch_residency();
    raise_pending();
    for (int expert = 0; slot_of && expert < residency_.experts(); ++expert)
        slot_of[expert] = residency_.slot_of(expert);
    for (int slot = 0; expert_in && slot < residency_.slots(); ++slot) expert_in[slot] = residency_.expert_in(slot);
}

}  // namespace moepool
