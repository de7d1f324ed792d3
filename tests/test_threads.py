"""Threads: the core's own and the caller's, many at once, and whatever float state they bring along."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import moepool
from moepool.pool import Miss, Policy
from tests import cases
from tests.programs import run
from tests.support import (
    F32,
    assert_same,
    few_slots,
    layer_of,
    matrix_layer,
    pick,
    products,
    reference_ffn,
    usable_kernels,
)

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0))
THREADS = 8

pytestmark = pytest.mark.usefixtures("settings_kept")


def together(*works: Callable[[], None]) -> None:
    """Runs all at once, each in a thread of its own, and raises what any of them raised."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        work()

    with ThreadPoolExecutor(len(works)) as executor:
        for future in [executor.submit(run, work) for work in works]:
            future.result()


# ------------------------------------------------------------------------------------------- many callers


def test_many_threads_over_shared_pools() -> None:
    """Every call's bytes are right whatever the others evict, and the counts of the pools add up."""
    experts, most, calls = 9, 2, 80
    layers = [
        matrix_layer(qtype, cases.tame_blocks(qtype, experts * 40, 256, "threads").reshape(experts, 40, -1))
        for qtype in ("q4_k", "q8_0")
    ]
    x = cases.activations("plain", most, 256, "threads")
    tables = [products(layer, x) for layer in layers]
    kinds: tuple[tuple[int, int, Policy, Miss], ...] = (
        (0, 1, "lru", "stream"),
        (0, 4, "lru", "host"),
        (1, 3, "lru", "stream"),
        (1, 4, "static", "stream"),
    )
    with few_slots():
        pools = [(i, moepool.Pool(layers[i], slots, policy=p, miss=m)) for i, slots, p, m in kinds]
        wanted = [0] * THREADS
        moepool.set_threads(2)

        def work(number: int) -> None:
            stream = cases.Stream("threads", number)
            held: list[tuple[moepool.Route, moepool.Pool, F32, F32]] = []
            for call in range(calls):
                which, tokens, k, keep = (int(stream.below(b, 1)[0]) for b in (len(pools), most, 3, 3))
                at, pool = pools[which]
                ids = (stream.below(experts + 1, (tokens + 1, k + 1)) - 1).astype(np.int32)
                expected = pick(tables[at][: tokens + 1], ids)
                route = pool.resolve(ids, phase="decode")
                wanted[number] += route.hits + route.misses
                held.append((route, pool, x[: tokens + 1], expected))
                if keep == 0:
                    continue  # used and released later, when others have been at work in between
                for route, pool, rows, rows_expected in held:
                    with route:
                        what = f"thread {number}, call {call}, {pool!r}"
                        assert_same(moepool.matmul_id(rows, route, pool), rows_expected, what)
                held.clear()
            for route, *_ in held:
                route.release()

        together(*(lambda n=n: work(n) for n in range(THREADS)))
    stats = [pool.stats() for _, pool in pools]
    assert sum(s.hits + s.misses for s in stats) == sum(wanted)
    assert all(s.leased == 0 and s.evictions >= 0 for s in stats)
    assert sum(s.evictions for s in stats) > 50


def test_steps_of_many_threads_are_taken_one_after_the_other() -> None:
    """Wide steps, long enough to overlap if they could: tables, leases and counts are those of some order."""
    experts, calls, threads = 96, 120, 4
    blocks = cases.tame_blocks("q8_0", experts * 64, 512, "steps").reshape(experts, 64, -1)
    layer = matrix_layer("q8_0", blocks)
    x = cases.activations("plain", 1, 512, "steps")
    table = products(layer, x)
    wanted = [0] * threads
    with moepool.Pool(layer, 64) as pool:

        def work(number: int) -> None:
            stream = cases.Stream("steps", number)
            for call in range(calls):
                ids = stream.below(experts, (1, 40)).astype(np.int32)
                with pool.resolve(ids) as route:
                    wanted[number] += route.hits + route.misses
                    what = f"thread {number}, call {call}"
                    assert_same(moepool.matmul_id(x, route, pool), pick(table, ids), what)

        together(*(lambda n=n: work(n) for n in range(threads)))
        stats = pool.stats()
        slot_of, expert_in = pool.residents()
    assert (stats.steps, stats.leased, stats.bypasses) == (threads * calls, 0, 0)
    assert stats.hits + stats.misses == sum(wanted)
    assert stats.copied_bytes == (stats.evictions + stats.resident) * layer.record_bytes
    assert stats.evictions > 100
    resident = expert_in[expert_in >= 0]
    assert len(resident) == stats.resident == (slot_of >= 0).sum()
    assert (slot_of[resident] == np.flatnonzero(expert_in >= 0)).all()


