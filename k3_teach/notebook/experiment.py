"""The longer experiments: a script beside the chapters, and what it once gave.

    lab, stored = experiment("09_order")

A chapter shows what is stored and repeats a short part of it with the script's functions. The
script ends in `command(run, __doc__)`, which makes it a command:

    python book/experiments/09_order.py --output book/experiments/09_order.json
"""

import argparse
import importlib.util
import json
from pathlib import Path
from urllib.request import urlretrieve

import torch

HERE = Path(__file__).resolve().parents[2] / "book/experiments"
THERE = "https://raw.githubusercontent.com/k3-teach/k3-teach/main/book/experiments/"


def experiment(name: str):
    """The script book/experiments/NAME.py as a module, and its stored result.

    From this repository; where only the package is installed (on Colab, say), from the folder
    experiments/ beside the notebook, fetched when it is missing.
    """
    script, result = (_file(f"{name}.{ending}") for ending in ("py", "json"))
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, json.loads(result.read_text(encoding="utf-8"))


def _file(name: str) -> Path:
    if (HERE / name).exists():
        return HERE / name
    beside = Path("experiments") / name
    if not beside.exists():
        beside.parent.mkdir(exist_ok=True)
        urlretrieve(THERE + name, beside)
    return beside


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
