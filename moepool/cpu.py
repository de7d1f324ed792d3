"""The CPU side of the core: threads, kernel sets, and the weight types that this build computes with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from moepool import checks
from moepool._native import handles
from moepool.errors import ArgumentError

__all__ = [
    "KernelChoice",
    "QuantType",
    "cpu_kernel_problems",
    "cpu_kernels",
    "get_threads",
    "quant_types",
    "set_threads",
    "use_cpu_kernel",
]


@dataclass(frozen=True)
class QuantType:
    """A ggml weight type that this build computes with.

    Attributes
    ----------
    id : int
        ggml's number.
    name : str
        ggml's name in lower case.
    block : int
        Columns of a block; the columns of a matrix must be a multiple.
    block_bytes : int
        Bytes of a block in a GGUF file.
    panel_words : int
        32-bit words that a row takes in a full panel of 256 columns.
    """

    id: int
    name: str
    block: int
    block_bytes: int
    panel_words: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` columns in a GGUF file."""
        return columns // self.block * self.block_bytes


def quant_types() -> dict[str, QuantType]:
    """The weight types that this build computes with, by name, in rising number.

    Returns
    -------
    dict of str to QuantType

    Examples
    --------
    >>> moepool.quant_types()["q4_k"]
    QuantType(id=12, name='q4_k', block=256, block_bytes=144, panel_words=36)
    """
    return {fields[1]: QuantType(*fields) for fields in handles.types()}


def set_threads(threads: int | None, *, affinity: Iterable[int] | None = None) -> None:
    """Sets how many threads the CPU kernels and the packing use, the caller's included, for the whole
    process, and the CPUs they keep to.

    Calls that are under way in other threads end with the threads they began with. Results depend on neither.

    Parameters
    ----------
    threads : int or None
        At least 1. None: as many as `affinity` has CPUs; without it the default is restored, which is
        ``MOEPOOL_THREADS`` and ``MOEPOOL_AFFINITY`` of the environment, or else the CPUs this process may
        use, by its cgroup limit and by the affinity of its main thread when moepool was imported, without a
        place of their own; fewer if the system starts no more threads.
    affinity : iterable of int, optional
        Numbers of CPUs, as in ``os.sched_getaffinity(0)``. Thread i keeps to the i-th, round and round if
        there are more threads. The first one is the caller's share: the caller itself is left where it is.
        So is the thread that answers CUDA devices (:func:`set_doorbell`), the caller of what it computes:
        it runs on any CPU that the process might use when moepool was imported.
        By default the system places the threads, which serves best on a machine that others use as well.

    Raises
    ------
    ArgumentError
        `threads` is no integer, less than 1, or more than the core can keep or the system starts; `affinity`
        is empty, no sequence of integers, or names a CPU that this process might not use when moepool was
        imported. The setting is as it was.

    Examples
    --------
    >>> moepool.set_threads(2)
    >>> moepool.get_threads()
    2
    >>> import os
    >>> moepool.set_threads(None, affinity=os.sched_getaffinity(0))
    >>> moepool.set_threads(None)
    """
    number = None if threads is None else checks.integer("threads", threads)
    if number is not None and not 1 <= number < 2**31:
        raise ArgumentError(f"threads is {threads}; it must be at least 1, or None for the default")
    if affinity is not None and not isinstance(affinity, Iterable):
        raise ArgumentError(
            f"affinity is {affinity!r}; it must be a sequence of CPUs, [{affinity!r}] for one"
        )
    cpus = [] if affinity is None else [checks.integer("affinity", cpu) for cpu in affinity]
    if affinity is not None and not cpus:
        raise ArgumentError("affinity is empty; name at least one CPU, or give None to let the system choose")
    if bad := [cpu for cpu in cpus if not 0 <= cpu < 2**31]:
        raise ArgumentError(f"affinity names CPU {bad[0]}; there is none of that number")
    try:
        handles.set_threads(number or 0, cpus)
    except ArgumentError as error:  # which has the names of the C interface
        raise ArgumentError(re.sub("^cpus:", "affinity:", str(error))) from None


def get_threads() -> int:
    """How many threads the next call uses.

    Returns
    -------
    int

    Raises
    ------
    ArgumentError
        ``MOEPOOL_THREADS`` or ``MOEPOOL_AFFINITY`` makes no sense, and nothing else was set.
    """
    return handles.get_threads()


def cpu_kernels() -> dict[str, bool]:
    """The CPU kernel sets of this build, by name, in rising order of preference, and whether this machine can
    run each.

    All of them compute the same bits; see :func:`use_cpu_kernel`. "amx-emulated" is there for tests: "amx"
    with its instructions written out in C++.

    Returns
    -------
    dict of str to bool

    Examples
    --------
    >>> moepool.cpu_kernels()["portable"]
    True
    """
    return handles.cpu_kernels()


def cpu_kernel_problems() -> dict[str, str]:
    """Why this machine can not run the kernel sets that :func:`cpu_kernels` gives False for.

    Returns
    -------
    dict of str to str
        The reason by name. The system may refuse what the processor has, AMX for example.

    Examples
    --------
    >>> "portable" in moepool.cpu_kernel_problems()
    False
    """
    return handles.cpu_kernel_lacks()


class KernelChoice:
    """What :func:`use_cpu_kernel` returns: as a context manager it puts the former choice back at the end.

    Attributes
    ----------
    name : str
        The kernel set that was chosen.
    """

    def __init__(self, former: str) -> None:
        self._former = former
        self.name = handles.cpu_selected()

    def __enter__(self) -> KernelChoice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handles.cpu_select(self._former)

    def __repr__(self) -> str:
        return f"<CPU kernels: {self.name}>"


def use_cpu_kernel(name: str | None) -> KernelChoice:
    """Picks a CPU kernel set for all later calls of the process, or, in a `with` statement, for the calls
    inside.

    Parameters
    ----------
    name : str or None
        A key of :func:`cpu_kernels`; None picks the best that this machine can run, which is the default.

    Returns
    -------
    KernelChoice

    Raises
    ------
    ArgumentError
        There is no such set.
    UnsupportedError
        This machine cannot run it.

    Examples
    --------
    >>> with moepool.use_cpu_kernel("portable") as choice:
    ...     choice.name
    'portable'
    """
    kernels = cpu_kernels()
    if name is not None and name not in kernels:
        usable = ", ".join(repr(kernel) for kernel, can in kernels.items() if can)
        raise ArgumentError(f"kernel set {name!r} is not in this build; this machine runs {usable}")
    former = handles.cpu_selected()
    handles.cpu_select(name)
    return KernelChoice(former)
