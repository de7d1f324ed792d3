"""Expert layers in ggml, through the libraries that the package llama-cpp-python installs.

The package itself is not imported. Tensors and graphs are made as llama.cpp makes them (`build_moe_ffn`), all
layers of a step in one graph. Everything but `ggml_init_params` is an opaque pointer here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from bench.workload import F32, I32
from tests import cases

REMEDY = "pip install llama-cpp-python, which compiles it for this machine, or --libraries FOLDER"

_F32, _I32 = 0, 26  # ggml_type
_CPU = 0  # ggml_backend_dev_type


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_silent = _Log(lambda level, text, data: None)

# What each function gives and takes. A pointer is c_void_p: with the default, int, it would be cut in half.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_log_set": (None, _Log, c_void_p),
    "ggml_version": (c_char_p,),
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_new_tensor_3d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64),
    "ggml_view_2d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_cont": (c_void_p, c_void_p, c_void_p),
    "ggml_add": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_swiglu_split": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_set_output": (None, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_gallocr_new": (c_void_p, c_void_p),
    "ggml_gallocr_alloc_graph": (c_bool, c_void_p, c_void_p),
    "ggml_gallocr_free": (None, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
    "ggml_backend_dev_init": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_dev_buffer_type": (c_void_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_dev_backend_reg": (c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_load_all_from_path": (None, c_char_p),
    "ggml_backend_dev_by_type": (c_void_p, c_int),
}


def installed() -> Path:
    """Where the package keeps its libraries, or the error that there is none."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise click.ClickException(f"this needs ggml from the package llama-cpp-python: {REMEDY}")
    return Path(spec.origin).parent / "lib"


class Ggml:
    """ggml and its CPU backend.

    Attributes
    ----------
    lib : namespace
        The functions of `_FUNCTIONS`.
    version : str
    buffer_types : dict
        Where weights can lie, by ggml's name: first "CPU", as in the file, then those in which llama.cpp
        packs them anew by itself when the type and the machine allow it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = installed() if folder is None else folder
        try:
            self.lib = _declared(folder / "libggml.so", _FUNCTIONS)
        except (OSError, AttributeError) as error:
            raise click.ClickException(f"no usable ggml in {folder}: {error}; {REMEDY}") from None
        self.version = str(self.lib.ggml_version().decode())
        self.lib.ggml_log_set(_silent, None)  # or it tells of each tensor that it packs anew
        device = self.lib.ggml_backend_dev_by_type(_CPU)
        if not device:  # built with its backends as plugins
            self.lib.ggml_backend_load_all_from_path(os.fsencode(folder))
            self.lib.ggml_log_set(_silent, None)  # or it tells of each tensor that it packs anew
        device = self.lib.ggml_backend_dev_by_type(_CPU)
        if not device:
            raise click.ClickException(f"the ggml in {folder} has no CPU backend; {REMEDY}")
        self.device = device
        self.backend = self.lib.ggml_backend_dev_init(device, None)
        plain = self.lib.ggml_backend_dev_buffer_type(device)
        self.buffer_types = {self._name(buft): buft for buft in (plain, *self._extra_buffer_types())}

    def _name(self, buft: int) -> str:
        return str(self.lib.ggml_backend_buft_name(buft).decode())

    def _function(self, name: bytes, *types: Any) -> Any:
        """One that backends offer by name, None if this one does not."""
        registry = self.lib.ggml_backend_dev_backend_reg(self.device)
        address = self.lib.ggml_backend_reg_get_proc_address(registry, name)
        return ctypes.CFUNCTYPE(*types)(address) if address else None

    def _extra_buffer_types(self) -> list[int]:
        get = self._function(b"ggml_backend_dev_get_extra_bufts", POINTER(c_void_p), c_void_p)
        found: list[int] = []
        types = get(self.device) if get else None
        while types and types[len(found)]:
            found.append(types[len(found)])
        return found

    def set_threads(self, threads: int) -> None:
        """How many threads a step is computed with, the caller's included."""
        set_threads = self._function(b"ggml_backend_set_n_threads", None, c_void_p, c_int)
        set_threads(self.backend, threads)

    def features(self) -> str:
        """What the CPU backend was compiled with, as it says itself."""

        class Feature(ctypes.Structure):
            _fields_ = (("name", c_char_p), ("value", c_char_p))

        get = self._function(b"ggml_backend_get_features", POINTER(Feature), c_void_p)
        features = get(self.lib.ggml_backend_dev_backend_reg(self.device)) if get else None
        names: list[str] = []
        while features and features[len(names)].name:
            names.append(features[len(names)].name.decode())
        return " ".join(names)

    def close(self) -> None:
        self.lib.ggml_backend_free(self.backend)


