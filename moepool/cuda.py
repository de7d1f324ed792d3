"""CUDA as Python meets it: the libraries whose arrays may be handed in, their streams, page-locked memory.

No array library is imported here. Whoever hands in an array of one has imported it, so it is found among the
modules of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from moepool import checks
from moepool._native import handles
from moepool.errors import ArgumentError

__all__ = [
    "Facts",
    "Library",
    "current_stream",
    "get_pinned_limit",
    "library",
    "library_of",
    "set_doorbell",
    "set_pinned_limit",
]


class Facts(NamedTuple):
    """Where an array lies; `owner` keeps its memory alive. Strides are in bytes. The dtype is a name or
    NumPy's."""

    owner: Any
    address: int
    dtype: str | np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int


class Library(Protocol):
    """What moepool asks of an array library."""

    module: Any

    def owns(self, array: Any) -> bool:
        """Whether it is an array of this library in the memory of a CUDA device."""

    def facts(self, array: Any, name: str) -> Facts:
        """Describes one of its arrays; `name` is what messages call it."""

    def packed(self, array: Any) -> Any:
        """A C-contiguous array of the same values, made on the library's current stream."""

    def empty(self, shape: tuple[int, ...], device: int) -> Any:
        """A float32 array of any content."""

    def current_stream(self, device: int) -> int:
        """Address of the stream that the library gives its work to, in this thread."""


