"""Misses in a CUDA graph: the rate at which records come over the link, beside the copy engine's."""

from __future__ import annotations

from collections.abc import Sequence

import moepool
from bench.gpu import Gpu, Replay
from bench.measure import SPREAD, Column, Report, gigabytes_a_second
from bench.workload import Shape, layers_of, quiet, ring_trace

CALLS = 8  # of the pool in a graph
K = 8
HIDDEN = 2048

# Widths and experts: records of 0.9, 2.6 and 16 MB in Q4_K.
LAYERS = ((256, 128), (768, 64), (4608, 32))

COLUMNS = (
    Column("type", "type"),
    Column("tokens", "T", "d", 4),
    Column("record_megabytes", "record MB", ".2f", 11),
    Column("misses", "misses", "", 18),
    Column("us", "us", ",.1f", 10),
    SPREAD,
    Column("rate", "GB/s", ".1f"),
    Column("copy_engine", "copy engine", ".1f", 13),
    Column("ratio", "ratio", ".2f", 7),
)


def stream(report: Report, gpu: Gpu, types: Sequence[str], tokens: Sequence[int], seconds: float) -> None:
    """Measures steps that want 8 experts, none of them resident: into slots on the way, and without any."""
    report.header()
    for qtype in types:
        for width, experts in LAYERS:
            ffn = Shape(HIDDEN, width, experts, K).ffn(qtype)
            (layer,) = layers_of(ffn, 1)
            ceiling = gpu.copy_rate(layer.record_bytes)
            for count in tokens:
                for slots, how in ((K, "into slots"), (0, "in place")):
                    with quiet(), moepool.Pool(layer, slots, device="cuda:0") as pool:
                        trace = ring_trace(CALLS, count, K, experts)
                        replay = Replay(gpu, [pool] * CALLS, trace, ffn.x(count), ffn.router(count))
                        replay.check(f"{qtype}, width {width}, {how}")
                        replay.warm_up()
                        before = pool.stats()
                        timing, _ = replay.time(seconds)
                        after = pool.stats()
                    assert after.hits == before.hits, "a ring of more experts than slots has no hits"
                    rate = gigabytes_a_second(K * layer.record_bytes, timing.median)
                    report.add(
                        timing.row()
                        | {
                            "type": qtype,
                            "tokens": count,
                            "record_megabytes": layer.record_bytes / 1e6,
                            "misses": f"8, {how}",
                            "rate": rate,
                            "copy_engine": ceiling,
                            "ratio": rate / ceiling,
                        }
                    )
