"""The demonstration: one prompt under many placements, the same bytes from all of them, and from each the
hits that were simulated before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from moepool.plan import Plan, make_plan
from moepool.recorder import TraceRecorder
from moepool.runner.config import Config
from moepool.runner.generate import Generation, generate
from moepool.runner.model import Checkpoint, Placement
from moepool.runner.table import format_table
from moepool.simulate import SimulationRun, simulate
from moepool.trace import Trace, TraceModel

PROMPT = "def read_config(path):\n    "

HEADER = (
    *("device", "slots", "policy", "miss", "hits", "simulated", "of", "copied MB", "tokens/s", "text"),
    "logits",
)


@dataclass(frozen=True)
class Row:
    """One placement, what it gave, and what the simulator said that its pools would count."""

    placement: Placement
    generation: Generation
    simulated: SimulationRun

    @property
    def text_sha256(self) -> str:
        """Of the generated text."""
        return hashlib.sha256(self.generation.text.encode()).hexdigest()

    @property
    def output(self) -> tuple[str, str]:
        """What must not depend on the placement: hashes of the text and of the logits."""
        return self.text_sha256, self.generation.logits_sha256

    @property
    def as_simulated(self) -> bool:
        """Whether the pools counted the hits, misses, evictions and bytes that were simulated."""
        stats, run = self.generation.stats, self.simulated
        names = ("hits", "misses", "prompt_hits", "prompt_misses", "evictions")
        counted = [stats[name] for name in names], stats["copied_bytes"]
        return counted == ([int(run.by_layer[name].sum()) for name in names], run.copied_bytes)

    def cells(self) -> list[str]:
        """The row as printed, in the order of `HEADER`."""
        placement, stats, speed = self.placement, self.generation.stats, self.generation.tokens_per_second
        low, high = min(self.simulated.slots), max(self.simulated.slots)
        plan = placement.plan
        policy = str(placement.policy) if plan is None else f"{plan.policy}, planned"
        return [
            placement.device,
            str(low) if low == high else f"{low}-{high}",
            policy if high else "-",
            placement.miss if plan is None else plan.miss,
            str(stats["hits"]),
            str(self.simulated.hits),
            str(stats["hits"] + stats["misses"]),
            f"{stats['copied_bytes'] / 1e6:.1f}",
            "-" if speed is None else f"{speed:.1f}",
            self.text_sha256[:8],
            self.generation.logits_sha256[:16],
        ]


@dataclass(frozen=True)
class Comparison:
    """All rows of a demonstration, the first being what the others are compared with."""

    prompt: str
    rows: list[Row]
    plan: Plan

    @property
    def different(self) -> list[int]:
        """Numbers of the rows, counted from 1, whose text or logits differ from the first row's."""
        return [i for i, row in enumerate(self.rows, start=1) if row.output != self.rows[0].output]

    @property
    def unforeseen(self) -> list[int]:
        """Numbers of the rows, counted from 1, whose pools counted otherwise than was simulated."""
        return [i for i, row in enumerate(self.rows, start=1) if not row.as_simulated]

    def table(self) -> str:
        """The rows as text."""
        return format_table(HEADER, [row.cells() for row in self.rows], left=(0, 2, 3, 9, 10))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "prompt": self.prompt,
            "rows": [
                {
                    "placement": asdict(row.placement),
                    "text_sha256": row.text_sha256,
                    "tokens_per_second": row.generation.tokens_per_second,
                    **asdict(row.generation),
                    "simulated": row.simulated.as_dict(),
                }
                for row in self.rows
            ],
            "plan": asdict(self.plan),
            "as_simulated": not self.unforeseen,
            "same_bytes": not self.different,
        }

    def words(self) -> str:
        """What was planned, in a line."""
        slots = ", ".join(str(layer.slots) for layer in self.plan.layers)
        return (
            f"planned for 3/8 of the memory of all experts: {slots} slots under {self.plan.policy}, "
            f"{100 * self.plan.hit_rate:.1f} % hits expected"
        )

    def verdict(self) -> str:
        """Two lines: whether pools counted what was simulated, and whether all bytes are the same."""
        lines = []
        for what, wrong, how in (
            ("counts as simulated", self.unforeseen, "do not"),
            ("same bytes", self.different, "differ from row 1"),
        ):
            rows = ", ".join(map(str, wrong))
            lines.append(
                f"{what}: " + (f"no, rows {rows} {how}" if wrong else f"yes ({len(self.rows)} placements)")
            )
        return "\n".join(lines)


def placements(config: Config, trace: Trace, plan: Plan, device: str) -> Iterator[tuple[Placement, str]]:
    """No slots, few to all slots under LRU, the hottest half resident, misses computed by the host, and a
    plan; each with the policy by which it is simulated.

    The hottest are what the prompt wants most.
    """
    half = max(config.experts // 2, 1)
    yield Placement(0, device=device), "lru"
    for share in (8, 4, 2, 1):
        yield Placement(max(config.experts // share, 1), device=device), "lru"
    yield Placement(half, "static", device=device, hot=trace.hottest(half, "prompt")), "static-prompt"
    yield Placement(half, miss="host", device=device), "lru"
    yield Placement(device=device, plan=plan), plan.policy


def run_demo(
    checkpoint: Checkpoint,
    devices: Sequence[str] = ("cpu",),
    n: int = 48,
    prompt: str = PROMPT,
    progress: bool = False,
) -> Comparison:
    """Traces `n` tokens, plans and simulates by that, and generates them again under every placement.

    Parameters
    ----------
    checkpoint : Checkpoint
    devices : sequence of str
    n : int
    prompt : str
    progress : bool
        Show a bar on standard error if that is a terminal.
    """
    config = checkpoint.config
    recorder = TraceRecorder(TraceModel(config.experts, config.experts_used, config.layers))
    with checkpoint.model() as model:
        generate(model, checkpoint.tokenizer, prompt, n, stop_at_eos=False, trace=recorder)
    trace = recorder.trace()
    records = [layer.record_bytes for layer in checkpoint.store]
    # A single token has no decode step to plan by.
    planned = trace if trace.decode.any() else _as_decode(trace)
    plan = make_plan(planned, sum(records) * config.experts * 3 // 8, records)
    todo = [each for device in devices for each in placements(config, trace, plan, device)]
    rows = []
    for placement, policy in tqdm(todo, disable=None if progress else True, unit="run", leave=False):
        slots = [layer.slots for layer in plan.layers] if placement.plan else placement.slots
        found = simulate(trace, [slots], [policy], record_bytes=records)
        with checkpoint.model(placement) as model:
            generation = generate(model, checkpoint.tokenizer, prompt, n, stop_at_eos=False)
        rows.append(Row(placement, generation, found.runs[0]))
    return Comparison(prompt, rows, plan)


def _as_decode(trace: Trace) -> Trace:
    return Trace(trace.model, trace.step, trace.layer, trace.pos, ~trace.decode, trace.ids)
