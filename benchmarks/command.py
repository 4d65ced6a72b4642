"""Run the benchmarks: `python -m benchmarks [--only kda,mla] [--quick] [--threads N]`.

Ctrl-C keeps what has been measured.
"""

import argparse
import importlib
import importlib.util
import os
import pkgutil
import sys
from datetime import date
from pathlib import Path

import torch

from benchmarks import cases, report
from benchmarks.run import Floors, measure
from k3_teach.scale.measure import machine

STOPPED = 130       # what a shell expects after Ctrl-C
GROUPS = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the report, and give the exit status: 1 if a row has failed, 130 after
    Ctrl-C."""
    options = parse(arguments)
    floors, stopped = Floors(options.threads), False
    result = {"date": date.today().isoformat(), "quick": options.quick,
              "machine": machine(options.threads), "rows": []}
    torch.set_num_threads(options.threads)      # what a case prepares counts as well
    try:
        for group in options.only:
            module = importlib.import_module(f"benchmarks.cases.{group}")
            for row in measure(module.cases(options.quick), floors, options.quick):
                result["rows"].append(row)
                print(report.line(row), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        stopped = True
        print("Stopped; what has been measured is kept.", file=sys.stderr)
    result["floors"] = floors.known()
    print(report.write(result, options.output))
    print(f"Written to {options.output}: result.json, table.md, plot.svg", file=sys.stderr)
    return STOPPED if stopped else int(any("failed" in row for row in result["rows"]))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    cores = os.cpu_count() or 1
    parser.add_argument("--only", type=group_names, default=GROUPS,
                        help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--threads", type=int, default=1,
                        help="1 (the clock is CPU time) or more (wall time)")
    parser.add_argument("--output", type=Path, default=Path("_build/bench"),
                        help="folder of the result (default: _build/bench)")
    options = parser.parse_args(arguments)
    if not 1 <= options.threads <= cores:
        parser.error(f"--threads is {options.threads}; it must be from 1 to {cores}, the cores")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed, which draws the plot: pip install matplotlib")
    if complaint := unwritable(options.output):
        parser.error(complaint)
    return options


def group_names(text: str) -> list[str]:
    """The groups of "kda, mla", each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GROUPS)}")
    return names


def unwritable(folder: Path) -> str:
    """Why nothing can be written there; empty if it can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--output {folder}: the folder cannot be made ({error.strerror})"
    return "" if os.access(folder, os.W_OK) else f"--output {folder}: the folder is not writable"
