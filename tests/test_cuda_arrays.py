"""Arrays of CuPy, PyTorch and others on a CUDA device: each gives the bytes of the CPU, or a clear error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import moepool
from tests import cases
from tests.support import F32, assert_same, get, layer_of, put, reference, reference_ffn

pytestmark = pytest.mark.cuda

SMALL = cases.FFNS[0]
# Exact in float16 and bfloat16.
X = np.round(SMALL.x(3) * 4).clip(-60, 60).astype(np.float32)
IDS, WEIGHTS = SMALL.ids(3, "repeats"), SMALL.router(3)
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


@pytest.fixture(scope="module")
def pool(layer: moepool.Layer) -> moepool.Pool:
    return moepool.Pool(layer, 4, device=DEVICE)


@pytest.fixture(scope="module")
def expected(layer: moepool.Layer) -> F32:
    """Of gate, (3, 2, 512)."""
    return reference(layer, X, IDS, "gate")


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return module


class DLPackOnly:
    """An array of which only DLPack is known."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return self.array.__dlpack__(stream=stream)


class InterfaceOnly:
    """An array of which only the CUDA array interface is known."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | changes


# ---------------------------------------------------------------------------------------------------------- x

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "packed": lambda a: a,
    "every second column": lambda a: a.repeat(2, axis=1)[:, ::2],
    "every third row": lambda a: a.repeat(3, axis=0)[::3],
    "transposed": lambda a: a.T.copy().T,
    "columns reversed": lambda a: a[:, ::-1].copy()[:, ::-1],
    "rows reversed": lambda a: a[::-1].copy()[::-1],
    "in the middle": lambda a: a.repeat(2, axis=0).repeat(2, axis=1)[: len(a) * 2 : 2, : a.shape[1] * 2 : 2],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_h15_cupy_arrays_of_any_layout(
    layout: str, dtype: type, cupy: Any, pool: moepool.Pool, expected: F32
) -> None:
    x = LAYOUTS[layout](cupy.asarray(X.astype(dtype)))
    y = moepool.matmul_id(x, IDS, pool.gate)
    assert isinstance(y, cupy.ndarray) and y.device.id == 0 and y.flags.c_contiguous
    assert_same(get(y), expected, layout)


def test_h15_broadcast_and_rows_of_places(
    cupy: Any, pool: moepool.Pool, layer: moepool.Layer, expected: F32
) -> None:
    x = cupy.asarray(X)
    places = cupy.broadcast_to(x[:, None], (3, 2, X.shape[1]))
    for given in (places, places.copy(), cupy.asfortranarray(places)):
        assert_same(get(moepool.matmul_id(given, IDS, pool.gate)), expected, "(T, k, K)")
    one = cupy.broadcast_to(x[0], X.shape)
    right = reference(layer, np.repeat(X[:1], 3, axis=0), IDS, "gate")
    assert_same(get(moepool.matmul_id(one, IDS, pool.gate)), right, "stride 0")


def test_h15_tensors(torch: Any, pool: moepool.Pool, layer: moepool.Layer, expected: F32) -> None:
    t, ids = torch.from_numpy(X).to(DEVICE), torch.from_numpy(IDS.astype(np.int64)).to(DEVICE)
    layouts = (
        t,
        t.half(),
        t.bfloat16(),
        t.T.contiguous().T,
        t.repeat(1, 2)[:, : X.shape[1]],
        t[:, None].squeeze(1),
    )
    for given in layouts:
        y = moepool.matmul_id(given, ids, pool.gate)
        assert isinstance(y, torch.Tensor) and y.dtype == torch.float32 and str(y.device) == DEVICE
        assert_same(y.cpu().numpy(), expected, f"{given.dtype} {given.stride()}")
    places = t[:, None].expand(-1, 2, -1)
    assert_same(moepool.matmul_id(places, ids, pool.gate).cpu().numpy(), expected, "expand")
    right = reference(layer, np.repeat(X[:1], 3, axis=0), IDS, "gate")
    assert_same(moepool.matmul_id(t[:1].expand(3, -1), ids, pool.gate).cpu().numpy(), right, "expand")
    negated = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert negated.is_neg()
    assert_same(moepool.matmul_id(negated, ids, pool.gate).cpu().numpy(), expected, "a negated view")
    with torch.inference_mode():
        assert_same(moepool.matmul_id(t, ids, pool.gate).cpu().numpy(), expected, "inference mode")


def test_tensors_that_are_refused(torch: Any, pool: moepool.Pool) -> None:
    t = torch.from_numpy(X).to(DEVICE)
    before = pool.stats()
    with pytest.raises(moepool.ArgumentError, match=r"x requires a gradient.*detach"):
        moepool.matmul_id(t.clone().requires_grad_(), IDS, pool.gate)
    with pytest.raises(moepool.DtypeError, match="x is float64"):
        moepool.matmul_id(t.double(), IDS, pool.gate)
    with pytest.raises(moepool.ArgumentError, match="layout"):
        moepool.matmul_id(t.to_sparse(), IDS, pool.gate)
    with pytest.raises(moepool.ArgumentError, match="x is on cpu, but the call runs on cuda:0"):
        moepool.matmul_id(t.cpu(), IDS, pool.gate)
    assert pool.stats() == before


def test_arrays_of_other_libraries(cupy: Any, pool: moepool.Pool, expected: F32) -> None:
    x, ids = cupy.asarray(X), cupy.asarray(IDS)
    for other in (DLPackOnly, InterfaceOnly):
        for given in (x, x.astype(cupy.float16)):
            y = moepool.matmul_id(other(given), other(ids), pool.gate)
            assert isinstance(y, cupy.ndarray), "CuPy is imported"
            assert_same(get(y), expected, other.__name__)
        with pytest.raises(moepool.ArgumentError, match="does not know its library: pack it first"):
            moepool.matmul_id(other(cupy.asfortranarray(x)), IDS, pool.gate)
    for version in ({"version": 2}, {"stream": None}, {"stream": 1}, {"stream": 2}):
        y = moepool.matmul_id(InterfaceOnly(x, **version), IDS, pool.gate)
        assert_same(get(y), expected, str(version))
    out = cupy.full(expected.shape, cupy.nan, cupy.float32)
    given = InterfaceOnly(out)
    assert moepool.matmul_id(DLPackOnly(x), IDS, pool.gate, out=given) is given
    assert_same(get(out), expected, "out")


def test_the_stream_of_the_cuda_array_interface_is_waited_for(
    cupy: Any, pool: moepool.Pool, expected: F32, spin: Callable[[], None]
) -> None:
    x, late = cupy.zeros(X.shape, cupy.float32), cupy.asarray(X)
    cupy.cuda.Device(0).synchronize()
    with cupy.cuda.Stream(non_blocking=True) as producer:
        spin()
        x[...] = late
    y = moepool.matmul_id(InterfaceOnly(x, stream=producer.ptr), IDS, pool.gate)
    assert_same(get(y), expected, "produced on another stream")


def test_dlpack_waits_for_the_producer(
    cupy: Any, pool: moepool.Pool, expected: F32, spin: Callable[[], None]
) -> None:
    """The call runs on a stream that is not CuPy's current one."""
    x, late = cupy.zeros(X.shape, cupy.float32), cupy.asarray(X)
    consumer = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        spin()
        x[...] = late
        y = moepool.matmul_id(DLPackOnly(x), IDS, pool.gate, stream=consumer)
        assert_same(get(y), expected, "produced on another stream")


