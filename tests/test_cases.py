"""Faults that people met in other software for this job, each with the smallest input that shows it."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest

import moepool
from moepool.ops import Half
from moepool.pool import Phase
from tests import cases
from tests.support import (
    F32,
    I32,
    U8,
    Guarded,
    assert_same,
    few_slots,
    ffn_layer,
    layer_of,
    matrix_layer,
    pick,
    products,
    reference,
    reference_ffn,
    usable_kernels,
)
from tests.test_float64_bound import bound, dequantised

HALVES: tuple[Half, ...] = ("hot", "cold")


def quantised(qtype: str, *shape: int) -> U8:
    """Blocks (E, N, row_bytes) of bell-shaped weights (E, N, K); drawn ones where gguf cannot quantise."""
    if cases.LAYOUTS[qtype].block == 256:
        experts, rows, columns = shape
        return cases.tame_blocks(qtype, experts * rows, columns, "field").reshape(experts, rows, -1)
    values = (cases.Stream("field", qtype, *shape).bell(shape) * 0.1).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[qtype.upper()])
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(*shape[:2], -1)


def assert_near(qtype: str, weight: U8, x: F32, ids: I32, y: F32) -> None:
    """y (T, k, N) is as near to the float64 product over dequantised weights as the law promises."""
    place = np.maximum(ids, 0)[:, :, None]
    exact = np.einsum("tk,enk->ten", x.astype(np.float64), dequantised(qtype, weight))
    expected, allowed = (np.take_along_axis(of, place, 1) for of in (exact, bound(qtype, weight, x)))
    expected = np.where(ids[:, :, None] < 0, 0, expected)
    assert np.isfinite(y).all()
    assert (np.abs(y - expected) <= allowed).all()


def expert_table(ids: list[list[int]]) -> I32:
    return np.array(ids, np.int32)


# ------------------------------------------------------------------------------------------------- ids


def test_h01_a_token_may_name_an_expert_twice() -> None:
    """Both places get the expert's row, at every batch size, and the rows do not depend on it."""
    weight, most = quantised("q8_0", 16, 128, 256), 256
    ids = cases.expert_ids("plain", most, 8, 16, "h01")
    ids[:, 5] = ids[:, 1]
    x = cases.activations("plain", most, 256, "h01")
    with moepool.Pool(matrix_layer("q8_0", weight), 16) as pool:
        whole: F32 | None = None
        for tokens in (256, 16, 9, 1):
            out = Guarded(tokens, 8, 128)
            moepool.matmul_id(x[:tokens], ids[:tokens], pool, out=out.out)
            y = out.check(f"{tokens} tokens")
            assert_same(np.ascontiguousarray(y[:, 5]), np.ascontiguousarray(y[:, 1]), f"{tokens} tokens")
            whole = y if whole is None else whole
            assert_same(y, whole[:tokens], f"{tokens} tokens against {most}")
        assert whole is not None
        assert_near("q8_0", weight, x, ids, whole)


def test_h03_a_skipped_place_is_no_expert_0() -> None:
    """Two partial passes count expert 0 once, and its faults do not reach a place of -1."""
    weight = quantised("q8_0", 4, 40, 64)
    x = cases.activations("plain", 2, 64, "h03")
    ids = expert_table([[0, 2], [-1, 3]])
    with moepool.Pool(matrix_layer("q8_0", weight), 2, policy="static", hot=[0, 1]) as pool:
        with pool.resolve(ids) as route:
            assert (route.hits, route.misses) == (1, 2)
            halves = [moepool.matmul_id(x, route, pool, half=half) for half in HALVES]
            y = moepool.add(*halves)
        assert_same(y, moepool.matmul_id(x, ids, pool), "the sum of the halves")
        assert_near("q8_0", weight, x, ids, y)
        assert (y[1, 0].view(np.uint32) == 0).all()
    scale = np.array([np.inf, 1, 1, 1], np.float32)
    for slots in (0, 2, 4):
        layer = matrix_layer("q8_0", weight, scale=scale)
        with moepool.Pool(layer, slots, policy="static") as pool:
            for half in ("all", *HALVES):
                y = moepool.matmul_id(x[:1], expert_table([[-1, 3]]), pool, half=half)
                assert (y[0, 0].view(np.uint32) == 0).all(), (slots, half)
                assert np.isfinite(y).all(), (slots, half)


