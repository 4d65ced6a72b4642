"""Where weights come from, one tensor at a time, under their released names.

    FolderSource     a folder in the released format, through memory maps
    VirtualSource    no file: numbers from a seed

Both have

    config                the model that the weights belong to
    read(name, dtype)     the tensor; a view where nothing has to be converted
    rows(name, ids, dtype)       rows of a matrix: ids [...] -> [..., d]
    made(name, dtype)     bytes that `read` must allocate: 0 for a view
    to_hold               bytes that the source itself is still going to allocate, in `prepare`
    origin(names)         where they lie, for a message
    identity              the same text, the same weights
"""

import re
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from k3_teach.arguments import check_arguments
from k3_teach.checkpoint import (
    FLOATS, Stored, fitted, fitting_model, released_names)
from k3_teach.config import K3Config
from k3_teach.errors import CheckpointError, InputError
from k3_teach.files import as_path
from k3_teach.init import RULES
from k3_teach.model import K3Model
from k3_teach.validate import check_dtype

SEED = "an integer from 0 to 2**63 - 1", lambda x: type(x) is int and 0 <= x < 2 ** 63
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")


def first_layers(c: K3Config, layers: int | None) -> K3Config:
    """The same model with its first `layers` layers, in their pattern. None: all.

    InputError for fewer than 1, and for more than there are.
    """
    L, a = c.num_hidden_layers, c.linear_attn_config
    if layers is None:
        return c
    if type(layers) is not int or not 1 <= layers <= L:
        raise InputError(f"layers is {layers!r}; it must be from 1 to {L}")
    kept = lambda numbers: tuple(i for i in numbers if i <= layers)
    return c.replace(num_hidden_layers=layers, kda_layers=kept(a.kda_layers),
                     full_attn_layers=kept(a.full_attn_layers))


class FolderSource(Stored):
    """The tensors of a folder. Pages of a memory map belong to the system, which drops them
    when it needs the room; what is converted or decoded is a copy, alive for one call. So
    is what a header has moved off the lines of the cache, in float64 alone: a product may
    sum its rows in another order, and float64 is where the last bit is compared.

    Everything that the headers show is checked here, before anything runs: CheckpointError
    names each file that can't be read, and each tensor that is missing, misshapen, or has
    no place. layers: only the first so many; of the others nothing is needed.

    A file must stay as it is: reading a map behind the end of a file that was cut would kill
    the process. Its size and time are looked at before each tensor, so all but a cut in that
    very moment is a CheckpointError.
    """

    to_hold = 0

    def __init__(self, folder, layers: int | None = None):
        self.folder, self.opened = as_path(folder), {}
        whole = K3Config.from_json(self.folder)
        super().__init__(self.folder)
        self.config = first_layers(whole, layers)
        beyond = range(self.config.num_hidden_layers, whole.num_hidden_layers)
        beyond = tuple(f"model.layers.{i}." for i in beyond)
        places = released_names(fitting_model(self, self.config, self.folder, beyond))
        self.shapes_of_model = {n: p.shape if e is None else p.shape[1:]
                                for n, (p, e) in places.items()}

    def prepare(self) -> None:
        """There is nothing to do."""

    def _add(self, stored: str, f, path: Path):
        super()._add(stored, f, path)
        self.opened.setdefault(path, _size_and_time(path))

    def raw(self, name: str) -> Tensor:
        """As it is stored. CheckpointError if the file has changed since it was opened."""
        path = self.paths[name]
        if _size_and_time(path) != self.opened[path]:
            raise CheckpointError(f"{path}: has changed since it was opened; a folder must stay "
                                  "as it is while it is read")
        return super().raw(name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """CheckpointError for values that MXFP4 or the padding of `A_log` can't have."""
        try:
            x = fitted(name, super().read(name, dtype), self.shapes_of_model[name])
        except CheckpointError as e:
            raise CheckpointError(f"{self.origin([name])}: {e}") from None
        x = x.to(dtype)
        return x.clone() if dtype == torch.float64 and x.data_ptr() % 64 else x

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        stored = self.raw(name) if name in self.files else self.read(name, dtype)
        return stored[ids].to(dtype)

    def made(self, name: str, dtype: torch.dtype) -> int:
        viewed = FLOATS.get(self.kind(name)) == dtype != torch.float64
        return 0 if viewed else prod(self.shapes_of_model[name]) * dtype.itemsize

    @cached_property
    def identity(self) -> str:
        """A digest of the shards' names, sizes and last bytes: the folder may be moved."""
        files = sorted((p.name, *_size_and_end(p)) for p in self.opened)
        return f"folder {blake2b(repr(files).encode(), digest_size=8).hexdigest()}"


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    except OSError:
        return None


def _size_and_end(path: Path) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4096))
        return size, file.read()


