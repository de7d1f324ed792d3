// A decode step of a whole layer on the device: no host in the loop, so that a CUDA graph can hold it.
//
//   resolve   one block takes the residency law's step and cuts the places into tiles; others quantise x
//   gate/up   a block computes 32 hidden columns of a tile: gate's rows, up's, then swiglu and a quantised block
//   down      a warp computes 32 outputs of a tile
//   combine   adds a token's rows up
//
// Gate and up of two types are two kernels, so that none is made for pairs of types: gate leaves its rows to up. A
// single token is then taken as several are.
//
// Else there are but two kernels of a single token. Hits need only a look-up, which gate/up and down do themselves;
// resolve is a block of gate/up that runs beside the others, x is quantised where it is used, and a block of down
// computes 32 outputs of all places and combines them.
//
// Down begins when every block of gate/up runs, asks for its weights, and takes each hidden row when it is there
// (handover.h).
//
// A tile's record is read where it lies: in a slot, or in page-locked host memory over the link. If the step admits the
// expert, the blocks that read its panels write them into its slot as well, so that a miss crosses the link once. Next
// step's kernels find it there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/doorbell.h"
#include "cuda/resolve.h"
#include "cuda/runtime.h"
#include "moepool.h"
#include "pool/backend.h"
#include "pool/residency.h"
#include "store/store.h"

namespace moepool {
namespace cuda {

// Everything that the steps of one pool keep on the device between and during steps.
class Decoder : public DeviceSteps {
  public:
    // records: by expert, where its record lies in page-locked host memory as the device addresses it. slots: the most
    // that there will be. doorbell: NULL if the device computes every miss.
    Decoder(int device, const Layer &layer, const std::vector<const uint8_t *> &records, int slots, uint8_t *arena,
            const PolicyConfig &policy, int admit, std::unique_ptr<Doorbell> doorbell);
    ~Decoder() override;
    Decoder(const Decoder &) = delete;
    Decoder &operator=(const Decoder &) = delete;

    // Why the device takes no step of this layer; NULL: it does.
    static const char *refuses(const Layer &layer, int slots);
    const char *refuses(int64_t tokens, int64_t k) const override;
    std::string describe(int64_t tokens, int64_t k, int slots) const override;
    void run(const moepool_ids &ids, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype,
             float *out, void *stream) override;
    void load(const Residency::Snapshot &residency, const std::vector<int> &leases) override;
    Counts store(Residency::Snapshot &residency) override;
    void lease(const std::vector<int> &leases) override;
    void trace(int64_t words) override;
    int64_t take_trace(std::vector<uint32_t> &words) override;
    BadId take_bad_id() override;
    std::string failure() const override { return doorbell_ ? doorbell_->failure() : std::string(); }

  private:
    struct Workspace;
    void reserve(int64_t places);
    void require_whole() const;
    void copy(void *to, const void *from, int64_t bytes);
    template <class T>
    void copy(T *to, const T *from, size_t count) {
        copy(static_cast<void *>(to), static_cast<const void *>(from), static_cast<int64_t>(count * sizeof(T)));
    }
    void wait();
    bool asks_the_cpu(int slots) const;

    const int device_;
    const Layer &layer_;
    const int slots_;
    int slots_now_ = 0;  // as far as the device knows
    uint8_t *const arena_;
    const PolicyConfig policy_;
    const int admit_;
    const std::unique_ptr<Doorbell> doorbell_;
    Stream side_;  // of copies that are no part of a step, also while one is captured
    DeviceMemory<DeviceState> state_;
    DeviceMemory<int32_t> slot_of_, expert_in_, leases_;
    DeviceMemory<Use> uses_;
    DeviceMemory<uint32_t> trace_;
    int64_t trace_words_ = 0;
    uint64_t drained_ = 0;  // of them
    int64_t lost_ = 0;      // steps, as told so far
    DeviceMemory<const uint8_t *> records_;
    MappedMemory<BadId> bad_id_;
    Event last_;                                          // behind the last step that was not captured
    Event leased_;                                        // behind the last change of leases_
    bool captured_ = false;                               // a graph holds steps
    bool whole_ = true;                                   // every step so far was launched whole
    std::vector<std::unique_ptr<Workspace>> workspaces_;  // the last is in use; graphs may hold the others
};

}  // namespace cuda
}  // namespace moepool
