"""Thousands of layer calls under constant eviction: never a wrong byte, and memory stays where it is."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import moepool
from moepool.policy import PolicyName
from moepool.pool import Phase
from tests import cases
from tests.support import F32, I32, assert_same, few_slots, layer_of, products

SECONDS = 10.0  # at most
CALLS = 4000
MOST_TOKENS = 12
PHASES: tuple[Phase, ...] = ("decode", "decode", "auto", "prompt")
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
# So that what happens every so many steps happens often.
SHORT: dict[str, dict[str, int]] = {
    "lfu": {"half_life": 8},
    "lfru": {"half_life": 8, "weight": 3},
    "slru": {"protected_percent": 50},
    "reelect": {"period": 8},
}
MARGIN = 24 << 20  # bytes: a leak of one record a call would be several times as much


@dataclass(frozen=True)
class Layer:
    """A layer, its input rows, and the outputs of every expert for each of them."""

    ffn: cases.Ffn
    layer: moepool.Layer
    x: F32
    table: F32  # (T, E, N): down's rows before they are weighted

    def expected(self, pool: moepool.Pool, tokens: slice, ids: I32, weights: F32) -> F32:
        """The layer's output, of rows taken from the table."""
        places = np.take_along_axis(self.table[tokens], np.maximum(ids, 0)[:, :, None], axis=1)
        with pool.resolve(ids) as route:
            y: F32 = moepool.combine(places, route, weights)
            return y


def layer(ffn: cases.Ffn) -> Layer:
    made, x = layer_of(ffn), ffn.x(MOST_TOKENS)
    gate, up = products(made, x, "gate"), products(made, x, "up")
    with moepool.use_cpu_kernel("portable"):
        hidden = moepool.swiglu(gate, up)
    per_place = products(made, hidden, "down").reshape(MOST_TOKENS, ffn.experts, ffn.experts, -1)
    every = np.arange(ffn.experts)
    return Layer(ffn, made, x, np.ascontiguousarray(per_place[:, every, every]))


@dataclass
class Used:
    """A pool, and what is to be true of it.

    Attributes
    ----------
    pool
    hot
        The experts that stay; none but of "pinned".
    routes
        Open ones.
    saved
        How many slots there were when its state was saved; None: it was not.
    """

    pool: moepool.Pool
    hot: list[int]
    routes: list[moepool.Route] = field(default_factory=list)
    saved: int | None = None

    def resize(self, slots: int) -> None:
        """Refused only if an open route reads a slot that goes."""
        read = max((int(route.hot.max()) for route in self.routes), default=-1)
        if read >= slots:
            with pytest.raises(moepool.StateError, match="an open route reads slot"):
                self.pool.resize(slots)
        else:
            assert self.pool.resize(slots) == self.pool.slots == slots

    def load(self, file: Path) -> None:
        """What was saved, if nothing stands against it."""
        if self.routes:
            with pytest.raises(moepool.StateError, match="routes of the pool are open"):
                self.pool.load_state(file)
        elif self.saved != self.pool.slots:
            with pytest.raises(moepool.ArgumentError):
                self.pool.load_state(file)
        else:
            self.pool.load_state(file)

    def check(self, what: str) -> None:
        """The two maps say the same, and who is to stay is there."""
        slot_of, expert_in = self.pool.residents()
        assert len(expert_in) == self.pool.slots, what
        residents = expert_in[expert_in >= 0]
        assert sorted(residents) == np.flatnonzero(slot_of >= 0).tolist(), what
        assert (slot_of[residents] == np.flatnonzero(expert_in >= 0)).all(), what
        assert (slot_of[self.hot] >= 0).all(), (what, self.hot)
        assert self.pool.stats().resident == len(residents), what


def draw(stream: cases.Stream, *bounds: int) -> tuple[int, ...]:
    """An integer below each."""
    return tuple(int(stream.below(bound, 1)[0]) for bound in bounds)


