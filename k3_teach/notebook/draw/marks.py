"""A drawing is a list of marks, so that it can be stored as data and drawn in Python or in a page.

    ["rect", x, y, width, height, colour, opacity]   ["line", x1, y1, x2, y2, colour, width, dashes]
    ["path", d, colour, width, dashes]               ["dot", x, y, radius, colour]
    ["text", x, y, words, anchor, colour, size, bold]
    ["link", address, words, [marks]]                marks that lead to another page

A colour is a name of `palette.LIGHT`. Lengths are in units of a drawing WIDTH wide, which is about
the width of a phone, so words stay readable there. `live` stores hundreds of drawings as a table of
the marks in which they differ; `Drawing.svg` draws the same marks in Python.
"""

import math
from dataclasses import dataclass
from html import escape

from ..palette import LIGHT, PALETTE

WIDTH = 360
ORDER = list(PALETTE)
DASHES = ("", "6 4", "2 3", "8 3 2 3", "1 3")


@dataclass
class Drawing:
    """Marks on a ground of `width` x `height`; `says` is for a reader who cannot see them."""

    height: float
    marks: list[list]
    says: str
    width: float = WIDTH

    def svg(self) -> str:
        """The drawing as an SVG image of its own, in the colours of a light page."""
        body = "".join(map(_element, self.marks))
        label = escape(self.says, quote=True)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
                f'aria-label="{label}" font-family="system-ui,sans-serif">'
                f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>')


def _element(mark: list) -> str:
    kind, *v = mark
    if kind == "rect":
        return (f'<rect x="{v[0]}" y="{v[1]}" width="{v[2]}" height="{v[3]}" rx="2" '
                f'fill="{LIGHT[v[4]]}" opacity="{v[5]}"/>')
    if kind == "line":
        return (f'<line x1="{v[0]}" y1="{v[1]}" x2="{v[2]}" y2="{v[3]}" '
                f'stroke="{LIGHT[v[4]]}" stroke-width="{v[5]}" stroke-dasharray="{v[6]}"/>')
    if kind == "path":
        return (f'<path d="{v[0]}" fill="none" '
                f'stroke="{LIGHT[v[1]]}" stroke-width="{v[2]}" stroke-dasharray="{v[3]}"/>')
    if kind == "dot":
        return f'<circle cx="{v[0]}" cy="{v[1]}" r="{v[2]}" fill="{LIGHT[v[3]]}"/>'
    if kind == "link":
        return "<g>" + "".join(map(_element, v[2])) + "</g>"  # a picture file leads nowhere
    weight = "600" if v[6] else "400"
    return (f'<text x="{v[0]}" y="{v[1]}" text-anchor="{v[3]}" fill="{LIGHT[v[4]]}" '
            f'font-size="{v[5]}" font-weight="{weight}">{escape(str(v[2]))}</text>')


# --- words and numbers ----------------------------------------------------------------------------

def number(x: float, digits: int = 3) -> str:
    """`x` with `digits` significant digits, a real minus sign, an exponent only if that helps."""
    x = float(x)
    if not math.isfinite(x):
        return "∞" if x > 0 else "−∞" if x < 0 else "not a number"
    if x == 0 or f"{x:.{digits}g}" in ("0", "-0"):
        return "0"
    if 1e-3 <= abs(x) < 1e5:
        text = f"{float(f'{x:.{digits}g}'):f}"
        text = text.rstrip("0").rstrip(".")
    else:
        text = f"{x:.{max(digits - 1, 0)}e}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def at(x: float) -> float:
    """A coordinate, rounded so that the last bits of a computation change no stored drawing."""
    if not math.isfinite(x):
        raise ValueError(f"a coordinate is {float(x)}; it must be finite")
    x = round(float(x), 1) + 0.0
    return int(x) if x == int(x) else x


# --- marks ----------------------------------------------------------------------------------------

def text(x, y, words, anchor="middle", colour="ink", size=12, bold=False) -> list:
    return ["text", at(x), at(y), str(words), anchor, colour, size, int(bold)]


def line(x1, y1, x2, y2, colour="ink", width=1, dashes="") -> list:
    return ["line", at(x1), at(y1), at(x2), at(y2), colour, width, dashes]


def rect(x, y, width, height, colour="blue", opacity=1.0) -> list:
    return ["rect", at(x), at(y), at(width), at(height), colour, round(float(opacity), 2)]


def dot(x, y, radius=3.5, colour="blue") -> list:
    return ["dot", at(x), at(y), radius, colour]


def path(points, colour="ink", width=2, dashes="") -> list:
    """A line through `points`, a list of (x, y)."""
    places = "L".join(f"{at(x)} {at(y)}" for x, y in points)
    return ["path", "M" + places, colour, width, dashes]


def link(address: str, words: str, marks: list[list]) -> list:
    """Marks that lead to `address`; `words` say where."""
    return ["link", address, words, marks]


def arrow(points, colour="ink", width=1.5) -> list[list]:
    """A line through `points` with a head at its end."""
    (x, y), (xb, yb) = points[-2], points[-1]
    length = math.hypot(xb - x, yb - y) or 1.0
    dx, dy = (xb - x) / length, (yb - y) / length
    wing = lambda side: (xb - 6 * dx - 4 * side * dy, yb - 6 * dy + 4 * side * dx)
    return [path(points, colour, width), path([wing(1), (xb, yb), wing(-1)], colour, width)]


# --- drawings put together ------------------------------------------------------------------------

def stack(*drawings: Drawing, gap: float = 8) -> Drawing:
    """Drawings under one another."""
    marks, y = [], 0.0
    for drawing in drawings:
        marks += [moved(mark, y) for mark in drawing.marks]
        y += drawing.height + gap
    return Drawing(y - gap, marks, ". ".join(d.says for d in drawings if d.says))


def title(words: str, height: float = 18) -> Drawing:
    """A line of words, to stand above another drawing."""
    return Drawing(height, [text(4, height - 4, words, "start")], "")


def moved(mark: list, dy: float) -> list:
    """The mark, `dy` further down."""
    kind, *v = mark
    if kind == "link":
        return ["link", *v[:2], [moved(inner, dy) for inner in v[2]]]
    if kind == "path":
        parts = v[0].replace("M", " M ").replace("L", " L ").split()  # M, x, y, L, x, y, ...
        parts[2::3] = [f"{at(float(y) + dy)}" for y in parts[2::3]]
        return ["path", " ".join(parts), *v[1:]]
    for i in {"rect": (1,), "line": (1, 3), "dot": (1,), "text": (1,)}[kind]:
        v[i] = at(v[i] + dy)
    return [kind, *v]
