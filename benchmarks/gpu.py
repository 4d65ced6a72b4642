"""What a GPU makes of it: `python -m benchmarks.gpu` prints one table in under ten minutes.

K3's own sizes in bfloat16: the operators, one KDA and one MLA mixer, prefill and single
tokens, against the measured rate of a matrix product and the measured bandwidth of a
copy. What does not fit or is not installed is a row that says so. See GPU.md beside this
file. `--device cpu --quick` runs all rows at toy size, to try the script itself.
"""

import argparse
import gc
import signal
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import k3_teach as k3
from benchmarks.gpu_rows import rows
from benchmarks.gpu_work import QUICK, Refused, Row, Sizes
from k3_teach.scale.measure import machine

TOTAL, ROW, SHARE = 500, 90, 1.0    # seconds: no row starts later, a row at most, its times
FLUSH = 1 << 28                     # bytes that push everything else out of the caches
HEAD = ("what", "GPU ms", "call ms", "TFLOP/s", "%", "GB/s", "%", "peak GB", "error", "note")
WIDTHS = (54, 9, 9, 8, 4, 7, 4, 8, 8, 4)


@dataclass
class Floors:
    """What the device reaches at best, in FLOP/s and bytes/s."""

    matmul: float
    copy: float


class Clock:
    """Two times of a call: between events on the GPU, and as a loop of calls sees it.

    Before every call that events time, the caches are overwritten: the state of one of
    K3's layers fits into the L2 cache, but in a model 68 others pass between two visits.
    """

    def __init__(self, device: torch.device, share: float = SHARE):
        self.device, self.on_gpu, self.share = device, device.type == "cuda", share
        self.junk = torch.empty(FLUSH if self.on_gpu else 1, dtype=torch.uint8, device=device)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call) -> tuple[float, float]:
        """Median between events, and mean of a loop, of a call that has been made before."""
        once = self._loop(call, 1)
        repeats = max(1, min(50, int(self.share / 2 / once)))
        looped = self._loop(call, repeats)
        return (self._events(call, repeats) if self.on_gpu else looped), looped

    def _loop(self, call, repeats: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def _events(self, call, repeats: int) -> float:
        marks = []
        for _ in range(repeats):
            self.junk.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            marks.append((start, end))
        self.wait()
        return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def measure_floors(clock: Clock, quick: bool) -> Floors:
    size, nbytes = (64, 1 << 12) if quick else (8192, 1 << 30)
    a, b = torch.randn(2, size, size, device=clock.device, dtype=torch.bfloat16)
    source = torch.ones(nbytes, device=clock.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    (a @ b, target.copy_(source))
    return Floors(2 * size ** 3 / clock.seconds(lambda: a @ b)[0],
                  2 * nbytes / clock.seconds(lambda: target.copy_(source))[0])


@contextmanager
def limit(seconds: int):
    """TimeoutError after so long, where the system can (not on Windows)."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise TimeoutError(f"not done in {seconds} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(row: Row, clock: Clock, floors: Floors) -> list[str]:
    """The cells of one row; whatever goes wrong is its note."""
    name, build = row
    try:
        with limit(ROW), torch.no_grad():
            return [name, *measured(build(), clock, floors)]
    except torch.cuda.OutOfMemoryError:
        reason = "out of memory"
    except (Refused, TimeoutError) as error:
        reason = str(error)
    except Exception as error:      # a table with a hole is worth more than no table
        lines = str(error).splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:90]}"
    return [name, *["-"] * 8, reason]


def measured(work, clock: Clock, floors: Floors) -> list[str]:
    if clock.on_gpu:
        torch.cuda.reset_peak_memory_stats(clock.device)
    work.call()                                         # compiles, tunes, warms up
    gpu, call = clock.seconds(work.call)
    peak = (torch.cuda.max_memory_allocated(clock.device) - clock.junk.nbytes) / 1e9 \
        if clock.on_gpu else None
    rate, moved = work.flops / gpu, None if work.bytes is None else work.bytes / gpu
    return [f"{gpu * 1e3:.3f}", f"{call * 1e3:.3f}", f"{rate / 1e12:.2f}",
            f"{100 * rate / floors.matmul:.0f}",
            "-" if moved is None else f"{moved / 1e9:.0f}",
            "-" if moved is None else f"{100 * moved / floors.copy:.0f}",
            "-" if peak is None else f"{peak:.1f}",
            "-" if work.error is None else f"{work.error():.0e}", work.note]


def line(cells) -> str:
    aligned = (c.ljust(w) if i in (0, len(WIDTHS) - 1) else c.rjust(w)
               for i, (c, w) in enumerate(zip(cells, WIDTHS)))
    return f"| {' | '.join(aligned)} |"


def table(device: torch.device, quick: bool) -> None:
    """Measure and print, row by row, so that a table that is cut short is one still."""
    start, clock = time.perf_counter(), Clock(device, SHARE / 100 if quick else SHARE)
    config, sizes = (k3.K3Config.toy(), QUICK) if quick else (k3.K3Config.k3(), Sizes())
    floors = measure_floors(clock, quick)
    print(*(f"{key}: {value}" for key, value in about(device).items()), sep="\n")
    print(f"matrix product: {floors.matmul / 1e12:.3g} TFLOP/s in bfloat16; "
          f"copy: {floors.copy / 1e9:.3g} GB/s, read and written\n")
    print(line(HEAD), line("-" * w for w in WIDTHS), sep="\n")
    for row in rows(config, device, sizes):
        late = time.perf_counter() - start > TOTAL
        print(line([row[0], *["-"] * 8, "not run: the time is over"] if late
                   else run(row, clock, floors)), flush=True)
        if clock.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()


def about(device: torch.device) -> dict:
    """The device, and the versions that its times depend on."""
    named = {key: value for key, value in machine().items() if key in ("python", "torch", "system")}
    if device.type != "cuda":
        return {"device": "CPU"} | named
    p = torch.cuda.get_device_properties(device)
    return {"device": f"{p.name}, {p.total_memory / 1e9:.0f} GB, compute capability "
                      f"{p.major}.{p.minor}, {p.multi_processor_count} multiprocessors",
            "CUDA": torch.version.cuda or torch.version.hip} | named


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("This script measures a GPU, and torch sees none; "
              "`python -m benchmarks` measures the CPU.", file=sys.stderr)
        return 2
    if chosen.device == "cpu" and not chosen.quick:
        print("K3's sizes are for a GPU; on the CPU this script needs --quick.", file=sys.stderr)
        return 2
    table(torch.device(chosen.device), chosen.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
