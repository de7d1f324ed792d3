"""The demonstration: its rows, and that it tells a difference."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import moepool.cli
from moepool.runner import Checkpoint, bundled_model
from moepool.runner.demo import Comparison, run_demo
from moepool.runner.devices import available_devices


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint(bundled_model(), progress=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def comparison(checkpoint: Checkpoint) -> Comparison:
    return run_demo(checkpoint, n=12)


def _spoilt(comparison: Comparison) -> Comparison:
    rows = list(comparison.rows)
    generation = dataclasses.replace(rows[2].generation, logits_sha256="0" * 64)
    rows[2] = dataclasses.replace(rows[2], generation=generation)
    return dataclasses.replace(comparison, rows=rows)


def test_all_placements_give_the_same_bytes(comparison: Comparison) -> None:
    assert comparison.different == comparison.unforeseen == []
    placements = [row.placement for row in comparison.rows]
    assert [p.slots for p in placements] == [0, 4, 8, 16, 32, 16, 16, 0]
    assert {p.policy for p in placements} == {"lru", "static"}
    assert {p.miss for p in placements} == {"stream", "host"}
    assert [p.plan is not None for p in placements] == [False] * 7 + [True]
    assert comparison.verdict().splitlines() == [
        "counts as simulated: yes (8 placements)",
        "same bytes: yes (8 placements)",
    ]


def test_the_rows_really_differ_in_placement(comparison: Comparison) -> None:
    none, few, *_, every, static, host, planned = comparison.rows
    assert none.generation.stats["hits"] == 0
    assert few.generation.stats["evictions"] > 0
    assert every.generation.stats["evictions"] == 0
    assert static.generation.stats["hit_rate"] > 0.5, "the prompt's hottest half serves less than chance"
    assert host.generation.stats["host_bytes"] > 0
    assert len(set(planned.simulated.slots)) > 1
    assert planned.generation.stats["slot_bytes"] <= comparison.plan.budget_bytes
    assert planned.generation.stats["hit_rate"] == comparison.plan.hit_rate


def test_a_count_that_was_not_foreseen_is_told(comparison: Comparison) -> None:
    rows = list(comparison.rows)
    stats = rows[1].generation.stats
    for name in ("hits", "evictions", "copied_bytes", "prompt_misses"):
        generation = dataclasses.replace(rows[1].generation, stats=stats | {name: stats[name] + 1})
        rows[1] = dataclasses.replace(rows[1], generation=generation)
        spoilt = dataclasses.replace(comparison, rows=rows)
        assert spoilt.unforeseen == [2]
        assert spoilt.verdict().splitlines()[0] == "counts as simulated: no, rows 2 do not"


def test_the_table_is_aligned(comparison: Comparison) -> None:
    header, rule, *rows = comparison.table().splitlines()
    assert header.split()[:4] == ["device", "slots", "policy", "miss"]
    assert len(rows) == 8
    start = rule.rindex(" ") + 1
    assert all(row[start - 1] == " " and len(row) - start == 16 for row in rows)


def test_a_difference_is_told(comparison: Comparison) -> None:
    spoilt = _spoilt(comparison)
    assert spoilt.different == [3]
    assert spoilt.verdict().splitlines()[-1] == "same bytes: no, rows 3 differ from row 1"


def test_the_command_exits_by_the_outcome(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(moepool.cli.main, ["demo", "-n", "3", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "same bytes: yes (8 placements)"
    monkeypatch.setattr(moepool.cli, "run_demo", lambda *_, **__: _spoilt(comparison))
    result = CliRunner().invoke(moepool.cli.main, ["demo", "--device", "cpu", "--json", "-"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["same_bytes"] is False
    assert len(report["rows"]) == 8


@pytest.mark.cuda
def test_the_gpu_gives_the_same_bytes(checkpoint: Checkpoint) -> None:
    if "cuda:0" not in available_devices():
        pytest.skip("no CUDA device")
    comparison = run_demo(checkpoint, ("cpu", "cuda:0"), n=12)
    assert len(comparison.rows) == 16
    assert comparison.different == comparison.unforeseen == []
