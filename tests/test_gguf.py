"""Reading GGUF files: what is right is read, what is wrong is named, and nothing is read past the end."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import moepool
from moepool.gguf import GGUFFile, expert_layers
from tests import cases, ggufs
from tests.ggufs import ARRAY, STRING, UINT32, Blocks, Tensor, field, handmade, text

U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1


def file_of(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def resident_kib(path: Path) -> int:
    """How much of a mapped file this process has in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


# ---------------------------------------------------------------------------------------------- what is right


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    """Fields of every kind become plain Python values, tensors their bytes."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "test")
    scalars: dict[str, tuple[Callable[..., None], Any]] = {
        "u8": (writer.add_uint8, 200),
        "i8": (writer.add_int8, -7),
        "u16": (writer.add_uint16, 60000),
        "i16": (writer.add_int16, -30000),
        "u32": (writer.add_uint32, U32_MAX),
        "i32": (writer.add_int32, -5),
        "u64": (writer.add_uint64, 2**63),
        "i64": (writer.add_int64, -(2**62)),
        "f32": (writer.add_float32, 0.25),
        "f64": (writer.add_float64, 0.1),
        "bool": (writer.add_bool, True),
        "string": (writer.add_string, "naïve"),
        "strings": (writer.add_array, ["a", "", "ü€"]),
        "numbers": (writer.add_array, [3, 1, 2]),
        "floats": (writer.add_array, [0.5, -1.5]),
    }
    for key, (add, value) in scalars.items():
        add(key, value)
    blocks = cases.raw_blocks("q4_k", 6, 512, "gguf").reshape(2, 3, -1)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    numbers = np.arange(10, dtype=np.float32).reshape(2, 5)
    writer.add_tensor("numbers", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile(path) as file:
        assert {key: file.fields[key] for key in scalars} == {
            key: value for key, (_, value) in scalars.items()
        }
        assert type(file.fields["bool"]) is bool
        assert set(file.fields) == {"general.architecture", *scalars}
        assert list(file.tensors) == ["blocks", "numbers"]
        tensor = file.tensors["blocks"]
        assert (tensor.shape, tensor.qtype, tensor.type_id, tensor.nbytes) == (
            (2, 3, 512),
            "q4_k",
            12,
            6 * 288,
        )
        assert tensor.data.shape == (2, 3, 288)
        assert (tensor.data == blocks).all()
        assert (file.tensors["numbers"].floats() == numbers).all()
        assert file.tensors["numbers"].data.shape == (2, 20)


@pytest.mark.parametrize("qtype", ["f32", "f16", "bf16", "q8_0", "q6_k", "mxfp4", "iq4_nl"])
def test_floats_are_what_the_gguf_package_decodes(qtype: str, tmp_path: Path) -> None:
    """Of a tensor of three dimensions."""
    blocks = cases.raw_blocks(qtype, 6, 256, "floats", limit=252).reshape(2, 3, -1)
    kind = gguf.GGMLQuantizationType[qtype.upper()]
    path = ggufs.write(tmp_path / "model.gguf", {"a": Blocks(blocks, qtype)})
    with GGUFFile(path) as file:
        values = file.tensors["a"].floats()
    expected = gguf.quants.dequantize(blocks, kind).reshape(2, 3, 256)
    assert values.dtype == np.float32
    assert (values.view(np.uint32) == np.asarray(expected, np.float32).view(np.uint32)).all()


def test_a_type_that_gguf_cannot_decode_is_read_all_the_same(tmp_path: Path) -> None:
    data = handmade([Tensor("a", (128,), 41, data=bytes(18))])
    tensor = GGUFFile(file_of(tmp_path, data)).tensors["a"]
    assert tensor.data.shape == (18,)
    with pytest.raises(moepool.UnsupportedError, match="a: the gguf package cannot decode q1_0"):
        tensor.floats()


def test_a_large_vocabulary_is_read_quickly_and_exactly(tmp_path: Path) -> None:
    """Strings are found by their lengths and decoded only when asked for."""
    tokens = [f"<{i}>" * (i % 3) for i in range(50_000)]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "test")
    writer.add_token_list(tokens)
    writer.add_uint32("after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile(tmp_path / "model.gguf") as file:
        assert file.fields["after"] == 7
        assert file.fields["tokenizer.ggml.tokens"] == tokens


def test_alignment_of_the_file_is_followed(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "test")
    writer.add_custom_alignment(256)
    arrays = {name: np.full(3, value, np.float32) for value, name in enumerate("abc")}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "model.gguf") as file:
        for name, array in arrays.items():
            assert (file.tensors[name].floats() == array).all()


def test_closing_unmaps_the_file(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "model.gguf", {"a": np.zeros(8, np.float32)})
    with GGUFFile(path) as file:
        assert str(path) in Path("/proc/self/maps").read_text()
        assert repr(file) == "<GGUFFile 'model.gguf': 1 tensors, 1 fields>"
    file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_release_gives_whole_pages_back(tmp_path: Path) -> None:
    """The data can be read again afterwards, and the neighbours' pages stay."""
    arrays = {name: np.full(1 << 20, value, np.float32) for value, name in enumerate("abc")}
    path = ggufs.write(tmp_path / "model.gguf", {**arrays, "tiny": np.zeros(3, np.float32)})
    with GGUFFile(path) as file:
        for name in arrays:
            file.tensors[name].data.sum()
        before = resident_kib(path)
        assert before > 11 << 10
        file.release(file.tensors["b"])
        file.release(file.tensors["tiny"])
        assert before - resident_kib(path) == pytest.approx(4 << 10, abs=64)
        assert (file.tensors["b"].floats() == 1).all()


