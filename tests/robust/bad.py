"""What nobody should pass, and what may come of it: a result, or an error of our own type."""

from k3_teach.errors import K3Error

import torch


class Unhashable:
    __hash__ = None


SCALARS = [None, True, -1, 0, 3, 2 ** 40, 2 ** 70, 10 ** 5000, 0.5, -1.5, float("nan"), float("inf"), "x", "", "\0", b"x",
           [], {}, [1], ["x"], (), Unhashable(), object(), torch.float32, torch.int8, torch.tensor(1.0), torch.zeros(0), torch.zeros(1, 1, 1, 1, 1, 1)]
DTYPES = [torch.float64, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.bool, torch.float8_e4m3fn]


def variants(value):
    """Bad ones of any kind, and of a tensor: other dtypes, devices, layouts, shapes and values."""
    yield from SCALARS
    if not isinstance(value, torch.Tensor):
        return
    yield value.to("meta")
    yield value.to_sparse()
    yield from (value.to(dtype) for dtype in DTYPES)
    for axis, size in enumerate(value.shape):
        yield from (value.narrow(axis, 0, size - 1), value.narrow(axis, 0, 0), torch.cat((value, value), axis))
    yield from (value[None], value.flatten(), value.mT if value.ndim > 1 else value)
    if value.is_floating_point():
        yield from (value * float("nan"), value * float("inf"), value * 1e38)
    elif value.dtype != torch.bool:
        yield from (value - 100, value + 2 ** 31, value + 2 ** 62)


def show(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return type(value).__name__ if isinstance(value, int) else repr(value)[:40]


def try_all(call, arguments: dict, leave_out=()):
    """Each argument in turn becomes each bad value. -> the raw errors as text, and how often our own error came."""
    raw, refused = [], 0
    for name, good in arguments.items():
        for value in variants(good) if name not in leave_out else ():
            try:
                call(**arguments | {name: value})
            except K3Error as error:
                refused += 1
                assert 10 < len(str(error)) < 1000, (name, str(error)[:2000])
            except Exception as error:
                raw.append(f"{name} = {show(value)}: {type(error).__name__} {str(error)[:100]}")
    return raw, refused