def test_calls_while_threads_and_kernels_change() -> None:
    """What a call computes with may be replaced under it."""
    ffn = cases.FFNS[1]
    layer, x, ids, weights = layer_of(ffn), ffn.x(6), ffn.ids(6, "some"), ffn.router(6)
    expected = reference_ffn(layer, x, ids, weights)
    done = threading.Event()

    def change() -> None:
        try:
            for i in range(60):
                moepool.set_threads(1 + i % (CORES + 2))
                moepool.use_cpu_kernel(usable_kernels()[i % len(usable_kernels())])
        finally:
            done.set()

    def compute() -> None:
        with moepool.Pool(layer, 3) as pool:
            call = moepool.ExpertFFN(pool)
            while not done.is_set():
                assert_same(call(x, ids, weights), expected, "while threads and kernels change")

    with few_slots():
        together(change, compute, compute)


# --------------------------------------------------------------------------------------- the core's threads


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("threads") / "threads"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    includes = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
    sources = [ROOT / "tests/native/threads.cpp", ROOT / "csrc/cpu/threads.cpp", ROOT / "csrc/error.cpp"]
    run("g++", *flags, f"-fsanitize={request.param}", *includes, *sources, "-o", target)
    return target


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    "case",
    [
        "every_item_is_done_once",
        "alone_in_rising_order",
        "later_items_wait_for_earlier_ones",
        "who_waits_is_told_that_the_call_is_stopped",
    ],
)
def test_items(program: Path, case: str) -> None:
    """tests/native/threads.cpp, built with the thread and the address sanitizer."""
    assert run(program, case) == "ok\n"


@pytest.mark.parametrize("kernel", usable_kernels())
def test_any_number_of_threads_gives_the_same_bytes(kernel: str) -> None:
    ffn = cases.FFNS[0]
    weights, x = ffn.weights(), ffn.x(33)
    ids, router = ffn.ids(33, "some"), ffn.router(33)
    layer = layer_of(ffn)
    moepool.set_threads(1)
    expected = reference_ffn(layer, x, ids, router)
    with moepool.use_cpu_kernel(kernel):
        for threads in (*range(1, CORES + 2), 4 * CORES + 1):
            moepool.set_threads(threads)
            assert moepool.get_threads() == threads
            packed = layer_of(ffn)  # packed by that many, too
            store = moepool.ExpertStore.from_arrays(
                gate=weights["gate"],
                up=weights["up"],
                down=weights["down"],
                qtype={"gate": ffn.gate, "up": ffn.up, "down": ffn.down},
            )
            for name, blocks in weights.items():
                assert (store.unpack(0, name, ffn.experts - 1) == blocks[-1]).all(), (threads, name)
            for slots in (0, 3, ffn.experts):
                with moepool.Pool(packed, slots) as pool:
                    y = moepool.ExpertFFN(pool)(x, ids, router)
                    assert_same(y, expected, f"{threads} threads, {slots} slots, {kernel}")


def test_threads_default_to_the_processors_of_this_process() -> None:
    assert 1 <= moepool.get_threads() <= CORES
    default = moepool.get_threads()
    moepool.set_threads(CORES + 3)
    moepool.set_threads(None)
    assert moepool.get_threads() == default
    for bad in (0, -1, 2**31, 5000):
        with pytest.raises(moepool.ArgumentError, match="threads"):
            moepool.set_threads(bad)
    assert moepool.get_threads() == default


