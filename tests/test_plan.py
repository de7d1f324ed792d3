"""Plans: slots go where they bring most, files are checked, pools come out as planned, and budgets give
way."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import moepool
from moepool import LayerPlan, Plan, Rates, Trace, TraceModel, Watermark
from moepool.cli import main
from moepool.memory import Memory
from moepool.plan import RESERVE, auto_budget, give_out, make_plan
from moepool.recorder import TraceRecorder
from moepool.runner import Checkpoint, Placement, bundled_model, generate
from moepool.runner.info import ModelInfo
from moepool.simulate import simulate
from moepool.trace import trace_model
from tests.support import few_slots
from tests.test_cuda_memory import CUDA_LARGE, GIB, LARGE, FakeNVML, NVMLError, cuda, fake
from tests.test_simulate import local_trace

RECORD = 110_592
TINY = trace_model(bundled_model())


def skewed_trace(steps: int = 300) -> Trace:
    """Layer 0 wants few experts, layer 3 all of them alike; of the bundled model."""
    rng = np.random.default_rng(0)
    rows, ids = [], []
    for step in range(steps):
        for layer in range(4):
            taste = rng.gumbel(size=32) - np.log(np.arange(1, 33)) * (3 - layer)
            ids.append(np.argsort(-taste)[:4])
            rows.append((step, layer, step, True))
    return Trace(TINY, *zip(*rows, strict=True), ids)  # type: ignore[call-arg,arg-type]


@pytest.fixture(scope="module")
def records() -> list[int]:
    return [layer.record_bytes or 0 for layer in ModelInfo.from_gguf(bundled_model()).layers]


# ------------------------------------------------------------------------------------------- giving slots out


def exhaustive(gains: Sequence[Sequence[float]], budget: int) -> float:
    """The most hits of all ways to spend `budget` slots."""
    ways = itertools.product(*(range(len(row)) for row in gains))
    return max(sum(row[n] for row, n in zip(gains, way, strict=True)) for way in ways if sum(way) <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_to_give_slots_out_brings_more(seed: int) -> None:
    """With curves that rise less and less."""
    rng = np.random.default_rng(seed)
    curves = [np.cumsum([0, *np.sort(rng.random(5))[::-1]]).tolist() for _ in range(3)]
    corners = [list(enumerate(curve)) for curve in curves]
    for budget in range(16):
        slots = give_out(corners, [7, 7, 7], 7 * budget + 3)
        assert sum(slots) <= budget
        brought = sum(curve[n] for curve, n in zip(curves, slots, strict=True))
        assert brought == pytest.approx(exhaustive(curves, budget))


def test_a_layer_of_large_records_pays_for_them() -> None:
    corners = [[(0, 0.0), (8, 4.0)], [(0, 0.0), (8, 3.9)]]
    assert give_out(corners, [100, 100], 800) == (8, 0)
    # A slot takes more and a hit saves more: the same order, as long as there is room.
    assert give_out(corners, [200, 100], 800) == (4, 0)
    assert give_out(corners, [300, 100], 800) == (2, 2)
    assert give_out(corners, [900, 100], 800) == (0, 8)


def test_a_curve_that_is_flat_at_first_does_not_withhold_slots(records: list[int]) -> None:
    """Fewer slots than a token has places bring LRU nothing: every step bypasses."""
    plan = make_plan(skewed_trace(), 20 * RECORD, records, policy="lru")
    for layer in plan.layers:
        slots = [n for n, _ in layer.gains]
        hits = [h for _, h in layer.gains]
        assert slots[0] == 0
        slopes = np.diff(hits) / np.diff(slots)
        assert (np.diff(slopes) < 1e-12).all()
    assert max(layer.slots for layer in plan.layers) >= 4


def test_slots_go_where_they_bring_most(records: list[int]) -> None:
    trace = skewed_trace()
    budget = 48 * RECORD
    plan = make_plan(trace, budget, records, policy="lru")
    slots = [layer.slots for layer in plan.layers]
    assert plan.slot_bytes <= budget
    assert min(slots) < max(slots)
    uniform = simulate(trace, budget // sum(records), ["lru"]).runs[0]
    assert plan.hit_rate > uniform.hit_rate
    exact = simulate(trace, [slots], ["lru"]).runs[0]
    assert plan.hit_rate == exact.hit_rate
    assert [layer.hit_rate for layer in plan.layers] == pytest.approx(
        exact.by_layer["hits"] / (exact.by_layer["hits"] + exact.by_layer["misses"])
    )


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])
def test_a_plan_is_never_worse_than_as_many_slots_for_all(records: list[int], policy: str) -> None:
    """Few slots bring LRU less than its curve promises."""
    trace = local_trace(300, TINY, most=1)
    for n in (3, 5, 8, 11, 16, 24, 31):
        budget = n * sum(records) + 1000
        plan = make_plan(trace, budget, records, policy=policy)
        assert plan.slot_bytes <= budget
        assert plan.hit_rate >= simulate(trace, n, [policy]).runs[0].hit_rate


def test_the_policy_with_most_hits_or_least_time_is_chosen(records: list[int]) -> None:
    trace = local_trace(1200, TINY, most=1)
    by_hits = make_plan(trace, 40 * RECORD, records)
    for name in ("lru", "lfu", "lfru", "slru", "reelect"):
        assert make_plan(trace, 40 * RECORD, records, policy=name).hit_rate <= by_hits.hit_rate
    # A CPU that computes at once, and a link over which nothing should go: the policy that copies least.
    rates = Rates("cuda:0", host=1e15, host_layer=1e-9, memory=1e15, link=1e6, layer=1e-9)
    by_time = make_plan(trace, 40 * RECORD, records, rates=rates)
    assert (by_time.policy, by_time.miss) == ("reelect", "host")
    assert by_time.seconds is not None
    assert by_hits.seconds is None


def test_notes_say_what_does_not_fit(records: list[int]) -> None:
    trace = skewed_trace()
    nothing = make_plan(trace, 0, records, policy="lru")
    assert [layer.slots for layer in nothing.layers] == [0] * 4
    assert "128 of 128 experts" in nothing.notes[0]
    assert "read over the link" in nothing.notes[0]
    assert nothing.notes[1] == "layers 0, 1, 2, 3 get no slots at all"
    all_of_it = make_plan(trace, 1 << 40, records, policy="static")
    assert "of the budget are left: every expert has a slot" in " ".join(all_of_it.notes)
    assert [layer.slots for layer in all_of_it.layers] == [32] * 4
    assert "expect less of others" in all_of_it.notes[-1]
    assert max(layer.slots for layer in all_of_it.layers) <= 32
    assert all_of_it.hit_rate == 1


@pytest.mark.parametrize("policy", ["lru", "static"])
def test_what_the_trace_has_no_use_for_is_given_out_too(records: list[int], policy: str) -> None:
    """Another text may want those experts; and a short trace is told."""
    at = np.arange(32)
    few = Trace(TINY, at // 4, at % 4, at // 4, at >= 0, [[3, 5, 7, 9]] * 32)
    plan = make_plan(few, 25 * sum(records), records, policy=policy)
    assert [layer.slots for layer in plan.layers] == [25] * 4
    assert any("short: 8 decoded tokens" in note for note in plan.notes)
    assert "no further slot" not in " ".join(plan.notes)
    assert [layer.slots for layer in make_plan(few, 1 << 40, records, policy=policy).layers] == [32] * 4
    more = make_plan(skewed_trace(), 25 * sum(records) + 5, records, policy=policy)
    assert more.budget_bytes - more.slot_bytes < max(records)
    assert "of the budget are left: no further slot fits" in " ".join(more.notes)
    assert not any("short" in note for note in more.notes)


def test_arguments_are_checked(records: list[int]) -> None:
    trace = skewed_trace(10)
    with pytest.raises(moepool.ArgumentError, match="belady knows the future"):
        make_plan(trace, 1, records, policy="belady")
    with pytest.raises(moepool.ArgumentError, match="policy is 'mru'"):
        make_plan(trace, 1, records, policy="mru")
    with pytest.raises(moepool.ArgumentError, match="policy is 'static-promt'"):
        make_plan(trace, 1, records, policy="static-promt")
    for wrong, told in (
        (0, "record_bytes is 0"),
        ([1], "1 numbers for the 4 layers"),
        ("x", "record_bytes is 'x'"),
    ):
        with pytest.raises(moepool.ArgumentError, match=told):
            make_plan(trace, 1, wrong, policy="lru")  # type: ignore[arg-type]
    with pytest.raises(moepool.ArgumentError, match="budget_bytes is -1"):
        make_plan(trace, -1, records)
    with pytest.raises(moepool.ArgumentError, match="no rows of decode steps"):
        make_plan(trace.phase("prompt"), 1, records)


# -------------------------------------------------------------------------------------------- files and pools


@pytest.mark.parametrize("policy", ["lru", "lfu:half_life=64,guard", "static", "pinned"])
def test_pools_come_out_as_planned(tmp_path: Path, records: list[int], policy: str) -> None:
    """And what the plan expects is what happens, to the last hit."""
    recorder = TraceRecorder(TINY)
    with Checkpoint(bundled_model(), progress=False) as checkpoint:
        with checkpoint.model() as runner:
            text = generate(
                runner, checkpoint.tokenizer, "import os\n", 40, stop_at_eos=False, trace=recorder
            )
        make_plan(recorder.trace(), 40 * RECORD, records, policy=policy).save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json", TINY)
        with checkpoint.model(Placement(plan=plan)) as runner:
            assert [pool.slots for pool in runner.pools] == [layer.slots for layer in plan.layers]
            assert str(runner.pools[0].policy) == policy.replace(":", ", ").replace(
                "half_life=64,guard", "guard, half_life=64"
            )
            again = generate(runner, checkpoint.tokenizer, "import os\n", 40, stop_at_eos=False)
    assert again.logits_sha256 == text.logits_sha256
    assert again.stats["hit_rate"] == plan.hit_rate


def test_a_file_gives_back_the_plan(tmp_path: Path, records: list[int]) -> None:
    plan = make_plan(skewed_trace(), 40 * RECORD, records, policy="pinned")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json", TINY) == plan
    with pytest.raises(moepool.FormatError, match="for another model"):
        Plan.load(tmp_path / "plan.json", TraceModel(32, 4, 4, "f" * 16))
    values = json.loads((tmp_path / "plan.json").read_text())
    for change in (
        {"moepool_plan": 2},
        {"layers": [{}]},
        {"speed": 1},
        {"policy": "mru"},
        {"policy": "static-promt"},
        {"model": None},
    ):
        (tmp_path / "bad.json").write_text(json.dumps(values | change))
        with pytest.raises((moepool.FormatError, moepool.ArgumentError), match="static-promt|mru|bad.json"):
            Plan.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(moepool.FormatError, match="bad.json"):
        Plan.load(tmp_path / "bad.json")
    with pytest.raises(moepool.ArgumentError, match="No such file"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slots": "many"}, "slots of layer 0 is 'many'; it must be an integer"),
        ({"slots": 3.7}, "slots of layer 0 is 3.7"),
        ({"slots": None}, "slots of layer 0 is None"),
        ({"slots": -2}, "slots of layer 0 is -2"),
        ({"slots": 99}, "slots of layer 0 is 99; it must be from 0 to 32"),
        ({"record_bytes": 0}, "record_bytes of layer 0 is 0"),
        ({"hit_rate": 1.5}, "hit_rate of layer 0 is 1.5"),
        ({"hot": [32]}, "hot expert of layer 0 is 32"),
        ({"hot": [1, 1]}, "hot of layer 0 is"),
        ({"hot": 7}, "hot is 7; it must be a list"),
        ({"gains": [3]}, "a gain is 3; it must be a list of 2"),
        ({"gains": [[1, 0.0]]}, "gains of layer 0 do not rise from 0"),
        ({"gains": [[0, 0.0], [4, 1.0], [8, 0.5]]}, "gains of layer 0 do not rise from 0"),
        ({"gains": [[0, "x"]]}, "hits in gains of layer 0 is 'x'"),
        ({"speed": 1}, "entry 0 of layers has an unknown 'speed'"),
    ],
)
def test_a_layer_that_makes_no_sense_is_refused(
    tmp_path: Path, records: list[int], change: dict[str, Any], told: str
) -> None:
    file = tmp_path / "plan.json"
    make_plan(skewed_trace(20), 40 * RECORD, records, policy="static").save(file)
    values = json.loads(file.read_text())
    values["layers"][0] |= change
    file.write_text(json.dumps(values))
    with pytest.raises(moepool.FormatError, match=f"plan {file}: .*{re.escape(told)}"):
        Plan.load(file)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": []}, "layers are []"),
        ({"layers": {}}, "layers is {}; it must be a list"),
        ({"layers": [3]}, "entry 0 of layers is 3; it must be an object"),
        ({"model": None}, "the model is None; it must be an object"),
        ({"model": {"experts": 32, "k": "x", "layers": 4, "fingerprint": ""}}, "k"),
        ({"policy": 3}, "policy is 3"),
        ({"policy": "static-promt"}, "policy is 'static-promt'"),
        ({"miss": "bogus"}, "miss is 'bogus'; it must be 'stream'"),
        ({"budget_bytes": "1GiB"}, "budget_bytes is '1GiB'"),
        ({"seconds": "1"}, "seconds is '1'"),
        ({"notes": [3]}, "notes are [3]"),
        ({"reserve_bytes": -1}, "reserve_bytes is -1"),
        ({"tokens": None}, "tokens is None"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    tmp_path: Path, records: list[int], change: dict[str, Any], told: str
) -> None:
    file = tmp_path / "plan.json"
    make_plan(skewed_trace(20), 40 * RECORD, records, policy="lru").save(file)
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | change))
    with pytest.raises(moepool.FormatError, match=f"plan {file}: .*{re.escape(told)}"):
        Plan.load(file)
    del values["policy"]
    file.write_text(json.dumps(values))
    with pytest.raises(moepool.FormatError, match="the plan has no 'policy'"):
        Plan.load(file)
    for other in ("phase,layer,expert,count\n", "[]", "[" * 100_000, "3"):
        file.write_text(other)
        with pytest.raises(moepool.FormatError, match="this is no (file that `moepool plan -o` wrote|plan)"):
            Plan.load(file)


@pytest.mark.parametrize("policy", ["static", "pinned"])
def test_hot_experts_go_with_the_slots(records: list[int], policy: str) -> None:
    plan = make_plan(skewed_trace(), 60 * RECORD, records, policy=policy)
    less = plan.within(14 * RECORD)
    with moepool.ExpertStore.from_gguf(bundled_model(), progress=False) as store:
        for layer, whole in zip(less.layers, plan.layers, strict=True):
            assert layer.hot == whole.hot[: len(layer.hot)]
            with less.pool(store[layer.layer]) as pool:
                assert (pool.slots, len(layer.hot) <= pool.slots) == (layer.slots, True)
        with plan.pool(store[0], slots=2) as pool:
            assert pool.slots == 2
    assert any(layer.hot for layer in less.layers)
    if policy == "static":
        assert [len(layer.hot) for layer in less.layers] == [layer.slots for layer in less.layers]


def test_layers_of_fewer_experts_get_no_more_than_they_have() -> None:
    """And such a plan fits its layers."""
    model = TraceModel(32, 2, 2)
    rng = np.random.default_rng(0)
    ids = [rng.permutation((32, 12)[row % 2])[:2] for row in range(400)]
    row = np.arange(400)
    trace = Trace(model, row // 2, row % 2, row // 2, row >= 0, ids)
    weights = [np.zeros((n, 32, 32), np.float32) for n in (32, 12)]
    layers = [moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0] for weight in weights]
    size = layers[0].record_bytes
    for budget in (9, 20, 40, 60):
        for policy in ("lru", "static"):
            plan = make_plan(trace, budget * size, size, experts=[32, 12], policy=policy)
            assert [layer.experts for layer in plan.layers] == [32, 12]
            assert plan.layers[1].slots <= 12
            assert plan.layers[1].gains[-1][0] <= 12
            alone = replace(plan, layers=(replace(plan.layers[1], layer=0),))
            with alone.pool(layers[1]) as pool:
                assert pool.slots == plan.layers[1].slots


def test_no_layer_keeps_fewer_slots_than_a_token_has_places(records: list[int]) -> None:
    """They bring nothing, since every step bypasses: others get them."""
    trace = skewed_trace()
    plan = make_plan(trace, 60 * RECORD, records, policy="lru")
    for slots in range(61):
        less = plan.within(slots * RECORD)
        each = [layer.slots for layer in less.layers]
        assert not any(0 < n < 4 for n in each), each
        assert less.slot_bytes <= slots * RECORD
        assert sum(each) >= 4 or slots < 4
    assert any(
        0 < layer.slots < 4 for n in range(61) for layer in _static(trace, records).within(n * RECORD).layers
    )


def _static(trace: Trace, records: list[int]) -> Plan:
    """Whose slots are all of use."""
    return make_plan(trace, 60 * RECORD, records, policy="static")


def test_another_layer_is_refused(records: list[int]) -> None:
    plan = make_plan(skewed_trace(), 40 * RECORD, records, policy="lru")
    weight = np.zeros((32, 32, 32), np.float32)
    layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="q8_0")[0]
    with pytest.raises(moepool.ArgumentError, match="of another model or quantisation"):
        plan.pool(layer)
    with pytest.raises(moepool.ArgumentError, match="layers \\[0, 1, 2, 3\\], not 7"):
        plan.of(7)


def test_options_go_before_the_plan(records: list[int]) -> None:
    plan = make_plan(skewed_trace(), 40 * RECORD, records, policy="lru")
    with moepool.ExpertStore.from_gguf(bundled_model(), progress=False) as store:
        assert plan.pool(store[1], slots=3, miss="host").slots == 3


# ---------------------------------------------------------------------------- budgets, of cards that are none


def test_auto_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, FakeNVML([LARGE]), CUDA_LARGE)
    found = moepool.memory("cuda:0")
    budget, reserve, told = auto_budget("cuda:0")
    assert told == found
    assert found.source == "NVML"
    assert reserve == found.total // 20 > RESERVE
    assert budget == found.free - reserve
    assert auto_budget("cuda:0", 3 * GIB)[:2] == (found.free - 3 * GIB, 3 * GIB)
    assert auto_budget("cuda:0", 1000 * GIB)[0] == 0, "no negative budget"


def test_auto_on_a_small_card_and_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML([LARGE], fails={"nvmlDeviceGetMemoryInfo": NVMLError("Not Supported")})
    fake(monkeypatch, nvml, cuda(CUDA_LARGE.uuid, CUDA_LARGE.pci_bus_id, 4 * GIB, 3 * GIB))
    budget, reserve, told = auto_budget("cuda:0")
    assert reserve == RESERVE
    assert budget == 3 * GIB - RESERVE
    assert told.source.startswith("CUDA (NVML: ")


def test_auto_needs_a_card() -> None:
    with pytest.raises(moepool.ArgumentError, match="give a size"):
        auto_budget("cpu")


# -------------------------------------------------------------------------------------------------- watermark


class FakePool:
    """What a watermark does to a pool."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.calls: list[int] = []
        self.leased = 0
        self.fails = ""

    def stats(self) -> FakePool:
        return self

    def resize(self, slots: int) -> int:
        if self.fails:
            raise moepool.StateError(self.fails)
        self.calls.append(slots)
        self.slots = slots
        return slots


