#include "pool/pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"
#include "pool/state.h"

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

// 0: nobody asked for more, nor for memory to be given back.
int checked_most(const moepool_pool_config &config) {
    if (config.max_slots != 0 && config.max_slots < config.slots)
        fail(MOEPOOL_ERROR_ARGUMENT, "max_slots is %d: it must be at least slots, which is %d", config.max_slots,
             config.slots);
    return config.max_slots;
}

// With miss = auto one a step unless said: to come in has to be worth the link. Where all have a slot there is no
// choice.
int checked_admit(const moepool_pool_config &config) {
    const int admit = at_least(config.admit, policy::kNoLimit, "admit");
    return config.miss == MOEPOOL_MISS_AUTO && admit == policy::kNoLimit ? policy::kOneUnlessAll : admit;
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
      admit_(checked_admit(config)),
      prompt_tokens_(at_least(config.prompt_tokens, 0, "prompt_tokens")),
      max_slots_(std::min(checked_most(config), layer_.experts())),
      slots_(backend_.make_slots(layer_, std::min(at_least(config.slots, 0, "slots"), layer_.experts()), max_slots_,
                                 checked_budget(config.budget_bytes))),
      most_slots_(std::max(max_slots_, slots_->count())),
      residency_(layer_.experts(), slots_->count(), policy_, admit_),
      leases_(static_cast<size_t>(residency_.slots()), 0) {
    if (policy_.kind == MOEPOOL_POLICY_STATIC || policy_.kind == MOEPOOL_POLICY_PINNED) {
        std::vector<bool> named(static_cast<size_t>(layer_.experts()), false);
        const int count = config.hot ? config.hot_count : layer_.experts();
        for (int i = 0; i < count; ++i) {
            const int expert = config.hot ? config.hot[i] : i;
            if (expert < 0 || expert >= layer_.experts())
                fail(MOEPOOL_ERROR_INDEX, "hot expert %d at position %d is outside [0, %d)", expert, i,
                     layer_.experts());
            if (named[static_cast<size_t>(expert)])
                fail(MOEPOOL_ERROR_ARGUMENT, "hot expert %d at position %d is given twice", expert, i);
            named[static_cast<size_t>(expert)] = true;
            hot_.push_back(expert);
        }
    }
    fill(place_hot());
    stats_.experts = layer_.experts();
}

// Gives the hot experts the slots that are theirs, if they lie nowhere: those for which there were no slots are the
// least hot ones.
std::vector<Residency::Admission> Pool::place_hot() {
    std::vector<Residency::Admission> placed;
    placed.reserve(hot_.size());
    for (int slot = 0; slot < std::min(static_cast<int>(hot_.size()), residency_.slots()); ++slot) {
        const int expert = hot_[static_cast<size_t>(slot)];
        if (residency_.expert_in(slot) >= 0 || residency_.slot_of(expert) >= 0) continue;
        residency_.place(expert, slot);
        placed.push_back({expert, slot, -1});
    }
    return placed;
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
    must_settle_ = true;
    for (size_t i = 0; i < admissions.size(); ++i) {
        try {
            slots_->fill(admissions[i].slot, layer_.record(admissions[i].expert));
        } catch (...) {
            // The map must not promise what no slot holds.
            for (; i < admissions.size(); ++i) residency_.clear(admissions[i].slot);
            throw;
        }
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
    if (!steps || steps->refuses(ids.tokens, ids.k)) return false;
    raise_pending();
    if (told_of_failure_) fail_for_good(steps->failure());
    if (must_settle_) slots_->settle();
    if (!device_steps_) {
        steps->load(residency_.snapshot(), leases_);
        device_steps_ = steps;
    }
    must_settle_ = false;
    steps->run(ids, x, weights, weights_dtype, out, stream);
    return true;
}

std::string Pool::describe(int64_t tokens, int64_t k) {
    if (device_ == MOEPOOL_CPU) return "host: the pool is on the CPU";
    if (is_prompt(tokens, MOEPOOL_PHASE_AUTO)) return "host: a prompt, of more than prompt_tokens tokens";
    const std::lock_guard<std::mutex> lock(mutex_);
    DeviceSteps *steps = slots_->device_steps(policy_, admit_, miss_, store_);
    if (!steps) return "host: " + slots_->why_no_device_steps();
    if (const char *why = steps->refuses(tokens, k)) return std::string("host: ") + why;
    return "device: " + steps->describe(tokens, k, residency_.slots());
}

void Pool::return_residency() {
    if (!device_steps_) return;
    device_steps_->load(residency_.snapshot(), leases_);
    slots_->settle();
}

// The host changes the residency, or what the slots hold. Whatever fails then, the device gets what has become of it.
template <class Change>
void Pool::change(const Change &change) {
    try {
        change();
    } catch (...) {
        return_residency();
        throw;
    }
    return_residency();
}

// Whether a step that wants these may admit so; nothing has changed yet.
void Pool::check(const std::vector<Residency::Choice> &chosen, const std::vector<int> &wanted, bool prompt) const {
    const int slots = residency_.slots();
    if (!chosen.empty() && policy_.kind == MOEPOOL_POLICY_STATIC)
        fail(MOEPOOL_ERROR_ARGUMENT, "admissions for a static pool, which admits nobody");
    if (!chosen.empty() && (prompt || static_cast<int>(wanted.size()) > slots))
        fail(MOEPOOL_ERROR_ARGUMENT, "admissions for a step that bypasses, since it %s: it admits nobody",
             prompt ? "is a prompt" : "wants more experts than there are slots");
    const auto wants = [&](int expert) { return std::binary_search(wanted.begin(), wanted.end(), expert); };
    std::vector<bool> named(static_cast<size_t>(residency_.experts()), false),
        filled(static_cast<size_t>(slots), false);
    for (size_t i = 0; i < chosen.size(); ++i) {
        const int expert = chosen[i].expert, slot = chosen[i].slot;
        const char *why = nullptr;
        if (slot < 0 || slot >= slots)
            why = "there is no such slot";
        else if (!wants(expert))
            why = "the step does not want this expert";
        else if (residency_.slot_of(expert) >= 0)
            why = "the expert is resident already";
        else if (policy::keeps(policy_, slot))
            why = "the expert in this slot is pinned";
        else if (leases_[static_cast<size_t>(slot)])
            why = "an open route reads this slot";
        else if (wants(residency_.expert_in(slot)))
            why = "the step wants the expert in this slot";
        else if (named[static_cast<size_t>(expert)])
            why = "the expert is named twice";
        else if (filled[static_cast<size_t>(slot)])
            why = "the slot is named twice";
        if (why)
            fail(MOEPOOL_ERROR_ARGUMENT, "admission %d, of expert %d to slot %d: %s", static_cast<int>(i), expert, slot,
                 why);
        named[static_cast<size_t>(expert)] = filled[static_cast<size_t>(slot)] = true;
    }
}

std::unique_ptr<Route> Pool::resolve(const moepool_ids &ids, moepool_phase phase, void *stream,
                                     const std::vector<Residency::Choice> *chosen) {
    const bool prompt = is_prompt(ids.tokens, phase);
    backend_.require_host(stream, "resolving ids");
    std::unique_ptr<Route> route;
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_pending();
    route = std::make_unique<Route>(shared_from_this(), read_ids(ids, stream), ids.tokens, ids.k);
    ++open_routes_;
    route->counted = true;
    const std::vector<int> wanted = route->wanted();
    if (!route->groups.empty() || tracing_) fetch_residency();
    if (chosen) check(*chosen, wanted, prompt);
    if (route->groups.empty()) {
        record(residency_.tick(), route.get(), prompt ? MOEPOOL_TRACE_PROMPT : MOEPOOL_TRACE_DECODE, false, {});
        route->device = slots_->publish(*route);
        return route;
    }
    std::vector<bool> hit;
    for (const int expert : wanted) hit.push_back(residency_.slot_of(expert) >= 0);
    const Residency::Step *taken = nullptr;
    change([&] {
        const Residency::Step &step =
            residency_.step(wanted.data(), static_cast<int>(wanted.size()), prompt, leases_.data(), chosen);
        taken = &step;
        fill(step.admissions);
        record(step.tick, route.get(), prompt ? MOEPOOL_TRACE_PROMPT : MOEPOOL_TRACE_DECODE, step.bypass,
               step.admissions);
        // The map is as the step left it: only now is it read.
        for (size_t i = 0; i < route->groups.size(); ++i) {
            Route::Group &group = route->groups[i];
            // A host miss that was given a slot is computed where it lies all the same: the slot is for later steps.
            const bool hot = hit[i] || miss_ == MOEPOOL_MISS_STREAM;
            group.slot = hot ? residency_.slot_of(group.expert) : -1;
            group.record = group.slot >= 0 ? slots_->slot(group.slot) : layer_.record(group.expert);
        }
        route->device = slots_->publish(*route);
        for (const Route::Group &group : route->groups)
            if (group.slot >= 0) ++leases_[static_cast<size_t>(group.slot)];
        route->leased = true;
    });

    // From here on nothing fails.
    const Residency::Step &step = *taken;
    for (const Route::Group &group : route->groups)
        if (group.slot < 0)
            (miss_ != MOEPOOL_MISS_STREAM ? stats_.host_bytes : stats_.in_place_bytes) += layer_.record_bytes();
    ++stats_.steps;
    stats_.copied_bytes += static_cast<int64_t>(step.admissions.size()) * layer_.record_bytes();
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
    try {
        if (device_steps_) device_steps_->lease(leases_);
    } catch (...) {  // the device is lost: its next use says so
    }
}

int Pool::prefetch(const int32_t *experts, int count) {
    std::vector<int> wanted;
    std::vector<bool> named(static_cast<size_t>(layer_.experts()), false);
    for (int i = 0; i < at_least(count, 0, "count"); ++i) {
        const int expert = experts[i];
        if (expert < 0 || expert >= layer_.experts())
            fail(MOEPOOL_ERROR_INDEX, "expert %d at position %d is outside [0, %d)", expert, i, layer_.experts());
        if (named[static_cast<size_t>(expert)])
            fail(MOEPOOL_ERROR_ARGUMENT, "expert %d at position %d is named twice", expert, i);
        named[static_cast<size_t>(expert)] = true;
        wanted.push_back(expert);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_pending();
    fetch_residency();
    int admitted = 0;
    change([&] {
        const std::vector<Residency::Admission> &admissions = residency_.prefetch(wanted, leases_);
        fill(admissions);
        admitted = static_cast<int>(admissions.size());
        record(residency_.tick(), nullptr, MOEPOOL_TRACE_PREFETCH, false, admissions);
        for (const Residency::Admission &admission : admissions) stats_.evictions += admission.evicted >= 0;
        stats_.prefetched += admitted;
        stats_.copied_bytes += admitted * layer_.record_bytes();
    });
    return admitted;
}

int Pool::resize(int slots) {
    at_least(slots, 0, "slots");
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_pending();
    const int asked = slots;
    slots = std::min(slots, layer_.experts());
    if (slots > most_slots_)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d slots, but the pool was made for at most %d: make it with a greater max_slots",
             asked, most_slots_);
    if (slots < std::min(policy_.pinned, residency_.slots()))
        fail(MOEPOOL_ERROR_ARGUMENT, "%d slots, but %d experts are pinned", slots, policy_.pinned);
    for (size_t slot = static_cast<size_t>(slots); slot < leases_.size(); ++slot)
        if (leases_[slot])
            fail(MOEPOOL_ERROR_STATE, "an open route reads slot %d: release it before there are only %d slots",
                 static_cast<int>(slot), slots);
    fetch_residency();
    slots_->settle();  // what still reads the slots
    if (slots > residency_.slots()) {
        slots_->resize(slots);
        leases_.resize(static_cast<size_t>(slots_->count()), 0);
        change([&] {
            residency_.resize(slots_->count(), leases_);
            fill(place_hot());
        });
    } else if (slots < residency_.slots()) {
        change([&] {
            const std::vector<Residency::Admission> moved = residency_.resize(slots, leases_);
            leases_.resize(static_cast<size_t>(slots));
            fill(moved);
        });
        slots_->settle();
        slots_->resize(slots);  // last: nobody knows of the slots that go any more
    }
    return residency_.slots();
}

std::vector<uint8_t> Pool::save() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    fetch_residency();
    raise_pending();
    return write_state(residency_.snapshot(), policy_, layer_);
}

void Pool::load(const uint8_t *data, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_pending();
    if (open_routes_)
        fail(MOEPOOL_ERROR_STATE, "%d routes of the pool are open: release them before its state is loaded",
             open_routes_);
    const Residency::Snapshot state = read_state(data, size, residency_.slots(), policy_, layer_);
    std::vector<Residency::Admission> residents;
    for (int slot = 0; slot < residency_.slots(); ++slot) {
        const int expert = state.expert_in[static_cast<size_t>(slot)];
        if (slot < static_cast<int>(hot_.size()) && expert != hot_[static_cast<size_t>(slot)])
            fail(MOEPOOL_ERROR_ARGUMENT, "the state is of a pool with another hot list: expert %d in slot %d, not %d",
                 expert, slot, hot_[static_cast<size_t>(slot)]);
        if (expert >= 0) residents.push_back({expert, slot, -1});
    }
    fetch_residency();
    slots_->settle();
    change([&] {
        residency_.restore(state);
        fill(residents);
    });
}

void Pool::record(int64_t tick, const Route *route, moepool_trace_phase phase, bool bypass,
                  const std::vector<Residency::Admission> &admissions) {
    if (!tracing_) return;
    drain_trace();  // what the device has done before
    const auto places = route ? route->places() : 0;
    trace::Header header = {};
    header.words = static_cast<uint32_t>(trace::kHeaderWords + places +
                                         trace::kAdmissionWords * static_cast<int64_t>(admissions.size()));
    header.tick = tick;
    header.tokens = route ? static_cast<int32_t>(route->tokens()) : 0;
    header.k = route ? static_cast<int32_t>(route->k()) : 0;
    header.admitted = static_cast<int32_t>(admissions.size());
    header.phase = phase;
    header.bypass = bypass;
    for (int i = 0; i < trace::kHeaderWords; ++i) trace_.push_back(header.word(i));
    if (route)
        for (const int32_t id : route->ids()) trace_.push_back(static_cast<uint32_t>(id));
    for (const Residency::Admission &admission : admissions)
        for (const int value : {admission.expert, admission.slot, admission.evicted})
            trace_.push_back(static_cast<uint32_t>(value));
}

void Pool::drain_trace() {
    if (device_steps_) trace_lost_ += device_steps_->take_trace(trace_);
}

void Pool::start_trace(int64_t room_bytes) {
    constexpr int64_t kUsual = int64_t{64} << 20;
    if (room_bytes < 0)
        fail(MOEPOOL_ERROR_ARGUMENT, "room_bytes is %lld: at least 0", static_cast<long long>(room_bytes));
    const std::lock_guard<std::mutex> lock(mutex_);
    // At least a step or two of the largest there are.
    const int64_t room =
        std::max<int64_t>(room_bytes ? room_bytes : kUsual, 1 << 14) / static_cast<int64_t>(sizeof(uint32_t));
    // Also if the device has taken no step yet: if there is no memory, that is to be said here.
    if (DeviceSteps *steps = slots_->device_steps(policy_, admit_, miss_, store_)) steps->trace(room);
    trace_room_ = room;
    trace_.clear();
    trace_lost_ = 0;
    tracing_ = true;
}

void Pool::stop_trace() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!tracing_) return;
    fetch_residency();
    drain_trace();
    if (DeviceSteps *steps = slots_->device_steps(policy_, admit_, miss_, store_)) steps->trace(0);
    tracing_ = false;
}

