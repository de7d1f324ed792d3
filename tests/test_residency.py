"""The residency law: a model of it in plain Python, and traces through which pools must follow it exactly."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
from numpy.typing import ArrayLike

import moepool
from moepool.policy import PolicyName
from moepool.pool import Miss, Phase
from tests import cases
from tests.spec.residency import EMPTY, Residency
from tests.support import F32, I32, Guarded, On, assert_same, few_slots, matrix_layer, pick, products

EXPERTS = 6


@dataclass
class Step:
    """What one resolve does, according to the law."""

    tick: int = 0
    bypass: bool = False
    prompt: bool = False
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    serving: dict[int, int] = field(default_factory=dict)  # expert -> the slot that serves it


@dataclass
class Law:
    """The residency law with its leases and counts, around the specification of the policies.

    Attributes
    ----------
    pins
        How many open routes read each slot.
    """

    experts: int
    slots: int
    policy: moepool.Policy | PolicyName = "lru"
    miss: Miss = "stream"
    admit: int | None = None
    prompt_tokens: int = 32
    hot: list[int] | None = None

    def __post_init__(self) -> None:
        self.slots = min(self.slots, self.experts)
        policy = self.policy if isinstance(self.policy, moepool.Policy) else moepool.Policy(self.policy)
        self.residency = Residency(self.experts, self.slots, policy, self.admit, self.hot)
        self.pins = [0] * self.slots
        names = "bypasses hits misses prompt_hits prompt_misses evictions copied in_place host"
        self.counts = dict.fromkeys(names.split(), 0)

    @property
    def expert_in(self) -> list[int]:
        return self.residency.expert_in

    def slot_of(self, expert: int) -> int:
        return self.residency.slot_of(expert)

    def resolve(self, ids: I32, phase: Phase) -> Step:
        wanted = sorted(set(ids[ids >= 0].tolist()))
        if not wanted:
            return Step()
        step = Step(prompt=phase == "prompt" or (phase == "auto" and len(ids) > self.prompt_tokens))
        leased = {slot for slot in range(self.slots) if self.pins[slot]}
        outcome = self.residency.step(wanted, step.prompt, leased)
        step.tick, step.bypass = outcome.tick, outcome.bypass
        step.hits, step.misses = outcome.hits, outcome.misses
        step.admitted = [expert for expert, _, _ in outcome.admissions]
        self.counts["evictions"] += sum(victim != EMPTY for _, _, victim in outcome.admissions)
        for expert in step.hits + (step.misses if self.miss == "stream" else []):
            if expert in self.expert_in:
                step.serving[expert] = self.slot_of(expert)
        for slot in step.serving.values():
            self.pins[slot] += 1
        self._count(step, wanted)
        return step

    def _count(self, step: Step, wanted: list[int]) -> None:
        kind = "prompt_" if step.prompt else ""
        self.counts["bypasses"] += step.bypass
        self.counts[kind + "hits"] += len(step.hits)
        self.counts[kind + "misses"] += len(step.misses)
        self.counts["copied"] += len(step.admitted)
        where_they_lie = len(wanted) - len(step.serving)
        self.counts["host" if self.miss == "host" else "in_place"] += where_they_lie

    def release(self, step: Step) -> None:
        for slot in step.serving.values():
            self.pins[slot] -= 1

    def stats(self, record: int) -> dict[str, int]:
        """Every count by its name in PoolStats; `record` is the size of an expert's record in bytes."""
        counts = dict(self.counts)
        sizes = {f"{name}_bytes": counts.pop(name) * record for name in ("copied", "in_place", "host")}
        return {
            "steps": self.residency.tick,
            **counts,
            **sizes,
            "slots": self.slots,
            "experts": self.experts,
            "resident": self.slots - self.expert_in.count(EMPTY),
            "leased": self.slots - self.pins.count(0),
        }


@dataclass(frozen=True)
class Fixture:
    """A layer and what each expert gives for each token of x."""

    on: On
    layer: moepool.Layer
    x: F32
    table: F32


