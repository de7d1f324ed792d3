// The trace of a pool: what every step wanted, and who was admitted. A device appends steps to a ring of words in its
// memory, the host to a list; both write a step the same way:
//
//   header      kHeaderWords, as Header says
//   ids         tokens * k, as int32
//   admissions  admitted times {expert, slot, the expert that was in the slot or -1}, in the order of the law
#pragma once

#include <cstdint>
#include <vector>

#include "moepool.h"
#include "pool/policy.h"

namespace moepool {
namespace trace {

constexpr int kHeaderWords = 8;
constexpr int kAdmissionWords = 3;

struct Header {
    uint32_t words;  // of the whole step
    int64_t tick;
    int32_t tokens, k, admitted;
    int32_t phase;  // moepool_trace_phase
    int32_t bypass;

    MOEPOOL_BOTH uint32_t word(int index) const {
        switch (index) {
            case 0:
                return words;
            case 1:
                return static_cast<uint32_t>(tick);
            case 2:
                return static_cast<uint32_t>(tick >> 32);
            case 3:
                return static_cast<uint32_t>(tokens);
            case 4:
                return static_cast<uint32_t>(k);
            case 5:
                return static_cast<uint32_t>(admitted);
            case 6:
                return static_cast<uint32_t>(phase);
            default:
                return static_cast<uint32_t>(bypass);
        }
    }
};

// A step as its words lie in host memory.
struct Step {
    const uint32_t *words;
    Header header;

    explicit Step(const uint32_t *at)
        : words(at), header{at[0],     static_cast<int64_t>(uint64_t{at[1]} | uint64_t{at[2]} << 32),
                            number(3), number(4),
                            number(5), number(6),
                            number(7)} {}
    int64_t places() const { return int64_t{header.tokens} * header.k; }
    int32_t id(int64_t place) const { return number(kHeaderWords + place); }
    int32_t admission(int index, int what) const {
        return number(kHeaderWords + places() + int64_t{kAdmissionWords} * index + what);
    }

  private:
    int32_t number(int64_t at) const { return static_cast<int32_t>(words[at]); }
};

}  // namespace trace
}  // namespace moepool
