"""What the chapters use: set-up, the package's code, live figures, the tool that executes them."""

from . import draw
from .live import live
from .setup import INK, PALETTE, setup
from .source import show_source

__all__ = ["INK", "PALETTE", "draw", "live", "setup", "show_source"]
