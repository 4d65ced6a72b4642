"""Folders in the released format: `config.json` beside safetensors, in one file or in
shards with an index.

Reading accepts what the release and its ports contain: names with or without
`language_model.`, `A_log` padded with zeros, routed experts in MXFP4 or not, a vision tower
(skipped). Nothing is guessed: every tensor must find its place and every place its tensor,
or one error lists them all.
"""

import json
import os
import re
import shutil
import tempfile
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3_teach import mxfp4
from k3_teach.config import K3Config
from k3_teach.errors import CheckpointError, InputError
from k3_teach.model import K3Model
from k3_teach.validate import check_dtype

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16,
          "F16": torch.float16}                     # the dtypes that weights may have
PREFIX = "language_model."
NOT_TEXT = ("vision_tower.", "mm_projector.")       # of the released multimodal checkpoint
STACKED = re.compile(r"(.*\.experts)\.(w[123])")    # our stack of one matrix of each expert


def released_names(model: K3Model) -> dict[str, tuple[torch.nn.Parameter, int | None]]:
    """Released name -> (our parameter, row of the stack or None), in the model's order.

    It names a tied head only once, as the embedding.
    """
    names = {}
    for name, p in model.named_parameters():
        full = name if name.startswith("lm_head.") else f"model.{name}"
        if m := STACKED.fullmatch(full):
            names.update({f"{m[1]}.{e}.{m[2]}.weight": (p, e) for e in range(len(p))})
        else:
            names[full] = (p, None)
    return names


# --- reading --------------------------------------------------------------------------

def load_checkpoint(folder, dtype: torch.dtype | None = None, device="cpu") -> K3Model:
    """The model in `folder`, in evaluation mode.

    dtype None: that of the stored embedding. Parameters that the release keeps in float32
    are kept so. Raises ConfigError; CheckpointError for files that cannot be read, and for
    tensors that do not fit, listing every missing, extra and misshapen one.
    """
    folder = Path(folder)
    config = K3Config.from_json(folder)
    stored = _Stored(folder)
    model = K3Model(config, device="meta")
    places = released_names(model)
    extra = sorted(stored.names - places.keys())
    problems = [f"extra: {n}" for n in extra if not stored.droppable(n, config)]
    problems += [f"missing: {n}" for n in places if n not in stored.names]
    problems += [f"misshapen: {n} is {shape}, the configuration wants {wanted}"
                 for n, shape, wanted in _misshapen(places, stored)]
    _raise_if(problems, folder)
    dtype = dtype or stored.dtype("model.embed_tokens.weight")
    check_dtype(dtype)
    model.to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    with torch.no_grad():
        for name, (p, e) in released_names(model).items():
            target = p if e is None else p[e]
            x = stored.read(name, target.dtype)
            target.copy_(_fit(name, x, target.shape, problems))
    _raise_if(problems, folder)
    return model.eval()


