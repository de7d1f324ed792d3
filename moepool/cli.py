"""The command line: `moepool generate | perplexity | info | doctor | demo | trace | simulate | plan`."""

from __future__ import annotations

import errno
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any, TextIO

import click
from click.core import ParameterSource

import moepool
from moepool.cli_plan import plan_command
from moepool.cli_simulate import simulate_command
from moepool.cli_trace import trace_group
from moepool.errors import ArgumentError, MoePoolError, MoePoolWarning, UnsupportedError, warn
from moepool.options import (
    FILE,
    MODEL,
    OUTPUT,
    json_option,
    placement_options,
    trace_option,
    writable,
    write_json,
)
from moepool.plan import Plan, Watermark
from moepool.policy import Policy, PolicyName
from moepool.pool import Miss
from moepool.rates import Rates, measure_rates, rates_path
from moepool.recorder import PoolRecorder
from moepool.runner.config import Config
from moepool.runner.demo import run_demo
from moepool.runner.devices import (
    CUPY_REMEDY,
    CudaDevice,
    Dense,
    available_devices,
    cuda_devices,
    dense_module,
)
from moepool.runner.generate import Generation, Sampling, generate
from moepool.runner.info import ModelInfo
from moepool.runner.model import Checkpoint, Model, Placement
from moepool.runner.perplexity import Perplexity, perplexity
from moepool.runner.profile import RoutingProfile
from moepool.runner.table import format_table
from moepool.trace import Trace, trace_model
from moepool.tracefile import PROFILE_HEADER


class _Commands(click.Group):
    """Prints errors and warnings of moepool as one line each, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("default", MoePoolWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except MoePoolError as error:
                raise click.ClickException(str(error)) from error
            except OSError as error:
                if error.errno == errno.EPIPE:  # click ends quietly when the reader of a pipe is gone
                    raise
                raise click.ClickException(str(error)) from error


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    click.echo(f"Warning: {message}", err=True)


def _placement(
    checkpoint: Checkpoint,
    model: Path,
    slots: int,
    policy: Policy,
    miss: Miss,
    device: str,
    hot: Path | None,
    plan: Path | None,
) -> Placement:
    if plan is not None:
        overriding = _overriding()
        if not overriding:
            return Placement(device=device, plan=Plan.load(plan, trace_model(model)))
        warn(f"MOEPOOL_PLAN is set aside because {overriding[0]} was given; without it the plan holds")
    if slots == 0 and _given("policy"):
        warn(f"--policy {policy} has no effect without --slots: no expert gets a slot")
    name: Policy | PolicyName = policy if policy != Policy(policy.name) else policy.name
    config = checkpoint.config
    if policy.name not in ("static", "pinned"):
        # The environment's is for the policies that have a use for it.
        if hot is not None and _given("hot"):
            raise ArgumentError("--hot chooses the experts of --policy static and pinned")
        return Placement(slots, name, miss, device)
    if hot is None:
        if policy.name == "pinned":
            raise ArgumentError("--policy pinned needs --hot, a profile or a trace: the experts that stay")
        return Placement(slots, name, miss, device)
    kept = slots if policy.name == "static" else slots // 2
    return Placement(slots, name, miss, device, _hottest(hot, kept, model, config))


@contextmanager
def _recording(model: Path, runner: Model, path: Path | None) -> Iterator[PoolRecorder | None]:
    """Writes the routing of what runs inside to a file, if there is to be one."""
    if path is None:
        yield None
        return
    # What measured times had a say in can only be repeated from what was admitted.
    admissions = runner.placement.miss == "auto"
    with PoolRecorder(trace_model(model), runner.pools, admissions) as recorder:
        yield recorder
    recorder.trace().save(path)


def _watching(placement: Placement, runner: Model) -> AbstractContextManager[object]:
    """Gives slots back when others take the device's memory, if the plan was made by what was free there."""
    plan = placement.plan
    if plan is None or plan.reserve_bytes is None or placement.device == "cpu":
        return nullcontext()
    return Watermark(plan, runner.pools, placement.device).watching()


def _given(option: str) -> bool:
    """Whether it is an argument, not from the environment."""
    return click.get_current_context().get_parameter_source(option) == ParameterSource.COMMANDLINE


def _overriding() -> list[str]:
    """The arguments that say where experts live, while the plan is only named by the environment."""
    given = [f"--{name}" for name in ("slots", "policy", "hot") if _given(name)]
    if given and _given("plan"):
        raise ArgumentError(f"--plan says where experts live, and so does {given[0]}: give one of them")
    return given


