"""How long does it take here? Contenders side by side, and what the machine can do at best.

Times on a machine with other work vary more than what is compared. What they share is
taken out: all contenders run in one process, round by round in shuffled order, and two
are compared by the median of the ratios of their rounds. With one thread the clock is
the CPU time of that thread, which does not run while another program has the core.
"""

import gc
import os
import platform
import random
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3_teach.errors import InputError

SAMPLE = 2e-3       # seconds that a clock reading covers at least; short calls are repeated


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Median and quartiles of at least one number."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 \
        else values * 3
    return Spread(statistics.median(values), low, high)


@dataclass(frozen=True)
class Race:
    """Seconds of one call for every contender, round by round.

    A slow one may have left early, after three rounds or more, so its list is shorter;
    rounds still stand side by side. `clock` says what was read.
    """

    times: dict[str, list[float]]
    clock: str

    def seconds(self, name: str) -> Spread:
        return spread(self.times[name])

    def ratio(self, slow: str, fast: str) -> Spread:
        """How many times as long `slow` takes, from the rounds that both have run."""
        rounds = zip(self.times[slow], self.times[fast])
        return spread([a / b for a, b in rounds])


def race(contenders: dict[str, Callable], rounds: int = 15, seconds: float = 3.0,
         threads: int = 1, seed: int = 0, clock: Callable[[], float] | None = None) -> Race:
    """Time the functions of `contenders`, which take no arguments, against each other.

    Each is called beforehand, which warms it up and shows how many calls a reading of
    the clock should cover. Then come at most `rounds` rounds, in an order that `seed`
    shuffles. A contender leaves when it has used its share of `seconds`, after three
    rounds at the earliest, however long they take. `clock` None: the CPU time of this thread when
    `threads` is 1, else wall time. InputError for no contender, and for numbers below 1
    (`rounds`, `threads`) or not above 0 (`seconds`).
    """
    if not contenders or rounds < 1 or threads < 1 or not seconds > 0:
        raise InputError(f"{len(contenders)} contenders, rounds {rounds}, threads {threads}, "
                         f"seconds {seconds}; need one or more of each, and seconds above 0")
    name = "given" if clock else "CPU time of the thread" if threads == 1 else "wall time"
    clock = clock or (time.thread_time if threads == 1 else time.perf_counter)
    order, share = random.Random(seed), seconds / len(contenders)
    times, used = {who: [] for who in contenders}, dict.fromkeys(contenders, 0.0)
    with _quiet(threads):
        repeats = {who: _warm_up(call, clock) for who, call in contenders.items()}
        racing = list(contenders)
        for _ in range(rounds):
            order.shuffle(racing)
            for who in racing:
                taken = _time(contenders[who], repeats[who], clock)
                times[who].append(taken)
                used[who] += taken * repeats[who]
            racing = [who for who in racing if len(times[who]) < 3 or used[who] < share]
    return Race(times, name)


def _time(call: Callable, repeats: int, clock: Callable[[], float]) -> float:
    """Seconds of one call, the mean of `repeats`."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _warm_up(call: Callable, clock: Callable[[], float]) -> int:
    """Call, and find how many calls last long enough for the clock."""
    least = max(SAMPLE, 20 * time.get_clock_info("thread_time").resolution)
    repeats = 1
    if _time(call, 1, clock) < 4 * least:       # if not, the first call was warm enough
        while repeats < 1024 and _time(call, repeats, clock) * repeats < least / 2:
            repeats *= 4
    return repeats


@contextmanager
def _quiet(threads: int):
    """So many threads, and no garbage collection, inside."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    gc.collect()
    gc.disable()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


# --- memory ---------------------------------------------------------------------------

def peak_memory(call: Callable) -> int:
    """Most bytes that tensors made by `call` held at once, its result included.

    Every operation's outputs are counted from their making to their end, in a backward
    pass too. What was there before is not counted, nor what one operation needs for
    itself while it runs.
    """
    with _Ledger() as ledger:
        result = call()
    del result
    return ledger.peak


class _Ledger(TorchDispatchMode):
    """Bytes of the storages that have come into being and are not yet gone."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self._note((args, kwargs), is_new=False)
        out = operation(*args, **(kwargs or {}))
        self._note(out, is_new=True)
        return out

    def _note(self, values, is_new: bool) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self.known:
                storage = x.untyped_storage()
                size = storage.nbytes() if is_new else 0
                self.known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


# --- the floors -----------------------------------------------------------------------

def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 1024, threads: int = 1
                ) -> float:
    """FLOP/s of a square matrix product: what arithmetic is measured against."""
    a, b = torch.ones(2, size, size, dtype=dtype)
    out = torch.empty_like(a)
    taken = race({"mm": lambda: torch.mm(a, b, out=out)}, seconds=0.5, threads=threads)
    return 2 * size ** 3 / taken.seconds("mm").median


def copy_bandwidth(nbytes: int = 1 << 28, threads: int = 1) -> float:
    """Bytes per second of a copy of `nbytes` bytes, counted twice: read and written.

    What fits into a cache is copied faster, so take the size of what is compared.
    """
    source = torch.ones(max(nbytes // 4, 1))
    target = torch.ones_like(source)
    taken = race({"copy": lambda: target.copy_(source)}, seconds=0.5, threads=threads)
    return 2 * 4 * source.numel() / taken.seconds("copy").median


# --- the machine ----------------------------------------------------------------------

def machine(threads: int = 1) -> dict[str, str | int]:
    """What a time depends on: the processor and the versions; no name, no path."""
    out = {"processor": _processor(), "cores": os.cpu_count() or 0, "threads": threads,
           "caches": _caches(), "memory_GB": _memory(), "system": _system(),
           "python": platform.python_version(), "torch": torch.__version__,
           "instructions": torch.backends.cpu.get_cpu_capability(),
           "BLAS": "MKL" if torch.backends.mkl.is_available() else "not MKL"}
    if torch.cuda.is_available():
        out["GPU"] = torch.cuda.get_device_name()
    return {name: value for name, value in out.items() if value}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _caches() -> str:
    """Sizes of the caches of one core, where Linux tells: "L1 32K, L2 1024K"."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / n).read_text().strip() for n in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


def _memory() -> int:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9)


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"
