"""What nbval does not see: un-run cells pass there, pictures and metadata are not compared."""

from pathlib import Path

import pytest

from k3_teach.notebook import form

BOOK = Path(__file__).parents[2] / "book"


@pytest.mark.parametrize("path", sorted(BOOK.glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_form(path):
    assert form.problems(path) == []
