"""Folders in the released format: `config.json` beside safetensors, in one file or in shards with an index.

Reading accepts what the release and its ports contain: names with or without `language_model.`, `A_log` padded with zeros,
routed experts in MXFP4 or not, a vision tower (skipped). Nothing is guessed: every tensor must find its place and every
place its tensor, or one error lists them all.
"""

import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3_teach import mxfp4
from k3_teach.config import K3Config
from k3_teach.errors import CheckpointError, InputError
from k3_teach.model import K3Model

INDEX = "model.safetensors.index.json"
PREFIX = "language_model."
NOT_TEXT = ("vision_tower.", "mm_projector.")             # the other halves of the released multimodal checkpoint
STACKED = re.compile(r"(.*\.experts)\.(w[123])")          # our stacked parameter


def released_names(model: K3Model) -> dict[str, tuple[torch.nn.Parameter, int | None]]:
    """Released name -> (our parameter, row of the stack or None), in the order of the model."""
    names = {}
    for name, p in model.named_parameters():              # a tied head is not listed a second time
        full = name if name.startswith("lm_head.") else f"model.{name}"
        if m := STACKED.fullmatch(full):
            names.update({f"{m[1]}.{e}.{m[2]}.weight": (p, e) for e in range(len(p))})
        else:
            names[full] = (p, None)
    return names


# --- reading ---------------------------------------------------------------------------------------------------------

def load_checkpoint(folder, dtype: torch.dtype | None = None, device="cpu") -> K3Model:
    """The model in `folder`, in evaluation mode. `dtype` None: that of the stored embedding.

    Parameters that the release keeps in float32 are kept so. Raises ConfigError, or CheckpointError listing every missing,
    extra and misshapen tensor.
    """
    folder = Path(folder)
    config = K3Config.from_json(folder)
    stored = _Stored(folder)
    model = K3Model(config, device="meta")
    places = released_names(model)
    problems = [f"extra: {n}" for n in sorted(stored.names) if n not in places and not _droppable(n, stored, config)]
    problems += [f"missing: {n}" for n in places if n not in stored.names]
    problems += [f"misshapen: {n} is {s}, the configuration wants {w}" for n, s, w in _misshapen(places, stored)]
    _raise_if(problems, folder)
    dtype = dtype or stored.dtype("model.embed_tokens.weight")
    model.to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    with torch.no_grad():
        for name, (p, e) in released_names(model).items():
            target = p if e is None else p[e]
            target.copy_(_fit(name, stored.read(name, target.dtype), target.shape, problems))
    _raise_if(problems, folder)
    return model.eval()


