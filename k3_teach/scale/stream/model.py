"""The ordinary model, whose weights are lent to it: each module has them for one call.

`StreamedModel` is a `K3Model` on the meta device, where tensors have shapes and no numbers.
Nothing of the mathematics is written again. What differs is who holds the weights:

    depth queries, last norm    the model: small, and wanted before the first layer
    a layer without experts     the layer, while it runs: `Lent`
    experts                     nobody: a `Stack` reads a matrix when it is multiplied by,
                                so only those that the router chose are ever read
    embedding                   the source, which is asked for rows
    head                        the head, while it runs

Shapes: B rows, T tokens, d model width, E experts.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from k3_teach.cache import Cache
from k3_teach.errors import InputError
from k3_teach.model import K3Model
from k3_teach.parts.grouped import by_expert
from k3_teach.scale.stream.clock import READING, Clock, part_of
from k3_teach.scale.stream.memory import (
    assert_below, parse_bytes, plan, refuse_above, resident)
from k3_teach.validate import check_device, check_dtype, check_ids


class Stack:
    """One matrix of each expert [E, b, a], read when it is used: it stands in for a tensor
    in `experts_few` and `experts_grouped`.

    read(e) -> the matrix [b, a] of expert e.
    """

    def __init__(self, read, shape: torch.Size):
        self.read, self.shape = read, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, e: int) -> Tensor:
        return self.read(e)

    def unbind(self):
        """E matrices that are read as their transpose is asked for."""
        return [Unread(self.read, e) for e in range(len(self))]

    @property
    def mT(self) -> "Stack":
        return self         # as torch.grouped_mm wants it: see below

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """torch.grouped_mm(x, stack): the kernel wants all experts at once. Instead, one
        product for each expert in use."""
        if "offs" not in (kwargs or {}):
            return NotImplemented
        x, stack = args
        parts = zip(by_expert(x, kwargs["offs"]), stack.unbind())
        return torch.cat([x_e @ w_e.T for x_e, w_e in parts if len(x_e)])


class Unread:
    """The matrix of an expert that may never be used."""

    def __init__(self, read, e: int):
        self.read, self.e = read, e

    @property
    def T(self) -> Tensor:
        return self.read(self.e).T


class Lent(nn.Module):
    """A module on the meta device that is lent its weights for the time of a call.

    prefix: what stands before the names of its parameters in a release.
    """

    def __init__(self, module: nn.Module, prefix: str, read):
        super().__init__()
        self.module, self.prefix, self.read = module, prefix, read

    def weights(self) -> dict[str, torch.dtype]:
        """What is lent: name in the release -> dtype."""
        named = self.module.named_parameters()
        return {f"{self.prefix}{name}": p.dtype for name, p in named if p.is_meta}

    def forward(self, *args):
        lent = {name.removeprefix(self.prefix): self.read(name, dtype)
                for name, dtype in self.weights().items()}
        return functional_call(self.module, lent, args)


class LentLayer(Lent):
    """A layer; afterwards the model looks at the stream. A pass that is taken up again
    leaves out the layers that it has run."""

    def __init__(self, layer: nn.Module, index: int, model: "StreamedModel"):
        super().__init__(layer, f"model.layers.{index}.", model.read)
        self.index, self.after, self.runs = index, model._after, model._runs

    def query_factors(self, name: str):
        return self.module.query_factors(name)

    def forward(self, stream, *args):
        if self.runs(self.index):
            super().forward(stream, *args)
            self.after(self.index, stream)


class Rows(nn.Module):
    """The embedding: ids [B,T] -> [B,T,d], of which only these rows are read."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids)


