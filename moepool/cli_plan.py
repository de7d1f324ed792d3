"""`moepool plan`: slots for each layer of a model, by what traces show."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from moepool.cli_simulate import parse_size, rates_of, record_bytes_of
from moepool.errors import ArgumentError, UnsupportedError
from moepool.memory import memory
from moepool.options import (
    FILE,
    MODEL,
    OUTPUT,
    checked,
    device_option,
    environment,
    json_option,
    writable,
    write_json,
)
from moepool.plan import Plan, auto_budget, make_plan
from moepool.runner.info import ModelInfo
from moepool.runner.table import format_table
from moepool.trace import Trace, trace_model


def _vram(text: str) -> str:
    """A size, or auto."""
    if text != "auto":
        parse_size(text)
    return text


@click.command("plan")
@click.argument("model", type=MODEL)
@click.option(
    "--trace",
    "traces",
    type=FILE,
    multiple=True,
    required=True,
    help="Routing to plan by; may be given again, for other texts.",
)
@click.option(
    "--vram",
    default="auto",
    show_default=True,
    callback=checked(_vram),
    **environment("VRAM"),
    help="Memory of all slots: 10GiB, or what is free but for a reserve.",
)
@click.option("--reserve", help="What auto leaves free: a size [default: 512MiB, or 5 % if that is more].")
@device_option("cuda:0", "Whose memory auto asks for.")
@click.option(
    "--policy",
    default="auto",
    show_default=True,
    help="auto: the best of lru, lfu, lfru, slru and reelect. Or one by name, static and pinned too.",
)
@click.option("--lenient", is_flag=True, help="Leave out and count what is damaged in traces.")
@click.option("--rates", type=FILE, help="Rates of a machine [default: what `doctor --measure` wrote].")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: all].")
@click.option("-o", "--output", type=OUTPUT, callback=writable, help="File for `generate --plan`.")
@json_option
def plan_command(
    model: Path,
    traces: tuple[Path, ...],
    vram: str,
    reserve: str | None,
    device: str,
    policy: str,
    lenient: bool,
    rates: Path | None,
    threads: int | None,
    output: Path | None,
    json_path: str | None,
) -> None:
    """Give each layer of a model the slots that bring most, and say what to expect of them."""
    budget, kept, told = _budget(vram, reserve, device)
    of = trace_model(model)
    trace = Trace.merge([Trace.load(path, of, lenient=lenient) for path in traces])
    layers = trace.info().layers
    experts = {layer.block: layer.experts for layer in ModelInfo.from_gguf(model).layers}
    if missing := [block for block in experts if block not in layers]:
        raise ArgumentError(f"the traces have no rows of block {missing[0]} of {model}: trace every layer")
    records = record_bytes_of(model, layers)
    plan = make_plan(
        trace,
        budget,
        records,
        experts=[experts[layer] for layer in layers],
        policy=policy,
        rates=rates_of(rates),
        threads=threads,
        progress=True,
    )
    plan = replace(plan, reserve_bytes=kept)
    if output is not None:
        plan.save(output)
    if json_path is not None:
        write_json(json_path, {"model_file": str(model), "budget": told} | asdict(plan))
    if json_path != "-":
        click.echo(_table(plan))
        click.echo()
        click.echo("\n".join(_words(plan, told)))


def _budget(vram: str, reserve: str | None, device: str) -> tuple[int, int | None, str]:
    """Bytes for slots, bytes to be left free while it runs, and where the figures come from."""
    if vram != "auto":
        if reserve is not None:
            raise ArgumentError("--reserve is what --vram auto leaves free")
        return parse_size(vram), None, f"{vram} was given"
    try:
        budget, kept, free = auto_budget(device, None if reserve is None else parse_size(reserve))
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; or plan for another machine with --vram SIZE") from None
    return (
        budget,
        kept,
        (
            f"{free.free / 2**30:.2f} GiB of {device} are free by {free.source}, {kept / 2**30:.2f} of them "
            "are left to others"
        ),
    )


def _table(plan: Plan) -> str:
    rows = [
        [
            layer.layer,
            layer.slots,
            f"{100 * layer.slots / layer.experts:.0f} %",
            f"{layer.slots * layer.record_bytes / 1e6:,.1f}",
            f"{100 * layer.hit_rate:.1f} %",
        ]
        for layer in plan.layers
    ]
    return format_table(["layer", "slots", "of experts", "MB", "hit rate"], rows, left=())


def _words(plan: Plan, budget: str) -> list[str]:
    """What to expect, and of what there is not enough."""
    speed = "" if plan.seconds is None else f", about {1e3 * plan.seconds:.2f} ms a token for the experts"
    need = sum(layer.experts * layer.record_bytes for layer in plan.layers)
    host = memory("cpu")
    lines = [
        f"{plan.policy}, miss={plan.miss!r}: {100 * plan.hit_rate:.1f} % of the experts wanted are in slots, "
        f"by {plan.tokens:,} traced tokens{speed}",
        f"slots take {plan.slot_bytes / 2**20:,.1f} MiB of {plan.budget_bytes / 2**20:,.1f} ({budget})",
        f"all experts take {need / 2**30:.2f} GiB of host memory, of which {host.free / 2**30:.2f} are free"
        + ("" if need <= host.free else ": the model does not fit, loading it will fail or swap"),
    ]
    return lines + list(plan.notes)