class CuPy:
    """Arrays of CuPy."""

    def __init__(self, module: Any) -> None:
        self.module = self._cupy = module
        self._array_type = module.ndarray

    def owns(self, array: Any) -> bool:
        return isinstance(array, self._array_type)

    def facts(self, array: Any, name: str) -> Facts:
        memory = array.data
        return Facts(array, memory.ptr, array.dtype, array.shape, array.strides, memory.device_id)

    def packed(self, array: Any) -> Any:
        with self._cupy.cuda.Device(array.data.device_id):
            return self._cupy.ascontiguousarray(array)

    def empty(self, shape: tuple[int, ...], device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.empty(shape, "float32")

    def current_stream(self, device: int) -> int:
        return int(self._cupy.cuda.get_current_stream(device).ptr)


class Torch:
    """CUDA tensors of PyTorch."""

    def __init__(self, module: Any) -> None:
        self.module = self._torch = module
        self._array_type = module.Tensor

    def owns(self, array: Any) -> bool:
        return isinstance(array, self._array_type) and array.device.type == "cuda"

    def facts(self, array: Any, name: str) -> Facts:
        # Refuses what its DLPack export refuses, at a tenth of the time.
        if array.requires_grad:
            raise ArgumentError(f"{name} requires a gradient, but moepool has none: give {name}.detach()")
        if array.layout is not self._torch.strided:
            raise ArgumentError(f"{name} is of the layout {array.layout}; it must be strided")
        if array.is_neg():
            array = array.resolve_neg()  # the imaginary part of a conjugate: its memory holds the negative
        try:
            address = array.data_ptr()
        except RuntimeError as error:  # traced by a compiler: there is no memory yet
            raise ArgumentError(f"{name} has no memory: {error}") from None
        size = array.element_size()
        strides = tuple(size * step for step in array.stride())
        dtype = str(array.dtype).removeprefix("torch.")
        return Facts(array, address, dtype, tuple(array.shape), strides, array.device.index)

    def packed(self, array: Any) -> Any:
        return array.contiguous()

    def empty(self, shape: tuple[int, ...], device: int) -> Any:
        return self._torch.empty(shape, dtype=self._torch.float32, device=self._torch.device("cuda", device))

    def current_stream(self, device: int) -> int:
        # Asking would start CUDA in a process where PyTorch does without.
        if not self._torch.cuda.is_initialized():
            return 0
        return int(self._torch.cuda.current_stream(device).cuda_stream)


_KINDS: dict[str, tuple[type[CuPy] | type[Torch], str]] = {
    "cupy": (CuPy, "ndarray"),
    "torch": (Torch, "Tensor"),
}


_found: dict[str, Library] = {}


def library(name: str) -> Library | None:
    """The library "cupy" or "torch", if this process has imported it."""
    module = sys.modules.get(name)
    found = _found.get(name)
    if found is None or found.module is not module:
        kind, array_type = _KINDS[name]
        if not hasattr(module, array_type):  # another thread may be importing it right now
            return None
        found = _found[name] = kind(module)
    return found


def _imported() -> Iterator[Library]:
    for name in _KINDS:
        if (found := library(name)) is not None:
            yield found


def library_of(array: Any) -> Library | None:
    """The library whose array in the memory of a CUDA device this is, None if it is no such array."""
    name = type(array).__module__.partition(".")[0]
    if name not in _KINDS:  # then it may still be of a subclass
        return next((found for found in _imported() if found.owns(array)), None)
    found = library(name)
    return found if found is not None and found.owns(array) else None


def current_stream(device: int) -> int:
    """The stream of a call whose arrays tell none: the first current stream of an imported library that is
    not the default one, else the default stream."""
    return next((stream for found in _imported() if (stream := found.current_stream(device))), 0)


# ---------------------------------------------------------------------------------------- page-locked memory

_pinned_limit: int | None = None


def set_pinned_limit(limit: int | None) -> None:
    """Sets how much host memory this process page-locks for CUDA, over all stores.

    A layer is page-locked when its first pool on a CUDA device is made, piece by piece of about 64 MiB until
    the limit or the system refuses one. What is not page-locked reaches the device through a small
    page-locked ring: slower, with the same results.

    Parameters
    ----------
    limit : int or None
        Bytes, at least 0. None is no limit, which is the default. What is page-locked already stays so.

    Raises
    ------
    ArgumentError
        `limit` is no integer, negative or past 2^63.

    Examples
    --------
    >>> moepool.set_pinned_limit(8 << 30)
    >>> moepool.get_pinned_limit()
    8589934592
    >>> moepool.set_pinned_limit(None)
    """
    global _pinned_limit
    if limit is not None:
        limit = checks.integer("the limit", limit)
    if limit is not None and not 0 <= limit < 2**63:
        raise ArgumentError(f"the limit is {limit} bytes; it must be at least 0, or None for no limit")
    handles.set_pinned_limit(2**63 - 1 if limit is None else limit)
    _pinned_limit = limit


def get_pinned_limit() -> int | None:
    """The limit that :func:`set_pinned_limit` has set, in bytes; None if there is none.

    Returns
    -------
    int or None
    """
    return _pinned_limit


# ----------------------------------------------------------------------------------------------- the doorbell


def set_doorbell(*, timeout: float = 1.0, host_nodes: bool | None = None) -> None:
    """Sets how steps on a CUDA device ask the CPU for the misses that it is to compute.

    Holds for steps that are launched or captured from then on, `host_nodes` for pools that have taken no step
    yet. What is not given gets its default.

    Parameters
    ----------
    timeout : float
        Seconds that a step waits for the CPU, at least 1e-6. After that its rows and those of later steps of
        the pool are NaN without another wait, and calls that use the pool raise :class:`StateError`. For as
        long as the CPU takes up no request other pools give up after 10 milliseconds, so that a graph of
        many layers waits once. A display's watchdog ends kernels after 2 seconds.
    host_nodes : bool, optional
        True: a host function in the stream or graph asks, and no kernel waits; some 35 to 80 microseconds a
        layer slower. False: kernels wait. None: kernels wait where that is safe, which it is not under
        Windows.

    Raises
    ------
    ArgumentError
        A value is wrong.

    Examples
    --------
    >>> moepool.set_doorbell(timeout=0.5)
    >>> moepool.set_doorbell()
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 1e-6 <= timeout <= 1e6:
        raise ArgumentError(f"timeout is {timeout!r}; it must be a number of seconds, 1e-6 to 1e6")
    if host_nodes is not None and not isinstance(host_nodes, bool):
        raise ArgumentError(f"host_nodes is {host_nodes!r}; it must be True, False or None")
    handles.set_doorbell(timeout_us=round(timeout * 1e6), host_nodes=-1 if host_nodes is None else host_nodes)
