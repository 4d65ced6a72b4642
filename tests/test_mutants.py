"""Break the package on purpose, line by line, and see that the named test fails. See mutants.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, NOT_OURS, PITFALLS

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

BROKEN = re.compile(r"^E\s+(\w*Syntax|Indentation|Name|Attribute|Import|Type|UnboundLocal)Error", re.M)


def run(folder: Path, test: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", f"tests/{test}"]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package and its tests; the golden files are linked."""
    folder = tmp_path_factory.mktemp("mutant")
    ignore = shutil.ignore_patterns("__pycache__", "golden", "book")
    shutil.copytree(ROOT / "k3_teach", folder / "k3_teach", ignore=ignore)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
    (folder / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    return folder


def test_every_pitfall_is_made_or_is_not_ours():
    assert set(PITFALLS) == set(range(1, 41))
    made = {m.number for m in MUTANTS} - {0}
    assert made | set(NOT_OURS) == set(PITFALLS) and not made & set(NOT_OURS)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.number}: {m.what}")
def test_mistake_is_noticed(copy, mutant):
    path = copy / "k3_teach" / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"the text to change occurs {source.count(mutant.old)} times in {mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        result = run(copy, mutant.test)
    finally:
        path.write_text(source)
    assert result.returncode == 1, f"the mistake went unnoticed:\n{result.stdout[-2000:]}"
    assert not BROKEN.search(result.stdout), f"the change broke the code instead of making the mistake:\n{result.stdout[-2000:]}"
