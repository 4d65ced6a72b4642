"""An adapter makes an implementation fit the kit: an object or a module with three functions.

    load(folder) -> model               a folder in the released format
    forward(model, ids, attention_mask, state) -> (logits, state)
    trace(model, ids) -> {name: array}

Arrays are NumPy's. For a port to PyTorch, in a file `my_adapter.py`:

    load = MyModel.from_folder

    def forward(model, ids, attention_mask, state):
        mask = None if attention_mask is None else torch.from_numpy(attention_mask)
        logits, state = model(torch.from_numpy(ids), mask, state)
        return logits.numpy(), state

    def trace(model, ids):
        return {}

`python -m k3_teach.conformance my_adapter`, run beside that file, does the rest.

- load: `folder` (a `Path`) has `config.json`, with `text_config` or without, and one
  `model.safetensors`; names begin with `language_model.` or not; experts are plain numbers or
  MXFP4, A_log has one entry for each head or zeros behind them. Compute in float64 if you
  can, whatever the file holds. A folder that cannot be right must raise an error.
- forward: ids int64 [B,T]; logits [B,T,vocab], at padding anything. attention_mask is None or
  int64 [B, all tokens so far], 0 at padding, which stands on the left. It stands on the right
  only where state is None, and the state that comes back is not used.
- state: None begins a text. Otherwise it is what `forward` gave back, whatever that is: it may
  be continued more than once, by one token or by many, so a call must not write into it.
- trace: what the port has of the entries in `trace.py`, of one text [1,T], as "L0.g"; the more,
  the closer a mistake is located. A state of KDA is [K,V].
- save(model, folder), a fourth, is optional.
"""

import importlib

import numpy as np
import torch

from k3_teach import checkpoint, saving
from k3_teach.conformance import reference
from k3_teach.conformance.folder import read_folder
from k3_teach.errors import InputError

FUNCTIONS = ("load", "forward", "trace")


class K3Teach:
    """The adapter of this package's own model."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def load(self, folder):
        return checkpoint.load_checkpoint(folder, dtype=self.dtype)

    def forward(self, model, ids, attention_mask, state):
        mask = None if attention_mask is None else torch.as_tensor(attention_mask)
        if mask is not None and state is None and not mask[:, -1].all():
            cache = None            # padding on the right: nothing to continue
        else:
            cache = model.new_cache(len(ids)) if state is None else state.copy()
        with torch.no_grad():
            logits = model(torch.as_tensor(ids), mask, cache)
        return logits.numpy(), cache

    def trace(self, model, ids):
        with torch.no_grad():
            _, trace = model(torch.as_tensor(ids), return_trace=True)
        return {name: value.numpy() for name, value in trace.items()}

    def save(self, model, folder):
        saving.save_checkpoint(model, folder, released_layout=True)


class Reference:
    """The adapter of `reference`: its state is the text so far, which it reads again."""

    def load(self, folder):
        config, weights = read_folder(folder)
        heads = config.get("text_config", config)["linear_attn_config"]["num_heads"]
        if any(w.flatten()[heads:].any() for n, w in weights.items() if n.endswith("A_log")):
            raise InputError(f"A_log is not zero behind the {heads} heads")
        reference.forward(config, weights, [0])     # KeyError if a tensor is missing
        return config, weights

    def forward(self, model, ids, attention_mask, state):
        before = np.zeros((len(ids), 0), int) if state is None else state
        ids = np.concatenate([before, ids], 1)
        mask = np.ones_like(ids) if attention_mask is None else attention_mask
        rows = []
        for row, real in zip(ids, mask.astype(bool)):
            logits, _ = reference.forward(*model, row[real])
            rows.append(np.zeros((len(row), logits.shape[-1])))
            rows[-1][real] = logits
        return np.stack(rows)[:, before.shape[1]:], ids

    def trace(self, model, ids):
        return reference.forward(*model, ids[0])[1]


k3_teach = K3Teach(torch.float64)
k3_teach_float32 = K3Teach(torch.float32)
written_out = Reference()


def find(name: str):
    """The adapter `module:attribute`, or `module`. InputError if there is none, and if it
    lacks one of the three functions."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as e:
        raise InputError(f"{module}: cannot be imported ({type(e).__name__}: {e}); an adapter is "
                         "named module:attribute or module") from e
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part):
            raise InputError(f"{module} has no {attribute}; an adapter is named "
                             "module:attribute or module")
        found = getattr(found, part)
    return checked(found)


def checked(adapter):
    """The adapter itself. InputError if it lacks one of the three functions."""
    missing = [f for f in FUNCTIONS if not callable(getattr(adapter, f, None))]
    if missing:
        raise InputError(f"the adapter {getattr(adapter, '__name__', type(adapter).__name__)} "
                         f"lacks {', '.join(missing)}; it needs {', '.join(FUNCTIONS)}")
    return adapter
