from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

class ChoiceError(ValueError): ...
class Run: ...

class Chooser:
    def __init__(self) -> None: ...
    def begin(self, experts: int, slots: int) -> None: ...

class Replay:
    def __init__(
        self,
        step: NDArray[np.int64],
        layer: NDArray[np.int32],
        decode: NDArray[np.bool_],
        ids: NDArray[np.int32],
        layers: Sequence[int],
        experts: int,
    ) -> None: ...
    def run(
        self,
        slots: Sequence[int],
        options: Mapping[str, int],
        admit: int,
        belady: bool,
        hot: Sequence[Sequence[int]],
    ) -> Run: ...
    def replay(
        self, runs: Sequence[Run], threads: int, progress: Callable[[int], None] | None
    ) -> NDArray[np.int64]: ...
    def replay_chosen(self, slots: Sequence[int], policy: Chooser) -> NDArray[np.int64]: ...
    def reuse(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
