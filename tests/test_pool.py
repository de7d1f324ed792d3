"""Pools as Python sees them: arguments, warnings, closing, threads, forks and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import moepool
from moepool._native import handles
from tests import cases
from tests.support import F32, assert_same, ffn_layer, matrix_layer, reference

EXPERTS, ROWS, COLUMNS = 8, 40, 64


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    weight = cases.tame_blocks("q8_0", EXPERTS * ROWS, COLUMNS, "pool").reshape(EXPERTS, ROWS, -1)
    return matrix_layer("q8_0", weight)


def rows(tokens: int) -> F32:
    return cases.activations("plain", tokens, COLUMNS, "pool", tokens)


# -------------------------------------------------------------------------------------------------- arguments


def test_attributes_of_a_pool(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, slots=3, policy="static", miss="host") as pool:
        assert (pool.layer, pool.slots, pool.experts) == (layer, 3, EXPERTS)
        assert (pool.device, pool.policy.name, pool.miss, pool.closed) == ("cpu", "static", "host", False)
        assert repr(pool) == "<Pool of block 0 on cpu: 3 slots for 8 experts, static, host>"
        matrix = pool.weight
        assert matrix == pool.matrix("weight") == pool.matrices["weight"]
        assert (matrix.name, matrix.rows, matrix.columns, matrix.index) == ("weight", ROWS, COLUMNS, 0)
        assert repr(matrix) == f"<weight of {pool!r}: q8_0, 40 x 64>"
    assert repr(pool).endswith("host, closed>")


def test_matrices_that_the_layer_does_not_have(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 2) as pool:
        for name in ("gate", "up", "down"):
            assert not hasattr(pool, name)
        with pytest.raises(AttributeError, match="the pool has no matrix 'gate', only weight"):
            _ = pool.gate
        with pytest.raises(moepool.ArgumentError, match="no matrix 'x', only weight"):
            pool.matrix("x")


def hot_of(pool: moepool.Pool) -> list[int]:
    return [int(e) for e in pool.residents()[1]]


@pytest.mark.parametrize(
    "hot",
    [
        [5, 0, 7],
        (5, 0, 7),
        np.array([5, 0, 7]),
        np.array([5, 9, 0, 9, 7, 9], np.uint8)[::2],
        [np.int32(5), 0, 7],
    ],
    ids=lambda hot: type(hot).__name__,
)
def test_hot_may_be_any_sequence_of_integers(hot: Any, layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 3, policy="static", hot=hot) as pool:
        assert sorted(hot_of(pool)) == [0, 5, 7]


def test_hot_may_be_shorter_than_the_slots_and_empty(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 4, policy="static", hot=range(6, 8)) as pool:
        assert sorted(hot_of(pool)) == [-1, -1, 6, 7]
    with moepool.Pool(layer, 4, policy="static", hot=[]) as pool:
        assert hot_of(pool) == [-1] * 4
    with moepool.Pool(layer, 4, policy="static") as pool:
        assert sorted(hot_of(pool)) == [0, 1, 2, 3]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative slots": ({"slots": -1}, moepool.ArgumentError, "slots is -1"),
    "a fraction of slots": ({"slots": 2.5}, moepool.ArgumentError, "slots is 2.5; it must be an integer"),
    "too many slots for an integer": ({"slots": 2**31}, moepool.ArgumentError, "slots is 2147483648"),
    "device": ({"device": "tpu"}, moepool.ArgumentError, "device is 'tpu'"),
    "policy": ({"policy": "mru"}, moepool.ArgumentError, "policy is 'mru'; it must be 'lru' or 'static'"),
    "no policy": ({"policy": []}, moepool.ArgumentError, r"policy is \[\]; it must be 'lru' or 'static'"),
    "one hot": ({"policy": "static", "hot": 3}, moepool.ArgumentError, r"hot is 3; .* \[3\] for one"),
    "miss": ({"miss": "wait"}, moepool.ArgumentError, "miss is 'wait'; it must be 'stream' or 'host'"),
    "prompt_tokens": ({"prompt_tokens": -1}, moepool.ArgumentError, "prompt_tokens is -1"),
    "admit": ({"admit": -2}, moepool.ArgumentError, "admit is -2"),
    "budget": ({"budget_bytes": 0}, moepool.ArgumentError, "budget_bytes is 0"),
    "hot for lru": ({"hot": [1]}, moepool.ArgumentError, "hot belongs to the policies .*, not to 'lru'"),
    "hot past the experts": ({"policy": "static", "hot": [1, 8]}, moepool.IdError, r"hot\[1\] is expert 8"),
    "negative hot": ({"policy": "static", "hot": [-1]}, moepool.IdError, r"hot\[0\] is expert -1"),
    "huge hot": ({"policy": "static", "hot": [2**40]}, moepool.IdError, "1099511627776"),
    "fractions in hot": ({"policy": "static", "hot": [0.5]}, moepool.ArgumentError, r"hot\[0\] is 0.5"),
    "more hot than slots": ({"policy": "static", "hot": [0, 1, 2, 3, 4]}, moepool.ArgumentError, "hot"),
    "the same twice": ({"policy": "static", "hot": [3, 3]}, moepool.ArgumentError, "hot"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, layer: moepool.Layer) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        moepool.Pool(layer, **{"slots": 4, **arguments})


def test_a_pool_is_made_of_a_layer(layer: moepool.Layer) -> None:
    for other in (
        None,
        "model.gguf",
        moepool.ExpertStore.from_arrays(weight=np.zeros((1, 1, 32), np.float32), qtype="q8_0"),
    ):
        with pytest.raises(
            moepool.ArgumentError, match=r"it must be a layer of a store, store\[0\] for example"
        ):
            moepool.Pool(other, 2)  # type: ignore[arg-type]


def test_unknown_phases_are_refused(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 2) as pool, pytest.raises(moepool.ArgumentError, match="phase is 'prefill'"):
        pool.resolve([[0]], phase="prefill")  # type: ignore[arg-type]


@pytest.mark.parametrize(("slots", "admitted"), [(4, 1), (EXPERTS, 3)])
def test_auto_on_the_cpu_is_host_and_admits_one_a_step(
    slots: int, admitted: int, layer: moepool.Layer
) -> None:
    """Or as many as miss, if all have a slot."""
    with moepool.Pool(layer, slots, miss="auto") as pool:
        assert pool.policy == moepool.Policy("lfu", guard=True, half_life=1024)
        with pool.resolve([[0, 1, 2]]) as route:
            assert (route.misses, route.admitted, route.cold.tolist()) == (3, admitted, [[0, 1, 2]])
        assert pool.stats().host_bytes == 3 * layer.record_bytes
        assert pool.stats().in_place_bytes == 0


# --------------------------------------------------------------------------------------------------- warnings


def test_more_slots_than_experts_are_told_at_the_callers_line(layer: moepool.Layer) -> None:
    with pytest.warns(moepool.MoePoolWarning, match="9 slots for a layer of 8 experts") as caught:
        pool = moepool.Pool(layer, 9)
    assert [warning.filename for warning in caught] == [__file__]
    assert pool.slots == EXPERTS


def test_h24_fewer_slots_than_places_are_told_once(layer: moepool.Layer) -> None:
    """At the first step, with the number that it takes, at the line that called; the results are right."""
    x = rows(2)
    ids = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    expected = reference(layer, x, ids)
    for slots in (1, 2):
        with moepool.Pool(layer, slots) as pool:
            message = f"3 places, but the pool has {slots} slots: .* at least 3 slots, or none"
            with pytest.warns(moepool.MoePoolWarning, match=message) as caught:
                y = moepool.matmul_id(x, ids, pool)
            assert [warning.filename for warning in caught] == [__file__]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert_same(moepool.matmul_id(x, ids, pool), y, "again")
        assert_same(y, expected, f"{slots} slots")


@pytest.mark.parametrize("slots", [0, 3, 8])
def test_slots_that_suffice_and_none_at_all_are_silent(slots: int, layer: moepool.Layer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with moepool.Pool(layer, slots) as pool:
            moepool.matmul_id(rows(1), [[0, 1, 2]], pool)
            if slots == 8:  # repeats: more places than experts, all of which are there
                moepool.matmul_id(rows(1), [[0] * 12], pool)


def test_a_bad_call_does_not_use_the_warning_up(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 1) as pool:
        with pytest.raises(moepool.ArgumentError):
            moepool.matmul_id(rows(2), [[0, 1]], pool)
        with pytest.warns(moepool.MoePoolWarning, match="2 places"):
            moepool.matmul_id(rows(1), [[0, 1]], pool)


# ------------------------------------------------------------------------------------------------------ facts


def test_stats_and_residents(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 2) as pool:
        assert np.isnan(pool.stats().hit_rate)
        slot_of, expert_in = pool.residents()
        assert slot_of.dtype == expert_in.dtype == np.int32
        assert (slot_of.tolist(), expert_in.tolist()) == ([-1] * EXPERTS, [-1, -1])
        for ids in ([[3]], [[3]], [[5]], [[6]]):
            pool.resolve(ids).release()
        stats = pool.stats()
        assert (stats.steps, stats.hits, stats.misses, stats.evictions, stats.resident) == (4, 1, 3, 1, 2)
        assert stats.hit_rate == 0.25
        assert stats.copied_bytes == 3 * layer.record_bytes
        assert stats.slot_bytes == 2 * layer.record_bytes
        slot_of, expert_in = pool.residents()
        assert sorted(expert_in.tolist()) == [5, 6]
        assert all(expert_in[slot_of[expert]] == expert for expert in (5, 6))


def test_route_attributes(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 2) as pool, pool.resolve([[3, -1], [4, 3]], phase="decode") as route:
        assert (route.tokens, route.k, route.tick, route.bypass, route.prompt) == (2, 2, 1, False, False)
        assert (route.hits, route.misses, route.admitted, route.pool) == (0, 2, 2, pool)
        assert route.hot.dtype == route.cold.dtype == np.int32
        assert pool.residents()[1][route.hot[[0, 1, 1], [0, 0, 1]]].tolist() == [3, 4, 3]
        assert (route.hot[0, 1], route.cold.tolist()) == (-1, [[-1, -1], [-1, -1]])
        assert repr(route) == "<Route of 2 x 2 ids: decode, 0 hits, 2 misses, 2 admitted>"
        with pool.resolve([[0, 1], [2, 3]]) as other:
            assert other.bypass
            assert repr(other) == "<Route of 2 x 2 ids: decode, bypass, 1 hits, 3 misses, 0 admitted>"
            assert other.cold.tolist() == [[0, 1], [2, -1]]


def test_h25_pools_are_independent(layer: moepool.Layer) -> None:
    """A pool of another shape, made and used in between, changes neither results nor counters."""
    other = matrix_layer("q4_0", cases.tame_blocks("q4_0", 3 * 32, 96, "other").reshape(3, 32, -1))
    x, wide = rows(1), cases.activations("plain", 1, 96, "other")
    with moepool.Pool(layer, 2) as a:
        first = moepool.matmul_id(x, [[1, 2]], a)
        with moepool.Pool(other, 3) as b:
            y = moepool.matmul_id(wide, [[2, 0]], b)
            assert_same(moepool.matmul_id(x, [[1, 2]], a), first, "a after b")
            assert_same(moepool.matmul_id(wide, [[2, 0]], b), y, "b after a")
            assert (a.stats().hits, a.stats().misses) == (2, 2)
            assert (b.stats().hits, b.stats().misses) == (2, 2)
        assert_same(moepool.matmul_id(x, [[1, 2]], a), first, "a after b is closed")
        assert a.stats().hits == 4


def test_a_closed_pool_is_of_no_use_and_closes_twice(layer: moepool.Layer) -> None:
    pool = moepool.Pool(layer, 2)
    pool.close()
    pool.close()
    assert pool.closed
    for use in (
        lambda: pool.stats(),
        lambda: pool.residents(),
        lambda: pool.resolve([[0]]),
        lambda: moepool.matmul_id(rows(1), [[0]], pool),
    ):
        with pytest.raises(moepool.StateError, match="the pool is closed"):
            use()


# ----------------------------------------------------------------------------------------- threads, processes


def busy_layer() -> moepool.Layer:
    """A layer on which a call takes tens of milliseconds."""
    blocks = {
        name: cases.tame_blocks("q4_k", 4 * n, k, "busy", name).reshape(4, n, -1)
        for name, n, k in (("gate", 1024, 512), ("up", 1024, 512), ("down", 512, 1024))
    }
    return ffn_layer(blocks, "q4_k")


def test_the_gil_is_free_in_a_long_call() -> None:
    """A ticker in Python keeps ticking while the kernels run."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    with moepool.Pool(busy_layer(), 4) as pool:
        ffn = moepool.ExpertFFN(pool)
        tokens, start, end = 32, 0.0, 0.0
        thread.start()
        try:
            while end - start < 0.05:
                tokens *= 2
                x = cases.activations("plain", 1, 512, "gil").repeat(tokens, axis=0)
                ids = np.broadcast_to(np.arange(4), (tokens, 4))
                weights = np.ones((tokens, 4), np.float32)
                start = time.perf_counter()
                ffn(x, ids, weights)
                end = time.perf_counter()
        finally:
            stop.set()
            thread.join()
    assert len([t for t in ticks if start < t < end]) >= 3


