"""Every way to compute: each CPU kernel set that this machine can run, and each other device.

Tests that hold kernels to the specification run over `BACKENDS`. Arrays go in and come out in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import moepool
from tests import cases
from tests.support import DEVICES, On, few_slots, layer_of, matrix_layer, usable_kernels

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Backend:
    """A device, and of the CPU the kernel set."""

    device: str
    kernel: str | None = None

    def __str__(self) -> str:
        return self.kernel or self.device

    @contextmanager
    def _on(self) -> Iterator[On]:
        with nullcontext() if self.kernel is None else moepool.use_cpu_kernel(self.kernel):
            yield On(self.device)

    def matmul_id(
        self,
        qtype: str,
        weight: U8,
        x: NDArray[Any],
        ids: I32,
        scale: F32 | None = None,
        bias: F32 | None = None,
    ) -> F32:
        """``moepool.matmul_id`` over a pool that holds half of the experts, to have places of both kinds."""
        layer = matrix_layer(qtype, weight, scale=scale, bias=bias)
        with self._on() as on, few_slots(), on.pool(layer, len(weight) // 2) as pool:
            return on(moepool.matmul_id, x, ids, pool)

    def swiglu(self, gate: F32, up: F32) -> F32:
        """``moepool.swiglu``."""
        with self._on() as on:
            return on(moepool.swiglu, gate, up)

    def combine(self, rows: F32, ids: I32, weights: NDArray[Any], experts: int) -> F32:
        """``moepool.combine`` of place rows, by the route of a pool of that many experts."""
        layer = matrix_layer("f32", np.zeros((experts, 1, 4), np.uint8))
        with self._on() as on, on.pool(layer, 0) as pool, pool.resolve(on.put(ids)) as route:
            return on(moepool.combine, rows, route, weights)

    def layer(self, ffn: cases.Ffn, x: F32, ids: I32, weights: F32) -> F32:
        """``moepool.ExpertFFN`` over a pool that holds half of the experts."""
        layer = layer_of(ffn)
        with self._on() as on, few_slots(), on.pool(layer, ffn.experts // 2) as pool:
            return on(moepool.ExpertFFN(pool), x, ids, weights)


BACKENDS = [Backend("cpu", kernel) for kernel in usable_kernels()]
BACKENDS += [Backend(device) for device in DEVICES if device != "cpu"]
