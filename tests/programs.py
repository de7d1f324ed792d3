"""Running other programs from a test."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Stdout of a command that has to succeed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, cwd=cwd, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def compile_for_host(program: Path, *sources: Path) -> None:
    """Compiles device code for the host, with the stand-ins of tests/native for what a GPU has."""
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    folders = (ROOT / "tests" / "native", ROOT / "csrc", ROOT / "include")
    run("g++", *flags, *(f"-I{folder}" for folder in folders), *sources, "-o", program)