moepool_trace_counts Pool::fetch_trace() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (tracing_) {
        fetch_residency();
        drain_trace();
    }
    if (const int64_t lost = std::exchange(trace_lost_, 0))
        fail(
            MOEPOOL_ERROR_STATE,
            "%lld steps are missing from the trace: its ring of %lld bytes on the device was full. Take it more often, "
            "or start it with a larger one",
            static_cast<long long>(lost), static_cast<long long>(trace_room_ * 4));
    moepool_trace_counts counts = {};
    for (size_t at = 0; at < trace_.size(); at += trace_[at]) {
        const trace::Step step(trace_.data() + at);
        ++counts.steps;
        counts.places += step.places();
        counts.admissions += step.header.admitted;
    }
    return counts;
}

void Pool::take_trace(const moepool_trace_counts &counts, const moepool_trace_arrays &arrays) {
    const std::lock_guard<std::mutex> lock(mutex_);
    moepool_trace_counts done = {};
    size_t at = 0;
    for (; done.steps < counts.steps; at += trace_[at]) {
        if (at >= trace_.size())
            fail(MOEPOOL_ERROR_STATE, "the trace has been taken or started anew since it was counted");
        const trace::Step step(trace_.data() + at);
        if (done.places + step.places() > counts.places || done.admissions + step.header.admitted > counts.admissions)
            fail(MOEPOOL_ERROR_STATE, "the trace has been taken or started anew since it was counted");
        arrays.tick[done.steps] = step.header.tick;
        arrays.tokens[done.steps] = step.header.tokens;
        arrays.k[done.steps] = step.header.k;
        arrays.phase[done.steps] = step.header.phase;
        arrays.bypass[done.steps] = step.header.bypass;
        for (int64_t place = 0; place < step.places(); ++place) arrays.ids[done.places++] = step.id(place);
        for (int i = 0; i < step.header.admitted; ++i, ++done.admissions) {
            arrays.admission_step[done.admissions] = done.steps;
            arrays.expert[done.admissions] = step.admission(i, 0);
            arrays.slot[done.admissions] = step.admission(i, 1);
            arrays.evicted[done.admissions] = step.admission(i, 2);
        }
        ++done.steps;
    }
    if (done.places != counts.places || done.admissions != counts.admissions)
        fail(MOEPOOL_ERROR_STATE, "the trace has been taken or started anew since it was counted");
    trace_.erase(trace_.begin(), trace_.begin() + static_cast<std::ptrdiff_t>(at));
}

moepool_pool_stats Pool::stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    fetch_residency();
    raise_pending();
    moepool_pool_stats stats = stats_;
    stats.slots = residency_.slots();
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
