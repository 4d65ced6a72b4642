"""Which arithmetic is done in float32 although the model is bfloat16.

The released code up-casts in a dozen places (norms, router, activation, depth reads,
the recurrence) and stores a few small tensors in float32. Float64 stays float64
throughout: that is how the tests compare with the released model.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn


def upcast(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is float64. Any shape."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What `torch.autocast` rounds the factors of a matrix product to, where x is.

    None if it is off, and for float64, which it leaves alone. Any shape.
    """
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and x.dtype != torch.float64 else None


def as_upcast(x: Tensor):
    """A context in which matrix products on the device of x keep the dtype of their
    factors: `torch.autocast` would round them, upcast or not. Any shape."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class KeepFloat32:
    """Mixin for a module: parameters named in `float32_names` never go below float32.

    `model.to(torch.bfloat16)` would otherwise round them, and that changes the model:
    near-ties of the router flip, and an error in a decay counts again at every token.
    """

    float32_names: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        # Every .to(), .cuda(), .half() of a module ends here; `fn` converts a tensor.
        kept = [getattr(self, n) for n in self.float32_names]
        kept += [p.grad for p in kept if p.grad is not None]
        ids = {id(t) for t in kept}

        def convert(t):
            new = fn(t)
            if id(t) in ids and new.dtype in (torch.bfloat16, torch.float16):
                return t.to(new.device, torch.float32)
            return new

        return super()._apply(convert, recurse)


def float32_parameter(values: Tensor, **options) -> nn.Parameter:
    """A parameter in float32, or in float64 where that is the default. Any shape.

    options: those of `nn.Parameter`.
    """
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(values.to(dtype), **options)
