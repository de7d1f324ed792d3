#include "cuda/decode.h"

#include <algorithm>
#include <atomic>

#include "cuda/decode_kernels.h"
#include "error.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kMostBooks = 40 << 10;  // bytes of shared memory that resolve takes: any device has them

}  // namespace

// Tables and rows of a step of up to so many places, with what the types of the layer need.
struct Decoder::Workspace {
    const int64_t places;
    DeviceMemory<int32_t> ids, order, tile_count, commit_count;
    DeviceMemory<uint32_t> resolved, finished;
    DeviceMemory<DecodeTile> tiles;
    DeviceMemory<Commit> commits;
    DeviceMemory<ActivationBlock> input, hidden;
    DeviceMemory<float> hidden_x, rows;
    DeviceMemory<int32_t> hosted;
    int bell_buffer = -1;

    Workspace(int64_t count, const Layer &layer)
        : places(count),
          ids(count),
          order(count),
          tile_count(1),
          commit_count(1),
          resolved(1),
          finished(1),
          tiles(count),
          commits(count),
          input(layer.matrices()[0].quantised() ? count * layer.matrices()[0].columns / kBlockColumns : 0),
          hidden(layer.matrices()[2].quantised() ? count * layer.matrices()[2].columns / kBlockColumns : 0),
          hidden_x(layer.matrices()[2].quantised() ? 0 : count * layer.matrices()[2].columns),
          rows(count * layer.matrices()[2].rows),
          hosted(count) {}

    StepTables tables() const {
        return {ids.get(),     order.get(),        tiles.get(),    tile_count.get(),
                commits.get(), commit_count.get(), resolved.get(), finished.get()};
    }
};

Decoder::Decoder(int device, const Layer &layer, const std::vector<const uint8_t *> &records, int slots, uint8_t *arena,
                 bool static_policy, int admit, std::unique_ptr<Doorbell> doorbell)
    : device_(device),
      layer_(layer),
      slots_(slots),
      arena_(arena),
      static_policy_(static_policy),
      admit_(admit),
      doorbell_(std::move(doorbell)),
      state_(1),
      slot_of_(layer.experts()),
      expert_in_(slots),
      stamp_(slots),
      records_(layer.experts()) {
    const RelaxedCapture relaxed;
    for (const Matrix &m : layer.matrices()) load_decode_kernels(m);
    load_resolve_kernel();
    *bad_id_.get() = {0, -1, 1};
    copy(records_.get(), records.data(), static_cast<int64_t>(records.size() * sizeof(records[0])));
    const DeviceState fresh = {};
    copy(state_.get(), &fresh, sizeof fresh);
}

Decoder::~Decoder() {
    try {
        last_.wait();
    } catch (...) {  // the device is lost
    }
}

const char *Decoder::refuses(const Layer &layer, int slots) {
    const std::vector<Matrix> &m = layer.matrices();
    if (m.size() != 3) return "the layer is not gate, up and down";
    if (m[0].type_index != m[1].type_index) return "gate and up differ in type";
    if (resolve_shared_bytes(layer.experts(), slots) > kMostBooks) return "the layer has too many experts";
    return nullptr;
}

const char *Decoder::refuses(int64_t tokens, int64_t k) const {
    if (tokens < 1 || tokens > kMostDecodeTokens) return "a decode step on the device has 1 to 16 tokens";
    if (tokens * k > kMostDecodePlaces) return "a decode step on the device has at most 512 places";
    const OnDevice on(device_);
    if (!configure_step(layer_.matrices()[0], layer_.matrices()[2], tokens, k).fits())
        return "the device has too little shared memory for so many places a token";
    return nullptr;
}

std::string Decoder::describe(int64_t tokens, int64_t k) const {
    const OnDevice on(device_);
    const StepConfig config = configure_step(layer_.matrices()[0], layer_.matrices()[2], tokens, k);
    const char *misses = !doorbell_              ? ""
                         : doorbell_->by_nodes() ? "; misses by the CPU, asked by a node of the graph"
                                                 : "; misses by the CPU, asked through a doorbell";
    return "gate/up " + config.gate_up.text() + ", down " + config.down.text() + misses;
}

void Decoder::reserve(int64_t places) {
    if (!workspaces_.empty() && workspaces_.back()->places >= places) return;
    int64_t room = 8;  // doubling, so that rising shapes leave few behind
    while (room < places) room *= 2;
    auto made = std::make_unique<Workspace>(room, layer_);
    const uint32_t none = 0;
    copy(made->finished.get(), &none, sizeof none);
    copy(made->resolved.get(), &none, sizeof none);
    if (doorbell_) made->bell_buffer = doorbell_->add_buffer(room);
    workspaces_.push_back(std::move(made));
}

void Decoder::copy(void *to, const void *from, int64_t bytes) {
    if (bytes == 0) return;
    const RelaxedCapture relaxed;
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, side_), "copying the residency");
    check(cudaStreamSynchronize(side_), "waiting for the residency");
}

