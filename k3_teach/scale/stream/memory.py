"""What a streamed pass takes, in bytes, before it runs; and what the process takes then.

Counted is anonymous memory: what only this process has, and what would have to be swapped.
The pages of a memory map are not: they are the system's copy of a file, dropped when
anything else needs the room. A GPU's memory is not counted either.
"""

import re
from pathlib import Path

from k3_teach.config import K3Config
from k3_teach.errors import InputError, shown
from k3_teach.parts.attn_res import TwoPhaseStream
from k3_teach.scale.cost import cache_bytes

UNITS = {"": 1, "B": 1, "KB": 10 ** 3, "MB": 10 ** 6, "GB": 10 ** 9,
         "KIB": 2 ** 10, "MIB": 2 ** 20, "GIB": 2 ** 30}
SCRATCH = 256 * 10 ** 6     # of torch and its libraries, and what MXFP4 is decoded through


def parse_bytes(text: str | int | None) -> int | None:
    """"8GB" -> 8000000000, "1.5 GiB" -> 1610612736. InputError for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text), re.ASCII)
    unit = UNITS.get(found[2].upper()) if found else None
    if unit is None or not 1 <= float(found[1]) * unit < 2 ** 63:
        raise InputError(f"the ceiling is {shown(text)}; it must be a number of bytes above 0, "
                         "such as 8GB or 7.5GiB")
    return int(float(found[1]) * unit)


def resident() -> int | None:
    """Anonymous bytes of this process in memory (RssAnon); None where Linux doesn't tell."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024
    except (OSError, TypeError):
        return None


def activations(c: K3Config, rows: int, new: int, total: int, size: int) -> int:
    """At most, for `new` of `total` tokens: the stream, and the part that needs most.

    size: bytes of a number. What is up-cast lives beside what it came from.
    """
    n, d, k, a = rows * new, c.hidden_size, c.num_experts_per_token, c.linear_attn_config
    H, both = c.num_attention_heads, size + 4
    sources = 2 if c.attn_res_block_size is None else \
        c.num_hidden_layers // c.attn_res_block_size + 3
    stream = n * d * (2 * sources * both + 2 * 4 * TwoPhaseStream.AT_ONCE)
    inner = max(c.intermediate_size, c.num_shared_experts * c.moe_intermediate_size)
    heads = rows * H * (total * 2 * (c.qk_head_dim + c.v_head_dim) * size
                        + new * total * 2 * both)
    return stream + max(
        n * a.num_heads * a.head_dim * 16 * both,                       # KDA
        heads + n * H * 4 * c.qk_head_dim * both,                       # MLA
        n * 6 * inner * both,                                           # dense and shared
        n * k * 4 * (c.moe_intermediate_size + c.expert_width) * both,  # experts
        n * c.vocab_size * (size + 12))                                 # logits, and a law


def plan(model, rows: int, new: int, cached: int, saving: bool = False) -> dict[str, int]:
    """Bytes of a `StreamedModel` for a pass over [rows, new] tokens behind `cached` ones.

    States count twice, as the old ones stay until the pass has ended, and once more while
    a run is written to its file (`saving`).
    """
    c, size = model.config, model.dtype.itemsize
    state = max(size, 4)
    states = rows * cache_bytes(c, cached + new, size, state)["total"]
    out = {"this process before it began": model.before, "pool of numbers": model.to_hold,
           "depth queries and last norm": model.kept,
           "largest weights that are copies": model.largest_made,
           "states, old and new": 2 * states, "a copy to be written": states * saving,
           "activations": activations(c, rows, new, cached + new, size),
           "scratch": SCRATCH + c.num_experts * c.hidden_size * max(size, 4)}
    return {name: value for name, value in out.items() if value}


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def refuse_above(ceiling: int | None, planned: dict[str, int]) -> None:
    """InputError, with every item, if the plan is above the ceiling."""
    total = sum(planned.values())
    if ceiling is not None and total > ceiling:
        items = ", ".join(f"{name} {gigabytes(n)}" for name, n in planned.items())
        raise InputError(f"the ceiling is {gigabytes(ceiling)}; this needs {gigabytes(total)}: "
                         f"{items}")


def assert_below(ceiling: int | None, where: str) -> int:
    """Anonymous bytes now (0 where they aren't known). InputError above the ceiling."""
    now = resident() or 0
    if ceiling is not None and now > ceiling:
        raise InputError(f"the ceiling is {gigabytes(ceiling)}; after {where} the process "
                         f"holds {gigabytes(now)}")
    return now
