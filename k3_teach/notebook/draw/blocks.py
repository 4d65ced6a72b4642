"""Block diagrams: boxes with words, arrows with shapes, paths that light up.

    blocks([["x"], ["router", "shared"], ["+"], ["y"]],
           [("x", "router", "[N, d]"), ("x", "shared"), ("router", "+"), ("shared", "+"),
            ("+", "y")])
"""

from dataclasses import dataclass

from .marks import WIDTH, Drawing, arrow, dot, link, rect, text

TALL, PITCH = 28, 60
OPERATORS = set("+×⊙σ−")


@dataclass
class Box:
    """A box with its centre at `x`, `y`; one of the OPERATORS as words makes a circle.

    `tag` is a few small letters in its corner; `link` the address of the page that it leads to.
    """

    x: float
    y: float
    words: str
    width: float = 0.0
    colour: str = "blue"
    link: str = ""
    tag: str = ""

    def __post_init__(self):
        wide = 24 if self.words in OPERATORS else 6.9 * len(self.words) + (20 if self.tag else 12)
        self.width = self.width or wide

    @property
    def half(self) -> float:
        return 12 if self.words in OPERATORS else TALL / 2


def blocks(rows, arrows=(), lit=None, colours=None, links=None, says=None, pitch=PITCH) -> Drawing:
    """A diagram laid out by itself, from top to bottom.

    rows: lists of names, each row spread over the width; None leaves a place empty, a dict
    name -> words gives words that differ from the name. arrows, lit, says: as in `flow`.
    colours, links: name -> colour, name -> address of a page.
    """
    boxes, colours, links = {}, colours or {}, links or {}
    for i, row in enumerate(rows):
        words = row if isinstance(row, dict) else {name: name for name in row if name is not None}
        slot = WIDTH / len(row)
        for j, name in enumerate(row):
            if name is not None:
                place = (j + 0.5) * slot, 18 + i * pitch
                look = {"colour": colours.get(name, "blue"), "link": links.get(name, "")}
                boxes[name] = Box(*place, words[name], **look)
    return flow(boxes, arrows, lit, says, height=18 + (len(rows) - 1) * pitch + 22)


def flow(boxes: dict, arrows=(), lit=None, says=None, height=None) -> Drawing:
    """A diagram of placed boxes. `boxes`: name -> Box; `arrows`: (from, to) or (from, to, words),
    words being a shape, say; `lit`: names that take part now (None: all are shown alike)."""
    height = height or max(box.y for box in boxes.values()) + 30
    marks = []
    for a, b, *words in arrows:
        missing = [name for name in (a, b) if name not in boxes]
        if missing:
            raise ValueError(f"an arrow leads to {missing[0]!r}; the boxes are {', '.join(boxes)}")
        on = lit is not None and a in lit and b in lit
        marks += _between(boxes[a], boxes[b], *(("rust", 2.5) if on else ("ink", 1.5)), *words)
    for name, box in boxes.items():
        marks += _box(box, lit is None or name in lit, lit is not None)
    told = [box.words for name, box in boxes.items() if lit is None or name in lit]
    return Drawing(height, marks, says or ", ".join(told))


def _box(box: Box, on: bool, some_are_lit: bool) -> list[list]:
    colour, opacity, ink = (box.colour, 1, "on") if on else ("ink", 0.18, "strong")
    if on and some_are_lit:
        colour = "rust"
    if box.words in OPERATORS:
        marks = [dot(box.x, box.y, 12, colour if on else "ink")]
        ink = "on"
    else:
        left, top = box.x - box.width / 2, box.y - TALL / 2
        marks = [rect(left, top, box.width, TALL, colour, opacity)]
    marks.append(text(box.x + (4 if box.tag else 0), box.y + 4, box.words, "middle", ink, 12, True))
    if box.tag:
        marks.append(text(box.x - box.width / 2 + 3, box.y - 4, box.tag, "start", ink, 9))
    return [link(box.link, box.words, marks)] if box.link else marks


def _between(a: Box, b: Box, colour, width, words="") -> list[list]:
    """An arrow from box to box: level, straight, bent, or round the boxes that lie between."""
    if abs(a.y - b.y) < 1:
        side = 1 if b.x > a.x else -1
        points = [(a.x + side * a.width / 2, a.y), (b.x - side * b.width / 2, b.y)]
        label = text((points[0][0] + points[1][0]) / 2, a.y - 6, words, "middle", "ink", 11)
    elif abs(a.x - b.x) < 2 and abs(b.y - a.y) > 1.5 * PITCH:
        side = -1 if a.x <= WIDTH / 2 else 1
        out = a.x + side * (max(a.width, b.width) / 2 + 18)
        points = [(a.x + side * a.width / 2, a.y), (out, a.y), (out, b.y),
                  (b.x + side * b.width / 2, b.y)]
        label = text(out - side * 5, (a.y + b.y) / 2, words, "start" if side < 0 else "end")
    else:
        down = 1 if b.y > a.y else -1
        start, end = a.y + down * a.half, b.y - down * b.half
        bend = end - down * min(14, abs(end - start) / 2)
        straight = [(a.x, start), (b.x, end)]
        elbow = [(a.x, start), (a.x, bend), (b.x, bend), (b.x, end)]
        points = straight if abs(a.x - b.x) < 2 else elbow
        beside = start + down * min(10, abs(end - start) * 0.72) + (0 if down > 0 else 8)
        label = text(a.x + 6, beside, words, "start", size=11)
    return arrow(points, colour, width) + ([label] if words else [])
