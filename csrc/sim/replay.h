// A trace taken through the residency law (pool/residency.h), without weights: what a pool would count, to the last
// one. Belady's optimum is here and nowhere else, since only a replay knows the future.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "pool/residency.h"

namespace moepool::sim {

// The steps of one layer, in order: the distinct experts that each wants, rising. Steps that want nobody are none.
struct Steps {
    int experts = 0;
    std::vector<int32_t> wanted;
    std::vector<int64_t> begin{0};  // of step i: wanted[begin[i]] .. wanted[begin[i + 1]]
    std::vector<uint8_t> prompt;

    int64_t size() const { return static_cast<int64_t>(prompt.size()); }
    const int32_t *of(int64_t i) const { return wanted.data() + begin[static_cast<size_t>(i)]; }
    int count(int64_t i) const {
        return static_cast<int>(begin[static_cast<size_t>(i) + 1] - begin[static_cast<size_t>(i)]);
    }
};

// Rows of one layer in the order of the trace. Rows that follow one another in the same step and phase are one step.
Steps steps_of(const std::vector<int64_t> &rows, const int64_t *step, const bool *decode, const int32_t *ids, int k,
               int experts);

// What PoolStats counts, with `admitted` for the bytes copied into slots.
struct Counts {
    int64_t steps = 0, bypasses = 0, hits = 0, misses = 0, prompt_hits = 0, prompt_misses = 0, evictions = 0,
            admitted = 0;
};

// The options of one pool; hot: put into the first slots before the first step.
struct Setting {
    int slots = 0;
    int admit = -1;
    PolicyConfig policy;
    std::vector<int> hot;
};

Counts replay(const Steps &steps, const Setting &setting);

// As many hits as no policy exceeds: Belady's optimum. It begins with the experts that are wanted first, and of those
// that it holds or a decode step wants it keeps the ones that are wanted next, whatever the law says of that step: a
// pool may not replace what the step wants, nor anything in a step that bypasses, so it may fall short of this. No
// limit of admissions holds here: under one, keeping what is wanted next is not always best.
Counts replay_belady(const Steps &steps, int slots);

// A policy that is not of the list: it names whom a step admits, and where.
class Chooser {
  public:
    struct Choice {
        int expert, slot;
    };
    virtual ~Chooser() = default;
    virtual void begin(int, int) {}  // experts and slots of a layer, before its first step
    // Called for every step that does not bypass, whether or not it misses.
    virtual std::vector<Choice> choose(int64_t tick, const std::vector<int> &wanted, const std::vector<int> &missing,
                                       const std::vector<int> &expert_in) = 0;
};

// A choice that breaks the law.
struct BadChoice : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

Counts replay_chosen(const Steps &steps, int slots, Chooser &chooser);

// histogram[d]: how many uses in decode steps were of an expert such that d others had been used since its use before;
// histogram[experts]: first uses. A cache of more than d slots under LRU hits the former.
std::vector<int64_t> reuse_distances(const Steps &steps);

}  // namespace moepool::sim
