#include "cuda/decode.h"

#include <algorithm>

#include "cuda/decode_kernels.h"
#include "error.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int kMostBooks = 40 << 10;  // bytes of shared memory that resolve takes: any device has them

bool is_quantised(const Matrix &m) { return m.type().block > 1; }

template <class T>
T *allocate(int64_t count) {
    void *data = nullptr;
    const RelaxedCapture relaxed;
    check(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(1, count)) * sizeof(T)),
          "allocating the memory of a decode step");
    return static_cast<T *>(data);
}

}  // namespace

// Tables and rows of a step of up to so many places.
struct Decoder::Workspace {
    const int64_t places;
    StepTables tables;
    ActivationBlock *input, *hidden;
    float *hidden_x, *rows;

    Workspace(int64_t count, const Layer &layer)
        : places(count),
          tables{allocate<int32_t>(count), allocate<int32_t>(count), allocate<DecodeTile>(count),
                 allocate<int32_t>(1),     allocate<Commit>(count),  allocate<int32_t>(1),
                 allocate<uint32_t>(1),    allocate<uint32_t>(1)},
          input(allocate<ActivationBlock>(count * layer.matrices()[0].columns / kBlockColumns)),
          hidden(allocate<ActivationBlock>(count * layer.matrices()[2].columns / kBlockColumns)),
          hidden_x(allocate<float>(count * layer.matrices()[2].columns)),
          rows(allocate<float>(count * layer.matrices()[2].rows)) {}
    ~Workspace() {
        for (void *memory :
             {static_cast<void *>(tables.ids), static_cast<void *>(tables.order), static_cast<void *>(tables.tiles),
              static_cast<void *>(tables.tile_count), static_cast<void *>(tables.commits),
              static_cast<void *>(tables.commit_count), static_cast<void *>(tables.resolved),
              static_cast<void *>(tables.finished), static_cast<void *>(input), static_cast<void *>(hidden),
              static_cast<void *>(hidden_x), static_cast<void *>(rows)})
            cudaFree(memory);
    }
};

Decoder::Decoder(int device, const Layer &layer, const std::vector<const uint8_t *> &records, int slots, uint8_t *arena,
                 bool static_policy, int admit)
    : device_(device), layer_(layer), slots_(slots), arena_(arena), static_policy_(static_policy), admit_(admit) {
    const RelaxedCapture relaxed;
    for (const Matrix &m : layer.matrices()) load_decode_kernels(m);
    load_resolve_kernel();
    check(cudaHostAlloc(reinterpret_cast<void **>(&bad_id_), sizeof *bad_id_, cudaHostAllocMapped),
          "allocating page-locked memory");
    *bad_id_ = {0, -1, 1};
    state_ = allocate<DeviceState>(1);
    slot_of_ = allocate<int32_t>(layer.experts());
    expert_in_ = allocate<int32_t>(slots);
    stamp_ = allocate<int64_t>(slots);
    records_ = allocate<const uint8_t *>(layer.experts());
    copy(records_, records.data(), static_cast<int64_t>(records.size() * sizeof(records[0])));
    const DeviceState fresh = {};
    copy(state_, &fresh, sizeof fresh);
}

Decoder::~Decoder() {
    cudaFree(state_);
    cudaFree(slot_of_);
    cudaFree(expert_in_);
    cudaFree(stamp_);
    cudaFree(records_);
    cudaFreeHost(bad_id_);
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
    return nullptr;
}

void Decoder::reserve(int64_t tokens, int64_t k) {
    if (!workspaces_.empty() && workspaces_.back()->places >= tokens * k) return;
    workspaces_.push_back(std::make_unique<Workspace>(tokens * k, layer_));
    const uint32_t none = 0;
    copy(workspaces_.back()->tables.finished, &none, sizeof none);
    copy(workspaces_.back()->tables.resolved, &none, sizeof none);
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
    if (!in_graph && last_stream_ != stream) last_.hold(stream);
    reserve(tokens, k);
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
    step.residents = {layer_.experts(), slot_of_, records_, arena_, layer_.record_bytes(), layer_.tail()};
    step.tables = w.tables;
    step.x = x.data;
    step.x_dtype = x.dtype;
    step.x_per_row = x.per_place ? 1 : step.k;
    step.input = w.input;
    step.hidden = is_quantised(down) ? w.hidden : nullptr;
    step.hidden_x = is_quantised(down) ? nullptr : w.hidden_x;
    step.rows = w.rows;
    step.weights = weights;
    step.weights_dtype = weights_dtype;
    step.out = out;
    const ResolveArguments arguments{
        slots_,     static_policy_, admit_,  state_,
        expert_in_, stamp_,         bad_id_, is_quantised(gate) ? places / step.x_per_row * gate.columns : 0};
    if (tokens > 1) resolve(step, arguments, stream);
    gate_up(gate, up, step, arguments, stream);
    down_and_combine(down, step, stream);
    if (in_graph) return;
    last_.record(stream);
    last_stream_ = stream;
}

void Decoder::load(const Residency::Snapshot &residency) {
    const OnDevice on(device_);
    copy(slot_of_, residency.slot_of.data(), layer_.experts() * static_cast<int64_t>(sizeof(int32_t)));
    copy(expert_in_, residency.expert_in.data(), slots_ * static_cast<int64_t>(sizeof(int32_t)));
    copy(stamp_, residency.stamp.data(), slots_ * static_cast<int64_t>(sizeof(int64_t)));
    copy(&state_->tick, &residency.tick, sizeof residency.tick);
}

DeviceSteps::Counts Decoder::store(Residency::Snapshot &residency) {
    const OnDevice on(device_);
    check(cudaDeviceSynchronize(), "waiting for the device");
    residency.slot_of.resize(static_cast<size_t>(layer_.experts()));
    residency.expert_in.resize(static_cast<size_t>(slots_));
    residency.stamp.resize(static_cast<size_t>(slots_));
    DeviceState state;
    copy(residency.slot_of.data(), slot_of_, layer_.experts() * static_cast<int64_t>(sizeof(int32_t)));
    copy(residency.expert_in.data(), expert_in_, slots_ * static_cast<int64_t>(sizeof(int32_t)));
    copy(residency.stamp.data(), stamp_, slots_ * static_cast<int64_t>(sizeof(int64_t)));
    copy(&state, state_, sizeof state);
    residency.tick = state.tick;
    return state.counts;
}

DeviceSteps::BadId Decoder::take_bad_id() {
    volatile BadId *shared = bad_id_;
    const BadId bad{shared->id, shared->place, shared->k};
    if (bad.place >= 0) shared->place = -1;
    return bad;
}

}  // namespace cuda
}  // namespace moepool
