// A pool: the slots of one layer on one device, and the resolving of ids to them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moepool.h"
#include "pool/backend.h"
#include "pool/residency.h"
#include "pool/route.h"
#include "pool/trace.h"
#include "store/store.h"

namespace moepool {

class Pool : public std::enable_shared_from_this<Pool> {
  public:
    Pool(std::shared_ptr<const Store> store, const moepool_pool_config &config);

    // chosen: whom the step admits instead of the policy; NULL: the policy.
    std::unique_ptr<Route> resolve(const moepool_ids &ids, moepool_phase phase, void *stream,
                                   const std::vector<Residency::Choice> *chosen = nullptr);
    // The whole layer for one step.
    void ffn(const moepool_ids &ids, moepool_phase phase, const moepool_rows &x, const void *weights,
             moepool_dtype weights_dtype, float *out, void *stream);
    // Who takes a step of this shape by ffn, in words.
    std::string describe(int64_t tokens, int64_t k);
    // Ends a route's lease.
    void release(const Route &route);

    int prefetch(const int32_t *experts, int count);
    int resize(int slots);
    std::vector<uint8_t> save() const;
    void load(const uint8_t *data, int64_t size);

    void start_trace(int64_t room_bytes);
    void stop_trace();
    moepool_trace_counts fetch_trace();
    void take_trace(const moepool_trace_counts &counts, const moepool_trace_arrays &arrays);

    moepool_pool_stats stats() const;
    void tables(int32_t *slot_of, int32_t *expert_in) const;

    const Layer &layer() const { return layer_; }
    int device() const { return device_; }
    const Backend &on() const { return backend_; }
    const Slots &slots() const { return *slots_; }
    moepool_miss miss() const { return miss_; }

  private:
    std::vector<int32_t> read_ids(const moepool_ids &ids, void *stream);
    std::vector<Residency::Admission> place_hot();
    void fill(const std::vector<Residency::Admission> &admissions);
    void raise_pending() const;
    bool is_prompt(int64_t tokens, moepool_phase phase) const;
    bool ffn_on_device(const moepool_ids &ids, moepool_phase phase, const moepool_rows &x, const void *weights,
                       moepool_dtype weights_dtype, float *out, void *stream);
    void fetch_residency() const;
    // Hands the residency back to the device, if it is the one that has it.
    void return_residency();
    template <class Change>
    void change(const Change &change);
    void check(const std::vector<Residency::Choice> &chosen, const std::vector<int> &wanted, bool prompt) const;
    void record(int64_t tick, const Route *route, moepool_trace_phase phase, bool bypass,
                const std::vector<Residency::Admission> &admissions);
    void drain_trace();

    const std::shared_ptr<const Store> store_;
    const Layer &layer_;
    const int device_;
    const Backend &backend_;
    const PolicyConfig policy_;
    const moepool_miss miss_;
    const int admit_;
    const int prompt_tokens_;
    const int max_slots_;
    const std::unique_ptr<Slots> slots_;
    const int most_slots_;
    std::vector<int> hot_;  // static, pinned: who has the first slots, as far as there are any

    mutable std::mutex mutex_;  // of all below, and of filling slots
    mutable Residency residency_;
    std::vector<int> leases_;  // by slot: open routes that read it
    int open_routes_ = 0;
    bool must_settle_ = true;  // before the device's next step: fills and ops of ended routes may be under way
    DeviceSteps *device_steps_ = nullptr;  // set once the residency has moved to the device, where it then stays
    mutable DeviceSteps::Counts device_counts_{};
    mutable bool told_of_failure_ = false;  // of device_steps_
    moepool_pool_stats stats_{};
    bool tracing_ = false;
    int64_t trace_room_ = 0;       // words of a device
    std::vector<uint32_t> trace_;  // steps in their order: trace.h
    int64_t trace_lost_ = 0;
    mutable std::string pending_;  // an id out of range in device memory, to be told at the next call
};

}  // namespace moepool
