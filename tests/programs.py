"""Running other programs from a test."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Stdout of a command that has to succeed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, cwd=cwd, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
