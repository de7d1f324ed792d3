"""Files that lie beside the repository and not in it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """Path of a file of ../shared; skips the test where there is none."""
    path = SHARED.joinpath(*parts)
    if not path.is_file():
        pytest.skip(f"the test models are not here (shared/{'/'.join(parts)}, beside the repository)")
    return path


def text(name: str) -> str:
    """A text of ../shared/text, line ends as they are."""
    return shared("text", name).read_bytes().decode("utf-8")
