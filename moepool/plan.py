"""Plans: how many slots each layer gets, under which policy, and what comes of it."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np

from moepool.checks import count
from moepool.errors import ArgumentError, FormatError, StateError
from moepool.memory import Memory, memory
from moepool.policy import Policy
from moepool.pool import Miss, Pool
from moepool.rates import Rates
from moepool.simulate import Simulation, SimulationRun, hot_lists, per_layer, pool_policy, simulate
from moepool.store import Layer
from moepool.trace import Trace, TraceModel

__all__ = ["LayerPlan", "Plan", "Watermark", "auto_budget", "make_plan"]

_VERSION = 1
_INT64 = 2**63 - 1
_SHORT = 16
"""Uses of an expert, on average, below which a trace says little."""
_SIZES = 16
"""Numbers of slots, besides none, at which a policy's hits are counted."""

CANDIDATES = ("lru", "lfu", "lfru", "slru", "reelect")
"""The policies that a plan chooses from by itself: those that need no list of hot experts."""

RESERVE = 512 << 20
"""Bytes of device memory that a budget of "auto" leaves at least; and a twentieth of all, if that is more."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes
    ----------
    layer : int
        Its block in the model.
    experts, slots, record_bytes : int
        How many experts it has and how many slots it gets; what one of these takes.
    hit_rate : float
        Of the trace's decode steps, 0 to 1.
    hot : tuple of int
        The experts that stay, for the policies "static" and "pinned".
    gains : tuple of (int, float)
        Numbers of slots, rising, and the hits a decoded token that they bring: what slots are given out by.
    """

    layer: int
    experts: int
    slots: int
    record_bytes: int
    hit_rate: float
    hot: tuple[int, ...] = ()
    gains: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        count("layer", self.layer)
        where = f" of layer {self.layer}"
        count("experts" + where, self.experts, 1)
        count("slots" + where, self.slots, 0, self.experts)
        count("record_bytes" + where, self.record_bytes, 1, _INT64)
        _share("hit_rate" + where, self.hit_rate)
        for expert in self.hot:
            count("a hot expert" + where, expert, 0, self.experts - 1)
        if len(set(self.hot)) != len(self.hot) or len(self.hot) > self.slots:
            raise ArgumentError(
                f"hot{where} is {list(self.hot)}: not distinct, or more than {self.slots} slots"
            )
        numbers = [count("slots in gains" + where, n, 0, self.experts) for n, _ in self.gains]
        hits = [_real("hits in gains" + where, h) for _, h in self.gains]
        if numbers and (numbers[0] != 0 or sorted(set(numbers)) != numbers or sorted(hits) != hits):
            raise ArgumentError(f"gains{where} do not rise from 0 slots on")

    def at(self, slots: int, policy: Policy) -> LayerPlan:
        """The same with fewer slots, and with as many hot experts as these hold."""
        kept = self.hot
        if len(kept) > slots:
            kept = kept[: slots // 2 if policy.name == "pinned" else slots]
        return replace(self, slots=slots, hot=kept)


@dataclass(frozen=True)
class Plan:
    """Slots for each layer of a model, and what is expected of them. Made by :func:`make_plan`.

    Attributes
    ----------
    model : TraceModel
        The model, and the shape of what was traced.
    policy : str
        As :func:`simulate` takes it.
    miss : {"stream", "host"}
    layers : tuple of LayerPlan
    budget_bytes : int
        What the slots of all layers may take.
    tokens : int
        Decoded in the trace that it was made from.
    hit_rate : float
        Of that trace, 0 to 1.
    seconds : float or None
        Expected for the experts of a token, if the machine was measured.
    notes : tuple of str
        What does not fit, and what becomes of it.
    reserve_bytes : int or None
        What running pools should leave free on the device, if a :class:`Watermark` is to see to it.

    Examples
    --------
    >>> model = moepool.trace_model(model_path)
    >>> at = np.arange(64)
    >>> ids = np.stack([at % 3, at % 5 + 4, at % 2 + 9, at % 7 + 11], axis=1)
    >>> trace = moepool.Trace(model, at, 0 * at, at, at >= 0, ids)
    >>> plan = moepool.make_plan(trace, budget_bytes=1 << 20, record_bytes=[110592])
    >>> plan.layers[0].slots, plan.slot_bytes <= 1 << 20
    (9, True)
    >>> plan.save("plan.json")
    >>> with moepool.ExpertStore.from_gguf(model_path) as store:
    ...     moepool.Plan.load("plan.json").pool(store[0]).slots
    9
    """

    model: TraceModel
    policy: str
    miss: Miss
    layers: tuple[LayerPlan, ...]
    budget_bytes: int
    tokens: int
    hit_rate: float
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("experts", "k", "layers"):
            count(f"{name} of the model", getattr(self.model, name), 1)
        if not isinstance(self.policy, str):
            raise ArgumentError(f"policy is {self.policy!r}; it must be a string")
        pool_policy(self.policy)
        if self.miss not in get_args(Miss):
            raise ArgumentError(f"miss is {self.miss!r}; it must be {' or '.join(map(repr, get_args(Miss)))}")
        numbers = [layer.layer for layer in self.layers]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ArgumentError(f"layers are {numbers}: none, or one of them twice")
        count("budget_bytes", self.budget_bytes, 0, _INT64)
        count("tokens", self.tokens, 0, _INT64)
        _share("hit_rate", self.hit_rate)
        if self.seconds is not None:
            _real("seconds", self.seconds)
        if not all(isinstance(note, str) for note in self.notes):
            raise ArgumentError(f"notes are {list(self.notes)}; they must be strings")
        if self.reserve_bytes is not None:
            count("reserve_bytes", self.reserve_bytes, 0, _INT64)

    @property
    def slot_bytes(self) -> int:
        """What all slots take."""
        return sum(layer.slots * layer.record_bytes for layer in self.layers)

    def of(self, block: int) -> LayerPlan:
        """The plan of a layer.

        Raises
        ------
        ArgumentError
            The plan has no such layer.
        """
        for layer in self.layers:
            if layer.layer == block:
                return layer
        raise ArgumentError(f"the plan has layers {[layer.layer for layer in self.layers]}, not {block}")

    def pool(self, layer: Layer, *, device: str = "cpu", **options: Any) -> Pool:
        """A pool of a layer as planned.

        Parameters
        ----------
        layer : Layer
            Of a store of the model.
        device : str
        options
            Of :class:`Pool`, in place of what is planned. With `max_slots` a :class:`Watermark` can give
            memory back.

        Returns
        -------
        Pool

        Raises
        ------
        ArgumentError
            The plan has no such layer, or it is of another size.
        """
        planned = self.of(layer.block)
        if (layer.experts, layer.record_bytes) != (planned.experts, planned.record_bytes):
            raise ArgumentError(
                f"block {layer.block} has {layer.experts} experts of {layer.record_bytes} bytes, the plan "
                f"{planned.experts} of {planned.record_bytes}: it is of another model or quantisation"
            )
        policy = pool_policy(self.policy)
        slots = count("slots", options.get("slots", planned.slots))
        settings: dict[str, Any] = {
            "slots": slots,
            "policy": policy,
            "miss": self.miss,
            # A budget of its own: what is planned is not cut to half of what is free.
            "budget_bytes": max(slots * planned.record_bytes, 1),
        }
        if self.reserve_bytes is not None:
            settings["max_slots"] = planned.slots
        if policy.name in ("static", "pinned"):
            settings["hot"] = planned.at(min(slots, planned.slots), policy).hot
        return Pool(layer, device=device, **(settings | options))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file."""
        Path(path).write_text(
            json.dumps({"moepool_plan": _VERSION} | asdict(self), indent=1) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: TraceModel | None = None) -> Plan:
        """Reads what :meth:`save` wrote.

        Parameters
        ----------
        path : str or path
        model : TraceModel, optional
            What the plan has to be for.

        Raises
        ------
        FormatError
            It is no plan, or one for another model.
        ArgumentError
            It cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"plan {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            text = ""
        try:
            plan = cls(**_parsed(text))
        except ArgumentError as error:
            raise FormatError(f"plan {path}: {error}") from None
        if model is not None and not _same(plan.model, model):
            raise FormatError(
                f"plan {path} is for another model: {_told(plan.model)}, while this has {_told(model)}"
            )
        return plan

    def within(self, budget_bytes: int) -> Plan:
        """The same within a smaller budget: slots are taken where they bring least, and no layer gets more
        than it has, or fewer than are of use. Of the hot experts those stay that are wanted most.
        Expectations stay those of the whole plan."""
        if budget_bytes >= self.slot_bytes:
            return replace(self, budget_bytes=budget_bytes)
        slots = give_out(
            [_up_to(layer) for layer in self.layers],
            [layer.record_bytes for layer in self.layers],
            budget_bytes,
            _least(self.policy, self.model),
        )
        policy = pool_policy(self.policy)
        layers = tuple(layer.at(n, policy) for layer, n in zip(self.layers, slots, strict=True))
        return replace(self, layers=layers, budget_bytes=budget_bytes)


def auto_budget(device: str, reserve: int | None = None) -> tuple[int, int, Memory]:
    """What slots may take of a device's memory.

    Parameters
    ----------
    device : str
        A CUDA device.
    reserve : int, optional
        Bytes left to others. Default :data:`RESERVE`, or a twentieth of the memory if that is more.

    Returns
    -------
    budget, reserve : int
        Bytes.
    memory : Memory

    Raises
    ------
    ArgumentError
        `device` is the CPU, whose slots save nothing.
    UnsupportedError
        There is no such device.
    """
    if device == "cpu":
        raise ArgumentError("a budget of 'auto' is for a CUDA device: give a size, 2GiB for example")
    free = memory(device)
    kept = max(RESERVE, free.total // 20) if reserve is None else reserve
    return max(free.free - kept, 0), kept, free


def make_plan(
    trace: Trace,
    budget_bytes: int,
    record_bytes: int | Sequence[int],
    *,
    experts: int | Sequence[int] | None = None,
    policy: str = "auto",
    rates: Rates | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Plan:
    """Gives slots to layers where they bring most, by what a trace shows.

    Parameters
    ----------
    trace : Trace
        With rows of decode steps.
    budget_bytes : int
        What all slots may take.
    record_bytes : int or sequence of int
        Of one expert, for every layer of the trace or for each.
    experts : int or sequence of int, optional
        Of every layer or of each; by default as many as the trace's model says, which are those of its
        widest layer.
    policy : str
        As :func:`simulate` takes it, or "auto": of :data:`CANDIDATES` the one that takes the least time by
        `rates`, or has the most hits.
    rates : Rates, optional
        Of the machine.
    threads : int, optional
        Default `moepool.get_threads()`.
    progress : bool
        Show a bar on standard error if that is a terminal.

    Returns
    -------
    Plan

    Raises
    ------
    ArgumentError
        The trace has no decode steps, or the policy cannot be run by a pool.
    """
    count("budget_bytes", budget_bytes, 0, _INT64)
    if not trace.decode.any():
        raise ArgumentError("the trace has no rows of decode steps: there is nothing to plan by")
    names = list(CANDIDATES) if policy == "auto" else [policy]
    for name in names:
        if name == "belady":
            raise ArgumentError("belady knows the future, which no pool does: choose another policy")
        pool_policy(name)
    layers = len(np.unique(trace.layer))
    records = per_layer("record_bytes", record_bytes, layers, 1, _INT64)
    widest = trace.model.experts
    each = per_layer("experts", widest if experts is None else experts, layers, 1, widest)
    sizes = sorted({0, *each, *(-(-widest * i // _SIZES) for i in range(1, _SIZES + 1))})
    swept = simulate(trace, sizes, names, record_bytes=records, threads=threads, progress=progress)
    plans = []
    for name in names:
        gains = _gains(swept, name, each)
        equal = budget_bytes // sum(records)
        # The curves are only bounds between their corners: as many slots for all may be the better plan.
        least = _least(name, trace.model)
        ways = {
            filled(slots, each, records, budget_bytes, least)
            for slots in (
                give_out(gains, records, budget_bytes, least),
                tuple(min(equal, n) for n in each),
            )
        }
        exact = simulate(trace, sorted(ways), [name], record_bytes=records, threads=threads)
        plans += [_plan(trace, exact, run, gains, each, budget_bytes, rates) for run in exact.runs]
    best = min(plans, key=lambda plan: (plan.seconds or 0.0, -plan.hit_rate))
    return replace(best, notes=_notes(best))


def _gains(swept: Simulation, policy: str, experts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """For each layer hits a token by slots: the corners of the least concave curve above what was counted.

    A policy may bring nothing until it has as many slots as a token has places; on this curve every slot up
    to there counts for its share, so that slots are not withheld because the first alone brings nothing.
    """
    runs = [run for run in swept.runs if run.policy == policy]
    sizes = [run.slots[0] for run in runs]
    out = []
    for i in range(len(swept.layers)):
        points = [
            (n, float(run.by_layer["hits"][i]) / max(run.tokens, 1))
            for n, run in zip(sizes, runs, strict=True)
            if n <= experts[i]
        ]
        corners: list[tuple[int, float]] = []
        for n, hits in points:
            while len(corners) > 1 and (corners[-1][1] - corners[-2][1]) * (n - corners[-2][0]) <= (
                hits - corners[-2][1]
            ) * (corners[-1][0] - corners[-2][0]):
                corners.pop()
            if not corners or hits > corners[-1][1]:
                corners.append((n, hits))
        out.append(tuple(corners))
    return out


def _up_to(layer: LayerPlan) -> list[tuple[int, float]]:
    """The part of a layer's curve that ends at its slots."""
    slots = layer.slots
    gains = layer.gains or ((0, 0.0), (slots, layer.hit_rate))
    numbers, hits = zip(*gains, strict=True)
    return [(n, h) for n, h in gains if n < slots] + [(slots, float(np.interp(slots, numbers, hits)))]


def _least(policy: str, model: TraceModel) -> int:
    """The fewest slots that are of use: with fewer than a token has places every step bypasses, and only what
    stays anyway brings hits."""
    return 0 if pool_policy(policy).name in ("static", "pinned") else model.k


def give_out(
    gains: Sequence[Sequence[tuple[int, float]]],
    record_bytes: Sequence[int],
    budget_bytes: int,
    least: int = 0,
) -> tuple[int, ...]:
    """Slots of each layer: the budget goes, piece by piece, where a byte saves most bytes of misses.

    A hit saves its record and a slot takes one, so layers of different records compete by hits a slot. A
    layer that would get some slots, but fewer than `least`, gets none, and the others share them.

    Examples
    --------
    >>> give_out([[(0, 0.0), (2, 1.0), (8, 1.5)], [(0, 0.0), (8, 3.0)]], [100, 100], 600)
    (2, 4)
    """
    pieces = []
    for layer, corners in enumerate(gains):
        for (low, before), (high, after) in zip(corners, corners[1:], strict=False):
            pieces.append(((after - before) / (high - low), layer, high - low))
    slots = [0] * len(gains)
    left = budget_bytes
    for _, layer, size in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        taken = min(size, left // record_bytes[layer])
        slots[layer] += taken
        left -= taken * record_bytes[layer]
    if few := [layer for layer, n in enumerate(slots) if 0 < n < least]:
        worst = min(few, key=lambda layer: (gains[layer][1][1] - gains[layer][0][1]) / gains[layer][1][0])
        rest = [() if layer == worst else corners for layer, corners in enumerate(gains)]
        return give_out(rest, record_bytes, budget_bytes, least)
    return tuple(slots)


def filled(
    slots: Sequence[int],
    experts: Sequence[int],
    record_bytes: Sequence[int],
    budget_bytes: int,
    least: int = 0,
) -> tuple[int, ...]:
    """The same and what the budget holds besides, evenly: slots that a trace has no use for serve another
    text.

    Examples
    --------
    >>> filled((2, 0), (4, 8), (100, 100), 900, least=2)
    (3, 6)
    """
    out = list(slots)
    left = budget_bytes - sum(n * size for n, size in zip(out, record_bytes, strict=True))
    while True:
        # The first slots of a layer come together: fewer than `least` are of no use.
        steps = [min(max(least - n, 1), most - n) for n, most in zip(out, experts, strict=True)]
        fitting = [i for i, n in enumerate(steps) if n and n * record_bytes[i] <= left]
        if not fitting:
            return tuple(out)
        emptiest = min(fitting, key=lambda i: out[i] / experts[i])
        out[emptiest] += steps[emptiest]
        left -= steps[emptiest] * record_bytes[emptiest]


def _same(one: TraceModel, other: TraceModel) -> bool:
    """As far as both are known."""
    if one.fingerprint and other.fingerprint:
        return one.fingerprint == other.fingerprint
    return (one.k, one.experts) == (other.k, other.experts)


def _told(model: TraceModel) -> str:
    return f"{model.experts} experts, top-{model.k}, router {model.fingerprint or 'unknown'}"


def _parsed(text: str) -> dict[str, Any]:
    """The arguments of a :class:`Plan`, from its file."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ArgumentError("this is no file that `moepool plan -o` wrote") from None
    if not isinstance(values, dict) or values.pop("moepool_plan", None) != _VERSION:
        raise ArgumentError(f"this is no plan of version {_VERSION}")
    _named_as(Plan, "the plan", values)
    _named_as(TraceModel, "the model", values["model"])
    layers = []
    for i, layer in enumerate(_list("layers", values["layers"])):
        _named_as(LayerPlan, f"entry {i} of layers", layer)
        gains = [tuple(_list("a gain", gain, 2)) for gain in _list("gains", layer["gains"])]
        layers.append(LayerPlan(**layer | {"hot": tuple(_list("hot", layer["hot"])), "gains": tuple(gains)}))
    return values | {
        "model": TraceModel(**values["model"]),
        "layers": tuple(layers),
        "notes": tuple(_list("notes", values["notes"])),
    }


def _named_as(kind: type[Plan | LayerPlan | TraceModel], what: str, values: Any) -> None:
    """An object with the fields of a class, all of them and no others."""
    names = {field.name for field in fields(kind)}
    if not isinstance(values, dict):
        raise ArgumentError(f"{what} is {values!r}; it must be an object")
    if wrong := sorted(names.symmetric_difference(values)):
        raise ArgumentError(f"{what} has {'no' if wrong[0] in names else 'an unknown'} {wrong[0]!r}")


def _list(name: str, value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ArgumentError(f"{name} is {value!r}; it must be a list" + (f" of {length}" if length else ""))
    return value


def _real(name: str, value: Any) -> float:
    """A number that is finite and not negative."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ArgumentError(f"{name} is {value!r}; it must be a number from 0 on")
    return float(value)


def _share(name: str, value: Any) -> None:
    """From 0 to 1; not a number where there was nothing to share."""
    if not (isinstance(value, float) and math.isnan(value)) and _real(name, value) > 1:
        raise ArgumentError(f"{name} is {value}; it must be from 0 to 1")


def _plan(
    trace: Trace,
    exact: Simulation,
    run: SimulationRun,
    gains: list[tuple[tuple[int, float], ...]],
    experts: Sequence[int],
    budget_bytes: int,
    rates: Rates | None,
) -> Plan:
    hot = hot_lists(run.policy, run.slots, trace, None, exact.layers)
    wanted = run.by_layer["hits"] + run.by_layer["misses"]
    layers = tuple(
        LayerPlan(
            layer=layer,
            experts=experts[i],
            slots=run.slots[i],
            record_bytes=record,
            hit_rate=float(run.by_layer["hits"][i] / max(wanted[i], 1)),
            hot=tuple(hot[i]) if hot else (),
            gains=gains[i],
        )
        for i, (layer, record) in enumerate(zip(exact.layers, run.record_bytes or (), strict=True))
    )
    miss: Miss = "stream"
    seconds = None
    if rates is not None and rates.memory is not None:
        way, seconds = rates.best(run)
        miss = "host" if way == "host" else "stream"
    return Plan(trace.model, run.policy, miss, layers, budget_bytes, run.tokens, run.hit_rate, seconds)


def _notes(plan: Plan) -> tuple[str, ...]:
    experts = sum(layer.experts for layer in plan.layers)
    cold = experts - sum(layer.slots for layer in plan.layers)
    bare = [layer.layer for layer in plan.layers if layer.slots == 0]
    notes = []
    if cold:
        who = "read over the link when they are wanted" if plan.miss == "stream" else "computed by the CPU"
        size = sum((layer.experts - layer.slots) * layer.record_bytes for layer in plan.layers)
        notes.append(f"{cold} of {experts} experts ({size} bytes) are without a slot at any time: {who}")
    if bare:
        notes.append(f"layers {', '.join(map(str, bare))} get no slots at all")
    if (left := plan.budget_bytes - plan.slot_bytes) > 0:
        why = "no further slot fits" if cold else "every expert has a slot"
        notes.append(f"{left} bytes of the budget are left: {why}")
    widest = max(layer.experts for layer in plan.layers)
    if plan.tokens * plan.model.k < _SHORT * widest:
        notes.append(
            f"the traces are short: {plan.tokens} decoded tokens want an expert of a layer "
            f"{plan.tokens * plan.model.k / widest:.1f} times on average, which says little about other texts"
        )
    if plan.policy.startswith("static") or plan.policy.startswith("pinned"):
        notes.append("the hit rate is that of the trace which chose the hot experts: expect less of others")
    return tuple(notes)


class Watermark:
    """Keeps the slots of running pools within what other processes leave of a device's memory.

    When less than `reserve` bytes are free, slots are given back, from where they bring least; when more than
    `reserve` and a quarter of it are, slots come back, never more than planned. Bits never depend on it, as
    long as pools are resized where they may be: not while a CUDA graph that holds their steps is replayed.
    Who replays graphs calls :meth:`check` between replays; :meth:`watching`, whose thread knows nothing of
    replays, is for pools whose steps no graph holds.

    Parameters
    ----------
    plan : Plan
    pools : sequence of Pool
        In the order of `plan.layers`, made with `max_slots`, without which a pool keeps its memory.
    device : str
        Whose memory is looked at.
    reserve : int, optional
        Bytes; by default the plan's, or else as :func:`auto_budget` has it.
    look : callable, optional
        Gives the device's :class:`Memory`; :func:`moepool.memory` by default.

    Examples
    --------
    ::

        with moepool.Watermark(plan, pools, "cuda:0").watching(seconds=1):
            ...  # generate, step by step

        mark = moepool.Watermark(plan, pools, "cuda:0")
        for _ in range(tokens):
            mark.check()
            graph.launch(stream)
    """

    def __init__(
        self,
        plan: Plan,
        pools: Sequence[Pool],
        device: str,
        reserve: int | None = None,
        look: Callable[[str], Memory] = memory,
    ) -> None:
        if len(pools) != len(plan.layers):
            raise ArgumentError(f"{len(pools)} pools for a plan of {len(plan.layers)} layers")
        self._plan, self._pools, self._device, self._look = plan, tuple(pools), device, look
        kept = plan.reserve_bytes if reserve is None else reserve
        self.reserve = max(RESERVE, look(device).total // 20) if kept is None else kept

    def check(self) -> int:
        """Looks once, and resizes pools if it must.

        Returns
        -------
        int
            Bytes by which the slots grew; negative if they shrank. A pool of which an open route reads a slot
            that would go is left for the next look.

        Raises
        ------
        IdError, StateError
            What :meth:`Pool.stats` and :meth:`Pool.resize` tell: of earlier steps that met a bad id, or that
            the CPU did not answer; or a pool is closed.
        """
        free = self._look(self._device).free
        records = [layer.record_bytes for layer in self._plan.layers]
        taken = sum(pool.slots * record for pool, record in zip(self._pools, records, strict=True))
        spare = free - self.reserve
        if 0 <= spare <= self.reserve // 4:
            return 0
        budget = min(max(taken + spare, 0), self._plan.budget_bytes)
        wanted = [layer.slots for layer in self._plan.within(budget).layers]
        if pool_policy(self._plan.policy).name == "pinned":
            wanted = [max(n, len(layer.hot)) for n, layer in zip(wanted, self._plan.layers, strict=True)]
        # Those that shrink first, so that there is room for those that grow.
        for pool, slots in sorted(
            zip(self._pools, wanted, strict=True), key=lambda pair: pair[1] - pair[0].slots
        ):
            if slots == pool.slots:
                continue
            leased = pool.stats().leased  # and what went wrong in earlier steps is told here
            try:
                pool.resize(slots)
            except StateError:
                # An open route may read a slot that would go: the next look will find it closed.
                if not leased or slots > pool.slots:
                    raise
        return sum(pool.slots * record for pool, record in zip(self._pools, records, strict=True)) - taken

    def watching(self, seconds: float = 1.0) -> _Watch:
        """A context in which a thread of its own calls :meth:`check` again and again.

        Only for pools whose steps no CUDA graph holds: what a replay does to a pool while that is resized is
        undone.
        """
        return _Watch(self, seconds)


class _Watch:
    def __init__(self, watermark: Watermark, seconds: float) -> None:
        self._watermark, self._seconds = watermark, seconds
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="moepool-watermark", daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._seconds):
                self._watermark.check()
        except BaseException as error:  # told where the context ends: a thread has nobody to tell
            self._failed = error

    def __enter__(self) -> Watermark:
        self._thread.start()
        return self._watermark

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._stop.set()
        self._thread.join()
        if error is None and self._failed is not None:
            raise self._failed
        return False
