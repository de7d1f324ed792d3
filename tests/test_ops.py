"""The ops as Python sees them: shapes, errors before anything is counted, in-place results, and the layer
composed."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

import moepool
from tests import cases
from tests.support import F32, assert_same, few_slots, ffn_layer

HIDDEN, WIDTH, EXPERTS = 64, 96, 6


@pytest.fixture(scope="module")
def layer() -> moepool.Layer:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    blocks = {
        name: cases.tame_blocks("q8_0", EXPERTS * n, k, "ops", name).reshape(EXPERTS, n, -1)
        for name, (n, k) in shapes.items()
    }
    return ffn_layer(blocks, "q8_0")


@pytest.fixture
def pool(layer: moepool.Layer) -> moepool.Pool:
    return moepool.Pool(layer, 4)


X = cases.activations("plain", 3, HIDDEN, "ops")
IDS = np.array([[0, 5], [5, -1], [2, 3]], np.int64)
WEIGHTS = cases.router_weights(3, 2, "ops")


def one_matrix() -> moepool.Pool:
    eye = np.stack([np.eye(32, dtype=np.float32)] * 3)
    return moepool.Pool(moepool.ExpertStore.from_arrays(weight=eye, qtype="f32")[0], 3)


# -------------------------------------------------------------------------------------------------- matmul_id


def test_a_pool_of_one_matrix_needs_no_name(pool: moepool.Pool) -> None:
    single = one_matrix()
    x = np.arange(32, dtype=np.float32)[None]
    assert_same(moepool.matmul_id(x, [[1]], single), moepool.matmul_id(x, [[1]], single.weight), "weight")
    with pytest.raises(
        moepool.ArgumentError, match="several matrices; say which: pool.gate, pool.up, pool.down"
    ):
        moepool.matmul_id(X, IDS, pool)
    with pytest.raises(moepool.DtypeError, match="pool is a Layer; it must be a Pool or one of its matrices"):
        moepool.matmul_id(X, IDS, pool.layer)  # type: ignore[arg-type]


def test_unknown_halves_are_refused(pool: moepool.Pool) -> None:
    before = pool.stats()
    with pytest.raises(moepool.ArgumentError, match="half is 'warm'; it must be 'all' or 'hot' or 'cold'"):
        moepool.matmul_id(X, IDS, pool.gate, half="warm")  # type: ignore[arg-type]
    assert pool.stats() == before


def test_rows_of_a_token_and_of_a_place_are_told_apart_by_dimensions(pool: moepool.Pool) -> None:
    """k = 1 included: (T, K), (T, 1, K) and (T, k, K) give the same rows."""
    whole = moepool.matmul_id(X, IDS, pool.up)
    assert whole.shape == (3, 2, WIDTH)
    places = np.repeat(X[:, None], 2, axis=1)
    assert_same(moepool.matmul_id(places, IDS, pool.up), whole, "(T, k, K)")
    one = moepool.matmul_id(X, IDS[:, :1], pool.up)
    assert_same(moepool.matmul_id(X[:, None], IDS[:, :1], pool.up), one, "(T, 1, K)")
    assert_same(one, np.ascontiguousarray(whole[:, :1]), "k = 1")


@pytest.mark.parametrize("ids", [np.empty((0, 2), np.int32), np.empty((0, 2), np.int64)])
def test_h16_no_tokens(ids: Any, pool: moepool.Pool) -> None:
    empty = np.empty((0, HIDDEN), np.float32)
    assert moepool.matmul_id(empty, ids, pool.gate).shape == (0, 2, WIDTH)
    assert moepool.matmul_id(np.empty((0, 2, HIDDEN), np.float32), ids, pool.gate).shape == (0, 2, WIDTH)
    ffn = moepool.ExpertFFN(pool)
    weights = np.empty((0, 2), np.float32)
    for call in (ffn, ffn.composed):
        assert call(empty, ids, weights).shape == (0, HIDDEN)
    assert pool.stats().steps == 0
    alone = moepool.matmul_id(X[:1], IDS[:1], pool.gate)
    assert_same(moepool.matmul_id(X, IDS, pool.gate)[:1], alone, "right afterwards")


def test_a_route_of_another_pool_is_refused(layer: moepool.Layer, pool: moepool.Pool) -> None:
    other = moepool.Pool(layer, 4)
    with other.resolve(IDS) as route:
        for call in (
            lambda: moepool.matmul_id(X, route, pool.gate),
            lambda: moepool.ExpertFFN(pool)(X, route, WEIGHTS),
        ):
            with pytest.raises(moepool.ArgumentError, match="the route is of <Pool"):
                call()
    with pytest.raises(moepool.StateError, match="the route is closed"):
        moepool.matmul_id(X, route, other.gate)


def test_a_long_row_of_a_small_tensor(pool: moepool.Pool) -> None:
    """x of the wrong matrix is refused by its shape."""
    with pytest.raises(
        moepool.ArgumentError, match=r"x is of shape \(3, 64\); it must be \(3, 96\) or \(3, 2, 96\)"
    ):
        moepool.matmul_id(X, IDS, pool.down)


# ------------------------------------------------------------------------------------------------ elementwise


def silu_times(gate: F32, up: F32) -> np.ndarray:
    g = gate.astype(np.float64)
    return g / (1 + np.exp(-g)) * up


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 33), (1, 1, 1, 1)])
def test_elementwise_ops_take_any_shape(shape: tuple[int, ...]) -> None:
    a = np.asarray(cases.Stream("a", shape).bell(shape), np.float32)
    b = np.asarray(cases.Stream("b", shape).bell(shape), np.float32)
    total, hidden = moepool.add(a, b), moepool.swiglu(a, b)
    assert total.shape == hidden.shape == shape
    assert (total == a + b).all()
    np.testing.assert_allclose(hidden, silu_times(a, b), rtol=1e-6, atol=1e-12)


def test_elementwise_ops_may_work_in_place() -> None:
    for op in (moepool.add, moepool.swiglu):
        a = cases.activations("plain", 4, 33, "a")
        b = cases.activations("plain", 4, 33, "b")
        expected = op(a, b)
        first, second, both = a.copy(), b.copy(), a.copy()
        assert op(first, b, out=first) is first
        assert_same(first, expected, "out is the first")
        assert op(a, second, out=second) is second
        assert_same(second, expected, "out is the second")
        same = op(a, a)
        assert_same(op(both, both, out=both), same, "all the same")


def test_elementwise_ops_take_strided_inputs() -> None:
    a, b = cases.activations("plain", 6, 32, "a"), cases.activations("plain", 6, 32, "b")
    for op in (moepool.add, moepool.swiglu):
        expected = op(a, b)
        assert_same(op(np.asfortranarray(a), b[::-1].copy()[::-1]), expected, "strided")


def test_elementwise_ops_refuse_what_does_not_fit() -> None:
    a = np.zeros(16, np.float32)
    for op, first, second in ((moepool.add, "a", "b"), (moepool.swiglu, "gate", "up")):
        with pytest.raises(moepool.ArgumentError, match=rf"{second} is of shape \(15,\); it must be \(16,\)"):
            op(a, a[:15])
        with pytest.raises(moepool.DtypeError, match=f"{first} is float16; it must be float32"):
            op(a.astype(np.float16), a)
        with pytest.raises(moepool.DtypeError, match=f"{second} is float64"):
            op(a, a.astype(np.float64))
        with pytest.raises(moepool.ArgumentError, match="out overlaps"):
            op(a[:8], a[8:], out=a[4:12])
        with pytest.raises(moepool.ArgumentError, match="out has strides"):
            op(a, a, out=np.zeros(32, np.float32)[::2])
        with pytest.raises(moepool.ArgumentError, match="out is read-only"):
            op(a, a, out=np.frombuffer(bytes(64), np.float32))


# ---------------------------------------------------------------------------------------------------- combine


def test_combine_sums_in_rising_places_and_leaves_skipped_ones_out() -> None:
    """A NaN weight beside an id of -1 does no harm."""
    with one_matrix() as pool, pool.resolve([[0, -1, 2], [-1, -1, -1]]) as route:
        rows = np.array([[[1, 2], [np.nan, np.inf], [3, 4]], [[5, 6], [7, 8], [9, 1]]], np.float32)
        weights = np.array([[0.5, np.nan, 2], [1, 1, 1]], np.float32)
        expected = np.array([[6.5, 9], [0, 0]], np.float32)
        assert_same(moepool.combine(rows, route, weights), expected, "float32")
        assert_same(moepool.combine(rows, route, weights.astype(np.float16)), expected, "float16")
        out = np.full((2, 2), np.nan, np.float32)
        assert moepool.combine(np.asfortranarray(rows), route, weights, out=out) is out
        assert_same(out, expected, "out")


def test_combine_refuses_what_does_not_fit() -> None:
    with one_matrix() as pool:
        route = pool.resolve([[0, 1]])
        rows, weights = np.zeros((1, 2, 8), np.float32), np.ones((1, 2), np.float32)
        for bad_rows, bad_weights, error, message in (
            (
                rows[0],
                weights,
                moepool.ArgumentError,
                r"rows is of shape \(2, 8\); it must be \(1, 2, columns\)",
            ),
            (
                np.zeros((1, 3, 8), np.float32),
                weights,
                moepool.ArgumentError,
                r"rows is of shape \(1, 3, 8\)",
            ),
            (rows.astype(np.float16), weights, moepool.DtypeError, "rows is float16; it must be float32"),
            (
                rows,
                weights[:, :1],
                moepool.ArgumentError,
                r"weights is of shape \(1, 1\); it must be \(1, 2\)",
            ),
            (rows, weights.astype(np.float64), moepool.DtypeError, "weights is float64"),
        ):
            with pytest.raises(error, match=message):
                moepool.combine(bad_rows, route, bad_weights)
        memory = np.ones(10, np.float32)
        for given_weights, out in ((weights, rows[0, :1]), (memory[6:8][None], memory[:8][None])):
            with pytest.raises(moepool.ArgumentError, match="out overlaps"):
                moepool.combine(rows, route, given_weights, out=out)
        with pytest.raises(moepool.DtypeError, match="route is a list; it must be a Route"):
            moepool.combine(rows, [[0, 1]], weights)  # type: ignore[arg-type]
        route.release()
        with pytest.raises(moepool.StateError, match="the route is closed"):
            moepool.combine(rows, route, weights)


# -------------------------------------------------------------------------------------------------- the layer


def test_the_layer_is_near_its_definition(layer: moepool.Layer, pool: moepool.Pool) -> None:
    """In float64, over what each matrix gives."""
    y = moepool.ExpertFFN(pool)(X, IDS, WEIGHTS)
    hidden = silu_times(moepool.matmul_id(X, IDS, pool.gate), moepool.matmul_id(X, IDS, pool.up))
    rows = moepool.matmul_id(hidden.astype(np.float32), IDS, pool.down)
    expected = (rows.astype(np.float64) * np.where(IDS < 0, 0, WEIGHTS)[:, :, None]).sum(axis=1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("slots", [0, 1, 4, 6])
@pytest.mark.parametrize("miss", ["stream", "host"])
def test_the_composed_layer_has_the_same_bytes_and_stats(slots: int, miss: Any, layer: moepool.Layer) -> None:
    stats = []
    outputs = []
    with few_slots():
        for composed in (False, True):
            with moepool.Pool(layer, slots, miss=miss) as pool:
                ffn = moepool.ExpertFFN(pool)
                call = ffn.composed if composed else ffn
                outputs.append(
                    [
                        call(X, ids, WEIGHTS, phase=phase)
                        for ids in (IDS, IDS[::-1])
                        for phase in ("auto", "prompt")
                    ]
                )
                with pool.resolve(IDS) as route:
                    outputs[-1].append(call(X, route, WEIGHTS))
                    assert not route.closed
                stats.append(pool.stats())
    for y, other in zip(*outputs, strict=True):
        assert_same(y, other, f"{slots} slots, {miss}")
    assert stats[0] == stats[1]


@pytest.mark.parametrize("other", ["x", "ids", "weights"])
def test_arrays_of_any_kind_take_the_same_step(other: str, layer: moepool.Layer) -> None:
    """Packed arrays of NumPy have a short way into the core; others, those that are read-only for example, a
    long one."""
    outcomes = []
    for short in (True, False):
        given = {"x": X.copy(), "ids": IDS.copy(), "weights": WEIGHTS.copy()}
        given = {
            name: pickle.loads(pickle.dumps(array)) for name, array in given.items()
        }  # dtypes of their own
        given[other].flags.writeable = short
        with moepool.Pool(layer, 1) as pool:
            ffn = moepool.ExpertFFN(pool)
            assert ffn._are_plain(*given.values(), None) == short
            with pytest.warns(moepool.MoePoolWarning, match="a token has 2 places, but the pool has 1 slots"):
                y = ffn(**given)
            ffn(**given, phase="prompt")
            with pytest.raises(moepool.ArgumentError, match="phase is 'no'"):
                ffn(**given, phase="no")
            with pytest.raises(moepool.IdError, match=r"id 99 at token 2, place 1 is outside"):
                ffn(given["x"], np.where(np.arange(6).reshape(3, 2) == 5, 99, IDS), given["weights"])
            outcomes.append((y.tobytes(), pool.stats()))
        with pytest.raises(moepool.StateError, match="the pool is closed"):
            ffn(**given)
    assert outcomes[0] == outcomes[1]


def test_out_of_the_layer(pool: moepool.Pool) -> None:
    ffn = moepool.ExpertFFN(pool)
    expected = ffn(X, IDS, WEIGHTS)
    for call in (ffn, ffn.composed):
        out = np.full((3, HIDDEN), np.nan, np.float32)
        assert call(X, IDS, WEIGHTS, out=out) is out
        assert_same(out, expected, "out")
        x = X.copy()
        with pytest.raises(moepool.ArgumentError, match="out overlaps"):
            call(x, IDS, WEIGHTS, out=x)
        ids = out.view(np.int32).reshape(-1)[: IDS.size].reshape(IDS.shape)
        ids[:] = IDS
        with pytest.raises(moepool.ArgumentError, match="out overlaps"):
            call(X, ids, WEIGHTS, out=out)
        assert (ids == IDS).all()


def test_a_wrong_call_of_the_layer_counts_nothing(pool: moepool.Pool) -> None:
    ffn = moepool.ExpertFFN(pool)
    before = pool.stats()
    for call in (ffn, ffn.composed):
        for x, ids, weights, error in (
            (X[:2], IDS, WEIGHTS, moepool.ArgumentError),
            (np.repeat(X[:, None], 2, axis=1), IDS, WEIGHTS, moepool.ArgumentError),
            (X, IDS, WEIGHTS[:, :1], moepool.ArgumentError),
            (X, IDS, WEIGHTS.astype(np.float64), moepool.DtypeError),
            (X.astype(np.float64), IDS, WEIGHTS, moepool.DtypeError),
            (X, IDS + 1, WEIGHTS, moepool.IdError),
        ):
            with pytest.raises(error):
                call(x, ids, weights)
        with pytest.raises(moepool.ArgumentError):
            call(X, IDS, WEIGHTS, out=np.empty((3, WIDTH), np.float32))
        with pytest.raises(moepool.ArgumentError, match="phase is 'no'"):
            call(X, IDS, WEIGHTS, phase="no")
    assert pool.stats() == before


def test_phases_of_the_layer(pool: moepool.Pool) -> None:
    ffn = moepool.ExpertFFN(pool)
    for call in (ffn, ffn.composed):
        before = pool.stats()
        call(X, IDS, WEIGHTS, phase="prompt")
        after = pool.stats()
        assert after.prompt_misses + after.prompt_hits > before.prompt_misses + before.prompt_hits
        assert (after.hits, after.misses) == (before.hits, before.misses)


def test_a_layer_needs_gate_up_and_down(pool: moepool.Pool) -> None:
    with pytest.raises(moepool.ArgumentError, match="an FFN needs gate, up and down; the pool has weight"):
        moepool.ExpertFFN(one_matrix())
    with pytest.raises(moepool.ArgumentError, match="pool is a Layer"):
        moepool.ExpertFFN(pool.layer)  # type: ignore[arg-type]
    assert repr(moepool.ExpertFFN(pool)) == f"<ExpertFFN of {pool!r}>"


def test_outputs_are_infinite_only_past_float32() -> None:
    """A row of finite weights and activations whose products pass 65,504 by far."""
    weight = np.full((1, 32, 256), 1e4, np.float32)
    with moepool.Pool(moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0], 1) as pool:
        y = moepool.matmul_id(np.full((1, 256), 1e4, np.float32), [[0]], pool)
    assert math.isclose(float(y[0, 0, 0]), 256e8, rel_tol=0.02)
    assert (y == y[0, 0, 0]).all()
