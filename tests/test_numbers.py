"""The quoted figures: each is what its computation gives, and each is on its chapter's page."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from k3_teach.notebook.model_map import CHAPTERS
from k3_teach.numbers import VERDICTS, figures
from k3_teach.numbers.__main__ import main

ROOT = Path(__file__).parents[1]
DIFFERENT = {"corrected", "not reproducible"}  # the other verdicts say that both strings are the same


def words_of(path):
    """What a chapter says: Markdown, captions and printed output, dashes and spaces alike."""
    words = []
    for cell in nbformat.read(path, as_version=4).cells:
        words.append(json.dumps(cell.metadata.get("mystnb", {}), ensure_ascii=False))
        if cell.cell_type == "markdown":
            words.append(cell.source)
        for output in cell.get("outputs", ()):
            words.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    text = " ".join(words).replace("−", "-").replace("{,}", ",").replace("\u2009", " ")
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def found():
    return figures()


def test_figures_are_what_was_quoted(found):
    for f in found:
        assert f.verdict in VERDICTS and f.chapter in CHAPTERS, f
        assert (f.computed == f.quoted) == (f.verdict not in DIFFERENT), f
        assert f.note or f.verdict == "agrees", f"say which convention, or what is missing: {f}"
    assert len({(f.chapter, f.what) for f in found}) == len(found) > 40


def test_figures_are_on_their_pages(found):
    written = {f.chapter: ROOT / f"book/{f.chapter}.ipynb" for f in found}
    pages = {name: words_of(path) for name, path in written.items() if path.exists()}
    missing = [f"{f.chapter}: {f.page or f.quoted}" for f in found
               if f.chapter in pages and (f.page or f.quoted) not in pages[f.chapter]]
    assert not missing, missing


def test_the_command_writes_them_all(found, tmp_path, capsys):
    main(["--output", str(tmp_path / "results.json")])
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [row["what"] for row in data["figures"]] == [f.what for f in found]
    assert all(f.what in printed and f.computed in printed for f in found)
    assert data["verdicts"] == VERDICTS


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "none/results.json")])
    assert "none/results.json" in capsys.readouterr().err
