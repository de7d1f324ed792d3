"""Decode steps that the device takes by itself, and what a CPU says of them: for the tests of CUDA pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import moepool
from tests import cases
from tests.support import F32, ffn_layer

DEVICE = "cuda:0"
SMALL = cases.FFNS[0]
EXPERTS, K = 8, 3
NAN = np.uint32(0x7FFFFFFF)
# Layers of other types and sizes, whose activations have the same size.
CHAIN = (
    cases.Ffn("first", 256, 256, EXPERTS, 2, "q4_k", "q4_k", "q6_k"),
    cases.Ffn("second", 256, 96, EXPERTS, 2, "q8_0", "q8_0", "mxfp4"),
    cases.Ffn("third", 256, 45, EXPERTS, 2, "f16", "f16", "f32"),
    cases.Ffn("fourth", 256, 96, EXPERTS, 2, "q4_k", "q5_0", "q5_0"),
)
SIZES = {1: (259, 67), 32: (288, 96), 256: (512, 256)}  # by block: columns of gate and up, and of down
DOWN_ROWS = 45
TOKENS = (1, 2, 3, 8, 16)
KINDS = (*cases.ID_KINDS, "out of range")


def recorded(stream: Any, call: Callable[[], object], mode: int | None = None) -> Any:
    """The graph of what a call queues on this stream."""
    stream.begin_capture(mode)
    try:
        call()
    finally:
        graph = stream.end_capture()
    return graph


def counts(pool: moepool.Pool) -> moepool.PoolStats:
    """The stats, but for what depends on the device."""
    return replace(pool.stats(), slot_bytes=0, pinned_bytes=0)


def assert_in_step(pool: moepool.Pool, law: moepool.Pool, what: object) -> None:
    """The pool holds and has counted what its law says."""
    for ours, theirs in zip(pool.residents(), law.residents(), strict=True):
        assert ours.tolist() == theirs.tolist(), what
    assert counts(pool) == counts(law), what


@dataclass(frozen=True)
class Step:
    """The arrays of one call, and its places whose id is out of range."""

    x: NDArray[Any]
    ids: NDArray[Any]
    weights: NDArray[Any]
    bad: list[tuple[int, int]]

    @property
    def good(self) -> NDArray[Any]:
        """The ids, without those out of range."""
        ids = self.ids.copy()
        for place in self.bad:
            ids[place] = -1
        return ids

    def right(self, ffn: moepool.ExpertFFN) -> F32:
        """What the step has to give, by a pool on the CPU."""
        y: F32 = ffn(self.x, self.good, self.weights)
        y.view(np.uint32)[[token for token, _ in self.bad]] = NAN
        return y


def step_of(kind: str, tokens: int, hidden: int, number: int) -> Step:
    """A step of the matrix: dtypes and kinds of activations change with its number."""
    key = ("decode", kind, tokens, number)
    trouble = tokens > 3 and number % 2
    x: NDArray[Any] = cases.activations("special" if trouble else "plain", tokens, hidden, *key)
    ids: NDArray[Any] = cases.expert_ids(
        "plain" if kind not in cases.ID_KINDS else kind, tokens, K, EXPERTS, *key
    )
    weights: NDArray[Any] = cases.router_weights(tokens, K, *key)
    if number % 2:
        ids = ids.astype(np.int64)
    bad = []
    if kind == "out of range":
        values = [EXPERTS, -2, *((2**32 + 3, -(2**63)) if ids.dtype == np.int64 else (2**31 - 1,))]
        draw = cases.Stream(*key)
        places = sorted(set(draw.below(tokens * K, 1 + tokens // 2).tolist()))
        bad = [divmod(place, K) for place in places]
        for i, place in enumerate(bad):
            ids[place] = values[(number + i) % len(values)]
    else:
        weights[ids < 0] = np.nan  # of a skipped place it means nothing
    if number % 3 == 1:
        with np.errstate(over="ignore"):
            x = x.astype(np.float16)
    if number % 3 == 2:
        weights = weights.astype(np.float16)
    return Step(x, ids, weights, bad)


def steps_of(hidden: int) -> list[Step]:
    """Every kind with every number of tokens, in a mixed order, and single tokens between them."""
    every = [(kind, tokens) for kind in KINDS for tokens in TOKENS]
    order = np.argsort(cases.Stream("order of the matrix").words(len(every)), kind="stable")
    mixed = [every[i] for i in order]
    for at in range(len(mixed), 0, -2):
        mixed.insert(at, ("plain", 1))
    return [step_of(kind, tokens, hidden, number) for number, (kind, tokens) in enumerate(mixed)]


def hidden_of(gate: str, up: str) -> int:
    """Columns that both types can have."""
    return SIZES[max(cases.LAYOUTS[gate].block, cases.LAYOUTS[up].block)][0]


def layer_of_types(
    gate: str, down: str, up: str = "", *, hidden: int | None = None, width: int | None = None
) -> moepool.Layer:
    """Rows and columns that fill no panel and no chunk, scales, biases. Up is of gate's type unless said."""
    up = up or gate
    hidden, width = hidden or hidden_of(gate, up), width or SIZES[cases.LAYOUTS[down].block][1]
    shapes = {"gate": (gate, width, hidden), "up": (up, width, hidden), "down": (down, DOWN_ROWS, width)}
    draw = cases.Stream("decode", gate, up, down)
    return ffn_layer(
        {
            name: cases.tame_blocks(qtype, EXPERTS * rows, columns, "decode", name).reshape(EXPERTS, rows, -1)
            for name, (qtype, rows, columns) in shapes.items()
        },
        {name: qtype for name, (qtype, _, _) in shapes.items()},
        scale={name: draw.bell((EXPERTS,)).astype(np.float32) for name in ("gate", "down")},
        bias={name: draw.bell((EXPERTS, shapes[name][1])).astype(np.float32) for name in ("up", "down")},
    )
