"""Every kind of kernel once, in calls so small that compute-sanitizer is done in minutes (docs/gpu.md).

Like all tests it compares bits; run under the sanitizer it also finds what does no harm to these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepool
from moepool.pool import Miss
from tests import cases
from tests.support import (
    F32,
    On,
    assert_same,
    few_slots,
    ffn_layer,
    matrix_layer,
    reference,
    reference_ffn,
)

pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

CUDA = On("cuda:0")
EXPERTS, ROWS = 4, 45


@pytest.mark.parametrize("qtype", cases.TYPES)
def test_matrices(qtype: str) -> None:
    """One place, two, four, many; rows that fill no panel, a last chunk that is short, skips, repeats."""
    columns = {1: 259, 32: 288, 256: 512}[cases.LAYOUTS[qtype].block]
    weight = cases.tame_blocks(qtype, EXPERTS * ROWS, columns, "sanitizer").reshape(EXPERTS, ROWS, -1)
    draw = cases.Stream("sanitizer", qtype)
    layer = matrix_layer(
        qtype,
        weight,
        scale=draw.bell((EXPERTS,)).astype(np.float32),
        bias=draw.bell((EXPERTS, ROWS)).astype(np.float32),
    )
    with CUDA.pool(layer, 2) as pool, few_slots():
        for tokens in (1, 2, 4, 11, 40):
            x = cases.activations("plain", tokens, columns, "sanitizer")
            ids = cases.expert_ids("repeats", tokens, 3, EXPERTS, "sanitizer")
            y = CUDA(moepool.matmul_id, x, ids, pool)
            assert_same(y, reference(layer, x, ids), f"{tokens} tokens")


def layers(
    scale: dict[str, F32] | None = None, bias: dict[str, F32] | None = None
) -> dict[str, moepool.Layer]:
    """One of each way to be served: all types of equal gate and up, and a mixture with float weights."""
    kinds = {"q4_k": ("q4_k", "q4_k", "q6_k"), "q8_0": ("q8_0",) * 3, "mixed": ("mxfp4", "q5_1", "f16")}
    out = {}
    for name, (gate, up, down) in kinds.items():
        shapes = {"gate": (gate, 256, 256), "up": (up, 256, 256), "down": (down, 256, 256)}
        weights: dict[str, Any] = {
            part: cases.tame_blocks(qtype, EXPERTS * n, k, "sanitizer", part).reshape(EXPERTS, n, -1)
            for part, (qtype, n, k) in shapes.items()
        }
        qtypes = {part: qtype for part, (qtype, _, _) in shapes.items()}
        out[name] = ffn_layer(weights, qtypes, scale=scale, bias=bias)
    return out


@pytest.mark.parametrize("miss", ["stream", "host", "auto"])
@pytest.mark.parametrize("name", ["q4_k", "q8_0", "mixed"])
def test_layers(name: str, miss: Miss) -> None:
    """Ids on the device and on the host, hits, misses, bypasses and prompts, in one call and composed."""
    layer = layers()[name]

    def drawn(tokens: int) -> tuple[F32, Any, F32]:
        x = cases.activations("plain", tokens, 256, "sanitizer", tokens)
        ids = cases.expert_ids("some", tokens, 2, EXPERTS, "sanitizer", tokens)
        return x, ids, cases.router_weights(tokens, 2, "sanitizer", tokens)

    with CUDA.pool(layer, 3, miss=miss) as pool:
        ffn = moepool.ExpertFFN(pool)
        for tokens in (1, 3, 1, 16, 40):
            x, ids, weights = drawn(tokens)
            right = reference_ffn(layer, x, ids, weights)
            assert_same(CUDA(ffn, x, ids, weights), right, f"{tokens} tokens, ids on the device")
            assert_same(CUDA(ffn, x, ids.tolist(), weights), right, f"{tokens} tokens, ids on the host")
            assert_same(CUDA(ffn.composed, x, ids, weights), right, f"{tokens} tokens, composed")


POLICIES = {
    "slru": moepool.Policy("slru", protected_percent=50),
    "lfu": moepool.Policy("lfu", guard=True, half_life=2),
    "reelect": moepool.Policy("reelect", period=2),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_between_changes(policy: str, tmp_path: Path) -> None:
    """Decode steps of matrices with scales and biases, traced, while slots come and go and states are loaded.

    A pool on the CPU that goes through the same says who is admitted.
    """
    stream = cases.Stream("sanitizer", "changes")
    parts = ("gate", "up", "down")
    layer = layers(
        scale={part: stream.bell((EXPERTS,)).astype(np.float32) for part in parts},
        bias={part: stream.bell((EXPERTS, 256)).astype(np.float32) for part in parts},
    )["q4_k"]
    options: dict[str, Any] = {"max_slots": EXPERTS, "policy": POLICIES[policy]}
    with (
        few_slots(),
        CUDA.pool(layer, 2, **options) as pool,
        moepool.Pool(layer, 2, **options) as twin,
        pool.trace() as trace,
        twin.trace() as expected,
    ):
        for number, (slots, tokens) in enumerate([(2, 1), (4, 1), (4, 3), (3, 1), (4, 1), (2, 2), (1, 1)]):
            what = f"step {number}, {tokens} tokens, {slots} slots"
            for one in (pool, twin):
                one.resize(slots)
                one.prefetch([number % EXPERTS])
                if number == 3:
                    one.save_state(tmp_path / one.device.partition(":")[0])
                    one.load_state(tmp_path / one.device.partition(":")[0])
            x = cases.activations("plain", tokens, 256, "sanitizer", number)
            ids = cases.expert_ids("some", tokens, 2, EXPERTS, "sanitizer", number)
            weights = cases.router_weights(tokens, 2, "sanitizer", number)
            right = reference_ffn(layer, x, ids, weights)
            assert_same(CUDA(moepool.ExpertFFN(pool), x, ids, weights), right, f"{what}, on the device")
            assert_same(moepool.ExpertFFN(twin)(x, ids, weights), right, f"{what}, on the CPU")
            assert [a.tolist() for a in pool.residents()] == [a.tolist() for a in twin.residents()], what
        steps, those = trace.drain(), expected.drain()
        for name in ("step", "token", "decode", "ids", "admissions", "prefetched"):
            assert (getattr(steps, name) == getattr(those, name)).all(), name
        assert len(steps.admissions) > 0


def test_pageable_experts() -> None:
    """Through the ring of staging memory."""
    moepool.set_pinned_limit(0)
    try:
        layer = layers()["q4_k"]
        x, ids = cases.activations("plain", 3, 256, "sanitizer"), cases.expert_ids("plain", 3, 2, EXPERTS)
        with pytest.warns(moepool.MoePoolWarning, match="page-locked"):
            pool = CUDA.pool(layer, 2)
        with pool:
            assert_same(
                CUDA(moepool.matmul_id, x, ids, pool.gate), reference(layer, x, ids, "gate"), "pageable"
            )
    finally:
        moepool.set_pinned_limit(None)
