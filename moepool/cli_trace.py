"""`moepool trace convert | merge | split | info`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from moepool.errors import ArgumentError
from moepool.options import FILE, MODEL, OUTPUT, json_option, writable, write_json
from moepool.runner.table import format_table
from moepool.trace import Trace, TraceInfo, TraceModel, trace_model
from moepool.tracefile import Form

_F = TypeVar("_F", bound=Callable[..., Any])


def reading_options(command: _F) -> _F:
    """The options that say what a trace is of and how it is read."""
    for option in reversed(
        (
            click.option("--model", type=MODEL, help="The GGUF file that traces must be of."),
            click.option(
                "--experts", type=click.IntRange(1), help="Experts of a layer, where no file tells them."
            ),
            click.option("--lenient", is_flag=True, help="Leave out and count what is damaged."),
        )
    ):
        command = option(command)
    return command


def load(path: Path, model: TraceModel | None, experts: int | None, lenient: bool) -> Trace:
    """A trace as `reading_options` ask for it."""
    return Trace.load(path, model, lenient=lenient, experts=experts)


def _loaded(paths: tuple[Path, ...], model: Path | None, experts: int | None, lenient: bool) -> list[Trace]:
    of = None if model is None else trace_model(model)
    return [load(path, of, experts, lenient) for path in paths]


_FORM = click.option(
    "--form",
    type=click.Choice(["csv", "binary", "plain"]),
    help="Of what is written [default: as the name ends, .csv or .moetrace].",
)
_OUT = click.option("-o", "--output", type=OUTPUT, callback=writable, required=True, help="File to write.")


@click.group("trace")
def trace_group() -> None:
    """Convert, merge, split and describe traces of routing.

    A trace is a file of `moepool generate --trace`, or the plain CSV (pos,layer,id0,id1,...) of forks of
    llama.cpp.
    """


@trace_group.command("convert")
@click.argument("trace", type=FILE)
@_OUT
@_FORM
@reading_options
def convert_command(trace: Path, output: Path, form: Form | None, **reading: Any) -> None:
    """Write a trace in another form."""
    (loaded,) = _loaded((trace,), **reading)
    loaded.save(output, form)
    click.echo(f"{output}: {loaded!r}")


@trace_group.command("merge")
@click.argument("traces", type=FILE, nargs=-1, required=True)
@_OUT
@_FORM
@reading_options
def merge_command(traces: tuple[Path, ...], output: Path, form: Form | None, **reading: Any) -> None:
    """Put traces of one model behind one another."""
    merged = Trace.merge(_loaded(traces, **reading))
    merged.save(output, form)
    click.echo(f"{output}: {merged!r}")


@trace_group.command("split")
@click.argument("trace", type=FILE)
@click.option("--prompt", type=OUTPUT, callback=writable, help="File for the rows of prompts.")
@click.option("--decode", type=OUTPUT, callback=writable, help="File for the rows of decode steps.")
@click.option("--at", type=click.IntRange(0), help="A step: what comes before it is apart from the rest.")
@click.option("--first", type=OUTPUT, callback=writable, help="File for the steps before --at.")
@click.option("--rest", type=OUTPUT, callback=writable, help="File for the others.")
@_FORM
@reading_options
def split_command(
    trace: Path,
    prompt: Path | None,
    decode: Path | None,
    at: int | None,
    first: Path | None,
    rest: Path | None,
    form: Form | None,
    **reading: Any,
) -> None:
    """Tell prompts and decode steps apart, or what comes before a step and after it."""
    if not any((prompt, decode, first, rest)):
        raise ArgumentError("nothing to write: give --prompt or --decode, or --at with --first or --rest")
    if (at is None) != (first is None and rest is None):
        raise ArgumentError("--at says where --first ends and --rest begins: give them together")
    (loaded,) = _loaded((trace,), **reading)
    parts = [(prompt, loaded.phase("prompt")), (decode, loaded.phase("decode"))]
    if at is not None:
        parts += zip((first, rest), loaded.split(at), strict=True)
    for path, rows in parts:
        if path is not None:
            rows.save(path, form)
            click.echo(f"{path}: {rows!r}")


@trace_group.command("info")
@click.argument("trace", type=FILE)
@reading_options
@json_option
def info_command(trace: Path, json_path: str | None, **reading: Any) -> None:
    """What a trace holds."""
    (loaded,) = _loaded((trace,), **reading)
    info = loaded.info()
    if json_path is not None:
        facts = {"trace": str(trace), "model": asdict(loaded.model), "skipped": dict(loaded.skipped)}
        write_json(json_path, facts | asdict(info))
    if json_path != "-":
        click.echo(_text(loaded, info))


def _text(trace: Trace, info: TraceInfo) -> str:
    model = trace.model
    router = f"router {model.fingerprint}" if model.fingerprint else "model unknown"
    lines = [
        f"{len(info.layers)} layers, {model.experts} experts, top-{model.k}, {router}",
        f"{info.rows:,} rows: {info.prompt_rows:,} of prompts, {info.decode_rows:,} of decode steps",
        f"{info.tokens:,} tokens in {info.steps:,} steps, {info.admissions:,} admissions"
        + ("" if info.admissions else " (`--trace` keeps them in runs with --miss auto alone)"),
        "",
    ]
    counts = trace.counts("decode")[list(info.layers)]
    table = [
        [layer, seen, *(f"{100 * share:.0f} %" for share in shares_of(row))]
        for layer, seen, row in zip(info.layers, info.experts_seen, counts, strict=True)
    ]
    header = ["layer", "experts seen", *(f"top {percent} %" for percent in TOP)]
    return "\n".join(lines) + format_table(header, table, left=())


TOP = (10, 25, 50)
"""Per cent of the experts whose share of all uses tells how skewed a routing is."""


def shares_of(counts: np.ndarray[Any, np.dtype[np.int64]]) -> list[float]:
    """What share of all uses falls on the most used `TOP` per cent of experts."""
    falling = np.sort(counts)[::-1]
    most = [max(round(len(falling) * percent / 100), 1) for percent in TOP]
    return [float(falling[:n].sum() / max(falling.sum(), 1)) for n in most]
