"""A chapter runs where nothing is prepared: on Colab, on Binder, in a devcontainer."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest
import yaml

from k3_teach.notebook import form

from .browser import ROOT

IN_TREE = ["pyproject.toml", "README.md", "LICENSE", "k3_teach"]
NO_NETWORK = re.compile("NewConnectionError|name resolution|Network is unreachable|ConnectTimeout")
FIRST_CELLS = """
import importlib.resources, sys
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import k3_teach as k3
from k3_teach.notebook import draw, live, setup, show_source

assert "site-packages" in k3.__file__, k3.__file__
setup()
torch.set_default_dtype(torch.float64)
logits = k3.K3Model(k3.K3Config.toy(), dtype=torch.float64)(torch.arange(4)[None])
plt.plot(logits[0, -1].detach())
plt.savefig("figure.png")
assert k3.K3Config.k3().num_hidden_layers == 93
figure = live(lambda bias: draw.bars([bias, 1]), alt="Two bars.", kernel=True, bias=[0, 1])
assert "<script>" in figure.to_html() and "--k3-" in figure.to_html()
assert "view+json" in str(figure._repr_mimebundle_())
assert "```python" in show_source(k3.K3Model)._repr_markdown_()
assert "IPython" in sys.modules
package = importlib.resources.files("k3_teach")
missing = [name for name in sys.argv[1:] if not package.joinpath(name).is_file()]
assert not missing, missing
"""


def pip_line():
    """The arguments of the one %pip command that stands in every chapter's first cell."""
    found = re.findall(r"^\s*%pip (.*)$", form.INSTALL, re.M)
    assert len(found) == 1
    return shlex.split(found[0])


def test_chapters_install_the_package_in_one_way():
    lines = {line.strip() for path in (ROOT / "book").glob("*.ipynb")
             for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
             for line in "".join(cell["source"]).splitlines() if "%pip" in line}  # fmt: skip
    assert lines <= {line.strip() for line in form.INSTALL.splitlines()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What pip would get from the repository; pip builds in it, so not the repository itself."""
    folder = tmp_path_factory.mktemp("tree")
    for name in IN_TREE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def run(*command, cwd):
    """Run in `cwd`, seeing nothing of the environment's own Python settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [str(word) for word in command]
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)


@pytest.mark.slow
def test_first_cell_installs_all_that_a_chapter_needs(tree, tmp_path):
    python = tmp_path / "venv/bin/python"
    assert run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path).returncode == 0
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"torch=={version('torch').split('+')[0]}\n", encoding="utf-8")
    arguments = [re.sub(r"git\+\S+", tree.as_uri(), word) for word in pip_line()]
    assert tree.as_uri() in " ".join(arguments)
    done = run(python, "-m", "pip", *arguments, "-c", constraint, cwd=tmp_path)
    if NO_NETWORK.search(done.stdout + done.stderr) and os.environ.get("CI") != "true":
        pytest.skip("NO NETWORK: THE CHAPTERS' INSTALLATION WAS NOT TRIED.")
    assert done.returncode == 0, done.stdout + done.stderr
    script = tmp_path / "first_cells.py"
    script.write_text(FIRST_CELLS, encoding="utf-8")
    files = [path for path in (ROOT / "k3_teach").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts]  # fmt: skip
    data = [path.relative_to(ROOT / "k3_teach").as_posix() for path in files]
    done = run(python, "-I", script, *data, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the places where a chapter opens ------------------------------------------------------------


def test_binder_has_what_a_chapter_needs():
    listed = yaml.safe_load((ROOT / "binder/environment.yml").read_text(encoding="utf-8"))
    names = {re.match(r"[\w-]+", item)[0] for item in listed["dependencies"] if isinstance(item, str)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["notebook"]
    needed = {re.match(r"[\w-]+", item)[0] for item in needed} - {"torch", "ipython"}
    assert needed | {"pytorch-cpu", "jupyterlab"} <= names  # jupyterlab brings ipython
    lab = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(pin in lab for pin in listed["dependencies"][-1]["pip"])
    for name in ("binder/postBuild", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK)


def test_devcontainer_knows_the_make_targets_and_ports():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make (\w+)", json.dumps(container)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert int(re.search(r"^PORT += (\d+)", makefile, re.M)[1]) in container["forwardPorts"]


@pytest.mark.parametrize("place", ["colab.research.google.com", "mybinder.org"])
def test_every_chapter_has_launch_buttons(site, pages, place):
    for path in (ROOT / "book").glob("*.ipynb"):
        page = pages[site / f"book/{path.stem}.html"]
        assert page.select_one(f'a[href*="{place}"][href*="{path.stem}.ipynb"]'), path.name
