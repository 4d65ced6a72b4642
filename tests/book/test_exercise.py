"""What `check` tells the reader."""

import pytest
import torch

from k3_teach.notebook import check

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
double = lambda x: 2 * x


def says(answer, **options):
    verdict = check(answer, **options)
    assert not verdict.right
    return repr(verdict)


def stub(x):  # about 1 line
    ...


def raises(x):
    raise RuntimeError("mat1 and mat2")


@pytest.mark.parametrize("answer", [..., None, stub])
def test_a_stub_is_not_done_yet(answer):
    assert says(answer, like=double, on=[(X,)]).startswith("Not done yet: ")


def test_right_answers():
    def short(x):
        """A docstring
        of two lines."""
        # a comment
        return x + x

    verdict = check(short, like=double, on=[X, (X[0],), (torch.tensor(3.0),)])
    assert verdict.right and repr(verdict) == "Right: all 3 cases agree, in 1 line."
    assert repr(check(448, like=448)) == "Right: it agrees."
    assert check(0.1 + 0.2, like=0.3).right and not check(0.301, like=0.3).right
    assert check(torch.tensor(5), like=5).right and check([1, (2.0, X)], like=[[1, (2.0, X)]]).right
    assert check(torch.tensor([float("nan")]), like=torch.tensor([float("nan")])).right


@pytest.mark.parametrize("answer, message", [
    (raises, "raises raises RuntimeError: mat1 and mat2"),
    (lambda x: x[0], r"the shape should be \[2, 2\], it is \[2\]"),
    (lambda x: "two", "a number or tensor is asked for, the answer is of type str"),
    (lambda x: 2 * x + (x == 3), r"1 of 4 numbers differ; the first is at \[1, 0\], where the answer has 7 and 6 is right"),
])  # fmt: skip
def test_what_is_wrong_is_named(answer, message):
    import re
    assert re.search(message, says(answer, like=double, on=[(X,)]))


def test_the_case_is_named():
    def size(x):
        return 2 * x.abs()

    assert says(size, like=double, on=[X, -X]).startswith("Not yet: case 2 of 2, size([2, 2]): 4 of 4")

    def power(a, n, f):
        return a

    options = dict(like=lambda a, n, f: a**n, on=[(2, 1, abs), (3.5, 2, abs)])
    assert "case 2 of 2, power(3.5, 2, abs): 3.5 is not it" in says(power, **options)


def test_numbers_are_compared_in_full():
    """Python's floats are float64 whatever torch's default; as many digits as tell two apart."""
    big = 1_436_935_618_560
    assert check(big * 17 / 32, like=big * 17 / 32).right and check(float(big), like=big).right
    assert says(big + 1, like=big) == "Not yet: 1436935618561 is not it."
    assert "has 0.123457 and 0.123456 is right" in says([0.123457], like=torch.tensor([0.123456]).double())
    assert check(torch.tensor(2.0, requires_grad=True), like=2).right


def test_none_inside_an_answer_is_not_done_yet():
    assert says(lambda: (1, None), like=(1, 2)) == "Not done yet: the answer has None in value 2."


def test_a_known_mistake_is_recognised():
    options = dict(like=double, on=[X, 2 * X], wrong={"x is squared": torch.square, "x is kept": lambda x: x})
    assert says(lambda x: x * 1, **options).endswith("This is what one gets if x is kept.")
    assert "one gets" not in says(lambda x: 3 * x, **options)
    assert says(56, like=896, wrong={"layers are counted": 56}).endswith("if layers are counted.")


def test_several_values():
    like = lambda x: (x, x.argmax(-1))
    assert "2 values, in a tuple or list, are asked for, the answer is of type Tensor" in says(lambda x: x, like=like, on=[X])
    assert "in value 2" in says(lambda x: (x, x.argmin(-1)), like=like, on=[X])
    assert "whole numbers are asked for in value 2" in says(lambda x: (x, x[:, 0] / 3), like=like, on=[X])


def test_one_right_value_for_each_case():
    assert check(abs, like=[1, 2], on=[(-1,), (2,)]).right
    with pytest.raises(ValueError, match="'like' has 1 values, on has 2 cases"):
        check(abs, like=[1], on=[(1,), (2,)])
    with pytest.raises(ValueError, match="'half' has 1 values, on has 2 cases"):
        check(abs, like=[1, 2], on=[(1,), (2,)], wrong={"half": [1]})
    with pytest.raises(ValueError, match="on has no cases"):
        check(abs, like=[], on=[])
    with pytest.raises(ValueError, match="like is None"):
        check(abs, on=[(1,)])


def test_an_answer_that_writes_to_its_arguments_harms_no_other_case():
    kept = X.clone()
    assert check(lambda x: x.mul_(2), like=double, on=[X, X]).right and torch.equal(X, kept)


def test_what_the_page_shows():
    bundle = check(1, like=2)._repr_mimebundle_()
    assert bundle["text/plain"] == "Not yet: 1 is not it."
    assert 'class="k3-check k3-not-yet" role="status"' in bundle["text/html"]
    assert "&lt;b&gt;" in check(lambda: 1 / len({}["<b>"]), like=1)._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("answer, like", [
    (True, 1), (1, True), ([1.0], 1.0), (1 + 0j, 1.0), (2**53 + 1, 2**53), ({"a": 1}, {"a": 2}),
    (torch.ones(2), torch.ones(2, 1)), (torch.ones(1), torch.ones(())), ("1", 1), (object(), 1),
    ((1, 2, 3), (1, 2)), ({1}, [1]), (float("nan"), 1.0),
])  # fmt: skip
def test_what_is_nearly_right_is_not_right(answer, like):
    assert not check(answer, like=[like]).right


@pytest.mark.parametrize("answer, like", [
    ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])), (X.numpy()[::-1], X.flip(0)),
    ({"a": X, "b": 1}, {"a": X.clone(), "b": 1}), (3.0, 3), (1 + 1j, 1 + 1j), ([1, 2], (1, 2)),
])  # fmt: skip
def test_the_same_in_another_form_is_right(answer, like):
    assert check(answer, like=[like]).right


def test_an_answer_is_called_once_for_each_case():
    calls = []

    def answer(x):
        calls.append(x)
        return 3 * x

    says(answer, like=double, on=[X, 2 * X], wrong={"x is squared": torch.square, "kept": abs})
    assert len(calls) == 2


def test_tolerance_is_relative_and_absolute_but_whole_numbers_are_exact():
    assert check(1e6 + 0.5, like=1e6, tolerance=1e-6).right and not check(1e6 + 5, like=1e6).right
    assert check(1e-7, like=0.0, tolerance=1e-6).right and not check(9, like=10, tolerance=1).right


def test_a_mistake_is_named_only_if_every_case_agrees():
    answer = lambda x: x if x < 2 else 5 * x
    assert "one gets" not in says(answer, like=[7, 7], on=[(1,), (3,)], wrong={"kept": lambda x: x})


def test_no_answer_stops_the_notebook():
    def leaves():
        raise SystemExit("bye")

    class Odd:
        def __repr__(self):
            raise ValueError

    assert "leaves raises SystemExit: bye" in says(leaves, like=1)
    assert "something of type Odd" in says(Odd(), like="word")
    assert "raises TypeError" in says(lambda: 1, like=double, on=[X])
