"""One layer of the map, enlarged: twice read, norm, compute, add.

Boxes lead to the chapters that explain them, whose numbers stand in their corners.
"""

from k3_teach.config import K3Config

from .draw import arrow, dot, link, path, rect, text

AXIS = 208              # where the main path runs down
LIST_RIGHT = 68         # the sources of a read stand left of this
SLAB = 12               # from one source to the next
NORM, ROW = 46, 98      # from a read to its norm, and to the first row of what follows
SECOND = 172            # from the first read to the second
ADD = {"mixer": 138, "feed-forward": 232}


def enlarged(c: K3Config, layer: int, y: float, sources: tuple[int, int], told
             ) -> tuple[list[list], float]:
    """Marks with the first read at `y`, and where they end, which is the same for all layers.

    sources: how many each read has. told: chapter -> where a link to it leads, in words.
    """
    box = Boxes(told)
    marks = entrance(c, box, y, sources[0]) + mixer_half(c, box, layer, y)
    marks += seal(c, box, layer, y, sources[0])
    marks += entrance(c, box, y + SECOND, sources[1])
    marks += (experts_half if c.is_moe(layer) else dense_half)(c, box, y + SECOND)
    for place in (y + ADD["mixer"], y + SECOND + ADD["feed-forward"]):
        marks += [dot(AXIS, place, 10, "ink"), text(AXIS, place + 4, "+", "middle", "on", 13, True),
                  text(AXIS - 16, place + 4, "add to the live sum", "end", size=11)]
    return marks, y + SECOND + ADD["feed-forward"] + 16


class Boxes:
    """Draws the boxes."""

    def __init__(self, told):
        self.told = told

    def __call__(self, x: float, y: float, words: str, chapter: str, colour: str) -> list[list]:
        """A box with its centre at x, y, and the way to a chapter."""
        width, number = room(words, chapter), str(int(chapter[:2]))
        marks = [rect(x - width / 2, y - 14, width, 28, colour),
                 text(x + 3.5 * len(number), y + 4, words, "middle", "on", 12, True),
                 text(x - width / 2 + 3, y - 4, number, "start", "on", 10.5)]
        return [link(f"{chapter}.ipynb", f"{words}: {self.told(chapter)}", marks)]


def room(words: str, chapter: str) -> float:
    """The width of a box."""
    return 6.9 * len(words) + 19 + 7 * len(str(int(chapter[:2])))


def down(x: float, y1: float, y2: float, words="") -> list[list]:
    label = [text(x + 5, y1 + 11, words, "start", size=10.5)] if words else []
    return arrow([(x, y1), (x, y2)]) + label


def entrance(c: K3Config, box: Boxes, y: float, sources: int) -> list[list]:
    """What both halves begin with: the depth read of so many sources, and a norm."""
    marks = box(AXIS, y + NORM, "norm", "01_layer", "ink")
    marks += down(AXIS, y + 14, y + NORM - 14, f"[T, {c.hidden_size}]")
    if not c.attn_res_block_size:
        return marks + [rect(AXIS - 56, y - 14, 112, 28, "ink", 0.18),
                        text(AXIS, y + 4, "the sum so far", "middle", "strong", 12, True)]
    for i in range(sources):
        words = "live sum" if 0 < i == sources - 1 else f"b{i}" if i else "embedding"
        top = y - 13 + SLAB * i
        marks += [rect(6, top, LIST_RIGHT - 6, SLAB - 1, "ink", 0.18),
                  text(LIST_RIGHT / 2 + 3, top + 9, words, "middle", "strong", 10.5)]
    marks += arrow([(LIST_RIGHT + 3, y), (AXIS - room("depth read", "03") / 2 - 1, y)], "ink", 1.2)
    return marks + box(AXIS, y, "depth read", "03_attn_res", "pink")


def seal(c: K3Config, box: Boxes, layer: int, y: float, sources: int) -> list[list]:
    """In the first layer of a block: the last source of its first read is kept for good.

    That is the live sum, in layer 0 the embedding; what the read returns is not sealed.
    """
    size = c.attn_res_block_size
    if not size or layer % size:
        return []
    x, foot = LIST_RIGHT / 2 + 3, y - 14 + SLAB * sources
    return [*arrow([(x, foot), (x, foot + 11)], "ink", 1.2),
            *box(x, foot + 26, "seal", "03_attn_res", "pink"),
            text(x, foot + 53, f"is now b{layer // size}", "middle", size=11)]