class _Stored:
    """The tensors of a folder under their names without `language_model.`, read one at a time through a memory map."""

    def __init__(self, folder: Path):
        self.files, self.shapes = {}, {}                  # name -> open file and stored name; name -> shape
        for path in _shards(folder):
            try:
                f = safe_open(path, framework="pt")
                for stored in f.keys():
                    self._add(stored, f, path)
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{path}: not a readable safetensors file ({e})") from None
        packed = {n.removesuffix("_packed") for n in self.files if n.endswith(".weight_packed")}
        halves = {f"{n}{half}" for n in packed for half in ("_packed", "_scale")}
        self.names = packed | (self.files.keys() - halves)
        if twice := packed & self.files.keys():
            raise CheckpointError(f"{folder}: {min(twice)} is stored twice, in MXFP4 and plain")

    def _add(self, stored: str, f, path: Path):
        name = stored.removeprefix(PREFIX)
        if name.startswith(NOT_TEXT):
            return
        if name in self.files:
            raise CheckpointError(f"{path}: {stored} is stored twice")
        self.files[name] = (f, stored)
        self.shapes[name] = list(f.get_slice(stored).get_shape())

    def shape(self, name: str) -> list[int]:
        """The shape that `name` has once decoded."""
        if name in self.shapes:
            return self.shapes[name]
        *rows, half = self.shapes[f"{name}_packed"]
        return [*rows, 2 * half]

    def raw(self, name: str) -> Tensor:
        f, stored = self.files[name]
        return f.get_tensor(stored)

    def dtype(self, name: str) -> torch.dtype:
        return self.raw(name).dtype

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self.files:
            return self.raw(name)
        try:
            return mxfp4.decode(self.raw(f"{name}_packed"), self.raw(f"{name}_scale"), dtype)
        except InputError as e:
            raise CheckpointError(f"{name}: {e}") from None


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        files = [folder / "model.safetensors"] if (folder / "model.safetensors").exists() else sorted(folder.glob("model-*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no {INDEX}, model.safetensors or model-*.safetensors")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: must be JSON with a weight_map from tensor names to file names") from None
    outside = [n for n in names if not isinstance(n, str) or Path(n).name != n]
    if outside:
        raise CheckpointError(f"{index}: names {outside[0]!r}; shards must be files in the same folder")
    lost = [n for n in names if not (folder / n).is_file()]
    if lost:
        raise CheckpointError(f"{folder}: the index names shards that are not there: {', '.join(lost)}")
    return [folder / n for n in names]


def _droppable(name: str, stored: _Stored, config: K3Config) -> bool:
    """Tensors that carry nothing: of size 0 (no shared experts), or a head that is tied to the embedding."""
    return 0 in stored.shapes.get(name, [1]) or (config.tie_word_embeddings and name == "lm_head.weight")


def _misshapen(places, stored: _Stored):
    for name, (p, e) in places.items():
        if name not in stored.names:
            continue
        want = list(p.shape if e is None else p.shape[1:])
        padded_ok = name.endswith(".A_log") and len(stored.shape(name)) == 1 and stored.shape(name)[0] >= want[0]
        if stored.shape(name) != want and not padded_ok:
            yield name, stored.shape(name), want
        packed, scale = stored.shapes.get(f"{name}_packed"), stored.shapes.get(f"{name}_scale")
        if packed is not None and scale != [want[0], want[1] // mxfp4.BLOCK]:
            yield f"{name}_scale", scale, [want[0], want[1] // mxfp4.BLOCK]


def _fit(name: str, x: Tensor, shape, problems: list[str]) -> Tensor:
    """Cut the zero padding of `A_log`. It is per head; the release pads it to 128 entries."""
    if x.shape == shape:
        return x
    if x[shape[0]:].any():
        problems.append(f"misshapen: {name} has {len(x)} entries for {shape[0]} heads, and those after {shape[0]} are not zero")
    return x[:shape[0]]


def _raise_if(problems: list[str], folder: Path, most: int = 40):
    if problems:
        more = [f"... and {len(problems) - most} more"] if len(problems) > most else []
        raise CheckpointError(f"{folder}: {len(problems)} tensors do not fit the configuration\n  " + "\n  ".join(problems[:most] + more))


# --- writing ---------------------------------------------------------------------------------------------------------

def save_checkpoint(model: K3Model, folder, max_shard_bytes: int = 5 * 10 ** 9, released_layout: bool = False,
                    mxfp4_experts: bool = False) -> None:
    """Write `config.json` and the weights so that `load_checkpoint` gives back the same bits.

    released_layout: the names of the release (`language_model.`), its nested configuration, and `A_log` padded with zeros.
    mxfp4_experts: routed experts in MXFP4, as released; lossless only for weights that MXFP4 can hold. Otherwise the
    experts are written in the dtype of the model, and the written configuration has no quantization_config.

    Files are complete before they get their names: an interrupted save leaves the previous checkpoint whole.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards, weight_map, total = [{}], {}, 0
    size = 0
    for name, tensor in _to_write(model, released_layout, mxfp4_experts):
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + nbytes, total + nbytes
    written = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / f"{file}.tmp", metadata={"format": "pt"})
        written[file] = f"{file}.tmp"
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{INDEX}.tmp").write_text(json.dumps(index, indent=1), encoding="utf-8")
        written[INDEX] = f"{INDEX}.tmp"
    _config_to_write(model.config, released_layout, mxfp4_experts).to_json(folder / "config.json.tmp")
    written["config.json"] = "config.json.tmp"
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / INDEX, folder / "model.safetensors"]:
        if old.name not in written:
            old.unlink(missing_ok=True)
    for file, tmp in written.items():
        os.replace(folder / tmp, folder / file)


def _to_write(model: K3Model, released_layout: bool, mxfp4_experts: bool):
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
    if not mxfp4_experts:
        c = c.replace(quantization_config=None)
    elif c.quantization_config is None:
        c = c.replace(quantization_config=K3Config.k3().quantization_config)
    if released_layout and c.wrapper is None:
        c = c.replace(wrapper={"model_type": "kimi_k3"})
    return c
