"""What a model's experts are and what slots for them cost, from the file's header alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import moepool
from moepool.errors import FormatError
from moepool.gguf import ExpertLayer, ExpertMatrix, GGUFFile, expert_layers


@dataclass(frozen=True)
class LayerInfo:
    """One MoE layer.

    Attributes
    ----------
    block, experts : int
        Its number in the file, how many experts it has.
    types : dict of str to str
        ggml's type of gate, up and down.
    hidden, width : int
        Inputs of gate and up, and their outputs.
    expert_bytes : int
        One expert's weights in the file.
    record_bytes : int or None
        One expert packed: what a slot takes and a miss copies. None if moepool does not compute with a type.
    """

    block: int
    experts: int
    types: dict[str, str]
    hidden: int
    width: int
    expert_bytes: int
    record_bytes: int | None


@dataclass(frozen=True)
class ModelInfo:
    """A model's experts, whatever its architecture.

    Attributes
    ----------
    name, architecture : str
    experts_used : int or None
        k, None where the file does not say.
    layers : list of LayerInfo
    """

    name: str
    architecture: str
    experts_used: int | None
    layers: list[LayerInfo]

    @classmethod
    def from_gguf(cls, path: str | Path) -> ModelInfo:
        """Reads the header of a GGUF file, all shards of a split one.

        Raises
        ------
        FormatError
            The file is damaged or has no experts.
        """
        with GGUFFile(path) as file:
            architecture = str(file.fields.get("general.architecture"))
            layers = expert_layers(file, any_type=True)
            if not layers:
                raise FormatError(f"{path}: architecture {architecture!r}, no tensors of experts")
            used = file.fields.get(f"{architecture}.expert_used_count")
            name = str(file.fields.get("general.name") or Path(path).stem)
            # Layers are mostly alike, and each kind needs measuring once.
            records: dict[str, int | None] = {}
            return cls(name, architecture, used, [_layer_info(layer, records) for layer in layers])

    @property
    def record_bytes(self) -> int | None:
        """One packed expert of every layer: what one slot costs in total. None if a layer's is."""
        records = [layer.record_bytes for layer in self.layers if layer.record_bytes is not None]
        return sum(records) if len(records) == len(self.layers) else None

    @property
    def not_computed(self) -> list[str]:
        """The types of experts that moepool does not compute with."""
        return sorted(
            {t for layer in self.layers for t in layer.types.values()} - moepool.quant_types().keys()
        )

    def slot_costs(self) -> list[dict[str, int]]:
        """Bytes of all pools together for 8, 16, 32, ... and all slots of every layer; [] if a type is not
        computed."""
        records = [(layer.experts, layer.record_bytes or 0) for layer in self.layers]
        if self.record_bytes is None:
            return []
        experts = max(layer.experts for layer in self.layers)
        steps = [2**i for i in range(3, experts.bit_length()) if 2**i < experts] + [experts]
        return [
            {"slots": n, "bytes": sum(min(n, count) * record for count, record in records)} for n in steps
        ]


def _layer_info(layer: ExpertLayer, records: dict[str, int | None]) -> LayerInfo:
    kind = repr([(n, m.qtype, m.rows, m.columns, m.bias, m.scale) for n, m in layer.matrices.items()])
    if kind not in records:
        records[kind] = _record_bytes(layer.matrices)
    gate = layer.matrices["gate"]
    return LayerInfo(
        block=layer.block,
        experts=layer.experts,
        types={name: matrix.qtype for name, matrix in layer.matrices.items()},
        hidden=gate.columns,
        width=gate.rows,
        expert_bytes=sum(matrix.expert_bytes for matrix in layer.matrices.values()),
        record_bytes=records[kind],
    )


def _record_bytes(matrices: dict[str, ExpertMatrix]) -> int | None:
    """Asks the packer, with one expert of zeros, rather than knowing its layout a second time."""
    items = matrices.items()
    if not {m.qtype for m in matrices.values()} <= moepool.quant_types().keys():
        return None
    arguments: dict[str, Any] = {
        name: np.zeros((1, m.rows, m.expert_bytes // m.rows), np.uint8) for name, m in items
    }
    arguments["qtype"] = {name: m.qtype for name, m in items}
    arguments["bias"] = {name: np.zeros((1, m.rows), np.float32) for name, m in items if m.bias}
    arguments["scale"] = {name: np.ones(1, np.float32) for name, m in items if m.scale}
    with moepool.ExpertStore.from_arrays(**arguments) as store:
        return int(store[0].record_bytes)