class Card:
    """A device on which pools and others take memory."""

    def __init__(self, pools: Sequence[Any], total: int = 1000) -> None:
        self.pools, self.total, self.others = pools, total, 0

    def __call__(self, device: str) -> Memory:
        assert device == "cuda:0"
        taken = sum(pool.slots * 10 for pool in self.pools)
        return Memory(self.total, max(self.total - taken - self.others, 0), "a fake")


def plan_of(*slots: int) -> Plan:
    """Two layers of 32 experts of 10 bytes, the first of which gains more by each slot."""
    gains: list[tuple[tuple[int, float], ...]] = [((0, 0.0), (32, 4.0)), ((0, 0.0), (32, 2.0))]
    layers = tuple(
        LayerPlan(i, 32, n, 10, 0.5, gains=gain) for i, (n, gain) in enumerate(zip(slots, gains, strict=True))
    )
    return Plan(TraceModel(32, 4, 2), "lru", "stream", layers, 10 * sum(slots), 100, 0.5)


def watermark(reserve: int = 100) -> tuple[Watermark, Card, list[FakePool]]:
    plan = plan_of(32, 28)
    pools = [FakePool(layer.slots) for layer in plan.layers]
    card = Card(pools)
    return Watermark(plan, pools, "cuda:0", reserve, card), card, pools  # type: ignore[arg-type]


