"""Traces: what a file may say, what is refused and where, and that parts add up to the whole."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import moepool
from moepool import Trace, TraceModel, tracefile
from moepool.cli import main
from moepool.recorder import PoolRecorder, TraceRecorder
from moepool.runner import Checkpoint, Placement, RoutingProfile, bundled_model, generate
from moepool.runner.perplexity import perplexity
from moepool.trace import trace_model
from moepool.tracefile import steps_of
from tests.support import On

MODEL = TraceModel(experts=8, k=2, layers=3, fingerprint="0123456789abcdef")
COLUMNS = ("step", "layer", "pos", "decode", "ids", "admissions")


def random_trace(seed: int, model: TraceModel = MODEL, steps: int = 40, admissions: int = 5) -> Trace:
    """A prompt of a few tokens, then decode steps, all layers of a step behind one another."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 6)), *([1] * steps)]
    rows = [
        (step, layer, sum(sizes[:step]) + i, step > 0)
        for step, size in enumerate(sizes)
        for layer in range(model.layers)
        for i in range(size)
    ]
    ids = rng.integers(-1, model.experts, (len(rows), model.k))
    took = np.column_stack(
        [rng.integers(0, high, admissions) for high in (steps + 1, model.layers, model.experts, 4)]
    )
    return Trace(model, *zip(*rows, strict=True), ids, took)  # type: ignore[call-arg,arg-type]


def same(a: Trace, b: Trace) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def fails(path: Path, match: str, model: TraceModel | None = None) -> None:
    with pytest.raises(moepool.FormatError, match=match) as caught:
        Trace.load(path, model)
    assert str(path) in str(caught.value)


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("suffix", [".csv", ".moetrace"])
@pytest.mark.parametrize("experts", [8, 128, 200, 40_000])
def test_a_file_gives_back_what_was_written(tmp_path: Path, suffix: str, experts: int) -> None:
    trace = random_trace(1, TraceModel(experts, 2, 3, "ab"))
    trace.save(tmp_path / f"trace{suffix}")
    read = Trace.load(tmp_path / f"trace{suffix}")
    assert same(read, trace)
    assert read.model == trace.model


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(2, steps=300)
    trace.save(tmp_path / "a.csv")
    monkeypatch.setattr("moepool.tracefile._CHUNK", 37)
    monkeypatch.setattr("moepool.tracefile._BLOCK", 11)
    trace.save(tmp_path / "a.moetrace")
    assert same(Trace.load(tmp_path / "a.csv"), trace)
    assert same(Trace.load(tmp_path / "a.moetrace"), trace)
    lines = (tmp_path / "a.csv").read_text().splitlines(keepends=True)
    lines[500] = "x" + lines[500]
    fails(write(tmp_path / "b.csv", "".join(lines)), "line 501")


def test_an_empty_trace(tmp_path: Path) -> None:
    empty = TraceRecorder(MODEL).trace()
    for name in ("a.csv", "a.moetrace"):
        empty.save(tmp_path / name)
        assert same(Trace.load(tmp_path / name), empty)
    assert Trace.load(write(tmp_path / "b.csv", ""), MODEL).info().rows == 0


def test_the_form_of_llama_forks(tmp_path: Path) -> None:
    """Prompt rows have negative positions; a second run follows the first."""
    path = write(
        tmp_path / "fork.csv",
        "-2,0,1,2\n-1,0,3,4\n-2,1,5,6\n-1,1,7,0\n0,0,1,2\n0,1,3,4\n1,0,5,6\n1,1,7,-1\n\n-1,0,1,2\r\n0,0,3,3\n",
    )
    trace = Trace.load(path)
    assert trace.model == TraceModel(experts=8, k=2, layers=2)
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 4]
    assert trace.decode.tolist() == [False] * 4 + [True] * 4 + [False, True]
    assert trace.pos.tolist() == [-2, -1, -2, -1, 0, 0, 1, 1, -1, 0]
    assert trace.ids[7].tolist() == [7, -1]


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ([(5, 0), (5, 1), (6, 0), (6, 1)], [0, 0, 1, 1]),
        ([(5, 0), (6, 0), (5, 1), (6, 1)], [0, 1, 2, 3]),  # a batch of decode rows: each a step of its own
        ([(-2, 0), (-2, 1), (-1, 0), (-1, 1)], [0, 0, 1, 1]),  # token by token
        ([(-2, 0), (-1, 0), (-2, 0), (-1, 0)], [0, 0, 1, 1]),  # two prompts through one layer
        ([(5, 0), (5, 0)], [0, 1]),
    ],
)
def test_steps_are_told_from_positions_and_layers(rows: list[tuple[int, int]], steps: list[int]) -> None:
    pos, layer = np.array(rows).T
    assert steps_of(pos, layer).tolist() == steps


