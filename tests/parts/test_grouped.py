"""Products with one matrix per group: against one product per row, their gradients, and what the compiler is told."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from k3_teach.parts.grouped import grouped_linear, grouped_outer, grouped_product, has_kernel, opaque_outer, opaque_product


def case(R, E, a, b, dtype, seed=0):
    """Rows in any groups, some of them empty."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    expert = torch.randint(E, (R,), generator=g).sort().values
    ends = torch.bincount(expert, minlength=E).cumsum(0).int()
    return rand(R, a), rand(E, b, a), ends, rand(R, b), expert


@settings(max_examples=25, deadline=None)
@given(R=st.integers(1, 30), E=st.integers(1, 9), a=st.sampled_from([8, 7]), b=st.sampled_from([12, 16, 5]),
       dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), seed=st.integers(0, 99))
def test_every_row_meets_its_matrix(R, E, a, b, dtype, seed):
    """Widths of 7 and 5 are not aligned, and float64 has no kernel: the fallback must serve."""
    x, w, ends, y, expert = case(R, E, a, b, dtype, seed)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    expected = torch.stack([w[e].double() @ row.double() for e, row in zip(expert, x)])
    assert_close(grouped_linear(x, w, ends).double(), expected, atol=tolerance, rtol=tolerance)
    outer = torch.zeros(E, b, a, dtype=torch.float64)
    for e, row, grad in zip(expert, x.double(), y.double()):
        outer[e] += grad[:, None] * row
    assert_close(grouped_outer(y, x, ends).double(), outer, atol=tolerance, rtol=tolerance)


def test_where_the_kernel_is():
    assert has_kernel(torch.zeros(1, 8), 8, 12) and has_kernel(torch.zeros(1, 8).bfloat16(), 8, 16)
    assert not has_kernel(torch.zeros(1, 8), 8, 7) and not has_kernel(torch.zeros(1, 8).bfloat16(), 8, 12)
    assert not has_kernel(torch.zeros(1, 8).double(), 8, 12)


@pytest.mark.parametrize("dtype, b", [(torch.float64, 12), (torch.float32, 12), (torch.float32, 7), (torch.bfloat16, 16)])
def test_the_compiled_form_has_the_same_gradients(dtype, b):
    x, w, ends, y, _ = case(20, 6, 8, b, dtype)
    results = []
    for product in (grouped_product, opaque_product):
        x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = product(x_, w_, ends)
        out.backward(y)
        results.append((out.detach(), x_.grad, w_.grad))
    for plain, opaque in zip(*results):
        assert_close(plain, opaque, atol=0 if dtype == torch.bfloat16 else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype, b", [(torch.float64, 12), (torch.float32, 7), (torch.bfloat16, 16)])
def test_what_the_compiler_is_told_is_true(dtype, b):
    """torch's own check: schema, fake shapes and dtypes, and autograd registration."""
    x, w, ends, y, _ = case(9, 4, 8, b, dtype)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(opaque_product, (x.requires_grad_(), w.requires_grad_(), ends), test_utils=tests)
    torch.library.opcheck(opaque_outer, (y, x.detach(), ends), test_utils=tests[::2])


def test_gradcheck():
    x, w, ends, _, _ = case(5, 3, 2, 4, torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: opaque_product(x, w, ends), (x.requires_grad_(), w.requires_grad_()))
