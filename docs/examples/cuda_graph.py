"""A layer in a CUDA graph, with arrays of CuPy: captured once, replayed with other activations and experts.

There are slots for a quarter of the experts on the first GPU. What misses is divided between the link and the
CPU. Each step is compared with a pool on the CPU, byte by byte.

    python cuda_graph.py
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import moepool
from moepool.runner import bundled_model

TOKENS, K, STEPS = 1, 4, 3000


def cupy_and_a_gpu() -> Any:
    """CuPy; without it, or without a GPU that moepool can use, the program ends here."""
    try:
        moepool.memory("cuda:0")
    except moepool.MoePoolError as error:
        sys.exit(f"this program needs a GPU, and moepool can use none: {error}")
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"this program needs CuPy: pip install cupy-cuda13x ({error})")
    return cupy


def main() -> None:
    """Captures a step, replays it, and compares."""
    cupy = cupy_and_a_gpu()
    # One core is for the thread that waits for the device and answers it.
    cores = moepool.get_threads()
    moepool.set_threads(max(1, cores - 1))

    layer = moepool.ExpertStore.from_gguf(bundled_model())[0]
    pool = moepool.Pool(layer, layer.experts // 4, device="cuda:0", miss="auto")
    ffn = moepool.ExpertFFN(pool)
    on_cpu = moepool.ExpertFFN(moepool.Pool(layer, slots=0))
    # "device: ..." can be captured. "host: ..." can not, and says why.
    print(pool.describe(TOKENS, K))

    hidden = layer.matrices["gate"].columns
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # The graph reads and writes these: they stay, and with them the pool, as long as it is replayed.
        x = cupy.zeros((TOKENS, hidden), cupy.float32)
        ids = cupy.zeros((TOKENS, K), cupy.int32)
        weights = cupy.zeros((TOKENS, K), cupy.float32)
        y = cupy.empty((TOKENS, hidden), cupy.float32)
        stream.begin_capture()
        try:
            ffn(x, ids, weights, out=y)
        finally:
            graph = stream.end_capture()

        rng, same = np.random.default_rng(0), True
        for _ in range(STEPS):
            new_x = rng.standard_normal(x.shape, np.float32)
            new_ids = np.array([rng.permutation(12)[:K] for _ in range(TOKENS)], np.int32)
            new_weights = rng.dirichlet(np.ones(K), TOKENS).astype(np.float32)
            x.set(new_x)
            ids.set(new_ids)
            weights.set(new_weights)
            graph.launch(stream)
            same &= y.get().tobytes() == on_cpu(new_x, new_ids, new_weights).tobytes()

    stats = pool.stats()
    print(f"{stats.steps} steps, {stats.hit_rate:.0%} hits, {stats.step_backs} step-backs")
    print("same bytes:", "yes" if same else "NO")


if __name__ == "__main__":
    main()
