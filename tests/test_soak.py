"""Thousands of layer calls under constant eviction: never a wrong byte, and memory stays where it is."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
import pytest

import moepool
from moepool.pool import Phase
from tests import cases
from tests.support import F32, I32, assert_same, few_slots, layer_of, products

SECONDS = 10.0  # at most
CALLS = 4000
MOST_TOKENS = 12
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


def new_pool(of: Layer, stream: cases.Stream) -> moepool.Pool:
    slots, policy, miss, admit = (int(stream.below(b, 1)[0]) for b in (of.ffn.experts, 6, 2, 4))
    return moepool.Pool(
        of.layer,
        slots,
        policy="static" if policy == 0 else "lru",
        miss="host" if miss else "stream",
        admit=1 if admit == 0 else None,
    )


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_no_wrong_byte_and_no_growth_under_constant_eviction() -> None:
    stream = cases.Stream("soak")
    layers = [layer(ffn) for ffn in cases.FFNS]
    phases: tuple[Phase, ...] = ("decode", "decode", "auto", "prompt")
    made = 0
    evictions = copied = 0
    with few_slots():
        judges = [moepool.Pool(of.layer, 0) for of in layers]
        pools = [[new_pool(of, stream) for _ in range(3)] for of in layers]
        started, begun, grown = time.monotonic(), 0, 0
        held: list[moepool.Route] = []
        for call in range(CALLS):
            if time.monotonic() - started > SECONDS:
                break
            which, at, tokens, first, cut, phase, renew, keep = (
                int(stream.below(b, 1)[0]) for b in (len(layers), 3, 3, 9, 4, len(phases), 40, 8)
            )
            of, pool = layers[which], pools[which][at]
            span = slice(first, first + tokens + 1)
            shape = (tokens + 1, of.ffn.k)
            ids = np.where(stream.below(8, shape) == 0, -1, stream.below(of.ffn.experts, shape)).astype(
                np.int32
            )
            weights = (stream.below(1000, shape) * 0.001).astype(np.float32)
            what = f"call {call}: {ids.tolist()} in {phases[phase]} by {pool!r}"
            expected = of.expected(judges[which], span, ids, weights)
            layer_call = moepool.ExpertFFN(pool)
            if cut == 0:  # the batch in two steps
                half = (tokens + 1) // 2
                for part in (slice(0, half), slice(half, None)):
                    y = layer_call(of.x[span][part], ids[part], weights[part], phase=phases[phase])
                    assert_same(y, expected[part], f"{what}, tokens {part}")
            elif cut == 1:
                y = layer_call.composed(of.x[span], ids, weights, phase=phases[phase])
                assert_same(y, expected, f"{what}, composed")
            else:
                y = layer_call(of.x[span], ids, weights, phase=phases[phase])
                assert_same(y, expected, what)
            if keep == 0:
                held.append(pool.resolve(ids, phase=phases[phase]))
            if len(held) > 2:
                held.pop(0).release()
            if renew == 0:
                evictions += pool.stats().evictions
                copied += pool.stats().copied_bytes
                made += 1
                pool.close()
                pools[which][at] = new_pool(of, stream)
            if call == 500:
                begun = resident_bytes()
            grown = resident_bytes() - begun
        for stats in (pool.stats() for of_layer in pools for pool in of_layer):
            evictions += stats.evictions
            copied += stats.copied_bytes
    if call < 1000:
        pytest.skip(f"this machine made only {call} calls in {SECONDS} s")
    assert made > 10 and evictions > call / 4, (made, evictions, call)
    assert grown < MARGIN, (
        f"{grown / 2**20:.1f} MiB more than after 500 calls, {copied / 2**20:.1f} MiB copied"
    )
