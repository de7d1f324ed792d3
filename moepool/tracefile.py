"""The forms in which a trace of routing is kept in a file.

plain
    What forks of llama.cpp write: lines of `pos,layer,id0,id1,...` without a header, rows of prompts with
    negative positions, several runs one after the other.
csv
    The same with all that a trace knows. One line of comment with the model, one with the names of the
    columns::

        # moepool trace 1 experts=32 k=4 layers=4 fingerprint=5b0c...
        step,layer,pos,decode,id0,id1,id2,id3
        0,0,0,0,17,3,30,9

    A line `+step,layer,expert,slot` tells that the step admitted the expert to the slot.
binary
    For long traces, a few bytes a row. All integers are little-endian. It begins with b"MOETRACE", a uint32
    1, the length of a JSON text as uint32 and that text: the model. Then blocks follow: uint32 kind (0 rows,
    1 admissions, 2 the end), uint32 count, uint32 bytes, and so many bytes, which zlib has
    compressed. A block of rows holds, column after column, the differences of its steps as int64, layers as
    int32, the differences of its positions as int64, decode as int8, and the ids, row after row, as int8,
    int16 or int32, the narrowest that holds `experts`; one of admissions holds rows of int64 (step, layer,
    expert, slot).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from moepool.checks import INT32, count
from moepool.errors import ArgumentError, FormatError

Form = Literal["plain", "csv", "binary"]
Int64 = NDArray[np.int64]

PROFILE_HEADER = "phase,layer,expert,count"
"""The first line of a routing profile (`moepool/runner/profile.py`), which is no trace."""

MAGIC = b"MOETRACE"
SUFFIXES: dict[str, Form] = {".csv": "csv", ".moetrace": "binary"}

_VERSION = 1
_COMMENT = "# moepool trace"
_NAMES = ("step", "layer", "pos", "decode")
_CHUNK = 1 << 22
_BLOCK = 1 << 11  # rows, all of which are lost with one damaged byte
_WORDS = struct.Struct("<II")
_BLOCK_HEAD = struct.Struct("<III")
_ROWS, _ADMISSIONS, _END = 0, 1, 2
_DIGITS = 18  # what an int64 holds without a look at the value
LIMIT = 10**_DIGITS  # of steps, and of positions on both sides

# Beyond these a trace is damaged: counting takes memory for every expert of every layer.
MOST_LAYERS = 1 << 16
MOST_EXPERTS = 1 << 24
_MOST_COUNTS = 1 << 26


@dataclass(frozen=True)
class TraceModel:
    """The model that a trace is of, as far as it is known.

    Attributes
    ----------
    experts : int
        Ids are below it.
    k : int
        Ids of a token.
    layers : int
        Layers are counted as the blocks of the file are, from 0; they are below it.
    fingerprint : str
        Of the router's weights, which quantising leaves as they are; "" if it is not known. Letters and
        digits.

    Raises
    ------
    ArgumentError
        A number is none, or out of any model's range.

    Examples
    --------
    >>> moepool.TraceModel(experts=128, k=8, layers=48).fingerprint
    ''
    """

    experts: int
    k: int
    layers: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, most in (("experts", MOST_EXPERTS), ("k", 1 << 16), ("layers", MOST_LAYERS)):
            object.__setattr__(self, name, count(name, getattr(self, name), 1, most))
        if self.experts * self.layers > _MOST_COUNTS:
            raise ArgumentError(
                f"{self.layers} layers of {self.experts} experts; it must be at most {_MOST_COUNTS} in all"
            )
        if not isinstance(self.fingerprint, str) or not re.fullmatch(r"\w*", self.fingerprint):
            raise ArgumentError(f"fingerprint is {self.fingerprint!r}; it must be letters and digits")


@dataclass
class Rows:
    """The content of a file: columns of equal length, and admissions (m, 4) of step, layer, expert, slot."""

    step: Int64
    layer: NDArray[np.int32]
    pos: Int64
    decode: NDArray[np.bool_]
    ids: NDArray[np.int32]
    admissions: Int64


@dataclass
class Reading:
    """What was read; the model that the file names, if it does; how much was left out, and why."""

    rows: Rows
    model: TraceModel | None
    skipped: Counter[str] = field(default_factory=Counter)


def form_of(path: Path) -> Form:
    """The form that a file's name asks for.

    Raises
    ------
    ArgumentError
        It ends in neither `.csv` nor `.moetrace`.
    """
    try:
        return SUFFIXES[path.suffix]
    except KeyError:
        raise ArgumentError(
            f"{path} ends in neither {' nor '.join(SUFFIXES)}: give it one of these endings, or name the form"
        ) from None


# ---------------------------------------------------------------------------------------------------- reading


def read(path: Path, expected: TraceModel | None, lenient: bool, experts: int = MOST_EXPERTS) -> Reading:
    """Reads a file of any form. `expected` limits ids and layers where the file does not tell its model, or
    else `experts` limits ids.

    Raises
    ------
    FormatError
        A line or block is damaged, the file is cut, or an id or layer is out of range; with the line or the
        byte. If `lenient`, what is damaged is left out and counted instead.
    ArgumentError
        The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return _Binary(file, path, lenient).read()
            file.seek(0)
            return _Text(file, path, expected, lenient, experts).read()
    except OSError as error:
        raise ArgumentError(f"trace {path}: {error.strerror}") from None