@pytest.mark.parametrize("slots", [0, 2, 4])
def test_h04_a_skipped_place_gets_no_bias(slots: int) -> None:
    """Not of gate, up or down, in neither half, nor through swiglu into the sum."""
    ffn = cases.Ffn("h04", 32, 64, 4, 2, "mxfp4", "mxfp4", "mxfp4")
    bias = {name: np.full((4, n), 5.0, np.float32) for name, n in (("gate", 64), ("up", 64), ("down", 32))}
    layer = ffn_layer(ffn.weights(), "mxfp4", bias=bias)
    x, ones = ffn.x(1), np.ones((1, 2), np.float32)
    skipped, alone = expert_table([[-1, 3]]), expert_table([[3]])
    with moepool.Pool(layer, slots, policy="static", hot=[3, 0][:slots] or None) as pool, few_slots():
        expected = moepool.ExpertFFN(pool)(x, alone, ones[:, :1])
        assert np.isfinite(expected).all() and (expected != 0).all()
        for call in (moepool.ExpertFFN(pool), moepool.ExpertFFN(pool).composed):
            assert_same(call(x, skipped, ones), expected, f"{slots} slots")
        with pool.resolve(skipped) as route:
            for name, info in layer.matrices.items():
                wide = cases.activations("plain", 2, info.columns, "h04").reshape(1, 2, -1)
                for half in ("all", *HALVES):
                    out = Guarded(1, 2, info.rows)
                    moepool.matmul_id(wide, route, pool.matrix(name), half=half, out=out.out)
                    assert (out.check(name)[0, 0].view(np.uint32) == 0).all(), (name, half)
        y = moepool.ExpertFFN(pool)(x, expert_table([[-1, -1]]), ones)
        assert (y.view(np.uint32) == 0).all()


@pytest.mark.parametrize("tokens", [8191, 8192])
def test_h05_a_batch_of_more_places_than_a_grid_has_rows(tokens: int) -> None:
    """65,536 places in one call."""
    weight = quantised("q4_0", 4, 32, 32)
    layer = matrix_layer("q4_0", weight)
    x = cases.activations("plain", tokens, 32, "h05")
    ids = cases.Stream("h05").below(4, (tokens, 8)).astype(np.int32)
    out = Guarded(tokens, 8, 32)
    with moepool.Pool(layer, 4) as pool:
        moepool.matmul_id(x, ids, pool, out=out.out)
        y = out.check("h05")
        assert_same(y, reference(layer, x, ids), f"{tokens} tokens")
        assert_same(moepool.matmul_id(x[-1:], ids[-1:], pool), y[-1:], "the last token alone")
    assert_near("q4_0", weight, x[-3:], ids[-3:], y[-3:])


# ----------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize(("qtype", "columns"), [("q4_0", 384), ("q4_k", 2816)])
def test_h06_a_slot_keeps_nothing_of_what_was_there_before(qtype: str, columns: int) -> None:
    """Each slot held an expert of the largest scales, 0xFF codes and NaN biases before a good one."""
    experts, rows = 3, 50  # rows: no multiple of a panel's 32
    good = quantised(qtype, experts, rows, columns)
    poison = np.full_like(good, 0xFF).reshape(-1, cases.LAYOUTS[qtype].block_bytes)
    for offset in cases.LAYOUTS[qtype].scales:
        poison[:, offset : offset + 2] = np.array([0x7BFF], "<u2").view(np.uint8)  # 65504
    both = np.concatenate([good, poison.reshape(good.shape)])
    bias = np.concatenate([np.zeros((experts, rows)), np.full((experts, rows), np.nan)]).astype(np.float32)
    layer = matrix_layer(qtype, both, bias=bias)
    x = cases.activations("plain", 2, columns, "h06")
    # From a store that has none of the bad ones.
    expected = reference(matrix_layer(qtype, good, bias=bias[:experts]), x, expert_table([[0, 1, 2]] * 2))
    assert np.isfinite(expected).all()
    assert_near(qtype, good, x, expert_table([[0, 1, 2]] * 2), expected)
    for slots in range(1, experts + 1):
        with moepool.Pool(layer, slots) as pool:
            for first in range(experts):
                poisons = [experts + (first + i) % experts for i in range(slots)]
                goods = [(first + i) % experts for i in range(slots)]
                assert np.isnan(moepool.matmul_id(x, expert_table([poisons] * 2), pool)).all()
                with pool.resolve(expert_table([goods] * 2)) as route:
                    assert route.admitted == slots
                    out = Guarded(2, slots, rows)
                    moepool.matmul_id(x, route, pool, half="hot", out=out.out)
                y = out.check(f"{slots} slots")
                for place, expert in enumerate(goods):
                    assert_same(
                        np.ascontiguousarray(y[:, place]),
                        np.ascontiguousarray(expected[:, expert]),
                        f"{qtype}, slot {place} of {slots}, expert {expert}",
                    )


