"""From cases to rows: plain dictionaries, as they are stored in `result.json`.

A row's `contenders` have times or numbers by name, `ours` among them; those in `aside` are
no rivals, but floors or parts of ours. `not_run` says why someone has none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from benchmarks.case import Case, Disagreement, Quantity
from k3_teach.scale.measure import copy_bandwidth, matmul_rate, race

# A smaller copy measures the call, and a larger one is not faster.
SMALLEST_COPY, LARGEST_COPY = 1 << 16, 1 << 28


class Floors:
    """What the machine reaches at best; each figure is measured when it is first asked for."""

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.rate: float | None = None
        self.copies: dict[int, float] = {}

    def matmul(self) -> float:
        """FLOP/s of a large float32 product."""
        if self.rate is None:
            self.rate = matmul_rate(threads=self.threads)
        return self.rate

    def copy(self, nbytes: int) -> float:
        """Bytes/s of a copy that reads and writes `nbytes` together, to a power of two."""
        size = 1 << max(nbytes // 2, 1).bit_length() - 1
        size = min(max(size, SMALLEST_COPY), LARGEST_COPY)
        if size not in self.copies:
            self.copies[size] = copy_bandwidth(size, self.threads)
        return self.copies[size]

    def known(self) -> dict:
        """What has been measured: FLOP/s, and bytes/s by the bytes of one copy."""
        copies = dict(sorted(self.copies.items()))
        return {"matmul_flops": self.rate, "copy_bytes_per_second": copies}


FAILURES = Disagreement, RuntimeError, MemoryError


def measure(cases: Iterable[Case | Quantity], floors: Floors, quick: bool = False
            ) -> Iterator[dict]:
    """One row for each case, in order. A case that fails is a row that says why.

    If one cannot be made, its module's row is the last.
    """
    try:
        for case in cases:
            try:
                row = timed(case, floors, quick) if isinstance(case, Case) else quantity(case)
            except FAILURES as error:
                row = failed(error, case.group, case.name, case.ours)
            del case        # its tensors go before the next one's come
            yield row
    except FAILURES as error:
        yield failed(error, "Not made", "a case")


def failed(error: BaseException, group: str, name: str, ours: str = "") -> dict:
    return {"group": group, "name": name, "ours": ours, "failed": first_line(error),
            "contenders": {}}


def timed(case: Case, floors: Floors, quick: bool) -> dict:
    """Race the contenders that agree, and set ours against the floors."""
    refused = agreement(case)
    rounds, seconds = (3, 0.2) if quick else (case.rounds, case.seconds)
    racing = {name: call for name, call in case.contenders.items() if name not in refused}
    result = race({**racing, **case.floors}, rounds, seconds, floors.threads)
    contenders = {}
    for name, times in result.times.items():
        contenders[name] = asdict(result.seconds(name)) | {
            "rounds": len(times), "ratio": asdict(result.ratio(name, case.ours))}
    row = {"group": case.group, "name": case.name, "ours": case.ours, "unit": "s",
           "clock": result.clock, "contenders": contenders, "aside": list(case.floors),
           "not_run": {**case.not_run, **refused}}
    median = contenders[case.ours]["median"]
    if case.flops:
        row |= {"flops": case.flops, "of_matmul": case.flops / median / floors.matmul()}
    if case.bytes:
        row |= {"bytes": case.bytes, "of_copy": case.bytes / median / floors.copy(case.bytes)}
    if case.tokens:
        row |= {"tokens": case.tokens, "tokens_per_second": case.tokens / median}
    return row


def agreement(case: Case) -> dict[str, str]:
    """Disagreement unless all that run give the same; who refuses this size, and why."""
    results, refused = {}, {}
    for name, call in case.contenders.items():
        try:
            results[name] = call()
        except Exception as error:      # whatever another package may raise
            if name == case.ours:
                raise
            refused[name] = first_line(error)
    for name in set(case.foreign) & set(results):
        if differs := case.difference(results[name], results[case.ours]):
            refused[name] = f"it and ours {differs}"
            del results[name]
    case.agree(results)
    return refused


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def quantity(case: Quantity) -> dict:
    """Numbers and their ratios to ours."""
    ours = case.values[case.ours]
    contenders = {name: {"median": value, "ratio": {"median": value / ours}}
                  if ours else {"median": value} for name, value in case.values.items()}
    return {"group": case.group, "name": case.name, "ours": case.ours, "unit": case.unit,
            "note": case.note, "contenders": contenders, "aside": list(case.parts),
            "not_run": dict(case.not_run)}
