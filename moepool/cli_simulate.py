"""`moepool simulate`: what every policy would do with a trace, in words, tables, JSON and a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import click
from click.core import ParameterSource

from moepool.cli_trace import TOP, load, reading_options, shares_of
from moepool.errors import ArgumentError, FormatError, MoePoolError, UnsupportedError, warn
from moepool.options import FILE, checked, environment, json_option, writable, write_json
from moepool.plan import Plan
from moepool.plots import plot_hit_rates, require_matplotlib
from moepool.rates import Rates, rates_path, verdict
from moepool.runner.info import ModelInfo
from moepool.runner.table import format_table
from moepool.simulate import POLICIES, Simulation, SimulationRun, simulate, split_policies
from moepool.trace import Trace, trace_model

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([KMG]I?B|)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "10GiB", "500MB" or "4096".

    Raises
    ------
    ArgumentError
        It is not such a size.

    Examples
    --------
    >>> parse_size("1.5GiB")
    1610612736
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (not found[2] and "." in found[1]):
        raise ArgumentError(f"{_short(text)} is not a size: write 4GiB, 500MB or a number of bytes")
    size = int(Fraction(found[1]) * _UNITS[found[2].upper()])
    if size >= 2**63:
        raise ArgumentError(f"{_short(text)} is more than any memory")
    return size


def _short(text: str) -> str:
    return repr(text if len(text) < 40 else text[:37] + "...")


def rates_of(path: Path | None) -> Rates | None:
    """The rates that were asked for, or those of this machine if they were measured."""
    if path is not None:
        return Rates.load(path)
    if not rates_path().exists():
        return None
    try:
        return Rates.load(rates_path())
    except MoePoolError as error:
        warn(f"{error}; `moepool doctor --measure` writes it anew")
        return None


def record_bytes_of(model: Path, layers: Sequence[int]) -> list[int]:
    """What a slot takes in each of these layers.

    Raises
    ------
    UnsupportedError
        moepool does not compute with a type of the model.
    ArgumentError
        A layer has no experts.
    """
    info = ModelInfo.from_gguf(model)
    if info.record_bytes is None:
        raise UnsupportedError(f"{model}: moepool does not compute with {', '.join(info.not_computed)}")
    records = {layer.block: layer.record_bytes or 0 for layer in info.layers}
    if missing := [layer for layer in layers if layer not in records]:
        raise ArgumentError(f"the trace has layer {missing[0]}, in which {model} has no experts")
    return [records[layer] for layer in layers]


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    parts = value.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", part.strip()) for part in parts):
        raise click.BadParameter(f"{_short(value)} is not a list like 8,16,32", ctx, param)
    return [int(part) for part in parts]


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Sizes, commas between; in the environment also what `plan` takes."""
    named = ctx.get_parameter_source("vram") == ParameterSource.ENVIRONMENT
    if value is not None and not (named and value == "auto"):
        checked(lambda text: [parse_size(size) for size in text.split(",")])(ctx, param, value)
    return value


