"""The C core in Python's terms: integers for addresses, NumPy arrays for tables, errors for statuses.

Nothing outside `moepool._native` sees `ffi` or a C pointer. The defaults and the checks of values live in the
core.

A handle's C object is destroyed when the last reference to its pointer goes. `close` drops one reference, a
call that is under way in another thread holds its own, so closing never frees what is in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from moepool._native import check, ffi, lib
from moepool.errors import StateError

Int32s = npt.NDArray[np.int32]

DTYPES = {"float32": lib.MOEPOOL_F32, "float16": lib.MOEPOOL_F16, "bfloat16": lib.MOEPOOL_BF16}
POLICIES = {
    name: getattr(lib, f"MOEPOOL_POLICY_{name.upper()}")
    for name in ("lru", "static", "lfu", "lfru", "slru", "reelect", "pinned")
}
MISSES = {"stream": lib.MOEPOOL_MISS_STREAM, "host": lib.MOEPOOL_MISS_HOST, "auto": lib.MOEPOOL_MISS_AUTO}
PHASES = {
    "auto": lib.MOEPOOL_PHASE_AUTO,
    "decode": lib.MOEPOOL_PHASE_DECODE,
    "prompt": lib.MOEPOOL_PHASE_PROMPT,
}
TRACE_DECODE: int = lib.MOEPOOL_TRACE_DECODE
TRACE_PREFETCH: int = lib.MOEPOOL_TRACE_PREFETCH
HALVES = {"all": lib.MOEPOOL_ALL, "hot": lib.MOEPOOL_HOT, "cold": lib.MOEPOOL_COLD}
CPU: int = lib.MOEPOOL_CPU
_FLOATS = ffi.typeof("float[]")


def _text(pointer: Any) -> str:
    return str(ffi.string(pointer).decode("utf-8"))


def _address(value: int) -> Any:
    return ffi.cast("void *", value)


def _floats(value: int) -> Any:
    return ffi.cast("float *", value)


def _int32s(array: Int32s) -> Any:
    return ffi.from_buffer("int32_t[]", array)


def _fields(struct: Any) -> dict[str, int]:
    """A struct of numbers as a dict."""
    return {name: getattr(struct, name) for name, _ in ffi.typeof(struct).item.fields}


# ---------------------------------------------------------------------------------------------- build and CPU


class MatrixSpec(NamedTuple):
    """One matrix of a layer to be added: ggml's number of its type, outputs, inputs, and what goes with
    it."""

    type_id: int
    rows: int
    columns: int
    bias: bool
    scale: bool


def build_info() -> str:
    return _text(lib.moepool_build_info())


def types() -> list[tuple[int, str, int, int, int]]:
    """(id, name, block, block_bytes, panel_words) of every weight type."""
    out = []
    info = ffi.new("moepool_type_info *")
    for i in range(lib.moepool_type_count()):
        check(lib.moepool_type_at(i, info))
        out.append((info.id, _text(info.name), info.block, info.block_bytes, info.panel_words))
    return out


def cpu_kernels() -> dict[str, bool]:
    out = {}
    name, usable = ffi.new("const char **"), ffi.new("int32_t *")
    for i in range(lib.moepool_cpu_kernel_count()):
        check(lib.moepool_cpu_kernel_at(i, name, usable))
        out[_text(name[0])] = bool(usable[0])
    return out


def cpu_kernel_lacks() -> dict[str, str]:
    """Why this machine can not run a kernel set, of those that it can not."""
    reasons = {name: lib.moepool_cpu_kernel_lacks(i) for i, name in enumerate(cpu_kernels())}
    return {name: _text(reason) for name, reason in reasons.items() if reason != ffi.NULL}


def cpu_select(name: str | None) -> None:
    check(lib.moepool_cpu_select(ffi.NULL if name is None else name.encode()))


def cpu_selected() -> str:
    return _text(lib.moepool_cpu_selected())


def set_threads(threads: int, cpus: Sequence[int] = ()) -> None:
    check(lib.moepool_set_threads_on(threads, ffi.new("int32_t[]", list(cpus)), len(cpus)))


def get_threads() -> int:
    threads = int(lib.moepool_get_threads())
    if threads < 0:
        check(-threads)
    return threads


# ------------------------------------------------------------------------------------------------------- CUDA


class DeviceInfo(NamedTuple):
    """A CUDA device as the runtime describes it; memory in bytes."""

    name: str
    pci_bus_id: str
    uuid: str
    capability: tuple[int, int]
    total: int
    free: int


def cuda_devices() -> int:
    out = ffi.new("int32_t *")
    check(lib.moepool_cuda_devices(out))
    return int(out[0])


def cuda_device(device: int) -> DeviceInfo:
    info = ffi.new("moepool_device_info *")
    check(lib.moepool_cuda_device(device, info))
    return DeviceInfo(
        _text(info.name),
        _text(info.pci_bus_id),
        _text(info.uuid),
        (info.compute_major, info.compute_minor),
        info.total_bytes,
        info.free_bytes,
    )


def set_pinned_limit(limit: int) -> None:
    check(lib.moepool_set_pinned_limit(limit))


def set_doorbell(**changes: int) -> None:
    """Changes fields of moepool_doorbell_settings."""
    settings = ffi.new("moepool_doorbell_settings *")
    lib.moepool_get_doorbell(settings)
    for name, value in changes.items():
        setattr(settings, name, value)
    check(lib.moepool_set_doorbell(settings))


def get_doorbell() -> dict[str, int]:
    """The fields of moepool_doorbell_settings."""
    settings = ffi.new("moepool_doorbell_settings *")
    lib.moepool_get_doorbell(settings)
    return _fields(settings)


def pointer_device(address: int) -> int:
    out = ffi.new("int32_t *")
    check(lib.moepool_cuda_pointer_device(_address(address), out))
    return int(out[0])


def stream_capturing(device: int, stream: int) -> bool:
    out = ffi.new("int32_t *")
    check(lib.moepool_cuda_stream_capturing(device, _address(stream), out))
    return bool(out[0])


def stream_order(device: int, earlier: int, later: int) -> None:
    check(lib.moepool_cuda_stream_order(device, _address(earlier), _address(later)))


def stream_wait(device: int, stream: int) -> None:
    check(lib.moepool_cuda_stream_wait(device, _address(stream)))


# ---------------------------------------------------------------------------------------------------- handles


class Handle:
    """Owner of one C object."""

    kind: ClassVar[str]

    def __init__(self, pointer: Any, destroy: Callable[[Any], None]) -> None:
        self._pointer = ffi.gc(pointer, destroy)

    @property
    def pointer(self) -> Any:
        pointer = self._pointer
        if pointer is None:
            raise StateError(f"the {self.kind} is closed")
        return pointer

    @property
    def closed(self) -> bool:
        return self._pointer is None

    def close(self) -> None:
        self._pointer = None


class StoreHandle(Handle):
    kind = "store"
    told_of_pinning = False  # the user has been warned

    def __init__(self) -> None:
        out = ffi.new("moepool_store **")
        check(lib.moepool_store_create(out))
        super().__init__(out[0], lib.moepool_store_destroy)

    def add_layer(self, experts: int, matrices: Sequence[MatrixSpec]) -> int:
        specs = [
            {
                "type": m.type_id,
                "has_bias": m.bias,
                "has_scale": m.scale,
                "rows": m.rows,
                "columns": m.columns,
            }
            for m in matrices
        ]
        out = ffi.new("int32_t *")
        check(
            lib.moepool_store_add_layer(
                self.pointer, experts, len(specs), ffi.new("moepool_matrix[]", specs), out
            )
        )
        return int(out[0])

    def pack(self, layer: int, matrix: int, expert: int, count: int, address: int, stride: int) -> None:
        check(lib.moepool_store_pack(self.pointer, layer, matrix, expert, count, _address(address), stride))

    def unpack(self, layer: int, matrix: int, expert: int, out: npt.NDArray[np.uint8]) -> None:
        check(lib.moepool_store_unpack(self.pointer, layer, matrix, expert, ffi.from_buffer(out)))

    def set_bias(self, layer: int, matrix: int, expert: int, bias: npt.NDArray[np.float32]) -> None:
        check(
            lib.moepool_store_set_bias(self.pointer, layer, matrix, expert, ffi.from_buffer("float[]", bias))
        )

    def set_scale(self, layer: int, matrix: int, expert: int, scale: npt.NDArray[np.float32]) -> None:
        check(
            lib.moepool_store_set_scale(
                self.pointer, layer, matrix, expert, ffi.from_buffer("float[]", scale)
            )
        )

    def seal(self) -> None:
        check(lib.moepool_store_seal(self.pointer))

    def layer(self, index: int) -> dict[str, int]:
        """The fields of moepool_layer_info."""
        info = ffi.new("moepool_layer_info *")
        check(lib.moepool_store_layer(self.pointer, index, info))
        return _fields(info)


def pool_defaults() -> dict[str, int]:
    """The fields of moepool_pool_config that are numbers, as moepool_pool_config_init fills them."""
    settings = ffi.new("moepool_pool_config *")
    lib.moepool_pool_config_init(settings)
    return {name: value for name, value in _fields(settings).items() if isinstance(value, int)}


class PoolHandle(Handle):
    kind = "pool"

    def __init__(self, store: StoreHandle, hot: Int32s | None, **config: int) -> None:
        settings = ffi.new("moepool_pool_config *")
        lib.moepool_pool_config_init(settings)
        for name, value in config.items():
            setattr(settings, name, value)
        if hot is not None:
            pointer = _int32s(hot)  # lives in this frame until the core has copied the list
            settings.hot, settings.hot_count = pointer, len(hot)
        out = ffi.new("moepool_pool **")
        check(lib.moepool_pool_create(store.pointer, settings, out))
        super().__init__(out[0], lib.moepool_pool_destroy)
        self._tracing, self._traces = threading.Lock(), 0

    def describe(self, tokens: int, k: int) -> str:
        text = ffi.new("char[]", 512)
        check(lib.moepool_pool_describe(self.pointer, tokens, k, text, 512))
        return _text(text)

    def stats(self) -> dict[str, int]:
        """The fields of moepool_pool_stats."""
        stats = ffi.new("moepool_pool_stats *")
        check(lib.moepool_pool_get_stats(self.pointer, stats))
        return _fields(stats)

    def prefetch(self, experts: Int32s) -> int:
        """How many came in."""
        admitted = ffi.new("int32_t *")
        check(lib.moepool_pool_prefetch(self.pointer, _int32s(experts), len(experts), admitted))
        return int(admitted[0])

    def resize(self, slots: int) -> int:
        """How many slots there are."""
        made = ffi.new("int32_t *")
        check(lib.moepool_pool_resize(self.pointer, slots, made))
        return int(made[0])

    def save(self) -> bytes:
        size = ffi.new("int64_t *")
        room = 0
        while True:  # it has the same size again, unless the slots were changed meanwhile
            data = ffi.new("char[]", max(1, room))
            check(lib.moepool_pool_save(self.pointer, data, room, size))
            if size[0] <= room:
                return bytes(ffi.buffer(data, size[0]))
            room = size[0]

    def load(self, data: bytes) -> None:
        check(lib.moepool_pool_load(self.pointer, ffi.from_buffer(data), len(data)))

    def start_trace(self, room_bytes: int) -> int:
        """The number of this trace: a later one ends it."""
        with self._tracing:
            check(lib.moepool_pool_trace_start(self.pointer, room_bytes))
            self._traces += 1
            return self._traces

    def stop_trace(self, number: int) -> None:
        with self._tracing:
            if number == self._traces:
                check(lib.moepool_pool_trace_stop(self.pointer))

    def take_trace(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """The fields of moepool_trace_arrays, of all steps that were recorded so far."""
        with self._tracing:
            if number != self._traces:
                raise StateError(
                    "a later trace of the pool has ended this one, and what it had not drained is gone"
                )
            return self._take_trace()

    def _take_trace(self) -> dict[str, npt.NDArray[Any]]:
        counts = ffi.new("moepool_trace_counts *")
        check(lib.moepool_pool_trace_fetch(self.pointer, counts))
        lengths = {
            "admission_step": counts.admissions,
            "expert": counts.admissions,
            "slot": counts.admissions,
            "evicted": counts.admissions,
            "ids": counts.places,
        }
        taken = {}
        arrays = ffi.new("moepool_trace_arrays *")
        for name, field in ffi.typeof("moepool_trace_arrays").fields:
            dtype = np.int64 if field.type.item is ffi.typeof("int64_t") else np.int32
            taken[name] = np.empty(lengths.get(name, counts.steps), dtype)
            setattr(arrays, name, ffi.cast(field.type, taken[name].ctypes.data))
        check(lib.moepool_pool_trace_take(self.pointer, counts, arrays))
        return taken

    def tables(self, slot_of: Int32s, expert_in: Int32s) -> None:
        """Both are as long as there are experts; of expert_in only what there are slots is written."""
        check(lib.moepool_pool_tables(self.pointer, _int32s(slot_of), _int32s(expert_in)))


class Ids(NamedTuple):
    """Expert ids in memory: `bits` a number, (tokens, k) of them, strides in bytes."""

    address: int
    bits: int
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _ids(ids: Ids) -> Any:
    out = ffi.new("moepool_ids *")
    out.data, out.bits, out.device = _address(ids.address), ids.bits, ids.device
    out.tokens, out.k = ids.shape
    out.token_stride, out.place_stride = ids.strides
    return out


class RouteHandle(Handle):
    kind = "route"

    def __init__(
        self,
        pool: PoolHandle,
        ids: Ids,
        phase: int,
        stream: int,
        admissions: Int32s | None = None,
    ) -> None:
        """admissions: (n, 2) of expert and slot instead of the policy's."""
        out = ffi.new("moepool_route **")
        if admissions is None:
            check(lib.moepool_pool_resolve(pool.pointer, _ids(ids), phase, _address(stream), out))
        else:
            chosen = ffi.cast("moepool_admission *", admissions.ctypes.data)
            check(
                lib.moepool_pool_resolve_chosen(
                    pool.pointer, _ids(ids), phase, chosen, len(admissions), _address(stream), out
                )
            )
        super().__init__(out[0], lib.moepool_route_release)

    def info(self) -> dict[str, int]:
        """The fields of moepool_route_info."""
        info = ffi.new("moepool_route_info *")
        check(lib.moepool_route_get_info(self.pointer, info))
        return _fields(info)

    def tables(self, hot: Int32s, cold: Int32s) -> None:
        check(lib.moepool_route_tables(self.pointer, _int32s(hot), _int32s(cold)))


