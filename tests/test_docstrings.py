"""Every public object is described, and every example in its description runs as printed."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest

import moepool
from moepool.gguf import GGUFFile, expert_layers
from moepool.runner import bundled_model

MODULES = ["moepool"] + [
    f"moepool.{name}"
    for name in (
        *(
            "arrays",
            "cli_simulate",
            "cpu",
            "cuda",
            "errors",
            "ffn",
            "gguf",
            "memory",
            "ops",
            "plan",
            "policy",
        ),
        *("pool", "rates", "simulate", "store", "trace", "tracefile"),
    )
]

# What an example may use without importing it.
NAMES = {
    "np": np,
    "moepool": moepool,
    "Path": Path,
    "GGUFFile": GGUFFile,
    "expert_layers": expert_layers,
    "model_path": bundled_model(),
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(
    name: str, settings_kept: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for test in finder.find(module, extraglobs=NAMES):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def documented() -> list[object]:
    """The public classes and functions, and the public methods and properties of the classes."""
    out: list[object] = []
    for name in moepool.__all__:
        value = getattr(moepool, name)
        if not callable(value):
            continue
        out.append(value)
        if inspect.isclass(value) and value.__module__.startswith("moepool"):
            out += [
                member
                for key, member in vars(value).items()
                if not key.startswith("_") and not isinstance(member, (int, type(None)))
            ]
    return [value for value in out if callable(value) or isinstance(value, (property, classmethod))]


def test_everything_public_is_described() -> None:
    things = documented()
    assert len(things) >= 60
    missing = [thing for thing in things if not inspect.getdoc(thing)]
    assert not missing


@pytest.mark.parametrize(
    "name",
    ["matmul_id", "swiglu", "add", "combine", "memory", "quant_types", "set_pinned_limit", "set_threads"],
)
def test_functions_have_an_example(name: str) -> None:
    assert ">>>" in (getattr(moepool, name).__doc__ or "")
