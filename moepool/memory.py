"""How much memory a device has and how much of it is free, and where the figures come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepool import arrays
from moepool._native import handles
from moepool.errors import UnsupportedError

__all__ = ["Memory", "memory"]


@dataclass(frozen=True)
class Memory:
    """Memory of a device.

    Attributes
    ----------
    total, free : int
        Bytes. `free` is what can be taken without pushing anything out that is in use.
    source : str
        Where the figures come from.
    """

    total: int
    free: int
    source: str


def memory(device: str = "cpu") -> Memory:
    """Tells the memory of a device.

    For the CPU, free is what the kernel calls available, or what the tightest limit of the process's control
    groups leaves, if that is less. For a CUDA device it is what NVML says of that very card, or the CUDA
    runtime, if that is less or NVML cannot tell; the reason is then in `source`.

    Parameters
    ----------
    device : str
        "cpu", "cuda" or "cuda:N".

    Returns
    -------
    Memory

    Raises
    ------
    ArgumentError
        `device` is no device's name, or there is no such CUDA device.
    UnsupportedError
        A CUDA device in a build without CUDA or on a machine without a driver, or a system that does not tell
        its memory.

    Examples
    --------
    >>> moepool.memory("cpu").free > 0
    True
    """
    index = arrays.device_index(device)
    return cpu_memory() if index == arrays.CPU else cuda_memory(index)


def cuda_memory(index: int) -> Memory:
    """Memory of a CUDA device, by NVML or, where that cannot tell, by the CUDA runtime."""
    device = handles.cuda_device(index)
    if device.total <= 0:
        raise UnsupportedError(f"the CUDA runtime does not tell the memory of cuda:{index} ({device.name})")
    try:
        free = _nvml_free(device)
    except Exception as error:
        # A missing or mismatched library, an old module, a card that does not tell: NVML is never needed.
        return Memory(device.total, device.free, f"CUDA (NVML: {str(error) or type(error).__name__})")
    # NVML describes the whole card, the runtime what this process may use of it.
    return Memory(device.total, min(free, device.free), "NVML")


def _nvml_free(device: handles.DeviceInfo) -> int:
    """Free bytes of the card by NVML; fails in many ways where it cannot tell."""
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        card = _nvml_card(nvml, device)
        # The second version of the call counts what the driver keeps for itself apart; old modules and
        # drivers have the first alone.
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2)
        except (TypeError, AttributeError, nvml.NVMLError):
            info = nvml.nvmlDeviceGetMemoryInfo(card)
    finally:
        nvml.nvmlShutdown()
    # Systems whose memory is the host's are known to answer with zeros.
    if not 0 < info.free <= info.total:
        raise ValueError(f"it tells {info.free} free bytes of {info.total}")
    return int(info.free)


def _nvml_card(nvml: Any, device: handles.DeviceInfo) -> Any:
    """NVML's handle of a device: of a slice if the card is split (MIG).

    It is found by its identity, never by its number: NVML numbers all cards of the machine, CUDA those that
    CUDA_VISIBLE_DEVICES shows to the process, and in another order.
    """
    identity = device.uuid.removeprefix("GPU-")
    card = None
    for uuid in (f"GPU-{identity}", f"MIG-{identity}"):
        try:
            card = nvml.nvmlDeviceGetHandleByUUID(uuid)
            break
        except nvml.NVMLError:
            continue
    if card is None:
        card = nvml.nvmlDeviceGetHandleByPciBusId(device.pci_bus_id)
    try:
        split = nvml.nvmlDeviceGetMigMode(card)[0] == 1
    except (
        AttributeError,
        nvml.NVMLError,
    ):  # neither an old module nor a card that cannot be split knows of it
        split = False
    if not split:
        return card
    slices = []
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, i))
        except nvml.NVMLError:  # an unused place
            continue
    for part in slices:
        if nvml.nvmlDeviceGetUUID(part) == f"MIG-{identity}":
            return part
    if len(slices) != 1:
        raise LookupError(f"none of the card's {len(slices)} MIG slices is known to be the device")
    return slices[0]


def cpu_memory(root: Path = Path("/")) -> Memory:
    """Memory of the host, as far as this process may use it; `root` is where proc and sys are mounted."""
    try:
        text = (root / "proc/meminfo").read_text()
        total, free = (_kib(text, name) for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"this system does not tell its memory: {error}") from None
    best = Memory(total, free, "MemAvailable of /proc/meminfo")
    for limit in _cgroup_limits(root):
        if limit.free < best.free:
            best = Memory(min(limit.total, total), limit.free, limit.source)
    return best


def _kib(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"/proc/meminfo has no {name}")
    return int(match[1]) * 1024


def _cgroup_limits(root: Path) -> Iterator[Memory]:
    """What each control group that this process is in, and each group around it, limits and leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, of which only the mount itself is visible.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if (limit := _limit(folder, *names)) is not None:
                yield limit
            if folder == mount:
                break


def _limit(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> Memory | None:
    """The limit of one control group, if it has one."""
    try:
        limit = int((folder / limit_file).read_text())  # "max" is no limit: a ValueError
        usage = int((folder / usage_file).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    # Pages of files that nobody used lately count as usage, but give way; MemAvailable counts them as free as
    # well.
    match = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
    used = max(0, usage - int(match[1] if match else 0))
    return Memory(limit, max(0, limit - used), f"{limit_file} of the control group {folder}")
