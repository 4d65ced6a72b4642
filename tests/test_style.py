"""What CONTRIBUTING.md says of the shape of the code."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("k3_teach", "book/_ext", "book/_static", "book/experiments",
                               "benchmarks", "tools")
         for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".js", ".css")]
SHOWN = [*sorted((ROOT / "k3_teach/parts").glob("*.py")), ROOT / "k3_teach/model.py",
         ROOT / "k3_teach/cache.py"]  # chapters show these, and a page has room for 88 columns


def too_long(path, most):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if len(line) > most]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_is_read_in_one_sitting(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
    assert too_long(path, 100) == []


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_room_for_every_line(path):
    assert too_long(path, 88) == []
