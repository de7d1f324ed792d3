"""The measurements: their options, traces and reports, and a small one on the CPU. No time is asserted."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import moepool
from bench import cpu, measure, peer, workload
from bench.run import main
from tests.programs import run as run_program
from tests.support import cuda_missing, usable_kernels

RUN = Path(__file__).parents[1] / "bench" / "run.py"
SMALL = ["--shape", "256,256,8,2", "--layers", "2", "--seconds", "0"]


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def test_it_starts_as_a_program_from_anywhere(tmp_path: Path) -> None:
    printed = run_program(sys.executable, RUN, "--help", cwd=tmp_path)
    for mode in ("decode", "resolve", "stream", "hybrid", "doorbell", "cpu", "peer"):
        assert mode in printed
        assert "--json" in run(mode, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--types", "q4_k,q9"], "'q9' is not one of"),
        (["decode", "--types", "iq1_s"], "'iq1_s' is not one of"),
        (["cpu", "--kernels", "sse"], "'sse' is not one of"),
        (["cpu", "--tokens", "1,0"], "0 is not in the range"),
        (["cpu", "--tokens", "one"], "'one' is not a valid integer"),
        (["peer", "--threads", "0"], "0 is not in the range"),
        (["peer", "--libraries", "/nowhere"], "'/nowhere' does not exist"),
        (["decode", "--tokens", "17"], "17 is not in the range"),
        (["decode", "--hits", "1.5"], "1.5 is not in the range"),
        (["cpu", "--shape", "256,256,8"], "the first two must be multiples of 256"),
        (["cpu", "--shape", "256,255,8,2"], "the first two must be multiples of 256"),
        (["cpu", "--shape", "256,256,8,9"], "K at most EXPERTS"),
    ],
)
def test_options_that_are_refused(arguments: list[str], message: str) -> None:
    assert message in " ".join(run(*arguments, code=2).output.split())


@pytest.mark.skipif(cuda_missing() is None, reason="there is a GPU")
@pytest.mark.parametrize("mode", ["decode", "resolve", "stream", "hybrid", "doorbell"])
def test_a_bench_that_needs_a_gpu_says_so(mode: str) -> None:
    told = run(mode, code=1).stderr
    assert told.startswith(f"Error: the bench {mode} needs ")
    assert "use device cpu" not in told


def test_a_small_measurement_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "READ_BYTES", 1 << 20)
    path = tmp_path / "report.json"
    printed = run("cpu", "--types", "q4_k,q8_0", "--tokens", "1,3", *SMALL, "--json", path).stdout
    assert "host memory: " in printed
    assert [line.split()[:2] for line in printed.splitlines()[-4:]] == [
        [qtype, tokens] for qtype in ("q4_k", "q8_0") for tokens in ("1", "3")
    ]
    report = json.loads(path.read_text())
    assert report["bench"] == "cpu" and report["machine"]["moepool"] == moepool.__version__
    assert report["ceilings"]["host memory"] > 0 and len(report["rows"]) == 4
    record = 3 * 256 * 256 // 256 * 144  # of q4_k, without padding
    for row in report["rows"][:2]:
        assert 1.5 <= row["megabytes"] * 1e6 / record <= row["tokens"] * 2 + 0.5
        assert row["low_us"] <= row["us"] <= row["high_us"] and row["samples"] >= 4
        assert row["rate"] == pytest.approx(row["megabytes"] / row["us"] * 1e3)


def test_kernel_sets_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "READ_BYTES", 1 << 20)
    kernels = ["portable", usable_kernels()[-1]]
    printed = run("cpu", "--types", "f16", "--tokens", "2", "--kernels", ",".join(kernels), *SMALL).stdout
    assert [line.split()[:3] for line in printed.splitlines()[-2:]] == [["f16", "2", k] for k in kernels]


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "READ_BYTES", 1 << 20)
    real = workload.portable

    def nearly(*arguments: object) -> workload.F32:
        right = real(*arguments)  # type: ignore[arg-type]
        right[0, 7] = np.nextafter(right[0, 7], np.float32(0))
        return right

    monkeypatch.setattr(cpu, "portable", nearly)
    result = run("cpu", "--types", "q4_k", "--tokens", "1", *SMALL, code=1)
    assert "1 of 256 outputs differ from the portable kernel's" in result.output


def test_ggml_has_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "package llama-cpp-python: pip install llama-cpp-python" in run("peer", code=1).output
    printed = run("peer", "--libraries", tmp_path, code=1).output
    assert f"no usable ggml in {tmp_path}: " in printed and "pip install llama-cpp-python" in printed


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("k", [1, 2])
def test_a_small_measurement_beside_ggml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(peer, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(peer, "BLOCK_SECONDS", 0.001)
    path = tmp_path / "report.json"
    before = moepool.get_threads()
    threads = 2 if before == 1 else 1
    small = ["--shape", f"256,256,8,{k}", "--layers", "2", "--seconds", "0", "--patience", "0"]
    small += ["--threads", str(threads)]
    run("peer", "--types", "q4_k,q8_0", "--tokens", "1,9", *small, "--json", path)
    assert moepool.get_threads() == before
    report = json.loads(path.read_text())
    assert report["machine"]["threads"] == threads and report["ggml"]["version"]
    assert [(row["type"], row["tokens"]) for row in report["rows"]] == [
        (qtype, tokens) for qtype in ("q4_k", "q8_0") for tokens in (1, 9)
    ]
    for row in report["rows"]:
        assert row["rounds"] >= peer.LEAST_ROUNDS and row["plain_us"] > 0 and row["us"] > 0
        assert 0 < row["differs"] < peer.TOLERANCE


def test_another_result_than_ggmls_is_not_timed() -> None:
    right = np.random.default_rng(0).standard_normal((3, 256), np.float32)
    assert peer.difference(right * np.float32(1.01), right, "") == pytest.approx(0.01, rel=1e-3)
    lost = right.copy()
    lost[1] = 0
    for wrong in (lost, right[::-1], np.full_like(right, np.nan)):
        with pytest.raises(click.ClickException, match="CPU: outputs differ by .*% from moepool's"):
            peer.difference(wrong, right, "ggml, weights in CPU")


class Clocks:
    """Two threads that compute for as long as a step takes, of which they have a share of the CPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = self.idle = 0.0
        self.others = 0
        monkeypatch.setattr(moepool, "get_threads", lambda: 2)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        monkeypatch.setattr(peer, "idle_seconds", lambda: self.idle)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.idle += (2 - self.others) * seconds

    def compute(self, seconds: float, share: float = 1) -> None:
        self.now += seconds
        self.cpu += 2 * seconds * share


