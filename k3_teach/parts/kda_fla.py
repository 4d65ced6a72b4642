"""KDA on a GPU: the kernels of flash-linear-attention (`fla`), where it is installed.

`pip install -e ".[cuda]"` brings it; K3_TEACH_FLA=0 in the environment leaves it
out, so that the two can be compared. What is computed is `kda.py`, and the conventions
are nearly the same (fla-core 0.6, fla/ops/kda):

    here                                there
    q holds 1/sqrt(K) already           multiplied in, unless scale=1 is given
    g, a natural logarithm              the same; turned to base 2 inside
    S [B,H,K,V] in float32              the same, unless state_v_first is set
    gate_lower_bound of -5 or more      safe_gate: larger tiles of one product
    one token, no gradient              another kernel, all of it in float32

Its chunks multiply in 16 bits and add in float32. The products of float32 inputs would
be TF32, 10 bits of 23, so float32 stays with `kda.py`, as does float64.
"""

import functools
import os

import torch
from torch import Tensor

from k3_teach.parts.kda import prepare

OLDEST = (0, 6)     # before it, a later gate changed the last bits of an earlier output


def fla_refuses(v: Tensor) -> str | None:
    """Why `fla_kda` should not be given the values v [B,T,H,V], or None if it may."""
    if not v.is_cuda:
        return "it runs on CUDA only"
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"it would round {v.dtype} before it multiplies"
    if not 16 <= v.shape[-1] <= 256:
        return f"it takes heads of 16 to 256 channels, not {v.shape[-1]}"
    return fla_missing()


@torch.compiler.assume_constant_result      # torch.compile asks once, and does not look
def fla_missing() -> str | None:
    """Why there is no fla to use in this process, or None if there is one."""
    if os.environ.get("K3_TEACH_FLA") == "0":
        return "it is switched off: K3_TEACH_FLA=0"
    return _not_importable()


@functools.cache
def _not_importable() -> str | None:
    try:
        import fla.ops.kda
    except ImportError as error:
        return f"it is not installed ({error})"
    if tuple(int(n) for n in fla.__version__.split(".")[:2]) < OLDEST:
        return f"its version {fla.__version__} is older than 0.6"
    return None


def fla_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
            initial_state: Tensor | None = None, gate_lower_bound: float | None = None
            ) -> tuple[Tensor, Tensor]:
    """`chunk_kda` by fla's kernels (arXiv 2510.26692); `recurrent_kda` for one token.

    Shapes and errors as there, K at most 256. In chunks q and k are rounded to the
    dtype of v, as in the released model; o and S come back in float32.
    """
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    narrow = v.dtype
    q, k, v, g, beta, S = prepare(q, k, v, g, beta, initial_state)
    options = dict(scale=1.0, initial_state=S, output_final_state=True)
    if q.shape[1] == 1 and not torch.is_grad_enabled():     # it has no backward
        return fused_recurrent_kda(q, k, v, g, beta, **options)
    q, k, v = (x.to(narrow) for x in (q, k, v))
    bounded = gate_lower_bound is not None and -5 <= gate_lower_bound < 0
    o, S = chunk_kda(q, k, v, g, beta, safe_gate=bounded, **options)
    return o.float(), S
