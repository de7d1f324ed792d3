"""How fast this machine reads experts, from wherever they lie, and what a simulated run would take on it."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from moepool import arrays
from moepool.checks import count
from moepool.cpu import get_threads
from moepool.errors import ArgumentError, FormatError
from moepool.ffn import ExpertFFN
from moepool.pool import Pool
from moepool.simulate import Simulation, SimulationRun
from moepool.store import ExpertStore

__all__ = ["Rates", "measure_rates", "rates_path"]

_HIDDEN, _WIDTH, _EXPERTS, _K = 2048, 768, 64, 8
_QTYPE, _BLOCK, _BLOCK_BYTES = "q4_k", 256, 144
_CALLS = 32
_SECONDS = 0.25
_RUNS = 3


def rates_path() -> Path:
    """Where `moepool doctor --measure` puts what it measured: in `$XDG_CACHE_HOME`, or else in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "moepool" / "rates.json"


@dataclass(frozen=True)
class Rates:
    """What reading experts takes on a machine, in seconds and bytes a second.

    Attributes
    ----------
    device : str
        "cpu", or the CUDA device that the other figures are of.
    host : float
        Bytes of experts that the CPU computes with, a second.
    host_layer : float
        Seconds that a layer on the CPU takes besides that.
    memory, link : float or None
        Bytes that the device reads from its slots, and over the link, a second; None without a GPU.
    layer : float or None
        Seconds that a layer on the device takes besides that.
    threads : int
        CPU threads it was measured with.
    card : str
        What the device is.
    spread : float
        By what share the slowest of several measurements took longer than the fastest, which is kept: more
        than a tenth tells of a machine that was busy.

    Examples
    --------
    >>> rates = Rates("cuda:0", host=80e9, host_layer=10e-6, memory=3e12, link=50e9, layer=10e-6)
    >>> f"{1e6 * rates.layer_seconds('stream', 20e6, 1e6):.0f} us"
    '37 us'
    """

    device: str
    host: float
    host_layer: float
    memory: float | None = None
    link: float | None = None
    layer: float | None = None
    threads: int = 0
    card: str = ""
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("host", "host_layer", "memory", "link", "layer"):
            value = getattr(self, name)
            if value is None and name in ("memory", "link", "layer"):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ArgumentError(f"{name} is {value!r}; it must be a number above 0")
        if not isinstance(self.spread, int | float) or not 0 <= self.spread < float("inf"):
            raise ArgumentError(f"spread is {self.spread!r}; it must be a number from 0 on")
        count("threads", self.threads)
        for name in ("device", "card"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be a string")

    def layer_seconds(self, miss: str, hit: float, missed: float, filled: float = 0.0) -> float:
        """What a layer of a token takes.

        Parameters
        ----------
        miss : {"stream", "host", "cpu"}
            Who computes what is not in a slot: the device, reading it over the link, or the CPU. "cpu": the
            CPU computes everything.
        hit, missed : float
            Bytes of records read from slots, and of those that no slot holds.
        filled : float
            Bytes copied into slots for later steps, where the CPU computes what is missed.

        Raises
        ------
        ArgumentError
            The device has no rates for it: there is no GPU.
        """
        if miss == "cpu":
            return self.host_layer + (hit + missed) / self.host
        if self.memory is None or self.link is None or self.layer is None:
            raise ArgumentError(f"no rates of a GPU for miss={miss!r}: they were measured on {self.device}")
        device = self.layer + hit / self.memory
        if miss == "stream":
            return device + missed / self.link
        cold = missed / self.host + (self.host_layer if missed else 0.0)
        return device + max(cold, filled / self.link)

    def run_seconds(self, run: SimulationRun, miss: str) -> float:
        """What the experts of a decoded token take under a simulated policy.

        Raises
        ------
        ArgumentError
            The run knows no record bytes or no decoded token; or as :meth:`layer_seconds`.
        """
        if run.record_bytes is None or not run.tokens:
            raise ArgumentError(
                "seconds need the bytes of a record (give the model) and rows of decode steps"
            )
        return sum(
            self.layer_seconds(
                miss,
                hits * record / run.tokens,
                misses * record / run.tokens,
                admitted * record / run.tokens,
            )
            for hits, misses, admitted, record in zip(
                *(run.by_layer[name].tolist() for name in ("hits", "misses", "admitted")),
                run.record_bytes,
                strict=True,
            )
        )

    def best(self, run: SimulationRun) -> tuple[str, float]:
        """The better way to serve a run's misses, and the seconds of a token."""
        ways = ("cpu",) if self.memory is None else ("stream", "host")
        return min(((miss, self.run_seconds(run, miss)) for miss in ways), key=lambda pair: pair[1])

    def without_pool(self, run: SimulationRun) -> tuple[str, float]:
        """The same of a pool without slots: "cpu" where the CPU computes everything."""
        ways = {"cpu": self.run_seconds(run, "cpu")}
        if self.memory is not None:
            nothing = {name: np.zeros_like(values) for name, values in run.by_layer.items()}
            nothing["misses"] = run.by_layer["hits"] + run.by_layer["misses"]
            bare = SimulationRun("none", True, (0,) * len(run.slots), nothing, run.record_bytes, run.tokens)
            ways["stream"] = self.run_seconds(bare, "stream")
        return min(ways.items(), key=lambda pair: pair[1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, and the folder that it is in."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rates:
        """Reads what :meth:`save` wrote.

        Raises
        ------
        FormatError
            It is not that.
        ArgumentError
            It cannot be read.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ArgumentError(f"rates {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            values = None
        names = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or not {"device", "host", "host_layer"} <= set(values) <= set(names):
            raise FormatError(f"rates {path}: expected an object of {', '.join(names)}")
        try:
            return cls(**values)
        except ArgumentError as error:
            raise FormatError(f"rates {path}: {error}") from None


def measure_rates(device: str = "cpu") -> Rates:
    """Measures this machine, in a few seconds, with a layer of the shape of Qwen3-30B-A3B in Q4_K.

    Parameters
    ----------
    device : str
        "cpu", or a CUDA device; its figures come from CUDA graphs of layers and need CuPy.

    Returns
    -------
    Rates

    Raises
    ------
    UnsupportedError
        There is no such device, or no CuPy.
    """
    rows = {"gate": (_WIDTH, _HIDDEN), "up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}
    # Weights of zero take as long as others do: no kernel leaves a block out.
    blocks = {
        name: np.zeros((_EXPERTS, n, columns // _BLOCK * _BLOCK_BYTES), np.uint8)
        for name, (n, columns) in rows.items()
    }
    with ExpertStore.from_arrays(
        gate=blocks["gate"], up=blocks["up"], down=blocks["down"], qtype=_QTYPE, progress=False
    ) as store:
        with Pool(store[0], slots=0, miss="host") as pool:
            host, host_layer, spread = _line(store[0].record_bytes, lambda k: _host_seconds(pool, k))
        if arrays.device_index(device) == arrays.CPU:
            return Rates("cpu", host, host_layer, threads=get_threads(), spread=spread)
        from moepool.runner.devices import import_cupy

        cupy = import_cupy(device)
        index = arrays.device_index(device)
        card = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        with cupy.cuda.Device(index):
            hot = list(range(_EXPERTS))
            with Pool(store[0], _EXPERTS, device=device, policy="static", hot=hot) as pool:
                memory, layer, of_memory = _line(
                    store[0].record_bytes, lambda k: _device_seconds(cupy, pool, k)
                )
            with Pool(store[0], 0, device=device) as pool:
                link, _, of_link = _line(store[0].record_bytes, lambda k: _device_seconds(cupy, pool, k))
    spread = max(spread, of_memory, of_link)
    return Rates(device, host, host_layer, memory, link, layer, get_threads(), card, spread)


def _line(record: int, seconds: Callable[[int], float]) -> tuple[float, float, float]:
    """Bytes a second and the seconds of no bytes, from the times of one expert and of eight; and how much the
    latter differ. What else a machine does only makes them longer: the shortest count."""
    runs = [(seconds(1), seconds(_K)) for _ in range(_RUNS)]
    one, many = (min(times) for times in zip(*runs, strict=True))
    spread = max(times for _, times in runs) / many - 1
    # A clock that is too coarse, or a machine that is too busy, must not give a negative rate.
    slope = max(many - one, many * 0.1) / (_K - 1)
    return record / slope, max(one - slope, 1e-7), spread


def _ids(k: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Ids (calls, 1, k), distinct in a call, so that no cache serves them."""
    order = np.random.default_rng(0).permuted(np.tile(np.arange(_EXPERTS), (_CALLS, 1)), axis=1)
    return np.ascontiguousarray(order[:, None, :k], np.int32)


def _median(call: Callable[[], float]) -> float:
    samples: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(samples) < 5 or time.perf_counter() < end:
        samples.append(call())
    return statistics.median(samples)


def _host_seconds(pool: Pool, k: int) -> float:
    """Of a layer on the CPU."""
    ffn, ids = ExpertFFN(pool), _ids(k)
    x, weights = np.ones((1, _HIDDEN), np.float32), np.ones((1, k), np.float32)

    def once() -> float:
        started = time.perf_counter()
        for each in ids:
            ffn(x, each, weights)
        return (time.perf_counter() - started) / len(ids)

    once()
    return _median(once)


def _device_seconds(cupy: Any, pool: Pool, k: int) -> float:
    """Of a layer in a CUDA graph."""
    ffn = ExpertFFN(pool)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ids = cupy.asarray(_ids(k))
        x, weights = cupy.ones((1, _HIDDEN), cupy.float32), cupy.ones((1, k), cupy.float32)
        out = cupy.empty_like(x)

        def layers() -> None:
            for each in ids:
                ffn(x, each, weights, out=out)

        layers()
        stream.synchronize()
        stream.begin_capture()
        layers()
        graph = stream.end_capture()

        def once() -> float:
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(stream)
            graph.launch(stream)
            last.record(stream)
            last.synchronize()
            return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3 / len(ids)

        once()
        return _median(once)


# --------------------------------------------------------------------------------------------------- in words


def verdict(simulation: Simulation, rates: Rates | None) -> str:
    """Whether a pool is worth it, with how many slots and by which policy, in a few sentences.

    Parameters
    ----------
    simulation : Simulation
        Only policies that do not know the future are recommended.
    rates : Rates or None
        Of the machine; without them the verdict is about hits and bytes.
    """
    runs = [run for run in simulation.runs if run.attainable and max(run.slots) > 0 and run.tokens]
    if not runs:
        return "No verdict: no policy that could be used was simulated with slots on decode steps."
    if rates is None or runs[0].record_bytes is None:
        remedy = (
            "For times and a verdict measure this machine: moepool doctor --measure."
            if rates is None
            else "For times and a verdict give the model, whose experts say how many bytes they have."
        )
        return f"{_verdict_of_hits(simulation, runs)} {remedy}"
    if rates.memory is None:
        way, seconds = rates.without_pool(runs[0])
        return (
            f"No pool pays on this machine: it has no GPU, and the CPU computes from the same memory with or "
            f"without slots. Measured with {rates.threads} thread{'s' * (rates.threads != 1)}, it would take "
            f"{1e3 * seconds:.2f} ms a token for the experts. " + _verdict_of_hits(simulation, runs)
        )
    way, without = rates.without_pool(runs[0])
    who = "on the CPU" if way == "cpu" else "over the link"
    costs = {id(run): rates.best(run) for run in runs}
    fastest = min(runs, key=lambda run: costs[id(run)][1])
    # Slots that bring little are left to others: the fewest within a twentieth of the best.
    enough = min(
        (run for run in runs if costs[id(run)][1] <= 1.05 * costs[id(fastest)][1]),
        key=lambda run: (sum(run.slots), costs[id(run)][1]),
    )
    miss, seconds = costs[id(enough)]
    if seconds > 0.95 * without:
        return (
            f"Not worth a pool: without slots, {who}, the experts take {1e3 * without:.2f} ms a token, and "
            f"at best {1e3 * costs[id(fastest)][1]:.2f} ms with {_slots(fastest)} slots under "
            f"{fastest.policy}."
        )
    return (
        f"A pool is worth it: {_slots(enough)} slots a layer under {enough.policy}, miss={miss!r}, serve "
        f"{100 * enough.hit_rate:.1f} % of the experts wanted; the experts take about {1e3 * seconds:.2f} ms "
        f"a token, {without / seconds:.1f} times as fast as without slots ({who}, {1e3 * without:.2f} ms). "
        + _more(enough, fastest, costs[id(fastest)][1])
    )


def _more(enough: SimulationRun, fastest: SimulationRun, seconds: float) -> str:
    if fastest is enough:
        return "It is the fastest of those simulated."
    return f"{_slots(fastest)} under {fastest.policy} would take {1e3 * seconds:.2f} ms."


def _verdict_of_hits(simulation: Simulation, runs: list[SimulationRun]) -> str:
    parts = []
    for slots in sorted({run.slots for run in runs}, key=sum):
        best = max((run for run in runs if run.slots == slots), key=lambda run: run.hit_rate)
        bound = [run for run in simulation.runs if run.policy == "belady" and run.slots == slots]
        of = f" of at most {100 * bound[0].hit_rate:.1f}" if bound else ""
        parts.append(f"{_slots(best)} slots: {best.policy} hits {100 * best.hit_rate:.1f}{of} %")
    return "By hits alone: " + "; ".join(parts) + "."


def _slots(run: SimulationRun) -> str:
    low, high = min(run.slots), max(run.slots)
    return str(low) if low == high else f"{low} to {high}"
