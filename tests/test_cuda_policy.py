"""Steps that the device takes, with every policy, under leases, traced, and while slots come and go:
in calls and in CUDA graphs, what the CPU does, to the last eviction and the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moepool
from moepool.policy import PolicyName
from tests import cases
from tests.decode_steps import DEVICE, EXPERTS, SMALL, assert_in_step, counts, recorded
from tests.support import assert_same, few_slots, ffn_layer, get, layer_of, reference_ffn
from tests.test_policy import draw_policy

pytestmark = pytest.mark.cuda

NAMES: tuple[PolicyName, ...] = ("lru", "static", "lfu", "lfru", "slru", "reelect", "pinned")


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


class Arrays:
    """The arrays of a call with a fixed shape, on the device, filled anew for each step."""

    def __init__(self, cupy: Any, tokens: int, k: int = 2) -> None:
        self.x, self.weights = SMALL.x(tokens), cases.router_weights(tokens, k, "policy")
        self.device = [cupy.asarray(a) for a in (self.x, np.zeros((tokens, k), np.int32), self.weights)]
        self.y = cupy.empty((tokens, SMALL.hidden), cupy.float32)

    def put(self, ids: Any) -> None:
        self.device[1].set(ids)


def draw_ids(draw: cases.Stream, tokens: int, k: int, shift: int) -> Any:
    low = draw.below(EXPERTS, (2, tokens, k)).min(axis=0)
    return np.where(draw.below(9, (tokens, k)) == 0, -1, (low + shift) % EXPERTS).astype(np.int32)


def same_state(pool: moepool.Pool, law: moepool.Pool, what: object) -> None:
    """Residents, counts, and what the policy knows of every expert."""
    assert_in_step(pool, law, what)
    assert pool._handle.save() == law._handle.save(), what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_takes_the_cpus_steps(
    name: PolicyName, seed: int, cupy: Any, layer: moepool.Layer
) -> None:
    """Calls, replays of a graph, and steps of the host between them; a route stays open now and then."""
    draw = cases.Stream("policies on the device", name, seed)
    policy = draw_policy(draw, name)
    options: dict[str, Any] = {"policy": policy, "hot": [3, 6] if name == "pinned" else None}
    options["admit"] = (None, 1, 2)[seed]
    arrays = {tokens: Arrays(cupy, tokens) for tokens in (1, 3, 16)}
    stream = cupy.cuda.Stream(non_blocking=True)
    with (
        stream,
        few_slots(),
        moepool.Pool(layer, 4, device=DEVICE, **options) as pool,
        moepool.Pool(layer, 4, **options) as law,
    ):
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        graphs = {t: recorded(stream, lambda a=a: ffn(*a.device, out=a.y)) for t, a in arrays.items()}
        routes: list[moepool.Route] = []
        for step in range(400):
            what = f"{policy}, {options}, step {step}"
            kind, which, hold = (int(draw.below(b, 1)[0]) for b in (8, 4, 12))
            tokens = (1, 1, 3, 16)[which]
            ids, a = draw_ids(draw, tokens, 2, step // 60 * 3), arrays[tokens]
            if hold == 0:
                for route in routes:
                    route.release()
                wanted = draw_ids(draw, 1, 2, 0)
                routes = [pool.resolve(wanted, phase="decode"), law.resolve(wanted, phase="decode")]
            if hold == 1:
                while routes:
                    routes.pop().release()
            a.put(ids)
            if kind < 4:
                graphs[tokens].launch(stream)
            elif kind < 7:
                ffn(*a.device, out=a.y)
            else:
                ffn(a.device[0], ids, a.device[2], out=a.y)
            assert_same(get(a.y), on_cpu(a.x, ids, a.weights), what)
            if step % 7 == 0:
                same_state(pool, law, what)
        same_state(pool, law, "the end")
        while routes:
            routes.pop().release()


def test_a_replay_evicts_no_slot_under_a_lease(cupy: Any, layer: moepool.Layer) -> None:
    a = Arrays(cupy, 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, few_slots(), moepool.Pool(layer, 2, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        ffn(*a.device, out=a.y)
        with pool.resolve([[5]], phase="decode") as route:
            slot = int(route.hot[0, 0])
            graph = recorded(stream, lambda: ffn(*a.device, out=a.y))  # recorded while it is open, too
            for step in range(30):
                ids = np.array([[step % 4, -1]], np.int32)
                a.put(ids)
                graph.launch(stream)
                assert_same(get(a.y), reference_ffn(layer, a.x, ids, a.weights), f"step {step}")
                assert pool.residents()[1][slot] == 5, f"step {step}"
            given = cupy.asarray(SMALL.x(1))
            assert_same(
                get(ffn(given, route, cupy.asarray(a.weights[:, :1]))),
                reference_ffn(layer, SMALL.x(1), np.array([[5]], np.int32), a.weights[:, :1]),
                "the route",
            )
        a.put(np.array([[0, 1]], np.int32))
        graph.launch(stream)
        assert sorted(pool.residents()[1].tolist()) == [0, 1]


def test_a_replay_behind_a_resolve_knows_of_its_lease(cupy: Any, layer: moepool.Layer) -> None:
    """Launched at once, with ids that have long been there."""
    a = Arrays(cupy, 1)
    ids = np.array([[0, 1]], np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, few_slots(), moepool.Pool(layer, 2, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        ffn(*a.device, out=a.y)
        graph = recorded(stream, lambda: ffn(*a.device, out=a.y))
        a.put(ids)
        stream.synchronize()
        right = reference_ffn(layer, a.x, ids, a.weights)
        for step in range(300):
            with pool.resolve([[5]], phase="decode") as route:
                graph.launch(stream)
                slot = int(route.hot[0, 0])
                assert pool.residents()[1][slot] == 5, f"step {step}"
                assert_same(get(a.y), right, f"step {step}")
            graph.launch(stream)
            stream.synchronize()
            assert sorted(pool.residents()[1].tolist()) == [0, 1]


def test_scales_and_biases_change_with_their_slot(cupy: Any) -> None:
    """One slot, in turn of two experts, in replays that follow one another at once."""
    draw = cases.Stream("slots with scales and biases")
    rows = {"gate": SMALL.width, "up": SMALL.width, "down": SMALL.hidden}
    scale = {name: 1 + draw.below(1000, EXPERTS).astype(np.float32) / 500 for name in rows}
    bias = {name: draw.below(1000, (EXPERTS, n)).astype(np.float32) / 1000 - 0.5 for name, n in rows.items()}
    layer = ffn_layer(
        SMALL.weights(),
        {"gate": SMALL.gate, "up": SMALL.up, "down": SMALL.down},
        scale=scale,
        bias=bias,
    )
    a = Arrays(cupy, 1, 1)
    right = [
        reference_ffn(layer, a.x, np.array([[expert]], np.int32), a.weights) for expert in range(EXPERTS)
    ]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, few_slots(), moepool.Pool(layer, 1, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        graph = recorded(stream, lambda: ffn(*a.device, out=a.y))
        count = 400
        ids = cupy.asarray(np.array([step // 2 % 2 for step in range(count)], np.int32))  # a miss, then a hit
        results = cupy.empty((count, *a.y.shape), cupy.float32)
        for step in range(count):
            a.device[1][:] = ids[step]
            graph.launch(stream)
            results[step] = a.y
        got = get(results)
        for step in range(count):
            assert_same(got[step], right[step // 2 % 2], f"step {step}")
        assert counts(pool).hits == count // 2


def test_stats_leave_a_capture_on_a_blocking_stream_whole(cupy: Any, layer: moepool.Layer) -> None:
    """Of a pool whose steps a graph holds: they would have to wait for the device."""
    a = Arrays(cupy, 1)
    stream = cupy.cuda.Stream(non_blocking=False)
    with stream, few_slots(), moepool.Pool(layer, 2, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        ffn(*a.device, out=a.y)
        recorded(stream, lambda: ffn(*a.device, out=a.y)).launch(stream)
        told = []

        def step() -> None:
            for call in (pool.stats, pool.residents):
                with pytest.raises(moepool.StateError, match="captured in a graph"):
                    call()
                told.append(call)
            ffn(*a.device, out=a.y)

        graph = recorded(stream, step)
        graph.launch(stream)
        assert len(told) == 2 and pool.stats().steps == 3


# ------------------------------------------------------------------------------------------------------ trace


def test_a_ring_that_there_is_no_memory_for_is_refused_at_once(cupy: Any, layer: moepool.Layer) -> None:
    a = Arrays(cupy, 1)
    with few_slots(), moepool.Pool(layer, 2, device=DEVICE) as pool:
        with pytest.raises(moepool.OutOfMemoryError):
            pool.trace(room_bytes=1 << 42)
        moepool.ExpertFFN(pool)(*a.device, out=a.y)
        assert pool.stats().steps == 1


@pytest.mark.parametrize("name", ["lru", "lfu", "slru"])
def test_the_trace_of_replays_is_the_cpus(name: PolicyName, cupy: Any, layer: moepool.Layer) -> None:
    """From a graph that was recorded before the trace began, with calls and steps of the host between."""
    draw = cases.Stream("traces on the device", name)
    arrays = {tokens: Arrays(cupy, tokens) for tokens in (1, 5)}
    stream = cupy.cuda.Stream(non_blocking=True)
    with (
        stream,
        few_slots(),
        moepool.Pool(layer, 4, device=DEVICE, policy=name) as pool,
        moepool.Pool(layer, 4, policy=name) as law,
    ):
        ffn = moepool.ExpertFFN(pool)
        graphs = {t: recorded(stream, lambda a=a: ffn(*a.device, out=a.y)) for t, a in arrays.items()}
        with pool.trace(room_bytes=1 << 14) as ours, law.trace() as theirs:
            for step in range(600):
                kind, which = (int(draw.below(b, 1)[0]) for b in (12, 2))
                tokens = (1, 5)[which]
                ids, a = draw_ids(draw, tokens, 2, step // 60), arrays[tokens]
                a.put(ids)
                if kind == 0:
                    pool.resolve(ids, phase="prompt").release()
                elif kind == 1:
                    pool.resolve(ids, phase="decode").release()
                elif kind == 2:
                    assert pool.prefetch([step % EXPERTS]) == law.prefetch([step % EXPERTS])
                elif kind < 6:
                    ffn(*a.device, out=a.y)
                else:
                    graphs[tokens].launch(stream)
                if kind != 2:
                    law.resolve(ids, phase="prompt" if kind == 0 else "decode").release()
                if step % 50 == 49:
                    stream.synchronize()
                    got, expected = ours.drain(), theirs.drain()
                    for field in ("step", "token", "decode", "ids", "admissions", "prefetched"):
                        left, right = getattr(got, field), getattr(expected, field)
                        assert left.tolist() == right.tolist(), (field, step)
            stream.synchronize()
        graphs[1].launch(stream)
        stream.synchronize()
        assert len(ours.drain()) == len(theirs.drain()) == 0


def test_a_trace_that_runs_over_says_so(cupy: Any, layer: moepool.Layer) -> None:
    a = Arrays(cupy, 16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, moepool.Pool(layer, 4, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        graph = recorded(stream, lambda: ffn(*a.device, out=a.y))
        with pool.trace(room_bytes=1 << 14) as trace:  # 4096 words; a step takes 40
            for _ in range(110):
                graph.launch(stream)
            with pytest.raises(
                moepool.StateError, match="8 steps are missing from the trace: its ring of 16384"
            ):
                trace.drain()
            assert len(trace.drain()) == 102 * 16
            graph.launch(stream)
            assert len(trace.drain()) == 16
        assert counts(pool).steps == 111


# ----------------------------------------------------------------------------------------------------- resize


@pytest.mark.parametrize("tokens", [1, 4])
def test_slots_change_under_a_graph(tokens: int, cupy: Any, layer: moepool.Layer) -> None:
    """20,000 resizes between replays of one graph: the CPU's residents, and no wrong byte."""
    draw = cases.Stream("resizes on the device", tokens)
    count, k = 20_000 // 2, 2
    a = Arrays(cupy, tokens, k)
    stream = cupy.cuda.Stream(non_blocking=True)
    with (
        stream,
        few_slots(),
        moepool.Pool(layer, 3, device=DEVICE, max_slots=EXPERTS) as pool,
        moepool.Pool(layer, 3, max_slots=EXPERTS) as law,
    ):
        ffn = moepool.ExpertFFN(pool)
        graph = recorded(stream, lambda: ffn(*a.device, out=a.y))
        results, ids = cupy.empty((count, *a.y.shape), cupy.float32), []
        for i in range(count):
            slots = int(draw.below(EXPERTS + 1, 1)[0])
            assert pool.resize(slots) == law.resize(slots) == slots
            ids.append(draw_ids(draw, tokens, k, 0))
            a.put(ids[-1])
            graph.launch(stream)
            results[i] = a.y
            law.resolve(ids[-1], phase="decode").release()
            if i % 50 == 0:
                same_state(pool, law, f"resize {i}")
        same_state(pool, law, "the end")
        given = get(results)
        with moepool.Pool(layer, 0) as nothing:
            right = moepool.ExpertFFN(nothing)(
                np.concatenate([a.x] * count), np.concatenate(ids), np.concatenate([a.weights] * count)
            )
        assert_same(given.reshape(right.shape), right, "all results")


@pytest.mark.alone
def test_memory_is_given_back_and_taken_again(cupy: Any) -> None:
    ffn = cases.Ffn("large", 2048, 768, 64, 2, "q8_0", "q8_0", "q8_0")
    large = layer_of(ffn)
    chunk = 32 << 20
    with moepool.Pool(large, 8, device=DEVICE, max_slots=64) as pool:
        record = large.record_bytes
        for slots in (64, 3, 40, 0, 8):
            before = moepool.memory(DEVICE).free, pool.stats().slot_bytes
            assert pool.resize(slots) == slots
            taken = pool.stats().slot_bytes
            assert slots * record <= taken < slots * record + chunk
            assert abs((before[0] - moepool.memory(DEVICE).free) - (taken - before[1])) <= chunk
    with (
        moepool.Pool(large, 2, device=DEVICE, max_slots=64, budget_bytes=10 * record) as pool,
        pytest.warns(moepool.MoePoolWarning, match=r"64 slots .* and 10 were made: budget_bytes is"),
    ):
        assert pool.resize(64) == 10 == pool.slots
