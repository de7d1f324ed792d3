"""Steps on the device whose misses the CPU computes, all of them or a share: bytes, residency and counts are
the CPU's, in calls and in CUDA graphs, and a CPU that does not answer is survived."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import moepool
from moepool._native import handles
from tests import cases
from tests.decode_steps import (
    CHAIN,
    DEVICE,
    EXPERTS,
    NAN,
    SIZES,
    SMALL,
    Step,
    assert_in_step,
    hidden_of,
    layer_of_types,
    recorded,
    steps_of,
)
from tests.support import F32, I32, Guarded, assert_same, few_slots, get, layer_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("settings")]


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def settings() -> Iterator[None]:
    """Puts the doorbell back to its defaults; a busy machine gets more time."""
    before = handles.get_doorbell()
    handles.set_doorbell(timeout_us=20_000_000)
    yield
    handles.set_doorbell(**before)


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


# -------------------------------------------------------------------------------------------------- the bytes

TRIPLES = [  # gate, up, down
    ("q4_k", "q4_k", "q4_k"),
    ("q8_0", "q8_0", "f32"),
    ("bf16", "bf16", "mxfp4"),
    ("f32", "f32", "q6_k"),
    ("iq4_nl", "iq4_nl", "q3_k"),
    ("q2_k", "q2_k", "q2_k"),
    ("q4_k", "q6_k", "q8_0"),
    ("f16", "bf16", "q5_0"),
    ("q8_0", "f32", "q4_k"),  # the CPU is given activations in both forms
    ("bf16", "q3_k", "f16"),
]
SERVING: tuple[tuple[int, dict[str, Any]], ...] = (
    (0, {"miss": "host"}),
    (3, {"miss": "host"}),
    (4, {"miss": "host", "admit": 1}),
    (4, {"miss": "host", "policy": "static", "hot": [6, 1, 3]}),
    (8, {"miss": "host"}),
    (0, {"miss": "auto"}),
    (4, {"miss": "auto"}),
    (4, {"miss": "auto", "admit": 3}),
    (4, {"miss": "auto", "policy": "static", "hot": [6, 1, 3]}),
    (8, {"miss": "auto"}),
    (8, {"miss": "auto", "admit": 1}),
)


def follow(
    cupy: Any, layer: moepool.Layer, steps: list[Step], slots: int, options: dict[str, Any], what: str
) -> None:
    """Every other step in a graph. Whom "auto" admits depends on time; of "host" all is the law's."""
    divides = options["miss"] == "auto"
    with (
        few_slots(),
        moepool.Pool(layer, slots, device=DEVICE, **options) as pool,
        moepool.Pool(layer, slots, **options) as law,
    ):
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for number, step in enumerate(steps):
                here = f"step {number}, ids {step.ids.tolist()}, {slots} slots, {options}, {what}"
                right = step.right(on_cpu)
                x, ids, weights = (cupy.asarray(array) for array in (step.x, step.ids, step.weights))
                out = Guarded(*right.shape, device=DEVICE)
                if number % 2:
                    recorded(stream, partial(ffn, x, ids, weights, out=out.out)).launch(stream)
                else:
                    ffn(x, ids, weights, out=out.out)
                assert_same(out.check(here), right, here)
                if step.bad:
                    with pytest.raises(moepool.IdError):
                        pool.stats()
                if divides:
                    slot_of, expert_in = pool.residents()
                    for slot, expert in enumerate(expert_in):
                        assert expert < 0 or slot_of[expert] == slot, here
                    assert (slot_of >= 0).sum() == (expert_in >= 0).sum(), here
                else:
                    assert_in_step(pool, law, here)
        asks = not divides or slots < EXPERTS or "admit" in options
        assert ("misses by the CPU" in pool.describe(1, 2)) == asks
        ours, theirs = pool.stats(), law.stats()
        assert ours.steps == theirs.steps
        assert ours.hits + ours.misses == theirs.hits + theirs.misses
        assert (ours.misses > 0 and ours.host_bytes > 0) == (asks and theirs.misses > 0)


@pytest.mark.parametrize(("gate", "up", "down"), TRIPLES)
def test_every_step_is_the_cpus(gate: str, up: str, down: str, cupy: Any) -> None:
    layer = layer_of_types(gate, down, up)
    steps = steps_of(hidden_of(gate, up))
    for slots, options in SERVING:
        follow(cupy, layer, steps, slots, options, f"{gate}, {up} and {down}")


