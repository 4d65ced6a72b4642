"""One call at the top of a chapter, so that it prints the same on every machine and every run.

    from k3_teach.notebook import setup
    setup()
"""

import os
import random
import warnings

import numpy as np
import torch

from .palette import INK, PALETTE


def setup(seed=0):
    """Fix seeds, threads, printed digits, figure style and the form of warnings."""
    _repeatable_numbers(seed)
    _short_printing()
    _figures()
    warnings.formatwarning = _warning_without_path


def _repeatable_numbers(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # one order of summation
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU needs it for the next line
    torch.use_deterministic_algorithms(True)


def _short_printing():
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=80)
    np.set_printoptions(precision=4, suppress=True, linewidth=80)


def _figures():
    """Figures as vectors, the same bytes on every run; the book's pages give them their colours.

    The small PNG beside each is for viewers that do not show an SVG they do not trust.
    """
    import matplotlib as mpl

    mpl.rcParams.update(_figure_style())
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:
        return
    if get_ipython() is not None:
        set_matplotlib_formats("svg", "png", metadata={"Date": None, "Creator": None})


def _figure_style():
    from cycler import cycler

    axes = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor")
    ink = (*axes, "text.color", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(ink, INK),
        "axes.prop_cycle": cycler(color=list(PALETTE.values())),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "figure.figsize": (5.0, 2.8),  # the words are then readable on a phone, too
        "figure.dpi": 100,
        "font.size": 10,
        "grid.color": INK,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "svg.hashsalt": "k3",
    }


def _warning_without_path(message, category, *_args, **_kwargs):
    return f"{category.__name__}: {message}\n"
