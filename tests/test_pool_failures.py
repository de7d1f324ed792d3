"""A pool on a device whose copies and allocations fail now and then, on a machine without one:
tests/native/pool.cpp puts a device that is none under the core's pool."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.programs import run

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "tests" / "native"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_no_failure_leaves_a_wrong_map(tmp_path: Path) -> None:
    program = tmp_path / "pool"
    flags = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{folder}" for folder in (ROOT / "csrc", ROOT / "include")]
    names = ("pool/pool", "pool/residency", "pool/route", "pool/state", "store/store", "store/pack")
    names += ("store/pages", "quant/types", "error", "cpu/threads")
    sources = [NATIVE / "pool.cpp", *(ROOT / "csrc" / f"{name}.cpp" for name in names)]
    run("g++", *flags, *includes, *sources, "-o", program)
    told = run(program, 0, 400)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", told)}
    assert set(counts) == {"fill", "publish", "load", "trace", "take_trace", "settle", "resize"}
    assert all(count >= 20 for count in counts.values()), counts
