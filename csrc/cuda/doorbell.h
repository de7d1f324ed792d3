// The doorbell of a pool on CUDA: what its kernels and the host keep of it. pool/doorbell.h is the protocol,
// doorbell_device.h what the kernels do.
//
// A step whose missing experts the CPU is to compute, all or some of them:
//
//   books     decide which (Division), write the request straight into mapped memory, ring; then keep the books
//   hot part  gate/up and down of all other places, records of admitted experts copied beside
//   answer    one thread polls the mapped line and tells the others through device memory. Of a single token, the
//   blocks
//             of down read their pieces of the rows over the link; of more, some blocks bring the rows to Step::rows,
//             where the combine finds every place's row
//
// A step without such experts posts nothing and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/runtime.h"
#include "moepool.h"
#include "pool/division.h"
#include "pool/doorbell.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

// Of a pool, in device memory. Times are the device's nanoseconds.
struct BellState {
    uint32_t epoch;     // of the last step with a request
    uint32_t arrived;   // the last epoch whose answer was seen, or given up
    uint32_t poisoned;  // an answer did not come in time: nobody asks and nobody waits any more
    int32_t places;     // of this step that the CPU computes

    // What follows is for miss = auto.
    alignas(8) int32_t all_host;    // the CPU computes every place of the step, hits too
    int32_t course_due;             // the course may change in this step, or in the next
    int32_t next_all_host;          // all_host of the next step
    uint32_t measured_ns, link_ns;  // of division::Rates
    division::Beside beside;
    division::Fit fits[division::kLoads];
    division::Course course;
    uint32_t took_ns;  // how long the CPU was at work for the last answer
    // The last step: records, of which those copied were computed by the CPU, and when the books began, what crossed
    // the link was done, all was done. Before `begun`: not yet.
    int32_t streamed, copied, hosted, wanted, load;
    unsigned long long begun, ready, ended;
};

// What the kernels of a step get. state is NULL if the pool has no doorbell.
struct Bell {
    BellState *state;
    doorbell::Request *request;
    const doorbell::Answer *answer;
    doorbell::Trouble *trouble;
    uint32_t *silence;
    int32_t *experts;  // of the buffer in use
    uint8_t *input;
    const float *rows;
    int32_t *hosted;  // device memory: the places that the CPU computes
    int32_t buffer;   // its index
    bool divides;     // miss = auto; else the CPU computes every miss
    int32_t period;   // of division::advance
    bool by_nodes;    // a node of the graph asks the CPU, in front of down
    int64_t timeout_ns, give_up_ns;
};

// The host's side.
class Doorbell {
  public:
    // keep: what the CPU reads is alive as long as this is. nodes: the CPU is asked by a node of the graph.
    Doorbell(const Layer &layer, std::shared_ptr<const void> keep, bool divides, bool by_nodes, uint32_t measured_ns);
    ~Doorbell();
    Doorbell(const Doorbell &) = delete;
    Doorbell &operator=(const Doorbell &) = delete;

    // For steps of up to so many places: the index of a buffer.
    int add_buffer(int64_t places);
    Bell bell(int buffer, int32_t *hosted) const;
    // Why no step can be taken any more; empty: it can. Does not wait.
    std::string failure() const { return channel_->failure(); }
    void wake() const { channel_->wake(); }
    // Between the kernels that post and those that wait, if the CPU is asked by a node.
    void ask(cudaStream_t stream) const;
    bool by_nodes() const { return by_nodes_; }
    bool divides() const { return divides_; }
    const BellState *state() const { return state_.get(); }

  private:
    const Layer &layer_;
    const bool divides_, by_nodes_;
    DeviceMemory<BellState> state_;
    std::shared_ptr<doorbell::Channel> channel_;
};

// Whether a kernel that waits for the CPU must not be launched on the current device: a display's watchdog or its
// scheduler could end it.
bool needs_nodes();

// Nanoseconds that page-locked bytes take over the link of the current device, by a few copies; known from then on.
uint32_t measure_link(const uint8_t *record, int64_t bytes);

}  // namespace cuda
}  // namespace moepool
