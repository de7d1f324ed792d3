"""Reads a DLPack capsule: what any array library hands over, bfloat16 and device memory included.

NumPy's own reader knows neither. The structures are those of dlpack.h, version 0.8, whose layout DLPack keeps
for capsules named "dltensor".
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

# DLDeviceType. Pinned host memory is as good as ordinary memory for the CPU.
CPU, CUDA, CUDA_HOST = 1, 2, 3
DEVICE_NAMES = {CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cpu", 8: "metal", 10: "rocm", 13: "cuda managed memory"}

# DLDataTypeCode and bits.
DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Tensor(NamedTuple):
    """What a capsule describes; its memory lives as long as `capsule`."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    device_type: int
    device_id: int
    capsule: Any


def compact_strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of packed elements of `size` bytes."""
    return tuple(size * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def read(capsule: Any) -> Tensor:
    """Describes the tensor of a fresh, unused capsule. The capsule stays unused and frees the tensor when it
    goes."""
    tensor = ctypes.cast(_get_pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    shape = tuple(tensor.shape[: tensor.ndim])
    size = tensor.bits // 8
    if tensor.strides:
        strides = tuple(size * step for step in tensor.strides[: tensor.ndim])
    else:
        strides = compact_strides(shape, size)
    dtype = DTYPES.get((tensor.code, tensor.bits), f"DLPack type {tensor.code} of {tensor.bits} bits")
    if tensor.lanes != 1:
        dtype = f"{dtype} in {tensor.lanes} lanes"
    address = (tensor.data or 0) + tensor.byte_offset
    return Tensor(address, dtype, shape, strides, tensor.device_type, tensor.device_id, capsule)
