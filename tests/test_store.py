"""Stores: from files and from arrays, what is packed is what was given, and what cannot be is refused by
name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import moepool
import moepool.store
from moepool._native.handles import StoreHandle
from moepool.gguf import GGUFFile
from moepool.runner import bundled_model
from tests import cases, ggufs
from tests.ggufs import Blocks
from tests.support import F32, U8, assert_same

EXPERTS, WIDTH, HIDDEN = 12, 32, 64


def blocks_of(qtype: str, experts: int, rows: int, columns: int, *key: object) -> U8:
    return cases.raw_blocks(qtype, experts * rows, columns, "store", *key).reshape(experts, rows, -1)


def layer_blocks(qtype: str = "q8_0", *key: object) -> dict[str, U8]:
    """gate, up and down of a small layer."""
    return {
        "gate": blocks_of(qtype, EXPERTS, WIDTH, HIDDEN, "gate", *key),
        "up": blocks_of(qtype, EXPERTS, WIDTH, HIDDEN, "up", *key),
        "down": blocks_of(qtype, EXPERTS, HIDDEN, WIDTH, "down", *key),
    }


def tensors_of(blocks: Mapping[str, U8], qtype: str = "q8_0", block: int = 0) -> dict[str, Any]:
    return {f"blk.{block}.ffn_{name}_exps.weight": Blocks(data, qtype) for name, data in blocks.items()}


def unpacked(store: moepool.ExpertStore, layer: int, name: str) -> U8:
    """Every expert of a matrix, as the store gives it back."""
    return np.stack([store.unpack(layer, name, expert) for expert in range(store[layer].experts)])


def assert_holds(store: moepool.ExpertStore, layer: int, blocks: Mapping[str, U8]) -> None:
    for name, data in blocks.items():
        assert (unpacked(store, layer, name) == data).all(), name


def resident_mib() -> float:
    """Memory of this process that is its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


# ------------------------------------------------------------------------------------------------ from a file


def test_the_bundled_model_comes_back_byte_for_byte() -> None:
    with moepool.ExpertStore.from_gguf(bundled_model()) as store, GGUFFile(bundled_model()) as file:
        assert [layer.block for layer in store] == [0, 1, 2, 3]
        for layer in store:
            assert layer.experts == 32
            assert layer.record_bytes % 256 == 0
            assert layer.bytes >= 32 * layer.record_bytes
            for name, info in layer.matrices.items():
                tensor = file.tensors[f"blk.{layer.block}.ffn_{name}_exps.weight"]
                assert (info.name, info.qtype, layer.experts, info.rows, info.columns) == (
                    name,
                    tensor.qtype,
                    *tensor.shape,
                )
                assert (unpacked(store, layer.index, name) == tensor.data).all()
        assert store.bytes == sum(layer.bytes for layer in store)
        assert repr(store).startswith("<ExpertStore: 4 layers")


def test_only_the_layers_asked_for_are_loaded() -> None:
    with moepool.ExpertStore.from_gguf(bundled_model(), layers=iter([3, 1, 3])) as store:
        assert [(layer.index, layer.block) for layer in store] == [(0, 1), (1, 3)]
        with pytest.raises(moepool.IdError, match="no layer 3, only 0 to 1, which are the blocks 1, 3$"):
            store[3]
    with pytest.raises(
        moepool.ArgumentError, match=r"layers names \[4\], but the blocks .* are \[0, 1, 2, 3\]"
    ):
        moepool.ExpertStore.from_gguf(bundled_model(), layers=[0, 4])


@pytest.mark.parametrize("layers", [1, "1", [1.5], ["1"]])
def test_layers_must_be_numbers(layers: Any) -> None:
    with pytest.raises(moepool.ArgumentError, match="layers.* it must be"):
        moepool.ExpertStore.from_gguf(bundled_model(), layers=layers)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "model.gguf", {"token_embd.weight": np.zeros((4, 8), np.float32)})
    with pytest.raises(moepool.FormatError, match="no expert tensors"):
        moepool.ExpertStore.from_gguf(path)


