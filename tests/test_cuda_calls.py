"""What Python does around a call on a CUDA device: arrays of every library in and out, the order of streams,
capture, warnings.

The device is a stand-in; test_cuda_arrays.py and test_cuda_pool.py do the same on a real one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moepool
from moepool._native import handles
from tests import cases, fake_cuda
from tests.fake_cuda import (
    CudaInterface,
    CuPyArray,
    DLPackOnly,
    FakeCuda,
    FakeCuPy,
    FakeTorch,
    TorchTensor,
    values,
)
from tests.support import F32, assert_same, layer_of, reference, reference_ffn

SMALL = cases.FFNS[0]
X, IDS, WEIGHTS = SMALL.x(3), SMALL.ids(3, "some"), SMALL.router(3)


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


@pytest.fixture(scope="module")
def expected(layer: moepool.Layer) -> F32:
    return reference(layer, X, IDS, "gate")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def cupy(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    module = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def torch(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    module = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def pool(fake: FakeCuda, layer: moepool.Layer) -> moepool.Pool:
    return moepool.Pool(layer, 4, device="cuda:0")


def bfloat16(array: F32) -> TorchTensor:
    return TorchTensor((array.view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16")


# --------------------------------------------------------------------------------------------- arrays come in

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "packed": lambda a: a,
    "every second column": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_h15_strided_device_arrays_are_packed_by_their_own_library(
    layout: str, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool, expected: F32
) -> None:
    laid = LAYOUTS[layout](X)
    for make, kind in ((CuPyArray, CuPyArray), (TorchTensor, TorchTensor)):
        y = moepool.matmul_id(make(laid), make(LAYOUTS[layout](IDS)), pool.gate)
        assert type(y) is kind
        assert_same(values(y), expected, f"{kind.__name__}, {layout}")
    assert bool(cupy.packed) == (layout != "packed")


def test_h15_broadcast_rows(cupy: FakeCuPy, pool: moepool.Pool, layer: moepool.Layer) -> None:
    wide = np.broadcast_to(X[0], X.shape)
    y = moepool.matmul_id(CuPyArray(wide), IDS, pool.gate)
    assert_same(values(y), reference(layer, np.ascontiguousarray(wide), IDS, "gate"), "stride 0")


@pytest.mark.parametrize("ids", [IDS, IDS.astype(np.int64)], ids=["int32", "int64"])
def test_h14_ids_on_either_side(ids: Any, cupy: FakeCuPy, pool: moepool.Pool, expected: F32) -> None:
    for given in (
        ids,
        ids.tolist(),
        CuPyArray(ids),
        ids[:, ::-1].copy()[:, ::-1],
        CuPyArray(np.asfortranarray(ids)),
    ):
        assert_same(values(moepool.matmul_id(CuPyArray(X), given, pool.gate)), expected, type(given).__name__)


def test_bfloat16_tensors(torch: FakeTorch, pool: moepool.Pool, layer: moepool.Layer) -> None:
    x = (X.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    y = moepool.matmul_id(bfloat16(x), IDS, pool.gate)
    assert_same(values(y), reference(layer, x, IDS, "gate"), "bfloat16")


def test_the_negative_of_a_view_is_seen(torch: FakeTorch, pool: moepool.Pool, expected: F32) -> None:
    """A conjugate's imaginary part: PyTorch negates it when it is read."""
    tensor = TorchTensor(-X)
    tensor.negative = True
    assert_same(values(moepool.matmul_id(tensor, IDS, pool.gate)), expected, "negated")


