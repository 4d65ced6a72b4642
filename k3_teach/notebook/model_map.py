"""The map of the model, drawn from a configuration: all layers, one of them enlarged, and the chapters.

    live_map(K3Config.k3())    the map of chapter 00; pointing at a layer enlarges it
    here("02_moe")             the small map at the head of a chapter, its part of the model lit
"""

from k3_teach.config import K3Config

from .draw import Box, Drawing, arrow, flow, line, link, path, rect, text
from .live import Live, live, picture

# What each chapter lights on the small map: boxes of the layer, kinds of layers, ends of the model.
CHAPTERS = {
    "00_map": (),
    "01_layer": ("read", "norm", "mixer", "router", "latent", "expert"),
    "02_moe": ("router", "expert", "MoE"),
    "03_attn_res": ("read", "blocks"),
    "04_situ": ("expert", "MoE", "dense"),
    "05_latent_moe": ("latent", "MoE"),
    "06_balancing": ("router", "MoE"),
    "07_attention_cache": ("mixer", "MLA"),
    "08_kda_hybrid": ("mixer", "KDA", "MLA"),
    "09_rope_nope": ("mixer", "KDA", "MLA"),
    "10_cost": ("mixer", "expert", "KDA", "MLA", "MoE"),
    "11_design": (),
    "12_sources": (),
    "13_gated_mla": ("mixer", "MLA"),
    "14_assemble": ("embed", "read", "norm", "mixer", "router", "latent", "expert", "head",
                    "KDA", "MLA", "MoE", "dense", "blocks"),
}  # fmt: skip
LEFT, RIGHT = 6, 354
COLOURS = {"KDA": "blue", "MLA": "rust", "MoE": "green", "dense": "ochre"}


def mixer(c: K3Config, layer: int) -> str:
    return "KDA" if c.is_kda(layer) else "MLA"


def feed_forward(c: K3Config, layer: int) -> str:
    return "MoE" if c.is_moe(layer) else "dense"


