"""A prompt and what follows it, for hours if need be: saved after any layer, taken up again.

The file of a run, `run.safetensors`, holds all that the next layer needs: tokens, the cache,
the stream of the pass that is under way, and the state of the chance that draws tokens. It
is written beside and renamed, so that it is whole or not there, and has a digest of itself:
what was altered is refused. No pickle.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3_teach.arguments import COUNT, NOT_NEGATIVE, SIZE, check_arguments, optional
from k3_teach.cache import Cache, KDAState
from k3_teach.errors import CheckpointError, InputError, K3Error, shown
from k3_teach.files import as_path
from k3_teach.generate.sampling import check_sampling
from k3_teach.generate.tokens import check_room, generate
from k3_teach.scale.stream.memory import plan, refuse_above
from k3_teach.scale.stream.model import StreamedModel
from k3_teach.scale.stream.source import SEED
from k3_teach.validate import check_ids

FILE = "run.safetensors"
EVERY = 600.0       # seconds between two saves that nobody asked for
RULES = {"new_tokens": COUNT, "every": NOT_NEGATIVE, "seed": SEED, "prefill_chunk": optional(SIZE)}


class Stopped(Exception):
    """The run was asked to stop, and has: what it knows is saved, if it has a folder."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and the prompt read: see `generate`. temperature 0: greedily."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    prefill_chunk: int | None = None


class Run:
    """Iterating over it gives new tokens, one after another, of a prompt of one row.

    ids: the prompt. folder: where the run is saved: when `stop` was called, every `every`
    seconds, and at its end; None: nowhere. A run that ends can be resumed for more tokens.
    The same folder, options and number of threads give the same bits, whenever and how
    often the run is interrupted. If it ends in an error, all tokens so far are saved.
    """

    def __init__(self, model: StreamedModel, ids, new_tokens: int,
                 sampling: Sampling = Sampling(), folder=None, every: float = EVERY,
                 after_layer=lambda layer: None):
        check_sampling(sampling.temperature, sampling.top_k, sampling.top_p)
        check_arguments(RULES, asdict(sampling) | {"new_tokens": new_tokens, "every": every})
        self.model, self.sampling, self.new_tokens = model, sampling, new_tokens
        self.tokens = _token_ids(ids, model.config.vocab_size)
        self.prompt = len(self.tokens)
        check_room(model.config, 0, self.prompt, new_tokens)
        self.folder = None if folder is None else as_path(folder)
        self.every, self.after_layer = every, after_layer
        self.cache = model.new_cache()
        self.chance = torch.Generator().manual_seed(sampling.seed)
        self.asked_to_stop, self.saved_at = False, time.monotonic()
        self.under_way = None       # of a resumed run: how its first pass begins
        self.refuse_above_ceiling()

    def refuse_above_ceiling(self) -> None:
        """InputError unless the largest pass fits: that over the prompt, or the last."""
        refuse_above(self.model.ceiling, self.plan())

    def plan(self) -> dict[str, int]:
        """Bytes of the pass that needs most, saving included."""
        chunk = self.sampling.prefill_chunk or self.prompt
        passes = ((min(chunk, self.prompt), max(self.prompt - chunk, 0)),
                  (1, self.prompt + self.new_tokens))
        saving = self.folder is not None
        return max((plan(self.model, 1, new, cached, saving) for new, cached in passes),
                   key=lambda items: sum(items.values()))

    def stop(self) -> None:
        """End after the layer that is running. May be called by a signal handler."""
        self.asked_to_stop = True

    @property
    def new(self) -> list[int]:
        return self.tokens[self.prompt:]

    def __iter__(self):
        """Yields token ids. Stopped where it was asked to stop."""
        s, model = self.sampling, self.model
        unread = torch.tensor([self.tokens[len(self.cache):]], device=model.device)
        more = generate(model, unread, self.new_tokens - len(self.new),
                        temperature=s.temperature, top_k=s.top_k, top_p=s.top_p,
                        seed=self.chance, cache=self.cache, prefill_chunk=s.prefill_chunk)
        while (token := self._next(more)) is not None:
            self.tokens.append(int(token))
            yield self.tokens[-1]
        self._save_between_passes()

    def _next(self, more) -> Tensor | None:
        """A token, or None at the end. The model knows of the run only meanwhile: passes
        that others ask it for are none of the run's."""
        self.model.after_layer, self.model.paused = self._after_layer, self.under_way
        began = time.monotonic()
        try:
            token = next(more, None)
        except K3Error:         # the cache is as it was before this token
            if self.saved_at <= began:          # else the file knows more
                self._save_between_passes()
            raise
        finally:
            self.model.after_layer, self.model.paused = lambda layer, stream: None, None
        self.under_way = self.under_way if token is None else None
        return token

    def _after_layer(self, layer: int, stream) -> None:
        self.after_layer(layer)
        due = time.monotonic() - self.saved_at > self.every
        if self.folder is not None and (due or self.asked_to_stop):
            self.save(layer + 1, stream)
        if self.asked_to_stop:
            raise Stopped

    # --- the file ---------------------------------------------------------------------

    def _save_between_passes(self) -> None:
        """If one is still to be taken up, the file is as it should be."""
        if self.folder is not None and self.under_way is None:
            self.save(0, None)

    def save(self, layer: int, stream) -> None:
        """Write the file: `layer` layers of the pass under way have run. CheckpointError if
        it can't be written; an older one is then still there."""
        tensors = _stream_tensors(stream) | _cache_tensors(self.cache)
        tensors |= {"tokens": torch.tensor(self.tokens), "chance": self.chance.get_state()}
        tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        about = json.dumps({
            "identity": _identity(self.model, self.sampling), "layer": layer,
            "prompt": self.prompt, "cached": len(self.cache),
            "reads": getattr(stream, "num_read", 0)})
        _write(self.folder / FILE, tensors, {"run": about, "digest": _digest(about, tensors)})
        self.saved_at = time.monotonic()

    @classmethod
    def resume(cls, model: StreamedModel, folder, new_tokens: int,
               sampling: Sampling = Sampling(), **options) -> "Run":
        """Go on with the run in `folder`.

        CheckpointError for a file that can't be read or was altered, and for one of another
        model, other weights, another dtype or other sampling, which it names. InputError for
        fewer new tokens than it has.
        """
        file = as_path(folder) / FILE
        about, tensors = _read(file)
        _refuse_other(about["identity"], _identity(model, sampling), file)
        tokens = tensors["tokens"].tolist()
        run = cls(model, tokens[:about["prompt"]], new_tokens, sampling, folder, **options)
        run.tokens = tokens
        if len(run.new) > new_tokens:
            raise InputError(f"new_tokens is {new_tokens}; {file} has {len(run.new)} already")
        run.chance.set_state(tensors["chance"])
        run.cache.length = about["cached"]
        for i, state in enumerate(run.cache.states):
            _fill(state, tensors, f"cache.{i}", model.device)
        if about["layer"]:
            run.under_way = about["layer"], lambda stream: _restore(
                stream, tensors, about["reads"], model.device)
        return run


