"""The channel between a device and the CPU, with a thread in the device's place: tests/native/doorbell.cpp,
built with the thread and the address sanitizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepool
from moepool._native import handles
from tests.programs import run

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "tests" / "native"
SOURCES = (
    ROOT / "csrc" / "pool" / "doorbell.cpp",
    ROOT / "csrc" / "cpu" / "threads.cpp",
    ROOT / "csrc" / "error.cpp",
)
CASES = (
    "a_compute_that_throws",
    "by_host_calls",
    "epochs",
    "exit_while_late",
    "exit_while_open",
    "forks",
    "killed",
    "late_answer",
    "many_channels",
    "pauses_and_wrap",
    "refused_memory",
    "silence",
    "time_out",
    "times",
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("doorbell") / "doorbell"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    includes = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
    sources = (NATIVE / "doorbell.cpp", *SOURCES)
    run("g++", *flags, f"-fsanitize={request.param}", *includes, *sources, "-o", target)
    return target


@pytest.mark.parametrize("case", CASES)
def test_channel(program: Path, case: str, request: pytest.FixtureRequest) -> None:
    if case == "forks" and "thread" in request.node.name:
        pytest.skip("the thread sanitizer allows no threads in a forked child")
    assert run(program, case) == "ok\n"


@pytest.mark.skipif("MOEPOOL_SOAK" not in os.environ, reason="takes minutes: set MOEPOOL_SOAK=100000")
@pytest.mark.timeout(3600)
def test_soak(program: Path) -> None:
    assert run(program, "soak", int(os.environ["MOEPOOL_SOAK"])) == "ok\n"


def test_every_case_is_run(program: Path) -> None:
    assert tuple(run(program).split()) == CASES


def test_division(tmp_path: Path) -> None:
    """How misses are divided, and when slots are given up: no device has a part in it."""
    target = tmp_path / "division"
    includes = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    run("g++", *flags, *includes, NATIVE / "division.cpp", *SOURCES, "-o", target)
    assert run(target) == "ok\n"


def test_settings() -> None:
    before = handles.get_doorbell()
    try:
        moepool.set_doorbell(timeout=0.25, host_nodes=True)
        assert handles.get_doorbell() == before | {"timeout_us": 250_000, "host_nodes": 1}
        moepool.set_doorbell()
        assert handles.get_doorbell() == before | {"timeout_us": 1_000_000, "host_nodes": -1}
        wrong: Any
        for wrong in (0, -1, True, "1", float("nan"), 1e9):
            with pytest.raises(moepool.ArgumentError, match="timeout"):
                moepool.set_doorbell(timeout=wrong)
        wrong = 1
        with pytest.raises(moepool.ArgumentError, match="host_nodes"):
            moepool.set_doorbell(host_nodes=wrong)
        with pytest.raises(moepool.ArgumentError):
            handles.set_doorbell(period=0)
        assert handles.get_doorbell()["timeout_us"] == 1_000_000
    finally:
        handles.set_doorbell(**before)


def test_auto_admits_by_worth_unless_told_otherwise() -> None:
    weight = np.zeros((8, 32, 64), np.float32)
    layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0]
    with (
        moepool.Pool(layer, 4, miss="auto") as pool,
        moepool.Pool(layer, 4, miss="auto", policy="lru") as lru,
    ):
        assert pool.policy == moepool.Policy("lfu", guard=True, half_life=1024)
        assert lru.policy == moepool.Policy("lru")
    with moepool.Pool(layer, 4, miss="host") as pool:
        assert pool.policy == moepool.Policy("lru")
