"""Measures moepool: ``python bench/run.py MODE``. See README.md beside this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

if not __package__:  # started as a program: the packages bench and tests lie beside each other
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import moepool
from bench import cpu as cpu_layers
from bench import decode as decode_layers
from bench import doorbell as doorbell_trips
from bench import hybrid as hybrid_layers
from bench import peer as peer_layers
from bench import resolve as resolve_steps
from bench import stream as stream_misses
from bench.ggml import Ggml
from bench.gpu import Gpu
from bench.measure import Report, machine
from bench.workload import TYPES, Shape
from moepool.options import writable
from tests import cases

_F = TypeVar("_F", bound=Callable[..., Any])


def list_of(kind: Any) -> Callable[..., list[Any]]:
    """A callback that takes values separated by commas."""

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> list[Any]:
        return [kind.convert(part.strip(), param, ctx) for part in value.split(",")]

    return convert


def shape_of(ctx: click.Context, param: click.Parameter, value: str) -> Shape:
    sizes = list_of(click.IntRange(min=1))(ctx, param, value)
    if len(sizes) != 4 or sizes[0] % 256 or sizes[1] % 256 or sizes[3] > sizes[2]:
        raise click.BadParameter(
            "it takes four: the first two must be multiples of 256, and K at most EXPERTS",
            ctx,
            param,
        )
    return Shape(*sizes)


def types_option(default: str) -> Callable[[_F], _F]:
    convert = list_of(click.Choice(TYPES))
    return click.option(
        "--types",
        callback=lambda ctx, param, value: convert(ctx, param, ",".join(TYPES) if value == "all" else value),
        default=default,
        show_default=True,
        metavar="TYPE,...",
        help="Weight types, or all.",
    )


threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Of the CPU.  [default: one less than it has, for one thread waits for the device]",
)


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Computes on so many, by default on one less than there are."""
    before = moepool.get_threads()
    moepool.set_threads(threads or max(1, before - 1))
    try:
        yield
    finally:
        moepool.set_threads(before)


def tokens_option(default: str, most: int | None) -> Callable[[_F], _F]:
    return click.option(
        "--tokens",
        callback=list_of(click.IntRange(1, most)),
        default=default,
        show_default=True,
        metavar="T,...",
        help="Tokens of a step.",
    )


def seconds_option(default: float) -> Callable[[_F], _F]:
    return click.option(
        "--seconds",
        type=click.FloatRange(min=0),
        default=default,
        show_default=True,
        help="How long to repeat each measurement, at least 5 times.",
    )


def layers_option_of(default: int) -> Callable[[_F], _F]:
    return click.option(
        "--layers",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Layers in turn, so that no cache serves their weights.",
    )


layers_option = layers_option_of(16)
shape_option = click.option(
    "--shape",
    callback=shape_of,
    default="2048,768,128,8",
    show_default=True,
    metavar="HIDDEN,WIDTH,EXPERTS,K",
    help="A layer's sizes.",
)
json_option = click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    help="Also write everything to this file.",
)

