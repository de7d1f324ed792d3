"""The store: the packed experts of a model's layers in host memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moepool import arrays, checks
from moepool._native.handles import MatrixSpec, StoreHandle
from moepool.cpu import QuantType, quant_types
from moepool.errors import (
    ArgumentError,
    FormatError,
    IdError,
    OutOfMemoryError,
    StateError,
    UnsupportedError,
    warn,
)
from moepool.memory import cpu_memory

if TYPE_CHECKING:
    from moepool.gguf import Experts, GGUFFile

__all__ = ["ExpertStore", "Layer", "MatrixInfo"]

log = logging.getLogger("moepool")

# Packed in one call: enough for every thread, little enough for a progress bar to move.
_BATCH_BYTES = 64 << 20

_FFN = ("gate", "up", "down")


@dataclass(frozen=True)
class MatrixInfo:
    """One matrix of every expert of a layer.

    Attributes
    ----------
    name : str
        "gate", "up", "down" or "weight".
    qtype : str
        A key of :func:`moepool.quant_types`.
    rows, columns : int
        Outputs (N) and inputs (K).
    bias, scale : bool
        Whether each expert has a bias of N numbers, and a scale.
    """

    name: str
    qtype: str
    rows: int
    columns: int
    bias: bool = False
    scale: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer of a store, from which a :class:`Pool` is made.

    Attributes
    ----------
    index : int
        Its place in the store.
    block : int
        The number of its block in the GGUF file; of :meth:`ExpertStore.from_arrays` 0.
    experts : int
    matrices : dict of str to MatrixInfo
        In the order of the record.
    record_bytes : int
        Bytes of one expert: what a slot takes and a miss copies. A multiple of 256.
    bytes : int
        Bytes of all experts of the layer.
    """

    index: int
    block: int
    experts: int
    matrices: dict[str, MatrixInfo]
    record_bytes: int
    bytes: int
    _store: StoreHandle = field(repr=False, compare=False)

    @property
    def pinned_bytes(self) -> int:
        """How many of its bytes are page-locked now. Its first pool on a CUDA device does that."""
        return self._store.layer(self.index)["pinned_bytes"]


# --------------------------------------------------------------------------------------- what is to be packed


@dataclass(frozen=True)
class _Piece:
    """The blocks of some consecutive experts: the first begins at `offset` of `blocks()`, the next `stride`
    bytes on."""

    source: str
    first: int
    count: int
    blocks: Callable[[], npt.NDArray[np.uint8]]
    offset: int
    stride: int
    done: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Matrix:
    info: MatrixInfo
    pieces: Sequence[_Piece]
    biases: npt.NDArray[np.float32] | None
    scales: npt.NDArray[np.float32] | None


@dataclass(frozen=True)
class _Plan:
    block: int
    experts: int
    matrices: Sequence[_Matrix]


