"""The errors and warnings of moepool.

Every error is a :class:`MoePoolError` and also the built-in error that fits it, so a caller may catch either.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

__all__ = [
    "ArgumentError",
    "CudaError",
    "DtypeError",
    "FormatError",
    "IdError",
    "MoePoolError",
    "MoePoolWarning",
    "OutOfMemoryError",
    "StateError",
    "UnsupportedError",
]


class MoePoolError(Exception):
    """Base of every error that moepool raises on purpose."""


class ArgumentError(MoePoolError, ValueError):
    """A value, a shape, a size or a device does not fit the call. Nothing was changed."""


class DtypeError(ArgumentError, TypeError):
    """An array holds numbers of a type that the call does not take; the message names the remedy."""


class IdError(MoePoolError, IndexError):
    """An expert id lies outside [-1, experts), or there is no such layer; the message gives the id and its
    position."""


class OutOfMemoryError(MoePoolError, MemoryError):
    """Host or device memory ran out; the message says how many bytes were asked for."""


class CudaError(MoePoolError, RuntimeError):
    """The CUDA runtime or driver failed."""


class FormatError(MoePoolError, ValueError):
    """A file is damaged or contradicts itself; the message names the file and the tensor or field."""


class UnsupportedError(MoePoolError, RuntimeError):
    """Legal, but not in this build or not on this machine."""


class StateError(MoePoolError, RuntimeError):
    """The store, pool or route is not in a state that allows the call, closed for example."""


class MoePoolWarning(UserWarning):
    """Something works, but perhaps not as it was meant. Raised through the :mod:`warnings` module."""


# By moepool_status. Unknown ones, MOEPOOL_ERROR_INTERNAL among them, are plain MoePoolErrors.
_BY_STATUS: dict[int, type[MoePoolError]] = {
    1: ArgumentError,
    2: IdError,
    3: OutOfMemoryError,
    4: CudaError,
    5: FormatError,
    6: UnsupportedError,
    7: StateError,
}

_PACKAGE = str(Path(__file__).parent) + os.sep


def from_status(status: int, message: str) -> MoePoolError:
    """The error for a status of the C core."""
    return _BY_STATUS.get(status, MoePoolError)(message)


def warn(message: str) -> None:
    """Warns at the line outside this package that led here, so that each caller's line is told once."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, MoePoolWarning, stacklevel=level)