class _Text:
    """Reads the plain form and ours. Numbers are parsed a few megabytes at once, in NumPy."""

    def __init__(
        self, file: BinaryIO, path: Path, expected: TraceModel | None, lenient: bool, experts: int
    ) -> None:
        self.file, self.path, self.lenient, self.experts = file, path, lenient, experts
        self.skipped: Counter[str] = Counter()
        self.line = 0  # lines read so far
        self.model: TraceModel | None = None
        self.limits = expected
        self.ours = False
        self.columns = 0
        self.rows: list[Int64] = []
        self.admissions: list[Int64] = []
        self.last_step = -1

    def read(self) -> Reading:
        self._head()
        rest = b""
        while chunk := self.file.read(_CHUNK):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                self._lines(whole + newline)
        if rest:
            self.line += 1
            self._wrong(self.line, "the line has no end, as if the file had been cut", rest)
        return Reading(self._content(), self.model, self.skipped)

    def _wrong(self, line: int, reason: str, text: bytes = b"", count: int = 1) -> None:
        """A line that cannot be used: an error, or counted."""
        if not self.lenient:
            shown = f": {text[:60].decode('utf-8', 'replace')!r}" if text else ""
            raise FormatError(f"trace {self.path}, line {line}: {reason}{shown}")
        self.skipped[reason] += count

    def _head(self) -> None:
        first = self.file.readline()
        if first.startswith(_COMMENT.encode()):
            self.ours, self.line = True, 2
            self.model = self.limits = self._parse_comment(first)
            self.columns = len(_NAMES) + self.model.k
            names = self.file.readline()
            if names.rstrip().decode("utf-8", "replace") != _header(self.model.k) or names[-1:] != b"\n":
                self._fail(2, f"the columns are {names[:60]!r}, not {_header(self.model.k)!r}")
            return
        if self.path.suffix == ".moetrace" and first:
            raise FormatError(
                f"trace {self.path}, byte 0: not a trace: it does not begin with {MAGIC.decode()}"
            )
        if first.strip() == PROFILE_HEADER.encode():
            self._fail(
                1,
                "a routing profile, not a trace: `generate --hot` reads it, in a program "
                "moepool.runner.RoutingProfile.load; `generate --trace` writes a trace",
            )
        self.file.seek(0)
        # The first line says how many columns there are.
        self.columns = max(first.count(b",") + 1, 3)
        if self.limits is not None:
            self.columns = 2 + self.limits.k

    def _parse_comment(self, line: bytes) -> TraceModel:
        text = line.decode("utf-8", "replace").strip()
        number = rf"([0-9]{{1,{_DIGITS}}})"
        words = re.fullmatch(
            rf"{_COMMENT} {number} experts={number} k={number} layers={number} fingerprint=(\w*)", text
        )
        if words is None:
            self._fail(1, f"not the head of a trace: {text[:80]!r}")
        version, experts, k, layers = map(int, words.groups()[:4])
        if version != _VERSION:
            self._fail(1, f"version {version} of the form; this moepool reads {_VERSION}")
        try:
            return TraceModel(experts, k, layers, words[5])
        except ArgumentError as error:
            self._fail(1, f"not the head of a trace: {error}")

    def _fail(self, line: int, reason: str) -> NoReturn:
        raise FormatError(f"trace {self.path}, line {line}: {reason}")

    def _lines(self, text: bytes) -> None:
        """Takes whole lines."""
        lines = text.count(b"\n")
        if (parsed := self._parse(text)) is None:
            # Something is wrong: line by line, to say where, and to go on with the rest.
            good = []
            for number, line in enumerate(text.split(b"\n")[:-1], self.line + 1):
                if reason := self._fault(line) if line.strip() else "":
                    self._wrong(number, reason, line)
                good.append(b"\n" if reason or not line.strip() else line + b"\n")
            parsed = self._parse(b"".join(good))
            assert parsed is not None
        self._take(*parsed)
        self.line += lines

    def _fault(self, line: bytes) -> str:
        """What is wrong with a line, "" if nothing."""
        line = line.removesuffix(b"\r")
        if self.ours and (line.startswith(_COMMENT.encode()) or line == _header(self.columns - 4).encode()):
            return "a second head: `moepool trace merge` joins files"
        if not self.ours and line.replace(b" ", b"").startswith(b"pos,layer"):
            return "not integers but the names of columns, which this form does not have: remove the line"
        numbers, expected = line.split(b","), self.columns
        if self.ours and line.startswith(b"+"):
            numbers[0], expected = numbers[0][1:], 4
            if numbers[0].startswith(b"-"):
                return "an admission in a step before the first"
        if not all(re.fullmatch(rb"-?\d+", number) for number in numbers):
            return "not integers"
        if any(len(number.lstrip(b"-")) > _DIGITS for number in numbers):
            return f"a number of more than {_DIGITS} digits"
        if len(numbers) != expected:
            return f"{len(numbers)} columns, not {expected}"
        return ""

    def _parse(self, text: bytes) -> tuple[Int64, Int64, Int64, Int64] | None:
        """Rows and admissions of whole lines, each with the lines' positions; None if a line is at fault."""
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        data = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero((data == ord(",")) | (data == ord("\n")))
        is_last = data[ends] == ord("\n")
        starts = np.empty_like(ends)
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
        first = data[starts]
        minus = first == ord("-")
        plus = (first == ord("+")) & np.roll(
            is_last, 1
        )  # roll: the field before it ended a line, or the chunk
        digits = ends - starts - minus - plus
        blank = (digits == 0) & is_last & np.roll(is_last, 1)
        if blank.any():
            keep = ~blank
            line_of = np.cumsum(is_last)[keep] - is_last[keep]
            ends, is_last, minus, plus = ends[keep], is_last[keep], minus[keep], plus[keep]
            digits = digits[keep]
        else:
            line_of = np.cumsum(is_last) - is_last
        # Every byte is a digit, a separator or a sign that stands where one may.
        plain = np.count_nonzero((data >= ord("0")) & (data <= ord("9")))
        signs = np.count_nonzero(minus) + np.count_nonzero(plus)
        if plain != digits.sum() or plain + signs + np.count_nonzero(data == ord(",")) + text.count(
            b"\n"
        ) != len(data):
            return None
        if not len(ends):
            none = np.empty(0, np.int64)
            return none.reshape(0, self.columns), none, none.reshape(0, 4), none
        if (plus.any() and not self.ours) or digits.min() < 1 or digits.max() > _DIGITS:
            return None
        last = np.flatnonzero(is_last)
        counts = np.diff(last, prepend=-1)
        begins = last - counts + 1
        admits = plus[begins]
        if not np.array_equal(counts, np.where(admits, 4, self.columns)):
            return None
        values = _numbers(data, ends, digits)
        np.negative(values, out=values, where=minus)
        lines = line_of[begins] + self.line + 1
        if not admits.any():
            empty = np.empty(0, np.int64)
            return values.reshape(-1, self.columns), lines, empty.reshape(0, 4), empty
        of_admission = np.repeat(admits, counts)
        return (
            values[~of_admission].reshape(-1, self.columns),
            lines[~admits],
            values[of_admission].reshape(-1, 4),
            lines[admits],
        )

    def _take(self, rows: Int64, lines: Int64, admissions: Int64, admission_lines: Int64) -> None:
        """Keeps what the model can have routed."""
        lead = len(_NAMES) if self.ours else 2
        layer, ids = rows[:, 1], rows[:, lead:]
        experts = self.experts if self.limits is None else self.limits.experts
        layers = MOST_LAYERS if self.limits is None else self.limits.layers
        checks: list[tuple[NDArray[np.bool_], str]] = [
            ((layer >= 0) & (layer < layers), f"a layer outside [0, {layers})"),
            (np.asarray(((ids >= -1) & (ids < experts)).all(axis=1)), f"an id outside [-1, {experts})"),
        ]
        if self.ours:
            checks.append(((rows[:, 3] | 1) == 1, "decode is neither 0 nor 1"))
            good = np.logical_and.reduce([passed for passed, _ in checks])
            # Only rows that are kept say how far the steps have come.
            highest = np.maximum.accumulate(np.r_[self.last_step, np.where(good, rows[:, 0], -1)])
            self.last_step = int(highest[-1])
            checks.append((rows[:, 0] >= np.maximum(highest[:-1], 0), "a step before one above it"))
            assert self.limits is not None
            self.admissions.append(
                self._good(admissions, admission_lines, [_admissions_check(admissions, self.limits)])
            )
        self.rows.append(self._good(rows, lines, checks))

    def _good(self, table: Int64, lines: Int64, checks: list[tuple[NDArray[np.bool_], str]]) -> Int64:
        """The rows that pass every check; a row counts for the first that it fails."""
        good = np.ones(len(table), np.bool_)
        for passed, reason in checks:
            failed = np.flatnonzero(good & ~passed)
            if len(failed):
                shown = ",".join(map(str, table[failed[0]].tolist())).encode()
                self._wrong(int(lines[failed[0]]), reason, shown, len(failed))
                good[failed] = False
        return table if good.all() else table[good]

    def _content(self) -> Rows:
        rows = np.concatenate([*self.rows, np.empty((0, self.columns), np.int64)])
        admissions = np.concatenate([*self.admissions, np.empty((0, 4), np.int64)])
        if self.ours:
            step, layer, pos, decode = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] != 0
        else:
            pos, layer = rows[:, 0], rows[:, 1]
            decode = pos >= 0
            step = steps_of(pos, layer)
        return Rows(
            np.ascontiguousarray(step),
            layer.astype(np.int32),
            np.ascontiguousarray(pos),
            decode,
            rows[:, len(_NAMES) if self.ours else 2 :].astype(np.int32),
            admissions,
        )


