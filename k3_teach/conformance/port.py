"""A port as the probes see it: an adapter whose answers are checked, with the special models
loaded into it, each once."""

import traceback
from pathlib import Path

import numpy as np

from k3_teach.conformance.folder import write_folder
from k3_teach.conformance.models import text, write_model
from k3_teach.conformance.trace import known


class PortError(Exception):
    """The port raised an error, or gave back what an adapter may not."""


class NotChecked(Exception):
    """The port has not what the rest of a probe needs."""


NEW = object()      # the state of a text that begins


class Port:
    """adapter: see `adapters`; folder: where the special models are written."""

    def __init__(self, adapter, folder):
        self.adapter, self.folder, self.models = adapter, Path(folder), {}

    def call(self, function: str, *arguments):
        try:
            return getattr(self.adapter, function)(*arguments)
        except Exception as e:
            at, said = traceback.extract_tb(e.__traceback__)[-1], " ".join(str(e).split())
            raise PortError(f"{function} raised {type(e).__name__}: {said[:200]} "
                            f"({Path(at.filename).name}, line {at.lineno})") from e

    def load(self, name: str, *folder):
        """The port's model of a folder of this name; of `folder` (configuration, tensors)
        where it is given, else of the special model."""
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            write_folder(path, *folder) if folder else write_model(name, path)
        return self.call("load", path)

    def model(self, name: str):
        if name not in self.models:
            self.models[name] = self.load(name)
        return self.models[name]

    def refuses(self, name: str) -> bool:
        """Does the port raise an error when it loads this special model?"""
        try:
            self.load(name)
        except PortError:
            return True
        return False

    def run(self, model, ids, mask=None, state=NEW):
        """Logits [B,T,vocab] in float64, and the state. ids [B,T]."""
        if state is None:
            raise NotChecked("forward gave back None as the state, so no text can be continued")
        ids, mask = np.array(ids, np.int64), None if mask is None else np.array(mask, np.int64)
        out = self.call("forward", model, ids, mask, None if state is NEW else state)
        if not isinstance(out, tuple) or len(out) != 2:
            raise PortError(f"forward gave back {type(out).__name__}; it must be (logits, state)")
        logits, state = out
        if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
            kind = getattr(logits, "dtype", type(logits).__name__)
            raise PortError(f"forward gave back logits of {kind}; they must be a NumPy array "
                            "of float16, float32 or float64")
        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise PortError(f"forward gave back logits of shape {list(logits.shape)} for ids "
                            f"of shape {list(ids.shape)}; they must be [B, T, vocab]")
        return logits.astype(np.float64), state

    def once(self, name: str, ids=None):
        """Logits [T,vocab] of one text in one call; None: the text of the model."""
        ids = text(name) if ids is None else ids
        return self.run(self.model(name), ids[None])[0][0]

    def pieces(self, name: str, ids, sizes, state=NEW):
        """The same in pieces of these sizes, the last taking the rest."""
        ends, out = [0, *np.cumsum(sizes), len(ids)], []
        for a, b in zip(ends, ends[1:]):
            if b > a:
                logits, state = self.run(self.model(name), ids[None, a:b], None, state)
                out.append(logits[0])
        return np.concatenate(out), state

    def trace(self, name: str, ids) -> dict[str, np.ndarray]:
        """What the port has of the trace of one text."""
        trace = self.call("trace", self.model(name), np.array(ids, np.int64)[None])
        arrays = isinstance(trace, dict) and all(
            type(x) is np.ndarray and x.dtype.kind in "fiub" for x in trace.values())
        if not arrays:
            raise PortError("trace gave back something else than a dictionary of NumPy arrays")
        if trace and not any("." in key and known(key) for key in trace):
            raise PortError(f"trace gave back {', '.join(list(trace)[:3])} and no entry of a "
                            'layer, as "L0.attn_in"; see k3_teach/conformance/trace.py')
        return trace
