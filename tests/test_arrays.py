"""Arrays coming in: every dtype, layout and library gives the bytes of the packed NumPy array, or a clear
error."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import moepool
from moepool import arrays
from moepool._native import dlpack
from tests import cases
from tests.support import F32, assert_same, matrix_layer

EXPERTS, ROWS, COLUMNS = 8, 40, 64
IDS = np.array([[3, 1], [0, -1], [7, 7]], np.int32)


@pytest.fixture(scope="module")
def pool() -> moepool.Pool:
    weight = cases.tame_blocks("q8_0", EXPERTS * ROWS, COLUMNS, "arrays").reshape(EXPERTS, ROWS, -1)
    return moepool.Pool(matrix_layer("q8_0", weight), EXPERTS)


@pytest.fixture(scope="module")
def x() -> F32:
    """(3, 64), exact in bfloat16 and float16."""
    return np.round(cases.activations("plain", 3, COLUMNS, "arrays") * 8).clip(-100, 100).astype(np.float32)


@pytest.fixture(scope="module")
def expected(pool: moepool.Pool, x: F32) -> F32:
    return moepool.matmul_id(x, IDS, pool)


def bits_of_bfloat16(values: F32) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


class Foreign:
    """An array of some other library: DLPack is all it has.

    Parameters
    ----------
    array
        Its memory.
    code
        DLPack's code of the dtype, if it is another than NumPy's.
    device
        What it says where it is.
    """

    def __init__(
        self, array: NDArray[Any], code: int | None = None, device: tuple[int, int] = (1, 0)
    ) -> None:
        self.array, self.code, self.device = array, code, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self) -> Any:
        capsule = self.array.__dlpack__()
        tensor = ctypes.cast(
            dlpack._get_pointer(capsule, b"dltensor"), ctypes.POINTER(dlpack._Tensor)
        ).contents
        tensor.device_type, tensor.device_id = self.device
        if self.code is not None:
            tensor.code = self.code
        return capsule


class Exported(Foreign):
    """One that hands over a copy, which the capsule alone keeps alive."""

    def __dlpack__(self) -> Any:
        return Foreign(self.array.copy(), self.code, self.device).__dlpack__()


def bfloat16(values: F32) -> Foreign:
    return Foreign(bits_of_bfloat16(values), code=4)


# ------------------------------------------------------------------------------------------------ activations

LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "packed": np.ascontiguousarray,
    "every second column": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "every third row": lambda a: np.repeat(a, 3, axis=0)[::3],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "columns reversed": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "rows reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "misaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "subclass": lambda a: a.view(np.matrix) if a.ndim == 2 else a,
}

LIBRARIES: dict[str, Callable[[F32], Any]] = {
    "float32": lambda a: a,
    "float16": lambda a: a.astype(np.float16),
    "DLPack float32": Foreign,
    "DLPack float16": lambda a: Foreign(a.astype(np.float16)),
    "DLPack bfloat16": bfloat16,
    "DLPack pinned": lambda a: Foreign(a, device=(3, 0)),
}


# NumPy exports neither of these two.
LAYOUTS_OF_LIBRARIES = [
    (library, layout)
    for library in LIBRARIES
    for layout in LAYOUTS
    if not (library.startswith("DLPack") and layout in ("read-only", "misaligned"))
]


@pytest.mark.parametrize(("library", "layout"), LAYOUTS_OF_LIBRARIES)
def test_h15_activations_in_any_dtype_and_layout(
    library: str, layout: str, pool: moepool.Pool, x: F32, expected: F32
) -> None:
    given = LIBRARIES[library](x)
    if isinstance(given, Foreign):
        given.array = LAYOUTS[layout](given.array)
    else:
        given = LAYOUTS[layout](given)
    assert_same(moepool.matmul_id(given, IDS, pool), expected, f"{library}, {layout}")


def test_h15_broadcast_rows(pool: moepool.Pool, x: F32) -> None:
    """Stride 0, from NumPy and through DLPack."""
    one = np.broadcast_to(x[0], (3, COLUMNS))
    expected = moepool.matmul_id(np.ascontiguousarray(one), IDS, pool)
    assert_same(moepool.matmul_id(one, IDS, pool), expected, "NumPy")
    wide = np.lib.stride_tricks.as_strided(x, (3, COLUMNS), (0, 4))
    assert_same(moepool.matmul_id(Foreign(wide), IDS, pool), expected, "DLPack")


def test_rows_of_places(pool: moepool.Pool, x: F32, expected: F32) -> None:
    """(T, k, K) with the token's row at each place is (T, K), also broadcast."""
    places = np.broadcast_to(x[:, None], (3, 2, COLUMNS))
    for given in (places, np.ascontiguousarray(places), Foreign(np.ascontiguousarray(places))):
        assert_same(moepool.matmul_id(given, IDS, pool), expected, type(given).__name__)