def _admissions_check(admissions: Int64, model: TraceModel) -> tuple[NDArray[np.bool_], str]:
    """Which rows of step, layer, expert and slot a pool of the model can have admitted."""
    step, layer, expert, slot = admissions.T
    good = (step >= 0) & (step < LIMIT) & (layer >= 0) & (layer < model.layers)
    good &= (expert >= 0) & (expert < model.experts) & (slot >= 0) & (slot <= INT32)
    return good, f"an admission outside of {model.layers} layers of {model.experts} experts"


def wrong_admission(admissions: Int64, model: TraceModel) -> str:
    """What is wrong with the first row that no pool of the model can have admitted, "" if nothing is."""
    good, reason = _admissions_check(admissions, model)
    at = int(np.argmin(good)) if len(good) else 0
    return "" if good.all() else f"admission {admissions[at].tolist()} at row {at}: {reason}"


def _numbers(data: NDArray[np.uint8], ends: Int64, digits: Int64) -> Int64:
    """The numbers of so many digits that end before `ends`."""
    values = data[ends - 1].astype(np.int64) - ord("0")
    longer = np.flatnonzero(digits > 1)
    for place in range(1, _DIGITS):
        if not len(longer):
            break
        values[longer] += (data[ends[longer] - 1 - place].astype(np.int64) - ord("0")) * 10**place
        longer = longer[digits[longer] > place + 1]
    return values


