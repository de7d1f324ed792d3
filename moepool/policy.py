"""Policies: who is resident. The law that they follow is in docs/design.md, its integers in the core."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from moepool._native import handles
from moepool.checks import choice, count
from moepool.errors import ArgumentError

__all__ = ["Policy", "PolicyName", "parse_policy", "policy_from"]

PolicyName = Literal["lru", "static", "lfu", "lfru", "slru", "reelect", "pinned"]

_DEFAULTS = handles.pool_defaults()
_RANGES = {"half_life": (1,), "weight": (0, 1 << 20), "period": (1,), "protected_percent": (0, 100)}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "lru": ("guard",),
    "static": (),
    "lfu": ("guard", "half_life"),
    "lfru": ("guard", "half_life", "weight"),
    "slru": ("guard", "protected_percent"),
    "reelect": ("period",),
    "pinned": ("guard",),
}


@dataclass(frozen=True)
class Policy:
    """Which experts become resident, and which of them go.

    All count in steps of their pool and in integers, without clocks, so that the same calls give the same
    hits on every device. A prompt, or a step that wants more experts than there are slots, changes nothing.

    Attributes
    ----------
    name : str
        "lru" evicts the expert used longest ago. "static" keeps the experts it is made with and admits no
        others. "lfu" evicts the one used least often, "lfru" the one used longest ago, where each use is
        worth `weight` steps. "slru" is LRU in two segments: a hit protects an expert, and one that is not
        protected goes first. "reelect" elects the experts used most every `period` steps; only they come
        in, and only others go; before the first election it is LRU. "pinned" is LRU, but the experts it is
        made with stay.
    guard : bool
        A miss replaces an expert only if it was wanted more often: of no use to "static" and "reelect".
    half_life : int
        For "lfu", "lfru" and `guard`: steps after which counts are halved, at least 1.
    weight : int
        For "lfru": 0 to 1048576.
    period : int
        For "reelect": steps from one election to the next, at least 1.
    protected_percent : int
        For "slru": how many of the slots the protected segment takes at most, 0 to 100.

    Raises
    ------
    ArgumentError
        A name is unknown, a value out of its range, or an option set that the policy does not have.

    Examples
    --------
    >>> moepool.Policy("lfu", half_life=64)
    Policy('lfu', half_life=64)
    >>> print(moepool.Policy("slru", guard=True))
    slru, guard
    """

    name: PolicyName = "lru"
    guard: bool = False
    half_life: int = _DEFAULTS["half_life"]
    weight: int = _DEFAULTS["weight"]
    period: int = _DEFAULTS["period"]
    protected_percent: int = _DEFAULTS["protected_percent"]

    def __post_init__(self) -> None:
        if isinstance(self.name, str) and ":" in self.name:
            raise ArgumentError(f"policy is {self.name!r}; write moepool.{policy_from(self.name)!r}")
        choice("policy", self.name, handles.POLICIES)
        if not isinstance(self.guard, bool):
            raise ArgumentError(f"guard is {self.guard!r}; it must be True or False")
        for option, limits in _RANGES.items():
            object.__setattr__(self, option, count(option, getattr(self, option), *limits))
        known = _OPTIONS[self.name]
        if self.guard and "guard" in known:
            known = tuple(dict.fromkeys((*known, "half_life")))
        for option in self._changed():
            if option not in known:
                raise no_option(option, self.name, known)

    def _changed(self) -> list[str]:
        return [f.name for f in fields(self) if f.name != "name" and getattr(self, f.name) != f.default]

    def config(self) -> dict[str, int]:
        """The fields of moepool_pool_config that say it."""
        options = {f.name: int(getattr(self, f.name)) for f in fields(self) if f.name != "name"}
        return {"policy": handles.POLICIES[self.name], **options}

    def __repr__(self) -> str:
        options = "".join(f", {option}={getattr(self, option)!r}" for option in self._changed())
        return f"{type(self).__name__}({self.name!r}{options})"

    def __str__(self) -> str:
        changed = {option: getattr(self, option) for option in self._changed()}
        return ", ".join(
            [self.name, *(name if value is True else f"{name}={value}" for name, value in changed.items())]
        )


OPTIONS = {f.name: f.default for f in fields(Policy) if f.name != "name"}
"""What policies may be given beside their name, and the defaults."""


def no_option(option: str, name: str, known: Sequence[str] = ()) -> ArgumentError:
    """The error for an option that a policy does not have."""
    return ArgumentError(
        f"{option} is no option of policy {name!r}, which has {' and '.join(known) or 'none'}"
    )


def policy_of(value: Policy | PolicyName) -> Policy:
    """A policy, or the one of that name with its defaults."""
    return value if isinstance(value, Policy) else Policy(value)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Splits "lfu:half_life=64,guard" into a name and options; semicolons do as well as commas.

    Raises
    ------
    ArgumentError
        An option is neither a word nor `name=integer`, or lacks its number.

    Examples
    --------
    >>> parse_policy("lfu:half_life=64,guard")
    ('lfu', {'half_life': 64, 'guard': True})
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, map(str.strip, re.split("[,;]", rest))):
        key, equals, value = option.partition("=")
        if equals and not re.fullmatch("-?[0-9]{1,18}", value):
            raise ArgumentError(f"{option!r} of policy {text!r} is not name=integer")
        key = key.replace("-", "_")
        default = OPTIONS.get(key, False)
        if not equals and default is not False:
            raise ArgumentError(f"{key} needs a value in policy {text!r}: {key}={default} is the default")
        if equals and default is False and key in OPTIONS:
            raise ArgumentError(f"{key} takes no value in policy {text!r}: write {key}, or leave it out")
        options[key] = int(value) if equals else True
    return name, options


def policy_from(text: str) -> Policy:
    """A policy of pools as it is written on the command line.

    Examples
    --------
    >>> policy_from("lfu:half_life=64,guard")
    Policy('lfu', guard=True, half_life=64)
    """
    name, options = parse_policy(text)
    choice("policy", name, handles.POLICIES)
    for option in options:
        if option not in OPTIONS:
            raise no_option(option, name, _OPTIONS[name])
    return Policy(name, **options)  # type: ignore[arg-type]