def test_everybody_takes_the_same_steps_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    trace = workload.random_trace(6, 2, 1, 2, 8)
    number = {ids.tobytes(): i for i, ids in enumerate(trace)}
    taken: list[tuple[str, int]] = []

    def side(name: str, us: float) -> peer.OneStep:
        def step(ids: workload.I32) -> float:
            taken.append((name, number[ids.tobytes()]))
            clocks.compute(us / 1e6)
            return us

        return step

    block = peer.BLOCK_SECONDS * 1e6
    quick, slow = block / 3, 2 * block
    rounds = peer.by_turns({"quick": side("quick", quick), "slow": side("slow", slow)}, trace, 0, 0)
    assert [r.had for r in rounds] == [pytest.approx(1)] * 5
    assert rounds[0].blocks == {"quick": [quick], "slow": [slow]}
    assert [r.blocks for r in rounds[1:]] == [{"quick": [quick] * 3, "slow": [slow]}] * 4
    assert taken[:4] == [
        ("quick", 5),
        ("quick", 0),
        ("slow", 5),
        ("slow", 0),
    ]  # the first step does not count
    assert taken[4:8] == [("quick", 0), ("quick", 1), ("quick", 2), ("quick", 3)]
    assert taken[8:10] == [("slow", 0), ("slow", 1)]


@pytest.mark.parametrize(
    ("shares", "patience", "count"),
    [
        ([1, 0.8, 0.98, 0.5, 1, 1, 1], 100, 5),  # the disturbed ones do not count
        ([0.8] * 50, 100, 40),  # they never end: all do
        ([0.8] * 5, 0, 5),
    ],
)
def test_disturbed_rounds_are_waited_out(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], patience: float, count: int
) -> None:
    clocks = Clocks(monkeypatch)
    left = iter(np.repeat(shares, 2).tolist())  # a step that does not count, and one that does

    def step(ids: workload.I32) -> float:
        clocks.compute(1, next(left))
        return 1e6

    rounds = peer.by_turns({"one": step}, workload.random_trace(6, 2, 1, 2, 8), 0, patience)
    assert len(rounds) == count
    assert {r.had > peer.UNDISTURBED for r in rounds} == {len(shares) == 7}


