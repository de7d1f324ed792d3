"""A CUDA device that is none: "cuda:0" computes on the CPU, CuPy and PyTorch are stand-ins over NumPy memory.

What is real is all that Python does around the core: taking arrays of every library, packing them, making
results, choosing and ordering streams, warning.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moepool._native import dlpack, handles

GIB = 1 << 30


@dataclass
class FakeCuda:
    """What happened, and what the device answers.

    Attributes
    ----------
    log
        What was queued, in order: (what, stream), of an ordering (what, earlier, later).
    capturing
        Streams that record a graph.
    pinned
        The bytes that every pool says are page-locked; None is all of the layer.
    room
        The most slots that a pool gets.
    memory
        Addresses that the runtime knows, first and past the last, and their devices.
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    pinned: int | None = None
    room: int = 1 << 30
    memory: list[tuple[int, int, int]] = field(default_factory=list)

    def device_of(self, address: int) -> int:
        return next((device for first, end, device in self.memory if first <= address < end), handles.CPU)


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts the stand-in under moepool."""
    fake = FakeCuda()
    names = ("PoolHandle", "RouteHandle", "matmul_id", "ffn", "pool_ffn", "combine")
    real = {name: getattr(handles, name) for name in names}

    class PoolHandle(real["PoolHandle"]):  # type: ignore[misc, valid-type]
        def __init__(self, store: handles.StoreHandle, hot: Any, **config: int) -> None:
            self.on_cuda = config["device"] >= 0
            self.layer = store.layer(config["layer"])
            if self.on_cuda:
                config["device"], config["slots"] = handles.CPU, min(config["slots"], fake.room)
            super().__init__(store, hot, **config)

        def stats(self) -> dict[str, int]:
            stats: dict[str, int] = super().stats()
            if self.on_cuda:
                stats["pinned_bytes"] = self.layer["bytes"] if fake.pinned is None else fake.pinned
            return stats

    class RouteHandle(real["RouteHandle"]):  # type: ignore[misc, valid-type]
        def __init__(
            self, pool: Any, ids: handles.Ids, phase: int, stream: int, admissions: Any = None
        ) -> None:
            if pool.on_cuda:
                fake.log.append(("resolve", stream))
            super().__init__(pool, ids._replace(device=handles.CPU), phase, stream, admissions)

    def logged(name: str) -> Callable[..., None]:
        def op(*arguments: Any) -> None:
            fake.log.append((name, arguments[-1]))
            real[name](*arguments)

        return op

    def elementwise(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def op(device: int, *arguments: Any) -> None:
            fake.log.append((name, arguments[-1]))
            call(handles.CPU, *arguments)

        return op

    def pool_ffn(pool: Any, ids: handles.Ids, *arguments: Any) -> None:
        if pool.on_cuda:
            where = "pool_ffn" if ids.device == handles.CPU else "pool_ffn by the device"
            fake.log.append((where, arguments[-1]))
        real["pool_ffn"](pool, ids._replace(device=handles.CPU), *arguments)

    patch.setattr(handles, "pool_ffn", pool_ffn)
    patch.setattr(handles, "PoolHandle", PoolHandle)
    patch.setattr(handles, "RouteHandle", RouteHandle)
    for name in ("matmul_id", "ffn", "combine"):
        patch.setattr(handles, name, logged(name))
    for name in ("swiglu", "add"):
        patch.setattr(handles, name, elementwise(name, getattr(handles, name)))
    patch.setattr(handles, "stream_order", lambda _, first, then: fake.log.append(("order", first, then)))
    patch.setattr(handles, "stream_wait", lambda _, stream: fake.log.append(("wait", stream)))
    patch.setattr(handles, "stream_capturing", lambda _, stream: stream in fake.capturing)
    patch.setattr(handles, "pointer_device", fake.device_of)
    device = handles.DeviceInfo("Fake GPU", "0000:01:00.0", "GPU-1", (9, 0), 80 * GIB, 60 * GIB)
    patch.setattr(handles, "cuda_device", lambda index: device)
    for name in ("cupy", "torch"):
        patch.delitem(sys.modules, name, raising=False)
    return fake


# ------------------------------------------------------------------------------------------------------- CuPy


class CuPyArray:
    """cupy.ndarray, as far as moepool and its tests look."""

    def __init__(self, array: NDArray[Any], device: int = 0) -> None:
        self.array, self.number = array, device
        address = array.__array_interface__["data"][0]
        self.data = SimpleNamespace(ptr=address, device_id=device)
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides

    def get(self) -> NDArray[Any]:
        return self.array

    def __getitem__(self, index: Any) -> CuPyArray:
        return CuPyArray(self.array[index], self.number)

    @property
    def T(self) -> CuPyArray:
        return CuPyArray(self.array.T, self.number)


class FakeCuPy(ModuleType):
    """The module cupy. `streams` are its current streams by device."""

    ndarray = CuPyArray

    def __init__(self) -> None:
        super().__init__("cupy")
        self.streams = {0: 0, 1: 0}
        self.current_device = 0
        self.packed: list[int] = []  # devices that were current when something was packed
        self.cuda = SimpleNamespace(
            Device=self._on, get_current_stream=lambda device: SimpleNamespace(ptr=self.streams[device])
        )

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self.current_device = self.current_device, device
        yield
        self.current_device = before

    def asarray(self, array: NDArray[Any]) -> CuPyArray:
        return CuPyArray(np.array(array, order="C"), self.current_device)

    def ascontiguousarray(self, array: CuPyArray) -> CuPyArray:
        assert array.number == self.current_device
        self.packed.append(self.current_device)
        return CuPyArray(np.ascontiguousarray(array.array), array.number)

    def empty(self, shape: tuple[int, ...], dtype: str) -> CuPyArray:
        return CuPyArray(np.full(shape, np.nan, dtype), self.current_device)

    @contextmanager
    def stream(self, address: int) -> Iterator[None]:
        before, self.streams[0] = self.streams[0], address
        yield
        self.streams[0] = before


# ---------------------------------------------------------------------------------------------------- PyTorch


class TorchDtype:
    """torch.dtype: known by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