# ---------------------------------------------------------------------------------------------- what is wrong

BIG = 1 << 40

WRONG_HEADERS = {
    "empty": (b"", "not a GGUF file"),
    "short": (b"GGU", "not a GGUF file"),
    "other": (b"PK\3\4" + bytes(60), "not a GGUF file, it begins with b'PK"),
    "swapped magic": (handmade(magic=b"FUGG"), "not a GGUF file"),
    "version 1": (handmade(version=1), "GGUF version 1"),
    "version 4": (handmade(version=4), "GGUF version 4"),
    "byte-swapped": (handmade(version=3 << 24), "big-endian"),
    "too many fields": (handmade(field_count=U64_MAX), "truncated"),
    "too many tensors": (handmade(tensor_count=BIG), "truncated"),
    "key past the end": (handmade(fields=[struct.pack("<Q", BIG) + b"k"]), "truncated"),
    "key length wraps": (handmade(fields=[struct.pack("<Q", U64_MAX) + b"k"]), "truncated"),
    "string past the end": (handmade(fields=[field("k", STRING, struct.pack("<Q", BIG))]), "truncated"),
    "array past the end": (
        handmade(fields=[field("k", ARRAY, struct.pack("<IQ", UINT32, BIG))]),
        "truncated",
    ),
    "array length wraps": (
        handmade(fields=[field("k", ARRAY, struct.pack("<IQ", UINT32, 2**62 + 1))]),
        "truncated",
    ),
    "strings past the end": (
        handmade(fields=[field("k", ARRAY, struct.pack("<IQ", STRING, BIG))]),
        "truncated",
    ),
    "a string of an array past the end": (
        handmade(
            fields=[field("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", BIG))]
        ),
        "truncated",
    ),
    "unknown field type": (handmade(fields=[field("k", 77, b"abcd")]), "type number 77"),
    "unknown item type": (handmade(fields=[field("k", ARRAY, struct.pack("<IQ", 77, 1))]), "type number 77"),
    "array of arrays": (
        handmade(fields=[field("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT32, 0))]),
        "array of arrays",
    ),
    "field twice": (handmade(fields=[field("k", UINT32, bytes(4))] * 2), "Duplicate k"),
    "key not UTF-8": (handmade(fields=[field(b"\xff", UINT32, bytes(4))]), "damaged: 'utf-8'"),
    "alignment 0": (handmade(fields=[field("general.alignment", UINT32, bytes(4))]), "alignment"),
    "alignment 24": (
        handmade(fields=[field("general.alignment", UINT32, struct.pack("<I", 24))]),
        "alignment",
    ),
    "alignment a string": (handmade(fields=[field("general.alignment", STRING, text("32"))]), "alignment"),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_wrong_header_is_refused(name: str, tmp_path: Path) -> None:
    data, message = WRONG_HEADERS[name]
    path = file_of(tmp_path, data)
    with pytest.raises(moepool.FormatError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


WRONG_TENSORS = {
    "no dimension": ([Tensor("bad", ())], "'bad' has 0 dimensions"),
    "five dimensions": ([Tensor("bad", (32, 1, 1, 1, 1))], "'bad' has 5 dimensions"),
    "empty": ([Tensor("bad", (32, 0, 4))], r"'bad' has the empty shape \(4, 0, 32\)"),
    "product wraps to 0": ([Tensor("bad", (2**32, 2**32))], "'bad' of shape .* would take"),
    "product wraps to something small": ([Tensor("bad", (2**63, 2, 2))], "'bad' of shape .* would take"),
    "bytes wrap": ([Tensor("bad", (2**62,))], "'bad' of shape .* would take"),
    "past the end": ([Tensor("bad", (2**40,))], "'bad' ends at byte"),
    "offset past the end": ([Tensor("bad", (32,), 0, 2**50, bytes(128))], "'bad' ends at byte"),
    "offset wraps": ([Tensor("bad", (32,), 0, U64_MAX - 31, bytes(128))], "'bad' ends at byte"),
    "type 9999": ([Tensor("bad", (32,), 9999, data=bytes(128))], "'bad' is of type number 9999"),
    "type removed from ggml": ([Tensor("bad", (32,), 4, data=bytes(128))], "'bad' is of type number 4"),
    "type of all bits": ([Tensor("bad", (32,), U32_MAX)], "'bad' is of type number 4294967295"),
    "half a block": (
        [Tensor("bad", (48,), 8, data=bytes(102))],
        "'bad' has 48 columns, not whole blocks of 32",
    ),
    "twice": (
        [Tensor("a", (8,), data=bytes(32)), Tensor("a", (8,), data=bytes(32))],
        "two tensors are named 'a'",
    ),
    "one inside the other": (
        [Tensor("a", (16,), data=bytes(64)), Tensor("bad", (8,), 0, 32, bytes(32))],
        "'bad' begins at 32, but the tensors before it end at 64",
    ),
    "unaligned": ([Tensor("bad", (8,), 0, 4, bytes(64))], "'bad' begins at 4"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors, message = WRONG_TENSORS[name]
    with pytest.raises(moepool.FormatError, match=message):
        GGUFFile(file_of(tmp_path, handmade(tensors)))


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(moepool.FormatError, match="damaged"):
        GGUFFile(file_of(tmp_path, handmade([Tensor(b"\xff\xfe", data=bytes(128))])))


def test_a_field_that_is_not_utf8_is_refused_when_it_is_read(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", STRING, 1) + text(b"\xff")
    fields = [
        field("one", STRING, text(b"\xff")),
        field("many", ARRAY, strings),
        field("n", UINT32, bytes(4)),
    ]
    file = GGUFFile(file_of(tmp_path, handmade(fields=fields)))
    assert file.fields["n"] == 0
    for key in ("one", "many"):
        with pytest.raises(moepool.FormatError, match=f"field '{key}' is not UTF-8"):
            file.fields[key]


def test_a_file_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "m.gguf", {"a": np.zeros(8, np.float32)}, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(moepool.FormatError, match="big-endian"):
        GGUFFile(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "model.gguf")
    with pytest.raises(IsADirectoryError):
        GGUFFile(tmp_path)


def test_h13_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Never fewer tensors and no error: by one byte, by half, inside the header, just after it."""
    tensors = {"a": np.ones(8, np.float32), "b": np.ones((2, 16), np.float32)}
    whole = ggufs.write(tmp_path / "whole.gguf", tensors, {"k": "v"}).read_bytes()
    for size in range(len(whole)):
        with pytest.raises(moepool.FormatError):
            GGUFFile(file_of(tmp_path, whole[:size]))
    for size in (len(whole) - 1, len(whole) - 128):
        with pytest.raises(moepool.FormatError, match="'b' ends at byte"):
            GGUFFile(file_of(tmp_path, whole[:size]))
    with pytest.raises(moepool.FormatError, match="'a' ends at byte"):
        GGUFFile(file_of(tmp_path, whole[: len(whole) - 160]))


def test_no_damage_to_a_header_goes_further_than_an_error(tmp_path: Path) -> None:
    """Random bytes in random places: the file is refused, or every tensor can be read to its end."""
    blocks = cases.raw_blocks("q8_0", 8, 64, "damage").reshape(2, 4, -1)
    names = [f"blk.0.ffn_{name}_exps.weight" for name in ("gate", "up")]
    path = ggufs.write(tmp_path / "whole.gguf", {name: Blocks(blocks, "q8_0") for name in names}, {"k": 3})
    whole = path.read_bytes()
    header = len(whole) - 2 * blocks.nbytes
    chance = random.Random(5)
    opened = 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(4, header)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        try:
            file = GGUFFile(file_of(tmp_path, bytes(data)))
            dict(file.fields)
        except moepool.FormatError:
            continue
        opened += 1
        for tensor in file.tensors.values():
            assert tensor.data.nbytes == tensor.nbytes
            int(tensor.data.sum(dtype=np.int64))
    assert 0 < opened < 550


# ----------------------------------------------------------------------------------------------------- shards


def shards_of(folder: Path) -> tuple[list[Path], dict[str, np.ndarray]]:
    """Three shards, over which the experts of one layer are spread."""
    whole = {
        f"blk.0.ffn_{name}_exps.weight": np.full((4, 8, 8), i, np.float32)
        for i, name in enumerate(("gate", "up", "down"))
    }
    return ggufs.write_shards(folder, [{name: array} for name, array in whole.items()]), whole


def test_h12_any_shard_opens_the_whole_model(tmp_path: Path) -> None:
    paths, whole = shards_of(tmp_path)
    for path in paths:
        with GGUFFile(path) as file:
            assert list(file.tensors) == list(whole)
            assert file.fields["test.expert_count"] == 4
            for shard, (name, array) in zip(paths, whole.items(), strict=True):
                assert file.tensors[name].path == shard
                assert (file.tensors[name].floats() == array).all()


def test_h12_missing_shards_are_one_error(tmp_path: Path) -> None:
    paths, _ = shards_of(tmp_path)
    paths[1].unlink()
    with pytest.raises(moepool.FormatError, match="of 3 shards 1 are missing: model-00002-of-00003.gguf"):
        GGUFFile(paths[0])


def test_shards_that_contradict_their_names_are_refused(tmp_path: Path) -> None:
    paths, _ = shards_of(tmp_path)
    kept = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(moepool.FormatError, match="two tensors are named"):
        GGUFFile(paths[0])
    paths[2].write_bytes(kept)
    with pytest.raises(moepool.FormatError, match="shard 2 of 3, but its fields split.no .* are 2 and 3"):
        GGUFFile(paths[0])
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(paths[0].read_bytes())
    with pytest.raises(moepool.FormatError, match="one of 3 shards, but its name"):
        GGUFFile(alone)


def test_shards_with_a_tensor_missing_are_refused(tmp_path: Path) -> None:
    paths, whole = shards_of(tmp_path)
    name, array = next(iter(whole.items()))
    fields = {"split.no": 0, "split.count": 3, "split.tensors.count": 4}
    ggufs.write(paths[0], {name: array}, fields)
    with pytest.raises(moepool.FormatError, match="hold 3 tensors, split.tensors.count is 4"):
        GGUFFile(paths[0])


def test_a_cut_shard_is_refused_by_name(tmp_path: Path) -> None:
    paths, _ = shards_of(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    with pytest.raises(
        moepool.FormatError, match=r"00003-of-00003.gguf: tensor 'blk.0.ffn_down_exps.weight' ends"
    ):
        GGUFFile(paths[0])


# ---------------------------------------------------------------------------------------------------- experts


def experts(
    experts: int = 4, rows: int = 6, columns: int = 8, blocks: tuple[int, ...] = (0,)
) -> dict[str, Any]:
    """The expert tensors of a model in float32."""
    out: dict[str, Any] = {}
    for block in blocks:
        for name, (n, k) in {"gate": (rows, columns), "up": (rows, columns), "down": (columns, rows)}.items():
            out[f"blk.{block}.ffn_{name}_exps.weight"] = np.zeros((experts, n, k), np.float32)
    return out


def layers_of(folder: Path, tensors: dict[str, Any], fields: dict[str, int | str] | None = None) -> Any:
    with GGUFFile(ggufs.write(folder / "model.gguf", tensors, fields)) as file:
        return expert_layers(file)


def test_layers_come_in_rising_block_whatever_the_order(tmp_path: Path) -> None:
    tensors = experts(blocks=(11, 2, 0))
    found = layers_of(tmp_path, dict(sorted(tensors.items(), reverse=True)), {"test.expert_count": 4})
    assert [layer.block for layer in found] == [0, 2, 11]
    assert list(found[0].matrices) == ["gate", "up", "down"]
    down = found[0].matrices["down"]
    assert (found[0].experts, down.qtype, down.rows, down.columns) == (4, "f32", 8, 6)
    assert (down.bias, down.scale, down.biases(), down.scales()) == (False, False, None, None)


def test_a_model_without_experts_has_no_layers(tmp_path: Path) -> None:
    assert layers_of(tmp_path, {"blk.0.ffn_gate.weight": np.zeros((4, 8), np.float32)}) == []


def test_bias_and_scale_belong_to_their_matrix(tmp_path: Path) -> None:
    tensors = experts()
    tensors["blk.0.ffn_up_exps.bias"] = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors["blk.0.ffn_down_exps.scale"] = np.arange(4, dtype=np.float32)
    tensors["blk.0.ffn_down_exps.input_scale"] = np.ones(4, np.float32)
    (layer,) = layers_of(tmp_path, tensors)
    assert {name: (m.bias, m.scale) for name, m in layer.matrices.items()} == {
        "gate": (False, False),
        "up": (True, False),
        "down": (False, True),
    }


def swap(name: str, shape: tuple[int, ...], qtype: str | None = None) -> Callable[[dict[str, Any]], None]:
    """Replaces or adds a tensor of block 0."""

    def change(tensors: dict[str, Any]) -> None:
        array = np.zeros(shape, np.float32 if qtype is None else np.uint8)
        tensors[f"blk.0.{name}"] = array if qtype is None else Blocks(array, qtype)

    return change


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(f"blk.0.{name}")


CONTRADICTIONS = {
    "no up": (drop("ffn_up_exps.weight"), "block 0 has experts, but no blk.0.ffn_up_exps.weight"),
    "gate and up": (swap("ffn_up_exps.weight", (4, 5, 8)), "gate is 6 x 8, up is 5 x 8"),
    "gate and down": (swap("ffn_down_exps.weight", (4, 8, 7)), "down has 7 columns, gate has 6 rows"),
    "two dimensions": (
        swap("ffn_gate_exps.weight", (6, 8)),
        "'blk.0.ffn_gate_exps.weight' of shape .* 3 dim",
    ),
    "bias": (swap("ffn_up_exps.bias", (4, 8)), r"'blk.0.ffn_up_exps.bias' is of shape \(4, 8\), .* \(4, 6\)"),
    "scale": (swap("ffn_up_exps.scale", (3,)), "'blk.0.ffn_up_exps.scale' is of shape"),
    "merged as well": (swap("ffn_gate_up_exps.weight", (4, 12, 8)), "gate matrices of its experts twice"),
    "single as well": (swap("ffn_down.0.weight", (8, 6)), "down matrices of its experts twice"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_experts_that_contradict_each_other_are_refused(name: str, tmp_path: Path) -> None:
    change, message = CONTRADICTIONS[name]
    tensors = experts()
    change(tensors)
    with pytest.raises(moepool.FormatError, match=message):
        layers_of(tmp_path, tensors)


def test_an_expert_count_that_contradicts_a_tensor_is_refused(tmp_path: Path) -> None:
    message = "'blk.0.ffn_gate_exps.weight' has 4 experts, test.expert_count says 8"
    with pytest.raises(moepool.FormatError, match=message):
        layers_of(tmp_path, experts(), {"test.expert_count": 8})
    tensors = experts()
    tensors["blk.0.ffn_down_exps.weight"] = np.zeros((5, 8, 6), np.float32)
    with pytest.raises(moepool.FormatError, match="different numbers of experts"):
        layers_of(tmp_path, tensors)


@pytest.mark.parametrize(("qtype", "row"), [("q8_k", 292), ("i32", 1024)])
def test_a_type_that_is_no_weight_type_is_refused_by_name(qtype: str, row: int, tmp_path: Path) -> None:
    tensors = experts(columns=256)
    if qtype == "i32":
        tensors["blk.0.ffn_up_exps.weight"] = np.zeros((4, 6, 256), np.int32)
    else:
        tensors["blk.0.ffn_up_exps.weight"] = Blocks(np.zeros((4, 6, row), np.uint8), qtype)
    with pytest.raises(moepool.UnsupportedError, match=f"'blk.0.ffn_up_exps.weight' is {qtype}, which"):
        layers_of(tmp_path, tensors)


def test_a_bias_that_is_no_float_is_refused_by_name(tmp_path: Path) -> None:
    tensors = experts()
    tensors["blk.0.ffn_up_exps.bias"] = np.zeros((4, 6), np.int32)
    with pytest.raises(moepool.UnsupportedError, match=r"'blk.0.ffn_up_exps.bias' is i32"):
        layers_of(tmp_path, tensors)


def merged(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same experts with gate and up in one tensor."""
    out = {name: array for name, array in tensors.items() if "gate" not in name and "up" not in name}
    gate, up = (tensors[f"blk.0.ffn_{name}_exps.weight"] for name in ("gate", "up"))
    return {"blk.0.ffn_gate_up_exps.weight": np.concatenate([gate, up], axis=1), **out}


def test_merged_tensors_take_the_scale_of_up(tmp_path: Path) -> None:
    for name in ("gate_up", "up"):
        scale = {f"blk.0.ffn_{name}_exps.scale": np.arange(4, dtype=np.float32)}
        (layer,) = layers_of(tmp_path, {**merged(experts()), **scale})
        assert [m.scale for m in layer.matrices.values()] == [True, True, False]
    with pytest.raises(moepool.FormatError, match="'blk.0.ffn_gate_exps.bias' has no weights of its own"):
        layers_of(tmp_path, {**merged(experts()), "blk.0.ffn_gate_exps.bias": np.zeros((4, 6), np.float32)})
    with pytest.raises(moepool.FormatError, match="11 rows, which gate and up cannot share evenly"):
        layers_of(
            tmp_path, {**merged(experts()), "blk.0.ffn_gate_up_exps.weight": np.zeros((4, 11, 8), np.float32)}
        )


def single(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same experts with a tensor for each."""
    return {
        name.replace("_exps.", f".{expert}."): array[expert]
        for name, array in tensors.items()
        for expert in range(len(array))
    }


def test_single_experts_must_all_be_there_and_alike(tmp_path: Path) -> None:
    tensors = single(experts(experts=12))
    (layer,) = layers_of(tmp_path, tensors, {"test.expert_count": 12})
    assert layer.experts == 12
    with pytest.raises(moepool.FormatError, match=r"blk.0.ffn_up.3.weight is missing"):
        layers_of(tmp_path, {name: t for name, t in tensors.items() if name != "blk.0.ffn_up.3.weight"})
    other = np.zeros((6, 7), np.float32)
    with pytest.raises(moepool.FormatError, match=r"'blk.0.ffn_up.3.weight' is of shape \(6, 7\)"):
        layers_of(tmp_path, {**tensors, "blk.0.ffn_up.3.weight": other})
    with pytest.raises(moepool.UnsupportedError, match=r"'blk.0.ffn_up.3.weight' is f16, expert 0 is f32"):
        layers_of(tmp_path, {**tensors, "blk.0.ffn_up.3.weight": np.zeros((6, 8), np.float16)})
    with pytest.raises(moepool.FormatError, match=r"'blk.0.ffn_up_exps.scale' has no weights of its own"):
        layers_of(tmp_path, {**tensors, "blk.0.ffn_up_exps.scale": np.zeros(12, np.float32)})


def test_h10_expert_tensors_of_an_unknown_kind_are_told(tmp_path: Path) -> None:
    """Shared experts, router biases and norms are no experts."""
    silent = {
        "blk.0.ffn_gate_shexp.weight": np.zeros((6, 8), np.float32),
        "blk.0.exp_probs_b.bias": np.zeros(4, np.float32),
        "blk.0.ffn_norm_exps.weight": np.zeros(8, np.float32),
        "blk.0.ffn_gate_inp.weight": np.zeros((4, 8), np.float32),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers_of(tmp_path, {**experts(), **silent})
    told = {
        name: np.zeros(4, np.float32) for name in ("blk.0.ffn_up_exps.zero", "blk.0.ffn_up_chexps.weight")
    }
    with pytest.warns(
        moepool.MoePoolWarning, match=r"2 tensors .* stay unread: .*ffn_up_exps.zero, .*chexps"
    ):
        layers_of(tmp_path, {**experts(), **told})
