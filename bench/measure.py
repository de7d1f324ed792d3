"""What all measurements share: repeated timings, tables that grow row by row, reports."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import moepool

Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of many repetitions: their median, and the tenth and the ninetieth of a hundred."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        low, median, high = np.percentile(microseconds, (10, 50, 90))
        return cls(float(median), float(low), float(high), len(microseconds))

    def over(self, parts: int) -> Timing:
        """The same of one of so many equal parts."""
        return Timing(self.median / parts, self.low / parts, self.high / parts, self.samples)

    def row(self) -> Row:
        """As a part of a row."""
        return {"us": self.median, "low_us": self.low, "high_us": self.high, "samples": self.samples}


def repeated(sample: Callable[[], float], seconds: float, least: int = 5, most: int = 500) -> Timing:
    """Takes samples for so many seconds, at least `least` and at most `most` of them.

    Parameters
    ----------
    sample
        Does what is measured and tells its microseconds.
    seconds, least, most
    """
    return by_turns([sample], seconds, least, most)[0]


def by_turns(
    samples: Sequence[Callable[[], float]], seconds: float, least: int = 5, most: int = 500
) -> list[Timing]:
    """The same of several, one sample of each after the other: what else the machine does hits all of them.

    Parameters
    ----------
    samples
    seconds
        For each.
    least, most
    """
    values: list[list[float]] = [[] for _ in samples]
    end = time.perf_counter() + seconds * len(samples)
    while len(values[0]) < least or (len(values[0]) < most and time.perf_counter() < end):
        for sample, mine in zip(samples, values, strict=True):
            mine.append(sample())
    return [Timing.of(mine) for mine in values]


def host_microseconds(call: Callable[[], object]) -> float:
    """What a call takes by the host's clock."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def gigabytes_a_second(size: float, microseconds: float) -> float:
    """Of `size` bytes."""
    return size / microseconds / 1e3


def check_same(actual: Any, expected: Any, what: str) -> None:
    """Ends the program if two float32 arrays differ in any bit: a wrong result has no time."""
    differ = int((np.asarray(actual).view(np.uint32) != np.asarray(expected).view(np.uint32)).sum())
    if differ:
        raise click.ClickException(
            f"{what}: {differ} of {expected.size} outputs differ from the portable kernel's"
        )


# ---------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True)
class Column:
    """One column of a printed table: the row's key, the title, and how a value is written."""

    key: str
    title: str
    form: str = ""
    width: int = 8

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        return "" if value is None else format(value, self.form)


SPREAD = Column("spread", "p10-p90", "", 15)


class Report:
    """Prints rows as they come and keeps them for a file.

    Parameters
    ----------
    bench : str
        What is measured.
    columns : sequence of Column
    machine : dict
        Where; goes into the file.
    """

    def __init__(self, bench: str, columns: Sequence[Column], machine: Row) -> None:
        self.columns = columns
        self.content: Row = {"bench": bench, "machine": machine, "ceilings": {}, "rows": []}
        where = machine["device"] or f"{machine['processor']}, {machine['threads']} threads"
        click.echo(f"moepool {machine['moepool']} on {where}")

    def ceiling(self, name: str, rate: float, how: str) -> None:
        """Notes and prints a rate in GB/s that nothing can pass."""
        self.content["ceilings"][name] = rate
        click.echo(f"{name}: {rate:,.0f} GB/s ({how})")

    def header(self) -> None:
        click.echo(self._line(column.title for column in self.columns))
        click.echo(self._line("-" * max(len(column.title), column.width - 2) for column in self.columns))

    def add(self, row: Row) -> None:
        self.content["rows"].append(row)
        if "low_us" in row:
            row = row | {"spread": f"{row['low_us']:.2f}-{row['high_us']:.2f}"}
        click.echo(self._line(column.cell(row) for column in self.columns))

    def _line(self, cells: Iterable[str]) -> str:
        pairs = zip(cells, self.columns, strict=True)
        return "".join(f"  {cell.rjust(max(c.width - 2, len(c.title)))}" for cell, c in pairs).rstrip()

    def write(self, path: Path | None) -> None:
        """The rows with everything that was noted of the run, as JSON."""
        if path is not None:
            path.write_text(json.dumps(self.content, indent=1) + "\n")


def machine(device: str | None = None) -> Row:
    """The machine and the build that a report is of."""
    info = moepool.build_info()
    return {
        "device": device,
        "processor": _processor(),
        "threads": moepool.get_threads(),
        "cpu_kernel": next(n for n, usable in reversed(moepool.cpu_kernels().items()) if usable),
        "python": platform.python_version(),
        "moepool": info["version"],
        "cuda": info["cuda"],
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
