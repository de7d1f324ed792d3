"""The simulator: it counts what pools count, to the last one, and Belady's optimum is one."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import moepool
from moepool import Chooser, ChosenPool, Rates, Trace, TraceModel, _sim
from moepool.cli import main
from moepool.cli_simulate import parse_size
from moepool.policy import policy_from
from moepool.rates import _line, rates_path, verdict
from moepool.runner import bundled_model
from moepool.runner.info import ModelInfo
from moepool.simulate import POLICIES, hot_lists, simulate
from tests.support import On, few_slots

EXPERTS, K, LAYERS = 24, 4, 2
MODEL = TraceModel(EXPERTS, K, LAYERS)

SIMULATED = (
    *("static", "static-prompt", "lru", "lfu", "lfru", "slru", "reelect", "pinned"),
    *("lru:guard", "lfu:half_life=16", "lfru:half_life=20,weight=5", "slru:guard,protected_percent=50"),
    *("reelect:period=13", "pinned:guard", "lfu:guard,half_life=7"),
)


def local_trace(steps: int = 400, model: TraceModel = MODEL, seed: int = 0, most: int = 3) -> Trace:
    """Prompts and decode steps of up to `most` tokens whose wants drift; some places are skipped."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, bool]] = []
    ids = []
    taste = rng.gumbel(size=(model.layers, model.experts))
    for step in range(steps):
        prompt = step % 97 == 0
        tokens = int(rng.integers(5, 12)) if prompt else int(rng.integers(1, most + 1))
        taste += 0.3 * rng.standard_normal(taste.shape)
        for layer in range(model.layers):
            for token in range(tokens):
                wanted = np.argsort(-(taste[layer] + rng.gumbel(size=model.experts)))[: model.k]
                ids.append(np.where(rng.random(model.k) < 0.05, -1, wanted))
                rows.append((step, layer, token, not prompt))
    return Trace(model, *zip(*rows, strict=True), ids)  # type: ignore[call-arg,arg-type]


def steps_of(trace: Trace, layer: int) -> Iterator[tuple[Any, str]]:
    """Ids and phase of each step of a layer."""
    at = np.flatnonzero(trace.layer == layer)
    edges = np.flatnonzero(np.diff(trace.step[at])) + 1
    for rows in np.split(at, edges):
        yield trace.ids[rows], "decode" if trace.decode[rows[0]] else "prompt"


# -------------------------------------------------------------------------------------------- pools, replayed


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    """Next to nothing to compute."""
    weight = np.ones((EXPERTS, 32, 32), np.float32)
    return moepool.ExpertStore.from_arrays(gate=weight, up=weight, down=weight, qtype="f32")[0]


def pool_of(
    on: On, layer: moepool.Layer, trace: Trace, name: str, slots: int, admit: int | None, index: int
) -> moepool.Pool:
    policy = policy_from("static" if name == "static-prompt" else name)
    options: dict[str, Any] = {"policy": policy, "admit": admit}
    hot = hot_lists(name, [slots], trace, None, [index])
    return on.pool(layer, slots, **options, **({"hot": hot[0]} if hot else {}))


def assert_counts(pool: moepool.Pool, run: moepool.SimulationRun, index: int, what: object) -> None:
    stats = pool.stats()
    counted = {name: int(values[index]) for name, values in run.by_layer.items()}
    copied = counted.pop("admitted") * pool.layer.record_bytes
    assert {name: getattr(stats, name) for name in counted} == counted, what
    assert stats.copied_bytes == copied, what
    missed = stats.misses + stats.prompt_misses
    assert stats.in_place_bytes == missed * pool.layer.record_bytes - copied, what


@pytest.mark.parametrize("name", SIMULATED)
def test_a_pool_counts_what_was_simulated(name: str, on: On, layer: moepool.Layer) -> None:
    """R2: hits, misses, evictions and bytes, to the last one."""
    trace = local_trace()
    budgets = [0, 1, 3, 8, 13, 24]
    for admit in (None, 1, 2):
        found = simulate(trace, budgets, [name], admit=admit)
        for slots, index in itertools.product(budgets, range(LAYERS)):
            with few_slots(), pool_of(on, layer, trace, name, slots, admit, index) as pool:
                for ids, phase in steps_of(trace, index):
                    pool.resolve(ids, phase=phase).release()  # type: ignore[arg-type]
                assert_counts(pool, found.run(name, slots), index, (slots, admit, index))