def steps_of(pos: Int64, layer: Int64) -> Int64:
    """The steps of rows in the plain form, which does not tell them.

    A decode row is a step of its own in its layer; all layers of a position that follow one another are one.
    Prompt rows that follow one another are one step until the layer falls, or the position does within a
    layer.
    """
    if not len(pos):
        return np.empty(0, np.int64)
    decode = pos >= 0
    same_layer = layer[1:] == layer[:-1]
    begins = (layer[1:] < layer[:-1]) | (decode[1:] != decode[:-1])
    begins |= decode[1:] & (same_layer | (pos[1:] != pos[:-1]))
    begins |= ~decode[1:] & same_layer & (pos[1:] <= pos[:-1])
    step = np.zeros(len(pos), np.int64)
    np.cumsum(begins, out=step[1:])
    return step


class _Binary:
    """Reads the binary form, of which the magic has been read."""

    def __init__(self, file: BinaryIO, path: Path, lenient: bool) -> None:
        self.file, self.path, self.lenient = file, path, lenient
        self.skipped: Counter[str] = Counter()
        self.last_step = 0

    def read(self) -> Reading:
        model = self._model()
        rows, admissions = [], []
        ended = False
        while not ended:
            at = self.file.tell()
            head = self.file.read(_BLOCK_HEAD.size)
            if len(head) < _BLOCK_HEAD.size:
                self._wrong(at, "the file is cut: it has no end block")
                break
            kind, count, size = _BLOCK_HEAD.unpack(head)
            if kind == _END:
                ended = True
                if self.file.read(1):
                    self._wrong(self.file.tell() - 1, "more bytes behind the end block")
                break
            packed = self.file.read(size)
            if len(packed) < size:
                self._wrong(at, "the file is cut inside a block", max(count, 1))
                break
            content = self._unpack(kind, count, packed, model)
            if content is None:
                self._wrong(at, "a damaged block", max(count, 1))
            elif isinstance(content, Rows):
                self._check(content, model, at)
                rows.append(content)
            else:
                admissions.append(self._good_admissions(content, model, at))
        return Reading(_joined(rows, admissions, model.k), model, self.skipped)

    def _model(self) -> TraceModel:
        try:
            version, size = _WORDS.unpack(self.file.read(_WORDS.size))
            if version != _VERSION:
                raise FormatError(
                    f"trace {self.path}: version {version} of the form; this moepool reads {_VERSION}"
                )
            return TraceModel(**json.loads(self.file.read(size)))
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            if isinstance(error, FormatError):
                raise
            why = f": {error}" if isinstance(error, ArgumentError) else ""
            raise FormatError(f"trace {self.path}, byte {len(MAGIC)}: the head is damaged{why}") from None

    def _wrong(self, at: int, reason: str, count: int = 1) -> None:
        if not self.lenient:
            raise FormatError(f"trace {self.path}, byte {at}: {reason}")
        self.skipped[reason] += count

    @staticmethod
    def _unpack(kind: int, count: int, packed: bytes, model: TraceModel) -> Rows | Int64 | None:
        if kind not in (_ROWS, _ADMISSIONS):
            return None
        try:
            data = zlib.decompress(packed)  # with a check sum of its own
        except zlib.error:
            return None
        if kind == _ADMISSIONS:
            return np.frombuffer(data, "<i8").reshape(-1, 4) if len(data) == 32 * count else None
        id_type = _id_type(model.experts)
        if len(data) != count * (8 + 4 + 8 + 1 + model.k * id_type.itemsize):
            return None
        at = 0
        columns = []
        for dtype in ("<i8", "<i4", "<i8", "i1"):
            columns.append(np.frombuffer(data, dtype, count, at))
            at += columns[-1].nbytes
        ids = np.frombuffer(data, id_type, offset=at).reshape(count, model.k).astype(np.int32)
        step, layer, pos, decode = columns
        if not np.isin(decode, (0, 1)).all():
            return None
        return Rows(np.cumsum(step), layer, np.cumsum(pos), decode != 0, ids, np.empty((0, 4), np.int64))

    def _check(self, rows: Rows, model: TraceModel, at: int) -> None:
        """A block may be whole and yet nonsense."""
        good = (rows.layer >= 0) & (rows.layer < model.layers)
        good &= ((rows.ids >= -1) & (rows.ids < model.experts)).all(axis=1)
        self._keep(
            rows,
            good,
            at,
            lambda row: (
                f"has layer {rows.layer[row]} and ids {rows.ids[row].tolist()}: outside of "
                f"{model.layers} layers of {model.experts} experts"
            ),
        )
        # Of the rows that are left: a step below the one before it, or a sum that has overflowed.
        highest = np.maximum.accumulate(np.r_[self.last_step, np.where(rows.step < LIMIT, rows.step, 0)])
        good = (rows.step >= highest[:-1]) & (rows.step < LIMIT) & (rows.pos > -LIMIT) & (rows.pos < LIMIT)
        self.last_step = int(highest[-1])
        self._keep(
            rows,
            good,
            at,
            lambda row: (
                f"has step {rows.step[row]} behind {highest[row]} and position {rows.pos[row]}: steps "
                "never fall, and both have at most 18 digits"
            ),
        )

    def _keep(self, rows: Rows, good: NDArray[np.bool_], at: int, told: Callable[[int], str]) -> None:
        """Leaves rows out, if that is allowed."""
        if not good.all():
            first = int(np.argmin(good))
            self._wrong(at, f"row {first} of the block {told(first)}", int((~good).sum()))
            for name in ("step", "layer", "pos", "decode", "ids"):
                setattr(rows, name, getattr(rows, name)[good])

    def _good_admissions(self, admissions: Int64, model: TraceModel, at: int) -> Int64:
        if wrong := wrong_admission(admissions, model):
            good, _ = _admissions_check(admissions, model)
            self._wrong(at, wrong, int((~good).sum()))
            return admissions[good]
        return admissions


