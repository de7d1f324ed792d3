"""Text generation: greedy unless told otherwise, with what is needed to compare two runs byte by byte."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moepool.errors import ArgumentError
from moepool.recorder import Recorder
from moepool.runner.model import Model, Observer
from moepool.runner.profile import RoutingProfile
from moepool.runner.tokenizer import Tokenizer

PROMPT_CHUNK = 512
"""Most tokens of a prompt that one forward takes; bounds the memory of its attention scores."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes
    ----------
    temperature : float
        0 takes the most probable token (the lowest id among equals).
    top_k : int
        Draw from this many most probable tokens; 0: all.
    top_p : float
        Draw from the fewest most probable tokens whose shares reach this sum, in (0, 1].
    seed : int
        Of NumPy's PCG64; the same seed draws the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError(f"temperature {self.temperature} is not a number >= 0")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or self.seed < 0:
            raise ArgumentError(
                f"top_k {self.top_k} or seed {self.seed} is negative, or top_p {self.top_p} not in (0, 1]"
            )


class Sampler:
    """Draws tokens from logits; keeps the state of the random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Index of the drawn token of logits (vocab,)."""
        s = self._sampling
        if s.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")[: s.top_k or None]
        scaled = logits[order].astype(np.float64) / s.temperature
        share = np.exp(scaled - scaled[0])
        cumulative = np.cumsum(share / share.sum())
        # Draw below what the tokens that stay reach together: the same as normalising them.
        kept = int(np.searchsorted(cumulative, min(s.top_p, cumulative[-1]))) + 1
        draw = self._random.random() * cumulative[kept - 1]
        return int(order[np.searchsorted(cumulative[:kept], draw, side="right")])


@dataclass(frozen=True)
class Generation:
    """What a run gave and how.

    Attributes
    ----------
    text : str
        The generated text, without the prompt.
    prompt_tokens, tokens : list of int
        Ids of the prompt and of what was generated (a final end-of-text token included).
    finish : {"length", "eos", "context"}
        Why it ended: `n` tokens, the model's end-of-text token, or no position left.
    prompt_seconds : float
        Time of the prompt's forward passes.
    step_seconds : list of float
        Time of every decode step; one fewer than tokens, since the first comes from the prompt.
    logits_sha256 : str
        Over the float32 bytes of all logits that tokens were drawn from, in order.
    stats : dict
        `Model.stats` after the run less before it; gauges (slots, resident, ...) as after it.
    """

    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    finish: Literal["length", "eos", "context"]
    prompt_seconds: float
    step_seconds: list[float] = field(repr=False)
    logits_sha256: str
    stats: dict[str, Any]

    @property
    def tokens_per_second(self) -> float | None:
        """Decode steps a second, None if there was none."""
        seconds = sum(self.step_seconds)
        return len(self.step_seconds) / seconds if seconds else None


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    n: int = 64,
    sampling: Sampling | None = None,
    *,
    stop_at_eos: bool = True,
    on_text: Callable[[str], None] | None = None,
    profile: RoutingProfile | None = None,
    trace: Recorder | None = None,
) -> Generation:
    """Continues a text.

    Parameters
    ----------
    model : Model
    tokenizer : Tokenizer
    prompt : str
        At least one token; control tokens written in it count as such.
    n : int
        The most tokens to generate, n >= 1.
    sampling : Sampling, optional
        Greedy by default.
    stop_at_eos : bool
        End when the model says that the text ends.
    on_text : callable, optional
        Gets the text piece by piece, whole characters only.
    profile : RoutingProfile, optional
        Counts the routing of the prompt and of the decode steps.
    trace : TraceRecorder or PoolRecorder, optional
        Keeps the routing, step by step.

    Raises
    ------
    ArgumentError
        The prompt is empty or leaves no room in the model's context, or n < 1.

    Examples
    --------
    >>> generate(model, checkpoint.tokenizer, "import os", n=16).text
    """
    if n < 1:
        raise ArgumentError(f"n is {n}, expected at least 1")
    prompt_tokens = tokenizer.encode(prompt, special=True)
    if tokenizer.add_bos and tokenizer.bos is not None and prompt_tokens[:1] != [tokenizer.bos]:
        prompt_tokens = [tokenizer.bos, *prompt_tokens]
    context = model.config.context
    if not 0 < len(prompt_tokens) <= context:
        raise ArgumentError(
            f"the prompt has {len(prompt_tokens)} tokens, expected 1 to {context} (the model's context)"
        )

    before = model.stats()
    sampler, stream, digest = Sampler(sampling or Sampling()), tokenizer.stream(), hashlib.sha256()
    # The last token drawn is not fed back, so it needs no position.
    cache = model.new_cache(min(context, len(prompt_tokens) + n - 1))
    pieces: list[str] = []

    def emit(piece: str) -> None:
        pieces.append(piece)
        if piece and on_text is not None:
            on_text(piece)

    started = time.perf_counter()
    for at in range(0, len(prompt_tokens), PROMPT_CHUNK):
        chunk = prompt_tokens[at : at + PROMPT_CHUNK]
        observe = _observer(profile, trace, at, decode=False)
        logits = model.forward(chunk, cache, first=len(chunk) - 1, phase="prompt", observe=observe)[-1]
    prompt_seconds = time.perf_counter() - started

    tokens: list[int] = []
    step_seconds: list[float] = []
    finish: Literal["length", "eos", "context"] = "length"
    while True:
        digest.update(np.ascontiguousarray(logits).data)
        tokens.append(sampler(logits))
        emit(stream.push(tokens[-1]))
        if stop_at_eos and tokens[-1] == tokenizer.eos:
            finish = "eos"
            break
        if len(tokens) == n:
            break
        if cache.length == cache.capacity:
            finish = "context"
            break
        observe = _observer(profile, trace, cache.length, decode=True)
        started = time.perf_counter()
        logits = model.forward(tokens[-1:], cache, phase="decode", observe=observe)[-1]
        step_seconds.append(time.perf_counter() - started)
    emit(stream.finish())
    return Generation(
        text="".join(pieces),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        finish=finish,
        prompt_seconds=prompt_seconds,
        step_seconds=step_seconds,
        logits_sha256=digest.hexdigest(),
        stats=_since(before, model.stats()),
    )


def _observer(
    profile: RoutingProfile | None, trace: Recorder | None, pos: int, decode: bool
) -> Observer | None:
    """What looks at the routing of a pass that begins at a position."""
    observers: list[Observer] = []
    if profile is not None:
        observers.append(profile.observer("decode" if decode else "prompt"))
    if trace is not None and (observer := trace.step(pos, decode)) is not None:
        observers.append(observer)
    if not observers:
        return None

    def observe(layer: int, ids: NDArray[np.int32]) -> None:
        for observer in observers:
            observer(layer, ids)

    return observe


_GAUGES = frozenset({"slots", "experts", "resident", "leased", "slot_bytes", "pinned_bytes"})


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters of one run of a model that may have run before."""
    stats = {k: v if k in _GAUGES or k == "hit_rate" else v - before[k] for k, v in after.items()}
    wanted = stats["hits"] + stats["misses"]
    return stats | {"hit_rate": stats["hits"] / wanted if wanted else None}