@pytest.mark.parametrize("name", SIMULATED)
def test_steps_of_a_whole_layer_count_the_same(name: str, on: On, layer: moepool.Layer) -> None:
    """On a GPU these are the steps that the device takes by itself."""
    trace = local_trace(150)
    x, weights = np.ones((16, 32), np.float32), np.ones((16, K), np.float32)
    for slots in (8, 24):
        found = simulate(trace, slots, [name])
        with pool_of(on, layer, trace, name, slots, None, 0) as pool:
            ffn = moepool.ExpertFFN(pool)
            for ids, phase in steps_of(trace, 0):
                on(ffn, x[: len(ids)], ids, weights[: len(ids)], phase=phase)
            assert_counts(pool, found.runs[0], 0, slots)


# ---------------------------------------------------------------------------------------------------- optimum


def fewest_misses(steps: list[set[int]], slots: int) -> int:
    """Of whoever may keep any of what he holds and what a step wants, by trying everything."""
    states = {frozenset(held): 0 for held in itertools.combinations(range(5), slots)}
    for wanted in steps:
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            cost = misses + len(wanted - held)
            for kept in map(frozenset, itertools.combinations(held | wanted, slots)):
                following[kept] = min(following.get(kept, cost), cost)
        states = following
    return min(states.values())