def test_a_whole_layer_in_each_library(
    cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool, layer: moepool.Layer
) -> None:
    ffn = moepool.ExpertFFN(pool)
    right = reference_ffn(layer, X, IDS, WEIGHTS)
    for make in (CuPyArray, TorchTensor):
        for call in (ffn, ffn.composed):
            y = call(make(X), IDS, make(WEIGHTS))
            assert type(y) is make
            assert_same(values(y), right, make.__name__)
    with pool.resolve(CuPyArray(IDS)) as route:
        assert_same(values(ffn(CuPyArray(X), route, TorchTensor(WEIGHTS))), right, "two libraries")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "NumPy": (lambda: X, "x is on cpu, but the call runs on cuda:0"),
    "another device": (lambda: CuPyArray(X, 1), "x is on cuda:1, but the call runs on cuda:0"),
    "another device, PyTorch": (lambda: TorchTensor(X, 1), "x is on cuda:1"),
    "another device, DLPack": (lambda: DLPackOnly(X, (2, 1)), "x is on cuda:1"),
    "host, DLPack": (lambda: DLPackOnly(X, (1, 0)), "x is on cpu"),
    "float64": (lambda: CuPyArray(X.astype(np.float64)), "x is float64"),
    "shape": (lambda: CuPyArray(X[:, :32]), "x is of shape"),
    "misaligned": (
        lambda: CuPyArray(np.frombuffer(b"x" + X.tobytes(), np.float32, offset=1).reshape(X.shape)),
        "x begins at an address",
    ),
    "list": (lambda: X.tolist(), "x is a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arrays_are_refused(
    name: str, fake: FakeCuda, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool
) -> None:
    """By name, and before the pool takes a step."""
    make, message = REFUSED[name]
    with pytest.raises(moepool.ArgumentError, match=message):
        moepool.matmul_id(make(), IDS, pool.gate)
    with pytest.raises(moepool.ArgumentError, match=message):
        moepool.ExpertFFN(pool)(make(), IDS, CuPyArray(WEIGHTS))
    with pytest.raises(moepool.ArgumentError, match="weights is "):
        moepool.ExpertFFN(pool)(CuPyArray(X), IDS, make())
    assert fake.log == []


def test_what_pytorch_would_not_export_is_refused(torch: FakeTorch, pool: moepool.Pool) -> None:
    tensor = TorchTensor(X)
    tensor.requires_grad = True
    with pytest.raises(moepool.ArgumentError, match=r"x requires a gradient.*x\.detach\(\)"):
        moepool.matmul_id(tensor, IDS, pool.gate)
    tensor = TorchTensor(X)
    tensor.layout = "sparse_coo"
    with pytest.raises(moepool.ArgumentError, match="layout sparse_coo"):
        moepool.matmul_id(tensor, IDS, pool.gate)

    class Traced(TorchTensor):
        def data_ptr(self) -> int:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    with pytest.raises(moepool.ArgumentError, match="x has no memory"):
        moepool.matmul_id(Traced(X), IDS, pool.gate)


def test_device_arrays_do_not_go_into_a_pool_on_the_cpu(
    cupy: FakeCuPy, torch: FakeTorch, fake: FakeCuda, layer: moepool.Layer
) -> None:
    with moepool.Pool(layer, 4) as pool:
        for x in (CuPyArray(X), TorchTensor(X), DLPackOnly(X), CudaInterface(fake, X)):
            with pytest.raises(moepool.ArgumentError, match="x is on cuda:0, but the call runs on cpu"):
                moepool.matmul_id(x, IDS, pool.gate)
        with pytest.raises(moepool.ArgumentError, match="ids is on cuda:1, but the call runs on cpu"):
            moepool.matmul_id(X, CuPyArray(IDS, 1), pool.gate)
        with pytest.raises(moepool.ArgumentError, match="out is on cuda:0"):
            moepool.matmul_id(X, IDS, pool.gate, out=CuPyArray(np.zeros((3, 2, 512), np.float32)))
    with pytest.raises(moepool.ArgumentError, match="b is on cpu, but the call runs on cuda:0"):
        moepool.add(CuPyArray(X), X)
    with pytest.raises(
        moepool.ArgumentError, match="weight is on cuda:0; a store is filled from host memory"
    ):
        moepool.ExpertStore.from_arrays(weight=CuPyArray(np.zeros((1, 32, 32), np.float32)), qtype="q8_0")


# ---------------------------------------------------------------------------------------- libraries not known


