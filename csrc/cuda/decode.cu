#include "cuda/decode.h"

#include <algorithm>
#include <atomic>

#include "cuda/decode_kernels.h"
#include "cuda/handover.h"
#include "error.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kMostBooks = 46 << 10;  // bytes of shared memory that resolve takes: any device has them

bool together(const Layer &layer) { return cuda::together(layer.matrices()[0], layer.matrices()[1]); }
// Gate or up.
bool any_quantised(const Layer &layer) { return layer.matrices()[0].quantised() || layer.matrices()[1].quantised(); }
StepConfig configure(const Layer &layer, int64_t tokens, int64_t k) {
    const std::vector<Matrix> &m = layer.matrices();
    return configure_step(m[0], m[1], m[2], tokens, k);
}

}  // namespace

// Tables and rows of a step of up to so many places, with what the types of the layer need.
struct Decoder::Workspace {
    const int64_t places;
    DeviceMemory<int32_t> ids, order, tile_count, commit_count;
    DeviceMemory<uint32_t> resolved, finished;
    DeviceMemory<unsigned long long> steps;
    DeviceMemory<DecodeTile> tiles;
    DeviceMemory<Commit> commits;
    DeviceMemory<ActivationBlock> input;
    DeviceMemory<uint4> handed;
    DeviceMemory<uint64_t> handed_x;
    DeviceMemory<float> gated, rows;
    DeviceMemory<int32_t> hosted;
    int bell_buffer = -1;

    Workspace(int64_t count, const Layer &layer)
        : places(count),
          ids(count),
          order(count * kMostDecodeTokens),
          tile_count(1),
          commit_count(1),
          resolved(1),
          finished(1),
          steps(1),
          tiles(count),
          commits(count),
          input(any_quantised(layer) ? count * layer.matrices()[0].columns / kBlockColumns : 0),
          handed(quads(layer)),
          handed_x(columns(layer)),
          gated(together(layer) ? 0 : count * layer.matrices()[0].rows),
          rows(count * layer.matrices()[2].rows),
          hosted(count) {}

    StepTables tables() const {
        return {ids.get(),          order.get(), tiles.get(),    tile_count.get(), commits.get(),
                commit_count.get(), steps.get(), resolved.get(), finished.get()};
    }

    // What is compared with the number of a step, and tables of which a step may read more than it wrote.
    void clear(cudaStream_t stream, const Layer &layer) const {
        const auto zero = [&](const auto &memory, int64_t count) {
            check(cudaMemsetAsync(memory.get(), 0, static_cast<size_t>(count) * sizeof *memory.get(), stream),
                  "clearing the tables of a step");
        };
        const RelaxedCapture relaxed;
        zero(steps, 1);
        zero(resolved, 1);
        zero(finished, 1);
        zero(tiles, places);
        zero(order, places * kMostDecodeTokens);
        zero(handed, quads(layer));
        zero(handed_x, columns(layer));
        check(cudaStreamSynchronize(stream), "waiting for the tables of a step");
    }

  private:
    // Of handed and handed_x: one of them is 0.
    int64_t quads(const Layer &layer) const {
        return layer.matrices()[2].quantised() ? places * layer.matrices()[2].columns / kBlockColumns * kQuads : 0;
    }
    int64_t columns(const Layer &layer) const {
        return layer.matrices()[2].quantised() ? 0 : places * layer.matrices()[2].columns;
    }
};

Decoder::Decoder(int device, const Layer &layer, const std::vector<const uint8_t *> &records, int slots, uint8_t *arena,
                 const PolicyConfig &policy, int admit, std::unique_ptr<Doorbell> doorbell)
    : device_(device),
      layer_(layer),
      slots_(slots),
      arena_(arena),
      policy_(policy),
      admit_(admit),
      doorbell_(std::move(doorbell)),
      state_(1),
      slot_of_(layer.experts()),
      expert_in_(slots),
      leases_(slots),
      uses_(layer.experts()),
      records_(layer.experts()) {
    const RelaxedCapture relaxed;
    for (const Matrix &m : layer.matrices()) load_decode_kernels(m);
    load_resolve_kernel();
    *bad_id_.get() = {0, -1, 1};
    copy(records_.get(), records.data(), records.size());
    const DeviceState fresh = {};
    copy(state_.get(), &fresh, 1);
    const std::vector<int32_t> empty(static_cast<size_t>(slots), -1), none(static_cast<size_t>(slots), 0);
    copy(expert_in_.get(), empty.data(), empty.size());
    copy(leases_.get(), none.data(), none.size());
}

