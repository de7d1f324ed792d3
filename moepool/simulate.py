"""What pools would do with a trace: counted without weights, by the same law and the same code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moepool import _sim
from moepool.checks import INT32, choice, count, integer
from moepool.cpu import get_threads
from moepool.errors import ArgumentError, FormatError
from moepool.policy import OPTIONS, Policy, no_option, parse_policy, policy_from
from moepool.pool import Phase, Pool, Route
from moepool.trace import Trace, must_fit

__all__ = ["POLICIES", "Chooser", "ChosenPool", "Simulation", "SimulationRun", "simulate"]

Int64 = npt.NDArray[np.int64]

POLICIES = ("belady", "static", "static-prompt", "lru", "lfu", "lfru", "slru", "reelect", "pinned")
"""What :func:`simulate` knows by name: the policies of pools, three ways to choose what stays, and the
bound."""

_MOST_RECORD_BYTES = 1 << 40

_STATIC_BY = ("static-prompt", "static-profile")
"""Simulated ways to choose what "static" keeps in pools."""

_COUNTS = (
    "steps",
    "bypasses",
    "hits",
    "misses",
    "prompt_hits",
    "prompt_misses",
    "evictions",
    "admitted",
)


class Chooser(_sim.Chooser):
    """Base of policies written in Python: one names whom each step admits, and where.

    It is simulated by :func:`simulate`, and runs a pool through :class:`ChosenPool`. It must be
    deterministic for the two to count the same. An `__init__` of its own must call `super().__init__()`.

    Examples
    --------
    An expert that misses twice takes the slot after the one that was filled last:

    >>> class SecondChance(moepool.Chooser):
    ...     def begin(self, experts, slots):
    ...         self.missed, self.next = set(), 0
    ...     def choose(self, tick, wanted, missing, expert_in):
    ...         choices = []
    ...         for expert in missing:
    ...             if expert in self.missed and expert_in[self.next] not in wanted:
    ...                 choices.append((expert, self.next))
    ...                 self.next = (self.next + 1) % len(expert_in)
    ...         self.missed.update(missing)
    ...         return choices
    >>> model = moepool.TraceModel(experts=8, k=1, layers=1)
    >>> at = np.arange(4)
    >>> trace = moepool.Trace(model, at, 0 * at, at, at >= 0, [[3], [3], [3], [5]])
    >>> moepool.simulate(trace, slots=4, policies=[SecondChance()]).runs[0].hits
    1
    """

    def begin(self, experts: int, slots: int) -> None:
        """Called before the first step of each layer.

        Parameters
        ----------
        experts, slots : int
            Of the layer.
        """

    def choose(
        self, tick: int, wanted: list[int], missing: list[int], expert_in: list[int]
    ) -> Iterable[tuple[int, int]]:
        """Called for every step that does not bypass.

        Parameters
        ----------
        tick : int
            The pool's step count.
        wanted, missing : list of int
            The experts that the step wants, rising, and those of them that are not resident.
        expert_in : list of int
            By slot, the expert in it, or -1.

        Returns
        -------
        iterable of (int, int)
            Experts to admit, each missing, and the slot of each, which must not hold a wanted one. It may be
            empty.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method choose(self, tick, wanted, missing, expert_in)"
        )


