"""What else changes a pool's residents: admissions that the caller chooses, prefetch, other numbers of slots,
states that are saved and loaded. And the trace, from which a run is replayed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepool
from moepool._native import handles
from moepool.policy import PolicyName
from tests import cases
from tests.spec.residency import Residency
from tests.support import F32, I32, On, assert_same, few_slots, matrix_layer, pick, products
from tests.test_policy import draw_policy, skewed

EXPERTS = 12
NAMES: tuple[PolicyName, ...] = ("lru", "static", "lfu", "lfru", "slru", "reelect", "pinned")


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    """A layer whose experts give different bytes everywhere."""
    weight = cases.tame_blocks("q8_0", EXPERTS * 33, 64, "changes").reshape(EXPERTS, 33, -1)
    return matrix_layer("q8_0", weight)


X = cases.activations("plain", 4, 64, "changes")


@pytest.fixture(scope="module")
def table(layer: moepool.Layer) -> F32:
    return products(layer, X)


@pytest.fixture
def pool(on: On, layer: moepool.Layer) -> Iterator[moepool.Pool]:
    with on.pool(layer, 4, max_slots=8) as pool:
        yield pool


def step(pool: moepool.Pool, *experts: int, **options: Any) -> moepool.Route:
    with few_slots():
        route = pool.resolve([experts], phase=options.pop("phase", "decode"), **options)
    route.release()
    return route


def residents(pool: moepool.Pool) -> list[int]:
    expert_in: list[int] = pool.residents()[1].tolist()
    return expert_in


def check(on: On, pool: moepool.Pool, table: F32, ids: I32, what: object) -> None:
    with few_slots():
        got = on(moepool.matmul_id, X[: len(ids)], ids, pool)
    assert_same(got, pick(table[: len(ids)], ids), what)


# ------------------------------------------------------------------------------------------ chosen admissions


def test_the_caller_chooses_whom_a_step_admits(on: On, pool: moepool.Pool, table: F32) -> None:
    assert step(pool, 5, 1, 7, admissions=[(7, 3), (1, 0)]).admitted == 2
    assert residents(pool) == [1, -1, -1, 7]
    assert step(pool, 5, 1, admissions=[]).hits == 1
    assert residents(pool) == [1, -1, -1, 7]
    step(pool, 9, admissions=[(9, 3)])
    assert residents(pool) == [1, -1, -1, 9] and pool.stats().evictions == 1
    check(on, pool, table, np.array([[1, 9, 7]], np.int32), "chosen")
    # The policy goes on from there: 1 was used at step 2.
    assert step(pool, 2, 3).admitted == 2
    assert residents(pool)[1:3] != [-1, -1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not wanted": (
        {"admissions": [(6, 2)]},
        "admission 0, of expert 6 to slot 2: the step does not want this",
    ),
    "resident": ({"admissions": [(0, 2)]}, "of expert 0 to slot 2: the expert is resident already"),
    "no slot": ({"admissions": [(5, 4)]}, "of expert 5 to slot 4: there is no such slot"),
    "wanted in slot": ({"admissions": [(5, 0)]}, "slot 0: the step wants the expert in this slot"),
    "leased": ({"admissions": [(5, 1)]}, "slot 1: an open route reads this slot"),
    "expert twice": ({"admissions": [(5, 2), (5, 3)]}, "admission 1, .*: the expert is named twice"),
    "slot twice": ({"admissions": [(5, 2), (8, 2)]}, "admission 1, .*: the slot is named twice"),
    "prompt": ({"admissions": [(5, 2)], "phase": "prompt"}, "bypasses, since it is a prompt"),
    "no pairs": ({"admissions": 5}, r"admissions is 5; it must be a sequence of \(expert, slot\)"),
    "no pair": ({"admissions": [5]}, r"admissions\[0\] is 5; it must be \(expert, slot\)"),
    "negative": ({"admissions": [(5, -1)]}, r"admissions\[0\], the slot, is -1"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=list(BAD))
def test_admissions_that_are_not_allowed_change_nothing(
    pool: moepool.Pool, options: dict[str, Any], message: str
) -> None:
    step(pool, 0)
    with pool.resolve([[1]], phase="decode"):
        before = residents(pool), pool.stats()
        with pytest.raises(moepool.ArgumentError, match=message):
            step(pool, 0, 5, 8, **options)
        assert (residents(pool), pool.stats()) == before


def test_a_step_that_wants_too_much_admits_nobody(pool: moepool.Pool) -> None:
    with pytest.raises(moepool.ArgumentError, match="wants more experts than there are slots"):
        step(pool, 0, 1, 2, 3, 4, admissions=[(0, 0)])
    assert step(pool, 0, 1, 2, 3, 4, admissions=[]).bypass


def test_nobody_chooses_against_pinned_and_static(on: On, layer: moepool.Layer) -> None:
    with (
        on.pool(layer, 3, policy="pinned", hot=[8, 9]) as pinned,
        on.pool(layer, 2, policy="static") as static,
    ):
        with pytest.raises(moepool.ArgumentError, match="slot 1: the expert in this slot is pinned"):
            step(pinned, 5, admissions=[(5, 1)])
        assert step(pinned, 5, admissions=[(5, 2)]).admitted == 1
        with pytest.raises(moepool.ArgumentError, match="admissions for a static pool"):
            step(static, 5, admissions=[(5, 1)])
        assert step(static, 5, admissions=[]).misses == 1
        assert (residents(pinned), residents(static)) == ([8, 9, 5], [0, 1])


# --------------------------------------------------------------------------------------------------- prefetch


def test_prefetch_fills_slots_and_counts_nothing(on: On, pool: moepool.Pool, table: F32) -> None:
    assert pool.prefetch([7, 3]) == 2
    assert residents(pool) == [7, 3, -1, -1]
    stats = pool.stats()
    assert (stats.steps, stats.hits, stats.misses, stats.prefetched) == (0, 0, 0, 2)
    assert stats.copied_bytes == 2 * pool.layer.record_bytes
    assert step(pool, 3, 7).hits == 2
    check(on, pool, table, np.array([[3, 7, 5]], np.int32), "prefetched")


def test_prefetch_takes_what_would_go_first_but_nothing_that_it_names(pool: moepool.Pool) -> None:
    for expert in range(4):
        step(pool, expert)
    assert pool.prefetch([8, 0, 9]) == 2  # 0 is the oldest, but named
    assert residents(pool) == [0, 8, 9, 3]
    with pool.resolve([[3]], phase="decode"):
        assert pool.prefetch([1, 2, 4, 5]) == 3
    assert residents(pool) == [1, 2, 4, 3] and pool.stats().evictions == 5


def test_prefetch_of_a_static_pool_does_nothing(on: On, layer: moepool.Layer) -> None:
    with on.pool(layer, 2, policy="static") as pool:
        assert pool.prefetch([5]) == 0 and residents(pool) == [0, 1]


def test_prefetch_knows_whom_it_is_told(pool: moepool.Pool) -> None:
    with pytest.raises(moepool.IdError, match=r"experts\[1\] is expert 12"):
        pool.prefetch([0, 12])
    with pytest.raises(moepool.ArgumentError, match="expert 3 at position 2 is named twice"):
        pool.prefetch([3, 0, 3])
    assert residents(pool) == [-1] * 4 and pool.prefetch([]) == 0


# ----------------------------------------------------------------------------------------------------- resize


def test_fewer_slots_keep_the_experts_used_last(on: On, pool: moepool.Pool, table: F32) -> None:
    for expert in (0, 1, 2, 3, 1):
        step(pool, expert)
    assert pool.resize(2) == 2 == pool.slots
    assert residents(pool) == [3, 1]
    check(on, pool, table, np.array([[1, 3, 0, 2]], np.int32), "two slots")
    assert pool.resize(5) == 5 == pool.slots == pool.stats().slots
    assert residents(pool) == [3, 1, -1, -1, -1]
    assert pool.stats().slot_bytes >= 5 * pool.layer.record_bytes
    step(pool, 6, 7, 8)
    assert residents(pool) == [3, 1, 6, 7, 8]
    check(on, pool, table, np.array([[6, 7, 8, 3]], np.int32), "five slots")
    assert pool.resize(0) == 0 and residents(pool) == []
    check(on, pool, table, np.array([[6, 7, 8, 3]], np.int32), "no slots")


def test_resize_has_limits(on: On, layer: moepool.Layer, pool: moepool.Pool) -> None:
    with pytest.raises(
        moepool.ArgumentError, match="9 slots, but the pool was made for at most 8: .*max_slots"
    ):
        pool.resize(9)
    with on.pool(layer, 4) as plain:
        assert plain.resize(1) == 1 and plain.resize(4) == 4
        with pytest.raises(moepool.ArgumentError, match="5 slots, but the pool was made for at most 4"):
            plain.resize(5)
        with warnings.catch_warnings():  # more than there are experts is no excuse to warn first
            warnings.simplefilter("error")
            with pytest.raises(moepool.ArgumentError, match="99 slots, but the pool was made for at most 4"):
                plain.resize(99)
    with pytest.raises(moepool.ArgumentError, match="max_slots is 3; it must be from 4"):
        on.pool(layer, 4, max_slots=3)
    with on.pool(layer, 4, policy="pinned", hot=[8, 9]) as pinned:
        with pytest.raises(moepool.ArgumentError, match="1 slots, but 2 experts are pinned"):
            pinned.resize(1)
        assert pinned.resize(2) == 2 and residents(pinned) == [8, 9]


def test_the_limit_of_auto_follows_the_slots_there_are(on: On, layer: moepool.Layer) -> None:
    """One admission a step while not all experts have a slot."""
    with on.pool(layer, 4, max_slots=EXPERTS, miss="auto") as pool:
        assert step(pool, 0, 1, 2).admitted == 1
        pool.resize(EXPERTS)
        assert step(pool, 3, 4, 5).admitted == 3
        pool.resize(8)
        assert step(pool, 6, 7, 8).admitted == 1
    with on.pool(layer, 4, max_slots=EXPERTS, miss="auto", admit=2) as pool:
        pool.resize(EXPERTS)
        assert step(pool, 0, 1, 2).admitted == 2


def test_more_slots_than_experts_are_as_many_as_experts(pool: moepool.Pool, layer: moepool.Layer) -> None:
    with (
        pytest.warns(moepool.MoePoolWarning, match="20 slots for a layer of 12 experts"),
        moepool.Pool(layer, 20, device=pool.device) as full,
    ):
        assert full.slots == EXPERTS == full.resize(20)
        assert full._handle.resize(20) == EXPERTS  # the core says nothing


def test_slots_that_come_back_take_the_hot_experts_in(on: On, layer: moepool.Layer, table: F32) -> None:
    with on.pool(layer, 4, policy="static", hot=[7, 3, 5], max_slots=8) as given:
        assert given.resize(1) == 1 and residents(given) == [7]
        assert given.resize(8) == 8 and residents(given) == [7, 3, 5, -1, -1, -1, -1, -1]
        check(on, given, table, np.array([[5, 7, 3]], np.int32), "hot again")
    with on.pool(layer, 2, policy="static", max_slots=8) as first:
        assert first.resize(4) == 4 and residents(first) == [0, 1, 2, 3]
        assert first.stats().copied_bytes == 0
        check(on, first, table, np.array([[3, 2, 0]], np.int32), "the first ones")


def test_residents_hold_while_another_thread_resizes(pool: moepool.Pool) -> None:
    step(pool, 5, 1)
    pool._handle.resize(8)  # as if it happened between the question and the answer
    assert residents(pool) == [1, 5] + [-1] * 6
    pool._handle.resize(1)
    assert len(residents(pool)) == 1

    threads = [threading.Thread(target=pool.resize, args=(slots,)) for slots in (1, 8) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.slots == pool.stats().slots == len(residents(pool))


def test_an_open_route_keeps_its_slots(on: On, pool: moepool.Pool, table: F32) -> None:
    step(pool, 0, 1, 2)
    with pool.resolve([[3]], phase="decode") as route:
        assert route.hot.tolist() == [[3]]
        with pytest.raises(moepool.StateError, match="an open route reads slot 3: release it"):
            pool.resize(3)
        assert residents(pool) == [0, 1, 2, 3]
        assert pool.resize(8) == 8  # growing moves nobody
        got = on(moepool.matmul_id, X[:1], route, pool)
        assert_same(got, pick(table[:1], np.array([[3]], np.int32)), "the open route")
    assert pool.resize(3) == 3 and residents(pool) == [0, 1, 3] or residents(pool) == [3, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_random_changes_follow_the_specification(
    on: On, layer: moepool.Layer, table: F32, name: PolicyName
) -> None:
    """Steps, prefetches and resizes in turn, routes open meanwhile: maps, and every byte computed."""
    for seed in range(3):
        draw = cases.Stream("changes", name, seed)
        slots = 1 + int(draw.below(EXPERTS, 1)[0])
        policy = draw_policy(draw, name)
        pinned = int(draw.below(slots + 1, 1)[0]) if name == "pinned" else 0
        hot = list(range(pinned)) if name == "pinned" else None
        spec = Residency(EXPERTS, slots, policy, None, hot)
        with few_slots(), on.pool(layer, slots, policy=policy, hot=hot, max_slots=EXPERTS) as pool:
            held: list[moepool.Route] = []
            for number in range(250):
                what = f"{policy}, {slots} slots, change {number}"
                kind, tokens, k = (int(draw.below(b, 1)[0]) for b in (6, 3, 3))
                leased = {int(slot) for route in held for slot in route.hot.ravel() if slot >= 0}
                if kind == 0:
                    count = max(pinned, 1 + max(leased, default=-1), int(draw.below(EXPERTS + 1, 1)[0]))
                    assert pool.resize(count) == count
                    spec.resize(count, leased)
                elif kind == 1:
                    named = np.argsort(draw.words(EXPERTS))[: 1 + k].tolist()
                    assert pool.prefetch(named) == len(spec.prefetch(named, leased)), what
                else:
                    ids = skewed(draw, EXPERTS, 1 + tokens, 1 + k, number // 50)
                    wanted = sorted(set(ids[ids >= 0].tolist()))
                    route = pool.resolve(ids, phase="decode")
                    if wanted:
                        assert route.admitted == len(spec.step(wanted, False, leased).admissions), what
                    got = on(moepool.matmul_id, X[: len(ids)], route, pool)
                    assert_same(got, pick(table[: len(ids)], ids), what)
                    held.append(route)
                assert residents(pool) == spec.expert_in, what
                if len(held) > kind % 3:
                    held.pop(0).release()
            for route in held:
                route.release()


def test_twenty_thousand_resizes_in_a_running_replay(on: On, layer: moepool.Layer, table: F32) -> None:
    draw = cases.Stream("resizes")
    count = 20_000
    sizes = draw.below(EXPERTS + 1, count).tolist()
    ids = np.minimum(draw.below(EXPERTS, (count, 1, 2)), draw.below(EXPERTS, (count, 1, 2))).astype(np.int32)
    x = on.put(X[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepool.MoePoolWarning)
        with on.pool(layer, 4, max_slots=EXPERTS) as pool:
            results = []
            for i in range(count):
                assert pool.resize(sizes[i]) == sizes[i]
                results.append(moepool.matmul_id(x, ids[i], pool))
                if len(results) == 500:
                    for j, y in enumerate(results, i - 499):
                        got = y if isinstance(y, np.ndarray) else y.get()
                        assert_same(got, pick(table[:1], ids[j]), f"resize {j}")
                    results.clear()
            assert pool.stats().steps == count and pool.stats().hits > 1000


# ----------------------------------------------------------------------------------------------------- states


# Short periods, so that what is saved matters to the rest of the trace.
STATES = (
    moepool.Policy("lru"),
    moepool.Policy("static"),
    moepool.Policy("lfu", half_life=17),
    moepool.Policy("lfru", half_life=9, weight=3),
    moepool.Policy("slru", protected_percent=60),
    moepool.Policy("reelect", period=25),
    moepool.Policy("pinned", guard=True, half_life=11),
)


@pytest.mark.parametrize("policy", STATES, ids=str)
def test_a_pool_goes_on_where_another_stopped(
    on: On, layer: moepool.Layer, table: F32, policy: moepool.Policy, tmp_path: Path
) -> None:
    draw = cases.Stream("states", policy.name)
    options: dict[str, Any] = {"policy": policy, "hot": [2, 3] if policy.name == "pinned" else None}
    trace = [skewed(draw, EXPERTS, 1, 3, i // 20) for i in range(120)]
    file = tmp_path / "state"
    with few_slots(), on.pool(layer, 5, **options) as whole, on.pool(layer, 5, **options) as first:
        for ids in trace[:60]:
            whole.resolve(ids).release()
            first.resolve(ids).release()
        first.save_state(file)
        with on.pool(layer, 5, **options) as second:
            second.load_state(file)
            assert residents(second) == residents(first)
            again = tmp_path / "again"
            second.save_state(again)
            assert again.read_bytes() == file.read_bytes()
            stats = second.stats()
            assert (stats.steps, stats.copied_bytes, stats.resident) == (0, 0, first.stats().resident)
            for number, ids in enumerate(trace[60:]):
                theirs, ours = whole.resolve(ids), second.resolve(ids)
                assert (theirs.tick, theirs.hits, theirs.admitted) == (ours.tick, ours.hits, ours.admitted)
                theirs.release(), ours.release()
                assert residents(second) == residents(whole), number
                check(on, second, table, ids, f"step {number} after loading")
                check(on, whole, table, ids, "the whole run")


def test_a_loaded_pool_knows_who_was_elected(on: On, layer: moepool.Layer, tmp_path: Path) -> None:
    policy = moepool.Policy("reelect", period=4)
    with on.pool(layer, 1, policy=policy) as first, on.pool(layer, 1, policy=policy) as second:
        for expert in (0, 0, 0, 2, 2, 2, 3):  # 0 is elected at step 4; of the steps since then 2 has the most
            step(first, expert)
        step(first, 3)  # the election of step 8: 2, which does not lie in the slot yet
        assert residents(first) == [0]
        first.save_state(tmp_path / "state")
        second.load_state(tmp_path / "state")
        for pool in (first, second):
            step(pool, 2)
            assert residents(pool) == [2]


def test_states_of_other_pools_are_refused(on: On, layer: moepool.Layer, tmp_path: Path) -> None:
    file = tmp_path / "state"
    with on.pool(layer, 4, policy="lfu") as pool:
        step(pool, 1, 2)
        pool.save_state(file)
        before = residents(pool)
        others = {
            "slots: 4, this one has 3": on.pool(layer, 3, policy="lfu"),
            "policy lfu, this one has lru": on.pool(layer, 4),
            "half_life 256, this one has 8": on.pool(layer, 4, policy=moepool.Policy("lfu", half_life=8)),
            "experts: 12, this one has 11": on.pool(
                matrix_layer("q8_0", cases.tame_blocks("q8_0", 11 * 33, 64, "s").reshape(11, 33, -1)),
                4,
                policy="lfu",
            ),
            "other matrices": on.pool(
                matrix_layer("q8_0", cases.tame_blocks("q8_0", 12 * 32, 64, "s").reshape(12, 32, -1)),
                4,
                policy="lfu",
            ),
        }
        for message, other in others.items():
            with other, pytest.raises(moepool.ArgumentError, match=message):
                other.load_state(file)
        whole = file.read_bytes()
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            with pytest.raises((moepool.ArgumentError, moepool.FormatError), match="state"):
                pool.load_state(file)
        for size in (0, 7, 79, 80, len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(
                (moepool.ArgumentError, moepool.FormatError), match=f"{file}: .*(state|damaged)"
            ):
                pool.load_state(file)
        file.write_bytes(whole)
        with pool.resolve([[1]]), pytest.raises(moepool.StateError, match="1 routes of the pool are open"):
            pool.load_state(file)
        assert residents(pool) == before
        pool.load_state(file)
        assert residents(pool) == before


@pytest.mark.parametrize("name", ["pinned", "static"])
def test_a_state_does_not_replace_the_hot_experts(
    on: On, layer: moepool.Layer, name: PolicyName, tmp_path: Path
) -> None:
    file = tmp_path / "state"
    with (
        on.pool(layer, 3, policy=name, hot=[8, 9]) as pool,
        on.pool(layer, 3, policy=name, hot=[9, 8]) as other,
    ):
        pool.save_state(file)
        pool.load_state(file)
        with pytest.raises(moepool.ArgumentError, match="another hot list: expert 8 in slot 0, not 9"):
            other.load_state(file)
        assert residents(other) == [9, 8, -1]


def summed(state: bytes) -> bytes:
    """A state with the check sum that it should have: FNV-1a of its head and of what follows."""
    check = 0xCBF29CE484222325
    for byte in state[:72] + state[80:]:
        check = (check ^ byte) * 0x100000001B3 % 2**64
    return state[:72] + check.to_bytes(8, "little") + state[80:]


@pytest.mark.parametrize("policy", [*STATES[2:5], STATES[6]], ids=str)
def test_what_a_state_says_is_believed_only_as_far_as_it_can_be(
    on: On, layer: moepool.Layer, table: F32, policy: moepool.Policy, tmp_path: Path
) -> None:
    """Damage that the check sum does not tell is told, or does no harm."""
    draw = cases.Stream("believed", policy.name)
    file, told = tmp_path / "state", 0
    hot = [2, 3] if policy.name == "pinned" else None
    with few_slots(), on.pool(layer, 5, policy=policy, hot=hot) as pool:
        for i in range(60):
            pool.resolve(skewed(draw, EXPERTS, 1, 3, i // 20)).release()
        pool.save_state(file)
        whole = file.read_bytes()
        assert summed(whole) == whole
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(draw.below(8, 1)[0])
            file.write_bytes(summed(bytes(damaged)))
            try:
                pool.load_state(file)
            except (moepool.ArgumentError, moepool.FormatError):
                told += 1
            for _ in range(2):
                check(on, pool, table, skewed(draw, EXPERTS, 1, 3, 0), f"byte {at}")
            if hot:
                assert residents(pool)[:2] == hot
    assert told > 72  # of the head alone


BAD_STATES = {
    "tick": (56, (1 << 42) + 1, 8),
    "negative tick": (56, 2**64 - 1, 8),
    "unused": (68, 1, 4),
}


@pytest.mark.parametrize(("at", "value", "size"), BAD_STATES.values(), ids=list(BAD_STATES))
def test_a_head_that_can_not_be_is_told(
    pool: moepool.Pool, tmp_path: Path, at: int, value: int, size: int
) -> None:
    file = tmp_path / "state"
    pool.save_state(file)
    whole = file.read_bytes()
    file.write_bytes(summed(whole[:at] + value.to_bytes(size, "little") + whole[at + size :]))
    with pytest.raises(moepool.FormatError, match="damaged: its step count"):
        pool.load_state(file)


def test_only_residents_can_be_protected(on: On, layer: moepool.Layer, tmp_path: Path) -> None:
    file = tmp_path / "state"
    with on.pool(layer, 4, policy="slru") as pool:
        step(pool, 0)
        pool.save_state(file)
        whole = bytearray(file.read_bytes())
        for expert in range(1, EXPERTS):
            whole[80 + 4 * 4 + 16 * expert + 15] |= 0x80
        file.write_bytes(summed(bytes(whole)))
        with pytest.raises(moepool.FormatError, match="expert 1 is protected and not resident"):
            pool.load_state(file)
        assert step(pool, 0).hits == 1


# ------------------------------------------------------------------------------------------------------ trace


def test_a_later_trace_ends_the_one_before(pool: moepool.Pool) -> None:
    with pool.trace() as first:
        step(pool, 1)
        with pool.trace() as second:
            step(pool, 2)
            first.close()
            with pytest.raises(moepool.StateError, match="a later trace of the pool has ended this one"):
                first.drain()
            step(pool, 3)
        assert second.drain().ids.tolist() == [[2], [3]]


def test_steps_are_taken_by_whoever_counted_them(pool: moepool.Pool) -> None:
    """Of two that count before either takes, the second is told."""
    lib, ffi, core = handles.lib, handles.ffi, pool._handle.pointer

    def fetched() -> Any:
        counts = ffi.new("moepool_trace_counts *")
        handles.check(lib.moepool_pool_trace_fetch(core, counts))
        return counts

    room = np.empty(64, np.int64)  # for each of the arrays
    arrays = ffi.new("moepool_trace_arrays *")
    for name, field in ffi.typeof("moepool_trace_arrays").fields:
        setattr(arrays, name, ffi.cast(field.type, room.ctypes.data))
    with pool.trace():
        step(pool, 1, 2)
        one = fetched()
        pool.trace()
        step(pool, 3)
        with pytest.raises(moepool.StateError, match="taken or started anew"):
            handles.check(lib.moepool_pool_trace_take(core, one, arrays))
        assert fetched().steps == 1


def test_a_trace_has_every_step(pool: moepool.Pool) -> None:
    step(pool, 9)
    with pool.trace() as trace:
        step(pool, 5, 1)
        pool.resolve([[1, -1, 3], [-1, -1, -1]], phase="decode").release()
        pool.resolve([[2], [3], [2]], phase="prompt").release()
        pool.resolve([[-1]]).release()
        pool.prefetch([7])
        strided = np.array([[6, 0, 8, 0], [5, 0, 1, 0]], np.int64)[:, ::2]
        pool.resolve(strided).release()
    step(pool, 0)
    steps = trace.drain()
    assert steps.layer == pool.layer.block
    assert steps.step.tolist() == [2, 3, 3, 4, 4, 4, 4, 5, 5]
    assert steps.token.tolist() == [0, 0, 1, 0, 1, 2, 0, 0, 1]
    assert steps.decode.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert steps.ids.tolist() == [
        [5, 1, -1],
        [1, -1, 3],
        [-1, -1, -1],
        [2, -1, -1],
        [3, -1, -1],
        [2, -1, -1],
        [-1, -1, -1],
        [6, 8, -1],
        [5, 1, -1],
    ]
    block = pool.layer.block
    assert steps.admissions.tolist()[:3] == [[2, block, 1, 1], [2, block, 5, 2], [3, block, 3, 3]]
    assert steps.prefetched.tolist() == [[4, block, 7, 0]]
    assert len(steps) == 9 and len(trace.drain()) == 0


def test_a_trace_may_be_empty_and_closed_twice(pool: moepool.Pool) -> None:
    trace = pool.trace(room_bytes=1)
    assert trace.drain().ids.shape == (0, 1) and trace.drain().admissions.shape == (0, 4)
    trace.close()
    trace.close()
    step(pool, 1)
    assert len(trace.drain()) == 0
    with pytest.raises(moepool.ArgumentError, match="room_bytes is 0"):
        pool.trace(room_bytes=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_replayed_from_its_trace(on: On, layer: moepool.Layer, name: PolicyName) -> None:
    """By the same policy, and by any other that is told whom to admit."""
    draw = cases.Stream("replay", name)
    policy = draw_policy(draw, name)
    options: dict[str, Any] = {"hot": [1, 2] if name == "pinned" else None, "policy": policy}
    with few_slots(), on.pool(layer, 4, **options) as pool, pool.trace() as trace:
        for i in range(200):
            ids = skewed(draw, EXPERTS, 1 + i % 2, 2, i // 40)
            pool.resolve(ids, phase="prompt" if i % 9 == 0 else "decode").release()
        steps, stats, end = trace.drain(), pool.stats(), residents(pool)
    assert stats.evictions > 3 or name in ("static", "reelect")
    start = [] if name not in ("static", "pinned") else list(range(4)) if name == "static" else [1, 2]
    with few_slots(), on.pool(layer, 4, policy="pinned", hot=start) as other:
        for tick in np.unique(steps.step):
            rows = steps.step == tick
            wanted = steps.ids[rows]
            if not (wanted >= 0).any():
                continue
            of = steps.admissions[steps.admissions[:, 0] == tick]
            phase: Any = "decode" if steps.decode[rows][0] else "prompt"
            other.resolve(wanted, phase=phase, admissions=of[:, 2:].tolist()).release()
        assert residents(other) == end
        again = other.stats()
        for count in ("steps", "bypasses", "hits", "misses", "evictions", "copied_bytes", "prompt_hits"):
            assert getattr(again, count) == getattr(stats, count), count
