#include "cuda/doorbell.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "cpu/kernels.h"
#include "pool/backend.h"

namespace moepool {
namespace cuda {

namespace {

void *allocate_mapped(size_t bytes) {
    const RelaxedCapture relaxed;
    void *made = nullptr;
    check(cudaHostAlloc(&made, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "allocating page-locked memory");
    return made;
}
void free_mapped(void *memory) {
    const RelaxedCapture relaxed;
    cudaFreeHost(memory);
    cudaGetLastError();
}

// A node of a graph: no call into the runtime from here on.
void CUDART_CB answer_request(void *channel) { static_cast<doorbell::Channel *>(channel)->serve(); }

// Of an activation row, in the forms that gate and up want.
int64_t input_bytes(const Matrix &gate, const Matrix &up) {
    const int64_t chunks = (gate.columns + kChunkColumns - 1) / kChunkColumns;
    int64_t bytes = 0;
    if (gate.quantised() || up.quantised()) bytes += chunks * static_cast<int64_t>(sizeof(ActivationChunk));
    if (!gate.quantised() || !up.quantised()) bytes += gate.columns * 4;
    return bytes;
}

}  // namespace

Doorbell::Doorbell(const Layer &layer, std::shared_ptr<const void> keep, bool divides, bool by_nodes,
                   uint32_t measured_ns)
    : layer_(layer),
      divides_(divides),
      by_nodes_(by_nodes),
      state_(1),
      channel_(doorbell::Channel::open(
          {allocate_mapped, free_mapped}, layer.matrices()[2].rows, !by_nodes,
          [&layer, keep = std::move(keep)](const doorbell::Work &work) { cpu_answer(layer, work); })) {
    BellState fresh = {};
    fresh.measured_ns = fresh.link_ns = measured_ns;
    fresh.beside = division::begin_beside(measured_ns);
    fresh.course_due = divides;
    fresh.course = division::begin_course(std::abs(doorbell::settings().period.load()));
    try {
        const RelaxedCapture relaxed;
        const Stream stream;
        check(cudaMemcpyAsync(state_.get(), &fresh, sizeof fresh, cudaMemcpyHostToDevice, stream), "making a doorbell");
        check(cudaStreamSynchronize(stream), "making a doorbell");
    } catch (...) {
        doorbell::Channel::close(std::move(channel_));
        throw;
    }
}

Doorbell::~Doorbell() { doorbell::Channel::close(std::move(channel_)); }

int Doorbell::add_buffer(int64_t places) {
    return channel_->add_buffer(places, places * input_bytes(layer_.matrices()[0], layer_.matrices()[1]));
}

Bell Doorbell::bell(int buffer, int32_t *hosted) const {
    const doorbell::Buffer &b = channel_->buffer(buffer);
    Bell bell = {};
    bell.state = state_.get();
    bell.request = channel_->request();
    bell.answer = channel_->answer();
    bell.trouble = channel_->trouble();
    bell.silence = channel_->silence();
    bell.experts = b.experts;
    bell.input = b.input;
    bell.rows = b.rows;
    bell.hosted = hosted;
    bell.buffer = buffer;
    bell.divides = divides_;
    bell.by_nodes = by_nodes_;
    bell.period = doorbell::settings().period.load();
    bell.timeout_ns = doorbell::settings().timeout_us.load() * 1000;
    bell.give_up_ns = std::chrono::nanoseconds(doorbell::kGiveUp).count();
    return bell;
}

void Doorbell::ask(cudaStream_t stream) const {
    if (by_nodes_) check(cudaLaunchHostFunc(stream, answer_request, channel_.get()), "asking the CPU");
}

bool needs_nodes() {
    const int wanted = doorbell::settings().host_nodes.load();
    if (wanted >= 0) return wanted > 0;
    // Windows, also underneath Linux: its scheduler ends kernels that take long, and may not run two at once.
    return access("/dev/dxg", F_OK) == 0;
}

uint32_t measure_link(const uint8_t *record, int64_t bytes) {
    static std::mutex mutex;
    static auto *known = new std::map<std::pair<int, int64_t>, uint32_t>;
    const std::lock_guard<std::mutex> lock(mutex);
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    uint32_t &ns = (*known)[{device, bytes}];
    if (ns) return ns;
    const RelaxedCapture relaxed;
    const DeviceMemory<uint8_t> target(bytes);
    const Stream stream;
    constexpr int kCopies = 4, kTries = 3;
    float best = 0;
    for (int i = 0; i < kTries; ++i) {
        struct Timer {
            cudaEvent_t event = nullptr;
            Timer() { check(cudaEventCreate(&event), "creating an event"); }
            ~Timer() { cudaEventDestroy(event); }
        } const first, last;
        check(cudaEventRecord(first.event, stream), "recording an event");
        for (int copy = 0; copy < kCopies; ++copy)
            check(cudaMemcpyAsync(target.get(), record, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream),
                  "measuring the link");
        check(cudaEventRecord(last.event, stream), "recording an event");
        check(cudaEventSynchronize(last.event), "measuring the link");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, first.event, last.event), "measuring the link");
        best = i == 0 ? ms : std::min(best, ms);
    }
    ns = std::max<uint32_t>(1, static_cast<uint32_t>(best * 1e6f / kCopies));
    return ns;
}

}  // namespace cuda
}  // namespace moepool
