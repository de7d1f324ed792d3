"""Perplexity: the definition, the models of ../shared, and equal bits over placements."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moepool.errors import ArgumentError
from moepool.gguf import GGUFFile
from moepool.runner import Checkpoint, Placement, bundled_model, perplexity
from moepool.runner.perplexity import _estimate, _losses, _scored_logits
from tests import shared

MODELS = ["Q8_0", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "MXFP4"]


class PositionModel:
    """Returns its position as the only logit."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.phases: set[tuple[str, bool]] = set()

    def forward(self, tokens: Any, cache: Any, *, first: int, phase: str, observe: Any) -> Any:
        self.phases.add((phase, len(tokens) <= 32))
        positions = np.arange(cache.length, cache.length + len(tokens), dtype=np.float32)
        cache.length += len(tokens)
        self.tokens.extend(int(token) for token in tokens)
        return positions[first:, None]


@pytest.mark.parametrize("batch", [1, 7, 128, 255, 256, 257, 511, 512, 1000])
def test_positions_256_to_510_are_scored(batch: int) -> None:
    model = PositionModel()
    cache = SimpleNamespace(length=3)
    cache.reset = lambda: setattr(cache, "length", 0)
    window = np.arange(1000, 1512)
    scored = _scored_logits(model, cache, window, batch)  # type: ignore[arg-type]
    assert scored[:, 0].tolist() == list(range(256, 511))
    assert model.tokens == window.tolist()
    assert model.phases <= {("decode", True), ("prompt", False)}


def test_losses_and_estimate_follow_their_definitions() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 4, (50, 30)).astype(np.float32)
    targets = rng.integers(0, 30, 50)
    losses = _losses(logits, targets)
    for row, target, loss in zip(logits.tolist(), targets, losses, strict=True):
        assert loss == pytest.approx(-row[target] + math.log(sum(math.exp(x) for x in row)), rel=1e-12)
    value, error = _estimate(losses)
    assert value == pytest.approx(math.exp(losses.mean()))
    assert error == pytest.approx(value * losses.std(ddof=1) / math.sqrt(50))
    assert _estimate(np.full(10, 0.7))[1] == pytest.approx(0, abs=1e-6)


class FloatExperts:
    """The experts of a layer in float32, as the `gguf` package dequantises them."""

    def __init__(self, file: GGUFFile, block: int) -> None:
        names = (f"blk.{block}.ffn_{name}_exps.weight" for name in ("gate", "up", "down"))
        self.gate, self.up, self.down = (file.tensors[name].floats() for name in names)

    def __call__(self, x: Any, ids: Any, weights: Any, phase: str) -> Any:
        out = np.zeros_like(x)
        for expert in np.unique(ids):
            token, place = np.nonzero(ids == expert)
            gate = x[token] @ self.gate[expert].T
            hidden = gate / (1 + np.exp(-gate)) * (x[token] @ self.up[expert].T)
            out[token] += hidden @ self.down[expert].T * weights[token, place][:, None]
        return out


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_is_that_of_the_dequantised_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared.shared("models", f"tiny-moe-{name}.gguf")
    text = shared.text("held_docs.txt")
    with Checkpoint(path, progress=False) as checkpoint, checkpoint.model() as model:
        ours = perplexity(model, checkpoint.tokenizer, text, windows=2)
        with GGUFFile(path) as file:
            experts = [FloatExperts(file, block) for block in range(checkpoint.config.layers)]
        monkeypatch.setattr(model, "_ffns", experts)
        theirs = perplexity(model, checkpoint.tokenizer, text, windows=2)
    assert ours.scored == theirs.scored == 2 * 255
    assert ours.logits_sha256 != theirs.logits_sha256
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=0.01)


def _placements(checkpoint: Checkpoint) -> list[Placement]:
    experts, layers = checkpoint.config.experts, checkpoint.config.layers
    hot = [[(5 * i + layer) % experts for i in range(experts // 2)] for layer in range(layers)]
    return [
        Placement(),
        Placement(4),
        Placement(experts),
        Placement(experts // 2, "static", hot=hot),
        Placement(0, miss="host"),
        Placement(8, miss="host"),
        Placement(experts // 2, "static", "host", hot=hot),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_placement_changes_no_bit(name: str) -> None:
    text = shared.text("held_code.txt")
    with Checkpoint(shared.shared("models", f"tiny-moe-{name}.gguf"), progress=False) as checkpoint:
        results = []
        for placement in _placements(checkpoint):
            with checkpoint.model(placement) as model:
                results.append(perplexity(model, checkpoint.tokenizer, text, windows=1))
    assert len({(r.perplexity, r.error, r.logits_sha256) for r in results}) == 1


def test_placement_changes_no_bit_in_decode_steps() -> None:
    """Windows in passes of a few tokens, which fill slots and evict where whole windows bypass them."""
    lines = [f"    parser.add_argument('--option-{i}', type=int, default={i * i})\n" for i in range(40)]
    text = "".join(lines)
    with Checkpoint(bundled_model(), progress=False) as checkpoint:
        for batch in (1, 5):
            results = []
            for placement in _placements(checkpoint):
                with checkpoint.model(placement) as model:
                    results.append(perplexity(model, checkpoint.tokenizer, text, 128, windows=1, batch=batch))
            assert len({(r.perplexity, r.error, r.logits_sha256) for r in results}) == 1
            assert results[1].stats["evictions"] > 0 or batch > 1
            assert results[2].stats["hit_rate"] > 0.5


def test_bad_arguments_are_errors() -> None:
    with Checkpoint(bundled_model(), progress=False) as checkpoint, checkpoint.model() as model:
        for options in ({"context": 7}, {"context": 4}, {"context": 514}, {"batch": 0}, {"windows": 0}):
            with pytest.raises(ArgumentError):
                perplexity(model, checkpoint.tokenizer, "word " * 600, **options)
        with pytest.raises(ArgumentError, match="fewer than a window of 512"):
            perplexity(model, checkpoint.tokenizer, "too short")
