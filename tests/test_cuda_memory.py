"""Memory of CUDA devices: NVML asked about the card that CUDA uses, and what happens where it cannot tell.

NVML and the CUDA runtime are stand-ins, so that every answer of theirs can be had on any machine.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import moepool
from moepool._native import handles
from moepool._native.handles import DeviceInfo

GIB = 1 << 30


class NVMLError(Exception):
    """What every call of NVML may raise."""


@dataclass
class Card:
    """A card, or a slice of one, as NVML knows it; in `mig` the slices, None if it is not split."""

    uuid: str
    pci: str
    total: int
    free: int
    mig: list[Card | None] | None = None


@dataclass
class FakeNVML:
    """A module in place of pynvml over cards in NVML's own order.

    Attributes
    ----------
    fails
        By the name of a function, what it raises.
    missing
        Names that the module does not have.
    """

    cards: list[Card] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    opened: int = 0
    asked: list[str] = field(default_factory=list)

    NVMLError = NVMLError

    def __getattr__(self, name: str) -> Any:
        if name in self.missing or name.startswith("_"):
            raise AttributeError(name)
        if name == "nvmlMemory_v2":
            return 0x02000028
        call = getattr(type(self), f"do_{name}", None)
        if call is None:
            raise AttributeError(name)

        def ask(*arguments: Any, **options: Any) -> Any:
            self.asked.append(name)
            if name in self.fails:
                raise self.fails[name]
            return call(self, *arguments, **options)

        return ask

    def do_nvmlInit(self) -> None:
        self.opened += 1

    def do_nvmlShutdown(self) -> None:
        self.opened -= 1

    def _all(self) -> list[Card]:
        slices = [part for card in self.cards for part in card.mig or [] if part is not None]
        return self.cards + slices

    def do_nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        return self._found(card for card in self._all() if card.uuid == uuid)

    def do_nvmlDeviceGetHandleByPciBusId(self, pci: str) -> Card:
        return self._found(card for card in self.cards if card.pci == pci)

    @staticmethod
    def _found(cards: Any) -> Card:
        for card in cards:
            return card  # type: ignore[no-any-return]
        raise NVMLError("Not Found")

    def do_nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> Any:
        if version is not None and "nvmlDeviceGetMemoryInfo_v2" in self.missing:
            raise TypeError("unexpected keyword argument 'version'")
        return SimpleNamespace(total=card.total, free=card.free)

    def do_nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.uuid.startswith("MIG-"):
            raise NVMLError("Invalid Argument")
        mode = int(card.mig is not None)
        return [mode, mode]

    def do_nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return len(card.mig or [])

    def do_nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        part = (card.mig or [])[index]
        if part is None:
            raise NVMLError("Not Found")
        return part

    def do_nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid


def fake(monkeypatch: pytest.MonkeyPatch, nvml: Any, *devices: DeviceInfo) -> None:
    """Puts a module in the place of pynvml, and these devices in the place of CUDA's, in CUDA's order."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def device(index: int) -> DeviceInfo:
        if index >= len(devices):
            raise moepool.ArgumentError(f"CUDA device {index} does not exist")
        return devices[index]

    monkeypatch.setattr(handles, "cuda_device", device)


def cuda(uuid: str, pci: str, total: int, free: int) -> DeviceInfo:
    return DeviceInfo("Fake GPU", pci, uuid, (9, 0), total, free)


SMALL = Card("GPU-aaaa", "0000:17:00.0", 24 * GIB, 2 * GIB)
LARGE = Card("GPU-bbbb", "0000:65:00.0", 96 * GIB, 80 * GIB)
# As the runtime sees them: a little less in all, a little more free.
CUDA_SMALL = cuda("GPU-aaaa", "0000:17:00.0", 23 * GIB, 3 * GIB)
CUDA_LARGE = cuda("GPU-bbbb", "0000:65:00.0", 95 * GIB, 81 * GIB)


@pytest.mark.parametrize("by", ["UUID", "PCI bus id"])
def test_h23_the_card_is_the_one_that_cuda_uses(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """CUDA shows the second card first, and the first one not at all or second; NVML does not care."""
    nvml = FakeNVML([SMALL, LARGE])
    if by == "PCI bus id":
        nvml.fails["nvmlDeviceGetHandleByUUID"] = NVMLError("Not Found")
    for visible, devices in (
        ("1", [CUDA_LARGE]),
        ("1,0", [CUDA_LARGE, CUDA_SMALL]),
        ("GPU-bbbb", [CUDA_LARGE]),
    ):
        fake(monkeypatch, nvml, *devices)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        assert moepool.memory("cuda:0") == moepool.Memory(95 * GIB, 80 * GIB, "NVML")
        assert moepool.memory("cuda") == moepool.memory("cuda:0")
        if len(devices) == 2:
            assert moepool.memory("cuda:1") == moepool.Memory(23 * GIB, 2 * GIB, "NVML")
    assert nvml.opened == 0, "each opening has been closed"


def test_what_the_runtime_leaves_is_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, FakeNVML([LARGE]), cuda("GPU-bbbb", "0000:65:00.0", 95 * GIB, 10 * GIB))
    assert moepool.memory("cuda:0").free == 10 * GIB


