"""The plain GPT: against torch's own layers, causality, and its size beside a K3's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.scale.cost import active_parameters
from k3_teach.train.gpt import GPT, active, gpt_like

V, D, H, L, INNER = 50, 24, 3, 2, 40
K = D // H


def make(seed=0, std=0.3):
    torch.manual_seed(seed)
    model = GPT(V, D, H, L, INNER).double()
    for p in model.parameters():        # gains other than 1, logits far from 0
        torch.nn.init.normal_(p, p.mean().round().item(), std)
    return model


def ids(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def turn(x):
    """RoPE by complex numbers: x [T, K], channels 2i and 2i + 1 are one number."""
    theta = torch.tensor([10000 ** (-2 * i / K) for i in range(K // 2)], dtype=torch.float64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * theta
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def naive(model, row):
    """One row of ids [T] -> [T, V], head by head and token by token, with torch's own norm."""
    w = {name: p.detach() for name, p in model.named_parameters()}
    h = w["embed_tokens.weight"][row]
    norm = lambda x, name: F.rms_norm(x, (D,), w[f"{name}.weight"], 1e-5)
    for i in range(L):
        at = lambda name: w[f"layers.{i}.{name}.weight"]
        n, heads = norm(h, f"layers.{i}.input_layernorm"), []
        for a in range(0, D, K):
            q, k, v = (n @ at(f"self_attn.{x}_proj")[a:a + K].T for x in "qkv")
            q, k = turn(q), turn(k)
            heads.append(torch.stack([(k[:t + 1] @ q[t] / math.sqrt(K)).softmax(0) @ v[:t + 1]
                                      for t in range(len(row))]))
        h = h + torch.cat(heads, -1) @ at("self_attn.o_proj").T
        n = norm(h, f"layers.{i}.post_attention_layernorm")
        gate, up = n @ at("mlp.gate_proj").T, n @ at("mlp.up_proj").T
        h = h + (gate * gate.sigmoid() * up) @ at("mlp.down_proj").T
    return norm(h, "norm") @ w["lm_head.weight"].T


def test_equals_a_form_of_loops():
    model, x = make(), ids(2, 9)
    want = torch.stack([naive(model, row) for row in x])
    assert want.std() > 0.5
    assert_close(model(x), want, atol=1e-12, rtol=0)


def test_later_tokens_change_no_earlier_logits():
    model, x = make().float(), ids(1, 12)
    other = x.clone()
    other[:, 7:] = (other[:, 7:] + 1) % V
    before, after = model(x), model(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_every_parameter_learns():
    model, x = make(), ids(2, 6)
    k3.next_token_loss(model(x), x).backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


def test_begins_as_k3_does():
    torch.manual_seed(0)
    model = GPT(256, 64, 4, 2, 160)
    for name, p in model.named_parameters():
        want = (1, 0) if name.endswith("norm.weight") else (0, 0.02)
        assert abs(p.mean() - want[0]) < 1e-3 and abs(p.std() - want[1]) < 1e-3, name
    x = torch.randint(256, (2, 32))
    assert abs(k3.next_token_loss(model(x), x) - math.log(256)) < 0.1


@pytest.mark.parametrize("changes", [
    {}, dict(hidden_size=128, head_dim=32, moe_intermediate_size=64, vocab_size=1024),
    dict(hidden_size=32, head_dim=8, num_experts=0, intermediate_size=256),
    dict(num_experts_per_token=16, attn_res_block_size=None)])
def test_as_active_as_the_k3(changes):
    """Within the rounding of the inner width, which is all that is free; here that is 1 %."""
    c = k3.K3Config.toy(**changes)
    model, inner = gpt_like(c), gpt_like(c).layers[0].mlp.up_proj.out_features
    assert active(model) == pytest.approx(active_parameters(c), rel=0.01)
    assert abs(active(model) - active_parameters(c)) <= 3 * 4 * c.hidden_size * 9
    assert inner % 8 == 0
    assert (model.lm_head.in_features, model.lm_head.out_features) == (c.hidden_size, c.vocab_size)
    assert len(model.layers) == 9 and model.layers[0].self_attn.num_heads == 4


def test_counts_what_a_token_multiplies_with():
    block = 4 * D * D + 3 * D * INNER + 2 * D
    assert active(GPT(V, D, H, L, INNER)) == L * block + D + V * D


def test_a_k3_that_is_too_small_for_attention():
    narrow = k3.K3Config.toy(num_experts=0, intermediate_size=1, head_dim=1, num_attention_heads=1,
                             qk_nope_head_dim=1, v_head_dim=1, kv_lora_rank=1, q_lora_rank=1)
    with pytest.raises(k3.InputError, match="leave nothing for the feed-forwards"):
        gpt_like(narrow)


@pytest.mark.parametrize("d, heads", [(24, 5), (12, 4)])
def test_a_width_that_rope_cannot_turn(d, heads):
    with pytest.raises(k3.InputError, match=f"d is {d}; it must be a multiple of 2 heads"):
        GPT(V, d, heads, 1, 8)


def test_a_token_that_is_not_there():
    with pytest.raises(k3.InputError, match="token ids must be from 0 to 49"):
        make()(torch.tensor([[1, V]]))