def test_plain_keeps_rows_steps_and_phases(tmp_path: Path) -> None:
    trace = random_trace(3, admissions=0)
    trace.save(tmp_path / "plain.csv", "plain")
    read = Trace.load(tmp_path / "plain.csv", MODEL)
    assert (read.pos[~read.decode] < 0).all()
    for name in ("step", "layer", "decode", "ids"):
        assert np.array_equal(getattr(read, name), getattr(trace, name))
    with pytest.raises(moepool.ArgumentError, match="no place for 5 admissions"):
        random_trace(3).save(tmp_path / "plain.csv", "plain")
    negative = Trace(MODEL, [0], [0], [-1], [True], [[1, 2]])
    with pytest.raises(moepool.ArgumentError, match="a decode row has one"):
        negative.save(tmp_path / "plain.csv", "plain")


HEAD = (
    "# moepool trace 1 experts=8 k=2 layers=3 fingerprint=0123456789abcdef\nstep,layer,pos,decode,id0,id1\n"
)


@pytest.mark.parametrize(
    ("text", "match", "left", "kept"),
    [
        ("0,0,0,1,3,8\n", r"line 3: an id outside \[-1, 8\): '0,0,0,1,3,8'", 1, 1),
        ("0,0,0,1,-2,3\n", r"line 3: an id outside", 1, 1),
        ("0,0,0,1,3,99999999999\n", r"line 3: an id outside", 1, 1),
        ("0,3,0,1,3,4\n", r"line 3: a layer outside \[0, 3\)", 1, 1),
        ("0,0,0,2,3,4\n", r"line 3: decode is neither", 1, 1),
        ("0,0,0,1,3\n", r"line 3: 5 columns, not 6", 1, 1),
        ("0,0,0,1,3,4,5\n", r"line 3: 7 columns, not 6", 1, 1),
        ("0,0,0,1,3,\n", r"line 3: not integers", 1, 1),
        ("0,0,0,1,3,4.5\n", r"line 3: not integers", 1, 1),
        ("0,0,0,1,3,0x4\n", r"line 3: not integers", 1, 1),
        ("0,0,0,1,3,4-\n", r"line 3: not integers", 1, 1),
        ("-\n", r"line 3: not integers", 1, 1),
        ("0,0,0,1,3,+4\n", r"line 3: not integers", 1, 1),
        ("+-1,0,0,0\n", r"line 3: an admission in a step before the first", 1, 1),
        ("+0,0,1,99999999999\n", r"line 3: an admission outside", 1, 1),
        ("999999,0,0,1,3,8\n", r"line 3: an id outside", 1, 1),  # which says nothing of later steps
        ("-1,0,0,1,3,4\n", r"line 3: a step before", 1, 1),
        (f"0,0,0,1,3,{'1' * 30}\n", r"line 3: a number of more than 18 digits", 1, 1),
        (HEAD, r"line 3: a second head", 2, 1),
        ("+0,0,9,0\n", r"line 3: an admission outside", 1, 1),
        ("+0,0,1\n", r"line 3: 3 columns, not 4", 1, 1),
        ("5,0,0,1,3,4\n2,0,0,1,3,4\n", r"line 4: a step before", 2, 1),
    ],
)
def test_what_is_damaged_is_told_or_counted(
    tmp_path: Path, text: str, match: str, left: int, kept: int
) -> None:
    path = write(tmp_path / "bad.csv", HEAD + text)
    fails(path, match)
    path = write(tmp_path / "bad.csv", HEAD + text + "0,1,0,1,3,4\n")
    with pytest.warns(moepool.MoePoolWarning, match="left out"):
        trace = Trace.load(path, lenient=True)
    assert trace.skipped.total() == left
    assert len(trace) == kept


