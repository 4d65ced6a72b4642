"""What the README shows runs."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_python_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_exactly_two_commands_after_a_clone():
    shell = re.findall(r"```sh\n(.*?)```", README, re.S)
    assert shell[0].split("\n")[:2] == ["make book", "make test"]