@pytest.mark.parametrize("phase", ["auto", "decode"])
@pytest.mark.parametrize("policy", ["lru", "static"])
def test_h18_more_experts_in_a_call_than_slots(policy: str, phase: Phase) -> None:
    """Right, and no expert is brought in twice for one call."""
    experts, tokens = 32, 64
    weight = quantised("q8_0", experts, 33, 32)
    layer = matrix_layer("q8_0", weight)
    x = cases.activations("plain", tokens, 32, "h18")
    ids = np.argsort(cases.Stream("h18").words((tokens, experts)), axis=1)[:, :2].astype(np.int32)
    assert len(np.unique(ids)) == experts
    expected = reference(layer, x, ids)
    assert_near("q8_0", weight, x, ids, expected)
    with moepool.Pool(layer, 4, policy=policy) as pool:  # type: ignore[arg-type]
        moepool.matmul_id(x[:1], ids[:1], pool)
        for _ in range(2):
            before = pool.stats()
            with pool.resolve(ids, phase=phase) as route:
                assert_same(moepool.matmul_id(x, route, pool), expected, f"{policy}, {phase}")
            stats = pool.stats()
            moved = stats.copied_bytes + stats.in_place_bytes - before.copied_bytes - before.in_place_bytes
            assert moved <= experts * layer.record_bytes
            assert stats.evictions == before.evictions
        # The working set is what it was.
        with pool.resolve(ids[:1]) as route:
            assert (route.misses == 0) == (policy == "lru")


@pytest.mark.parametrize("slots", [0, 1, 7, 8])
def test_h24_fewer_slots_than_places(slots: int) -> None:
    """It works, and says once how many slots a step needs; none at all is a choice and goes unsaid."""
    layer = matrix_layer("q8_0", quantised("q8_0", 16, 40, 32))
    x, ids = cases.activations("plain", 2, 32, "h24"), cases.expert_ids("plain", 2, 8, 16, "h24")
    expected = reference(layer, x, ids)
    with moepool.Pool(layer, slots) as pool:
        if 0 < slots < 8:
            with pytest.warns(moepool.MoePoolWarning, match="at least 8 slots"):
                y = moepool.matmul_id(x, ids, pool)
            assert_same(y, expected, f"{slots} slots")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                assert_same(moepool.matmul_id(x, ids, pool), expected, f"{slots} slots, again")
                assert_same(
                    moepool.matmul_id(x[:1], ids[:1], pool), expected[:1], f"{slots} slots, one token"
                )
        assert not told


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("qtype", ["q4_k", "q5_k", "q4_1", "q5_1"])
@pytest.mark.parametrize("kernel", usable_kernels())
def test_h07_block_sums_past_float16(qtype: str, kernel: str) -> None:
    """Thirty-two times 3000 is more than 65504: the sum of a block is no float16 anywhere."""
    x = np.full((3, 256), 3000.0, np.float32)
    x[1] = -3000.0
    x[2, ::2] = 2999.0
    weight = quantised(qtype, 2, 48, 256)
    layer = matrix_layer(qtype, weight)
    ids = expert_table([[0, 1]] * 3)
    with moepool.use_cpu_kernel(kernel), moepool.Pool(layer, 2) as pool:
        y = moepool.matmul_id(x, ids, pool)
    assert_near(qtype, weight, x, ids, y)
    assert_same(y, reference(layer, x, ids), kernel)