def _declared(path: Path, functions: Mapping[str, tuple[Any, ...]]) -> Any:
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Weights:
    """The experts of some layers, each in memory of its own, all of the same blocks.

    Parameters
    ----------
    ggml : Ggml
    ffn : cases.Ffn
    blocks : mapping
        Raw blocks of "gate", "up" and "down".
    layers : int
    buffer_type : str
        One of `ggml.buffer_types`.

    Raises
    ------
    NotSupported
        ggml does not keep such weights in this buffer type.
    """

    def __init__(
        self,
        ggml: Ggml,
        ffn: cases.Ffn,
        blocks: Mapping[str, NDArray[np.uint8]],
        layers: int,
        buffer_type: str,
    ) -> None:
        self.ggml, self.ffn = ggml, ffn
        lib = ggml.lib
        self._context = lib.ggml_init(_InitParams(lib.ggml_tensor_overhead() * (4 * layers + 8), None, True))
        self._buffer = None
        sizes = {
            "gate": (ffn.hidden, ffn.width),
            "up": (ffn.hidden, ffn.width),
            "down": (ffn.width, ffn.hidden),
        }
        types = {"gate": ffn.gate, "up": ffn.up, "down": ffn.down}
        self.layers = [
            {
                part: lib.ggml_new_tensor_3d(
                    self._context, cases.LAYOUTS[types[part]].id, columns, rows, ffn.experts
                )
                for part, (columns, rows) in sizes.items()
            }
            for _ in range(layers)
        ]
        self._buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(
            self._context, ggml.buffer_types[buffer_type]
        )
        if not self._buffer:
            self.close()
            raise click.ClickException(f"ggml has no memory for {layers} layers of {ffn.gate}")
        if not all(self._supported(tensor, sizes[part][0]) for part, tensor in self.layers[0].items()):
            self.close()
            raise NotSupported(buffer_type)
        for layer in self.layers:
            for part, tensor in layer.items():
                data = np.ascontiguousarray(blocks[part])
                assert data.nbytes == lib.ggml_nbytes(tensor)
                lib.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def _supported(self, tensor: int, columns: int) -> bool:
        """As llama.cpp asks it of a buffer type before it puts a tensor there."""
        lib, k = self.ggml.lib, self.ffn.k
        context = lib.ggml_init(_InitParams(lib.ggml_tensor_overhead() * 8, None, True))
        x = lib.ggml_new_tensor_3d(context, _F32, columns, k, 512)
        ids = lib.ggml_new_tensor_2d(context, _I32, k, 512)
        op = lib.ggml_mul_mat_id(context, tensor, x, ids)
        supported = bool(lib.ggml_backend_dev_supports_op(self.ggml.device, op))
        lib.ggml_free(context)
        return supported

    def close(self) -> None:
        if self._buffer:
            self.ggml.lib.ggml_backend_buffer_free(self._buffer)
        self.ggml.lib.ggml_free(self._context)


class NotSupported(Exception):
    """ggml does not keep such weights in this buffer type."""