class ExpertStore:
    """The experts of any number of layers, packed in host memory. Made by :meth:`from_gguf` or
    :meth:`from_arrays`.

    It is a sequence of :class:`Layer`, and a context manager that closes it. Any number of threads may use
    it. A pool keeps the memory it needs alive, so a store may be closed while pools are in use.

    Examples
    --------
    >>> with moepool.ExpertStore.from_gguf(model_path) as store:
    ...     for layer in store:
    ...         print(layer.block, layer.experts, layer.matrices["down"].qtype)
    0 32 q4_k
    1 32 q4_k
    2 32 q6_k
    3 32 q6_k
    """

    def __init__(self, handle: StoreHandle, layers: Sequence[Layer]) -> None:
        self._handle = handle
        self._layers = list(layers)

    # ------------------------------------------------------------------------------------------- construction

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        *,
        progress: bool | None = None,
        layers: Iterable[int] | None = None,
    ) -> ExpertStore:
        """Loads the experts of a GGUF model and packs them.

        The whole file is checked before anything is packed. The file is mapped, and its pages are given back
        as they are packed, so that loading takes little more memory than the store itself.

        Parameters
        ----------
        path : str or PathLike
            The file; of a split model any shard.
        progress : bool, optional
            Whether to show a progress bar on stderr. None shows one if stderr is a terminal.
        layers : iterable of int, optional
            The numbers of the blocks to load, in any order; the store has them in rising order. None loads
            every block that has experts.

        Returns
        -------
        ExpertStore

        Raises
        ------
        OSError
            The file cannot be opened.
        FormatError
            The file is damaged or contradicts itself, or has no experts; the message names the tensor.
        UnsupportedError
            An expert tensor is of a type that moepool does not compute with.
        ArgumentError
            `layers` names a block that has no experts.
        OutOfMemoryError
            The experts take more than the host or the process's control group has; the message says how much.

        Warns
        -----
        MoePoolWarning
            The file holds expert tensors of an unknown kind, which are not read; or the experts take more
            memory than is free.

        Examples
        --------
        >>> store = moepool.ExpertStore.from_gguf(model_path, layers=[2])
        >>> len(store), store[0].block
        (1, 2)
        """
        # Here, so that importing moepool stays quick.
        from moepool.gguf import GGUFFile, expert_layers

        with GGUFFile(path) as file:
            found = {layer.block: layer for layer in expert_layers(file)}
            if not found:
                raise FormatError(f"{path}: no expert tensors: this is not a mixture-of-experts model")
            wanted = sorted(found if layers is None else _blocks(layers))
            if missing := [block for block in wanted if block not in found]:
                raise ArgumentError(
                    f"layers names {missing}, but the blocks with experts are {sorted(found)}"
                )
            plans = []
            for layer in (found[block] for block in wanted):
                matrices = []
                for matrix in layer.matrices.values():
                    pieces = [_file_piece(file, part) for part in matrix.pieces]
                    info = MatrixInfo(
                        matrix.name, matrix.qtype, matrix.rows, matrix.columns, matrix.bias, matrix.scale
                    )
                    matrices.append(_Matrix(info, pieces, matrix.biases(), matrix.scales()))
                plans.append(_Plan(layer.block, layer.experts, matrices))
            return cls._pack(plans, progress)

    @classmethod
    def from_arrays(
        cls,
        *,
        gate: Any = None,
        up: Any = None,
        down: Any = None,
        weight: Any = None,
        qtype: str | Mapping[str, str],
        bias: Mapping[str, Any] | None = None,
        scale: Mapping[str, Any] | None = None,
        progress: bool | None = False,
    ) -> ExpertStore:
        """Packs one layer from arrays: gate, up and down of an FFN, or a single matrix named "weight".

        Parameters
        ----------
        gate, up, down, weight : array
            In host memory, of E experts. Either raw ggml blocks, uint8 of shape (E, N, row bytes), or
            numbers, float32, float16 or bfloat16 of shape (E, N, K), which the `gguf` package quantises.
        qtype : str, or mapping of str to str
            A key of :func:`moepool.quant_types` for all matrices, or one for each by name.
        bias : mapping of str to array, optional
            By matrix name, float numbers of shape (E, N), added to the outputs.
        scale : mapping of str to array, optional
            By matrix name, float numbers of shape (E,), which the outputs are multiplied by before the bias.
        progress : bool, optional
            As in :meth:`from_gguf`.

        Returns
        -------
        ExpertStore
            Of one layer.

        Raises
        ------
        ArgumentError
            The matrices given are no layer, or shapes do not fit together; the message names the array.
        DtypeError
            An array is of another dtype.
        UnsupportedError
            The `gguf` package cannot quantise numbers to this type: hand in raw blocks.
        FormatError
            A block's scale is not finite; or numbers hold NaN or infinity, or are too large for `qtype`. The
            message names the matrix, the expert and the row.
        OutOfMemoryError

        Examples
        --------
        >>> weight = np.random.default_rng(0).standard_normal((4, 32, 64), dtype=np.float32)
        >>> store = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")
        >>> store[0].matrices["weight"]
        MatrixInfo(name='weight', qtype='q8_0', rows=32, columns=64, bias=False, scale=False)
        """
        given = {
            name: array
            for name, array in (("gate", gate), ("up", up), ("down", down), ("weight", weight))
            if array is not None
        }
        if tuple(given) not in (_FFN, ("weight",)):
            raise ArgumentError(
                f"a layer is gate, up and down, or weight alone; given is {', '.join(given) or 'nothing'}"
            )
        if not isinstance(qtype, str):
            checks.named("qtype", qtype, "a key of moepool.quant_types(), or a dict of them by matrix name")
        name = next(iter(given))
        biases, scales = (
            {} if array is None else dict(checks.named(what, array, f"a dict: {what}={{{name!r}: array}}"))
            for what, array in (("bias", bias), ("scale", scale))
        )
        for what, named in (
            ("qtype", {} if isinstance(qtype, str) else qtype),
            ("bias", biases),
            ("scale", scales),
        ):
            if unknown := [name for name in named if name not in given]:
                raise ArgumentError(f"{what} names {unknown[0]!r}, which is not one of {', '.join(given)}")
        matrices = []
        for name, array in given.items():
            kind = _quant_type(name, qtype)
            source = arrays.host_array(array, name, ("uint8", *arrays.FLOATS))
            experts, rows, columns = _matrix_shape(name, source, kind)
            matrices.append(
                _Matrix(
                    MatrixInfo(name, kind.name, rows, columns, name in biases, name in scales),
                    _array_pieces(name, source, kind),
                    arrays.floats(biases[name], f"bias[{name!r}]", (experts, rows), "(experts, rows)")
                    if name in biases
                    else None,
                    arrays.floats(scales[name], f"scale[{name!r}]", (experts,), "(experts,)")
                    if name in scales
                    else None,
                )
            )
        counts = {m.info.name: sum(piece.count for piece in m.pieces) for m in matrices}
        if len(set(counts.values())) > 1:
            raise ArgumentError(f"the matrices have different numbers of experts: {counts}")
        if len(matrices) == len(_FFN):
            _check_ffn(*(m.info for m in matrices))
        return cls._pack([_Plan(0, next(iter(counts.values())), matrices)], progress)

    @classmethod
    def _pack(cls, plans: Sequence[_Plan], progress: bool | None) -> ExpertStore:
        from tqdm import tqdm

        types = quant_types()
        sizes = [
            [m.info.rows * types[m.info.qtype].row_bytes(m.info.columns) for m in plan.matrices]
            for plan in plans
        ]
        total = sum(plan.experts * sum(size) for plan, size in zip(plans, sizes, strict=True))
        _check_memory(total)
        handle = StoreHandle()
        try:
            for plan in plans:
                specs = [
                    MatrixSpec(types[m.info.qtype].id, m.info.rows, m.info.columns, m.info.bias, m.info.scale)
                    for m in plan.matrices
                ]
                handle.add_layer(plan.experts, specs)
            with tqdm(
                total=total,
                desc="packing experts",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=None if progress is None else not progress,
            ) as bar:
                for i, plan in enumerate(plans):
                    for j, matrix in enumerate(plan.matrices):
                        _pack_matrix(handle, i, j, matrix, sizes[i][j], bar.update)
            handle.seal()
            layers = []
            for i, plan in enumerate(plans):
                facts = handle.layer(i)
                matrices = {m.info.name: m.info for m in plan.matrices}
                record, whole = facts["record_bytes"], facts["bytes"]
                layers.append(Layer(i, plan.block, plan.experts, matrices, record, whole, handle))
        except BaseException:
            # Now, not when the traceback that holds this frame is dropped: it may be tens of gigabytes.
            handle.close()
            raise
        store = cls(handle, layers)
        log.info("packed %r", store)
        return store

    # ---------------------------------------------------------------------------------------------------- use

    def __len__(self) -> int:
        return len(self._open())

    def __getitem__(self, index: int) -> Layer:
        layers = self._open()
        try:
            return layers[index]
        except IndexError:
            blocks = [layer.block for layer in layers]
            counted = blocks == list(range(len(layers)))
            raise IdError(
                f"the store has no layer {index}, only 0 to {len(layers) - 1}"
                + ("" if counted else f", which are the blocks {', '.join(map(str, blocks))}")
            ) from None

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._open())

    def _open(self) -> list[Layer]:
        if self._handle.closed:
            raise StateError("the store is closed")
        return self._layers

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._handle.closed

    @property
    def bytes(self) -> int:
        """Bytes of all layers in host memory."""
        return sum(layer.bytes for layer in self._open())

    def unpack(self, layer: int, name: str, expert: int) -> npt.NDArray[np.uint8]:
        """The ggml blocks of one expert, the very bytes that were packed.

        Parameters
        ----------
        layer : int
            Index of the layer in the store.
        name : str
            Name of the matrix.
        expert : int

        Returns
        -------
        numpy.ndarray
            uint8 (N, row bytes), the caller's own.

        Raises
        ------
        IndexError
            There is no such layer.
        ArgumentError
            There is no such matrix or expert.
        StateError
            The store is closed.

        Examples
        --------
        >>> blocks = np.arange(2 * 3 * 34, dtype=np.uint8).reshape(2, 3, 34)
        >>> store = moepool.ExpertStore.from_arrays(weight=blocks, qtype="q8_0")
        >>> bool((store.unpack(0, "weight", 1) == blocks[1]).all())
        True
        """
        of = self[layer]
        if name not in of.matrices:
            raise ArgumentError(f"layer {layer} has no matrix {name!r}, only {', '.join(of.matrices)}")
        if not 0 <= expert < of.experts:
            raise ArgumentError(f"layer {layer} has experts 0 to {of.experts - 1}, not {expert}")
        info = of.matrices[name]
        out = np.empty((info.rows, quant_types()[info.qtype].row_bytes(info.columns)), np.uint8)
        self._handle.unpack(of.index, list(of.matrices).index(name), expert, out)
        return out

    def close(self) -> None:
        """Lets go of the memory, or leaves it to the pools that still use it. May be called twice.

        After it every use of the store is a :class:`StateError`.
        """
        self._handle.close()

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<ExpertStore, closed>"
        return f"<ExpertStore: {len(self)} layers, {self.bytes / 2**20:.1f} MiB>"