def _token_ids(ids, vocab_size: int) -> list[int]:
    """InputError for what are no token ids."""
    try:
        found = torch.tensor([list(ids)])
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"ids is {shown(ids)}; it must be a list of token ids") from None
    check_ids(found, vocab_size)
    return found[0].tolist()


def _identity(model: StreamedModel, sampling: Sampling) -> dict:
    """What must be the same when a run is taken up again."""
    return {"config": json.loads(model.config.to_json()), "weights": model.source.identity,
            "dtype": str(model.dtype), "sampling": asdict(sampling)}


def _digest(about: str, tensors: dict[str, Tensor]) -> str:
    """Of all that is in the file."""
    digest = blake2b(about.encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        x = x.clone(memory_format=torch.contiguous_format)      # an axis of 1 may have any stride
        digest.update(x.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _write(file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """The whole file or nothing of it; two processes don't write into one another's."""
    beside = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside, about)
        os.replace(beside, file)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file}: can't be written ({e})") from None
    finally:
        beside.unlink(missing_ok=True)


def _read(file: Path) -> tuple[dict, dict[str, Tensor]]:
    """What stands in the file. CheckpointError if that is no run, or not as it was written."""
    try:
        with safe_open(file, framework="pt") as f:
            about = f.metadata()
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}
        if about["digest"] != _digest(about["run"], tensors):
            raise CheckpointError(f"{file}: has been altered since it was written")
        return json.loads(about["run"]), tensors
    except (SafetensorError, OSError, KeyError, TypeError) as e:
        why = f" ({e})" if isinstance(e, (SafetensorError, OSError)) else ""
        raise CheckpointError(f"{file}: not the file of a streamed run{why}") from None


def _refuse_other(saved: dict, mine: dict, file: Path) -> None:
    for name, value in mine.items():
        theirs = saved.get(name)
        if isinstance(value, dict) and isinstance(theirs, dict) and theirs != value:
            field = next(k for k in {**value, **theirs} if theirs.get(k) != value.get(k))
            name, theirs, value = f"{name}.{field}", theirs.get(field), value.get(field)
        if theirs != value:
            raise CheckpointError(f"{file}: a run with {name} {theirs!r}; this one has "
                                  f"{value!r}")


def _cache_tensors(cache: Cache) -> dict[str, Tensor]:
    return {f"cache.{i}.{j}": x for i, state in enumerate(cache.states)
            for j, x in enumerate(state.tensors())}


def _fill(state, tensors: dict[str, Tensor], name: str, device) -> None:
    """Give one layer's state back what was kept of it."""
    kept = [tensors[key].to(device) for j in range(4) if (key := f"{name}.{j}") in tensors]
    if not kept:
        return
    if isinstance(state, KDAState):
        state.S, state.taps = kept[0], tuple(kept[1:])
    else:
        state.append(kept[0])


def _stream_tensors(stream) -> dict[str, Tensor]:
    """The live sum, the sealed sources, and what was read ahead; of no stream nothing."""
    if stream is None:
        return {}
    out = {"stream.prefix": stream.prefix}
    out |= {f"stream.sealed.{i}": x for i, x in enumerate(getattr(stream, "sealed", []))}
    for i, (mixture, log_sum) in enumerate(getattr(stream, "waiting", [])):
        out |= {f"stream.mixture.{i}": mixture, f"stream.log_sum.{i}": log_sum}
    return out


def _restore(stream, tensors: dict[str, Tensor], reads: int, device) -> None:
    """The reverse, into a stream that has just begun."""
    def all_of(name):
        count = sum(key.startswith(f"stream.{name}.") for key in tensors)
        return [tensors[f"stream.{name}.{i}"].to(device) for i in range(count)]

    stream.prefix = tensors["stream.prefix"].to(device)
    if hasattr(stream, "sealed"):
        stream.sealed, stream.num_read = all_of("sealed"), reads
        stream.waiting = list(zip(all_of("mixture"), all_of("log_sum")))