FAILURES: dict[str, tuple[FakeNVML | None, str]] = {
    "no module": (None, "pynvml"),
    "library missing": (
        FakeNVML(fails={"nvmlInit": NVMLError("Shared Library Not Found")}),
        "Shared Library",
    ),
    "library of another driver": (
        FakeNVML(fails={"nvmlInit": NVMLError("Driver/library version mismatch")}),
        "version mismatch",
    ),
    "init fails otherwise": (FakeNVML(fails={"nvmlInit": OSError("no such device")}), "no such device"),
    "failure without a word": (FakeNVML(fails={"nvmlInit": RuntimeError()}), "RuntimeError"),
    "card unknown": (FakeNVML([SMALL]), "Not Found"),
    "not supported": (
        FakeNVML([LARGE], fails={"nvmlDeviceGetMemoryInfo": NVMLError("Not Supported")}),
        "Not Supported",
    ),
    "zeros": (FakeNVML([Card("GPU-bbbb", "0000:65:00.0", 0, 0)]), "0 free bytes of 0"),
    "nothing free": (FakeNVML([Card("GPU-bbbb", "0000:65:00.0", 96 * GIB, 0)]), "0 free bytes"),
    "nonsense": (FakeNVML([Card("GPU-bbbb", "0000:65:00.0", GIB, 2 * GIB)]), "free bytes"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_h22_where_nvml_cannot_tell_the_runtime_does(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And the source says why."""
    nvml, reason = FAILURES[name]
    fake(monkeypatch, nvml, CUDA_LARGE)
    told = moepool.memory("cuda:0")
    assert (told.total, told.free) == (95 * GIB, 81 * GIB)
    assert told.source.startswith("CUDA (NVML: ") and reason in told.source
    assert nvml is None or nvml.opened == 0


@pytest.mark.parametrize(
    "missing", [("nvmlMemory_v2",), ("nvmlDeviceGetMemoryInfo_v2",), ("nvmlDeviceGetMigMode",)], ids=str
)
def test_h22_old_modules_will_do(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    fake(monkeypatch, FakeNVML([LARGE], missing=missing), CUDA_LARGE)
    assert moepool.memory("cuda:0") == moepool.Memory(95 * GIB, 80 * GIB, "NVML")


def test_h22_a_driver_without_the_second_call_has_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(FakeNVML):
        def do_nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> Any:
            if version is not None:
                raise NVMLError("Function Not Found")
            return super().do_nvmlDeviceGetMemoryInfo(card)

    fake(monkeypatch, Old([LARGE]), CUDA_LARGE)
    assert moepool.memory("cuda:0") == moepool.Memory(95 * GIB, 80 * GIB, "NVML")


def split(*slices: Card | None) -> Card:
    return Card("GPU-cccc", "0000:65:00.0", 96 * GIB, 5 * GIB, list(slices))


PART = Card("MIG-dddd", "", 24 * GIB, 20 * GIB)
OTHER = Card("MIG-eeee", "", 12 * GIB, GIB)
# The runtime may tell the slice's identity or the card's.
MIG: dict[str, tuple[Card, str, int | None]] = {
    "by the slice": (split(None, OTHER, PART), "GPU-dddd", 20 * GIB),
    "by the card, one slice": (split(None, PART, None), "GPU-cccc", 20 * GIB),
    "by the card, which slice nobody knows": (split(OTHER, PART), "GPU-cccc", None),
    "by the card, no slice": (split(None, None), "GPU-cccc", None),
}


@pytest.mark.parametrize("name", MIG)
def test_a_slice_of_a_card_has_its_own_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    card, uuid, free = MIG[name]
    fake(monkeypatch, FakeNVML([SMALL, card]), cuda(uuid, card.pci, 23 * GIB, 21 * GIB))
    told = moepool.memory("cuda:0")
    if free is None:
        assert (told.free, told.source[:5]) == (21 * GIB, "CUDA "), "the card's memory is not the slice's"
        assert "MIG" in told.source
    else:
        assert told == moepool.Memory(23 * GIB, free, "NVML")


def test_a_slice_without_its_card_s_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a card that NVML lists as split, asked about by its bus: still the slice."""
    nvml = FakeNVML([split(OTHER, PART)], fails={"nvmlDeviceGetHandleByUUID": NVMLError("Not Supported")})
    fake(monkeypatch, nvml, cuda("GPU-eeee", "0000:65:00.0", 12 * GIB, 2 * GIB))
    assert moepool.memory("cuda:0") == moepool.Memory(12 * GIB, GIB, "NVML")


def test_no_budget_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither NVML nor the runtime tells: an error, and no figure that a budget could be made of."""
    fake(monkeypatch, FakeNVML([]), cuda("GPU-ffff", "0000:01:00.0", 0, 0))
    with pytest.raises(moepool.UnsupportedError, match="memory of cuda:0"):
        moepool.memory("cuda:0")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML([LARGE])
    fake(monkeypatch, nvml, CUDA_LARGE)
    with pytest.raises(moepool.ArgumentError, match="does not exist"):
        moepool.memory("cuda:7")
    assert nvml.asked == [], "NVML is not asked about what CUDA does not have"


def test_importing_moepool_needs_no_nvml_and_starts_no_cuda() -> None:
    code = (
        "import sys; sys.modules['pynvml'] = None; import moepool; "
        "assert not {'cupy', 'torch'} & set(sys.modules); "
        "assert not any('libcuda.so' in line for line in open('/proc/self/maps')); "
        "assert moepool.memory('cpu').free > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.cuda
def test_a_real_device_tells_its_memory() -> None:
    told = moepool.memory("cuda:0")
    device = handles.cuda_device(0)
    assert 0 < told.free <= told.total == device.total
    assert told.source, "where the figures come from"
    assert device.uuid.startswith("GPU-") and len(device.uuid) == 40
    assert device.capability >= (5, 0)
