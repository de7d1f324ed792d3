"""The channel between a device and the CPU, with a thread in the device's place: tests/native/doorbell.cpp,
built with the thread and the address sanitizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.programs import run

ROOT = Path(__file__).parents[1]
SOURCES = (
    ROOT / "tests" / "native" / "doorbell.cpp",
    ROOT / "csrc" / "pool" / "doorbell.cpp",
    ROOT / "csrc" / "error.cpp",
)
CASES = (
    "a_compute_that_throws",
    "by_host_calls",
    "epochs",
    "exit_while_open",
    "forks",
    "killed",
    "late_answer",
    "many_channels",
    "pace",
    "pauses_and_wrap",
    "refused_memory",
    "time_out",
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("doorbell") / "doorbell"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    includes = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
    run("g++", *flags, f"-fsanitize={request.param}", *includes, *SOURCES, "-o", target)
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
    source = ROOT / "tests" / "native" / "division.cpp"
    run(
        "g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", *includes, source,
        "-o", target,
    )  # fmt: skip
    assert run(target) == "ok\n"
