"""The one place where arrays come in.

Whatever array library a caller uses, an op sees an :class:`ArrayView`: an address, a dtype, a shape, strides
and a device. Arrays of NumPy, of CuPy and of PyTorch on a CUDA device are asked directly, everything else
through DLPack, which also covers bfloat16, or the CUDA array interface; no array library but NumPy is
imported. A :class:`Call` checks what an op needs, packs what is not packed, and says in its error which
argument is wrong and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moepool import cuda
from moepool._native import dlpack, handles
from moepool._native.handles import CPU
from moepool.errors import ArgumentError, DtypeError, MoePoolError, StateError, UnsupportedError

__all__ = [
    "CPU",
    "ArrayView",
    "Call",
    "HostArray",
    "device_index",
    "device_name",
    "device_of",
    "floats",
    "host_array",
    "is_plain",
    "on_host",
    "stream_address",
    "view",
]

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")

# A CUDA device whose number nobody tells.
SOME_CUDA = -2

# The default stream by its other name, which DLPack and the CUDA array interface use since 0 is ambiguous
# there.
LEGACY_STREAM = 1

_FLOAT32 = np.dtype(np.float32)
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}


# ---------------------------------------------------------------------------------------------------- devices


def device_index(device: str) -> int:
    """The core's number of a device: "cpu", "cuda" (device 0) or "cuda:N"."""
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind == "cpu" and device == "cpu":
        return CPU
    if kind == "cuda" and (device == "cuda" or (number.isascii() and number.isdigit() and len(number) < 6)):
        return int(number or 0)
    raise ArgumentError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'")


def device_name(device: int) -> str:
    """The inverse of :func:`device_index`."""
    return {CPU: "cpu", SOME_CUDA: "a CUDA device"}.get(device, f"cuda:{device}")


def stream_address(stream: Any) -> int:
    """Address of a CUDA stream: None, an integer, or a stream object of CuPy, PyTorch or any library with the
    protocol."""
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        address = stream.__cuda_stream__()[1]
    elif hasattr(stream, "ptr"):
        address = stream.ptr
    elif hasattr(stream, "cuda_stream"):
        address = stream.cuda_stream
    elif isinstance(stream, int):
        address = stream
    else:
        raise DtypeError(
            f"stream is a {type(stream).__name__}; it must be None, an address or a CUDA stream object"
        )
    return 0 if address == LEGACY_STREAM else int(address)


# ------------------------------------------------------------------------------------------------------ views


class ArrayView(NamedTuple):
    """Memory of an array that was handed in.

    Attributes
    ----------
    address : int
        Of the first element.
    dtype : str
        "float32", "bfloat16", "int64", ...; anything else is a name for an error message.
    shape : tuple of int
    strides : tuple of int
        Bytes.
    device : int
        `CPU` or a CUDA device.
    owner : object
        Keeps the memory alive.
    library : Library or None
        Of `owner`, if that is an array on a CUDA device whose library is known.
    stream : int or None
        The stream that the array says it is used on; None if it says nothing.
    read_only : bool
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    owner: Any
    library: cuda.Library | None = None
    stream: int | None = None
    read_only: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def packed(self) -> bool:
        """Whether the elements follow one another in order, aligned."""
        if isinstance(self.owner, np.ndarray):  # which knows
            flags = self.owner.flags
            return flags.c_contiguous and flags.aligned
        step = _ITEMSIZE[self.dtype]
        if self.size == 0:
            return True
        if self.address % step:
            return False
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return False
            step *= n
        return True

    def overlaps(self, other: ArrayView) -> bool:
        """Whether the memory of this and of another packed array meets."""
        end = self.address + self.size * _ITEMSIZE[self.dtype]
        other_end = other.address + other.size * _ITEMSIZE[other.dtype]
        return self.address < other_end and other.address < end and self.device == other.device


def view(array: Any, name: str, devices: Sequence[int] | None = None, stream: int = 0) -> ArrayView:
    """Describes any array.

    Parameters
    ----------
    array : array
    name : str
        What messages call it.
    devices : sequence of int, optional
        Where it may be, the place where the call runs last. None is anywhere.
    stream : int
        The CUDA stream that is going to use it.
    """
    if isinstance(array, np.ndarray):
        found = _numpy_view(array, name)
    elif (library := cuda.library_of(array)) is not None:
        found = _library_view(library, array, name)
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _dlpack_view(array, name, devices, stream)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _cuda_view(array, name)
    else:
        raise DtypeError(
            f"{name} is a {type(array).__name__}; it must be an array of NumPy, CuPy, PyTorch or a library "
            "that speaks DLPack"
        )
    _check_device(found.device, name, devices)
    return found


def device_of(array: Any, name: str) -> int:
    """The device that an array is on."""
    if isinstance(array, np.ndarray) or cuda.library_of(array) is not None:
        return view(array, name).device
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _dlpack_device(array, name)
    return view(array, name).device


def on_host(array: Any) -> bool:
    """Whether what was handed in is no array on a CUDA device."""
    if isinstance(array, (list, tuple, np.ndarray)):
        return True
    return cuda.library_of(array) is None and not hasattr(array, "__cuda_array_interface__")


def _check_device(device: int, name: str, devices: Sequence[int] | None) -> None:
    if devices is not None and device not in devices:
        raise ArgumentError(
            f"{name} is on {device_name(device)}, but the call runs on {device_name(devices[-1])}: "
            f"copy {name} there first, or make the pool where {name} is"
        )


@lru_cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype, kept since NumPy makes it anew each time, in longer than an op may take."""
    # It does not tell the byte order; for what is not native, dtype.str does.
    return dtype.name if dtype.isnative else dtype.str


