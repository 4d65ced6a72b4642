"""Every figure that is quoted about K3, recomputed.

    python -m k3_teach.numbers                          a table
    python -m k3_teach.numbers --output results.json    the same as data

A figure stands here as it is quoted, a string, beside the string that the computation
gives; the verdict says what must be known for the two to agree. A test holds quoted and
computed equal, and looks for each figure on the page of its chapter.
"""

from k3_teach.config import K3Config

from . import account, balancing, sequence, width
from .figure import VERDICTS, Figure

PARTS = (width.whole, width.layer, width.moe, width.attn_res, width.situ, width.latent_moe,
         balancing.balancing, sequence.attention, sequence.kda, sequence.order, account.bills,
         account.optimiser, account.gated_mla, width.totals, account.training, account.writing,
         account.full_size)


def figures() -> list[Figure]:
    """All figures, in the order of the chapters; a few seconds."""
    c = K3Config.k3()
    return [figure for part in PARTS for figure in part(c)]
