"""What the chapters use: set-up, the package's code, live figures, exercises, the map."""

from . import draw
from .exercise import check
from .experiment import experiment
from .live import live, picture
from .model_map import here, live_map
from .palette import INK, PALETTE
from .setup import setup
from .source import show_source
from .walk import live_walk

__all__ = [
    "INK", "PALETTE", "check", "draw", "experiment", "here", "live", "live_map", "live_walk",
    "picture", "setup", "show_source",
]
