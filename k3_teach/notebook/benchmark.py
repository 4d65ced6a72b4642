"""Speeds that were measured once, for chapters to quote beside what they measure again.

    stored = benchmark(threads=1)
    stored.machine["processor"]
    stored.ratio("KDA forward", "T 1024, H 4, K 64", "recurrence")      # so many times as long

The rows are those of `make bench` (see benchmarks/README.md), on one machine, which is named.
"""

import json
from dataclasses import dataclass

from k3_teach.errors import InputError
from k3_teach.scale.measure import Spread

from .files import repository_file

UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Benchmark:
    """A stored result: the machine, its floors, and a row for each comparison."""

    machine: dict
    floors: dict
    date: str
    rows: list[dict]

    def row(self, group: str, name: str) -> dict:
        """InputError, with what there is, for another group or name."""
        names = [row["name"] for row in self.rows if row["group"] == group]
        if name not in names:
            known = names or sorted({row["group"] for row in self.rows})
            raise InputError(f"no row {name!r} of {group!r}; there are {known}")
        return next(r for r in self.rows if (r["group"], r["name"]) == (group, name))

    def ratio(self, group: str, name: str, slow: str) -> Spread:
        """How many times as long as the package's function the contender `slow` took."""
        contenders = self.row(group, name)["contenders"]
        if slow not in contenders:
            raise InputError(f"no contender {slow!r}; there are {sorted(contenders)}")
        return Spread(**contenders[slow]["ratio"])


def rivals(row: dict) -> dict[str, dict]:
    """Ratios of the others to ours, by name: without ours, its parts, and floors."""
    return {name: entry["ratio"] for name, entry in row["contenders"].items()
            if name not in (row["ours"], *row.get("aside", ())) and "ratio" in entry}


def in_words(row: dict, name: str) -> tuple[str, str]:
    """What a contender took, with its unit, and the quartiles of a time: "2.1 ms", "2-2.3"."""
    entry = row["contenders"][name]
    if row["unit"] != "s":
        return f"{digits(entry['median'])} {row['unit']}", ""
    size, unit = next(((s, u) for s, u in UNITS if entry["median"] >= s), UNITS[-1])
    low, middle, high = (digits(entry[key] / size) for key in ("low", "median", "high"))
    return f"{middle} {unit}", f"{low}-{high}"


def digits(x: float) -> str:
    """Three digits that mean something, without an exponent."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def benchmark(threads: int = 1) -> Benchmark:
    """The stored result with so many threads: 1 or 2. InputError for another number."""
    if threads not in (1, 2):
        raise InputError(f"threads is {threads}; results are stored for 1 and 2")
    file = repository_file(f"benchmarks/stored/threads-{threads}/result.json")
    result = json.loads(file.read_text(encoding="utf-8"))
    return Benchmark(**{name: result[name] for name in ("machine", "floors", "date", "rows")})
