"""Pools and routes: which experts of a layer lie in slots on a device, and who serves each id of a step."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moepool import arrays, cuda
from moepool._native import handles
from moepool.checks import choice, count, integer
from moepool.errors import ArgumentError, FormatError, IdError, warn
from moepool.policy import Policy, PolicyName, policy_of
from moepool.pooltrace import PoolTrace
from moepool.store import Layer, MatrixInfo

__all__ = ["Miss", "Phase", "Pool", "PoolMatrix", "PoolStats", "Route"]

log = logging.getLogger("moepool")

Miss = Literal["stream", "host", "auto"]
Phase = Literal["auto", "decode", "prompt"]

_INT64 = 2**63 - 1


@dataclass(frozen=True)
class PoolStats:
    """What a pool has done since it was made. An expert counts once a step, however many places want it.

    Attributes
    ----------
    steps : int
        Resolves that wanted at least one expert.
    bypasses : int
        Of these, the ones that left the pool as it was: prompts, and steps that wanted more experts than
        there are slots.
    hits, misses : int
        Of decode steps: wanted experts that were resident, and that were not.
    prompt_hits, prompt_misses : int
        The same of prompt steps.
    evictions : int
    copied_bytes : int
        Records copied into slots.
    in_place_bytes : int
        Records of "stream" misses read where they lie, once a step.
    host_bytes : int
        Records that the CPU computed, of "host" misses and of what "auto" left to it, once a step.
    step_backs : int
        With "auto", on CUDA: how often serving through slots lost against the CPU alone for long, so that the
        pool left everything to the CPU for some thousand steps.
    slots, experts : int
    resident : int
        Slots that hold an expert now.
    leased : int
        Slots that an open route pins now.
    slot_bytes : int
        Device memory that the slots take.
    pinned_bytes : int
        Of the layer's records, how much is page-locked for CUDA.
    prefetched : int
        Experts that :meth:`Pool.prefetch` brought in.
    """

    steps: int
    bypasses: int
    hits: int
    misses: int
    prompt_hits: int
    prompt_misses: int
    evictions: int
    copied_bytes: int
    in_place_bytes: int
    host_bytes: int
    step_backs: int
    slots: int
    experts: int
    resident: int
    leased: int
    slot_bytes: int
    pinned_bytes: int
    prefetched: int

    @property
    def hit_rate(self) -> float:
        """Share of the experts wanted in decode steps that were resident, 0 to 1; NaN before the first."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else float("nan")


@dataclass(frozen=True)
class PoolMatrix:
    """One matrix of a pool's experts: what :func:`matmul_id` multiplies by.

    Attributes
    ----------
    pool : Pool
    index : int
        Its place in the record.
    info : MatrixInfo
    """

    pool: Pool
    index: int
    info: MatrixInfo

    @property
    def name(self) -> str:
        """ "gate", "up", "down" or "weight"."""
        return self.info.name

    @property
    def rows(self) -> int:
        """Outputs (N)."""
        return self.info.rows

    @property
    def columns(self) -> int:
        """Inputs (K)."""
        return self.info.columns

    def __repr__(self) -> str:
        return f"<{self.name} of {self.pool!r}: {self.info.qtype}, {self.rows} x {self.columns}>"


