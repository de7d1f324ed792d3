"""From a run to a policy: record, simulate, plan, run by the plan, and try a policy of your own.

python policy.py [MODEL.gguf]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

import moepool
from moepool.runner import Checkpoint, Placement, bundled_model, generate

PROMPT, TOKENS = "import os\n\ndef ", 64


class Clock(moepool.Chooser):
    """A hand goes round the slots: who was used since it came by last stays, the next one goes."""

    def begin(self, experts: int, slots: int) -> None:
        """Before the first step of each layer."""
        self.hand, self.used = 0, [False] * slots

    def choose(
        self, tick: int, wanted: list[int], missing: list[int], expert_in: list[int]
    ) -> Iterable[tuple[int, int]]:
        """A slot for everyone that is missing."""
        for slot, expert in enumerate(expert_in):
            self.used[slot] |= expert in wanted
        chosen: dict[int, int] = {}
        for expert in missing:
            while True:
                slot, self.hand = self.hand, (self.hand + 1) % len(expert_in)
                if expert_in[slot] in wanted or slot in chosen:
                    continue  # this step reads it
                if not self.used[slot]:
                    break
                self.used[slot] = False
            chosen[slot] = expert
            self.used[slot] = True
        return [(expert, slot) for slot, expert in chosen.items()]


def main(path: str) -> None:
    """Does it all with one model, on the CPU."""
    with Checkpoint(path, progress=False) as checkpoint:
        # 1. Record what a run wants. The text is the same with any number of slots, or none.
        with (
            checkpoint.model() as model,
            moepool.PoolRecorder(moepool.trace_model(path), model.pools) as recorder,
        ):
            text = generate(model, checkpoint.tokenizer, PROMPT, TOKENS, stop_at_eos=False, trace=recorder)
        trace = recorder.trace()
        print("recorded:", trace)

        # 2. Simulate: policies by name, and one of your own.
        records = [layer.record_bytes for layer in checkpoint.store]
        slots = checkpoint.config.experts // 2
        policies = ["belady", "lru", "lfu:half_life=64,guard", Clock()]
        found = moepool.simulate(trace, slots, policies, record_bytes=records)
        for run in found.runs:
            print(f"{run.policy}: {100 * run.hit_rate:.1f} % hits, {run.admitted} copies")

        # 3. Plan: as much memory as that, where it brings most.
        plan = moepool.make_plan(trace, slots * sum(records), records)
        print(f"planned: {[layer.slots for layer in plan.layers]} slots under {plan.policy}")

        # 4. Run by the plan: the same text, and the hits that were foretold.
        with checkpoint.model(Placement(plan=plan)) as model:
            again = generate(model, checkpoint.tokenizer, PROMPT, TOKENS, stop_at_eos=False)
        print("same logits:", "yes" if again.logits_sha256 == text.logits_sha256 else "NO")
        print("hits as planned:", "yes" if again.stats["hit_rate"] == plan.hit_rate else "NO")

        # 5. Run a pool by your own policy. Here the first layer takes the recorded steps again.
        layer = checkpoint.store[0]
        x = np.ones((1, layer.matrices["gate"].columns), np.float32)
        rows = trace.layer == layer.block
        with moepool.Pool(layer, slots) as pool:
            chosen, ffn = moepool.ChosenPool(pool, Clock()), moepool.ExpertFFN(pool)
            for step in np.unique(trace.step[rows]):
                at = rows & (trace.step == step)
                ids = trace.ids[at]
                phase = "decode" if trace.decode[at].all() else "prompt"
                with chosen.resolve(ids, phase=phase) as route:
                    ffn(np.repeat(x, len(ids), 0), route, np.full(ids.shape, 0.25, np.float32))
            hits = pool.stats().hits
        print("Clock, run:", hits, "hits; simulated:", found.run("Clock", slots).by_layer["hits"][0])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(bundled_model()))