class TorchTensor:
    """torch.Tensor, as far as moepool looks. bfloat16 is kept as its bits."""

    def __init__(self, array: NDArray[Any], device: int = 0, dtype: str | None = None) -> None:
        self.array = array
        self.device = SimpleNamespace(type="cuda", index=device)
        self.dtype = TorchDtype(dtype or array.dtype.name)
        self.shape = array.shape
        self.requires_grad = False
        self.layout: object = "strided"
        self.negative = False

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def contiguous(self) -> TorchTensor:
        return TorchTensor(np.ascontiguousarray(self.array), self.device.index, self.dtype.name)

    def is_neg(self) -> bool:
        return self.negative

    def resolve_neg(self) -> TorchTensor:
        return TorchTensor(-self.array, self.device.index, self.dtype.name)


class FakeTorch(ModuleType):
    """The module torch. `streams` are its current streams by device."""

    Tensor = TorchTensor
    strided = "strided"
    float32 = TorchDtype("float32")

    def __init__(self) -> None:
        super().__init__("torch")
        self.streams = {0: 0, 1: 0}
        self.started = True
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.started,
            current_stream=lambda device: SimpleNamespace(cuda_stream=self.streams[device]),
        )

    @staticmethod
    def device(kind: str, index: int) -> Any:
        assert kind == "cuda"
        return SimpleNamespace(type=kind, index=index)

    def empty(self, shape: tuple[int, ...], *, dtype: TorchDtype, device: Any) -> TorchTensor:
        assert dtype is self.float32
        return TorchTensor(np.full(shape, np.nan, np.float32), device.index)


# -------------------------------------------------------------------------------------------- other libraries


class CudaInterface:
    """An array that has the CUDA array interface and nothing else."""

    def __init__(self, fake: FakeCuda, array: NDArray[Any], device: int = 0, **interface: Any) -> None:
        self.array = array
        address = array.__array_interface__["data"][0]
        fake.memory.append((address, address + max(1, array.nbytes), device))
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": array.shape,
            "typestr": array.dtype.str,
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
        } | interface


class DLPackOnly:
    """An array that speaks DLPack and nothing else; `streams` are those that consumers named."""

    def __init__(self, array: NDArray[Any], device: tuple[int, int] = (2, 0)) -> None:
        self.array, self.device = array, device
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        tensor = ctypes.cast(
            dlpack._get_pointer(capsule, b"dltensor"), ctypes.POINTER(dlpack._Tensor)
        ).contents
        tensor.device_type, tensor.device_id = self.device
        return capsule


def values(array: Any) -> Any:
    """The memory of any stand-in's array."""
    return array if isinstance(array, np.ndarray) else array.array