@pytest.fixture(scope="module")
def small(on: On) -> Fixture:
    """A layer whose experts give different bytes everywhere, so that a wrong one can not pass."""
    weight = cases.tame_blocks("q8_0", 9 * 33, 64, "residency").reshape(9, 33, -1)
    layer = matrix_layer("q8_0", weight)
    x = cases.activations("plain", 40, 64, "residency")
    table = products(layer, x)
    for token in table.view(np.uint32):
        assert all((token[a] != token[b]).all() for a in range(9) for b in range(a))
    return Fixture(on, layer, x, table)


def layer_of(small: Fixture, experts: int) -> Fixture:
    """The same with the first experts only."""
    if experts == small.layer.experts:
        return small
    weight = cases.tame_blocks("q8_0", 9 * 33, 64, "residency").reshape(9, 33, -1)[:experts]
    return Fixture(small.on, matrix_layer("q8_0", weight), small.x, small.table[:, :experts])


class Follower:
    """A pool and the law side by side: every step is compared in full.

    Attributes
    ----------
    pool
    law
    """

    def __init__(self, small: Fixture, law: Law) -> None:
        self.small, self.law = small, law
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", moepool.MoePoolWarning)
            self.pool = small.on.pool(
                small.layer,
                law.slots,
                policy=law.policy,
                miss=law.miss,
                hot=law.hot,
                prompt_tokens=law.prompt_tokens,
                admit=law.admit,
            )
        self.same("new pool")

    def same(self, what: object) -> None:
        slot_of, expert_in = self.pool.residents()
        assert expert_in.tolist() == self.law.expert_in, what
        assert slot_of.tolist() == [self.law.slot_of(expert) for expert in range(self.law.experts)], what
        stats = asdict(self.pool.stats())
        law = self.law.stats(self.small.layer.record_bytes)
        assert {name: stats[name] for name in law} == law, what

    def step(
        self, ids: ArrayLike, phase: Phase = "decode", what: object = "", *, keep: bool = False
    ) -> tuple[moepool.Route, Step]:
        """One step of both. The route stays open, with its lease, if `keep`."""
        array = np.asarray(ids, np.int32)
        what = f"{what}: {array.tolist()} in {phase} after {self.law.expert_in}"
        step = self.law.resolve(array, phase)
        with few_slots():
            route = self.pool.resolve(array, phase=phase)
        counts = (route.tick, route.bypass, route.prompt, route.hits, route.misses, route.admitted)
        law = (step.tick, step.bypass, step.prompt, len(step.hits), len(step.misses), len(step.admitted))
        assert counts == law, what
        hot = [[step.serving.get(expert, -1) for expert in token] for token in array.tolist()]
        cold = [[-1 if expert in step.serving else expert for expert in token] for token in array.tolist()]
        assert route.hot.tolist() == hot, what
        assert route.cold.tolist() == cold, what
        self.same(what)
        self.check(route, ids, what)
        if not keep:
            self.release(route, step, what)
        return route, step

    def release(self, route: moepool.Route, step: Step, what: object = "") -> None:
        route.release()
        self.law.release(step)
        self.same(f"{what}, released")

    def check(self, route: moepool.Route, ids: ArrayLike, what: object) -> None:
        """The route's experts give their own bytes."""
        array = np.asarray(ids, np.int32)
        expected = pick(self.small.table[: len(array)], array)
        out = Guarded(*expected.shape, device=self.pool.device)
        self.small.on(moepool.matmul_id, self.small.x[: len(array)], route, self.pool, out=out.out)
        assert_same(out.check(what), expected, what)


# ----------------------------------------------------------------------------------------------------- traces


TRACES = range(120)
STEPS = 60


@dataclass(frozen=True)
class Move:
    """One step of a trace, and what happens to the leases after it."""

    ids: I32
    phase: Phase
    keep: bool  # the route stays open
    release: bool  # one of those that stayed open is released,
    which: int  # this one, modulo their number

    def ends(self, held: int) -> bool:
        """Whether a route is released, of `held` that are open: never more than two stay so."""
        return held > 2 or (held > 0 and self.release)


