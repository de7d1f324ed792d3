"""Ctrl-C in the middle of a long call: it ends soon, and everything can be used as before."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest

import moepool
from moepool._native import ffi, handles, lib
from tests import cases
from tests.support import F32, assert_same, few_slots, layer_of, reference_ffn

pytestmark = pytest.mark.usefixtures("settings_kept")

# A layer and so many tokens that the portable kernel would take half a minute and more.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import moepool
from moepool._native import handles

what, threads = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
E, N, K = 4, 256, 1024
weight = {name: np.ones((E, N, K), np.float32) for name in ("gate", "up")}
weight["down"] = np.ones((E, K, N), np.float32)
store = moepool.ExpertStore.from_arrays(**weight, qtype="q8_0")
pool = moepool.Pool(store[0], 2)
ffn = moepool.ExpertFFN(pool)
few = rng.standard_normal((2, K), dtype=np.float32), [[0, 1], [2, 3]], np.ones((2, 2), np.float32)
before = ffn(*few).tobytes()
moepool.use_cpu_kernel("portable")
moepool.set_threads(threads)
T = 40000
x, ids = np.ones((T, K), np.float32), np.zeros((T, 2), np.int32)
weights = np.ones((T, 2), np.float32)

def pack():
    blocks = np.zeros(16384 * 1088, np.uint8)
    raw = handles.StoreHandle()
    layer = raw.add_layer(64, [handles.MatrixSpec(8, 16384, 1024, False, False)])
    for _ in range(100):
        raw.pack(layer, 0, 0, 64, blocks.ctypes.data, 0)

calls = {
    "matmul_id": lambda: moepool.matmul_id(x, ids, pool.gate),
    "ffn": lambda: ffn(x, ids, weights),
    "pack": pack,
}
def interrupt():
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
start = time.monotonic()
try:
    calls[what]()
except KeyboardInterrupt as error:
    took = time.monotonic() - start
    frames, trace = [], error.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    moepool.use_cpu_kernel(None)
    assert ffn(*few).tobytes() == before
    stats = pool.stats()
    assert stats.leased == 0, stats
    print(f"interrupted after {took:.2f} s in {frames}")
else:
    print("was not interrupted")
"""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("what", ["matmul_id", "ffn", "pack"])
def test_sigint_ends_a_long_call(what: str, threads: int) -> None:
    command = [sys.executable, "-c", PROGRAM, what, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    words = done.stdout.split()
    assert words[:2] == ["interrupted", "after"], done.stdout
    assert 0.3 < float(words[2]) < 8, done.stdout
    assert "run_signal_handlers" in done.stdout, "the call was not ended, it had ended"


def long_call() -> tuple[Callable[[], F32], Callable[[], F32], F32]:
    """An FFN call of at least a second, a short one of the same pool, and what the short one gives."""
    ffn = cases.FFNS[1]
    layer, x, ids, weights = layer_of(ffn), ffn.x(6), ffn.ids(6, "some"), ffn.router(6)
    expected = reference_ffn(layer, x, ids, weights)
    with few_slots():
        pool = moepool.Pool(layer, 3)
    call = moepool.ExpertFFN(pool)
    many = [np.repeat(a, 250, axis=0) for a in (x, ids, weights)]
    return lambda: call(*many), lambda: call(x, ids, weights), expected


def raise_soon(after: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after)


def test_a_handlers_own_error_ends_the_call_and_a_quiet_handler_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handlers are the program's: none is replaced."""
    long, short, expected = long_call()
    moepool.set_threads(2)
    moepool.use_cpu_kernel("portable")
    seen: list[bytes] = []

    def quiet(number: int, frame: object) -> None:
        seen.append(short().tobytes())  # the same pool, from within a call of it

    def loud(number: int, frame: object) -> None:
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGALRM, quiet)
    try:
        raise_soon(0.1)
        start = time.monotonic()
        long()
        took = time.monotonic() - start
        assert took > 0.4, f"too quick to tell: {took} s"
        assert seen == [expected.tobytes()]
        signal.signal(signal.SIGALRM, loud)
        raise_soon(0.1)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="enough"):
            long()
        assert time.monotonic() - start < took / 2 + 0.3
        assert_same(short(), expected, "after the interruption")
    finally:
        raise_soon(0)
        signal.signal(signal.SIGALRM, before)


