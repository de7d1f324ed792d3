"""The C library as Python sees it.

`lib` holds its functions and constants, `ffi` makes its structs and pointers, `check` raises its errors.
Calls release the GIL.
"""

from __future__ import annotations

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
    """
    if status != lib.MOEPOOL_OK:
        message = ffi.string(lib.moepool_last_error()).decode("utf-8", "replace")
        raise from_status(status, message)
