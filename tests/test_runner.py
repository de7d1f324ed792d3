"""The runner: tokenizer, transformer, generation and routing profiles."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

import moepool
from moepool._native import handles
from moepool.errors import ArgumentError, FormatError, StateError, UnsupportedError
from moepool.gguf import GGUFFile
from moepool.runner import (
    Checkpoint,
    Config,
    Placement,
    RoutingProfile,
    Sampling,
    Tokenizer,
    Weights,
    bundled_model,
    generate,
)
from moepool.runner.generate import Sampler
from moepool.runner.table import format_table
from moepool.runner.tokenizer import _BYTE_TO_CHAR
from moepool.tracefile import PROFILE_HEADER
from tests import shared

PROMPT = "import os\n\n\ndef main(argv):\n"


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint(bundled_model(), progress=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return checkpoint.tokenizer


# -------------------------------------------------------------------------------------------------- tokenizer

STRINGS = [
    "",
    "hello world",
    "  leading and trailing  ",
    "def f(x):\n    return x ** 2  # square\n",
    "tabs\tand\r\nline ends\n\n\n   \n",
    "it's they'll WE'VE 'tis 12345 3.14 $5",
    "na\u00efve caf\u00e9, e\u0301 decomposed",
    "\u65e5\u672c\u8a9e and \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
    "\U0001f642 \U0001f469\u200d\U0001f4bb \U0001f1e8\U0001f1ed",
    "\x00\x01\x7f\x80\xa0\xad\u2028\ufeff",
    "<|endoftext|>",
]


@pytest.mark.parametrize("string", STRINGS)
def test_decode_inverts_encode(tokenizer: Tokenizer, string: str) -> None:
    tokens = tokenizer.encode(string)
    assert tokenizer.decode(tokens) == string
    assert b"".join(map(tokenizer.token_bytes, tokens)) == string.encode()


@pytest.mark.parametrize("name", ["held_docs.txt", "held_code.txt", "held_prose.txt"])
def test_decode_inverts_encode_on_texts(tokenizer: Tokenizer, name: str) -> None:
    text = shared.text(name)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode()) / 2, "merges were not applied"


def test_stream_gives_whole_characters_only(tokenizer: Tokenizer) -> None:
    text = "a\U0001f642b\u65e5\u672c e\u0301\U0001f469\u200d\U0001f4bb"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text), "no character is split, so this proves nothing"
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    assert "" in pieces
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


def test_stream_ends_a_cut_character_with_one_replacement(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("\U0001f642")
    assert len(tokens) > 1
    stream = tokenizer.stream()
    assert "".join(map(stream.push, tokens[:-1])) == ""
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode([*tokens[:-1], *tokenizer.encode("x")]) == "\ufffdx"


def test_special_tokens_are_read_only_when_asked(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos
    assert eos is not None
    assert tokenizer.encode("a<|endoftext|>b", special=True) == [
        *tokenizer.encode("a"),
        eos,
        *tokenizer.encode("b"),
    ]
    assert eos not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([eos]) == ""
    assert tokenizer.is_control(eos)
    assert tokenizer.token_bytes(eos) == b"<|endoftext|>"


def _byte_tokenizer(words: list[str], pre: str, **options: Any) -> Tokenizer:
    """All bytes and every prefix of some words: nothing but the split can part a word."""
    alphabet = list(_BYTE_TO_CHAR.values())
    tokens, merges = list(alphabet), []
    for word in words:
        word = "".join(_BYTE_TO_CHAR[byte] for byte in word.encode())
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return Tokenizer(tokens, merges, pre, **options)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "12345", ["12345"]),
        ("default", "12345", ["123", "4", "5"]),
        ("llama-bpe", "12345", ["123", "4", "5"]),
        ("qwen2", "12345", ["1", "2", "3", "4", "5"]),
        ("gpt-2", "(get", ["(", "g", "e", "t"]),
        ("qwen2", "(get", ["(get"]),
        ("llama-bpe", "(get", ["(get"]),
        ("gpt-2", "\n\n\n", ["\n\n\n"]),
        ("gpt-2", "\n\n\nx", ["\n\n", "\n", "x"]),
        ("qwen2", "\n\n\nx", ["\n\n\n", "x"]),
    ],
)
def test_pre_tokenisers_split_as_they_should(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = _byte_tokenizer(["12345", "(get", "\n\n\n"], pre)
    assert [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)] == pieces


def test_llama_takes_whole_pieces_before_merges() -> None:
    tokens = [*_BYTE_TO_CHAR.values(), "ab", "abc"]
    assert len(Tokenizer(tokens, ["a b"], "llama-bpe").encode("abc")) == 1
    assert len(Tokenizer(tokens, ["a b"], "qwen2").encode("abc")) == 2


def test_user_defined_tokens_are_always_read() -> None:
    alphabet = list(_BYTE_TO_CHAR.values())
    tokenizer = Tokenizer([*alphabet, "<think>"], [], types=[1] * 256 + [4])
    tokens = tokenizer.encode("a<think>b")
    assert tokens[1] == 256
    assert tokenizer.decode(tokens) == "a<think>b"


def test_token_bytes_refuses_other_tokens(tokenizer: Tokenizer) -> None:
    for token in (-1, len(tokenizer)):
        with pytest.raises(ArgumentError, match=str(token)):
            tokenizer.token_bytes(token)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "llama"}, UnsupportedError, "'llama'"),
        ({"pre": "deepseek-v3"}, UnsupportedError, "'deepseek-v3'"),
        ({"tokens": None}, FormatError, "tokens"),
        ({"tokens": ["a", "b"]}, FormatError, "byte-level"),
        ({"merges": ["ab"]}, FormatError, "'ab'"),
        ({"merges": ["a b"]}, FormatError, "merge 0"),
        ({"token_type": [1]}, FormatError, "token types"),
        ({"token_type": 1}, FormatError, "token_type"),
        ({"eos_token_id": 256}, FormatError, "eos"),
    ],
)
def test_bad_tokenizer_metadata_is_named(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": list(_BYTE_TO_CHAR.values()), "merges": []}
    values = {f"tokenizer.ggml.{k}": v for k, v in (good | fields).items() if v is not None}
    with pytest.raises(error, match=message):
        Tokenizer.from_fields(values)


# ----------------------------------------------------------------------------------------------------- config


def _header(**changes: Any) -> Any:
    """Metadata of a small model, with keys changed or (None) removed."""
    fields: dict[str, Any] = {
        "general.architecture": "qwen3moe",
        "block_count": 2,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 8,
        "expert_used_count": 2,
        "context_length": 128,
    }
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    named = {
        k if k.startswith("general.") else f"qwen3moe.{k}": v for k, v in fields.items() if v is not None
    }
    return SimpleNamespace(
        fields=named, path="model.gguf", tensors={"token_embd.weight": SimpleNamespace(shape=(99, 64))}
    )


def test_config_reads_the_metadata() -> None:
    config = Config.from_gguf(_header())
    assert config == Config("model", 2, 64, 4, 2, 16, 8, 2, 99, 128, 1e-6, 10000.0, 1.0)
    scaled = Config.from_gguf(_header(rope__scaling__type="linear", rope__scaling__factor=4.0))
    assert scaled.rope_scale == 0.25


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general.architecture": "llama"}, UnsupportedError, "'llama'"),
        ({"general.architecture": None}, UnsupportedError, "architecture None"),
        ({"rope__scaling__type": "yarn"}, UnsupportedError, "'yarn'"),
        ({"attention__value_length": 8}, UnsupportedError, "different width"),
        ({"rope__dimension_count": 8}, UnsupportedError, "RoPE"),
        ({"block_count": None}, FormatError, "qwen3moe.block_count"),
        ({"block_count": 0}, FormatError, "block_count is 0"),
        ({"expert_count": "8"}, FormatError, "expert_count is '8'"),
        ({"expert_used_count": 9}, FormatError, "expert_used_count 9"),
        ({"attention__head_count_kv": 3}, FormatError, "3 key/value heads"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, FormatError, "epsilon"),
    ],
)
def test_config_names_what_it_cannot_take(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Config.from_gguf(_header(**changes))


def _file_with(file: GGUFFile, tensors: dict[str, Any]) -> Any:
    return SimpleNamespace(fields=file.fields, path=file.path, tensors=tensors)


def test_weights_name_missing_misshapen_and_unknown_tensors() -> None:
    with GGUFFile(bundled_model()) as file:
        config, tensors = Config.from_gguf(file), dict(file.tensors)
        name = "blk.1.attn_q.weight"
        missing = {k: v for k, v in tensors.items() if k != name}
        with pytest.raises(FormatError, match=f"{name} is missing"):
            Weights.from_gguf(_file_with(file, missing), config)
        with pytest.raises(FormatError, match=rf"{name} has shape \(128, 256\)"):
            swapped = tensors | {name: tensors["blk.1.attn_k.weight"]}
            Weights.from_gguf(_file_with(file, swapped), config)
        with pytest.raises(UnsupportedError, match="blk.0.attn_q.bias"):
            more = tensors | {"blk.0.attn_q.bias": tensors["output_norm.weight"]}
            Weights.from_gguf(_file_with(file, more), config)


def test_output_is_tied_to_the_embedding_if_absent() -> None:
    with GGUFFile(bundled_model()) as file:
        tensors = {k: v for k, v in file.tensors.items() if k != "output.weight"}
        weights = Weights.from_gguf(_file_with(file, tensors), Config.from_gguf(file))
    assert weights.output is weights.token_embd


# ------------------------------------------------------------------------------------------------ transformer


def _slow_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """The definition of the architecture, token by token and head by head in float64, dequantised experts."""
    with GGUFFile(path) as file:
        f = {key.removeprefix("qwen3moe."): value for key, value in file.fields.items()}
        w = {name: info.floats().astype(np.float64) for name, info in file.tensors.items()}
    heads, kv_heads, dim = f["attention.head_count"], f["attention.head_count_kv"], f["attention.key_length"]

    def norm(v: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return v / np.sqrt(np.mean(v * v) + f["attention.layer_norm_rms_epsilon"]) * gain

    def turn(v: np.ndarray, position: int) -> np.ndarray:
        out = v.copy()
        for i in range(dim // 2):
            angle = position * f["rope.freq_base"] ** (-2 * i / dim)
            pair = (v[i] + 1j * v[i + dim // 2]) * np.exp(1j * angle)
            out[i], out[i + dim // 2] = pair.real, pair.imag
        return out

    def attend(block: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        normed = [norm(x, w[f"{block}.attn_norm.weight"]) for x in inputs]
        q, k, v = ([(w[f"{block}.attn_{n}.weight"] @ x).reshape(-1, dim) for x in normed] for n in "qkv")
        q_gain, k_gain = (w[f"{block}.attn_{n}_norm.weight"] for n in "qk")
        outputs = []
        for t in range(len(inputs)):
            mixed = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                query = turn(norm(q[t][head], q_gain), t)
                scores = [query @ turn(norm(k[s][group], k_gain), s) / dim**0.5 for s in range(t + 1)]
                share = np.exp(scores) / np.exp(scores).sum()
                mixed.append(sum(p * v[s][group] for s, p in enumerate(share)))
            outputs.append(w[f"{block}.attn_output.weight"] @ np.concatenate(mixed))
        return outputs

    def experts(block: str, x: np.ndarray) -> np.ndarray:
        x = norm(x, w[f"{block}.ffn_norm.weight"])
        score = np.exp(w[f"{block}.ffn_gate_inp.weight"] @ x)
        chosen = sorted(range(len(score)), key=lambda e: -score[e])[: f["expert_used_count"]]
        gate, up, down = (w[f"{block}.ffn_{n}_exps.weight"] for n in ("gate", "up", "down"))
        total = sum(score[e] for e in chosen)
        out = np.zeros_like(x)
        for e in chosen:
            g = gate[e] @ x
            out += score[e] / total * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x)))
        return out

    stream = [w["token_embd.weight"][token] for token in tokens]
    for index in range(f["block_count"]):
        block = f"blk.{index}"
        stream = [x + a for x, a in zip(stream, attend(block, stream), strict=True)]
        stream = [x + experts(block, x) for x in stream]
    head = w.get("output.weight", w["token_embd.weight"])
    return np.array([head @ norm(x, w["output_norm.weight"]) for x in stream])


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with float32 experts: three query heads a key head, heads wider than the stream, and the
    output tied to the embedding."""
    path = tmp_path_factory.mktemp("odd") / "odd.gguf"
    layers, hidden, heads, kv_heads, dim, experts, width, vocab = 2, 40, 6, 2, 16, 5, 24, 300
    rng = np.random.default_rng(11)
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm": (hidden,),
            f"blk.{i}.attn_q": (heads * dim, hidden),
            f"blk.{i}.attn_k": (kv_heads * dim, hidden),
            f"blk.{i}.attn_v": (kv_heads * dim, hidden),
            f"blk.{i}.attn_q_norm": (dim,),
            f"blk.{i}.attn_k_norm": (dim,),
            f"blk.{i}.attn_output": (hidden, heads * dim),
            f"blk.{i}.ffn_norm": (hidden,),
            f"blk.{i}.ffn_gate_inp": (experts, hidden),
            f"blk.{i}.ffn_gate_exps": (experts, width, hidden),
            f"blk.{i}.ffn_up_exps": (experts, width, hidden),
            f"blk.{i}.ffn_down_exps": (experts, hidden, width),
        }
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(3)
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_BYTE_TO_CHAR.values(), "ab", *(f"[{i}]" for i in range(257, vocab))])
    # An empty array of strings cannot be written, so there is one merge.
    writer.add_token_merges(["a b"])
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        scaled = 1 + values / 4 if name.endswith("norm") else values * np.float32(2 * shape[-1] ** -0.5)
        writer.add_tensor(f"{name}.weight", scaled)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_odd_sizes_agree_with_the_definition_to_rounding(odd_model: Path) -> None:
    tokens = np.random.default_rng(5).integers(0, 300, 21).tolist()
    expected = _slow_logits(odd_model, tokens)
    with Checkpoint(odd_model, progress=False) as odd, odd.model(Placement(3)) as model:
        whole = model.forward(tokens, model.new_cache())
        cache = model.new_cache(len(tokens))
        pieces = [model.forward(tokens[at:end], cache) for at, end in ((0, 8), (8, 9), (9, 20), (20, 21))]
    assert expected.std() > 0.5
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-4)