def draw_policy(stream: cases.Stream, kind: int) -> moepool.Policy:
    """The policies, with and without a guard, and short periods: a trace has some sixty steps."""
    half_life, weight, period, percent, guard = (
        int(stream.below(bound, 1)[0]) for bound in (20, 6, 20, 101, 2)
    )
    options = {"half_life": 1 + half_life, "guard": guard == 1}
    policies = {
        2: moepool.Policy("pinned"),
        3: moepool.Policy("lfu", **options),
        4: moepool.Policy("lfu", **options),
        5: moepool.Policy("lfru", weight=weight, **options),
        6: moepool.Policy("lfru", weight=weight, **options),
        7: moepool.Policy("slru", protected_percent=percent),
        8: moepool.Policy("slru", protected_percent=percent),
        9: moepool.Policy("reelect", period=1 + period),
        10: moepool.Policy("reelect", period=1 + period),
        11: moepool.Policy("lru", guard=True, half_life=1 + half_life),
    }
    return policies.get(kind, moepool.Policy("static" if kind < 2 else "lru"))


def draw_law(stream: cases.Stream) -> Law:
    experts = 1 + int(stream.below(9, 1)[0])
    slots, kind, admit, miss, prompt, hot = (
        int(stream.below(bound, 1)[0]) for bound in (experts + 4, 16, 4, 2, 4, experts + 1)
    )
    order = np.argsort(stream.words(experts)).tolist()
    return Law(
        experts,
        slots,
        policy=draw_policy(stream, kind),
        hot=order[: min(hot, slots)] if kind in (0, 2) else None,
        miss="host" if miss else "stream",
        admit=(None, None, 1, 2)[admit],
        prompt_tokens=(0, 2, 32, 32)[prompt],
    )


def draw_moves(stream: cases.Stream, experts: int) -> Iterator[Move]:
    """Few tokens mostly, favouring low ids, now and then a prompt; skips and repeats among them."""
    phases: tuple[Phase, ...] = ("auto", "auto", "decode", "decode", "prompt")
    for _ in range(STEPS):
        tokens, k, prompt, phase, keep, release, which = (
            int(stream.below(bound, 1)[0]) for bound in (4, 4, 12, len(phases), 3, 4, 6)
        )
        shape = (tokens + (33 if prompt == 0 else 0), k + 1)
        low = np.minimum(stream.below(experts, shape), stream.below(experts, shape))
        ids = np.where(stream.below(6, shape) == 0, -1, low).astype(np.int32)
        yield Move(ids, phases[phase], keep == 0, release == 0, which)


@pytest.mark.parametrize("seed", TRACES)
def test_pools_follow_the_law_through_random_traces(small: Fixture, seed: int) -> None:
    stream = cases.Stream("trace", seed)
    law = draw_law(stream)
    follower = Follower(layer_of(small, law.experts), law)
    held: list[tuple[moepool.Route, Step, I32]] = []
    for i, move in enumerate(draw_moves(stream, law.experts)):
        what = f"trace {seed}, step {i}, {law}"
        route, step = follower.step(move.ids, move.phase, what, keep=move.keep)
        if move.keep:
            held.append((route, step, move.ids))
        if move.ends(len(held)):
            route, step, ids = held.pop(move.which % len(held))
            follower.check(route, ids, f"{what}: a route that was held")
            follower.release(route, step, what)
    for route, step, ids in held:
        follower.check(route, ids, f"trace {seed}, the end")
        follower.release(route, step, f"trace {seed}, the end")
    assert follower.pool.stats().leased == 0


