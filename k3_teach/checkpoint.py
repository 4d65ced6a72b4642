"""Reading folders in the released format: `config.json` beside safetensors, in one file or
in shards with an index. `saving.py` writes them.

Reading accepts what the release and its ports contain: names with or without
`language_model.`, `A_log` padded with zeros, routed experts in MXFP4 or not, a vision tower
(skipped). Nothing is guessed: every tensor must find its place and every place its tensor,
or one error lists them all.
"""

import json
import re
import struct
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3_teach import mxfp4
from k3_teach.config import K3Config
from k3_teach.errors import CheckpointError, InputError
from k3_teach.files import as_path, read_json
from k3_teach.model import K3Model
from k3_teach.validate import check_device, check_dtype

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


def load_checkpoint(folder, dtype: torch.dtype | None = None, device="cpu") -> K3Model:
    """The model in `folder`, in evaluation mode.

    dtype None: that of the stored embedding. Parameters that the release keeps in float32
    are kept so. InputError for a dtype that no model has, for a folder or device that is
    none; ConfigError; CheckpointError for files that cannot be read, and for tensors that
    do not fit, listing every missing, extra and misshapen one.
    """
    check_dtype(dtype)
    check_device(device)
    folder = as_path(folder)
    config, stored = K3Config.from_json(folder), Stored(folder)
    model = fitting_model(stored, config, folder)
    dtype = dtype or FLOATS.get(stored.kind("model.embed_tokens.weight"), torch.float32)
    model.to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    with torch.no_grad():
        for name, (p, e) in released_names(model).items():
            target = p if e is None else p[e]
            x = stored.read(name, target.dtype)
            target.copy_(fitted(name, x, target.shape))
    return model.eval()


def fitting_model(stored: "Stored", config: K3Config, folder: Path,
                  besides: tuple[str, ...] = ()) -> K3Model:
    """The model of `config` on the meta device, if what is stored has just its tensors.

    besides: beginnings of names that are allowed, too. CheckpointError, listing every
    missing, extra and misshapen one.
    """
    for field in ("num_hidden_layers", "num_experts"):      # before any are made
        if (n := getattr(config, field)) > len(stored.names):
            raise CheckpointError(f"{folder}: {field} is {n}; the files hold only "
                                  f"{len(stored.names)} tensors")
    model = K3Model(config, device="meta")
    places = released_names(model)
    extra = sorted(n for n in stored.names - places.keys() if not n.startswith(besides))
    problems = [f"extra: {n}" for n in extra if not stored.droppable(n, config)]
    problems += [f"missing: {n}" for n in places if n not in stored.names]
    problems += [f"misshapen: {n} is {shape}, the configuration wants {wanted} "
                 f"({stored.origin([n]).replace(f'{folder}/', '')})"
                 for n, shape, wanted in _misshapen(places, stored)]
    _raise_if(problems, folder)
    return model


