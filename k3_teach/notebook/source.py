"""Show the package's own code in a chapter, so that a chapter never holds a second copy of it."""

import inspect
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Source:
    """Code with its place as caption: Markdown where it is rendered, plain text elsewhere."""

    def __init__(self, *objects):
        self.parts = [(_place(obj), _code(obj)) for obj in objects]

    def __repr__(self):
        return "\n\n".join(f"# {place}\n{code}" for place, code in self.parts)

    def _repr_markdown_(self):
        return "\n\n".join(f"`{place}`\n\n```python\n{code}\n```" for place, code in self.parts)


def show_source(*objects):
    """The source of functions or classes of this package, read from their files."""
    return Source(*objects)


def _place(obj):
    path = Path(inspect.getsourcefile(inspect.unwrap(obj))).resolve()
    if not path.is_relative_to(ROOT):
        only = "show_source shows this repository's code only"
        raise ValueError(f"{only}; {obj!r} comes from elsewhere")
    return f"{path.relative_to(ROOT).as_posix()}: {obj.__qualname__}"


def _code(obj):
    return textwrap.dedent(inspect.getsource(inspect.unwrap(obj))).rstrip()