@pytest.mark.parametrize("form", ["csv", "plain", "binary"])
def test_a_cut_file_is_told_at_every_byte(tmp_path: Path, form: Any) -> None:
    path, cut = tmp_path / "whole", tmp_path / "cut"
    trace = random_trace(4, steps=6, admissions=0)
    trace.save(path, form)
    data = path.read_bytes()
    for size in range(1, len(data)):
        lines = data[:size].count(b"\n")
        if data[size - 1 : size] == b"\n" and lines >= {"csv": 2, "plain": 1, "binary": 10**9}[form]:
            continue  # a text has no end of its own: whole lines are a shorter trace
        cut.write_bytes(data[:size])
        with pytest.raises(moepool.FormatError, match=r"(byte|line) \d+"):
            Trace.load(cut, None if form != "plain" else MODEL)


def test_damaged_bytes_of_the_binary_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepool.tracefile._BLOCK", 50)
    trace, path = random_trace(5), tmp_path / "a.moetrace"
    trace.save(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"}") + 1
    data[start + 40] ^= 1
    path.write_bytes(data)
    fails(path, f"byte {start}: a damaged block")
    with pytest.warns(moepool.MoePoolWarning, match="50 x a damaged block"):
        read = Trace.load(path, lenient=True)
    assert np.array_equal(read.ids, trace.ids[50:])
    path.write_bytes(bytes(data) + b"x")
    with pytest.warns(moepool.MoePoolWarning, match="more bytes behind"):
        Trace.load(path, lenient=True)


def test_a_block_that_is_whole_and_yet_nonsense(tmp_path: Path) -> None:
    """Written for a model of more experts than its head then says."""
    path = tmp_path / "a.moetrace"
    random_trace(6).save(path)
    path.write_bytes(path.read_bytes().replace(b'"experts": 8', b'"experts": 5'))
    fails(path, r"byte \d+: row \d+ of the block has layer . and ids .*outside of 3 layers of 5 experts")


