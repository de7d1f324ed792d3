"""Errors, warnings, the logger, and what an import does."""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import moepool
from moepool import errors
from moepool._native import handles
from tests.programs import run

PARENTS = {
    moepool.ArgumentError: ValueError,
    moepool.DtypeError: TypeError,
    moepool.IdError: IndexError,
    moepool.OutOfMemoryError: MemoryError,
    moepool.CudaError: RuntimeError,
    moepool.FormatError: ValueError,
    moepool.UnsupportedError: RuntimeError,
    moepool.StateError: RuntimeError,
}


def test_every_error_has_two_parents() -> None:
    for error, parent in PARENTS.items():
        assert issubclass(error, moepool.MoePoolError)
        assert issubclass(error, parent)
    assert issubclass(moepool.DtypeError, moepool.ArgumentError)
    assert issubclass(moepool.MoePoolWarning, UserWarning)


def test_errors_of_the_core_come_with_its_message() -> None:
    """Each handle is left as it was."""
    store = handles.StoreHandle()
    with pytest.raises(moepool.ArgumentError, match="at least one expert, not 0"):
        store.add_layer(0, [handles.MatrixSpec(8, 4, 32, False, False)])
    with pytest.raises(moepool.UnsupportedError, match="type 9999"):
        store.add_layer(1, [handles.MatrixSpec(9999, 4, 32, False, False)])
    assert store.add_layer(1, [handles.MatrixSpec(8, 4, 32, False, False)]) == 0
    store.seal()
    with pytest.raises(moepool.StateError, match="sealed"):
        store.add_layer(1, [handles.MatrixSpec(8, 4, 32, False, False)])
    store.close()


def test_memory_that_the_system_refuses_is_an_error() -> None:
    """In a process that may not take more than a little."""
    code = (
        "import resource, numpy as np, moepool\n"
        "blocks = np.broadcast_to(np.zeros((1, 1024, 1088), np.uint8), (512, 1024, 1088))\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))\n"
        "try:\n    moepool.ExpertStore.from_arrays(weight=blocks, qtype='q8_0')\n"
        "except moepool.OutOfMemoryError as error:\n    print(error)\n"
    )
    assert "bytes for packed experts were refused" in run(sys.executable, "-c", code)


def test_unknown_statuses_are_plain_errors() -> None:
    for status in (8, 77):
        assert type(errors.from_status(status, "x")) is moepool.MoePoolError


def test_a_warning_points_at_the_line_outside_the_package() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.warn("careful")
    assert [(w.filename, w.category, str(w.message)) for w in caught] == [
        (__file__, moepool.MoePoolWarning, "careful")
    ]


def test_the_logger_is_silent_until_configured(caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import numpy as np, moepool\n"
        "store = moepool.ExpertStore.from_arrays(weight=np.ones((2, 4, 32), np.float32), qtype='q8_0')\n"
        "moepool.Pool(store[0], 1)\n"
    )
    assert run(sys.executable, "-c", code) == ""
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("moepool").handlers)
    with caplog.at_level(logging.INFO, "moepool"):
        store = moepool.ExpertStore.from_arrays(weight=np.ones((2, 4, 32), np.float32), qtype="q8_0")
        moepool.Pool(store[0], 1)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "packed <ExpertStore",
        "made <Pool of block 0 on cpu",
    ]


# ---------------------------------------------------------------------------------------------------- package


def test_everything_public_is_exported() -> None:
    for name in moepool.__all__:
        assert hasattr(moepool, name), name
    public = {
        name
        for name, value in vars(moepool).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in ("annotations", "Any", "Path")
    }
    assert public == set(moepool.__all__) - {"__version__"}


def test_version_and_build() -> None:
    assert moepool.__version__ == metadata.version("moepool") == moepool.build_info()["version"]
    header = Path(moepool.get_include()) / "moepool.h"
    assert "moepool_store_create" in header.read_text()


def test_an_import_brings_in_nothing_heavy() -> None:
    """No array library, no tokenizer, no progress bar, no NVML: only NumPy and the binding."""
    code = "import sys, moepool; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": ""}).split()
    assert not {"gguf", "tqdm", "tokenizers", "torch", "cupy", "pynvml", "click"} & set(loaded)