def test_the_traces_meet_what_the_law_is_about() -> None:
    """They evict, bypass, hit in prompts, and run out of victims under leases, each often."""
    names = ("evictions", "bypasses", "prompt_hits", "host", "in_place", "copied")
    policies = ("lru", "static", "lfu", "lfru", "slru", "reelect", "pinned")
    seen = dict.fromkeys((*names, *policies, "pinned out"), 0)
    for seed in TRACES:
        stream = cases.Stream("trace", seed)
        law = draw_law(stream)
        held: list[Step] = []
        for move in draw_moves(stream, law.experts):
            step = law.resolve(move.ids, move.phase)
            room = len(step.misses) if law.admit is None else min(law.admit, len(step.misses))
            lru = law.policy == moepool.Policy("lru")
            seen["pinned out"] += not step.bypass and lru and len(step.admitted) < room
            held.append(step)
            if not move.keep:
                law.release(held.pop())
            if move.ends(len(held)):
                law.release(held.pop(move.which % len(held)))
        for name in names:
            seen[name] += law.counts[name]
        assert isinstance(law.policy, moepool.Policy)
        seen[law.policy.name] += 1
    assert all(count >= 5 for count in seen.values()), seen


# -------------------------------------------------------------------------------------------- rule by rule


def follow(small: Fixture, slots: int, experts: int = EXPERTS, **options: object) -> Follower:
    return Follower(layer_of(small, experts), Law(experts, slots, **options))  # type: ignore[arg-type]


def residents(follower: Follower) -> list[int]:
    expert_in: list[int] = follower.pool.residents()[1].tolist()
    return expert_in


def test_missing_experts_take_empty_slots_first_in_rising_id(small: Fixture) -> None:
    follower = follow(small, 4)
    follower.step([[5, 2]])
    assert residents(follower) == [2, 5, EMPTY, EMPTY]
    follower.step([[2]])
    follower.step([[4, 0]])
    assert residents(follower) == [2, 5, 0, 4]


def test_the_expert_used_longest_ago_goes_and_ties_go_by_slot(small: Fixture) -> None:
    follower = follow(small, 3)
    follower.step([[0, 1, 2]])
    follower.step([[0]])
    follower.step([[3]])
    assert residents(follower) == [0, 3, 2]  # 1 and 2 were used at once: the lower slot goes
    follower.step([[4, 5]])
    assert residents(follower) == [5, 3, 4]  # 2, then 0


@pytest.mark.parametrize("miss", ["stream", "host"])
def test_a_wanted_expert_is_never_evicted_by_its_own_call(small: Fixture, miss: Miss) -> None:
    follower = follow(small, 2, miss=miss)
    follower.step([[0, 1]])
    follower.step([[0]])  # so 1 is the one to go
    _, step = follower.step([[1, 2]])
    assert (step.hits, step.admitted) == ([1], [2])
    assert residents(follower) == [2, 1]
    # A later miss of a call may not take the slot of an earlier one either.
    follower.step([[3, 4], [4, 3]])
    assert sorted(residents(follower)) == [3, 4]


def test_a_wanted_expert_stays_though_no_other_slot_is_free(small: Fixture) -> None:
    follower = follow(small, 2)
    follower.step([[0, 1]])
    route, held = follower.step([[0]], keep=True)
    _, step = follower.step([[1, 2]])  # 0 is pinned and 1 is wanted: 2 finds no slot
    assert (step.hits, step.admitted) == ([1], []) and residents(follower) == [0, 1]
    follower.release(route, held)


@pytest.mark.parametrize("slots", range(1, 5))
def test_the_map_is_rewritten_before_anything_of_the_step_reads_it(small: Fixture, slots: int) -> None:
    """Every slot holds another expert's weights when the step begins, and none of them when it computes."""
    follower = follow(small, slots, experts=9)
    others, wanted = list(range(slots)), list(range(8, 8 - slots, -1))
    follower.step([others])
    for round_ in range(3):
        route, step = follower.step([wanted], what=f"round {round_}", keep=True)
        assert step.admitted == sorted(wanted)
        # The tables are those after the step: each place is served by the slot that now holds its expert.
        expert_in = follower.pool.residents()[1]
        assert expert_in[route.hot[0]].tolist() == wanted
        assert (route.cold == -1).all()
        # And so are the bytes, of the hot half alone.
        hot = small.on(moepool.matmul_id, small.x[:1], route, follower.pool, half="hot")
        assert_same(hot, pick(small.table[:1], np.array([wanted], np.int32)), f"round {round_}")
        follower.release(route, step)
        others, wanted = wanted, others