def test_dlpack_names_the_stream_of_the_call(
    fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool, expected: F32
) -> None:
    """The default stream by DLPack's number for it. The host waits, since nobody knows who reuses memory."""
    x = DLPackOnly(X)
    y = moepool.matmul_id(x, IDS, pool.gate)
    assert type(y) is CuPyArray, "CuPy was imported"
    assert_same(values(y), expected, "DLPack")
    with cupy.stream(0x70):
        moepool.matmul_id(x, IDS, pool.gate)
    moepool.matmul_id(x, IDS, pool.gate, stream=0x90)
    assert x.streams == [1, 0x70, 0x90]
    assert fake.log == [
        *(("resolve", 0), ("matmul_id", 0), ("wait", 0)),
        *(("resolve", 0x70), ("matmul_id", 0x70), ("wait", 0x70)),
        # The result is CuPy's, whose current stream is the default one.
        *(("order", 0, 0x90), ("resolve", 0x90), ("matmul_id", 0x90), ("order", 0x90, 0), ("wait", 0x90)),
    ]


def test_without_any_library_a_result_needs_out(fake: FakeCuda, pool: moepool.Pool, expected: F32) -> None:
    x, memory = DLPackOnly(X), np.zeros_like(expected)
    with pytest.raises(moepool.ArgumentError, match="give out="):
        moepool.matmul_id(x, IDS, pool.gate)
    out = CudaInterface(fake, memory)
    assert moepool.matmul_id(x, IDS, pool.gate, out=out) is out
    assert_same(memory, expected, "out")
    assert x.streams == [1, 1]
    assert fake.log == [("resolve", 0), ("matmul_id", 0), ("wait", 0)]


def test_the_cuda_array_interface_and_its_stream(
    fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool, expected: F32
) -> None:
    """Its stream comes before the call, and comes after it again before its memory can go."""
    y = moepool.matmul_id(CudaInterface(fake, X, stream=0x50), IDS, pool.gate)
    assert_same(values(y), expected, "__cuda_array_interface__")
    order = [("order", 0x50, 0), ("resolve", 0), ("matmul_id", 0), ("order", 0, 0x50)]
    assert fake.log == order
    fake.log.clear()
    moepool.matmul_id(CudaInterface(fake, X, stream=1), IDS, pool.gate)  # the default stream itself
    assert fake.log == [("resolve", 0), ("matmul_id", 0)]
    fake.log.clear()
    moepool.matmul_id(CudaInterface(fake, X, stream=None), IDS, pool.gate)
    moepool.matmul_id(CudaInterface(fake, X, version=2), IDS, pool.gate)
    assert fake.log == [("resolve", 0), ("matmul_id", 0), ("wait", 0)] * 2