@click.command("simulate")
@click.argument("trace", type=FILE)
@click.option("--slots", callback=_numbers, help="Slots of a layer, a list: 8,16,32 [default: five sizes].")
@click.option(
    "--vram",
    callback=_sizes,
    **environment("VRAM"),
    help="In place of --slots, memory of all slots: 2GiB,4GiB. Needs --model.",
)
@click.option("--plan", type=FILE, help="In place of --slots, those of a plan for each layer.")
@click.option(
    "--policy",
    "policies",
    default="all",
    show_default=True,
    help="Names, commas between; options follow a colon, as in lru,lfu:half_life=64,guard,belady.",
)
@click.option("--profile", type=FILE, help="Trace of another run, for static-profile and pinned.")
@click.option("--admit", type=click.IntRange(0), help="The most experts admitted a step [default: no limit].")
@reading_options
@click.option("--rates", type=FILE, help="Rates of a machine [default: what `doctor --measure` wrote].")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: all].")
@click.option("--by-layer", is_flag=True, help="Show hit rates and evictions of each layer too.")
@click.option("--plot", metavar="FILE", callback=writable, help="Draw hit rates: .png, .svg or .pdf.")
@json_option
def simulate_command(
    trace: Path,
    slots: list[int] | None,
    vram: str | None,
    plan: Path | None,
    policies: str,
    profile: Path | None,
    admit: int | None,
    model: Path | None,
    experts: int | None,
    lenient: bool,
    rates: Path | None,
    threads: int | None,
    by_layer: bool,
    plot: str | None,
    json_path: str | None,
) -> None:
    """What pools would do with a trace: hits, copies and evictions, for each policy and number of slots.

    The counts are those that pools come to when they run the same steps.
    """
    if plot is not None:
        require_matplotlib()
    speeds = rates_of(rates)
    of = None if model is None else trace_model(model)
    planned = None if plan is None else Plan.load(plan, of)
    loaded = load(trace, of, experts, lenient)
    other = None if profile is None else load(profile, of, experts, lenient)
    # A trace that does not know its model is of the one that the others know.
    for known in (None if planned is None else planned.model, None if other is None else other.model):
        if known is not None and known.fingerprint and not loaded.model.fingerprint:
            loaded = loaded.of(known)
    if plan is not None:
        planned = Plan.load(plan, loaded.model)
    if other is not None:
        try:
            other = other.of(loaded.model)
        except FormatError as error:
            raise FormatError(f"--profile {profile}: {error}") from None
    layers = loaded.info().layers
    records = None if model is None else record_bytes_of(model, layers)
    found = simulate(
        loaded,
        _budgets(slots, vram, records, loaded.model.experts)
        if planned is None
        else [_planned(planned, layers, slots or vram)],
        _policies(policies, loaded, other, planned),
        profile=other,
        admit=admit,
        record_bytes=records,
        threads=threads,
        progress=True,
    )
    words = verdict(found, speeds)
    for run in found.runs:
        if planned is not None and run.policy == planned.policy:
            words = f"The plan's policy is {run.policy}: {100 * run.hit_rate:.1f} % hits here. {words}"
    if json_path is not None:
        facts = {"trace": str(trace), "model": asdict(loaded.model), "admit": admit, "verdict": words}
        facts |= {"skipped": dict(loaded.skipped), "rates": None if speeds is None else asdict(speeds)}
        facts |= {"skew": {f"top_{p}": s for p, s in zip(TOP, shares_of(found.counts.sum(0)), strict=True)}}
        write_json(json_path, facts | found.as_dict())
    if plot is not None:
        plot_hit_rates(found, plot, f"{trace.name}: {found.tokens:,} tokens, {len(layers)} layers")
    if json_path != "-":
        click.echo(report(found, speeds, by_layer))
        click.echo()
        click.echo(words)