# -------------------------------------------------------------------------------------------------------- ops


def _rows(address: int, dtype: int, per_place: bool) -> Any:
    return ffi.new("moepool_rows *", {"data": _address(address), "dtype": dtype, "per_place": per_place})


def matmul_id(
    route: RouteHandle, matrix: int, half: int, x: int, dtype: int, per_place: bool, out: int, stream: int
) -> None:
    rows = _rows(x, dtype, per_place)
    check(lib.moepool_matmul_id(route.pointer, matrix, half, rows, _floats(out), _address(stream)))


def ffn(
    route: RouteHandle, x: int, dtype: int, weights: int, weights_dtype: int, out: int, stream: int
) -> None:
    rows = _rows(x, dtype, False)
    check(
        lib.moepool_ffn(route.pointer, rows, _address(weights), weights_dtype, _floats(out), _address(stream))
    )


def pool_ffn(
    pool: PoolHandle,
    ids: Ids,
    phase: int,
    x: int,
    dtype: int,
    weights: int,
    weights_dtype: int,
    out: int,
    stream: int,
) -> None:
    rows = _rows(x, dtype, False)
    check(
        lib.moepool_pool_ffn(
            pool.pointer,
            _ids(ids),
            phase,
            rows,
            _address(weights),
            weights_dtype,
            _floats(out),
            _address(stream),
        )
    )


