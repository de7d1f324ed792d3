"""Decode steps that the device takes by itself, in calls and in CUDA graphs: bytes, residency and counts are
the CPU's, and no host has a part in a replay."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepool
from tests import cases
from tests.decode_steps import (
    CHAIN,
    DEVICE,
    EXPERTS,
    SMALL,
    Step,
    assert_in_step,
    counts,
    hidden_of,
    layer_of_types,
    recorded,
    step_of,
    steps_of,
)
from tests.programs import run
from tests.support import F32, I32, Guarded, assert_same, few_slots, get, layer_of, reference_ffn

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[1]

KERNELS = r"""
extern "C" {
// Row *step * layers + layer of tables, to the arrays of a call.
__global__ void route(const float *all_x, const int *all_ids, const float *all_weights, float *x, int *ids,
                      float *weights, int x_rows, int x_size, int places, int layer, int layers,
                      const long long *step) {
    const long long row = *step * layers + layer;
    for (int i = threadIdx.x; i < x_size; i += blockDim.x) x[i] = all_x[row % x_rows * x_size + i];
    for (int i = threadIdx.x; i < places; i += blockDim.x) {
        ids[i] = all_ids[row * places + i];
        weights[i] = all_weights[row * places + i];
    }
}

// The other way: the result of a call to a row of a table.
__global__ void keep(const float *y, float *all, int size, int layer, int layers, const long long *step) {
    const long long row = *step * layers + layer;
    for (int i = threadIdx.x; i < size; i += blockDim.x) all[row * size + i] = y[i];
}

__global__ void advance(long long *step) { ++*step; }

// Keeps its stream busy until the host opens it, or for so many cycles.
__global__ void gate(volatile int *open, long long cycles, int *opened) {
    const long long start = clock64();
    while (!*open && clock64() - start < cycles) {
    }
    *opened = *open;
}
}
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def kernel(cupy: Any) -> Callable[[str], Any]:
    module = cupy.RawModule(code=KERNELS)
    return lambda name: module.get_function(name)


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


# ------------------------------------------------------------------------------------------------- the matrix

