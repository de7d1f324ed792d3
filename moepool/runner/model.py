"""The `qwen3moe` transformer in NumPy, its experts served by one pool per layer.

Everything but the experts is plain float32 NumPy on the host, with shapes that depend on the tokens alone.
So two runs that differ only in `Placement` do the same dense arithmetic, and since the experts' bits do not
depend on the placement either, their logits are equal to the last byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

import moepool
from moepool.errors import ArgumentError, StateError, UnsupportedError
from moepool.gguf import GGUFFile
from moepool.plan import Plan
from moepool.policy import Policy, PolicyName
from moepool.pool import Miss
from moepool.runner.config import Config
from moepool.runner.devices import import_cupy
from moepool.runner.tokenizer import Tokenizer
from moepool.runner.weights import Array, LayerWeights, Weights

Phase = Literal["auto", "decode", "prompt"]
Observer = Callable[[int, NDArray[np.int32]], None]
"""Called with a layer's position and the ids (T, k) routed there, before the experts run."""

# The smallest sum that llama.cpp divides router weights by: the smallest normal float16.
_LEAST_WEIGHT_SUM = np.float32(6.103515625e-5)


def bundled_model() -> Path:
    """Path of the `tiny-moe` model that comes with the package (Q4_K, 17 MB)."""
    return Path(moepool.__file__).with_name("data") / "tiny-moe-Q4_K_M.gguf"


class KVCache:
    """Keys and values of the positions seen so far, for one sequence.

    Parameters
    ----------
    config : Config
    capacity : int
        The most positions it can hold; `2 * layers * kv_heads * capacity * head_dim * 4` bytes.
    xp : module
        Array module, as of the model.

    Attributes
    ----------
    length : int
        Positions held; `Model.forward` advances it.
    """

    def __init__(self, config: Config, capacity: int, xp: ModuleType = np) -> None:
        if capacity < 1:
            raise ArgumentError(f"a cache of {capacity} positions")
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.capacity = capacity
        self.length = 0
        self.keys: Array = xp.zeros(shape, dtype=np.float32)
        self.values: Array = xp.zeros(shape, dtype=np.float32)

    def reset(self) -> None:
        """Forgets every position."""
        self.length = 0


@dataclass(frozen=True)
class Placement:
    """Where experts live and who computes them. No choice here changes a bit of the output.

    Attributes
    ----------
    slots : int
        Slots of every layer's pool, 0 .. experts.
    policy : str or moepool.Policy
    miss : {"stream", "host", "auto"}
    device : str
        "cpu" or "cuda:N".
    hot : sequence of sequences of int, optional
        For "static" and "pinned", the experts that stay in every MoE layer, in the order of the layers.
    plan : moepool.Plan, optional
        In place of all but `device`.
    """

    slots: int = 0
    policy: Policy | PolicyName = "lru"
    miss: Miss = "stream"
    device: str = "cpu"
    hot: Sequence[Sequence[int]] | None = field(default=None, repr=False)
    plan: Plan | None = field(default=None, repr=False)

    def pool(self, layer: moepool.Layer) -> moepool.Pool:
        """The pool of a layer."""
        if self.plan is not None:
            return self.plan.pool(layer, device=self.device)
        return moepool.Pool(
            layer,
            slots=self.slots,
            device=self.device,
            policy=self.policy,
            miss=self.miss,
            hot=None if self.hot is None else list(self.hot[layer.index]),
        )