def test_slots_give_way_to_others_and_come_back() -> None:
    mark, card, pools = watermark()
    assert mark.check() == 0  # 400 are free, and all that was planned is there
    card.others = 350  # 50 are free, 100 should be
    assert mark.check() == -50
    assert [pool.slots for pool in pools] == [32, 23], "the layer that gains less gives"
    assert mark.check() == 0
    card.others = 600  # more than there is: as far as a look can tell, nothing is free
    while mark.check():
        pass
    assert [pool.slots for pool in pools] == [30, 0]
    card.others = 2000
    while mark.check():
        pass
    assert [pool.slots for pool in pools] == [0, 0]
    card.others = 0
    assert mark.check() == 600
    assert [pool.slots for pool in pools] == [32, 28], "never more than planned"


def test_a_plan_is_kept_where_there_is_room() -> None:
    """Though its slots are not those that the curves alone would give."""
    plan = plan_of(20, 20)
    pools = [FakePool(20), FakePool(20)]
    card = Card(pools)
    mark = Watermark(plan, pools, "cuda:0", 100, card)  # type: ignore[arg-type]
    assert mark.check() == 0
    card.others = 550
    assert mark.check() == -50
    assert [pool.slots for pool in pools] == [20, 15]
    card.others = 0
    mark.check()
    assert [pool.slots for pool in pools] == [20, 20]
    assert plan.within(0).slot_bytes == 0
    assert plan.within(10**9).layers == plan.layers