TRIPLES = [(qtype,) * 3 for qtype in cases.TYPES]  # gate, up, down
TRIPLES += [(gate, gate, down) for gate, down in (("q4_k", "q6_k"), ("q8_0", "f32"), ("bf16", "mxfp4"))]
TRIPLES += [("iq4_nl", "iq4_nl", "q3_k")]
# Passes of their own: both quantised, floats and quantised, both floats.
TRIPLES += [
    ("q4_k", "q6_k", "q8_0"),
    ("iq4_nl", "q3_k", "f16"),
    ("mxfp4", "q5_1", "f32"),
    ("q2_k", "iq4_xs", "q5_k"),
]
TRIPLES += [
    ("q8_0", "f32", "q4_0"),
    ("bf16", "q5_0", "q6_k"),
    ("f16", "bf16", "q4_1"),
    ("f32", "f16", "bf16"),
]
SLOTS = (0, 3, EXPERTS // 2, EXPERTS)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"admit": 1}, {"policy": "static"})


@pytest.mark.parametrize(("gate", "up", "down"), TRIPLES, ids=lambda qtype: str(qtype))
def test_every_step_is_the_cpus(gate: str, up: str, down: str, cupy: Any) -> None:
    """Every other one in a graph, the first of a pool among them."""
    layer = layer_of_types(gate, down, up)
    steps = steps_of(hidden_of(gate, up))
    for number, slots in enumerate(SLOTS):
        for options in OPTIONS:
            with (
                few_slots(),
                moepool.Pool(layer, slots, device=DEVICE, **options) as pool,
                moepool.Pool(layer, slots, **options) as law,
            ):
                follow(
                    cupy, pool, law, steps, number % 2, f"{gate}, {up} and {down}, {slots} slots, {options}"
                )


@pytest.mark.parametrize(
    ("gate", "up", "down", "hidden", "width"),
    [
        ("q4_k", "q4_k", "q6_k", 1280, 1536),
        ("q8_0", "q8_0", "iq4_nl", 1184, 1056),
        ("f16", "f16", "f32", 1101, 1061),
        ("q5_0", "q4_k", "mxfp4", 1280, 1056),
    ],
)
@pytest.mark.parametrize("slots", [3, EXPERTS])
def test_rows_of_more_chunks_than_are_under_way(
    gate: str, up: str, down: str, hidden: int, width: int, slots: int, cupy: Any
) -> None:
    """Five and six chunks a row, the last ones mostly short, and up to sixteen places of an expert."""
    layer = layer_of_types(gate, down, up, hidden=hidden, width=width)
    kinds = [("plain", 1), ("plain", 3), ("repeats", 16), ("some", 2), ("plain", 16), ("plain", 1)]
    steps = [step_of(kind, tokens, hidden, number) for number, (kind, tokens) in enumerate(kinds)]
    with (
        few_slots(),
        moepool.Pool(layer, slots, device=DEVICE) as pool,
        moepool.Pool(layer, slots) as law,
    ):
        follow(cupy, pool, law, steps, slots % 2, f"{gate}, {up} and {down}, {slots} slots")


def follow(
    cupy: Any, pool: moepool.Pool, law: moepool.Pool, steps: Sequence[Step], in_graphs: int, serving: str
) -> None:
    ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for number, step in enumerate(steps):
            what = f"step {number}, ids {step.ids.tolist()}, {serving}"
            right = step.right(on_cpu)
            x, ids, weights = (cupy.asarray(array) for array in (step.x, step.ids, step.weights))
            out = Guarded(*right.shape, device=DEVICE)
            if number % 2 == in_graphs:
                graph = recorded(stream, partial(ffn, x, ids, weights, out=out.out))
                graph.launch(stream)
            else:
                assert ffn(x, ids, weights, out=out.out) is out.out
            assert_same(out.check(what), right, what)
            if step.bad:
                token, place = step.bad[0]
                told = (
                    rf"earlier step: id {step.ids[token, place]} at token {token}, place {place} is outside"
                )
                with pytest.raises(moepool.IdError, match=told):
                    pool.stats()
            assert_in_step(pool, law, what)


# ------------------------------------------------------------------------------------------------ long traces


@dataclass(frozen=True)
class Trace:
    """Steps of a layer one after the other, their arrays also on the device, and what they have to give."""

    x: F32  # (most tokens, hidden): of every step the first rows
    ids: list[I32]
    weights: list[F32]
    right: list[F32]
    device: list[tuple[Any, Any, Any]]

    def __len__(self) -> int:
        return len(self.ids)


def trace_of(cupy: Any, ffn: cases.Ffn, layer: moepool.Layer, tokens: Sequence[int], name: str) -> Trace:
    """Ids from -1 to the last expert, repeats among them."""
    draw = cases.Stream("trace", name)
    x = ffn.x(max(tokens))
    ids = [(draw.below(ffn.experts + 1, (t, ffn.k)) - 1).astype(np.int32) for t in tokens]
    weights = [(draw.below(1000, i.shape) * 0.001).astype(np.float32) for i in ids]
    with moepool.Pool(layer, 0) as pool:
        whole = moepool.ExpertFFN(pool)(
            np.concatenate([x[:t] for t in tokens]), np.concatenate(ids), np.concatenate(weights)
        )
    right = np.split(whole, np.cumsum(tokens)[:-1])
    on_device = cupy.asarray(x)
    device = [
        (on_device[:t], cupy.asarray(i), cupy.asarray(w))
        for t, i, w in zip(tokens, ids, weights, strict=True)
    ]
    cupy.cuda.Device(0).synchronize()
    return Trace(x, ids, weights, right, device)


def test_a_long_trace_with_prompts_between(cupy: Any, layer: moepool.Layer) -> None:
    """The device takes most steps, the host the prompts and some others, the law on the CPU all of them."""
    draw = cases.Stream("long trace")
    count = 2000
    prompt = draw.below(10, count) == 0
    by_host = draw.below(20, count) == 0
    tokens = np.where(
        prompt, 17 + draw.below(24, count), 1 + draw.below(16, count) * (draw.below(3, count) == 0)
    )
    trace = trace_of(cupy, SMALL, layer, tokens.tolist(), "with prompts")
    with moepool.Pool(layer, 4, device=DEVICE) as pool, moepool.Pool(layer, 4) as law:
        ffn, results = moepool.ExpertFFN(pool), []
        for step, (x, ids, weights) in enumerate(trace.device):
            phase: Any = "prompt" if prompt[step] else "auto"
            results.append(ffn(x, trace.ids[step] if by_host[step] else ids, weights, phase=phase))
            law.resolve(trace.ids[step], phase=phase).release()
            if step % 97 == 0:
                assert_in_step(pool, law, f"step {step}")
        assert_in_step(pool, law, "the end")
        stats = pool.stats()
        assert stats.evictions > 500 and stats.prompt_misses > 100 and stats.hits > 500
    for step, (y, right) in enumerate(zip(results, trace.right, strict=True)):
        assert_same(get(y), right, f"step {step}")


@pytest.mark.parametrize(("tokens", "slots"), [(1, 3), (4, 6)])
def test_ten_thousand_replays_while_everything_is_evicted(
    tokens: int, slots: int, cupy: Any, kernel: Callable[[str], Any]
) -> None:
    """A graph of four layers, recorded before their pools ever ran. A kernel before each layer writes new
    activations, ids and weights, one after it keeps the result."""
    steps, layers, hidden, k, x_rows = 10_000, len(CHAIN), 256, 2, 499
    draw = cases.Stream("replays", tokens)
    x = cases.activations("plain", x_rows * tokens, hidden, "replays").reshape(x_rows, tokens, hidden)
    ids = (draw.below(EXPERTS + 1, (steps, layers, tokens, k)) - 1).astype(np.int32)
    weights = (draw.below(1000, ids.shape) * 0.001).astype(np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    made = [layer_of(ffn) for ffn in CHAIN]
    pools = [moepool.Pool(layer, slots, device=DEVICE) for layer in made]
    laws = [moepool.Pool(layer, slots) for layer in made]
    route, keep, advance = map(kernel, ("route", "keep", "advance"))
    with stream, few_slots():
        tables = [cupy.asarray(array) for array in (x, ids, weights)]
        step = cupy.zeros(1, cupy.int64)
        x_in, y = (cupy.empty((layers, tokens, hidden), cupy.float32) for _ in range(2))
        ids_in, weights_in = (cupy.empty((layers, tokens, k), d) for d in (cupy.int32, cupy.float32))
        results = cupy.full((steps, layers, tokens, hidden), cupy.nan, cupy.float32)

        def one_step() -> None:
            for i, pool in enumerate(pools):
                here = (np.int32(i), np.int32(layers), step)
                sizes = (np.int32(x_rows), np.int32(tokens * hidden), np.int32(tokens * k))
                route((1,), (256,), (*tables, x_in[i], ids_in[i], weights_in[i], *sizes, *here))
                moepool.ExpertFFN(pool)(x_in[i], ids_in[i], weights_in[i], out=y[i])
                keep((1,), (256,), (y[i], results, np.int32(tokens * hidden), *here))
            advance((1,), (1,), (step,))

        graph = recorded(stream, one_step)
        for first in range(0, steps, steps // 4):
            span = range(first, first + steps // 4)
            for _ in span:
                graph.launch(stream)
            for i, law in enumerate(laws):
                for number in span:
                    law.resolve(ids[number, i]).release()
            stream.synchronize()
            for i, (pool, law) in enumerate(zip(pools, laws, strict=True)):
                assert_in_step(pool, law, f"layer {i} after {span.stop} replays")
        assert int(get(step)[0]) == steps
        assert all(pool.stats().evictions > steps // 2 for pool in pools)
        given = get(results)
    for i, layer in enumerate(made):
        rows = x[(np.arange(steps) * layers + i) % x_rows]
        with moepool.Pool(layer, 0) as pool:
            right = moepool.ExpertFFN(pool)(
                rows.reshape(-1, hidden), ids[:, i].reshape(-1, k), weights[:, i].reshape(-1, k)
            )
        assert_same(given[:, i].reshape(right.shape), right, f"layer {i}")
    for pool in (*pools, *laws):
        pool.close()


# ----------------------------------------------------------------------------------------------------- graphs

MODES = ("streamCaptureModeGlobal", "streamCaptureModeThreadLocal", "streamCaptureModeRelaxed")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("mode", MODES)
def test_the_first_step_of_a_pool_may_be_recorded(
    mode: str, tokens: int, cupy: Any, layer: moepool.Layer
) -> None:
    x, ids, weights = SMALL.x(tokens), SMALL.ids(tokens, "some"), SMALL.router(tokens)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, moepool.Pool(layer, 3, device=DEVICE) as pool, moepool.Pool(layer, 3) as law:
        given = [cupy.asarray(array) for array in (x, ids, weights)]
        out = Guarded(tokens, 256, device=DEVICE)
        stream.synchronize()
        graph = recorded(
            stream,
            partial(moepool.ExpertFFN(pool), *given, out=out.out),
            getattr(cupy.cuda.runtime, mode),
        )
        assert counts(pool) == counts(law), "recording is no step"
        for replay in range(3):
            graph.launch(stream)
            right = moepool.ExpertFFN(law)(x, ids, weights)
            assert_same(out.check(mode), right, f"replay {replay}")
            assert_in_step(pool, law, f"replay {replay}")


def record_first_of_all() -> None:
    """In a process that has done nothing with CUDA but bring its arrays there."""
    import cupy

    layer = layer_of(SMALL)
    stream = cupy.cuda.Stream(non_blocking=True)
    x, ids, weights = SMALL.x(1), SMALL.ids(1), SMALL.router(1)
    with stream, moepool.Pool(layer, 3, device=DEVICE) as pool:
        given = [cupy.asarray(array) for array in (x, ids, weights)]
        y = cupy.empty((1, 256), cupy.float32)
        stream.synchronize()
        graph = recorded(
            stream,
            partial(moepool.ExpertFFN(pool), *given, out=y),
            cupy.cuda.runtime.streamCaptureModeGlobal,
        )
        graph.launch(stream)
        assert_same(get(y), reference_ffn(layer, x, ids, weights), "the first of all steps")


def test_the_first_step_of_a_process_may_be_recorded() -> None:
    program = "from tests.test_cuda_decode import record_first_of_all; record_first_of_all()"
    run(sys.executable, "-c", program, cwd=ROOT)


def test_blocks_of_a_device_with_little_shared_memory() -> None:
    """As of compute capability 7.5: fewer warps and panels, down to one warp that does gate and then up."""
    ids = [f"test_every_step_is_the_cpus[{qtype}-{qtype}-{qtype}]" for qtype in ("f32", "f16", "q8_0")]
    ids += ["test_every_step_is_the_cpus[q8_0-f32-q4_0]", "test_rows_of_more_chunks_than_are_under_way"]
    tests = [f"tests/test_cuda_decode.py::{test}" for test in ids]
    run(
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests),
        cwd=ROOT,
        env=os.environ | {"MOEPOOL_TEST_SHARED_BYTES": str(64 << 10)},
    )


def test_a_graph_outlives_larger_steps_of_its_pool(cupy: Any, layer: moepool.Layer) -> None:
    """Of more tokens and places than it was recorded with, by call and by graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    graphs = []
    with stream, few_slots(), moepool.Pool(layer, 3, device=DEVICE) as pool, moepool.Pool(layer, 3) as law:
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        for tokens, k in ((1, 2), (2, 2), (1, 40), (16, 32)):
            x, weights = SMALL.x(tokens), cases.router_weights(tokens, k)
            given = [cupy.asarray(x), cupy.zeros((tokens, k), cupy.int64), cupy.asarray(weights)]
            y = cupy.empty((tokens, 256), cupy.float32)
            if k > 2:
                ffn(*given)
                on_cpu(x, np.zeros((tokens, k), np.int64), weights)
            graph = recorded(stream, partial(ffn, *given, out=y))
            graphs.append((graph, x, given, weights, y))
            for round_, (replayed, rows, (_, ids, _), router, result) in enumerate(graphs * 2):
                drawn = cases.expert_ids("repeats", *ids.shape, EXPERTS, tokens, round_).astype(np.int64)
                ids.set(drawn)
                replayed.launch(stream)
                right = on_cpu(rows, drawn, router)
                assert_same(get(result), right, f"a graph of {ids.shape} after one of {(tokens, k)}")
            assert_in_step(pool, law, (tokens, k))


def test_steps_that_need_the_host_are_refused_and_the_capture_goes_on(
    cupy: Any, layer: moepool.Layer
) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    moepool.set_pinned_limit(0)
    try:
        with pytest.warns(moepool.MoePoolWarning, match="page-locked"):
            pageable = moepool.Pool(layer_of(SMALL), 4, device=DEVICE)
    finally:
        moepool.set_pinned_limit(None)
    pool = moepool.Pool(layer, 4, device=DEVICE)
    refused: list[tuple[str, moepool.Pool, cases.Ffn, int, int, dict[str, Any]]] = [
        ("ids in host memory", pool, SMALL, 2, 2, {}),
        ("17 tokens", pool, SMALL, 17, 2, {}),
        ("528 places", pool, SMALL, 16, 33, {}),
        ("a prompt", pool, SMALL, 2, 2, {"phase": "prompt"}),
        ("pageable records", pageable, SMALL, 2, 2, {}),
    ]
    right, calls = [], []
    for name, of, ffn, tokens, k, options in refused:
        x, weights = ffn.x(tokens), cases.router_weights(tokens, k)
        ids = cases.expert_ids("some", tokens, k, ffn.experts, name)
        right.append(reference_ffn(of.layer, x, ids, weights))
        given = [cupy.asarray(x), ids if name.startswith("ids") else cupy.asarray(ids), cupy.asarray(weights)]
        calls.append((of, given, cupy.empty(right[-1].shape, cupy.float32), options))
    x, ids, weights = SMALL.x(3), SMALL.ids(3), SMALL.router(3)
    good = [cupy.asarray(array) for array in (x, ids, weights)]
    out = cupy.empty((3, 256), cupy.float32)
    strided = cupy.zeros((256, 3), cupy.float32).T
    cupy.cuda.Device(0).synchronize()
    before = [counts(of) for of, *_ in calls]

    def record() -> None:
        for (name, *_), (of, given, y, options) in zip(refused, calls, strict=True):
            with pytest.raises(moepool.StateError, match="captured"):
                moepool.ExpertFFN(of)(*given, out=y, **options)
                pytest.fail(f"{name} was recorded")
        with pytest.raises(moepool.ArgumentError, match="x has strides .* pack it before the capture"):
            moepool.ExpertFFN(pool)(strided, good[1], good[2], out=out)
        moepool.ExpertFFN(pool)(*good, out=out)

    with stream, few_slots():
        graph = recorded(stream, record)
        assert [counts(of) for of, *_ in calls] == before
        graph.launch(stream)
        assert_same(get(out), reference_ffn(layer, x, ids, weights), "the rest of the capture")
        for (name, *_), expected, (of, given, y, options) in zip(refused, right, calls, strict=True):
            moepool.ExpertFFN(of)(*given, out=y, **options)
            assert_same(get(y), expected, f"{name}, afterwards")
    for of in {id(of): of for of, *_ in calls}.values():
        of.close()


def test_one_row_or_column_of_something_larger_is_packed(cupy: Any, layer: moepool.Layer) -> None:
    """Whatever the strides of a dimension of one element are: it can be recorded."""
    stream = cupy.cuda.Stream(non_blocking=True)
    x, ids, weights = SMALL.x(4), cases.expert_ids("plain", 4, 4, EXPERTS), cases.router_weights(4, 4)
    with stream, few_slots(), moepool.Pool(layer, 3, device=DEVICE) as pool, moepool.Pool(layer, 3) as law:
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        whole = [cupy.asarray(array) for array in (x, ids.astype(np.int64), weights)]
        y = cupy.empty((1, 256), cupy.float32)
        for rows, columns in ((slice(1, 2), slice(2, 3)), (slice(3, None, 3), slice(1, 3))):
            given = (whole[0][rows], whole[1][rows, columns], whole[2][rows, columns])
            graph = recorded(stream, partial(ffn, *given, out=y))
            graph.launch(stream)
            right = on_cpu(x[rows], ids[rows, columns], weights[rows, columns])
            assert_same(get(y), right, f"rows {rows}, places {columns}")
        assert_in_step(pool, law, "the end")


def test_ids_out_of_range_in_a_replay(cupy: Any, layer: moepool.Layer) -> None:
    """NaN at once, an error at the next call that the host takes part in, and nothing more."""
    stream = cupy.cuda.Stream(non_blocking=True)
    x, weights = SMALL.x(2), SMALL.router(2)
    with stream, moepool.Pool(layer, 3, device=DEVICE) as pool, moepool.Pool(layer, 3) as law:
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        ids, y = cupy.zeros((2, 2), cupy.int64), cupy.empty((2, 256), cupy.float32)
        given = (cupy.asarray(x), ids, cupy.asarray(weights))
        graph = recorded(stream, partial(ffn, *given, out=y))
        for replay, bad in enumerate((8, -2, 2**40, -(2**63))):
            drawn = cases.expert_ids("plain", 2, 2, EXPERTS, "bad", replay).astype(np.int64)
            step = Step(x, drawn, weights, [(1, replay % 2)])
            drawn[step.bad[0]] = bad
            ids.set(drawn)
            graph.launch(stream)
            assert_same(get(y), step.right(on_cpu), f"id {bad}")
            with pytest.raises(
                moepool.IdError, match=f"earlier step: id {bad} at token 1, place {replay % 2} "
            ):
                ffn(*given, out=y)
            assert_in_step(pool, law, f"id {bad}: the call that told was no step")


def test_pytorch_routes_and_computes_in_one_graph(layer: moepool.Layer) -> None:
    """topk gives int64 ids and weights, activations are bfloat16, PyTorch makes the result."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    for tokens in (1, 6):
        with moepool.Pool(layer, 4, device=DEVICE) as pool, moepool.Pool(layer, 4) as law:
            ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
            x = torch.zeros((tokens, 256), dtype=torch.bfloat16, device=DEVICE)
            scores = torch.zeros((tokens, EXPERTS), device=DEVICE)
            torch.topk(torch.softmax(scores, -1), SMALL.k)  # so that PyTorch has its kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                weights, ids = torch.topk(torch.softmax(scores, -1), SMALL.k)
                y = ffn(x, ids, weights)
            draw = cases.Stream("torch", tokens)
            for replay in range(50):
                x.copy_(torch.from_numpy(cases.activations("plain", tokens, 256, "torch", replay)))
                scores.copy_(torch.from_numpy(draw.bell((tokens, EXPERTS))))
                graph.replay()
                rows, chosen, router = (a.cpu().numpy() for a in (x.float(), ids, weights))
                right = on_cpu(rows, chosen, router)
                assert_same(y.cpu().numpy(), right, f"{tokens} tokens, replay {replay}")
            assert_in_step(pool, law, f"{tokens} tokens")


# ---------------------------------------------------------------------------------------------------- no host

KERNEL_NODE, COPY_NODE = 0, 1  # CUgraphNodeType


def node_types(graph: Any) -> list[int]:
    """What a graph is made of, by the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count, kind = ctypes.c_void_p(graph.graph), ctypes.c_size_t(), ctypes.c_int()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    types = []
    for node in nodes:
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types.append(kind.value)
    return types


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_a_recorded_step_is_kernels_alone(tokens: int, cupy: Any) -> None:
    """No copy to or from the host, no call of the host, no allocation, no event: with hits as with misses."""
    stream = cupy.cuda.Stream(non_blocking=True)
    pools = [moepool.Pool(layer_of(ffn), 3, device=DEVICE) for ffn in CHAIN]
    with stream, few_slots():
        x, y = (cupy.ones((tokens, 256), cupy.float32) for _ in range(2))
        ids, weights = cupy.zeros((tokens, 2), cupy.int32), cupy.ones((tokens, 2), cupy.float32)

        def layers() -> None:
            for pool in pools:
                moepool.ExpertFFN(pool)(x, ids, weights, out=y)

        first, later = recorded(stream, layers), recorded(stream, layers)
        for graph in (first, later):
            types = node_types(graph)
            assert set(types) == {KERNEL_NODE} and len(types) >= 2 * len(pools), types
        runtime = cupy.cuda.runtime

        def copy() -> None:
            runtime.memcpyAsync(y.data.ptr, x.data.ptr, x.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

        assert node_types(recorded(stream, copy)) == [COPY_NODE]
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_host_never_waits_for_a_step(tokens: int, cupy: Any, kernel: Callable[[str], Any]) -> None:
    """A kernel in front keeps the stream busy until the host, after all its replays and calls, lets it go. If
    any of them waited for the stream, that kernel would have to end by itself."""
    layer = layer_of(SMALL)
    x, weights = SMALL.x(tokens), SMALL.router(tokens)
    drawn = [cases.expert_ids("plain", tokens, 2, EXPERTS, "no host", i) for i in range(10)]
    stream = cupy.cuda.Stream(non_blocking=True)
    opening = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
    with stream, moepool.Pool(layer, 4, device=DEVICE) as pool, moepool.Pool(layer, 4) as law, few_slots():
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        rows, router, ids = cupy.asarray(x), cupy.asarray(weights), cupy.asarray(np.array(drawn))
        opened = cupy.zeros(1, cupy.int32)
        results = cupy.zeros((2, len(drawn), tokens, 256), cupy.float32)
        graphs = [
            recorded(stream, partial(ffn, rows, ids[i], router, out=results[0, i])) for i in range(len(drawn))
        ]

        def everything(cycles: int) -> bool:
            """Whether the stream was still busy when all was queued."""
            opening[0] = 0
            kernel("gate")((1,), (1,), (np.uintp(opening.ctypes.data), np.int64(cycles), opened))
            for i, graph in enumerate(graphs):
                graph.launch(stream)
                ffn(rows, ids[i], router, out=results[1, i])
            busy = not stream.done
            opening[0] = 1
            stream.synchronize()
            return busy

        everything(1)  # so that all is loaded
        assert everything(4_000_000_000), "something waited for the stream"
        assert int(get(opened)[0]) == 1, "something waited for the stream"
        given = get(results)
        for round_ in range(2):
            for i, wanted in enumerate(drawn):
                for result in given[:, i]:
                    right = on_cpu(x, wanted, weights)
                    assert_same(result, right, f"round {round_}, step {i}")
        assert_in_step(pool, law, "the end")


# ------------------------------------------------------------------------------------------ streams and hosts


def test_two_pools_on_two_streams(cupy: Any, layer: moepool.Layer, spin: Callable[..., None]) -> None:
    """Side by side, each in its own order, with delays that put now this and now that one in front."""
    count = 1000
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    tokens = [1 if i % 3 else 1 + i % 16 for i in range(count)]
    traces = [trace_of(cupy, SMALL, layer, tokens, f"two pools, {i}") for i in range(2)]
    pools = [moepool.Pool(layer, 3, device=DEVICE) for _ in streams]
    laws = [moepool.Pool(layer, 3) for _ in streams]
    results: list[list[Any]] = [[], []]
    with few_slots():
        for step in range(count):
            for i, stream in enumerate(streams):
                with stream:
                    if (step + i) % 50 == 0:
                        spin(400_000)
                    results[i].append(moepool.ExpertFFN(pools[i])(*traces[i].device[step]))
                laws[i].resolve(traces[i].ids[step]).release()
        for i, (pool, law) in enumerate(zip(pools, laws, strict=True)):
            assert_in_step(pool, law, f"pool {i}")
            for step, right in enumerate(traces[i].right):
                assert_same(get(results[i][step]), right, f"pool {i}, step {step}")
            pool.close()


def test_two_streams_on_one_pool(cupy: Any, layer: moepool.Layer, spin: Callable[..., None]) -> None:
    """Steps run in the order of their calls, although the streams know nothing of each other."""
    count = 2000
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    trace = trace_of(cupy, SMALL, layer, [1 if i % 4 else 1 + i % 16 for i in range(count)], "two streams")
    which = cases.Stream("which stream").below(2, count)
    with moepool.Pool(layer, 3, device=DEVICE) as pool, moepool.Pool(layer, 3) as law, few_slots():
        ffn, results = moepool.ExpertFFN(pool), []
        for step, given in enumerate(trace.device):
            with streams[which[step]]:
                if step % 60 == 0:
                    spin(400_000)
                results.append(ffn(*given))
            law.resolve(trace.ids[step]).release()
        assert_in_step(pool, law, "the end")
        assert pool.stats().evictions > count // 2
    cupy.cuda.Device(0).synchronize()
    for step, right in enumerate(trace.right):
        assert_same(get(results[step]), right, f"step {step}")


def test_the_device_the_host_and_the_device_again(cupy: Any, layer: moepool.Layer) -> None:
    """Routes are resolved where the device left off, and it goes on where the host left off. While a route is
    open nobody evicts what it uses."""
    trace = trace_of(cupy, SMALL, layer, [1, 2, 1, 1, 3, 1] * 40, "in turn")
    with few_slots(), moepool.Pool(layer, 4, device=DEVICE) as pool, moepool.Pool(layer, 4) as law:
        ffn, on_cpu = moepool.ExpertFFN(pool), moepool.ExpertFFN(law)
        for first in range(0, len(trace), 6):
            taken: list[Any] = []
            steps = iter(range(first, first + 6))

            def both(ids: Any = None) -> int:
                step = next(steps)  # noqa: B023
                x, on_device, weights = trace.device[step]
                taken.append(ffn(x, on_device if ids is None else ids, weights))  # noqa: B023
                return step

            for _ in range(2):
                step = both()
                on_cpu(trace.x[: len(trace.ids[step])], trace.ids[step], trace.weights[step])
            with pool.resolve(trace.device[first + 2][1]) as route, law.resolve(trace.ids[first + 2]):
                both(route)
                step = both()
                on_cpu(trace.x[: len(trace.ids[step])], trace.ids[step], trace.weights[step])
                assert_in_step(pool, law, f"steps {first}, a route is open")
            for _ in range(2):
                step = both()
                on_cpu(trace.x[: len(trace.ids[step])], trace.ids[step], trace.weights[step])
            assert_in_step(pool, law, f"steps {first}")
            for step, y in enumerate(taken, first):
                assert_same(get(y), trace.right[step], f"step {step}")


def test_a_failed_call_is_no_step(cupy: Any, layer: moepool.Layer) -> None:
    given = [cupy.asarray(array) for array in (SMALL.x(2), SMALL.ids(2), SMALL.router(2))]
    with moepool.Pool(layer, 3, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        ffn(*given)
        before = pool.stats()
        for wrong in ({"x": given[0][:1]}, {"weights": given[2].astype(cupy.float64)}, {"out": given[0]}):
            with pytest.raises(moepool.ArgumentError):
                ffn(**{"x": given[0], "ids": given[1], "weights": given[2]} | wrong)
        assert pool.stats() == before


def test_a_pool_says_who_takes_a_step(cupy: Any, layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 3, device=DEVICE) as pool:
        assert pool.describe(1, 4).startswith("device: gate/up ")
        assert "16 tokens" in pool.describe(17, 4)
        assert "prompt" in pool.describe(33, 4)
        with pool.resolve([[0]]):
            assert pool.describe(1, 4).startswith("device: ")
    with moepool.Pool(layer, 3, device=DEVICE, miss="host") as pool:
        assert "; misses by the CPU, asked through a doorbell" in pool.describe(1, 4)
    with moepool.Pool(layer_of(cases.FFNS[1]), 3, device=DEVICE) as pool:  # gate and up of two types
        for tokens in (1, 16):
            told = pool.describe(tokens, 3)
            assert told.startswith("device: gate, of q4_k") and "then up, of iq4_xs" in told


@pytest.mark.parametrize(("qtype", "up"), [("f32", "f32"), ("q8_0", "q8_0"), ("q8_0", "f16")])
@pytest.mark.parametrize("k", [33, 200, 512])
def test_many_places_of_one_token(qtype: str, up: str, k: int, cupy: Any) -> None:
    """Taken by the device if its shared memory holds their sums, else by the host: the bytes are the same."""
    layer = layer_of_types(qtype, qtype, up)
    draw = cases.Stream("many places", qtype, str(k))
    x = draw.bell((1, layer.matrices["gate"].columns)).astype(np.float32)
    ids = (np.arange(k, dtype=np.int32) % (EXPERTS + 1) - 1)[None]
    weights = draw.bell((1, k)).astype(np.float32)
    with moepool.Pool(layer, EXPERTS, device=DEVICE) as pool, moepool.Pool(layer, EXPERTS) as law:
        for what in ("cold", "hit"):
            y = moepool.ExpertFFN(pool)(*map(cupy.asarray, (x, ids, weights)))
            assert_same(get(y), moepool.ExpertFFN(law)(x, ids, weights), what)
            assert_in_step(pool, law, what)


def test_a_capture_outlives_what_else_happens_meanwhile(cupy: Any, layer: moepool.Layer) -> None:
    """Stats of a pool whose steps no graph holds, and pools that are dropped, leave a capture whole."""
    given = [cupy.asarray(array) for array in (SMALL.x(1), SMALL.ids(1), SMALL.router(1))]
    out = cupy.empty_like(given[0])
    other, dropped, pool = (moepool.Pool(layer, 3, device=DEVICE) for _ in range(3))
    for one in (other, dropped, pool):
        moepool.ExpertFFN(one)(*given)

    def call() -> None:
        moepool.ExpertFFN(pool)(*given, out=out)
        assert other.stats().steps == 1
        dropped.close()

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        graph = recorded(stream, call)
        graph.launch(stream)
        stream.synchronize()
    with moepool.Pool(layer, 3) as law:
        assert_same(get(out), moepool.ExpertFFN(law)(SMALL.x(1), SMALL.ids(1), SMALL.router(1)), "the replay")
    other.close()
    pool.close()
