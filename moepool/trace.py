"""Traces: which experts a router wanted, token by token and layer by layer."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moepool import tracefile
from moepool.checks import count
from moepool.errors import ArgumentError, DtypeError, FormatError, IdError, warn
from moepool.tracefile import Form, Rows, TraceModel

__all__ = ["Trace", "TraceInfo", "TraceModel", "trace_model"]

TracePhase = Literal["prompt", "decode"]


def trace_model(path: str | os.PathLike[str]) -> TraceModel:
    """What traces of a GGUF file's model are recognised by.

    The fingerprint is of the router's weights. Quantisers leave these alone, so a trace of one quantisation
    of a model fits the others. A file without them has the fingerprint of its experts' shapes.

    Parameters
    ----------
    path : str or path
        Any architecture with experts.

    Returns
    -------
    TraceModel

    Raises
    ------
    FormatError
        The file is damaged, has no experts, or does not say how many a token uses.

    Examples
    --------
    >>> model = moepool.trace_model(model_path)
    >>> model.experts, model.k, model.layers, len(model.fingerprint)
    (32, 4, 4, 16)
    """
    from moepool.gguf import GGUFFile, expert_layers  # not before it is wanted: it takes a while

    with GGUFFile(path) as file:
        architecture = str(file.fields.get("general.architecture"))
        layers = expert_layers(file, any_type=True)
        if not layers:
            raise FormatError(f"{path}: architecture {architecture!r}, no tensors of experts")
        k = file.fields.get(f"{architecture}.expert_used_count")
        if not isinstance(k, int) or k < 1:
            raise FormatError(f"{path}: {architecture}.expert_used_count is {k!r}, expected at least 1")
        digest = hashlib.sha256()
        for layer in layers:
            router = file.tensors.get(f"blk.{layer.block}.ffn_gate_inp.weight")
            digest.update(f"{layer.block} {layer.experts} ".encode())
            digest.update(str(router.shape).encode() if router is not None else b"none")
            if router is not None:
                digest.update(np.ascontiguousarray(router.data).data)
        most = max(layer.experts for layer in layers)
        return TraceModel(most, k, max(layer.block for layer in layers) + 1, digest.hexdigest()[:16])


@dataclass(frozen=True)
class TraceInfo:
    """What a trace holds.

    Attributes
    ----------
    rows, prompt_rows, decode_rows : int
        A row is a token in a layer.
    steps, tokens : int
        Forward passes; tokens, as far as the layer with the most rows tells.
    layers : tuple of int
        Those that occur.
    wanted : int
        Places of decode rows that are not skipped.
    experts_seen : tuple of int
        For each of `layers`, how many experts its decode rows want at all.
    admissions : int
    """

    rows: int
    prompt_rows: int
    decode_rows: int
    steps: int
    tokens: int
    layers: tuple[int, ...]
    wanted: int
    experts_seen: tuple[int, ...]
    admissions: int


class Trace:
    """The routing of a run, in memory. It does not change: what seems to change it returns another one.

    Parameters
    ----------
    model : TraceModel
    step, layer, pos : array of int, (rows,)
        The forward pass, which never falls; the layer; the token's position in its text.
    decode : array of bool, (rows,)
        Whether the row belongs to a decode step; else to a prompt.
    ids : array of int, (rows, k)
        The experts wanted, -1 for none.
    admissions : array of int, (m, 4), optional
        Step, layer, expert and slot of what a pool admitted where measured times had a say in it.

    All are copied into NumPy arrays of int64 (step, pos, admissions), int32 (layer, ids) and bool.

    Attributes
    ----------
    model, step, layer, pos, decode, ids, admissions
        As above.
    skipped : collections.Counter
        What a lenient reading left out, by reason.

    Raises
    ------
    IdError
        An id or a layer is not one of the model's.
    ArgumentError
        Shapes do not fit one another, steps fall, or a number is out of its range.

    Examples
    --------
    >>> model = moepool.TraceModel(experts=8, k=2, layers=1)
    >>> trace = moepool.Trace(model, step=[0, 1], layer=[0, 0], pos=[0, 1], decode=[False, True],
    ...                       ids=[[3, 1], [3, 5]])
    >>> trace.counts("decode")
    array([[0, 0, 0, 1, 0, 1, 0, 0]])
    """

    def __init__(
        self,
        model: TraceModel,
        step: npt.ArrayLike,
        layer: npt.ArrayLike,
        pos: npt.ArrayLike,
        decode: npt.ArrayLike,
        ids: npt.ArrayLike,
        admissions: npt.ArrayLike | None = None,
    ) -> None:
        self.model = model
        self.step = _column("step", step, np.int64)
        rows = len(self.step)
        self.layer = _column("layer", layer, np.int32, (rows,))
        self.pos = _column("pos", pos, np.int64, (rows,))
        self.decode = _column("decode", decode, np.bool_, (rows,))
        self.ids = _column("ids", ids, np.int32, (rows, model.k))
        self.admissions = _column(
            "admissions", np.empty((0, 4)) if admissions is None else admissions, np.int64, (None, 4)
        )
        self.skipped: Counter[str] = Counter()
        self._counts: dict[TracePhase | None, npt.NDArray[np.int64]] = {}
        if np.any(np.diff(self.step) < 0):
            at = int(np.argmax(np.diff(self.step) < 0))
            raise ArgumentError(f"step falls from {self.step[at]} to {self.step[at + 1]} at row {at + 1}")
        outside = (self.layer < 0) | (self.layer >= model.layers)
        if outside.any():
            at = int(np.argmax(outside))
            raise IdError(f"layer {self.layer[at]} at row {at} is outside [0, {model.layers})")
        wrong = (self.ids < -1) | (self.ids >= model.experts)
        if wrong.any():
            at, place = (int(n) for n in np.argwhere(wrong)[0])
            raise IdError(
                f"id {self.ids[at, place]} at row {at}, place {place} is outside [-1, {model.experts})"
            )
        if len(self.step) and not 0 <= self.step[0] <= self.step[-1] < tracefile.LIMIT:
            raise ArgumentError(
                f"steps are from {self.step[0]} to {self.step[-1]}; they must be in [0, 10^18)"
            )
        if np.any((self.pos <= -tracefile.LIMIT) | (self.pos >= tracefile.LIMIT)):
            raise ArgumentError("a position has more than 18 digits")
        if wrong_one := tracefile.wrong_admission(self.admissions, model):
            raise ArgumentError(wrong_one)
        for array in (self.step, self.layer, self.pos, self.decode, self.ids, self.admissions):
            array.flags.writeable = False

    # -------------------------------------------------------------------------------------------------- files

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: TraceModel | None = None,
        *,
        lenient: bool = False,
        experts: int | None = None,
    ) -> Trace:
        """Reads a file: the plain CSV of llama.cpp's forks, or one that :meth:`save` wrote.

        Parameters
        ----------
        path : str or path
        model : TraceModel, optional
            What the trace has to be of. Without it a plain file is taken to be of a model with as many
            experts and layers as occur in it.
        lenient : bool
            Leave out what is damaged or out of range, count it in `skipped` and warn, instead of failing.
        experts : int, optional
            How many a layer has, where neither `model` nor the file tells.

        Returns
        -------
        Trace

        Raises
        ------
        FormatError
            The file is damaged, cut, or of another model; the message has the line or the byte. Or nothing
            is left of it.
        ArgumentError
            It cannot be read.

        Examples
        --------
        >>> _ = Path("trace.csv").write_text("-2,0,3,1\\n-1,0,3,2\\n0,0,3,5\\n1,0,5,1\\n")
        >>> trace = moepool.Trace.load("trace.csv", moepool.TraceModel(experts=8, k=2, layers=1))
        >>> trace
        <Trace of 4 rows, 2 of prompts: 1 layer, 8 experts, top-2>
        """
        file = Path(path)
        most = tracefile.MOST_EXPERTS
        if experts is not None:
            most = count("experts", experts, 1, most)
        reading = tracefile.read(file, model, lenient, most)
        rows = reading.rows
        found = reading.model or model
        if found is None:
            found = _model_in(file, rows, reading.skipped, experts)
        elif model is not None:
            must_fit(f"trace {file}", found, model)
        elif experts is not None:
            if found.experts > experts or (found.fingerprint and found.experts < experts):
                raise FormatError(f"trace {file} is of a model of {found.experts} experts, not {experts}")
            found = replace(found, experts=experts)
        trace = cls._of(found if model is None else model, rows)
        trace.skipped = reading.skipped
        if reading.skipped:
            if not len(trace):
                raise FormatError(f"trace {file}: nothing is left of it: {_counted(reading.skipped)}")
            warn(f"trace {file}: left out {reading.skipped.total()}: {_counted(reading.skipped)}")
        return trace

    def save(self, path: str | os.PathLike[str], form: Form | None = None) -> None:
        """Writes a file.

        Parameters
        ----------
        path : str or path
        form : {"csv", "binary", "plain"}, optional
            By default what the name ends in says: `.csv` or `.moetrace`. The plain form, of llama.cpp's
            forks, holds neither steps nor the model; prompt rows get negative positions there.

        Raises
        ------
        ArgumentError
            The name does not tell the form, or the plain form cannot hold the trace's admissions, or decode
            rows of negative positions.
        """
        file = Path(path)
        form = form or tracefile.form_of(file)
        if form == "plain" and np.any(self.decode & (self.pos < 0)):
            raise ArgumentError(
                "the plain form takes rows of negative positions for prompts, and a decode row has one: "
                "write csv or binary"
            )
        if form == "plain" and len(self.admissions):
            raise ArgumentError(
                f"the plain form has no place for {len(self.admissions)} admissions: write csv or binary"
            )
        tracefile.write(file, self._rows, self.model, form)

    # --------------------------------------------------------------------------------------------- new traces

    @staticmethod
    def merge(traces: Iterable[Trace]) -> Trace:
        """One run behind the other. What the result counts is the sum of what the parts count.

        Parameters
        ----------
        traces : iterable of Trace
            Of one model. A trace that does not know its fingerprint goes with any of the same k.

        Returns
        -------
        Trace

        Raises
        ------
        ArgumentError
            There is none, or they are of different models.

        Examples
        --------
        >>> model = moepool.TraceModel(experts=8, k=1, layers=1)
        >>> part = moepool.Trace(model, [0, 1], [0, 0], [0, 1], [True, True], [[3], [4]])
        >>> moepool.Trace.merge([part, part]).step
        array([0, 1, 2, 3])
        """
        parts = list(traces)
        if not parts:
            raise ArgumentError("no traces to merge")
        model = _common([part.model for part in parts])
        offset = 0
        steps, admissions = [], []
        for part in parts:
            first = int(part.step[0]) if len(part.step) else 0
            steps.append(part.step - first + offset)
            admissions.append(part.admissions - [first - offset, 0, 0, 0])
            offset = int(steps[-1][-1]) + 1 if len(part.step) else offset
        return Trace(
            model,
            step=np.concatenate(steps),
            layer=np.concatenate([part.layer for part in parts]),
            pos=np.concatenate([part.pos for part in parts]),
            decode=np.concatenate([part.decode for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            admissions=np.concatenate(admissions),
        )

    def phase(self, phase: TracePhase) -> Trace:
        """The rows of prompts, or those of decode steps.

        Examples
        --------
        >>> model = moepool.TraceModel(experts=8, k=1, layers=1)
        >>> trace = moepool.Trace(model, [0, 1], [0, 0], [0, 1], [False, True], [[3], [4]])
        >>> trace.phase("decode").ids.tolist(), trace.phase("prompt").ids.tolist()
        ([[4]], [[3]])
        """
        if phase not in ("prompt", "decode"):
            raise ArgumentError(f"phase is {phase!r}; it must be 'prompt' or 'decode'")
        kept = self.decode == (phase == "decode")
        steps = self.step[kept]
        return Trace(
            self.model,
            step=steps,
            layer=self.layer[kept],
            pos=self.pos[kept],
            decode=self.decode[kept],
            ids=self.ids[kept],
            admissions=self.admissions[np.isin(self.admissions[:, 0], steps)],
        )

    def split(self, step: int) -> tuple[Trace, Trace]:
        """The steps before one, and the rest: to learn from the first and to test on the second.

        Examples
        --------
        >>> model = moepool.TraceModel(experts=8, k=1, layers=1)
        >>> trace = moepool.Trace(model, [0, 1], [0, 0], [0, 1], [False, True], [[3], [4]])
        >>> [part.ids.tolist() for part in trace.split(1)]
        [[[3]], [[4]]]
        """
        first, rest = (
            Trace(
                self.model,
                step=self.step[kept],
                layer=self.layer[kept],
                pos=self.pos[kept],
                decode=self.decode[kept],
                ids=self.ids[kept],
                admissions=self.admissions[admitted],
            )
            for kept, admitted in (
                (self.step < step, self.admissions[:, 0] < step),
                (self.step >= step, self.admissions[:, 0] >= step),
            )
        )
        return first, rest

    def of(self, model: TraceModel) -> Trace:
        """The same, of a model that was not known when it was read.

        Raises
        ------
        FormatError
            It is of another model.
        """
        must_fit("the trace", self.model, model)
        return Trace._of(model, self._rows)

    # -------------------------------------------------------------------------------------------------- facts

    def counts(self, phase: TracePhase | None = None) -> npt.NDArray[np.int64]:
        """How many places wanted each expert.

        Parameters
        ----------
        phase : {"prompt", "decode"}, optional
            Only rows of this phase.

        Returns
        -------
        numpy.ndarray
            int64 (layers, experts), which must not be changed: it is counted once.
        """
        if phase in self._counts:
            return self._counts[phase]
        kept = slice(None) if phase is None else self.decode == (phase == "decode")
        layer, ids = self.layer[kept], self.ids[kept]
        layers, experts = self.model.layers, self.model.experts
        flat = (layer[:, None].astype(np.int64) * experts + ids)[ids >= 0]
        counts = np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
        counts.flags.writeable = False
        self._counts[phase] = counts
        return counts

    def hottest(self, slots: int | Sequence[int], phase: TracePhase | None = None) -> list[list[int]]:
        """For each layer the experts wanted most, most wanted first, the lower number among equals.

        Parameters
        ----------
        slots : int or sequence of int
            How many; one number, or one for each layer.
        phase : {"prompt", "decode"}, optional
            Count rows of this phase only.

        Raises
        ------
        ArgumentError
            A number is negative, or there is not one for each layer.

        Examples
        --------
        >>> model = moepool.TraceModel(experts=8, k=2, layers=1)
        >>> moepool.Trace(model, [0, 1], [0, 0], [0, 1], [True, True], [[3, 1], [3, 5]]).hottest(2)
        [[3, 1]]
        """
        many = isinstance(slots, Sequence | np.ndarray) and np.ndim(slots) > 0
        each = [count("slots", n) for n in (slots if many else [slots] * self.model.layers)]  # type: ignore[union-attr]
        if len(each) != self.model.layers:
            raise ArgumentError(f"{len(each)} numbers of slots for {self.model.layers} layers")
        order = np.argsort(-self.counts(phase), axis=1, kind="stable")
        return [row[:n].tolist() for row, n in zip(order, each, strict=True)]

    def info(self) -> TraceInfo:
        """What it holds, counted.

        Returns
        -------
        TraceInfo
        """
        rows_of = np.bincount(self.layer, minlength=1)
        seen = np.count_nonzero(self.counts("decode"), axis=1)
        layers = tuple(np.flatnonzero(rows_of).tolist())
        decode_rows = int(np.count_nonzero(self.decode))
        return TraceInfo(
            rows=len(self.step),
            prompt_rows=len(self.step) - decode_rows,
            decode_rows=decode_rows,
            steps=len(np.unique(self.step)),
            tokens=int(rows_of.max()),
            layers=layers,
            wanted=int(np.count_nonzero(self.ids[self.decode] >= 0)),
            experts_seen=tuple(int(seen[layer]) for layer in layers),
            admissions=len(self.admissions),
        )

    @property
    def _rows(self) -> Rows:
        return Rows(self.step, self.layer, self.pos, self.decode, self.ids, self.admissions)

    @classmethod
    def _of(cls, model: TraceModel, rows: Rows) -> Trace:
        return cls(model, rows.step, rows.layer, rows.pos, rows.decode, rows.ids, rows.admissions)

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        prompt = len(self.decode) - int(np.count_nonzero(self.decode))
        layers = len(np.unique(self.layer))
        return (
            f"<Trace of {len(self)} rows, {prompt} of prompts: {layers} layer{'s' * (layers != 1)}, "
            f"{self.model.experts} experts, top-{self.model.k}>"
        )


def _column(
    name: str, values: npt.ArrayLike, dtype: type[np.generic], shape: tuple[int | None, ...] = (None,)
) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.size and not np.can_cast(array.dtype, np.int64, "same_kind"):
        raise DtypeError(f"{name} is of dtype {array.dtype}: give integers")
    if len(array.shape) != len(shape) or any(
        want is not None and have != want for have, want in zip(array.shape, shape, strict=True)
    ):
        wanted = ", ".join("rows" if n is None else str(n) for n in shape)
        raise ArgumentError(f"{name} has shape {array.shape}, expected ({wanted})")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ArgumentError(f"{name} has {array.max()}, which is out of any range")
    # Ids that do not fit int32 are out of any model's range: caught by the check of the range.
    if dtype == np.int32:
        array = np.clip(array, -(2**31), 2**31 - 1)
    return array.astype(dtype)


def _model_in(file: Path, rows: Rows, skipped: Counter[str], experts: int | None) -> TraceModel:
    """A model that a file in the plain form can be of, which does not tell."""
    if not len(rows.step):
        why = f"nothing is left of it: {_counted(skipped)}" if skipped else "it has no rows"
        raise FormatError(f"trace {file}: {why}")
    most = experts or int(rows.ids.max(initial=0)) + 1
    try:
        return TraceModel(most, rows.ids.shape[1], int(rows.layer.max()) + 1)
    except ArgumentError as error:
        raise FormatError(f"trace {file}: what occurs in it is no model: {error}") from None


def _counted(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.items())


def must_fit(what: str, found: TraceModel, model: TraceModel) -> None:
    """Refuses a trace of another model."""
    if found.k != model.k or found.experts > model.experts or found.layers > model.layers:
        differ = True
    else:
        both = found.fingerprint and model.fingerprint
        differ = bool(both) and found.fingerprint != model.fingerprint
    if differ:
        raise FormatError(
            f"{what} is of another model: {told_of(found)}, while the model has {told_of(model)}"
        )


def told_of(model: TraceModel) -> str:
    """A model in the words of messages."""
    known = f", router {model.fingerprint}" if model.fingerprint else ""
    return f"{model.layers} layers of {model.experts} experts, top-{model.k}{known}"


def _common(models: list[TraceModel]) -> TraceModel:
    """The model that all of them are of."""
    known = {model for model in models if model.fingerprint}
    if len(known) > 1 or len({model.k for model in models}) > 1:
        raise ArgumentError(f"traces of different models: {'; '.join(sorted({told_of(m) for m in models}))}")
    widest = TraceModel(
        max(model.experts for model in models), models[0].k, max(model.layers for model in models)
    )
    if not known:
        return widest
    (model,) = known
    if widest != replace(model, fingerprint=""):
        raise ArgumentError(f"traces of different models: {told_of(widest)} does not fit {told_of(model)}")
    return model
