"""Decoding with few slots: misses over the link, by the CPU, and divided between the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

import moepool
from bench.cpu import read_rate, read_size
from bench.gpu import Gpu, Replay
from bench.measure import SPREAD, Column, Report, Row, by_turns, gigabytes_a_second
from bench.workload import I32, Shape, layers_of, quiet, skewed_trace

STEPS = 128
SETTLING = 1.0  # seconds until rates, shares and residents are what they stay

WAYS = ("stream", "host", "auto", "static")
COUNTED = ("steps", "hits", "misses", "copied_bytes", "in_place_bytes", "host_bytes", "step_backs")

COLUMNS = (
    Column("type", "type"),
    Column("tokens", "T", "d", 4),
    Column("slots", "slots", "d", 7),
    Column("way", "misses", "", 9),
    Column("hit_rate", "hits", ".2f", 6),
    Column("us", "us", ".1f", 9),
    SPREAD,
    Column("link_megabytes", "link MB", ".1f", 9),
    Column("cpu_megabytes", "CPU MB", ".1f"),
    Column("rate", "GB/s", ".1f", 7),
    Column("best_ratio", "best / auto", ".2f", 12),
)


def hybrid(
    report: Report,
    gpu: Gpu,
    types: Sequence[str],
    tokens: Sequence[int],
    slots: Sequence[int],
    layers: int,
    shape: Shape,
    seconds: float,
) -> None:
    """Measures each way to serve misses with each number of slots, on one trace a number of tokens."""
    threads = moepool.get_threads()
    reading = read_rate(threads, read_size())
    report.ceiling("host memory", reading, f"numpy.max on {threads} threads, the best of 8")
    for qtype in types:
        ffn = shape.ffn(qtype)
        made = layers_of(ffn, layers)
        link = gpu.copy_rate(made[0].record_bytes)
        report.ceiling("link", link, f"copies of {made[0].record_bytes / 1e6:.1f} MB from page-locked memory")
        report.header()
        for count in tokens:
            trace = skewed_trace(STEPS, layers, count, shape.k, shape.experts)
            for number in slots:
                rows = _rows(gpu, made, trace, min(number, shape.experts), ffn, count, seconds)
                auto = rows[WAYS.index("auto")]
                auto["best_ratio"] = min(row["us"] for row in rows) / auto["us"]
                for row in rows:
                    report.add(row | {"type": qtype, "tokens": count})
        del made
    worst = min(row["best_ratio"] for row in report.content["rows"] if "best_ratio" in row)
    click.echo(f"auto is at worst {worst:.2f} of the best of the four")


def options_of(way: str, trace: I32, layer: int, experts: int, slots: int) -> dict[str, Any]:
    """How the pool of a layer is made: "static" knows the trace beforehand."""
    if way == "stream":
        return {"miss": "stream"}
    if way == "host":
        return {"miss": "host"}
    if way == "auto":
        return {"miss": "auto"}
    counts = np.bincount(trace[:, layer].ravel(), minlength=experts)
    hot = np.argsort(-counts, kind="stable")[:slots].astype(np.int32)
    return {"miss": "host", "policy": "static", "hot": hot}


def _counts(pools: Sequence[moepool.Pool]) -> Counter[str]:
    """What all of them have counted together."""
    total: Counter[str] = Counter()
    for pool in pools:
        stats = pool.stats()
        total.update({name: getattr(stats, name) for name in COUNTED})
    return total


def _rows(
    gpu: Gpu,
    layers: Sequence[moepool.Layer],
    trace: I32,
    slots: int,
    ffn: Any,
    tokens: int,
    seconds: float,
) -> list[Row]:
    """All ways, by turns."""
    x, weights = ffn.x(tokens), ffn.router(tokens)
    sides: list[tuple[list[moepool.Pool], Replay]] = []
    with quiet():
        for way in WAYS:
            pools = [
                moepool.Pool(layer, slots, device="cuda:0", **options_of(way, trace, i, layer.experts, slots))
                for i, layer in enumerate(layers)
            ]
            if min(pool.slots for pool in pools) < slots:
                raise click.ClickException(f"{slots} slots do not fit for each way: take fewer layers")
            sides.append((pools, Replay(gpu, pools, trace, x, weights)))
            sides[-1][1].check(f"{slots} slots, {way}")
            sides[-1][1].warm_up(SETTLING)
        before = [_counts(pools) for pools, _ in sides]
        timings = by_turns([replay.once for _, replay in sides], seconds)
        counts = [after - b for after, b in zip((_counts(pools) for pools, _ in sides), before, strict=True)]
    for pools, _ in sides:
        for pool in pools:
            pool.close()
    record = layers[0].record_bytes
    rows: list[Row] = []
    for way, timing, count in zip(WAYS, timings, counts, strict=True):
        steps, wanted = count["steps"], count["hits"] + count["misses"]
        rows.append(
            timing.row()
            | {
                "slots": slots,
                "way": way,
                "hit_rate": count["hits"] / wanted,
                "link_megabytes": (count["copied_bytes"] + count["in_place_bytes"]) / steps / 1e6,
                "cpu_megabytes": count["host_bytes"] / steps / 1e6,
                "rate": gigabytes_a_second(wanted * record / steps, timing.median),
                "step_backs": count["step_backs"],
            }
        )
    return rows