def test_forward_agrees_with_the_definition(checkpoint: Checkpoint) -> None:
    tokens = checkpoint.tokenizer.encode("The file is opened for reading and then closed.")
    with checkpoint.model() as model:
        logits = model.forward(tokens, model.new_cache())
    expected = _slow_logits(bundled_model(), tokens)
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape == (len(tokens), checkpoint.config.vocab)
    # The experts take activations in 8 bits, so logits (of spread 3.5) differ by a few hundredths.
    assert np.abs(logits - expected).max() < 0.3
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.03
    assert np.array_equal(logits.argmax(axis=1), expected.argmax(axis=1))


def test_a_prompt_may_come_in_pieces(checkpoint: Checkpoint) -> None:
    tokens = checkpoint.tokenizer.encode(PROMPT * 3)
    with checkpoint.model() as model:
        whole = model.forward(tokens, model.new_cache())
        cache = model.new_cache(len(tokens))
        pieces = [model.forward(tokens[:7], cache), model.forward(tokens[7:8], cache)]
        pieces.append(model.forward(tokens[8:], cache, first=3))
        assert cache.length == len(tokens)
    # Dense products of other shapes round differently, and an activation may fall to the next 8-bit step.
    np.testing.assert_allclose(np.concatenate([*pieces[:2]]), whole[:8], atol=0.1)
    np.testing.assert_allclose(pieces[2], whole[11:], atol=0.1)