Decoder::~Decoder() {
    try {
        last_.wait();
    } catch (...) {  // the device is lost
    }
}

const char *Decoder::refuses(const Layer &layer, int slots) {
    if (layer.matrices().size() != 3) return "the layer is not gate, up and down";
    if (resolve_shared_bytes(layer.experts(), slots) > kMostBooks) return "the layer has too many experts";
    return nullptr;
}

const char *Decoder::refuses(int64_t tokens, int64_t k) const {
    if (tokens < 1 || tokens > kMostDecodeTokens) return "a decode step on the device has 1 to 16 tokens";
    if (k < 1 || k > kMostDecodePlaces / tokens) return "a decode step on the device has at most 512 places";
    const OnDevice on(device_);
    if (!configure(layer_, tokens, k).fits())
        return "the device has too little shared memory for so many places a token";
    return nullptr;
}

std::string Decoder::describe(int64_t tokens, int64_t k, int slots) const {
    const OnDevice on(device_);
    const StepConfig config = configure(layer_, tokens, k);
    const char *misses = !asks_the_cpu(slots)    ? ""
                         : doorbell_->by_nodes() ? "; misses by the CPU, asked by a node of the graph"
                                                 : "; misses by the CPU, asked through a doorbell";
    const std::string down = ", down " + config.down.text() + misses;
    if (together(layer_)) return "gate/up " + config.gate_up.text() + down;
    const auto pass = [&](int matrix, const DecodeConfig &c) {
        return layer_.matrices()[static_cast<size_t>(matrix)].type().name + (", " + c.text());
    };
    return "gate, of " + pass(0, config.gate_up) + ", then up, of " + pass(1, config.up) + down;
}

// Whether steps that are launched now know of the doorbell. Where every expert gets a slot as it is wanted, miss = auto
// has nothing to divide for long, and kernels that need not look are quicker.
bool Decoder::asks_the_cpu(int slots) const {
    const bool all_come_in = slots >= layer_.experts() && admit_ < 0 && policy_.kind != MOEPOOL_POLICY_STATIC &&
                             policy_.kind != MOEPOOL_POLICY_PINNED;
    return doorbell_ && !(doorbell_->divides() && all_come_in);
}

void Decoder::reserve(int64_t places) {
    if (!workspaces_.empty() && workspaces_.back()->places >= places) return;
    int64_t room = 8;  // doubling, so that rising shapes leave few behind
    while (room < places) room *= 2;
    auto made = std::make_unique<Workspace>(room, layer_);
    made->clear(side_, layer_);
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
    if (in_graph) {
        const RelaxedCapture relaxed;
        leased_.wait();  // a graph can not wait for what was queued outside of it
    } else {
        last_.hold(stream);
        leased_.hold(stream);
    }
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
    step.single = tokens == 1 && together(layer_);
    step.most_tiles = step.single ? step.k : most_tiles_of(static_cast<int>(places), layer_.experts());
    step.residents = {layer_.experts(), slot_of_.get(), records_.get(), arena_, layer_.record_bytes(), layer_.tail()};
    step.tables = w.tables();
    step.x = x.data;
    step.x_dtype = x.dtype;
    step.x_per_row = x.per_place ? 1 : step.k;
    step.input = w.input.get();
    step.gated = w.gated.get();
    step.handed = w.handed.get();
    step.handed_x = w.handed_x.get();
    step.rows = w.rows.get();
    const bool asks = asks_the_cpu(slots_now_);
    if (asks) {
        step.bell = doorbell_->bell(w.bell_buffer, w.hosted.get());
        doorbell_->wake();
    }
    step.weights = weights;
    step.weights_dtype = weights_dtype;
    step.out = out;
    ResolveArguments arguments = {};
    arguments.slots = slots_;
    arguments.policy = policy_;
    arguments.admit = admit_;
    arguments.state = state_.get();
    arguments.expert_in = expert_in_.get();
    arguments.uses = uses_.get();
    arguments.leases = leases_.get();
    arguments.bad_id = bad_id_.get();
    arguments.row_elements = any_quantised(layer_) ? places / step.x_per_row * gate.columns : 0;
    arguments.columns = gate.columns;
    arguments.quantised = any_quantised(layer_);
    arguments.floats = !gate.quantised() || !up.quantised();
    // A step that stops half way has changed the books but not the slots.
    whole_ = false;
    if (!step.single) resolve(step, arguments, stream);
    gate_up(gate, up, step, arguments, stream);
    if (asks) doorbell_->ask(stream);
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

// Steps of a graph may be under way on any stream.
void Decoder::wait() {
    if (!captured_) return last_.wait();
    // To wait would break a capture that is under way. This fails beforehand, if that is on a blocking stream; of
    // others nobody can be asked.
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(cudaStreamLegacy, &status), "waiting for replays");
    check(cudaDeviceSynchronize(), "waiting for the device");
}

