"""Pictures of simulations; they need Matplotlib, which nothing else here does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moepool.errors import UnsupportedError
from moepool.simulate import Simulation, SimulationRun

# Colours that stay apart for most kinds of colour vision (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D3B", "#5B4B9A")
_MARKERS = "osD^vPX*"


def require_matplotlib() -> Any:
    """Matplotlib's `Figure`, which needs no screen.

    Raises
    ------
    UnsupportedError
        It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f'a picture needs Matplotlib ({error}): pip install matplotlib (the extra "plot" of moepool)'
        ) from None
    return Figure


def plot_hit_rates(simulation: Simulation, path: str | os.PathLike[str], title: str = "") -> None:
    """Draws the hit rate against the memory of all slots, or their number a layer, a line for each policy.

    Policies that know the future are dashed, Belady's optimum is black.

    Parameters
    ----------
    simulation : Simulation
    path : str or path
        What it ends in says the form: `.png`, `.svg`, `.pdf`.
    title : str
        Written above it.

    Raises
    ------
    UnsupportedError
        Matplotlib is not installed, or does not know the form.
    """
    figure_class = require_matplotlib()
    figure = figure_class(figsize=(8.4, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    known = simulation.runs[0].slot_bytes is not None
    largest = max(run.slot_bytes or 0 for run in simulation.runs)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)

    def x_of(run: SimulationRun) -> float:
        return (run.slot_bytes or 0) / size if known else sum(run.slots) / len(run.slots)

    lines: dict[str, list[SimulationRun]] = {}
    for run in simulation.runs:
        lines.setdefault(run.policy, []).append(run)
    # The legend lists the lines from top to bottom as they lie.
    order = sorted(lines, key=lambda name: -sum(run.hit_rate for run in lines[name]))
    usable = [name for name in lines if lines[name][0].attainable]
    for name in order:
        runs = sorted(lines[name], key=x_of)
        if name == "belady":
            style: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.6, "zorder": 5}
        elif not runs[0].attainable:
            dotted = name.startswith("static")  # and pinned has dashes between its dots
            style = {
                "color": "0.35" if dotted else "0.6",
                "linestyle": ":" if dotted else "-.",
                "linewidth": 1.8,
            }
        else:
            at = usable.index(name) % len(_COLOURS)
            style = {"color": _COLOURS[at], "marker": _MARKERS[at], "markersize": 4.5, "linewidth": 1.6}
        future = "" if runs[0].attainable else " *"
        axes.plot(
            [x_of(run) for run in runs],
            [100 * run.hit_rate for run in runs],
            label=name + future,
            clip_on=False,
            **style,
        )
    axes.set_ylabel("hit rate of decode steps, %")
    axes.set_xlabel(f"memory of all slots, {unit}" if known else "slots a layer")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if known and all(len(set(run.slots)) == 1 for run in simulation.runs):
        per_slot = (simulation.runs[0].slot_bytes or 1) / size / max(simulation.runs[0].slots[0], 1)
        above = axes.secondary_xaxis("top", functions=(lambda v: v / per_slot, lambda v: v * per_slot))
        above.set_xlabel("slots a layer")
        above.set_ticks(sorted({run.slots[0] for run in simulation.runs}))
        above.spines["top"].set_visible(False)
    legend = figure.legend(loc="outside right center", frameon=False, title="policy")
    legend.set_alignment("left")
    if not all(lines[name][0].attainable for name in lines):
        axes.text(0.99, 0.02, "* knows the future", transform=axes.transAxes, ha="right", color="0.35")
    if title:
        axes.set_title(title, fontsize=11, pad=10)
    try:
        figure.savefig(Path(path))
    except ValueError as error:
        raise UnsupportedError(f"{path}: {error}") from None