def _joined(rows: list[Rows], admissions: list[Int64], k: int) -> Rows:
    def column(name: str, dtype: type) -> NDArray[np.generic]:
        return np.concatenate([*(getattr(part, name) for part in rows), np.empty(0, dtype)])

    return Rows(
        column("step", np.int64),  # type: ignore[arg-type]
        column("layer", np.int32),  # type: ignore[arg-type]
        column("pos", np.int64),  # type: ignore[arg-type]
        column("decode", np.bool_),  # type: ignore[arg-type]
        np.concatenate([*(part.ids for part in rows), np.empty((0, k), np.int32)]),
        np.concatenate([*admissions, np.empty((0, 4), np.int64)]),
    )


# ---------------------------------------------------------------------------------------------------- writing


def write(path: Path, rows: Rows, model: TraceModel, form: Form) -> None:
    """Writes a file; positions of prompts become negative in the plain form."""
    writers = {"plain": _write_plain, "csv": _write_csv, "binary": _write_binary}
    with path.open("wb") as file:
        writers[form](file, rows, model)


def _header(k: int) -> str:
    return ",".join([*_NAMES, *(f"id{j}" for j in range(k))])


def _write_plain(file: BinaryIO, rows: Rows, model: TraceModel) -> None:
    table = np.column_stack([plain_positions(rows), rows.layer, rows.ids])
    for text in _csv(table):
        file.write(text)


