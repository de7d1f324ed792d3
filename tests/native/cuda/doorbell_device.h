// What a step's books do with a doorbell, without a clock and a link.
#pragma once

#include <cuda_runtime.h>

#include "cuda/step.h"
#include "pool/division.h"

namespace moepool {
namespace cuda {

struct Outlook {};
constexpr int kOutlookWords = 0;
inline uint32_t outlook_word(const Bell &, int) { return 0; }
inline void keep_word(Outlook &, int, uint32_t) {}
inline bool hosts_all(const Step &step, const Outlook &) { return step.bell.divides && step.bell.state->all_host; }
inline unsigned long long device_ns() { return 0; }
inline void learn(const Step &step, const Outlook &, bool trial) { step.bell.state->trial = trial; }
inline int records_for_host(const Step &step, const Outlook &outlook, int missing, int wanted, int places, int64_t) {
    step.bell.state->offered = wanted;
    step.bell.state->places = places;
    return !step.bell.divides || hosts_all(step, outlook) ? missing : step.bell.state->share % (missing + 1);
}
inline void post(const Step &step, const Outlook &, int64_t, bool, bool, const int *ids, const uint8_t *host) {
    if (threadIdx.x || threadIdx.y) return;
    step.bell.state->asked.clear();
    for (int p = 0; p < step.tokens * step.k; ++p)
        step.bell.state->asked.push_back(ids[p] >= 0 && host[ids[p]] ? ids[p] : -1);
}
inline void post_nothing(const Bell &bell) {
    if (bell.state) bell.state->asked.clear();
}
inline void note_step(const Bell &bell, int streamed, int copied, int hosted, int wanted, int places,
                      unsigned long long) {
    bell.state->streamed = streamed;
    bell.state->copied = copied;
    bell.state->hosted = hosted;
    bell.state->wanted = wanted;
    bell.state->noted_places = places;
}

}  // namespace cuda
}  // namespace moepool
