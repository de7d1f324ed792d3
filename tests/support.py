"""What the tests of pools share: layers, the reference product, guarded outputs, and comparison of bytes."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import moepool
from tests import cases

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

# Where pools are tested; the fixture `device` runs through these.
DEVICES = ("cpu", "cuda:0")

# 61 floats: the output then begins at no multiple of a vector, and an overrun of one vector is caught.
GUARD = 61
POISON = np.uint32(0xFFFDEAD1)  # a NaN with a payload, which no op may give


def put(array: NDArray[Any], device: str) -> Any:
    """The array, on a device: itself on the CPU, else a CuPy copy."""
    if device == "cpu":
        return array
    import cupy

    with cupy.cuda.Device(int(device.partition(":")[2])):
        return cupy.asarray(array)


def get(array: Any) -> NDArray[Any]:
    """The array in host memory."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


@dataclass(frozen=True)
class On:
    """Pools and ops on a device for tests that have their arrays in host memory.

    Calling it calls an op with its arrays, ids included, on the device, and gives the result in host memory:
    ``on(moepool.matmul_id, x, ids, pool)``.
    """

    device: str

    def pool(self, layer: moepool.Layer, slots: int, **options: Any) -> moepool.Pool:
        """A pool on the device."""
        return moepool.Pool(layer, slots, device=self.device, **options)

    def put(self, value: Any) -> Any:
        """The value; if it is an array, on the device."""
        return put(value, self.device) if isinstance(value, np.ndarray) else value

    def __call__(self, op: Callable[..., Any], *arguments: Any, **options: Any) -> NDArray[Any]:
        options = {name: self.put(value) for name, value in options.items()}
        return get(op(*map(self.put, arguments), **options))


class Guarded:
    """An `out=` array in the middle of a larger buffer, all of which is NaN before the call.

    Attributes
    ----------
    out
        float32 of the shape asked for, on the device.
    """

    def __init__(self, *shape: int, device: str = "cpu") -> None:
        self._shape, self._size = shape, int(np.prod(shape))
        self._words = put(np.full(self._size + 2 * GUARD, POISON, np.uint32), device)
        self.out: Any = self._words[GUARD : GUARD + self._size].view(np.float32).reshape(shape)

    def check(self, what: object) -> F32:
        """The output in host memory, once it is sure that the call wrote all of it and nothing beside it."""
        words = get(self._words)
        inside = words[GUARD : GUARD + self._size]
        beside = (words != POISON).sum() - (inside != POISON).sum()
        assert not beside, f"{what}: {beside} elements beside the output were written"
        left = (inside == POISON).sum()
        assert not left, f"{what}: {left} of {self._size} elements were not written"
        return inside.view(np.float32).reshape(self._shape)


def assert_same(actual: F32, expected: F32, what: object) -> None:
    """Equal in every bit; the message names `what` and the first difference."""
    assert actual.dtype == expected.dtype == np.float32, f"{what}: {actual.dtype}, {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    a, b = (np.ascontiguousarray(array).view(np.uint32) for array in (actual, expected))
    if (a == b).all():
        return
    at = tuple(int(i) for i in np.argwhere(a != b)[0])
    raise AssertionError(
        f"{what}: {int((a != b).sum())} of {a.size} elements differ, the first at {at}: "
        f"{actual[at]!r} ({a[at]:#010x}), expected {expected[at]!r} ({b[at]:#010x})"
    )


# ----------------------------------------------------------------------------------------------------- layers


def matrix_layer(
    qtype: str, weight: U8, *, scale: F32 | None = None, bias: F32 | None = None
) -> moepool.Layer:
    """A layer of one matrix, "weight", from raw blocks (E, N, row_bytes)."""
    return moepool.ExpertStore.from_arrays(
        weight=weight,
        qtype=qtype,
        scale=None if scale is None else {"weight": scale},
        bias=None if bias is None else {"weight": bias},
    )[0]


def ffn_layer(
    weights: Mapping[str, Any],
    qtype: str | Mapping[str, str],
    *,
    scale: Mapping[str, F32] | None = None,
    bias: Mapping[str, F32] | None = None,
) -> moepool.Layer:
    """A layer of gate, up and down from raw blocks."""
    return moepool.ExpertStore.from_arrays(**weights, qtype=qtype, scale=scale, bias=bias)[0]


def layer_of(ffn: cases.Ffn) -> moepool.Layer:
    """The layer of one of `cases.FFNS`."""
    return ffn_layer(ffn.weights(), {"gate": ffn.gate, "up": ffn.up, "down": ffn.down})


def pool_of(layer: moepool.Layer, slots: int, **options: Any) -> moepool.Pool:
    """A pool on the CPU unless `options` say otherwise."""
    return moepool.Pool(layer, slots, **options)


@cache
def cuda_missing() -> str | None:
    """Why nothing can be tested on a CUDA device here; None if it can."""
    try:
        moepool.memory("cuda:0")
    except moepool.MoePoolError as error:
        return str(error)
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed, which brings the tests' arrays to the device"
    return None


@contextmanager
def few_slots() -> Iterator[None]:
    """Allows what moepool warns of: fewer slots than a token has places, more slots than experts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepool.MoePoolWarning)
        yield


# -------------------------------------------------------------------------------------------------- reference


def products(layer: moepool.Layer, x: F32, name: str = "weight") -> F32:
    """Every row of x times every expert, by the portable kernels from a pool without slots.

    Parameters
    ----------
    layer
    x
        (T, K), or (T, k, K), whose first two axes are then one.
    name
        Of the matrix.

    Returns
    -------
    numpy.ndarray
        float32 (rows of x, E, N).
    """
    rows = x.reshape(-1, x.shape[-1])
    everyone = np.broadcast_to(np.arange(layer.experts, dtype=np.int32), (len(rows), layer.experts))
    with moepool.use_cpu_kernel("portable"), moepool.Pool(layer, 0) as pool:
        table: F32 = moepool.matmul_id(rows, everyone, pool.matrix(name))
        return table


def pick(table: F32, ids: I32) -> F32:
    """What matmul_id gives (T, k, N), out of the `products` of its x: zero rows where an id is -1."""
    tokens, k = ids.shape
    experts, rows = table.shape[1:]
    if not ids.size:
        return np.zeros((tokens, k, rows), np.float32)
    places = np.broadcast_to(table.reshape(tokens, -1, experts, rows), (tokens, k, experts, rows))
    chosen = np.take_along_axis(places, np.maximum(ids, 0)[:, :, None, None], axis=2)[:, :, 0]
    return np.where(ids[:, :, None] < 0, np.float32(0), chosen)


def reference(layer: moepool.Layer, x: F32, ids: I32, name: str = "weight") -> F32:
    """What matmul_id has to give, (T, k, N)."""
    return pick(products(layer, x, name), ids)


def reference_ffn(layer: moepool.Layer, x: F32, ids: I32, weights: F32) -> F32:
    """What an FFN has to give, (T, N): the portable kernels, from a pool without slots, op by op."""
    gate, up = (reference(layer, x, ids, name) for name in ("gate", "up"))
    with moepool.use_cpu_kernel("portable"), moepool.Pool(layer, 0) as pool:
        rows = reference(layer, moepool.swiglu(gate, up), ids, "down")
        with pool.resolve(ids) as route:
            y: F32 = moepool.combine(rows, route, weights)
            return y


def usable_kernels() -> list[str]:
    """The kernel sets that this machine can run, "portable" first."""
    return [name for name, usable in moepool.cpu_kernels().items() if usable]