def _write_csv(file: BinaryIO, rows: Rows, model: TraceModel) -> None:
    head = (
        f"{_COMMENT} {_VERSION} experts={model.experts} k={model.k} layers={model.layers} "
        f"fingerprint={model.fingerprint}\n{_header(model.k)}\n"
    )
    file.write(head.encode())
    table = np.column_stack([rows.step, rows.layer, rows.pos, rows.decode, rows.ids])
    for text in _csv(table):
        file.write(text)
    for text in _csv(rows.admissions, "+"):
        file.write(text)


def _csv(table: NDArray[np.integer], before: str = "") -> Iterator[bytes]:
    line = before + ",".join(["%d"] * table.shape[1]) + "\n"
    for at in range(0, len(table), 4096):
        part = table[at : at + 4096]
        yield (line * len(part) % tuple(part.ravel().tolist())).encode()


def plain_positions(rows: Rows) -> Int64:
    """Positions in which prompt rows are negative: those of a stretch of prompt rows end at -1."""
    pos = rows.pos.copy()
    prompt = ~rows.decode & (pos >= 0)
    edges = np.flatnonzero(np.diff(prompt, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2):
        pos[begin:end] -= pos[begin:end].max() + 1
    return pos


def _write_binary(file: BinaryIO, rows: Rows, model: TraceModel) -> None:
    head = json.dumps(asdict(model)).encode()
    file.write(MAGIC + _WORDS.pack(_VERSION, len(head)) + head)
    id_type = _id_type(model.experts)
    for at in range(0, len(rows.step), _BLOCK):
        part = slice(at, at + _BLOCK)
        columns = [
            np.diff(rows.step[part], prepend=0).astype("<i8"),
            rows.layer[part].astype("<i4"),
            np.diff(rows.pos[part], prepend=0).astype("<i8"),
            rows.decode[part].astype("i1"),
            rows.ids[part].astype(id_type),
        ]
        _write_block(file, _ROWS, len(columns[0]), b"".join(c.tobytes() for c in columns))
    for at in range(0, len(rows.admissions), _BLOCK):
        some = rows.admissions[at : at + _BLOCK]
        _write_block(file, _ADMISSIONS, len(some), some.astype("<i8").tobytes())
    file.write(_BLOCK_HEAD.pack(_END, 0, 0))


def _write_block(file: BinaryIO, kind: int, count: int, data: bytes) -> None:
    packed = zlib.compress(data, 1)
    file.write(_BLOCK_HEAD.pack(kind, count, len(packed)) + packed)


def _id_type(experts: int) -> np.dtype[np.signedinteger]:
    return np.dtype(next(t for t in ("i1", "<i2", "<i4") if experts - 1 <= np.iinfo(t).max))
