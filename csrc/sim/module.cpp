// moepool._sim: the simulator for Python. moepool/simulate.py is its only user.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "sim/replay.h"

namespace py = pybind11;

namespace moepool::sim {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

struct PyChooser : Chooser {
    void begin(int experts, int slots) override { PYBIND11_OVERRIDE(void, Chooser, begin, experts, slots); }
    std::vector<Choice> choose(int64_t tick, const std::vector<int> &wanted, const std::vector<int> &missing,
                               const std::vector<int> &expert_in) override {
        const py::function override = py::get_override(static_cast<const Chooser *>(this), "choose");
        if (!override) throw py::type_error("a policy needs a method choose(tick, wanted, missing, expert_in)");
        const py::object given = override(tick, wanted, missing, expert_in);
        const auto refuse = [&](const py::handle &what) -> BadChoice {
            return BadChoice("step " + std::to_string(tick) + ": choose gave " + py::repr(what).cast<std::string>() +
                             ", not pairs of an expert and a slot");
        };
        if (!py::isinstance<py::iterable>(given)) throw refuse(given);
        std::vector<Choice> choices;
        for (const py::handle each : given) {
            try {
                const auto [expert, slot] = each.cast<std::pair<int, int>>();
                choices.push_back({expert, slot});
            } catch (const py::cast_error &) {
                throw refuse(each);
            }
        }
        return choices;
    }
};

struct Run {
    std::vector<Setting> layers;  // one for each layer of the replay
    bool belady = false;
};

PolicyConfig policy_of(const py::dict &options) {
    PolicyConfig p;
    p.kind = options["policy"].cast<moepool_policy>();
    p.guard = options["guard"].cast<bool>();
    p.half_life = options["half_life"].cast<int>();
    p.weight = options["weight"].cast<int>();
    p.period = options["period"].cast<int>();
    p.protected_percent = options["protected_percent"].cast<int>();
    return p;
}

// A list made for another model must not reach the residency, which trusts its callers.
void check_hot(const Setting &setting, int layer, int experts) {
    const std::string where = " of layer " + std::to_string(layer);
    if (setting.hot.size() > static_cast<size_t>(std::max(setting.slots, 0)))
        throw std::invalid_argument(std::to_string(setting.hot.size()) + " hot experts" + where + " do not fit " +
                                    std::to_string(setting.slots) + " slots");
    std::vector<bool> seen(static_cast<size_t>(experts), false);
    for (const int expert : setting.hot) {
        if (expert < 0 || expert >= experts)
            throw std::invalid_argument("hot expert " + std::to_string(expert) + where + " is outside [0, " +
                                        std::to_string(experts) + ")");
        if (seen[static_cast<size_t>(expert)])
            throw std::invalid_argument("hot expert " + std::to_string(expert) + where + " is named twice");
        seen[static_cast<size_t>(expert)] = true;
    }
}

// A trace, cut into the steps of its layers.
class Replay {
  public:
    Replay(const Array<int64_t> &step, const Array<int32_t> &layer, const Array<bool> &decode,
           const Array<int32_t> &ids, std::vector<int> layers, int experts)
        : layers_(std::move(layers)) {
        const auto count = static_cast<size_t>(*std::max_element(layers_.begin(), layers_.end())) + 1;
        std::vector<std::vector<int64_t>> rows(count);
        for (int64_t i = 0; i < layer.shape(0); ++i) {
            const auto at = static_cast<size_t>(layer.data()[i]);
            if (at < count) rows[at].push_back(i);
        }
        const int k = static_cast<int>(ids.shape(1));
        for (const int each : layers_)
            steps_.push_back(
                steps_of(rows[static_cast<size_t>(each)], step.data(), decode.data(), ids.data(), k, experts));
    }

    Run run(const std::vector<int> &slots, const py::dict &options, int admit, bool belady,
            const std::vector<std::vector<int>> &hot) const {
        Run run;
        run.belady = belady;
        for (size_t i = 0; i < steps_.size(); ++i) {
            Setting setting{slots.at(i), admit, policy_of(options), {}};
            if (!hot.empty()) setting.hot = hot.at(i);
            check_hot(setting, layers_[i], steps_[i].experts);
            if (setting.policy.kind == MOEPOOL_POLICY_PINNED)
                setting.policy.pinned = static_cast<int>(setting.hot.size());
            run.layers.push_back(std::move(setting));
        }
        return run;
    }

    // Counts (runs, layers, 8). progress(done) is told how many steps are behind, about ten times a second.
    py::array_t<int64_t> replay(const std::vector<Run> &runs, int threads, const py::object &progress) const {
        std::vector<Counts> counts(runs.size() * steps_.size());
        // The longest first, so that no thread is left with one at the end.
        std::vector<size_t> order(counts.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        const auto work = [&](size_t i) { return steps_[i % steps_.size()].size(); };
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return work(a) > work(b); });

