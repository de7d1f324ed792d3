"""The shape of a `qwen3moe` model, from its GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moepool.errors import FormatError, UnsupportedError
from moepool.gguf import GGUFFile

ARCHITECTURE = "qwen3moe"


@dataclass(frozen=True)
class Config:
    """The numbers that shape a model, as its GGUF metadata gives them.

    Attributes
    ----------
    name : str
        `general.name`, or the file's stem.
    layers, hidden, heads, kv_heads, head_dim : int
        Blocks, width of the residual stream, query heads, key/value heads, width of a head.
    experts, experts_used : int
        Experts of a layer (E) and how many each token is routed to (k).
    vocab, context : int
        Tokens of the vocabulary; positions the model was trained on.
    norm_eps, rope_base, rope_scale : float
        RMSNorm's epsilon, RoPE's base and the factor on its positions (1 unless scaled linearly).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_used: int
    vocab: int
    context: int
    norm_eps: float
    rope_base: float
    rope_scale: float = 1.0

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Config:
        """Reads the metadata.

        Raises
        ------
        UnsupportedError
            The architecture, or a variant of it, is not one the runner knows; the message names it.
        FormatError
            A key is missing or its value makes no sense; the message names it.
        """
        architecture = file.fields.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise UnsupportedError(f"architecture {architecture!r}: the runner only knows {ARCHITECTURE!r}")
        meta = _Metadata(file.fields, architecture)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise FormatError("tensor token_embd.weight is missing")
        hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
        head_dim = meta.integer("attention.key_length", hidden // heads)
        config = cls(
            name=str(file.fields.get("general.name") or Path(file.path).stem),
            layers=meta.integer("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=meta.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            experts=meta.integer("expert_count"),
            experts_used=meta.integer("expert_used_count"),
            vocab=embedding.shape[0],
            context=meta.integer("context_length"),
            norm_eps=meta.real("attention.layer_norm_rms_epsilon"),
            rope_base=meta.real("rope.freq_base", 10000.0),
            rope_scale=meta.rope_scale(),
        )
        if meta.integer("attention.value_length", head_dim) != head_dim:
            raise UnsupportedError(f"{architecture}: keys and values of different width")
        if meta.integer("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
            raise UnsupportedError(f"{architecture}: RoPE over a part of a head")
        if heads % config.kv_heads:
            raise FormatError(f"{heads} heads cannot share {config.kv_heads} key/value heads evenly")
        if config.experts_used > config.experts:
            raise FormatError(
                f"expert_used_count {config.experts_used} exceeds expert_count {config.experts}"
            )
        return config


class _Metadata:
    """Typed look-ups of one architecture's keys."""

    def __init__(self, values: Mapping[str, object], architecture: str) -> None:
        self._values = values
        self._prefix = f"{architecture}."

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(self._prefix + key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"metadata {self._prefix}{key} is {value!r}, expected a positive integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._values.get(self._prefix + key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise FormatError(f"metadata {self._prefix}{key} is {value!r}, expected a positive number")
        return float(value)

    def rope_scale(self) -> float:
        kind = self._values.get(self._prefix + "rope.scaling.type", "none")
        if kind == "none":
            return 1.0
        if kind == "linear":
            return 1.0 / self.real("rope.scaling.factor", 1.0)
        raise UnsupportedError(f"RoPE scaling {kind!r}: the runner knows 'none' and 'linear'")
