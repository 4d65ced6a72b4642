"""What chapters import: the set-up call, the colours, and the source of the package in the page."""

import json
import random
import warnings

import numpy as np
import pytest
import torch

from k3_teach.notebook import INK, PALETTE, form, setup, show_source
from k3_teach.notebook.setup import _figure_style

from .colours import PAGES, contrast


@pytest.fixture
def as_it_was():
    """`setup` changes the whole process; put everything back for the tests that follow."""
    import matplotlib as mpl

    threads, format_warning = torch.get_num_threads(), warnings.formatwarning
    numpy_style, deterministic = np.get_printoptions(), torch.are_deterministic_algorithms_enabled()
    with mpl.rc_context():
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_printoptions(profile="default")
    np.set_printoptions(**numpy_style)
    warnings.formatwarning = format_warning


def test_setup_repeats_and_prints_short(as_it_was):
    def drawn():
        setup(3)
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    assert drawn() == drawn()
    assert torch.get_num_threads() == 1
    assert repr(torch.tensor([1e-5, 1 / 3])) == "tensor([0.0000, 0.3333])"
    assert warnings.formatwarning("mind", UserWarning, "/some/file.py", 3) == "UserWarning: mind\n"


@pytest.mark.parametrize("page", PAGES.values())
@pytest.mark.parametrize("colour, least", [*((c, 3.0) for c in PALETTE.values()), (INK, 4.2)])
def test_colours_show_on_light_and_dark(colour, least, page):
    assert contrast(colour, page) >= least


def test_figures_have_no_background():
    style = _figure_style()
    assert style["figure.facecolor"] == style["axes.facecolor"] == "none"


def test_source_is_the_file_s_own_text():
    shown = show_source(form.write, form._free_id)
    file = (form.ROOT / "k3_teach/notebook/form.py").read_text(encoding="utf-8")
    for place, code in shown.parts:
        assert place.startswith("k3_teach/notebook/form.py: ")
        assert code in file
    assert repr(shown).startswith("# k3_teach/notebook/form.py: write\ndef write(notebook):\n")
    assert shown._repr_markdown_().count("```python\ndef ") == 2
    assert str(form.ROOT) not in repr(shown) + shown._repr_markdown_()


def test_source_of_others_is_refused():
    with pytest.raises(ValueError, match="this repository's code only"):
        show_source(json.dumps)