INTERFACES: dict[str, tuple[Callable[[FakeCuda], Any], str]] = {
    "strided": (lambda fake: CudaInterface(fake, np.asfortranarray(X)), "does not know its library: pack it"),
    "another device": (lambda fake: CudaInterface(fake, X, 1), "x is on cuda:1"),
    "not a device's address": (
        lambda fake: CudaInterface(fake, X, data=(4096, False)),
        "x is on a CUDA device, but the call runs on cuda:0",
    ),
    "masked": (lambda fake: CudaInterface(fake, X, mask=object()), "x is masked"),
    "stream 0": (lambda fake: CudaInterface(fake, X, stream=0), "the stream 0"),
    "big-endian": (lambda fake: CudaInterface(fake, X, typestr=">f4"), "x is >f4"),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_interfaces_that_are_refused(name: str, fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool) -> None:
    make, message = INTERFACES[name]
    with pytest.raises(moepool.ArgumentError, match=message):
        moepool.matmul_id(make(fake), IDS, pool.gate)
    with pytest.raises(moepool.ArgumentError, match="pack it first"):
        moepool.matmul_id(DLPackOnly(np.asfortranarray(X)), IDS, pool.gate)
    assert fake.log == []


# -------------------------------------------------------------------------------------------------------- out


def test_out_is_written_and_returned(
    fake: FakeCuda, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool, expected: F32
) -> None:
    for make in (CuPyArray, TorchTensor, lambda a: CudaInterface(fake, a)):
        memory = np.full_like(expected, np.nan)
        out = make(memory)
        assert moepool.matmul_id(CuPyArray(X), IDS, pool.gate, out=out) is out
        assert_same(memory, expected, type(out).__name__)


OUT: dict[str, tuple[Callable[[FakeCuda, tuple[int, ...]], Any], str]] = {
    "NumPy": (lambda fake, s: np.zeros(s, np.float32), "out is on cpu, but the call runs on cuda:0"),
    "another device": (lambda fake, s: CuPyArray(np.zeros(s, np.float32), 1), "out is on cuda:1"),
    "strided": (lambda fake, s: CuPyArray(np.zeros(s, np.float32)[::-1]), "out has strides"),
    "float16": (lambda fake, s: TorchTensor(np.zeros(s, np.float16)), "out is float16"),
    "shape": (lambda fake, s: CuPyArray(np.zeros(s[1:], np.float32)), "out is of shape"),
    "DLPack": (
        lambda fake, s: DLPackOnly(np.zeros(s, np.float32)),
        "out is a DLPackOnly; .* must be a CuPy array",
    ),
    "read-only": (
        lambda fake, s: CudaInterface(fake, a := np.zeros(s, np.float32), data=(a.ctypes.data, True)),
        "out is read-only",
    ),
}


@pytest.mark.parametrize("name", OUT)
def test_out_that_does_not_fit_is_refused(
    name: str, fake: FakeCuda, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool, expected: F32
) -> None:
    make, message = OUT[name]
    with pytest.raises(moepool.ArgumentError, match=message):
        moepool.matmul_id(CuPyArray(X), IDS, pool.gate, out=make(fake, expected.shape))
    assert fake.log == []


def test_out_must_not_overlap_the_activations(cupy: FakeCuPy, pool: moepool.Pool, expected: F32) -> None:
    memory = np.zeros(X.size + expected.size, np.float32)
    x, out = memory[: X.size].reshape(X.shape), memory[X.size - 1 : -1].reshape(expected.shape)
    with pytest.raises(moepool.ArgumentError, match="out overlaps"):
        moepool.matmul_id(CuPyArray(x), IDS, pool.gate, out=CuPyArray(out))
    a = CuPyArray(X.copy())
    assert moepool.add(a, CuPyArray(X), out=a) is a
    assert_same(a.array, X + X, "in place")


# ---------------------------------------------------------------------------------------------------- streams


def test_calls_run_on_the_current_stream_of_the_library_of_x(
    fake: FakeCuda, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool
) -> None:
    """Without an event, since the library's own order is the call's."""
    cupy.streams[0], torch.streams[0] = 0x10, 0x20
    moepool.matmul_id(CuPyArray(X), IDS, pool.gate)
    moepool.matmul_id(TorchTensor(X), IDS, pool.gate)
    moepool.ExpertFFN(pool)(TorchTensor(X), IDS, TorchTensor(WEIGHTS))
    moepool.add(CuPyArray(X), CuPyArray(X))
    moepool.swiglu(TorchTensor(X), TorchTensor(X))
    with pool.resolve(TorchTensor(IDS)) as route:
        moepool.combine(CuPyArray(np.zeros((3, 2, 5), np.float32)), route, CuPyArray(WEIGHTS))
    assert fake.log == [
        *(("resolve", 0x10), ("matmul_id", 0x10)),
        *(("resolve", 0x20), ("matmul_id", 0x20)),
        ("pool_ffn", 0x20),
        *(("add", 0x10), ("swiglu", 0x20)),
        *(("resolve", 0x20), ("combine", 0x10)),
    ]


def test_another_stream_is_put_between_what_came_before_and_what_comes_after(
    fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool
) -> None:
    cupy.streams[0] = 0x10
    moepool.matmul_id(CuPyArray(X[:, ::-1].copy()[:, ::-1]), CuPyArray(IDS), pool.gate, stream=0x90)
    between = [("order", 0x10, 0x90), ("resolve", 0x90), ("matmul_id", 0x90), ("order", 0x90, 0x10)]
    assert fake.log == between
    fake.log.clear()
    with pytest.raises(moepool.IdError):  # also if the call fails in the middle
        moepool.matmul_id(CuPyArray(X), [[99, 0]] * 3, pool.gate, stream=0x90)
    assert fake.log == [("order", 0x10, 0x90), ("resolve", 0x90), ("order", 0x90, 0x10)]


def test_arrays_of_two_libraries_meet_on_the_stream_of_x(
    fake: FakeCuda, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool
) -> None:
    cupy.streams[0], torch.streams[0] = 0x10, 0x20
    moepool.ExpertFFN(pool)(TorchTensor(X), IDS, CuPyArray(WEIGHTS))
    assert fake.log == [("order", 0x10, 0x20), ("pool_ffn", 0x20), ("order", 0x20, 0x10)]


def test_streams_may_be_objects_and_the_default_one_has_two_names(
    fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool
) -> None:
    class Stream:
        ptr = 0x90

    moepool.matmul_id(CuPyArray(X), IDS, pool.gate, stream=1)
    moepool.matmul_id(CuPyArray(X), IDS, pool.gate, stream=0)
    assert fake.log == [("resolve", 0), ("matmul_id", 0)] * 2
    fake.log.clear()
    cupy.streams[0] = 0x90
    moepool.matmul_id(CuPyArray(X), IDS, pool.gate, stream=Stream())
    assert fake.log == [("resolve", 0x90), ("matmul_id", 0x90)]


def test_host_ids_are_resolved_on_whatever_stream_is_in_use(
    fake: FakeCuda, cupy: FakeCuPy, torch: FakeTorch, pool: moepool.Pool
) -> None:
    pool.resolve(IDS).release()
    torch.streams[0] = 0x20
    pool.resolve(IDS).release()
    torch.started = False  # then it has no streams, and asking would start CUDA
    pool.resolve(IDS).release()
    cupy.streams[0] = 0x10
    pool.resolve(IDS).release()
    assert fake.log == [("resolve", stream) for stream in (0, 0x20, 0, 0x10)]


def test_the_device_takes_steps_whose_ids_it_has(
    fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool, layer: moepool.Layer
) -> None:
    """Also in a capture, if all is packed: of a copy nobody knows how long a graph uses it."""
    ffn = moepool.ExpertFFN(pool)
    cupy.streams[0] = 0x10
    fake.capturing.add(0x10)
    x, weights = CuPyArray(X), CuPyArray(WEIGHTS)
    right = reference_ffn(layer, X, IDS, WEIGHTS)
    fake.log.clear()
    for ids in (IDS, IDS.astype(np.int64)):
        assert_same(values(ffn(x, CuPyArray(ids), weights)), right, str(ids.dtype))
    assert fake.log == [("pool_ffn by the device", 0x10)] * 2
    strided = {"x": X, "ids": IDS, "weights": WEIGHTS}
    for name, array in strided.items():
        arguments = {"x": x, "ids": CuPyArray(IDS), "weights": weights}
        arguments[name] = CuPyArray(np.asfortranarray(array))
        with pytest.raises(moepool.ArgumentError, match=f"{name} has strides .* pack it before the capture"):
            ffn(**arguments)
    assert len(fake.log) == 2 and cupy.packed == []
    for given in (IDS, IDS.tolist(), DLPackOnly(IDS)):
        with pytest.raises(moepool.StateError, match="captured"):
            ffn(x, given, weights)
    with pytest.raises(moepool.StateError, match="captured"):
        ffn.composed(x, CuPyArray(IDS), weights)
    fake.capturing.clear()
    assert_same(values(ffn(x, CuPyArray(np.asfortranarray(IDS)), weights)), right, "packed on the device")


def test_h21_resolving_in_a_capture_is_refused_before_anything_is_made(
    fake: FakeCuda, cupy: FakeCuPy, pool: moepool.Pool
) -> None:
    x, weights = CuPyArray(X[:, ::-1].copy()[:, ::-1]), CuPyArray(WEIGHTS)
    with pool.resolve(IDS) as route:
        fake.log.clear()
        fake.capturing.add(0x10)
        cupy.streams[0] = 0x10
        for call in (
            lambda: pool.resolve(IDS),
            lambda: moepool.matmul_id(x, IDS, pool.gate),
            lambda: moepool.ExpertFFN(pool)(x, IDS, weights),
            lambda: moepool.ExpertFFN(pool).composed(x, CuPyArray(IDS), weights),
        ):
            with pytest.raises(moepool.StateError, match="captured in a CUDA graph"):
                call()
        assert fake.log == [] and cupy.packed == []
        moepool.ExpertFFN(pool)(CuPyArray(X), route, weights)
        assert fake.log == [("ffn", 0x10)]


# --------------------------------------------------------------------------------------------------- warnings


def test_fewer_slots_than_asked_for_are_told(fake: FakeCuda, layer: moepool.Layer) -> None:
    fake.room = 3
    record = layer.record_bytes
    with pytest.warns(moepool.MoePoolWarning) as caught:
        pool = moepool.Pool(layer, 6, device="cuda:0")
    assert pool.slots == pool.stats().slots == 3
    message = str(caught[0].message)
    assert f"6 slots of {record} bytes were asked for, {6 * record} bytes in all, and 3 were made" in message
    assert f"half of the memory that nobody else uses, of which {60 << 30} bytes are left" in message
    assert caught[0].filename == __file__
    with pytest.warns(moepool.MoePoolWarning, match=f"and 3 were made: budget_bytes is {3 * record}"):
        moepool.Pool(layer, 6, device="cuda:0", budget_bytes=3 * record)
    with pytest.warns(moepool.MoePoolWarning, match="9 slots for a layer of 8 experts"):
        fake.room = 100
        assert moepool.Pool(layer, 9, device="cuda:0").slots == 8


def test_h17_what_is_not_page_locked_is_told_once_a_store(fake: FakeCuda) -> None:
    layer = layer_of(SMALL)
    fake.pinned = 4096
    with pytest.warns(
        moepool.MoePoolWarning, match="4096 of [0-9]+ bytes .* page-locked .the system refused more"
    ):
        assert moepool.Pool(layer, 2, device="cuda:0").stats().pinned_bytes == 4096
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moepool.Pool(layer, 2, device="cuda:0")
        moepool.Pool(layer, 2)
        fake.pinned = None
        moepool.Pool(layer_of(SMALL), 2, device="cuda:0")
    fake.pinned = 0
    moepool.set_pinned_limit(0)
    try:
        with pytest.warns(moepool.MoePoolWarning, match=r"moepool.set_pinned_limit\(0\)"):
            moepool.Pool(layer_of(SMALL), 2, device="cuda:0")
    finally:
        moepool.set_pinned_limit(None)


def test_the_limit_of_page_locked_memory() -> None:
    assert moepool.get_pinned_limit() is None
    moepool.set_pinned_limit(1 << 30)
    assert moepool.get_pinned_limit() == 1 << 30
    for wrong in (-1, 2**63):
        with pytest.raises(moepool.ArgumentError, match=f"the limit is {wrong} bytes"):
            moepool.set_pinned_limit(wrong)
    with pytest.raises(moepool.ArgumentError, match="the limit is 1.5; it must be an integer"):
        moepool.set_pinned_limit(1.5)  # type: ignore[arg-type]
    assert moepool.get_pinned_limit() == 1 << 30
    moepool.set_pinned_limit(None)
    assert moepool.get_pinned_limit() is None


def test_without_a_usable_device_everything_says_so(layer: moepool.Layer) -> None:
    """Nothing is stood in for: a machine without a GPU. The CPU goes on working."""
    try:
        handles.cuda_devices()
    except moepool.UnsupportedError:
        pass
    else:
        pytest.skip("there is a GPU")
    for call in (
        lambda: moepool.Pool(layer, 2, device="cuda:0"),
        lambda: moepool.memory("cuda:0"),
        lambda: handles.cuda_device(0),
        lambda: handles.stream_order(0, 1, 2),
        lambda: handles.stream_wait(0, 0),
        lambda: handles.stream_capturing(0, 0),
        lambda: handles.pointer_device(4096),
    ):
        with pytest.raises(moepool.UnsupportedError, match="CUDA"):
            call()
    assert moepool.matmul_id(X, IDS, moepool.Pool(layer, 2).gate).shape == (3, 2, 512)