def test_h09_merged_tensors_have_the_gate_first(tmp_path: Path) -> None:
    """gate rows all +1, up rows all -2, x = 1: silu(K) * -2K, not silu(-2K) * K."""
    both = np.concatenate([np.ones((4, 32, 64)), np.full((4, 32, 64), -2)], axis=1).astype(np.float32)
    tensors = {
        "blk.0.ffn_gate_up_exps.weight": both,
        "blk.0.ffn_down_exps.weight": np.zeros((4, 64, 32), np.float32),
    }
    with moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "m.gguf", tensors)) as store:
        assert list(store[0].matrices) == ["gate", "up", "down"]
        with moepool.Pool(store[0], 4) as pool:
            x, ids = np.ones((1, 64), np.float32), [[3, 0]]
            hidden = moepool.swiglu(moepool.matmul_id(x, ids, pool.gate), moepool.matmul_id(x, ids, pool.up))
    np.testing.assert_allclose(hidden, 64 / (1 + np.exp(-64.0)) * -128, rtol=1e-6)


def test_h09_merged_blocks_are_cut_between_rows(tmp_path: Path) -> None:
    """The same store as from separate tensors, biases and scale too."""
    blocks = layer_blocks()
    bias = {
        name: cases.Stream("bias", name).bell((EXPERTS, WIDTH)).astype(np.float32) for name in ("gate", "up")
    }
    scale = np.arange(1, EXPERTS + 1, dtype=np.float32)
    tensors = {
        "blk.0.ffn_gate_up_exps.weight": Blocks(
            np.concatenate([blocks["gate"], blocks["up"]], axis=1), "q8_0"
        ),
        "blk.0.ffn_gate_up_exps.bias": np.concatenate([bias["gate"], bias["up"]], axis=1),
        "blk.0.ffn_up_exps.scale": scale,
        "blk.0.ffn_down_exps.weight": Blocks(blocks["down"], "q8_0"),
    }
    merged = moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "m.gguf", tensors))
    assert_holds(merged, 0, blocks)
    apart = moepool.ExpertStore.from_arrays(
        **blocks, qtype="q8_0", bias=bias, scale={"gate": scale, "up": scale}
    )
    assert_same_outputs(merged, apart)


def assert_same_outputs(a: moepool.ExpertStore, b: moepool.ExpertStore) -> None:
    """Every matrix of every expert of layer 0 gives the same bytes."""
    ids = np.arange(a[0].experts)[None]
    for name, info in a[0].matrices.items():
        x = cases.activations("plain", 1, info.columns, "same", name)
        with moepool.Pool(a[0], 0) as one, moepool.Pool(b[0], 0) as other:
            outputs = [moepool.matmul_id(x, ids, pool.matrix(name)) for pool in (one, other)]
        assert_same(*outputs, name)


def test_h10_scales_of_the_file_are_applied_once(tmp_path: Path) -> None:
    """Expert e's outputs are e + 1 times what they are without, in each projection."""
    blocks = layer_blocks("f16")
    scale = np.arange(1, EXPERTS + 1, dtype=np.float32)
    scales = {f"blk.0.ffn_{name}_exps.scale": scale for name in blocks}
    plain = moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "a.gguf", tensors_of(blocks, "f16")))
    scaled = moepool.ExpertStore.from_gguf(
        ggufs.write(tmp_path / "b.gguf", {**scales, **tensors_of(blocks, "f16")})
    )
    ids = np.arange(EXPERTS)[None]
    for name, info in plain[0].matrices.items():
        x = cases.activations("plain", 1, info.columns, "h10")
        with moepool.Pool(plain[0], 4) as one, moepool.Pool(scaled[0], 4) as other:
            with pytest.warns(moepool.MoePoolWarning):
                once = moepool.matmul_id(x, ids, one.matrix(name))
            with pytest.warns(moepool.MoePoolWarning):
                y = moepool.matmul_id(x, ids, other.matrix(name))
        assert_same(y, once * scale[None, :, None] + np.float32(0), name)