@pytest.mark.parametrize(
    "change",
    [
        {"experts": "8"},
        {"experts": 8.5},
        {"experts": None},
        {"experts": 10**12},
        {"experts": 0},
        {"k": -1},
        {"layers": -1},
        {"layers": 10**13},
        {"fingerprint": 3},
        {"more": 3},
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_a_damaged_head_of_the_binary_form(tmp_path: Path, change: dict[str, Any], lenient: bool) -> None:
    head = json.dumps({"experts": 8, "k": 2, "layers": 3, "fingerprint": ""} | change).encode()
    path = tmp_path / "a.moetrace"
    path.write_bytes(tracefile.MAGIC + tracefile._WORDS.pack(1, len(head)) + head)
    with pytest.raises(moepool.FormatError, match="byte 8: the head is damaged"):
        Trace.load(path, lenient=lenient)


@pytest.mark.parametrize(
    ("name", "row", "value", "match"),
    [
        ("step", 5, 0, r"row 5 of the block has step 0 behind 1 and"),
        ("step", 5, 10**18, "row 5 of the block has step 1000000000000000000"),
        ("step", 0, -3, "row 0 of the block has step -3"),
        ("pos", 5, -(2**63), "row 5 of the block .* position -9223372036854775808"),
        ("decode", 5, 7, "a damaged block"),
        ("admissions", 1, (0, -7, 2**40, -3), "an admission outside"),
        ("admissions", 1, (-1, 0, 0, 0), "an admission outside"),
    ],
)
def test_numbers_that_no_run_has(tmp_path: Path, name: str, row: int, value: Any, match: str) -> None:
    model, path = TraceModel(8, 2, 1), tmp_path / "a.moetrace"
    at = np.arange(10)
    columns = {"step": at // 3, "layer": 0 * at, "pos": at, "decode": at >= 0}
    columns |= {"ids": np.zeros((10, 2), np.int32), "admissions": np.zeros((3, 4), np.int64)}
    columns = {key: np.array(column) for key, column in columns.items()}
    columns["decode"] = columns["decode"].astype(np.int8)
    columns[name][row] = value
    tracefile.write(path, tracefile.Rows(**columns), model, "binary")  # type: ignore[arg-type]
    fails(path, rf"byte \d+: .*{match}")
    if name != "decode":
        with pytest.warns(moepool.MoePoolWarning, match="left out 1: 1 x"):
            trace = Trace.load(path, lenient=True)
        assert len(trace) + len(trace.admissions) == 12
    with pytest.raises(moepool.ArgumentError):
        Trace(model, **(columns | {"decode": at >= 0} if name != "decode" else {"step": [-1], **ONE}))


ONE: dict[str, Any] = {"layer": [0], "pos": [0], "decode": [True], "ids": [[1, 2]]}


def test_steps_fall_between_blocks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepool.tracefile._BLOCK", 5)
    at = np.arange(10)
    rows = tracefile.Rows(
        np.where(at < 5, 3, 2),
        np.zeros(10, np.int32),
        at,
        at >= 0,
        np.zeros((10, 2), np.int32),
        np.empty((0, 4), np.int64),
    )
    tracefile.write(tmp_path / "a.moetrace", rows, MODEL, "binary")
    fails(tmp_path / "a.moetrace", "row 0 of the block has step 2 behind 3")


def test_a_cut_file_loses_a_block_and_says_of_how_many_rows(tmp_path: Path) -> None:
    trace, path = random_trace(3, steps=2000), tmp_path / "a.moetrace"
    trace.save(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.warns(moepool.MoePoolWarning, match="the file is cut inside a block"):
        read = Trace.load(path, lenient=True)
    assert len(read) >= len(trace) - 2048 > 3000
    assert read.skipped.total() == len(trace) - len(read)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    fails(write(tmp_path / "a.csv", "hello\n"), "line 1: not integers")
    names = "pos,layer,id0,id1\n0,0,1,2\n"
    fails(
        write(tmp_path / "a.csv", names), "line 1: not integers but the names of columns, .* remove the line"
    )
    fails(write(tmp_path / "a.moetrace", "junk\n"), "byte 0: not a trace")
    for number in ("0", "9" * 5000, "9" * 18):
        head = HEAD.replace("experts=8", f"experts={number}")
        fails(write(tmp_path / "a.csv", head), "line 1: not the head of a trace")
    fails(write(tmp_path / "a.csv", ""), "it has no rows")
    fails(write(tmp_path / "a.csv", "0,0,2000000000\n"), r"line 1: an id outside \[-1, 16777216\)")
    fails(write(tmp_path / "a.csv", "0,60000,16000000\n"), "no model: 60001 layers of 16000001 experts")
    for text in ("hello\n", HEAD + "x\n"):
        with pytest.raises(moepool.FormatError, match="nothing is left of it: 1 x not integers"):
            Trace.load(write(tmp_path / "a.csv", text), lenient=True)
    fails(write(tmp_path / "a.csv", HEAD.replace("trace 1", "trace 9")), "line 1: version 9")
    fails(write(tmp_path / "a.csv", HEAD.replace("pos", "position")), "line 2: the columns")
    with pytest.raises(moepool.ArgumentError, match="No such file"):
        Trace.load(tmp_path / "none.csv")


@pytest.mark.parametrize("lenient", [False, True])
def test_a_routing_profile_is_no_trace(tmp_path: Path, lenient: bool) -> None:
    RoutingProfile(4, 32).save(tmp_path / "routing.csv")
    match = "line 1: a routing profile, not a trace: `generate --hot` reads it, .*RoutingProfile.load"
    with pytest.raises(moepool.FormatError, match=match):
        Trace.load(tmp_path / "routing.csv", lenient=lenient)


def test_another_models_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    random_trace(7).save(path)
    for other in (
        TraceModel(8, 2, 3, "f" * 16),
        TraceModel(8, 3, 3),
        TraceModel(7, 2, 3),
        TraceModel(8, 2, 2),
    ):
        with pytest.raises(moepool.FormatError, match="of another model: 3 layers of 8 experts, top-2"):
            Trace.load(path, other)
    assert Trace.load(path, TraceModel(16, 2, 4)).model.experts == 16
    fails(write(tmp_path / "plain.csv", "0,0,1,2,3\n"), "5 columns, not 4", MODEL)
    fails(write(tmp_path / "plain.csv", "0,0,1,8\n"), r"line 1: an id outside \[-1, 8\)", MODEL)


def test_experts_are_told_where_no_file_does(tmp_path: Path) -> None:
    path = write(tmp_path / "plain.csv", "0,0,1,2\n1,0,3,9\n")
    assert Trace.load(path).model.experts == 10
    assert Trace.load(path, experts=32).model.experts == 32
    with pytest.warns(moepool.MoePoolWarning, match="left out 1"):  # the model says more
        assert Trace.load(path, MODEL, lenient=True, experts=32).model == MODEL
    with pytest.raises(moepool.FormatError, match=r"plain.csv, line 2: an id outside \[-1, 8\)"):
        Trace.load(path, experts=8)
    with pytest.warns(moepool.MoePoolWarning, match="left out 1: 1 x an id outside"):
        assert len(Trace.load(path, lenient=True, experts=8)) == 1
    with pytest.raises(moepool.ArgumentError, match="experts is 0"):
        Trace.load(path, experts=0)
    random_trace(1).save(tmp_path / "a.csv")
    random_trace(1, TraceModel(8, 2, 3)).save(tmp_path / "b.csv")
    for name, experts in (("a.csv", 16), ("a.csv", 7), ("b.csv", 7)):
        with pytest.raises(moepool.FormatError, match=f"{name} is of a model of 8 experts, not {experts}"):
            Trace.load(tmp_path / name, experts=experts)
    assert Trace.load(tmp_path / "b.csv", experts=16).model.experts == 16
    told = run("trace", "info", path, "--experts", "8", "--lenient")
    assert "1 rows" in told.stdout


def test_a_million_rows_take_seconds(tmp_path: Path) -> None:
    rows = 1_000_000
    model = TraceModel(128, 8, 48, "ab")
    at = np.arange(rows)
    ids = np.random.default_rng(0).integers(0, 128, (rows, 8))
    Trace(model, at // 48, at % 48, at // 48, at > 999, ids).save(tmp_path / "a.csv")
    started = time.perf_counter()
    assert len(Trace.load(tmp_path / "a.csv")) == rows
    assert time.perf_counter() - started < 15, "about 1.5 s on an idle core"


# -------------------------------------------------------------------------------------------- whole and parts


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_a_merged_trace_counts_the_sum_of_its_parts(seeds: list[int]) -> None:
    parts = [random_trace(seed, steps=seed % 7) for seed in seeds]
    whole = Trace.merge(parts)
    for phase in (None, "prompt", "decode"):
        assert np.array_equal(whole.counts(phase), sum(part.counts(phase) for part in parts))
    infos = [part.info() for part in parts]
    for name in ("rows", "prompt_rows", "decode_rows", "steps", "wanted", "admissions"):
        assert getattr(whole.info(), name) == sum(getattr(info, name) for info in infos)
    assert len(whole.phase("prompt")) + len(whole.phase("decode")) == len(whole)


def test_merging_moves_admissions_with_their_steps() -> None:
    a, b = random_trace(8), random_trace(9)
    whole = Trace.merge([a, b])
    moved = whole.admissions[len(a.admissions) :] - b.admissions
    assert (moved == [a.step[-1] + 1, 0, 0, 0]).all()


def test_only_traces_of_one_model_are_merged() -> None:
    known = random_trace(1)
    unknown = random_trace(2, TraceModel(8, 2, 2))
    assert Trace.merge([unknown, known]).model == MODEL
    for other in (TraceModel(8, 2, 3, "ff"), TraceModel(8, 3, 3), TraceModel(9, 2, 3)):
        with pytest.raises(moepool.ArgumentError, match="different models"):
            Trace.merge([known, random_trace(3, other)])
    with pytest.raises(moepool.ArgumentError, match="no traces"):
        Trace.merge([])


def test_parts_at_a_step_are_the_whole() -> None:
    trace = random_trace(11)
    for step in (0, 1, 17, 1000):
        first, rest = trace.split(step)
        assert (first.step < step).all()
        assert (rest.step >= step).all()
        assert np.array_equal(np.concatenate([first.ids, rest.ids]), trace.ids)
        assert len(first.admissions) + len(rest.admissions) == len(trace.admissions)
        assert (first.admissions[:, 0] < step).all()


def test_counts_and_the_hottest() -> None:
    trace = Trace(
        TraceModel(5, 2, 2), [0, 0, 1], [0, 0, 1], [0, 1, 2], [False, True, True], [[1, 1], [3, 1], [-1, 4]]
    )
    assert trace.counts().tolist() == [[0, 3, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert trace.counts("prompt").tolist() == [[0, 2, 0, 0, 0], [0] * 5]
    assert trace.hottest(2) == [[1, 3], [4, 0]]
    assert trace.hottest([0, 1]) == [[], [4]]
    assert trace.hottest(np.int64(1)) == trace.hottest(np.array([1, 1])) == [[1], [4]]  # type: ignore[arg-type]
    for slots, match in (
        (-1, "slots is -1"),
        (1.5, "slots is 1.5"),
        ([1], "1 numbers of slots for 2 layers"),
    ):
        with pytest.raises(moepool.ArgumentError, match=match):
            trace.hottest(slots)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ids": [[1, 8]]}, moepool.IdError, "id 8 at row 0, place 1"),
        ({"ids": [[1, 2**40]]}, moepool.IdError, "outside"),
        ({"ids": [1, 2]}, moepool.ArgumentError, "ids has shape"),
        ({"ids": [[1.0, 2.0]]}, moepool.DtypeError, "give integers"),
        ({"step": np.array([2**64 - 1], np.uint64)}, moepool.ArgumentError, "out of any range"),
        ({"step": [-1]}, moepool.ArgumentError, "steps are from -1"),
        ({"pos": [10**18]}, moepool.ArgumentError, "18 digits"),
        ({"admissions": [[0, 0, 8, 0]]}, moepool.ArgumentError, "at row 0: an admission outside of 3 layers"),
        ({"layer": [3]}, moepool.IdError, "layer 3 at row 0"),
        ({"layer": [0, 1]}, moepool.ArgumentError, "layer has shape"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], error: type[Exception], match: str) -> None:
    columns = {"step": [0], "layer": [0], "pos": [0], "decode": [True], "ids": [[1, 2]]}
    with pytest.raises(error, match=match):
        Trace(MODEL, **(columns | change))
    with pytest.raises(moepool.ArgumentError, match="step falls"):
        Trace(MODEL, [1, 0], [0, 0], [0, 0], [True, True], [[1, 2], [1, 2]])


def test_a_trace_does_not_change() -> None:
    trace = random_trace(1)
    with pytest.raises(ValueError, match="read-only"):
        trace.ids[0, 0] = 1


# -------------------------------------------------------------------------------------------------- recording


def test_a_strided_view_is_recorded_whole() -> None:
    """Routers hand out the first k columns of a wider table."""
    table = np.arange(24, dtype=np.int64).reshape(3, 8) % 8
    recorder = TraceRecorder(MODEL)
    recorder.step(10, False)(1, table[:, ::4])
    table[:] = 0
    trace = recorder.trace()
    assert trace.ids.tolist() == [[0, 4]] * 3
    assert trace.pos.tolist() == [10, 11, 12]


def test_generate_records_what_the_pools_count(tmp_path: Path) -> None:
    model = trace_model(bundled_model())
    recorder = TraceRecorder(model)
    with Checkpoint(bundled_model(), progress=False) as checkpoint:
        with checkpoint.model(Placement(slots=32)) as runner:
            result = generate(
                runner, checkpoint.tokenizer, "import os\n", 12, stop_at_eos=False, trace=recorder
            )
            stats = runner.stats()
        trace = recorder.trace()
        info = trace.info()
        assert info.prompt_rows == 4 * len(result.prompt_tokens)
        assert info.decode_rows == 4 * 11
        assert info.wanted == stats["hits"] + stats["misses"]
        assert trace.pos[-1] == len(result.prompt_tokens) + 10
        recorder = TraceRecorder(model)
        with checkpoint.model(Placement(slots=32)) as runner:
            text = "def f(x):\n    return x + 1\n" * 40
            scored = perplexity(runner, checkpoint.tokenizer, text, 128, 2, 16, trace=recorder)
        info = recorder.trace().info()
        assert (info.rows, info.decode_rows, info.steps) == (4 * 256, 4 * 256, 16)
        assert scored.stats["prompt_misses"] == 0


@pytest.mark.parametrize("room", [1 << 20, 300])
def test_pools_record_what_the_host_saw(room: int, on: On) -> None:
    """Ids, phases and positions, whoever took the steps; little room is drained again and again."""
    weight = np.ones((8, 32, 32), np.float32)
    store = moepool.ExpertStore.from_arrays(gate=weight, up=weight, down=weight, qtype="f32")
    model = TraceModel(8, 2, 1)
    rng = np.random.default_rng(0)
    host = TraceRecorder(model)
    with on.pool(store[0], 4) as pool:
        ffn = moepool.ExpertFFN(pool)
        before = np.array([[0, 1]], np.int32)
        on(ffn, np.ones((1, 32), np.float32), before, np.ones((1, 2), np.float32), phase="prompt")
        with PoolRecorder(model, [pool], admissions=True, room_bytes=room) as recorder:
            pos = 0
            for i in range(60):
                tokens = 3 if i % 20 == 0 else 1
                ids = rng.integers(0, 8, (tokens, 2)).astype(np.int32)
                if i in (5, 6, 33):
                    ids[:] = -1  # which a pool does not count
                phase = "prompt" if tokens == 3 else "decode"
                host.step(pos, tokens == 1)(0, ids)
                recorder.step(pos, tokens == 1)
                on(ffn, np.ones((tokens, 32), np.float32), ids, np.ones((tokens, 2), np.float32), phase=phase)
                pos += tokens
        on(ffn, np.ones((1, 32), np.float32), np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
        stats = pool.stats()
    trace, seen = recorder.trace(), host.trace()
    for name in ("step", "layer", "pos", "decode", "ids"):
        assert np.array_equal(getattr(trace, name), getattr(seen, name)), name
    # The step behind it admits only what the run evicted.
    assert len(trace.admissions) <= stats.copied_bytes // store[0].record_bytes
    assert set(trace.admissions[:, 0].tolist()) <= set(trace.step[trace.decode].tolist())
    assert len(trace.admissions) > 10
    for step, _, expert, _ in trace.admissions.tolist():
        assert expert in trace.ids[trace.step == step]


@pytest.mark.parametrize("how", ["", "warm", "prefetched", "resized", "loaded"])
def test_admissions_that_cannot_be_repeated_are_left_out(how: str, tmp_path: Path) -> None:
    weight = np.ones((8, 32, 32), np.float32)
    layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="f32")[0]
    with moepool.Pool(layer, 4) as pool:
        if how == "warm":
            pool.resolve([[1, 2]]).release()
        pool.save_state(tmp_path / "state")
        with PoolRecorder(TraceModel(8, 2, 1), [pool], admissions=True) as recorder:
            recorder.step(0, True)
            pool.resolve([[3, 4]]).release()
            if how == "prefetched":
                pool.prefetch([5])
            if how == "resized":
                pool.resize(1)
            if how == "loaded":
                pool.load_state(tmp_path / "state")
        if not how:
            assert recorder.trace().admissions.tolist() == [[0, 0, 3, 0], [0, 0, 4, 1]]
            return
        with pytest.warns(moepool.MoePoolWarning, match="admissions are left out of the trace: the pool of"):
            trace = recorder.trace()
    assert trace.ids.tolist() == [[3, 4]]
    with pytest.raises(moepool.ArgumentError, match="has no admissions"):
        moepool.simulate(trace, 4, ["recorded"])


def test_a_gap_is_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.ones((8, 32, 32), np.float32)
    layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="f32")[0]

    def gone(self: object) -> None:
        raise moepool.StateError("the ring ran full")

    recorder = PoolRecorder(TraceModel(8, 2, 1), [moepool.Pool(layer, 8)])
    with monkeypatch.context() as patch:
        patch.setattr("moepool.pooltrace.PoolTrace.drain", gone)
        with pytest.raises(moepool.StateError, match="ran full"):
            recorder.trace()
    with pytest.raises(moepool.StateError, match="ran full"):
        recorder.trace()


def test_the_pools_must_be_the_models() -> None:
    weight = np.ones((8, 32, 32), np.float32)
    layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="f32")[0]
    with moepool.Pool(layer, 4) as pool, moepool.Pool(layer, 4) as other:
        with pytest.warns(moepool.MoePoolWarning, match=r"has 4 layers, and pools of \[0\] are recorded"):
            PoolRecorder(TraceModel(8, 2, 4), [pool])
        with pytest.raises(moepool.ArgumentError, match="one for each layer"):
            PoolRecorder(TraceModel(8, 2, 1), [pool, other])
        with pytest.raises(moepool.ArgumentError, match="a pool of layer 0 with 8 experts; the model has"):
            PoolRecorder(TraceModel(7, 2, 1), [pool])


def test_a_pool_records_only_steps_of_the_models_width() -> None:
    weight = np.ones((8, 32, 32), np.float32)
    layer = moepool.ExpertStore.from_arrays(weight=weight, qtype="f32")[0]
    recorder = PoolRecorder(TraceModel(8, 2, 1), [pool := moepool.Pool(layer, 8)])
    pool.resolve([[1, 2, 3]]).release()
    with pytest.raises(moepool.ArgumentError, match="3 places a token; the model has 2"):
        recorder.trace()
    recorder = PoolRecorder(TraceModel(8, 4, 1), [pool])
    pool.resolve([[1, 2, 3]]).release()
    assert recorder.trace().ids.tolist() == [[1, 2, 3, -1]]


def test_the_fingerprint_is_the_routers(tmp_path: Path) -> None:
    def model(name: str, router: float, experts: float) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, "mixtral")
        writer.add_expert_used_count(2)
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.1.ffn_{part}_exps.weight", np.full((4, 32, 32), experts, np.float32))
        writer.add_tensor("blk.1.ffn_gate_inp.weight", np.full((4, 32), router, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    first = trace_model(model("a.gguf", 1, 1))
    assert (first.experts, first.k, first.layers) == (4, 2, 2)
    assert trace_model(model("b.gguf", 1, 2)) == first
    assert trace_model(model("c.gguf", 2, 1)) != first


# ----------------------------------------------------------------------------------------------- command line


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def test_the_commands(tmp_path: Path) -> None:
    csv, plain, binary = tmp_path / "a.csv", tmp_path / "plain.csv", tmp_path / "a.moetrace"
    run("generate", "tiny-moe", "-p", "import os", "-n", "4", "--trace", csv)
    run("trace", "convert", csv, "-o", binary, "--model", "tiny-moe")
    assert same(Trace.load(csv), Trace.load(binary))
    run("trace", "convert", csv, "-o", plain, "--form", "plain")
    run("trace", "merge", plain, binary, "-o", tmp_path / "both.csv")
    report = json.loads(run("trace", "info", tmp_path / "both.csv", "--json", "-").stdout)
    assert report["rows"] == 2 * len(Trace.load(csv))
    assert report["model"]["fingerprint"] == trace_model(bundled_model()).fingerprint
    run("trace", "split", csv, "--prompt", tmp_path / "p.csv", "--decode", tmp_path / "d.csv")
    assert Trace.load(tmp_path / "d.csv").info().decode_rows == 4 * 3
    run("trace", "split", csv, "--at", 2, "--rest", tmp_path / "r.csv")
    assert same(Trace.load(tmp_path / "r.csv"), Trace.load(csv).split(2)[1])
    assert "give them together" in run("trace", "split", csv, "--rest", tmp_path / "r.csv", code=1).stderr
    told = run("trace", "info", csv).stdout
    assert "top-4, router" in told
    assert "0 admissions (`--trace` keeps them in runs with --miss auto alone)" in told
    run("generate", "tiny-moe", "-p", "a", "-n", "4", "--miss", "auto", "--slots", "8", "--trace", csv)
    assert re.search(r"[1-9]\d* admissions$", run("trace", "info", csv).stdout, re.MULTILINE)
    assert "recorded" in run("simulate", csv, "--policy", "recorded", "--slots", "8").stdout


def test_the_commands_refuse_in_one_line(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.csv", "0,0,1,2,3,40\n0,1,1,2,3,4\n")
    assert "line 1: an id outside" in run("trace", "info", plain, "--model", "tiny-moe", code=1).stderr
    told = run("trace", "info", plain, "--model", "tiny-moe", "--lenient")
    assert "Warning" in told.stderr
    assert "1 rows" in told.stdout
    assert "--prompt or --decode" in run("trace", "split", plain, code=1).stderr
    assert "neither" in run("trace", "convert", plain, "-o", tmp_path / "a.txt", code=1).stderr
    assert (
        "ends in neither"
        in run("generate", "tiny-moe", "-p", "a", "--trace", tmp_path / "a.txt", code=2).stderr
    )
