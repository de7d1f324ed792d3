"""The ops that a mixture-of-experts layer is composed of.

Their arithmetic is fixed bit by bit (docs/numerics.md): a result depends on the weights, the activations, the
ids and the router weights, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from moepool import arrays
from moepool._native import handles
from moepool.errors import ArgumentError, DtypeError, StateError
from moepool.pool import Phase, Pool, PoolMatrix, Route

__all__ = ["Half", "add", "combine", "matmul_id", "swiglu"]

Half = Literal["all", "hot", "cold"]


class Step(NamedTuple):
    """The ids of a call, checked but not resolved: `open` gives the route to use and afterwards releases what
    it made. `ids` is None if a route was given."""

    tokens: int
    k: int
    open: Callable[[], AbstractContextManager[Route]]
    ids: arrays.ArrayView | None


def step_of(
    ids: Any, pool: Pool, call: arrays.Call, phase: Phase = "auto", *, by_device: bool = False
) -> Step:
    """Takes ids or a route of `pool`, so that all arguments can be checked before a step is counted.

    `by_device` says that the device may take the step by itself, if the ids are in its memory.
    """
    if isinstance(ids, Route):
        if ids.pool is not pool:
            raise ArgumentError(f"the route is of {ids.pool!r}, not of {pool!r}")
        if ids.closed:
            raise StateError("the route is closed")
        return Step(ids.tokens, ids.k, lambda: nullcontext(ids), None)
    if not by_device or arrays.on_host(ids):
        call.require_host()
    taken = call.ids(ids)
    tokens, k = taken.shape
    return Step(tokens, k, lambda: pool._resolve(taken, phase, call), taken)


def matmul_id(
    x: Any,
    ids: Any,
    pool: Pool | PoolMatrix,
    *,
    half: Half = "all",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Multiplies each token's activations by the matrices of its experts.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16
        (T, K), one row a token, or (T, k, K), one row a place; where the pool is. Any strides.
    ids : array of int32 or int64, nested list of int, or Route
        (T, k), where the pool is or in host memory: for each token and place an expert, or -1 to skip the
        place. Ids are one step of the pool; a route was counted when it was resolved and is not released.
    pool : PoolMatrix or Pool
        `pool.gate` for example; a pool if its layer has a single matrix.
    half : {"all", "hot", "cold"}
        The places to compute: all, those that a slot serves, or the others. The rows of the rest are zero, so
        that the two halves sum to the whole with :func:`add`, in every bit.
    out : array, optional
        float32 (T, k, N), C-contiguous, where the pool is, to be written to. It must not overlap `x`.
    stream : optional
        The CUDA stream: an address or a stream object. None is the current stream of the library of `x`.
        Ignored on the CPU.

    Returns
    -------
    array
        float32 (T, k, N): `out` if it was given, else a NumPy array, or on a CUDA device an array of the
        library of `x` (of CuPy, if that is another one than PyTorch). On CUDA the call returns when the work
        is queued. Skipped places are rows of +0.0.

    Raises
    ------
    IdError
        An id is outside [-1, experts). Of ids in device memory that is told by the next call that uses the
        pool, and the rows of these places are NaN.
    DtypeError, ArgumentError
        An array is of another dtype, shape, layout or device. The pool is as it was.
    StateError
        The pool or the route is closed.

    Examples
    --------
    >>> eye = np.stack([np.eye(32, dtype=np.float32) * (e + 1) for e in range(4)])
    >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=eye, qtype="f32")[0], slots=4)
    >>> x = np.ones((1, 32), np.float32)
    >>> moepool.matmul_id(x, [[2, -1, 0]], pool)[0, :, 0].tolist()
    [3.0, 0.0, 1.0]
    """
    matrix = _matrix(pool)
    if half not in handles.HALVES:
        raise ArgumentError(f"half is {half!r}; it must be {' or '.join(map(repr, handles.HALVES))}")
    call = arrays.Call(matrix.pool._device, stream, like=x)
    step = step_of(ids, matrix.pool, call)
    tokens, k, columns = step.tokens, step.k, matrix.columns
    taken = call.rows(
        x, "x", [(tokens, columns), (tokens, k, columns)], "(tokens, columns) or (tokens, k, columns)"
    )
    target, y = call.output(out, (tokens, k, matrix.rows), [taken])
    with call, step.open() as route:
        handles.matmul_id(
            route._handle,
            matrix.index,
            handles.HALVES[half],
            taken.address,
            handles.DTYPES[taken.dtype],
            len(taken.shape) == 3,
            target.address,
            call.stream,
        )
    return y


def _matrix(pool: Pool | PoolMatrix) -> PoolMatrix:
    if isinstance(pool, PoolMatrix):
        return pool
    if not isinstance(pool, Pool):
        raise DtypeError(f"pool is a {type(pool).__name__}; it must be a Pool or one of its matrices")
    matrices = list(pool.matrices.values())
    if len(matrices) > 1:
        names = ", ".join(f"pool.{matrix.name}" for matrix in matrices)
        raise ArgumentError(f"the pool has several matrices; say which: {names}")
    return matrices[0]