def test_a_forked_child_computes() -> None:
    """The parent's threads are not in it; it makes its own."""
    ffn = cases.FFNS[2]
    layer, x, ids, weights = layer_of(ffn), ffn.x(5), ffn.ids(5), ffn.router(5)
    moepool.set_threads(3)
    expected = reference_ffn(layer, x, ids, weights)
    with moepool.Pool(layer, 3) as pool:
        call = moepool.ExpertFFN(pool)
        assert_same(call(x, ids, weights), expected, "the parent, before")
        child = os.fork()
        if child == 0:
            # Nothing of pytest may run here, whatever happens.
            code = 1
            try:
                code = 0 if call(x, ids, weights).tobytes() == expected.tobytes() else 2
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert_same(call(x, ids, weights), expected, "the parent, after")


# --------------------------------------------------------------------------------------- float environment

FLUSH = 0x8040  # flush to zero, and subnormals taken for zero
TOWARDS_ZERO = 0x6000
DEFAULT = 0x1F80
STICKY = 0x3F  # what has happened, not how to compute

SOURCE = """
#include <xmmintrin.h>
unsigned get_csr(void) { return _mm_getcsr(); }
void set_csr(unsigned value) { _mm_setcsr(value); }
"""


class Control:
    """The float control register of the calling thread."""

    def __init__(self, library: Path) -> None:
        lib = ctypes.CDLL(str(library))
        self.get: Callable[[], int] = lib.get_csr
        lib.get_csr.restype = ctypes.c_uint
        lib.set_csr.argtypes, lib.set_csr.restype = [ctypes.c_uint], None
        self._set: Callable[[int], None] = lib.set_csr

    @contextmanager
    def set(self, value: int) -> Iterator[None]:
        """Sets it for a while."""
        before = self.get()
        self._set(value)
        try:
            yield
        finally:
            self._set(before)


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Control:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the register is x86's")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler to reach the register with")
    folder = tmp_path_factory.mktemp("csr")
    (folder / "csr.c").write_text(SOURCE)
    command = [compiler, "-O1", "-shared", "-fPIC", "csr.c", "-o", "csr.so"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Control(folder / "csr.so")


def subnormals(y: F32) -> int:
    """How many elements are subnormal."""
    size = y.view(np.uint32) & 0x7FFFFFFF
    return int(((size > 0) & (size < 0x00800000)).sum())


def small_ops() -> dict[str, Callable[[], F32]]:
    """Each op on inputs whose result has subnormals, made from subnormals where the op takes them."""
    power = np.float32(2.0) ** np.arange(-149, -117, dtype=np.float32)
    tiny = np.tile(power, (3, 8)) * np.float32(1.5)  # (3, 256), the smaller ones subnormal
    weight = (cases.Stream("tiny").bell((2, 33, 256)) * 2.0**-12).astype("<f4")
    # The scale of every block is float16's smallest, 2^-24.
    blocks = cases.tame_blocks("q8_0", 2 * 33, 256, "tiny").reshape(2, 33, -1)
    blocks.reshape(-1, 34)[:, :2] = np.array([1], "<u2").view(np.uint8)
    small = cases.activations("plain", 3, 256, "tiny") * np.float32(2.0**-116)
    ids = np.array([[0, 1], [1, -1], [1, 0]], np.int32)
    floats, quants = matrix_layer("f32", weight.view(np.uint8)), matrix_layer("q8_0", blocks)
    pools = [moepool.Pool(layer, 1) for layer in (floats, quants)]
    ones, up = np.full((3, 2), 0.75, np.float32), np.full_like(tiny, 1.25)
    rows, less = np.tile(tiny[:, None, :64], (1, 2, 1)), tiny * np.float32(-0.75)

    def combined() -> F32:
        with pools[0].resolve(ids) as route:
            y: F32 = moepool.combine(rows, route, ones)
            return y

    return {
        "matmul_id f32": lambda: moepool.matmul_id(tiny, ids, pools[0]),
        "matmul_id q8_0": lambda: moepool.matmul_id(small, ids, pools[1]),
        "matmul_id of one row": lambda: moepool.matmul_id(tiny[:1], ids[:1, :1], pools[0]),
        "swiglu": lambda: moepool.swiglu(tiny, up),
        "add": lambda: moepool.add(tiny, less),
        "combine": combined,
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", usable_kernels())
def test_the_callers_float_state_changes_no_bit_and_stays(
    control: Control, kernel: str, threads: int
) -> None:
    """Other libraries set flush-to-zero, for threads that they did not start as well."""
    moepool.set_threads(threads)
    with moepool.use_cpu_kernel(kernel), few_slots():
        ops = small_ops()
        assert control.get() & ~STICKY == DEFAULT
        expected = {name: op() for name, op in ops.items()}
        assert all(subnormals(y) > 0 for y in expected.values()), {
            n: subnormals(y) for n, y in expected.items()
        }
        for value in (DEFAULT | FLUSH, DEFAULT | TOWARDS_ZERO, DEFAULT | FLUSH | TOWARDS_ZERO):
            got, left = {}, {}
            with control.set(value):
                moepool.set_threads(threads)  # new workers inherit the state of the thread that makes them
                for name, op in ops.items():
                    got[name] = op()
                    left[name] = control.get() & ~STICKY
            for name, y in got.items():
                assert_same(y, expected[name], f"{name}, MXCSR {value:#x}")
                assert left[name] == value, f"{name} left MXCSR {left[name]:#x}, it was {value:#x}"


TRAPS = """
import ctypes
import numpy as np
import moepool

rng = np.random.default_rng(0)
gate, up = rng.standard_normal((2, 8, 64, 32), dtype=np.float32)
down = rng.standard_normal((8, 32, 64), dtype=np.float32)
layer = moepool.ExpertStore.from_arrays(gate=gate, up=up, down=down, qtype="q8_0")[0]
ffn = moepool.ExpertFFN(moepool.Pool(layer, 4))
ids = np.array([[0, 5], [5, 1], [7, -1]])
for dtype in (np.float16, np.float32):
    x, weights = rng.standard_normal((3, 32)).astype(dtype), np.full((3, 2), 60000, dtype)
    expected = ffn(x, ids, weights)
    assert ctypes.CDLL("libm.so.6").feenableexcept(0x3D) >= 0  # all but "denormal operand"
    assert ffn(x, ids, weights).tobytes() == expected.tobytes()
    ctypes.CDLL("libm.so.6").fedisableexcept(0x3D)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="traps are set through glibc")
def test_traps_of_the_caller_do_not_spring() -> None:
    """A caller that traps inexact results gets its result, of whatever types."""
    run(sys.executable, "-c", TRAPS)


# ------------------------------------------------------------------------------------------------- the GIL


def ticks_during(work: Callable[[], object]) -> tuple[int, float]:
    """How often another Python thread came to run while `work` did, and for how many seconds it did."""
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        while not ticks:
            time.sleep(0.001)
        before, start = ticks, time.perf_counter()
        work()
        return ticks - before, time.perf_counter() - start
    finally:
        stop.set()
        ticker.join()


def test_the_gil_is_released_while_the_core_computes() -> None:
    """Other Python threads run on during a long call of every kind."""
    experts, rows, columns, tokens = 4, 256, 1024, 128
    weight = cases.tame_blocks("f32", experts * rows, columns, "gil").reshape(experts, rows, -1)
    layer = matrix_layer("f32", weight)
    x, ids = np.ones((tokens, columns), np.float32), np.zeros((tokens, 4), np.int32)
    moepool.set_threads(1)
    with moepool.use_cpu_kernel("portable"), moepool.Pool(layer, 0) as pool:
        ticks, seconds = ticks_during(lambda: moepool.matmul_id(x, ids, pool))
    assert seconds > 0.05, f"too quick to tell: {seconds:.3f} s"
    assert ticks >= seconds / 0.001 / 50, f"{ticks} ticks in {seconds:.3f} s"


def test_a_ticker_would_notice_a_held_gil() -> None:
    """The test above can fail: sorting holds the lock from its beginning to its end."""
    numbers = cases.Stream("held").below(2**31, 600_000).tolist()
    ticks, seconds = ticks_during(lambda: numbers.sort())
    assert ticks < 3 + seconds / 0.001 / 50, f"{ticks} ticks in {seconds:.3f} s"
