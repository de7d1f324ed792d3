"""Writes the golden vectors from the executable specification: ``python -m tests.golden.make [type ...]``.

Takes a minute or two. No kernel has a part in it.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import cases, golden, spec


def bits(array: NDArray[Any]) -> Any:
    """A float32 array as nested lists of bits."""
    return array.view(np.uint32).tolist()


def places(x: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """The row of every place, (T, k, K): x (T, K) is shared by a token's places."""
    return np.ascontiguousarray(np.broadcast_to(x[:, None], (len(x), k, x.shape[1]))) if x.ndim == 2 else x


def rows_of(weight: NDArray[np.uint8]) -> list[list[bytes]]:
    """Raw blocks (E, N, row_bytes) as rows of bytes."""
    return [[row.tobytes() for row in expert] for expert in weight]


def floats(values: Any) -> NDArray[np.float32]:
    """Nested lists of bits as a float32 array."""
    return np.array(values, np.uint32).view(np.float32)


def matmul_id(
    qtype: str,
    weight: NDArray[np.uint8],
    x: NDArray[np.float32],
    ids: NDArray[np.int32],
    scale: NDArray[np.float32] | None = None,
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The specification's ``matmul_id`` on arrays: x (T, K) or (T, k, K), result (T, k, N)."""
    out = spec.matmul_id(
        qtype,
        rows_of(weight),
        bits(places(x, ids.shape[1])),
        ids.tolist(),
        None if scale is None else bits(scale),
        None if bias is None else bits(bias),
    )
    return floats(out)


def swiglu(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """The specification's swiglu on arrays of one shape."""
    pairs = zip(bits(gate.reshape(-1)), bits(up.reshape(-1)), strict=True)
    return floats([spec.swiglu(g, u) for g, u in pairs]).reshape(gate.shape)


def combine(
    rows: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The specification's combine: rows (T, k, N), ids and weights (T, k), result (T, N)."""
    tokens = zip(bits(rows), ids.tolist(), bits(weights), strict=True)
    return floats([spec.combine(*token) for token in tokens])


def layer(ffn: cases.Ffn, tokens: int) -> NDArray[np.float32]:
    """The specification's whole layer."""
    weights, x, ids = ffn.weights(), ffn.x(tokens), ffn.ids(tokens, "repeats")
    gate = matmul_id(ffn.gate, weights["gate"], x, ids)
    up = matmul_id(ffn.up, weights["up"], x, ids)
    down = matmul_id(ffn.down, weights["down"], swiglu(gate, up), ids)
    return combine(down, ids, ffn.router(tokens))


def type_vectors(qtype: str) -> dict[str, Any]:
    """All vectors of a weight type."""
    vectors = {}
    for name in golden.VECTORS:
        case = cases.find(f"{qtype}/{name}")
        out = matmul_id(qtype, case.weight(), case.x(), case.ids(), case.scale(), case.bias())
        vectors[case.name] = golden.describe(golden.case_inputs(case), out)
    return vectors


def op_vectors() -> dict[str, Any]:
    """The vectors of swiglu, combine and whole layers."""
    gate_up, combined = golden.swiglu_inputs(), golden.combine_inputs()
    vectors = {
        "swiglu": golden.describe(golden.digest(*gate_up), swiglu(*gate_up)),
        "combine": golden.describe(golden.digest(*combined), combine(*combined)),
    }
    for ffn in cases.FFNS:
        tokens = golden.LAYERS[ffn.name]
        vectors[f"layer/{ffn.name}"] = golden.describe(golden.layer_inputs(ffn, tokens), layer(ffn, tokens))
    return vectors


def write(name: str) -> str:
    """Writes one file and says how long it took."""
    start = time.perf_counter()
    vectors = op_vectors() if name == "ops" else type_vectors(name)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(vector)}" for key, vector in vectors.items())
    (golden.FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
    return f"{name}: {len(vectors)} vectors, {time.perf_counter() - start:.1f} s"


def main() -> None:
    """Writes the files named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="type", help='types such as "q4_k", or "ops"; default: all'
    )
    names = parser.parse_args().names or [*cases.TYPES, "ops"]
    with ProcessPoolExecutor() as processes:
        for line in processes.map(write, names):
            print(line, flush=True)


if __name__ == "__main__":
    main()
