"""The dense weights of a model: everything but its experts, as float32."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from moepool.errors import FormatError, UnsupportedError
from moepool.gguf import GGUFFile
from moepool.runner.config import Config

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LayerWeights:
    """Dense float32 weights of one block; matrices are (outputs, inputs).

    Attributes
    ----------
    attn_norm, ffn_norm : (hidden,)
    attn_q : (heads * head_dim, hidden)
    attn_k, attn_v : (kv_heads * head_dim, hidden)
    attn_q_norm, attn_k_norm : (head_dim,)
    attn_output : (hidden, heads * head_dim)
    ffn_gate_inp : (experts, hidden)
        The router.
    """

    attn_norm: Array
    attn_q: Array
    attn_k: Array
    attn_v: Array
    attn_q_norm: Array
    attn_k_norm: Array
    attn_output: Array
    ffn_norm: Array
    ffn_gate_inp: Array


@dataclass(frozen=True)
class Weights:
    """Everything but the experts, dequantised to float32.

    Attributes
    ----------
    token_embd : (vocab, hidden)
    layers : tuple of LayerWeights
    output_norm : (hidden,)
    output : (vocab, hidden)
        `token_embd` itself where the file ties the two.
    """

    token_embd: Array
    layers: tuple[LayerWeights, ...]
    output_norm: Array
    output: Array

    @classmethod
    def from_gguf(cls, file: GGUFFile, config: Config, xp: ModuleType = np) -> Weights:
        """Dequantises every dense tensor.

        Parameters
        ----------
        file : GGUFFile
        config : Config
        xp : module
            The array module the weights shall live in: `numpy`, or one that offers the same functions.

        Raises
        ------
        FormatError
            A tensor is missing or has another shape than the metadata say.
        UnsupportedError
            The file has a tensor that the runner would ignore, or cannot decode.
        """
        reader = _TensorReader(file, xp)
        hidden, queries, keys = (
            config.hidden,
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_q_norm": (config.head_dim,),
            "attn_k_norm": (config.head_dim,),
            "attn_output": (hidden, queries),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (config.experts, hidden),
        }
        layers = tuple(
            LayerWeights(
                **{name: reader(f"blk.{block}.{name}.weight", shape) for name, shape in shapes.items()}
            )
            for block in range(config.layers)
        )
        token_embd = reader("token_embd.weight", (config.vocab, hidden))
        output_norm = reader("output_norm.weight", (hidden,))
        tied = "output.weight" not in file.tensors
        output = token_embd if tied else reader("output.weight", (config.vocab, hidden))
        reader.refuse_unread()
        return cls(token_embd, layers, output_norm, output)


class _TensorReader:
    """Reads dense tensors by name and knows afterwards which ones nobody asked for."""

    _EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.")

    def __init__(self, file: GGUFFile, xp: ModuleType) -> None:
        self._tensors = file.tensors
        self._xp = xp
        self._read: set[str] = set()

    def __call__(self, name: str, shape: tuple[int, ...]) -> Array:
        info = self._tensors.get(name)
        if info is None:
            raise FormatError(f"tensor {name} is missing")
        if tuple(info.shape) != shape:
            raise FormatError(f"tensor {name} has shape {tuple(info.shape)}, expected {shape}")
        self._read.add(name)
        # A copy: float32 tensors come as views of the mapped file.
        return self._xp.array(info.floats(), dtype=np.float32, order="C")  # type: ignore[no-any-return]

    def refuse_unread(self) -> None:
        # A tensor left out (a bias, RoPE factors) would give fluent nonsense rather than an error.
        unread = sorted(n for n in self._tensors if n not in self._read and not self._EXPERTS.match(n))
        if unread:
            raise UnsupportedError(f"the runner does not know what to do with tensor {', '.join(unread[:4])}")
