"""One token's way through a model: at each sub-layer what is read, sealed and added.

    logits, trace = model(ids, return_trace=True)
    live_walk(model.config, ids, logits, trace)
"""

from dataclasses import dataclass

from torch import Tensor

from k3_teach.config import K3Config

from .draw import Drawing, line, number, path, rect, stack, text
from .live import Live, live
from .model_map import KINDS, LEFT, RIGHT, column, feed_forward, mixer, strip


@dataclass
class Step:
    """One sub-layer. Sources have the names b0 (the embedding), b1, b2, ... and live."""

    layer: int
    kind: str                   # KDA, MLA, MoE or dense
    weights: dict[str, float]   # of the read, by source
    seals: bool                 # after the read, before anything is added
    sizes: dict[str, float]     # of the sources, when the step is done: root mean squares
    added: float                # the size of what was added


def rms(v: Tensor) -> float:
    return v.square().mean().sqrt().item()


def by_source(values: list) -> dict:
    """Values by the names of their sources, of which the last is the live sum."""
    if len(values) == 1:
        return {"b0": values[0]}
    return dict(zip([*(f"b{n}" for n in range(len(values) - 1)), "live"], values))


def walk(c: K3Config, trace: dict) -> list[Step]:
    """The steps of the last token of the first row, from the trace of a run."""
    if not c.attn_res_block_size:
        raise ValueError("attn_res_block_size is None; a walk needs a model with depth reads")
    at = lambda name: trace[name][0, -1]
    steps, sealed, live = [], [], at("L0.attn_in")
    for i in range(c.num_hidden_layers):
        for half, kind in (("attn", mixer(c, i)), ("mlp", feed_forward(c, i))):
            weights, out = at(f"L{i}.{half}_read").tolist(), at(f"L{i}.{half}_out")
            seals = half == "attn" and i % c.attn_res_block_size == 0
            if seals:
                sealed, live = [*sealed, live], 0
            live = live + out
            sizes = by_source([rms(v) for v in (*sealed, live)])
            steps.append(Step(i, kind, by_source(weights), seals, sizes, rms(out)))
    return steps


# --- the figure ---------------------------------------------------------------------------------

def live_walk(c: K3Config, ids: Tensor, logits: Tensor, trace: dict, start: int = 0) -> Live:
    """The steps, and what comes before and after them, one by one or by pointing at a layer."""
    steps = walk(c, trace)
    stops = stops_of(c, ids, logits, trace, steps)
    names, half = list(stops), (RIGHT - LEFT) / len(steps)
    tallest = max(max(*s.sizes.values(), s.added) for s in steps)
    places = [*steps[-1].sizes, "added"]

    def stop(at: str) -> Drawing:
        words, weights, sizes = stops[at]
        colour = KINDS.get(at.split(", ")[-1], ["ink"])[0]
        rows = (where(c, names.index(at), len(names), half),
                source_bars(places, weights, 1, "weights of the read", {}, "pink"),
                source_bars(places, sizes, tallest, "sizes after the step, and of what it added",
                            {"live": "strong", "added": colour}, "ink"))
        drawing = stack(*rows, gap=4)
        return Drawing(drawing.height, drawing.marks, words)

    alt = ("All layers, the present sub-layer framed; the weights of its depth read; the sizes of "
           "the sources after it.")
    return live(stop, alt=alt, steps="at", start={"at": start}, at=names,
                pick={"at": (LEFT - 2 * half, 4, RIGHT + 2 * half, 70)})


def stops_of(c: K3Config, ids: Tensor, logits: Tensor, trace: dict, steps: list[Step]) -> dict:
    """Each stop's name -> what happens in words, weights of the read, sizes."""
    first, last = steps[0].sizes["b0"], by_source(trace["output_read"][0, -1].tolist())
    best = logits[0, -1].softmax(-1).topk(3)
    likely = ", ".join(f"{i} with {p:.2f}" for i, p in zip(best.indices.tolist(), best.values))
    return {
        "ids": (f"{ids.shape[1]} token ids; the last one is {ids[0, -1]}.", {}, {}),
        "embed": (f"Its row of the embedding is the first source, b0, of size {first:.2f}.",
                  {}, {"b0": first}),
        **{f"layer {s.layer}, {s.kind}": during(c, s) for s in steps},
        "last read": (f"The last read takes {listed(last)}. A norm follows.",
                      last, steps[-1].sizes),
        "head": (f"The head: of {logits.shape[-1]} ids the likeliest are {likely}.", {}, {}),
    }


def during(c: K3Config, s: Step) -> tuple[str, dict, dict]:
    block = s.layer // c.attn_res_block_size
    kept = "the live sum" if block else "the embedding"
    sealed = f" It seals {kept} as b{block}." if s.seals else ""
    words = (f"Layer {s.layer}, {s.kind}, reads {listed(s.weights)}.{sealed} "
             f"It adds a vector of size {s.added:.2f}; the live sum is now {s.sizes['live']:.2f}.")
    return words, s.weights, s.sizes | {"added": s.added}


def listed(weights: dict) -> str:
    return ", ".join(f"{name} {w:.2f}" for name, w in weights.items())


def source_bars(places: list[str], values: dict, top: float, label: str, colours: dict,
                other: str) -> Drawing:
    """Bars in fixed places; what is not there yet has none. `other`: the colour of the rest."""
    floor, wide = 92, (RIGHT - LEFT) / len(places)
    marks = [text(4, 12, label, "start", size=11), line(LEFT, floor, RIGHT, floor)]
    for name, v in values.items():
        x, tall = LEFT + wide * (places.index(name) + 0.5), round(v / top, 2) * (floor - 34)
        colour = colours.get(name, other)
        marks += [rect(x - 0.36 * wide, floor - tall, 0.72 * wide, tall, colour),
                  text(x, floor - tall - 4, number(round(v, 2), 2), size=10.5),
                  text(x, floor + 13, name, size=11)]
    return Drawing(floor + 18, marks, "")


def where(c: K3Config, n: int, stops: int, half: float) -> Drawing:
    """All layers, with a frame around the sub-layer of stop `n`, or beside them."""
    layer, second = divmod(n - 2, 2)
    left, wide, top, tall = column(c, layer), 2 * half, 31 if second else 7, 19 if second else 24
    if not 2 <= n < stops - 2:
        left, wide, top, tall = LEFT + (n - 2) * half, half, 7, 43
    right, bottom = left + wide, top + tall
    frame = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    return Drawing(72, [*strip(c, 14, 16), path(frame, "strong", 1.5)], "")
