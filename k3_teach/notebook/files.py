"""Files of the repository that a chapter reads, wherever its notebook runs."""

import importlib.util
from pathlib import Path
from types import ModuleType
from urllib.request import urlretrieve

REPOSITORY = Path(__file__).resolve().parents[2]
THERE = "https://raw.githubusercontent.com/k3-teach/k3-teach/main/"


def repository_file(path: str) -> Path:
    """A file by its path in the repository.

    Where only the package is installed (on Colab, say), it is fetched once and kept under the
    same path beside the notebook.
    """
    if (REPOSITORY / path).exists():
        return REPOSITORY / path
    beside = Path(path)
    if not beside.exists():
        beside.parent.mkdir(parents=True, exist_ok=True)
        urlretrieve(THERE + path, beside)
    return beside


def repository_module(path: str) -> ModuleType:
    """A Python file by its path in the repository, as a module."""
    file = repository_file(path)
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