class Checkpoint:
    """An opened model file: configuration, dense weights, tokenizer and packed experts.

    Any number of models can share it; they differ in placement only.

    Parameters
    ----------
    path : str or Path
        A GGUF file, or any shard of a split one.
    progress : bool, optional
        Show a progress bar while experts are packed (default: as `ExpertStore.from_gguf` decides).
    xp : module
        Array module of the dense weights, and of all that is computed with them: NumPy, or CuPy, whose
        logits differ in their last bits. With CuPy the experts must be on its current device.

    Raises
    ------
    UnsupportedError, FormatError
        As `Config.from_gguf` and `Weights.from_gguf`.

    Examples
    --------
    >>> with Checkpoint(bundled_model()) as checkpoint, checkpoint.model(Placement(slots=8)) as model:
    ...     logits = model.forward(checkpoint.tokenizer.encode("import os"), model.new_cache(16))
    """

    def __init__(self, path: str | Path, progress: bool | None = None, xp: ModuleType = np) -> None:
        with GGUFFile(path) as file:
            self.config = Config.from_gguf(file)
            self.tokenizer = Tokenizer.from_fields(file.fields)
            self.weights = Weights.from_gguf(file, self.config, xp)
        self.xp = xp
        self.store = moepool.ExpertStore.from_gguf(path, progress=progress)
        blocks = [layer.block for layer in self.store]
        if blocks != list(range(self.config.layers)):
            self.store.close()
            raise UnsupportedError(
                f"blocks {blocks} of {self.config.layers} have experts: dense blocks are not supported"
            )

    def model(self, placement: Placement | None = None) -> Model:
        """A model over these weights with its experts placed as told."""
        return Model(self, placement or Placement())

    def close(self) -> None:
        """Frees the packed experts once the last model is closed too. May be called twice."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Model:
    """A transformer with one pool per MoE layer, made by `Checkpoint.model`.

    A context manager that closes its pools.

    Parameters
    ----------
    checkpoint : Checkpoint
    placement : Placement

    Attributes
    ----------
    config, placement
        As given.
    pools : tuple of moepool.Pool
        One a layer, in order.
    """

    def __init__(self, checkpoint: Checkpoint, placement: Placement) -> None:
        self.config = config = checkpoint.config
        self.placement = placement
        self._weights = checkpoint.weights
        self._xp = checkpoint.xp
        if placement.hot is not None and len(placement.hot) != config.layers:
            raise ArgumentError(f"hot lists for {len(placement.hot)} layers, the model has {config.layers}")
        pools: list[moepool.Pool] = []
        try:
            for index in range(config.layers):
                pools.append(placement.pool(checkpoint.store[index]))
            self._ffns = tuple(_experts(pool, self._xp) for pool in pools)
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        self.pools = tuple(pools)
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        self._frequencies = config.rope_scale * config.rope_base**-exponents
        self._closed = False

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache; `capacity` defaults to the context the model was trained on."""
        return KVCache(self.config, self.config.context if capacity is None else capacity, self._xp)

    def forward(
        self,
        tokens: ArrayLike,
        cache: KVCache,
        *,
        first: int = 0,
        phase: Phase = "auto",
        observe: Observer | None = None,
    ) -> Array:
        """Appends tokens to a sequence and returns what follows each of them.

        Parameters
        ----------
        tokens : (T,) integers
            T >= 1.
        cache : KVCache
            The positions before; T more are added. Untouched if an argument is wrong.
        first : int
            The first of the T tokens whose logits are wanted: a prompt need not pay for a large vocabulary.
        phase : {"auto", "decode", "prompt"}
            Passed to every pool: a prompt step leaves the slots as they are.
        observe : callable, optional
            Sees every layer's routing.

        Returns
        -------
        (T - first, vocab) float32, in host memory

        Raises
        ------
        ArgumentError
            A token is outside the vocabulary, or the cache is full.
        StateError
            The model is closed.
        """
        xp, config = self._xp, self.config
        ids = np.asarray(tokens)
        if self._closed:
            raise StateError("the model is closed")
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ArgumentError(f"tokens must be a non-empty list of integers, got {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= config.vocab:
            raise ArgumentError(
                f"token {ids.min() if ids.min() < 0 else ids.max()} is outside [0, {config.vocab})"
            )
        if not 0 <= first < ids.size:
            raise ArgumentError(f"first={first} is not one of {ids.size} tokens")
        if cache.length + ids.size > cache.capacity:
            raise ArgumentError(
                f"{ids.size} tokens after {cache.length} do not fit a cache of {cache.capacity}"
            )

        x: Array = self._weights.token_embd[xp.asarray(ids)]
        angles = np.arange(cache.length, cache.length + ids.size)[:, None] * self._frequencies
        rotation = xp.asarray(np.cos(angles), dtype=np.float32), xp.asarray(np.sin(angles), dtype=np.float32)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(layer, index, self._norm(x, layer.attn_norm), cache, rotation)
            h = self._norm(x, layer.ffn_norm)
            experts, weights = self._route(layer, h)
            if observe is not None:
                observe(index, _on_host(experts))
            x = x + self._ffns[index](h, experts, weights, phase=phase)
        cache.length += int(ids.size)
        return _on_host(self._norm(x[first:], self._weights.output_norm) @ self._weights.output.T)

    def _norm(self, x: Array, weight: Array) -> Array:
        """RMSNorm over the last axis."""
        mean = self._xp.mean(x * x, axis=-1, keepdims=True)
        scale: Array = 1 / self._xp.sqrt(mean + np.float32(self.config.norm_eps))
        return x * scale * weight

    def _attention(
        self, layer: LayerWeights, index: int, x: Array, cache: KVCache, rotation: tuple[Array, Array]
    ) -> Array:
        """Grouped-query attention of T new positions over all so far; (T, hidden) to (T, hidden)."""
        xp, c = self._xp, self.config
        count, past, total = len(x), cache.length, cache.length + len(x)
        q = self._norm((x @ layer.attn_q.T).reshape(count, -1, c.head_dim), layer.attn_q_norm)
        k = self._norm((x @ layer.attn_k.T).reshape(count, -1, c.head_dim), layer.attn_k_norm)
        v = (x @ layer.attn_v.T).reshape(count, -1, c.head_dim)
        cache.keys[index, :, past:total] = _rotate(xp, k, rotation).transpose(1, 0, 2)
        cache.values[index, :, past:total] = v.transpose(1, 0, 2)

        # Query heads that share a key head are stacked, so that each key head is one matrix product.
        group = c.heads // c.kv_heads
        q = _rotate(xp, q, rotation).reshape(count, c.kv_heads, group, c.head_dim)
        q = q.transpose(1, 2, 0, 3).reshape(c.kv_heads, group * count, -1)
        scores = q @ cache.keys[index, :, :total].transpose(0, 2, 1) * np.float32(c.head_dim**-0.5)
        scores = scores.reshape(c.kv_heads, group, count, total)
        future = xp.arange(total)[None, :] > xp.arange(past, total)[:, None]
        scores = _softmax(xp, xp.where(future, np.float32(-np.inf), scores))
        mixed: Array = scores.reshape(c.kv_heads, group * count, total) @ cache.values[index, :, :total]
        mixed = mixed.reshape(c.kv_heads, group, count, c.head_dim).transpose(2, 0, 1, 3).reshape(count, -1)
        return mixed @ layer.attn_output.T

    def _route(self, layer: LayerWeights, x: Array) -> tuple[NDArray[np.int32], Array]:
        """Top-k experts of every token, most probable first, ties by the lower id, and weights of sum 1."""
        xp, k = self._xp, self.config.experts_used
        share = _softmax(xp, x @ layer.ffn_gate_inp.T)
        ids = xp.argsort(-share, axis=-1, kind="stable")[:, :k]
        weights = xp.take_along_axis(share, ids, axis=-1)
        weights = weights / xp.maximum(weights.sum(axis=-1, keepdims=True), _LEAST_WEIGHT_SUM)
        return xp.ascontiguousarray(ids, dtype=np.int32), xp.ascontiguousarray(weights)

    def stats(self) -> dict[str, Any]:
        """Counters of all pools added up, with the hit rate over decode steps (None before the first)."""
        totals: dict[str, Any] = {}
        for pool in self.pools:
            stats = pool.stats()
            for name in (f.name for f in fields(stats)):
                totals[name] = totals.get(name, 0) + getattr(stats, name)
        wanted = totals["hits"] + totals["misses"]
        totals["hit_rate"] = totals["hits"] / wanted if wanted else None
        return totals

    def close(self) -> None:
        """Frees the slots. May be called twice."""
        self._closed = True
        for pool in self.pools:
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _experts(pool: moepool.Pool, xp: ModuleType) -> Callable[..., Array]:
    """The experts of a layer as a function (x, ids, weights, phase=) of arrays of `xp`, wherever they are."""
    ffn = moepool.ExpertFFN(pool)
    if pool.device == "cpu" or xp is not np:
        return ffn
    cupy = import_cupy(pool.device)
    device = cupy.cuda.Device(int(pool.device.partition(":")[2]))

    def on_device(x: Array, ids: NDArray[np.int32], weights: Array, phase: Phase) -> Array:
        with device:
            y = ffn(cupy.asarray(x), ids, cupy.asarray(weights), phase=phase)
            return cupy.asnumpy(y)  # type: ignore[no-any-return]

    return on_device


def _on_host(array: Any) -> NDArray[Any]:
    """The array as one of NumPy's, copied if it is on a device."""
    return array if isinstance(array, np.ndarray) else array.get()


def _softmax(xp: ModuleType, x: Array) -> Array:
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


def _rotate(xp: ModuleType, x: Array, rotation: tuple[Array, Array]) -> Array:
    """RoPE, NEOX style: the first half of a head turns with the second. `x` is (T, heads, head_dim)."""
    cos, sin = (r[:, None, :] for r in rotation)
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return xp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)  # type: ignore[no-any-return]
