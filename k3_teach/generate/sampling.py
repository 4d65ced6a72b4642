"""From logits to the next token: a law, cut where its tail is not trusted, and a draw.

    p = softmax(z / temperature)         temperature 0: all on the largest logit
    top_k: only the k most likely tokens
    top_p: of those, the fewest most likely ones whose sum reaches top_p

in this order, and what is left made to sum to 1 (top-k: Fan et al. 2018, arXiv
1805.04833; top-p: Holtzman et al. 2019, arXiv 1904.09751). Of equally likely tokens,
the one with the lower number counts as more likely.

Shapes: V tokens of the vocabulary; laws are float64 [..., V].
"""

import sys
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from k3_teach.arguments import FLOATS
from k3_teach.errors import InputError, shown


def sampling_law(logits: Tensor, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float | None = None) -> Tensor:
    """The law of the next token, in float64: logits [..., V] -> [..., V].

    None: no cut. A top_k above V keeps all. The token that crosses top_p is kept, so
    that there is always one. InputError for options out of range, and for logits of
    which none is largest.
    """
    check_sampling(temperature, top_k, top_p)
    check_logits(logits)
    z = logits.double()
    if temperature == 0:
        return torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1)
    # The largest first becomes 0: it stays so at the smallest temperature.
    z = (z - z.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return z.softmax(-1)
    z, order = z.sort(dim=-1, descending=True, stable=True)  # ties: by their number
    law = z[..., :top_k].softmax(-1)
    if top_p is not None and top_p < 1:
        reached = law.cumsum(-1).roll(1, -1)                # by the tokens before
        reached[..., 0] = 0
        law = law.masked_fill(reached >= top_p, 0)
        law = law / law.sum(-1, keepdim=True)
    return torch.zeros_like(z).scatter_(-1, order[..., :top_k], law)


def draw(law: Tensor, generator: torch.Generator | None = None) -> int:
    """A token of the law [V], drawn where the generator is: the same on any device."""
    law = law if generator is None else law.to(generator.device)
    return int(torch.multinomial(law, 1, generator=generator))


def generators(seed, rows: int) -> list[torch.Generator | None]:
    """A source of chance for each row, so that no row notices its neighbours.

    seed s: row i has seed s + i, so that it draws what it would draw alone with that
    seed. A torch.Generator goes on from where it is; it serves one row. None: torch's
    own, which all rows share. Or a list with one of these for each row. InputError for
    anything else.
    """
    if _is_real(seed, Integral) and 0 <= seed < 2 ** 63:
        return [torch.Generator().manual_seed(int(seed) + i) for i in range(rows)]
    if seed is None or isinstance(seed, torch.Generator) and rows == 1:
        return [seed] * rows
    if isinstance(seed, Sequence) and len(seed) == rows:
        if not any(isinstance(s, Sequence) for s in seed):
            return [generators(s, 1)[0] for s in seed]
    raise InputError(f"seed is {shown(seed)}; it must be an integer from 0 to 2**63 - 1, "
                     f"None, or a list of {rows}, one for each row, which may be a "
                     "torch.Generator, too")


def check_sampling(temperature, top_k, top_p) -> None:
    """InputError for what is out of range, or no number."""
    most = 2 ** 62 if isinstance(temperature, Integral) else sys.float_info.max
    if not _is_real(temperature) or not 0 <= temperature <= most:
        raise InputError(f"temperature is {shown(temperature)}; it must be a number of at "
                         "least 0, and finite")
    if top_k is not None and (not _is_real(top_k, Integral) or top_k < 1):
        raise InputError(f"top_k is {shown(top_k)}; it must be an integer of at least 1, "
                         "or None")
    if top_p is not None and (not _is_real(top_p) or not 0 < top_p <= 1):
        raise InputError(f"top_p is {shown(top_p)}; it must be above 0 and at most 1, or "
                         "None")


def check_logits(logits: Tensor, place: str = "") -> None:
    """InputError unless each row of [..., V] has a largest logit that is a number.

    One NaN is enough to fail; a logit of minus infinity is a token that cannot come.
    """
    floats = isinstance(logits, Tensor) and logits.dtype in FLOATS
    floats = floats and logits.ndim > 0
    if not floats or logits.layout != torch.strided or logits.is_meta or not logits.numel():
        raise InputError(f"the logits{place} are {shown(logits)}; they must be floats "
                         "[..., V] with values")
    largest = logits.amax(-1)
    if not bool(largest.isfinite().all()):
        wrong = float(largest[~largest.isfinite()][0])
        raise InputError(f"the largest logit{place} is {wrong}; it must be a finite "
                         "number: look at the weights, or at the checkpoint that they "
                         "came from")


def _is_real(x, kind=Real) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)