def test_any_number_of_threads_may_use_a_pool(layer: moepool.Layer) -> None:
    """Each gets its own bytes, while the pool evicts all the time."""
    streams = [cases.expert_ids("some", 4, 2, EXPERTS, "threads", i) for i in range(24)]
    x = rows(4)
    expected = [reference(layer, x, ids) for ids in streams]
    with moepool.Pool(layer, 3) as pool, ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            results = list(threads.map(lambda ids: moepool.matmul_id(x, ids, pool), streams))
            for i, (y, right) in enumerate(zip(results, expected, strict=True)):
                assert_same(y, right, f"thread {i}")
        assert pool.stats().leased == 0


def test_closing_in_another_thread_frees_nothing_that_is_in_use() -> None:
    """The call ends with its result, or finds the pool closed."""
    layer = busy_layer()
    x = cases.activations("plain", 64, 512, "close")
    ids = cases.expert_ids("plain", 64, 4, 4, "close")
    weights = np.ones((64, 4), np.float32)
    with moepool.Pool(layer, 4) as pool:
        expected = moepool.ExpertFFN(pool)(x, ids, weights)
    for delay in (0.0, 0.0005, 0.002, 0.005):
        pool = moepool.Pool(layer, 4)
        ffn = moepool.ExpertFFN(pool)
        closer = threading.Timer(delay, pool.close)
        closer.start()
        finished = 0
        with pytest.raises(moepool.StateError):
            while True:
                assert_same(ffn(x, ids, weights), expected, "while closing")
                finished += 1
        closer.join()


