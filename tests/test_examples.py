"""The programs of docs/examples, on a GPU where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moepool
from tests.programs import run
from tests.support import cuda_missing

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
PACKAGE = Path(moepool.__file__).parent


@pytest.mark.parametrize("compiler", ["cc", "nvcc"])
def test_ffn_in_c(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    program = tmp_path / "ffn"
    options = ["-DCPU_ONLY", "-std=c99", "-Wall", "-Wextra", "-Werror", f"-Wl,-rpath,{PACKAGE / 'lib'}"]
    if compiler == "nvcc":
        options = ["-Xlinker", f"-rpath,{PACKAGE / 'lib'}"]
    link = [f"-I{moepool.get_include()}", f"-L{PACKAGE / 'lib'}", "-lmoepool"]
    run(compiler, EXAMPLES / "ffn.c", "-o", program, *options, *link)
    printed = run(program)
    assert printed.endswith("same bytes: yes\n")
    assert "device -1: 4 slots, " in printed
    if compiler == "nvcc":
        assert ("device 0: 4 slots, " in printed) == (cuda_missing() is None)


def test_torch_ffn() -> None:
    torch = pytest.importorskip("torch")
    printed = run(sys.executable, EXAMPLES / "torch_ffn.py")
    assert printed.startswith("cpu: (4, 256) PoolStats(steps=1, ")
    if torch.cuda.is_available() and cuda_missing() is None:
        assert "cuda:0: (4, 256) PoolStats(steps=1, " in printed
        assert float(printed.rpartition(": ")[2]) < 1e-3


@pytest.mark.cuda
def test_cuda_graph() -> None:
    described, counted, same = run(sys.executable, EXAMPLES / "cuda_graph.py").splitlines()
    assert described.startswith("device: ")
    assert re.fullmatch(r"3000 steps, [1-9]\d*% hits, \d+ step-backs", counted), counted
    assert same == "same bytes: yes"


def test_cuda_graph_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "cuda_graph.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("this program needs a GPU, and moepool can use none: .+\n", done.stderr)


def test_policy() -> None:
    printed = run(sys.executable, EXAMPLES / "policy.py")
    assert "same logits: yes\n" in printed
    assert "hits as planned: yes\n" in printed
    last = printed.splitlines()[-1]
    counted = re.fullmatch(r"Clock, run: (\d+) hits; simulated: (\d+)", last)
    assert counted is not None, last
    assert int(counted[1]) == int(counted[2]) > 0