def test_a_host_miss_fills_the_slot_for_later_steps(small: Fixture) -> None:
    follower = follow(small, 2, miss="host")
    route, step = follower.step([[4, 1]], keep=True)
    assert step.admitted == [1, 4] and (route.hot == -1).all() and route.cold.tolist() == [[4, 1]]
    follower.release(route, step)
    route, _ = follower.step([[4, 1]], keep=True)
    assert route.hot.tolist() == [[1, 0]] and (route.cold == -1).all()
    stats = follower.pool.stats()
    record = small.layer.record_bytes
    assert (stats.copied_bytes, stats.host_bytes, stats.in_place_bytes) == (2 * record, 2 * record, 0)


@pytest.mark.parametrize("said", [True, False], ids=["said to be one", "by its length"])
def test_a_prompt_evicts_nothing_and_stamps_nothing(small: Fixture, said: bool) -> None:
    follower = follow(small, 3)
    follower.step([[0, 1, 2]])
    follower.step([[1, 2]])
    prompt = [[5, 0]] if said else [[5, 0]] * 33
    phase: Phase = "prompt" if said else "auto"
    _, step = follower.step(prompt, phase)
    assert step.bypass and step.prompt and (step.hits, step.misses) == ([0], [5])
    assert residents(follower) == [0, 1, 2]
    follower.step([[3]])
    assert residents(follower) == [3, 1, 2]  # 0 was the oldest still


def test_thirty_two_tokens_are_no_prompt_unless_told(small: Fixture) -> None:
    follower = follow(small, 2)
    assert not follower.step([[0]] * 32, "auto")[1].prompt
    assert follower.step([[0]] * 33, "auto")[1].prompt
    assert not follower.step([[0]] * 33, "decode")[1].prompt
    follower = follow(small, 2, prompt_tokens=1)
    assert follower.step([[0]] * 2, "auto")[1].prompt
    follower = follow(small, 2, prompt_tokens=0)
    assert follower.step([[0]], "auto")[1].prompt


def test_with_a_slot_for_every_expert_decode_never_bypasses(small: Fixture) -> None:
    follower = follow(small, EXPERTS)
    stream = cases.Stream("full pool")
    for _ in range(40):
        _, step = follower.step(stream.below(EXPERTS, (3, 2)).tolist(), "decode")
        assert not step.bypass
    stats = follower.pool.stats()
    assert (stats.bypasses, stats.evictions, stats.misses) == (0, 0, EXPERTS)


def test_a_step_that_wants_more_than_there_are_slots_leaves_them_alone(small: Fixture) -> None:
    follower = follow(small, 2)
    follower.step([[0, 1]])
    follower.step([[1]])
    _, step = follower.step([[0, 2, 3]])
    assert step.bypass and not step.prompt and step.serving == {0: 0}
    follower.step([[4]])
    assert residents(follower) == [4, 1]  # the bypass gave 0 no new stamp


def test_at_most_admit_experts_come_in_a_step(small: Fixture) -> None:
    follower = follow(small, 4, admit=1)
    _, step = follower.step([[5, 3, 1]])
    assert step.admitted == [1]
    _, step = follower.step([[5, 3, 1]])
    assert step.admitted == [3]
    follower = follow(small, 4, admit=0)
    assert follower.step([[5, 3, 1]])[1].admitted == []


@pytest.mark.parametrize("hot", [None, [4, 0], []])
def test_static_holds_its_experts_and_no_others(small: Fixture, hot: list[int] | None) -> None:
    follower = follow(small, 3, policy="static", hot=hot)
    first = residents(follower)
    assert first == ([0, 1, 2] if hot is None else hot + [EMPTY] * (3 - len(hot)))
    for ids in ([[4, 5]], [[3]], [[0, 1, 2]], [[0, 1, 2, 3, 4, 5]]):
        follower.step(ids)
        assert residents(follower) == first
    assert follower.pool.stats().copied_bytes == 0


