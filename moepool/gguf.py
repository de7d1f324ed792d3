"""GGUF files, read strictly, and the expert tensors in them.

The `gguf` package parses; this module checks. Whatever is wrong with a file is said, with the name of the
tensor or field, when it is opened and before a byte of a tensor is touched: a file that opens can be read to
its end.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf import quants as ggml_quants
from gguf.gguf_reader import ReaderField

from moepool.cpu import quant_types
from moepool.errors import FormatError, UnsupportedError, warn

__all__ = ["ExpertLayer", "ExpertMatrix", "Experts", "GGUFFile", "TensorInfo", "expert_layers"]

_MAX_DIMS = 4  # ggml's own limit
_MAX_BYTES = 1 << 62  # sizes are compared as Python integers, but must fit the file offsets of every system
_LENGTH = struct.Struct("<Q")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

# A tensor of all experts of a block, or, in files of early 2024 and before, of one expert.
_EXPERTS = re.compile(r"blk\.(?P<block>\d+)\.ffn_(?P<matrix>gate_up|gate|up|down)_exps\.(?P<part>\w+)")
_ONE_EXPERT = re.compile(r"blk\.(?P<block>\d+)\.ffn_(?P<matrix>gate|up|down)\.(?P<expert>\d+)\.(?P<part>\w+)")
_ALIKE = re.compile(r"blk\.\d+\.ffn_\w*(?<!norm)_(ch)?exps\..+")
_FLOATS = ("f32", "f16", "bf16")


def _type_table() -> dict[int, tuple[str, int, int]]:
    """Name, block and block bytes of every ggml type that has a known size, by number."""
    table = {int(t): (t.name.lower(), *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    table.update({t.id: (t.name, t.block, t.block_bytes) for t in quant_types().values()})
    return table


class _StrictReader(GGUFReader):
    """`GGUFReader` that reads nothing past the end of the file and leaves the tensors to :class:`GGUFFile`.

    It also keeps an array of the metadata as one stretch of bytes: as NumPy objects, one a token, the
    vocabulary of a large model takes seconds.
    """

    tensor_fields: list[ReaderField]

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise FormatError(
                f"the header is truncated: it needs {end} bytes or more, the file has {len(self.data)}"
            )
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if _value_type(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start, count, kind = orig_offs + 12, int(length[0]), _value_type(item[0])
        if kind == GGUFValueType.ARRAY:
            raise FormatError("an array of arrays, which GGUF does not define for metadata")
        if kind == GGUFValueType.STRING:
            size = _strings_size(self.data, start, count)
        else:
            size = count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        parts = [item, length, self._get(start, np.uint8, size)]
        return 12 + size, parts, [2], [GGUFValueType.ARRAY, kind]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.data_offset = int(start_offs)
        self.tensor_fields = fields


def _value_type(number: int) -> GGUFValueType:
    try:
        return GGUFValueType(int(number))
    except ValueError:
        raise FormatError(f"a field is of type number {number}, which GGUF does not define") from None


def _strings_size(data: npt.NDArray[np.uint8], start: int, count: int) -> int:
    """Bytes of `count` strings, each with its length before it."""
    view, offset = memoryview(data.data), start
    for _ in range(count):
        if offset + 8 > len(view):
            return len(view)  # more than there is from `start` on, which the caller's read then refuses
        offset += 8 + int(_LENGTH.unpack_from(view, offset)[0])
    return offset - start


def _strings(data: bytes, count: int) -> list[str]:
    out, offset = [], 0
    for _ in range(count):
        size = _LENGTH.unpack_from(data, offset)[0]
        out.append(data[offset + 8 : offset + 8 + size].decode("utf-8"))
        offset += 8 + size
    return out


class _Fields(Mapping[str, Any]):
    """The metadata as plain Python values, each decoded when it is first asked for."""

    def __init__(self, reader: _StrictReader, path: Path) -> None:
        self._raw = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
        self._scalars = reader.gguf_scalar_to_np
        self._path = path
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raw = self._raw[key]
            try:
                self._values[key] = self._decode(raw)
            except UnicodeDecodeError as error:
                raise FormatError(f"{self._path}: the field {key!r} is not UTF-8: {error}") from None
        return self._values[key]

    def _decode(self, raw: ReaderField) -> Any:
        if raw.types[0] != GGUFValueType.ARRAY:
            return raw.contents()
        *_, length, data = raw.parts
        if raw.types[1] == GGUFValueType.STRING:
            return _strings(data.tobytes(), int(length[0]))
        return data.view(self._scalars[raw.types[1]]).tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return f"<{len(self)} fields of {self._path.name}>"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Rows first: (experts, rows, columns) for the experts of a layer; the last is the one that is
        quantised.
    type_id : int
        ggml's number of the type.
    qtype : str
        ggml's name of the type in lower case, "q4_k" for example.
    nbytes : int
    path : Path
        The file, that is the shard, that holds it.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    qtype: str
    nbytes: int
    path: Path
    _offset: int = field(repr=False)
    _map: npt.NDArray[np.uint8] = field(repr=False, compare=False)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The blocks, read-only uint8 of shape[:-1] + (row bytes,): a view of the mapped file, read when
        touched."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return np.asarray(self._map[self._offset : self._offset + self.nbytes]).reshape(
            *self.shape[:-1], self.nbytes // rows
        )

    def floats(self) -> npt.NDArray[np.float32]:
        """The weights as float32, of `shape`, decoded by the `gguf` package.

        Raises
        ------
        UnsupportedError
            The package cannot decode this type.
        """
        try:
            values = ggml_quants.dequantize(self.data, GGMLQuantizationType(self.type_id))
        except (ValueError, NotImplementedError):
            raise UnsupportedError(f"{self.name}: the gguf package cannot decode {self.qtype}") from None
        return np.asarray(values, dtype=np.float32).reshape(self.shape)


class GGUFFile:
    """A GGUF model file, all its shards, checked from end to end and mapped, not read.

    Parameters
    ----------
    path : str or PathLike
        The file; of a split model (`name-00001-of-00003.gguf`) any shard, the others are found beside it.

    Attributes
    ----------
    path : Path
        As given.
    fields : Mapping of str to object
        The metadata, of the first shard: plain Python numbers, strings and lists, decoded when asked for.
    tensors : dict of str to TensorInfo
        Every tensor of every shard, in the order of the files.

    Raises
    ------
    OSError
        The file cannot be opened.
    FormatError
        It is no GGUF file, is truncated, was written for the other byte order, names a tensor twice, has a
        tensor of an unknown type or an impossible shape, or a shard is missing. The message names the tensor
        or field.

    Examples
    --------
    >>> with GGUFFile(model_path) as file:
    ...     print(file.fields["general.architecture"], file.tensors["blk.0.ffn_gate_exps.weight"].shape)
    qwen3moe (32, 256, 256)
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        types = _type_table()
        readers = [_open(shard) for shard in self._shards()]
        self.fields = _Fields(readers[0][1], readers[0][0])
        self.tensors = {}
        for shard, reader in readers:
            for tensor in _tensors(reader, shard, types):
                if tensor.name in self.tensors:
                    raise FormatError(f"{shard}: two tensors are named {tensor.name!r}")
                self.tensors[tensor.name] = tensor
        self._check_split([_Fields(reader, shard) for shard, reader in readers])

    def _shards(self) -> list[Path]:
        """Every file of the model, by its name."""
        match = _SHARD.fullmatch(self.path.name)
        if match is None or not self.path.exists():
            return [self.path]
        count = int(match["count"])
        shards = [
            self.path.with_name(f"{match['stem']}-{i + 1:05d}-of-{match['count']}.gguf") for i in range(count)
        ]
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise FormatError(
                f"{self.path}: of {count} shards {len(missing)} are missing: {', '.join(missing)}"
            )
        return shards if self.path in shards else [self.path]

    def _check_split(self, shards: Sequence[Mapping[str, Any]]) -> None:
        counts = [fields.get("split.count", 1) for fields in shards]
        if counts[0] > 1 and len(shards) == 1:
            raise FormatError(
                f"{self.path}: one of {counts[0]} shards, but its name does not end in "
                "-00001-of-00002.gguf and the like, so the others cannot be found"
            )
        if len(shards) == 1:
            return
        for i, fields in enumerate(shards):
            found = (fields.get("split.no"), fields.get("split.count"))
            if found != (i, len(shards)):
                raise FormatError(
                    f"{self.path}: by its name a file is shard {i + 1} of {len(shards)}, but its fields "
                    f"split.no and split.count are {found[0]} and {found[1]}"
                )
        total = shards[0].get("split.tensors.count")
        if total is not None and total != len(self.tensors):
            raise FormatError(
                f"{self.path}: the shards hold {len(self.tensors)} tensors, split.tensors.count is {total}"
            )

    def release(self, tensor: TensorInfo) -> None:
        """Gives the pages of a tensor that has been read back to the system, its whole pages only.

        The data stays readable, from the page cache or the disk.
        """
        mapped: Any = tensor._map
        start = -(-tensor._offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor._offset + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            mapped._mmap.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Forgets the tensors and fields; the files are unmapped once no array of theirs is alive. May be
        called twice."""
        self.tensors = {}
        self.fields = {}

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path.name!r}: {len(self.tensors)} tensors, {len(self.fields)} fields>"


def _open(path: Path) -> tuple[Path, _StrictReader]:
    """The parsed header of one file."""
    with path.open("rb") as file:
        head = file.read(8)
    if len(head) < 8 or head[:4] != b"GGUF":
        raise FormatError(f"{path}: not a GGUF file, it begins with {head[:4]!r}")
    version = int.from_bytes(head[4:], "little")
    if version & 0xFFFF == 0:
        raise FormatError(
            f"{path}: a big-endian GGUF file; convert it with gguf-convert-endian of the gguf package"
        )
    if version not in (2, 3):
        raise FormatError(f"{path}: GGUF version {version}; moepool reads versions 2 and 3")
    try:
        return path, _StrictReader(path)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else error  # str() of a KeyError adds quotes
        raise FormatError(f"{path}: the header is damaged: {reason}") from None


def _tensors(
    reader: _StrictReader, path: Path, types: Mapping[int, tuple[str, int, int]]
) -> Iterator[TensorInfo]:
    """The tensors of one file, each checked against the file's size and its neighbours."""
    alignment, data = int(reader.alignment), reader.data
    expected = 0
    for raw in reader.tensor_fields:
        name, dims = raw.name, [int(d) for d in raw.parts[3]]
        type_id, offset = int(raw.parts[4][0]), int(raw.parts[5][0])
        where = f"{path}: tensor {name!r}"
        if not 1 <= len(dims) <= _MAX_DIMS:
            raise FormatError(f"{where} has {len(dims)} dimensions")
        shape = tuple(reversed(dims))
        if 0 in dims:
            raise FormatError(f"{where} has the empty shape {shape}")
        if type_id not in types:
            raise FormatError(f"{where} is of type number {type_id}, which is no ggml type known here")
        qtype, block, block_bytes = types[type_id]
        if shape[-1] % block:
            raise FormatError(
                f"{where} has {shape[-1]} columns, not whole blocks of {block} as {qtype} needs"
            )
        nbytes = block_bytes
        for n in (shape[-1] // block, *shape[:-1]):
            nbytes *= n
        if nbytes > _MAX_BYTES:
            raise FormatError(f"{where} of shape {shape} would take {nbytes} bytes")
        start = reader.data_offset + offset
        if start + nbytes > len(data):
            raise FormatError(
                f"{where} ends at byte {start + nbytes}, the file at {len(data)}: it is truncated or damaged"
            )
        if offset != expected:
            raise FormatError(f"{where} begins at {offset}, but the tensors before it end at {expected}")
        expected = -(-(offset + nbytes) // alignment) * alignment
        yield TensorInfo(name, shape, type_id, qtype, nbytes, path, start, data)


# ---------------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Experts:
    """Where the rows of some consecutive experts lie: `tensor`, from byte `offset` on, `stride` bytes an
    expert."""

    tensor: TensorInfo
    first: int
    count: int
    offset: int
    stride: int


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of every expert of a layer, as a file holds it.

    Attributes
    ----------
    name : str
        "gate", "up" or "down".
    qtype : str
    type_id : int
    rows, columns : int
        Outputs and inputs of one expert.
    pieces : tuple of Expert
        Where its weights are.
    bias_tensor, scale_tensor : TensorInfo or None
    """

    name: str
    qtype: str
    type_id: int
    rows: int
    columns: int
    pieces: tuple[Experts, ...]
    bias_tensor: TensorInfo | None = None
    scale_tensor: TensorInfo | None = None
    _bias_start: int = 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in the file."""
        _, block, block_bytes = _type_table()[self.type_id]
        return self.rows * (self.columns // block) * block_bytes

    @property
    def bias(self) -> bool:
        """Whether the file has biases for it."""
        return self.bias_tensor is not None

    @property
    def scale(self) -> bool:
        """Whether the file has a scale an expert for it."""
        return self.scale_tensor is not None

    def biases(self) -> npt.NDArray[np.float32] | None:
        """float32 (experts, rows), or None."""
        if self.bias_tensor is None:
            return None
        return np.ascontiguousarray(self.bias_tensor.floats()[:, self._bias_start :][:, : self.rows])

    def scales(self) -> npt.NDArray[np.float32] | None:
        """float32 (experts,), or None."""
        return None if self.scale_tensor is None else self.scale_tensor.floats()


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one block of a model: `block` is its number in the file, `matrices` are gate, up and
    down."""

    block: int
    experts: int
    matrices: dict[str, ExpertMatrix]


@dataclass
class _Found:
    """The expert tensors of one block by matrix, then by part ("weight") or by expert."""

    merged: dict[str, dict[str, TensorInfo]] = field(default_factory=lambda: defaultdict(dict))
    single: dict[str, dict[int, TensorInfo]] = field(default_factory=lambda: defaultdict(dict))


def expert_layers(file: GGUFFile, *, any_type: bool = False) -> list[ExpertLayer]:
    """Finds the experts of every block of a file, whichever way they are stored, and checks that they fit
    together.

    Known are one tensor for all experts of a matrix (`blk.N.ffn_gate_exps.weight`, with `.bias` and
    `.scale`), gate and up merged into one (`blk.N.ffn_gate_up_exps.weight`, gate rows first), and one tensor
    for each expert (`blk.N.ffn_gate.E.weight`). `.input_scale` concerns activations in FP4 and is left out.

    Parameters
    ----------
    file : GGUFFile
    any_type : bool
        Whether experts of types that moepool does not compute with are listed too, rather than refused.

    Returns
    -------
    list of ExpertLayer
        In rising block number; empty for a model without experts.

    Raises
    ------
    FormatError
        A tensor is missing, or its shape contradicts the others' or the expert count in the metadata.
    UnsupportedError
        A tensor's type is not one of :func:`moepool.quant_types`.

    Warns
    -----
    MoePoolWarning
        The file holds expert tensors of a kind that is not known here, which would stay unread.

    Examples
    --------
    >>> with GGUFFile(model_path) as file:
    ...     layer = expert_layers(file)[0]
    >>> layer.experts, layer.matrices["down"].qtype
    (32, 'q4_k')
    """
    found: dict[int, _Found] = defaultdict(_Found)
    unread = []
    for name, tensor in file.tensors.items():
        if (match := _EXPERTS.fullmatch(name)) and match["part"] in (
            "weight",
            "bias",
            "scale",
            "input_scale",
        ):
            found[int(match["block"])].merged[match["matrix"]][match["part"]] = tensor
        elif (match := _ONE_EXPERT.fullmatch(name)) and match["part"] == "weight":
            found[int(match["block"])].single[match["matrix"]][int(match["expert"])] = tensor
        elif match or _ALIKE.fullmatch(name):
            unread.append(name)
    if unread:
        some = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
        warn(
            f"{file.path}: {len(unread)} tensors of experts are of no kind known here and stay unread: {some}"
        )
    return [_Assembler(file, block, any_type).layer(found[block]) for block in sorted(found)]


class _Assembler:
    """Makes the layer of one block from the tensors found for it."""

    def __init__(self, file: GGUFFile, block: int, any_type: bool) -> None:
        self.file, self.block, self.any_type = file, block, any_type
        self.types = quant_types()

    def fault(self, message: str) -> FormatError:
        return FormatError(f"{self.file.path}: {message}")

    def layer(self, found: _Found) -> ExpertLayer:
        matrices = {}
        for name in ("gate", "up", "down"):
            matrices[name] = self.matrix(name, found)
        gate, up, down = matrices.values()
        if (gate.rows, gate.columns) != (up.rows, up.columns):
            raise self.fault(
                f"block {self.block}: gate is {gate.rows} x {gate.columns}, up is {up.rows} x {up.columns}"
            )
        if down.columns != gate.rows:
            raise self.fault(
                f"block {self.block}: down has {down.columns} columns, gate has {gate.rows} rows"
            )
        counts = {name: sum(piece.count for piece in m.pieces) for name, m in matrices.items()}
        if len(set(counts.values())) > 1:
            raise self.fault(f"block {self.block}: the matrices have different numbers of experts: {counts}")
        return ExpertLayer(self.block, counts["gate"], matrices)

    def matrix(self, name: str, found: _Found) -> ExpertMatrix:
        whole = found.merged.get(name, {})
        both = found.merged.get("gate_up", {}) if name != "down" else {}
        ways = [way for way in (whole.get("weight"), both.get("weight"), found.single.get(name)) if way]
        if not ways:
            raise self.fault(
                f"block {self.block} has experts, but no blk.{self.block}.ffn_{name}_exps.weight"
            )
        if len(ways) > 1:
            raise self.fault(f"block {self.block} holds the {name} matrices of its experts twice")
        if "weight" not in whole:
            # A merged tensor's scale is stored under its own name or under up's.
            kept = {"input_scale", "scale"} if both and name == "up" else {"input_scale"}
            for tensor in (tensor for part, tensor in whole.items() if part not in kept):
                raise self.fault(f"tensor {tensor.name!r} has no weights of its own to go with")
        if "weight" in whole:
            return self.whole(name, whole)
        if "weight" in both:
            parts = dict(both)
            if scale := both.get("scale", found.merged.get("up", {}).get("scale")):
                parts["scale"] = scale
            return self.half(name, parts)
        return self.singles(name, found.single[name])

    def whole(self, name: str, parts: Mapping[str, TensorInfo]) -> ExpertMatrix:
        tensor = parts["weight"]
        experts, rows, columns = self.shape(tensor, 3)
        self.check_experts(tensor, experts)
        piece = Experts(tensor, 0, experts, 0, tensor.nbytes // experts)
        bias, scale = self.extras(parts, experts, rows)
        return ExpertMatrix(name, tensor.qtype, tensor.type_id, rows, columns, (piece,), bias, scale)

    def half(self, name: str, parts: Mapping[str, TensorInfo]) -> ExpertMatrix:
        tensor = parts["weight"]
        experts, both_rows, columns = self.shape(tensor, 3)
        self.check_experts(tensor, experts)
        if both_rows % 2:
            raise self.fault(
                f"tensor {tensor.name!r} has {both_rows} rows, which gate and up cannot share evenly"
            )
        rows, stride, second = both_rows // 2, tensor.nbytes // experts, name == "up"
        piece = Experts(tensor, 0, experts, stride // 2 if second else 0, stride)
        bias, scale = self.extras(parts, experts, both_rows)
        return ExpertMatrix(
            name, tensor.qtype, tensor.type_id, rows, columns, (piece,), bias, scale, rows if second else 0
        )

    def singles(self, name: str, tensors: Mapping[int, TensorInfo]) -> ExpertMatrix:
        for number in range(len(tensors)):
            if number not in tensors:
                raise self.fault(f"blk.{self.block}.ffn_{name}.{number}.weight is missing")
        first = tensors[0]
        rows, columns = self.shape(first, 2)
        self.check_experts(first, len(tensors))
        for tensor in tensors.values():
            if tensor.shape != first.shape:
                raise self.fault(
                    f"tensor {tensor.name!r} is of shape {tensor.shape}, expert 0 of {first.shape}"
                )
            if tensor.type_id != first.type_id:
                raise UnsupportedError(
                    f"{self.file.path}: tensor {tensor.name!r} is {tensor.qtype}, expert 0 is {first.qtype}: "
                    "the experts of a matrix must be of one type"
                )
        pieces = tuple(Experts(tensors[i], i, 1, 0, first.nbytes) for i in range(len(tensors)))
        return ExpertMatrix(name, first.qtype, first.type_id, rows, columns, pieces)

    def shape(self, tensor: TensorInfo, dims: int) -> tuple[int, ...]:
        """The tensor's shape, checked with its type."""
        if tensor.qtype not in self.types and not self.any_type:
            raise UnsupportedError(
                f"{self.file.path}: tensor {tensor.name!r} is {tensor.qtype}, which moepool does not "
                f"compute; it computes {', '.join(self.types)}"
            )
        if len(tensor.shape) != dims:
            raise self.fault(f"tensor {tensor.name!r} of shape {tensor.shape} should have {dims} dimensions")
        return tensor.shape

    def check_experts(self, tensor: TensorInfo, experts: int) -> None:
        architecture = self.file.fields.get("general.architecture")
        told = self.file.fields.get(f"{architecture}.expert_count")
        if told is not None and told != experts:
            raise self.fault(
                f"tensor {tensor.name!r} has {experts} experts, {architecture}.expert_count says {told}"
            )

    def extras(
        self, parts: Mapping[str, TensorInfo], experts: int, rows: int
    ) -> tuple[TensorInfo | None, TensorInfo | None]:
        """The bias and the scale tensor, if there are any."""
        for part, shape in (("bias", (experts, rows)), ("scale", (experts,))):
            tensor = parts.get(part)
            if tensor is not None and tensor.shape != shape:
                raise self.fault(
                    f"tensor {tensor.name!r} is of shape {tensor.shape}, its weights need {shape}"
                )
            if tensor is not None and tensor.qtype not in _FLOATS:
                raise UnsupportedError(
                    f"{self.file.path}: tensor {tensor.name!r} is {tensor.qtype}, not a float type"
                )
        return parts.get("bias"), parts.get("scale")