def depth_sources(c: K3Config, layer: int) -> tuple[int, int]:
    """How many sources the two reads of a layer have: embedding and sealed blocks, and the sum.

    A block's first layer reads before it seals, so its first read still sees the block before.
    """
    size = c.attn_res_block_size
    return (-(-layer // size) + 1, layer // size + 2) if size else (1, 1)


def says(c: K3Config, layer: int) -> str:
    """The layer in words."""
    first, second = depth_sources(c, layer)
    width = f"{c.num_experts_per_token} of {c.num_experts} experts" if c.is_moe(layer) else ""
    ffn = f"mixture of experts, {width}" if width else "dense feed-forward"
    block = f", block {layer // c.attn_res_block_size + 1}" if c.attn_res_block_size else ""
    reads = f"The depth reads have {first} and {second} sources."
    return f"Layer {layer}{block}: {mixer(c, layer)}, then {ffn}. {reads}"


# --- the strip of layers --------------------------------------------------------------------------

def column(c: K3Config, layer: float) -> float:
    """The left edge of a layer's column."""
    return LEFT + layer * (RIGHT - LEFT) / c.num_hidden_layers


def strip(c: K3Config, y: float, tall: float, lit=None, numbers=True) -> list[list]:
    """Every layer as a column: its mixer above, its feed-forward below, a bracket for each block.

    Kinds differ by colour and by height: MLA is taller than KDA, a dense layer lower than MoE.
    """
    width, marks = column(c, 1) - column(c, 0) - 0.7, []
    for layer in range(c.num_hidden_layers):
        x, kinds = column(c, layer), (mixer(c, layer), feed_forward(c, layer))
        on = [1 if lit is None or kind in lit else 0.25 for kind in kinds]
        more = tall * 0.35 if kinds[0] == "MLA" else 0
        less = tall * 0.5 if kinds[1] == "dense" else 0
        marks.append(rect(x, y - more, width, tall + more, COLOURS[kinds[0]], on[0]))
        marks.append(rect(x, y + tall + 2, width, tall - less, COLOURS[kinds[1]], on[1]))
    size = c.attn_res_block_size or c.num_hidden_layers
    colour = "rust" if lit is not None and "blocks" in lit else "ink"
    for first in range(0, c.num_hidden_layers, size):
        a = column(c, first)
        b = column(c, min(first + size, c.num_hidden_layers)) - 1.5
        foot = y + 2 * tall + 6
        marks.append(path([(a, foot), (a, foot + 4), (b, foot + 4), (b, foot)], colour, 1))
        if numbers:
            marks.append(text((a + b) / 2, foot + 16, first // size + 1, "middle", colour, 11))
    return marks


def chain(y: float, lit=None) -> list[list]:
    """From token ids to the next token, with the layers as one box."""
    marks, x = [text(4, y + 4, "ids", "start", size=10)], 21
    for words, width in (("embed", 42), ("all layers", 58), ("read", 34), ("norm", 37), ("head", 34)):
        on = lit is None or words in lit or words == "all layers"
        marks += arrow([(x, y), (x + 7, y)], "ink", 1.2)
        marks += small_box(x + 8, y, words, width, on)
        x += 9 + width
    return [*marks, *arrow([(x, y), (x + 7, y)], "ink", 1.2),
            text(x + 10, y + 4, "next token", "start", size=10)]


def small_box(x: float, y: float, words: str, width: float, on: bool) -> list[list]:
    colour, opacity, ink = ("blue", 1, "on") if on else ("ink", 0.18, "strong")
    return [rect(x, y - 9, width, 18, colour, opacity),
            text(x + width / 2, y + 3.5, words, "middle", ink, 10, True)]


def zoom(a: float, b: float, y1: float, y2: float) -> list[list]:
    """Lines that open a part of one row into the whole width of the next."""
    return [line(a, y1, LEFT, y2, "ink", 0.8), line(b, y1, RIGHT, y2, "ink", 0.8)]


# --- the large map --------------------------------------------------------------------------------

STRIP_TOP, STRIP_TALL = 74, 24
PICK = (LEFT, STRIP_TOP - 14, RIGHT, STRIP_TOP + 2 * STRIP_TALL + 24)


def model_map(c: K3Config, layer: int = 0) -> Drawing:
    """The whole model with one layer enlarged. Boxes lead to the chapters that explain them."""
    foot = STRIP_TOP + 2 * STRIP_TALL + 4
    a, b = column(c, layer), column(c, layer + 1)
    marks = chain(14)
    marks += zoom(80, 138, 24, 42) + legend(56)
    marks += strip(c, STRIP_TOP, STRIP_TALL)
    marks.append(path([(a - 1, STRIP_TOP - 11), (b, STRIP_TOP - 11), (b, foot),
                       (a - 1, foot), (a - 1, STRIP_TOP - 11)], "strong", 1.5))
    marks += zoom(a, b, foot + 20, foot + 34)
    block = f" of block {layer // c.attn_res_block_size + 1}" if c.attn_res_block_size else ""
    marks.append(text(LEFT, foot + 50, f"Layer {layer}{block}", "start", "strong", 13, True))
    inside = enlarged(c, layer, foot + 72)
    return Drawing(inside.height, marks + inside.marks, says(c, layer))


def legend(y: float) -> list[list]:
    marks = []
    for x, kind in zip((LEFT, 60, 114, 168), COLOURS):
        marks += [rect(x, y - 8, 9, 9, COLOURS[kind]), text(x + 13, y, kind, "start", size=11)]
    return [*marks, text(RIGHT, y, "numbers: chapters", "end", size=11)]


def enlarged(c: K3Config, layer: int, y: float) -> Drawing:
    """One layer, from top to bottom: twice read, norm, compute, add."""
    first, second = depth_sources(c, layer)
    half = flow(*mixer_half(c, layer, y))
    under = y + 152
    other = flow(*feed_forward_half(c, layer, under))
    marks = half.marks + other.marks
    if c.attn_res_block_size:
        marks += sources(first, y) + sources(second, under)
    for place in (y + 114, half_end(c, layer, under)):
        marks.append(text(206, place + 4, "add to the running sum", "start", size=11))
    return Drawing(half_end(c, layer, under) + 22, marks, says(c, layer))


def sources(n: int, y: float) -> list[list]:
    """What a depth read sees: the embedding, the sealed blocks, the running sum."""
    marks = []
    for i in range(n):
        words = ("running sum" if i == n - 1 and n > 1 else "embedding" if i == 0 else f"block {i}")
        top = y - 13 + 11.5 * i
        marks += [rect(6, top, 70, 10.5, "ink", 0.18), text(41, top + 8.5, words, "middle", "strong", 9)]
    return marks + arrow([(80, y), (134, y)], "ink", 1.2)


def part(x: float, y: float, words: str, chapter: str, colour: str) -> Box:
    """A box with the number of the chapter that explains it, and the way there."""
    return Box(x, y, words, colour=colour, link=f"{chapter}.ipynb", tag=str(int(chapter[:2])))


def ends(c: K3Config, y: float, bottom: float) -> tuple[dict, list]:
    """What both halves of a layer have: read, norm, add."""
    boxes = {
        "read": part(180, y, "depth read", "03_attn_res", "pink"),
        "norm": part(180, y + 42, "norm", "01_layer", "ink"),
        "+": Box(180, bottom, "+", colour="ink"),
    }
    return boxes, [("read", "norm", f"[T, {c.hidden_size}]")]


def mixer_half(c: K3Config, layer: int, y: float) -> tuple[dict, list]:
    boxes, arrows = ends(c, y, y + 114)
    if c.is_kda(layer):
        parts = ("short conv", "09_rope_nope"), ("KDA", "08_kda_hybrid"), ("gate", "13_gated_mla")
    else:
        latent = f"latent {c.kv_lora_rank} + {c.qk_rope_head_dim}"
        parts = (latent, "07_attention_cache"), ("MLA", "13_gated_mla"), ("gate", "13_gated_mla")
    x = 80
    for words, chapter in parts:
        box = part(0, y + 80, words, chapter, COLOURS[mixer(c, layer)])
        box.x, x = x + box.width / 2, x + box.width + 12
        boxes[words] = box
    a, b, gate = (words for words, _ in parts)
    return boxes, [*arrows, ("norm", a), (a, b), (b, gate), (gate, "+")]


def feed_forward_half(c: K3Config, layer: int, y: float) -> tuple[dict, list]:
    boxes, arrows = ends(c, y, half_end(c, layer, y))
    if not c.is_moe(layer):
        words = f"dense, {c.intermediate_size} wide"
        boxes["mlp"] = part(180, y + 84, words, "04_situ", COLOURS["dense"])
        return boxes, [*arrows, ("norm", "mlp"), ("mlp", "+")]
    add = lambda name, x, dy, chapter, words=None: boxes.update(
        {name: part(x, y + dy, words or name, chapter, COLOURS["MoE"])})
    add("router", 110, 86, "02_moe")
    add("bias", 176, 86, "06_balancing")
    many = f"{c.num_experts_per_token} of {c.num_experts} experts"
    add("experts", 180, 140, "04_situ", many)
    arrows += [("norm", "router"), ("router", "bias"), ("bias", "experts", str(c.num_experts))]
    last = "experts"
    if c.routed_expert_hidden_size:
        add("down", 239, 86, "05_latent_moe")
        add("up", 180, 182, "05_latent_moe", "norm, up")
        arrows += [("norm", "down"), ("down", "experts", str(c.expert_width)), ("experts", "up")]
        last = "up"
    arrows.append((last, "+"))
    if c.num_shared_experts:
        add("shared", 311, 86, "05_latent_moe")
        arrows += [("norm", "shared"), ("shared", "+")]
    return boxes, arrows


def half_end(c: K3Config, layer: int, y: float) -> float:
    """Where the feed-forward's output is added."""
    return y + (220 if c.is_moe(layer) else 122)


def live_map(c: K3Config, start: int = 0) -> Live:
    """The large map with a control for the layer; pointing at a column chooses it as well."""
    alt = ("Map of the model: ids, embedding, all layers, depth read, norm, head, next token; "
           "every layer as a column, its mixer above and its feed-forward below; one layer enlarged.")
    return live(lambda layer: model_map(c, layer), alt=alt, start={"layer": start},
                pick={"layer": PICK}, layer=range(c.num_hidden_layers))


# --- the small map --------------------------------------------------------------------------------

def here(chapter: str, c: K3Config | None = None) -> Live:
    """The small map with the part of the model that `chapter` explains lit; it leads to the map."""
    if chapter not in CHAPTERS:
        raise ValueError(f"chapter is {chapter!r}; it must be one of {', '.join(CHAPTERS)}")
    c, lit = c or K3Config.k3(), set(CHAPTERS[chapter])
    middle = c.num_hidden_layers // 2
    marks = chain(12, lit) + zoom(80, 138, 21, 30) + strip(c, 36, 9, lit, numbers=False)
    marks += zoom(column(c, middle), column(c, middle + 1), 64, 76)
    x, parts = LEFT, ("read", "norm", "mixer", "read", "norm", "router", "latent", "expert")
    for i, part in enumerate(parts):
        if i:
            marks += arrow([(x + 1, 86), (x + 5, 86)], "ink", 1)
            x += 6
        width = 6 * len(part) + 9
        marks += small_box(x, 86, part, width, part in lit)
        x += width
    told = ", ".join(CHAPTERS[chapter]) or "nothing in particular"
    drawing = Drawing(98, [link("00_map.ipynb", "the map of the model", marks)], f"Lit: {told}.")
    return picture(drawing, alt="Small map of the model with the part of this chapter lit.")
