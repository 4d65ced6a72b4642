"""Exercises that say what is wrong with an answer, and lead on from there.

    check(my_route, like=k3.route, on=[(scores, bias, 2)], wrong={"the bias weighs too": leaky})

compares an answer, a function or a value, with what it should be like. It raises only for a check
that is itself wrong, so a notebook with unsolved exercises still runs to its end;
`check(...).right` is for tests.
"""

import ast
import copy
import inspect
import textwrap
from html import escape

import numpy as np
import torch

from .palette import LIGHT

STUB = "Not done yet"


class Verdict:
    """Whether an answer is right, and a sentence for the reader."""

    def __init__(self, right: bool, says: str):
        self.right, self.says = right, says

    def __repr__(self) -> str:
        if self.says.startswith(STUB):
            return self.says
        return f"{'Right' if self.right else 'Not yet'}: {self.says}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        kind, colour = ("right", LIGHT["green"]) if self.right else ("not-yet", LIGHT["rust"])
        html = (f'<div class="k3-check k3-{kind}" role="status" style="border-left:.3rem solid '
                f'{colour};padding:.3rem .8rem">{escape(repr(self))}</div>')
        return {"text/html": html, "text/plain": repr(self)}


def check(answer, *, like=None, on=((),), wrong=None, tolerance=1e-9) -> Verdict:
    """Is `answer` like `like`?

    answer: a function, called with each tuple of arguments in `on`; or a value. `...` and None, and
    a function that returns them, count as not done yet. like: a function that is called in the
    same way, or the right value; or a list with one right value for each case. wrong: {a sentence
    that names a mistake: what the answer is like with it}, so that a known mistake is recognised.
    tolerance: largest difference allowed, relative and absolute. Integers and shapes must be equal.
    """
    on = [case if isinstance(case, tuple) else (case,) for case in on]
    if like is None:
        raise ValueError("like is None; give the function or the value that the answer is to match")
    if not on:
        raise ValueError("on has no cases; give at least one")
    for name, values in {"like": like, **(wrong or {})}.items():
        if isinstance(values, list) and len(values) != len(on):
            has = f"{name!r} has {len(values)} values, on has {len(on)} cases"
            raise ValueError(f"{has}; each needs one")
    given = [_given(answer, case) for case in on]
    for number, (got, case) in enumerate(zip(given, on), start=1):
        found = _differs(got, _right(like, number, case), tolerance)
        if found is None:
            continue
        if found.startswith(STUB):
            return Verdict(False, found)
        where = f"case {number} of {len(on)}, {_call(answer, case)}: " if len(on) > 1 else ""
        return Verdict(False, where + found + _named(given, wrong or {}, on, tolerance))
    counts = f"all {len(on)} cases agree" if len(on) > 1 else "it agrees"
    return Verdict(True, f"{counts}{_length(answer)}.")


def _right(like, number, case):
    if isinstance(like, list):
        return like[number - 1]
    return like(*copy.deepcopy(case)) if callable(like) else like


class Failed(str):
    """In place of a value: why there is none."""


def _given(answer, case):
    """The answer's value in this case."""
    got = answer
    if callable(answer):
        try:
            got = answer(*copy.deepcopy(case))  # what it writes to its arguments stays here
        except (Exception, SystemExit) as error:  # the notebook goes on
            return Failed(f"{_name(answer)} raises {type(error).__name__}: {_words(str, error)}")
    if got is None or got is ...:
        found = f"{_name(answer)} returns" if callable(answer) else "the answer is still"
        return Failed(f"{STUB}: {found} {'None.' if got is None else '...'}")
    return got


def _differs(got, right, tolerance) -> str | None:
    """What is wrong with a value; None if nothing is."""
    return str(got) if isinstance(got, Failed) else _difference(got, right, tolerance)


