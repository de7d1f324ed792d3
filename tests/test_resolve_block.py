"""The step that a GPU takes by itself, on a machine without one.

tests/native/resolve_block.cpp runs the device's code on the host, a thread block as fibers that change at
every barrier in another order each time, beside the host's residency law.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.programs import compile_for_host, run

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "tests" / "native"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_device_takes_the_steps_of_the_law(tmp_path: Path) -> None:
    program = tmp_path / "resolve_block"
    compile_for_host(program, NATIVE / "resolve_block.cpp", ROOT / "csrc" / "pool" / "residency.cpp")
    told = run(program, 0, 120)
    counts = {name.strip(): int(count) for count, name in re.findall(r"(\d+) ([a-z ]+)", told)}
    assert counts["steps"] == 120 * 60
    # The traces meet what the law is about.
    assert all(count >= 30 for count in counts.values()), counts
