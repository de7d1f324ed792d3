"""What the commands say of devices, by stand-ins for the answers of CUDA, and the runner on a GPU."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import moepool
from moepool._native import handles
from moepool.cli import main
from moepool.errors import ArgumentError, UnsupportedError
from moepool.runner import Checkpoint, Placement, bundled_model, devices

GIB = 1 << 30
PROMPT = ["-p", "import os\n\n\ndef ", "-n", "12", "--ignore-eos"]


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json", "-").stdout)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards, of which the first is too old for the build."""

    def device(index: int) -> handles.DeviceInfo:
        if index == 0:
            raise UnsupportedError("CUDA device 0 (Fake GT 1) has no kernel in this build")
        return handles.DeviceInfo("Fake GPU", "0000:02:00.0", "GPU-2", (9, 0), 80 * GIB, 60 * GIB)

    monkeypatch.setattr(handles, "cuda_devices", lambda: 2)
    monkeypatch.setattr(handles, "cuda_device", device)
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.usefixtures("cards")
def test_the_doctor_names_cards_that_can_and_that_cannot_be_used() -> None:
    assert list(devices.available_devices()) == ["cpu", "cuda:1"]
    printed = run("doctor").stdout
    row = next(line for line in printed.splitlines() if line.startswith("cuda:1"))
    assert row.split()[1:6] == ["Fake", "GPU", "9.0", "80.0", "60.0"] and "CUDA (NVML: " in row
    assert "cuda:0 cannot be used: CUDA device 0 (Fake GT 1) has no kernel in this build" in printed
    assert "Page-locked: no limit" in printed
    moepool.set_pinned_limit(1 << 30)
    try:
        assert "Page-locked: at most 1,073,741,824 bytes" in run("doctor").stdout
        report = run_json("doctor")
    finally:
        moepool.set_pinned_limit(None)
    assert report["pinned_limit"] == 1 << 30
    assert report["devices"]["cuda:1"]["free"] == 60 * GIB and "cuda:0" not in report["devices"]
    assert report["cuda"]["cuda:1"]["card"] == "Fake GPU" and report["cuda"]["cuda:1"]["problem"] == ""
    assert "no kernel" in report["cuda"]["cuda:0"]["problem"]


@pytest.mark.parametrize("reason", ["there is no NVIDIA driver", "the NVIDIA driver supports CUDA 11.4"])
def test_without_a_usable_driver_the_commands_say_why_and_go_on(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise UnsupportedError(reason)

    monkeypatch.setattr(handles, "cuda_devices", fail)
    monkeypatch.setattr(handles, "cuda_device", fail)
    assert list(devices.available_devices()) == ["cpu"]
    assert f"no GPU, everything runs on the CPU: {reason}" in run("doctor").stdout
    result = run("demo", "-n", "2")
    assert f"no CUDA rows: {reason}" in result.stderr
    assert result.stdout.endswith("same bytes: yes (8 placements)\n")


def test_the_dense_parts_have_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda index: SimpleNamespace(use=lambda: used.append(index)))
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(handles, "cuda_devices", lambda: 4)
    assert devices.dense_module("numpy", "cuda:0") is np
    assert devices.dense_module("cupy", "cuda:3") is cupy
    assert devices.dense_module("cupy", "cuda") is cupy
    assert used == [3, 0]
    with pytest.raises(ArgumentError, match="--dense cupy computes on a CUDA device, not on cpu"):
        devices.dense_module("cupy", "cpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match="pip install cupy-cuda13x"):
        devices.dense_module("cupy", "cuda:0")

    def fail() -> Any:
        raise UnsupportedError("there is no NVIDIA driver")

    monkeypatch.setattr(handles, "cuda_devices", fail)
    with pytest.raises(UnsupportedError, match="no NVIDIA driver"):
        devices.dense_module("cupy", "cuda:0")


@pytest.mark.cuda
def test_generation_on_the_gpu_has_the_bytes_of_the_cpu() -> None:
    on_cpu = run_json("generate", "tiny-moe", *PROMPT, "--slots", "8")
    for miss in ("stream", "host"):
        for slots in ("0", "8", "32"):
            options = ["--device", "cuda:0", "--slots", slots, "--miss", miss]
            report = run_json("generate", "tiny-moe", *PROMPT, *options)
            assert report["logits_sha256"] == on_cpu["logits_sha256"], options
            assert report["text"] == on_cpu["text"]
            if (slots, miss) == ("8", "stream"):
                same = ("hits", "misses", "evictions", "copied_bytes")
                assert [report["stats"][n] for n in same] == [on_cpu["stats"][n] for n in same]


@pytest.mark.cuda
def test_the_dense_parts_may_be_cupys() -> None:
    """Other bits, the same model."""
    import cupy

    tokens = list(range(40, 90))
    with Checkpoint(bundled_model(), progress=False) as checkpoint, checkpoint.model() as model:
        expected = model.forward(tokens, model.new_cache(64))
    placement = Placement(8, device="cuda:0")
    with (
        Checkpoint(bundled_model(), progress=False, xp=cupy) as checkpoint,
        checkpoint.model(placement) as model,
    ):
        logits = model.forward(tokens, model.new_cache(64))
    assert isinstance(logits, np.ndarray) and logits.dtype == np.float32
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()
    report = run_json(
        "generate", "tiny-moe", *PROMPT, "--device", "cuda:0", "--slots", "8", "--dense", "cupy"
    )
    assert report["dense"] == "cupy" and len(report["tokens"]) == 12
