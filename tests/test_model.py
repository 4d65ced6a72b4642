"""The whole model: decoding, prefill in pieces, padding, causality, training, mistakes of the caller."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from tests.helpers import GOLDEN, tokens, toy

VARIANTS = {
    "K3": {}, "plain residual": dict(attn_res_block_size=None), "blocks of one layer": dict(attn_res_block_size=1),
    "no latent": dict(routed_expert_hidden_size=None, latent_moe_use_norm=False), "no norm": dict(latent_moe_use_norm=False),
    "SiLU": dict(hidden_act="silu"), "softplus gate": dict(gate_lower_bound=None), "low-rank gate": dict(use_full_rank_gate=False),
    "no MLA gate": dict(mla_use_output_gate=False), "no q-LoRA": dict(q_lora_rank=None), "RoPE": dict(mla_use_nope=False),
    "all KDA": dict(kda_layers=tuple(range(1, 10)), full_attn_layers=()), "all MLA": dict(kda_layers=(), full_attn_layers=tuple(range(1, 10))),
    "dense": dict(num_experts=0), "tied": dict(tie_word_embeddings=True), "groups": dict(num_expert_group=4, topk_group=2),
    "softmax router": dict(moe_router_activation_func="softmax"), "no shared experts": dict(num_shared_experts=0),
    "one expert": dict(num_experts_per_token=1), "wide convolution": dict(short_conv_kernel_size=6), "no convolution": dict(short_conv_kernel_size=1),
}


@pytest.fixture(scope="module")
def model():
    return toy()


def in_pieces(model, ids, cuts, mask=None, cache=None):
    cache, out, end = cache or model.new_cache(len(ids)), [], 0
    for part in ids.split(cuts, 1):
        end += part.shape[1]
        out.append(model(part, attention_mask=None if mask is None else mask[:, :end], cache=cache))
    return torch.cat(out, 1), cache


@pytest.mark.parametrize("cuts", [[2, 5, 1, 3, 119], [63, 67], [64, 66], [65, 65], [1] * 130, [129, 1], [1, 129], [130]], ids=lambda c: "+".join(map(str, c[:5])))
def test_pieces_equal_one_shot(model, cuts):
    """Pitfalls 13, 14, 15, 20."""
    ids = tokens(2, 130)
    assert_close(in_pieces(model, ids, cuts)[0], model(ids).detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_decodes_what_it_prefills(name):
    model, ids = toy(**VARIANTS[name]), tokens(2, 20)
    assert_close(in_pieces(model, ids, [7, 1, 1, 11])[0], model(ids).detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(name):
    """A gradient for every parameter but the biases of the routers and the query of layer 0, which reads one source."""
    model, ids = toy(**VARIANTS[name]).train(), tokens(2, 20)
    loss = k3.next_token_loss(model(ids), ids)
    loss.backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    expected = {n for n, _ in model.named_parameters() if n.endswith("e_score_correction_bias")}
    if model.config.attn_res_block_size:
        expected |= {"layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight"}
    assert silent == expected
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_one_step_down_the_gradient_lowers_the_loss():
    torch.manual_seed(0)
    model, ids = k3.K3Model(k3.K3Config.toy()), tokens(2, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = k3.next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - 5.545) < 0.1 and losses[-1] < losses[0] - 0.5       # ln 256 at the start


@settings(max_examples=15, deadline=None)
@given(at=st.integers(1, 39), seed=st.integers(0, 99))
def test_causal(model, at, seed):
    ids = tokens(1, 40, seed)
    changed = ids.clone()
    changed[:, at:] = (changed[:, at:] + 1 + tokens(1, 40 - at, seed + 1, 200)) % 256
    a, b = model(ids), model(changed)
    assert_close(a[:, :at], b[:, :at], atol=1e-11, rtol=0)
    assert (a[:, at] - b[:, at]).abs().max() > 1e-3


def left_padded(pads=37, T=130, seed=0):
    ids, mask = tokens(2, T, seed), torch.ones(2, T, dtype=torch.long)
    mask[0, :pads] = 0
    return ids, mask


@pytest.mark.parametrize("cuts", [[130], [37, 93], [20, 40, 70], [5, 3, 1, 121], [36, 1, 1, 92], [64, 66]], ids=str)
def test_left_padded_row_equals_the_row_alone(model, cuts):
    """Pitfall 19, also where a piece ends inside the padding, and through five decoding steps."""
    ids, mask = left_padded()
    next_ids = tokens(2, 5, 9)
    out, cache = in_pieces(model, ids, cuts, mask)
    steps, _ = in_pieces(model, next_ids, [1] * 5, cache=cache)
    whole = torch.cat((ids, next_ids), 1)
    actual = torch.cat((out, steps), 1)
    assert_close(actual[0, 37:], model(whole[:1, 37:])[0].detach(), atol=1e-10, rtol=0)
    assert_close(actual[1], model(whole[1:])[0].detach(), atol=1e-10, rtol=0)


def test_a_mask_in_decoding_means_the_same_as_none(model):
    ids, mask = left_padded()
    next_ids = tokens(2, 3, 9)
    _, one = in_pieces(model, ids, [130], mask)
    two = one.copy()
    longer = torch.cat((mask, torch.ones(2, 3, dtype=torch.long)), 1)
    assert torch.equal(model(next_ids, cache=one), model(next_ids, attention_mask=longer, cache=two))


def test_garbage_in_the_padding_changes_nothing(model):
    ids, mask = left_padded()
    other = ids.clone()
    other[0, :37] = tokens(1, 37, 5)
    real = mask.bool()
    assert torch.equal(model(ids, attention_mask=mask)[real], model(other, attention_mask=mask)[real])


def test_padding_on_the_right(model):
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.bool)
    mask[0, 20:] = False
    out = model(ids, attention_mask=mask)
    assert_close(out[0, :20], model(ids[:1, :20])[0], atol=1e-11, rtol=0)
    assert_close(k3.next_token_loss(out[:1], ids[:1], mask[:1]), k3.next_token_loss(model(ids[:1, :20]), ids[:1, :20]), atol=1e-11, rtol=0)


def test_neighbours_do_not_matter(model):
    ids = tokens(3, 25)
    assert_close(model(ids)[1], model(ids[1:2])[0], atol=1e-11, rtol=0)


def test_trace_changes_nothing_and_is_complete(model):
    ids = tokens(2, 12)
    logits, trace = model(ids, return_trace=True)
    assert torch.equal(logits, model(ids))
    for i in range(9):
        names = {n.split(".", 1)[1] for n in trace if n.startswith(f"L{i}.")}
        expected = {"attn_in", "attn_out", "mlp_in", "mlp_out", "prefix", "nblocks", "attn_read", "mlp_read"}
        expected |= {"g", "beta", "state"} if model.config.is_kda(i) else {"attn_weights"}
        expected |= {"topk_idx", "topk_w", "scores", "latent"} if model.config.is_moe(i) else set()
        assert names == expected
    assert {"pre_norm", "post_norm", "output_read"} <= trace.keys()
    for name, value in trace.items():
        if name.endswith(("_read", "attn_weights")):
            assert_close(value.sum(-1), torch.ones_like(value[..., 0]))


def test_bfloat16_model_keeps_float32_where_the_release_does():
    model = toy(dtype=torch.bfloat16)
    kept = {n.rsplit(".", 2)[-2] + "." + n.rsplit(".", 1)[-1] for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"self_attn.A_log", "self_attn.dt_bias", "o_norm.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "gate.e_score_correction_bias"}
    cache = model.new_cache(1)
    logits = model(tokens(1, 8), cache=cache)
    assert logits.dtype == torch.bfloat16 and cache.states[0].S.dtype == torch.float32 and cache.states[3].rows.dtype == torch.bfloat16


def test_bfloat16_is_near_float64():
    wide = toy()
    narrow = copy.deepcopy(wide).bfloat16()
    a, b = wide(tokens(1, 8)), narrow(tokens(1, 8)).double()
    assert torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1] > 0.9


def test_cache_grows_by_mla_only(model):
    cache = model.new_cache(1)
    model(tokens(1, 10), cache=cache)
    before = cache.nbytes()
    model(tokens(1, 7), cache=cache)
    mla = len(model.config.mla_layers)
    assert cache.nbytes() - before == 7 * mla * (32 + 8) * 8                   # the latent and the shared key, float64
    assert cache.states[3].rows.shape == (1, 17, 40)


def test_released_size_on_paper():
    c = k3.K3Config.k3()
    model = k3.K3Model(c, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 2_779_484_476_000
    assert sum(isinstance(layer.self_attn, k3.KDA) for layer in model.layers) == 69
    assert [i for i, layer in enumerate(model.layers) if isinstance(layer.self_attn, k3.MLA)] == [*range(3, 92, 4), 92]
    assert [i for i, layer in enumerate(model.layers) if layer.starts_block] == [0, 12, 24, 36, 48, 60, 72, 84]
    logits, trace = model(torch.zeros(1, 3, dtype=torch.long, device="meta"), return_trace=True)
    assert logits.shape == (1, 3, 163840) and trace["output_read"].shape == (1, 3, 9)


@pytest.mark.parametrize("ids, message", [
    (torch.zeros(3, dtype=torch.long), r"ids is torch.int64 of shape \[3\]"), (torch.zeros(1, 3), "ids is torch.float32"), ([[1, 2]], "ids is list"),
    (torch.zeros(1, 0, dtype=torch.long), "at least one token"), (torch.tensor([[256]]), "token ids must be from 0 to 255"), (torch.tensor([[-1]]), "ids holds -1")])
def test_wrong_ids(model, ids, message):
    with pytest.raises(k3.InputError, match=message):
        model(ids)


@pytest.mark.parametrize("mask, message", [
    (torch.ones(1, 4), "attention_mask is torch.float32"), (torch.ones(1, 3, dtype=torch.long), r"it must be bool or integer, \[1, 4\]"),
    (torch.tensor([[1, 0, 1, 1]]), "padding after real tokens in row 0; padding must stand on one side"), ("left", "attention_mask is str")])
def test_wrong_masks(model, mask, message):
    with pytest.raises(k3.InputError, match=message):
        model(tokens(1, 4), attention_mask=mask)


def test_wrong_use_of_a_cache(model):
    cache = model.new_cache(2)
    with pytest.raises(k3.InputError, match="the cache holds 2 rows; ids has 1"):
        model(tokens(1, 4), cache=cache)
    with pytest.raises(k3.InputError, match="on the left when there is a cache"):
        model(tokens(2, 3), attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]), cache=cache)
    assert len(cache) == 0
    model(tokens(2, 3), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), cache=cache)
    with pytest.raises(k3.InputError, match="covers the 3 cached tokens too"):
        model(tokens(2, 1), attention_mask=torch.ones(2, 1, dtype=torch.long), cache=cache)
    with pytest.raises(k3.InputError, match="says otherwise about the cached tokens"):
        model(tokens(2, 1), attention_mask=torch.ones(2, 4, dtype=torch.long), cache=cache)
    for size in (0, -1, 1.5):
        with pytest.raises(k3.InputError, match="batch_size is"):
            model.new_cache(size)


def test_wrong_dtype_and_init():
    with pytest.raises(k3.InputError, match="dtype is torch.int32; it must be one of"):
        k3.K3Model(k3.K3Config.toy(), dtype=torch.int32)
    with pytest.raises(k3.InputError, match="init is 'random'"):
        k3.K3Model(k3.K3Config.toy(), init="random")
    with pytest.raises(k3.InputError, match="at least two tokens"):
        k3.next_token_loss(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.long))


def test_a_failed_call_leaves_the_cache_as_it_was(model):
    """An interruption in the middle of the layers: the same call again gives what it would have given."""
    ids, mask = left_padded(pads=5, T=30)
    cache = model.new_cache(2)
    model(ids[:, :20], attention_mask=mask[:, :20], cache=cache)
    def interrupt(*_):
        raise KeyboardInterrupt
    for layer in (1, 3, 8):
        hook = model.layers[layer].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 20:], attention_mask=mask, cache=cache)
        hook.remove()
        assert len(cache) == 20
    out = model(ids[:, 20:], attention_mask=mask, cache=cache)
    assert_close(out, model(ids, attention_mask=mask)[:, 20:].detach(), atol=1e-10, rtol=0)


def test_caches_of_other_models_are_refused(model):
    other = toy(kda_layers=(1,), full_attn_layers=tuple(range(2, 10))).new_cache(1)
    for cache, message in ((other, "another pattern"), (3, "cache is int"), ([], "cache is list")):
        with pytest.raises(k3.InputError, match=message):
            model(tokens(1, 3), cache=cache)


def test_loss_does_not_see_the_padding(model):
    """Neither as a target nor as what the first real token is predicted from."""
    ids, mask = left_padded(pads=6, T=20)
    losses = []
    for pad in (0, 7, 200):
        ids[0, :6] = pad
        losses.append(k3.next_token_loss(model(ids[:1], attention_mask=mask[:1]), ids[:1], mask[:1]).item())
    alone = k3.next_token_loss(model(ids[:1, 6:]), ids[:1, 6:]).item()
    assert max(abs(l - alone) for l in losses) < 1e-11
    with pytest.raises(k3.InputError, match="no two real tokens"):
        k3.next_token_loss(torch.zeros(1, 4, 256), tokens(1, 4), torch.tensor([[0, 0, 0, 1]]))
    with pytest.raises(k3.InputError, match="must be int64 \\[B, T"):
        k3.next_token_loss(torch.zeros(1, 5, 256), tokens(1, 4))


def test_padding_token_has_no_gradient_in_the_embedding():
    model = toy(pad_token_id=5)
    ids = torch.tensor([[1, 5, 2, 5, 9]])
    k3.next_token_loss(model(ids), ids).backward()
    assert not model.embed_tokens.weight.grad[5].any() and model.embed_tokens.weight.grad[2].any()


def test_nan_in_the_embedding_of_padding_reaches_nothing(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.embed_tokens.weight[0] = torch.nan
    ids, mask = left_padded(pads=6, T=20)
    ids = ids.clamp_min(1)
    ids[0, :6] = 0
    logits = broken(ids, attention_mask=mask)
    k3.next_token_loss(logits, ids, mask).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in broken.parameters())


def test_prefill_in_inference_mode_and_decode_outside(model):
    ids, cache = tokens(1, 12), model.new_cache(1)
    with torch.inference_mode():
        model(ids[:, :10], cache=cache)
    assert_close(model(ids[:, 10:], cache=cache), model(ids)[:, 10:].detach(), atol=1e-10, rtol=0)


def test_released_code_cases_still_train():
    """The released block refuses to train; ours gives its experts gradients."""
    model = k3.load_checkpoint(GOLDEN / "k3_tiny", dtype=torch.float64).train()
    ids = tokens(1, 9, vocab=67)
    k3.next_token_loss(model(ids), ids).backward()
    assert model.layers[1].block_sparse_moe.experts.w1.grad.abs().sum() > 0
