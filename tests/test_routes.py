"""Routes: one count for many ops, two halves that make a whole, leases, and lifetimes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import moepool
from moepool.ops import Half
from moepool.pool import Miss
from tests import cases
from tests.support import (
    F32,
    On,
    assert_same,
    few_slots,
    layer_of,
    matrix_layer,
    pick,
    products,
    reference,
    reference_ffn,
)

SMALL = cases.FFNS[0]
HALVES: tuple[Half, ...] = ("hot", "cold")
# Slots, and the experts that they hold.
MIXES: tuple[tuple[int, list[int]], ...] = ((8, list(range(8))), (0, []), (4, [0, 2, 5, 7]))


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    return layer_of(SMALL)


def static_pool(
    on: On, layer: moepool.Layer, slots: int, hot: list[int], miss: Miss = "stream"
) -> moepool.Pool:
    return on.pool(layer, slots, policy="static", hot=hot, miss=miss)


def test_a_route_used_by_many_ops_counts_once(on: On, layer: moepool.Layer) -> None:
    x, ids, weights = SMALL.x(3), SMALL.ids(3, "some"), SMALL.router(3)
    with on.pool(layer, 8) as pool:
        ffn = moepool.ExpertFFN(pool)
        with pool.resolve(ids) as route:
            before = pool.stats()
            for _ in range(2):
                y = on(ffn, x, route, weights)
                hidden = on(
                    moepool.swiglu,
                    on(moepool.matmul_id, x, route, pool.gate),
                    on(moepool.matmul_id, x, route, pool.up),
                )
                rows = on(moepool.matmul_id, hidden, route, pool.down)
                assert_same(on(moepool.combine, rows, route, weights), y, "op by op")
                assert_same(on(ffn.composed, x, route, weights), y, "composed")
            assert not route.closed
            assert pool.stats() == before and before.steps == 1
        # With ids each op is a step of its own, and the whole layer one.
        on(moepool.matmul_id, x, ids, pool.gate)
        assert pool.stats().steps == 2
        on(ffn, x, ids, weights)
        assert pool.stats().steps == 3
        on(ffn.composed, x, ids, weights)
        assert pool.stats().steps == 4 and pool.stats().leased == 0


@pytest.mark.parametrize("miss", ["stream", "host"])
@pytest.mark.parametrize(("slots", "hot"), MIXES, ids=["all hot", "all cold", "both"])
@pytest.mark.parametrize("kind", cases.ID_KINDS)
def test_hot_and_cold_part_the_places(
    on: On, layer: moepool.Layer, kind: str, slots: int, hot: list[int], miss: Miss
) -> None:
    x, ids = SMALL.x(9), SMALL.ids(9, kind)
    with static_pool(on, layer, slots, hot, miss) as pool, few_slots(), pool.resolve(ids) as route:
        expert_in = pool.residents()[1]
        is_hot, is_cold = route.hot >= 0, route.cold >= 0
        assert not (is_hot & is_cold).any()
        assert ((is_hot | is_cold) == (ids >= 0)).all()
        assert (is_hot == np.isin(ids, hot)).all()
        assert (expert_in[route.hot[is_hot]] == ids[is_hot]).all()
        assert (route.cold[is_cold] == ids[is_cold]).all()
        assert route.hot.dtype == route.cold.dtype == np.int32
        # The whole is the sum of the halves, in every bit, and each half is zero where the other is.
        for name in ("gate", "up"):
            whole = on(moepool.matmul_id, x, route, pool.matrix(name))
            assert_same(whole, reference(layer, x, ids, name), name)
            halves = [on(moepool.matmul_id, x, route, pool.matrix(name), half=half) for half in HALVES]
            for half, mine in zip(halves, (is_hot, is_cold), strict=True):
                assert_same(half, np.where(mine[:, :, None], whole, np.float32(0)), f"a half of {name}")
            assert_same(on(moepool.add, *halves), whole, f"the halves of {name}")
            assert_same(on(moepool.add, halves[1], halves[0], out=halves[0]), whole, f"{name}, the other way")


def test_halves_keep_what_a_careless_sum_would_lose(on: On) -> None:
    """Rows of NaN, infinity, subnormals and a sum of -0 come through the addition of a zero row."""
    words = np.array([[0x80000000], [0x00000001], [0x7F7FFFFF], [0x3F800000]], np.uint32)
    weight = words.view(np.uint8).reshape(4, 1, 4)
    x = np.array([[1.0], [np.inf], [np.nan], [-1.0], [2.0]], np.float32)
    ids = np.tile(np.arange(4, dtype=np.int32), (5, 1))
    layer = matrix_layer("f32", weight)
    with static_pool(on, layer, 2, [1, 2]) as pool, few_slots(), pool.resolve(ids) as route:
        halves = [on(moepool.matmul_id, x, route, pool, half=half) for half in HALVES]
        whole = on(moepool.matmul_id, x, route, pool)
        assert_same(on(moepool.add, *halves), whole, "halves")
    assert_same(whole, reference(layer, x, ids), "whole")
    assert not (whole.view(np.uint32) == 0x80000000).any()
    assert (whole.view(np.uint32)[2] == 0x7FFFFFFF).all()


# ---------------------------------------------------------------------------------------------------- leases


def test_release_may_be_called_twice(on: On, layer: moepool.Layer) -> None:
    with on.pool(layer, 4) as pool:
        route, other = pool.resolve([[1, 2]]), pool.resolve([[1]])
        assert pool.stats().leased == 2
        route.release()
        route.release()
        assert route.closed and not other.closed
        assert pool.stats().leased == 1  # the second call gave back nothing of the other route's
        with other:
            pass
        other.release()
        assert pool.stats().leased == 0


def test_a_released_route_is_of_no_use(on: On, layer: moepool.Layer) -> None:
    x, weights = SMALL.x(1), SMALL.router(1)
    with on.pool(layer, 4) as pool:
        with pool.resolve([[1, 2]]) as route:
            rows = on(moepool.matmul_id, x, route, pool.gate)
        steps = pool.stats().steps
        for use in (
            lambda: on(moepool.matmul_id, x, route, pool.gate),
            lambda: on(moepool.combine, rows, route, weights),
            lambda: on(moepool.ExpertFFN(pool), x, route, weights),
            lambda: on(moepool.ExpertFFN(pool).composed, x, route, weights),
            lambda: route.hot,
            lambda: route.cold,
        ):
            with pytest.raises(moepool.StateError, match="route"):
                use()
        assert (route.misses, route.admitted) == (2, 2)  # what it said it still says
        assert pool.stats().steps == steps


def test_a_route_serves_its_own_pool_alone(on: On, layer: moepool.Layer) -> None:
    with on.pool(layer, 4) as pool, on.pool(layer, 4) as other, pool.resolve([[1, 2]]) as route:
        with pytest.raises(moepool.ArgumentError, match="route"):
            on(moepool.matmul_id, SMALL.x(1), route, other.gate)
        with pytest.raises(moepool.ArgumentError, match="route"):
            on(moepool.ExpertFFN(other), SMALL.x(1), route, SMALL.router(1))
        assert other.stats().steps == 0


def test_two_open_routes_keep_what_they_read(on: On, layer: moepool.Layer) -> None:
    x = SMALL.x(2)
    first, second, third = (
        np.array(ids, np.int32) for ids in ([[0, 1]] * 2, [[2, 3], [-1, 2]], [[4, 5]] * 2)
    )
    with on.pool(layer, 4) as pool:
        one, two = pool.resolve(first), pool.resolve(second)
        assert pool.stats().leased == 4
        three = pool.resolve(third)  # nothing may go, so it is read in place
        assert (three.admitted, three.bypass) == (0, False) and (three.hot == -1).all()
        for _ in range(2):  # in turn, each as if it were alone
            for route, ids in ((three, third), (one, first), (two, second)):
                assert_same(
                    on(moepool.matmul_id, x, route, pool.gate), reference(layer, x, ids, "gate"), str(ids)
                )
        one.release()
        with pool.resolve(third) as four:
            assert four.admitted == 2 and pool.stats().evictions == 2
            for route, ids in ((four, third), (three, third), (two, second)):
                assert_same(
                    on(moepool.matmul_id, x, route, pool.up), reference(layer, x, ids, "up"), str(ids)
                )


# ------------------------------------------------------------------------------------------------- lifetimes


def test_pools_of_one_layer_know_nothing_of_each_other(on: On, layer: moepool.Layer) -> None:
    x, ids = SMALL.x(1), np.array([[1, 2]], np.int32)
    expected = reference(layer, x, ids, "gate")
    with on.pool(layer, 4) as a, on.pool(layer, 1) as b, on.pool(layer, 8, miss="host") as c:
        with few_slots():
            for _ in range(3):
                for pool in (a, b, c):
                    assert_same(on(moepool.matmul_id, x, ids, pool.gate), expected, repr(pool))
        assert (a.stats().hits, a.stats().misses) == (4, 2)
        assert (b.stats().hits, b.stats().bypasses) == (0, 3)
        assert (c.stats().hits, c.stats().host_bytes) == (4, 2 * layer.record_bytes)
        b.close()
        assert_same(on(moepool.matmul_id, x, ids, a.gate), expected, "a, after b was closed")


def test_a_route_outlives_pool_and_store(on: On) -> None:
    """Closed or collected, in any order: the memory that a route reads stays."""
    weight = cases.tame_blocks("q6_k", 4 * 40, 256, "lifetimes").reshape(4, 40, -1)
    x, ids = cases.activations("plain", 2, 256, "lifetimes"), np.array([[3, 0], [0, 2]], np.int32)
    store = moepool.ExpertStore.from_arrays(weight=weight, qtype="q6_k")
    expected = reference(store[0], x, ids)
    for slots in (4, 2):  # all hot; bypassed and so read in the store
        pool = on.pool(store[0], slots)
        matrix, route = pool.weight, pool.resolve(ids)
        pool.close()
        assert_same(on(moepool.matmul_id, x, route, matrix), expected, f"{slots} slots, the pool closed")
        with pytest.raises(moepool.StateError, match="pool"):
            pool.resolve(ids)
        route.release()
    pool = on.pool(store[0], 2)
    store.close()
    assert_same(on(moepool.matmul_id, x, ids, pool), expected, "the store closed")
    with pytest.raises(moepool.StateError):
        store[0]
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert_same(on(moepool.matmul_id, x, ids, pool), expected, "the store collected")


def route_alone(on: On, x: F32) -> tuple[moepool.Route, moepool.PoolMatrix]:
    weight = cases.tame_blocks("q6_k", 4 * 40, 256, "lifetimes").reshape(4, 40, -1)
    pool = on.pool(matrix_layer("q6_k", weight), 2)
    return pool.resolve([[3, 1], [1, -1]]), pool.weight


def test_a_route_is_all_that_has_to_be_kept(on: On) -> None:
    x = cases.activations("plain", 2, 256, "lifetimes")
    route, matrix = route_alone(on, x)
    gc.collect()
    # New stores in what would be the freed memory.
    others = [
        matrix_layer("q6_k", cases.tame_blocks("q6_k", 160, 256, i).reshape(4, 40, -1)) for i in range(8)
    ]
    y = on(moepool.matmul_id, x, route, matrix)
    weight = cases.tame_blocks("q6_k", 4 * 40, 256, "lifetimes").reshape(4, 40, -1)
    table = products(matrix_layer("q6_k", weight), x)
    assert_same(y, pick(table, np.array([[3, 1], [1, -1]], np.int32)), "a route alone")
    assert len(others) == 8


def test_what_is_dropped_goes_at_once(on: On) -> None:
    """Not when the cycle collector comes: it counts objects and does not know how large slots are."""
    weight = cases.tame_blocks("q8_0", 4 * 32, 32, "dropped").reshape(4, 32, -1)
    gc.disable()
    try:
        store = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")
        pool = on.pool(store[0], 2)
        route = pool.resolve([[0, 1]])
        matrix = pool.weight
        handles = [weakref.ref(item._handle) for item in (route, pool, store)]
        del route
        assert handles[0]() is None and pool.stats().leased == 0
        del matrix, pool
        assert handles[1]() is None
        del store
        assert handles[2]() is None
    finally:
        gc.enable()


def test_an_ffn_after_everything_else_is_closed(on: On, layer: moepool.Layer) -> None:
    x, ids, weights = SMALL.x(4), SMALL.ids(4), SMALL.router(4)
    pool = on.pool(layer, 4)
    ffn = moepool.ExpertFFN(pool)
    with pool.resolve(ids) as route:
        pool.close()
        expected = reference_ffn(layer, x, ids, weights)
        assert_same(on(ffn, x, route, weights), expected, "an FFN of a closed pool, by an open route")
    with pytest.raises(moepool.StateError):
        on(ffn, x, ids, weights)
