"""Fixtures of the whole suite."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import moepool
from tests.support import DEVICES, On, cuda_missing

# A shell starts jobs in the background with Ctrl-C ignored, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test with a CUDA device among its parameters is one marked `cuda`."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(str(value).startswith("cuda:") for value in parameters):
            item.add_marker(pytest.mark.cuda)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and (reason := cuda_missing()):
        pytest.skip(f"no CUDA device to test on: {reason}")


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device that pools are tested on."""
    return str(request.param)


@pytest.fixture(scope="session")
def on(device: str) -> On:
    """Each device, to call ops on."""
    return On(device)


@pytest.fixture
def settings_kept() -> Iterator[None]:
    """Puts threads and kernels back to their defaults after a test that sets them."""
    yield
    moepool.set_threads(None)
    moepool.use_cpu_kernel(None)


@pytest.fixture(scope="session")
def spin() -> Callable[..., None]:
    """Keeps CuPy's current stream busy, for a few milliseconds unless told otherwise."""
    cupy = pytest.importorskip("cupy")
    source = """extern "C" __global__ void spin(long long cycles) {
        for (long long start = clock64(); clock64() - start < cycles;) {
        }
    }"""
    kernel = cupy.RawKernel(source, "spin")
    return lambda cycles=5_000_000: kernel((1,), (1,), (np.int64(cycles),))
