"""A small model runner: `qwen3moe` GGUF files, dense parts in NumPy, experts through `moepool.ExpertFFN`.

It exists to show a whole model running from a pool, and to prove that placement changes no byte of its
output.
"""

from moepool.runner.config import Config
from moepool.runner.generate import Generation, Sampling, generate
from moepool.runner.model import Checkpoint, KVCache, Model, Placement, bundled_model
from moepool.runner.perplexity import Perplexity, perplexity
from moepool.runner.profile import RoutingProfile
from moepool.runner.tokenizer import TextStream, Tokenizer
from moepool.runner.weights import Weights

__all__ = [
    "Checkpoint",
    "Config",
    "Generation",
    "KVCache",
    "Model",
    "Perplexity",
    "Placement",
    "RoutingProfile",
    "Sampling",
    "TextStream",
    "Tokenizer",
    "Weights",
    "bundled_model",
    "generate",
    "perplexity",
]
