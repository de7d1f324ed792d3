"""Layers on the CPU beside ggml's, in one process and by turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import click
import numpy as np

import moepool
from bench.cpu import read_rate, read_size
from bench.ggml import Ggml, NotSupported, Step, Weights
from bench.measure import Column, Report, Row, Timing, check_same, gigabytes_a_second
from bench.workload import F32, I32, Shape, distinct, layers_of, portable, random_trace

STEPS = 16
BLOCK_SECONDS = 0.1  # of one side, then it is the other's turn
REST_SECONDS = 0.02  # in which the threads of the other side stop spinning
LEAST_ROUNDS = 5
# Of the CPU time of all threads. One that is interrupted holds up the others of ggml, which spin meanwhile.
UNDISTURBED = 0.95

# Both quantise activations to 8 bits, in blocks of other sizes, whose errors the three products double or so.
# One place of eight that is lost is 0.3.
TOLERANCE = 0.1

COLUMNS = (
    Column("type", "type"),
    Column("tokens", "T", "d", 4),
    Column("plain_us", "ggml", ",.0f", 10),
    Column("repacked_us", "repacked", ",.0f", 10),
    Column("us", "moepool", ",.0f", 10),
    Column("spread", "p10-p90", "", 19),
    Column("times", "times", ".2f"),
    Column("times_spread", "p10-p90", "", 13),
    Column("megabytes", "MB", ".1f"),
    Column("rate", "GB/s", ".1f"),
    Column("ratio", "ratio", ".2f", 7),
    Column("had", "CPU", ".0%", 7),
    Column("differs", "differs", ".2%"),
)

OneStep = Callable[[I32], float]  # ids of all layers; microseconds


def peer(
    report: Report,
    ggml: Ggml,
    types: Sequence[str],
    tokens: Sequence[int],
    layers: int,
    shape: Shape,
    seconds: float,
    patience: float,
) -> None:
    """Measures each type with each number of tokens, the layers in turn, on moepool's number of threads."""
    threads = moepool.get_threads()
    ggml.set_threads(threads)
    report.content["ggml"] = {"version": ggml.version, "features": ggml.features()}
    click.echo(f"ggml {ggml.version}: {ggml.features()}")
    size = read_size()
    ceiling = steady_read_rate(threads, size, patience)
    how = f"numpy.max of {size / 2**30:.1f} GiB on {threads} threads, each its own array, the best of 8"
    report.ceiling("host memory", ceiling, how)
    report.header()
    for qtype in types:
        ffn = shape.ffn(qtype)
        blocks = ffn.weights()
        with ExitStack() as stack:
            pools = [stack.enter_context(moepool.Pool(layer, 0)) for layer in layers_of(ffn, layers, blocks)]
            theirs = {}
            for name in ggml.buffer_types:
                try:
                    weights = Weights(ggml, ffn, blocks, layers, name)
                except NotSupported:
                    continue
                theirs[name] = stack.enter_context(closing(weights))
            for count in tokens:
                trace = random_trace(STEPS, layers, count, shape.k, shape.experts)
                measured = measure(pools, theirs, trace, ffn.x(count), ffn.router(count), seconds, patience)
                megabytes = distinct(trace) * pools[0].layer.record_bytes / 1e6
                rate = gigabytes_a_second(megabytes * 1e6, measured["us"])
                report.add(
                    measured
                    | {
                        "type": qtype,
                        "tokens": count,
                        "megabytes": megabytes,
                        "rate": rate,
                        "ratio": rate / ceiling,
                    }
                )


def measure(
    pools: Sequence[moepool.Pool],
    theirs: Mapping[str, Weights],
    trace: I32,
    x: F32,
    router: F32,
    seconds: float,
    patience: float,
) -> Row:
    """Checks one step of everybody, then times them: what a row says of it, times as microseconds a layer."""
    layers = len(pools)
    ffns = [moepool.ExpertFFN(pool) for pool in pools]
    out = np.empty_like(x)

    def ours(ids: I32) -> float:
        return microseconds(lambda: [ffn(x, i, router, out=out) for ffn, i in zip(ffns, ids, strict=True)])

    sides: dict[str, OneStep] = {"moepool": ours}
    right = portable(pools[0].layer, x, trace[0, 0], router)
    check_same(ffns[0](x, trace[0, 0], router), right, f"{pools[0]}, {len(x)} tokens")
    with ExitStack() as stack:
        differs = 0.0
        for name, weights in theirs.items():
            step = stack.enter_context(closing(Step(weights, len(x))))
            step.set_activations(x, router)
            sides[name] = _timed(step)
            sides[name](trace[0])
            differs = max(differs, difference(step.result(0), right, f"ggml, weights in {name}"))
        rounds = by_turns(sides, trace, seconds, patience)
    whole = {name: Timing.of([us for r in rounds for us in r.blocks[name]]).over(layers) for name in sides}
    plain, *repacked = (whole[name].median for name in theirs)
    quickest = min(theirs, key=lambda name: whole[name].median)
    times = Timing.of([float(np.median(r.blocks[quickest]) / np.median(r.blocks["moepool"])) for r in rounds])
    row: Row = dict(whole["moepool"].row())
    row |= {"plain_us": plain, "quickest": quickest, "differs": differs, "rounds": times.samples}
    row["had"] = float(np.mean([r.had for r in rounds]))
    row |= {"times": times.median, "times_spread": f"{times.low:.2f}-{times.high:.2f}"}
    return row | ({"repacked_us": min(repacked)} if repacked else {})


