// Where the experts of a single token lie, as its kernels look it up by themselves, so that weights are asked for at
// once: hits need nothing from the books.
#pragma once

#include <cstdint>

#include "cuda/doorbell_device.h"
#include "cuda/step.h"

namespace moepool {
namespace cuda {
namespace {

constexpr int kQuickExperts = 128;  // of which a warp reads the whole map at once

// The expert of a place.
struct Looked {
    const uint8_t *record;  // NULL: skipped
    bool missing;           // the books are to be asked
    bool invalid;
    bool host;  // the CPU computes it: only the books say so
};
// An id as it lies in memory, 32 bits or 64: what is loaded is not looked at before it is used.
__device__ __forceinline__ int2 ask_for_id(const Step &step, int place) {
    if (step.bits == 64) return __ldcg(static_cast<const int2 *>(step.ids) + place);
    return {__ldcg(static_cast<const int *>(step.ids) + place), 0};
}
__device__ __forceinline__ int64_t id_of(const Step &step, int2 word) {
    return step.bits == 64 ? int64_t{word.y} << 32 | static_cast<uint32_t>(word.x) : word.x;
}
__device__ __forceinline__ Looked found(const Step &step, int64_t id, int slot, bool host_has_all) {
    return {slot >= 0 ? step.residents.arena + slot * step.residents.record_bytes : step.residents.records[id],
            slot < 0 || host_has_all, false, false};
}
template <bool kBell>
__device__ __forceinline__ Looked look_up(const Step &step, int place) {
    const int host_has_all = kBell ? course_of(step.bell).x : 0;  // asked for beside the others
    const int64_t id = id_of(step, ask_for_id(step, place));
    if (id < 0 || id >= step.residents.experts) return {nullptr, false, id != -1, false};
    return found(step, id, __ldcg(step.residents.slot_of + id), host_has_all != 0);
}
// The same by a warp, a place a lane (lanes of negative places look on), in two halves: it asks for ids and slots at
// once, and takes what has come.
struct Asked {
    int2 id;
    int slots[kQuickExperts / 32];
    int2 course;  // of a pool with a doorbell
};
template <bool kBell>
__device__ __forceinline__ Asked ask(const Step &step, int place, int lane) {
    const int experts = step.residents.experts;
    Asked asked = {{-1, -1}, {}, {}};
    if constexpr (kBell) asked.course = course_of(step.bell);
    if (experts > kQuickExperts) return asked;
    if (place >= 0) asked.id = ask_for_id(step, place);
#pragma unroll
    for (int i = 0; i < kQuickExperts / 32; ++i)
        if (32 * i + lane < experts) asked.slots[i] = __ldcg(step.residents.slot_of + 32 * i + lane);
    return asked;
}
template <bool kBell>
__device__ __forceinline__ Looked take(const Step &step, int place, const Asked &asked) {
    const int experts = step.residents.experts;
    if (experts > kQuickExperts) return place < 0 ? Looked{} : look_up<kBell>(step, place);
    const int64_t id = id_of(step, asked.id);
    const bool valid = id >= 0 && id < experts;
    const int expert = valid ? static_cast<int>(id) : 0;
    int slot = -1;
#pragma unroll
    for (int i = 0; i < kQuickExperts / 32; ++i) {
        const int there = __shfl_sync(~0u, asked.slots[i], expert % 32);
        slot = expert / 32 == i ? there : slot;
    }
    if (!valid) return {nullptr, false, id != -1, false};
    return found(step, id, slot, kBell && asked.course.x != 0);
}

}  // namespace
}  // namespace cuda
}  // namespace moepool
