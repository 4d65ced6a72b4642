"""Pictures as lists of marks: rectangles, lines, paths, dots and words, in colours a page may set.

A builder (`bars`, `lines`, `heat`, `scatter`, `flow`) turns numbers into a `Drawing`. Marks are
plain lists, so that `live` can store hundreds of drawings as a table of the marks in which they
differ, and a short script can draw any of them. `Drawing.svg` draws the same marks in Python.

    ["rect", x, y, width, height, colour, opacity]   ["line", x1, y1, x2, y2, colour, width, dashes]
    ["path", d, colour, width, dashes]               ["dot", x, y, radius, colour]
    ["text", x, y, words, anchor, colour, size, bold]

A colour is a name of PALETTE, "ink" or "white". Lengths are in units of a drawing WIDTH wide, which
is about the width of a phone, so words stay readable there.
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
    """Marks on a ground of `width` x `height`; `says` is for a reader who cannot see them."""

    height: float
    marks: list[list]
    says: str
    width: float = WIDTH

    def svg(self) -> str:
        """The drawing as an SVG image of its own, in the colours that both pages can carry."""
        body = "".join(_element(mark) for mark in self.marks)
        label = escape(self.says, quote=True)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
                f'aria-label="{label}" font-family="system-ui,sans-serif">{body}</svg>')


def _element(mark: list) -> str:
    kind, *v = mark
    if kind == "rect":
        return (f'<rect x="{v[0]}" y="{v[1]}" width="{v[2]}" height="{v[3]}" rx="2" '
                f'fill="{COLOURS[v[4]]}" opacity="{v[5]}"/>')
    if kind == "line":
        return (f'<line x1="{v[0]}" y1="{v[1]}" x2="{v[2]}" y2="{v[3]}" '
                f'stroke="{COLOURS[v[4]]}" stroke-width="{v[5]}" stroke-dasharray="{v[6]}"/>')
    if kind == "path":
        return (f'<path d="{v[0]}" fill="none" '
                f'stroke="{COLOURS[v[1]]}" stroke-width="{v[2]}" stroke-dasharray="{v[3]}"/>')
    if kind == "dot":
        return f'<circle cx="{v[0]}" cy="{v[1]}" r="{v[2]}" fill="{COLOURS[v[3]]}"/>'
    weight = "600" if v[6] else "400"
    return (f'<text x="{v[0]}" y="{v[1]}" text-anchor="{v[3]}" fill="{COLOURS[v[4]]}" '
            f'font-size="{v[5]}" font-weight="{weight}">{escape(str(v[2]))}</text>')


# --- words and numbers ----------------------------------------------------------------------------

def number(x: float, digits: int = 3) -> str:
    """`x` with `digits` significant digits, a real minus sign, an exponent only if that helps."""
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


def _path(points, colour, width, dashes="") -> list:
    places = "L".join(f"{at(x)} {at(y)}" for x, y in points)
    return ["path", "M" + places, colour, width, dashes]


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
    for x, words in [(place_x(v), number(v)) for v in ticks(x0, x1)]:
        marks += [line(x, floor, x, floor + 4), text(x, floor + 16, words, size=11)]
    for y, words in [(place_y(v), number(v)) for v in ticks(y0, y1)]:
        marks += [line(LEFT - 4, y, LEFT, y), text(LEFT - 6, y + 4, words, "end", size=11)]
    marks.append(text((LEFT + WIDTH - RIGHT) / 2, height - 6, x_label))
    marks.append(text(4, TOP - 2, y_label, "start"))
    return marks, place_x, place_y


def _legend(i, name, colour, dashes=None) -> list:
    """Row `i` of a legend: a stroke of a curve, or a dot where `dashes` is None, and the name."""
    x, y = LEFT + 10, TOP + 8 + 16 * i
    if dashes is None:
        return [["dot", x + 4, y, 3.5, colour], text(x + 14, y + 4, name, "start")]
    return [line(x, y, x + 24, y, colour, 2, dashes), text(x + 30, y + 4, name, "start")]


# --- builders -------------------------------------------------------------------------------------

def bars(values, names=None, limits=None, unit="", lit=None, digits=3, height=180) -> Drawing:
    """One bar a value, with its number. `lit`: the indices in a second colour (None: all alike)."""
    values = [float(v) for v in values]
    names = [str(n) for n in (names if names is not None else range(len(values)))]
    low, high = limits or (min(0.0, *values), max(0.0, *values) or 1.0)
    floor, top = height - 24, 22
    place = lambda v: floor - (min(max(v, low), high) - low) / (high - low) * (floor - top)
    step, zero = (WIDTH - 8) / len(values), place(max(low, min(0.0, high)))
    marks = [line(4, zero, WIDTH - 4, zero)]
    for i, (v, name) in enumerate(zip(values, names)):
        x, y, chosen = 4 + i * step, place(v), lit is not None and i in lit
        colour, opacity = ("blue", 1) if lit is None else ("rust", 1) if chosen else ("ink", 0.45)
        upper, middle = min(zero, y), x + step / 2
        marks.append(rect(x + 0.15 * step, upper, 0.7 * step, abs(y - zero), colour, opacity))
        if step >= 26:
            ink = "rust" if chosen else "ink"
            marks.append(text(middle, upper - 5, number(v, digits), "middle", ink, 11, chosen))
        marks.append(text(middle, height - 6, name, size=12 if step >= 22 else 9))
    unit = " " + unit if unit else ""
    told = ", ".join(f"{n} {number(v, digits)}{unit}" for n, v in zip(names, values))
    marked = "" if lit is None else ". Marked: " + ", ".join(names[i] for i in sorted(lit))
    return Drawing(height, marks, told + marked)


def lines(x, ys: dict, x_label="", y_label="", x_limits=None, y_limits=None, marks_at=None,
          says=None, height=230) -> Drawing:
    """Curves over a common x. `ys`: name -> values. `marks_at`: an x with a dot on every curve."""
    x = [float(v) for v in x]
    ys = {name: [float(v) for v in y] for name, y in ys.items()}
    y_limits = y_limits or spread([v for y in ys.values() for v in y])
    x_limits = x_limits or (min(x), max(x))
    marks, place_x, place_y = _axes(x_limits, y_limits, x_label, y_label, height)
    clip = lambda v: min(max(v, y_limits[0]), y_limits[1])
    told = []
    for i, (name, y) in enumerate(ys.items()):
        colour, dashes = ORDER[i % len(ORDER)], DASHES[i % len(DASHES)]
        points = [(place_x(a), place_y(clip(b))) for a, b in zip(x, y) if math.isfinite(b)]
        marks += [_path(points, colour, 2, dashes), *_legend(i, name, colour, dashes)]
        if marks_at is not None:
            near = min(range(len(x)), key=lambda j: abs(x[j] - marks_at))
            marks.append(["dot", at(place_x(x[near])), at(place_y(clip(y[near]))), 4, colour])
            told.append(f"{name} {number(y[near])}")
    if says is None:
        ranges = [f"{name} from {number(min(y))} to {number(max(y))}" for name, y in ys.items()]
        says = f"at {number(marks_at)}: " + ", ".join(told) if told else ", ".join(ranges)
    return Drawing(height, marks, says)


def heat(matrix, rows=None, columns=None, limits=None, row_label="", column_label="", says=None,
         digits=2, height=None) -> Drawing:
    """A matrix as cells; darker is larger. Cells hold their numbers while there is room."""
    matrix = [[float(v) for v in row] for row in matrix]
    n, m = len(matrix), len(matrix[0])
    low, high = limits or (min(map(min, matrix)), max(map(max, matrix)))
    size = min((WIDTH - LEFT - RIGHT) / m, 34.0)
    tall = min(size, 26)
    height = height or TOP + 14 + n * tall + (18 if column_label else 4)
    row_names, column_names = rows or range(n), columns or range(m)
    marks = [text(4, TOP - 2, row_label, "start")] if row_label else []
    for i, row in enumerate(matrix):
        y = TOP + 14 + i * tall
        if rows is not None or n <= 16:
            marks.append(text(LEFT - 6, y + tall / 2 + 4, row_names[i], "end", size=11))
        for j, v in enumerate(row):
            marks += _cell(j, y, size, v, low, high, digits)
    if columns is not None or m <= 16:
        middle = lambda j: LEFT + (j + 0.5) * size
        marks += [text(middle(j), TOP + 10, column_names[j], size=11) for j in range(m)]
    if column_label:
        marks.append(text(LEFT + m * size / 2, height - 4, column_label))
    if says is None and n * m <= 36:
        told = [", ".join(number(v, digits) for v in row) for row in matrix]
        says = "; ".join(f"row {row_names[i]}: {told[i]}" for i in range(n))
    elif says is None:
        says = f"{n} by {m} cells from {number(low)} to {number(high)}"
    return Drawing(height, marks, says)


def _cell(j, y, size, v, low, high, digits) -> list:
    """The cell of value `v` in column `j`, its top at `y`."""
    flat, tall = high == low or not math.isfinite(v), min(size, 26)
    share = 0.0 if flat else min(max((v - low) / (high - low), 0), 1)
    cell = rect(LEFT + j * size, y, size - 1, tall - 1, "blue", 0.06 + 0.94 * share)
    if size < 30:
        return [cell]
    x, colour = LEFT + (j + 0.5) * size, "white" if share > 0.55 else "ink"
    return [cell, text(x, y + tall / 2 + 4, number(v, digits), colour=colour, size=10)]


def scatter(points: dict, x_label="", y_label="", x_limits=None, y_limits=None, says=None,
            height=230) -> Drawing:
    """Dots in groups. `points`: name -> list of (x, y)."""
    points = {name: [(float(a), float(b)) for a, b in group] for name, group in points.items()}
    x_limits = x_limits or spread([a for group in points.values() for a, _ in group])
    y_limits = y_limits or spread([b for group in points.values() for _, b in group])
    marks, place_x, place_y = _axes(x_limits, y_limits, x_label, y_label, height)
    for i, (name, group) in enumerate(points.items()):
        colour = ORDER[i % len(ORDER)]
        marks += [["dot", at(place_x(a)), at(place_y(b)), 3.5, colour] for a, b in group]
        marks += _legend(i, name, colour)
    told = ", ".join(f"{len(group)} of {name}" for name, group in points.items())
    return Drawing(height, marks, says or told)


def flow(boxes: dict, arrows=(), lit=(), says=None, height=None) -> Drawing:
    """A block diagram. `boxes`: name -> (x, y, width, words), x, y the centre; `arrows`: (from, to)
    or (from, to, words); `lit`: boxes and ends that take part now. Words may hold a shape."""
    height = height or max(y for _, y, _, _ in boxes.values()) + 30
    marks = []
    for a, b, *words in arrows:
        on = lit and a in lit and b in lit
        marks += _arrow(boxes[a], boxes[b], *(("rust", 2.5) if on else ("ink", 1.5)), *words)
    for name, (x, y, width, words) in boxes.items():
        on = not lit or name in lit
        colour, opacity = ("rust" if lit else "blue", 1) if on else ("ink", 0.35)
        marks.append(rect(x - width / 2, y - 15, width, 30, colour, opacity))
        marks.append(text(x, y + 4, words, colour="white", bold=True))
    return Drawing(height, marks, says or ", ".join(str(boxes[n][3]) for n in (lit or boxes)))


def _arrow(start, end, colour, width, *words) -> list:
    """An arrow from box to box: between their sides if they are level, or else top and bottom."""
    (xa, ya, wa, _), (xb, yb, wb, _) = start, end
    level = abs(yb - ya) < 20
    dx, dy = (math.copysign(1, xb - xa), 0) if level else (0, math.copysign(1, yb - ya))
    x1, y1, x2, y2 = xa + dx * wa / 2, ya + dy * 15, xb - dx * wb / 2, yb - dy * 15
    x, y, wing = x2 - dx * 6, y2 - dy * 6, (0, 4) if level else (4, 0)
    head = [(x - wing[0], y - wing[1]), (x2, y2), (x + wing[0], y + wing[1])]
    marks = [line(x1, y1, x2, y2, colour, width), _path(head, colour, width)]
    if words:
        marks.append(text((x1 + x2) / 2 + 4, (y1 + y2) / 2 - 4, words[0], "start", size=11))
    return marks


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
        parts = v[0].replace("M", " M ").replace("L", " L ").split()  # M, x, y, L, x, y, ...
        parts[2::3] = [f"{at(float(y) + dy)}" for y in parts[2::3]]
        return ["path", " ".join(parts), *v[1:]]
    for i in {"rect": (1,), "line": (1, 3), "dot": (1,), "text": (1,)}[kind]:
        v[i] = at(v[i] + dy)
    return [kind, *v]
