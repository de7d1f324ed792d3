"""Mixture-of-experts weights packed in host memory, hot experts in slots on a device.

A :class:`ExpertStore` holds the packed experts of a model's layers, a :class:`Pool` serves one layer from
slots, and :func:`matmul_id` or :class:`ExpertFFN` compute with it. Where an expert lives never changes a bit
of the result.

Messages go to the logger "moepool", which is silent unless the application configures it. Warnings are
:class:`MoePoolWarning`, errors :class:`MoePoolError`.

Examples
--------
>>> store = moepool.ExpertStore.from_gguf(model_path)
>>> pool = moepool.Pool(store[0], slots=16)
>>> ffn = moepool.ExpertFFN(pool)
>>> y = ffn(np.ones((1, 256), np.float32), [[3, 1, 4, 15]], np.full((1, 4), 0.25, np.float32))
>>> y.shape, pool.stats().misses
((1, 256), 4)
"""

from __future__ import annotations

import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from moepool._native import handles
from moepool.cpu import (
    KernelChoice,
    QuantType,
    cpu_kernel_problems,
    cpu_kernels,
    get_threads,
    quant_types,
    set_threads,
    use_cpu_kernel,
)
from moepool.cuda import get_pinned_limit, set_doorbell, set_pinned_limit
from moepool.errors import (
    ArgumentError,
    CudaError,
    DtypeError,
    FormatError,
    IdError,
    MoePoolError,
    MoePoolWarning,
    OutOfMemoryError,
    StateError,
    UnsupportedError,
)
from moepool.ffn import ExpertFFN
from moepool.memory import Memory, memory
from moepool.ops import add, combine, matmul_id, swiglu
from moepool.plan import LayerPlan, Plan, Watermark, make_plan
from moepool.policy import Policy
from moepool.pool import Pool, PoolMatrix, PoolStats, Route
from moepool.pooltrace import PoolTrace, TracedSteps
from moepool.rates import Rates, measure_rates
from moepool.recorder import PoolRecorder, TraceRecorder
from moepool.simulate import Chooser, ChosenPool, Simulation, SimulationRun, simulate
from moepool.store import ExpertStore, Layer, MatrixInfo
from moepool.trace import Trace, TraceInfo, TraceModel, trace_model

__all__ = [
    "ArgumentError",
    "Chooser",
    "ChosenPool",
    "CudaError",
    "DtypeError",
    "ExpertFFN",
    "ExpertStore",
    "FormatError",
    "IdError",
    "KernelChoice",
    "Layer",
    "LayerPlan",
    "MatrixInfo",
    "Memory",
    "MoePoolError",
    "MoePoolWarning",
    "OutOfMemoryError",
    "Plan",
    "Policy",
    "Pool",
    "PoolMatrix",
    "PoolRecorder",
    "PoolStats",
    "PoolTrace",
    "QuantType",
    "Rates",
    "Route",
    "Simulation",
    "SimulationRun",
    "StateError",
    "Trace",
    "TraceInfo",
    "TraceModel",
    "TraceRecorder",
    "TracedSteps",
    "UnsupportedError",
    "Watermark",
    "__version__",
    "add",
    "build_info",
    "combine",
    "cpu_kernel_problems",
    "cpu_kernels",
    "get_include",
    "get_pinned_limit",
    "get_threads",
    "make_plan",
    "matmul_id",
    "measure_rates",
    "memory",
    "quant_types",
    "set_doorbell",
    "set_pinned_limit",
    "set_threads",
    "simulate",
    "swiglu",
    "trace_model",
    "use_cpu_kernel",
]

__version__ = metadata.version("moepool")

logging.getLogger("moepool").addHandler(logging.NullHandler())


def build_info() -> dict[str, Any]:
    """What this build of moepool is: version, compiler, flags, CUDA toolkit (None without), CPU kernel sets.

    Returns
    -------
    dict

    Examples
    --------
    >>> sorted({"version", "compiler", "cuda"} - moepool.build_info().keys())
    []
    """
    info: dict[str, Any] = json.loads(handles.build_info())
    return info


def get_include() -> str:
    """The folder of `moepool.h`, for programs that use the C interface.

    Returns
    -------
    str

    Examples
    --------
    >>> (Path(moepool.get_include()) / "moepool.h").exists()
    True
    """
    return str(Path(__file__).parent / "include")
