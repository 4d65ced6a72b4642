"""Products with one matrix per group of rows: the rows of an expert meet its matrix.

    y_r = W_e x_r        for the rows r of expert e

Shapes: R rows, sorted by expert, E experts, a and b the widths that a matrix reads and
writes. ends [E] is, for each expert, the row after its last; the last of them is R.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_teach.parts.precision import autocast_dtype


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Each row through the matrix of its expert: x [R, a], w [E, b, a] -> [R, b]."""
    dtype = autocast_dtype(x)
    if dtype is not None:               # autocast itself does not know these products
        x, w = x.to(dtype), w.to(dtype)
    product = opaque_product if torch.compiler.is_compiling() else grouped_product
    return product(x, w, ends)


def grouped_product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` for x and w of one dtype.

    One grouped matrix product where torch has it for this dtype and alignment, else one
    product per expert in use.
    """
    if has_kernel(x, *w.shape[1:]):
        return F.grouped_mm(x, w.mT, offs=ends)
    parts = zip(by_expert(x, ends), w.unbind())
    return torch.cat([x_e @ w_e.T for x_e, w_e in parts if len(x_e)])


def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """sum_r y_r x_r^T over the rows of each expert: y [R, b], x [R, a] -> [E, b, a].

    With y the gradient of what `grouped_product` returned: the gradient of its w.
    """
    if has_kernel(x, y.shape[1], x.shape[1]):
        return F.grouped_mm(y.mT, x, offs=ends)
    parts = zip(by_expert(y, ends), by_expert(x, ends))
    return torch.stack([y_e.T @ x_e for y_e, x_e in parts])


def has_kernel(x: Tensor, *widths: int) -> bool:
    """Can `F.grouped_mm` take rows like x [R, ...] and matrices of these widths?"""
    aligned = all(n * x.element_size() % 16 == 0 for n in widths)
    return aligned and x.dtype != torch.float64 and hasattr(F, "grouped_mm")


def by_expert(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """The rows x [R, a] of each expert: E views."""
    return x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())


# --- for torch.compile ----------------------------------------------------------------
# The compiler cannot trace sizes that depend on data, and in torch 2.13 believes that
# grouped products are for bfloat16 alone. So it is not shown what is inside: it is told
# which shape comes out, and the derivative.

opaque_product = torch.library.custom_op(
    "k3_teach::grouped_product", grouped_product, mutates_args=())
opaque_outer = torch.library.custom_op(
    "k3_teach::grouped_outer", grouped_outer, mutates_args=())


@opaque_product.register_fake
def _(x, w, ends):
    return x.new_empty(len(x), w.shape[1])


@opaque_outer.register_fake
def _(y, x, ends):
    return x.new_empty(len(ends), y.shape[1], x.shape[1])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad: Tensor):
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return opaque_product(grad, w.mT, ends), opaque_outer(grad, x, ends), None


opaque_product.register_autograd(_gradients, setup_context=_save)
