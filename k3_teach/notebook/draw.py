"""Pictures as lists of marks: rectangles, lines, paths, dots and words, in colours that a page can change.

A builder (`bars`, `lines`, `heat`, `scatter`, `flow`) turns numbers into a `Drawing`. Marks are plain lists, so
that `live` can store hundreds of drawings as a table of the marks in which they differ, and a script of a few lines
can draw any of them. `Drawing.svg` draws the same marks in Python.

    ["rect", x, y, width, height, colour, opacity]      ["line", x1, y1, x2, y2, colour, width, dashes]
    ["path", d, colour, width, dashes]                  ["dot", x, y, radius, colour]
    ["text", x, y, words, anchor, colour, size, bold]

A colour is a name of PALETTE, "ink" or "white". Lengths are in units of a drawing WIDTH wide, which is about the width
of a phone, so words stay readable there.
"""

import math
from dataclasses import dataclass
from html import escape

from .setup import INK, PALETTE

WIDTH = 360
COLOURS = {**PALETTE, "ink": INK, "white": "#ffffff"}
ORDER = list(PALETTE)
DASHES = ("", "6 4", "2 3", "8 3 2 3", "1 3")
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 38


@dataclass
class Drawing:
    """Marks on a ground of `width` x `height`, and `says`, what a reader who cannot see them is told."""

    height: float
    marks: list[list]
    says: str
    width: float = WIDTH

    def svg(self) -> str:
        """The drawing as an SVG image of its own, in the colours that both pages can carry."""
        body = "".join(_element(mark) for mark in self.marks)
        label = escape(self.says, quote=True)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
                f'aria-label="{label}" font-family="system-ui,sans-serif">{body}</svg>')


def _element(mark: list) -> str:
    kind, *v = mark
    if kind == "rect":
        return f'<rect x="{v[0]}" y="{v[1]}" width="{v[2]}" height="{v[3]}" rx="2" fill="{COLOURS[v[4]]}" opacity="{v[5]}"/>'
    if kind == "line":
        return (f'<line x1="{v[0]}" y1="{v[1]}" x2="{v[2]}" y2="{v[3]}" stroke="{COLOURS[v[4]]}" stroke-width="{v[5]}" '
                f'stroke-dasharray="{v[6]}"/>')
    if kind == "path":
        return f'<path d="{v[0]}" fill="none" stroke="{COLOURS[v[1]]}" stroke-width="{v[2]}" stroke-dasharray="{v[3]}"/>'
    if kind == "dot":
        return f'<circle cx="{v[0]}" cy="{v[1]}" r="{v[2]}" fill="{COLOURS[v[3]]}"/>'
    weight = "600" if v[6] else "400"
    return (f'<text x="{v[0]}" y="{v[1]}" text-anchor="{v[3]}" fill="{COLOURS[v[4]]}" font-size="{v[5]}" '
            f'font-weight="{weight}">{escape(str(v[2]))}</text>')


# --- words and numbers --------------------------------------------------------------------------------------------

def number(x: float, digits: int = 3) -> str:
    """`x` with `digits` significant digits, without an exponent where that is short, and with a real minus sign."""
    x = float(x)
    if not math.isfinite(x):
        return "∞" if x > 0 else "−∞" if x < 0 else "not a number"
    if x == 0 or f"{x:.{digits}g}" in ("0", "-0"):
        return "0"
    text = f"{x:.{digits}g}" if 1e-3 <= abs(x) < 1e5 else f"{x:.{max(digits - 1, 0)}e}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def at(x: float) -> float:
    """A coordinate, rounded so that the last bits of a computation change no stored drawing."""
    x = round(float(x), 1) + 0.0
    return int(x) if x == int(x) else x


def text(x, y, words, anchor="middle", colour="ink", size=12, bold=False) -> list:
    return ["text", at(x), at(y), str(words), anchor, colour, size, int(bold)]


def line(x1, y1, x2, y2, colour="ink", width=1, dashes="") -> list:
    return ["line", at(x1), at(y1), at(x2), at(y2), colour, width, dashes]