def test_h07_a_down_output_above_float16() -> None:
    """An output, a hidden row and their weighted sum of more than 65504 are numbers like any other."""
    ones = np.ones((2, 64, 64), np.float32)
    layer = moepool.ExpertStore.from_arrays(gate=ones, up=ones, down=ones, qtype="q8_0")[0]
    x = np.full((1, 64), 8.0, np.float32)
    with moepool.Pool(layer, 1) as pool, few_slots():
        rows = moepool.matmul_id(np.full((1, 64), 4096.0, np.float32), expert_table([[0, 1]]), pool.down)
        y = moepool.ExpertFFN(pool)(x, expert_table([[0, 1]]), np.ones((1, 2), np.float32))
    assert np.allclose(rows, 64 * 4096.0, rtol=0.02)
    assert np.allclose(y, 2 * 64 * 512.0 * 512.0, rtol=0.1)
    assert_same(y, reference_ffn(layer, x, expert_table([[0, 1]]), np.ones((1, 2), np.float32)), "layer")


# -------------------------------------------------------------------------------------------------- types


def test_h08_the_matrices_of_a_layer_differ_in_type() -> None:
    """Each is sized, packed and multiplied by its own type; an unknown type is refused by name."""
    experts, hidden, width, tokens = 4, 512, 256, 5
    types = {"gate": "q4_k", "up": "mxfp4", "down": "q6_k"}
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    x = cases.activations("plain", tokens, hidden, "h08")
    ids, weights = cases.expert_ids("some", tokens, 2, experts, "h08"), cases.router_weights(tokens, 2, "h08")
    sizes = []
    for mix in (types, dict.fromkeys(types, "q5_k")):
        blocks = {
            name: cases.tame_blocks(mix[name], experts * n, k, "h08", name).reshape(experts, n, -1)
            for name, (n, k) in shapes.items()
        }
        layer = ffn_layer(blocks, mix)
        sizes.append(layer.record_bytes)
        singly = {name: matrix_layer(mix[name], blocks[name]) for name in shapes}
        gate, up = (reference(singly[name], x, ids) for name in ("gate", "up"))
        rows = reference(singly["down"], moepool.swiglu(gate, up), ids)
        for slots in (0, 2, 4):
            with moepool.Pool(layer, slots) as pool:
                for name, expected in (("gate", gate), ("up", up)):
                    assert_same(moepool.matmul_id(x, ids, pool.matrix(name)), expected, f"{mix}, {name}")
                with pool.resolve(ids) as route:
                    y = moepool.ExpertFFN(pool)(x, route, weights)
                    assert_same(y, moepool.combine(rows, route, weights), f"{mix}, {slots} slots")
        words = {name: moepool.quant_types()[mix[name]].panel_words for name in shapes}
        packed = sum(4 * words[name] * n * k // 256 for name, (n, k) in shapes.items())
        assert 0 <= layer.record_bytes - packed < 256
    assert sizes[0] != sizes[1]
    blocks = {name: np.zeros((experts, n, k), np.float32) for name, (n, k) in shapes.items()}
    blocks["gate"] = quantised("q4_k", experts, width, hidden)
    with pytest.raises(moepool.ArgumentError, match="'iq2_xxs' of up"):
        moepool.ExpertStore.from_arrays(**blocks, qtype=types | {"up": "iq2_xxs"})  # type: ignore[arg-type]


def test_experts_of_one_matrix_differ_in_type(tmp_path: Path) -> None:
    """Files with one tensor an expert can hold that: refused by name, not read as the first one's type."""
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("gate", "up", "down"):
        for expert in range(3):
            qtype = "q8_0" if (name, expert) != ("down", 2) else "q4_0"
            data = quantised(qtype, 1, 32, 32)[0]
            tensor = f"blk.0.ffn_{name}.{expert}.weight"
            writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType[qtype.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(moepool.UnsupportedError, match=r"blk\.0\.ffn_down\.2\.weight.* q4_0.* q8_0"):
        moepool.ExpertStore.from_gguf(path, progress=False)


# -------------------------------------------------------------------------------------------------- sizes


def test_h16_no_tokens_and_no_experts() -> None:
    """A call of nothing is a call, and the one after it is right."""
    ffn = cases.FFNS[0]
    layer, x, ids, weights = layer_of(ffn), ffn.x(1), ffn.ids(1), ffn.router(1)
    expected = reference_ffn(layer, x, ids, weights)
    with moepool.Pool(layer, 4) as pool:
        fused = moepool.ExpertFFN(pool)
        for _ in range(2):
            before = pool.stats()
            with pool.resolve(ids[:0]) as route:
                gate, up = (moepool.matmul_id(x[:0], route, m) for m in (pool.gate, pool.up))
                assert gate.shape == up.shape == (0, 2, ffn.width)
                hidden = moepool.swiglu(gate, up)
                rows = moepool.matmul_id(hidden, route, pool.down)
                assert moepool.add(rows, rows).shape == (0, 2, ffn.hidden)
                assert moepool.combine(rows, route, weights[:0]).shape == (0, ffn.hidden)
            for call in (fused, fused.composed):
                assert call(x[:0], ids[:0], weights[:0]).shape == (0, ffn.hidden)
            assert moepool.matmul_id(x[:0], np.empty((0, 2), np.int64), pool.gate).shape == (0, 2, ffn.width)
            nobody = np.full((3, 2), -1, np.int32)
            for phase in ("auto", "prompt"):
                out = Guarded(3, ffn.hidden)
                fused(ffn.x(3), nobody, ffn.router(3), out=out.out, phase=phase)
                assert (out.check("all ids -1").view(np.uint32) == 0).all()
            assert pool.stats() == before
            assert_same(fused(x, ids, weights), expected, "one token after none")


@pytest.mark.parametrize("slots", [0, 1])
def test_a_layer_of_one_expert(slots: int) -> None:
    """E = 1: every id is 0 or -1, also many times over."""
    ffn = cases.Ffn("single", 256, 64, 1, 1, "q3_k", "q4_k", "iq4_nl")
    layer, x = layer_of(ffn), ffn.x(6)
    ids = expert_table([[0, 0, 0], [0, -1, 0], [-1, -1, -1], [-1, 0, -1], [0, 0, -1], [-1, -1, 0]])
    weights = cases.router_weights(6, 3, "single")
    with moepool.Pool(layer, slots) as pool, few_slots():
        y = moepool.ExpertFFN(pool)(x, ids, weights)
        with pytest.raises(moepool.IdError):
            pool.resolve([[1]])
    assert_same(y, reference_ffn(layer, x, ids, weights), f"{slots} slots")


@pytest.mark.parametrize("qtype", cases.TYPES)
def test_every_small_size(qtype: str) -> None:
    """T 1..40 by N 1..40: rows and tokens do not notice how many others there are."""
    columns = 256 if cases.LAYOUTS[qtype].block == 256 else 64
    experts, most = 2, 40
    blocks = cases.raw_blocks(qtype, experts * most, columns, "sizes").reshape(experts, most, -1)
    x = cases.activations("special", most, columns, "sizes")
    ids = cases.expert_ids("some", most, 2, experts, "sizes")
    whole = pick(products(matrix_layer(qtype, blocks), x), ids)
    for rows in range(1, most + 1):
        layer = matrix_layer(qtype, np.ascontiguousarray(blocks[:, :rows]))
        expected = np.ascontiguousarray(whole[:, :, :rows])
        with moepool.Pool(layer, 1) as pool, few_slots():
            for tokens in range(1, most + 1):
                y = moepool.matmul_id(x[:tokens], ids[:tokens], pool)
                if y.tobytes() != expected[:tokens].tobytes():
                    assert_same(y, expected[:tokens], f"{qtype}, {tokens} tokens, {rows} rows")
