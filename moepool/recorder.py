"""Recorders: traces of what a running model, or its pools, want."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from moepool.errors import ArgumentError, MoePoolError, StateError, warn
from moepool.pool import Pool
from moepool.pooltrace import PoolTrace, TracedSteps
from moepool.trace import Trace, told_of
from moepool.tracefile import TraceModel

__all__ = ["PoolRecorder", "Recorder", "TraceRecorder"]


def _check_pools(model: TraceModel, pools: Sequence[Pool]) -> None:
    blocks = [pool.layer.block for pool in pools]
    if len(set(blocks)) < len(blocks):
        raise ArgumentError(f"pools of layers {blocks}: one for each layer can be recorded")
    for pool in pools:
        if not 0 <= pool.layer.block < model.layers or pool.experts > model.experts:
            raise ArgumentError(
                f"a pool of layer {pool.layer.block} with {pool.experts} experts; the model has "
                f"{told_of(model)}"
            )
    # Others than the last may have no experts.
    if model.layers - 1 not in blocks:
        warn(
            f"the model has {model.layers} layers, and pools of {sorted(blocks)} are recorded: the trace has "
            "no others"
        )


Observer = Callable[[int, npt.NDArray[np.int32]], None]


class Recorder(Protocol):
    """What gathers the routing of a run: it is told of every forward pass before it begins."""

    def step(self, pos: int, decode: bool) -> Observer | None:
        """Begins a forward pass; gives who wants to see its routing, if anybody does."""
        ...


class TraceRecorder:
    """Gathers the routing of a run on the host.

    Parameters
    ----------
    model : TraceModel

    Examples
    --------
    >>> recorder = moepool.TraceRecorder(moepool.TraceModel(experts=8, k=2, layers=1))
    >>> observe = recorder.step(pos=0, decode=True)
    >>> observe(0, np.array([[3, 1]]))
    >>> recorder.trace().ids
    array([[3, 1]], dtype=int32)
    """

    def __init__(self, model: TraceModel) -> None:
        self.model = model
        self._steps = 0
        self._parts: list[tuple[int, int, int, bool, npt.NDArray[np.int32]]] = []

    def step(self, pos: int, decode: bool) -> Observer:
        """Begins a forward pass.

        Parameters
        ----------
        pos : int
            Position of its first token.
        decode : bool
            Whether it is a decode step; else it is one of a prompt.

        Returns
        -------
        callable
            Takes a layer and the ids (tokens, k) routed there; they are copied.
        """
        step = self._steps
        self._steps += 1

        def observe(layer: int, ids: npt.NDArray[np.int32]) -> None:
            self._parts.append((step, layer, pos, decode, np.array(ids, np.int32)))

        return observe

    def trace(self) -> Trace:
        """What has been gathered so far."""
        sizes = np.array([len(ids) for *_, ids in self._parts], np.int64)
        columns = [np.repeat([part[i] for part in self._parts], sizes) for i in range(4)]
        step, layer, pos, decode = columns if self._parts else [np.empty(0, np.int64)] * 4
        # Within a part positions count up from its first token's.
        begins = np.cumsum(sizes) - sizes
        pos = pos + np.arange(len(pos)) - np.repeat(begins, sizes)
        ids = [*(part[4] for part in self._parts), np.empty((0, self.model.k), np.int32)]
        return Trace(self.model, step, layer, pos, decode.astype(np.bool_), np.concatenate(ids))


class PoolRecorder:
    """Gathers the routing of a run from the pools that serve it, through :meth:`Pool.trace`.

    Steps that a GPU takes by itself, in CUDA graphs too, are recorded there and cost no synchronisation. A
    context manager that ends recording.

    Parameters
    ----------
    model : TraceModel
    pools : sequence of Pool
        One for each layer with experts. Every step has to go through all of them, and each call of
        :meth:`step` announces one.
    admissions : bool
        Keep whom the steps admitted too, which "recorded" of :func:`simulate` repeats. They are left out,
        with a warning, if they do not tell all that was resident: if a pool was not empty at first, was
        prefetched or resized, or loaded a state.
    room_bytes : int, optional
        Of each pool's ring on a GPU, as for :meth:`Pool.trace`. It is drained every so many steps.

    Raises
    ------
    ArgumentError
        Two pools serve the same layer, or one serves none of the model's.

    Warns
    -----
    MoePoolWarning
        The model's last layer has no pool.

    Examples
    --------
    >>> weight = np.zeros((8, 32, 64), np.float32)
    >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], slots=4)
    >>> with moepool.PoolRecorder(moepool.TraceModel(experts=8, k=2, layers=1), [pool]) as recorder:
    ...     recorder.step(pos=0, decode=True)
    ...     pool.resolve([[6, 2]]).release()
    >>> recorder.trace().ids
    array([[6, 2]], dtype=int32)
    """

    def __init__(
        self,
        model: TraceModel,
        pools: Sequence[Pool],
        admissions: bool = False,
        room_bytes: int = 1 << 20,
    ) -> None:
        pools = list(pools)
        _check_pools(model, pools)
        self.model = model
        self._pools = pools
        # Who is in each slot, as far as what was recorded tells; None where admissions are not kept.
        self._tables = [np.full(pool.slots, -1, np.int32) for pool in pools] if admissions else None
        self._astray = ""  # why admissions do not tell it
        self._error: StateError | None = None
        # A step takes less than 64 bytes and 16 a place; half the room is kept for steps of many tokens.
        self._every = max(room_bytes // 2 // (64 + 16 * model.k), 1)
        self._pos: list[int] = []
        self._drained: list[list[TracedSteps]] = [[] for _ in pools]
        if self._tables is not None:
            self._follow("was not empty when recording began")
        self._traces: list[PoolTrace] = [pool.trace(room_bytes) for pool in pools]

    def step(self, pos: int, decode: bool) -> None:
        """Begins a forward pass whose first token is at a position. The pools know the rest."""
        if self._pos and len(self._pos) % self._every == 0:
            self._drain()
        self._pos.append(pos)

    def _drain(self) -> None:
        for steps, trace in zip(self._drained, self._traces, strict=True):
            try:
                steps.append(trace.drain())
            except StateError as error:
                # Passes are told apart by counting steps: behind a gap they would be others.
                self._error = self._error or error
                raise
        if self._tables is None or self._astray:
            return
        for table, parts in zip(self._tables, self._drained, strict=True):
            if len(parts[-1].prefetched):
                self._astray = f"the pool of layer {parts[-1].layer} was prefetched"
                return
            _, _, expert, slot = parts[-1].admissions.T
            known = slot < len(table)
            for e, s in zip(expert[known].tolist(), slot[known].tolist(), strict=True):  # the last one stays
                table[s] = e
        self._follow("was resized, or loaded a state, or took steps meanwhile")

    def _follow(self, reason: str) -> None:
        """Compares what was recorded with who is resident."""
        for table, pool in zip(self._tables or [], self._pools, strict=True):
            if not self._astray and not np.array_equal(pool.residents()[1], table):
                self._astray = f"the pool of layer {pool.layer.block} {reason}"

    def trace(self) -> Trace:
        """What has been recorded so far. Waits for steps under way on a GPU.

        Raises
        ------
        StateError
            A ring ran full: steps are missing. Told again by each call.
        """
        if self._error is not None:
            raise self._error
        if self._traces:
            self._drain()
        columns: list[tuple[npt.NDArray[Any], ...]] = []
        admissions = [np.empty((0, 4), np.int64)]
        begun = np.array([*self._pos, 0], np.int64)
        for parts in self._drained:
            # Steps are passes in their order: a pool does not count those that want nobody.
            passes, ticks = 0, []
            for steps in parts:
                begins = steps.token == 0
                step = np.cumsum(begins) - 1 + passes
                passes += int(np.count_nonzero(begins))
                ticks.append(steps.step[begins])
                pos = begun[np.minimum(step, len(self._pos))] + steps.token
                columns.append(
                    (step, np.full(len(step), steps.layer), pos, steps.decode, self._ids(steps.ids))
                )
            if self._tables is not None and not self._astray and ticks:
                admitted = np.concatenate([steps.admissions for steps in parts])
                # A step that wants nobody has the tick of the one before, and stands behind it.
                admitted[:, 0] = np.searchsorted(np.concatenate(ticks), admitted[:, 0])
                admissions.append(admitted)
        if self._astray:
            warn(f"admissions are left out of the trace: {self._astray}, so that they cannot be repeated")
            admissions = admissions[:1]
        none = (*(np.empty(0, np.int64) for _ in range(3)), np.empty(0, np.bool_))
        empty = (*none, np.empty((0, self.model.k), np.int32))
        step, layer, pos, decode, ids = (np.concatenate(parts) for parts in zip(*columns, empty, strict=True))
        order = np.lexsort((layer, step))  # stable: tokens of a step stay in their order
        return Trace(
            self.model,
            step[order],
            layer[order],
            pos[order],
            decode[order],
            ids[order],
            np.concatenate(admissions),
        )

    def _ids(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """With as many places as a token of the model has."""
        if invalid := int(np.count_nonzero(ids < -1)):
            warn(f"{invalid} ids out of range in device memory are left out of the trace")
        if ids.shape[1] > self.model.k:
            raise ArgumentError(f"steps of {ids.shape[1]} places a token; the model has {self.model.k}")
        missing = self.model.k - ids.shape[1]
        return np.pad(np.maximum(ids, -1), ((0, 0), (0, missing)), constant_values=-1)

    def close(self) -> None:
        """Ends recording; what was recorded is kept. May be called twice.

        Raises
        ------
        StateError
            As :meth:`trace`.
        """
        try:
            if self._traces:
                self._drain()
        finally:
            for trace in self._traces:
                trace.close()
            self._traces = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # which is what the caller has to know of
            with suppress(MoePoolError):
                self.close()