def test_small_changes_are_left_alone() -> None:
    """Or two processes that watch each other would never come to rest."""
    mark, card, pools = watermark()
    card.others = 350
    mark.check()
    before = [len(pool.calls) for pool in pools]
    for others in (350, 340, 330, 326):
        card.others = others
        assert mark.check() == 0
    assert [len(pool.calls) for pool in pools] == before
    card.others = 320
    assert mark.check() == 30


def test_running_pools_give_slots_back(records: list[int]) -> None:
    """And the same text comes out, while slots go and come."""
    plan = make_plan(skewed_trace(), 60 * RECORD, records, policy="lru")
    free = [2 * plan.slot_bytes]
    with Checkpoint(bundled_model(), progress=False) as checkpoint:
        with checkpoint.model() as runner:
            text = generate(runner, checkpoint.tokenizer, "import os\n", 30, stop_at_eos=False)
        with checkpoint.model(Placement(plan=plan)) as runner:
            mark = Watermark(
                plan,
                runner.pools,
                "cuda:0",
                reserve=2 * plan.slot_bytes,
                look=lambda _: Memory(1 << 40, free[0], "a fake"),
            )
            sizes = set()
            rng = np.random.default_rng(0)

            def change(piece: str) -> None:
                free[0] = int(rng.integers(1, 4) * plan.slot_bytes - rng.integers(plan.slot_bytes))
                mark.check()
                sizes.add(sum(pool.slots for pool in runner.pools))

            with few_slots():
                again = generate(
                    runner, checkpoint.tokenizer, "import os\n", 30, stop_at_eos=False, on_text=change
                )
    assert again.logits_sha256 == text.logits_sha256
    assert len(sizes) > 2
    assert max(sizes) <= sum(layer.slots for layer in plan.layers)


