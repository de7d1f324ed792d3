"""Where the records lie: huge pages, memory nodes."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from moepool._native.handles import MatrixSpec, StoreHandle
from tests import cases

HUGE = 2 << 20
SIZE = 24 * HUGE
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NODES = Path("/sys/devices/system/node/has_memory")


def huge_bytes() -> int:
    """Of this process that lie in huge pages."""
    text = Path("/proc/self/smaps").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE))


def gained(make: Callable[[], object]) -> int:
    """The same, by what `make` makes."""
    before = huge_bytes()
    kept = make()
    after = huge_bytes()
    del kept
    return after - before


def touched_store(count: int) -> StoreHandle:
    """A store whose records take `count` MiB and a few bytes, all of them written to."""
    blocks = cases.raw_blocks("f32", 1024, 256, "pages")
    store = StoreHandle()
    layer = store.add_layer(count, [MatrixSpec(0, 1024, 256, True, False)])
    store.pack(layer, 0, 0, count, blocks.ctypes.data, 0)
    return store


def advised() -> mmap.mmap:
    """Memory of that size, got by hand; a huge page more, as it may begin anywhere."""
    memory = mmap.mmap(-1, SIZE + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    return memory


def test_records_lie_in_huge_pages() -> None:
    if not THP.exists() or "[never]" in THP.read_text():
        pytest.skip("transparent huge pages are off")
    if gained(advised) < SIZE:
        pytest.skip("the system has no huge pages left")
    count = SIZE >> 20
    # Every page but the last, which the records do not fill.
    assert gained(lambda: touched_store(count)) >= SIZE, "the records do not begin where a huge page does"


def test_nothing_more_than_the_records_stays_mapped() -> None:
    """Allocations are larger, so that they can be cut to begin at a huge page."""

    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    touched_store(1)  # threads and what else the first packing needs
    before = mapped()
    stores = [touched_store(experts) for experts in range(1, 12)]
    size = sum(store.layer(0)["bytes"] for store in stores)
    assert sum(range(1, 12)) << 20 <= size <= (sum(range(1, 12)) << 20) + (1 << 20)
    assert size <= mapped() - before < size + HUGE
    stores.clear()
    assert mapped() - before < HUGE


@pytest.mark.parametrize("pinned", [False, True])
def test_records_are_spread_over_memory_nodes(pinned: bool) -> None:
    """Also if the thread that makes the store keeps to one CPU."""
    nodes = NODES.read_text().strip() if NODES.exists() else "0"
    if not re.search("[-,]", nodes):
        pytest.skip(f"this machine has one memory node: {nodes}")
    every = os.sched_getaffinity(0)
    if pinned:
        os.sched_setaffinity(0, {min(every)})
    try:
        store = touched_store(SIZE >> 20)
    finally:
        os.sched_setaffinity(0, every)
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    spread = [line for line in lines if " interleave" in line]
    assert spread, "no memory is interleaved"
    assert any(len(re.findall(r"N\d+=\d+", line)) > 1 for line in spread), spread
    store.close()
