"""The C library as Python sees it.

`lib` holds its functions and constants, `ffi` makes its structs and pointers, `check` raises its errors.
Calls release the GIL. Long ones on the main thread let Python run its signal handlers now and then; if one
raises, as Ctrl-C does, the call ends and `check` raises that.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from moepool.errors import from_status

try:
    from moepool._native._lib import ffi, lib
except ImportError as error:
    raise ImportError(
        f"moepool's native library cannot be loaded ({error}). Build it with `pip install .`, in a checkout "
        "with `pip install -e .`, after a change of its C++ with `python setup.py build_ext --inplace`."
    ) from error

__all__ = ["check", "ffi", "lib"]

if lib.moepool_abi_version() != lib.MOEPOOL_ABI_VERSION:
    raise ImportError(
        f"moepool's binding was built for version {lib.MOEPOOL_ABI_VERSION} of the C ABI, but the library it "
        f"found has version {lib.moepool_abi_version()}: install moepool again."
    )


_raised: list[BaseException] = []  # by a signal handler, for the call that it ends


def _keep(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> int:
    _raised.append(error.with_traceback(trace))
    return 1


@ffi.def_extern(onerror=_keep)  # type: ignore[untyped-decorator]
def run_signal_handlers(data: Any) -> int:
    """Nothing by itself: Python runs handlers of pending signals when it comes to run at all."""
    return 0


# Python handles signals on the main thread, and threads that end at exit must not be called back.
if threading.current_thread() is threading.main_thread():
    lib.moepool_set_interrupt(lib.run_signal_handlers, ffi.NULL)


def check(status: int) -> None:
    """Raise the error that a failed call stands for.

    Parameters
    ----------
    status
        What a function of `lib` returned, on the thread that called it and before it calls another.

    Raises
    ------
    MoePoolError
        The class that belongs to the status, with the library's message; nothing for ``MOEPOOL_OK``.
    BaseException
        What a signal handler raised while the call ran, KeyboardInterrupt for example.
    """
    if status == lib.MOEPOOL_ERROR_INTERRUPTED and _raised:
        raise _raised.pop()
    if status != lib.MOEPOOL_OK:
        message = ffi.string(lib.moepool_last_error()).decode("utf-8", "replace")
        raise from_status(status, message)
