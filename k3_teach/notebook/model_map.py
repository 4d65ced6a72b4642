"""The map of the model, drawn from a configuration: all layers, one of them enlarged, the chapters.

    live_map(K3Config.k3())    the map of chapter 00; pointing at a layer enlarges it
    here("02_moe")             the small map at the head of a chapter, its part of the model lit
"""

from k3_teach.config import K3Config

from .draw import Drawing, arrow, line, link, path, rect, text
from .layer_map import enlarged
from .live import Live, live, picture

STEPS = ("embed", "read", "norm", "mixer", "router", "latent", "expert", "head")
WHOLE = (*STEPS, "KDA", "MLA", "MoE", "dense", "blocks")
# Each chapter's title, and what it lights on the small map: steps, kinds of layers, blocks.
CHAPTERS = {
    "00_map": ("The whole model on one page", WHOLE),
    "01_layer": ("What happens in one layer", ("read", "norm", "mixer", *STEPS[4:7])),
    "02_moe": ("Few experts per token", ("router", "expert", "MoE")),
    "03_attn_res": ("Attention over depth", ("read", "blocks")),
    "04_situ": ("Inside an expert", ("expert", "MoE", "dense")),
    "05_latent_moe": ("Experts at half width", ("latent", "MoE")),
    "06_balancing": ("Keeping the experts busy", ("router", "MoE")),
    "07_attention_cache": ("What attention keeps", ("mixer", "MLA")),
    "08_kda_hybrid": ("A state that is corrected", ("mixer", "KDA", "MLA")),
    "09_rope_nope": ("Where order comes from", ("mixer", "KDA", "MLA")),
    "10_cost": ("Cache, compute, time", ("mixer", "expert", "KDA", "MLA", "MoE")),
    "11_design": ("The optimiser, and why K3 is built so", WHOLE),
    "12_sources": ("Sources, and where they disagree", ()),
    "13_gated_mla": ("Gated MLA, and three KDA to one", ("mixer", "KDA", "MLA")),
    "14_assemble": ("The parts become the model", WHOLE),
    "15_train": ("Training a small one", WHOLE),
    "16_generate": ("Writing text", ("mixer", "KDA", "MLA", "head")),
    "17_full_scale": ("At full size", WHOLE),
    "18_porting": ("Forty ways to get it wrong", WHOLE),
}  # fmt: skip
LEFT, RIGHT = 6, 354
ACCENT = "strong"       # what is lit on the small map; colours are for kinds, pink for reads
# Kinds of sub-layers: a colour, and the chapter that a legend leads to.
KINDS = {
    "KDA": ("blue", "08_kda_hybrid"),
    "MLA": ("rust", "07_attention_cache"),
    "MoE": ("green", "02_moe"),
    "dense": ("ochre", "04_situ"),
}
ENDS = {"embed": "14_assemble", "read": "03_attn_res", "norm": "01_layer", "head": "14_assemble"}


# --- what the map knows -------------------------------------------------------------------------

def mixer(c: K3Config, layer: int) -> str:
    return "KDA" if c.is_kda(layer) else "MLA"


def feed_forward(c: K3Config, layer: int) -> str:
    return "MoE" if c.is_moe(layer) else "dense"