def test_pinned_experts_keep_their_slots(records: list[int]) -> None:
    plan = make_plan(skewed_trace(), 60 * RECORD, records, policy="pinned")
    with moepool.ExpertStore.from_gguf(bundled_model(), progress=False) as store:
        pools = [plan.pool(layer) for layer in store]
        mark = Watermark(plan, pools, "cuda:0", 1 << 30, lambda _: Memory(1 << 40, 0, "a fake"))
        mark.check()
        assert [pool.slots for pool in pools] == [len(layer.hot) for layer in plan.layers]
        grown = Watermark(plan, pools, "cuda:0", 0, lambda _: Memory(1 << 40, 1 << 39, "a fake"))
        grown.check()
        assert [pool.slots for pool in pools] == [layer.slots for layer in plan.layers]


def test_what_an_open_route_reads_is_left_for_the_next_look(records: list[int]) -> None:
    plan = make_plan(skewed_trace(), 60 * RECORD, records, policy="lru")
    with moepool.ExpertStore.from_gguf(bundled_model(), progress=False) as store:
        pools = [plan.pool(layer) for layer in store]
        mark = Watermark(plan, pools, "cuda:0", 1 << 30, lambda _: Memory(1 << 40, 0, "a fake"))
        with pools[0].resolve([[1, 2, 3, 4]]):
            mark.check()
            assert [pool.slots for pool in pools] == [plan.layers[0].slots, 0, 0, 0]
        mark.check()
        assert [pool.slots for pool in pools] == [0, 0, 0, 0]