def _budgets(slots: list[int] | None, vram: str | None, records: list[int] | None, experts: int) -> list[int]:
    source = click.get_current_context().get_parameter_source("vram")
    if source == ParameterSource.ENVIRONMENT and (slots is not None or records is None or vram == "auto"):
        if slots is None and vram != "auto":
            warn("MOEPOOL_VRAM has no effect without --model, whose experts say how much a slot takes")
        vram = None  # it is meant for `plan`
    if slots is not None and vram is not None:
        raise ArgumentError("--slots and --vram say the same: give one of them")
    if vram is not None:
        if records is None:
            raise ArgumentError("--vram needs --model, whose experts say how much a slot takes")
        slots = [min(parse_size(size) // sum(records), experts) for size in vram.split(",")]
    if slots is None:
        slots = [max(experts * eighths // 8, 1) for eighths in (1, 2, 3, 4, 6)]
    return sorted(set(slots))


def _planned(plan: Plan, layers: Sequence[int], other: object) -> list[int]:
    """The slots of a plan, for each of these layers."""
    if other and click.get_current_context().get_parameter_source("vram") != ParameterSource.ENVIRONMENT:
        raise ArgumentError("--plan says how many slots there are: give no --slots and no --vram")
    return [plan.of(layer).slots for layer in layers]


def _policies(text: str, trace: Trace, profile: Trace | None, plan: Plan | None) -> list[str]:
    if text != "all":
        return split_policies(text)
    usable = [name for name in POLICIES if name != "static-prompt" or not trace.decode.all()]
    usable += ["static-profile"] if profile is not None else []
    if plan is not None and plan.policy not in (*usable, "static-prompt", "static-profile"):
        usable.append(plan.policy)
    return usable


# ----------------------------------------------------------------------------------------------------- tables


def report(found: Simulation, rates: Rates | None, by_layer: bool = False) -> str:
    """The tables of a simulation."""
    parts = [_skew(found), "Hit rate of decode steps, %\n" + _grid(found, lambda run: 100 * run.hit_rate)]
    if found.runs[0].bytes_per_token is not None:
        parts.append(
            "Copied into slots, MB a token\n" + _grid(found, lambda run: (run.bytes_per_token or 0) / 1e6)
        )
    else:
        parts.append(
            "Copied into slots, records a token\n"
            + _grid(found, lambda run: run.admitted / max(run.tokens, 1))
        )
    parts.append("Evictions\n" + _grid(found, lambda run: run.evictions))
    if rates is not None and rates.memory is not None and found.runs[0].record_bytes is not None:
        parts.append(
            f"Expected for the experts, ms a token ({rates.card})\n"
            + _grid(found, lambda run: 1e3 * rates.best(run)[1])
        )
    if by_layer:
        parts += _by_layer(found)
    return "\n\n".join(parts)


def _budget_names(found: Simulation) -> list[str]:
    names = []
    for run in _columns(found):
        low, high = min(run.slots), max(run.slots)
        name = str(low) if low == high else f"{low}-{high}"
        if run.slot_bytes is not None:
            size = run.slot_bytes
            name += f" ({size / 2**30:.1f} GiB)" if size >= 2**30 else f" ({size / 2**20:.1f} MiB)"
        names.append(name)
    return names


def _columns(found: Simulation) -> list[SimulationRun]:
    first = found.runs[0].policy
    return [run for run in found.runs if run.policy == first]


def _grid(found: Simulation, value: Callable[[SimulationRun], float]) -> str:
    """Policies down, slots across."""
    rows: dict[str, list[str]] = {}
    for run in found.runs:
        name = run.policy if run.attainable else f"{run.policy} *"
        number = value(run)
        rows.setdefault(name, [name]).append(f"{number:,}" if isinstance(number, int) else f"{number:.2f}")
    table = format_table(["slots", *_budget_names(found)], rows.values())
    return table + (
        "\n* knows the future, or repeats what was recorded" if any("*" in name for name in rows) else ""
    )


def _skew(found: Simulation) -> str:
    half, most = found.reuse_quantile(0.5), found.reuse_quantile(0.9)
    rows = [
        [
            layer,
            *(f"{100 * share:.0f} %" for share in shares_of(counts)),
            "-" if a is None else a,
            "-" if b is None else b,
        ]
        for layer, counts, a, b in zip(found.layers, found.counts, half, most, strict=True)
    ]
    header = ["layer", *(f"top {p} %" for p in TOP), "reuse, half", "nine tenths"]
    return (
        f"{found.tokens:,} tokens decoded, {len(found.layers)} layers of {found.experts} experts. Share of "
        "all uses that falls on the most\nwanted experts, and within how many other experts a use comes "
        "again:\n" + format_table(header, rows, left=())
    )


def _by_layer(found: Simulation) -> list[str]:
    out = []
    values: dict[str, Callable[[SimulationRun, int], str]] = {
        "Hit rate, %": lambda run, i: _share(run.by_layer["hits"][i], run.by_layer["misses"][i]),
        "Evictions": lambda run, i: f"{run.by_layer['evictions'][i]:,}",
    }
    for title, value in values.items():
        for column, name in zip(_columns(found), _budget_names(found), strict=True):
            runs = [run for run in found.runs if run.slots == column.slots]
            rows = [[layer, *(value(run, i) for run in runs)] for i, layer in enumerate(found.layers)]
            out.append(
                f"{title} by layer, {name} slots\n"
                + format_table(["layer", *(run.policy for run in runs)], rows, left=())
            )
    return out


def _share(hits: int, misses: int) -> str:
    return f"{100 * hits / (hits + misses):.2f}" if hits + misses else "-"
