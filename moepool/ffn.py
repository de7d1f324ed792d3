"""The feed-forward layer of experts in one call, and the same composed of the ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from moepool import arrays
from moepool._native import handles
from moepool.errors import ArgumentError
from moepool.ops import Step, add, combine, matmul_id, step_of, swiglu
from moepool.pool import Phase, Pool

__all__ = ["ExpertFFN"]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class ExpertFFN:
    """gate, up, swiglu, down and combine of a layer of experts.

    Parameters
    ----------
    pool : Pool
        Of a layer with the matrices gate, up and down. The FFN keeps it alive, but does not close it.

    Attributes
    ----------
    pool : Pool

    Raises
    ------
    ArgumentError
        The pool's layer has other matrices.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> gate, up = rng.standard_normal((2, 8, 64, 32), dtype=np.float32)
    >>> down = rng.standard_normal((8, 32, 64), dtype=np.float32)
    >>> store = moepool.ExpertStore.from_arrays(gate=gate, up=up, down=down, qtype="q8_0")
    >>> ffn = moepool.ExpertFFN(moepool.Pool(store[0], slots=4))
    >>> x, weights = rng.standard_normal((3, 32), dtype=np.float32), np.full((3, 2), 0.5, np.float32)
    >>> y = ffn(x, [[0, 5], [5, 1], [7, -1]], weights)
    >>> y.shape
    (3, 32)
    >>> bool((y == ffn.composed(x, [[0, 5], [5, 1], [7, -1]], weights)).all())
    True
    """

    def __init__(self, pool: Pool) -> None:
        if not isinstance(pool, Pool):
            raise ArgumentError(f"pool is a {type(pool).__name__}; it must be a Pool")
        names = list(pool.layer.matrices)
        if names != ["gate", "up", "down"]:
            raise ArgumentError(f"an FFN needs gate, up and down; the pool has {', '.join(names)}")
        self.pool = pool
        matrices = pool.layer.matrices
        self._columns, self._rows = matrices["gate"].columns, matrices["down"].rows

    def __call__(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        *,
        out: Any = None,
        phase: Phase = "auto",
        stream: Any = None,
    ) -> Any:
        """Computes the layer.

        With ids this is a whole step: the pool resolves them, the layer is computed, the lease ends. With a
        route it is the layer alone. Both give the same bytes, and leave the same residency and stats.

        On CUDA the device takes a step by itself if its ids are in device memory: nothing is copied to the
        host, which neither waits nor learns of the ids, and a CUDA graph can hold the call and replay it with
        new ids, activations and weights, hits or misses. That goes for decode steps of 1 to 16 tokens and up
        to 512 places, of a pool whose records are all page-locked, whatever its `miss`. What `miss="host"` or
        `"auto"` leaves to the CPU a thread of this process computes while the device waits, each pool at most
        as long as :func:`set_doorbell` says. Experts of open routes keep their slots. Any other step is
        resolved with the help of the host, and is a :class:`StateError` in a capture.

        In a capture the arrays have to be packed. Keep them, and the pool, as long as the graph is replayed;
        give `out` too, unless the library keeps what it allocates in a capture, as PyTorch does. Steps of a
        pool run in the order of their calls, whatever their streams; replays are ordered with other uses of
        the pool by the caller.

        Parameters
        ----------
        x : array of float32, float16 or bfloat16
            (T, K), where the pool is. Any strides.
        ids : array of int32 or int64, nested list of int, or Route
            (T, k), where the pool is or in host memory, -1 skips a place; or a route of the pool, which was
            counted when it was resolved and is not released.
        weights : array of float32, float16 or bfloat16
            (T, k), the router's weights, used as they are; where the pool is.
        out : array, optional
            float32 (T, N), N the outputs of down, C-contiguous, where the pool is, to be written to. It must
            not overlap `x`, `weights` or `ids`.
        phase : {"auto", "decode", "prompt"}
            As in :meth:`Pool.resolve`; of no effect with a route.
        stream : optional
            The CUDA stream, as of :func:`matmul_id`.

        Returns
        -------
        array
            float32 (T, N): `out` if it was given, else an array like that of :func:`matmul_id`. A token whose
            places are all skipped is a row of +0.0.

        Raises
        ------
        IdError
            An id is outside [-1, experts); of ids in device memory as :func:`matmul_id` says.
        DtypeError, ArgumentError
            An array is of another dtype, shape, layout or device. The pool is as it was.
        StateError
            The pool or the route is closed, or the stream records a CUDA graph and the step needs the host.
            The pool is as it was, and the capture goes on. Or, of an earlier step: the CPU did not answer in
            time, or could not compute. Its rows are NaN, and the pool computes no more.
        """
        if stream is None and self._are_plain(x, ids, weights, out):
            y = np.empty((len(ids), self._rows), np.float32) if out is None else out
            number = self.pool._phase(phase, ids.shape[1])
            handles.pool_ffn_packed(self.pool._handle, ids, number, x, weights, y)
            return y
        call, step, taken, weighted, target, y = self._take(
            x, ids, weights, out, phase, stream, by_device=True
        )
        rest = (
            taken.address,
            handles.DTYPES[taken.dtype],
            weighted.address,
            handles.DTYPES[weighted.dtype],
            target.address,
            call.stream,
        )
        with call:
            if step.ids is None:
                handles.ffn(ids._handle, *rest)
            else:
                handles.pool_ffn(self.pool._handle, *self.pool._step(step.ids, phase), *rest)
        return y

    def composed(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        *,
        out: Any = None,
        phase: Phase = "auto",
        stream: Any = None,
    ) -> Any:
        """The same from :func:`matmul_id`, :func:`swiglu`, :func:`add` and :func:`combine`: the same bytes,
        the same stats.

        The hot and the cold places go through a chain each, whose zero-padded results are added. Slower; it
        shows what the layer is made of, and how to put something of one's own in between. Parameters, result
        and errors are those of calling the FFN.
        """
        call, step, *_, y = self._take(x, ids, weights, out, phase, stream)
        with call, step.open() as route:
            halves = []
            for half in ("hot", "cold"):
                gate = matmul_id(x, route, self.pool.gate, half=half, stream=stream)
                up = matmul_id(x, route, self.pool.up, half=half, stream=stream)
                hidden = swiglu(gate, up, out=gate, stream=stream)
                halves.append(matmul_id(hidden, route, self.pool.down, half=half, stream=stream))
            rows = add(*halves, out=halves[0], stream=stream)
            return combine(rows, route, weights, out=y, stream=stream)

    def _are_plain(self, x: Any, ids: Any, weights: Any, out: Any) -> bool:
        """Whether these are arrays as most callers on the CPU have them, all of them right: `_take` would say
        nothing of them, and needs some 20 us to find that out."""
        if self.pool._device != arrays.CPU or type(ids) is not np.ndarray or ids.ndim != 2:
            return False
        tokens, k = ids.shape
        return (
            k > 0
            and arrays.is_plain(ids, (tokens, k), _INT32 if ids.itemsize == 4 else _INT64)
            and arrays.is_plain(x, (tokens, self._columns))
            and arrays.is_plain(weights, (tokens, k))
            and (
                out is None
                or arrays.is_plain(out, (tokens, self._rows))
                and not any(np.may_share_memory(out, other) for other in (x, weights, ids))
            )
        )

    def _take(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        out: Any,
        phase: Phase,
        stream: Any,
        *,
        by_device: bool = False,
    ) -> tuple[arrays.Call, Step, arrays.ArrayView, arrays.ArrayView, arrays.ArrayView, Any]:
        """Checks every argument, so that a step is only counted if it will be computed."""
        call = arrays.Call(self.pool._device, stream, like=x)
        step = step_of(ids, self.pool, call, phase, by_device=by_device)
        tokens, k = step.tokens, step.k
        taken = call.rows(x, "x", [(tokens, self._columns)], "(tokens, columns)")
        weighted = call.rows(weights, "weights", [(tokens, k)], "(tokens, k)")
        inputs = [taken, weighted]
        if step.ids is not None and step.ids.packed:  # others are read before anything is written
            inputs.append(step.ids)
        target, y = call.output(out, (tokens, self._rows), inputs)
        return call, step, taken, weighted, target, y

    def __repr__(self) -> str:
        return f"<ExpertFFN of {self.pool!r}>"
