"""A deliberate mistake: a few lines of the package, replaced while a `with` block runs.

    with mistake.apply():
        ...                 # every call of these functions now runs the wrong lines

The right lines stand in the mistake only to be found: what is replaced, and what `diff`
shows, is read from the source of the function. A line that has changed there since is an
error, so a mistake cannot become stale.
"""

import inspect
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType, FunctionType

from k3_teach.errors import InputError

PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Edit:
    """Lines `right` of the function `where` become `wrong`. Comments and indentation of
    `right` do not count; whole lines do."""

    where: FunctionType
    right: str
    wrong: str

    def place(self) -> str:
        """File and function, as `parts/kda_layer.py: bounded_gate`."""
        path = Path(inspect.getsourcefile(self.where)).relative_to(PACKAGE)
        return f"{path.as_posix()}: {self.where.__qualname__}"

    def span(self, lines: list[str]) -> slice:
        """Where `right` stands in `lines`. InputError unless that is exactly one place."""
        wanted = [_code(line) for line in self.right.strip().splitlines()]
        code, n = [_code(line) for line in lines], len(wanted)
        found = [i for i in range(len(lines)) if code[i:i + n] == wanted]
        if len(found) != 1:
            raise InputError(f"{self.place()} holds these lines {len(found)} times; "
                             f"it must hold them once:\n{self.right}")
        return slice(found[0], found[0] + n)

    def replaced(self, lines: list[str]) -> list[str]:
        """`lines` with `wrong` instead of `right`, as far indented."""
        at = self.span(lines)
        first = lines[at][0]
        indent = first[:len(first) - len(first.lstrip())]
        wrong = [indent + line for line in _lines(self.wrong)]
        return lines[:at.start] + wrong + lines[at.stop:]


@dataclass(frozen=True)
class Mistake:
    """One of K3's pitfalls (its number, from 1 to 40), made on purpose by `edits`.

    unseen: why it is small, or nothing at all, in the logits of an ordinary model.
    """

    pitfall: int
    name: str
    edits: tuple[Edit, ...]
    unseen: str = ""

    @property
    def right(self) -> str:
        """The right lines, as they stand in the package."""
        parts = [source(e.where)[e.span(source(e.where))] for e in self.edits]
        return "\n".join(textwrap.dedent("\n".join(part)) for part in parts)

    @property
    def wrong(self) -> str:
        return "\n".join(line for e in self.edits for line in _lines(e.wrong))

    def diff(self) -> str:
        """Place, right lines with a minus before them, wrong ones with a plus."""
        blocks = []
        for e in self.edits:
            one = Mistake(self.pitfall, self.name, (e,))
            marked = [f"- {line}" for line in one.right.splitlines()]
            marked += [f"+ {line}" for line in one.wrong.splitlines()]
            blocks.append("\n".join([f"# {e.place()}", *marked]))
        return "\n\n".join(blocks)

    @contextmanager
    def apply(self):
        """While the block runs, the functions do it wrong; afterwards, whatever happened,
        they are as before. Not for two threads, nor twice for one function."""
        wrong = self._wrong_code()
        right = {function: function.__code__ for function in wrong}
        try:
            for function, code in wrong.items():
                function.__code__ = code
            yield self
        finally:
            for function, code in right.items():
                function.__code__ = code

    def _wrong_code(self) -> dict[FunctionType, CodeType]:
        texts = {}
        for e in self.edits:
            texts[e.where] = e.replaced(texts.get(e.where) or source(e.where))
        return {f: compiled(f, lines) for f, lines in texts.items()}


def source(function: FunctionType) -> list[str]:
    """The lines of a function, without indentation and decorators."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    decorators = takewhile(lambda line: not line.startswith("def "), lines)
    return lines[len(list(decorators)):]


def compiled(function: FunctionType, lines: list[str]) -> CodeType:
    """The code of the definition `lines`, with the free variables of `function`.

    Its code alone is exchanged, so that whoever imported the function by name has it too.
    """
    free = function.__code__.co_freevars        # `__class__`, where it says super()
    text = f"def around({', '.join(free)}):\n" + textwrap.indent("\n".join(lines), "    ")
    name = f"<a deliberate mistake in {function.__qualname__}>"
    around = _inner(compile(text, name, "exec", dont_inherit=True), "around")
    return _inner(around, function.__name__)


def _inner(code: CodeType, name: str) -> CodeType:
    inside = (c for c in code.co_consts if isinstance(c, CodeType))
    return next(c for c in inside if c.co_name == name)


def _lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip().splitlines()


def _code(line: str) -> str:
    return line.split("#")[0].strip()
