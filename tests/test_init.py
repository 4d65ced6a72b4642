"""Every parameter begins as the table of init.py says, in both variants."""

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3


def model(variant, **changes):
    torch.manual_seed(0)
    return k3.K3Model(k3.K3Config.toy(pad_token_id=255, **changes), init=variant)


@pytest.mark.parametrize("variant", ["report", "released"])
def test_table(variant):
    seen = set()
    for name, p in model(variant).named_parameters():
        kind = next(k for k in ("_res_proj", "A_log", "dt_bias", "conv1d", "norm", "e_score", "gate.weight", "") if k in name)
        seen.add(kind)
        if kind == "_res_proj" and variant == "report" or kind == "e_score" or kind == "A_log" and variant == "report":
            assert not p.any(), name
        elif kind == "A_log":
            assert ((p >= 0) & (p <= torch.tensor(16.0).log() + 1e-6)).all() and p.unique().numel() == p.numel(), name
        elif kind == "dt_bias":
            t = torch.nn.functional.softplus(p)
            assert ((t > 0.99e-3) & (t < 0.101)).all() and t.std() > 0.01, name
        elif kind == "conv1d":
            assert p.abs().max() <= 0.5 and p.std() > 0.2, name
        elif kind == "norm":
            assert (p == 1).all(), name
        elif kind == "gate.weight":
            assert p.abs().max() <= 1 / 8 and p.std() > 0.05, name
        else:
            assert 0.012 < p.std() < 0.028, name
    assert len(seen) == 8


def test_padding_row():
    assert not model("released").embed_tokens.weight[255].any()
    assert model("report").embed_tokens.weight[255].any()


def test_range_and_seed():
    wide = model("report", initializer_range=0.2)
    assert 0.19 < wide.lm_head.weight.std() < 0.21 and 0.19 < wide.layers[1].block_sparse_moe.experts.w1.std() < 0.21
    assert_close(dict(model("report").state_dict()), dict(model("report").state_dict()), atol=0, rtol=0)


def test_first_loss_is_that_of_guessing():
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    for variant in ("report", "released"):
        assert abs(k3.next_token_loss(model(variant)(ids), ids).item() - 5.545) < 0.15