def test_a_pool_without_slots_serves_every_expert_where_it_lies(small: Fixture) -> None:
    for miss in ("stream", "host"):
        follower = follow(small, 0, miss=miss)
        _, step = follower.step([[3, 1], [-1, 1]])
        assert step.bypass and not step.serving


def test_more_slots_than_experts_are_as_many_and_said_so(small: Fixture) -> None:
    fixture = layer_of(small, EXPERTS)
    with pytest.warns(moepool.MoePoolWarning, match="slots"):
        pool = small.on.pool(fixture.layer, EXPERTS + 3)
    assert pool.slots == pool.stats().slots == EXPERTS


def test_steps_that_want_nothing_are_no_steps(small: Fixture) -> None:
    follower = follow(small, 2)
    follower.step([[0, 1]])
    before = follower.pool.stats()
    follower.step([[-1, -1], [-1, -1]])
    with follower.pool.resolve(np.empty((0, 2), np.int32)) as route:
        assert (route.tokens, route.tick, route.bypass, route.hot.shape) == (0, 0, False, (0, 2))
    assert follower.pool.stats() == before
    assert follower.step([[0]])[1].tick == 2


@pytest.mark.parametrize("bad", [EXPERTS, -2, 2**31 - 1, -(2**31)])
def test_a_bad_id_changes_nothing(small: Fixture, bad: int) -> None:
    follower = follow(small, 2)
    follower.step([[0, 1]])
    with pytest.raises(moepool.IdError, match=str(bad)):
        follower.pool.resolve([[3, 4], [2, bad]])
    follower.same("after a bad id")
    follower.step([[2, 1]])


def test_an_open_route_pins_its_slots(small: Fixture) -> None:
    follower = follow(small, 3)
    ids = [[0, 1]]
    route, step = follower.step(ids, keep=True)
    assert follower.pool.stats().leased == 2
    follower.step([[2]])
    # 0 and 1 are older than 2, but 2 is the only one that may go: one of the three misses finds a slot.
    _, other = follower.step([[3, 4, 5]])
    assert other.admitted == [3] and residents(follower) == [0, 1, 3]
    follower.check(route, ids, "the pinned slots")
    # Pinned twice is released twice.
    again, second = follower.step(ids, keep=True)
    follower.release(route, step)
    follower.step([[4, 5]])
    assert residents(follower) == [0, 1, 4]
    follower.check(again, ids, "pinned by the second route")
    follower.release(again, second)
    follower.step([[3, 5]])
    assert sorted(residents(follower)) != [0, 1, 4] and follower.pool.stats().leased == 0


def test_a_route_pins_nothing_that_it_does_not_read(small: Fixture) -> None:
    """A host miss is read where it lies: the slot that it was given may go to another."""
    follower = follow(small, 1, miss="host")
    route, step = follower.step([[0]], keep=True)
    assert residents(follower) == [0] and follower.pool.stats().leased == 0
    follower.step([[1]])
    assert residents(follower) == [1]
    follower.check(route, [[0]], "its record is in the store")
    follower.release(route, step)


def test_a_dropped_route_gives_its_lease_back(small: Fixture) -> None:
    follower = follow(small, 1)
    route, step = follower.step([[0]], keep=True)
    del route
    gc.collect()
    follower.law.release(step)
    follower.same("the route was collected")
    follower.step([[1]])
    assert residents(follower) == [1]


def test_an_expert_counts_once_a_step(small: Fixture) -> None:
    follower = follow(small, 3)
    _, step = follower.step([[2, 2], [2, 4], [-1, 4]])
    assert (step.misses, step.admitted) == ([2, 4], [2, 4])
    assert follower.pool.stats().misses == 2
    assert follower.pool.stats().copied_bytes == 2 * follower.small.layer.record_bytes