def mixer_half(c: K3Config, box: Boxes, layer: int, y: float) -> list[list]:
    """The token mixer as a chain of boxes."""
    if c.is_kda(layer):
        colour = "blue"
        parts = [("short conv", "09_rope_nope"), ("KDA", "08_kda_hybrid"), ("gate", "13_gated_mla")]
    else:
        colour, latent = "rust", f"latent {c.kv_lora_rank + c.qk_rope_head_dim}"
        parts = [(latent, "07_attention_cache"), ("MLA", "13_gated_mla")]
        parts += [("gate", "13_gated_mla")] if c.mla_use_output_gate else []
    widths = [room(*part) for part in parts]
    x = AXIS + 10 - (sum(widths) + 14 * (len(parts) - 1)) / 2
    marks, row = [], y + ROW
    for i, (part, width) in enumerate(zip(parts, widths)):
        middle = x + width / 2
        marks += box(middle, row, *part, colour)
        marks += arrow([(x - 14, row), (x - 1, row)]) if i else branch([middle], y)
        marks += [order(c, box, middle, row)] if part[0] == "MLA" else []
        x += width + 14
    add = y + ADD["mixer"]
    return marks + arrow([(middle, row + 14), (middle, add), (AXIS + 11, add)])


def order(c: K3Config, box: Boxes, x: float, row: float) -> list:
    """A note under MLA: whether it turns queries and keys by their positions."""
    chapter, words = "09_rope_nope", "NoPE" if c.mla_use_nope else "RoPE"
    note = [rect(x - 19, row + 15, 38, 17, "rust", 0), text(x, row + 27, words, "middle", size=11)]
    return link(f"{chapter}.ipynb", f"{words}: {box.told(chapter)}", note)


def branch(places: list[float], y: float) -> list[list]:
    """From the norm down to boxes of the next row."""
    fork = y + NORM + 24
    marks = [path([(AXIS, y + NORM + 14), (AXIS, fork)], width=1.5)]
    for x in places:
        marks += arrow([(AXIS, fork), (x, fork), (x, y + ROW - 15)])
    return marks


def dense_half(c: K3Config, box: Boxes, y: float) -> list[list]:
    row, words = y + 142, f"dense, {c.intermediate_size} wide"
    return [*down(AXIS, y + NORM + 14, row - 15, f"[T, {c.hidden_size}]"),
            *box(AXIS, row, words, "04_situ", "ochre"),
            *down(AXIS, row + 14, y + ADD["feed-forward"] - 11, f"[T, {c.hidden_size}]")]


def experts_half(c: K3Config, box: Boxes, y: float) -> list[list]:
    """Router and bias choose; the experts compute in the latent; the shared branch goes beside."""
    row, experts, up, add = y + ROW, y + 152, y + 194, y + ADD["feed-forward"]
    latent, shared = c.routed_expert_hidden_size, c.num_shared_experts
    router, bias, narrow, wide = 109, 181, 249, 321
    words = f"{c.num_experts_per_token} of {c.num_experts} experts"
    marks = box(router, row, "router", "02_moe", "green")
    marks += arrow([(router + 34, row), (bias - 28, row)])
    marks += box(bias, row, "bias", "06_balancing", "green")
    marks += down(bias, row + 14, experts - 15, f"top {c.num_experts_per_token}")
    marks += box(AXIS, experts, words, "04_situ", "green")
    marks += branch([router, narrow if latent else AXIS + 30] + [wide] * bool(shared), y)
    if latent:
        marks += box(narrow, row, "down", "05_latent_moe", "green")
        marks += down(narrow, row + 14, experts - 15, str(latent))
        marks += down(AXIS, experts + 14, up - 15)
        norm = "norm, up" if c.latent_moe_use_norm else "up"
        marks += box(AXIS, up, norm, "05_latent_moe", "green") + down(AXIS, up + 14, add - 11)
    else:
        marks += down(AXIS + 30, row - 15, experts - 15, str(c.hidden_size))
        marks += down(AXIS, experts + 14, add - 11)
    if shared:
        marks += box(wide, row, "shared", "05_latent_moe", "green")
        marks += arrow([(wide, row + 14), (wide, add), (AXIS + 11, add)])
        marks.append(text(wide + 5, row + 25, c.hidden_size, "start", size=10.5))
    return marks
