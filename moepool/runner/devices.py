"""Which devices this build and this machine offer."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np

import moepool
from moepool import arrays
from moepool._native import handles
from moepool.errors import ArgumentError, MoePoolError, UnsupportedError

Dense = Literal["numpy", "cupy"]

CUPY_REMEDY = 'pip install cupy-cuda13x (the extra "cuda" of moepool)'


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device that this process sees.

    Attributes
    ----------
    name : str
        "cuda:N".
    card : str
        What it is; "" if it cannot be used.
    capability : str
        Compute capability, "9.0" for example; "" if it cannot be used.
    memory : moepool.Memory or None
        None if it cannot be used.
    problem : str
        Why it cannot be used; "" if it can.
    """

    name: str
    card: str
    capability: str
    memory: moepool.Memory | None
    problem: str


def cuda_devices() -> list[CudaDevice]:
    """The CUDA devices that this process sees, usable or not.

    Raises
    ------
    UnsupportedError
        There is none: no CUDA in this build, no driver or too old a one, no card.
    """
    return [_cuda_device(index) for index in range(handles.cuda_devices())]


def _cuda_device(index: int) -> CudaDevice:
    name = f"cuda:{index}"
    try:
        info, memory = handles.cuda_device(index), moepool.memory(name)
    except MoePoolError as error:
        return CudaDevice(name, "", "", None, str(error))
    return CudaDevice(name, info.name, "{}.{}".format(*info.capability), memory, "")


def available_devices() -> dict[str, moepool.Memory]:
    """Memory of "cpu" and of every CUDA device that can be used, by name.

    Without a CUDA build, a driver or a device there is only "cpu"; that is no error.
    """
    devices = {"cpu": moepool.memory("cpu")}
    with suppress(MoePoolError):
        devices |= {device.name: device.memory for device in cuda_devices() if device.memory is not None}
    return devices


def import_cupy(device: str) -> ModuleType:
    """CuPy, which moves activations to `device`.

    Raises
    ------
    UnsupportedError
        It is not installed; or there is no device that it could be of use for, which is said first.
    """
    handles.cuda_devices()
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedError(
            f"on {device} the runner needs CuPy to move activations ({error}): {CUPY_REMEDY}"
        ) from None


def dense_module(dense: Dense, device: str) -> ModuleType:
    """The array module for all but the experts; "cupy" gets `device` for its current one."""
    if dense == "numpy":
        return np
    if not device.startswith("cuda"):
        raise ArgumentError(f"--dense cupy computes on a CUDA device, not on {device}: give --device cuda:0")
    cupy = import_cupy(device)
    cupy.cuda.Device(arrays.device_index(device)).use()
    return cupy
