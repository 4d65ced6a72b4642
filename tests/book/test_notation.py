"""The page of symbols says what the package says."""

import re
from pathlib import Path

from k3_teach.config import K3Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book/notation.md").read_text(encoding="utf-8")
HEADINGS = ("Along depth", "Experts", "Load", "Along the sequence", "Costs", "Training")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "k3_teach").rglob("*.py"))


def rows_of(heading):
    """The cells of every row of the table under a heading, its head left out."""
    table = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_sizes_are_those_of_the_configuration():
    c, compared = K3Config.k3(), 0
    for _, _, field, value in rows_of("Sizes"):
        name = field.strip("`")
        if hasattr(c, name) and value.isdigit():
            assert getattr(c, name) == int(value), name
            compared += 1
    assert compared >= 6
    assert f"{c.max_position_embeddings:,}" in PAGE and c.rms_norm_eps == 1e-5
    blocks = -(-c.num_hidden_layers // c.attn_res_block_size)
    assert f"1 to {blocks + 1} |" in PAGE


def test_names_in_the_code_column_are_in_the_code():
    names = set()
    for heading in HEADINGS:
        for row in rows_of(heading):
            names |= set(re.findall(r"`([\w.]+)`", row[2]))
    assert len(names) > 15
    for name in names:
        last = name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", SOURCE), name


def test_every_letter_with_several_meanings_has_them_above():
    symbols = " ".join(row[0] for heading in (*HEADINGS, "Everywhere", "Sizes")
                       for row in rows_of(heading))
    for letter, meanings in rows_of("One letter, several meanings"):
        inner = letter.strip("$")
        assert len(re.findall(re.escape(inner), symbols)) >= 2 and ";" in meanings, letter
