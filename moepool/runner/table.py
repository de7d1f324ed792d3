"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]], left: Iterable[int] = (0,)) -> str:
    """Columns two spaces apart, right-aligned except the `left` ones; the header underlined.

    Examples
    --------
    >>> print(format_table(["name", "MB"], [["gate", 1.5], ["down", 12.25]]))
    name     MB
    ----  -----
    gate    1.5
    down  12.25
    """
    lines = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    lefts = set(left)
    aligned = (
        "  ".join(
            c.ljust(w) if i in lefts else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)