def test_what_went_wrong_in_a_pool_is_told() -> None:
    """It is told once: to swallow it is to lose it."""
    mark, card, pools = watermark()
    card.others = 350
    pools[1].fails = "a step waited 1000 ms for the CPU, which did not answer"
    with pytest.raises(moepool.StateError, match="did not answer"):
        mark.check()
    pools[1].leased = 1
    assert mark.check() == 0
    pools[1].fails = ""
    mark.check()
    card.others, pools[1].fails = 0, "the pool is closed"
    with pytest.raises(moepool.StateError, match="closed"):
        mark.check()


def test_a_thread_watches() -> None:
    mark, card, pools = watermark()
    with mark.watching(0.01):
        card.others = 350
        end = time.monotonic() + 20
        while pools[1].slots != 23 and time.monotonic() < end:
            time.sleep(0.01)
    assert pools[1].slots == 23

    def broken(device: str) -> Memory:
        raise moepool.UnsupportedError("the card is gone")

    mark._look = broken
    with pytest.raises(moepool.UnsupportedError, match="the card is gone"), mark.watching(0.001):
        time.sleep(0.2)


def test_the_reserve_of_a_watermark_by_default() -> None:
    plan = plan_of(1, 1)
    big = Watermark(plan, [FakePool(1)] * 2, "cuda:0", look=lambda _: Memory(100 * GIB, GIB, ""))  # type: ignore[list-item]
    assert big.reserve == 5 * GIB
    with pytest.raises(moepool.ArgumentError, match="1 pools for a plan of 2 layers"):
        Watermark(plan, [FakePool(1)], "cuda:0", 0)  # type: ignore[list-item]


# ----------------------------------------------------------------------------------------------- command line


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace, its plan and nothing measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    skewed_trace(60).save(tmp_path / "a.moetrace")
    result = run(
        *("plan", "tiny-moe", "--trace", tmp_path / "a.moetrace", "--trace", tmp_path / "a.moetrace"),
        *("--vram", "5MiB", "--policy", "lfu", "-o", tmp_path / "plan.json"),
    )
    assert "5MiB was given" in result.stdout
    assert "of host memory, of which" in result.stdout
    return tmp_path


TEXT = ("generate", "tiny-moe", "-p", "import os", "-n", "4", "--json", "-")


def slots_of(*options: str | Path) -> int:
    return int(json.loads(run(*TEXT, *options).stdout)["stats"]["slots"])


def test_generate_runs_by_a_plan(files: Path) -> None:
    plan = Plan.load(files / "plan.json")
    assert plan.tokens == 120
    assert slots_of("--plan", files / "plan.json") == sum(layer.slots for layer in plan.layers)
    told = run(*TEXT, "--plan", files / "plan.json", "--slots", "3", code=1).stderr
    assert "--plan says where experts live, and so does --slots" in told


