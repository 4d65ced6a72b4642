"""Folders in the released format, read and written with NumPy alone.

A safetensors file is a length, a header in JSON and the numbers one after another. Only what
the kit's own small models need: one file of weights, not malformed.
"""

import json
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "U8": np.dtype("u1"),
          "I64": np.dtype("<i8")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensors(path) -> dict[str, np.ndarray]:
    """Name -> array, in the order of the names."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8:start]), {}
    for name in sorted(header.keys() - {"__metadata__"}):
        x, (a, b) = header[name], header[name]["data_offsets"]
        if x["dtype"] == "BF16":    # the upper half of a float32
            half = np.frombuffer(data[start + a:start + b], "<u2")
            flat = (half.astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(data[start + a:start + b], DTYPES[x["dtype"]])
        tensors[name] = flat.reshape(x["shape"])
    return tensors


def write_tensors(tensors: dict[str, np.ndarray], path, bfloat16: tuple[str, ...] = ()) -> None:
    """The same file for the same arrays. `bfloat16`: float32 tensors of which only the upper
    half is stored."""
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    # Wide numbers first, so that every one lies at a multiple of its size.
    for name in sorted(tensors, key=lambda n: (-tensors[n].itemsize, n)):
        x = np.ascontiguousarray(tensors[name])
        kind = "BF16" if name in bfloat16 else NAMES[x.dtype]
        if kind == "BF16":
            x = (x.view(np.uint32) >> 16).astype("<u2")
        parts.append(x.tobytes())
        offsets = [end, end := end + x.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def read_folder(folder) -> tuple[dict, dict[str, np.ndarray]]:
    """The configuration as it is written, and the tensors under their stored names."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, read_tensors(folder / "model.safetensors")


def write_folder(folder, config: dict, tensors: dict[str, np.ndarray],
                 bfloat16: tuple[str, ...] = ()) -> None:
    """Write `config.json` and `model.safetensors` into `folder`, which is there."""
    text = json.dumps(config, indent=1) + "\n"
    (Path(folder) / "config.json").write_text(text, encoding="utf-8")
    write_tensors(tensors, Path(folder) / "model.safetensors", bfloat16)