def test_auto_asks_nobody_where_every_expert_gets_a_slot(cupy: Any) -> None:
    """Each crosses the link once. With fewer slots the same pool divides."""
    layer = layer_of_types("q4_k", "q4_k")
    x = cases.activations("plain", 2, SIZES[256][0])
    weights = np.full((2, 3), 0.25, np.float32)
    with (
        moepool.Pool(layer, EXPERTS, device=DEVICE, miss="auto") as pool,
        moepool.Pool(layer, 0) as law,
        moepool.Pool(layer, EXPERTS, device=DEVICE, miss="auto", admit=1) as limited,
    ):

        def run(pool: moepool.Pool) -> None:
            for first in range(0, EXPERTS, 2):
                ids = np.arange(first, first + 6).reshape(2, 3) % EXPERTS
                y = moepool.ExpertFFN(pool)(*map(cupy.asarray, (x, ids, weights)))
                assert_same(get(y), moepool.ExpertFFN(law)(x, ids, weights), f"from {first}")

        for misses in (EXPERTS, EXPERTS):
            run(pool)
            stats = pool.stats()
            assert (stats.misses, stats.host_bytes) == (misses, 0)
            assert stats.copied_bytes == EXPERTS * layer.record_bytes
        assert "misses by the CPU" not in pool.describe(2, 3)
        run(limited)
        assert limited.stats().host_bytes > 0
        with few_slots():
            assert pool.resize(2) == 2
            run(pool)
        assert pool.stats().host_bytes > 0
        # What counts is how many there are, not how many the pool was made with.
        with moepool.Pool(layer, 2, max_slots=EXPERTS, device=DEVICE, miss="auto") as grown:
            assert "misses by the CPU" in grown.describe(2, 3)
            assert grown.resize(EXPERTS) == EXPERTS
            assert "misses by the CPU" not in grown.describe(2, 3)
            run(grown)
            assert grown.stats().host_bytes == 0
        with few_slots(), moepool.Pool(layer, EXPERTS, device=DEVICE, miss="auto") as shrunk:
            assert shrunk.resize(2) == 2
            assert "misses by the CPU" in shrunk.describe(2, 3)


@pytest.mark.parametrize("miss", ["host", "auto"])
def test_asked_by_nodes_of_the_graph(miss: Any, cupy: Any) -> None:
    moepool.set_doorbell(timeout=20, host_nodes=True)
    steps = steps_of(SIZES[256][0])[:60]
    for slots in (0, 4):
        follow(cupy, layer_of_types("q4_k", "q4_k"), steps, slots, {"miss": miss}, "by nodes")


@pytest.mark.parametrize("slots", [0, 4, 8])
def test_comparisons_with_the_cpu_alone(slots: int, cupy: Any) -> None:
    """Steps in which the CPU computes hits as well, often and at any time."""
    handles.set_doorbell(period=-20)
    steps = steps_of(SIZES[256][0]) * 2
    follow(cupy, layer_of_types("q4_k", "q4_k"), steps, slots, {"miss": "auto", "admit": 2}, "comparing")
    x, ids, router = (
        cupy.asarray(array)
        for array in (
            cases.activations("plain", 1, SIZES[256][0]),
            np.array([[1, 2, 3]]),
            np.ones((1, 3), np.float32),
        )
    )
    with moepool.Pool(
        layer_of_types("q4_k", "q4_k"), EXPERTS, device=DEVICE, miss="auto", admit=EXPERTS
    ) as pool:
        pool.resolve([list(range(EXPERTS))]).release()
        before = pool.stats().host_bytes
        for _ in range(100):
            moepool.ExpertFFN(pool)(x, ids, router)
        stats = pool.stats()
        assert (stats.misses, stats.hits) == (EXPERTS, 300), "hits stay hits"
        windows, rest = divmod(stats.host_bytes - before, 3 * pool.layer.record_bytes)
        assert rest == 0 and 20 < windows < 80


# ----------------------------------------------------------------------------------------------- long replays


