"""Pictures made of marks: `marks` (what a drawing is), `charts` (of numbers), `blocks`."""

from .blocks import Box, blocks, flow
from .charts import bars, heat, lines, scatter, spread, ticks
from .marks import (
    ORDER,
    WIDTH,
    Drawing,
    arrow,
    at,
    dot,
    line,
    link,
    number,
    path,
    rect,
    stack,
    text,
    title,
)

__all__ = [
    "ORDER", "WIDTH", "Box", "Drawing", "arrow", "at", "bars", "blocks", "dot", "flow", "heat",
    "line", "lines", "link", "number", "path", "rect", "scatter", "spread", "stack", "text",
    "ticks", "title",
]