def test_threads_are_settings_of_the_process(settings_kept: None, layer: moepool.Layer) -> None:
    x, ids = rows(16), cases.expert_ids("some", 16, 3, EXPERTS, "threads")
    with moepool.Pool(layer, 4) as pool:
        expected = moepool.matmul_id(x, ids, pool)
        for threads in (1, 2, 7):
            moepool.set_threads(threads)
            assert moepool.get_threads() == threads
            assert_same(moepool.matmul_id(x, ids, pool), expected, f"{threads} threads")
        for wrong in (0, -1, 2**31, "2", 1.5):
            with pytest.raises(moepool.ArgumentError, match=f"threads is {wrong!r}; it must be"):
                moepool.set_threads(wrong)
        assert moepool.get_threads() == 7
        moepool.set_threads(None)
        assert 1 <= moepool.get_threads() <= len(os.sched_getaffinity(0))


def test_kernels_are_chosen_for_a_while_or_for_good(settings_kept: None) -> None:
    kernels = moepool.cpu_kernels()
    assert kernels["portable"]
    usable = [name for name, can in kernels.items() if can]
    with moepool.use_cpu_kernel("portable") as outer:
        assert outer.name == "portable"
        with moepool.use_cpu_kernel(usable[-1]) as inner:
            assert (inner.name, repr(inner)) == (usable[-1], f"<CPU kernels: {usable[-1]}>")
        assert handles.cpu_selected() == "portable"
    assert handles.cpu_selected() == usable[-1]
    moepool.use_cpu_kernel("portable")
    assert handles.cpu_selected() == "portable"
    assert moepool.use_cpu_kernel(None).name == usable[-1]
    runs = ", ".join(map(repr, usable))
    with pytest.raises(
        moepool.ArgumentError, match=f"'abacus' is not in this build; this machine runs {runs}$"
    ):
        moepool.use_cpu_kernel("abacus")
    assert moepool.use_cpu_kernel(None).name == usable[-1]


