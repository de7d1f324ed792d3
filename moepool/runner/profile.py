"""Routing profiles: how often each expert of each layer was wanted, by prompt rows and by decode rows.

A profile is a CSV of `phase,layer,expert,count` with that header. Files of one model may simply be
concatenated: repeated headers and blank lines are skipped and counts of the same expert add up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moepool.errors import ArgumentError, FormatError
from moepool.runner.model import Observer
from moepool.tracefile import PROFILE_HEADER

ProfilePhase = Literal["prompt", "decode"]


class RoutingProfile:
    """Counts of routed places.

    Parameters
    ----------
    layers, experts : int
        Of the model; layers are counted among those with experts, from 0.

    Attributes
    ----------
    prompt, decode : (layers, experts) int64
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.prompt: NDArray[np.int64] = np.zeros((layers, experts), dtype=np.int64)
        self.decode: NDArray[np.int64] = np.zeros((layers, experts), dtype=np.int64)

    @property
    def total(self) -> NDArray[np.int64]:
        """Counts of both phases, (layers, experts) int64."""
        return self.prompt + self.decode

    def observer(self, phase: ProfilePhase) -> Observer:
        """A callable for `Model.forward(observe=)` that adds what it sees to this phase's counts."""
        counts = getattr(self, phase)

        def observe(layer: int, ids: NDArray[np.int32]) -> None:
            counts[layer] += np.bincount(ids.ravel(), minlength=counts.shape[1])

        return observe

    def hottest(self, slots: int) -> list[list[int]]:
        """The `slots` experts of every layer that decode steps want most, most wanted first, the lower id
        among equals. Prompts, which leave slots alone, count only where there is nothing else."""
        counts = self.decode if self.decode.any() else self.total
        order: list[list[int]] = np.argsort(-counts, axis=1, kind="stable")[:, :slots].tolist()
        return order

    def save(self, path: str | Path) -> None:
        """Writes the CSV, experts that were never wanted left out."""
        lines = [PROFILE_HEADER]
        for phase in get_args(ProfilePhase):
            counts = getattr(self, phase)
            lines += [
                f"{phase},{layer},{expert},{counts[layer, expert]}" for layer, expert in np.argwhere(counts)
            ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, layers: int, experts: int) -> RoutingProfile:
        """Reads a CSV, or several concatenated ones.

        Raises
        ------
        FormatError
            A line is broken or names a layer or expert that the model does not have; the message has its
            number.
        ArgumentError
            The file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"profile {path}: {error}") from None
        profile = cls(layers, experts)
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip() in ("", PROFILE_HEADER):
                continue
            phase, *numbers = line.strip().split(",")
            if (
                phase not in get_args(ProfilePhase)
                or len(numbers) != 3
                or not all(n.isascii() and n.isdigit() for n in numbers)
            ):
                raise FormatError(f"profile {path}, line {number}: {line!r} is not {PROFILE_HEADER}")
            layer, expert, count = map(int, numbers)
            if layer >= layers or expert >= experts:
                raise FormatError(
                    f"profile {path}, line {number}: layer {layer}, expert {expert} of a model with "
                    f"{layers} layers of {experts} experts"
                )
            getattr(profile, phase)[layer, expert] += count
        return profile
