"""Checks of plain values, which say in their error what would be right."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from moepool.errors import ArgumentError

__all__ = ["choice", "count", "integer", "named"]

INT32 = 2**31 - 1


def integer(name: str, value: Any) -> int:
    """An integer of Python or NumPy; nothing is rounded or parsed."""
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; it must be an integer") from None


def count(name: str, value: Any, low: int = 0, high: int = INT32) -> int:
    """An integer from `low` to `high`."""
    number = integer(name, value)
    if not low <= number <= high:
        raise ArgumentError(f"{name} is {number}; it must be from {low} to {high}")
    return number


def choice(name: str, value: Any, choices: Mapping[str, int]) -> int:
    """The number of one of the names in `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} is {value!r}; it must be {' or '.join(map(repr, choices))}")
    return choices[value]


def named(name: str, value: Any, remedy: str) -> Mapping[str, Any]:
    """A mapping whose keys are names of matrices; `remedy` is what to write instead of anything else."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} is a {type(value).__name__}; it must be {remedy}")
    return value
