"""Options and arguments that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from moepool.arrays import device_index
from moepool.errors import ArgumentError
from moepool.policy import policy_from
from moepool.runner.model import bundled_model
from moepool.tracefile import SUFFIXES

_F = TypeVar("_F", bound=Callable[..., Any])
_P = TypeVar("_P", bound=str | Path | None)
_T = TypeVar("_T")


class ModelPath(click.Path):
    """A GGUF file, or the name of the bundled model."""

    name = "model"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return bundled_model() if value == "tiny-moe" else super().convert(value, param, ctx)


MODEL = ModelPath()
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(dir_okay=False, path_type=Path)


def checked(check: Callable[[str], _T]) -> Callable[[click.Context, click.Parameter, str], _T]:
    """A callback that gives what a check makes of a value, and names the option where it refuses it."""

    def callback(ctx: click.Context, param: click.Parameter, value: str) -> _T:
        try:
            return check(value)
        except ArgumentError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return callback


def _device(name: str) -> str:
    device_index(name)
    return name


class _EnvironmentOption(click.Option):
    """Names the variable in an error only if the value came from there."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        hint = super().get_error_hint(ctx)
        given = ctx is not None and ctx.get_parameter_source(self.name or "") == ParameterSource.COMMANDLINE
        return hint.partition(" (env var")[0] if given else hint


def environment(name: str) -> dict[str, Any]:
    """An option that the environment may give too; an argument goes before it."""
    return {"envvar": f"MOEPOOL_{name}", "show_envvar": True, "cls": _EnvironmentOption}


def device_option(default: str, words: str) -> Callable[[_F], _F]:
    """`--device`, of commands that read MOEPOOL_DEVICE."""
    return click.option(
        "--device",
        default=default,
        show_default=True,
        callback=checked(_device),
        help=words,
        **environment("DEVICE"),
    )


def placement_options(command: _F) -> _F:
    """The options that say where experts live and what else computes; only `--dense` changes the output."""
    for option in reversed(
        (
            click.option(
                "--slots",
                type=click.IntRange(0),
                default=0,
                show_default=True,
                help="Slots of each layer.",
                **environment("SLOTS"),
            ),
            click.option(
                "--policy",
                callback=checked(policy_from),
                default="lru",
                show_default=True,
                help="Which experts hold the slots: lru, lfu, lfru, slru, reelect, static or pinned; options "
                "follow a colon, as in lfu:half_life=64,guard.",
                **environment("POLICY"),
            ),
            click.option(
                "--miss",
                type=click.Choice(["stream", "host", "auto"]),
                default="stream",
                show_default=True,
                help="Who computes an expert without a slot: the device, the CPU, or both.",
                **environment("MISS"),
            ),
            device_option("cpu", "cpu or cuda:N."),
            click.option(
                "--dense",
                type=click.Choice(["numpy", "cupy"]),
                default="numpy",
                show_default=True,
                help="What computes all but the experts: NumPy on the CPU, or CuPy on the device. Logits of "
                "CuPy differ from NumPy's in their last bits.",
            ),
            click.option(
                "--hot",
                type=FILE,
                help="Profile (of `generate --profile`) or trace that chooses what static and pinned keep.",
                **environment("PROFILE"),
            ),
            click.option(
                "--plan",
                type=FILE,
                help="Plan (of `moepool plan`) in place of --slots, --policy and --hot.",
                **environment("PLAN"),
            ),
            click.option(
                "--threads",
                type=click.IntRange(1),
                help="CPU threads of the experts [default: all].",
            ),
        )
    ):
        command = option(command)
    return command


def writable(ctx: click.Context, param: click.Parameter, value: _P) -> _P:
    """Refuses before a run, which may be long, what could not be written after it."""
    if value is None or value == "-":
        return value
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"{path} is a directory", ctx, param)
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}", ctx, param)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written", ctx, param)
    return value


def json_option(command: _F) -> _F:
    return click.option(
        "--json",
        "json_path",
        metavar="FILE",
        callback=writable,
        help="Write the result as JSON; - for standard output.",
    )(command)


def trace_option(command: _F) -> _F:
    """`--trace`, of commands that run a model."""
    return click.option(
        "--trace",
        "trace_path",
        metavar="FILE",
        type=OUTPUT,
        callback=_trace_path,
        help="Write which experts each token wanted, to a file that ends in .csv or .moetrace.",
    )(command)


def _trace_path(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in SUFFIXES:
        raise click.BadParameter(f"{value} ends in neither {' nor '.join(SUFFIXES)}", ctx, param)
    return writable(ctx, param, value)


def write_json(path: str, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n"
    if path == "-":
        click.echo(text, nl=False)
    else:
        Path(path).write_text(text, encoding="utf-8")
