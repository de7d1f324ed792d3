"""A CUDA device through CuPy: graphs of layers, their times, and the rates of memory and link."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np

import moepool
from bench.measure import Timing, check_same, gigabytes_a_second, repeated
from bench.workload import F32, I32, portable
from moepool.runner.devices import CUPY_REMEDY

KERNELS = r"""
extern "C" {
// The ids of one layer of a step, as a router in front of it writes them. The last layer's counts the step.
__global__ void router(const int *table, int *ids, long long *step, int layer, int layers, int places,
                       int steps) {
    const long long now = *step;
    for (int i = threadIdx.x; i < places; i += blockDim.x)
        ids[i] = table[((now % steps) * layers + layer) * places + i];
    __syncthreads();
    if (layer == layers - 1 && threadIdx.x == 0) *step = now + 1;
}

__global__ void read_all(const float4 *from, long long count, float *never) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    float sum = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        const float4 v = from[i];
        sum += v.x + v.y + v.z + v.w;
    }
    if (sum == 12345.0f) *never = sum;  // or the compiler would leave the reading out
}
}
"""

READ_BYTES = 4 << 30
COPY_BYTES = 512 << 20


class Gpu:
    """The first CUDA device.

    Attributes
    ----------
    cupy : module
    stream : cupy.cuda.Stream
        On which everything runs; make it current.
    name : str
    """

    def __init__(self) -> None:
        context = click.get_current_context(silent=True)
        bench = f"the bench {context.info_name}" if context else "this bench"
        try:
            moepool.memory("cuda:0")
        except moepool.MoePoolError as error:
            why = re.sub("[:,] (or )?use device cpu$", "", str(error))  # there is no such option
            raise click.ClickException(
                f"{bench} needs a GPU: {why}. Without one there are cpu and peer"
            ) from None
        try:
            import cupy
        except ImportError as error:
            raise click.ClickException(f"{bench} needs CuPy: {CUPY_REMEDY} ({error})") from None
        self.cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.name = str(properties["name"].decode())
        self._processors = int(properties["multiProcessorCount"])
        self.stream = cupy.cuda.Stream(non_blocking=True)
        module = cupy.RawModule(code=KERNELS)
        self._router, self._read_all = (module.get_function(name) for name in ("router", "read_all"))

    def route(self, table: Any, ids: Any, step: Any, layer: int) -> None:
        """Queues the kernel that writes a layer's ids."""
        steps, layers, tokens, k = table.shape
        sizes = (np.int32(layer), np.int32(layers), np.int32(tokens * k), np.int32(steps))
        self._router((1,), (64,), (table, ids, step, *sizes))

    def record(self, call: Callable[[], object]) -> Any:
        """The graph of what a call queues on the stream."""
        self.stream.begin_capture()
        try:
            call()
        finally:
            graph = self.stream.end_capture()
        return graph

    def microseconds(self, call: Callable[[], object]) -> float:
        """What the device takes for what a call queues."""
        first, last = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        first.record(self.stream)
        call()
        last.record(self.stream)
        last.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(first, last)) * 1e3

    # ----------------------------------------------------------------------------------------------- ceilings

    def read_rate(self) -> float:
        """GB/s of a kernel that reads much device memory, the best of several."""

        def best() -> float:
            memory = self.cupy.zeros(READ_BYTES // 4, self.cupy.float32)
            arguments = (memory, np.int64(memory.size // 4), memory)

            def read() -> None:
                for _ in range(4):
                    self._read_all((8 * self._processors,), (512,), arguments)

            self.microseconds(read)
            return min(self.microseconds(read) for _ in range(10)) / 4

        with self.stream:
            rate = gigabytes_a_second(READ_BYTES, best())
        self.cupy.get_default_memory_pool().free_all_blocks()
        return rate

    def copy_rate(self, size: int) -> float:
        """GB/s of the copy engine from page-locked memory, in pieces of `size` bytes, the best of several."""
        runtime = self.cupy.cuda.runtime
        pieces = max(1, COPY_BYTES // size)

        def best() -> float:
            host = self.cupy.cuda.alloc_pinned_memory(pieces * size)
            np.frombuffer(host, np.uint8, pieces * size)[:] = 1
            target = self.cupy.empty(size, self.cupy.uint8)

            def copy() -> None:
                for i in range(pieces):
                    source = host.ptr + i * size
                    runtime.memcpyAsync(
                        target.data.ptr, source, size, runtime.memcpyHostToDevice, self.stream.ptr
                    )

            self.microseconds(copy)
            return min(self.microseconds(copy) for _ in range(5))

        with self.stream:
            rate = gigabytes_a_second(pieces * size, best())
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()
        return rate


class Replay:
    """A graph of a step over several layers. Before each layer a kernel writes the ids of this step.

    Parameters
    ----------
    gpu : Gpu
    pools : sequence of Pool
        Of the layers; one may be there several times.
    trace : numpy.ndarray
        int32 (steps, layers, tokens, k).
    x, weights : numpy.ndarray
        The same for all layers and steps, (tokens, hidden) and (tokens, k).
    """

    def __init__(self, gpu: Gpu, pools: Sequence[moepool.Pool], trace: I32, x: F32, weights: F32) -> None:
        assert trace.shape[1] == len(pools)
        self._gpu, self._pools, self._trace, self._x, self._weights = gpu, pools, trace, x, weights
        self.steps, self.layers = trace.shape[:2]
        cupy = gpu.cupy
        with gpu.stream:
            table, rows, router = (cupy.asarray(array) for array in (trace, x, weights))
            ids = cupy.full(trace.shape[1:], -1, cupy.int32)
            self._step = cupy.zeros(1, cupy.int64)
            self._out = cupy.empty((len(pools), *x.shape), cupy.float32)
            ffns = [moepool.ExpertFFN(pool) for pool in pools]
            gpu.route(table, ids[0], self._step, 0)  # so that the kernel is loaded
            gpu.stream.synchronize()

            def whole() -> None:
                for i, ffn in enumerate(ffns):
                    gpu.route(table, ids[i], self._step, i)
                    ffn(rows, ids[i], router, out=self._out[i])

            def routers() -> None:
                for i in range(len(ffns)):
                    gpu.route(table, ids[i], self._step, i)

            self._graph, self._routers = gpu.record(whole), gpu.record(routers)
        self._kept = (table, rows, router, ids)  # as long as the graphs

    def _round(self, graph: Any) -> None:
        for _ in range(self.steps):
            graph.launch(self._gpu.stream)

    def check(self, what: str, steps: int = 2) -> None:
        """Compares the first and the last layer of the first steps with the portable CPU kernel."""
        with self._gpu.stream:
            self._step.fill(0)
            for step in range(min(steps, self.steps)):
                self._out.fill(self._gpu.cupy.nan)
                self._graph.launch(self._gpu.stream)
                for i in {0, self.layers - 1}:
                    ids = self._trace[step, i]
                    right = portable(self._pools[i].layer, self._x, ids, self._weights)
                    check_same(self._out[i].get(), right, f"{what}, step {step}, layer {i}")
            self._step.fill(0)

    def warm_up(self, seconds: float = 0.05) -> None:
        """Goes round twice and on for a while, so that residency and clocks are what they stay."""
        end = time.perf_counter() + seconds
        for round_ in range(1000):
            self._round(self._graph)
            self._gpu.stream.synchronize()
            if round_ > 0 and time.perf_counter() > end:
                break

    def once(self) -> float:
        """What a layer takes with the kernel in front of it, on average of once round the trace."""
        return self._once(self._graph)

    def time(self, seconds: float) -> tuple[Timing, Timing]:
        """What a layer takes with the kernel in front of it, and what that kernel takes alone."""
        return repeated(self.once, seconds), repeated(lambda: self._once(self._routers), seconds / 10)

    def _once(self, graph: Any) -> float:
        parts = int(self.steps * self.layers)
        return self._gpu.microseconds(lambda: self._round(graph)) / parts