def _numpy_view(array: npt.NDArray[Any], name: str = "") -> ArrayView:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(f"{name} is masked, and moepool knows no masks: give {name}.filled(...)")
    dtype = _dtype_name(array.dtype)
    address = array.__array_interface__["data"][0]
    read_only = not array.flags.writeable
    return ArrayView(address, dtype, array.shape, array.strides, CPU, array, read_only=read_only)


def _library_view(library: cuda.Library, array: Any, name: str) -> ArrayView:
    owner, address, dtype, shape, strides, device = library.facts(array, name)
    if not isinstance(dtype, str):
        dtype = _dtype_name(dtype)
    return ArrayView(address, dtype, shape, strides, device, owner, library)


def _dlpack_device(array: Any, name: str) -> int:
    try:
        kind, number = (int(part) for part in array.__dlpack_device__())
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} cannot be read through DLPack: {error}") from error
    if kind not in (dlpack.CPU, dlpack.CUDA, dlpack.CUDA_HOST):
        where = dlpack.DEVICE_NAMES.get(kind, f"DLPack device type {kind}")
        raise ArgumentError(f"{name} is on {where}, which moepool cannot read")
    return number if kind == dlpack.CUDA else CPU


def _dlpack_view(array: Any, name: str, devices: Sequence[int] | None, stream: int) -> ArrayView:
    device = _dlpack_device(array, name)
    _check_device(device, name, devices)
    try:
        # The producer makes our stream wait for its own.
        capsule = array.__dlpack__() if device == CPU else array.__dlpack__(stream=stream or LEGACY_STREAM)
        tensor = dlpack.read(capsule)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        # Of PyTorch for example, if the tensor requires a gradient.
        raise ArgumentError(f"{name} cannot be read through DLPack: {error}") from error
    return ArrayView(tensor.address, tensor.dtype, tensor.shape, tensor.strides, device, tensor.capsule)


def _cuda_view(array: Any, name: str) -> ArrayView:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name} is masked, which moepool cannot read")
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides") or dlpack.compact_strides(shape, dtype.itemsize)
    address, read_only = interface["data"]
    stream = interface.get("stream")
    if stream == 0:
        raise ArgumentError(f"{name} names the stream 0, which the CUDA array interface does not allow")
    return ArrayView(
        address or 0,
        dtype.name if dtype.isnative else dtype.str,
        shape,
        tuple(strides),
        _pointer_device(address or 0),
        array,
        stream=None if stream is None else stream_address(stream),
        read_only=bool(read_only),
    )


