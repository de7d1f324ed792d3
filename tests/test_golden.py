"""Every kernel set and every device is held to the golden vectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import cases, golden
from tests.backends import BACKENDS, Backend

backends = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def check(vector: dict[str, Any], inputs: str, out: Any) -> None:
    """Fails with the words that were expected if the output is another one."""
    assert vector["inputs"] == inputs, "the case itself has changed: python -m tests.golden.make"
    assert list(out.shape) == vector["shape"]
    assert golden.words(out) == vector["words"]
    assert golden.digest(out) == vector["output"], "the first words agree, later ones do not"


@backends
@pytest.mark.parametrize("name", golden.VECTORS)
@pytest.mark.parametrize("qtype", cases.TYPES)
def test_matmul_id(qtype: str, name: str, backend: Backend) -> None:
    """Each type: special values, a short last chunk, scale, bias, skips, repeats."""
    case = cases.find(f"{qtype}/{name}")
    out = backend.matmul_id(qtype, case.weight(), case.x(), case.ids(), case.scale(), case.bias())
    check(golden.load(qtype)[case.name], golden.case_inputs(case), out)


@backends
def test_swiglu(backend: Backend) -> None:
    """Usual values, both limits of E, and every kind of float32."""
    inputs = golden.swiglu_inputs()
    check(golden.load("ops")["swiglu"], golden.digest(*inputs), backend.swiglu(*inputs))


@backends
def test_combine(backend: Backend) -> None:
    """NaN weights beside skips, and special rows."""
    inputs = golden.combine_inputs()
    check(golden.load("ops")["combine"], golden.digest(*inputs), backend.combine(*inputs, experts=6))


@backends
@pytest.mark.parametrize("ffn", cases.FFNS, ids=lambda ffn: ffn.name)
def test_layer(ffn: cases.Ffn, backend: Backend) -> None:
    """Whole layers, with matrices of different types."""
    tokens = golden.LAYERS[ffn.name]
    out = backend.layer(ffn, ffn.x(tokens), ffn.ids(tokens, "repeats"), ffn.router(tokens))
    check(golden.load("ops")[f"layer/{ffn.name}"], golden.layer_inputs(ffn, tokens), out)


def test_every_vector_is_held_to() -> None:
    """No file and no vector that the tests above do not look at."""
    files = {path.stem: json.loads(path.read_text()) for path in golden.FOLDER.glob("*.json")}
    assert set(files) == {*cases.TYPES, "ops"}
    for qtype in cases.TYPES:
        assert set(files[qtype]) == {f"{qtype}/{name}" for name in golden.VECTORS}
    assert set(files["ops"]) == {"swiglu", "combine", *(f"layer/{ffn.name}" for ffn in cases.FFNS)}


def test_vectors_cover_what_they_promise() -> None:
    """The special inputs are there, and not every output is a NaN."""
    for qtype in cases.TYPES:
        picked = [cases.find(f"{qtype}/{name}") for name in golden.VECTORS]
        assert any(case.scale() is not None for case in picked)
        assert any(case.bias() is not None for case in picked)
        assert any((case.ids() < 0).any() for case in picked)
        assert any(len(set(row)) < len(row) for case in picked for row in case.ids().tolist())
        special = {trouble for case in picked if case.x_kind == "special" for trouble in troubles(case)}
        assert special == set(cases.SPECIALS)
        if cases.LAYOUTS[qtype].block < 256:
            assert any(case.columns % 256 for case in picked)
        words = {word for vector in golden.load(qtype).values() for word in vector["words"]}
        assert len(words - {"7fffffff", "7f800000", "ff800000"}) > 20


def troubles(case: cases.Case) -> set[str]:
    """The special rows of a case that are computed: those of places that are not skipped."""
    ids = case.ids()
    rows = range(ids.size) if case.shape.per_place else [row for row in range(len(ids)) for _ in ids[row]]
    return {
        cases.SPECIALS[row % len(cases.SPECIALS)]
        for row, expert in zip(rows, ids.reshape(-1), strict=True)
        if expert >= 0
    }