@pytest.mark.parametrize("miss", ["host", "auto"])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 3), (4, 6), (1, 0)])
def test_replays_of_several_layers(tokens: int, slots: int, miss: Any, cupy: Any) -> None:
    """A graph of three layers, recorded before their pools ever ran, while everything is evicted."""
    steps, hidden, k = 1500, 256, 2
    draw = cases.Stream("doorbell replays", tokens, slots)
    x = cases.activations("plain", tokens, hidden, "doorbell replays")
    ids = (draw.below(EXPERTS + 1, (steps, len(CHAIN), tokens, k)) - 1).astype(np.int32)
    router = (draw.below(1000, ids.shape) * 0.001).astype(np.float32)
    made = [layer_of(ffn) for ffn in CHAIN]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, few_slots():
        pools = [moepool.Pool(layer, slots, device=DEVICE, miss=miss) for layer in made]
        laws = [moepool.Pool(layer, slots, miss=miss) for layer in made]
        rows = cupy.asarray(x)
        ids_in = cupy.full((len(CHAIN), tokens, k), -1, cupy.int32)
        router_in = cupy.zeros((len(CHAIN), tokens, k), cupy.float32)
        y = cupy.empty((len(CHAIN), tokens, hidden), cupy.float32)

        def whole() -> None:
            for i, pool in enumerate(pools):
                moepool.ExpertFFN(pool)(rows, ids_in[i], router_in[i], out=y[i])

        graph = recorded(stream, whole)
        all_ids, all_router = cupy.asarray(ids), cupy.asarray(router)
        given = cupy.empty((steps, *y.shape), cupy.float32)
        for step in range(steps):
            ids_in[...] = all_ids[step]
            router_in[...] = all_router[step]
            graph.launch(stream)
            given[step] = y
        results = get(given)
        for i, (pool, law) in enumerate(zip(pools, laws, strict=True)):
            right = np.stack(
                [moepool.ExpertFFN(law)(x, ids[step, i], router[step, i]) for step in range(steps)]
            )
            assert_same(np.ascontiguousarray(results[:, i]), right, f"layer {i}")
            if miss == "host":
                assert_in_step(pool, law, f"layer {i}")
            assert pool.stats().host_bytes > 0
    for pool in (*pools, *laws):
        pool.close()