def new_pool(of: Layer, stream: cases.Stream) -> Used:
    experts = of.ffn.experts
    slots, which, guard, miss, admit, first = draw(stream, experts, len(POLICIES), 2, 2, 4, experts)
    name = POLICIES[which]
    hot = [(first + i) % experts for i in range(slots // 2)] if name == "pinned" else []
    pool = moepool.Pool(
        of.layer,
        slots,
        max_slots=experts,
        policy=moepool.Policy(
            name, guard=bool(guard) and name not in ("static", "reelect"), **SHORT.get(name, {})
        ),
        miss="host" if miss else "stream",
        admit=1 if admit == 0 else None,
        hot=hot if name == "pinned" else None,
    )
    return Used(pool, hot)


def change(used: Used, stream: cases.Stream, file: Path) -> str:
    """Something that is no step."""
    pool = used.pool
    kind, slots, first, count = draw(stream, 4, pool.experts + 1, pool.experts, pool.experts + 1)
    if kind == 0:
        used.resize(max(slots, len(used.hot)))
    elif kind == 1:
        assert pool.prefetch([(first + i) % pool.experts for i in range(count)]) <= min(count, pool.slots)
    elif kind == 2 or used.saved is None:
        pool.save_state(file)
        used.saved = pool.slots
    else:
        used.load(file)
    return f"change {kind} of {pool!r}"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_no_wrong_byte_and_no_growth_under_constant_eviction(tmp_path: Path) -> None:
    """Pools of every policy, between whose steps slots come and go and states are loaded."""
    stream = cases.Stream("soak")
    layers = [layer(ffn) for ffn in cases.FFNS]
    made = changes = 0
    evictions = copied = 0
    with few_slots():
        judges = [moepool.Pool(of.layer, 0) for of in layers]
        pools = [[new_pool(of, stream) for _ in range(3)] for of in layers]
        started, begun, grown = time.monotonic(), 0, 0
        held: list[tuple[Used, moepool.Route]] = []
        for call in range(CALLS):
            if time.monotonic() - started > SECONDS:
                break
            which, at, tokens, first, cut, phase, renew, keep, other = draw(
                stream, len(layers), 3, 3, 9, 4, len(PHASES), 60, 8, 4
            )
            of, used = layers[which], pools[which][at]
            pool = used.pool
            span = slice(first, first + tokens + 1)
            shape = (tokens + 1, of.ffn.k)
            ids = np.where(stream.below(8, shape) == 0, -1, stream.below(of.ffn.experts, shape)).astype(
                np.int32
            )
            weights = (stream.below(1000, shape) * 0.001).astype(np.float32)
            what = f"call {call}: {ids.tolist()} in {PHASES[phase]} by {pool!r}"
            expected = of.expected(judges[which], span, ids, weights)
            layer_call = moepool.ExpertFFN(pool)
            if cut == 0:  # the batch in two steps
                half = (tokens + 1) // 2
                for part in (slice(0, half), slice(half, None)):
                    y = layer_call(of.x[span][part], ids[part], weights[part], phase=PHASES[phase])
                    assert_same(y, expected[part], f"{what}, tokens {part}")
            elif cut == 1:
                y = layer_call.composed(of.x[span], ids, weights, phase=PHASES[phase])
                assert_same(y, expected, f"{what}, composed")
            else:
                y = layer_call(of.x[span], ids, weights, phase=PHASES[phase])
                assert_same(y, expected, what)
            if keep == 0:
                route = pool.resolve(ids, phase=PHASES[phase])
                held.append((used, route))
                used.routes.append(route)
            if len(held) > 2:
                holder, route = held.pop(0)
                holder.routes.remove(route)
                route.release()
            if other == 0:
                changes += 1
                used.check(change(used, stream, tmp_path / f"{which}-{at}"))
            if renew == 0:
                evictions += pool.stats().evictions
                copied += pool.stats().copied_bytes
                made += 1
                pool.close()
                pools[which][at] = new_pool(of, stream)
            if call == 500:
                begun = resident_bytes()
            grown = resident_bytes() - begun
        for stats in (used.pool.stats() for of_layer in pools for used in of_layer):
            evictions += stats.evictions
            copied += stats.copied_bytes
    if call < 1000:
        pytest.skip(f"this machine made only {call} calls in {SECONDS} s")
    assert made > 10 and evictions > call / 10 and changes > call / 8, (made, evictions, changes, call)
    assert grown < MARGIN, (
        f"{grown / 2**20:.1f} MiB more than after 500 calls, {copied / 2**20:.1f} MiB copied"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_no_wrong_byte_while_others_change_the_pool(policy: PolicyName, tmp_path: Path) -> None:
    """Three threads, each of which takes steps and changes what the others compute with."""
    of, threads, seconds = layer(cases.FFNS[1]), 3, 1.5
    hot = [3, 4] if policy == "pinned" else None
    experts, stop, end = of.ffn.experts, threading.Event(), time.monotonic() + seconds
    judge = moepool.Pool(of.layer, 0)
    steps = [0] * threads

    def work(number: int, pool: moepool.Pool) -> None:
        stream = cases.Stream("soak", policy, number)
        ffn, file = moepool.ExpertFFN(pool), tmp_path / str(number)
        pool.save_state(file)
        while not stop.is_set() and time.monotonic() < end:
            kind, slots, first, tokens = draw(stream, 10, experts + 1, experts, 4)
            try:
                if kind == 0:
                    pool.resize(max(slots, len(hot or ())))
                elif kind == 1:
                    pool.prefetch([first, (first + 2) % experts])
                elif kind == 2:
                    pool.save_state(file)
                elif kind == 3:
                    pool.load_state(file)
                elif kind == 4:
                    slot_of, expert_in = pool.residents()
                    assert sorted(expert_in[expert_in >= 0]) == np.flatnonzero(slot_of >= 0).tolist()
                    continue
                else:
                    span = slice(first, first + tokens + 1)
                    ids = (stream.below(experts + 1, (tokens + 1, of.ffn.k)) - 1).astype(np.int32)
                    weights = (stream.below(1000, ids.shape) * 0.001).astype(np.float32)
                    y = ffn(of.x[span], ids, weights, phase="decode")
                    assert_same(y, of.expected(judge, span, ids, weights), f"thread {number}: {ids.tolist()}")
                    steps[number] += 1
            except moepool.StateError as error:  # a step of another thread holds a route
                assert "route" in str(error)
            except moepool.ArgumentError:  # a state of another number of slots
                assert kind == 3

    with (
        few_slots(),
        moepool.Pool(of.layer, 3, max_slots=experts, policy=policy, hot=hot) as pool,
        ThreadPoolExecutor(threads) as executor,
    ):
        futures = [executor.submit(work, number, pool) for number in range(threads)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
    assert min(steps) > 0, steps