USABLE = [name for name, usable in moepool.cpu_kernels().items() if usable]
BENCH_TYPES = ",".join(cases.BENCH_TYPES)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Prints what moepool takes, beside what the machine allows in the same run.

    Every result is compared with the portable CPU kernel's bits before it is timed.
    """


@main.command()
@types_option(BENCH_TYPES)
@tokens_option("1,2,4,8,16", 16)
@click.option(
    "--hits",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of wanted experts that are resident; slots are chosen so.",
)
@layers_option
@shape_option
@seconds_option(0.5)
@json_option
def decode(
    types: list[str],
    tokens: list[int],
    hits: float,
    layers: int,
    shape: Shape,
    seconds: float,
    path: Path | None,
) -> None:
    """Whole layers in a CUDA graph, ids written by a kernel in front of each."""
    gpu = Gpu()
    report = Report("decode", decode_layers.COLUMNS, machine(gpu.name))
    decode_layers.decode(report, gpu, types, tokens, hits, layers, shape, seconds)
    report.write(path)


@main.command()
@tokens_option("1,4,8", 16)
@layers_option
@seconds_option(0.5)
@json_option
def resolve(tokens: list[int], layers: int, seconds: float, path: Path | None) -> None:
    """The bookkeeping of a step in a CUDA graph, with layers that have next to nothing to compute."""
    gpu = Gpu()
    report = Report("resolve", resolve_steps.COLUMNS, machine(gpu.name))
    resolve_steps.resolve(report, gpu, tokens, layers, seconds)
    report.write(path)


@main.command()
@types_option("q4_k")
@tokens_option("1", 16)
@seconds_option(0.5)
@json_option
def stream(types: list[str], tokens: list[int], seconds: float, path: Path | None) -> None:
    """Steps of nothing but misses in a CUDA graph, at three sizes of a record."""
    gpu = Gpu()
    report = Report("stream", stream_misses.COLUMNS, machine(gpu.name))
    stream_misses.stream(report, gpu, types, tokens, seconds)
    report.write(path)


@main.command()
@types_option("q4_k")
@tokens_option("1", 16)
@click.option(
    "--slots",
    callback=list_of(click.IntRange(min=0)),
    default="0,8,16,32,64,128",
    show_default=True,
    metavar="S,...",
    help="Slots of each layer.",
)
@threads_option
@layers_option_of(4)
@shape_option
@seconds_option(1.0)
@json_option
def hybrid(
    types: list[str],
    tokens: list[int],
    slots: list[int],
    threads: int | None,
    layers: int,
    shape: Shape,
    seconds: float,
    path: Path | None,
) -> None:
    """Whole layers in a CUDA graph with few slots: misses over the link, by the CPU, or divided."""
    gpu = Gpu()
    with cpu_threads(threads):
        report = Report("hybrid", hybrid_layers.COLUMNS, machine(gpu.name))
        hybrid_layers.hybrid(report, gpu, types, tokens, slots, layers, shape, seconds)
        report.write(path)


@main.command()
@threads_option
@layers_option
@seconds_option(0.5)
@json_option
def doorbell(threads: int | None, layers: int, seconds: float, path: Path | None) -> None:
    """From a CUDA graph to the CPU and back."""
    gpu = Gpu()
    with cpu_threads(threads):
        report = Report("doorbell", doorbell_trips.COLUMNS, machine(gpu.name))
        doorbell_trips.doorbell(report, gpu, layers, seconds)
        report.write(path)


@main.command()
@types_option("q4_k,q6_k,q8_0")
@tokens_option("1,8,64", None)
@click.option(
    "--kernels",
    callback=list_of(click.Choice(USABLE)),
    default=USABLE[-1],
    show_default=True,
    metavar="SET,...",
    help="CPU kernel sets, by turns.",
)
@layers_option
@shape_option
@seconds_option(2.0)
@json_option
def cpu(
    types: list[str],
    tokens: list[int],
    kernels: list[str],
    layers: int,
    shape: Shape,
    seconds: float,
    path: Path | None,
) -> None:
    """Whole layers on the CPU, on all threads."""
    report = Report("cpu", cpu_layers.COLUMNS, machine())
    cpu_layers.cpu(report, types, tokens, kernels, layers, shape, seconds)
    report.write(path)


@main.command()
@types_option(BENCH_TYPES)
@tokens_option("1,8,64", None)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Of either side.  [default: the CPUs this process may use]",
)
@click.option(
    "--libraries",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of libggml.so.  [default: that of the package llama-cpp-python]",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="How much longer to repeat each while others disturb the machine, in seconds.",
)
@layers_option_of(4)
@shape_option
@seconds_option(2.0)
@json_option
def peer(
    types: list[str],
    tokens: list[int],
    threads: int | None,
    libraries: Path | None,
    layers: int,
    shape: Shape,
    seconds: float,
    patience: float,
    path: Path | None,
) -> None:
    """Whole layers on the CPU and the same in ggml, by turns."""
    with closing(Ggml(libraries)) as ggml:
        before = moepool.get_threads()
        moepool.set_threads(threads)
        try:
            report = Report("peer", peer_layers.COLUMNS, machine())
            peer_layers.peer(report, ggml, types, tokens, layers, shape, seconds, patience)
            report.write(path)
        finally:
            moepool.set_threads(before)


if __name__ == "__main__":
    main()