class VirtualSource:
    """Weights that no one has trained and no disk has to hold.

    A matrix is a view into one pool of numbers N(0, initializer_range), so that no time
    goes into making it; where it begins depends on the seed and its name, and two matrices
    may overlap. The pool holds the largest matrix and more, far more than a processor
    caches: reading a model's weights from it takes as long as from as many bytes of their
    own. Vectors, convolutions and depth queries are made each time, as k3_teach.init
    ("released") begins them.

    dtype: that of the pool. A tensor in another one is a copy, rounded.
    """

    BLOCK = 2 ** 26 - 5     # numbers drawn, a prime: no width of a matrix divides it

    def __init__(self, config: K3Config, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
        check_arguments({"seed": SEED}, {"seed": seed})
        check_dtype(dtype)
        self.config, self.seed, self.dtype = config, seed, dtype
        self.identity = f"virtual, seed {seed}, pool in {dtype}"
        model = K3Model(config, device="meta")
        stacks = lambda name, p: ".experts." in name and "shared" not in name
        full = lambda name: name if name.startswith("lm_head.") else f"model.{name}"
        self.shapes = {full(n): p.shape[1:] if stacks(n, p) else p.shape
                       for n, p in model.named_parameters()}
        largest = max(map(prod, self.shapes.values()))
        self.pool_size = largest + min(self.BLOCK, 16 * largest)

    def shape(self, name: str) -> torch.Size:
        """InputError for a name that the model doesn't have."""
        stacked = EXPERT.fullmatch(name)
        known = f"{stacked[1]}.{stacked[3]}" if stacked else name
        inside = not stacked or int(stacked[2]) < self.config.num_experts
        if known not in self.shapes or not inside:
            raise InputError(f"{name} is no tensor of this model")
        return self.shapes[known]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        shape, rule = self.shape(name), _rule(name)
        if rule is None:
            start = self._chance(name) % (self.pool_size - prod(shape) + 1)
            start -= start % 32                                     # a line of the cache
            return self.pool[start:start + prod(shape)].view(shape).to(dtype)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._chance(name))
            x = torch.empty(shape)
            rule(x, self.config.initializer_range)
        return x.to(dtype)

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.read(name, self.dtype)[ids].to(dtype)

    def made(self, name: str, dtype: torch.dtype) -> int:
        viewed = _rule(name) is None and dtype == self.dtype
        return 0 if viewed else prod(self.shape(name)) * dtype.itemsize

    def prepare(self) -> None:
        """Draw the pool, if that is not done."""
        self.pool

    @property
    def to_hold(self) -> int:
        return 0 if "pool" in self.__dict__ else self.pool_size * self.dtype.itemsize

    def origin(self, names) -> str:
        return self.identity

    @cached_property
    def pool(self) -> Tensor:
        """One block of numbers after another, each the same: they are drawn once."""
        generator = torch.Generator().manual_seed(self.seed)
        pool = torch.empty(self.pool_size, dtype=self.dtype)
        first = pool[:self.BLOCK]
        for piece in first.split(2 ** 22):
            piece.copy_(torch.randn(len(piece), generator=generator)
                        .mul_(self.config.initializer_range))
        for piece in pool[self.BLOCK:].split(self.BLOCK):
            piece.copy_(first[:len(piece)])
        return pool

    def _chance(self, name: str) -> int:
        """63 bits that depend on the seed and the name alone, in every process."""
        digest = blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1


def _rule(name: str):
    """How `VirtualSource` makes a small tensor; None for a matrix, which it has."""
    ending, _, released = next(rule for rule in RULES if name.endswith(rule[0]))
    return None if ending in ("", "gate.weight") else released