void Decoder::load(const Residency::Snapshot &residency, const std::vector<int> &leases) {
    require_whole();
    const OnDevice on(device_);
    std::vector<int32_t> expert_in = residency.expert_in;
    expert_in.resize(static_cast<size_t>(slots_), -1);
    whole_ = false;  // until it is all there
    copy(slot_of_.get(), residency.slot_of.data(), residency.slot_of.size());
    copy(expert_in_.get(), expert_in.data(), expert_in.size());
    copy(uses_.get(), residency.uses.data(), residency.uses.size());
    DeviceState state;
    copy(&state, state_.get(), 1);
    state.tick = residency.tick;
    slots_now_ = static_cast<int>(residency.expert_in.size());
    state.slots = slots_now_;
    state.election = residency.election;
    copy(state_.get(), &state, 1);
    lease(leases);
    whole_ = true;
}

DeviceSteps::Counts Decoder::store(Residency::Snapshot &residency) {
    require_whole();
    const OnDevice on(device_);
    wait();
    DeviceState state;
    copy(&state, state_.get(), 1);
    residency.tick = state.tick;
    residency.election = state.election;
    residency.slot_of.resize(static_cast<size_t>(layer_.experts()));
    residency.uses.resize(static_cast<size_t>(layer_.experts()));
    residency.expert_in.resize(static_cast<size_t>(state.slots));
    copy(residency.slot_of.data(), slot_of_.get(), residency.slot_of.size());
    copy(residency.uses.data(), uses_.get(), residency.uses.size());
    copy(residency.expert_in.data(), expert_in_.get(), residency.expert_in.size());
    if (doorbell_) {
        BellState bell;
        copy(&bell, doorbell_->state(), 1);
        state.counts.step_backs = bell.course.step_backs;
    }
    return state.counts;
}

void Decoder::lease(const std::vector<int> &leases) {
    const OnDevice on(device_);
    const RelaxedCapture relaxed;
    std::vector<int32_t> all(leases.begin(), leases.end());
    all.resize(static_cast<size_t>(slots_), 0);
    int32_t leased = 0;
    for (const int32_t routes : all) leased += routes;
    last_.hold(side_);
    // Pageable memory is copied before the call returns.
    const auto bytes = all.size() * sizeof(all[0]);
    if (bytes)
        check(cudaMemcpyAsync(leases_.get(), all.data(), bytes, cudaMemcpyHostToDevice, side_), "copying leases");
    check(cudaMemcpyAsync(&state_.get()->leased, &leased, sizeof leased, cudaMemcpyHostToDevice, side_),
          "copying leases");
    leased_.record(side_);
    if (captured_) leased_.wait();  // a graph may be launched at once, and holds nothing that waits for it
}

void Decoder::trace(int64_t words) {
    const OnDevice on(device_);
    wait();
    int64_t room = 0;
    for (room = words > 0 ? 1 : 0; room < words; room *= 2) {
    }
    DeviceMemory<uint32_t> ring(room);
    DeviceState state;
    copy(&state, state_.get(), 1);
    state.trace = ring.get();
    state.trace_words = static_cast<uint64_t>(room);
    state.traced = state.drained = 0;
    state.lost = 0;
    copy(state_.get(), &state, 1);
    trace_ = std::move(ring);
    trace_words_ = room;
    drained_ = 0;
    lost_ = 0;
}

int64_t Decoder::take_trace(std::vector<uint32_t> &words) {
    if (trace_words_ == 0) return 0;
    const OnDevice on(device_);
    uint64_t traced = 0;
    int64_t lost = 0;
    copy(&traced, &state_.get()->traced, 1);
    copy(&lost, &state_.get()->lost, 1);
    const uint64_t room = static_cast<uint64_t>(trace_words_), count = traced - drained_;
    const size_t before = words.size();
    words.resize(before + count);
    const uint64_t at = drained_ & (room - 1), straight = std::min(count, room - at);
    copy(words.data() + before, trace_.get() + at, straight);
    copy(words.data() + before + straight, trace_.get(), count - straight);
    drained_ = traced;
    copy(&state_.get()->drained, &drained_, 1);  // only now may the device write there again
    const int64_t more = lost - lost_;
    lost_ = lost;
    return more;
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