def _hottest(path: Path, slots: int, model: Path, config: Config) -> list[list[int]]:
    """The experts that decode steps want most in each layer, by a profile or a trace."""
    with path.open("rb") as file:
        is_profile = file.readline().strip() == PROFILE_HEADER.encode()
    if is_profile:
        return RoutingProfile.load(path, config.layers, config.experts).hottest(slots)
    trace = Trace.load(path, trace_model(model))
    return trace.hottest(slots, "decode" if trace.decode.any() else None)


def _run_facts(model: Path, placement: Placement, dense: Dense) -> dict[str, Any]:
    """What a result depends on or was measured with."""
    return {
        "model": str(model),
        "placement": asdict(placement),
        "dense": dense,
        "threads": moepool.get_threads(),
        "version": moepool.__version__,
    }


def _stats_line(stats: dict[str, Any]) -> str:
    hit_rate = "no decode steps" if stats["hit_rate"] is None else f"hit rate {100 * stats['hit_rate']:.1f} %"
    return f"{hit_rate}, {stats['evictions']} evictions, {stats['copied_bytes'] / 1e6:.1f} MB copied"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(moepool.__version__, prog_name="moepool")
def main() -> None:
    """Mixture-of-experts models with their experts in host memory and the hot ones in slots on a device.

    MODEL is a GGUF file, or tiny-moe for the small model that comes with the package.
    """


