"""Golden vectors: what the executable specification gives for cases of the table, as hashes.

One JSON file a weight type, and ``ops.json`` for swiglu, combine and whole layers. Each vector holds a hash
of its inputs, so that a changed table is told from changed arithmetic; the hash of its output's bits; and the
first words of the output that are not +0, to look at. ``python -m tests.golden.make`` writes them from
`tests.spec` alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import cases

FOLDER = Path(__file__).parent

# shape/ids/x of each type's vectors: NaN, infinities, subnormals, -0 and the other SPECIALS in "special"; a
# short last chunk in all but "row" (of the types that can end in one); scale in "short" and "place", bias in
# "row", "place" and "wide"; skips in "some", repeats in "repeats".
VECTORS = (
    "one/plain/plain",
    "row/plain/plain",
    "short/repeats/plain",
    "place/some/special",
    "wide/plain/plain",
    "more/plain/special",
)
# Gates (bits) at which silu changes if the last bit of one of E's constants does: log2(e), ln 2, then the
# coefficients of r^6 to r^2, two for the neighbour below and two for that above. Then E's limits from both
# sides.
SENSITIVE = (
    *(0xC27DB11F, 0xC28B5295, 0xC25F3182, 0xC249033F),
    *(0xBFEE8C2F, 0xC0130453, 0xC27C071B, 0xC08A938C),
    *(0xC27AF217, 0xC267B52D, 0xC25C7EF8, 0xC1DA4DA7),
    *(0xC29C2CF1, 0xC158EB36, 0xC0D22D95, 0xC18C82CD),
    *(0xC25475BA, 0xC21CAF86, 0xC139523E, 0xC1BFB1F0),
    *(0xC208CBD9, 0xC29EC8D6, 0xC2924F76, 0xC211B713),
    *(0xC1CF6D55, 0xC2A9474A, 0xC29BFD77, 0x402028A1),
    *(0xC2B17217, 0xC2B17218, 0x42AEAC4F, 0x42AEAC50),
)
LAYERS = {"small": 1, "mixed": 2, "odd": 4}  # tokens of each layer's vector


def digest(*arrays: NDArray[Any] | None) -> str:
    """SHA-256 over the bytes of arrays in C order, with their shapes; None counts as a mark of its own."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(repr(None if array is None else array.shape).encode())
        if array is not None:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            sha.update(np.ascontiguousarray(little).tobytes())
    return sha.hexdigest()


def words(out: NDArray[Any], count: int = 8) -> list[str]:
    """The first `count` words of float32 bits that are not +0, in hexadecimal."""
    flat = out.reshape(-1).view(np.uint32)
    return [f"{word:08x}" for word in flat[flat != 0][:count]]


def describe(inputs: str, out: NDArray[Any]) -> dict[str, Any]:
    """A vector: the digest of the inputs, the output's shape, digest and first words."""
    return {"inputs": inputs, "shape": list(out.shape), "output": digest(out), "words": words(out)}


def load(name: str) -> dict[str, dict[str, Any]]:
    """The vectors of ``<name>.json`` by the name of their case."""
    vectors: dict[str, dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return vectors


def case_inputs(case: cases.Case) -> str:
    """Digest of all that goes into a case of ``matmul_id``."""
    return digest(case.weight(), case.x(), case.ids(), case.scale(), case.bias())


def layer_inputs(layer: cases.Ffn, tokens: int) -> str:
    """Digest of all that goes into a whole layer."""
    weights = layer.weights()
    parts = [weights[part] for part in ("gate", "up", "down")]
    return digest(*parts, layer.x(tokens), layer.ids(tokens, "repeats"), layer.router(tokens))


def swiglu_inputs() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Gate and up values (4096,): usual ones, around both limits of E, and every kind of float32."""
    stream = cases.Stream("swiglu")
    count = 4096
    usual = (stream.bell((2, count)) * 6).astype(np.float32).view(np.uint32)
    anything = stream.words((2, count))
    limit = np.array([0x42B17217, 0xC2AEAC4F, 0xC2B17217, 0x42AEAC4F], np.uint32)[stream.below(4, count)]
    edges = np.array(
        [
            0,
            1,
            0x007FFFFF,
            0x00800000,
            0x3F800000,
            0x7F7FFFFF,
            0x7F800000,
            0x7F800001,
            0x7FC00000,
            0x7FFFFFFF,
        ],
        np.uint32,
    )
    edge = edges[stream.below(len(edges), (2, count))] | stream.below(2, (2, count)).astype(
        np.uint32
    ) << np.uint32(31)
    kind = stream.below(8, count)
    near = limit + stream.below(9, count).astype(np.uint32) - np.uint32(4)
    gate = np.select([kind < 4, kind < 5, kind < 6], [usual[0], near, edge[0]], anything[0])
    up = np.select([kind < 5, kind < 6], [usual[1], edge[1]], anything[1])
    gate[: len(SENSITIVE)], up[: len(SENSITIVE)] = SENSITIVE, 0x3F800000
    return gate.astype(np.uint32).view(np.float32), up.astype(np.uint32).view(np.float32)


def combine_inputs() -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Place rows (8, 4, 96), ids (8, 4) with skips, weights (8, 4) with a NaN beside every skip."""
    tokens, k, columns = 8, 4, 96
    rows = cases.activations("special", tokens * k, columns, "combine").reshape(tokens, k, columns)
    ids = cases.expert_ids("some", tokens, k, 6, "combine")
    weights = np.where(ids < 0, np.float32("nan"), cases.router_weights(tokens, k, "combine"))
    weights[-1] = [0.0, -0.0, np.inf, -1.0]
    return rows, ids, weights.astype(np.float32)
