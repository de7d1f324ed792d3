"""How decode kernels divide their blocks, for GPUs that are not at hand: tests/native/decode_config.cpp."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.programs import compile_for_host, run

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "tests" / "native"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_usual_layers_fit_every_device(tmp_path: Path) -> None:
    program = tmp_path / "decode_config"
    compile_for_host(program, NATIVE / "decode_config.cpp")
    assert run(program) == "110 layers\n"