@pytest.mark.parametrize("policy", ["lru", None])
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_auto_admits_is_traced(tokens: int, policy: Any, cupy: Any, layer: moepool.Layer) -> None:
    """Chosen admissions take the recorded steps again, to the last hit."""
    steps, k, slots = 600, 3, 6
    draw = cases.Stream("traced", tokens)
    ids = np.minimum(*(draw.below(EXPERTS, (2, steps, tokens, k)))).astype(np.int32)
    x, router = SMALL.x(tokens), np.resize(SMALL.router(tokens), (tokens, k)).astype(np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with (
        stream,
        few_slots(),
        moepool.Pool(layer, slots, device=DEVICE, miss="auto", policy=policy, admit=2) as pool,
        moepool.Pool(layer, slots, policy=pool.policy) as law,
    ):
        given = [cupy.asarray(x), cupy.zeros((tokens, k), cupy.int32), cupy.asarray(router)]
        out = cupy.empty((tokens, 256), cupy.float32)
        graph = recorded(stream, partial(moepool.ExpertFFN(pool), *given, out=out))
        table = cupy.asarray(ids)
        with pool.trace() as trace:
            for step in range(steps):
                given[1][...] = table[step]
                graph.launch(stream)
            traced = trace.drain()
        assert traced.ids.reshape(ids.shape).tolist() == ids.tolist()
        ticks = traced.step.reshape(steps, tokens)[:, 0]
        for step in range(steps):
            rows = traced.admissions[traced.admissions[:, 0] == ticks[step]]
            law.resolve(ids[step], admissions=[(int(row[2]), int(row[3])) for row in rows]).release()
        for array, right in zip(pool.residents(), law.residents(), strict=True):
            assert array.tolist() == right.tolist()
        ours, theirs = pool.stats(), law.stats()
        assert (ours.hits, ours.misses, ours.evictions) == (theirs.hits, theirs.misses, theirs.evictions)
        assert ours.copied_bytes == len(traced.admissions) * layer.record_bytes > 0


@pytest.mark.parametrize("miss", ["host", "auto"])
def test_two_pools_on_two_streams(miss: Any, cupy: Any) -> None:
    """Graphs of both are under way at once; both ask the same thread."""
    rounds, k = 400, 4
    ids = [(cases.Stream("two streams", i).below(EXPERTS, (rounds, 1, k))).astype(np.int32) for i in range(2)]
    x, router = SMALL.x(1), SMALL.router(1)[:, :k]
    router = np.resize(router, (1, k)).astype(np.float32)
    layers = [layer_of(SMALL), layer_of(SMALL)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    pools = [moepool.Pool(layer, 4, device=DEVICE, miss=miss) for layer in layers]
    jobs = []
    for i in range(2):
        with streams[i]:
            given = [cupy.asarray(x), cupy.zeros((1, k), cupy.int32), cupy.asarray(router)]
            out = cupy.empty((1, 256), cupy.float32)
            graph = recorded(streams[i], partial(moepool.ExpertFFN(pools[i]), *given, out=out))
            jobs.append((graph, given, out, cupy.asarray(ids[i]), cupy.empty((rounds, 1, 256), cupy.float32)))
    for step in range(rounds):
        for i, (graph, given, out, table, kept) in enumerate(jobs):
            with streams[i]:
                given[1][...] = table[step]
                graph.launch(streams[i])
                kept[step] = out
    for i, (*_, kept) in enumerate(jobs):
        streams[i].synchronize()
        with moepool.Pool(layers[i], 0) as law:
            right = np.stack([moepool.ExpertFFN(law)(x, ids[i][step], router) for step in range(rounds)])
        assert_same(get(kept), right, f"stream {i}")
        pools[i].close()


def test_hits_ask_nobody(cupy: Any, layer: moepool.Layer) -> None:
    """With every expert resident, nothing depends on the CPU any more."""
    with moepool.Pool(layer, EXPERTS, device=DEVICE, miss="host") as pool:
        pool.resolve([list(range(EXPERTS))]).release()
        given = [cupy.asarray(a) for a in (SMALL.x(3), SMALL.ids(3), SMALL.router(3))]
        right = get(moepool.ExpertFFN(pool)(*given))
        before = pool.stats()
        handles.set_doorbell(timeout_us=1000, stall_us=5_000_000)
        with moepool.Pool(layer, EXPERTS, device=DEVICE, miss="host") as other:
            other.resolve([list(range(EXPERTS))]).release()
            for _ in range(50):
                assert_same(get(moepool.ExpertFFN(other)(*given)), right, "all hits")
            assert other.stats().host_bytes == before.host_bytes


def test_slots_that_lose_are_left(cupy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Slots for an eighth of many small experts, all of which are wanted: the CPU alone is quicker than both.

    If not at once, then when others fill the link, of which the pool knows nothing. When few are wanted, the
    slots win their place back.
    """
    tokens, k, experts, size = 16, 8, 128, 64 << 20
    small = cases.Ffn("slots that lose", 512, 256, experts, k, "q8_0", "q8_0", "q8_0")
    layer = layer_of(small)
    draw = cases.Stream("slots that lose")
    many, few = (cupy.asarray(draw.below(n, (64, tokens, k)).astype(np.int32)) for n in (experts, 8))
    handles.set_doorbell(period=48)
    stream, beside = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    load, filled = cupy.cuda.alloc_pinned_memory(size), cupy.empty(size, cupy.uint8)
    with stream, few_slots(), moepool.Pool(layer, 16, device=DEVICE, miss="auto") as pool:
        x, router = small.x(tokens), small.router(tokens)
        given = [cupy.asarray(x), cupy.zeros((tokens, k), cupy.int32), cupy.asarray(router)]
        out = cupy.empty((tokens, 512), cupy.float32)
        graph = recorded(stream, partial(moepool.ExpertFFN(pool), *given, out=out))

        def replayed(table: Any, busy: bool = False) -> float:
            """64 steps; the part of the wanted experts that the CPU computed."""
            before = pool.stats()
            for ids in table:
                if busy:
                    cupy.cuda.runtime.memcpyAsync(filled.data.ptr, load.ptr, size, 1, beside.ptr)
                given[1][...] = ids
                graph.launch(stream)
            stream.synchronize()
            beside.synchronize()
            after = pool.stats()
            wanted = after.hits + after.misses - before.hits - before.misses
            return (after.host_bytes - before.host_bytes) / layer.record_bytes / wanted

        parts: list[float] = []
        while len(parts) < 80 and not (pool.stats().step_backs and parts[-1] > 0.8):
            parts.append(replayed(many, len(parts) > 40))
        told = [round(part, 2) for part in parts]
        assert pool.stats().step_backs > 0 and parts[-1] > 0.8, told
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "slower than the CPU alone" in caplog.text
        rounds = next((i for i in range(40) if replayed(few) < 0.5), None)
        assert rounds is not None, "the slots were not tried again"
        with moepool.Pool(layer, 0) as law:
            right = moepool.ExpertFFN(law)(x, get(given[1]), router)
        assert_same(get(out), right, "the last step")


# ------------------------------------------------------------------------------------------------- no answer


def misses(cupy: Any, tokens: int) -> tuple[list[Any], F32, I32, F32]:
    k = SMALL.ids(tokens).shape[1]
    ids = (np.arange(tokens * k, dtype=np.int32) % EXPERTS).reshape(tokens, k)
    arrays = (SMALL.x(tokens), ids, SMALL.router(tokens))
    return [cupy.asarray(a) for a in arrays], *arrays


def assert_lost(y: Any, right: F32, miss: Any, what: str) -> None:
    """All rows are NaN, or with "auto" those of tokens with a place that was left to the CPU."""
    nan = (get(y).view(np.uint32) == NAN).all(axis=1)
    assert nan.all() or (miss == "auto" and nan.any()), what
    assert_same(get(y)[~nan], right[~nan], what)


@pytest.mark.parametrize("how", ["stalled", "killed"])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("miss", ["host", "auto"])
def test_a_cpu_that_does_not_answer(
    miss: Any, tokens: int, how: str, cupy: Any, layer: moepool.Layer
) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    given, x, ids, router = misses(cupy, tokens)
    out = cupy.empty((tokens, 256), cupy.float32)
    moepool.set_doorbell(timeout=0.1)
    with stream, few_slots():
        pool = moepool.Pool(layer, 0, device=DEVICE, miss=miss)
        ffn = moepool.ExpertFFN(pool)
        graph = recorded(stream, partial(ffn, *given, out=out))
        handles.set_doorbell(stall_us=1_500_000 if how == "stalled" else -1)
        with moepool.Pool(layer, 0) as law:
            right = moepool.ExpertFFN(law)(x, ids, router)
        begun = time.perf_counter()
        graph.launch(stream)
        stream.synchronize()
        took = time.perf_counter() - begun
        assert 0.09 < took < 1.0, f"one step waited {took} s"
        assert_lost(out, right, miss, "the step that waited")
        begun = time.perf_counter()
        for _ in range(20):
            graph.launch(stream)
        stream.synchronize()
        took = time.perf_counter() - begun
        assert took < 0.09, f"later steps waited {took} s"
        assert_lost(out, right, miss, "a later step")
        for call in (pool.stats, partial(ffn, *given), partial(ffn, *given)):
            with pytest.raises(moepool.StateError, match=r"did not answer.*[Mm]ake a new pool"):
                call()
        pool.stats()  # told; what was counted is there
        begun = time.perf_counter()
        pool.close()
        assert time.perf_counter() - begun < 0.5, "closing waited for the late worker"
        handles.set_doorbell(stall_us=0, timeout_us=20_000_000)
        # Beside what the late worker still does, another pool is right.
        with moepool.Pool(layer, 0, device=DEVICE, miss=miss) as other:
            for _ in range(30):
                assert_same(get(moepool.ExpertFFN(other)(*given)), right, "another pool")
                time.sleep(0.06)


@pytest.mark.parametrize("how", ["stalled", "killed"])
def test_a_graph_waits_once(how: str, cupy: Any) -> None:
    """Of several layers the first waits for the whole time-out, the others give up soon. New pools end it."""
    stream = cupy.cuda.Stream(non_blocking=True)
    made = [layer_of(ffn) for ffn in CHAIN]
    given, x, ids, router = misses(cupy, 1)
    out = cupy.empty((len(CHAIN), 1, 256), cupy.float32)
    right = []
    for layer in made:
        with few_slots(), moepool.Pool(layer, 0) as law:
            right.append(moepool.ExpertFFN(law)(x, ids, router))

    def launched(pools: list[moepool.Pool]) -> float:
        def whole() -> None:
            for i, pool in enumerate(pools):
                moepool.ExpertFFN(pool)(*given, out=out[i])

        graph = recorded(stream, whole)
        begun = time.perf_counter()
        graph.launch(stream)
        stream.synchronize()
        return time.perf_counter() - begun

    with stream, few_slots():
        moepool.set_doorbell(timeout=0.4)
        pools = [moepool.Pool(layer, 0, device=DEVICE, miss="host") for layer in made]
        handles.set_doorbell(stall_us=1_000_000 if how == "stalled" else -1)
        took = launched(pools)
        assert 0.4 < took < 0.6, f"{len(CHAIN)} layers waited {took} s"
        assert (get(out).view(np.uint32) == NAN).all()
        for i, pool in enumerate(pools):
            why = "nor had it answered another pool in time" if i else r"4\d\d ms"
            with pytest.raises(moepool.StateError, match=rf"{why}.*[Mm]ake a new pool"):
                pool.stats()
            pool.close()
        # The silence is over: an answer that takes long is waited for, also by the layers behind.
        handles.set_doorbell(stall_us=0, timeout_us=20_000_000)
        pools = [moepool.Pool(layer, 0, device=DEVICE, miss="host") for layer in made]
        handles.set_doorbell(stall_us=50_000)
        launched(pools)
        for i, pool in enumerate(pools):
            assert_same(get(out[i]), right[i], f"layer {i} of a new pool")
            pool.close()


def test_an_answer_is_not_lost_in_a_pause(cupy: Any, layer: moepool.Layer) -> None:
    """The thread sleeps between looks after a while; a replay wakes nobody."""
    stream = cupy.cuda.Stream(non_blocking=True)
    given, x, ids, router = misses(cupy, 1)
    out = cupy.empty((1, 256), cupy.float32)
    with stream, few_slots(), moepool.Pool(layer, 0, device=DEVICE, miss="host") as pool:
        graph = recorded(stream, partial(moepool.ExpertFFN(pool), *given, out=out))
        with moepool.Pool(layer, 0) as law:
            right = moepool.ExpertFFN(law)(x, ids, router)
        for pause in (0, 0.001, 0.003, 0.01, 0.1, 1.0):
            time.sleep(pause)
            out.fill(cupy.nan)
            graph.launch(stream)
            assert_same(get(out), right, f"after {pause} s")


# ------------------------------------------------------------------------------------------------------- soak


@pytest.mark.alone
@pytest.mark.skipif("MOEPOOL_SOAK" not in os.environ, reason="takes minutes: set MOEPOOL_SOAK=100000")
@pytest.mark.timeout(3600)
def test_soak(cupy: Any) -> None:
    """So many layer calls from four threads, each with its own pools: no wrong byte, no deadlock, no leak."""
    threads, each, k = 4, 250, 3
    calls = int(os.environ["MOEPOOL_SOAK"]) // threads
    made = [layer_of_types("q4_k", "q4_k"), layer_of_types("q8_0", "f32")]
    hidden = [SIZES[256][0], SIZES[32][0]]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            cupy.cuda.Device(0).use()
            draw = cases.Stream("soak", number)
            layer, columns = made[number % 2], hidden[number % 2]
            down_rows = layer.matrices["down"].rows
            x = cases.activations("plain", 16, columns, "soak", number)
            with cupy.cuda.Stream(non_blocking=True) as stream, few_slots():
                for number_of_round in range(calls // each):
                    miss: Any = ("host", "auto", "auto", "stream")[int(draw.below(4, 1)[0])]
                    slots = int(draw.below(EXPERTS + 1, 1)[0])
                    tokens = 1 + int(draw.below(3, 1)[0]) * int(draw.below(6, 1)[0])
                    ids = (draw.below(EXPERTS + 1, (each, tokens, k)) - 1).astype(np.int32)
                    router = (draw.below(1000, ids.shape) * 0.001).astype(np.float32)
                    rows = np.ascontiguousarray(np.broadcast_to(x[:tokens], (each, tokens, columns)))
                    with moepool.Pool(layer, slots, device=DEVICE, miss=miss) as pool:
                        ffn = moepool.ExpertFFN(pool)
                        wanted, weights, given = (cupy.asarray(a) for a in (ids, router, rows[0]))
                        y = cupy.empty((each, tokens, down_rows), cupy.float32)
                        if number_of_round % 2:
                            now = [cupy.zeros_like(a[0]) for a in (wanted, weights, y)]
                            graph = recorded(stream, partial(ffn, given, now[0], now[1], out=now[2]))
                            for call in range(each):
                                now[0][...], now[1][...] = wanted[call], weights[call]
                                graph.launch(stream)
                                y[call] = now[2]
                        else:
                            for call in range(each):
                                ffn(given, wanted[call], weights[call], out=y[call])
                        results = get(y)
                    with moepool.Pool(layer, 0) as law:
                        right = moepool.ExpertFFN(law)(
                            rows.reshape(-1, columns), ids.reshape(-1, k), router.reshape(-1, k)
                        )
                    what = f"thread {number}, round {number_of_round}, {slots} slots, {miss}, {tokens} tokens"
                    assert_same(results.reshape(right.shape), right, what)
        except BaseException as error:
            failed.append(error)

    crew = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    before = cupy.cuda.runtime.memGetInfo()[0]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if failed:
        raise failed[0]
    cupy.get_default_memory_pool().free_all_blocks()
    assert before - cupy.cuda.runtime.memGetInfo()[0] < 256 << 20, "device memory was left behind"