def test_arrays_elsewhere_are_refused_by_name(cupy: Any, pool: moepool.Pool, layer: moepool.Layer) -> None:
    x = cupy.asarray(X)
    before = pool.stats()
    with pytest.raises(moepool.ArgumentError, match="x is on cpu, but the call runs on cuda:0"):
        moepool.matmul_id(X, IDS, pool.gate)
    with pytest.raises(moepool.ArgumentError, match="weights is on cpu, but the call runs on cuda:0"):
        moepool.ExpertFFN(pool)(x, IDS, WEIGHTS)
    with pytest.raises(moepool.ArgumentError, match="out is on cpu"):
        moepool.matmul_id(x, IDS, pool.gate, out=np.zeros((3, 2, 512), np.float32))
    assert pool.stats() == before
    with moepool.Pool(layer, 4) as host:
        for given in (x, DLPackOnly(x), InterfaceOnly(x)):
            with pytest.raises(moepool.ArgumentError, match="x is on cuda:0, but the call runs on cpu"):
                moepool.matmul_id(given, IDS, host.gate)
        with pytest.raises(moepool.ArgumentError, match="ids is on cuda:0, but the call runs on cpu"):
            moepool.matmul_id(X, cupy.asarray(IDS), host.gate)
    with pytest.raises(moepool.ArgumentError, match="a CUDA device, but"):
        moepool.matmul_id(InterfaceOnly(x, data=(4096, False)), IDS, pool.gate)