class Recorded(Chooser):
    """The admissions that a trace has recorded, for pools with as many slots as there were.

    Parameters
    ----------
    trace : Trace
        From its pools' first steps on.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._layers = np.unique(trace.layer).tolist()
        self._steps = {layer: _steps_that_want(trace, layer) for layer in self._layers}
        self._choices: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for step, layer, expert, slot in trace.admissions.tolist():
            self._choices.setdefault((layer, step), []).append((expert, slot))
        self._at = -1

    def begin(self, experts: int, slots: int) -> None:
        """Goes on to the next layer."""
        self._at = (self._at + 1) % len(self._layers)
        layer = self._layers[self._at]
        taken = max(
            (slot for (at, _), c in self._choices.items() if at == layer for _, slot in c), default=-1
        )
        if taken >= slots:
            raise ArgumentError(
                f"slot {taken} of layer {layer} was filled when it was recorded, not {slots} slots"
            )

    def choose(
        self, tick: int, wanted: list[int], missing: list[int], expert_in: list[int]
    ) -> Iterable[tuple[int, int]]:
        """What was recorded of this step."""
        layer = self._layers[self._at]
        return self._choices.get((layer, self._steps[layer][tick - 1]), [])


def _steps_that_want(trace: Trace, layer: int) -> list[int]:
    """The step of each resolve of a layer that wants anybody: rows of one step and phase are one."""
    rows = np.flatnonzero(trace.layer == layer)
    if not len(rows):
        return []
    step, decode = trace.step[rows], trace.decode[rows]
    begins = np.flatnonzero(np.r_[True, (np.diff(step) != 0) | (decode[1:] != decode[:-1])])
    wants = np.logical_or.reduceat((trace.ids[rows] >= 0).any(axis=1), begins)
    return step[begins[wants]].tolist()  # type: ignore[no-any-return]


class ChosenPool:
    """Runs a pool by a policy written in Python. The host takes every step.

    Parameters
    ----------
    pool : Pool
        Its own policy has no say; slots must not change meanwhile.
    chooser : Chooser
        Of this pool alone.

    Examples
    --------
    >>> class Newest(moepool.Chooser):
    ...     def choose(self, tick, wanted, missing, expert_in):
    ...         return [(missing[-1], 0)] if missing and expert_in[0] not in wanted else []
    >>> weight = np.zeros((8, 32, 64), np.float32)
    >>> pool = moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], slots=4)
    >>> chosen = moepool.ChosenPool(pool, Newest())
    >>> with chosen.resolve([[6, 2]]) as route:
    ...     y = moepool.matmul_id(np.ones((1, 64), np.float32), route, pool)
    >>> pool.residents()[1].tolist()
    [6, -1, -1, -1]
    """

    def __init__(self, pool: Pool, chooser: Chooser) -> None:
        self.pool, self.chooser = pool, chooser
        self._slots = pool.slots
        chooser.begin(pool.experts, pool.slots)

    def resolve(self, ids: Any, phase: Phase = "auto", stream: Any = None) -> Route:
        """Takes one step, as :meth:`Pool.resolve` does.

        Parameters
        ----------
        ids : array of int, or nested list of int
            (tokens, k), in host memory.
        phase : {"auto", "decode", "prompt"}
            As for :meth:`Pool.resolve`. A prompt step leaves the pool as it is.
        stream : optional
            As for :meth:`Pool.resolve`.

        Raises
        ------
        ArgumentError
            The policy names experts or slots that the step cannot admit; or as :meth:`Pool.resolve`, before
            the policy is asked.
        """
        places = np.asarray(ids)
        if phase == "auto" and places.ndim == 2:
            phase = "prompt" if len(places) > self.pool.prompt_tokens else "decode"
        if phase != "decode" or not self._can_be_resolved(ids, places):
            return self.pool.resolve(ids, phase, stream)  # nobody is admitted, or an error
        wanted = np.unique(places[places >= 0]).tolist()
        if not 0 < len(wanted) <= self._slots:
            return self.pool.resolve(ids, phase, stream)
        slot_of, expert_in = self.pool.residents()
        missing = [expert for expert in wanted if slot_of[expert] < 0]
        tick = self.pool.stats().steps + 1
        choices = self.chooser.choose(tick, wanted, missing, expert_in.tolist())
        if not isinstance(choices, Iterable):
            raise ArgumentError(
                f"{type(self.chooser).__name__}: step {tick}: choose gave {choices!r}, not pairs of an "
                "expert and a slot"
            )
        return self.pool.resolve(ids, phase, stream, admissions=list(choices))

    def _can_be_resolved(self, ids: Any, places: npt.NDArray[Any]) -> bool:
        """Whether :meth:`Pool.resolve` takes these ids: the policy is not to learn of others."""
        if places.ndim != 2 or places.dtype.kind != "i":
            return False
        if hasattr(ids, "dtype") and places.dtype not in (np.int32, np.int64):
            return False
        return bool(((places >= -1) & (places < self.pool.experts)).all())


class Candidate(NamedTuple):
    """A policy as it is simulated."""

    name: str
    policy: Policy | None  # None: Belady's optimum, or a Chooser
    chooser: Chooser | None
    attainable: bool  # without knowing the future, and by other runs than the trace's


@dataclass(frozen=True, eq=False)
class SimulationRun:
    """What one policy did with one number of slots. All counts are what `Pool.stats` would have counted.

    Attributes
    ----------
    policy : str
    attainable : bool
        False if the policy knows the future, or what is hot in it, or only repeats what was recorded.
    slots : tuple of int
        Of each layer.
    by_layer : dict of str to numpy.ndarray
        int64 (layers,): "steps", "bypasses", "hits", "misses", "prompt_hits", "prompt_misses", "evictions"
        and "admitted", as in `PoolStats` but for the last: how often a record was copied into a slot.
    record_bytes : tuple of int or None
        Of each layer; None if the model is not known.
    tokens : int
        Decoded.
    """

    policy: str
    attainable: bool
    slots: tuple[int, ...]
    by_layer: Mapping[str, Int64] = field(repr=False)
    record_bytes: tuple[int, ...] | None = field(repr=False)
    tokens: int = field(repr=False)

    def _sum(self, name: str) -> int:
        return int(self.by_layer[name].sum())

    @property
    def hits(self) -> int:
        """Wanted experts of decode steps that were resident, over all layers."""
        return self._sum("hits")

    @property
    def misses(self) -> int:
        """Wanted experts of decode steps that were not."""
        return self._sum("misses")

    @property
    def evictions(self) -> int:
        """Experts that lost their slot."""
        return self._sum("evictions")

    @property
    def admitted(self) -> int:
        """Records copied into slots."""
        return self._sum("admitted")

    @property
    def hit_rate(self) -> float:
        """Share of the experts wanted in decode steps that were resident; NaN if none was wanted."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else float("nan")

    @property
    def copied_bytes(self) -> int | None:
        """Bytes of the records copied into slots, None if the model is not known."""
        if self.record_bytes is None:
            return None
        return int(self.by_layer["admitted"] @ np.array(self.record_bytes))

    @property
    def slot_bytes(self) -> int | None:
        """Device memory that the slots take, None if the model is not known."""
        if self.record_bytes is None:
            return None
        return sum(n * size for n, size in zip(self.slots, self.record_bytes, strict=True))

    @property
    def bytes_per_token(self) -> float | None:
        """Copied into slots for each decoded token, None if the model is not known."""
        copied = self.copied_bytes
        return None if copied is None or not self.tokens else copied / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "policy": self.policy,
            "attainable": self.attainable,
            "slots": list(self.slots),
            "slot_bytes": self.slot_bytes,
            "hit_rate": self.hit_rate,
            "copied_bytes": self.copied_bytes,
            "bytes_per_token": self.bytes_per_token,
            **{name: self._sum(name) for name in _COUNTS},
            "by_layer": {name: values.tolist() for name, values in self.by_layer.items()},
        }


