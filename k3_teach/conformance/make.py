"""`python -m k3_teach.conformance.make`: write the data of the kit once more.

It takes the two stored models and what the released model computed from `tests/golden`, so
it needs the repository; the expected values of all special models are `reference`'s.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

from k3_teach.conformance import reference
from k3_teach.conformance.folder import read_tensors, write_tensors
from k3_teach.conformance.models import DATA, MODELS, build, text

BASES = {"odd": "k3_odd", "official": "k3_official_format"}
RELEASED = ("input_ids", "logits", "padded.input_ids", "padded.attention_mask",
            "padded.logits", "padded.next_ids", "padded.next_logits")
TRACED = 8      # tokens of the base whose whole trace is stored
WITHOUT = {"odd", "official", "official_tail", "whole", "lost", "blind", "mixed", "memory",
           "all_experts"}      # models that are compared with nothing stored


def golden_values(source: Path) -> dict[str, np.ndarray]:
    """What the released model computed on the two bases."""
    values = {}
    for base, folder in BASES.items():
        io = read_tensors(source / folder / "io.safetensors")
        values |= {f"{base}.{name}": io[name] for name in RELEASED if base == "odd"
                   or not name.startswith("padded")}
    return values


def expected_values() -> dict[str, np.ndarray]:
    """What `reference` computes: of each special model the logits and the entries of the
    trace that its probe compares; of the base the whole trace of a few tokens."""
    values = {}
    for name in MODELS.keys() - WITHOUT:
        config, tensors, _ = build(name)
        values[name], trace = reference.forward(config, tensors, text(name))
        values |= {f"{name}.{key}": x for key, x in trace.items()
                   if key.split(".")[-1] in MODELS[name].traces}
    config, tensors, _ = build("odd")
    _, trace = reference.forward(config, tensors, text("odd")[:TRACED])
    return values | {f"odd.{key}": x for key, x in trace.items()}


def make(source: Path) -> None:
    for base, folder in BASES.items():
        (DATA / base).mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(source / folder / name, DATA / base / name)
    write_tensors(golden_values(source), DATA / "golden.safetensors")
    write_tensors(expected_values(), DATA / "expected.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m k3_teach.conformance.make")
    parser.add_argument("golden", nargs="?", default="tests/golden", type=Path,
                        help="the folder of what the released model computed (%(default)s)")
    make(parser.parse_args().golden)