def test_capsules_without_strides_are_packed(pool: moepool.Pool, x: F32, expected: F32) -> None:
    class Bare(Foreign):
        def __dlpack__(self) -> Any:
            capsule = super().__dlpack__()
            pointer = dlpack._get_pointer(capsule, b"dltensor")
            tensor = ctypes.cast(pointer, ctypes.POINTER(dlpack._Tensor)).contents
            tensor.strides = None
            return capsule

    assert_same(moepool.matmul_id(Bare(x), IDS, pool), expected, "no strides")


def test_byte_offsets_of_capsules_are_added(pool: moepool.Pool, x: F32, expected: F32) -> None:
    class Offset(Foreign):
        def __dlpack__(self) -> Any:
            capsule = super().__dlpack__()
            pointer = dlpack._get_pointer(capsule, b"dltensor")
            tensor = ctypes.cast(pointer, ctypes.POINTER(dlpack._Tensor)).contents
            tensor.data -= 64
            tensor.byte_offset = 64
            return capsule

    assert_same(moepool.matmul_id(Offset(x), IDS, pool), expected, "byte_offset")


REFUSED: dict[str, tuple[Callable[[F32], Any], type[Exception], str]] = {
    "float64": (lambda a: a.astype(np.float64), TypeError, r"x is float64; .*x.astype\(numpy.float32\)"),
    "int32": (lambda a: a.astype(np.int32), TypeError, "x is int32"),
    "bool": (lambda a: a > 0, TypeError, "x is bool"),
    "complex": (lambda a: a.astype(np.complex64), TypeError, "x is complex64"),
    "big-endian": (lambda a: a.astype(">f4"), TypeError, "x is >f4"),
    "uint16": (bits_of_bfloat16, TypeError, "x is uint16"),
    "object": (lambda a: a.astype(object), TypeError, "x is object"),
    "list": (lambda a: a.tolist(), TypeError, "x is a list"),
    "None": (lambda a: None, TypeError, "x is a NoneType"),
    "DLPack float64": (lambda a: Foreign(a.astype(np.float64)), TypeError, "x is float64"),
    "DLPack float8": (
        lambda a: Foreign(a.astype(np.int8), code=10),
        TypeError,
        "x is DLPack type 10 of 8 bits",
    ),
    "one dimension": (
        lambda a: a[0],
        ValueError,
        r"x is of shape \(64,\); it must be \(3, 64\) or \(3, 2, 64\)",
    ),
    "too few columns": (lambda a: a[:, :32], ValueError, r"x is of shape \(3, 32\)"),
    "too few tokens": (lambda a: a[:2], ValueError, r"x is of shape \(2, 64\)"),
    "other places": (lambda a: np.zeros((3, 3, 64), np.float32), ValueError, r"x is of shape \(3, 3, 64\)"),
    "on a GPU": (lambda a: Foreign(a, device=(2, 1)), ValueError, "x is on cuda:1, but the call runs on cpu"),
    "on an AMD GPU": (
        lambda a: Foreign(a, device=(10, 0)),
        ValueError,
        "x is on rocm, which moepool cannot read",
    ),
    "nowhere known": (lambda a: Foreign(a, device=(99, 0)), ValueError, "x is on DLPack device type 99"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_activations_are_refused(name: str, pool: moepool.Pool, x: F32) -> None:
    """With the reason, and before the pool takes a step."""
    make, error, message = REFUSED[name]
    before = pool.stats()
    with pytest.raises(error, match=message) as caught:
        moepool.matmul_id(make(x), IDS, pool)
    assert isinstance(caught.value, moepool.ArgumentError)
    assert pool.stats() == before


def test_an_array_that_only_cuda_can_read_is_refused(pool: moepool.Pool) -> None:
    class OnDevice:
        __cuda_array_interface__ = {"data": (4096, False), "shape": (3, 64), "typestr": "<f4", "version": 3}

    with pytest.raises(moepool.ArgumentError, match="x is on a CUDA device, but the call runs on cpu"):
        moepool.matmul_id(OnDevice(), IDS, pool)


def test_a_library_that_will_not_export_is_quoted(pool: moepool.Pool) -> None:
    class Unwilling(Foreign):
        def __dlpack__(self) -> Any:
            raise BufferError("this array requires a gradient")

    with pytest.raises(
        moepool.ArgumentError, match="x cannot be read through DLPack: this array requires a grad"
    ):
        moepool.matmul_id(Unwilling(np.zeros((3, 64), np.float32)), IDS, pool)


# -------------------------------------------------------------------------------------------------------- ids

ID_LAYOUTS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "packed": np.ascontiguousarray,
    "every second place": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "places reversed": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "tokens reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "misaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "inside a record": lambda a: np.rec.fromarrays([a.astype(np.int8), a], names=["pad", "ids"]).ids,
    "DLPack": Foreign,
    "DLPack, transposed": lambda a: Foreign(np.ascontiguousarray(a.T).T),
    "list": lambda a: a.tolist(),
    "tuple of arrays": tuple,
}


@pytest.mark.parametrize("layout", ID_LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_h14_ids_of_both_widths_in_any_layout(
    layout: str, dtype: type, pool: moepool.Pool, x: F32, expected: F32
) -> None:
    given = ID_LAYOUTS[layout](IDS.astype(dtype))
    assert_same(moepool.matmul_id(x, given, pool), expected, layout)
    with pool.resolve(given) as route:
        # One slot for every expert, taken in the order in which they came.
        assert (pool.residents()[1][route.hot] == np.where(IDS < 0, pool.residents()[1][-1], IDS)).all()


def test_ids_that_are_broadcast(pool: moepool.Pool, x: F32) -> None:
    same = np.broadcast_to(np.int64(5), (3, 2))
    assert_same(
        moepool.matmul_id(x, same, pool), moepool.matmul_id(x, np.ascontiguousarray(same), pool), "stride 0"
    )


IDS_REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "bool": (IDS > 0, TypeError, "ids is bool; it must be int32 or int64"),
    "float32": (IDS.astype(np.float32), TypeError, "ids is float32"),
    "uint8": (IDS.astype(np.uint8), TypeError, r"ids is uint8; .* with ids.astype\(numpy.int64\)"),
    "uint32": (IDS.astype(np.uint32), TypeError, "ids is uint32"),
    "uint64": (IDS.astype(np.uint64), TypeError, "ids is uint64"),
    "int16": (IDS.astype(np.int16), TypeError, "ids is int16"),
    "big-endian": (IDS.astype(">i8"), TypeError, "ids is >i8"),
    "list of fractions": ([[0.5, 1]], TypeError, "ids is float64"),
    "list of booleans": ([[True, False]], TypeError, "ids is bool"),
    "list of huge numbers": ([[2**63, 2**63]], TypeError, "ids is uint64"),
    "list of larger ones": ([[2**70, 0]], TypeError, "ids is object"),
    "list of words": ([["a", "b"]], TypeError, "ids is "),
    "ragged list": ([[0, 1], [2]], ValueError, "ids is no rectangle"),
    "empty list": ([], ValueError, r"ids is of shape \(0,\); it must be \(tokens, k\)"),
    "no place": ([[], [], []], ValueError, r"ids is of shape \(3, 0\); .* k at least 1"),
    "one dimension": (IDS[0], ValueError, r"ids is of shape \(2,\)"),
    "three dimensions": (IDS[None], ValueError, r"ids is of shape \(1, 3, 2\)"),
    "on a GPU": (Foreign(IDS, device=(2, 0)), ValueError, "ids is on cuda:0, but the call runs on cpu"),
    "a number": (3, TypeError, "ids is a int"),
}


def test_masked_arrays_are_refused(pool: moepool.Pool, x: F32) -> None:
    with pytest.raises(moepool.ArgumentError, match=r"x is masked, .* x.filled"):
        moepool.matmul_id(np.ma.array(x), IDS, pool)
    with pytest.raises(moepool.ArgumentError, match=r"ids is masked"):
        moepool.matmul_id(x, np.ma.array(IDS), pool)


@pytest.mark.parametrize("name", IDS_REFUSED)
def test_other_ids_are_refused(name: str, pool: moepool.Pool, x: F32) -> None:
    ids, error, message = IDS_REFUSED[name]
    before = pool.stats()
    for call in (lambda: moepool.matmul_id(x, ids, pool), lambda: pool.resolve(ids)):
        with pytest.raises(error, match=message) as caught:
            call()
        assert isinstance(caught.value, moepool.ArgumentError)
    assert pool.stats() == before


@pytest.mark.parametrize("bad", [EXPERTS, EXPERTS + 1, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_h02_an_id_out_of_range_is_refused_with_its_position(
    bad: int, dtype: type, pool: moepool.Pool, x: F32, expected: F32
) -> None:
    """And the next call is right."""
    ids = IDS.astype(dtype)
    ids[1, 1] = bad
    before = pool.stats()
    with pytest.raises(IndexError, match=rf"{bad}\b") as caught:
        moepool.matmul_id(x, ids, pool)
    assert isinstance(caught.value, moepool.IdError)
    # Token 1, place 1, and the range.
    assert all(part in str(caught.value) for part in ("1", str(EXPERTS)))
    assert pool.stats() == before
    assert_same(moepool.matmul_id(x, IDS, pool), expected, "after a bad id")


@pytest.mark.parametrize("bad", [2**32, 2**32 + 3, -(2**32), 2**63 - 1, -(2**63)])
def test_h14_wide_ids_are_not_cut_to_32_bits(bad: int, pool: moepool.Pool, x: F32) -> None:
    ids = IDS.astype(np.int64)
    ids[2, 0] = bad
    with pytest.raises(moepool.IdError, match=str(bad)):
        moepool.matmul_id(x, ids, pool)


# -------------------------------------------------------------------------------------------------------- out


def test_out_is_written_and_returned(pool: moepool.Pool, x: F32, expected: F32) -> None:
    out = np.full(expected.shape, np.nan, np.float32)
    assert moepool.matmul_id(x, IDS, pool, out=out) is out
    assert_same(out, expected, "out")
    inside = np.full((5, *expected.shape), np.nan, np.float32)
    moepool.matmul_id(x, IDS, pool, out=inside[2])
    assert_same(inside[2], expected, "a part of a larger array")
    assert np.isnan(inside[[0, 1, 3, 4]]).all()


OUT: dict[str, tuple[Callable[[tuple[int, ...]], Any], type[Exception], str]] = {
    "strided": (
        lambda s: np.zeros((*s[:-1], 2 * s[-1]), np.float32)[..., ::2],
        ValueError,
        "out has strides",
    ),
    "reversed": (lambda s: np.zeros(s, np.float32)[::-1], ValueError, "out has strides"),
    "Fortran": (lambda s: np.zeros(s, np.float32, order="F"), ValueError, "out has strides"),
    "broadcast": (lambda s: np.broadcast_to(np.zeros(s[-1], np.float32), s), ValueError, "out has strides"),
    "misaligned": (
        lambda s: np.frombuffer(bytearray(4 * int(np.prod(s)) + 1), np.float32, offset=1).reshape(s),
        ValueError,
        "C-contiguous and aligned",
    ),
    "read-only": (
        lambda s: np.frombuffer(bytes(4 * int(np.prod(s))), np.float32).reshape(s),
        ValueError,
        "read-only",
    ),
    "float64": (np.zeros, TypeError, "out is float64; it must be float32"),
    "float16": (lambda s: np.zeros(s, np.float16), TypeError, "out is float16"),
    "another shape": (lambda s: np.zeros((*s[:-1], s[-1] + 1), np.float32), ValueError, "out is of shape"),
    "flat": (lambda s: np.zeros(int(np.prod(s)), np.float32), ValueError, "out is of shape"),
    "another library's": (
        lambda s: Foreign(np.zeros(s, np.float32)),
        ValueError,
        "out is a Foreign; .* NumPy",
    ),
    "on a GPU": (lambda s: Foreign(np.zeros(s, np.float32), device=(2, 0)), ValueError, "out is on cuda:0"),
    "a list": (lambda s: [0.0], TypeError, "out is a list"),
}


@pytest.mark.parametrize("name", OUT)
def test_out_that_does_not_fit_is_refused(name: str, pool: moepool.Pool, x: F32, expected: F32) -> None:
    make, error, message = OUT[name]
    before = pool.stats()
    with pytest.raises(error, match=message) as caught:
        moepool.matmul_id(x, IDS, pool, out=make(expected.shape))
    assert isinstance(caught.value, moepool.ArgumentError)
    assert pool.stats() == before


def test_out_must_not_overlap_the_activations(pool: moepool.Pool, expected: F32) -> None:
    memory = np.zeros(3 * COLUMNS + expected.size, np.float32)
    x = memory[: 3 * COLUMNS].reshape(3, COLUMNS)
    for start in (0, 3 * COLUMNS - 1):
        out = memory[start : start + expected.size].reshape(expected.shape)
        with pytest.raises(moepool.ArgumentError, match="out overlaps"):
            moepool.matmul_id(x, IDS, pool, out=out)
    beside = memory[3 * COLUMNS :].reshape(expected.shape)
    moepool.matmul_id(x, IDS, pool, out=beside)


# --------------------------------------------------------------------------------------------------- lifetime


def test_temporaries_live_until_the_result_is_there(pool: moepool.Pool, x: F32, expected: F32) -> None:
    """While another thread collects garbage and reuses the memory that became free."""
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect()
            # Of the sizes that the calls use: a freed temporary would be overwritten at once.
            [np.full(n, np.nan, np.float32) for n in (x.size, IDS.size, x.size // 2)]

    thread = threading.Thread(target=collect)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    thread.start()
    try:
        for _ in range(100):
            y = moepool.matmul_id(Foreign(x[:, ::-1].copy()[:, ::-1]), Foreign(IDS.astype(np.int64)), pool)
            assert_same(y, expected, "temporaries")
            assert_same(moepool.matmul_id(Exported(x), Exported(IDS), pool), expected, "capsules")
            assert_same(moepool.matmul_id(bfloat16(x), IDS.tolist(), pool), expected, "temporaries")
    finally:
        gc.set_threshold(*threshold)
        stop.set()
        thread.join()


def test_capsules_are_freed() -> None:
    """A capsule that nobody consumes takes its array with it."""
    array = np.zeros((3, 4), np.float32)
    before = sys.getrefcount(array)
    for _ in range(10):
        arrays.view(Foreign(array), "x")
    assert sys.getrefcount(array) == before


# ------------------------------------------------------------------------------------------- devices, streams


def test_device_names() -> None:
    for name, index in (("cpu", -1), ("cuda", 0), ("cuda:0", 0), ("cuda:13", 13)):
        assert arrays.device_index(name) == index
    for name in (
        "",
        "CPU",
        "cpu:0",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "cuda:1.0",
        "gpu",
        "cuda:1234567",
        0,
        None,
    ):
        with pytest.raises(moepool.ArgumentError, match="it must be 'cpu', 'cuda' or 'cuda:N'"):
            arrays.device_index(name)  # type: ignore[arg-type]
    assert arrays.device_name(-1) == "cpu"
    assert arrays.device_name(2) == "cuda:2"


def test_stream_addresses() -> None:
    class CuPyLike:
        ptr = 0x10

    class TorchLike:
        cuda_stream = 0x20

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0x30)

    streams: list[tuple[Any, int]] = [
        (None, 0),
        (7, 7),
        (CuPyLike(), 16),
        (TorchLike(), 32),
        (Protocol(), 48),
    ]
    for stream, address in streams:
        assert arrays.stream_address(stream) == address
    with pytest.raises(moepool.DtypeError, match="stream is a str"):
        arrays.stream_address("0")


# --------------------------------------------------------------------------------------------- real libraries


def test_torch_tensors(pool: moepool.Pool, x: F32, expected: F32) -> None:
    torch = pytest.importorskip("torch")
    t = torch.from_numpy(x.copy())
    ids = torch.from_numpy(IDS.astype(np.int64))
    for given in (t, t.half(), t.bfloat16(), t.T.contiguous().T, t.repeat(1, 2)[:, : x.shape[1]]):
        assert_same(moepool.matmul_id(given, ids, pool), expected, str(given.dtype))
    one = t[:1].expand(3, -1)
    assert_same(
        moepool.matmul_id(one, ids, pool), moepool.matmul_id(np.repeat(x[:1], 3, 0), IDS, pool), "expand"
    )
    with pytest.raises(moepool.ArgumentError, match=r"x cannot be read through DLPack: .*detach"):
        moepool.matmul_id(t.clone().requires_grad_(), ids, pool)
    with pytest.raises(moepool.DtypeError, match="x is float64"):
        moepool.matmul_id(t.double(), ids, pool)


def test_bfloat16_of_numpy_extensions(pool: moepool.Pool, x: F32, expected: F32) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = x.astype(ml_dtypes.bfloat16)
    for layout in (given, given[:, ::-1].copy()[:, ::-1], np.asfortranarray(given)):
        assert_same(moepool.matmul_id(layout, IDS, pool), expected, "bfloat16")
