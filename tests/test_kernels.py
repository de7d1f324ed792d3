"""Kernel sets for one processor each, and the tiles of AMX, against the portable kernels."""

from __future__ import annotations

import numpy as np
import pytest

import moepool
from tests import cases
from tests.support import assert_same, matrix_layer, pick, products, usable_kernels

EXPERTS, ROWS = 2, 45
COLUMNS = {1: 259, 32: 544, 256: 512}

tiles = pytest.mark.parametrize("kernel", ["amx-emulated", "amx"])


def require(kernel: str) -> None:
    if reason := moepool.cpu_kernel_problems().get(kernel):
        pytest.skip(reason)


@tiles
@pytest.mark.parametrize("qtype", cases.TYPES)
def test_tiles_for_any_number_of_activations(qtype: str, kernel: str) -> None:
    """One tile of activations, two, and those that are not full; wild scales, NaN and infinity among them."""
    require(kernel)
    columns = COLUMNS[cases.LAYOUTS[qtype].block]
    for make, kind in ((cases.tame_blocks, "plain"), (cases.raw_blocks, "special")):
        blocks = make(qtype, EXPERTS * ROWS, columns, "tiles").reshape(EXPERTS, ROWS, -1)
        layer = matrix_layer(qtype, blocks)
        x = cases.activations(kind, 70, columns, "tiles")
        table = products(layer, x)
        with moepool.use_cpu_kernel(kernel), moepool.Pool(layer, 0) as pool:
            for tokens in (*range(1, 35), 48, 70):
                ids = np.ones((tokens, 1), np.int32)
                y = moepool.matmul_id(x[:tokens], ids, pool)
                assert_same(y, pick(table[:tokens], ids), f"{qtype}, {tokens} tokens, {kernel}")


def test_what_a_machine_lacks_is_said() -> None:
    kernels, problems = moepool.cpu_kernels(), moepool.cpu_kernel_problems()
    assert [name for name, usable in kernels.items() if not usable] == list(problems)
    for name, reason in problems.items():
        assert reason.startswith(("this processor lacks ", "the system does not ")), reason
        with pytest.raises(moepool.UnsupportedError, match=f'kernel set "{name}": {reason}'):
            moepool.use_cpu_kernel(name)


def test_emulation_is_never_the_default() -> None:
    with moepool.use_cpu_kernel(None) as choice:
        assert choice.name == usable_kernels()[-1]
        assert choice.name != "amx-emulated"
