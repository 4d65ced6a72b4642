"""Longer experiments: every script has its stored result, and its chapter shows that one."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3_teach.notebook import experiment, files
from k3_teach.notebook.experiment import command
from k3_teach.notebook.files import REPOSITORY

HERE = REPOSITORY / "book/experiments"
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
    words = " ".join(told.split())
    assert re.search(r"\b(about|needs) [\w.]+ (minutes|seconds)\b", words) and "ne core" in words
    assert callable(module.run)
    found = list(numbers(stored))
    assert len(found) > 10 and all(map(math.isfinite, found))


# keys that are not the script's own name in small letters
CALLED = {"seeds_tried": "TRIED", "seeds_fresh": "FRESH", "head width": "HEAD",
          "inner width": "INNER", "rows in a test": "ROWS", "vocabulary": "VOCAB",
          "asking tokens": "ASKS", "own and shared part of a key": "PART", "long_steps": "LONG"}
SHORT = {"07_share": {"width": "D", "heads": "H"}}


def constants(name):
    """[(key, as stored, as in the script)] of the settings that both have."""
    module, stored = experiment(name)
    for key, value in stored.get("settings", stored).items():
        called = SHORT.get(name, {}).get(key) or CALLED.get(key)
        called = called or key.upper().replace(" ", "_")
        if hasattr(module, called) and key != "tasks":      # which holds the results
            yield key, value, getattr(module, called)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_was_run_with_the_settings_of_the_script(name):
    compared = {}
    for key, value, own in constants(name):
        own = range(own) if key == "seeds" and isinstance(own, int) else own
        own = list(own) if isinstance(own, range) else own
        compared[key] = json.loads(json.dumps(own))
        assert value == compared[key], (name, key)
    assert {"steps", "rates"} <= compared.keys() and len(compared) >= 6, compared.keys()
    assert any(key.startswith("seeds") for key in compared)


@pytest.fixture
def precision():
    """Sets the default dtype, and afterwards what it was."""
    former = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(former)


@pytest.mark.slow
def test_a_run_of_07_is_repeated(precision):
    precision(torch.float64)
    module, stored = experiment("07_share")
    again = module.fit("MQA", "one", 0, 0.05)
    place = stored["rates"].index(0.05), stored["seeds"].index(0)
    assert abs(again - stored["missed"]["MQA"]["one"][place[0]][place[1]]) < 0.02


@pytest.mark.slow
def test_a_run_of_09_is_repeated(precision):
    precision(torch.float32)
    module, stored = experiment("09_order")
    found = stored["tasks"]["first"]["KDA, NoPE"]
    net = module.train(module.MODELS["KDA, NoPE"], "first", stored["rates"][found["best"]], 0)
    for place, length in enumerate(stored["lengths"][:2]):
        again = module.right(net, "first", length, 0)
        assert abs(again - found["right"][found["best"]][0][place]) < 0.15, length


@pytest.mark.slow
def test_a_run_of_11_is_repeated(precision):
    """Its first twenty steps: later ones may part with another order of sums."""
    precision(torch.float32)
    module, stored = experiment("11_muon")
    found, seed = stored["warm_up"]["10%"]["AdamW"], 3
    losses = module.train("AdamW", found["best"], seed, module.WARM_UPS["10%"], steps=20)
    curve = found["curves"][stored["seeds_fresh"].index(seed)]
    assert losses[9::10] == pytest.approx(curve[:2], abs=0.01)


@pytest.mark.slow
def test_a_run_of_13_is_repeated(precision):
    precision(torch.float32)
    module, stored = experiment("13_sink")
    row, = [r for r in stored["rows"] if (r["form"], r["rate"], r["seed"]) == ("gate", 0.01, 1)]
    again = module.measure(module.train("gate", 0.01, 1))
    assert abs(again["first idle"] - row["first idle"]) < 0.15


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
        path.write_text("value = 3\n" if path.suffix == ".py" else "[4]")

    monkeypatch.setattr(files, "REPOSITORY", tmp_path / "nowhere")
    monkeypatch.setattr(files, "urlretrieve", fetch)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time they are there
        module, stored = experiment("99_try")
        assert module.value == 3 and stored == [4]
    assert [address.rpartition("/")[2] for address in fetched] == ["99_try.json", "99_try.py"]