class StreamedModel(K3Model):
    """`K3Model` without weights of its own; `forward`, `new_cache` and errors as there, and
    `generate` takes it, too. Gradients are not kept.

    source: see source.py. dtype: that of the arithmetic.
    ceiling: the most anonymous memory that the process may have, in bytes or as "8GB".
        A pass that is going to need more is refused before it runs, and the process is
        measured after every layer. None: not looked at. See memory.py.
    after_layer(layer, stream): called when a layer has run; it may raise.
    paused: (layers, restore), or None. The next pass, and it alone, leaves out so many layers;
        restore(stream) gives the stream what they left.

    InputError for what a pass makes of its numbers: above the ceiling, or not finite, with
    the layer and where its weights come from; the cache is then as it was.
    """

    def __init__(self, source, dtype: torch.dtype = torch.bfloat16, device="cpu",
                 ceiling: str | int | None = None, after_layer=lambda layer, stream: None):
        check_dtype(dtype)
        check_device(device)
        if dtype is None or torch.device(device).type == "meta":
            raise InputError(f"dtype is {dtype} and device {device}; a streamed model needs a "
                             "dtype, and a device that holds numbers")
        self.before, self.to_hold = resident() or 0, source.to_hold
        super().__init__(source.config, device="meta", dtype=dtype)
        self.eval().requires_grad_(False)
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        self.ceiling, self.after_layer = parse_bytes(ceiling), after_layer
        self.clock, self.peak, self.used = Clock(self.device), 0, []
        self.first, self.paused = 0, None
        self.kept = self._keep_small()
        self._lend()
        lent = [module.weights() for module in (*self.layers, self.lm_head)]
        self.largest_made = max(sum(source.made(n, dtype) for n, dtype in names.items())
                                for names in lent) + self._expert_made()

    # --- lending ----------------------------------------------------------------------

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the source, on the device of the model; counted."""
        with self.clock.part(READING):
            x = self.source.read(name, dtype).to(self.device)
        return self._count(name, x)

    def _rows(self, ids: Tensor) -> Tensor:
        name = "model.embed_tokens.weight"
        x = self.source.rows(name, ids.to("cpu"), self.dtype).to(self.device)
        return self._count(name, x)

    def _count(self, name: str, x: Tensor) -> Tensor:
        self.clock.now.nbytes[part_of(name, self.config)] += x.nbytes
        self.used.append(name)
        return x

    def _keep_small(self) -> int:
        """Read depth queries and the last norm, once and for all -> their bytes."""
        small = [(name, p) for name, p in self.named_parameters()
                 if "_res_" in name or name == "norm.weight"]
        for name, p in small:
            module, _, attribute = name.rpartition(".")
            values = self.read(f"model.{name}", p.dtype).clone()
            if not bool(values.isfinite().all()):
                raise InputError(f"model.{name} holds NaN or infinity; it comes from "
                                 f"{self.source.origin([f'model.{name}'])}")
            kept = nn.Parameter(values, requires_grad=False)
            setattr(self.get_submodule(module), attribute, kept)
        return sum(p.nbytes for _, p in small)

    def _lend(self) -> None:
        """Put the lenders in the place of what holds weights."""
        for i, layer in enumerate(self.layers):
            for name, module in layer.named_modules():
                self._lend_experts(module, f"model.layers.{i}.{name}")
                self._watch(module, f"layers.{i}.{name}.")
            self.layers[i] = LentLayer(layer, i, self)
        head = "model.embed_tokens." if self.config.tie_word_embeddings else "lm_head."
        self.embed_tokens, self.lm_head = Rows(self._rows), Lent(self.lm_head, head, self.read)
        self.clock.watch(self.embed_tokens, "embedding")
        self.clock.watch(self.lm_head, "output head")

    def _lend_experts(self, module: nn.Module, name: str) -> None:
        if not name.endswith(".experts"):
            return
        for matrix in ("w1", "w2", "w3"):
            shape, dtype = getattr(module, matrix).shape, getattr(module, matrix).dtype
            delattr(module, matrix)
            setattr(module, matrix, Stack(
                lambda e, matrix=matrix, dtype=dtype:
                    self.read(f"{name}.{e}.{matrix}.weight", dtype), shape))

    def _watch(self, module: nn.Module, name: str) -> None:
        """Count the outermost module of each part."""
        outer = (".self_attn.", ".mlp.", ".gate.", ".experts.", ".shared_experts.")
        if name.endswith(outer) or ".routed_expert_" in name:
            self.clock.watch(module, part_of(name, self.config))

    def _expert_made(self) -> int:
        c = self.config
        i = next((i for i in range(c.num_hidden_layers) if c.is_moe(i)), None)
        name = f"model.layers.{i}.block_sparse_moe.experts.0.w1.weight"
        return 0 if i is None else self.source.made(name, self.dtype)

    # --- a pass -----------------------------------------------------------------------

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, cache=None,
                return_trace: bool = False):
        check_ids(ids, self.config.vocab_size)
        cached = len(cache) if isinstance(cache, Cache) else 0
        refuse_above(self.ceiling, plan(self, *ids.shape, cached))
        self.source.prepare()
        self.used = []
        with self.clock.forward_pass(ids.shape[1], cached), torch.no_grad():
            return super().forward(ids, attention_mask, cache, return_trace)

    def _run(self, *args):
        logits, trace = super()._run(*args)     # if this raises, the cache forgets the pass
        self._check_numbers(logits, "the output head")
        return logits, trace

    def new_stream(self, x: Tensor):
        stream, (self.first, restore) = super().new_stream(x), self.paused or (0, None)
        if restore is not None:
            restore(stream)
        self.clock.now.first_layer, self.paused = self.first, None
        return stream

    def _runs(self, layer: int) -> bool:
        return layer >= self.first

    def _after(self, layer: int, stream) -> None:
        self.clock.layer(self._check_numbers(stream.prefix, f"layer {layer}"))
        self.after_layer(layer, stream)

    def _check_numbers(self, x: Tensor, where: str) -> int:
        """What a layer or the head gives is finite, and the process below the ceiling -> its
        anonymous bytes."""
        if not bool(x.isfinite().all()):
            raise InputError(f"{where} gives NaN or infinity; its weights come from "
                             f"{self.source.origin(self.used)}")
        held, self.used = assert_below(self.ceiling, where), []
        self.peak = max(self.peak, held)
        return held
