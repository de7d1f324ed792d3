"""The trace of a pool: what its steps wanted and whom they admitted, wherever they were taken."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from moepool._native import handles

__all__ = ["PoolTrace", "TracedSteps"]


@dataclass(frozen=True)
class TracedSteps:
    """Steps of a pool in their order. A row is a token of a step.

    Attributes
    ----------
    layer : int
        The block of the model that the pool serves.
    step : numpy.ndarray
        int64 (rows,): the pool's step count. A step that wants no expert has that of the one before.
    token : numpy.ndarray
        int32 (rows,): its number in the step, from 0.
    decode : numpy.ndarray
        bool (rows,): whether it belongs to a decode step; else to a prompt.
    ids : numpy.ndarray
        int32 (rows, k): the experts wanted. -1 for none, also where other rows have more places; -2 for an
        id out of range in device memory.
    admissions : numpy.ndarray
        int64 (n, 4): step, layer, expert and slot of who was admitted, in the order of the law.
    prefetched : numpy.ndarray
        int64 (n, 4): the same of :meth:`Pool.prefetch`; step is the one before it.
    """

    layer: int
    step: npt.NDArray[np.int64]
    token: npt.NDArray[np.int32]
    decode: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int32]
    admissions: npt.NDArray[np.int64]
    prefetched: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)


class PoolTrace:
    """Records the steps of a pool, prompts too, until it is closed. Made by :meth:`Pool.trace`.

    A context manager that closes it. Recording neither waits nor changes what a step does. Steps that a GPU
    takes, in replays of a CUDA graph too, go to a ring in its memory, and from there to the host when a
    step is taken by the host or :meth:`drain` is called.
    """

    def __init__(self, handle: handles.PoolHandle, layer: int, room_bytes: int) -> None:
        self._number = handle.start_trace(room_bytes)
        self._handle, self._layer = handle, layer

    def drain(self) -> TracedSteps:
        """What was recorded since the last call. Waits for steps under way on a GPU.

        Returns
        -------
        TracedSteps

        Raises
        ------
        StateError
            The pool is closed, or has been given another trace since. Or the ring was full, and steps are
            missing: told once, the rest can be drained.
        """
        taken = self._handle.take_trace(self._number)
        tokens, phase = taken["tokens"], taken["phase"]
        k = np.repeat(taken["k"], tokens)
        ids = np.full((len(k), int(k.max(initial=1))), -1, np.int32)
        ids[np.arange(ids.shape[1]) < k[:, None]] = taken["ids"]
        rows = np.repeat(np.arange(len(tokens)), tokens)
        of = taken["admission_step"]
        admissions = np.stack(
            [taken["tick"][of], np.full(len(of), self._layer), taken["expert"], taken["slot"]], axis=1
        ).astype(np.int64)
        prefetched = phase[of] == handles.TRACE_PREFETCH
        return TracedSteps(
            self._layer,
            taken["tick"][rows],
            (np.arange(len(rows)) - np.repeat(np.cumsum(tokens) - tokens, tokens)).astype(np.int32),
            phase[rows] == handles.TRACE_DECODE,
            ids,
            admissions[~prefetched],
            admissions[prefetched],
        )

    def close(self) -> None:
        """Ends recording. What was recorded can still be drained. May be called twice."""
        if not self._handle.closed:
            self._handle.stop_trace(self._number)

    def __enter__(self) -> PoolTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