def test_h11_one_tensor_an_expert_loads_the_same(tmp_path: Path) -> None:
    """Experts go by number, 10 after 9, whatever the order in the file."""
    blocks = layer_blocks()
    single = {
        f"blk.0.ffn_{name}.{expert}.weight": Blocks(data[expert], "q8_0")
        for name, data in blocks.items()
        for expert in range(EXPERTS)
    }
    shuffled = {name: single[name] for name in random.Random(3).sample(list(single), len(single))}
    for tensors in (single, dict(sorted(single.items())), shuffled):
        with moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "m.gguf", tensors)) as store:
            assert_holds(store, 0, blocks)


def test_h12_shards_load_as_one_model(tmp_path: Path) -> None:
    blocks = layer_blocks()
    shards = [dict([tensor]) for tensor in tensors_of(blocks).items()]
    total = {"split.count": 3, "split.tensors.count": 3}
    for i, shard in enumerate(shards):
        ggufs.write(tmp_path / f"model-{i + 1:05d}-of-00003.gguf", shard, {"split.no": i, **total})
    with moepool.ExpertStore.from_gguf(tmp_path / "model-00001-of-00003.gguf") as store:
        assert_holds(store, 0, blocks)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(moepool.FormatError, match="missing: model-00002-of-00003.gguf"):
        moepool.ExpertStore.from_gguf(tmp_path / "model-00001-of-00003.gguf")


def test_h08_types_may_differ_within_a_layer_and_between_layers(tmp_path: Path) -> None:
    parts = {
        0: {"gate": ("q8_0", WIDTH, HIDDEN), "up": ("q4_0", WIDTH, HIDDEN), "down": ("f16", HIDDEN, WIDTH)},
        3: {"gate": ("bf16", WIDTH, HIDDEN), "up": ("q5_1", WIDTH, HIDDEN), "down": ("q4_1", HIDDEN, WIDTH)},
    }
    tensors, expected = {}, {}
    for block, matrices in parts.items():
        expected[block] = {}
        for name, (qtype, rows, columns) in matrices.items():
            data = blocks_of(qtype, 5, rows, columns, block, name)
            tensors[f"blk.{block}.ffn_{name}_exps.weight"] = Blocks(data, qtype)
            expected[block][name] = data
    with moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "m.gguf", tensors)) as store:
        for layer, (block, blocks) in zip(store, expected.items(), strict=True):
            assert layer.block == block
            assert {n: m.qtype for n, m in layer.matrices.items()} == {
                n: p[0] for n, p in parts[block].items()
            }
            assert_holds(store, layer.index, blocks)


def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a store was begun")

    monkeypatch.setattr(moepool.store, "StoreHandle", refuse)