def swiglu(gate: Any, up: Any, *, out: Any = None, stream: Any = None) -> Any:
    """silu(gate) * up, element by element.

    Parameters
    ----------
    gate, up : array of float32
        Of one shape, which may be any, and on one device.
    out : array, optional
        float32 of that shape, C-contiguous, on that device, to be written to. It may be `gate` or `up`, but
        not overlap them otherwise.
    stream : optional
        The CUDA stream, as of :func:`matmul_id`.

    Returns
    -------
    array
        float32 of that shape: `out` if it was given, else an array like that of :func:`matmul_id`.

    Raises
    ------
    DtypeError, ArgumentError
        An array is of another dtype, shape, layout or device.

    Examples
    --------
    >>> moepool.swiglu(np.array([0.0, 50.0], np.float32), np.array([1.0, 2.0], np.float32)).tolist()
    [0.0, 100.0]
    """
    return _elementwise(handles.swiglu, ("gate", gate), ("up", up), out, stream)


def add(a: Any, b: Any, *, out: Any = None, stream: Any = None) -> Any:
    """a + b, element by element: joins the hot and the cold half of a step exactly.

    Parameters
    ----------
    a, b : array of float32
        Of one shape, which may be any, and on one device.
    out : array, optional
        float32 of that shape, C-contiguous, on that device, to be written to. It may be `a` or `b`, but not
        overlap them otherwise.
    stream : optional
        The CUDA stream, as of :func:`matmul_id`.

    Returns
    -------
    array
        float32 of that shape: `out` if it was given, else an array like that of :func:`matmul_id`.

    Raises
    ------
    DtypeError, ArgumentError
        An array is of another dtype, shape, layout or device.

    Examples
    --------
    >>> moepool.add(np.array([1.5, 0.0], np.float32), np.array([0.0, 2.5], np.float32)).tolist()
    [1.5, 2.5]
    """
    return _elementwise(handles.add, ("a", a), ("b", b), out, stream)


def _elementwise(
    op: Callable[[int, int, int, int, int, int], None],
    first: tuple[str, Any],
    second: tuple[str, Any],
    out: Any,
    stream: Any,
) -> Any:
    (name, a), (other, b) = first, second
    call = arrays.Call(arrays.device_of(a, name), stream, like=a)
    left = call.rows(a, name, None, dtypes=("float32",))
    right = call.rows(b, other, [left.shape], f"the shape of {name}", dtypes=("float32",))
    target, y = call.output(out, left.shape, [left, right], in_place=True)
    with call:
        op(call.device, left.size, left.address, right.address, target.address, call.stream)
    return y


def combine(rows: Any, route: Route, weights: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Sums the rows of each token's places, weighted, in rising order of the places. Skipped places are left
    out.

    Parameters
    ----------
    rows : array of float32
        (T, k, N), the result of the last :func:`matmul_id`; where the pool is. Any strides.
    route : Route
        Of the step.
    weights : array of float32, float16 or bfloat16
        (T, k), the router's weights, used as they are; where the pool is.
    out : array, optional
        float32 (T, N), C-contiguous, where the pool is, to be written to. It must not overlap `rows` or
        `weights`.
    stream : optional
        The CUDA stream, as of :func:`matmul_id`.

    Returns
    -------
    array
        float32 (T, N): `out` if it was given, else an array like that of :func:`matmul_id`.

    Raises
    ------
    DtypeError, ArgumentError
        An array is of another dtype, shape, layout or device.
    StateError
        The route is closed.

    Examples
    --------
    >>> weight = np.zeros((4, 32, 64), np.float32)
    >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], slots=4)
    >>> rows = np.array([[[1.0], [2.0], [9.0]]], np.float32)
    >>> with pool.resolve([[3, 0, -1]]) as route:
    ...     moepool.combine(rows, route, np.array([[0.5, 0.25, np.nan]], np.float32)).tolist()
    [[1.0]]
    """
    if not isinstance(route, Route):
        raise DtypeError(f"route is a {type(route).__name__}; it must be a Route, made by pool.resolve(ids)")
    call = arrays.Call(route.pool._device, stream, like=rows)
    taken = call.rows(rows, "rows", None, dtypes=("float32",))
    if len(taken.shape) != 3 or taken.shape[:2] != (route.tokens, route.k):
        raise ArgumentError(
            f"rows is of shape {taken.shape}; it must be ({route.tokens}, {route.k}, columns)"
        )
    columns = taken.shape[2]
    weighted = call.rows(weights, "weights", [(route.tokens, route.k)], "(tokens, k)")
    target, y = call.output(out, (route.tokens, columns), [taken, weighted])
    with call:
        handles.combine(
            route._handle,
            columns,
            taken.address,
            weighted.address,
            handles.DTYPES[weighted.dtype],
            target.address,
            call.stream,
        )
    return y
