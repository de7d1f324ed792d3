"""Pools on a CUDA device: memory, streams, graphs, threads. Every result is the CPU's in every bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepool
from moepool.pool import Miss
from tests import cases
from tests.programs import run
from tests.support import (
    F32,
    assert_same,
    few_slots,
    get,
    layer_of,
    matrix_layer,
    pick,
    products,
    reference,
    reference_ffn,
)

pytestmark = pytest.mark.cuda

DEVICE = "cuda:0"
ROOT = Path(__file__).parents[1]
SMALL = cases.FFNS[0]
MISSES: tuple[Miss, ...] = ("stream", "host")
MIB = 1 << 20


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


def wide_layer(experts: int = 8, rows: int = 64, columns: int = 256) -> moepool.Layer:
    """Of one q8_0 matrix, whose experts give different bytes in every output."""
    weight = cases.tame_blocks("q8_0", experts * rows, columns, "cuda pool").reshape(experts, rows, -1)
    return matrix_layer("q8_0", weight)


def large_layer(experts: int, mib: int) -> moepool.Layer:
    """Experts of a given size, of which each gives its own number, and quickly made."""
    columns = 4096
    rows = mib * MIB // (4 * columns)
    weight = np.zeros((experts, rows, columns), np.float32)
    weight[:, :, 0] = np.arange(1, experts + 1)[:, None]
    return matrix_layer("f32", weight.view(np.uint8))


# ----------------------------------------------------------------------------------------------------- memory


def free_memory(cupy: Any) -> int:
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.cuda.Device(0).synchronize()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def resident_memory() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.alone
def test_h28_pools_made_and_dropped_give_their_memory_back(cupy: Any) -> None:
    """Store and pool, 64 MiB each; every fifth time the making of the pool fails in the middle."""
    x = cupy.ones((1, 4096), cupy.float32)
    after: list[tuple[int, int]] = []
    for round_ in range(50):
        layer = large_layer(8, 8)
        if round_ % 5 == 4:
            with pytest.raises(moepool.ArgumentError, match="given twice"):
                moepool.Pool(layer, 8, device=DEVICE, policy="static", hot=[0, 1, 1])
        else:
            pool = moepool.Pool(layer, 8, device=DEVICE)
            assert pool.stats().slot_bytes >= 64 * MIB and layer.pinned_bytes == layer.bytes
            y = get(moepool.matmul_id(x, [[3, 7]], pool))
            assert (y == np.array([4, 8])[:, None]).all()
            if round_ % 2:
                pool.close()
                pool.close()
            del pool
        del layer
        after.append((free_memory(cupy), resident_memory()))
    assert min(free for free, _ in after[2:]) >= after[1][0] - 8 * MIB, "memory of the device"
    assert max(used for _, used in after[2:]) <= after[1][1] + 24 * MIB, "memory of the host"


@pytest.mark.alone
def test_a_route_keeps_the_slots_until_it_ends(cupy: Any) -> None:
    layer = large_layer(4, 16)
    x = cupy.ones((1, 4096), cupy.float32)
    pool = moepool.Pool(layer, 4, device=DEVICE)
    moepool.matmul_id(x, [[0]], pool)
    before = free_memory(cupy)
    route = pool.resolve([[2]])
    matrix = pool.weight
    pool.close()
    assert free_memory(cupy) < before + 32 * MIB
    assert (get(moepool.matmul_id(x, route, matrix)) == 3).all()
    route.release()
    del matrix, pool, route
    assert free_memory(cupy) >= before + 60 * MIB


def test_the_budget_limits_the_slots_and_says_so(cupy: Any, layer: moepool.Layer) -> None:
    record = layer.record_bytes
    ids, x = SMALL.ids(3), SMALL.x(3)
    for budget, slots in ((3 * record, 3), (4 * record - 1, 3), (1, 0)):
        with pytest.warns(
            moepool.MoePoolWarning, match=f"and {slots} were made: budget_bytes is {budget}"
        ) as told:
            pool = moepool.Pool(layer, 8, device=DEVICE, budget_bytes=budget)
        assert len(told) == 1
        with pool, few_slots():
            stats = pool.stats()
            assert pool.slots == stats.slots == slots and stats.slot_bytes == slots * record <= budget
            y = get(moepool.matmul_id(cupy.asarray(x), ids, pool.gate))
        assert_same(y, reference(layer, x, ids, "gate"), f"{slots} slots")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moepool.Pool(layer, 8, device=DEVICE, budget_bytes=8 * record).close()


@pytest.mark.alone
def test_all_pools_together_take_half_of_what_nobody_else_uses(cupy: Any) -> None:
    """Another user has taken nearly all of the device: the first pool gets fewer slots, the second none."""
    layer = large_layer(8, 64)
    x = cupy.ones((1, 4096), cupy.float32)
    with moepool.Pool(layer, 1, device=DEVICE) as pool:  # so that scratch memory and kernels are there
        moepool.matmul_id(x, [[0]], pool)
    hog = [cupy.cuda.Memory(free_memory(cupy) - 768 * MIB)]
    try:
        free = free_memory(cupy)
        with pytest.warns(moepool.MoePoolWarning, match="8 slots of .* bytes are left") as told:
            first = moepool.Pool(layer, 8, device=DEVICE)
        assert len(told) == 1
        assert 0 < first.slots < 8 and first.slots == first.stats().slots
        assert first.stats().slot_bytes <= free // 2
        with pytest.warns(moepool.MoePoolWarning, match="were made"):
            second = moepool.Pool(layer, 8, device=DEVICE)
        assert first.stats().slot_bytes + second.stats().slot_bytes <= free // 2
        for pool in (first, second):
            ids = [[i] for i in range(8)]
            y = get(moepool.matmul_id(cupy.ones((8, 4096), cupy.float32), ids, pool))
            assert (y[:, 0] == np.arange(1, 9)[:, None]).all()
            pool.close()
    finally:
        hog.clear()


# ----------------------------------------------------------------------------------------- page-locked memory


def check_pinning() -> None:
    """None, some pieces or all of them page-locked: the same bytes, and one warning for a store."""
    import cupy

    x = cupy.ones((4, 4096), cupy.float32)
    ids = np.array([[0, 5], [7, 2], [-1, 3], [6, 6]], np.int32)
    right = np.where(ids < 0, 0, ids + 1)[:, :, None]
    for share in (0, 1, 3, 8):  # of eight experts, which lie in pieces of two
        layer = large_layer(8, 32)
        moepool.set_pinned_limit(share * layer.bytes // 8)
        for i, miss in enumerate(MISSES):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                pool = moepool.Pool(layer, 4, device=DEVICE, miss=miss)
            pinned = pool.stats().pinned_bytes
            assert pinned == layer.pinned_bytes == share // 2 * layer.bytes // 4, (share, pinned)
            expected = [f"{pinned} of {layer.bytes} bytes"] if share < 8 and i == 0 else []
            assert [str(warning.message).partition(" of experts")[0] for warning in told] == expected
            with pool, few_slots():
                for _ in range(2):
                    assert (get(moepool.matmul_id(x, ids, pool)) == right).all(), (share, miss)
                    assert (get(moepool.matmul_id(x[:1], ids[:1], pool)) == right[:1]).all(), (share, miss)
        del pool, layer


def test_h17_experts_need_not_be_page_locked() -> None:
    """In a process of its own, since the limit is over all stores."""
    run(sys.executable, "-c", "from tests.test_cuda_pool import check_pinning; check_pinning()", cwd=ROOT)


def test_h20_weights_outlive_their_copies(cupy: Any, spin: Callable[..., None]) -> None:
    """Store, pool and route are dropped while the copies are under way, and others take their memory."""
    for _ in range(5):
        layer = large_layer(4, 64)
        pool = moepool.Pool(layer, 4, device=DEVICE)
        x = cupy.ones((1, 4096), cupy.float32)
        cupy.cuda.Device(0).synchronize()
        spin(20_000_000)
        y = moepool.matmul_id(x, [[0, 1, 2, 3]], pool)
        pool.close()
        del pool, layer, x
        gc.collect()
        others = [large_layer(4, 64) for _ in range(2)]
        assert (get(y)[0] == np.arange(1, 5)[:, None]).all()
        del others


# -------------------------------------------------------------------------------------------- slots and tails


@pytest.mark.parametrize(("qtype", "columns"), [("q4_0", 384), ("q4_k", 2816), ("q8_0", 96), ("f16", 259)])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_h06_nothing_of_what_a_slot_held_before_is_left(
    qtype: str, columns: int, slots: int, cupy: Any
) -> None:
    """50 rows, no multiple of a panel; the last row of every expert in every slot."""
    experts, rows = 5, 50
    wild = cases.raw_blocks(qtype, experts * rows, columns, "h06").reshape(experts, rows, -1)
    layer = matrix_layer(qtype, wild, bias=cases.Stream("h06").bell((experts, rows)).astype(np.float32))
    x = cases.activations("plain", 2, columns, "h06")
    table = products(layer, x)
    device = cupy.asarray(x)
    with moepool.Pool(layer, slots, device=DEVICE) as pool:
        served = set()
        for round_ in range(3 * slots):
            for expert in range(experts):
                ids = np.full((2, 1), (expert + round_) % experts, np.int32)
                with pool.resolve(ids) as route:
                    served.add((int(route.hot[0, 0]), int(ids[0, 0])))
                    y = get(moepool.matmul_id(device, route, pool))
                assert_same(y, pick(table, ids), f"expert {ids[0, 0]}, round {round_}")
        assert len({slot for slot, _ in served}) == slots


@pytest.mark.parametrize("miss", ["stream", "host"])
@pytest.mark.parametrize("phase", ["decode", "prompt"])
def test_h18_each_expert_crosses_at_most_once_a_call(phase: Any, miss: Miss, cupy: Any) -> None:
    layer = wide_layer(32)
    x = cases.activations("plain", 64, 256, "h18")
    ids = cases.expert_ids("plain", 64, 2, 32, "h18")
    assert len(set(ids.flat)) == 32
    with moepool.Pool(layer, 4, device=DEVICE, miss=miss) as pool, pool.resolve(ids, phase=phase) as route:
        y = get(moepool.matmul_id(cupy.asarray(x), route, pool))
        stats = pool.stats()
    assert_same(y, reference(layer, x, ids), phase)
    crossed = stats.copied_bytes + stats.in_place_bytes + stats.host_bytes
    assert crossed == 32 * layer.record_bytes
    assert (stats.host_bytes > 0) == (miss == "host")


@pytest.mark.parametrize("tokens", [8191, 8192])
def test_h05_as_many_tokens_as_anybody_likes(tokens: int, cupy: Any) -> None:
    weight = cases.tame_blocks("q4_0", 4 * 32, 32, "h05").reshape(4, 32, -1)
    layer = matrix_layer("q4_0", weight)
    x = cases.activations("plain", tokens, 32, "h05")
    ids = cases.Stream("h05").below(4, (tokens, 8)).astype(np.int32)
    with moepool.Pool(layer, 4, device=DEVICE) as pool, few_slots():
        y = get(moepool.matmul_id(cupy.asarray(x), cupy.asarray(ids), pool))
    assert_same(y, reference(layer, x, ids), f"{tokens} tokens")


# ---------------------------------------------------------------------------------------------------- streams


def test_h19_a_slot_is_not_overwritten_under_its_reader(cupy: Any, spin: Callable[..., None]) -> None:
    """Two streams in turn, each held up by another kernel, two experts in one slot."""
    layer = wide_layer(2)
    x = cases.activations("plain", 1, 256, "h19")
    table = products(layer, x)
    device = cupy.asarray(x)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device(0).synchronize()
    results = []
    with moepool.Pool(layer, 1, device=DEVICE) as pool:
        for round_ in range(200):
            with streams[round_ % 2]:
                spin(200_000 * (1 + round_ % 3))
                results.append(moepool.matmul_id(device, [[round_ // 2 % 2]], pool))
        assert pool.stats().evictions >= 99
    cupy.cuda.Device(0).synchronize()
    for round_, y in enumerate(results):
        assert_same(get(y), pick(table, np.array([[round_ // 2 % 2]], np.int32)), f"round {round_}")


@pytest.mark.parametrize("ids_on_device", [False, True])
def test_ten_thousand_calls_on_two_streams_while_everything_is_evicted(
    ids_on_device: bool, cupy: Any
) -> None:
    layer = wide_layer(8)
    x = cases.activations("plain", 3, 256, "streams")
    device, table = cupy.asarray(x), cupy.asarray(products(layer, x))
    calls = 10_000
    drawn = cases.Stream("streams").below(9, (calls, 3, 2)).astype(np.int32) - 1
    drawn_on_device = cupy.asarray(drawn)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    wrong = [cupy.zeros((), cupy.int64) for _ in streams]
    cupy.cuda.Device(0).synchronize()
    tokens = cupy.arange(3)[:, None]
    with moepool.Pool(layer, 4, device=DEVICE) as pool, few_slots():
        for call in range(calls):
            with streams[call % 2]:
                ids = drawn_on_device[call]
                y = moepool.matmul_id(device, ids if ids_on_device else drawn[call], pool)
                right = cupy.where((ids < 0)[:, :, None], cupy.float32(0), table[tokens, ids])
                wrong[call % 2] += (y.view(cupy.uint32) != right.view(cupy.uint32)).sum()
        assert pool.stats().evictions > 1000
    cupy.cuda.Device(0).synchronize()
    assert [int(count) for count in wrong] == [0, 0]


def test_whole_layers_on_two_streams_while_everything_is_evicted(cupy: Any, layer: moepool.Layer) -> None:
    """By the device and by the host in turn, as a router would: the residency goes back and forth."""
    x, weights = SMALL.x(8), SMALL.router(8)
    kinds = ("plain", "some", "repeats") * 100
    ids = [cases.expert_ids(kind, 1 + i % 8, 2, 8, "two streams", i) for i, kind in enumerate(kinds)]
    right = [reference_ffn(layer, x[: len(i)], i, weights[: len(i)]) for i in ids]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    xs, ws, device_ids = cupy.asarray(x), cupy.asarray(weights), [cupy.asarray(i) for i in ids]
    cupy.cuda.Device(0).synchronize()
    with moepool.Pool(layer, 3, device=DEVICE) as pool, moepool.Pool(layer, 3) as host, few_slots():
        ffn, law = moepool.ExpertFFN(pool), moepool.ExpertFFN(host)
        results = []
        for step, (i, on_device) in enumerate(zip(ids, device_ids, strict=True)):
            with streams[step % 2]:
                given = i if step % 7 == 3 else on_device
                results.append(ffn(xs[: len(i)], given, ws[: len(i)]))
            law(x[: len(i)], i, weights[: len(i)])
            if step % 50 == 49:
                assert (pool.residents()[1] == host.residents()[1]).all(), f"step {step}"
        same = ("steps", "bypasses", "hits", "misses", "evictions", "copied_bytes", "in_place_bytes")
        assert [getattr(pool.stats(), n) for n in same] == [getattr(host.stats(), n) for n in same]
        cupy.cuda.Device(0).synchronize()
    for step, (y, expected) in enumerate(zip(results, right, strict=True)):
        assert_same(get(y), expected, f"step {step}")


def test_many_pools_on_many_threads(cupy: Any, layer: moepool.Layer) -> None:
    """Each thread with a stream and a pool of its own, and one pool for all."""
    x, weights = SMALL.x(4), SMALL.router(4)
    jobs = [cases.expert_ids("some", 4, 2, 8, "threads", i) for i in range(32)]
    right = [reference_ffn(layer, x, ids, weights) for ids in jobs]
    shared = moepool.Pool(layer, 3, device=DEVICE)

    def work(job: int) -> list[F32]:
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            xs, ws, ids = cupy.asarray(x), cupy.asarray(weights), cupy.asarray(jobs[job])
            with moepool.Pool(layer, 2, device=DEVICE) as own:
                results = []
                for _ in range(10):
                    for pool in (own, shared):
                        ffn = moepool.ExpertFFN(pool)
                        results += [
                            get(ffn(xs, jobs[job], ws)),
                            get(ffn(xs, ids, ws)),
                            get(ffn.composed(xs, ids, ws)),
                        ]
                return results

    with ThreadPoolExecutor(8) as threads:
        for job, results in enumerate(threads.map(work, range(32))):
            for y in results:
                assert_same(y, right[job], f"job {job}")
    assert shared.stats().leased == 0
    shared.close()


# ----------------------------------------------------------------------------------------------------- graphs


MODES = ["streamCaptureModeGlobal", "streamCaptureModeThreadLocal", "streamCaptureModeRelaxed"]


@pytest.mark.parametrize("mode", MODES)
def test_h21_ops_of_a_resolved_route_are_captured_and_replayed(
    mode: str, cupy: Any, layer: moepool.Layer
) -> None:
    ids, weights = SMALL.ids(3, "some"), SMALL.router(3)
    stream = cupy.cuda.Stream(non_blocking=True)
    with moepool.Pool(layer, 8, device=DEVICE) as pool, pool.resolve(ids) as route:
        ffn = moepool.ExpertFFN(pool)
        x, w = cupy.asarray(SMALL.x(3)), cupy.asarray(weights)
        gate, y = cupy.empty((3, 2, 512), cupy.float32), cupy.empty((3, 256), cupy.float32)

        def run() -> None:
            moepool.matmul_id(x, route, pool.gate, out=gate)
            ffn(x, route, w, out=y)

        run()
        cupy.cuda.Device(0).synchronize()
        with stream:
            stream.begin_capture(getattr(cupy.cuda.runtime, mode))
            run()
            graph = stream.end_capture()
            for round_ in range(3):
                new = cases.activations("plain", 3, 256, "replay", round_)
                x.set(new)
                gate.fill(cupy.nan)
                y.fill(cupy.nan)
                graph.launch(stream)
                stream.synchronize()
                assert_same(get(gate), reference(layer, new, ids, "gate"), f"gate, replay {round_}")
                assert_same(get(y), reference_ffn(layer, new, ids, weights), f"layer, replay {round_}")


@pytest.mark.parametrize("mode", MODES)
def test_h21_what_needs_the_host_is_refused_and_the_capture_goes_on(
    mode: str, cupy: Any, layer: moepool.Layer
) -> None:
    ids, cold = SMALL.ids(3, "some"), np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    new = cases.activations("plain", 3, 256, "refused")
    stream = cupy.cuda.Stream(non_blocking=True)
    x, w = cupy.asarray(new), cupy.asarray(SMALL.router(3))
    out, y = cupy.empty((3, 2, 512), cupy.float32), cupy.empty((3, 256), cupy.float32)
    few, pool = moepool.Pool(layer, 2, device=DEVICE), moepool.Pool(layer, 8, device=DEVICE)
    with few, pool, few_slots(), pool.resolve(ids) as route, few.resolve(cold) as missing:
        ffn = moepool.ExpertFFN(pool)
        moepool.matmul_id(x, route, pool.gate, out=out)
        moepool.matmul_id(x, missing, few.gate, out=out)
        steps = pool.stats().steps
        cupy.cuda.Device(0).synchronize()
        with stream:
            stream.begin_capture(getattr(cupy.cuda.runtime, mode))
            for refused in (
                lambda: pool.resolve(ids),
                lambda: moepool.matmul_id(x, ids, pool.gate, out=out),
                lambda: ffn(x, ids, w, out=y),
                lambda: ffn.composed(x, ids, w, out=y),
                lambda: moepool.matmul_id(x, missing, few.gate, out=out),
                lambda: moepool.ExpertFFN(few)(x, missing, w, out=y),
            ):
                with pytest.raises(moepool.StateError, match="captured"):
                    refused()
            moepool.matmul_id(x, route, pool.gate, out=out)
            graph = stream.end_capture()
            out.fill(cupy.nan)
            graph.launch(stream)
            stream.synchronize()
            assert_same(get(out), reference(layer, new, ids, "gate"), "the rest of the capture")
            assert pool.stats().steps == steps
            y = moepool.matmul_id(x, ids, pool.gate)
            assert_same(get(y), reference(layer, new, ids, "gate"), "the stream afterwards")


def test_h21_pytorch_captures_what_it_allocates_itself(layer: moepool.Layer) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    ids, weights = SMALL.ids(3, "some"), SMALL.router(3)
    with moepool.Pool(layer, 8, device=DEVICE) as pool, pool.resolve(ids) as route:
        ffn = moepool.ExpertFFN(pool)
        x, w = torch.from_numpy(SMALL.x(3)).to(DEVICE), torch.from_numpy(weights).to(DEVICE)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ffn(x, route, w)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ffn(x, route, w)
        for round_ in range(3):
            new = cases.activations("plain", 3, 256, "torch", round_)
            x.copy_(torch.from_numpy(new))
            graph.replay()
            assert_same(y.cpu().numpy(), reference_ffn(layer, new, ids, weights), f"replay {round_}")


def test_h21_steps_that_the_device_takes_are_captured_with_their_misses(
    cupy: Any, layer: moepool.Layer
) -> None:
    """New ids before each replay: the device resolves them, evicts and fills."""
    weights = SMALL.router(2)
    stream = cupy.cuda.Stream(non_blocking=True)
    with moepool.Pool(layer, 4, device=DEVICE) as pool, moepool.Pool(layer, 4) as host:
        ffn, law = moepool.ExpertFFN(pool), moepool.ExpertFFN(host)
        x, w = cupy.zeros((2, 256), cupy.float32), cupy.asarray(weights)
        ids, y = cupy.full((2, 2), -1, cupy.int64), cupy.empty((2, 256), cupy.float32)
        ffn(x, ids, w, out=y)
        cupy.cuda.Device(0).synchronize()
        with stream:
            stream.begin_capture()
            ffn(x, ids, w, out=y)
            graph = stream.end_capture()
            for round_ in range(100):
                new = cases.activations("plain", 2, 256, "device steps", round_)
                drawn = cases.expert_ids("some", 2, 2, 8, "device steps", round_)
                x.set(new)
                ids.set(drawn.astype(np.int64))
                graph.launch(stream)
                stream.synchronize()
                assert_same(get(y), reference_ffn(layer, new, drawn, weights), f"replay {round_}")
                law(new, drawn, weights)
                assert (pool.residents()[1] == host.residents()[1]).all(), f"replay {round_}"
            assert pool.stats().misses == host.stats().misses > 50


# ---------------------------------------------------------------------------------------------------- the end

AT_EXIT = """
import cupy, moepool, numpy as np
weight = np.ones((4, 32, 64), np.float32)
store = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")
pool = moepool.Pool(store[0], 2, device="cuda:0")
route = pool.resolve([[0, 1]])
cycle = [pool, route]
cycle.append(cycle)
y = moepool.matmul_id(cupy.ones((1, 64), cupy.float32), route, pool)
print("done", flush=True)
"""


def test_a_pool_may_be_alive_at_the_end_of_the_process() -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


WITHOUT_DEVICE = """
import moepool, numpy as np
layer = moepool.ExpertStore.from_arrays(weight=np.ones((2, 32, 64), np.float32), qtype="q8_0")[0]
try:
    moepool.Pool(layer, 1, device="cuda:0")
except (moepool.UnsupportedError, moepool.ArgumentError) as error:
    print(error)
print(moepool.matmul_id(np.ones((1, 64), np.float32), [[1]], moepool.Pool(layer, 1)).shape)
"""


def test_without_a_visible_device_the_cpu_goes_on() -> None:
    printed = run(sys.executable, "-c", WITHOUT_DEVICE, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA" in printed.splitlines()[0] and printed.endswith("(1, 1, 32)\n")