def _difference(got, right, tolerance, place="") -> str | None:
    """The same for values; `place` says where in a nested answer."""
    if got is None or got is ...:
        return f"{STUB}: the answer has {'None' if got is None else '...'}{place}."
    if isinstance(right, (tuple, list)):
        asked = f"{len(right)} values, in a tuple or list, are asked for{place}"
        if not isinstance(got, (tuple, list)):
            return f"{asked}, the answer is of type {type(got).__name__}."
        if len(got) != len(right):
            return f"{asked}, the answer has {len(got)}."
        parts = (_difference(g, r, tolerance, f"{place} in value {i}")
                 for i, (g, r) in enumerate(zip(got, right), start=1))
        return next(filter(None, parts), None)
    if isinstance(right, dict):
        if not isinstance(got, dict) or got.keys() != right.keys():
            return f"a dict with {', '.join(map(repr, right))} is asked for{place}."
        parts = (_difference(got[k], right[k], tolerance, f"{place} at {k!r}") for k in right)
        return next(filter(None, parts), None)
    if isinstance(right, (str, set)):
        same = type(got) is type(right) and got == right
        return None if same else f"{_words(repr, got)} is not it{place}."
    try:
        found, asked = _tensor(got), _tensor(right)
    except Exception:  # whatever numpy makes of the reader's objects
        kind = type(got).__name__
        return f"a number or tensor is asked for{place}, the answer is of type {kind}."
    if found.shape != asked.shape:
        return f"the shape{place} should be {list(asked.shape)}, it is {list(found.shape)}."
    return _numbers(found, asked, tolerance, place)


def _tensor(value) -> torch.Tensor:
    """Python's numbers, and lists of them, become float64 or int64 whatever torch's default."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return torch.stack([_tensor(v) for v in value])
    return torch.from_numpy(np.array(value, order="C"))  # a copy: torch takes no reversed views


def _numbers(got, right, tolerance, place) -> str | None:
    if (right.dtype is torch.bool) != (got.dtype is torch.bool):
        kind = "True or False" if right.dtype is torch.bool else "a number"
        return f"{kind} is asked for{place}."
    if got.is_complex() and not right.is_complex():
        return f"real numbers are asked for{place}."
    whole = not (right.is_floating_point() or right.is_complex())
    if whole and got.is_floating_point() and not torch.equal(got, got.round()):
        return f"whole numbers are asked for{place}."
    exact = whole and not got.is_floating_point()  # float64 has gaps beyond 2**53
    wide = torch.complex128 if right.is_complex() else torch.int64 if exact else torch.float64
    got, right = got.to(wide), right.to(wide)
    near = got == right if whole else torch.isclose(got, right, tolerance, tolerance, True)
    if near.all():
        return None
    first = (~near).nonzero()[0].tolist()
    found, asked = _two(got[tuple(first)].item(), right[tuple(first)].item())
    if right.dim() == 0:
        return f"{found} is not it{place}."
    off = int((~near).sum())
    return (f"{off} of {near.numel()} numbers differ{place}; the first is at {first}, "
            f"where the answer has {found} and {asked} is right.")


def _two(a, b) -> tuple[str, str]:
    """Two different numbers with as many digits as it takes to tell them apart."""
    if isinstance(a, int):
        return str(a), str(b)
    for digits in (4, 6, 9, 17):
        found = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if found[0] != found[1] and "e+" not in "".join(found):
            break
    return found


def _named(given, wrong, on, tolerance) -> str:
    """The sentence of the known mistake that gives just this answer, if there is one."""
    for sentence, mistake in wrong.items():
        if all(_differs(got, _right(mistake, n, case), tolerance) is None
               for n, (got, case) in enumerate(zip(given, on), start=1)):
            return f" This is what one gets if {sentence}."
    return ""


def _call(answer, case) -> str:
    """The call of this case, with what is short enough to show."""
    def shown(value):
        if isinstance(value, torch.Tensor) and value.dim():
            return f"[{', '.join(map(str, value.shape))}]"
        text = repr(value.item() if isinstance(value, torch.Tensor) else value)
        return getattr(value, "__name__", text if len(text) <= 20 else type(value).__name__)
    return f"{_name(answer)}({', '.join(map(shown, case))})"


def _words(how, thing, most=200) -> str:
    """`how(thing)`, str or repr, in one line that is not too long; the reader's own may fail."""
    try:
        text = " ".join(how(thing).split())
    except Exception:
        return f"something of type {type(thing).__name__}"
    return text if len(text) <= most else text[:most] + " ..."


def _name(answer) -> str:
    return getattr(answer, "__name__", "the answer")


def _length(answer) -> str:
    """How many lines the reader's function has, for the sport of it; docstring and comments not."""
    try:
        source = textwrap.dedent(inspect.getsource(answer))
        (function,) = ast.parse(source).body
    except (TypeError, OSError, SyntaxError, ValueError):
        return ""
    if not isinstance(function, ast.FunctionDef):
        return ""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    inside = source.splitlines()[body[0].lineno - 1:] if body else []
    count = sum(1 for ln in inside if ln.strip() and not ln.strip().startswith("#"))
    return f", in {count} line{'s' if count != 1 else ''}" if count else ""