def microseconds(call: Callable[[], object]) -> float:
    """What a call takes by the clock; with one thread by its CPU time, which others disturb less."""
    clock = time.process_time if moepool.get_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return (clock() - start) * 1e6


def _timed(step: Step) -> OneStep:
    def one_step(ids: I32) -> float:
        step.set_ids(ids)
        return microseconds(step.compute)

    return one_step


def difference(actual: F32, right: F32, what: str) -> float:
    """Relative, of the whole array; ends the program if it is no rounding error."""
    difference = float(np.linalg.norm(actual - right) / np.linalg.norm(right))
    if not difference <= TOLERANCE:
        raise click.ClickException(f"{what}: outputs differ by {difference:.2%} from moepool's")
    return difference


@dataclass(frozen=True)
class Round:
    """Microseconds of the steps that each took in turn, and the share of all threads' time that they ran."""

    blocks: dict[str, list[float]]
    had: float


def by_turns(sides: Mapping[str, OneStep], trace: I32, seconds: float, patience: float) -> list[Round]:
    """Times of steps, in blocks: everybody's block of a round, again and again, all over the same steps.

    While others disturb the machine it waits and goes on, for up to `patience` seconds more, until enough
    rounds were undisturbed; then these alone count. CPU time, of one thread, always does. The first step of a
    block, in which threads wake up, never does.
    """
    least = UNDISTURBED if moepool.get_threads() > 1 else 0.0
    steps = dict.fromkeys(sides, 1)
    rounds: list[Round] = []
    quiet: list[Round] = []
    begun = time.perf_counter()
    if least:
        wait_for_idle(patience)
    for first in cycle(range(len(trace))):
        blocks: dict[str, list[float]] = {}
        wanted = had = 0.0
        for name, step in sides.items():
            time.sleep(REST_SECONDS)
            step(trace[first - 1])
            start, ours = time.perf_counter(), time.process_time()
            blocks[name] = [step(trace[(first + i) % len(trace)]) for i in range(steps[name])]
            had += time.process_time() - ours
            wanted += (time.perf_counter() - start) * moepool.get_threads()
            steps[name] = int(np.clip(BLOCK_SECONDS * 1e6 / np.median(blocks[name]), 1, 2 * len(trace)))
        rounds.append(Round(blocks, had / wanted))
        quiet = [r for r in rounds if r.had > least]
        past = time.perf_counter() - begun
        if past >= seconds and len(quiet) >= LEAST_ROUNDS:
            return quiet
        if past >= seconds + patience and len(rounds) >= LEAST_ROUNDS:
            break
        if rounds[-1].had <= least:
            wait_for_idle(seconds + patience - past)
    return rounds


def wait_for_idle(most: float) -> None:
    """Waits until the machine had nothing to do for half a second, at most so many seconds."""
    end = time.perf_counter() + most
    before = idle_seconds()
    while time.perf_counter() < end:
        time.sleep(0.5)
        now = idle_seconds()
        if now - before > 0.45 * (os.cpu_count() or 1):
            return
        before = now


def idle_seconds() -> float:
    """Of all CPUs of the machine, since it was started."""
    fields = Path("/proc/stat").read_text().split(maxsplit=6)
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def steady_read_rate(threads: int, size: int, patience: float) -> float:
    """The rate at which memory is read: measured until the best was seen twice, or time is up."""
    if threads == 1:
        data = np.ones(size // 8)
        return gigabytes_a_second(data.nbytes, min(microseconds(lambda: np.max(data)) for _ in range(8)))
    best = 0.0
    end = time.perf_counter() + patience
    while True:
        rate = read_rate(threads, size)
        if 0.95 * best < rate < 1.05 * best or time.perf_counter() >= end:
            return max(best, rate)
        best = max(best, rate)
