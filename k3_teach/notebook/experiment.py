"""The longer experiments: a script beside the chapters, and what it once gave.

    lab, stored = experiment("09_order")

A chapter shows what is stored and repeats a short part of it with the script's functions. The
script ends in `command(run, __doc__)`, which makes it a command:

    python book/experiments/09_order.py --output book/experiments/09_order.json
"""

import argparse
import json
from pathlib import Path

import torch

from .files import repository_file, repository_module


def experiment(name: str):
    """The script book/experiments/NAME.py as a module, and its stored result."""
    result = repository_file(f"book/experiments/{name}.json")
    stored = json.loads(result.read_text(encoding="utf-8"))
    return repository_module(f"book/experiments/{name}.py"), stored


def command(run, doc: str, arguments: list[str] | None = None) -> None:
    """Run the experiment on one thread and write what it returns."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    output = parser.parse_args(arguments).output
    if not output.parent.is_dir():
        parser.error(f"{output.parent} is not a folder")
    torch.set_num_threads(1)
    output.write_text(json.dumps(run(), allow_nan=False) + "\n", encoding="utf-8")
