"""Perplexity as llama.cpp's `llama-perplexity` defines it, so that figures can be put side by side.

The text is cut into windows of `context` tokens, each evaluated from an empty cache and without a token that
begins the text. Of each window the predictions made at positions `context / 2` to `context - 2` are scored. A
shorter last window is dropped.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from moepool.errors import ArgumentError
from moepool.recorder import Recorder
from moepool.runner.model import KVCache, Model, Phase
from moepool.runner.tokenizer import Tokenizer

DECODE_TOKENS = 32
"""Passes of more tokens are steps of a prompt, as pools take them by default."""


@dataclass(frozen=True)
class Perplexity:
    """The figure and what it was taken from.

    Attributes
    ----------
    perplexity, error : float
        exp of the mean negative log likelihood, and its standard error.
    windows, scored : int
        Windows evaluated, predictions scored.
    seconds : float
        Time of the forward passes.
    logits_sha256 : str
        Over the float32 bytes of the logits of all scored predictions.
    stats : dict
        `Model.stats` after the run.
    """

    perplexity: float
    error: float
    windows: int
    scored: int
    seconds: float
    logits_sha256: str
    stats: dict[str, Any]


def perplexity(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    context: int = 512,
    windows: int | None = None,
    batch: int | None = None,
    progress: bool = False,
    trace: Recorder | None = None,
) -> Perplexity:
    """Scores a text.

    Parameters
    ----------
    model : Model
    tokenizer : Tokenizer
    text : str
        At least `context` tokens.
    context : int
        Tokens of a window, even and at least 6.
    windows : int, optional
        Only the first so many windows; default all.
    batch : int, optional
        Tokens of a forward pass, default a whole window. Passes of more tokens than a pool takes for decode
        steps bypass its slots. The bytes of the logits may depend on the batch, since dense products then
        differ in shape.
    progress : bool
        Show a bar on standard error if that is a terminal.
    trace : TraceRecorder or PoolRecorder, optional
        Keeps the routing, step by step. With a batch of 1 it is that of decoding the text.

    Raises
    ------
    ArgumentError
        The text is shorter than a window, or a number is out of range.
    """
    if context < 6 or context % 2 or context > model.config.context:
        raise ArgumentError(
            f"a window of {context} tokens: expected an even number, 6 to {model.config.context}"
        )
    batch = context if batch is None else batch
    if batch < 1 or (windows is not None and windows < 1):
        raise ArgumentError("windows and batch must be at least 1")
    tokens = np.asarray(tokenizer.encode(text), dtype=np.int64)
    count = min(len(tokens) // context, windows or len(tokens))
    if count == 0:
        raise ArgumentError(f"the text has {len(tokens)} tokens, fewer than a window of {context}")

    digest = hashlib.sha256()
    cache = model.new_cache(context)
    losses: list[NDArray[np.float64]] = []
    seconds = 0.0
    with tqdm(range(count), disable=None if progress else True, unit="window", dynamic_ncols=True) as bar:
        for index in bar:
            window = tokens[index * context : (index + 1) * context]
            started = time.perf_counter()
            logits = _scored_logits(model, cache, window, batch, trace)
            seconds += time.perf_counter() - started
            digest.update(np.ascontiguousarray(logits).data)
            losses.append(_losses(logits, window[context // 2 + 1 :]))
            if progress:
                bar.set_postfix_str(f"perplexity {_estimate(np.concatenate(losses))[0]:.4f}")
    scored = np.concatenate(losses)
    value, error = _estimate(scored)
    return Perplexity(value, error, count, scored.size, seconds, digest.hexdigest(), model.stats())


def _scored_logits(
    model: Model, cache: KVCache, window: NDArray[np.int64], batch: int, trace: Recorder | None = None
) -> NDArray[np.float32]:
    """Logits at positions context / 2 to context - 2 of a window; (context / 2 - 1, vocab)."""
    begin, end = len(window) // 2, len(window) - 1
    cache.reset()
    rows = []
    for at in range(0, len(window), batch):
        chunk = window[at : at + batch]
        # Every chunk has at least one row computed; those before `begin` are thrown away here.
        first = min(max(begin - at, 0), len(chunk) - 1)
        # The phase is told, so that what is recorded is what the pools take it for.
        decode = len(chunk) <= DECODE_TOKENS
        observe = None if trace is None else trace.step(at, decode)
        phase: Phase = "decode" if decode else "prompt"
        logits = model.forward(chunk, cache, first=first, phase=phase, observe=observe)
        rows.append(logits[max(begin - at - first, 0) : end - at - first])
    return np.concatenate(rows)


def _losses(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Negative log likelihood of each target under its row."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    chosen = np.take_along_axis(wide, targets[:, None], axis=1)[:, 0]
    return np.asarray(top + np.log(np.exp(wide - top[:, None]).sum(axis=1)) - chosen)


def _estimate(losses: NDArray[np.float64]) -> tuple[float, float]:
    """Perplexity and its standard error: that of the mean loss, carried through exp."""
    mean = float(losses.mean())
    value = math.exp(mean)
    # Rounding may leave a variance of zero a hair below it.
    variance = max(float((losses * losses).mean()) - mean**2, 0.0)
    return value, value * math.sqrt(variance / (losses.size - 1))