def pool_ffn_packed(
    pool: PoolHandle,
    ids: npt.NDArray[Any],
    phase: int,
    x: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
) -> None:
    """The same of packed arrays in host memory, ids of int32 or int64, in a fraction of the time: the structs
    lie on the C stack."""
    (tokens, k), size = ids.shape, ids.itemsize
    buffer = ffi.from_buffer
    check(
        lib.moepool_pool_ffn(
            pool.pointer,
            [(buffer(ids), 8 * size, CPU, tokens, k, k * size, size)],
            phase,
            [(buffer(x), lib.MOEPOOL_F32, 0)],
            buffer(weights),
            lib.MOEPOOL_F32,
            buffer(_FLOATS, out),
            ffi.NULL,
        )
    )


def swiglu(device: int, count: int, gate: int, up: int, out: int, stream: int) -> None:
    check(lib.moepool_swiglu(device, count, _floats(gate), _floats(up), _floats(out), _address(stream)))


def add(device: int, count: int, a: int, b: int, out: int, stream: int) -> None:
    check(lib.moepool_add(device, count, _floats(a), _floats(b), _floats(out), _address(stream)))


def combine(
    route: RouteHandle, columns: int, rows: int, weights: int, weights_dtype: int, out: int, stream: int
) -> None:
    check(
        lib.moepool_combine(
            route.pointer,
            columns,
            _floats(rows),
            _address(weights),
            weights_dtype,
            _floats(out),
            _address(stream),
        )
    )
