"""Charts: numbers become a Drawing that says them, too."""

import math
from itertools import groupby

from .marks import DASHES, ORDER, WIDTH, Drawing, dot, line, number, path, rect, text

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 38


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
    low, high = extent(values)
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room


def extent(values) -> tuple[float, float]:
    """The least and the largest of the finite `values`."""
    finite = [v for v in map(float, values) if math.isfinite(v)] or [0.0]
    return min(finite), max(finite)


def _axes(x_limits, y_limits, x_label, y_label, height) -> tuple[list, callable, callable]:
    """Marks of two axes, and the functions from values to places."""
    (x0, x1), (y0, y1) = x_limits, y_limits
    if not (x0 < x1 and y0 < y1):
        raise ValueError(f"the limits are {x_limits} and {y_limits}; each must be (low, high)")
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
        return [dot(x + 4, y, 3.5, colour), text(x + 14, y + 4, name, "start")]
    return [line(x, y, x + 24, y, colour, 2, dashes), text(x + 30, y + 4, name, "start")]


def bars(values, names=None, limits=None, unit="", lit=None, digits=3, height=180) -> Drawing:
    """One bar a value, with its number. `lit`: the indices in a second colour (None: all alike)."""
    values = [float(v) for v in values]
    names = [str(n) for n in (names if names is not None else range(len(values)))]
    low, high = limits or (min(0.0, *values), max(0.0, *values) or 1.0)
    if not low < high:
        raise ValueError(f"the limits are {limits}; they must be (low, high)")
    floor, top = height - 24, 22
    place = lambda v: floor - (min(max(v, low), high) - low) / (high - low) * (floor - top)
    step, zero = (WIDTH - 8) / len(values), place(max(low, min(0.0, high)))
    marks = [line(4, zero, WIDTH - 4, zero)]
    for i, (v, name) in enumerate(zip(values, names, strict=True)):
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
    marked = ". Marked: " + ", ".join(names[i] for i in sorted(lit)) if lit else ""
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
        points = [(place_x(a), place_y(clip(b)) if math.isfinite(b) else None)
                  for a, b in zip(x, y, strict=True)]
        runs = [list(run) for seen, run in groupby(points, lambda p: p[1] is not None) if seen]
        marks += [path(run, colour, 2, dashes) for run in runs]
        marks += _legend(i, name, colour, dashes)
        if marks_at is not None:
            near = min(range(len(x)), key=lambda j: abs(x[j] - marks_at))
            marks.append(dot(place_x(x[near]), place_y(clip(y[near])), 4, colour))
            told.append(f"{name} {number(y[near])}")
    if says is None:
        seen = {name: [v for v in y if math.isfinite(v)] or [math.nan] for name, y in ys.items()}
        ranges = [f"{name} from {number(min(y))} to {number(max(y))}" for name, y in seen.items()]
        says = f"at {number(marks_at)}: " + ", ".join(told) if told else ", ".join(ranges)
    return Drawing(height, marks, says)


def heat(matrix, rows=None, columns=None, limits=None, row_label="", column_label="", says=None,
         digits=2, height=None) -> Drawing:
    """A matrix as cells; stronger is larger. Cells hold their numbers while there is room."""
    matrix = [[float(v) for v in row] for row in matrix]
    n, m = len(matrix), len(matrix[0])
    low, high = limits or extent([v for row in matrix for v in row])
    size = min((WIDTH - LEFT - RIGHT) / m, 34.0)
    tall = min(size, 26)
    height = height or TOP + 14 + n * tall + (18 if column_label else 4)
    row_names, column_names = rows or range(n), columns or range(m)
    marks = [text(4, TOP - 2, row_label, "start")] if row_label else []
    for i, row in enumerate(matrix):
        y = TOP + 14 + i * tall
        if tall >= 11 and (rows is not None or n <= 16):
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
    cell = rect(LEFT + j * size, y, size - 1, tall - 1, "blue", 0.06 + 0.56 * share)
    if size < 30:
        return [cell]
    words = number(v, digits)
    return [cell, text(LEFT + (j + 0.5) * size, y + tall / 2 + 4, words, "middle", "strong", 10.5)]


def scatter(points: dict, x_label="", y_label="", x_limits=None, y_limits=None, says=None,
            height=230) -> Drawing:
    """Dots in groups. `points`: name -> list of (x, y)."""
    points = {name: [(float(a), float(b)) for a, b in group] for name, group in points.items()}
    x_limits = x_limits or spread([a for group in points.values() for a, _ in group])
    y_limits = y_limits or spread([b for group in points.values() for _, b in group])
    marks, place_x, place_y = _axes(x_limits, y_limits, x_label, y_label, height)
    for i, (name, group) in enumerate(points.items()):
        colour = ORDER[i % len(ORDER)]
        inside = [(a, b) for a, b in group if x_limits[0] <= a <= x_limits[1]
                  and y_limits[0] <= b <= y_limits[1]]
        marks += [dot(place_x(a), place_y(b), 3.5, colour) for a, b in inside]
        marks += _legend(i, name, colour)
    told = ", ".join(f"{len(group)} of {name}" for name, group in points.items())
    return Drawing(height, marks, says or told)
