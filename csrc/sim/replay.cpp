#include "sim/replay.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

namespace moepool::sim {

namespace {

constexpr int64_t kNeverAgain = std::numeric_limits<int64_t>::max();

void count(Counts &counts, const Residency::Step &step, bool prompt) {
    ++counts.steps;
    counts.bypasses += step.bypass;
    (prompt ? counts.prompt_hits : counts.hits) += step.hits;
    (prompt ? counts.prompt_misses : counts.misses) += step.misses;
}

// A pool whose admissions come from elsewhere.
class Chosen {
  public:
    Chosen(int experts, int slots) : residency_(experts, slots, fixed(), -1) {}

    Residency &residency() { return residency_; }
    void admit(int expert, int slot, Counts &counts) {
        if (residency_.expert_in(slot) >= 0) {
            residency_.clear(slot);
            ++counts.evictions;
        }
        residency_.place(expert, slot);
        ++counts.admitted;
    }

  private:
    static PolicyConfig fixed() {
        PolicyConfig policy;
        policy.kind = MOEPOOL_POLICY_STATIC;
        return policy;
    }
    Residency residency_;
};

// next[i]: the decode step that wants wanted[i] after the step that it belongs to. seen: the first that wants an
// expert.
std::vector<int64_t> next_uses(const Steps &steps, std::vector<int64_t> &seen) {
    std::vector<int64_t> next(steps.wanted.size(), kNeverAgain);
    seen.assign(static_cast<size_t>(steps.experts), kNeverAgain);
    for (int64_t i = steps.size() - 1; i >= 0; --i) {
        const auto first = static_cast<size_t>(steps.begin[static_cast<size_t>(i)]);
        for (int j = 0; j < steps.count(i); ++j) {
            const auto expert = static_cast<size_t>(steps.of(i)[j]);
            next[first + static_cast<size_t>(j)] = seen[expert];
            if (!steps.prompt[static_cast<size_t>(i)]) seen[expert] = i;
        }
    }
    return next;
}

}  // namespace

Steps steps_of(const std::vector<int64_t> &rows, const int64_t *step, const bool *decode, const int32_t *ids, int k,
               int experts) {
    Steps steps;
    steps.experts = experts;
    std::vector<uint8_t> is_wanted(static_cast<size_t>(experts), 0);
    std::vector<int32_t> wanted;
    const auto finish = [&](int64_t row) {
        if (wanted.empty()) return;
        std::sort(wanted.begin(), wanted.end());
        for (const int32_t expert : wanted) is_wanted[static_cast<size_t>(expert)] = 0;
        steps.wanted.insert(steps.wanted.end(), wanted.begin(), wanted.end());
        steps.begin.push_back(static_cast<int64_t>(steps.wanted.size()));
        steps.prompt.push_back(!decode[row]);
        wanted.clear();
    };
    for (size_t r = 0; r < rows.size(); ++r) {
        const int64_t row = rows[r];
        if (r > 0 && (step[row] != step[rows[r - 1]] || decode[row] != decode[rows[r - 1]])) finish(rows[r - 1]);
        for (int j = 0; j < k; ++j) {
            const int32_t expert = ids[row * k + j];
            if (expert < 0 || is_wanted[static_cast<size_t>(expert)]) continue;
            is_wanted[static_cast<size_t>(expert)] = 1;
            wanted.push_back(expert);
        }
    }
    if (!rows.empty()) finish(rows.back());
    return steps;
}

Counts replay(const Steps &steps, const Setting &setting) {
    Residency residency(steps.experts, setting.slots, setting.policy, setting.admit);
    for (size_t i = 0; i < setting.hot.size(); ++i) residency.place(setting.hot[i], static_cast<int>(i));
    Counts counts;
    for (int64_t i = 0; i < steps.size(); ++i) {
        const bool prompt = steps.prompt[static_cast<size_t>(i)] != 0;
        const Residency::Step &step = residency.step(steps.of(i), steps.count(i), prompt);
        count(counts, step, prompt);
        counts.admitted += static_cast<int64_t>(step.admissions.size());
        for (const Residency::Admission &admission : step.admissions) counts.evictions += admission.evicted >= 0;
    }
    return counts;
}

Counts replay_belady(const Steps &steps, int slots) {
    std::vector<int64_t> next_of;
    const std::vector<int64_t> next = next_uses(steps, next_of);
    Chosen pool(steps.experts, slots);
    Residency &residency = pool.residency();
    std::vector<int> first(static_cast<size_t>(steps.experts));
    std::iota(first.begin(), first.end(), 0);
    std::stable_sort(first.begin(), first.end(),
                     [&](int a, int b) { return next_of[static_cast<size_t>(a)] < next_of[static_cast<size_t>(b)]; });
    for (int slot = 0; slot < slots; ++slot) residency.place(first[static_cast<size_t>(slot)], slot);
    Counts counts;
    std::vector<int> missing, victims;
    const auto next_in = [&](int slot) {
        const int expert = residency.expert_in(slot);
        return expert < 0 ? kNeverAgain : next_of[static_cast<size_t>(expert)];
    };
    for (int64_t i = 0; i < steps.size(); ++i) {
        const bool prompt = steps.prompt[static_cast<size_t>(i)] != 0;
        const int32_t *wanted = steps.of(i);
        const Residency::Step &step = residency.step(wanted, steps.count(i), prompt);
        count(counts, step, prompt);
        if (prompt) continue;  // next uses are those of decode steps
        for (int j = 0; j < steps.count(i); ++j)
            next_of[static_cast<size_t>(wanted[j])] =
                next[static_cast<size_t>(steps.begin[static_cast<size_t>(i)]) + static_cast<size_t>(j)];
        if (step.misses == 0) continue;

        missing.clear();
        for (int j = 0; j < steps.count(i); ++j)
            if (residency.slot_of(wanted[j]) < 0 && next_of[static_cast<size_t>(wanted[j])] != kNeverAgain)
                missing.push_back(wanted[j]);
        std::sort(missing.begin(), missing.end(),
                  [&](int a, int b) { return next_of[static_cast<size_t>(a)] < next_of[static_cast<size_t>(b)]; });
        victims.resize(static_cast<size_t>(slots));
        std::iota(victims.begin(), victims.end(), 0);
        const size_t most = std::min(missing.size(), victims.size());
        std::partial_sort(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(most), victims.end(),
                          [&](int a, int b) { return next_in(a) != next_in(b) ? next_in(a) > next_in(b) : a < b; });
        for (size_t j = 0; j < most && next_of[static_cast<size_t>(missing[j])] < next_in(victims[j]); ++j)
            pool.admit(missing[j], victims[j], counts);
    }
    return counts;
}

Counts replay_chosen(const Steps &steps, int slots, Chooser &chooser) {
    Chosen pool(steps.experts, slots);
    Residency &residency = pool.residency();
    chooser.begin(steps.experts, slots);
    Counts counts;
    std::vector<int> wanted, missing, expert_in(static_cast<size_t>(slots));
    for (int64_t i = 0; i < steps.size(); ++i) {
        const bool prompt = steps.prompt[static_cast<size_t>(i)] != 0;
        wanted.assign(steps.of(i), steps.of(i) + steps.count(i));
        const Residency::Step &step = residency.step(steps.of(i), steps.count(i), prompt);
        count(counts, step, prompt);
        if (step.bypass) continue;
        missing.clear();
        for (const int expert : wanted)
            if (residency.slot_of(expert) < 0) missing.push_back(expert);
        for (int slot = 0; slot < slots; ++slot) expert_in[static_cast<size_t>(slot)] = residency.expert_in(slot);
        for (const Chooser::Choice &choice : chooser.choose(step.tick, wanted, missing, expert_in)) {
            const auto fail = [&](const char *why) {
                throw BadChoice("step " + std::to_string(step.tick) + ": expert " + std::to_string(choice.expert) +
                                " to slot " + std::to_string(choice.slot) + ": " + why);
            };
            if (!std::binary_search(missing.begin(), missing.end(), choice.expert)) fail("it is not missing");
            if (residency.slot_of(choice.expert) >= 0) fail("it is chosen twice");
            if (choice.slot < 0 || choice.slot >= slots) fail("there is no such slot");
            const int evicted = residency.expert_in(choice.slot);
            if (std::binary_search(wanted.begin(), wanted.end(), evicted)) fail("the step wants the expert in it");
            pool.admit(choice.expert, choice.slot, counts);
        }
    }
    return counts;
}

std::vector<int64_t> reuse_distances(const Steps &steps) {
    std::vector<int64_t> histogram(static_cast<size_t>(steps.experts) + 1, 0);
    std::vector<int32_t> recent;  // used last first
    std::vector<uint8_t> used(static_cast<size_t>(steps.experts), 0);
    for (int64_t i = 0; i < steps.size(); ++i) {
        if (steps.prompt[static_cast<size_t>(i)]) continue;
        const int32_t *wanted = steps.of(i);
        const int count = steps.count(i);
        // All of a step are used at once: what the step wants has not been used since.
        int passed = 0, known = 0;
        for (int j = 0; j < count; ++j) known += used[static_cast<size_t>(wanted[j])];
        histogram[static_cast<size_t>(steps.experts)] += count - known;
        for (size_t at = 0; known > 0; ++at) {
            if (std::binary_search(wanted, wanted + count, recent[at])) {
                ++histogram[static_cast<size_t>(passed)];
                --known;
            } else {
                ++passed;
            }
        }
        const auto end = std::stable_partition(recent.begin(), recent.end(), [&](int32_t expert) {
            return std::binary_search(wanted, wanted + count, expert);
        });
        recent.erase(recent.begin(), end);
        recent.insert(recent.begin(), wanted, wanted + count);
        for (int j = 0; j < count; ++j) used[static_cast<size_t>(wanted[j])] = 1;
    }
    return histogram;
}

}  // namespace moepool::sim
