"""GGUF files for tests: well-formed ones by the `gguf` package, and any bytes at all by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

UINT32, ARRAY, STRING = 4, 9, 8
ALIGNMENT = 32


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


@dataclass(frozen=True)
class Tensor:
    """A tensor of a hand-made file; `dims` in ggml's order, columns first."""

    name: str | bytes = "a"
    dims: Sequence[int] = (32,)
    type_id: int = 0
    offset: int | None = None
    data: bytes = b""

    def info(self, offset: int) -> bytes:
        place = offset if self.offset is None else self.offset
        dims = struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        return text(self.name) + dims + struct.pack("<IQ", self.type_id, place)


def handmade(
    tensors: Sequence[Tensor] = (),
    fields: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    field_count: int | None = None,
) -> bytes:
    """The bytes of a GGUF file, right or wrong; a field is its key, type and value, each as in the file."""
    count = len(tensors) if tensor_count is None else tensor_count
    keys = len(fields) if field_count is None else field_count
    out = magic + struct.pack("<IQQ", version, count, keys) + b"".join(fields)
    offset, data = 0, b""
    for tensor in tensors:
        out += tensor.info(offset)
        padded = tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
        offset, data = offset + len(padded), data + padded
    return out + bytes(-len(out) % ALIGNMENT) + data


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One field of a hand-made file."""
    return text(key) + struct.pack("<I", kind) + value


# ----------------------------------------------------------------------------------------------- whole models


@dataclass(frozen=True)
class Blocks:
    """Raw ggml blocks, uint8 (..., rows, row bytes), of a type."""

    data: NDArray[np.uint8]
    qtype: str


def write(
    path: Path,
    tensors: Mapping[str, Any],
    fields: Mapping[str, int | str] | None = None,
    *,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Writes a GGUF file of arrays and `Blocks`, in the order given."""
    writer = gguf.GGUFWriter(path, "test", endianess=endianess)
    for key, value in (fields or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif key in ("split.no", "split.count"):
            writer.add_uint16(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, Blocks):
            writer.add_tensor(name, tensor.data, raw_dtype=gguf.GGMLQuantizationType[tensor.qtype.upper()])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shards(folder: Path, shards: Sequence[Mapping[str, Any]], stem: str = "model") -> list[Path]:
    """Writes a split model, one mapping of tensors a shard; the metadata are in the first."""
    total = sum(len(shard) for shard in shards)
    paths = []
    for i, shard in enumerate(shards):
        split = {"split.no": i, "split.count": len(shards), "split.tensors.count": total}
        path = folder / f"{stem}-{i + 1:05d}-of-{len(shards):05d}.gguf"
        paths.append(write(path, shard, {**({"test.expert_count": 4} if i == 0 else {}), **split}))
    return paths
