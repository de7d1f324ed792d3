"""The demonstration: one prompt under many placements, and the same bytes from all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from moepool.runner.config import Config
from moepool.runner.generate import Generation, generate
from moepool.runner.model import Checkpoint, Placement
from moepool.runner.profile import RoutingProfile
from moepool.runner.table import format_table

PROMPT = "def read_config(path):\n    "

HEADER = ("device", "slots", "policy", "miss", "hit rate", "copied MB", "tokens/s", "text", "logits")


@dataclass(frozen=True)
class Row:
    """One placement and what it gave."""

    placement: Placement
    generation: Generation

    @property
    def text_sha256(self) -> str:
        """Of the generated text."""
        return hashlib.sha256(self.generation.text.encode()).hexdigest()

    @property
    def output(self) -> tuple[str, str]:
        """What must not depend on the placement: hashes of the text and of the logits."""
        return self.text_sha256, self.generation.logits_sha256

    def cells(self) -> list[str]:
        """The row as printed, in the order of `HEADER`."""
        placement, stats, speed = self.placement, self.generation.stats, self.generation.tokens_per_second
        return [
            placement.device,
            str(placement.slots),
            str(placement.policy) if placement.slots else "-",
            placement.miss,
            "-" if stats["hit_rate"] is None else f"{100 * stats['hit_rate']:.1f} %",
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

    @property
    def different(self) -> list[int]:
        """Numbers of the rows, counted from 1, whose text or logits differ from the first row's."""
        return [i for i, row in enumerate(self.rows, start=1) if row.output != self.rows[0].output]

    def table(self) -> str:
        """The rows as text."""
        return format_table(HEADER, [row.cells() for row in self.rows], left=(0, 2, 3, 7, 8))

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
                }
                for row in self.rows
            ],
            "same_bytes": not self.different,
        }

    def verdict(self) -> str:
        """One line: whether all bytes are the same."""
        if self.different:
            return f"same bytes: no, rows {', '.join(map(str, self.different))} differ from row 1"
        return f"same bytes: yes ({len(self.rows)} placements)"


def placements(config: Config, profile: RoutingProfile, device: str) -> Iterator[Placement]:
    """No slots, few to all slots under LRU, the hottest half resident, and misses computed by the host."""
    half = max(config.experts // 2, 1)
    yield Placement(0, device=device)
    for share in (8, 4, 2, 1):
        yield Placement(max(config.experts // share, 1), device=device)
    yield Placement(half, "static", device=device, hot=profile.hottest(half))
    yield Placement(half, miss="host", device=device)


def run_demo(
    checkpoint: Checkpoint,
    devices: Sequence[str] = ("cpu",),
    n: int = 48,
    prompt: str = PROMPT,
    progress: bool = False,
) -> Comparison:
    """Generates `n` tokens under every placement on every device.

    The hot set of the static rows is what the prompt routes to, counted in a first run.

    Parameters
    ----------
    checkpoint : Checkpoint
    devices : sequence of str
    n : int
    prompt : str
    progress : bool
        Show a bar on standard error if that is a terminal.
    """
    profile = RoutingProfile(checkpoint.config.layers, checkpoint.config.experts)
    with checkpoint.model() as model:
        generate(model, checkpoint.tokenizer, prompt, 1, profile=profile)
    todo = [place for device in devices for place in placements(checkpoint.config, profile, device)]
    rows = []
    for placement in tqdm(todo, disable=None if progress else True, unit="run", leave=False):
        with checkpoint.model(placement) as model:
            generation = generate(model, checkpoint.tokenizer, prompt, n, stop_at_eos=False)
        rows.append(Row(placement, generation))
    return Comparison(prompt, rows)
