"""The residency law and its policies, as plainly as they can be said.

Counts are halved when it is time, elections look at everybody, victims are sorted. Written from
docs/design.md, not from the core.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import moepool

EMPTY = -1


@dataclass
class Outcome:
    """What one step did."""

    tick: int
    bypass: bool
    hits: list[int]
    misses: list[int]
    admissions: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # expert, slot, whom it replaces or -1


class Residency:
    """Who lies in which slot.

    Attributes
    ----------
    expert_in
        The expert of each slot, -1 for an empty one.
    last
        By expert: tick of the last step that wanted it and did not bypass.
    uses
        By expert, how often it was wanted: halved now and then, or since the last election.
    """

    def __init__(
        self,
        experts: int,
        slots: int,
        policy: moepool.Policy,
        admit: int | None = None,
        hot: Sequence[int] | None = None,
    ) -> None:
        self.experts, self.policy, self.admit = experts, policy, admit
        if policy.name == "static" and hot is None:
            hot = range(experts)
        self.hot = [*(hot or ())]
        self.pinned = len(self.hot) if policy.name == "pinned" else 0
        self.expert_in = self._fresh(0, slots)
        self.tick = 0
        self.last = [0] * experts
        self.uses = [0] * experts
        self.halved = 0
        self.protected: set[int] = set()
        self.elections = 0  # periods that had passed at the last one
        self.elected: set[int] = set()

    @property
    def slots(self) -> int:
        return len(self.expert_in)

    def slot_of(self, expert: int) -> int:
        return self.expert_in.index(expert) if expert in self.expert_in else EMPTY

    def step(self, wanted: Sequence[int], prompt: bool = False, leased: Container[int] = ()) -> Outcome:
        """wanted: distinct experts, at least one. leased: slots that may not be overwritten."""
        self.tick += 1
        out = Outcome(
            self.tick,
            prompt or len(wanted) > self.slots,
            [e for e in wanted if e in self.expert_in],
            sorted(e for e in wanted if e not in self.expert_in),
        )
        if out.bypass:
            return out
        self._count(wanted)
        if self.policy.name == "slru":
            self._protect(out.hits)
        if self.policy.name != "static":
            self._admit(out, wanted, leased)
        return out

    def prefetch(self, experts: Sequence[int], leased: Container[int] = ()) -> list[tuple[int, int, int]]:
        """Experts, distinct, before they are wanted: expert, slot and whom it replaces."""
        if self.policy.name == "static":
            return []
        missing = [e for e in experts if e not in self.expert_in]
        for expert in experts:
            self.last[expert] = self.tick
        came = []
        for expert, slot in zip(missing, self._victims(experts, leased), strict=False):
            came.append((expert, slot, self.expert_in[slot]))
            self._put(expert, slot)
        return came

    def resize(self, slots: int, leased: Container[int] = ()) -> None:
        """More slots are empty, or take hot experts in. Of fewer those that would be the last to go stay, and
        move if they must."""
        if slots >= self.slots:
            self.expert_in += self._fresh(self.slots, slots)
            return
        order = [s for s in range(self.pinned, self.slots) if s not in leased and self.expert_in[s] != EMPTY]
        if self.policy.name == "static":
            order.reverse()
        else:
            order.sort(key=lambda s: (self._worth(self.expert_in[s]), s))
        for slot in order[: max(0, self.slots - self.expert_in.count(EMPTY) - slots)]:
            self._put(EMPTY, slot)
        for slot in range(slots, self.slots):
            expert = self.expert_in[slot]
            if expert != EMPTY:
                self.expert_in[self.expert_in.index(EMPTY)] = expert
        del self.expert_in[slots:]

    def _fresh(self, first: int, end: int) -> list[int]:
        return [self.hot[slot] if slot < len(self.hot) else EMPTY for slot in range(first, end)]

    def _put(self, expert: int, slot: int) -> None:
        self.protected.discard(self.expert_in[slot])
        self.expert_in[slot] = expert

    def _victims(self, wanted: Sequence[int], leased: Container[int]) -> list[int]:
        victims = [slot for slot in range(self.slots) if self._may_go(slot, wanted, leased)]
        empty = [slot for slot in victims if self.expert_in[slot] == EMPTY]
        others = [slot for slot in victims if self.expert_in[slot] != EMPTY]
        return empty + sorted(others, key=lambda slot: (self._worth(self.expert_in[slot]), slot))

    def _count(self, wanted: Sequence[int]) -> None:
        if self.policy.name == "reelect":
            periods = self.tick // self.policy.period
            if periods > self.elections:
                stand = [e for e in range(self.experts) if self.uses[e]]
                stand.sort(key=lambda e: (-self.uses[e], -self.last[e], e))
                self.elected = set(stand[: self.slots])
                self.uses = [0] * self.experts
                self.elections = periods
        else:
            while self.halved < self.tick // self.policy.half_life:
                self.uses = [count // 2 for count in self.uses]
                self.halved += 1
        for expert in wanted:
            self.uses[expert] += 1
            self.last[expert] = self.tick

    def _protect(self, hits: Sequence[int]) -> None:
        self.protected |= set(hits)
        excess = max(0, len(self.protected) - self.slots * self.policy.protected_percent // 100)
        for expert in sorted(self.protected, key=lambda e: (self.last[e], self.slot_of(e)))[:excess]:
            self.protected.remove(expert)
            self.last[expert] = self.tick

    def _claim(self, expert: int) -> int:
        if self.policy.name == "reelect":
            return int(expert in self.elected)
        return self.uses[expert] if self.policy.guard or self.policy.name in ("lfu", "lfru") else 0

    def _worth(self, expert: int) -> tuple[int, int]:
        if self.policy.name == "lfu":
            return self.uses[expert], self.last[expert]
        if self.policy.name == "lfru":
            return 0, self.last[expert] + self.policy.weight * self.uses[expert]
        return int(expert in self.protected or expert in self.elected), self.last[expert]

    def _may_go(self, slot: int, wanted: Sequence[int], leased: Container[int]) -> bool:
        expert = self.expert_in[slot]
        if slot in leased or expert in wanted:
            return False
        return expert == EMPTY or (slot >= self.pinned and expert not in self.elected)

    def _may_replace(self, expert: int, victim: int) -> bool:
        if victim == EMPTY:
            return True
        if self.policy.name == "reelect" and self.elections and expert not in self.elected:
            return False
        return not self.policy.guard or self.uses[expert] > self.uses[victim]

    def _admit(self, out: Outcome, wanted: Sequence[int], leased: Container[int]) -> None:
        missing = sorted(out.misses, key=lambda e: (-self._claim(e), e))[: self.admit]
        for expert, slot in zip(missing, self._victims(wanted, leased), strict=False):
            victim = self.expert_in[slot]
            if self._may_replace(expert, victim):
                self._put(expert, slot)
                out.admissions.append((expert, slot, victim))
