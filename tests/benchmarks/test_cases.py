"""Every case at its quick size: its contenders agree, and its row is what the report needs."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import k3_teach as k3
from benchmarks import report
from benchmarks.command import GROUPS
from benchmarks.baselines.attn_res import direct_reads, read_without_keys
from benchmarks.baselines.balance import selected, sorted_quantile
from benchmarks.baselines.experts import indexed_loop, sorted_loop
from benchmarks.baselines.kda import chunk_by_columns, chunk_by_tiles
from benchmarks.case import Case, Disagreement, Quantity, distance, with_gradients
from benchmarks.cases import experts, kda
from benchmarks.run import Floors, measure

EMPTY = {"date": "", "machine": {}, "floors": {"matmul_flops": None, "copy_bytes_per_second": {}}}
OPERATORS = ["attn_res", "balance", "experts", "kda", "mla"]


@pytest.fixture
def floors():
    known = Floors()
    known.rate, known.copy = 1e11, lambda nbytes: 1e10
    return known


def rows(group, floors):
    return list(measure(importlib.import_module(f"benchmarks.cases.{group}").cases(quick=True), floors, quick=True))


def test_all_groups_are_found():
    assert set(OPERATORS) <= set(GROUPS)


@pytest.mark.parametrize("group", OPERATORS)
def test_contenders_agree_and_the_row_is_whole(group, floors):
    found = rows(group, floors)
    assert found and not [row for row in found if "failed" in row]
    for row in found:
        assert row["ours"] in row["contenders"] and row["group"] and row["name"]
        for entry in row["contenders"].values():
            assert entry["median"] > 0
            if row["unit"] == "s":
                assert 0 < entry["low"] <= entry["median"] <= entry["high"] and entry["rounds"] >= 1
        if "of_matmul" in row:
            assert row["of_matmul"] == pytest.approx(row["flops"] / row["contenders"][row["ours"]]["median"] / 1e11)
        assert len(row["contenders"]) + len(row["not_run"]) > 1 or row["unit"] != "s"
    assert len({(row["group"], row["name"]) for row in found}) == len(found)


def test_the_full_sizes_are_cases_too():
    """Not run: only that they can be made, and that nothing is compared with itself."""
    case = next(kda.cases(quick=False))
    assert case.name == "T 256, H 4, K 64" and set(case.contenders) == {"chunk_kda", "recurrence", "textbook, columns", "textbook, tiles"}
    assert set(kda.training(1, 1024, 4, 128).not_run) == {"recurrence", "textbook, columns"}


# --- a case that goes wrong ----------------------------------------------------------------------------------------

def one(contenders, **more):
    return Case("group", "name", contenders, "ours", **more)


def refuse():
    raise RuntimeError("too large\nand more")


def test_contenders_that_differ_are_not_timed(floors):
    x = torch.ones(3)
    for other in (lambda: x + 1e-3, lambda: x * torch.nan, lambda: x[:1], lambda: [x], lambda: None):
        row, = measure([one({"ours": lambda: x, "other": other})], floors, quick=True)
        assert "other and ours differ" in row["failed"] and row["contenders"] == {}
    assert "failed" not in next(measure([one({"ours": lambda: x, "other": lambda: x + 1e-5})], floors, quick=True))


def test_a_failed_row_does_not_stop_the_rest(floors):
    good = one({"ours": lambda: torch.ones(1)})
    first, second = measure([one({"ours": refuse}), good], floors, quick=True)
    assert first["failed"] == "too large" and "failed" not in second


def test_a_case_that_cannot_be_made_is_a_row_too(floors):
    def cases():
        yield one({"ours": lambda: torch.ones(1)})
        raise Disagreement("the cache is larger than counted")

    first, last = measure(cases(), floors, quick=True)
    assert "failed" not in first and last["failed"] == "the cache is larger than counted"
    assert "| a case | the cache is larger than counted |" in report.table({**EMPTY, "rows": [last]})


def test_a_contender_may_refuse_a_size(floors):
    contenders = {"ours": lambda: torch.ones(1), "other": refuse, "another": lambda: [][0]}
    row, = measure([one(contenders, not_run={"third": "slow"})], floors, quick=True)
    assert row["not_run"] == {"third": "slow", "other": "too large", "another": "list index out of range"}
    assert set(row["contenders"]) == {"ours"}


def test_another_package_that_disagrees_is_left_out(floors):
    x = torch.ones(3)
    contenders = {"ours": lambda: x, "theirs": lambda: x + 1e-3, "good": lambda: x}
    row, = measure([one(contenders, foreign={"theirs", "good"})], floors, quick=True)
    assert set(row["contenders"]) == {"ours", "good"} and row["not_run"]["theirs"].startswith("it and ours differ by 1.0e-03")


def test_floors_are_timed_but_not_compared(floors):
    row, = measure([one({"ours": lambda: torch.ones(1)}, floors={"copy": lambda: None})], floors, quick=True)
    assert set(row["contenders"]) == {"ours", "copy"} and row["aside"] == ["copy"]


def test_quantities(floors):
    row, = measure([Quantity("group", "name", {"ours": 2.0, "other": 5.0}, "ours")], floors)
    assert row["contenders"]["other"] == {"median": 5.0, "ratio": {"median": 2.5}} and row["unit"] == "MB"
    row, = measure([Quantity("group", "name", {"ours": 0.0, "other": 5.0}, "ours")], floors)
    assert row["contenders"]["other"] == {"median": 5.0}


def test_distance_goes_into_nests():
    a, b = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])
    assert distance(a, b) == pytest.approx(0.2) and distance([b, (b, a)], [b, (b, b)]) == pytest.approx(0.2)
    assert distance(a * torch.nan, b) == torch.inf and distance(a, b * torch.nan) == torch.inf
    assert distance(torch.zeros(2), torch.zeros(2)) == 0


def test_gradients_are_those_of_autograd():
    x, w = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    outputs, (dx, dw, unused) = with_gradients(lambda x, w, y: x * w, x, w, x)()
    weights = dx / w
    assert_close(outputs[0], x * w)
    assert_close(dw, weights * x)
    assert not unused.any() and weights.all() and x.grad is None


# --- baselines -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", [chunk_by_columns, chunk_by_tiles])
@pytest.mark.parametrize("gate", [-1e-6, -1.0, -5.0, None])
def test_textbook_chunks_are_the_recurrence(form, gate):
    x = [y.double() for y in kda.inputs(2, 192, 2, 16)]
    if gate is not None:
        x[3] = torch.full_like(x[3], gate)
    ours, theirs = (with_gradients(f, *x)() for f in (k3.recurrent_kda, form))
    assert distance(theirs, ours) < 1e-9


@pytest.mark.parametrize("form", [chunk_by_columns, chunk_by_tiles, k3.recurrent_kda])
@pytest.mark.parametrize("backward", [False, True])
def test_twice_the_text_makes_twice_the_bytes(form, backward):
    """A slice of the whole text for every chunk would make it four times as many."""
    short, long = (made(form, backward, T) for T in (512, 1024))
    assert 1.97 * short < long < 2.03 * short


def made(form, backward, T):
    """Bytes of all new tensors, whether they are kept or not."""
    x = kda.inputs(1, T, 1, 8)
    with Written() as written:
        (with_gradients(form, *x) if backward else lambda: form(*x))()
    return written.nbytes


class Written(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        known = {y.untyped_storage()._cdata for y in tree_leaves((args, kwargs)) if isinstance(y, torch.Tensor)}
        self.nbytes += sum(y.nbytes for y in tree_leaves(out) if isinstance(y, torch.Tensor) and y.untyped_storage()._cdata not in known)
        return out


@pytest.mark.parametrize("block", [1, 2, 5, 24])
@pytest.mark.parametrize("read, tokens", [(k3.attn_res, 3), (read_without_keys, 3), (read_without_keys, 64)])
def test_direct_reads_are_those_of_the_stream(block, read, tokens):
    x, *outputs = torch.randn(11, tokens, 8, dtype=torch.float64)
    queries = torch.randn(11, 8, dtype=torch.float64)
    stream = k3.BlockStream(x)
    for i, mixture in enumerate(direct_reads(x, outputs, queries, block, read)):
        assert_close(mixture, stream.read(queries[i]))
        if i % block == 0 and i < 10:
            stream.seal()
        if i < 10:
            stream.add(outputs[i])
    assert i == 10


@pytest.mark.parametrize("N, E, k", [(100, 16, 3), (57, 8, 1), (33, 12, 5)])
def test_torch_quantile_takes_the_same_rank(N, E, k):
    scores, bias = torch.rand(N, E, dtype=torch.float64), 0.1 * torch.randn(E, dtype=torch.float64)
    for form in (sorted_quantile, selected):
        assert_close(form(scores, bias, k), k3.quantile_bias(scores, bias, k))


@pytest.mark.parametrize("N, E, k", [(12, 4, 2), (8, 16, 4), (16, 16, 1)])
def test_selection_has_the_rank_where_it_is_whole(N, E, k):
    scores, bias = torch.rand(N, E, dtype=torch.float64), 0.1 * torch.randn(E, dtype=torch.float64)
    assert_close(selected(scores, bias, k), k3.quantile_bias(scores, bias, k))


@pytest.mark.parametrize("loop", [indexed_loop, sorted_loop])
@pytest.mark.parametrize("tokens", [1, 20])
def test_loops_over_experts_are_the_definition(loop, tokens):
    layer, idx, x = experts.inputs(12, 3, tokens, 8)
    x = [y.double() for y in x]
    one, other = (with_gradients(lambda x, p, *w, f=f: f(x, idx, p, *w, layer.act), *x)() for f in (loop, k3.experts_loop))
    assert distance(one, other) < 1e-12
    assert distance(loop(x[0], idx, *x[1:], layer.act), other[0][0]) < 1e-12        # without gradients


def test_other_packages_are_asked_by_their_conventions(monkeypatch, floors):
    """Stand-ins with the signatures of fla 0.5 and transformers 5: the one takes a scale, the other scales by itself."""
    def naive_chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        o, S = k3.recurrent_kda(q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v, g, beta, initial_state)
        return o, S if output_final_state else None

    fakes = {"fla.ops.kda.naive": SimpleNamespace(naive_chunk_kda=naive_chunk_kda), "transformers.models.kimi_linear": SimpleNamespace(
        modeling_kimi_linear=SimpleNamespace(torch_chunk_kda=naive_chunk_kda))}
    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.naive", "transformers", "transformers.models", "transformers.models.kimi_linear"):
        monkeypatch.setitem(sys.modules, name, fakes.get(name, ModuleType(name)))
    row, = measure([kda.prefill(1, 64, 2, 8)], floors, quick=True)
    assert "failed" not in row and {"fla, naive", "transformers"} <= set(row["contenders"])
    assert kda.prefill(1, 4096, 4, 128).not_run["transformers"] == "too slow"


def test_no_other_package_is_needed(monkeypatch):
    for name in ("fla", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert kda.installed() == {}