        std::atomic<size_t> next{0};
        std::atomic<int64_t> done{0};
        std::atomic<int> working{0};
        std::mutex mutex;
        std::condition_variable changed;
        std::exception_ptr failed;
        const auto worker = [&] {
            try {
                for (size_t at = next++; at < order.size(); at = next++) {
                    const size_t i = order[at];
                    const Steps &steps = steps_[i % steps_.size()];
                    const Run &run = runs[i / steps_.size()];
                    const Setting &setting = run.layers[i % steps_.size()];
                    counts[i] = run.belady ? replay_belady(steps, setting.slots) : sim::replay(steps, setting);
                    done += steps.size();
                }
            } catch (...) {
                const std::lock_guard<std::mutex> lock(mutex);
                failed = std::current_exception();
                next = order.size();
            }
            const std::lock_guard<std::mutex> lock(mutex);
            --working;
            changed.notify_one();
        };
        {
            const py::gil_scoped_release released;
            std::vector<std::thread> pool;
            const auto stop = [&] {
                next = order.size();
                for (std::thread &thread : pool) thread.join();
            };
            try {
                const int most = std::max(std::min(threads, static_cast<int>(order.size())), 1);
                while (static_cast<int>(pool.size()) < most) {
                    ++working;
                    pool.emplace_back(worker);
                }
                std::unique_lock<std::mutex> lock(mutex);
                while (working > 0) {
                    changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return working == 0; });
                    lock.unlock();
                    {
                        const py::gil_scoped_acquire acquired;
                        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
                        if (!progress.is_none()) progress(done.load());
                    }
                    lock.lock();
                }
            } catch (...) {
                stop();
                throw;
            }
            stop();
        }
        if (failed) std::rethrow_exception(failed);
        py::array_t<int64_t> out({runs.size(), steps_.size(), size_t{8}});
        int64_t *to = out.mutable_data();
        for (const Counts &c : counts)
            for (const int64_t value :
                 {c.steps, c.bypasses, c.hits, c.misses, c.prompt_hits, c.prompt_misses, c.evictions, c.admitted})
                *to++ = value;
        return out;
    }

    // The same of a policy written in Python: (layers, 8).
    py::array_t<int64_t> replay_chosen(const std::vector<int> &slots, Chooser &chooser) const {
        py::array_t<int64_t> out({steps_.size(), size_t{8}});
        int64_t *to = out.mutable_data();
        for (size_t i = 0; i < steps_.size(); ++i) {
            const Counts c = sim::replay_chosen(steps_[i], slots.at(i), chooser);
            for (const int64_t value :
                 {c.steps, c.bypasses, c.hits, c.misses, c.prompt_hits, c.prompt_misses, c.evictions, c.admitted})
                *to++ = value;
        }
        return out;
    }

    // (layers, experts + 1)
    py::array_t<int64_t> reuse() const {
        const size_t width = static_cast<size_t>(steps_.front().experts) + 1;
        py::array_t<int64_t> out({steps_.size(), width});
        int64_t *to = out.mutable_data();
        const py::gil_scoped_release released;
        for (const Steps &steps : steps_) {
            const std::vector<int64_t> histogram = reuse_distances(steps);
            to = std::copy(histogram.begin(), histogram.end(), to);
        }
        return out;
    }

    int64_t size() const {
        int64_t sum = 0;
        for (const Steps &steps : steps_) sum += steps.size();
        return sum;
    }

  private:
    std::vector<int> layers_;
    std::vector<Steps> steps_;
};

}  // namespace
}  // namespace moepool::sim

PYBIND11_MODULE(_sim, m) {
    using namespace moepool::sim;
    m.doc() = "The residency law without weights. See moepool.simulate.";
    py::register_exception<BadChoice>(m, "ChoiceError", PyExc_ValueError);
    py::class_<Run>(m, "Run");
    py::class_<Chooser, PyChooser>(m, "Chooser")
        .def(py::init<>())
        .def("begin", &Chooser::begin, py::arg("experts"), py::arg("slots"));
    py::class_<Replay>(m, "Replay")
        .def(py::init<const Array<int64_t> &, const Array<int32_t> &, const Array<bool> &, const Array<int32_t> &,
                      std::vector<int>, int>(),
             py::arg("step"), py::arg("layer"), py::arg("decode"), py::arg("ids"), py::arg("layers"),
             py::arg("experts"), py::call_guard<py::gil_scoped_release>())
        .def("run", &Replay::run, py::arg("slots"), py::arg("options"), py::arg("admit"), py::arg("belady"),
             py::arg("hot"))
        .def("replay", &Replay::replay, py::arg("runs"), py::arg("threads"), py::arg("progress"))
        .def("replay_chosen", &Replay::replay_chosen, py::arg("slots"), py::arg("policy"))
        .def("reuse", &Replay::reuse)
        .def("__len__", &Replay::size);
}