@dataclass(frozen=True, eq=False)
class Simulation:
    """What :func:`simulate` found.

    Attributes
    ----------
    layers : tuple of int
        The layers of the trace, in the order of all that is told by layer.
    experts : int
    tokens : int
        Decoded.
    runs : list of SimulationRun
        For each policy every number of slots.
    counts : numpy.ndarray
        int64 (layers, experts): places of decode rows.
    reuse : numpy.ndarray
        int64 (layers, experts + 1): `reuse[:, d]` are the uses of an expert in decode steps such that d
        others had been used since the one before; the last column are first uses.
    """

    layers: tuple[int, ...]
    experts: int
    tokens: int
    runs: list[SimulationRun]
    counts: Int64 = field(repr=False)
    reuse: Int64 = field(repr=False)

    def run(self, policy: str, slots: int | Sequence[int]) -> SimulationRun:
        """One of the runs.

        Raises
        ------
        ArgumentError
            It was not simulated.
        """
        wanted = per_layer("slots", slots, len(self.layers))
        for run in self.runs:
            if run.policy == policy and run.slots == wanted:
                return run
        raise ArgumentError(f"{policy!r} with {slots} slots was not simulated")

    def reuse_quantile(self, share: float) -> list[int | None]:
        """For each layer the reuse distance within which this share of its uses lies; None: first uses stand
        in the way."""
        out: list[int | None] = []
        for row in self.reuse:
            reached = np.flatnonzero(np.cumsum(row[:-1]) >= share * row.sum())
            out.append(int(reached[0]) if len(reached) else None)
        return out

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "layers": list(self.layers),
            "experts": self.experts,
            "tokens": self.tokens,
            "reuse": self.reuse.tolist(),
            "counts": self.counts.tolist(),
            "runs": [run.as_dict() for run in self.runs],
        }


