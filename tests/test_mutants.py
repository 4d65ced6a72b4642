"""Break the package on purpose, line by line, and see that the named test fails. See mutants.py."""

import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, NOT_OURS, PITFALLS

ROOT = Path(__file__).parents[1]
BROKEN = re.compile(r"^E\s+(\w*Syntax|Indentation|Name|Attribute|Import|Type|UnboundLocal)Error", re.M)

# These imports take longer than most of the tests: one process makes them, and each mistake gets a fork of it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "hypothesis.extra.numpy", "pytest"])


def run(folder: Path, test: str) -> tuple[int, str]:
    """The exit status of pytest on a test of the copy, and what it says."""
    said = folder / "said.txt"
    process = FORKS.Process(target=run_here, args=(folder, test, said))
    process.start()
    process.join()
    return process.exitcode, said.read_text()


def run_here(folder: Path, test: str, said: Path):
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] in ("k3_teach", "tests")]:
        del sys.modules[name]       # the copy's are to be imported
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", f"tests/{test}"]))


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
        status, said = run(copy, mutant.test)
    finally:
        path.write_text(source)
    assert status == 1, f"the mistake went unnoticed:\n{said[-2000:]}"
    assert not BROKEN.search(said), f"the change broke the code instead of making the mistake:\n{said[-2000:]}"
