"""Which parameter is trained by what; the learning rate."""

import math

import pytest

import k3_teach as k3
from k3_teach.train.optimiser import learning_rate, make_optimisers, mla_layers, parameter_groups
from tests.helpers import toy


def names_of(model, groups):
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: group for group in groups for p in group["params"]}


@pytest.fixture
def model():
    return toy()


def test_every_parameter_is_in_one_group_but_the_biases_of_the_routers(model):
    muon, adamw = parameter_groups(model)
    listed = [id(p) for group in muon + adamw for p in group["params"]]
    assert len(set(listed)) == len(listed)
    left = {n for n, p in model.named_parameters() if id(p) not in set(listed)}
    assert left and all(n.endswith("e_score_correction_bias") for n in left)


def test_matrices_go_to_muon_and_the_rest_to_adamw(model):
    muon, adamw = (names_of(model, groups) for groups in parameter_groups(model))
    for name in ("layers.1.self_attn.f_a_proj.weight", "layers.3.self_attn.o_proj.weight",
                 "layers.1.block_sparse_moe.gate.weight", "layers.1.block_sparse_moe.experts.w1",
                 "layers.1.block_sparse_moe.routed_expert_up_proj.weight", "layers.0.mlp.up_proj.weight",
                 "layers.1.self_attn.b_proj.weight"):
        assert name in muon
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert "weight_decay" not in adamw[name]            # that of the optimiser
    for name in ("norm.weight", "layers.1.self_attn.A_log", "layers.1.self_attn.dt_bias",
                 "layers.1.self_attn.q_conv1d.weight", "layers.2.mlp_res_proj.weight",
                 "output_attn_res_proj.weight", "layers.3.self_attn.q_a_layernorm.weight"):
        assert adamw[name]["weight_decay"] == 0.0


def test_heads_are_parted_where_rows_are_heads(model):
    muon = names_of(model, parameter_groups(model)[0])
    parted = {n.split("self_attn.")[1]: g["num_heads"] for n, g in muon.items() if g["num_heads"]}
    assert parted == {"q_proj.weight": 4, "k_proj.weight": 4, "v_proj.weight": 4,
                      "q_b_proj.weight": 4, "kv_b_proj.weight": 8}
    whole = parameter_groups(model, per_head=False)[0]
    assert [g["num_heads"] for g in whole] == [None]


def test_keys_and_values_of_different_width_stay_together():
    model = toy(v_head_dim=8)
    groups = names_of(model, parameter_groups(model)[0])
    assert groups["layers.3.self_attn.kv_b_proj.weight"]["num_heads"] == 4


def test_a_tied_head_is_the_embedding():
    model = toy(tie_word_embeddings=True)
    _, adamw = parameter_groups(model)
    assert [len(adamw[0]["params"]), adamw[0]["params"][0] is model.embed_tokens.weight] == [1, True]


def test_adamw_alone_takes_everything(model):
    both, alone = make_optimisers(model), make_optimisers(model, "adamw")
    count = lambda made: sum(len(g["params"]) for o in made.values() for g in o.param_groups)
    assert list(both) == ["muon", "adamw"] and list(alone) == ["adamw"]
    assert count(both) == count(alone)
    decays = {g["weight_decay"] for g in alone["adamw"].param_groups}
    assert decays == {0.1, 0.0}
    with pytest.raises(k3.InputError, match="optimiser is 'sgd'; it must be 'muon' or 'adamw'"):
        make_optimisers(model, "sgd")


def test_the_rate_goes_up_in_a_line_and_down_in_half_a_cosine():
    rates = [learning_rate(s, 100, 2.0, warmup=0.1, last=0.1) for s in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (s + 1) for s in range(10)])
    assert max(rates) == rates[9] == 2.0 and rates[99] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))          # half way down
    assert all(a > b for a, b in zip(rates[9:], rates[10:]))
    assert rates[30] == pytest.approx(2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * 21 / 90))))


def test_the_rate_of_a_short_run_is_never_zero():
    for steps in (1, 2, 3):
        assert all(learning_rate(s, steps, 1.0) > 0 for s in range(steps))
    assert learning_rate(0, 1, 1.0) == 1.0


def test_qk_clip_watches_the_mla_layers(model):
    assert list(mla_layers(model)) == ["layers.3.self_attn", "layers.7.self_attn", "layers.8.self_attn"]
