"""Check what a caller passes: tensors by their shapes in letters, and numbers by their range.

    attention = checked(attention, q="B H T K", k="B H S K", v="B H S V", scale=NUMBER)

A letter is one size wherever it stands in a call, and not 0 unless it is N. `...` are leading
axes, the same wherever they stand; `*` are some that broadcast to those of the first tensor,
`**` such that both broadcast.
Tensors are floats, or "any: d" (their dtype has nothing to do with that of others), "kin: d"
(float64 if others are), "wide: d" (not below float32), "int: N k", "bool: T S", "mask: B T",
"number: E", "index E: N k" (values from 0 to E-1); a "?" at the end allows None. Other values
are not looked at: NaN and infinity pass through a function.
"""

import functools
import inspect
from numbers import Integral, Real

import torch
from torch import Tensor

from k3_teach.errors import InputError, shown

FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
INTEGERS = torch.int64, torch.int32
DTYPES = {"": FLOATS, "any": FLOATS, "kin": FLOATS, "wide": FLOATS[:2],
          "int": INTEGERS, "index": INTEGERS,
          "bool": (torch.bool,), "mask": (torch.bool, *INTEGERS), "number": FLOATS + INTEGERS}
WORDS = {"": "floats", "any": "floats", "kin": "floats", "wide": "float32 or float64",
         "int": "int64", "index": "int64",
         "bool": "bool", "mask": "bool or int64", "number": "floats or int64"}


# --- rules for what is no tensor: what is allowed, and whether a value is -------------

def _number(low: float, kind=Real, high: float = 2.0 ** 62):
    return lambda x: isinstance(x, kind) and not isinstance(x, bool) and low <= x <= high


NUMBER = "a number of at most 2^62 in size", _number(-2.0 ** 62)
POSITIVE = "a number above 0 and at most 2^62", _number(2.0 ** -1022)
NOT_NEGATIVE = "a number from 0 to 2^62", _number(0)
COUNT = "an integer from 0 to 2^20", _number(0, Integral, 2 ** 20)
SIZE = "an integer from 1 to 2^20", _number(1, Integral, 2 ** 20)
TRUTH = "True or False", lambda x: isinstance(x, bool)
FUNCTION = "a function", callable


def optional(rule: tuple) -> tuple:
    """The rule, or None."""
    return f"{rule[0]}, or None", lambda x: x is None or rule[1](x)


# --- checks ---------------------------------------------------------------------------

def checked(function, same_dtype: bool = False, also=None, **wanted):
    """`function`, with its arguments checked first: InputError names the one that is wrong.

    wanted: for each argument a shape in letters, or a rule such as POSITIVE. same_dtype: must
    its tensors of floats have one dtype? If not, all or none of them are float64. also: one
    more check, of the same arguments. Nothing is checked while torch.compile looks on.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            check_arguments(wanted, dict(zip(names, args)) | kwargs, same_dtype)
            if also is not None:
                also(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def check_arguments(wanted: dict, given: dict, same_dtype: bool = False) -> None:
    """InputError unless each of `given` is what `wanted` says of it. See `checked`."""
    sizes, first, first_float = {"1": 1}, None, None
    for name, want in wanted.items():
        if name not in given:
            continue
        x = given[name]
        if not isinstance(want, str):
            if not want[1](x):
                raise InputError(f"{name} is {shown(x)}; it must be {want[0]}")
        elif x is not None or not want.endswith("?"):
            _check_shape(name, x, want.rstrip("?"), sizes, first and first[1])
            first = first or (name, x)
            if x.device != first[1].device:
                raise InputError(f"{name} is on {x.device}; it must be on "
                                 f"{first[1].device}, as {first[0]} is")
            if x.is_floating_point() and not want.startswith("any"):
                first_float = first_float or (name, x.dtype)
                same = same_dtype and not want.startswith("kin")
                _check_dtype(name, x.dtype, *first_float, same)


def check_sizes(**sizes) -> None:
    """InputError unless all are integers from 1 to 2^20."""
    check_arguments(dict.fromkeys(sizes, SIZE), sizes)


def _check_shape(name: str, x, want: str, sizes: dict, first: Tensor | None) -> None:
    kind, _, letters = want.rpartition(": ")
    kind, _, below = kind.partition(" ")
    before = dict(sizes)
    axes = letters.split()
    leading = axes.pop(0) if axes and axes[0] in ("...", "*", "**") else None
    ok = isinstance(x, Tensor) and x.layout == torch.strided and x.dtype in DTYPES[kind]
    ok = ok and (x.ndim >= len(axes) if leading else x.ndim == len(axes))
    ok = ok and _fits(x, axes, leading, sizes, first)
    if not ok:
        known = ", ".join(f"{a} = {before[a]}" for a in [leading, *axes] if a in before)
        raise InputError(f"{name} is {_kind(x)}; it must be {WORDS[kind]} "
                         f"[{', '.join(letters.split())}]" + (known and f" with {known}"))
    if kind == "index":
        most = sizes.get(below, 2 ** 20) - 1
        if x.is_meta or x.numel() and not 0 <= int(x.min()) <= int(x.max()) <= most:
            raise InputError(f"{name} holds other values than 0..{most}, or none (on meta)")


def _fits(x: Tensor, axes: list, leading: str | None, sizes: dict, first) -> bool:
    before, last = x.shape[:x.ndim - len(axes)], x.shape[x.ndim - len(axes):]
    if leading == "...":
        sizes.setdefault("...", list(before))
    elif leading is not None:
        target = first.shape[:first.ndim - len(axes)]
        pairs = zip(reversed(before), reversed(target))
        ones = lambda n, m: n == 1 or leading == "**" and m == 1
        if len(before) > len(target) or any(n != m and not ones(n, m) for n, m in pairs):
            return False
    same = leading != "..." or sizes["..."] == list(before)
    return same and all((n > 0 or a == "N") and sizes.setdefault(a, n) == n
                        for a, n in zip(axes, last))


def _check_dtype(name: str, dtype, first: str, other, same: bool) -> None:
    if dtype != other and (same or torch.float64 in (dtype, other)):
        allowed = "of one dtype" if same else "float64 all, or none of them"
        raise InputError(f"{name} is {dtype} and {first} {other}; they must be {allowed}")


def _kind(x) -> str:
    """A tensor by dtype and shape, anything else as it is."""
    if not isinstance(x, Tensor):
        return shown(x)
    layout = "" if x.layout == torch.strided else f"{x.layout} "
    return f"{layout}{x.dtype} {list(x.shape)}"