void Decoder::run(const moepool_ids &ids, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype,
                  float *out, void *caller_stream) {
    const OnDevice on(device_);
    const auto stream = static_cast<cudaStream_t>(caller_stream);
    const int64_t tokens = ids.tokens, k = ids.k;
    const bool in_graph = capturing(stream);
    if (!in_graph) last_.hold(stream);
    require_whole();
    reserve(tokens * k);
    const Workspace &w = *workspaces_.back();
    const Matrix &gate = layer_.matrices()[0], &up = layer_.matrices()[1], &down = layer_.matrices()[2];
    const int64_t places = tokens * k;
    Step step = {};
    step.ids = ids.data;
    step.bits = ids.bits;
    step.tokens = static_cast<int32_t>(tokens);
    step.k = static_cast<int32_t>(k);
    // Of more tokens: at most one a place, or full ones and a short one an expert.
    step.most_tiles =
        static_cast<int32_t>(tokens == 1 ? k : std::min(places, layer_.experts() + places / kMostDecodeTokens));
    step.residents = {layer_.experts(), slot_of_.get(), records_.get(), arena_, layer_.record_bytes(), layer_.tail()};
    step.tables = w.tables();
    step.x = x.data;
    step.x_dtype = x.dtype;
    step.x_per_row = x.per_place ? 1 : step.k;
    step.input = w.input.get();
    step.hidden = w.hidden.get();
    step.hidden_x = w.hidden_x.get();
    step.rows = w.rows.get();
    if (doorbell_) {
        step.bell = doorbell_->bell(w.bell_buffer, w.hosted.get());
        doorbell_->wake();
    }
    step.weights = weights;
    step.weights_dtype = weights_dtype;
    step.out = out;
    const ResolveArguments arguments{
        slots_,           static_policy_,  admit_,        state_.get(),
        expert_in_.get(), stamp_.get(),    bad_id_.get(), gate.quantised() ? places / step.x_per_row * gate.columns : 0,
        gate.columns,     gate.quantised()};
    // A step that stops half way has changed the books but not the slots.
    whole_ = false;
    if (tokens > 1) resolve(step, arguments, stream);
    gate_up(gate, up, step, arguments, stream);
    if (doorbell_) doorbell_->ask(stream);
    down_and_combine(down, step, stream);
    whole_ = true;
    captured_ = captured_ || in_graph;
    if (in_graph) return;
    last_.record(stream);
}

void Decoder::require_whole() const {
    if (!whole_)
        fail(MOEPOOL_ERROR_STATE, "an earlier step of this pool failed on the device half way: make a new pool");
}

void Decoder::load(const Residency::Snapshot &residency) {
    require_whole();
    const OnDevice on(device_);
    copy(slot_of_.get(), residency.slot_of.data(), layer_.experts() * static_cast<int64_t>(sizeof(int32_t)));
    copy(expert_in_.get(), residency.expert_in.data(), slots_ * static_cast<int64_t>(sizeof(int32_t)));
    std::vector<int64_t> stamps(static_cast<size_t>(slots_), 0);
    for (size_t slot = 0; slot < stamps.size(); ++slot)
        if (const int32_t expert = residency.expert_in[slot]; expert >= 0)
            stamps[slot] = residency.uses[static_cast<size_t>(expert)].last;
    copy(stamp_.get(), stamps.data(), slots_ * static_cast<int64_t>(sizeof(int64_t)));
    copy(&state_.get()->tick, &residency.tick, sizeof residency.tick);
}

DeviceSteps::Counts Decoder::store(Residency::Snapshot &residency) {
    require_whole();
    const OnDevice on(device_);
    // Steps of a graph may be under way on any stream.
    if (captured_)
        check(cudaDeviceSynchronize(), "waiting for the device");
    else
        last_.wait();
    residency.slot_of.resize(static_cast<size_t>(layer_.experts()));
    residency.expert_in.resize(static_cast<size_t>(slots_));
    residency.uses.assign(static_cast<size_t>(layer_.experts()), Use{});
    std::vector<int64_t> stamps(static_cast<size_t>(slots_));
    DeviceState state;
    copy(residency.slot_of.data(), slot_of_.get(), layer_.experts() * static_cast<int64_t>(sizeof(int32_t)));
    copy(residency.expert_in.data(), expert_in_.get(), slots_ * static_cast<int64_t>(sizeof(int32_t)));
    copy(stamps.data(), stamp_.get(), slots_ * static_cast<int64_t>(sizeof(int64_t)));
    copy(&state, state_.get(), sizeof state);
    residency.tick = state.tick;
    for (size_t slot = 0; slot < stamps.size(); ++slot)
        if (const int32_t expert = residency.expert_in[slot]; expert >= 0)
            residency.uses[static_cast<size_t>(expert)].last = stamps[slot];
    if (doorbell_) {
        BellState bell;
        copy(&bell, doorbell_->state(), sizeof bell);
        state.counts.step_backs = bell.course.step_backs;
    }
    return state.counts;
}

DeviceSteps::BadId Decoder::take_bad_id() {
    // The device writes the place last.
    volatile BadId *shared = bad_id_.get();
    const int32_t place = shared->place;
    std::atomic_thread_fence(std::memory_order_acquire);
    const BadId bad{shared->id, place, shared->k};
    if (place >= 0) shared->place = -1;
    return bad;
}

}  // namespace cuda
}  // namespace moepool
