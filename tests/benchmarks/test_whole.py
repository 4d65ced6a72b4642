"""The toy K3 and the GPT beside it: equal in active size, and each does its work."""

import pytest
import torch

from benchmarks.baselines.gpt import active, gpt_like
from benchmarks.case import Case, Disagreement, Quantity
from benchmarks.cases import training, whole
from benchmarks.run import agreement, quantity
from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.model import K3Model
from k3_teach.scale.cost import active_parameters, total_parameters


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(0)
    return list(whole.cases(quick=True))


# --- the GPT --------------------------------------------------------------------------

@pytest.mark.parametrize("c", [K3Config.toy(num_attention_heads=2), training.toy(32),
                               training.toy(128), training.toy(256)])
def test_the_gpt_has_as_many_active_parameters(c):
    gpt = gpt_like(c, context=64)
    matrices = sum(p.numel() for name, p in gpt.named_parameters()
                   if not name.startswith(("embed", "position")))
    assert matrices == active(gpt) == pytest.approx(active_parameters(c), rel=0.01)
    assert len(gpt.blocks) == c.num_hidden_layers
    assert gpt.head.weight.shape == (c.vocab_size, c.hidden_size)


def test_a_k3_with_less_than_attention_has_no_such_gpt():
    few = K3Config.toy(moe_intermediate_size=1, intermediate_size=1, vocab_size=8,
                       kda_layers=(), full_attn_layers=tuple(range(1, 10)),
                       hidden_size=512)
    with pytest.raises(InputError, match="needs more than 1048576 for attention alone"):
        gpt_like(few, 8)


def test_the_gpt_is_causal_and_writes_as_it_reads():
    torch.manual_seed(0)
    gpt = gpt_like(training.toy(32), context=12).double()
    ids = torch.randint(0, 256, (2, 12))
    with torch.no_grad():
        logits, cache = gpt(ids), gpt.new_cache(2, 12).double()
        other = gpt(ids.index_fill(1, torch.tensor([11]), 3))
        pieces = [gpt(ids[:, :9], cache)]
        pieces += [gpt(ids[:, t:t + 1], cache, t) for t in range(9, 12)]
    torch.testing.assert_close(other[:, :11], logits[:, :11], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(pieces, 1), logits, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="ids has 2 tokens; behind 9 cached ones"):
        gpt(ids[:, 9:11], cache, 9)


# --- training -------------------------------------------------------------------------

def test_the_toy_is_the_one_described():
    c = training.toy(128)
    kinds = ["KDA" if c.is_kda(i) else "MLA" for i in range(8)]
    assert kinds == ["KDA", "KDA", "KDA", "MLA"] * 2 and all(map(c.is_moe, range(8)))
    sizes = [(total_parameters(x) / 1e6, active_parameters(x) / 1e6)
             for x in (c, training.toy(256))]
    assert [[round(n, 1) for n in pair] for pair in sizes] == [[4.5, 1.7], [10.7, 5.2]]


def test_a_step_learns_and_balances():
    case = next(training.cases(quick=True))
    first = agreement_of(case)
    for _ in range(12):
        last = {name: call() for name, call in case.contenders.items()}
    assert all(last[name] < first[name] - 0.2 for name in case.contenders)


def test_the_biases_are_set_at_every_step():
    model = K3Model(training.toy(32))
    balancer = training.Balancer(model)
    ids = torch.randint(0, 256, (2, 32))
    training.training_step(model, ids, balancer)()
    biases = [r.e_score_correction_bias for r in balancer.routers.values()]
    assert len(biases) == 8 and all(b.abs().max() > 0 for b in biases)


def test_a_model_that_knows_something_or_nothing_at_all_is_refused():
    guess = torch.tensor(5.5)
    training.untrained({"a": guess}, 256)
    for wrong in (torch.tensor(4.0), torch.tensor(torch.nan)):
        with pytest.raises(Disagreement, match="b: the first loss"):
            training.untrained({"a": guess, "b": wrong}, 256)


def agreement_of(case: Case) -> dict:
    """First results, after the case's own check has passed."""
    results = {name: call() for name, call in case.contenders.items()}
    case.agree(results)
    return results


# --- the whole model ------------------------------------------------------------------

def test_every_row_agrees(rows):
    groups = {row.group for row in rows}
    assert len(groups) == 4
    for row in rows:
        assert quantity(row) if isinstance(row, Quantity) else agreement(row) == {}


def test_the_cache_grows_by_mla_only(rows):
    short, long = (r.values for r in rows if r.group.endswith("one sequence"))
    assert short["its KDA layers"] == long["its KDA layers"] > 0
    assert long["its MLA layers"] == 2 * short["its MLA layers"]
    assert long["GPT"] == 2 * short["GPT"]


def test_a_token_is_forgotten_again(rows):
    step = next(r for r in rows if r.group.endswith("one token"))
    ours = step.contenders[step.ours]
    torch.testing.assert_close(ours(), ours(), rtol=0, atol=0)


def test_a_wrong_step_and_a_wrong_cache_are_seen(rows):
    step = next(r for r in rows if r.group.endswith("one token"))
    results = agreement_of(step)
    with pytest.raises(Disagreement, match="differs from prefill"):
        step.agree(results | {step.ours: results[step.ours] * 1.01})
    with pytest.raises(Disagreement, match="GPT: the logits are not finite"):
        step.agree(results | {"GPT": results["GPT"] * torch.nan})
    k3 = K3Model(training.toy(32)).eval()
    cache = k3.new_cache()
    k3(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    with pytest.raises(Disagreement, match="the cache of 5 tokens takes"):
        whole.kept(k3, gpt_like(k3.config, 8), cache, 5)


def test_a_prefill_in_pieces_takes_less_memory(rows):
    short, long = (r.values for r in rows if r.group.endswith("memory of prefill"))
    assert long["K3 toy at once"] > 1.5 * long["K3 toy in pieces"]
    assert long["K3 toy at once"] > 1.5 * short["K3 toy at once"]


def test_what_is_too_long_for_one_call_says_so(monkeypatch):
    monkeypatch.setattr(whole, "AT_ONCE", 15)
    c = training.toy(32)
    row = whole.memory(K3Model(c).eval(), gpt_like(c, 17).eval(), torch.zeros(1, 16, dtype=torch.long), 1000)
    assert set(row.values) == {row.ours} and set(row.not_run) == {"K3 toy at once", "GPT at once"}


def test_the_cache_counts_as_memory(monkeypatch):
    monkeypatch.setattr(whole, "peak_memory", lambda call: (call(), 1000)[1])
    k3, ids = K3Model(training.toy(32)).eval(), torch.zeros(1, 64, dtype=torch.long)
    caches, peaks = whole.in_pieces(k3, ids, [32, 64])
    assert peaks == {32: 1000, 64: 1000 + caches[32].nbytes()}
