"""Byte-level BPE from GGUF metadata, on the `tokenizers` package.

Only byte-level vocabularies (`tokenizer.ggml.model` = "gpt2") are known, split as `tokenizer.ggml.pre` says
with the expressions of llama.cpp. Decoding works on bytes: a token may end inside a character; `TextStream`
holds such bytes back until the character is whole.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from moepool.errors import ArgumentError, FormatError, UnsupportedError

_T = TypeVar("_T")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LLAMA3 = _CASELESS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# tokenizer.ggml.pre -> expressions, each splitting the pieces that the one before left.
_PRE_TOKENIZERS: Mapping[str, Sequence[str]] = {
    "gpt-2": [_GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "qwen2": [_QWEN2],
    "llama-bpe": [_LLAMA3],
}
# These take a piece that is a token as a whole, whatever the merges would make of it.
_IGNORE_MERGES = frozenset({"llama-bpe"})

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_BYTE = {char: byte for byte, char in _BYTE_TO_CHAR.items()}


class Tokenizer:
    """Text to token ids and back.

    Parameters
    ----------
    tokens : sequence of str
        The vocabulary in GPT-2's byte alphabet; special tokens as they are written.
    merges : sequence of str
        "left right", most wanted first.
    pre : str
        Name of the pre-tokeniser: "gpt-2", "default", "qwen2" or "llama-bpe".
    types : sequence of int, optional
        ggml's token types; 3 (control) and 4 (user defined) are special. Default: all ordinary.
    bos, eos : int, optional
        Ids of the tokens that begin and end a text.
    add_bos : bool
        Whether the model wants texts to begin with `bos`.

    Raises
    ------
    UnsupportedError
        Unknown `pre`.
    FormatError
        The vocabulary contradicts itself.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        pre: str = "gpt-2",
        types: Sequence[int] | None = None,
        bos: int | None = None,
        eos: int | None = None,
        add_bos: bool = False,
    ) -> None:
        if pre not in _PRE_TOKENIZERS:
            raise UnsupportedError(f"pre-tokeniser {pre!r}: the runner knows {', '.join(_PRE_TOKENIZERS)}")
        if types is not None and len(types) != len(tokens):
            raise FormatError(f"{len(types)} token types for {len(tokens)} tokens")
        for name, token in (("bos", bos), ("eos", eos)):
            if token is not None and not 0 <= token < len(tokens):
                raise FormatError(f"{name} token {token} is outside the vocabulary of {len(tokens)}")
        vocabulary = {token: i for i, token in enumerate(tokens)}
        missing = sum(char not in vocabulary for char in _CHAR_TO_BYTE)
        if missing:
            raise FormatError(f"not a byte-level vocabulary: {missing} of the 256 bytes have no token")
        self.bos, self.eos, self.add_bos = bos, eos, add_bos
        self._tokens = list(tokens)
        kinds = types or []
        self._control = frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)
        self._special = {tokens[i]: i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
        self._user_defined = {t: i for t, i in self._special.items() if i not in self._control}
        pairs = []
        for rank, merge in enumerate(merges):
            left, space, right = merge.partition(" ")
            if not (left and space and right) or not {left, right, left + right} <= vocabulary.keys():
                raise FormatError(f"merge {rank} ({merge!r}) does not join two tokens to a third")
            pairs.append((left, right))
        self._backend = Backend(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _IGNORE_MERGES))
        splits: list[PreTokenizer] = [Split(Regex(e), "isolated") for e in _PRE_TOKENIZERS[pre]]
        self._backend.pre_tokenizer = Steps([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Tokenizer:
        """Reads `tokenizer.ggml.*` of a GGUF file's metadata.

        Raises
        ------
        UnsupportedError
            Another kind of tokenizer; the message names it.
        FormatError
            A key is missing or has the wrong type.
        """
        model = fields.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedError(f"tokenizer {model!r}: the runner knows byte-level BPE ('gpt2') only")

        pre = _get(fields, "pre", str) or "default"
        tokens, merges = _get(fields, "tokens", list), _get(fields, "merges", list)
        if tokens is None or merges is None:
            raise FormatError("metadata tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
        add_bos = _get(fields, "add_bos_token", bool)
        return cls(
            tokens=tokens,
            merges=merges,
            pre=pre,
            types=_get(fields, "token_type", list),
            bos=_get(fields, "bos_token_id", int),
            eos=_get(fields, "eos_token_id", int),
            add_bos=pre == "llama-bpe" if add_bos is None else add_bos,
        )

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text, without a `bos`.

        Parameters
        ----------
        text : str
        special : bool
            Read control tokens written out in the text as such; otherwise they are ordinary characters.
        """
        known = self._special if special else self._user_defined
        if not known:
            return list(self._backend.encode(text).ids)
        longest_first = sorted(known, key=len, reverse=True)
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text):
            ids.extend([known[piece]] if piece in known else self._backend.encode(piece).ids)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; of a special token, its name.

        Raises
        ------
        ArgumentError
            No such token.
        """
        if not 0 <= token < len(self._tokens):
            raise ArgumentError(f"token {token} is outside [0, {len(self._tokens)})")
        text = self._tokens[token]
        if text in self._special:
            return text.encode()
        # Padding entries of a vocabulary need not be in the byte alphabet.
        return b"".join(bytes([_CHAR_TO_BYTE[c]]) if c in _CHAR_TO_BYTE else c.encode() for c in text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, leaving out control tokens; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(token) for token in tokens]) + stream.finish()

    def stream(self) -> TextStream:
        """A decoder that takes one token at a time."""
        return TextStream(self)

    def is_control(self, token: int) -> bool:
        """Whether a token steers the model rather than standing for text."""
        return token in self._control


def _get(fields: Mapping[str, object], key: str, kind: type[_T]) -> _T | None:
    value = fields.get(f"tokenizer.ggml.{key}")
    if value is not None and not isinstance(value, kind):
        raise FormatError(
            f"metadata tokenizer.ggml.{key} is {type(value).__name__}, expected {kind.__name__}"
        )
    return value


class TextStream:
    """Decodes token by token and never gives out a part of a character.

    Examples
    --------
    >>> stream = tokenizer.stream()
    >>> "".join(stream.push(token) for token in tokens) + stream.finish() == tokenizer.decode(tokens)
    True
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; often its text, sometimes ""."""
        if self._tokenizer.is_control(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)