def test_another_thread_is_not_interrupted() -> None:
    long, _, _ = long_call()
    moepool.set_threads(1)
    moepool.use_cpu_kernel("portable")
    result: list[F32] = []
    worker = threading.Thread(target=lambda: result.append(long()))

    def loud(number: int, frame: object) -> None:
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGALRM, loud)
    try:
        worker.start()
        raise_soon(0.1)
        with pytest.raises(TimeoutError):
            time.sleep(20)
    finally:
        raise_soon(0)
        signal.signal(signal.SIGALRM, before)
        worker.join()
    assert len(result) == 1 and result[0].any()


def test_the_hook_of_the_c_interface() -> None:
    """Of this thread alone, taken back by NULL; an ended call says so."""
    long, short, expected = long_call()
    moepool.set_threads(2)
    moepool.use_cpu_kernel("portable")
    asked: list[int] = []

    @ffi.callback("moepool_interrupt")  # type: ignore[untyped-decorator]
    def stop(data: object) -> int:
        asked.append(threading.get_ident())
        return int(len(asked) == 2)

    def work() -> None:
        lib.moepool_set_interrupt(stop, ffi.NULL)
        try:
            with pytest.raises(moepool.MoePoolError, match="was interrupted"):
                long()
            assert asked == [threading.get_ident()] * 2
            assert_same(short(), expected, "after the interruption")
        finally:
            lib.moepool_set_interrupt(ffi.NULL, ffi.NULL)
        short()

    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


# ----------------------------------------------------------------------------------------------- affinity


def allowed_cpus(of: str) -> set[int]:
    """Of a task, as /proc tells."""
    with open(f"{of}/status") as status:
        text = next(line for line in status if line.startswith("Cpus_allowed_list:")).split()[1]
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def new_tasks(before: set[str]) -> list[set[int]]:
    """The CPUs of each thread that was not there before."""
    tasks = sorted(set(os.listdir("/proc/self/task")) - before, key=int)
    return [allowed_cpus(f"/proc/self/task/{task}") for task in tasks]


def set_and_look(threads: int | None, affinity: Iterable[int] | None) -> list[set[int]]:
    moepool.set_threads(1)
    before = set(os.listdir("/proc/self/task"))
    moepool.set_threads(threads, affinity=affinity)
    return new_tasks(before)


def test_threads_keep_to_their_cpus() -> None:
    every = os.sched_getaffinity(0)
    one, other = min(every), max(every)
    assert set_and_look(4, None) == [every] * 3
    assert set_and_look(4, [one]) == [{one}] * 3
    assert set_and_look(3, np.array([one, other])) == [{other}, {one}]
    assert set_and_look(5, [one, other]) == [{other}, {one}, {other}, {one}]
    assert set_and_look(None, [one, other, other]) == [{other}, {other}]
    assert moepool.get_threads() == 3
    assert os.sched_getaffinity(0) == every, "the caller was moved"
    ffn = cases.FFNS[0]
    x, ids, weights = ffn.x(9), ffn.ids(9), ffn.router(9)
    layer = layer_of(ffn)
    with moepool.Pool(layer, 0) as pool:
        y = moepool.ExpertFFN(pool)(x, ids, weights)
    assert_same(y, reference_ffn(layer, x, ids, weights), "threads with CPUs of their own")
    assert set_and_look(4, None) == [every] * 3


def test_a_cpu_that_is_not_ours_is_refused() -> None:
    moepool.set_threads(2)
    nowhere = max(os.sched_getaffinity(0)) + 1
    for bad, words in (
        ([0, nowhere], f"^affinity: CPU {nowhere} is none of those"),
        ([-1], "CPU -1"),
        ([2**31], "CPU 2147483648"),
        ([8191], "CPU 8191 is none of those"),
        ([], "affinity is empty"),
        (np.array([], np.int64), "affinity is empty"),
        ([0.5], "affinity"),
        (1, "affinity is 1; it must be a sequence of CPUs"),
        (0, "affinity is 0; it must be a sequence of CPUs"),
    ):
        with pytest.raises(moepool.ArgumentError, match=words):
            moepool.set_threads(3, affinity=bad)  # type: ignore[arg-type]
    assert moepool.get_threads() == 2
    with pytest.raises(moepool.ArgumentError, match="cpus is NULL"):
        handles.check(lib.moepool_set_threads_on(2, ffi.NULL, 1))