def test_arrays_on_another_card_are_refused_by_name(cupy: Any, pool: moepool.Pool) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one card only")
    x, ids = put(X, "cuda:1"), put(IDS, "cuda:1")
    for given in (x, DLPackOnly(x), InterfaceOnly(x)):
        with pytest.raises(moepool.ArgumentError, match="x is on cuda:1, but the call runs on cuda:0"):
            moepool.matmul_id(given, IDS, pool.gate)
    with pytest.raises(moepool.ArgumentError, match="ids is on cuda:1, but the call runs on cuda:0"):
        pool.resolve(ids)


def test_a_pool_on_the_second_card_while_the_first_is_current(
    cupy: Any, layer: moepool.Layer, expected: F32
) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one card only")
    with moepool.Pool(layer, 4, device="cuda:1") as pool:
        x = put(np.asfortranarray(X), "cuda:1")
        assert cupy.cuda.runtime.getDevice() == 0
        y = moepool.matmul_id(x, put(IDS, "cuda:1"), pool.gate)
        assert y.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(1):
            assert_same(get(y), expected, "cuda:1")


# -------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_h14_ids_of_both_widths_from_everywhere(
    dtype: type, cupy: Any, pool: moepool.Pool, expected: F32
) -> None:
    x = cupy.asarray(X)
    host: NDArray[Any] = IDS.astype(dtype)
    device = cupy.asarray(host)
    forms = {
        "NumPy": host,
        "list": host.tolist(),
        "NumPy, reversed": host[:, ::-1].copy()[:, ::-1],
        "CuPy": device,
        "CuPy, transposed": device.T.copy().T,
        "CuPy, every second": device.repeat(2, axis=1)[:, ::2],
        "DLPack": DLPackOnly(device),
    }
    for form, ids in forms.items():
        assert_same(get(moepool.matmul_id(x, ids, pool.gate)), expected, form)
    with pool.resolve(device) as one, pool.resolve(host) as other:
        assert (one.hot == other.hot).all() and (one.cold == other.cold).all()


def test_h14_ids_of_tensors(torch: Any, pool: moepool.Pool, expected: F32) -> None:
    x = torch.from_numpy(X).to(DEVICE)
    for ids in (torch.from_numpy(IDS), torch.from_numpy(IDS).long(), torch.from_numpy(IDS).to(DEVICE).long()):
        assert_same(moepool.matmul_id(x, ids, pool.gate).cpu().numpy(), expected, str(ids.dtype))
    with pytest.raises(moepool.DtypeError, match="ids is int16"):
        moepool.matmul_id(x, torch.from_numpy(IDS).to(DEVICE).short(), pool.gate)


@pytest.mark.parametrize("bad", [8, -2, 2**31 - 1, 2**40, -(2**63)])
def test_h02_bad_ids_on_the_host_are_refused(bad: int, cupy: Any, pool: moepool.Pool, expected: F32) -> None:
    ids, x = IDS.astype(np.int64), cupy.asarray(X)
    ids[1, 1] = bad
    before = pool.stats()
    with pytest.raises(moepool.IdError, match=f"{bad} "):
        moepool.matmul_id(x, ids, pool.gate)
    assert pool.stats() == before
    assert_same(get(moepool.matmul_id(x, IDS, pool.gate)), expected, "after a bad id")