def test_quant_types_are_ggmls() -> None:
    types = moepool.quant_types()
    assert set(types) == set(cases.TYPES)
    assert [t.id for t in types.values()] == sorted(t.id for t in types.values())
    for name, kind in types.items():
        layout = cases.LAYOUTS[name]
        assert (kind.name, kind.id, kind.block, kind.block_bytes) == (
            name,
            layout.id,
            layout.block,
            layout.block_bytes,
        )
        assert kind.row_bytes(512) == layout.row_bytes(512)


def in_child(work: Callable[[], object], seconds: float = 60) -> int:
    """Exit status of a forked child that does the work; -9 if it does not come back."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_after_use_can_use_the_pool(settings_kept: None, layer: moepool.Layer) -> None:
    """The threads of the kernels do not live on in the child; it makes its own."""
    moepool.set_threads(4)
    x, ids = rows(16), cases.expert_ids("some", 16, 3, EXPERTS, "fork")
    with moepool.Pool(layer, 4) as pool:
        expected = moepool.matmul_id(x, ids, pool)

        def child() -> None:
            assert_same(moepool.matmul_id(x, ids, pool), expected, "in the child")
            moepool.set_threads(2)
            assert_same(moepool.matmul_id(x, ids, pool), expected, "in the child, two threads")
            with moepool.Pool(layer, 2) as own:
                assert_same(
                    moepool.matmul_id(x[:4], ids[:4, :2], own)[:, :2], expected[:4, :2], "its own pool"
                )

        assert in_child(child) == 0
        assert_same(moepool.matmul_id(x, ids, pool), expected, "in the parent")


AT_EXIT = """
import sys, threading
import numpy as np
import moepool

weight = np.ones((4, 32, 64), np.float32)
store = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")
pool = moepool.Pool(store[0], 2)
route = pool.resolve([[0, 1]])
cycle = [pool, route]
cycle.append(cycle)

def run():
    while True:
        moepool.matmul_id(np.ones((1, 64), np.float32), [[0, 1]], pool)

if "daemon" in sys.argv:
    threading.Thread(target=run, daemon=True).start()
moepool.matmul_id(np.ones((1, 64), np.float32), [[2]], pool)
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["plain", "daemon"])
def test_a_pool_may_be_alive_at_the_end_of_the_process(how: str) -> None:
    """With an open route, in a reference cycle, even while a daemon thread computes."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", AT_EXIT, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