class Stored:
    """The tensors of a folder under their names without `language_model.`, read one at a
    time through a memory map.

    files: name -> open file and stored name; paths: name -> where that file is; shapes:
    name -> shape; names: those that a model has, where the two halves of an MXFP4 weight
    count as one.
    """

    def __init__(self, folder: Path):
        self.files, self.paths, self.shapes = {}, {}, {}
        for path in _shards(folder):
            try:
                f = safe_open(path, framework="pt")
                for stored in f.keys():
                    self._add(stored, f, path)
                _once(path)
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
        self.files[name], self.paths[name] = (f, stored), path
        self.shapes[name] = list(f.get_slice(stored).get_shape())

    def shape(self, name: str) -> list[int]:
        """The shape that `name` has once decoded."""
        if name in self.shapes:
            return self.shapes[name]
        packed = self.shapes[f"{name}_packed"]
        return [*packed[:-1], *(2 * half for half in packed[-1:])]

    def origin(self, names) -> str:
        """The files in which these tensors lie, each once."""
        halves = [half for n in names for half in (n, f"{n}_packed", f"{n}_scale")]
        files = dict.fromkeys(str(self.paths[n]) for n in halves if n in self.paths)
        return ", ".join(files)

    def droppable(self, name: str, config: K3Config) -> bool:
        """Does it carry nothing? It has size 0 (no shared experts), or is a tied head."""
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        return tied or 0 in self.shapes.get(name, [1])

    def raw(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        f, stored = self.files[name]
        return f.get_tensor(stored)

    def kind(self, name: str) -> str:
        """The dtype by the name that safetensors gives it, or "MXFP4"."""
        if name not in self.files:
            return "MXFP4"
        f, stored = self.files[name]
        return f.get_slice(stored).get_dtype()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor; `dtype` is what MXFP4 is decoded to."""
        if name in self.files:
            return self.raw(name)
        packed, scale = self.raw(f"{name}_packed"), self.raw(f"{name}_scale")
        try:
            return mxfp4.decode(packed, scale, dtype)
        except InputError as e:
            raise CheckpointError(f"{name}: {e}") from None


def _once(path: Path) -> None:
    """CheckpointError for a header that names a tensor twice: safe_open takes the last."""
    with open(path, "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        pairs = json.loads(file.read(size), object_pairs_hook=list)
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise CheckpointError(f"{path}: {twice} is stored twice; once is allowed")


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, else what lies there."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        files = [single] if single.is_file() else sorted(folder.glob("model-*.safetensors"))
        files = [path for path in files if path.is_file()]      # a pipe may never end
        if not files:
            wanted = f"{INDEX}, {SINGLE} or model-*.safetensors"
            raise CheckpointError(f"{folder}: holds no {wanted}")
        return files
    try:
        names = sorted(set(read_json(index, CheckpointError)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: must be JSON with a weight_map from tensor names "
                              "to file names") from None
    outside = [n for n in names if not isinstance(n, str) or Path(n).name != n]
    if outside:
        raise CheckpointError(f"{index}: names {outside[0]!r}; "
                              "shards must be files in the same folder")
    try:
        lost = [n[:80] for n in names if not (folder / n).is_file()]
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{index}: names what cannot be a file ({str(e)[:80]})") from None
    if lost:
        raise CheckpointError(f"{folder}: the index names {len(lost)} shards that are not "
                              f"there: {', '.join(lost[:9])}")
    return [folder / n for n in names]


def _misshapen(places, stored: Stored):
    """Yields name, stored shape and wanted shape of what does not fit. `A_log` may be too
    long: see `fitted`."""
    for name, (p, e) in places.items():
        if name not in stored.names:
            continue
        shape, wanted = stored.shape(name), list(p.shape if e is None else p.shape[1:])
        padded = name.endswith(".A_log") and prod(shape) >= wanted[0]
        if shape != wanted and not padded:
            yield name, shape, wanted
        elif stored.kind(name) not in (*FLOATS, "MXFP4"):
            yield name, stored.kind(name), f"one of {', '.join(FLOATS)} or MXFP4"
        if f"{name}_packed" in stored.shapes:
            scale = stored.shapes.get(f"{name}_scale")
            wanted = [*wanted[:-1], wanted[-1] // mxfp4.BLOCK]
            if scale != wanted:
                yield f"{name}_scale", scale, wanted


def fitted(name: str, x: Tensor, shape) -> Tensor:
    """Cut the zero padding of `A_log`, which is per head; the release pads it to 128, and
    other files have it as [1, 1, H, 1]. CheckpointError if it is not zero."""
    if x.shape == shape:
        return x
    x = x.flatten()
    if x[shape[0]:].any():
        raise CheckpointError(f"misshapen: {name} has {len(x)} entries for {shape[0]} heads, "
                              f"and those after {shape[0]} are not zero")
    return x[:shape[0]]


def _raise_if(problems: list[str], folder: Path, most: int = 40):
    if problems:
        more = [f"... and {len(problems) - most} more"] if len(problems) > most else []
        head = f"{folder}: {len(problems)} tensors do not fit the configuration"
        raise CheckpointError("\n  ".join([head, *problems[:most], *more]))
