"""Layers on the CPU, on all threads that moepool uses, beside the rate at which these read memory.

Several kernel sets take turns, call by call, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import numpy as np

import moepool
from bench.measure import Column, Report, Timing, check_same, gigabytes_a_second, host_microseconds, repeated
from bench.workload import F32, I32, Shape, distinct, portable, random_trace
from tests import cases

STEPS = 16
READ_BYTES = 4 << 30
DRAWN = 16  # experts

COLUMNS = (
    Column("type", "type"),
    Column("tokens", "T", "d", 5),
    Column("kernel", "kernels", "", 14),
    Column("us", "us", ",.1f", 11),
    Column("spread", "p10-p90", "", 21),
    Column("empty_us", "empty", ".1f", 7),
    Column("megabytes", "MB", ".1f"),
    Column("rate", "GB/s", ".1f"),
    Column("ratio", "ratio", ".2f", 7),
    Column("gmacs", "GMAC/s", ",.0f"),
)


def read_size() -> int:
    """Bytes that are read to find the rate: many, but no more than fit."""
    return min(READ_BYTES, moepool.memory("cpu").free // 4)


def read_rate(threads: int, size: int) -> float:
    """GB/s at which threads read memory: each the maximum of its own array, by NumPy, the best of several."""
    count = size // threads // 8
    start, end = threading.Barrier(threads + 1), threading.Barrier(threads + 1)
    rounds = 8

    def work() -> None:
        mine = np.ones(count)  # touched by the thread that reads it
        for _ in range(rounds):
            start.wait()
            np.max(mine)
            end.wait()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    best = float("inf")
    for _ in range(rounds):
        start.wait()
        begun = time.perf_counter()
        end.wait()
        best = min(best, time.perf_counter() - begun)
    for worker in workers:
        worker.join()
    return gigabytes_a_second(count * threads * 8, best * 1e6)


def layers_of(ffn: cases.Ffn, count: int) -> list[moepool.Layer]:
    """Layers in memory of their own each, a few experts repeated: drawing takes longer than packing."""
    drawn = ffn.weights(min(DRAWN, ffn.experts))
    rounds = -(-ffn.experts // DRAWN)
    weights: dict[str, Any] = {
        name: np.tile(blocks, (rounds, 1, 1))[: ffn.experts] for name, blocks in drawn.items()
    }
    return [moepool.ExpertStore.from_arrays(**weights, qtype=ffn.gate)[0] for _ in range(count)]


def cpu(
    report: Report,
    types: Sequence[str],
    tokens: Sequence[int],
    kernels: Sequence[str],
    layers: int,
    shape: Shape,
    seconds: float,
) -> None:
    """Measures each type with each number of tokens, the layers in turn."""
    threads = moepool.get_threads()
    size = read_size()
    ceiling = read_rate(threads, size)
    how = f"numpy.max of {size / 2**30:.1f} GiB on {threads} threads, each its own array, the best of 8"
    report.ceiling("host memory", ceiling, how)
    report.header()
    for qtype in types:
        ffn = shape.ffn(qtype)
        made = layers_of(ffn, layers)
        for count in tokens:
            trace = random_trace(STEPS, layers, count, shape.k, shape.experts)
            megabytes = distinct(trace) * made[0].record_bytes / 1e6
            timings, empty = measure(made, trace, ffn.x(count), ffn.router(count), kernels, seconds)
            for kernel, timing in timings.items():
                rate = gigabytes_a_second(megabytes * 1e6, timing.median)
                report.add(
                    timing.row()
                    | {
                        "type": qtype,
                        "kernel": kernel,
                        "tokens": count,
                        "empty_us": empty.median,
                        "megabytes": megabytes,
                        "rate": rate,
                        "ratio": rate / ceiling,
                        "gmacs": count * shape.k * shape.multiplications / timing.median / 1e3,
                    }
                )
        del made  # before the next ones are made


def measure(
    layers: Sequence[moepool.Layer],
    trace: I32,
    x: F32,
    weights: F32,
    kernels: Sequence[str],
    seconds: float,
) -> tuple[dict[str, Timing], Timing]:
    """What a call takes by each kernel set, and what one takes that skips every place."""
    with ExitStack() as pools:
        ffns = [moepool.ExpertFFN(pools.enter_context(moepool.Pool(layer, 0))) for layer in layers]
        right = portable(layers[0], x, trace[0, 0], weights)
        calls = cycle([(ffn, ids) for step in trace for ffn, ids in zip(ffns, step, strict=True)])
        out = np.empty_like(x)
        nobody = np.full(trace.shape[2:], -1, np.int32)

        def one_layer() -> None:
            ffn, ids = next(calls)
            ffn(x, ids, weights, out=out)

        def empty() -> None:
            ffns[0](x, nobody, weights, out=out)

        taken: dict[str, list[float]] = {kernel: [] for kernel in kernels}
        for kernel in kernels:
            with moepool.use_cpu_kernel(kernel):
                what = f"{layers[0]}, {len(x)} tokens, {kernel}"
                check_same(ffns[0](x, trace[0, 0], weights), right, what)
                for _ in layers:
                    one_layer()
        end = time.perf_counter() + seconds * len(kernels)
        least = 2 * len(layers)
        while len(taken[kernels[-1]]) < least or time.perf_counter() < end:
            for kernel in kernels:
                with moepool.use_cpu_kernel(kernel):
                    taken[kernel].append(host_microseconds(one_layer))
        timings = {kernel: Timing.of(values) for kernel, values in taken.items()}
        return timings, repeated(lambda: host_microseconds(empty), seconds / 10)
