"""Policies: what a pool makes of one, rule by rule, and long traces against their specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moepool
from moepool.policy import PolicyName, policy_from
from tests import cases
from tests.spec.residency import Residency
from tests.support import I32, few_slots

NAMES: tuple[PolicyName, ...] = ("lru", "static", "lfu", "lfru", "slru", "reelect", "pinned")


def layer_of(experts: int) -> moepool.Layer:
    """A layer with next to nothing to copy."""
    return moepool.ExpertStore.from_arrays(weight=np.zeros((experts, 1, 32), np.float32), qtype="f32")[0]


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(8)


# ------------------------------------------------------------------------------------------------- the object


def test_a_policy_says_what_it_is() -> None:
    policy = moepool.Policy("lfru", guard=True, half_life=8, weight=3)
    assert (policy.name, policy.guard, policy.half_life, policy.weight) == ("lfru", True, 8, 3)
    assert repr(policy) == "Policy('lfru', guard=True, half_life=8, weight=3)"
    assert str(policy) == "lfru, guard, half_life=8, weight=3"
    assert repr(moepool.Policy()) == "Policy('lru')" and str(moepool.Policy()) == "lru"
    assert moepool.Policy("lfu") == moepool.Policy("lfu", half_life=256) != moepool.Policy("lfu", half_life=2)
    assert hash(moepool.Policy("lfu")) == hash(moepool.Policy("lfu"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "mru"}, "policy is 'mru'; it must be 'lru' or 'static' or 'lfu'"),
    "no name": ({"name": None}, "policy is None"),
    "guard": ({"name": "lfu", "guard": 1}, "guard is 1; it must be True or False"),
    "half_life": ({"name": "lfu", "half_life": 0}, "half_life is 0; it must be from 1"),
    "weight": ({"name": "lfru", "weight": 2**20 + 1}, "weight is 1048577; it must be from 0 to 1048576"),
    "period": ({"name": "reelect", "period": 1.5}, "period is 1.5; it must be an integer"),
    "percent": (
        {"name": "slru", "protected_percent": 101},
        "protected_percent is 101; it must be from 0 to 100",
    ),
    "not its own": (
        {"name": "lfu", "weight": 3},
        "weight is no option of policy 'lfu', which has guard and half_life",
    ),
    "has none": ({"name": "static", "guard": True}, "guard is no option of policy 'static', which has none"),
    "written as for a command": (
        {"name": "lfu:guard"},
        r"policy is 'lfu:guard'; write moepool\.Policy\('lfu', guard=True\)",
    ),
    "guard of reelect": ({"name": "reelect", "guard": True}, "guard is no option of policy 'reelect'"),
    "half_life without guard": ({"name": "lru", "half_life": 3}, "half_life is no option of policy 'lru'"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_policy_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(moepool.ArgumentError, match=message):
        moepool.Policy(**options)


WRITTEN: dict[str, str] = {
    "lfu:half_life": "half_life needs a value in policy 'lfu:half_life': half_life=256 is the default",
    "slru:guard,protected-percent": "protected_percent needs a value .*: protected_percent=75 is the default",
    "lfu:guard=1": "guard takes no value in policy 'lfu:guard=1': write guard, or leave it out",
    "lfu:foo": "foo is no option of policy 'lfu', which has guard and half_life",
    "static:foo=3": "foo is no option of policy 'static', which has none",
    "mru:foo": "policy is 'mru'; it must be 'lru' or 'static'",
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_wrong_policy_is_refused_as_it_is_written_for_commands(text: str) -> None:
    with pytest.raises(moepool.ArgumentError, match=WRITTEN[text]):
        policy_from(text)


def test_an_option_that_is_yes_or_no_needs_no_value() -> None:
    assert policy_from("lfu:guard") == moepool.Policy("lfu", guard=True)


def test_a_pool_takes_no_policy_as_it_is_written_for_commands(layer: moepool.Layer) -> None:
    with pytest.raises(moepool.ArgumentError, match=r"write moepool\.Policy\('lfu', guard=True\)"):
        moepool.Pool(layer, 4, policy="lfu:guard")  # type: ignore[arg-type]


def test_half_life_belongs_to_guard() -> None:
    assert moepool.Policy("lru", guard=True, half_life=3).half_life == 3


def test_a_pool_takes_a_name_or_a_policy(layer: moepool.Layer) -> None:
    with moepool.Pool(layer, 4, policy="lfu") as pool:
        assert pool.policy == moepool.Policy("lfu")
    with moepool.Pool(layer, 4, policy=moepool.Policy("slru", protected_percent=50)) as pool:
        assert repr(pool) == (
            "<Pool of block 0 on cpu: 4 slots for 8 experts, slru, protected_percent=50, stream>"
        )


def test_pinned_needs_experts(layer: moepool.Layer) -> None:
    with pytest.raises(moepool.ArgumentError, match="policy 'pinned' needs hot"):
        moepool.Pool(layer, 4, policy="pinned")
    with pytest.raises(moepool.ArgumentError, match="5 hot experts do not fit 4 slots"):
        moepool.Pool(layer, 4, policy="pinned", hot=range(5))
    for name in ("lru", "lfu", "lfru", "slru", "reelect"):
        with pytest.raises(moepool.ArgumentError, match=f"hot belongs to .*, not to '{name}'"):
            moepool.Pool(layer, 4, policy=name, hot=[1])


# --------------------------------------------------------------------------------------------- rule by rule


def follow(layer: moepool.Layer, slots: int, *steps: list[int], policy: Any, **options: Any) -> list[int]:
    """The residents after these steps."""
    with few_slots(), moepool.Pool(layer, slots, policy=policy, **options) as pool:
        for ids in steps:
            pool.resolve([ids], phase="decode").release()
        residents: list[int] = pool.residents()[1].tolist()
        return residents


def test_lfu_evicts_the_one_used_least_then_the_oldest(layer: moepool.Layer) -> None:
    assert follow(layer, 2, [0], [0], [1], [2], policy="lfu") == [0, 2]
    assert follow(layer, 2, [0], [0], [1], [2], policy="lru") == [2, 1]
    assert follow(layer, 2, [1], [0], [2], policy="lfu") == [2, 0]


def test_lfu_counts_also_what_is_not_resident(layer: moepool.Layer) -> None:
    # Expert 2 was wanted twice before 1 comes in: then 0, used once, goes and not 2.
    assert follow(layer, 1, [2], [0], [2], [1], policy="lfu") == [1]
    assert follow(layer, 2, [2], [0], [3], [0], [0], [3], [1], policy="lfu") == [1, 0]


def test_lfu_halves_its_counts(layer: moepool.Layer) -> None:
    steps = [[0], [0], [0], [1], [1], [1], [2]]  # 0: 3 uses, halved twice by then; 1: 3, one of them halved
    assert follow(layer, 2, *steps, policy=moepool.Policy("lfu", half_life=100)) == [2, 1]
    steps = [[0], [0], [0], [0], [0], [0], [1], [1], [2]]
    assert follow(layer, 2, *steps, policy=moepool.Policy("lfu", half_life=100)) == [0, 2]
    # Halved at steps 2, 4, 6 and 8: 0 has 1 left of six uses, and then none; 1 has one of two.
    assert follow(layer, 2, *steps, policy=moepool.Policy("lfu", half_life=2)) == [2, 1]


def test_lfru_weighs_uses_against_recency(layer: moepool.Layer) -> None:
    steps = [[0], [0], [1], [2]]  # 0: last 2, two uses; 1: last 3, one
    assert follow(layer, 2, *steps, policy=moepool.Policy("lfru", weight=0)) == [2, 1]
    assert follow(layer, 2, *steps, policy=moepool.Policy("lfru", weight=1)) == [
        2,
        1,
    ]  # both 4: the lower slot
    assert follow(layer, 2, *steps, policy=moepool.Policy("lfru", weight=2)) == [0, 2]


def test_slru_protects_what_was_hit(layer: moepool.Layer) -> None:
    assert follow(layer, 3, [0], [0], [1], [2], [3], policy="slru") == [0, 3, 2]
    assert follow(layer, 3, [0], [0], [1], [2], [3], policy="lru") == [3, 1, 2]


def test_slru_lets_the_oldest_go_back_when_the_segment_is_full(layer: moepool.Layer) -> None:
    one = moepool.Policy("slru", protected_percent=34)  # one of three slots
    # 1 is hit after 0: 0 falls back, but as one just used, so that 2 is older.
    assert follow(layer, 3, [0, 1, 2], [0], [1], [3], policy=one) == [0, 1, 3]
    assert follow(layer, 3, [0, 1, 2], [0], [1], [3], [4], policy=one) == [4, 1, 3]
    none = moepool.Policy("slru", protected_percent=0)
    assert follow(layer, 3, [0, 1, 2], [0], [1], [3], [4], policy=none) == [4, 1, 3]


def test_reelect_brings_in_the_elected_only(layer: moepool.Layer) -> None:
    policy = moepool.Policy("reelect", period=4)
    first = [[0], [0], [1]]
    # Elected at step 4 with two slots: 0 and 1. From then on 2 and 3 stay outside, however recent they are.
    assert follow(layer, 2, *first, [2], [3], [2], policy=policy) == [0, 1]
    # Counted since step 4: 2 twice, 3 and 0 once, 3 before; elected at step 8 are 2 and 0.
    assert follow(layer, 2, *first, [2], [3], [2], [0], [2], policy=policy) == [0, 2]
    # Before the first election it is LRU.
    assert follow(layer, 2, [0], [0], [1], policy=moepool.Policy("reelect", period=9)) == [0, 1]
    assert follow(layer, 2, [0], [0], [1], [2], policy=moepool.Policy("reelect", period=9)) == [2, 1]


def test_reelect_fills_empty_slots_with_anybody(layer: moepool.Layer) -> None:
    policy = moepool.Policy("reelect", period=2)
    assert follow(layer, 3, [0], [1], [2], [3], policy=policy)[:2] == [0, 1]
    assert follow(layer, 3, [0], [1], [2], [3], policy=policy)[2] in (2, 3)


def test_pinned_experts_stay(layer: moepool.Layer) -> None:
    steps = [[1], [2], [3], [1]]
    assert follow(layer, 3, *steps, policy="pinned", hot=[6, 7]) == [6, 7, 1]
    assert follow(layer, 3, *steps, policy="pinned", hot=[6]) == [6, 3, 1]
    assert follow(layer, 3, *steps, policy="pinned", hot=[6, 7, 5]) == [6, 7, 5]
    assert follow(layer, 3, *steps, policy="pinned", hot=[]) == follow(layer, 3, *steps, policy="lru")


def test_a_guard_wants_to_see_a_miss_more_often_than_its_victim(layer: moepool.Layer) -> None:
    guarded = moepool.Policy("lru", guard=True)
    assert follow(layer, 1, [0], [1], policy=guarded) == [0]
    assert follow(layer, 1, [0], [1], [1], policy=guarded) == [1]
    assert follow(layer, 1, [0], [0], [1], [1], policy=guarded) == [0]
    # The one wanted most often is the first to try, whatever its id.
    steps = [[0, 1], [0, 1], [3], [3], [2, 3]]
    assert follow(layer, 2, *steps, policy=guarded) == [3, 1]
    assert follow(layer, 2, *steps, policy=guarded, admit=1) == [3, 1]


# ----------------------------------------------------------------------------------------------- long traces


def draw_policy(draw: cases.Stream, name: PolicyName) -> moepool.Policy:
    half_life, weight, period, percent, guard = (int(draw.below(b, 1)[0]) for b in (400, 60, 300, 101, 2))
    if name in ("static", "reelect"):
        return moepool.Policy(name, period=1 + period) if name == "reelect" else moepool.Policy(name)
    options: dict[str, Any] = {"guard": guard == 1}
    if guard or name in ("lfu", "lfru"):
        options["half_life"] = 1 + half_life
    if name == "lfru":
        options["weight"] = weight
    if name == "slru":
        options["protected_percent"] = percent
    return moepool.Policy(name, **options)


def skewed(draw: cases.Stream, experts: int, tokens: int, k: int, shift: int) -> I32:
    """Low ids mostly, repeats and skips among them; the favourites change with `shift`."""
    low = draw.below(experts, (3, tokens, k)).min(axis=0)
    ids = np.where(draw.below(9, (tokens, k)) == 0, -1, (low + shift) % experts)
    return ids.astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_long_traces_follow_the_specification(name: PolicyName, seed: int) -> None:
    """Maps and admissions after every step, with caps, leases and prompts; steps of up to 16 tokens."""
    draw = cases.Stream("policies", name, seed)
    experts = 1 + int(draw.below(70, 1)[0])
    slots = 1 + int(draw.below(experts, 1)[0])
    policy = draw_policy(draw, name)
    admit = (None, None, 1, 3)[int(draw.below(4, 1)[0])]
    hot = None
    if name == "pinned":
        hot = np.argsort(draw.words(experts))[: int(draw.below(slots + 1, 1)[0])].tolist()
    spec = Residency(experts, slots, policy, admit, hot)
    what = f"{policy}, {experts} experts, {slots} slots, admit {admit}, hot {hot}"
    many = seed % 2
    with few_slots(), moepool.Pool(layer_of(experts), slots, policy=policy, admit=admit, hot=hot) as pool:
        held: list[moepool.Route] = []
        for step in range(500):
            kind, length, k, shift = (int(draw.below(b, 1)[0]) for b in (20, 16, 4, 3))
            ids = skewed(draw, experts, 1 + length * many, 1 + k, step // 100 * 7 + shift)
            wanted = sorted(set(ids[ids >= 0].tolist()))
            leased = {int(slot) for route in held for slot in route.hot.ravel() if slot >= 0}
            before = sum(slot != -1 for slot in spec.expert_in)
            route = pool.resolve(ids, phase="prompt" if kind == 0 else "decode")
            if wanted:
                out = spec.step(wanted, kind == 0, leased)
                assert (route.tick, route.bypass, route.hits) == (out.tick, out.bypass, len(out.hits)), what
                assert route.admitted == len(out.admissions), (what, step)
                assert sum(slot != -1 for slot in spec.expert_in) >= before
            assert pool.residents()[1].tolist() == spec.expert_in, (what, step)
            if kind < 5:
                held.append(route)
            else:
                route.release()
            if len(held) > 2:
                held.pop(0).release()