def _check_memory(needed: int) -> None:
    """Refuses what can never fit. The system would let it begin, and end the process somewhere in the
    middle."""
    try:
        host = cpu_memory()
    except UnsupportedError:
        return
    if needed > host.total:
        raise OutOfMemoryError(
            f"the packed experts take {needed} bytes or more, but this process can have {host.total} at most "
            f"({host.source}): load fewer layers, or a smaller quantisation"
        )
    if needed > host.free:
        warn(f"the packed experts take {needed} bytes or more, but only {host.free} are free ({host.source})")


def _pack_matrix(
    handle: StoreHandle, layer: int, index: int, matrix: _Matrix, size: int, advance: Callable[[int], object]
) -> None:
    batch = max(1, _BATCH_BYTES // size)
    for piece in matrix.pieces:
        blocks = piece.blocks()
        address = blocks.__array_interface__["data"][0] + piece.offset
        for start in range(0, piece.count, batch):
            count = min(batch, piece.count - start)
            try:
                handle.pack(
                    layer, index, piece.first + start, count, address + start * piece.stride, piece.stride
                )
            except FormatError as error:
                raise FormatError(f"{piece.source}: {error}") from None
            advance(count * size)
        piece.done()
    if matrix.biases is not None:
        for expert, bias in enumerate(matrix.biases):
            handle.set_bias(layer, index, expert, bias)
    if matrix.scales is not None:
        for expert in range(len(matrix.scales)):
            handle.set_scale(layer, index, expert, matrix.scales[expert : expert + 1])


# ----------------------------------------------------------------------------------- from a file, from arrays


def _file_piece(file: GGUFFile, part: Experts) -> _Piece:
    tensor = part.tensor
    return _Piece(
        f"{tensor.path}: tensor {tensor.name!r}",
        part.first,
        part.count,
        lambda: tensor.data,
        part.offset,
        part.stride,
        lambda: file.release(tensor),
    )


def _quant_type(name: str, qtype: str | Mapping[str, str]) -> QuantType:
    """The type of the matrix `name`."""
    known = quant_types()
    wanted = qtype if isinstance(qtype, str) else qtype.get(name)
    if wanted is None:
        raise ArgumentError(f"qtype says nothing about {name!r}")
    if wanted not in known:
        raise ArgumentError(f"the qtype {wanted!r} of {name} is none of {', '.join(known)}")
    return known[wanted]


def _matrix_shape(name: str, source: arrays.HostArray, kind: QuantType) -> tuple[int, int, int]:
    """Experts, rows and columns of an array of raw blocks or of numbers."""
    shape = source.values.shape
    raw = source.dtype == "uint8"
    if len(shape) != 3 or 0 in shape:
        last = "row bytes" if raw else "columns"
        raise ArgumentError(f"{name} is of shape {shape}; it must be (experts, rows, {last}), none of them 0")
    whole = kind.block_bytes if raw else kind.block
    if shape[2] % whole:
        unit = "bytes" if raw else "columns"
        raise ArgumentError(
            f"{name} has rows of {shape[2]} {unit}, not whole {kind.name} blocks of {whole} {unit}"
        )
    return shape[0], shape[1], shape[2] // whole * kind.block


def _array_pieces(name: str, source: arrays.HostArray, kind: QuantType) -> list[_Piece]:
    values = source.values
    if source.dtype == "uint8" and values.flags.c_contiguous:
        return [_Piece(name, 0, len(values), lambda: values, 0, values[0].nbytes)]

    # One expert at a time, so that no second copy of the layer comes into being.
    def piece(expert: int) -> _Piece:
        return _Piece(f"{name}[{expert}]", expert, 1, lambda: blocks(expert), 0, 0)

    if source.dtype == "uint8":

        def blocks(expert: int) -> npt.NDArray[np.uint8]:
            return np.ascontiguousarray(values[expert])
    else:
        quantise = _quantiser(name, kind)

        def blocks(expert: int) -> npt.NDArray[np.uint8]:
            return quantise(source.float32(expert), expert)

    return [piece(expert) for expert in range(len(values))]


def _blocks(layers: Iterable[int]) -> set[int]:
    """The numbers of blocks that a caller asks for."""
    if not isinstance(layers, Iterable) or isinstance(layers, str):
        raise ArgumentError(f"layers is {layers!r}; it must be the numbers of blocks, [{layers}] for one")
    return {checks.integer(f"layers[{i}]", block) for i, block in enumerate(layers)}


def _quantiser(name: str, kind: QuantType) -> Callable[[npt.NDArray[np.float32], int], npt.NDArray[np.uint8]]:
    """Turns the float32 (N, K) of an expert, whose number is for messages, into blocks, uint8 (N, row
    bytes)."""
    from gguf import GGMLQuantizationType, quants

    def quantise(values: npt.NDArray[np.float32], expert: int) -> npt.NDArray[np.uint8]:
        # The package would make some number of NaN, and that of an infinity is lost in types without a float
        # scale.
        _check_finite(values, name, expert, "NaN or infinity: replace it, with numpy.nan_to_num for example")
        # A block scale that is too large for its type is refused when it is packed.
        with np.errstate(all="ignore"):
            blocks = quants.quantize(values, GGMLQuantizationType(kind.id))
            if kind.name in ("f16", "bf16"):
                stored = quants.dequantize(blocks, GGMLQuantizationType(kind.id))
                _check_finite(
                    stored, name, expert, f"a number too large for {kind.name}: scale the weights, or use f32"
                )
        return np.ascontiguousarray(blocks).view(np.uint8)

    try:
        quantise(np.zeros((1, kind.block), np.float32), 0)
    except (NotImplementedError, ValueError):
        raise UnsupportedError(
            f"{name}: the gguf package cannot quantise numbers to {kind.name}; hand in raw blocks, "
            "uint8 of shape (experts, rows, row bytes), made by llama.cpp for example"
        ) from None
    return quantise


def _check_finite(values: npt.NDArray[np.float32], name: str, expert: int, what: str) -> None:
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise FormatError(f"{name}: expert {expert}, row {int(finite.argmin())}: holds {what}")


def _check_ffn(gate: MatrixInfo, up: MatrixInfo, down: MatrixInfo) -> None:
    if (gate.rows, gate.columns) != (up.rows, up.columns):
        raise ArgumentError(f"gate is {gate.rows} x {gate.columns}, but up is {up.rows} x {up.columns}")
    if down.columns != gate.rows:
        raise ArgumentError(f"down has {down.columns} columns, but gate has {gate.rows} rows")