def _pointer_device(address: int) -> int:
    """The device of an address that somebody says is CUDA's."""
    try:
        device = handles.pointer_device(address)
    except UnsupportedError:
        return SOME_CUDA
    # An address that the runtime does not know is not read on the host either.
    return SOME_CUDA if device == CPU else device


class _Interface:
    """What NumPy needs to see the memory of a view."""

    def __init__(self, array: ArrayView, typestr: str) -> None:
        self.owner = array.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (array.address, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": typestr,
        }


def is_plain(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any] = _FLOAT32) -> bool:
    """Whether this is an array of NumPy itself, packed and writable, which a call can take as it is."""
    return type(array) is np.ndarray and array.dtype == dtype and array.shape == shape and array.flags.carray


def _as_numpy(array: ArrayView) -> npt.NDArray[Any]:
    """A view on the CPU as a NumPy array, bfloat16 as its bits in uint16."""
    if isinstance(array.owner, np.ndarray):
        return array.owner.view(np.uint16) if array.dtype == "bfloat16" else array.owner
    dtype = np.dtype("uint16" if array.dtype == "bfloat16" else array.dtype)
    if array.size == 0:
        return np.empty(array.shape, dtype)
    return np.asarray(_Interface(array, dtype.str))


def _packed(array: ArrayView, name: str) -> ArrayView:
    """The view itself if it is packed, else one of a packed copy."""
    if array.packed:
        return array
    if array.device == CPU:
        # Not ascontiguousarray, which leaves what is contiguous but not aligned as it is.
        copy = np.array(_as_numpy(array), order="C", copy=True, subok=False)
        return ArrayView(
            copy.__array_interface__["data"][0], array.dtype, copy.shape, copy.strides, CPU, copy
        )
    if array.address % _ITEMSIZE[array.dtype]:
        raise ArgumentError(f"{name} begins at an address that is no multiple of its elements' size")
    if array.library is None:
        raise ArgumentError(
            f"{name} has strides {array.strides}, and moepool does not know its library: pack it first"
        )
    return _library_view(array.library, array.library.packed(array.owner), name)


# -------------------------------------------------------------------------------------------------- arguments


def _check_dtype(array: ArrayView, name: str, dtypes: Sequence[str], remedy: str) -> None:
    if array.dtype not in dtypes:
        choice = " or ".join([", ".join(dtypes[:-1]), dtypes[-1]] if len(dtypes) > 1 else dtypes)
        raise DtypeError(
            f"{name} is {array.dtype}; it must be {choice}: convert it, with {remedy} for example"
        )


def _check_shape(array: ArrayView, name: str, shapes: Sequence[tuple[int, ...]], meaning: str) -> None:
    if array.shape not in shapes:
        choice = " or ".join(str(shape) for shape in shapes)
        raise ArgumentError(f"{name} is of shape {array.shape}; it must be {choice}, that is {meaning}")