def test_everything_is_checked_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tensor of the last layer is wrong."""
    nothing_is_packed(monkeypatch)
    tensors = {**tensors_of(layer_blocks()), **tensors_of(layer_blocks(), block=1)}
    last = "blk.1.ffn_down_exps.weight"
    wrong = np.zeros((EXPERTS, HIDDEN, WIDTH + 1), np.float32)
    with pytest.raises(moepool.FormatError, match="block 1: down has 33 columns"):
        moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "m.gguf", {**tensors, last: wrong}))
    ints = np.zeros((EXPERTS, HIDDEN, WIDTH), np.int32)
    with pytest.raises(moepool.UnsupportedError, match=f"'{last}' is i32"):
        moepool.ExpertStore.from_gguf(ggufs.write(tmp_path / "m.gguf", {**tensors, last: ints}))
    path = ggufs.write(tmp_path / "m.gguf", tensors)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(moepool.FormatError, match=f"'{last}' ends at byte"):
        moepool.ExpertStore.from_gguf(path)


def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    blocks = layer_blocks()
    blocks["up"][7, 3, :2] = np.array([np.inf], np.float16).view(np.uint8)
    path = ggufs.write(tmp_path / "m.gguf", tensors_of(blocks))
    message = r"m.gguf: tensor 'blk.0.ffn_up_exps.weight': expert 7, row 3: .* not finite"
    with pytest.raises(moepool.FormatError, match=message):
        moepool.ExpertStore.from_gguf(path)
    with pytest.raises(moepool.FormatError, match=r"up: expert 7, row 3"):
        moepool.ExpertStore.from_arrays(**blocks, qtype="q8_0")


def test_progress_is_shown_on_a_terminal_or_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for progress, shown in ((True, True), (None, False), (False, False)):
        moepool.ExpertStore.from_gguf(bundled_model(), layers=[0], progress=progress).close()
        out, err = capsys.readouterr()
        assert (out, "packing experts" in err) == ("", shown), progress
        assert not shown or "100%" in err


def test_loading_keeps_no_page_of_the_file(tmp_path: Path) -> None:
    """A file of 96 MiB is never in memory twice: its pages go as they are packed, and the map at the end."""
    names = {"gate": (64, 4096), "up": (64, 4096), "down": (4096, 64)}
    tensors = {
        f"blk.{block}.ffn_{name}_exps.weight": np.full((16, *shape), block, np.float16)
        for block, (name, shape) in itertools.product(range(4), names.items())
    }
    path = ggufs.write(tmp_path / "m.gguf", tensors)
    seen = []

    class Watching(StoreHandle):
        def pack(self, *arguments: int) -> None:
            super().pack(*arguments)
            seen.append(file_mib(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moepool.store, "StoreHandle", Watching)
        store = moepool.ExpertStore.from_gguf(path)
    assert len(seen) == 12
    assert max(seen) < 10, seen
    assert str(path) not in Path("/proc/self/maps").read_text()
    store.close()


def file_mib(path: Path) -> float:
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total / 1024


# ------------------------------------------------------------------------------------------------ from arrays


@pytest.mark.parametrize("qtype", cases.TYPES)
def test_raw_blocks_come_back_byte_for_byte(qtype: str) -> None:
    """Of every type, padded rows and a short last chunk included."""
    columns = 512 if cases.LAYOUTS[qtype].block == 256 else 320
    blocks = blocks_of(qtype, 3, 33, columns, qtype)
    with moepool.ExpertStore.from_arrays(weight=blocks, qtype=qtype) as store:
        assert store[0].matrices == {"weight": moepool.MatrixInfo("weight", qtype, 33, columns)}
        assert_holds(store, 0, {"weight": blocks})


QUANTISABLE = [
    name
    for name in cases.TYPES
    if name in {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "mxfp4"}
]


@pytest.mark.parametrize("qtype", QUANTISABLE)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numbers_are_quantised_by_the_gguf_package(qtype: str, dtype: type) -> None:
    values = cases.Stream("quantise", qtype).bell((3, 5, 256)).astype(dtype)
    kind = gguf.GGMLQuantizationType[qtype.upper()]
    expected = gguf.quants.quantize(values.astype(np.float32), kind)
    with moepool.ExpertStore.from_arrays(weight=values, qtype=qtype) as store:
        assert_holds(store, 0, {"weight": np.ascontiguousarray(expected).view(np.uint8)})


@pytest.mark.parametrize("qtype", [name for name in cases.TYPES if name not in QUANTISABLE])
def test_a_type_that_gguf_cannot_make_is_refused_with_the_remedy(
    qtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_is_packed(monkeypatch)
    values = np.zeros((2, 3, 256), np.float32)
    with pytest.raises(
        moepool.UnsupportedError, match=f"cannot quantise numbers to {qtype}; hand in raw blocks"
    ):
        moepool.ExpertStore.from_arrays(weight=values, qtype=qtype)


@pytest.mark.parametrize("qtype", QUANTISABLE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(qtype: str, wrong: float) -> None:
    values = np.ones((3, 5, 256), np.float32)
    values[1, 4, 7] = wrong
    with pytest.raises(moepool.FormatError, match="weight: expert 1, row 4: .*numpy.nan_to_num"):
        moepool.ExpertStore.from_arrays(weight=values, qtype=qtype)


@pytest.mark.parametrize("qtype", [name for name in QUANTISABLE if name not in ("f32", "mxfp4")])
def test_numbers_that_become_infinite_are_refused_by_name(qtype: str) -> None:
    values = np.ones((3, 5, 256), np.float32)
    values[2, 1, 9] = np.finfo(np.float32).max
    with pytest.raises(
        moepool.FormatError, match=r"weight(: expert |\[)2.*row 1: .*(too large for|not finite)"
    ):
        moepool.ExpertStore.from_arrays(weight=values, qtype=qtype)


ARRANGED: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "every second expert": lambda a: np.repeat(a, 2, axis=0)[::2],
    "experts reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "rows reversed": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "columns last": lambda a: np.ascontiguousarray(a.transpose(2, 0, 1)).transpose(1, 2, 0),
    "Fortran": np.asfortranarray,
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("name", ARRANGED)
@pytest.mark.parametrize("raw", [True, False])
def test_arrays_may_be_arranged_in_any_way(name: str, raw: bool) -> None:
    blocks = blocks_of("q8_0", 4, 3, 64, "arranged")
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    given = ARRANGED[name](blocks if raw else values)
    with (
        moepool.ExpertStore.from_arrays(weight=blocks if raw else values, qtype="q8_0") as packed,
        moepool.ExpertStore.from_arrays(weight=given, qtype="q8_0") as store,
    ):
        assert (unpacked(store, 0, "weight") == unpacked(packed, 0, "weight")).all()


def test_an_expert_that_all_share_is_packed_for_each() -> None:
    """Stride 0."""
    one = blocks_of("q8_0", 1, 3, 64, "shared")
    with moepool.ExpertStore.from_arrays(
        weight=np.broadcast_to(one, (5, *one.shape[1:])), qtype="q8_0"
    ) as store:
        assert (unpacked(store, 0, "weight") == one).all()


def test_types_may_be_given_by_name() -> None:
    blocks = {
        "gate": blocks_of("q4_0", 4, WIDTH, HIDDEN),
        "up": blocks_of("q8_0", 4, WIDTH, HIDDEN),
        "down": blocks_of("q5_0", 4, HIDDEN, WIDTH),
    }
    with moepool.ExpertStore.from_arrays(
        **blocks, qtype={"gate": "q4_0", "up": "q8_0", "down": "q5_0"}
    ) as store:
        assert_holds(store, 0, blocks)


def test_bias_and_scale_are_applied_in_that_order() -> None:
    eye = np.broadcast_to(np.eye(32, dtype=np.float32), (3, 32, 32))
    bias = np.arange(96, dtype=np.float16).reshape(3, 32)
    scale = np.array([1.0, -2.0, 0.5], np.float32)
    store = moepool.ExpertStore.from_arrays(
        weight=eye, qtype="f32", bias={"weight": bias}, scale={"weight": scale}
    )
    assert store[0].matrices["weight"].bias and store[0].matrices["weight"].scale
    with moepool.Pool(store[0], 3) as pool:
        y = moepool.matmul_id(np.full((1, 32), 4, np.float32), [[0, 1, 2]], pool)
    assert (y[0] == scale[:, None] * 4 + bias).all()


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, moepool.ArgumentError, "given is nothing"),
    "no down": ({"gate": 0, "up": 0}, moepool.ArgumentError, "given is gate, up"),
    "two layers at once": (
        {"gate": 0, "up": 0, "down": 0, "weight": 0},
        moepool.ArgumentError,
        "or weight alone",
    ),
    "a list": ({"weight": [[1.0]]}, TypeError, "weight is a list"),
    "float64": (
        {"weight": np.zeros((2, 3, 64))},
        moepool.DtypeError,
        r"weight is float64; .*astype\(numpy.float32\)",
    ),
    "int8": ({"weight": np.zeros((2, 3, 68), np.int8)}, moepool.DtypeError, "weight is int8"),
    "big-endian": ({"weight": np.zeros((2, 3, 64), ">f4")}, moepool.DtypeError, "weight is >f4"),
    "two dimensions": (
        {"weight": np.zeros((3, 64), np.float32)},
        moepool.ArgumentError,
        r"\(experts, rows, columns\)",
    ),
    "no expert": (
        {"weight": np.zeros((0, 3, 68), np.uint8)},
        moepool.ArgumentError,
        r"\(experts, rows, row bytes\)",
    ),
    "half a block": (
        {"weight": np.zeros((2, 3, 48), np.float32)},
        moepool.ArgumentError,
        "rows of 48 columns",
    ),
    "half a block of bytes": (
        {"weight": np.zeros((2, 3, 51), np.uint8)},
        moepool.ArgumentError,
        "rows of 51 bytes",
    ),
    "an unknown type": (
        {"weight": np.zeros((2, 3, 64), np.float32), "qtype": "q9"},
        moepool.ArgumentError,
        "the qtype 'q9' of weight is none of f32, f16",
    ),
    "a type of another name": (
        {"weight": np.zeros((2, 3, 64), np.float32), "qtype": {"weights": "q8_0"}},
        moepool.ArgumentError,
        "qtype names 'weights', which is not one of weight",
    ),
    "no type for a matrix": (
        {"weight": np.zeros((2, 3, 64), np.float32), "qtype": {}},
        moepool.ArgumentError,
        "qtype says nothing about 'weight'",
    ),
    "no type": (
        {"weight": np.zeros((2, 3, 64), np.float32), "qtype": None},
        moepool.ArgumentError,
        "qtype is a NoneType; it must be a key of",
    ),
    "a bias without a name": (
        {"weight": np.zeros((2, 3, 64), np.float32), "bias": np.zeros((2, 3), np.float32)},
        moepool.ArgumentError,
        "bias is a ndarray; it must be a dict: bias={'weight': array}",
    ),
    "a masked array": (
        {"weight": np.ma.zeros((2, 3, 64), np.float32)},
        moepool.ArgumentError,
        "weight is masked.*weight.filled",
    ),
    "a bias of another name": (
        {"weight": np.zeros((2, 3, 64), np.float32), "bias": {"gate": np.zeros((2, 3), np.float32)}},
        moepool.ArgumentError,
        "bias names 'gate'",
    ),
    "a bias of another shape": (
        {"weight": np.zeros((2, 3, 64), np.float32), "bias": {"weight": np.zeros((3, 2), np.float32)}},
        moepool.ArgumentError,
        r"bias\['weight'\] is of shape \(3, 2\); it must be \(2, 3\)",
    ),
    "a scale in float64": (
        {"weight": np.zeros((2, 3, 64), np.float32), "scale": {"weight": np.ones(2)}},
        moepool.DtypeError,
        r"scale\['weight'\] is float64",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_wrong_arrays_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_packed(monkeypatch)
    arguments, error, message = WRONG_ARRAYS[name]
    with pytest.raises(error, match=message):
        moepool.ExpertStore.from_arrays(**{"qtype": "q8_0", **arguments})


def test_matrices_of_a_layer_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_packed(monkeypatch)
    good = layer_blocks()
    for name, shape, message in (
        ("up", (EXPERTS, WIDTH + 1, HIDDEN), "gate is 32 x 64, but up is 33 x 64"),
        ("down", (EXPERTS, HIDDEN, WIDTH * 2), "down has 64 columns, but gate has 32 rows"),
        ("down", (EXPERTS + 1, HIDDEN, WIDTH), "different numbers of experts"),
    ):
        with pytest.raises(moepool.ArgumentError, match=message):
            moepool.ExpertStore.from_arrays(**{**good, name: blocks_of("q8_0", *shape)}, qtype="q8_0")


# ------------------------------------------------------------------------------------------------- the handle


def small_store() -> moepool.ExpertStore:
    return moepool.ExpertStore.from_arrays(weight=blocks_of("q8_0", 4, 3, 64), qtype="q8_0")


def test_a_store_is_a_sequence_of_layers() -> None:
    with moepool.ExpertStore.from_gguf(bundled_model()) as store:
        assert len(store) == 4
        assert store[-1] is store[3]
        assert list(store) == [store[i] for i in range(4)]
        for index in (4, -5):
            with pytest.raises(moepool.IdError, match=f"the store has no layer {index}, only 0 to 3$"):
                store[index]


def test_unpack_refuses_what_is_not_there() -> None:
    with small_store() as store:
        for layer, name, expert, error in (
            (1, "weight", 0, IndexError),
            (0, "gate", 0, moepool.ArgumentError),
            (0, "weight", 4, moepool.ArgumentError),
            (0, "weight", -1, moepool.ArgumentError),
        ):
            with pytest.raises(error):
                store.unpack(layer, name, expert)


def test_a_closed_store_is_of_no_use_and_closes_twice() -> None:
    store = small_store()
    layer = store[0]
    assert not store.closed
    store.close()
    store.close()
    assert store.closed
    assert repr(store) == "<ExpertStore, closed>"
    for use in (
        lambda: len(store),
        lambda: store[0],
        lambda: list(store),
        lambda: store.bytes,
        lambda: store.unpack(0, "weight", 0),
        lambda: moepool.Pool(layer, 2),
    ):
        with pytest.raises(moepool.StateError, match="the store is closed"):
            use()


def test_pools_outlive_their_store() -> None:
    x: F32 = cases.activations("plain", 3, 64, "outlive")
    with small_store() as store:
        pools = [moepool.Pool(store[0], slots) for slots in (0, 2, 4)]
        before = [moepool.matmul_id(x, [[0], [3], [1]], pool) for pool in pools]
    for pool, expected in zip(pools, before, strict=True):
        assert_same(moepool.matmul_id(x, [[0], [3], [1]], pool), expected, repr(pool))


def test_h28_stores_and_pools_give_their_memory_back() -> None:
    """Fifty times 64 MiB, some with an error in the middle of loading."""
    blocks = np.zeros((64, 1024, 1088), np.uint8)
    bad = blocks.copy()
    bad[60, 0, :2] = 255
    levels = []
    for i in range(50):
        if i % 5 == 4:
            with pytest.raises(moepool.FormatError):
                moepool.ExpertStore.from_arrays(weight=bad, qtype="q8_0")
        else:
            store = moepool.ExpertStore.from_arrays(weight=blocks, qtype="q8_0")
            pool = moepool.Pool(store[0], 8)
            moepool.matmul_id(np.zeros((1, 1024), np.float32), [[i % 64]], pool)
            if i % 2:
                pool.close()
                store.close()
            del pool, store
        levels.append(resident_mib())
    assert max(levels[2:]) < levels[2] + 8, levels


def test_more_than_the_host_has_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """And more than is free is told."""
    blocks = layer_blocks()
    total = sum(data.nbytes for data in blocks.values())
    memory = moepool.Memory(total - 1, total - 1, "a small machine")
    monkeypatch.setattr(moepool.store, "cpu_memory", lambda: memory)
    with monkeypatch.context() as patch:
        nothing_is_packed(patch)
        message = f"take {total} bytes or more, but this process can have {total - 1} at most .a small"
        with pytest.raises(moepool.OutOfMemoryError, match=message):
            moepool.ExpertStore.from_arrays(**blocks, qtype="q8_0")
    memory = moepool.Memory(2 * total, total - 1, "a busy machine")
    with pytest.warns(moepool.MoePoolWarning, match=f"only {total - 1} are free .a busy machine"):
        moepool.ExpertStore.from_arrays(**blocks, qtype="q8_0")


def test_h28_an_error_while_loading_frees_the_store_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the traceback goes that holds the frames."""
    made = []

    class Failing(StoreHandle):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def pack(self, layer: int, matrix: int, *rest: int) -> None:
            if matrix == 2:
                raise KeyboardInterrupt
            super().pack(layer, matrix, *rest)

    monkeypatch.setattr(moepool.store, "StoreHandle", Failing)
    with pytest.raises(KeyboardInterrupt) as caught:
        moepool.ExpertStore.from_gguf(bundled_model())
    assert [handle.closed for handle in made] == [True]
    assert caught.value.__traceback__ is not None
