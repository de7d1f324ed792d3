"""What is computed: layers of the shape of a real model, and traces of expert ids.

A trace is an int32 array (steps, layers, tokens, k), replayed over and over.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

import moepool
from tests import cases

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

TYPES = tuple(cases.LAYOUTS)


@dataclass(frozen=True)
class Shape:
    """A layer's sizes, by default those of Qwen3-30B-A3B."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    k: int = 8

    def ffn(self, qtype: str) -> cases.Ffn:
        """All three matrices of one type."""
        name = f"bench/{self.hidden}/{self.width}/{qtype}"
        return cases.Ffn(name, self.hidden, self.width, self.experts, self.k, qtype, qtype, qtype)

    @property
    def multiplications(self) -> int:
        """Of one expert for one token."""
        return 3 * self.hidden * self.width


def layers_of(ffn: cases.Ffn, count: int, blocks: dict[str, Any] | None = None) -> list[moepool.Layer]:
    """Layers in memory of their own each, all of the same blocks: drawing these takes longer than packing."""
    weights: dict[str, Any] = ffn.weights() if blocks is None else blocks
    return [moepool.ExpertStore.from_arrays(**weights, qtype=ffn.gate)[0] for _ in range(count)]


@contextmanager
def quiet() -> Iterator[None]:
    """Allows fewer slots than a token has places."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepool.MoePoolWarning)
        yield


def portable(layer: moepool.Layer, x: F32, ids: I32, weights: F32) -> F32:
    """What a layer has to give, by the portable CPU kernel."""
    with moepool.use_cpu_kernel("portable"), moepool.Pool(layer, 0) as pool:
        y: F32 = moepool.ExpertFFN(pool)(x, ids, weights)
        return y


# ----------------------------------------------------------------------------------------------------- traces


def random_trace(steps: int, layers: int, tokens: int, k: int, experts: int) -> I32:
    """Distinct experts a token, each as likely as any other."""
    words = cases.Stream("bench trace", tokens, k, experts).words((steps, layers, tokens, experts))
    return np.argsort(words, axis=-1, kind="stable")[..., :k].astype(np.int32)


def skewed_trace(steps: int, layers: int, tokens: int, k: int, experts: int) -> I32:
    """Distinct experts a token, the r-th most wanted one 1 / (r + 1) as often as the first (Zipf's law).

    Which is which is another matter in each layer.
    """
    draws = 16 * k
    shares = (1 << 24) // np.arange(1, experts + 1)
    ends = np.cumsum(shares)
    trace = np.empty((steps, layers, tokens, k), np.int32)
    for layer in range(layers):
        stream = cases.Stream("skewed trace", tokens, k, experts, layer)
        names = np.argsort(stream.words(experts), kind="stable").astype(np.int32)
        drawn = np.searchsorted(ends, stream.below(int(ends[-1]), (steps, tokens, draws)), side="right")
        # Should the draws name too few, the most wanted of the others follow.
        drawn = np.concatenate([drawn, np.broadcast_to(np.arange(experts), (steps, tokens, experts))], axis=2)
        for step in range(steps):
            for token in range(tokens):
                ranks = drawn[step, token]
                _, first = np.unique(ranks, return_index=True)
                trace[step, layer, token] = names[ranks[np.sort(first)[:k]]]
    return trace


def distinct(trace: I32) -> float:
    """Different experts that a layer wants in a step, on average."""
    wanted = trace.reshape(-1, trace.shape[2] * trace.shape[3])
    return float(np.mean([len(np.unique(ids)) for ids in wanted]))


def ring_trace(layers: int, tokens: int, k: int, experts: int) -> I32:
    """All tokens of a step want the same k experts, and every step others, until all were wanted."""
    assert experts % k == 0
    steps = lcm(experts // k, layers) // layers
    order = np.arange(steps * layers * k, dtype=np.int32).reshape(steps, layers, 1, k) % experts
    return np.repeat(order, tokens, axis=2)


def missing_trace(layers: int, tokens: int, k: int, experts: int, slots: int, missing: int) -> I32 | None:
    """A trace of which an LRU pool misses exactly `missing` experts a token, once it goes round.

    The other places of a token share a few experts that are always wanted again soon. The missing ones come
    in turn, from so many that each is evicted before it is wanted again. None if there are too few slots.
    """
    hot = 4 * (k - missing)
    cold = (experts - hot) // (tokens * missing) * (tokens * missing)
    if hot + tokens * missing > slots or cold <= slots - hot:
        return None
    steps = lcm(cold // (tokens * missing), 4)
    number = np.arange(steps * tokens).reshape(steps, tokens, 1)
    hits = (number * (k - missing) + np.arange(k - missing)) % hot
    misses = hot + (number * missing + np.arange(missing)) % cold
    ids = np.concatenate([hits, misses], axis=2).astype(np.int32)
    return np.repeat(ids[:, None], layers, axis=1)


@cache
def law_layer(experts: int) -> moepool.Layer:
    """A layer so small that a pool of it shows nothing but which experts are resident."""
    return moepool.ExpertStore.from_arrays(weight=np.zeros((experts, 1, 4), np.float32), qtype="f32")[0]


def hit_rate(trace: I32, experts: int, slots: int) -> float:
    """Of an LRU pool that replays the trace's first layer, the second time round."""
    with quiet(), moepool.Pool(law_layer(experts), slots) as pool:
        for ids in trace[:, 0]:
            pool.resolve(ids, phase="decode").release()
        before = pool.stats()
        for ids in trace[:, 0]:
            pool.resolve(ids, phase="decode").release()
        after = pool.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / (hits + misses)


def slots_for(trace: I32, experts: int, rate: float) -> int:
    """The slots with which an LRU pool comes closest to a hit rate. Steps that want more experts than there
    are slots admit nobody, so with many tokens low rates are out of reach."""
    return min(range(experts + 1), key=lambda slots: abs(hit_rate(trace, experts, slots) - rate))