def test_simulate_takes_the_slots_of_a_plan(files: Path) -> None:
    options = ("simulate", files / "a.moetrace", "--plan", files / "plan.json", "--policy", "lfu")
    (found,) = json.loads(run(*options, "--json", "-").stdout)["runs"]
    plan = Plan.load(files / "plan.json")
    assert found["slots"] == [layer.slots for layer in plan.layers]
    assert "give no --slots" in run(*options, "--slots", "3", code=1).stderr


@pytest.mark.parametrize("kind", ["trace", "profile"])
def test_what_stays_is_what_decode_steps_want(tmp_path: Path, kind: str) -> None:
    """A prompt that wants other experts has no say: `generate --hot` hits as often as `simulate` says."""
    text = ("generate", "tiny-moe", "-p", "Once upon a time there was a king who had a daughter. " * 4)
    first, second = tmp_path / "a.moetrace", tmp_path / "b.moetrace"
    run(*text, "-n", "12", "--trace", first, "--profile", tmp_path / "profile", "--ignore-eos")
    hot = first if kind == "trace" else tmp_path / "profile"
    placed = ("--policy", "static", "--slots", "12", "--hot", hot)
    result = run(*text, "-n", "12", "--trace", second, *placed, "--ignore-eos", "--json", "-")
    trace = Trace.load(second)
    found = simulate(trace, 12, ["static"]).runs[0]
    assert (trace.counts("prompt").argsort(axis=1) != trace.counts("decode").argsort(axis=1)).any()
    stats = json.loads(result.stdout)["stats"]
    assert (stats["hits"], stats["misses"]) == (found.hits, found.misses)


def test_simulate_says_which_policy_is_the_plans(files: Path, records: list[int]) -> None:
    make_plan(skewed_trace(60), 40 * RECORD, records, policy="lfu:half_life=9").save(files / "other.json")
    for plan, policy in (("plan.json", "lfu"), ("other.json", "lfu:half_life=9")):
        told = run("simulate", files / "a.moetrace", "--plan", files / plan).stdout
        found = Plan.load(files / plan)
        each = [[layer.slots for layer in found.layers]]
        (counted,) = simulate(Trace.load(files / "a.moetrace"), each, [policy]).runs
        assert f"The plan's policy is {policy}: {100 * counted.hit_rate:.1f} % hits here." in told
    told = run("simulate", files / "a.moetrace", "--plan", files / "plan.json", "--policy", "lru").stdout
    assert "The plan's" not in told


def test_simulate_refuses_plans_and_profiles_of_other_models(files: Path) -> None:
    """And takes what does not know its model for one of theirs."""
    trace = skewed_trace(60)
    columns = (trace.step, trace.layer, trace.pos, trace.decode, trace.ids)
    Trace(TraceModel(32, 4, 4, "f" * 16), *columns).save(files / "other.csv")
    Trace(TraceModel(64, 4, 4), *columns).save(files / "wide.csv")
    trace.save(files / "plain.csv", "plain")
    options = ("--policy", "lru", "--json", "-")
    for other in ("other.csv", "wide.csv"):
        told = run("simulate", files / other, "--plan", files / "plan.json", *options, code=1).stderr
        assert "another model" in told
        told = run("simulate", files / "a.moetrace", "--profile", files / other, *options, code=1).stderr
        assert f"--profile {files / other}" in told
        assert "another model" in told
    for more in (("--plan", files / "plan.json"), ("--profile", files / "a.moetrace", "--slots", "8")):
        report = json.loads(run("simulate", files / "plain.csv", *more, *options).stdout)
        assert report["model"]["fingerprint"] == TINY.fingerprint