def depth_sources(c: K3Config, layer: int) -> tuple[int, int]:
    """How many sources the two reads of a layer have: sealed ones and the live sum.

    A block's first layer reads, then seals: its first read still sees the sum before.
    """
    size = c.attn_res_block_size
    return (-(-layer // size) + 1, layer // size + 2) if size else (1, 1)


def says(c: K3Config, layer: int) -> str:
    """The layer in words."""
    size, (first, second) = c.attn_res_block_size, depth_sources(c, layer)
    ffn = "a dense feed-forward"
    if c.is_moe(layer):
        ffn = f"a mixture of {c.num_experts} experts, {c.num_experts_per_token} for each token"
    if not size:
        return f"Layer {layer}: {mixer(c, layer)}, then {ffn}."
    number = layer // size
    kept = "the live sum" if number else "the embedding"
    seal = f" Between its two reads {kept} is sealed as b{number}." if layer % size == 0 else ""
    many = f"{first} source{'s' * (first > 1)} and {second}"
    return (f"Layer {layer}, in block {number + 1}: {mixer(c, layer)}, then {ffn}. "
            f"Its depth reads have {many}.{seal}")


# --- the strip of layers ------------------------------------------------------------------------

def column(c: K3Config, layer: float) -> float:
    """The left edge of a layer's column."""
    return LEFT + layer * (RIGHT - LEFT) / c.num_hidden_layers


def strip(c: K3Config, y: float, tall: float, lit=None, words=True) -> list[list]:
    """Every layer as a column: its mixer above, its feed-forward below, a bracket for each block.

    Kinds differ by colour and by height: MLA is taller than KDA, dense lower than MoE. One mark
    holds all columns of a kind; kinds that are not `lit` are thin lines (None: all are lit).
    """
    width, marks, foot = column(c, 1) - column(c, 0) - 0.7, [], y + tall + 2
    spans = {"KDA": (y, y + tall), "MLA": (y - 0.35 * tall, y + tall),
             "MoE": (foot, foot + tall), "dense": (foot, foot + 0.5 * tall)}
    for kind, (top, bottom) in spans.items():
        kinds = [(mixer(c, i), feed_forward(c, i)) for i in range(c.num_hidden_layers)]
        layers = [i for i, both in enumerate(kinds) if kind in both]
        on = lit is None or kind in lit
        colour, stroke = (KINDS[kind][0], round(width, 1)) if on else ("ink", 0.8)
        middles = [column(c, i) + width / 2 for i in layers]
        lines = [path([(x, top), (x, bottom)])[1] for x in middles]
        if lines:
            marks.append(["path", "".join(lines), colour, stroke, ""])
    return marks + brackets(c, foot + tall + 4, lit, words)


def brackets(c: K3Config, y: float, lit, words: bool) -> list[list]:
    size, marks = c.attn_res_block_size, []
    colour, width = (ACCENT, 2) if lit is not None and "blocks" in lit else ("ink", 1)
    for first in range(0, c.num_hidden_layers if size else 0, size or 1):
        a = column(c, first)
        b = column(c, min(first + size, c.num_hidden_layers)) - 1.5
        marks.append(path([(a, y), (a, y + 4), (b, y + 4), (b, y)], colour, width))
        if words:
            label = f"block {first // size + 1}" if b - a > 36 else first // size + 1
            marks.append(text((a + b) / 2, y + 15, label, "middle", colour, 10.5))
    return marks


def chain(c: K3Config, y: float, lit=None, links=False) -> tuple[list[list], float, float]:
    """From token ids to the next token, with the layers as one box, and where that box begins and
    ends. Steps that are not `lit` are pale (None: all have the colour of what they are)."""
    layers = f"{c.num_hidden_layers} layers"
    steps = ["embed", layers, *(["read"] if c.attn_res_block_size else []), "norm", "head"]
    marks, x, span = [text(4, y + 4, "ids", "start", size=10.5)], 21, (0, 0)
    if lit and lit - {"embed", "head"}:
        lit = lit | {layers}
    for words in steps:
        width = 6.4 * len(words) + 11
        span = (x + 8, x + 8 + width) if words == layers else span
        marks += arrow([(x, y), (x + 7, y)], "ink", 1.2)
        colour = "pink" if words == "read" else "ink"
        box = small_box(x + 8, y, words, width, colour if lit is None else shade(words, lit))
        to = ENDS.get(words) if links else None
        marks += [link(f"{to}.ipynb", f"{words}: {told(to)}", box)] if to else box
        x += 9 + width
    end = text(x + 10, y + 4, "next token", "start", size=10.5)
    return [*marks, *arrow([(x, y), (x + 7, y)], "ink", 1.2), end], *span


def shade(words: str, lit: set) -> str:
    return ACCENT if words in lit else "pale"


def small_box(x: float, y: float, words: str, width: float, colour: str) -> list[list]:
    colour, opacity, ink = ("ink", 0.18, "strong") if colour == "pale" else (colour, 1, "on")
    return [rect(x, y - 9, width, 18, colour, opacity),
            text(x + width / 2, y + 3.5, words, "middle", ink, 10.5, True)]


def told(chapter: str) -> str:
    """A chapter in words: where a link leads."""
    return f"chapter {int(chapter[:2])}, {CHAPTERS[chapter][0]}"


def zoom(a: float, b: float, y1: float, y2: float) -> list[list]:
    """Lines that open a part of one row into the whole width of the next."""
    return [line(a, y1, LEFT, y2, "ink", 0.8), line(b, y1, RIGHT, y2, "ink", 0.8)]


# --- the large map ------------------------------------------------------------------------------

STRIP_TOP, STRIP_TALL = 74, 24
PICK = (LEFT, STRIP_TOP - 14, RIGHT, STRIP_TOP + 2 * STRIP_TALL + 24)


def model_map(c: K3Config, layer: int = 0) -> Drawing:
    """The whole model with one layer enlarged. Boxes lead to the chapters that explain them."""
    foot = STRIP_TOP + 2 * STRIP_TALL + 4
    a, b = column(c, layer) - 0.8, column(c, layer + 1) + 0.1
    top = STRIP_TOP - 11
    marks, *layers = chain(c, 14, links=True)
    marks += zoom(*layers, 24, 42) + legend(56) + strip(c, STRIP_TOP, STRIP_TALL)
    marks.append(path([(a, top), (b, top), (b, foot), (a, foot), (a, top)], "strong", 1.5))
    marks += zoom(a, b, foot + 20, foot + 32)
    block = f" in block {layer // c.attn_res_block_size + 1}" if c.attn_res_block_size else ""
    marks.append(text(LEFT, foot + 46, f"Layer {layer}{block}", "start", "strong", 13, True))
    inside, height = enlarged(c, layer, foot + 72, depth_sources(c, layer), told)
    return Drawing(height, marks + inside, says(c, layer))


def legend(y: float) -> list[list]:
    marks = []
    for x, (kind, (colour, chapter)) in zip((LEFT, 60, 114, 168), KINDS.items()):
        room = rect(x - 2, y - 13, 16 + 7 * len(kind), 18, colour, 0)     # something to hit
        entry = [room, rect(x, y - 8, 9, 9, colour), text(x + 13, y, kind, "start", size=11)]
        marks.append(link(f"{chapter}.ipynb", f"{kind}: {told(chapter)}", entry))
    return [*marks, text(RIGHT, y, "numbers: chapters", "end", size=10.5)]


def live_map(c: K3Config, start: int = 0) -> Live:
    """The large map with a control for the layer; pointing at a column chooses it as well."""
    alt = ("Map of the model: ids, embedding, all layers, depth read, norm, head, next token; "
           "every layer as a column, mixer above, feed-forward below; one layer enlarged.")
    return live(lambda layer: model_map(c, layer), alt=alt, start={"layer": start},
                pick={"layer": PICK}, layer=range(c.num_hidden_layers))


# --- the small map ------------------------------------------------------------------------------

def here(chapter: str, c: K3Config | None = None) -> Live:
    """The small map with the part of the model that `chapter` explains lit; it leads to the map."""
    if chapter not in CHAPTERS:
        raise ValueError(f"chapter is {chapter!r}; it must be one of {', '.join(CHAPTERS)}")
    c, lit = c or K3Config.k3(), set(CHAPTERS[chapter][1])
    middle = c.num_hidden_layers // 2
    marks, *layers = chain(c, 12, lit)
    marks += zoom(*layers, 21, 30) + strip(c, 36, 9, lit, words=False)
    marks += zoom(column(c, middle), column(c, middle + 1), 64, 76) + steps_of_a_layer(c, 97, lit)
    names = "everything" if lit == set(WHOLE) else ", ".join(CHAPTERS[chapter][1]) or "nothing"
    drawing = Drawing(120, [link("00_map.ipynb", "the map of the model", marks)], f"Lit: {names}.")
    return picture(drawing, alt="Small map of the model with the part of this chapter lit.")


def steps_of_a_layer(c: K3Config, y: float, lit: set) -> list[list]:
    """A layer's steps in a row; in place of its feed-forward the parts of that.

    Router and latent stand above one another: both begin at the norm, and the expert needs both.
    """
    read = ["read"] if c.attn_res_block_size else []
    latent = ["latent"] if c.routed_expert_hidden_size else []
    marks, x = [], LEFT
    for step in [*read, "norm", "mixer", *read, "norm"]:
        marks += arrow([(x - 6, y), (x - 1, y)], "ink", 1) if marks else []
        marks += small_box(x, y, step, 6 * len(step) + 12, shade(step, lit))
        x += 6 * len(step) + 19
    for step, place in zip(["router", *latent], (y - 11, y + 11) if latent else (y,)):
        marks += arrow([(x - 6, y), (x + 4, place)], "ink", 1)
        marks += small_box(x + 6, place, step, 48, shade(step, lit))
        marks += arrow([(x + 55, place), (x + 64, (place + y) / 2)], "ink", 1)
    return marks + small_box(x + 66, y, "expert", 48, shade("expert", lit))
