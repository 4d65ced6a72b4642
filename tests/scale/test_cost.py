"""Counts by formula against counts of tensors, and against the released totals."""

import pytest
import torch

import k3_teach as k3
from k3_teach.scale import cost
from k3_teach.train.optimiser import make_optimisers, parameter_groups
from tests.helpers import GOLDEN
from tests.test_model import VARIANTS


def test_released_totals():
    c = k3.K3Config.k3()
    assert cost.total_parameters(c) == 2_779_484_476_000
    assert cost.active_parameters(c) == 104_189_612_640
    assert cost.checkpoint_bytes(c) == {"mxfp4": 1_361_370_415_104, "scales": 85_085_650_944, "bfloat16": 114_359_769_088,
                                        "float32": 44_489_728, "total": 1_560_860_324_864}
    each = {row.name: row.each for row in cost.components(c)}
    assert each["KDA mixers"] == 443_740_384 and each["MLA mixers"] == 232_196_096 and each["dense feed-forward"] == 726_663_168
    assert sum(v for n, v in each.items() if n.startswith("MoE")) == 29_784_936_832


@pytest.mark.parametrize("name", VARIANTS)
def test_formula_equals_the_tensors(name):
    c = k3.K3Config.toy(**VARIANTS[name])
    model = k3.K3Model(c, device="meta")
    assert cost.total_parameters(c) == sum(p.numel() for p in model.parameters())


def test_component_by_component_at_released_size():
    c = k3.K3Config.k3()
    model = k3.K3Model(c, device="meta")
    count = lambda *parts: sum(p.numel() for n, p in model.named_parameters() if any(x in n for x in parts))
    total = {row.name: row.total for row in cost.components(c)}
    assert total["KDA mixers"] + total["MLA mixers"] == count("self_attn.")
    assert total["MoE: routed experts"] == count(".experts.w")
    assert total["MoE: shared experts"] == count("shared_experts")
    assert total["AttnRes queries and key norms"] == count("self_attention_res", "mlp_res")


def test_bytes_equal_the_dtypes_of_a_bfloat16_model():
    """The second route: dtype by dtype over the tensors of the model on paper."""
    c = k3.K3Config.k3()
    model = k3.K3Model(c, device="meta", dtype=torch.bfloat16)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts.w" in n)
    narrow = sum(p.numel() for n, p in model.named_parameters() if p.dtype == torch.bfloat16) - experts
    wide = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    padding = 69 * 32
    total = experts // 2 + experts // 32 + 2 * (narrow + cost.VISION_TOWER + cost.PROJECTOR) + 4 * (wide + padding)
    assert total == cost.checkpoint_bytes(c)["total"]
    assert experts + narrow + wide + padding + cost.VISION_TOWER + cost.PROJECTOR == 2_779_931_837_184


def test_bytes_on_disk():
    """The golden folder in the released format, whose plain tensors are float32 instead of bfloat16."""
    c = k3.K3Config.from_json(GOLDEN / "k3_official_format")
    parts = cost.checkpoint_bytes(c, vision=False)
    header = int.from_bytes((GOLDEN / "k3_official_format" / "model.safetensors").read_bytes()[:8], "little")
    size = (GOLDEN / "k3_official_format" / "model.safetensors").stat().st_size - 8 - header
    assert size == parts["mxfp4"] + parts["scales"] + 2 * parts["bfloat16"] + parts["float32"]


def test_cache_bytes_equal_a_real_cache():
    c = k3.K3Config.toy()
    model = k3.K3Model(c)
    for T in (5, 50):
        cache = model.new_cache(1)
        model(torch.zeros(1, T, dtype=torch.long), cache=cache)
        assert cache.nbytes() == cost.cache_bytes(c, T, 4, 4)["total"]


def test_cache_at_released_size():
    """69 states of 96 heads x 128 x 128 in float32, and 24 x 576 numbers a token in bfloat16."""
    out = cost.cache_bytes(k3.K3Config.k3(), 10 ** 6)
    assert out["KDA states"] == 434_110_464 and out["MLA latents"] == 27_648_000_000 and out["KDA convolution inputs"] == 15_261_696


# --- training ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", VARIANTS)
def test_trained_by_equals_the_groups_of_the_optimisers(name):
    c = k3.K3Config.toy(**VARIANTS[name])
    sizes = [sum(p.numel() for group in groups for p in group["params"]) for groups in parameter_groups(k3.K3Model(c, device="meta"))]
    parts = cost.trained_by(c)
    assert [parts["Muon"], parts["AdamW"]] == sizes and sum(parts.values()) == cost.total_parameters(c)


def test_trained_by_at_released_size():
    c = k3.K3Config.k3()
    groups = parameter_groups(k3.K3Model(c, device="meta"))
    sizes = [sum(p.numel() for group in side for p in group["params"]) for side in groups]
    assert cost.trained_by(c) == {"Muon": sizes[0], "AdamW": sizes[1], "balancer": 92 * 896}


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_training_bytes_are_those_of_a_step(optimiser):
    """In float32 without a second copy: the tensors that lie there after a step, the routers' biases without gradient."""
    c = k3.K3Config.toy(num_hidden_layers=4, kda_layers=(1, 2, 4), full_attn_layers=(3,))
    model = k3.K3Model(c)
    made = make_optimisers(model, optimiser)
    k3.next_token_loss(model(torch.arange(8)[None]), torch.arange(8)[None]).backward()
    for p in model.parameters():            # an expert that no token chose has one, too
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    for each in made.values():
        for group in each.param_groups:
            group["lr"] = 1e-3
        each.step()
    moments = [t for each in made.values() for state in each.state.values() for t in state.values()
               if isinstance(t, torch.Tensor) and t.ndim]
    size = lambda tensors: sum(t.nbytes for t in tensors)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    parts = cost.training_bytes(c, weight=4, gradient=4, master=0, optimiser=optimiser)
    assert parts == {"weights": size(model.parameters()), "gradients": size(grads), "master copy": 0, "moments": size(moments),
                     "total": size(model.parameters()) + size(grads) + size(moments)}


def test_the_largest_gathered_unit():
    """The stack of a layer's experts, until a rank owns so few that the embedding is larger."""
    c = k3.K3Config.k3()
    assert cost.gathered_bytes(c, 1, 8) == 2 * 29_595_009_024 // 8
    assert cost.gathered_bytes(c, 8, 64) == cost.gathered_bytes(c, 1, 896) == 2 * 163_840 * 7168
    for dp, ep in ((1, 5), (0, 8), (8, 0)):
        with pytest.raises(k3.InputError, match=f"dp is {dp}, ep is {ep}"):
            cost.gathered_bytes(c, dp, ep)
    with pytest.raises(k3.InputError, match="optimiser is 'sgd'"):
        cost.training_bytes(c, optimiser="sgd")
