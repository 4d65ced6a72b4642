"""What the chapters use: one set-up call, one way to show source, one tool that executes notebooks."""

from .setup import INK, PALETTE, setup
from .source import show_source

__all__ = ["INK", "PALETTE", "setup", "show_source"]