def test_one_thread_is_timed_by_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    assert peer.microseconds(lambda: clocks.compute(1e-6, 0.25)) == pytest.approx(1)
    monkeypatch.setattr(moepool, "get_threads", lambda: 1)
    clocks.others = 2  # nobody waits for them

    def step(ids: workload.I32) -> float:
        return peer.microseconds(lambda: clocks.compute(1e-6, 0.25))

    rounds = peer.by_turns({"one": step}, workload.random_trace(6, 2, 1, 2, 8), 0, 100)
    assert len(rounds) == peer.LEAST_ROUNDS and clocks.now < 1
    assert rounds[0].blocks == {"one": [pytest.approx(0.5)]}


def test_an_idle_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    peer.wait_for_idle(100)
    assert clocks.now == 0.5
    clocks.others = 1
    peer.wait_for_idle(100)
    assert clocks.now == 100.5
    peer.wait_for_idle(0)
    assert clocks.now == 100.5


def test_reading_memory_is_measured_until_nobody_disturbs(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([7.0, 9.0, 8.0, 9.1, 10.0])
    monkeypatch.setattr(peer, "read_rate", lambda threads, size: next(rates))
    assert peer.steady_read_rate(2, 1, 100) == 9.1
    assert peer.steady_read_rate(2, 1, 0) == 10
    assert 0.1 < peer.steady_read_rate(1, 1 << 24, 0) < 1000  # by CPU time, which read_rate does not tell


def test_medians_and_spreads() -> None:
    values = iter(float(i) for i in range(1, 12))
    timing = measure.repeated(lambda: next(values), seconds=0, least=11)
    assert (timing.low, timing.median, timing.high, timing.samples) == (2, 6, 10, 11)
    assert timing.over(2).row() == {"us": 3.0, "low_us": 1.0, "high_us": 5.0, "samples": 11}
    assert measure.gigabytes_a_second(4640e3, 1.0) == 4640


def test_samples_by_turns() -> None:
    order: list[str] = []

    def sample(name: str) -> float:
        order.append(name)
        return float(len(order))

    timings = measure.by_turns([lambda: sample("a"), lambda: sample("b")], seconds=0, least=3)
    assert "".join(order) == "ababab"
    assert [(timing.median, timing.samples) for timing in timings] == [(3, 3), (4, 3)]


# ----------------------------------------------------------------------------------------------------- traces


def test_random_traces_name_distinct_experts() -> None:
    trace = workload.random_trace(5, 3, 2, 4, 16)
    assert trace.shape == (5, 3, 2, 4) and trace.dtype == np.int32
    assert all(len(set(token)) == 4 for token in trace.reshape(-1, 4).tolist())
    assert trace.min() >= 0 and trace.max() < 16
    assert 4 < workload.distinct(trace) <= 8
    assert (trace == workload.random_trace(5, 3, 2, 4, 16)).all()


def replayed(trace: workload.I32, experts: int, slots: int) -> list[tuple[int, int]]:
    """Hits and misses of every step of a trace's first layer, the second time round."""
    counts: list[tuple[int, int]] = []
    with workload.quiet(), moepool.Pool(workload.law_layer(experts), slots) as pool:
        for _ in range(2):
            counts = []
            for ids in trace[:, 0]:
                with pool.resolve(ids, phase="decode") as route:
                    assert not route.bypass
                    counts.append((route.hits, route.misses))
    return counts


@pytest.mark.parametrize(("experts", "slots", "k"), [(128, 64, 8), (512, 128, 10)])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_so_many_experts_are_missing_in_every_step(tokens: int, experts: int, slots: int, k: int) -> None:
    trace = workload.missing_trace(2, tokens, k, experts, slots, 3)
    assert trace is not None and trace.shape[1:] == (2, tokens, k)
    counts = replayed(trace, experts, slots)
    assert {misses for _, misses in counts} == {3 * tokens}
    if tokens == 1:
        assert {hits for hits, _ in counts} == {k - 3}


def test_too_few_slots_for_missing_experts() -> None:
    assert workload.missing_trace(2, 16, 8, 128, 64, 3) is None


def test_a_ring_of_experts_is_never_resident() -> None:
    trace = workload.ring_trace(3, 2, 8, 32)
    assert trace.shape == (4, 3, 2, 8)
    steps = trace.reshape(-1, 1, 2, 8)  # the layers are calls of one pool
    assert set(replayed(steps, 32, 8)) == {(0, 8)}


def test_slots_are_chosen_for_a_hit_rate() -> None:
    trace = workload.random_trace(32, 1, 1, 4, 32)
    for rate in (0.9, 0.5):
        slots = workload.slots_for(trace, 32, rate)
        hits, misses = np.sum(replayed(trace, 32, slots), axis=0)
        assert abs(hits / (hits + misses) - rate) < 0.08
    assert workload.hit_rate(trace, 32, 32) == 1