class _Stored:
    """The tensors of a folder under their names without `language_model.`, read one at a
    time through a memory map.

    files: name -> open file and stored name; shapes: name -> shape; names: those that a
    model has, where the two halves of an MXFP4 weight count as one.
    """

    def __init__(self, folder: Path):
        self.files, self.shapes = {}, {}
        for path in _shards(folder):
            try:
                f = safe_open(path, framework="pt")
                for stored in f.keys():
                    self._add(stored, f, path)
            except (SafetensorError, OSError) as e:
                message = f"{path}: not a readable safetensors file ({e})"
                raise CheckpointError(message) from None
        packed = (n for n in self.files if n.endswith(".weight_packed"))
        packed = {n.removesuffix("_packed") for n in packed}
        halves = {f"{n}{half}" for n in packed for half in ("_packed", "_scale")}
        self.names = packed | (self.files.keys() - halves)
        if twice := packed & self.files.keys():
            raise CheckpointError(f"{folder}: {min(twice)} is stored twice, in MXFP4 and "
                                  "plain; it must be stored once")

    def _add(self, stored: str, f, path: Path):
        name = stored.removeprefix(PREFIX)
        if name.startswith(NOT_TEXT):
            return
        if name in self.files:
            raise CheckpointError(f"{path}: {stored} is stored twice; once is allowed")
        self.files[name] = (f, stored)
        self.shapes[name] = list(f.get_slice(stored).get_shape())

    def shape(self, name: str) -> list[int]:
        """The shape that `name` has once decoded."""
        if name in self.shapes:
            return self.shapes[name]
        packed = self.shapes[f"{name}_packed"]
        return [*packed[:-1], *(2 * half for half in packed[-1:])]

    def droppable(self, name: str, config: K3Config) -> bool:
        """Does it carry nothing? It has size 0 (no shared experts), or is a tied head."""
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        return tied or 0 in self.shapes.get(name, [1])

    def raw(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        f, stored = self.files[name]
        return f.get_tensor(stored)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype as it is stored; float32 for MXFP4."""
        if name not in self.files:
            return torch.float32
        f, stored = self.files[name]
        return FLOATS.get(f.get_slice(stored).get_dtype(), torch.uint8)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor; `dtype` is what MXFP4 is decoded to."""
        if name in self.files:
            return self.raw(name)
        packed, scale = self.raw(f"{name}_packed"), self.raw(f"{name}_scale")
        try:
            return mxfp4.decode(packed, scale, dtype)
        except InputError as e:
            raise CheckpointError(f"{name}: {e}") from None


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, else what lies there."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        files = [single] if single.is_file() else sorted(folder.glob("model-*.safetensors"))
        if not files:
            wanted = f"{INDEX}, {SINGLE} or model-*.safetensors"
            raise CheckpointError(f"{folder}: holds no {wanted}")
        return files
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: must be JSON with a weight_map from tensor names "
                              "to file names") from None
    outside = [n for n in names if not isinstance(n, str) or Path(n).name != n]
    if outside:
        raise CheckpointError(f"{index}: names {outside[0]!r}; "
                              "shards must be files in the same folder")
    lost = [n for n in names if not (folder / n).is_file()]
    if lost:
        raise CheckpointError(f"{folder}: the index names shards that are not there: "
                              f"{', '.join(lost)}")
    return [folder / n for n in names]


def _misshapen(places, stored: _Stored):
    """Yields name, stored shape and wanted shape of what does not fit. `A_log` may be too
    long: see `_fit`."""
    for name, (p, e) in places.items():
        if name not in stored.names:
            continue
        shape, wanted = stored.shape(name), list(p.shape if e is None else p.shape[1:])
        padded = name.endswith(".A_log") and prod(shape) >= wanted[0]
        if shape != wanted and not padded:
            yield name, shape, wanted
        elif not stored.dtype(name).is_floating_point:
            yield name, stored.dtype(name), "floating-point numbers"
        if f"{name}_packed" in stored.shapes:
            scale = stored.shapes.get(f"{name}_scale")
            wanted = [*wanted[:-1], wanted[-1] // mxfp4.BLOCK]
            if scale != wanted:
                yield f"{name}_scale", scale, wanted


def _fit(name: str, x: Tensor, shape, problems: list[str]) -> Tensor:
    """Cut the zero padding of `A_log`, which is per head; the release pads it to 128, and
    other files have it as [1, 1, H, 1]."""
    if x.shape == shape:
        return x
    x = x.flatten()
    if x[shape[0]:].any():
        problems.append(f"misshapen: {name} has {len(x)} entries for {shape[0]} heads, "
                        f"and those after {shape[0]} are not zero")
    return x[:shape[0]]


def _raise_if(problems: list[str], folder: Path, most: int = 40):
    if problems:
        more = [f"... and {len(problems) - most} more"] if len(problems) > most else []
        head = f"{folder}: {len(problems)} tensors do not fit the configuration"
        raise CheckpointError("\n  ".join([head, *problems[:most], *more]))


# --- writing --------------------------------------------------------------------------

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
    folder = Path(folder)
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
    shutil.rmtree(new)


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