@pytest.mark.parametrize("seed", range(60))
def test_nobody_beats_belady(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [set(rng.integers(0, 5, rng.integers(1, 4)).tolist()) for _ in range(9)]
    slots = int(rng.integers(1, 4))
    ids = np.full((len(steps), 3), -1)
    for row, wanted in zip(ids, steps, strict=True):
        row[: len(wanted)] = sorted(wanted)
    at = np.arange(len(steps))
    trace = Trace(TraceModel(5, 3, 1), at, 0 * at, at, at >= 0, ids)
    for admit in (None, 0, 1):  # a limit does not bind the bound
        assert simulate(trace, slots, ["belady"], admit=admit).runs[0].misses == fewest_misses(steps, slots)


def test_belady_is_the_bound_of_all() -> None:
    trace = local_trace()
    found = simulate(trace, [2, 4, 8, 16, 24], [*SIMULATED, "belady"])
    for run in found.runs:
        assert run.hits <= found.run("belady", run.slots).hits, run
    slots = [found.run("belady", n).hits for n in (2, 4, 8, 16, 24)]
    assert slots == sorted(slots)
    few = simulate(trace, 8, [*SIMULATED, "belady"], admit=1).runs
    assert all(run.hits <= few[-1].hits for run in few)


# ----------------------------------------------------------------------------------------------- Python's own


class Lru(Chooser):
    """The law's LRU, written anew."""

    def begin(self, experts: int, slots: int) -> None:
        self.last = [0] * slots

    def choose(
        self, tick: int, wanted: list[int], missing: list[int], expert_in: list[int]
    ) -> list[tuple[int, int]]:
        victims = []
        for slot, expert in enumerate(expert_in):
            if expert in wanted:
                self.last[slot] = tick
            else:
                victims.append((expert >= 0, self.last[slot], slot))
        choices = [(e, slot) for e, (_, _, slot) in zip(missing, sorted(victims), strict=False)]
        for _, slot in choices:
            self.last[slot] = tick
        return choices


def test_a_policy_of_python_is_simulated() -> None:
    trace = local_trace()
    for slots in (3, 8, 24):
        own, native = simulate(trace, slots, [Lru(), "lru"]).runs
        assert own.policy == "Lru"
        for name, values in native.by_layer.items():
            assert np.array_equal(own.by_layer[name], values), name


@pytest.mark.parametrize("slots", [3, 8])
def test_what_a_pool_admitted_is_repeated(slots: int, layer: moepool.Layer) -> None:
    """As it must be where measured times had a say in it."""
    trace = local_trace(150)
    with few_slots(), moepool.Pool(layer, slots, policy=policy_from("lfru:half_life=20")) as pool:
        for_one = TraceModel(EXPERTS, K, 1)
        with moepool.PoolRecorder(for_one, [pool], admissions=True) as recorder:
            for ids, phase in steps_of(trace, 0):
                recorder.step(0, phase == "decode")
                pool.resolve(ids, phase=phase).release()  # type: ignore[arg-type]
        recorded = recorder.trace()
        for _ in range(2):
            assert_counts(pool, simulate(recorded, slots, ["recorded"]).runs[0], 0, slots)
    with pytest.raises(moepool.ArgumentError, match=f"slot {slots - 1} of layer 0 was filled"):
        simulate(recorded, slots - 1, ["recorded"])
    with pytest.raises(moepool.ArgumentError, match="has no admissions"):
        simulate(trace, slots, ["recorded"])


@pytest.mark.parametrize("slots", [3, 8, 24])
def test_a_policy_of_python_runs_a_pool_as_simulated(slots: int, on: On, layer: moepool.Layer) -> None:
    trace = local_trace(150)
    simulated = simulate(trace, slots, [Lru()]).runs[0]
    with few_slots(), on.pool(layer, slots) as pool:
        chosen = ChosenPool(pool, Lru())
        for ids, phase in steps_of(trace, 1):
            chosen.resolve(ids, phase).release()  # type: ignore[arg-type]
        assert_counts(pool, simulated, 1, slots)


def test_what_a_chosen_pool_refuses(layer: moepool.Layer) -> None:
    class Bad(Chooser):
        def choose(self, *_: Any) -> list[tuple[int, int]]:
            return [(9, 0)]

    with moepool.Pool(layer, 8) as pool:
        chosen = ChosenPool(pool, Bad())
        with pytest.raises(moepool.ArgumentError, match="9"):
            chosen.resolve([[1, 2, 3, 4]])
        with pytest.raises(moepool.IdError, match="id 24 at token 0, place 1"):
            chosen.resolve([[1, 24]])
        with pytest.raises(moepool.ArgumentError, match="phase is 'later'"):
            chosen.resolve([[1]], "later")  # type: ignore[arg-type]
        assert chosen.resolve(np.arange(12).reshape(3, 4)).bypass
        assert chosen.resolve([[1]], "prompt").prompt
        assert chosen.resolve([[-1]]).tick == 0


def test_a_policy_does_not_learn_of_ids_that_are_refused(layer: moepool.Layer) -> None:
    class Asked(Chooser):
        times = 0

        def choose(self, *_: Any) -> Any:
            self.times += 1
            return None

    with moepool.Pool(layer, 8, prompt_tokens=2) as pool:
        chosen = ChosenPool(pool, Asked())
        wrong: list[Any] = [
            [[1, -2]],
            [[1, EXPERTS]],
            [1, 2],
            [[True]],
            np.ones((1, 2), np.int16),
            np.ones((1, 2)),
        ]
        for ids in wrong:
            with pytest.raises(moepool.MoePoolError):
                chosen.resolve(ids, "decode")
        assert chosen.resolve([[1], [2], [3]]).prompt
        assert chosen.chooser.times == 0  # type: ignore[attr-defined]
        with pytest.raises(moepool.ArgumentError, match="Asked: step 2: choose gave None, not pairs"):
            chosen.resolve([[1], [2]])


@pytest.mark.parametrize("given", [None, 3, [(1 << 40, 0)], [("a", 0)], [(1, 2, 3)], [5]])
def test_what_is_no_list_of_pairs_is_refused(given: Any) -> None:
    class Odd(Chooser):
        def choose(self, *_: Any) -> Any:
            return given

    with pytest.raises(moepool.ArgumentError, match="Odd: step 1: choose gave .*, not pairs of an expert"):
        simulate(local_trace(5).phase("decode"), 8, [Odd()])


def test_pairs_may_come_from_a_generator() -> None:
    class Lazy(Lru):
        def choose(self, *step: Any) -> Any:
            yield from super().choose(*step)

    lazy, own = simulate(local_trace(50), np.int64(8), [Lazy(), Lru()]).runs  # type: ignore[arg-type]
    assert lazy.hits == own.hits


def test_a_recorded_step_of_two_phases(layer: moepool.Layer) -> None:
    """Each phase resolves on its own; what a run admitted is nothing that another can be promised."""
    model = TraceModel(EXPERTS, 1, 1)
    trace = Trace(model, [0, 0, 1], [0] * 3, [0, 1, 2], [False, True, True], [[3], [4], [4]], [[0, 0, 4, 2]])
    run = simulate(trace, 8, ["recorded"]).runs[0]
    assert (run.hits, run.misses, run.admitted, run.attainable) == (1, 1, 1, False)


def test_a_profile_of_another_model_is_refused() -> None:
    """It used to be placed unseen: beyond the experts, and the process ended there."""
    trace = local_trace(20)
    at = np.arange(2)
    for model in (
        TraceModel(900_000, K, LAYERS),
        TraceModel(EXPERTS, K + 1, LAYERS),
        TraceModel(EXPERTS, K, LAYERS + 1),
    ):
        other = Trace(model, at, 0 * at, at, at >= 0, np.full((2, model.k), model.experts - 1))
        for name in ("static-profile", "pinned", "lru"):
            with pytest.raises(
                moepool.ArgumentError, match=r"the profile is of another model: .*\(--model\)"
            ):
                simulate(trace, 4, [name], profile=other)
    fewer = local_trace(20, TraceModel(EXPERTS - 4, K, 1))
    assert simulate(trace, 4, ["static-profile"], profile=fewer).runs[0].hits > 0


@pytest.mark.parametrize(
    ("hot", "match"),
    [
        ([EXPERTS], "hot expert 24 of layer 0 is outside"),
        ([-1], "hot expert -1 of layer 0 is outside"),
        ([3, 3], "hot expert 3 of layer 0 is named twice"),
        ([1, 2, 3], "3 hot experts of layer 0 do not fit 2 slots"),
    ],
)
def test_the_replay_trusts_no_list(hot: list[int], match: str) -> None:
    trace = local_trace(5)
    replay = _sim.Replay(trace.step, trace.layer, trace.decode, trace.ids, [0], EXPERTS)
    with pytest.raises(ValueError, match=match):
        replay.run([2], policy_from("static").config(), -1, False, [hot])


def test_other_threads_run_while_a_trace_is_cut_and_measured() -> None:
    """The replay's making and its reuse distances take no lock that Python needs."""
    trace = wide_trace(200_000)
    layers = list(range(48))
    ticks = 0
    over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        replay = _sim.Replay(trace.step, trace.layer, trace.decode, trace.ids, layers, 128)
        made, ticks = ticks, 0
        started = time.perf_counter()
        replay.reuse()
        took = time.perf_counter() - started
    finally:
        over.set()
        thread.join()
    assert made >= 1
    assert ticks >= min(5, took / 0.02)


@pytest.mark.parametrize(
    ("choice", "match"),
    [
        ((0, 0), "expert 0 to slot 0: it is not missing"),
        ((5, 4), "no such slot"),
        ((5, -1), "no such slot"),
        ((5, 1), "the step wants the expert in it"),
    ],
)
def test_a_choice_that_breaks_the_law_is_refused(choice: tuple[int, int], match: str) -> None:
    class Bad(Chooser):
        def choose(self, tick: int, wanted: Any, missing: Any, expert_in: Any) -> list[tuple[int, int]]:
            return [(0, 1)] if tick == 1 else [choice]

    trace = Trace(TraceModel(8, 2, 1), [0, 1], [0, 0], [0, 1], [True, True], [[0, 0], [0, 5]])
    with pytest.raises(moepool.ArgumentError, match=f"Bad: step 2: expert .* to slot .*{match[-20:]}"):
        simulate(trace, 4, [Bad()])


def test_nobody_is_chosen_twice() -> None:
    class Twice(Chooser):
        def choose(self, tick: int, wanted: Any, missing: Any, expert_in: Any) -> list[tuple[int, int]]:
            return [(missing[0], 0), (missing[0], 1)]

    with pytest.raises(moepool.ArgumentError, match="to slot 1: it is chosen twice"):
        simulate(local_trace(5, most=1), 8, [Twice()])


def test_the_errors_of_a_python_policy_are_its_own() -> None:
    class Broken(Chooser):
        def choose(self, *_: Any) -> list[tuple[int, int]]:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(local_trace(5), 4, [Broken()])
    with pytest.raises(NotImplementedError, match="Chooser has no method choose"):
        simulate(local_trace(5), 4, [Chooser()])


# ---------------------------------------------------------------------------------------------- what it tells


def test_threads_change_nothing() -> None:
    trace = local_trace(200)
    one, many = (simulate(trace, [4, 8], SIMULATED, threads=n) for n in (1, 7))
    assert [run.as_dict() for run in one.runs] == [run.as_dict() for run in many.runs]


def test_more_slots_than_experts_are_as_many() -> None:
    many, all_of_them = simulate(local_trace(50), [1000, 24], ["lfu"]).runs
    assert many.slots == all_of_them.slots == (24, 24)
    assert many.as_dict() == all_of_them.as_dict()


def test_reuse_distances_are_the_hits_of_lru() -> None:
    """Of one token at a time: with S slots LRU hits what comes again within less than S others."""
    trace = local_trace(model=TraceModel(EXPERTS, 1, 1), most=1).phase("decode")
    found = simulate(trace, [1, 2, 5, 9, 24], ["lru"])
    for run in found.runs:
        assert run.hits == found.reuse[0, : run.slots[0]].sum()
    assert found.reuse.sum() == found.counts.sum()
    half = found.reuse_quantile(0.5)[0]
    assert half is not None
    assert found.reuse[0, :half].sum() < found.counts.sum() / 2 <= found.reuse[0, : half + 1].sum()


def test_bytes_are_records_times_admissions() -> None:
    huge = simulate(local_trace(5), np.array([5, 9]), ["lru"], record_bytes=3 << 30).runs
    assert [run.slot_bytes for run in huge] == [30 << 30, 54 << 30]
    run = simulate(local_trace(), [[5, 9]], ["lru"], record_bytes=[100, 7]).runs[0]
    first, second = run.by_layer["admitted"].tolist()
    assert run.copied_bytes == 100 * first + 7 * second
    assert run.slot_bytes == 5 * 100 + 9 * 7
    assert run.tokens == max(np.bincount(local_trace().layer[local_trace().decode]))
    assert run.bytes_per_token == run.copied_bytes / run.tokens


def test_hot_lists_come_from_where_they_say() -> None:
    trace, other = local_trace(seed=1), local_trace(seed=2)
    for name, source, phase in (
        ("static", trace, "decode"),
        ("static-prompt", trace, "prompt"),
        ("static-profile", other, "decode"),
    ):
        assert hot_lists(name, [3, 5], trace, other, [0, 1]) == source.hottest([3, 5], phase)  # type: ignore[arg-type]
    assert hot_lists("pinned", [6, 9], trace, other, [0, 1]) == other.hottest([3, 4], "decode")
    assert hot_lists("lfu:guard", [6, 9], trace, other, [0, 1]) == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"policies": ["mru"]}, "policy is 'mru'"),
        ({"policies": ["static-promt"]}, "policy is 'static-promt'"),
        (
            {"policies": ["beladi"]},
            "'beladi'; it must be 'belady' or .*'static-prompt' or .*'static-profile' or 'recorded'$",
        ),
        ({"policies": ["belady:guard"]}, "guard is no option of policy 'belady', which has none"),
        ({"policies": ["lru:speed=3"]}, "speed is no option of policy 'lru', which has guard"),
        ({"policies": ["lfu:half_life"]}, "half_life needs a value"),
        ({"policies": ["recorded"]}, r"no admissions, which 'recorded' repeats: .*--miss auto alone"),
        ({"policies": ["lru:half_life=x"]}, "not name=integer"),
        ({"policies": ["lfu:half_life=--3"]}, "not name=integer"),
        ({"policies": ["lfu:half_life=\u00b2"]}, "not name=integer"),
        ({"policies": ["lfu:half_life=" + "9" * 5000]}, "not name=integer"),
        ({"policies": ["slru:period=3"]}, "no option of policy"),
        ({"policies": ["static-profile"]}, "as profile"),
        ({"policies": [7]}, "7 is no policy"),
        ({"slots": [[1, 2, 3]]}, "3 numbers for the 2 layers"),
        ({"slots": [-1]}, "slots is -1"),
        ({"record_bytes": 0}, "record_bytes is 0"),
        ({"record_bytes": [1]}, "1 numbers for the 2 layers"),
        ({"admit": -1}, "admit is -1"),
        ({"slots": 8.5}, "slots is 8.5"),
        ({"slots": "8"}, "slots is '8'"),
        ({"record_bytes": 1 << 50}, "record_bytes is"),
        ({"policies": "lru"}, r"policies is 'lru'; it must be a list: \['lru'\]"),
        ({"policies": Lru()}, "it must be a list"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": "x"}, "threads is 'x'"),
        ({"threads": 1 << 40}, "threads is 1099511627776"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(moepool.ArgumentError, match=match):
        simulate(local_trace(5), **({"slots": 4, "policies": ["lru"]} | arguments))


def test_traces_that_lack_something() -> None:
    trace = local_trace(5)
    with pytest.raises(moepool.ArgumentError, match="rows of prompts"):
        simulate(trace.phase("decode"), 4, ["static-prompt"])
    with pytest.raises(moepool.ArgumentError, match="nothing to simulate"):
        simulate(moepool.TraceRecorder(MODEL).trace(), 4)
    run = simulate(trace.phase("prompt"), 4, ["lru"]).runs[0]
    assert run.tokens == 0
    assert np.isnan(run.hit_rate)


def wide_trace(rows: int) -> Trace:
    """48 layers of 128 experts, top-8."""
    rng = np.random.default_rng(0)
    worth = -0.8 * np.log(np.arange(1, 129)).astype(np.float32)
    ids = np.concatenate(
        [
            np.argpartition(rng.gumbel(size=(part, 128)).astype(np.float32) + worth, -8, axis=1)[:, -8:]
            for part in [rows // 10] * 10
        ]
    )
    at = np.arange(len(ids))
    return Trace(TraceModel(128, 8, 48), at // 48, at % 48, at // 48, at >= 960, ids)


def test_a_million_rows_by_nine_policies_by_eight_budgets() -> None:
    """A fifth of that, in a fifth of 20 s on two cores."""
    trace = wide_trace(200_000)
    started = time.process_time()
    simulate(trace, [8, 16, 24, 32, 48, 64, 96, 112], POLICIES)
    assert time.process_time() - started < 2 * 20 / 5, "about 3 s"


def test_it_can_be_interrupted() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    trace = wide_trace(200_000)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        started = time.perf_counter()
        with pytest.raises(Interrupted):
            simulate(trace, range(1, 121), ["lru", "lfu", "lfru", "slru"], threads=1)
        assert time.perf_counter() - started < 10, "the whole takes about 20 s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------------------------------- rates, in words

H200 = Rates("cuda:0", host=80e9, host_layer=10e-6, memory=3e12, link=50e9, layer=8e-6, card="a card")
RECORD = 2_654_208


def found_for_verdict(record: int | None = RECORD) -> moepool.Simulation:
    policies = ["lru", "lfu", "static", "belady"]
    return simulate(local_trace(), [8, 16, 24], policies, record_bytes=record)


def test_seconds_of_a_layer() -> None:
    assert H200.layer_seconds("cpu", 1e6, 3e6) == pytest.approx(10e-6 + 4e6 / 80e9)
    assert H200.layer_seconds("stream", 3e6, 1e6) == pytest.approx(8e-6 + 1e-6 + 20e-6)
    assert H200.layer_seconds("host", 3e6, 0) == pytest.approx(9e-6)
    assert H200.layer_seconds("host", 3e6, 8e6, 1e6) == pytest.approx(9e-6 + 110e-6)
    assert H200.layer_seconds("host", 3e6, 8e6, 8e6) == pytest.approx(9e-6 + 160e-6)
    with pytest.raises(moepool.ArgumentError, match="no rates of a GPU"):
        Rates("cpu", 1e9, 1e-6).layer_seconds("stream", 1, 1)


def test_the_verdict_of_a_fast_card() -> None:
    found = found_for_verdict()
    words = verdict(found, H200)
    assert words.startswith("A pool is worth it: 24 slots a layer under")
    assert "static" not in words
    run = found.run("lru", 24)
    assert H200.best(run)[1] < H200.without_pool(run)[1]


def test_the_verdict_of_a_slow_link_and_a_fast_host() -> None:
    slow = Rates("cuda:0", host=500e9, host_layer=1e-6, memory=501e9, link=1e9, layer=30e-6, card="a card")
    assert verdict(found_for_verdict(), slow).startswith("Not worth a pool")


def test_the_verdict_without_a_card_or_a_model() -> None:
    cpu = Rates("cpu", host=10e9, host_layer=1e-5, threads=2)
    assert "Measured with 2 threads, it would take" in verdict(found_for_verdict(), cpu)
    assert verdict(found_for_verdict(), cpu).startswith("No pool pays on this machine: it has no GPU")
    words = verdict(found_for_verdict(None), H200)
    assert words.startswith("By hits alone: 8 slots: ")
    assert "of at most" in words
    only = simulate(local_trace(), 8, ["belady"])
    assert verdict(only, None).startswith("No verdict")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_this_machine_can_be_measured(device: str) -> None:
    rates = moepool.measure_rates(device)
    assert 1e8 < rates.host < 1e13
    assert 0 < rates.host_layer < 0.1
    if device == "cpu":
        assert (rates.memory, rates.link, rates.layer) == (None, None, None)
    else:
        assert rates.memory is not None and rates.link is not None and rates.layer is not None
        assert 1e9 < rates.link < rates.memory < 1e14
        assert 0 < rates.layer < 1e-3
        assert rates.card


def test_rates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    H200.save(rates_path())
    assert rates_path().is_relative_to(tmp_path)
    assert Rates.load(rates_path()) == H200
    for text in ("{}", "[]", "x", json.dumps({"device": "cpu", "host": -1, "host_layer": 1, "speed": 3})):
        rates_path().write_text(text)
        with pytest.raises(moepool.FormatError, match="expected an object of device, host"):
            Rates.load(rates_path())
    with pytest.raises(moepool.ArgumentError, match="No such file"):
        Rates.load(tmp_path / "none")


def test_a_record_may_be_large() -> None:
    (found,) = simulate(local_trace(20), 4, ["lru"], record_bytes=3 << 30).runs
    assert found.slot_bytes == LAYERS * 4 * (3 << 30)


def test_the_shortest_of_several_measurements_counts() -> None:
    """Whatever else the machine did meanwhile."""
    busy = iter([1.0, 1.5, 2.0, 1.0, 1.0, 1.2])
    rate, rest, spread = _line(100, lambda k: (1e-3 + k * 1e-4) * next(busy))
    assert rate == pytest.approx(100 / 1e-4)
    assert rest == pytest.approx(1e-3)
    assert spread == pytest.approx(0.5)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[" * 100_000,
        "[]",
        '{"device": "cpu"}',
        '{"speed": 3}',
        *(
            json.dumps(asdict(H200) | change)
            for change in (
                {"host": -1},
                {"host": "5"},
                {"host": float("inf")},
                {"host": None},
                {"link": 0},
                {"memory": True},
                {"threads": "2"},
                {"card": 3},
            )
        ),
    ],
)
def test_damaged_rates_are_told_and_what_was_measured_is_left_out(
    text: str, tmp_path: Path, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    H200.save(rates_path())
    rates_path().write_text(text)
    with pytest.raises(moepool.FormatError, match="rates .*(expected an object of device|it must be)"):
        Rates.load(rates_path())
    options = ("simulate", trace_file, "--slots", "8", "--policy", "lru")
    result = run(*options)
    assert "Warning: rates" in result.stderr
    assert "`moepool doctor --measure` writes it anew" in result.stderr
    assert "By hits alone" in result.stdout
    assert result.stdout.endswith("moepool doctor --measure.\n")
    assert "Error: rates" in run(*options, "--rates", rates_path(), code=1).stderr


# ----------------------------------------------------------------------------------------------- command line


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # not what was measured here
    local_trace(100, TraceModel(32, 4, 4)).save(tmp_path / "a.moetrace")
    return tmp_path / "a.moetrace"


@pytest.mark.parametrize(
    "written", ["lfu:half_life=64,guard", "lfu:half_life=64;guard", "lfu: guard; half-life=64"]
)
def test_options_of_policies_are_written_the_same_everywhere(trace_file: Path, written: str) -> None:
    options = ("simulate", trace_file, "--slots", "8", "--json", "-", "--policy")
    report = json.loads(run(*options, f"lru,{written},belady").stdout)
    assert [found["policy"].partition(":")[0] for found in report["runs"]] == ["lru", "lfu", "belady"]
    (alone,) = simulate(Trace.load(trace_file), 8, [written]).runs
    assert report["runs"][1]["hits"] == alone.hits
    text = ("generate", "tiny-moe", "-p", "a", "-n", "2", "--json", "-", "--policy", written, "--slots", "4")
    assert json.loads(run(*text).stdout)["placement"]["policy"] == {
        **asdict(moepool.Policy("lfu", guard=True, half_life=64))
    }
    assert policy_from(written) == moepool.Policy("lfu", guard=True, half_life=64)


def test_the_command_prints_what_simulate_finds(trace_file: Path, tmp_path: Path) -> None:
    H200.save(tmp_path / "rates.json")
    options = ["--slots", "8,16", "--policy", "lru,lfu:half_life=64;guard,belady", "--model", "tiny-moe"]
    result = run("simulate", trace_file, *options, "--rates", tmp_path / "rates.json", "--by-layer")
    for text in ("8 (3.6 MiB)", "belady *", "lfu:half_life=64,guard", "MB a token", "ms a token (a card)"):
        assert text in result.stdout
    assert "Evictions by layer, 16" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(("A pool is worth it", "Not worth a pool"))
    report = json.loads(run("simulate", trace_file, *options, "--json", "-").stdout)
    policies = ["lru", "lfu:half_life=64,guard", "belady"]
    info = ModelInfo.from_gguf(bundled_model())
    records = [layer.record_bytes or 0 for layer in info.layers]
    found = simulate(Trace.load(trace_file), [8, 16], policies, record_bytes=records)
    assert report["runs"] == [r.as_dict() for r in found.runs]
    assert report["skew"]["top_50"] > 0.5


def test_the_command_takes_memory_in_place_of_slots(trace_file: Path) -> None:
    report = json.loads(
        run("simulate", trace_file, "--vram", "4MiB,1GiB", "--model", "tiny-moe", "--json", "-").stdout
    )
    assert sorted({tuple(r["slots"]) for r in report["runs"]}) == [(8,) * 4, (32,) * 4]
    assert "needs --model" in run("simulate", trace_file, "--vram", "4MiB", code=1).stderr
    told = run("simulate", trace_file, "--vram", "1GiB,much", "--model", "tiny-moe", code=2).stderr
    assert "'--vram': 'much' is not a size" in told
    assert "give one of them" in run("simulate", trace_file, "--vram", "1", "--slots", "1", code=1).stderr
    for slots in ("a", "\u00b2", "9" * 5000):
        assert "not a list" in run("simulate", trace_file, "--slots", slots, code=2).stderr


def test_sizes() -> None:
    sizes = {"10": 10, "4GiB": 4 << 30, "1.5 gib": 3 << 29, "500MB": 500_000_000, "2KiB": 2048}
    assert {text: parse_size(text) for text in sizes} == sizes
    assert parse_size("9007199254740993") == 2**53 + 1, "not through a float"
    for text in ("1.5", "9" * 400, "9" * 30, "9" * 20 + "GiB", "\u00b2", "1e3", "-1", "", "GiB"):
        with pytest.raises(moepool.ArgumentError, match="is not a size|more than any memory"):
            parse_size(text)


def test_a_picture_needs_matplotlib(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = run("simulate", trace_file, "--plot", trace_file.with_suffix(".png"), code=1).stderr
    assert "pip install matplotlib" in told


def test_the_picture_is_drawn(trace_file: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.png", "a.svg"):
        run("simulate", trace_file, "--model", "tiny-moe", "--plot", trace_file.with_name(name))
    assert trace_file.with_name("a.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in trace_file.with_name("a.svg").read_bytes()
    assert (
        "nonsense" in run("simulate", trace_file, "--plot", trace_file.with_name("a.nonsense"), code=1).stderr
    )
