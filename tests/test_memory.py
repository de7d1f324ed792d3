"""How much memory there is: of the host through meminfo and control groups, of a GPU through NVML or CUDA."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import moepool
from moepool import memory as module_function
from tests.programs import run

MIB = 1 << 20
MEMINFO = "MemTotal:       1048576 kB\nMemFree:         100000 kB\nMemAvailable:    524288 kB\n"

# `moepool.memory` is the function, which hides the module of that name.
module = sys.modules["moepool.memory"]


def host(root: Path, cgroup: str, files: dict[str, str]) -> moepool.Memory:
    """The memory of a host whose proc and sys are as told."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return module.cpu_memory(root)


def v2(folder: str, limit: int | str, usage: int, inactive: int = 0) -> dict[str, str]:
    group = f"sys/fs/cgroup/{folder}".rstrip("/")
    stat = f"anon 1\ninactive_file {inactive}\ntotal_inactive_file 7\n"
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{usage}\n",
        f"{group}/memory.stat": stat,
    }


def test_this_machine_has_memory() -> None:
    host = moepool.memory()
    assert host.total == moepool.memory("cpu").total
    assert 0 < host.free <= host.total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host.source


def test_without_a_limit_what_the_kernel_calls_available(tmp_path: Path) -> None:
    found = host(tmp_path, "0::/user/me\n", v2("user", "max", 5 * MIB))
    assert found == moepool.Memory(1024 * MIB, 512 * MIB, "MemAvailable of /proc/meminfo")


def test_a_control_group_limits_what_is_free(tmp_path: Path) -> None:
    """Files that nobody used lately are no obstacle."""
    found = host(tmp_path, "0::/user/me\n", v2("user/me", 300 * MIB, 250 * MIB, inactive=40 * MIB))
    assert (found.total, found.free) == (300 * MIB, 90 * MIB)
    assert found.source == f"memory.max of the control group {tmp_path}/sys/fs/cgroup/user/me"


def test_the_tightest_group_around_counts(tmp_path: Path) -> None:
    files = {**v2("user/me", 400 * MIB, 10 * MIB), **v2("user", 200 * MIB, 150 * MIB), **v2("", 900 * MIB, 0)}
    found = host(tmp_path, "0::/user/me\n", files)
    assert (found.total, found.free) == (200 * MIB, 50 * MIB)


def test_a_group_that_leaves_more_than_the_host_has_does_not_count(tmp_path: Path) -> None:
    found = host(tmp_path, "0::/a\n", v2("a", 2048 * MIB, 0))
    assert found.source == "MemAvailable of /proc/meminfo"


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    found = host(tmp_path, "0::/a\n", v2("a", 100 * MIB, 120 * MIB))
    assert found.free == 0


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup may be the host's, which is not there."""
    found = host(tmp_path, "0::/../../kubepods/x\n", v2("", 128 * MIB, 28 * MIB))
    assert (found.total, found.free) == (128 * MIB, 100 * MIB)


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/docker/x"
    files = {
        f"{folder}/memory.limit_in_bytes": f"{100 * MIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{80 * MIB}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/memory.stat": "\n",
    }
    found = host(tmp_path, "5:cpu,cpuacct:/other\n4:memory:/docker/x\n", files)
    assert (found.total, found.free) == (100 * MIB, 50 * MIB)
    assert "memory.limit_in_bytes" in found.source


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(moepool.UnsupportedError, match="does not tell its memory"):
        module.cpu_memory(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(moepool.UnsupportedError, match="no MemAvailable"):
        module.cpu_memory(tmp_path)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    assert module.cpu_memory(tmp_path).free == 512 * MIB


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(moepool.ArgumentError, match="device is 'gpu'"):
        module_function("gpu")


# ------------------------------------------------------------------------------------------------------- GPUs


def test_without_a_driver_cuda_memory_is_a_clear_error() -> None:
    """In a process that sees no device."""
    code = (
        "import moepool\n"
        "try:\n    moepool.memory('cuda:0')\n"
        "except (moepool.UnsupportedError, moepool.ArgumentError) as error:\n    print(error)\n"
    )
    assert "CUDA" in run(sys.executable, "-c", code, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
