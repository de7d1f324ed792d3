"""The bookkeeping of a step in a CUDA graph: layers so small that there is nothing else to do.

A step whose places are all skipped has the same launches and nothing to find: what the others take longer is
the price of resolving, and of what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np

import moepool
from bench.gpu import Gpu, Replay
from bench.measure import SPREAD, Column, Report, Row
from bench.workload import I32, Shape, layers_of, missing_trace, quiet, random_trace
from tests import cases

STEPS = 32
MISSING = 3
SIZE = 32  # of the layer, both ways

# experts, slots, k
POOLS = ((128, 64, 8), (512, 128, 10))

COLUMNS = (
    Column("experts", "experts", "d"),
    Column("slots", "slots", "d", 7),
    Column("k", "k", "d", 4),
    Column("tokens", "T", "d", 4),
    Column("missing", "missing", "d", 9),
    Column("us", "us", ".2f"),
    SPREAD,
    Column("router_us", "router", ".2f"),
    Column("own_us", "over skipped", ".2f", 14),
)


def resolve(report: Report, gpu: Gpu, tokens: Sequence[int], layers: int, seconds: float) -> None:
    """Measures pools of two sizes: every wanted expert resident, and three missing a token."""
    report.header()
    for experts, slots, k in POOLS:
        shape = Shape(SIZE, SIZE, experts, k)
        (layer,) = layers_of(shape.ffn("f32"), 1)
        for count in tokens:
            resident = random_trace(STEPS, layers, count, k, slots)
            missing = missing_trace(layers, count, k, experts, slots, MISSING)
            if missing is None:
                click.echo(f"  {slots} slots are too few for {MISSING} of {k} missing with {count} tokens")
            base = _row(gpu, layer, slots, np.full_like(resident, -1), None, seconds)
            report.add(base)
            for trace, misses in ((resident, 0), (missing, count * MISSING)):
                if trace is not None:
                    row = _row(gpu, layer, slots, trace, misses, seconds)
                    report.add(row | {"own_us": row["us"] - base["us"]})


def _row(gpu: Gpu, layer: moepool.Layer, slots: int, trace: I32, misses: int | None, seconds: float) -> Row:
    steps, layers, tokens, k = trace.shape
    x, weights = cases.activations("plain", tokens, SIZE, "resolve"), cases.router_weights(tokens, k)
    with quiet():
        pools = [moepool.Pool(layer, slots, device="cuda:0") for _ in range(layers)]
        for pool in pools:
            pool.resolve(np.arange(slots)[None], phase="decode").release()
        replay = Replay(gpu, pools, trace, x, weights)
        replay.check(f"{layer.experts} experts, {slots} slots, {tokens} tokens")
        replay.warm_up()
        before = pools[0].stats()
        timing, router = replay.time(seconds)
        after = pools[0].stats()
    counted = after.misses - before.misses
    if counted != (misses or 0) * (after.steps - before.steps):
        raise click.ClickException(f"{counted} experts were missing, not {misses} a step")
    for pool in pools:
        pool.close()
    return timing.row() | {
        "experts": layer.experts,
        "slots": slots,
        "k": k,
        "tokens": tokens,
        "missing": misses,
        "router_us": router.median,
    }