LOOK = """
import os, threading
at_import, at_call = (os.environ.get(name) for name in ("PIN_AT_IMPORT", "PIN_AT_CALL"))
def load():
    global moepool
    if at_import:
        os.sched_setaffinity(0, {int(at_import)})
    import moepool
loader = threading.Thread(target=load)
loader.start()
loader.join()
from tests.test_interrupt import new_tasks
if at_call:
    os.sched_setaffinity(0, {int(at_call)})
before = set(os.listdir("/proc/self/task"))
moepool.swiglu(*[moepool_zeros] * 2)
print(moepool.get_threads(), new_tasks(before))
""".replace("moepool_zeros", "__import__('numpy').zeros(1 << 16, 'f4')")


def look(pin: set[int] | None = None, program: str = LOOK, **env: str) -> str:
    """What the program prints or fails with, under these variables, and if asked on these CPUs alone."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        preexec_fn=None if pin is None else lambda: os.sched_setaffinity(0, pin),
        check=False,
    )
    return (done.stdout or done.stderr.splitlines()[-1]).strip()


def test_the_environment_sets_the_default() -> None:
    every = os.sched_getaffinity(0)
    one, other = min(every), max(every)
    assert look(MOEPOOL_THREADS="3") == f"3 {[every] * 2}"
    assert look(MOEPOOL_THREADS="3", MOEPOOL_AFFINITY=f"{one}") == f"3 {[{one}] * 2}"
    assert look(MOEPOOL_AFFINITY=f"{one},{one},{other}") == f"3 {[{one}, {other}]}"
    assert look(MOEPOOL_THREADS="", MOEPOOL_AFFINITY="") == look()
    assert look({one}, MOEPOOL_THREADS="2") == f"2 {[{one}]}"
    if one != other:
        refused = look({one}, MOEPOOL_AFFINITY=f"{one}-{other}")
        assert f"MOEPOOL_AFFINITY: CPU {one + 1} is none of those that this process may use: {one}" in refused
    for bad in ("0", "3x", "99999999999999999999", "4097"):
        for program in (LOOK, "import moepool; print(moepool.get_threads())"):
            told = look(program=program, MOEPOOL_THREADS=bad)
            assert "ArgumentError: MOEPOOL_THREADS" in told, (bad, told)
    for bad in ("0-", "1-0", "0,,1", "a", "0, 1"):
        assert f"MOEPOOL_AFFINITY={bad}: give CPUs" in look(MOEPOOL_AFFINITY=bad), bad


def test_a_caller_that_keeps_to_a_cpu_keeps_no_other_thread_to_it() -> None:
    """Neither the thread that imports nor the one that calls first."""
    every = os.sched_getaffinity(0)
    one = str(min(every))
    free = look()
    if free == "1 []":
        pytest.skip("one thread is the default here")
    assert free == f"{free.split()[0]} {[every] * (int(free.split()[0]) - 1)}"
    assert look(PIN_AT_CALL=one) == free
    assert look(PIN_AT_IMPORT=one) == free
    assert look(PIN_AT_CALL=one, MOEPOOL_THREADS="3") == f"3 {[every] * 2}"


FEW = """
import resource, sys
import moepool
threads = int(sys.argv[1])
moepool.set_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (room := int(sys.argv[2]) << 20), -1))
try:
    moepool.set_threads(threads or None)
except moepool.MoePoolError as error:
    print(type(error).__name__, error)
print(moepool.get_threads(), moepool.swiglu(*[__import__("numpy").zeros(1 << 16, "f4")] * 2).sum())
"""
STACK = 1 << 30  # of a thread; bytes


def start_few(threads: int, stacks: int) -> list[str]:
    """What FEW prints where there is room for so many more threads."""

    def limit() -> None:
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, most))

    done = subprocess.run(
        [sys.executable, "-c", FEW, str(threads), str((stacks * STACK >> 20) + 512)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_threads_that_the_system_does_not_start() -> None:
    """Asked for they are an error, which says how many there could be; by default fewer do."""
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if most not in (-1, resource.RLIM_INFINITY) and most < STACK:
        pytest.skip("the stacks of threads can not be made so large")
    assert start_few(3, 2) == ["3 0.0"]
    refused, after = start_few(4096, 2)
    assert refused.startswith("ArgumentError threads: the system starts no more than 3 of 4096 threads ("), (
        refused
    )
    assert after == "1 0.0"
    if moepool.get_threads() > 1:
        assert start_few(0, 0) == ["1 0.0"]