@main.command("generate")
@click.argument("model", type=MODEL)
@click.option("-p", "--prompt", required=True, help="Text to continue.")
@click.option(
    "-n", "--tokens", "n", type=click.IntRange(1), default=64, show_default=True, help="Tokens to generate."
)
@placement_options
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0: always the most probable token."
)
@click.option("--top-k", type=int, default=0, show_default=True, help="Draw from this many tokens; 0: all.")
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Draw from this share of probability."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random numbers.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token.")
@click.option(
    "--profile", type=OUTPUT, callback=writable, help="Write how often each expert was wanted, as CSV."
)
@trace_option
@json_option
def generate_command(
    model: Path,
    prompt: str,
    n: int,
    threads: int | None,
    dense: Dense,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ignore_eos: bool,
    profile: Path | None,
    trace_path: Path | None,
    json_path: str | None,
    **where: Any,
) -> None:
    """Continue a text. The text goes to standard output, figures to standard error."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    if threads is not None:
        moepool.set_threads(threads)
    with Checkpoint(model, xp=dense_module(dense, where["device"])) as checkpoint:
        placement = _placement(checkpoint, model, **where)
        counts = (
            None if profile is None else RoutingProfile(checkpoint.config.layers, checkpoint.config.experts)
        )
        with (
            checkpoint.model(placement) as runner,
            _recording(model, runner, trace_path) as recorder,
            _watching(placement, runner),
        ):
            result = generate(
                runner,
                checkpoint.tokenizer,
                prompt,
                n,
                sampling,
                stop_at_eos=not ignore_eos,
                on_text=None if json_path == "-" else lambda piece: click.echo(piece, nl=False),
                profile=counts,
                trace=recorder,
            )
    if json_path != "-":
        click.echo()
        click.echo(_generation_line(result), err=True)
    if profile is not None and counts is not None:
        counts.save(profile)
    if json_path is not None:
        facts = _run_facts(model, placement, dense) | {"prompt": prompt, "sampling": asdict(sampling)}
        write_json(json_path, facts | asdict(result) | {"tokens_per_second": result.tokens_per_second})


def _generation_line(result: Generation) -> str:
    speed = "" if result.tokens_per_second is None else f" at {result.tokens_per_second:.1f} tokens/s"
    return (
        f"[{len(result.prompt_tokens)} prompt tokens in {result.prompt_seconds:.2f} s, {len(result.tokens)} "
        f"generated{speed}, ended by {result.finish}; {_stats_line(result.stats)}; "
        f"logits sha256 {result.logits_sha256[:16]}]"
    )


@main.command("perplexity")
@click.argument("model", type=MODEL)
@click.argument("text", type=FILE)
@click.option("--context", type=int, default=512, show_default=True, help="Tokens of a window.")
@click.option("--windows", type=click.IntRange(1), help="Only the first N windows.")
@click.option("--batch", type=click.IntRange(1), help="Tokens of a forward pass [default: a window].")
@placement_options
@trace_option
@json_option
def perplexity_command(
    model: Path,
    text: Path,
    context: int,
    windows: int | None,
    batch: int | None,
    threads: int | None,
    dense: Dense,
    trace_path: Path | None,
    json_path: str | None,
    **where: Any,
) -> None:
    """Perplexity of a text, as llama.cpp defines it: the second half of every window is scored."""
    try:
        content = text.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{text} is not UTF-8: {error}") from None
    if threads is not None:
        moepool.set_threads(threads)
    with Checkpoint(model, xp=dense_module(dense, where["device"])) as checkpoint:
        placement = _placement(checkpoint, model, **where)
        with (
            checkpoint.model(placement) as runner,
            _recording(model, runner, trace_path) as recorder,
            _watching(placement, runner),
        ):
            result = perplexity(
                runner,
                checkpoint.tokenizer,
                content,
                context,
                windows,
                batch,
                progress=True,
                trace=recorder,
            )
    if json_path != "-":
        click.echo(_perplexity_line(result))
    if json_path is not None:
        facts = _run_facts(model, placement, dense) | {
            "text": str(text),
            "context": context,
            "batch": batch or context,
        }
        write_json(json_path, facts | asdict(result))


def _perplexity_line(result: Perplexity) -> str:
    return (
        f"perplexity {result.perplexity:.4f} +/- {result.error:.4f} ({result.scored} predictions of "
        f"{result.windows} windows, {result.seconds:.1f} s; {_stats_line(result.stats)}; "
        f"logits sha256 {result.logits_sha256[:16]})"
    )


@main.command("info")
@click.argument("model", type=MODEL)
@json_option
def info_command(model: Path, json_path: str | None) -> None:
    """Layers, experts and their types, and what slots cost. Any architecture with experts."""
    info = ModelInfo.from_gguf(model)
    if json_path is not None:
        slots = {
            "record_bytes": info.record_bytes,
            "slot_costs": info.slot_costs(),
            "not_computed": info.not_computed,
        }
        write_json(json_path, {"model": str(model)} | asdict(info) | slots)
    if json_path == "-":
        return
    first = info.layers[0]
    used = "" if info.experts_used is None else f", top-{info.experts_used}"
    click.echo(
        f"{info.name} ({info.architecture}): {len(info.layers)} MoE layers, {first.experts} experts{used}"
    )
    click.echo()
    strange = info.not_computed
    rows = [
        [
            x.block,
            *(f"{t} *" if t in strange else t for t in x.types.values()),
            f"{x.hidden} x {x.width}",
            f"{x.expert_bytes:,}",
            "-" if x.record_bytes is None else f"{x.record_bytes:,}",
        ]
        for x in info.layers
    ]
    header = ["block", *first.types, "hidden x width", "bytes/expert", "bytes/slot"]
    click.echo(format_table(header, rows, left=(1, 2, 3)))
    click.echo()
    if strange:
        click.echo(f"* {', '.join(strange)}: not computed by moepool, which computes")
        click.echo(f"  {', '.join(moepool.quant_types())}")
        return
    costs = [
        [c["slots"], f"{100 * min(c['slots'] / first.experts, 1):.0f} %", f"{c['bytes'] / 1e6:,.1f}"]
        for c in info.slot_costs()
    ]
    click.echo(format_table(["slots", "of experts", "MB, all layers"], costs, left=()))


@main.command("doctor")
@click.option(
    "--measure",
    is_flag=True,
    help="Measure how fast experts are read, for a few seconds, and keep it for `simulate` and `plan`.",
)
@json_option
def doctor_command(measure: bool, json_path: str | None) -> None:
    """What this build and this machine offer."""
    rates = _measured() if measure else None
    devices, build, kernels = available_devices(), moepool.build_info(), moepool.cpu_kernels()
    cards, why_none = _cards()
    if json_path is not None:
        report = {
            "version": moepool.__version__,
            "devices": {name: asdict(memory) for name, memory in devices.items()},
            "cuda": {card.name: asdict(card) for card in cards},
            "pinned_limit": moepool.get_pinned_limit(),
            "cpu_kernels": kernels,
            "cpu_kernel_problems": moepool.cpu_kernel_problems(),
            "threads": moepool.get_threads(),
            "build": build,
            "rates": None if rates is None else asdict(rates),
        }
        write_json(json_path, report)
    if json_path == "-":
        return
    click.echo(f"moepool {moepool.__version__}, {moepool.get_threads()} CPU threads")
    click.echo()
    known = {card.name: (card.card, card.capability) for card in cards}
    rows = [
        [name, *known.get(name, ("", "")), f"{m.total / 2**30:.1f}", f"{m.free / 2**30:.1f}", m.source]
        for name, m in devices.items()
    ]
    header = ["device", "card", "capability", "GiB", "free", "source"]
    click.echo(format_table(header, rows, left=(0, 1, 5)))
    for card in cards:
        if card.problem:
            click.echo(f"{card.name} cannot be used: {card.problem}")
    if len(devices) == 1:
        click.echo(f"no GPU, everything runs on the CPU{why_none}")
    click.echo()
    problems = moepool.cpu_kernel_problems()
    click.echo("CPU kernels: " + ", ".join(f"{n} ({problems.get(n, 'usable')})" for n in kernels))
    limit = moepool.get_pinned_limit()
    click.echo("Page-locked: " + ("no limit" if limit is None else f"at most {limit:,} bytes"))
    click.echo("Types:       " + ", ".join(moepool.quant_types()))
    click.echo(
        "Build:       " + ", ".join(f"{key} {value}" for key, value in build.items() if key != "version")
    )

    if rates is not None:
        click.echo()
        click.echo(f"Experts are read at {rates.host / 1e9:.1f} GB/s by {rates.threads} CPU threads")
        if rates.memory is not None and rates.link is not None:
            click.echo(f"and at {rates.memory / 1e9:.0f} GB/s by {rates.card} from its slots,")
            click.echo(f"{rates.link / 1e9:.1f} GB/s over the link")
        click.echo(
            f"The slowest of several measurements took {100 * rates.spread:.0f} % longer than the fastest, "
            "which is kept" + (": measure again when nothing else runs" if rates.spread > 0.1 else "")
        )
        click.echo(f"Written to {rates_path()}")


def _measured() -> Rates:
    """Measures the first GPU that can be used, or the CPU alone, and keeps the rates."""
    try:
        rates = measure_rates("cuda:0" if "cuda:0" in available_devices() else "cpu")
    except UnsupportedError as error:  # CuPy is missing
        click.echo(f"only the CPU is measured: {error}", err=True)
        rates = measure_rates("cpu")
    rates.save(rates_path())
    return rates


def _cards() -> tuple[list[CudaDevice], str]:
    """The CUDA devices, and why there are none."""
    try:
        return cuda_devices(), ""
    except MoePoolError as error:
        return [], f": {error}"


def _demo_devices() -> list[str]:
    """The CPU, and the first GPU if there is one that the runner can move arrays to."""
    if "cuda:0" not in available_devices():
        _, why_none = _cards()
        click.echo(f"no CUDA rows{why_none}", err=True)
        return ["cpu"]
    if importlib.util.find_spec("cupy") is None:
        click.echo(f"no CUDA rows: the runner needs CuPy there: {CUPY_REMEDY}", err=True)
        return ["cpu"]
    return ["cpu", "cuda:0"]


@main.command("demo")
@click.option("--model", type=MODEL, default="tiny-moe", show_default=True, help="Another GGUF file.")
@click.option(
    "-n", "--tokens", "n", type=click.IntRange(1), default=48, show_default=True, help="Tokens of each row."
)
@click.option("--device", "only", multiple=True, help="Only this device; may be given again [default: all].")
@json_option
@click.pass_context
def demo_command(
    ctx: click.Context, model: Path, n: int, only: tuple[str, ...], json_path: str | None
) -> None:
    """Trace a text, simulate and plan by it, generate it again under many placements, and compare every byte
    and count. Exits 1 if one differs."""
    devices = list(only) or _demo_devices()
    with Checkpoint(model) as checkpoint:
        comparison = run_demo(checkpoint, devices, n, progress=True)
    if json_path is not None:
        write_json(json_path, {"model": str(model)} | comparison.as_dict())
    if json_path != "-":
        click.echo(f"{checkpoint.config.name}, {n} tokens after {comparison.prompt!r}:")
        click.echo(indent(comparison.rows[0].generation.text, "    "))
        click.echo()
        click.echo(comparison.table())
        click.echo()
        click.echo(comparison.words())
        click.echo(comparison.verdict())
    if comparison.different or comparison.unforeseen:
        ctx.exit(1)


main.add_command(trace_group)
main.add_command(simulate_command)
main.add_command(plan_command)