class Step:
    """All layers for so many tokens, in one graph.

    Parameters
    ----------
    weights : Weights
    tokens : int
    """

    def __init__(self, weights: Weights, tokens: int) -> None:
        ggml, ffn = weights.ggml, weights.ffn
        lib = self._lib = ggml.lib
        self._backend = ggml.backend
        layers = len(weights.layers)
        nodes = layers * (2 * ffn.k + 8)
        memory = lib.ggml_tensor_overhead() * (nodes + 8) + lib.ggml_graph_overhead_custom(2 * nodes, False)
        self._context = lib.ggml_init(_InitParams(memory, None, True))
        self._inputs = lib.ggml_init(_InitParams(lib.ggml_tensor_overhead() * (layers + 8), None, True))
        self._x = lib.ggml_new_tensor_3d(self._inputs, _F32, ffn.hidden, 1, tokens)
        self._router = lib.ggml_new_tensor_3d(self._inputs, _F32, 1, ffn.k, tokens)
        self._ids = [lib.ggml_new_tensor_2d(self._inputs, _I32, ffn.k, tokens) for _ in weights.layers]
        plain = lib.ggml_backend_dev_buffer_type(ggml.device)
        self._buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self._inputs, plain)
        self._graph = lib.ggml_new_graph_custom(self._context, 2 * nodes, False)
        self._outputs = [
            self._layer(layer, ids, ffn, tokens) for layer, ids in zip(weights.layers, self._ids, strict=True)
        ]
        self._allocator = lib.ggml_gallocr_new(plain)
        assert lib.ggml_gallocr_alloc_graph(self._allocator, self._graph)
        self._shape = (tokens, ffn.hidden)

    def _layer(self, weights: Mapping[str, int], ids: int, ffn: cases.Ffn, tokens: int) -> int:
        lib, context = self._lib, self._context
        up = lib.ggml_mul_mat_id(context, weights["up"], self._x, ids)
        gate = lib.ggml_mul_mat_id(context, weights["gate"], self._x, ids)
        hidden = lib.ggml_swiglu_split(context, gate, up)
        rows = lib.ggml_mul_mat_id(context, weights["down"], hidden, ids)
        rows = lib.ggml_mul(context, rows, self._router)
        lib.ggml_build_forward_expand(self._graph, rows)
        row = 4 * ffn.hidden
        places = [
            lib.ggml_view_2d(context, rows, ffn.hidden, tokens, row * ffn.k, row * place)
            for place in range(ffn.k)
        ]
        for place in places:  # the views before the sums, as there
            lib.ggml_build_forward_expand(self._graph, place)
        y: int = places[0]
        for place in places[1:]:
            y = lib.ggml_add(context, y, place)
        if ffn.k == 1:
            y = lib.ggml_cont(context, y)
        lib.ggml_set_output(y)
        lib.ggml_build_forward_expand(self._graph, y)
        return y

    def set_activations(self, x: F32, router: F32) -> None:
        """x (T, hidden) of every layer, router weights (T, k)."""
        self._set(self._x, x)
        self._set(self._router, router)

    def set_ids(self, ids: Sequence[I32] | I32) -> None:
        """(T, k) for each layer."""
        for tensor, values in zip(self._ids, ids, strict=True):
            self._set(tensor, values)

    def _set(self, tensor: int, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values)
        assert values.nbytes == self._lib.ggml_nbytes(tensor)
        self._lib.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def compute(self) -> None:
        status = self._lib.ggml_backend_graph_compute(self._backend, self._graph)
        if status:
            raise click.ClickException(f"ggml could not compute a step: status {status}")

    def result(self, layer: int) -> F32:
        """(T, hidden) of the last step."""
        y = np.empty(self._shape, np.float32)
        self._lib.ggml_backend_tensor_get(self._outputs[layer], y.ctypes.data, 0, y.nbytes)
        return y

    def close(self) -> None:
        self._lib.ggml_gallocr_free(self._allocator)
        self._lib.ggml_backend_buffer_free(self._buffer)
        self._lib.ggml_free(self._context)
        self._lib.ggml_free(self._inputs)