def simulate(
    trace: Trace,
    slots: int | Sequence[int | Sequence[int]],
    policies: Iterable[str | Policy | Chooser] = POLICIES,
    *,
    profile: Trace | None = None,
    admit: int | None = None,
    record_bytes: int | Sequence[int] | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Simulation:
    """Takes a trace through the residency law under every policy with every number of slots.

    The counts are those of pools that resolve the trace's steps, each step in its phase, to the last one.

    Parameters
    ----------
    trace : Trace
    slots : int, or sequence of int or of sequences of int
        Each is a number of slots for every layer, or one for each layer of the trace. More than there are
        experts are as many as there are experts.
    policies : iterable of str, Policy or Chooser
        Names of :data:`POLICIES`, with options as in "lfu:half_life=64,guard". "belady" is Belady's optimum:
        it begins with what is wanted first, keeps what is wanted next, and may do so in any decode step, so
        that no policy has more hits. "static" holds the experts that the trace wants most, so it knows the
        future; "static-prompt" those that its prompts want most, "static-profile" those of `profile`.
        "pinned" keeps the hottest for half of the slots, of `profile` or else of the trace. "recorded"
        repeats the admissions in the trace, with as many slots as its pools had.
    profile : Trace, optional
        Of another run of the model: what "static-profile" and "pinned" go by.
    admit : int, optional
        The most experts admitted a step; None is no limit. It does not hold "belady" back, which stays the
        bound, nor what a Chooser or "recorded" names.
    record_bytes : int or sequence of int, optional
        Of one expert, for every layer or for each: gives bytes beside counts.
    threads : int, optional
        Default `moepool.get_threads()`.
    progress : bool
        Show a bar on standard error if that is a terminal.

    Returns
    -------
    Simulation

    Raises
    ------
    ArgumentError
        The trace has no rows, a policy is unknown, the profile is of another model, or numbers do not fit
        the trace's layers.

    Examples
    --------
    >>> model = moepool.TraceModel(experts=8, k=1, layers=1)
    >>> at = np.arange(6)
    >>> trace = moepool.Trace(model, at, 0 * at, at, at >= 0, [[3], [1], [3], [2], [1], [3]])
    >>> found = moepool.simulate(trace, slots=[2, 3], policies=["lru", "belady"])
    >>> [(run.policy, run.slots[0], run.hits) for run in found.runs]
    [('lru', 2, 1), ('lru', 3, 3), ('belady', 2, 5), ('belady', 3, 6)]
    """
    from tqdm import tqdm

    layers = tuple(np.unique(trace.layer).tolist())
    if not layers:
        raise ArgumentError("the trace has no rows: there is nothing to simulate")
    experts = trace.model.experts
    budgets = list(slots) if isinstance(slots, Iterable) else [slots]
    each = [_capped(per_layer("slots", n, len(layers)), experts) for n in budgets]
    sizes = None
    if record_bytes is not None:
        sizes = per_layer("record_bytes", record_bytes, len(layers), 1, _MOST_RECORD_BYTES)
    if threads is not None:
        threads = count("threads", threads, 1)
    if profile is not None:
        profile = _fitting(profile, trace)
    if isinstance(policies, str | Policy | Chooser):
        raise ArgumentError(f"policies is {policies!r}; it must be a list: [{policies!r}]")
    candidates = [_candidate(policy, trace, profile) for policy in policies]
    replay = _sim.Replay(trace.step, trace.layer, trace.decode, trace.ids, layers, experts)
    options = [
        _sim_run(replay, candidate, budget, trace, profile, layers, admit)
        for candidate in candidates
        if candidate.chooser is None
        for budget in each
    ]
    total = len(replay) * len(candidates) * len(each)
    tokens = int(np.bincount(trace.layer[trace.decode], minlength=1).max())
    runs = []
    with tqdm(
        total=total, disable=None if progress else True, unit="step", unit_scale=True, leave=False
    ) as bar:
        native = iter(replay.replay(options, threads or get_threads(), _progress(bar)))
        for candidate in candidates:
            for budget in each:
                if candidate.chooser is None:
                    counts = next(native)
                else:
                    try:
                        counts = replay.replay_chosen(budget, candidate.chooser)
                    except _sim.ChoiceError as error:
                        raise ArgumentError(f"{candidate.name}: {error}") from None
                    bar.update(len(replay))
                by_layer = dict(zip(_COUNTS, counts.T.copy(), strict=True))
                runs.append(
                    SimulationRun(candidate.name, candidate.attainable, budget, by_layer, sizes, tokens)
                )
    return Simulation(layers, experts, tokens, runs, trace.counts("decode")[list(layers)], replay.reuse())


def _progress(bar: Any) -> Callable[[int], None] | None:
    if bar.disable:
        return None
    return lambda done: bar.update(done - bar.n)


def _fitting(profile: Trace, trace: Trace) -> Trace:
    """A profile as a trace of the model of another trace."""
    try:
        must_fit("the profile", profile.model, trace.model)
    except FormatError as error:
        raise ArgumentError(
            f"{error}. If the files do not tell it, name the model when they are read (--model)"
        ) from None
    return profile.of(trace.model)


def per_layer(name: str, value: Any, layers: int, low: int = 0, high: int = INT32) -> tuple[int, ...]:
    """A number for each layer, from `low` to `high`."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        numbers = tuple(integer(name, n) for n in value)
        if len(numbers) != layers:
            raise ArgumentError(f"{len(numbers)} numbers for the {layers} layers of the trace: {value}")
    else:
        numbers = (integer(name, value),) * layers
    return tuple(count(name, n, low, high) for n in numbers)


def _capped(slots: tuple[int, ...], experts: int) -> tuple[int, ...]:
    return tuple(min(n, experts) for n in slots)


def split_policies(text: str) -> list[str]:
    """A list of policies as it is written on the command line; what follows a name as its option stays with
    it.

    Examples
    --------
    >>> split_policies("lru,lfu:half_life=64,guard,belady,slru:guard;protected_percent=50")
    ['lru', 'lfu:half_life=64,guard', 'belady', 'slru:guard,protected_percent=50']
    """
    out: list[str] = []
    for part in map(str.strip, re.split("[,;]", text)):
        key = part.partition("=")[0].replace("-", "_")
        if out and ":" in out[-1] and ":" not in part and ("=" in part or key in OPTIONS):
            out[-1] += ("" if out[-1].endswith(":") else ",") + part
        else:
            out.append(part)
    return out


def pool_policy(text: str) -> Policy:
    """The policy of pools that a simulated one stands for.

    Examples
    --------
    >>> pool_policy("static-prompt")
    Policy('static')
    """
    name = parse_policy(text)[0]
    return policy_from(text.replace(name, "static", 1) if name in _STATIC_BY else text)


def _candidate(value: str | Policy | Chooser, trace: Trace, profile: Trace | None) -> Candidate:
    if isinstance(value, Chooser):
        return Candidate(type(value).__name__, None, value, True)
    if isinstance(value, Policy):
        return Candidate(
            str(value), value, None, value.name not in ("static", "pinned") or profile is not None
        )
    if not isinstance(value, str):
        raise ArgumentError(f"{value!r} is no policy: give a name, a Policy or a Chooser")
    name, options = parse_policy(value)
    choice("policy", name, dict.fromkeys((*POLICIES, "static-profile", "recorded"), 0))
    if name in ("belady", "recorded") and options:
        raise no_option(next(iter(options)), name)
    if name == "belady":
        return Candidate(name, None, None, False)
    if name == "recorded":
        if not len(trace.admissions):
            raise ArgumentError(
                "the trace has no admissions, which 'recorded' repeats: the commands write them in runs with "
                "--miss auto alone, a program with PoolRecorder(..., admissions=True)"
            )
        return Candidate(name, None, Recorded(trace), False)
    if name == "static-prompt" and trace.decode.all():
        raise ArgumentError("static-prompt needs a trace with rows of prompts")
    if name == "static-profile" and profile is None:
        raise ArgumentError("static-profile needs the trace of another run as profile")
    policy = pool_policy(value)
    attainable = (
        name in _STATIC_BY or name not in ("static", "pinned") or (name == "pinned" and profile is not None)
    )
    return Candidate(value, policy, None, attainable)


def hot_lists(
    name: str, slots: Sequence[int], trace: Trace, profile: Trace | None, layers: Sequence[int]
) -> list[list[int]]:
    """The experts that stay in each layer's slots under a policy, hottest first; [] where none do.

    Parameters
    ----------
    name : str
        Of a policy as :func:`simulate` takes it.
    slots, layers : sequence of int
        Of each layer its slots, and its number in the trace.
    """
    kind = name.partition(":")[0].partition(",")[0]
    if kind not in ("static", "static-prompt", "static-profile", "pinned"):
        return []
    source = profile if profile is not None and kind in ("static-profile", "pinned") else trace
    if kind == "static-prompt":
        counts = source.counts("prompt")
    else:
        counts = source.counts("decode" if source.decode.any() else None)
    order = np.argsort(-counts, axis=1, kind="stable")
    kept = [n // 2 for n in slots] if kind == "pinned" else slots
    return [order[layer, :n].tolist() for layer, n in zip(layers, kept, strict=True)]


def _sim_run(
    replay: _sim.Replay,
    candidate: Candidate,
    slots: tuple[int, ...],
    trace: Trace,
    profile: Trace | None,
    layers: tuple[int, ...],
    admit: int | None,
) -> _sim.Run:
    policy = candidate.policy or Policy()
    hot = hot_lists(candidate.name, slots, trace, profile, layers)
    limit = -1 if admit is None else count("admit", admit)
    return replay.run(slots, policy.config(), limit, candidate.policy is None, hot)
