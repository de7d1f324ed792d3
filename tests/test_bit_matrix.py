"""Placement never changes a bit: any way to serve a call gives the portable kernel's bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moepool
from moepool.ops import Half
from moepool.policy import PolicyName
from moepool.pool import Miss, Phase
from tests import cases, spec
from tests.support import (
    F32,
    I32,
    Guarded,
    On,
    assert_same,
    few_slots,
    ffn_layer,
    layer_of,
    matrix_layer,
    pick,
    products,
    put,
    reference,
    reference_ffn,
    usable_kernels,
)

CORES = len(os.sched_getaffinity(0))

# ------------------------------------------------------------------------------------------------- the matrix

EXPERTS, K_PLACES = 8, 3
WANTED = np.array([1, 3, 4, 6], np.int32)  # calls name these alone, so that a pool can be filled with others
OTHERS = [0, 2, 5, 7]
TOKENS = (1, 3, 9, 33)
MISSES: tuple[Miss, ...] = ("stream", "host")
POLICIES: tuple[PolicyName, ...] = ("lru", "static", "lfu", "lfru", "slru", "reelect")
PHASES: tuple[Phase, ...] = ("auto", "decode", "prompt")
HALVES: tuple[Half, ...] = ("hot", "cold")
STATES = ("cold", "hit", "full eviction", "hit and reload", "rebuilt pool", "bypass", "prompt")

# (columns of gate and up, their rows = columns of down) by block: a short last chunk, padded rows.
SIZES = {1: (259, 67), 32: (288, 96), 256: (512, 256)}
DOWN_ROWS = 45


def matrix_of_types(qtype: str) -> moepool.Layer:
    hidden, width = SIZES[cases.LAYOUTS[qtype].block]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (DOWN_ROWS, width)}
    weights = {
        name: cases.raw_blocks(qtype, EXPERTS * rows, columns, "matrix", name).reshape(EXPERTS, rows, -1)
        for name, (rows, columns) in shapes.items()
    }
    draw = cases.Stream("matrix", qtype)
    return ffn_layer(
        weights,
        qtype,
        scale={name: draw.bell((EXPERTS,)).astype(np.float32) for name in ("gate", "down")},
        bias={"down": draw.bell((EXPERTS, DOWN_ROWS)).astype(np.float32)},
    )


def in_state(
    layer: moepool.Layer, state: str, ids: I32, wanted: list[int], device: str, miss: Miss
) -> tuple[moepool.Pool, Phase, tuple[int, int]]:
    """A pool in a state, the phase to resolve `ids` in, and the hits and admissions that this has to give."""
    n = len(wanted)
    slots = {"cold": EXPERTS, "hit": EXPERTS, "prompt": EXPERTS, "bypass": max(n - 1, 0)}.get(
        state, max(n, 1)
    )

    def make() -> moepool.Pool:
        return moepool.Pool(layer, slots, device=device, miss=miss)

    def warm(pool: moepool.Pool, experts: list[int]) -> None:
        ids = np.array([experts or [-1]], np.int32)
        pool.resolve(put(ids, device), phase="decode").release()

    pool = make()
    if state == "hit":
        warm(pool, list(range(EXPERTS)))
        return pool, "decode", (n, 0)
    if state == "full eviction":
        warm(pool, OTHERS[:n])
        return pool, "decode", (0, n)
    if state == "hit and reload":
        warm(pool, wanted[: n // 2] + OTHERS[: n - n // 2])
        return pool, "decode", (n // 2, n - n // 2)
    if state == "rebuilt pool":
        warm(pool, wanted)
        pool.close()
        return make(), "decode", (0, n)
    if state == "bypass":
        warm(pool, wanted[1:])
        return pool, "decode", (max(n - 1, 0), 0)
    if state == "prompt":
        warm(pool, wanted[: n // 2] + OTHERS)
        return pool, "prompt", (n // 2, 0)
    assert state == "cold"
    return pool, "decode", (0, n)


@pytest.mark.parametrize("qtype", cases.TYPES)
def test_every_state_of_a_pool_gives_the_same_bytes(qtype: str, device: str) -> None:
    layer = matrix_of_types(qtype)
    hidden, width = SIZES[cases.LAYOUTS[qtype].block]
    for tokens in TOKENS:
        kind = "special" if tokens > 3 else "plain"
        inputs = {
            "gate": cases.activations(kind, tokens, hidden, "matrix", qtype),
            "down": cases.activations(kind, tokens * K_PLACES, width, "matrix", qtype).reshape(
                tokens, K_PLACES, width
            ),
        }
        inputs["up"] = inputs["gate"]
        tables = {name: products(layer, x, name) for name, x in inputs.items()}
        for id_kind in cases.ID_KINDS:
            drawn = cases.expert_ids(id_kind, tokens, K_PLACES, len(WANTED), "matrix")
            ids = np.where(drawn < 0, np.int32(-1), WANTED[drawn])
            wanted = sorted(set(ids[ids >= 0].tolist()))
            expected = {name: pick(table, ids) for name, table in tables.items()}
            for state in STATES:
                for miss in MISSES:
                    what = f"{qtype}, {tokens} tokens, {id_kind} ids, {state}, miss={miss}, {device}"
                    with few_slots():
                        check_state(layer, state, ids, wanted, device, miss, inputs, expected, what)


def check_state(
    layer: moepool.Layer,
    state: str,
    ids: I32,
    wanted: list[int],
    device: str,
    miss: Miss,
    inputs: dict[str, F32],
    expected: dict[str, F32],
    what: str,
) -> None:
    pool, phase, (hits, admitted) = in_state(layer, state, ids, wanted, device, miss)
    xs = {name: put(x, device) for name, x in inputs.items()}
    with pool, pool.resolve(put(ids, device), phase=phase) as route:
        found = (route.hits, route.misses, route.admitted)
        assert found == (hits, len(wanted) - hits, admitted), f"{what}: not the state: {route!r}"
        assert route.bypass == (state in ("bypass", "prompt") and bool(wanted)), what
        check_route(pool, route, xs, expected, what)
        # The slots that this step filled, read by the next.
        with pool.resolve(put(ids, device), phase=phase) as again:
            assert again.hits == hits + admitted, what
            out = Guarded(*expected["gate"].shape, device=device)
            moepool.matmul_id(xs["gate"], again, pool.gate, out=out.out)
            assert_same(out.check(what), expected["gate"], f"{what}, the step after")


def check_route(
    pool: moepool.Pool, route: moepool.Route, xs: dict[str, Any], expected: dict[str, F32], what: str
) -> None:
    for name, x in xs.items():
        out = Guarded(*expected[name].shape, device=pool.device)
        assert moepool.matmul_id(x, route, pool.matrix(name), out=out.out) is out.out
        assert_same(out.check(f"{what}, {name}"), expected[name], f"{what}, {name}")
    for half, table in zip(HALVES, (route.hot, route.cold), strict=True):
        out = Guarded(*expected["down"].shape, device=pool.device)
        moepool.matmul_id(xs["down"], route, pool.down, half=half, out=out.out)
        of_half = np.where(table[:, :, None] < 0, np.float32(0), expected["down"])
        assert_same(out.check(f"{what}, {half} half"), of_half, f"{what}, {half} half")


# ----------------------------------------------------------------------------------------- calls of any shape

MOST_BLOCKS = {1: 600, 32: 20, 256: 3}
LIMITS = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Serving:
    """How a call is served; none of it may show."""

    kernel: str
    threads: int
    slots: int
    policy: PolicyName
    miss: Miss
    admit: int | None
    cuts: tuple[int, ...]  # where the tokens are split into steps
    phases: tuple[Phase, ...]  # of the steps, in turn

    def pool(self, on: On, layer: moepool.Layer) -> moepool.Pool:
        with few_slots():
            return on.pool(layer, self.slots, policy=self.policy, miss=self.miss, admit=self.admit)

    def steps(self, tokens: int) -> list[tuple[slice, Phase]]:
        edges = sorted({0, tokens, *(cut for cut in self.cuts if cut < tokens)})
        pieces = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)] or [slice(0, 0)]
        return [(piece, self.phases[i % len(self.phases)]) for i, piece in enumerate(pieces)]


def servings(experts: int, tokens: int) -> st.SearchStrategy[Serving]:
    return st.builds(
        Serving,
        kernel=st.sampled_from(usable_kernels()),
        threads=st.integers(1, CORES + 1),
        slots=st.integers(0, experts + 1),
        policy=st.sampled_from(POLICIES),
        miss=st.sampled_from(MISSES),
        admit=st.none() | st.integers(0, experts),
        cuts=st.lists(st.integers(1, max(tokens, 1)), max_size=4).map(tuple),
        phases=st.lists(st.sampled_from(PHASES), min_size=1, max_size=4).map(tuple),
    )


def draw_ids(seed: int, tokens: int, k: int, experts: int) -> I32:
    """Any ids, a quarter of them -1."""
    draw = cases.Stream("any ids", seed)
    skip = draw.below(4, (tokens, k)) == 0
    return np.where(skip, -1, draw.below(experts, (tokens, k))).astype(np.int32)


@st.composite
def columns_of(draw: st.DrawFn, *qtypes: str) -> int:
    block = lcm(*(cases.LAYOUTS[qtype].block for qtype in qtypes))
    return block * draw(st.integers(1, MOST_BLOCKS[block]))


@pytest.mark.usefixtures("settings_kept")
@LIMITS
@given(data=st.data(), seed=seeds, qtype=st.sampled_from(cases.TYPES), rows=st.integers(1, 70))
def test_any_call_served_in_any_way_gives_the_same_bytes(
    on: On, data: st.DataObject, seed: int, qtype: str, rows: int
) -> None:
    columns = data.draw(columns_of(qtype), "columns")
    experts, k, tokens = (
        data.draw(st.integers(a, b), n) for a, b, n in ((1, 9, "E"), (1, 5, "k"), (0, 40, "T"))
    )
    per_place, scaled, biased = (data.draw(st.booleans(), n) for n in ("per place", "scale", "bias"))
    x_kind = data.draw(st.sampled_from(cases.X_KINDS), "x")
    draw = cases.Stream("any call", seed)
    layer = matrix_layer(
        qtype,
        cases.raw_blocks(qtype, experts * rows, columns, seed).reshape(experts, rows, -1),
        scale=draw.bell((experts,)).astype(np.float32) if scaled else None,
        bias=draw.bell((experts, rows)).astype(np.float32) if biased else None,
    )
    x = cases.activations(x_kind, tokens * (k if per_place else 1), columns, seed)
    if per_place:
        x = x.reshape(tokens, k, columns)
    ids = draw_ids(seed, tokens, k, experts)
    moepool.set_threads(1)
    expected = reference(layer, x, ids)

    serving = data.draw(servings(experts, tokens), "serving")
    moepool.set_threads(serving.threads)
    with moepool.use_cpu_kernel(serving.kernel), serving.pool(on, layer) as pool:
        for piece, phase in serving.steps(tokens):
            with few_slots(), pool.resolve(ids[piece], phase=phase) as route:
                what = f"tokens {piece.start} to {piece.stop} of {serving}"
                out = Guarded(*expected[piece].shape, device=on.device)
                on(moepool.matmul_id, x[piece], route, pool, out=out.out)
                assert_same(out.check(what), expected[piece], what)
                halves = [on(moepool.matmul_id, x[piece], route, pool, half=half) for half in HALVES]
                assert_same(on(moepool.add, *halves), expected[piece], f"{what}, the sum of the halves")


# -------------------------------------------------------------------------------------------- the whole layer


@st.composite
def ffn_layers(draw: st.DrawFn) -> moepool.Layer:
    gate, up, down = (draw(st.sampled_from(cases.TYPES)) for _ in range(3))
    hidden, width = draw(columns_of(gate, up)), draw(columns_of(down))
    out, experts, seed = draw(st.integers(1, 70)), draw(st.integers(1, 9)), draw(seeds)
    shapes = {"gate": (gate, width, hidden), "up": (up, width, hidden), "down": (down, out, width)}
    # Wild scales among them: NaN and infinity go through the layer like anything else.
    make = draw(st.sampled_from([cases.tame_blocks, cases.raw_blocks]))
    random = cases.Stream("any layer", seed)
    rows = {name: random.bell((experts, shape[1])).astype(np.float32) for name, shape in shapes.items()}
    factors = {name: random.bell((experts,)).astype(np.float32) for name in shapes}
    names = [name for name in shapes if draw(st.booleans())]
    return ffn_layer(
        {
            name: make(t, experts * n, k, seed, name).reshape(experts, n, -1)
            for name, (t, n, k) in shapes.items()
        },
        {"gate": gate, "up": up, "down": down},
        bias={name: rows[name] for name in names},
        scale={name: factors[name] for name in names[1:]},
    )


@pytest.mark.usefixtures("settings_kept")
@settings(LIMITS, max_examples=60)
@given(data=st.data(), layer=ffn_layers(), k=st.integers(1, 5), tokens=st.integers(0, 20), seed=seeds)
def test_any_ffn_is_its_ops_one_by_one(
    on: On, data: st.DataObject, layer: moepool.Layer, k: int, tokens: int, seed: int
) -> None:
    x = cases.activations("plain", tokens, layer.matrices["gate"].columns, seed)
    ids = draw_ids(seed, tokens, k, layer.experts)
    weights = np.where(ids < 0, np.float32(np.nan), cases.router_weights(tokens, k, seed))
    if data.draw(st.booleans(), "half weights"):
        weights = weights.astype(np.float16)
    expected = reference_ffn(layer, x, ids, weights)

    serving = data.draw(servings(layer.experts, tokens), "serving")
    moepool.set_threads(serving.threads)
    with (
        moepool.use_cpu_kernel(serving.kernel),
        serving.pool(on, layer) as one,
        serving.pool(on, layer) as other,
        few_slots(),
    ):
        native, composed = moepool.ExpertFFN(one), moepool.ExpertFFN(other)
        for piece, phase in serving.steps(tokens):
            what = f"tokens {piece.start} to {piece.stop} of {serving}"
            out, parts = (Guarded(*expected[piece].shape, device=on.device) for _ in range(2))
            on(native, x[piece], ids[piece], weights[piece], out=out.out, phase=phase)
            assert_same(out.check(what), expected[piece], f"{what}, in one call")
            on(composed.composed, x[piece], ids[piece], weights[piece], out=parts.out, phase=phase)
            assert_same(parts.check(what), expected[piece], f"{what}, composed")
            assert one.stats() == other.stats(), what
            assert (one.residents()[0] == other.residents()[0]).all(), what


@pytest.mark.parametrize("ffn", cases.FFNS, ids=lambda ffn: ffn.name)
def test_the_ffn_is_what_the_law_says_it_is(on: On, ffn: cases.Ffn) -> None:
    """The three products by the portable kernel, what is between and after them by the specification."""
    layer, x, weights = layer_of(ffn), ffn.x(2), ffn.router(2)
    ids = np.array([[-1, *range(1, ffn.k)], [*range(ffn.k)]], np.int32)
    gate, up = (reference(layer, x, ids, name) for name in ("gate", "up"))
    hidden = [
        spec.swiglu(int(g), int(u))
        for g, u in zip(gate.view(np.uint32).flat, up.view(np.uint32).flat, strict=True)
    ]
    rows = reference(layer, np.array(hidden, np.uint32).view(np.float32).reshape(gate.shape), ids, "down")
    expected = [
        spec.combine(*(a.tolist() for a in token))
        for token in zip(rows.view(np.uint32), ids, weights.view(np.uint32), strict=True)
    ]
    with on.pool(layer, 1 + ffn.k) as pool:
        y = on(moepool.ExpertFFN(pool), x, ids, weights)
    assert_same(y, np.array(expected, np.uint32).view(np.float32), ffn.name)


def test_a_long_ffn_is_its_tokens_one_by_one(on: On) -> None:
    """More tokens than the core keeps intermediate rows for at once."""
    ffn = cases.Ffn("long", 32, 64, 4, 2, "q8_0", "q4_0", "q5_1")
    tokens = 1200
    x, ids, weights = ffn.x(tokens), ffn.ids(tokens, "some"), ffn.router(tokens)
    layer = layer_of(ffn)
    out = Guarded(tokens, ffn.hidden, device=on.device)
    with on.pool(layer, 2) as pool:
        on(moepool.ExpertFFN(pool), x, ids, weights, out=out.out)
    whole = out.check("long")
    assert_same(whole, reference_ffn(layer, x, ids, weights), "1200 tokens in one call")
    with on.pool(layer, 2) as pool:
        one = moepool.ExpertFFN(pool)
        for token in (0, 511, 512, 513, 1023, 1024, 1199):
            piece = slice(token, token + 1)
            assert_same(on(one, x[piece], ids[piece], weights[piece]), whole[piece], f"token {token} alone")
