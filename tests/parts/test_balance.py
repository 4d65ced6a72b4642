"""Balancing. Expected values come from numpy sorts, brute force and hand counting, not from the code under test."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from k3_teach.errors import InputError
from k3_teach.parts.balance import (
    QuantileHistogram, dual_value, expert_load, kth_smallest, margin_quantile, margins, max_vio,
    quantile_bias, sign_update)
from k3_teach.parts.balancer import Balancer

STALL = torch.tensor([[0.0, 0, 1], [0, 2, 0], [0, 2, 2]], dtype=torch.float64)


def sigmoid_scores(seed, tokens, experts, skew=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=g) + skew * torch.randn(experts, generator=g)
    return logits.sigmoid().to(dtype)


def oracle_margins(scores, bias, k):
    """numpy, by a full sort: alpha is entry k of the descending row, the last entry for k = E."""
    s, b = scores.double().numpy(), bias.double().numpy()
    alpha = -np.sort(-(s + b), axis=1)[:, min(k, s.shape[1] - 1)]
    return alpha[:, None] - s


def oracle_bias(scores, bias, k):
    r = np.sort(oracle_margins(scores, bias, k), axis=0)
    b = r[math.ceil(len(r) * k / r.shape[1]) - 1]
    return b - b.mean()


def load_of(scores, bias, k):
    chosen = np.argsort(-(scores + bias).double().numpy(), axis=1, kind="stable")[:, :k]
    return np.bincount(chosen.ravel(), minlength=scores.shape[1])


cases = st.tuples(st.integers(0, 2**31), st.integers(1, 60), st.integers(2, 9)).flatmap(
    lambda t: st.tuples(st.just(t[0]), st.just(t[1]), st.just(t[2]), st.integers(1, t[2])))


# --- counting ------------------------------------------------------------------------------------------------------

def test_load_and_max_vio_by_hand():
    load = expert_load(torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]]), 4)
    assert load.tolist() == [4, 3, 1, 0] and load.dtype == torch.int64
    assert float(max_vio(load)) == 1.0  # (4 - 2) / 2
    assert float(max_vio(torch.tensor([5, 5, 5]))) == 0
    assert float(max_vio(torch.zeros(3, dtype=torch.int64))) == 0
    assert max_vio(load).is_floating_point()
    assert expert_load(torch.empty(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("wrong", [4, -1])
def test_load_rejects_a_foreign_index(wrong):
    with pytest.raises(InputError, match="outside 0..3"):
        expert_load(torch.tensor([[0, wrong]]), 4)


def test_sign_update_by_hand():
    new = sign_update(torch.zeros(4), torch.tensor([4, 2, 1, 1]), 0.5)
    assert new.tolist() == [-0.5, 0.0, 0.5, 0.5] and new.dtype == torch.float32
    large = torch.tensor([2**25 + 2, 2**25, 2**25 + 1])  # float32 would round the last to the one before
    assert sign_update(torch.ones(3), large, 0.5).tolist() == [0.5, 1.5, 1.0]


# --- exact ---------------------------------------------------------------------------------------------------------

@given(st.lists(st.integers(-5, 5), min_size=1, max_size=12), st.data())
def test_kth_smallest_is_the_sorted_entry(values, data):
    rank = data.draw(st.integers(1, len(values)))
    assert int(kth_smallest(torch.tensor(values), rank)) == sorted(values)[rank - 1]


@given(cases)
@settings(deadline=None)
def test_margins_and_bias_equal_a_full_sort(case):
    seed, tokens, experts, k = case
    scores = sigmoid_scores(seed, tokens, experts, dtype=torch.float64)
    bias = sigmoid_scores(seed + 1, 1, experts, dtype=torch.float64)[0]
    np.testing.assert_allclose(margins(scores, bias, k).numpy(), oracle_margins(scores, bias, k), atol=1e-12)
    expected = bias.numpy() if k == experts else oracle_bias(scores, bias, k)
    np.testing.assert_allclose(quantile_bias(scores, bias, k).numpy(), expected, atol=1e-12)


def test_margin_by_hand():
    scores, bias = torch.tensor([[0.5, 0.25, 0.125]]), torch.tensor([0.0, 0.5, 0.0])
    # s + b = .5 .75 .125; k = 1: alpha is the second largest, .5; the margin subtracts the score without the bias
    assert margins(scores, bias, 1).tolist() == [[0.0, 0.25, 0.375]]
    assert margins(scores, bias, 1, midpoint=True).tolist() == [[0.125, 0.375, 0.5]]
    assert margins(scores, bias, 3).tolist() == [[-0.375, -0.125, 0.0]]  # k = E: alpha is the smallest


def test_ranks_by_hand():
    r = torch.tensor([[5.0, 0], [1, 0], [4, 0], [2, 0], [3, 0]])  # column 0 sorted: 1 2 3 4 5; q = 5/2
    column = lambda k, rank, rows=5: float(margin_quantile(r[:rows], k, rank)[0])
    assert column(1, "q") == column(1, "q+1") == column(1, "midpoint") == 3  # ceil(q) = floor(q) + 1 = 3
    assert (column(1, "q", 4), column(1, "q+1", 4), column(1, "midpoint", 4)) == (2, 4, 3)  # 1 2 4 5, q = 2
    with pytest.raises(InputError, match="rank"):
        margin_quantile(r, 1, "nearest")
    with pytest.raises(InputError, match="token"):
        margin_quantile(r[:0], 1)


@given(cases)
@settings(deadline=None)
def test_the_bias_lets_in_a_share_k_over_e_past_fixed_thresholds(case):
    seed, tokens, experts, k = case
    scores, bias = sigmoid_scores(seed, tokens, experts, dtype=torch.float64), torch.zeros(experts).double()
    b = margin_quantile(margins(scores, bias, k), k).numpy()
    r, share = oracle_margins(scores, bias, k), math.ceil(tokens * k / experts)
    assert ((r < b).sum(0) < share).all() and (share <= (r <= b).sum(0)).all()


def test_a_runner_up_holds_its_bias():
    """Where expert j is the (k+1)-th itself, r_ij is its old bias: many equal margins, and a dead zone for its bias.

    Short of the target, but by no more than the tokens it was next in line for: it keeps its bias (before centring).
    """
    scores, old, k = sigmoid_scores(0, 1000, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), 2
    order = np.argsort(-scores.numpy(), 1)
    load, second = (np.bincount(order[:, c].ravel(), minlength=8) for c in (slice(0, 2), 2))
    held = (load < 250) & (load + second >= 250)
    new = margin_quantile(margins(scores, old, k), k).numpy()
    assert held.any() and ((new == 0) == held).all()
    assert (margin_quantile(margins(scores, old, k, midpoint=True), k).numpy() != 0).all()


@pytest.mark.parametrize("tokens,experts,k", [(4096, 64, 4), (2048, 256, 16)])
def test_one_step_levels_a_fixed_batch(tokens, experts, k):
    """Also the sign trap: with s - b in place of s + b the same step makes it worse."""
    scores = sigmoid_scores(1, tokens, experts)
    vio = lambda bias: load_of(scores, bias, k).max() / (tokens * k / experts) - 1
    bias = quantile_bias(scores, torch.zeros(experts), k)
    before, after, wrong = vio(torch.zeros(experts)), vio(bias), vio(-bias)
    assert before > 4 and after < 0.5 and wrong > before
    assert vio(quantile_bias(scores, bias, k)) < after
    histogram = QuantileHistogram(torch.zeros(experts))
    histogram.add(margins(scores, torch.zeros(experts), k))
    assert vio(histogram.new_bias(k)) < 0.5


@given(cases)
@settings(deadline=None)
def test_experts_may_be_renumbered(case):
    seed, tokens, experts, k = case
    scores = sigmoid_scores(seed, tokens, experts, dtype=torch.float64)
    bias = torch.linspace(-0.2, 0.2, experts).double()
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(quantile_bias(scores[:, order], bias[order], k), quantile_bias(scores, bias, k)[order])


def test_stall_of_the_q_plus_one_convention():
    """A fixed point that is not optimal: dual 5, while the best balanced assignment is worth 4."""
    best = max(sum(float(STALL[i, p[i]]) for i in range(3)) for p in itertools.permutations(range(3)))
    value, last = {}, {}
    for rank in ("q+1", "midpoint", "q"):
        bias = torch.zeros(3, dtype=torch.float64)
        for _ in range(10):
            last[rank], bias = bias, quantile_bias(STALL, bias, 1, rank)
        value[rank] = (STALL + bias).numpy().max(1).sum() - bias.numpy().sum()
        assert float(dual_value(STALL, bias, 1)) == pytest.approx(value[rank])
    assert best == 4 and value["q+1"] == 5 and value["midpoint"] == value["q"] == pytest.approx(4)
    assert last["q+1"].tolist() == [0, 0, 0]


@given(cases)
@settings(deadline=None)
def test_dual_by_its_definition_and_no_bias_beats_an_assignment(case):
    seed, tokens, experts, k = case
    s, bias = sigmoid_scores(seed, tokens, experts, dtype=torch.float64), torch.linspace(-0.5, 0.8, experts).double()
    x, beta, q = s.numpy(), -bias.numpy(), tokens * k / experts
    alpha = -np.sort(-(x - beta), 1)[:, k - 1]
    definition = np.maximum(0, x - alpha[:, None] - beta).sum() + k * alpha.sum() + q * beta.sum()  # report, eq. 23
    assert float(dual_value(s, bias, k)) == pytest.approx(definition)
    cyclic = sum(x[i, (i * k + j) % experts] for i in range(tokens) for j in range(k))  # balanced if E divides N k
    if tokens * k % experts == 0:
        assert definition >= cyclic - 1e-9


@pytest.mark.parametrize("k", [0, 4])
def test_margins_reject_a_wrong_k(k):
    with pytest.raises(InputError, match="top_k"):
        margins(torch.rand(2, 3), torch.zeros(3), k)


@pytest.mark.parametrize("scores", [torch.rand(2, 4), torch.rand(3), torch.rand(1, 2, 3)])
def test_margins_reject_wrong_shapes(scores):
    with pytest.raises(InputError, match="fit"):
        margins(scores, torch.zeros(3), 1)


def test_all_experts_chosen_or_no_tokens_leave_the_bias():
    bias = torch.tensor([0.5, -0.25, 0.125])
    assert torch.equal(quantile_bias(torch.rand(7, 3), bias, 3), bias)
    assert torch.equal(quantile_bias(torch.rand(0, 3), bias, 1), bias)


def test_more_numbers_than_torch_quantile_takes():
    scores = torch.rand(1 << 17, 129, generator=torch.Generator().manual_seed(0))
    r = margins(scores, torch.zeros(129), 1)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(r.flatten(), 0.5)
    expected = np.partition(r[:, 7].numpy(), 1016)[1016]  # ceil(2^17 / 129) = 1017, counted from 1
    assert float(margin_quantile(r, 1)[7]) == expected


# --- counted -------------------------------------------------------------------------------------------------------

def filled(scores, bias, k, bins=1000):
    histogram = QuantileHistogram(bias, bins)
    histogram.add(margins(scores, bias, k))
    return histogram


@given(cases, st.sampled_from([2, 37, 1000]))
@settings(deadline=None)
def test_histogram_within_one_bin_of_the_sorted_value(case, bins):
    seed, tokens, experts, k = case
    scores, bias = sigmoid_scores(seed, tokens, experts), torch.linspace(-0.7, 0.4, experts)
    exact = np.sort(oracle_margins(scores, bias, k), axis=0)[math.ceil(tokens * k / experts) - 1]
    histogram = filled(scores, bias, k, bins)
    assert histogram.width == pytest.approx(3.1 / bins)  # range [-0.7 - 1, 0.4 + 1]
    assert np.abs(histogram.quantile(k).numpy() - exact).max() <= histogram.width * (1 + 1e-4)
    assert float(histogram.new_bias(k).mean()) == pytest.approx(0, abs=1e-6) or k == experts


@given(cases, st.lists(st.integers(0, 60), max_size=4))
@settings(deadline=None)
def test_counts_do_not_depend_on_how_tokens_are_split(case, cuts):
    seed, tokens, experts, k = case
    scores, bias = sigmoid_scores(seed, tokens, experts), torch.zeros(experts)
    whole, parts = filled(scores, bias, k, 50), QuantileHistogram(bias, 50)
    for piece in np.split(scores.numpy(), sorted(min(c, tokens) for c in cuts)):
        parts.merge(filled(torch.from_numpy(piece), bias, k, 50))
    assert torch.equal(whole.counts, parts.counts)
    assert whole.counts.dtype == torch.int64 and (whole.counts.sum(1) == tokens).all()


def test_counts_do_not_depend_on_the_chunk(monkeypatch):
    scores = sigmoid_scores(3, 100, 6)
    whole = filled(scores, torch.zeros(6), 2)
    monkeypatch.setattr("k3_teach.parts.balance.CHUNK", 50)
    assert torch.equal(filled(scores, torch.zeros(6), 2).counts, whole.counts)


def test_histogram_by_hand():
    histogram = QuantileHistogram(torch.zeros(2), num_bins=4)  # bins of 0.5 from -1 to 1
    histogram.add(torch.tensor([[-0.9, 1.0], [-0.4, -1.0], [-0.3, -1.0], [-0.2, 0.0], [0.6, 0.1], [0.7, 0.2]]))
    assert histogram.counts.tolist() == [[1, 3, 0, 2], [2, 0, 3, 1]]
    # q = 3. Column 0: bin 1 after 1, two of its three: -0.5 + 2/3 of 0.5. Column 1: bin 2 after 2, one of its three.
    np.testing.assert_allclose(histogram.quantile(1).numpy(), [-0.5 + 1 / 3, 1 / 6], atol=1e-12)
    np.testing.assert_allclose(histogram.new_bias(1).numpy(), [-1 / 6, 1 / 6], atol=1e-7)


def test_writer_and_reader_agree_on_every_edge():
    histogram = QuantileHistogram(torch.tensor([-0.3, 0.8]), 1000)
    edges = np.linspace(-1.3, 1.8, 1001)
    np.testing.assert_allclose(histogram.value(torch.arange(1001).double()).numpy(), edges, atol=1e-6)
    np.testing.assert_allclose(histogram.position(torch.from_numpy(edges)).numpy(), np.arange(1001), atol=1e-3)
    middle = torch.from_numpy((edges[1:] + edges[:-1]) / 2)
    histogram.add(middle[:, None].expand(-1, 2))
    assert (histogram.counts == 1).all()


def test_quantiles_of_shards_cannot_be_averaged():
    """Two unlike machines with one expert in fifty as the target: counts add up, quantiles do not."""
    bias, k = torch.zeros(50), 1
    shards = [sigmoid_scores(0, 1000, 50) * 0.2 + 0.8, sigmoid_scores(1, 1000, 50) * 0.2]
    exact = np.sort(oracle_margins(torch.cat(shards), bias, k), 0)[39]
    merged = filled(shards[0], bias, k)
    merged.merge(filled(shards[1], bias, k))
    average = sum(filled(s, bias, k).quantile(k).numpy() for s in shards) / 2
    assert np.abs(merged.quantile(k).numpy() - exact).max() <= 0.002 < np.abs(average - exact).max()


def test_extremes_stay_inside_the_range():
    scores, bias = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), torch.tensor([-3.0, 2.0])
    for k in (1, 2):
        assert (filled(scores, bias, k).counts.sum(1) == 4).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5, -1.5])
def test_histogram_rejects_what_it_cannot_place_and_counts_nothing(value):
    histogram = QuantileHistogram(torch.zeros(2))
    with pytest.raises(InputError, match="outside|NaN"):
        histogram.add(torch.tensor([[0.0, 0.0], [value, 0.0]]))
    assert histogram.counts.sum() == 0
    QuantileHistogram(torch.zeros(2), span=2.0).add(torch.tensor([[1.5, -1.5]]))  # wider scores: a wider span


def test_histogram_rejects():
    histogram = QuantileHistogram(torch.zeros(2))
    with pytest.raises(InputError, match="fit"):
        histogram.add(torch.zeros(3, 4))
    with pytest.raises(InputError, match="no margins"):
        histogram.quantile(1)
    for bias, bins in ((torch.zeros(2), 10), (torch.ones(2), 1000), (torch.zeros(3), 1000)):
        other = QuantileHistogram(bias, bins)
        with pytest.raises(InputError, match="added"):
            histogram.merge(other)
    for bias, bins in ((torch.zeros(2), 0), (torch.tensor([0, math.nan]), 10), (torch.tensor([0, -math.inf]), 10)):
        with pytest.raises(InputError, match="bins"):
            QuantileHistogram(bias, bins)


def test_empty_histogram_leaves_the_bias():
    bias = torch.tensor([0.5, -0.5])
    histogram = QuantileHistogram(bias)
    histogram.add(torch.empty(0, 2))
    assert torch.equal(histogram.new_bias(1), bias)


# --- in a model ----------------------------------------------------------------------------------------------------

class Router(nn.Module):
    def __init__(self, width=8, experts=12, k=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, generator=torch.Generator().manual_seed(5)))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.top_k = k

    def forward(self, x):
        scores = (x @ self.weight.T).sigmoid()
        idx = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        weights = scores.gather(1, idx)
        return idx, weights / weights.sum(1, keepdim=True), scores


class Net(nn.Module):
    def __init__(self, mode=None, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": Router(**kwargs)}) for _ in range(2))
        self.mode = mode

    def mix(self, gate, x):
        _, weights, scores = gate(x)
        return x + weights.sum(1, keepdim=True) * scores[:, :1].tanh()

    def forward(self, x):
        for layer in self.layers:
            if self.mode is None:
                x = self.mix(layer["gate"], x)
            else:
                x = checkpoint(self.mix, layer["gate"], x, use_reentrant=self.mode)
        return x


def batch(seed=0, n=200, width=8):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=g) + torch.randn(width, generator=g)


def biases(model):
    return [layer["gate"].e_score_correction_bias for layer in model.layers]


def expected_bias(model, x, k=3):
    """Both layers of Net at bias 0, by the sorted oracle."""
    out = []
    with torch.no_grad():
        for layer in model.layers:
            scores = (x @ layer["gate"].weight.T).sigmoid()
            out.append(oracle_bias(scores, torch.zeros(scores.shape[1]), k))
            x = model.mix(layer["gate"], x)
    return out


@pytest.mark.parametrize("method,atol", [("quantile_exact", 1e-6), ("quantile", 0.004)])
def test_step_sets_every_bias_from_all_micro_batches(method, atol):
    model, x = Net(), batch()
    expected = expected_bias(model, x)
    balancer = Balancer(model, method)
    assert list(balancer.routers) == ["layers.0.gate", "layers.1.gate"]
    for part in x.split(70):
        model(part)
        assert all(not b.any() for b in biases(model))  # not before step()
    balancer.step()
    for bias, values in zip(biases(model), expected):
        np.testing.assert_allclose(bias.numpy(), values, atol=atol)
        assert bias.dtype == torch.float32 and not bias.requires_grad


def test_load_is_readable_and_counts_start_afresh():
    model, x = Net(), batch()
    balancer = Balancer(model)
    expected = load_of((x @ model.layers[0]["gate"].weight.detach().T).sigmoid(), torch.zeros(12), 3)
    model(x)
    balancer.step()
    assert balancer.load["layers.0.gate"].tolist() == expected.tolist()
    assert balancer.max_vio["layers.0.gate"] == pytest.approx(expected.max() / 50 - 1)
    first = balancer.max_vio["layers.0.gate"]
    model(x)
    balancer.step()
    assert balancer.load["layers.0.gate"].sum() == 600 and balancer.max_vio["layers.0.gate"] < 0.5 * first


def test_sign_and_none():
    for method in ("sign", "none"):
        model, x = Net(), batch()
        balancer = Balancer(model, method, step=0.25)
        model(x)
        balancer.step()
        away = np.sign(50 - balancer.load["layers.1.gate"].numpy())
        assert biases(model)[1].tolist() == (0.25 * away if method == "sign" else 0 * away).tolist()


def test_step_without_data_changes_nothing():
    for method in ("quantile", "quantile_exact", "sign", "none"):
        model = Net()
        with torch.no_grad():
            biases(model)[0].copy_(torch.arange(12.0))
        balancer = Balancer(model, method)
        balancer.step()
        model(batch(n=0))
        balancer.step()
        assert biases(model)[0].tolist() == list(range(12)) and balancer.load == {} and balancer.max_vio == {}


def test_evaluation_is_neither_counted_nor_updated():
    model, x = Net(), batch()
    balancer = Balancer(model)
    model.eval()
    model(x)
    assert balancer.tallies == {}
    model.train()
    model(x[:50])
    model.eval()
    model(x)
    balancer.step()
    assert all(not b.any() for b in biases(model)) and balancer.load == {}
    model.train()
    balancer.step()
    assert balancer.load["layers.0.gate"].sum() == 150 and biases(model)[0].any()


def test_no_grad_forward_counts_in_training_mode():
    model = Net()
    balancer = Balancer(model)
    with torch.no_grad():
        model(batch())
    balancer.step()
    assert balancer.load["layers.0.gate"].sum() == 600


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_once(reentrant):
    plain, saved, x = Net(), Net(reentrant), batch()
    calls = []
    saved.layers[1]["gate"].register_forward_hook(lambda *_: calls.append(1))
    watch = [Balancer(m) for m in (plain, saved)]
    for model, balancer in zip((plain, saved), watch):
        for part in x.split(90):
            model(part.requires_grad_()).sum().backward()
    assert len(calls) == 6  # three micro-batches, each computed twice
    for name, tally in watch[0].tallies.items():
        assert torch.equal(tally.load, watch[1].tallies[name].load)
        assert torch.equal(tally.histogram.counts, watch[1].tallies[name].histogram.counts)
    for balancer in watch:
        balancer.step()
    assert all(torch.equal(a, b) for a, b in zip(biases(plain), biases(saved)))


@pytest.mark.parametrize("method", ["quantile", "quantile_exact", "sign"])
def test_all_experts_chosen_stays_finite(method):
    model = Net(experts=4, k=4)
    with torch.no_grad():
        biases(model)[0].copy_(torch.tensor([0.5, 0, 0, -0.25]))
    balancer = Balancer(model, method)
    for _ in range(3):
        model(batch())
        balancer.step()
    assert biases(model)[0].tolist() == [0.5, 0, 0, -0.25] and balancer.max_vio["layers.0.gate"] == 0


@pytest.mark.parametrize("method", ["quantile", "quantile_exact", "sign", "none"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_name_the_layer(method, value):
    model = Net()
    balancer = Balancer(model, method)
    broken = model.layers[1]["gate"]
    # A hook put in front of the balancer's would be too late, so break the output where it is made.
    forward = broken.forward

    def broken_forward(x):
        idx, weights, scores = forward(x)
        return idx, weights, scores + torch.where(torch.arange(12) == 3, value, 0.0)

    broken.forward = broken_forward
    with pytest.raises(InputError, match=r"layers\.1\.gate.*NaN"):
        model(batch())
    assert balancer.tallies["layers.1.gate"].load.sum() == 0


def test_low_precision_bias_is_refused():
    model = Net().bfloat16()
    balancer = Balancer(model)
    with pytest.raises(InputError, match=r"layers\.0\.gate.*bfloat16"):
        balancer.step()


def test_the_bias_never_reaches_the_weights():
    model, x = Net(), batch()
    gate = model.layers[0]["gate"]
    balancer = Balancer(model)
    model(x)
    balancer.step()
    idx, weights, scores = gate(x)
    raw = np.take_along_axis((x @ gate.weight.detach().T).sigmoid().numpy(), idx.numpy(), 1)
    np.testing.assert_allclose(weights.detach().numpy(), raw / raw.sum(1, keepdims=True), rtol=1e-6)
    assert [n for n, p in model.named_parameters() if p.grad is not None] == []


def test_remove_detaches():
    model = Net()
    balancer = Balancer(model)
    balancer.remove()
    model(batch())
    assert balancer.tallies == {}


def test_a_copy_of_the_model_does_not_feed_the_first_balancer():
    model = Net()
    balancer = Balancer(model)
    copy.deepcopy(model)(batch())
    assert balancer.tallies == {}


def test_unknown_method():
    with pytest.raises(InputError, match="quantile"):
        Balancer(Net(), "aux_loss")


# --- over processes ------------------------------------------------------------------------------------------------

def worker(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    try:
        model, x = Net(), batch(n=300)
        balancer = Balancer(model)
        model(x[:100] if rank else x[100:])
        balancer.step()
        balancer.step()  # nobody has data
        if rank == 0:
            model(x)
        balancer.step()  # one rank has none
        torch.save([b.clone() for b in biases(model)] + [balancer.load["layers.0.gate"]], f"{folder}/{rank}.pt")
        exact = Balancer(model, "quantile_exact")
        model(x)
        with pytest.raises(InputError, match="ranks"):
            exact.step()
        alone = Balancer(model, "quantile_exact", all_reduce=False)
        model(x)
        alone.step()
        assert alone.load["layers.0.gate"].sum() == 900
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_two_processes_equal_one(tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    model, x = Net(), batch(n=300)
    balancer = Balancer(model)
    for _ in range(2):
        model(x)
        balancer.step()
    ranks = [torch.load(tmp_path / f"{r}.pt") for r in (0, 1)]
    for one, a, b in zip(biases(model) + [balancer.load["layers.0.gate"]], *ranks):
        assert torch.equal(a, b) and torch.equal(one, a)
