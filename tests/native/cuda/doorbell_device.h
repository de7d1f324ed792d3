// What a step's books do with a doorbell, without a clock and a link.
#pragma once

#include <cuda_runtime.h>

#include "cuda/step.h"
#include "pool/division.h"

namespace moepool {
namespace cuda {

struct Outlook {
    bool all_host;
    int bias;
};
inline Outlook begin_books(const Step &step) {
    return {step.bell.state && step.bell.divides && step.bell.state->all_host, 0};
}
inline int records_for_host(const Step &step, const Outlook &outlook, int missing, int, int, int64_t) {
    if (!step.bell.state) return 0;
    return !step.bell.divides || outlook.all_host ? missing : step.bell.state->share % (missing + 1);
}
template <class Wants>
void post(const Step &step, int64_t, bool, const Wants &wants) {
    if (threadIdx.x || threadIdx.y) return;
    step.bell.state->asked.clear();
    for (int p = 0; p < step.tokens * step.k; ++p) step.bell.state->asked.push_back(wants(p));
}
inline void post_nothing(const Bell &bell) {
    if (bell.state) bell.state->asked.clear();
}
inline void note_step(const Bell &bell, int streamed, int hosted, int wanted, int) {
    bell.state->streamed = streamed;
    bell.state->hosted = hosted;
    bell.state->wanted = wanted;
}

}  // namespace cuda
}  // namespace moepool
