"""Longer experiments: every script has its stored result, and its chapter shows that one."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from k3_teach.notebook import experiment
from k3_teach.notebook.experiment import HERE, command

SCRIPTS = sorted(HERE.glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


def test_each_script_has_a_result_and_each_result_a_script():
    assert NAMES and NAMES == sorted(path.stem for path in HERE.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_script_says_what_it_does_and_how_long_it_takes(name):
    module, stored = experiment(name)
    told = module.__doc__
    assert f"python book/experiments/{name}.py --output book/experiments/{name}.json" in told
    assert "minute" in told or "second" in told
    assert callable(module.run)
    found = list(numbers(stored))
    assert len(found) > 10 and all(map(math.isfinite, found))


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_of_that_number_reads_it(name):
    chapter, = HERE.parent.glob(f"{name[:2]}_*.ipynb")
    assert f'experiment(\\"{name}\\")' in chapter.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_is_a_command(script):
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "--output" in shown.stdout, shown.stderr


def test_the_command_writes_what_the_run_returns(tmp_path):
    path = tmp_path / "result.json"
    command(lambda: {"loss": [1.5, 2]}, "Nothing.", ["--output", str(path)])
    assert json.loads(path.read_text()) == {"loss": [1.5, 2]}


def test_a_folder_that_is_not_there_is_named_before_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command(lambda: 1 / 0, "Nothing.", ["--output", str(tmp_path / "none/result.json")])
    assert "none is not a folder" in capsys.readouterr().err


def test_where_only_a_notebook_is_the_files_are_fetched(tmp_path, monkeypatch):
    """The fetch is made by a stand-in: the suite runs without a network."""
    fetched = []

    def fetch(address, path):
        fetched.append(address)
        Path(path).write_text("value = 3\n" if path.suffix == ".py" else "[4]")

    tool = sys.modules[experiment.__module__]
    monkeypatch.setattr(tool, "HERE", tmp_path / "nowhere")
    monkeypatch.setattr(tool, "urlretrieve", fetch)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time they are there
        module, stored = experiment("99_try")
        assert module.value == 3 and stored == [4]
    assert [address.rpartition("/")[2] for address in fetched] == ["99_try.py", "99_try.json"]
