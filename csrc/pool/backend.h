// What a pool asks of the device it is on. One implementation a kind of device: cpu/backend.cpp, cuda/backend.cu.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moepool.h"
#include "pool/doorbell.h"
#include "pool/residency.h"
#include "store/store.h"

namespace moepool {

class Route;

// What a route keeps on its device: ends with the route, and with it what its ops may still be reading.
class DeviceRoute {
  public:
    virtual ~DeviceRoute() = default;
};

// Takes whole decode steps on the device: resolve, fill and the layer, with the residency in its memory.
class DeviceSteps {
  public:
    struct BadId {
        int64_t id;
        int32_t place, k;  // place -1: there was none
    };
    struct Counts {
        int64_t steps, bypasses, hits, misses, evictions, admissions, in_place, hosted, step_backs;
    };
    virtual ~DeviceSteps() = default;
    // Why a step of this shape can not be taken here; NULL: it can.
    virtual const char *refuses(int64_t tokens, int64_t k) const = 0;
    // The launch geometry of a step that is not refused, and whether the CPU computes misses if there are so many
    // slots.
    virtual std::string describe(int64_t tokens, int64_t k, int slots) const = 0;
    virtual void run(const moepool_ids &ids, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype,
                     float *out, void *stream) = 0;
    // Moves the residency to the device, and back with what was counted there so far. Both wait for the device. leases:
    // how many open routes pin each slot.
    virtual void load(const Residency::Snapshot &residency, const std::vector<int> &leases) = 0;
    virtual Counts store(Residency::Snapshot &residency) = 0;
    // Tells the device of leases that have changed: behind the steps so far, in front of those to come.
    virtual void lease(const std::vector<int> &leases) = 0;
    // Records steps from here on, in a ring of at least so many words (trace.h); 0: no more. Waits for the device.
    virtual void trace(int64_t words) = 0;
    // Appends the steps recorded since the last call and gives how many more there was no room for. Waits for nobody:
    // store does.
    virtual int64_t take_trace(std::vector<uint32_t> &words) = 0;
    // The first id out of range since the last call, as far as the device has come. Does not wait.
    virtual BadId take_bad_id() = 0;
    // Why the rows of steps so far may be NaN, and no step can be taken any more; empty: all is well. Does not wait.
    virtual std::string failure() const { return {}; }
};

// The slots of one pool: room for whole records, zeroed at the start.
class Slots {
  public:
    virtual ~Slots() = default;
    virtual int count() const = 0;
    virtual int64_t bytes() const = 0;
    // The address of a slot in the device's memory.
    virtual const uint8_t *slot(int index) const = 0;
    // Copies a record into a slot that no open route reads.
    virtual void fill(int index, const uint8_t *record) = 0;
    // Makes a route, whose groups are set, known to the device. Its ops see all fills made so far.
    virtual std::unique_ptr<DeviceRoute> publish(const Route &route) = 0;
    // Changes the count to at most what make_slots was told, less if memory is short; nothing reads the slots that go.
    virtual void resize(int count) = 0;
    // Waits until fills and the ops of routes that have ended are done.
    virtual void settle() {}
    // NULL: this device, or this layer on it, has none. keep: the layer is there as long as this is.
    virtual DeviceSteps *device_steps(const PolicyConfig &, int /*admit*/, moepool_miss,
                                      const std::shared_ptr<const void> & /*keep*/) {
        return nullptr;
    }
    // Why device_steps gave NULL.
    virtual std::string why_no_device_steps() const { return {}; }
};

class Backend {
  public:
    virtual ~Backend() = default;

    // Slots for at most `count` records; fewer if memory is short (moepool_pool_config.budget_bytes). most: what they
    // may be resized to; memory is taken for `count` only.
    virtual std::unique_ptr<Slots> make_slots(const Layer &layer, int count, int most, int64_t budget_bytes) const = 0;

    // Fails with MOEPOOL_ERROR_STATE if the host can not wait for this stream, because it records a graph.
    virtual void require_host(void *stream, const char *what) const = 0;
    // Copies device memory to the host, in the order of the stream, and waits.
    virtual void read(void *host, const void *device, int64_t bytes, void *stream) const = 0;

    virtual void matmul_id(const Route &route, int matrix, moepool_half half, const moepool_rows &x, float *out,
                           void *stream) const = 0;
    virtual void ffn(const Route &route, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype,
                     float *out, void *stream) const = 0;
    virtual void combine(const Route &route, int64_t columns, const float *rows, const void *weights,
                         moepool_dtype weights_dtype, float *out, void *stream) const = 0;
    virtual void swiglu(int64_t count, const float *gate, const float *up, float *out, void *stream) const = 0;
    virtual void add(int64_t count, const float *a, const float *b, float *out, void *stream) const = 0;
};

// By device number; fails with a clear message where there is no such device.
const Backend &backend(int device);
const Backend &cpu_backend();

// The cold half of the chain gate, up, swiglu, down on the CPU, for a route of any device: out (tokens, k, rows of
// down), +0 in the other places. Host memory.
void cpu_cold_chain(const Route &route, const moepool_rows &x, float *out);

// The same chain for a request of a device. The input is rows of ActivationChunk if gate or up is quantised, then rows
// of float32 if one is of floats. Rows of places that want no expert are not written.
void cpu_answer(const Layer &layer, const doorbell::Work &work);

}  // namespace moepool