class Call:
    """The arrays of one call and the CUDA stream that it runs on.

    First the arrays are taken, which checks them and packs what is not packed; then what the core queues is
    queued inside a `with` statement.

    Parameters
    ----------
    device : int
        Where the call runs.
    stream : optional
        What the caller gave as `stream=`. None is the current stream of the library of `like`.
    like : array, optional
        The argument whose library makes the results.

    Attributes
    ----------
    device : int
    stream : int
        Address; 0, the default stream, on the CPU.

    Notes
    -----
    The core returns when the work is queued, so the memory of every array has to stay what it is until the
    stream has come past that work. CuPy and PyTorch free in the order of a stream: memory that an array gives
    back is used again by work which is queued later on the library's current stream. That is the stream of
    the call, as a rule, and then the call is like any function of the library: neither an argument that was a
    temporary, nor a packed copy, nor a result that is dropped at once is overwritten too early. If the call
    runs on another stream (by `stream=`, or because arrays of two libraries meet), that stream waits for the
    current one at the start, for what arguments hold and for the former users of a result's memory, and the
    current stream waits for the call at the end: everything that may use the memory next comes after it. An
    array that names its stream (CUDA array interface) is treated alike. In which order any other library
    reuses memory nobody knows: the host waits for the call then. In the capture of a graph nothing waits,
    since nothing runs; whoever replays the graph keeps its arrays.
    """

    def __init__(self, device: int, stream: Any = None, like: Any = None) -> None:
        self.device = device
        self.stream = stream_address(stream)
        self._library: cuda.Library | None = None
        self._beside: set[int] = set()  # other streams that the memory of arrays belongs to
        self._unknown = False  # or nobody knows which
        if device == CPU:
            self.stream = 0
            return
        # Arrays of unknown libraries give CuPy arrays, where there is CuPy already.
        own = cuda.library_of(like)
        self._library = own or cuda.library("cupy")
        if stream is None:
            self.stream = own.current_stream(device) if own else cuda.current_stream(device)

    # ------------------------------------------------------------------------------------------------- taking

    def rows(
        self,
        array: Any,
        name: str,
        shapes: Sequence[tuple[int, ...]] | None,
        meaning: str = "",
        dtypes: Sequence[str] = FLOATS,
    ) -> ArrayView:
        """Takes rows of numbers, packed; strided, reversed or broadcast ones are copied.

        Parameters
        ----------
        array : array
        name : str
            What messages call it.
        shapes : sequence of tuple of int, or None
            The shapes that fit; None takes any.
        meaning : str
            What the shapes stand for, for the message.
        dtypes : sequence of str
            The dtypes that fit.
        """
        out = view(array, name, (self.device,), self.stream)
        _check_dtype(out, name, dtypes, f"{name}.astype(numpy.float32)")
        if shapes is not None:
            _check_shape(out, name, shapes, meaning)
        return self._kept(self._pack(out, name))

    def ids(self, array: Any) -> ArrayView:
        """Takes expert ids, (tokens, k) of int32 or int64 with any strides, or nested lists of integers."""
        if isinstance(array, (list, tuple)):
            array = _ids_of_list(array)
        out = view(array, "ids", (CPU, self.device), self.stream)
        _check_dtype(out, "ids", INTEGERS, "ids.astype(numpy.int64)")
        if len(out.shape) != 2 or out.shape[1] < 1:
            raise ArgumentError(f"ids is of shape {out.shape}; it must be (tokens, k) with k at least 1")
        size = _ITEMSIZE[out.dtype]
        # The core reads any strides on the host, if all is aligned.
        if out.device != CPU or any(value % size for value in (out.address, *out.strides)):
            out = self._pack(out, "ids")
        return self._kept(out)

    def output(
        self,
        out: Any,
        shape: tuple[int, ...],
        inputs: Sequence[ArrayView] = (),
        *,
        in_place: bool = False,
    ) -> tuple[ArrayView, Any]:
        """Takes or makes the array that a result is written to.

        Parameters
        ----------
        out : array or None
            Given, it must be float32, writable, C-contiguous and of `shape`; None makes one.
        shape : tuple of int
        inputs : sequence of ArrayView
            What it must not overlap.
        in_place : bool
            Whether it may be exactly one of the inputs.
        """
        if out is None:
            return self._made(shape)
        taken = self._given(out)
        if taken.dtype != "float32":
            raise DtypeError(f"out is {taken.dtype}; it must be float32")
        if taken.shape != shape:
            raise ArgumentError(f"out is of shape {taken.shape}; the result is of shape {shape}")
        if not taken.packed:
            raise ArgumentError(f"out has strides {taken.strides}; it must be C-contiguous and aligned")
        if taken.read_only:
            raise ArgumentError("out is read-only")
        for other in inputs:
            same = in_place and other.address == taken.address and other.dtype == taken.dtype
            if taken.overlaps(other) and not same:
                raise ArgumentError("out overlaps an input of the call")
        return self._kept(taken), out

    def _made(self, shape: tuple[int, ...]) -> tuple[ArrayView, Any]:
        if self.device == CPU:
            result = np.empty(shape, np.float32)
            return _numpy_view(result), result
        if self._library is None:
            raise ArgumentError(
                "the arrays are of no library that moepool makes arrays of: give out=, or import cupy before"
            )
        made = self._library.empty(shape, self.device)
        return self._kept(_library_view(self._library, made, "out")), made

    def _given(self, out: Any) -> ArrayView:
        # DLPack does not say whether an array may be written to.
        known = isinstance(out, np.ndarray) or cuda.library_of(out) is not None
        if not known and hasattr(out, "__cuda_array_interface__"):
            taken = _cuda_view(out, "out")
            _check_device(taken.device, "out", (self.device,))
            return taken
        taken = view(out, "out", (self.device,), self.stream)
        if not known:
            kind = (
                "NumPy array"
                if self.device == CPU
                else "CuPy array, a PyTorch tensor or have __cuda_array_interface__"
            )
            raise ArgumentError(
                f"out is a {type(out).__name__}; for a pool on {device_name(self.device)} it must be a {kind}"
            )
        return taken

    def _pack(self, array: ArrayView, name: str) -> ArrayView:
        """The view itself if it is packed, else one of a packed copy."""
        if array.packed:
            return array
        if array.device != CPU and handles.stream_capturing(self.device, self.stream):
            raise ArgumentError(
                f"{name} has strides {array.strides}; a CUDA graph would use a packed copy after that is "
                "freed: pack it before the capture"
            )
        return _packed(array, name)

    def _kept(self, array: ArrayView) -> ArrayView:
        """Notes which stream the memory belongs to."""
        if array.device == CPU:
            return array
        stream = array.library.current_stream(self.device) if array.library else array.stream
        if stream is None:
            self._unknown = True
        elif stream != self.stream:
            self._beside.add(stream)
        return array

    # ------------------------------------------------------------------------------------------------ queuing

    def require_host(self) -> None:
        """Refuses what needs the host while the stream records a graph, before anything is allocated in
        it."""
        if self.device != CPU and handles.stream_capturing(self.device, self.stream):
            raise StateError(
                "resolving ids needs the host and can not be captured in a CUDA graph: resolve before the "
                "capture, with all experts resident, and capture ops on the route"
            )

    def __enter__(self) -> Call:
        for stream in self._beside:
            handles.stream_order(self.device, stream, self.stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for stream in self._beside:
                handles.stream_order(self.device, self.stream, stream)
            if self._unknown:
                handles.stream_wait(self.device, self.stream)
        except MoePoolError:
            # After a failure of the device, what led to it is what the caller should see.
            if error is None:
                raise


def _ids_of_list(values: Sequence[Any]) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ArgumentError(f"ids is no rectangle of integers: {error}") from None
    # Only integers are converted: a fraction would be cut off, and what int64 cannot hold NumPy makes an
    # object.
    return array.astype(np.int64) if array.dtype.kind == "i" or array.size == 0 else array


# ------------------------------------------------------------------------------------------------ host arrays


class HostArray(NamedTuple):
    """Weights, biases or scales in host memory: `values` has the bits of a bfloat16 in uint16."""

    values: npt.NDArray[Any]
    dtype: str

    def float32(self, index: Any = ...) -> npt.NDArray[np.float32]:
        """The elements at `index`, widened exactly, packed."""
        part = self.values[index]
        if self.dtype == "bfloat16":
            part = (part.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(part, dtype=np.float32)


def host_array(array: Any, name: str, dtypes: Sequence[str]) -> HostArray:
    """Takes an array on the CPU of any shape and strides, without copying it."""
    if (device := device_of(array, name)) != CPU:
        raise ArgumentError(f"{name} is on {device_name(device)}; a store is filled from host memory")
    taken = view(array, name)
    _check_dtype(taken, name, dtypes, f"{name}.astype(numpy.float32)")
    return HostArray(_as_numpy(taken), taken.dtype)


def floats(array: Any, name: str, shape: tuple[int, ...], meaning: str) -> npt.NDArray[np.float32]:
    """Takes float numbers on the CPU, of `shape`, as packed float32."""
    taken = host_array(array, name, FLOATS)
    if taken.values.shape != shape:
        raise ArgumentError(f"{name} is of shape {taken.values.shape}; it must be {shape}, that is {meaning}")
    return taken.float32()
