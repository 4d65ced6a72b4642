"""The tasks of recall: each text read again, in plain Python, by their rules."""

import pytest
import torch

import k3_teach as k3
from k3_teach.errors import InputError
from k3_teach.notebook import experiment
from k3_teach.notebook.files import repository_module
from k3_teach.train.recall import NOTHING, copying, mqar, share_right, some_of


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("pairs, queries, keys, values", [(1, 1, 1, 1), (5, 3, 9, 4), (64, 64, 64, 2)])
def test_an_answer_is_what_followed_the_key(pairs, queries, keys, values):
    ids, targets = mqar(20, pairs, queries, keys, values, seeded())
    assert ids.shape == targets.shape == (20, 2 * pairs + queries)
    assert ids.dtype == targets.dtype == torch.int64
    for text, answers in zip(ids.tolist(), targets.tolist()):
        shown, asked = text[:2 * pairs], text[2 * pairs:]
        table = dict(zip(shown[::2], shown[1::2]))
        assert len(table) == pairs and len(set(asked)) == queries
        assert all(0 <= key < keys <= value < keys + values for key, value in table.items())
        assert answers == [NOTHING] * 2 * pairs + [table[key] for key in asked]


def test_queries_come_in_another_order_than_their_keys():
    ids, _ = mqar(200, 8, 8, 8, 4, seeded())
    same = (ids[:, 16:] == ids[:, :16:2]).double().mean()
    assert abs(same - 1 / 8) < 0.05
    assert all(sorted(row) == list(range(8)) for row in ids[:, 16:].tolist())


def test_every_key_value_and_query_has_its_turn():
    ids, _ = mqar(3000, 2, 1, 5, 3, seeded())
    for column, lowest, number in ((0, 0, 5), (1, 5, 3), (2, 0, 5), (3, 5, 3), (4, 0, 5)):
        share = (ids[:, column] - lowest).bincount(minlength=number) / 3000
        assert len(share) == number and (share - 1 / number).abs().max() < 0.05, column


@pytest.mark.parametrize("length, alphabet", [(1, 1), (7, 3), (40, 26)])
def test_a_copy_is_the_string_once_more(length, alphabet):
    ids, targets = copying(12, length, alphabet, seeded())
    assert ids.shape == targets.shape == (12, 2 * length)
    for text, answers in zip(ids.tolist(), targets.tolist()):
        string = text[:length]
        assert all(0 <= symbol < alphabet for symbol in string)
        assert text == [*string, alphabet, *string[:-1]]
        assert answers == [NOTHING] * length + string


@pytest.mark.parametrize("make", [lambda g: mqar(4, 6, 6, 9, 9, g), lambda g: copying(4, 9, 5, g)])
def test_a_seed_gives_the_same_texts_in_any_precision(make):
    first = make(seeded(3))
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = make(seeded(3))
    finally:
        torch.set_default_dtype(former)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], make(seeded(4))[0])


def test_drawn_integers_differ():
    drawn = some_of(6, 4, 500, seeded())
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    assert (drawn.flatten().bincount(minlength=6) / 2000 - 1 / 6).abs().max() < 0.03


def test_only_what_is_asked_counts():
    targets = torch.tensor([[NOTHING, 2, 0], [1, NOTHING, 1]])
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 2, 1], [1, 0, 0]]), 3).double()
    assert share_right(logits, targets) == 0.5


@pytest.mark.parametrize("sizes, message", [
    ((2, 5, 1, 4, 2), "pairs is 5; there are only 4 keys"),
    ((2, 3, 4, 9, 2), "queries is 4; each of 3 pairs is asked at most once"),
    ((0, 1, 1, 1, 1), "batch is 0; it must be at least 1"),
    ((2, 3, 0, 9, 2), "queries is 0; it must be at least 1"),
    ((2, 3, 1, 9, -1), "values is -1; it must be at least 1")])
def test_numbers_that_make_no_text_are_named(sizes, message):
    with pytest.raises(InputError, match=message):
        mqar(*sizes, seeded())


def test_a_copy_of_nothing_is_refused():
    with pytest.raises(InputError, match="length is 0; it must be at least 1"):
        copying(2, 0, 3, seeded())


# --- the script of chapter 16 --------------------------------------------------------------------------------------

@pytest.fixture
def lab():
    return repository_module("book/experiments/16_recall.py")


@pytest.mark.parametrize("name", ["decay, add", "add"])
def test_the_baselines_only_add(lab, name):
    """Against S <- Diag(e^g) S + beta k v^T, token by token."""
    layer = lab.build(name, 0).layers[0].self_attn.double()
    x = torch.randn(2, 40, lab.WIDTH, generator=seeded(), dtype=torch.float64)
    part = lambda proj, conv: layer.heads(k3.short_conv(proj(x), conv.weight)[0])
    q = k3.l2_normalize(part(layer.q_proj, layer.q_conv1d)) * layer.head_dim ** -0.5
    k = k3.l2_normalize(part(layer.k_proj, layer.k_conv1d))
    v, beta = part(layer.v_proj, layer.v_conv1d), torch.sigmoid(layer.b_proj(x))
    decay = layer.log_decay(x).exp()
    assert (decay == 1).all() if name == "add" else (decay < 1).all()
    S, o = x.new_zeros(2, lab.HEADS, 16, 16), []
    for t in range(40):
        S = decay[:, t, ..., None] * S + beta[:, t, :, None, None] * k[:, t, ..., None] * v[:, t, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    wanted = layer.o_proj(layer.o_norm(torch.stack(o, 1), layer.output_gate(x)).flatten(2))
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    corrected = k3.KDA.forward(layer, x)
    assert (corrected - wanted).norm() > 0.01 * wanted.norm()


def test_attention_behind_a_convolution_sees_four_tokens_at_once(lab):
    """One layer of attention without places cannot tell the order of earlier tokens; with it, it can."""
    x = torch.randn(1, 12, lab.WIDTH, generator=seeded())
    swapped = x[:, [0, 1, 3, 2, *range(4, 12)]]
    moved = {}
    for name in ("MLA", "conv, MLA"):
        mix = lab.build(name, 0).layers[0].self_attn
        moved[name] = (mix(x) - mix(swapped))[0, -1].abs().max()
    assert moved["MLA"] < 1e-5 < 1e-3 < moved["conv, MLA"]


def test_a_study_goes_on_where_it_was_stopped(lab, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(lab, "train", lambda **run: made.append(run))
    monkeypatch.setattr(lab, "right", lambda net, task, seed: [0.5, seed])
    path, run = tmp_path / "x.jsonl", dict(name="KDA", task="mqar", steps=9, rate=0.01)
    first = [lab.Kept(path).right(**run, seed=seed) for seed in (0, 1)]
    assert [lab.Kept(path).right(**run, seed=seed) for seed in (0, 1)] == first and len(made) == 2
    lab.Kept(path).right(**run | {"rate": 0.02}, seed=0)
    assert len(made) == 3
    monkeypatch.setitem(lab.SETTINGS, "width", 1)       # what was stored is of another study
    lab.Kept(path).right(**run, seed=0)
    assert len(made) == 4


@pytest.mark.slow
def test_two_runs_of_16_are_repeated():
    lab, stored = experiment("16_recall")
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        again = lab.short()
    finally:
        torch.set_default_dtype(former)
    for name, shares in again.items():
        found = stored["results"]["copying"][name]
        assert stored["settings"]["rates"][found["best"]] == 0.02
        assert shares == pytest.approx(found["right"][1], abs=0.1), name
