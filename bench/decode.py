"""Decode layers in a CUDA graph: microseconds a layer, and the bytes that this is a second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import moepool
from bench.gpu import Gpu, Replay
from bench.measure import SPREAD, Column, Report, Row, gigabytes_a_second
from bench.workload import Shape, distinct, layers_of, quiet, random_trace, slots_for

STEPS, STEPS_WITH_MISSES = 32, 16

COLUMNS = (
    Column("type", "type"),
    Column("tokens", "T", "d", 4),
    Column("hit_rate", "hits", ".2f", 6),
    Column("us", "us", ".2f", 9),
    SPREAD,
    Column("router_us", "router", ".2f"),
    Column("megabytes", "MB", ".1f"),
    Column("rate", "GB/s", ",.0f"),
    Column("ratio", "ratio", ".2f", 7),
    Column("link_megabytes", "link MB", ".1f", 9),
    Column("link_rate", "GB/s", ".1f", 7),
    Column("link_ratio", "ratio", ".2f", 7),
)


def decode(
    report: Report,
    gpu: Gpu,
    types: Sequence[str],
    tokens: Sequence[int],
    hits: float,
    layers: int,
    shape: Shape,
    seconds: float,
) -> None:
    """Measures each type with each number of tokens.

    The layers' weights lie in as many places of device memory; in host memory they share one layer's records.
    """
    ceiling = gpu.read_rate()
    report.ceiling("device memory", ceiling, "a kernel that reads 4 GiB, the best of 10")
    links: dict[int, float] = {}
    report.header()
    for qtype in types:
        ffn = shape.ffn(qtype)
        (layer,) = layers_of(ffn, 1)
        if hits < 1:
            links[layer.record_bytes] = gpu.copy_rate(layer.record_bytes)
        for count in tokens:
            trace = random_trace(
                STEPS if hits >= 1 else STEPS_WITH_MISSES, layers, count, shape.k, shape.experts
            )
            slots = shape.experts if hits >= 1 else slots_for(trace, shape.experts, hits)
            with quiet():
                pools = [moepool.Pool(layer, slots, device="cuda:0") for _ in range(layers)]
                if slots == shape.experts:
                    for pool in pools:
                        pool.resolve(np.arange(shape.experts)[None], phase="decode").release()
                replay = Replay(gpu, pools, trace, ffn.x(count), ffn.router(count))
                replay.check(f"{qtype}, {count} tokens")
                row = measure(replay, pools, layer.record_bytes, seconds)
            row |= {"type": qtype, "tokens": count, "slots": slots, "distinct": distinct(trace)}
            row["ratio"] = row["rate"] / ceiling
            if row["link_megabytes"] is not None:
                row["link_ratio"] = row["link_rate"] / links[layer.record_bytes]
                row["copy_engine"] = links[layer.record_bytes]
            report.add(row)
            for pool in pools:
                pool.close()
            del replay, pools


def measure(replay: Replay, pools: Sequence[moepool.Pool], record_bytes: int, seconds: float) -> Row:
    """The row of one replay; misses are counted by the pools."""
    replay.warm_up()
    before = [pool.stats() for pool in pools]
    timing, router = replay.time(seconds)
    after = [pool.stats() for pool in pools]
    steps, hits, misses = (
        sum(getattr(b, name) - getattr(a, name) for a, b in zip(before, after, strict=True))
        for name in ("steps", "hits", "misses")
    )
    wanted, missed = (record_bytes * n / steps for n in (hits + misses, misses))
    return timing.row() | {
        "router_us": router.median,
        "hit_rate": hits / (hits + misses),
        "megabytes": wanted / 1e6,
        "rate": gigabytes_a_second(wanted, timing.median),
        "link_megabytes": missed / 1e6 if misses else None,
        "link_rate": gigabytes_a_second(missed, timing.median) if misses else None,
    }