@pytest.mark.parametrize("bad", [8, -2, 2**31 - 1, 2**32 + 3, -(2**63)])
@pytest.mark.parametrize("op", ["matmul_id", "ffn", "composed"])
def test_h02_bad_ids_on_the_device_are_nan_and_told_at_the_next_call(
    op: str, bad: int, cupy: Any, layer: moepool.Layer
) -> None:
    """They are never an address: the other places are right, and so is every later call."""
    good = SMALL.ids(3)
    ids = good.astype(np.int64)
    ids[1, 1], good[1, 1] = bad, -1
    x, weights, given = cupy.asarray(X), cupy.asarray(WEIGHTS), cupy.asarray(ids)
    with moepool.Pool(layer, 6, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        if op == "matmul_id":
            y = get(moepool.matmul_id(x, given, pool.gate))
            right = reference(layer, X, good, "gate")
            right[1, 1] = np.nan
        else:
            y = get((ffn if op == "ffn" else ffn.composed)(x, given, weights))
            right = reference_ffn(layer, X, good, WEIGHTS)
            right[1] = np.nan
        assert np.isnan(y[np.isnan(right)]).all()
        assert_same(np.where(np.isnan(right), np.float32(0), y), np.nan_to_num(right), "the others")
        cupy.cuda.Device(0).synchronize()
        with pytest.raises(moepool.IdError, match=rf"earlier step: id {bad} at token 1, place 1 .*\[-1, 8\)"):
            pool.stats()
        pool.stats()  # told once
        y = get(ffn(x, cupy.asarray(good), weights))
        assert_same(y, reference_ffn(layer, X, good, WEIGHTS), "afterwards")


# -------------------------------------------------------------------------------------------------------- out


def test_out_is_written_and_returned(
    cupy: Any, pool: moepool.Pool, layer: moepool.Layer, expected: F32
) -> None:
    x, weights = cupy.asarray(X), cupy.asarray(WEIGHTS)
    whole = cupy.full((3, *expected.shape), cupy.nan, cupy.float32)
    assert moepool.matmul_id(x, IDS, pool.gate, out=whole[1]) is not None
    assert_same(get(whole)[1], expected, "in the middle")
    assert np.isnan(get(whole)[[0, 2]]).all()
    y = cupy.empty(X.shape, cupy.float32)
    assert moepool.ExpertFFN(pool)(x, IDS, weights, out=y) is y
    assert_same(get(y), reference_ffn(layer, X, IDS, WEIGHTS), "ffn")


OUT: dict[str, tuple[Callable[[Any, tuple[int, ...]], Any], str]] = {
    "strided": (lambda cupy, s: cupy.zeros((*s[:-1], 2 * s[-1]), "f4")[..., ::2], "out has strides"),
    "Fortran": (lambda cupy, s: cupy.zeros(s, "f4", order="F"), "out has strides"),
    "broadcast": (lambda cupy, s: cupy.broadcast_to(cupy.zeros(s[-1], "f4"), s), "out has strides"),
    "float16": (lambda cupy, s: cupy.zeros(s, "f2"), "out is float16"),
    "shape": (lambda cupy, s: cupy.zeros(s[1:], "f4"), "out is of shape"),
    "DLPack": (lambda cupy, s: DLPackOnly(cupy.zeros(s, "f4")), "out is a DLPackOnly"),
    "read-only": (
        lambda cupy, s: InterfaceOnly(a := cupy.zeros(s, "f4"), data=(a.data.ptr, True)),
        "out is read-only",
    ),
}


@pytest.mark.parametrize("name", OUT)
def test_out_that_does_not_fit_is_refused(name: str, cupy: Any, pool: moepool.Pool, expected: F32) -> None:
    make, message = OUT[name]
    before = pool.stats()
    with pytest.raises(moepool.ArgumentError, match=message):
        moepool.matmul_id(cupy.asarray(X), IDS, pool.gate, out=make(cupy, expected.shape))
    assert pool.stats() == before


def test_out_must_not_overlap_the_activations(cupy: Any, pool: moepool.Pool, expected: F32) -> None:
    memory = cupy.zeros(X.size + expected.size, cupy.float32)
    x, out = memory[: X.size].reshape(X.shape), memory[X.size - 1 : -1].reshape(expected.shape)
    with pytest.raises(moepool.ArgumentError, match="out overlaps"):
        moepool.matmul_id(x, IDS, pool.gate, out=out)
    moepool.matmul_id(x, IDS, pool.gate, out=memory[X.size :].reshape(expected.shape))


def test_elementwise_ops(cupy: Any) -> None:
    a, b = cases.activations("special", 10, 37, "a"), cases.activations("plain", 10, 37, "b")
    for op in (moepool.add, moepool.swiglu):
        right = op(a, b)
        x, y = cupy.asarray(a), cupy.asarray(b)
        assert_same(get(op(x, y)), right, op.__name__)
        assert_same(get(op(cupy.asfortranarray(x), y[::-1].copy()[::-1])), right, f"{op.__name__}, strided")
        assert op(x, y, out=x) is x
        assert_same(get(x), right, f"{op.__name__}, in place")
        assert op(cupy.zeros((0, 3), "f4"), cupy.zeros((0, 3), "f4")).shape == (0, 3)


# ------------------------------------------------------------------------------------ nothing and temporaries


def test_h16_no_tokens_and_nothing_wanted(cupy: Any, layer: moepool.Layer) -> None:
    x, weights = cupy.asarray(X), cupy.asarray(WEIGHTS)
    with moepool.Pool(layer, 4, device=DEVICE) as pool:
        ffn = moepool.ExpertFFN(pool)
        none = np.empty((0, 2), np.int32)
        for ids in (none, cupy.asarray(none)):
            assert moepool.matmul_id(x[:0], ids, pool.gate).shape == (0, 2, 512)
            assert (
                ffn(x[:0], ids, weights[:0]).shape == ffn.composed(x[:0], ids, weights[:0]).shape == (0, 256)
            )
        skips = np.full((3, 2), -1, np.int32)
        for ids in (skips, cupy.asarray(skips)):
            for y in (
                moepool.matmul_id(x, ids, pool.gate),
                ffn(x, ids, weights),
                ffn.composed(x, ids, weights),
            ):
                assert not get(y).view(np.uint32).any()
        assert pool.stats().steps == 0
        assert_same(get(ffn(x, IDS, weights)), reference_ffn(layer, X, IDS, WEIGHTS), "right afterwards")


def poison(cupy: Any, *arrays: NDArray[Any]) -> None:
    """Takes the memory that arrays of these sizes have just given back, and fills it with NaN."""
    for array in arrays:
        cupy.full(array.size, cupy.nan, cupy.float32)


@pytest.mark.parametrize("other_stream", [False, True])
def test_temporaries_live_until_they_are_read(
    other_stream: bool, cupy: Any, pool: moepool.Pool, expected: F32, spin: Callable[[], None]
) -> None:
    """While the device is busy, their memory is given back and used again by the library."""
    host = np.ascontiguousarray(X[:, ::-1])
    with cupy.cuda.Stream(non_blocking=True) as current:
        stream = cupy.cuda.Stream(non_blocking=True) if other_stream else current
        for round_ in range(50):
            with stream:
                spin()
            ids = cupy.asarray(IDS) if round_ % 2 else IDS
            y = moepool.matmul_id(cupy.asarray(host)[:, ::-1], ids, pool.gate, stream=stream)
            poison(cupy, X, IDS, X)
            gc.collect()
            assert_same(get(y), expected, f"round {round_}")
            del y
            poison(cupy, expected)


def test_temporaries_of_pytorch(torch: Any, pool: moepool.Pool, expected: F32) -> None:
    host = torch.from_numpy(X)
    for stream in (None, torch.cuda.Stream()):
        for round_ in range(50):
            torch.cuda._sleep(1_000_000)
            y = moepool.matmul_id(host.to(DEVICE).T.contiguous().T, IDS, pool.gate, stream=stream)
            torch.full(X.shape, float("nan"), device=DEVICE)
            assert_same(y.cpu().numpy(), expected, f"round {round_}")


def test_libraries_meet_in_one_call(torch: Any, cupy: Any, pool: moepool.Pool, layer: moepool.Layer) -> None:
    """Each on a stream of its own, each late: the call comes after both."""
    right = reference_ffn(layer, X, IDS, WEIGHTS)
    ffn = moepool.ExpertFFN(pool)
    for round_ in range(20):
        with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
            torch.cuda._sleep(2_000_000)
            x = torch.from_numpy(X).to(DEVICE, non_blocking=True)
            weights = cupy.asarray(WEIGHTS) * cupy.float32(1)
            y = ffn(x, IDS, weights)
            del x, weights
            poison(cupy, WEIGHTS)
            assert_same(y.cpu().numpy(), right, f"round {round_}")