def test_arguments_go_before_the_environment(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots_of() == 0
    monkeypatch.setenv("MOEPOOL_SLOTS", "5")
    assert slots_of() == 20
    assert slots_of("--slots", "7") == 28
    monkeypatch.setenv("MOEPOOL_SLOTS", "")
    assert slots_of() == 0
    planned = sum(layer.slots for layer in Plan.load(files / "plan.json").layers)
    monkeypatch.setenv("MOEPOOL_PLAN", str(files / "plan.json"))
    assert slots_of() == planned
    assert slots_of("--slots", "7") == 28
    monkeypatch.setenv("MOEPOOL_SLOTS", "5")
    assert slots_of() == planned
    monkeypatch.delenv("MOEPOOL_PLAN")
    monkeypatch.setenv("MOEPOOL_POLICY", "pinned")
    assert "needs --hot" in run(*TEXT, code=1).stderr
    monkeypatch.setenv("MOEPOOL_PROFILE", str(files / "a.moetrace"))
    report = json.loads(run(*TEXT).stdout)
    assert report["placement"]["policy"] == "pinned"
    assert report["placement"]["hot"] == Trace.load(files / "a.moetrace").hottest(2)
    monkeypatch.setenv("MOEPOOL_POLICY", "")
    assert json.loads(run(*TEXT).stdout)["placement"]["policy"] == "lru"
    assert "--policy static and pinned" in run(*TEXT, "--hot", files / "a.moetrace", code=1).stderr
    monkeypatch.setenv("MOEPOOL_POLICY", "mru")
    assert re.search("MOEPOOL_POLICY.*policy is 'mru'", run(*TEXT, code=2).stderr)


def test_the_environment_of_plan_and_simulate(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPOOL_VRAM", "4MiB")
    options = ("--trace", files / "a.moetrace", "--policy", "lru", "--json", "-")
    assert json.loads(run("plan", "tiny-moe", *options).stdout)["budget_bytes"] == 4 << 20
    assert json.loads(run("plan", "tiny-moe", *options, "--vram", "2MiB").stdout)["budget_bytes"] == 2 << 20
    found = ("simulate", files / "a.moetrace", "--model", "tiny-moe", "--policy", "lru", "--json", "-")
    assert json.loads(run(*found).stdout)["runs"][0]["slots"] == [8] * 4
    assert json.loads(run(*found, "--slots", "5").stdout)["runs"][0]["slots"] == [5] * 4
    result = run("simulate", files / "a.moetrace", "--policy", "lru")
    assert "slots" in result.stdout
    assert "MOEPOOL_VRAM has no effect without --model" in result.stderr
    monkeypatch.setenv("MOEPOOL_VRAM", "auto")
    assert json.loads(run(*found).stdout)["runs"][0]["slots"] == [4] * 4
    monkeypatch.setenv("MOEPOOL_VRAM", "foo")
    for command in (("plan", "tiny-moe", *options), found):
        assert re.search("MOEPOOL_VRAM.*'foo' is not a size", run(*command, code=2).stderr)
    assert "MOEPOOL_VRAM" not in run(*found, "--vram", "bar", code=2).stderr


def test_a_device_that_the_environment_names_wrongly(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPOOL_DEVICE", "gpu")
    for command in (TEXT, ("plan", "tiny-moe", "--trace", files / "a.moetrace")):
        assert re.search("MOEPOOL_DEVICE.*device is 'gpu'; it must be", run(*command, code=2).stderr)
    assert "MOEPOOL_DEVICE" not in run(*TEXT, "--device", "tpu", code=2).stderr


def test_a_plan_that_is_set_aside_is_told(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPOOL_PLAN", str(files / "plan.json"))
    assert "set aside" not in run(*TEXT).stderr
    for option, value in (("--policy", "lru"), ("--slots", "7")):
        told = run(*TEXT, option, value).stderr
        assert f"Warning: MOEPOOL_PLAN is set aside because {option} was given" in told


def test_plan_by_the_card_that_is_there(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, FakeNVML([LARGE]), CUDA_LARGE)
    options = ("plan", "tiny-moe", "--trace", files / "a.moetrace", "--policy", "lru")
    result = run(*options, "--reserve", "2GiB", "-o", files / "auto.json")
    free = moepool.memory("cuda:0").free / GIB
    assert f"{free:.2f} GiB of cuda:0 are free by NVML, 2.00 of them are left to others" in result.stdout
    plan = Plan.load(files / "auto.json")
    assert plan.reserve_bytes == 2 * GIB
    assert plan.budget_bytes == int(free * GIB) - 2 * GIB
    with moepool.ExpertStore.from_gguf(bundled_model(), progress=False) as store:
        pool = plan.within(40 * RECORD).pool(store[0])
        with pytest.raises(moepool.ArgumentError):
            pool.resize(pool.slots + 1)
    monkeypatch.undo()


def test_what_plan_refuses(files: Path, tmp_path: Path) -> None:
    options = ("plan", "tiny-moe", "--trace", files / "a.moetrace")
    assert "--vram auto" in run(*options, "--vram", "1GiB", "--reserve", "1GiB", code=1).stderr
    trace = skewed_trace(5)
    some = trace.layer != 2
    columns = (getattr(trace, name)[some] for name in ("step", "layer", "pos", "decode", "ids"))
    Trace(TINY, *columns).save(files / "part.csv")
    told = run("plan", "tiny-moe", "--trace", files / "part.csv", "--vram", "1GiB", code=1).stderr
    assert "no rows of block 2" in told
    other = Trace(TraceModel(32, 4, 4, "f" * 16), trace.step, trace.layer, trace.pos, trace.decode, trace.ids)
    other.save(files / "other.csv")
    told = run("plan", "tiny-moe", "--trace", files / "other.csv", "--vram", "1GiB", code=1).stderr
    assert "is of another model" in told
