"""From a CUDA graph to the CPU and back: layers with next to nothing to compute, and what CUDA offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import click
import numpy as np

import moepool
from bench.gpu import Gpu, Replay
from bench.measure import SPREAD, Column, Report, Row
from bench.workload import layers_of, quiet, random_trace
from tests import cases

SOURCE = Path(__file__).with_name("doorbell.cu")
STEPS = 32
EXPERTS = 32
# Next to nothing, and activations of the usual length, of which the CPU then has a panel or two to read.
HIDDEN = (32, 2048)

COLUMNS = (
    Column("what", "", "", 26),
    Column("hidden", "hidden", "d", 8),
    Column("k", "k", "d", 4),
    Column("us", "us", ".2f"),
    SPREAD,
    Column("more_us", "round trip", ".2f", 12),
)


def doorbell(report: Report, gpu: Gpu, layers: int, seconds: float) -> None:
    """Measures small layers whose experts are all resident, then all left to the CPU."""
    report.header()
    for hidden, k in product(HIDDEN, (1, 8)):
        ffn = cases.Ffn(f"bench doorbell/{hidden}/{k}", hidden, 32, EXPERTS, k, "q8_0", "q8_0", "q8_0")
        (layer,) = layers_of(ffn, 1)
        hits = _row(gpu, layer, k, layers, seconds, slots=EXPERTS)
        report.add(hits | {"what": "resident"})
        for what, nodes in (("doorbell", False), ("host node", True)):
            moepool.set_doorbell(host_nodes=nodes)
            try:
                row = _row(gpu, layer, k, layers, seconds, slots=0)
            finally:
                moepool.set_doorbell()
            report.add(row | {"what": what, "more_us": row["us"] - hits["us"]})
    for row in means():
        report.add(row)


def _row(gpu: Gpu, layer: moepool.Layer, k: int, layers: int, seconds: float, *, slots: int) -> Row:
    trace = random_trace(STEPS, layers, 1, k, EXPERTS)
    hidden = layer.matrices["gate"].columns
    x, weights = cases.activations("plain", 1, hidden, "doorbell"), cases.router_weights(1, k)
    with quiet():
        pools = [moepool.Pool(layer, slots, device="cuda:0", miss="host") for _ in range(layers)]
        if slots:
            for pool in pools:
                pool.resolve(np.arange(EXPERTS)[None], phase="decode").release()
        replay = Replay(gpu, pools, trace, x, weights)
        replay.check(f"{slots} slots")
        replay.warm_up()
        timing, router = replay.time(seconds)
    for pool in pools:
        pool.close()
    return timing.row() | {"hidden": hidden, "k": k, "router_us": router.median}


def means() -> list[Row]:
    """What doorbell.cu prints, if there is a compiler."""
    given = os.environ.get("MOEPOOL_BENCH_DOORBELL")  # built elsewhere
    compiler = shutil.which(os.environ.get("CUDACXX") or "nvcc")
    if not given and compiler is None:
        click.echo("no nvcc: the means of CUDA alone are not measured")
        return []
    with tempfile.TemporaryDirectory() as folder:
        program = given or str(Path(folder) / "doorbell")
        if not given:
            command = [
                compiler,
                "-O3",
                "-std=c++17",
                "-arch=native",
                "-cudart",
                "static",
                SOURCE,
                "-o",
                program,
            ]
            subprocess.run([str(part) for part in command], check=True)
        printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    rows: list[Row] = []
    for line in printed.splitlines():
        name, _, numbers = line.partition(": ")
        try:
            median, low, high = map(float, numbers.split())
        except ValueError:
            click.echo(f"{name}: {numbers}")
            continue
        row: Row = {"what": f"CUDA: {name}", "us": median, "low_us": low, "high_us": high}
        if rows:
            row["more_us"] = median - rows[0]["us"]
        rows.append(row)
    return rows
