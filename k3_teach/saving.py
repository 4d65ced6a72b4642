"""Writing folders in the released format, so that `checkpoint.load_checkpoint` gives back the
same bits, and so that no interruption leaves half a checkpoint.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from k3_teach import mxfp4
from k3_teach.checkpoint import CONFIG, INDEX, PREFIX, SINGLE, released_names
from k3_teach.config import K3Config
from k3_teach.files import as_path
from k3_teach.model import K3Model


def save_checkpoint(model: K3Model, folder, max_shard_bytes: int = 5 * 10 ** 9,
                    released_layout: bool = False, mxfp4_experts: bool = False) -> None:
    """Write `config.json` and the weights; `load_checkpoint` gives back the same bits.

    released_layout: the names of the release (`language_model.`), its nested
        configuration, and `A_log` padded with zeros.
    mxfp4_experts: routed experts in MXFP4, as released; lossless only for weights that
        MXFP4 can hold, InputError for what it cannot take (see `mxfp4.encode`). Without
        it, they are written in the dtype of the model, and no quantization_config.

    Shards are made one at a time, and all files are complete before the first takes its
    place: a save that fails or is interrupted leaves the previous checkpoint whole, or the
    new one. The same bits: for a model of one dtype and its float32 parameters.
    """
    folder = as_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config_to_write(model.config, released_layout, mxfp4_experts)
    tensors = _to_write(model, released_layout, mxfp4_experts)
    new = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
    try:
        config.to_json(new / CONFIG)
        sizes = []                                  # of each shard: name -> bytes
        for shard in _cut(tensors, max_shard_bytes):
            save_file(shard, new / str(len(sizes)), metadata={"format": "pt"})
            sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
        names = _shard_names(len(sizes))
        for i, name in enumerate(names):
            os.rename(new / str(i), new / name)
        if len(names) > 1:
            (new / INDEX).write_text(_index(names, sizes), encoding="utf-8")
        written = [path.name for path in new.iterdir()]
    except BaseException:
        shutil.rmtree(new)
        raise
    try:
        _put_in_place(new, folder, written)
    except BaseException:       # once begun it is finished, whatever interrupts it
        _put_in_place(new, folder, written)
        raise


def _put_in_place(new: Path, folder: Path, written: list[str]) -> None:
    """Move the files `written` from `new` to `folder` and remove those they replace.

    The configuration is taken away first and put in place last: should the machine fail in
    between, the folder does not load, and never loads as a mixture of two checkpoints.
    """
    if (new / CONFIG).exists():
        (folder / CONFIG).unlink(missing_ok=True)
    for name in written:
        if name != CONFIG and (new / name).exists():
            os.replace(new / name, folder / name)
    for old in [folder / INDEX, folder / SINGLE, *folder.glob("model-*-of-*.safetensors")]:
        if old.name not in written:
            old.unlink(missing_ok=True)
    if (new / CONFIG).exists():
        os.replace(new / CONFIG, folder / CONFIG)
    shutil.rmtree(new, ignore_errors=True)


def _cut(tensors, max_bytes: int):
    """Yields shards, name -> tensor, of at most `max_bytes` (or one tensor) each."""
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _shard_names(n: int) -> list[str]:
    if n == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def _index(files: list[str], sizes: list[dict[str, int]]) -> str:
    total = sum(sum(shard.values()) for shard in sizes)
    weight_map = {name: file for file, shard in zip(files, sizes) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=1)


def _to_write(model: K3Model, released_layout: bool, mxfp4_experts: bool):
    """Yields stored name and tensor, on the CPU, in the model's order."""
    prefix = PREFIX if released_layout else ""
    for name, (p, e) in released_names(model).items():
        tensor = (p if e is None else p[e]).detach().cpu().contiguous()
        if released_layout and name.endswith(".A_log"):
            heads, dim = len(tensor), model.config.linear_attn_config.head_dim
            tensor = torch.nn.functional.pad(tensor, (0, max(dim - heads, 0)))
        if mxfp4_experts and e is not None:
            packed, scale = mxfp4.encode(tensor)
            yield f"{prefix}{name}_packed", packed
            yield f"{prefix}{name}_scale", scale
        else:
            yield prefix + name, tensor.clone()


def _config_to_write(c: K3Config, released_layout: bool, mxfp4_experts: bool) -> K3Config:
    """The configuration as the files are written, which may not be how they were read."""
    if not mxfp4_experts:
        c = c.replace(quantization_config=None)
    elif c.quantization_config is None:
        c = c.replace(quantization_config=K3Config.k3().quantization_config)
    if released_layout and c.wrapper is None:
        c = c.replace(wrapper={"model_type": "kimi_k3"})
    return c