def rect(x, y, width, height, colour="blue", opacity=1.0) -> list:
    return ["rect", at(x), at(y), at(width), at(height), colour, round(float(opacity), 2)]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def spread(values, share: float = 0.05) -> tuple[float, float]:
    """Limits that hold all finite `values` with some room."""
    finite = [v for v in map(float, values) if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room


def _axes(x_limits, y_limits, x_label, y_label, height) -> tuple[list, callable, callable]:
    """Marks of two axes, and the functions from values to places."""
    (x0, x1), (y0, y1) = x_limits, y_limits
    place_x = lambda v: LEFT + (v - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
    place_y = lambda v: height - BOTTOM - (v - y0) / (y1 - y0) * (height - BOTTOM - TOP)
    floor = height - BOTTOM
    marks = [line(LEFT, floor, WIDTH - RIGHT, floor), line(LEFT, TOP, LEFT, floor)]
    for v in ticks(x0, x1):
        marks += [line(place_x(v), floor, place_x(v), floor + 4), text(place_x(v), floor + 16, number(v), size=11)]
    for v in ticks(y0, y1):
        marks += [line(LEFT - 4, place_y(v), LEFT, place_y(v)), text(LEFT - 6, place_y(v) + 4, number(v), "end", size=11)]
    marks += [text((LEFT + WIDTH - RIGHT) / 2, height - 6, x_label), text(4, TOP - 2, y_label, "start")]
    return marks, place_x, place_y


# --- builders -----------------------------------------------------------------------------------------------------

def bars(values, names=None, limits=None, unit="", lit=None, digits=3, height=180) -> Drawing:
    """One bar a value, with its number. `lit`: the indices to draw in a second colour (None: all alike)."""
    values = [float(v) for v in values]
    names = [str(n) for n in (names if names is not None else range(len(values)))]
    low, high = limits or (min(0.0, *values), max(0.0, *values) or 1.0)
    floor, top = height - 24, 22
    place = lambda v: floor - (min(max(v, low), high) - low) / (high - low) * (floor - top)
    step = (WIDTH - 8) / len(values)
    marks = [line(4, place(max(low, min(0.0, high))), WIDTH - 4, place(max(low, min(0.0, high))))]
    for i, (v, name) in enumerate(zip(values, names)):
        x, y0, y1 = 4 + i * step, place(max(low, min(0.0, high))), place(v)
        colour = "blue" if lit is None else "rust" if i in lit else "ink"
        marks.append(rect(x + 0.15 * step, min(y0, y1), 0.7 * step, abs(y1 - y0), colour, 1 if lit is None or i in lit else 0.45))
        if step >= 26:
            marks.append(text(x + step / 2, min(y0, y1) - 5, number(v, digits), colour=colour if lit is not None and i in lit else "ink",
                              size=11, bold=lit is not None and i in lit))
        marks.append(text(x + step / 2, height - 6, name, size=12 if step >= 22 else 9))
    told = ", ".join(f"{n} {number(v, digits)}{' ' + unit if unit else ''}" for n, v in zip(names, values))
    chosen = "" if lit is None else ". Marked: " + ", ".join(names[i] for i in sorted(lit))
    return Drawing(height, marks, told + chosen)


def lines(x, ys: dict, x_label="", y_label="", x_limits=None, y_limits=None, marks_at=None, says=None, height=230) -> Drawing:
    """Curves over a common x. `ys`: name -> values. `marks_at`: an x at which every curve gets a dot and its number."""
    x = [float(v) for v in x]
    ys = {name: [float(v) for v in y] for name, y in ys.items()}
    y_limits = y_limits or spread([v for y in ys.values() for v in y])
    marks, place_x, place_y = _axes(x_limits or (min(x), max(x)), y_limits, x_label, y_label, height)
    clip = lambda v: min(max(v, y_limits[0]), y_limits[1])
    told = []
    for i, (name, y) in enumerate(ys.items()):
        colour, dashes = ORDER[i % len(ORDER)], DASHES[i % len(DASHES)]
        points = [f"{at(place_x(a))} {at(place_y(clip(b)))}" for a, b in zip(x, y) if math.isfinite(b)]
        marks.append(["path", "M" + "L".join(points), colour, 2, dashes])
        marks += [line(LEFT + 10, TOP + 8 + 16 * i, LEFT + 34, TOP + 8 + 16 * i, colour, 2, dashes),
                  text(LEFT + 40, TOP + 12 + 16 * i, name, "start")]
        if marks_at is not None:
            near = min(range(len(x)), key=lambda j: abs(x[j] - marks_at))
            marks.append(["dot", at(place_x(x[near])), at(place_y(clip(y[near]))), 4, colour])
            told.append(f"{name} {number(y[near])}")
    if says is None:
        says = f"at {number(marks_at)}: " + ", ".join(told) if told else ", ".join(
            f"{name} from {number(min(y))} to {number(max(y))}" for name, y in ys.items())
    return Drawing(height, marks, says)


def heat(matrix, rows=None, columns=None, limits=None, row_label="", column_label="", says=None, digits=2, height=None) -> Drawing:
    """A matrix as cells; darker is larger. Cells hold their numbers while there is room for them."""
    matrix = [[float(v) for v in row] for row in matrix]
    n, m = len(matrix), len(matrix[0])
    low, high = limits or (min(map(min, matrix)), max(map(max, matrix)))
    size = min((WIDTH - LEFT - RIGHT) / m, 34.0)
    height = height or TOP + 14 + n * min(size, 26) + (18 if column_label else 4)
    cell_h = min(size, 26)
    marks = [text(4, TOP - 2, row_label, "start")] if row_label else []
    for i, row in enumerate(matrix):
        y = TOP + 14 + i * cell_h
        if rows is not None or n <= 16:
            marks.append(text(LEFT - 6, y + cell_h / 2 + 4, (rows or range(n))[i], "end", size=11))
        for j, v in enumerate(row):
            share = 0.0 if high == low or not math.isfinite(v) else min(max((v - low) / (high - low), 0), 1)
            marks.append(rect(LEFT + j * size, y, size - 1, cell_h - 1, "blue", 0.06 + 0.94 * share))
            if size >= 30:
                marks.append(text(LEFT + (j + 0.5) * size, y + cell_h / 2 + 4, number(v, digits), colour="white" if share > 0.55 else "ink", size=10))
    if columns is not None or m <= 16:
        marks += [text(LEFT + (j + 0.5) * size, TOP + 10, (columns or range(m))[j], size=11) for j in range(m)]
    if column_label:
        marks.append(text(LEFT + m * size / 2, height - 4, column_label))
    if says is None:
        says = "; ".join(f"row {(rows or range(n))[i]}: " + ", ".join(number(v, digits) for v in row) for i, row in enumerate(matrix)) \
            if n * m <= 36 else f"{n} by {m} cells from {number(low)} to {number(high)}"
    return Drawing(height, marks, says)


def scatter(points: dict, x_label="", y_label="", x_limits=None, y_limits=None, says=None, height=230) -> Drawing:
    """Dots in groups. `points`: name -> list of (x, y)."""
    points = {name: [(float(a), float(b)) for a, b in group] for name, group in points.items()}
    everything = [p for group in points.values() for p in group]
    marks, place_x, place_y = _axes(x_limits or spread([a for a, _ in everything]), y_limits or spread([b for _, b in everything]),
                                    x_label, y_label, height)
    for i, (name, group) in enumerate(points.items()):
        colour = ORDER[i % len(ORDER)]
        marks += [["dot", at(place_x(a)), at(place_y(b)), 3.5, colour] for a, b in group]
        marks += [["dot", LEFT + 14, at(TOP + 8 + 16 * i), 3.5, colour], text(LEFT + 24, TOP + 12 + 16 * i, name, "start")]
    return Drawing(height, marks, says or ", ".join(f"{len(group)} of {name}" for name, group in points.items()))


def flow(boxes: dict, arrows=(), lit=(), says=None, height=None) -> Drawing:
    """A block diagram. `boxes`: name -> (x, y, width, words) with x, y the centre; `arrows`: (from, to) or (from, to, words);
    `lit`: the boxes and arrows' ends that take part now. Words may hold a shape on a second line."""
    height = height or max(y for _, y, _, _ in boxes.values()) + 30
    marks = []
    for a, b, *words in arrows:
        (xa, ya, wa, _), (xb, yb, wb, _) = boxes[a], boxes[b]
        on = not lit or (a in lit and b in lit)
        colour, width = ("rust", 2.5) if on and lit else ("ink", 1.5)
        if abs(yb - ya) < 20:
            side = math.copysign(1, xb - xa)
            x1, y1, x2, y2 = xa + side * wa / 2, ya, xb - side * wb / 2, yb
            head = f"M{at(x2 - side * 6)} {at(y2 - 4)}L{at(x2)} {at(y2)}L{at(x2 - side * 6)} {at(y2 + 4)}"
        else:
            side = math.copysign(1, yb - ya)
            x1, y1, x2, y2 = xa, ya + side * 15, xb, yb - side * 15
            head = f"M{at(x2 - 4)} {at(y2 - side * 6)}L{at(x2)} {at(y2)}L{at(x2 + 4)} {at(y2 - side * 6)}"
        marks += [line(x1, y1, x2, y2, colour, width), ["path", head, colour, width, ""]]
        if words:
            marks.append(text((x1 + x2) / 2 + 4, (y1 + y2) / 2 - 4, words[0], "start", size=11))
    for name, (x, y, width, words) in boxes.items():
        on = not lit or name in lit
        marks.append(rect(x - width / 2, y - 15, width, 30, "rust" if on and lit else "blue" if on else "ink", 1 if on else 0.35))
        marks.append(text(x, y + 4, words, colour="white", bold=True))
    return Drawing(height, marks, says or ", ".join(str(boxes[n][3]) for n in (lit or boxes)))


def stack(*drawings: Drawing, gap: float = 8) -> Drawing:
    """Drawings under one another."""
    marks, y = [], 0.0
    for drawing in drawings:
        marks += [_moved(mark, y) for mark in drawing.marks]
        y += drawing.height + gap
    return Drawing(y - gap, marks, ". ".join(d.says for d in drawings))


def _moved(mark: list, dy: float) -> list:
    kind, *v = mark
    if kind == "path":
        numbers = v[0].replace("M", " M ").replace("L", " L ").split()
        parts, is_y = [], False
        for item in numbers:
            if item in "ML":
                parts.append(item)
                is_y = False
            else:
                parts.append(f"{at(float(item) + dy)}" if is_y else item)
                is_y = not is_y
        return ["path", " ".join(parts), *v[1:]]
    v = list(v)
    for i in {"rect": (1,), "line": (1, 3), "dot": (1,), "text": (1,)}[kind]:
        v[i] = at(v[i] + dy)
    return [kind, *v]