def test_a_token_sees_no_later_one(checkpoint: Checkpoint) -> None:
    tokens = checkpoint.tokenizer.encode(PROMPT)
    with checkpoint.model() as model:
        one = model.forward(tokens, model.new_cache())
        other = model.forward([*tokens[:-1], 17], model.new_cache())
    assert np.array_equal(one[:-1], other[:-1])
    assert not np.array_equal(one[-1], other[-1])


def test_forward_refuses_bad_tokens_and_leaves_the_cache(checkpoint: Checkpoint) -> None:
    with checkpoint.model() as model:
        cache = model.new_cache(4)
        model.forward([1, 2], cache)
        for tokens, message in (
            ([], "non-empty"),
            ([[1]], "non-empty"),
            ([0.5], "integers"),
            ([-1], "token -1"),
            ([checkpoint.config.vocab], f"token {checkpoint.config.vocab}"),
            ([1, 2, 3], "do not fit"),
        ):
            with pytest.raises(ArgumentError, match=message):
                model.forward(tokens, cache)
        with pytest.raises(ArgumentError, match="first=1"):
            model.forward([1], cache, first=1)
        assert cache.length == 2
    with pytest.raises(StateError, match="closed"):
        model.forward([1], cache)
    model.close()


def test_a_gpu_needs_cupy_and_says_so(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    pool = SimpleNamespace(device="cuda:0", close=lambda: closed.append("pool"))
    monkeypatch.setattr(moepool, "Pool", lambda *_, **__: pool)
    monkeypatch.setattr(moepool, "ExpertFFN", lambda pool: pool)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(handles, "cuda_devices", lambda: 1)
    with pytest.raises(UnsupportedError, match=r"cuda:0.*pip install cupy-cuda13x"):
        checkpoint.model(Placement(device="cuda:0"))
    assert len(closed) == checkpoint.config.layers


def test_hot_lists_must_be_one_a_layer(checkpoint: Checkpoint) -> None:
    with pytest.raises(ArgumentError, match="3 layers"):
        checkpoint.model(Placement(2, "static", hot=[[0, 1]] * 3))


# ------------------------------------------------------------------------------------------------- generation


def test_placement_changes_no_byte(checkpoint: Checkpoint) -> None:
    experts, k = checkpoint.config.experts, checkpoint.config.experts_used
    hot = [[(3 * i + layer) % experts for i in range(10)] for layer in range(checkpoint.config.layers)]
    results = []
    for placement in (
        Placement(),
        Placement(k),
        Placement(8),
        Placement(experts),
        Placement(10, "static", hot=hot),
        Placement(0, miss="host"),
        Placement(8, miss="host"),
        Placement(10, "static", "host", hot=hot),
    ):
        with checkpoint.model(placement) as model:
            results.append(generate(model, checkpoint.tokenizer, PROMPT, 32, stop_at_eos=False))
    first, *others = results
    for result in others:
        assert result.logits_sha256 == first.logits_sha256
        assert (result.text, result.tokens) == (first.text, first.tokens)
    wanted = {result.stats["hits"] + result.stats["misses"] for result in results}
    assert wanted == {31 * checkpoint.config.layers * k}, "every decode step wants k experts a layer"


def test_stats_tell_what_the_pools_did(checkpoint: Checkpoint) -> None:
    config, record = checkpoint.config, sum(layer.record_bytes for layer in checkpoint.store)
    per_record = record // config.layers
    with checkpoint.model(Placement(config.experts)) as model:
        result = generate(model, checkpoint.tokenizer, PROMPT, 24, stop_at_eos=False)
        assert result.stats["evictions"] == 0
        assert result.stats["misses"] == result.stats["resident"]
        again = generate(model, checkpoint.tokenizer, PROMPT, 24, stop_at_eos=False)
        assert again.stats["hit_rate"] == 1.0
        assert again.stats["copied_bytes"] == 0
        assert again.logits_sha256 == result.logits_sha256
    with checkpoint.model(Placement(config.experts_used)) as model:
        few = generate(model, checkpoint.tokenizer, PROMPT, 24, stop_at_eos=False).stats
    assert few["evictions"] > 0
    assert few["prompt_misses"] > 0
    # Records of layers with other types differ in size, so the sum is only bounded by the mean.
    assert few["copied_bytes"] == pytest.approx(few["misses"] * per_record, rel=0.2)


def test_same_prompt_same_bytes(checkpoint: Checkpoint) -> None:
    with checkpoint.model(Placement(8)) as model:
        results = [
            generate(model, checkpoint.tokenizer, PROMPT, 16, Sampling(0.9, 40, 0.95, 7)) for _ in range(3)
        ]
    assert len({(r.logits_sha256, r.text) for r in results}) == 1


def test_text_arrives_in_pieces(checkpoint: Checkpoint) -> None:
    pieces: list[str] = []
    with checkpoint.model() as model:
        result = generate(model, checkpoint.tokenizer, PROMPT, 24, stop_at_eos=False, on_text=pieces.append)
    assert "".join(pieces) == result.text == checkpoint.tokenizer.decode(result.tokens)
    assert len(pieces) > 8
    assert len(result.tokens) == 24
    assert len(result.step_seconds) == 23
    assert result.finish == "length"
    assert result.tokens_per_second is not None and result.tokens_per_second > 0


def test_generation_ends_at_the_end_of_text(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with checkpoint.model() as model:
        free = generate(model, checkpoint.tokenizer, PROMPT, 8, stop_at_eos=False)
        monkeypatch.setattr(checkpoint.tokenizer, "eos", free.tokens[3])
        ended = generate(model, checkpoint.tokenizer, PROMPT, 8)
    assert ended.finish == "eos"
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]


def test_generation_ends_with_the_context(checkpoint: Checkpoint) -> None:
    context = checkpoint.config.context
    tokens = checkpoint.tokenizer.encode(PROMPT * 80)[: context - 2]
    prompt = checkpoint.tokenizer.decode(tokens)
    left = context - len(checkpoint.tokenizer.encode(prompt))
    with checkpoint.model() as model:
        result = generate(model, checkpoint.tokenizer, prompt, 64, stop_at_eos=False)
        assert result.finish == "context"
        assert len(result.tokens) == left + 1
        with pytest.raises(ArgumentError, match="context"):
            generate(model, checkpoint.tokenizer, PROMPT * 200, 1)
        for prompt, n in (("", 1), ("x", 0)):
            with pytest.raises(ArgumentError):
                generate(model, checkpoint.tokenizer, prompt, n)


def test_a_model_that_wants_bos_gets_it(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.tokenizer, "add_bos", True)
    with checkpoint.model() as model:
        for prompt in ("import", "<|endoftext|>import"):
            result = generate(model, checkpoint.tokenizer, prompt, 1)
            assert result.prompt_tokens == [0, *checkpoint.tokenizer.encode("import")]


def test_sampling() -> None:
    logits = np.array([1.0, 3.0, 3.0, 0.0, 2.0], dtype=np.float32)
    assert Sampler(Sampling())(logits) == 1, "the lowest id among equals"
    assert {Sampler(Sampling(1.0, top_k=1, seed=s))(logits) for s in range(20)} == {1}
    assert {Sampler(Sampling(1.0, top_k=2, seed=s))(logits) for s in range(40)} == {1, 2}
    assert {Sampler(Sampling(1.0, top_p=1e-9, seed=s))(logits) for s in range(20)} == {1}
    assert {Sampler(Sampling(1e-3, seed=s))(logits) for s in range(40)} == {1, 2}
    sampler = Sampler(Sampling(2.0, seed=5))
    drawn = np.bincount([sampler(logits) for _ in range(20000)], minlength=5) / 20000
    share = np.exp(logits / 2) / np.exp(logits / 2).sum()
    np.testing.assert_allclose(drawn, share, atol=0.015)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    for top_p, kept in ((0.45, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampler = Sampler(Sampling(1.0, top_p=top_p))
        assert {sampler(logits) for _ in range(400)} == kept


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}, {"seed": -1}]
)
def test_sampling_refuses_nonsense(values: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Sampling(**values)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_long_session(checkpoint: Checkpoint) -> None:
    """Four replays of one prompt, with generations between them that turn the slots over."""
    churn = [
        "The following options are available:\n",
        "class Parser:\n    def __init__(self",
        "## Copyright\n",
    ]
    anchors, memory = [], []
    generated = 0
    with checkpoint.model(Placement(8)) as model:
        for round_ in range(4):
            anchor = generate(model, checkpoint.tokenizer, PROMPT, 80, stop_at_eos=False)
            anchors.append((anchor.text, anchor.logits_sha256))
            between = [
                generate(
                    model, checkpoint.tokenizer, prompt, 140, Sampling(1.0, seed=round_), stop_at_eos=False
                )
                for prompt in churn
            ]
            assert all(result.stats["evictions"] > 100 for result in between)
            generated += 80 + sum(len(result.tokens) for result in between)
            gc.collect()
            memory.append(_resident_bytes())
        assert model.stats()["leased"] == 0
    assert generated == 2000
    assert len(set(anchors)) == 1
    # The first round may still grow the allocator's arenas.
    assert memory[-1] - memory[0] < 8 << 20


# --------------------------------------------------------------------------------------------------- profiles


def test_profile_counts_prompt_and_decode_apart(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    profile = RoutingProfile(config.layers, config.experts)
    with checkpoint.model() as model:
        result = generate(model, checkpoint.tokenizer, PROMPT, 9, stop_at_eos=False, profile=profile)
    assert (
        profile.prompt.sum(axis=1).tolist()
        == [len(result.prompt_tokens) * config.experts_used] * config.layers
    )
    assert profile.decode.sum(axis=1).tolist() == [8 * config.experts_used] * config.layers


def test_the_hottest_come_first_and_of_equals_the_lower_id() -> None:
    profile = RoutingProfile(2, 4)
    profile.prompt[:] = [[1, 5, 5, 0], [2, 2, 2, 2]]
    assert profile.hottest(2) == [[1, 2], [0, 1]]
    profile.decode[:] = [[4, 0, 4, 3], [1, 2, 2, 2]]  # from now on prompts have no say
    assert profile.hottest(2) == [[0, 2], [1, 2]]
    assert profile.hottest(9) == [[0, 2, 3, 1], [1, 2, 3, 0]]


def test_profiles_may_be_concatenated(tmp_path: Path) -> None:
    one, other, both = RoutingProfile(2, 4), RoutingProfile(2, 4), tmp_path / "both.csv"
    one.prompt[1, 2], one.decode[0, 3] = 5, 7
    other.prompt[1, 2], other.decode[1, 0] = 11, 1
    one.save(tmp_path / "a.csv")
    other.save(tmp_path / "b.csv")
    a, b = (tmp_path / name for name in ("a.csv", "b.csv"))
    both.write_bytes(a.read_bytes().replace(b"\n", b"\r\n") + b"\r\n" + b.read_bytes().rstrip(b"\n"))
    merged = RoutingProfile.load(both, 2, 4)
    assert np.array_equal(merged.prompt, one.prompt + other.prompt)
    assert np.array_equal(merged.decode, one.decode + other.decode)


@pytest.mark.parametrize(
    "line",
    [
        "prompt,0,1",
        "prompt,0,1,",
        "prefill,0,1,2",
        "prompt,0,-1,2",
        "prompt,0,4,1",
        "prompt,2,0,1",
        "x",
        "prompt,0,1,2,3",
    ],
)
def test_a_bad_line_of_a_profile_is_numbered(tmp_path: Path, line: str) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(f"{PROFILE_HEADER}\nprompt,0,1,2\n{line}\n")
    with pytest.raises(FormatError, match="line 3"):
        RoutingProfile.load(path, 2, 4)


def test_an_unreadable_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="none.csv"):
        RoutingProfile.load(tmp_path / "none.csv", 2, 4)


def test_table_aligns() -> None:
    table = format_table(["name", "MB"], [["gate", 1.5], ["down", 12.25]])
    assert table == "name     MB\n----  -----\ngate    1.5\ndown  12.25"