class Pool:
    """Serves one layer of a store from slots on a device.

    A context manager that closes it. Any number of threads may use it: steps are resolved one after the
    other, kernels run side by side. Pools are independent of one another. Whatever a pool holds, the results
    have the same bits.

    Parameters
    ----------
    layer : Layer
        Of an :class:`ExpertStore`. The store may be closed afterwards.
    slots : int
        How many experts the device holds. 0 is legal: every expert is then served where it lies. More than
        the layer has experts are as many as it has. A decode step wants up to tokens x k distinct experts,
        and leaves the pool as it is if that is more than there are slots. Only decode steps fill them.
    device : str
        "cpu", "cuda" or "cuda:N".
    policy : str or Policy
        Which experts become resident: a :class:`Policy`, or the name of one with its defaults: "lru" evicts
        the expert used longest ago, "static" holds the experts of `hot` and no others. None is "lru", with
        miss="auto" "lfu" with `guard` and a half life of 1024 steps.
    miss : {"stream", "host", "auto"}
        Who computes a wanted expert that is not resident: the device, the CPU, or both, divided by rates
        that the pool measures while it runs, so that they finish together. With "auto" whom a step of the
        device admits depends on that division, and so on time; :meth:`trace` records it, and results never
        depend on it. With a slot for every expert and no `admit`, "auto" is "stream" in those steps: each
        expert misses once. On the CPU, and in all other steps, "auto" is "host": the CPU computes what
        misses, and copies whom the policy admits into slots for later steps.
    hot : sequence of int, optional
        For "static" and "pinned": the experts that stay, hottest first, distinct, at most `slots`. For
        "static" None takes the first `slots` experts.
    prompt_tokens : int
        Steps of more tokens than this are prompts unless :meth:`resolve` is told otherwise: they use what is
        resident and leave the pool as it is.
    admit : int, optional
        The most experts admitted a step; None sets no limit, with miss="auto" and fewer slots than experts a
        limit of 1, on every device.
    budget_bytes : int, optional
        On CUDA, the most memory that the slots take; what does not fit gets no slot. None lets all pools of a
        device together take half of the memory that they and nobody else use. With `max_slots` memory is
        taken in chunks of up to 32 MiB, the last of which may go past it.
    max_slots : int, optional
        The most slots that :meth:`resize` can make, at least `slots`. On CUDA addresses are reserved for so
        many, and memory is taken, and given back, for those there are. None keeps the memory of `slots`.

    Attributes
    ----------
    layer : Layer
    slots : int
        How many there are: fewer than asked for if there are fewer experts, or memory is short.
        :meth:`resize` changes it.
    experts : int
    device, miss : str
    prompt_tokens : int
    policy : Policy

    Raises
    ------
    ArgumentError
        A value is wrong.
    IdError
        `hot` names an expert that the layer does not have.
    StateError
        The store is closed.
    OutOfMemoryError
        Host memory ran out. Too little memory of a CUDA device makes fewer slots, down to none.
    UnsupportedError
        A CUDA device in a build without CUDA, on a machine without a driver or with too old a one, or one
        that this build has no kernels for.

    Warns
    -----
    MoePoolWarning
        There are more slots than experts, or memory is short of them. The experts are not all page-locked for
        CUDA (told once a store). Or, at the first step: a token has more places than there are slots, so that
        every step misses or bypasses.

    Examples
    --------
    >>> weight = np.random.default_rng(0).standard_normal((8, 32, 64), dtype=np.float32)
    >>> store = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")
    >>> with moepool.Pool(store[0], slots=4) as pool:
    ...     for ids in ([[0, 1]], [[1, 2]], [[2, 1]]):
    ...         y = moepool.matmul_id(np.ones((1, 64), np.float32), ids, pool)
    ...     stats = pool.stats()
    >>> stats.hits, stats.misses, stats.resident
    (3, 3, 3)
    """

    def __init__(
        self,
        layer: Layer,
        slots: int,
        *,
        device: str = "cpu",
        policy: Policy | PolicyName | None = None,
        miss: Miss = "stream",
        hot: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        prompt_tokens: int = 32,
        admit: int | None = None,
        budget_bytes: int | None = None,
        max_slots: int | None = None,
    ) -> None:
        if not isinstance(layer, Layer):
            raise ArgumentError(
                f"layer is a {type(layer).__name__}; it must be a layer of a store, store[0] for example"
            )
        slots = count("slots", slots)
        if policy is None:  # what "auto" lets in has to be worth the link
            policy = Policy("lfu", guard=True, half_life=1024) if miss == "auto" else "lru"
        policy = policy_of(policy)
        if hot is not None and policy.name not in ("static", "pinned"):
            raise ArgumentError(f"hot belongs to the policies 'static' and 'pinned', not to {policy.name!r}")
        if hot is None and policy.name == "pinned":
            raise ArgumentError("policy 'pinned' needs hot=[...]: the experts that stay")
        if slots > layer.experts:
            warn(f"{slots} slots for a layer of {layer.experts} experts: the pool has {layer.experts} slots")
            slots = layer.experts
        most = 0 if max_slots is None else min(count("max_slots", max_slots, slots), layer.experts)
        self.layer = layer
        self.experts = layer.experts
        self._device = arrays.device_index(device)
        self.device = arrays.device_name(self._device)
        self.policy = policy
        self.miss = miss
        self.prompt_tokens = count("prompt_tokens", prompt_tokens)
        self._handle = handles.PoolHandle(
            layer._store,
            None if hot is None else _experts("hot", hot, layer.experts),
            layer=layer.index,
            slots=slots,
            max_slots=most,
            device=self._device,
            **policy.config(),
            miss=choice("miss", miss, handles.MISSES),
            prompt_tokens=self.prompt_tokens,
            admit=-1 if admit is None else count("admit", admit),
            budget_bytes=0 if budget_bytes is None else count("budget_bytes", budget_bytes, 1, _INT64),
        )
        self._told_of_step_back = False
        self._resizing = threading.Lock()
        stats = self.stats()
        self.slots = stats.slots
        self._budget_bytes = budget_bytes
        if self.slots < slots:
            self._tell_of_memory(slots, self.slots)
        if self._device != arrays.CPU and stats.pinned_bytes < layer.bytes:
            self._tell_of_pinning(stats.pinned_bytes)
        self._told_of_few_slots = False
        log.info("made %r", self)

    def _tell_of_memory(self, asked: int, made: int) -> None:
        record = self.layer.record_bytes
        if self._budget_bytes is not None:
            reason = f"budget_bytes is {self._budget_bytes}"
        else:
            free = handles.cuda_device(self._device).free
            reason = (
                f"all pools of {self.device} take at most half of the memory that nobody else uses, of which "
                f"{free} bytes are left; budget_bytes allows more"
            )
        warn(
            f"{asked} slots of {record} bytes were asked for, {asked * record} bytes in all, and "
            f"{made} were made: {reason}. The other experts are served without slots"
        )

    def _tell_of_pinning(self, pinned: int) -> None:
        if self.layer._store.told_of_pinning:
            return
        self.layer._store.told_of_pinning = True
        limit = cuda.get_pinned_limit()
        reason = "the system refused more" if limit is None else f"moepool.set_pinned_limit({limit})"
        warn(
            f"{pinned} of {self.layer.bytes} bytes of experts are page-locked ({reason}): the rest reaches "
            f"{self.device} through a small page-locked ring, more slowly"
        )

    # ----------------------------------------------------------------------------------------------- matrices

    @property
    def matrices(self) -> dict[str, PoolMatrix]:
        """The matrices by name, in the order of the record."""
        return {name: self.matrix(name) for name in self.layer.matrices}

    def matrix(self, name: str) -> PoolMatrix:
        """The matrix of that name.

        Raises
        ------
        ArgumentError
            The layer has none.
        """
        names = list(self.layer.matrices)
        if name not in names:
            raise ArgumentError(f"the pool has no matrix {name!r}, only {', '.join(names)}")
        # Made anew each time: kept, it and its pool would hold each other, and a dropped pool would wait for
        # the garbage collector with all its slots.
        return PoolMatrix(self, names.index(name), self.layer.matrices[name])

    def _attribute(self, name: str) -> PoolMatrix:
        try:
            return self.matrix(name)
        except ArgumentError as error:
            raise AttributeError(str(error)) from None

    @property
    def gate(self) -> PoolMatrix:
        """The matrix "gate"."""
        return self._attribute("gate")

    @property
    def up(self) -> PoolMatrix:
        """The matrix "up"."""
        return self._attribute("up")

    @property
    def down(self) -> PoolMatrix:
        """The matrix "down"."""
        return self._attribute("down")

    @property
    def weight(self) -> PoolMatrix:
        """The matrix "weight", of a layer of one matrix."""
        return self._attribute("weight")

    # -------------------------------------------------------------------------------------------------- steps

    def resolve(
        self,
        ids: Any,
        phase: Phase = "auto",
        stream: Any = None,
        admissions: Iterable[tuple[int, int]] | None = None,
    ) -> Route:
        """Takes one step: decides who is admitted and evicted, fills slots, and tells where each place's
        expert is read.

        Parameters
        ----------
        ids : array of int32 or int64, or nested list of int
            (tokens, k), any strides, where the pool is or in host memory: for each token and place an expert,
            or -1 to skip the place. Repeats are allowed. It is read before the call returns; if it is in
            device memory, the call waits for it.
        phase : {"auto", "decode", "prompt"}
            A prompt step leaves the pool as it is. "auto" takes more tokens than `prompt_tokens` for a
            prompt.
        stream : optional
            The CUDA stream on which `ids` is ready: an address or a stream object. None is the current stream
            of the library of `ids`. Ops of the route may run on any stream. Ignored on the CPU.
        admissions : sequence of (expert, slot), optional
            Whom this step admits and where, instead of the policy: experts that it wants and that are
            missing, to slots that no open route reads and that hold no expert it wants, nor a pinned one. So
            a policy in Python runs a pool, or a trace is replayed. None leaves it to the policy, [] admits
            nobody.

        Returns
        -------
        Route
            A lease: the slots it uses are not overwritten before it is released.

        Raises
        ------
        IdError
            An id is outside [-1, experts); the message gives its position. The pool is as it was. If `ids` is
            in device memory, the place's rows are NaN instead, and the next call that uses the pool raises
            this.
        DtypeError, ArgumentError
            `ids` is of another dtype, shape or device, `phase` is unknown, or `admissions` are not allowed:
            the step bypasses, for example. The pool is as it was.
        StateError
            The pool is closed, or the stream records a CUDA graph: resolving needs the host.

        Examples
        --------
        >>> weight = np.zeros((8, 32, 64), np.float32)
        >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], slots=4)
        >>> with pool.resolve([[6, 2], [2, -1]]) as route:
        ...     print(route.misses, route.hot.tolist(), route.cold.tolist())
        2 [[1, 0], [0, -1]] [[-1, -1], [-1, -1]]
        """
        call = arrays.Call(self._device, stream, like=ids)
        call.require_host()
        taken = call.ids(ids)
        chosen = None if admissions is None else _pairs(admissions)
        with call:
            return self._resolve(taken, phase, call, chosen)

    def _resolve(
        self,
        ids: arrays.ArrayView,
        phase: str,
        call: arrays.Call,
        chosen: npt.NDArray[np.int32] | None = None,
    ) -> Route:
        step = self._step(ids, phase)
        return Route(self, handles.RouteHandle(self._handle, *step, call.stream, chosen))

    def _step(self, ids: arrays.ArrayView, phase: str) -> tuple[handles.Ids, int]:
        """Ids and phase as the core takes them."""
        number = self._phase(phase, ids.shape[1])
        bits = 32 if ids.dtype == "int32" else 64
        return handles.Ids(ids.address, bits, ids.device, ids.shape, ids.strides), number

    def _phase(self, phase: str, k: int) -> int:
        """The phase as the core takes it, of a step of k places a token."""
        number = choice("phase", phase, handles.PHASES)
        if not self._told_of_few_slots and 0 < self.slots < min(k, self.experts):
            self._told_of_few_slots = True
            warn(
                f"a token has {k} places, but the pool has {self.slots} slots: every step misses or "
                f"bypasses; make at least {min(k, self.experts)} slots, or none"
            )
        return number

    # ------------------------------------------------------------------------------------- outside of steps

    def prefetch(self, experts: Sequence[int] | npt.NDArray[np.integer[Any]]) -> int:
        """Brings experts into slots ahead of the steps that want them, for callers that know.

        It is no step: it counts no hit and no miss. The missing ones take, in the order given, the slots
        that the policy would give up first; neither leased slots nor those of other experts named. `guard`,
        `admit` and elections have no say.

        Parameters
        ----------
        experts : sequence of int
            Distinct.

        Returns
        -------
        int
            How many came in: fewer than were missing if such slots ran out. A "static" pool takes nobody.

        Raises
        ------
        IdError
            The layer does not have an expert. Or an earlier step met an id out of range in device memory:
            told once, the next call goes on.
        ArgumentError
            One is named twice.
        StateError
            The pool is closed.

        Examples
        --------
        >>> weight = np.zeros((8, 32, 64), np.float32)
        >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], slots=4)
        >>> pool.prefetch([6, 2]), pool.resolve([[6, 2]]).hits
        (2, 2)
        """
        return self._handle.prefetch(_experts("experts", experts, self.experts))

    def resize(self, slots: int) -> int:
        """Changes the number of slots while the pool is in use. Results do not change by it.

        The experts worth most to the policy stay; a "static" pool keeps its first slots. As slots are added,
        "static" and "pinned" pools take in the experts of `hot` that had none. CUDA graphs that
        hold steps of the pool stay valid: the order of their replays and this call is the caller's
        business, as with other calls. With miss="auto", one recorded while every expert had a slot goes on
        to stream what misses: record it anew for the CPU to have its share.

        Parameters
        ----------
        slots : int
            At most `max_slots`, or, without it, as many as the pool was made with. More than the layer has
            experts are as many as it has, with a warning.

        Returns
        -------
        int
            How many there are: fewer than asked for if memory is short, with a warning.

        Raises
        ------
        ArgumentError
            More than there may be, or fewer than pinned experts.
        IdError
            An earlier step met an id out of range in device memory. Told once: the next call goes on.
        StateError
            The pool is closed, or an open route reads a slot that would go.

        Examples
        --------
        >>> weight = np.zeros((8, 32, 64), np.float32)
        >>> layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0]
        >>> pool = moepool.Pool(layer, slots=2, max_slots=8)
        >>> pool.resize(6), pool.slots
        (6, 6)
        """
        slots = count("slots", slots)
        with self._resizing:  # so that what is said here is what the last call made
            self.slots = made = self._handle.resize(slots)
        if slots > self.experts:
            warn(f"{slots} slots for a layer of {self.experts} experts: the pool gets {self.experts} slots")
            slots = self.experts
        if made < slots:
            self._tell_of_memory(slots, made)
        return made

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes who is resident, and what the policy knows of each expert, for :meth:`load_state`.

        Raises
        ------
        IdError
            An earlier step met an id out of range in device memory. Told once: the next call goes on.
        StateError
            The pool is closed.
        OSError
            The file can not be written.
        """
        Path(path).write_bytes(self._handle.save())

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Goes on where a pool stopped: brings its residents in, and decides as it would have.

        :meth:`stats` count nothing of it.

        Parameters
        ----------
        path : str or path
            What :meth:`save_state` wrote: of a pool for a layer of the same experts, types and sizes, with
            the same policy, hot experts and number of slots.

        Raises
        ------
        ArgumentError
            It is of another pool, or no state at all. The pool is as it was.
        FormatError
            It is damaged. The pool is as it was.
        IdError
            An earlier step met an id out of range in device memory. Told once: the next call goes on.
        StateError
            The pool is closed, or routes are open.
        OSError
            The file can not be read.
        """
        data = Path(path).read_bytes()
        try:
            self._handle.load(data)
        except (ArgumentError, FormatError) as error:
            raise type(error)(f"{path}: {error}") from None

    def trace(self, room_bytes: int | None = None) -> PoolTrace:
        """Begins to record every step: ids, phase and admissions.

        A pool has one trace; a new one ends the last, which can then not be drained any more. Calls of
        :meth:`resize` and :meth:`load_state` are not recorded: what was recorded across one of them can not
        be replayed.

        Parameters
        ----------
        room_bytes : int, optional
            On CUDA, the ring in device memory that steps taken by the device go to until they are drained.
            A step of one token with 8 experts takes at most 160 bytes. None is 64 MiB. If it runs full,
            :meth:`PoolTrace.drain` raises.

        Returns
        -------
        PoolTrace

        Raises
        ------
        StateError
            The pool is closed.
        OutOfMemoryError
            There is no room for the ring.

        Examples
        --------
        >>> weight = np.zeros((8, 32, 64), np.float32)
        >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], slots=4)
        >>> with pool.trace() as trace:
        ...     pool.resolve([[6, 2]]).release()
        >>> steps = trace.drain()
        >>> steps.ids.tolist(), steps.admissions.tolist()
        ([[6, 2]], [[1, 0, 2, 0], [1, 0, 6, 1]])
        """
        room = 0 if room_bytes is None else count("room_bytes", room_bytes, 1, _INT64)
        return PoolTrace(self._handle, self.layer.block, room)

    # -------------------------------------------------------------------------------------------------- facts

    def describe(self, tokens: int, k: int) -> str:
        """Who takes a step of this shape when :class:`ExpertFFN` is called with ids on the pool's device.

        Parameters
        ----------
        tokens, k : int
            The shape of the ids.

        Returns
        -------
        str
            "device: ..." with the launch geometry of its kernels, or "host: ..." with the reason.

        Raises
        ------
        ArgumentError
            `tokens` is negative or `k` less than 1.
        StateError
            The pool is closed.

        Examples
        --------
        >>> weight = np.zeros((8, 32, 64), np.float32)
        >>> layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0]
        >>> moepool.Pool(layer, slots=4).describe(1, 2)
        'host: the pool is on the CPU'
        """
        return self._handle.describe(count("tokens", tokens), count("k", k))

    def stats(self) -> PoolStats:
        """Counts since the pool was made.

        Returns
        -------
        PoolStats

        Raises
        ------
        IdError
            An earlier step met an id out of range in device memory. Told once: the next call goes on.
        StateError
            The pool is closed.
        """
        counts = self._handle.stats()
        if counts["step_backs"] and not self._told_of_step_back:
            self._told_of_step_back = True
            log.warning(
                "%r: serving through slots was slower than the CPU alone for long, so the CPU computes "
                "everything for now; fewer slots, or none, would do as well",
                self,
            )
        return PoolStats(**{f.name: counts[f.name] for f in fields(PoolStats)})

    def residents(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Who lies where now.

        Returns
        -------
        slot_of : numpy.ndarray
            int32 (experts,): the expert's slot, or -1.
        expert_in : numpy.ndarray
            int32 (slots,): the slot's expert, or -1.

        Raises
        ------
        IdError
            An earlier step met an id out of range in device memory. Told once: the next call goes on.
        StateError
            The pool is closed.
        """
        slot_of, expert_in = np.empty(self.experts, np.int32), np.full(self.experts, -2, np.int32)
        self._handle.tables(slot_of, expert_in)
        return slot_of, expert_in[expert_in != -2]  # another thread may be changing the number of slots

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._handle.closed

    def close(self) -> None:
        """Frees the slots, once no route and no call uses them any more. May be called twice."""
        self._handle.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<Pool of block {self.layer.block} on {self.device}: {self.slots} slots for {self.experts} "
            f"experts, {self.policy}, {self.miss}{state}>"
        )


class Route:
    """The outcome of one step of a pool, and the lease on the slots that it uses. Made by
    :meth:`Pool.resolve`.

    A context manager that releases it. One thread at a time may use it. It stays usable if the pool is
    closed.

    Attributes
    ----------
    pool : Pool
    tokens, k : int
        The shape of the ids.
    tick : int
        The pool's step count; 0 if the step wanted no expert.
    bypass : bool
        The step left the pool as it was.
    prompt : bool
        It was a prompt step.
    hits, misses : int
        Distinct wanted experts that were resident, and that were not.
    admitted : int
        How many of the misses got a slot.
    """

    def __init__(self, pool: Pool, handle: handles.RouteHandle) -> None:
        self.pool = pool
        self._handle = handle
        info = handle.info()
        self.tokens, self.k, self.tick = info["tokens"], info["k"], info["tick"]
        self.bypass, self.prompt = bool(info["bypass"]), bool(info["prompt"])
        self.hits, self.misses, self.admitted = info["hits"], info["misses"], info["admitted"]

    def _tables(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        hot = np.empty((self.tokens, self.k), np.int32)
        cold = np.empty_like(hot)
        self._handle.tables(hot, cold)
        return hot, cold

    @property
    def hot(self) -> npt.NDArray[np.int32]:
        """int32 (tokens, k): the slot that serves a place, or -1. A new array each time."""
        return self._tables()[0]

    @property
    def cold(self) -> npt.NDArray[np.int32]:
        """int32 (tokens, k): the expert of a place that no slot serves, or -1. A new array each time."""
        return self._tables()[1]

    @property
    def closed(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._handle.closed

    def release(self) -> None:
        """Ends the lease. May be called twice. After it the route is of no use to an op: a
        :class:`StateError`."""
        self._handle.close()

    def __enter__(self) -> Route:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        kind = "prompt" if self.prompt else "decode"
        state = "bypass, " if self.bypass else ""
        return (
            f"<Route of {self.tokens} x {self.k} ids: {kind}, {state}{self.hits} hits, {self.misses} misses, "
            f"{self.admitted} admitted>"
        )


def _experts(
    name: str, values: Sequence[int] | npt.NDArray[np.integer[Any]], experts: int
) -> npt.NDArray[np.int32]:
    if not isinstance(values, Iterable):
        raise ArgumentError(f"{name} is {values!r}; it must be a sequence of experts, [{values!r}] for one")
    numbers = []
    for i, value in enumerate(values):
        number = integer(f"{name}[{i}]", value)
        if not 0 <= number < experts:
            raise IdError(f"{name}[{i}] is expert {number}; the layer has experts 0 to {experts - 1}")
        numbers.append(number)
    return np.array(numbers, np.int32)


def _pairs(admissions: Iterable[tuple[int, int]]) -> npt.NDArray[np.int32]:
    if not isinstance(admissions, Iterable):
        raise ArgumentError(f"admissions is {admissions!r}; it must be a sequence of (expert, slot)")
    pairs = []
    for i, pair in enumerate(admissions):
        try:
            expert, slot = pair
        except (TypeError, ValueError):
            raise ArgumentError(f"admissions[{i}] is {pair!r}; it must be (expert, slot)") from None
        pairs.append(
            [count(f"admissions[{i}], the expert,", expert), count(f"admissions[{i}], the slot,", slot)]
        )
    return np.array(pairs, np.int32).reshape(-1, 2)
