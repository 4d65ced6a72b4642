"""The configuration: the released file in and out, and one clear error for each way to be wrong."""

import json

import pytest

import k3_teach as k3
from tests.helpers import GOLDEN


def test_released_configuration():
    c = k3.K3Config.k3()
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.intermediate_size) == (163840, 7168, 93, 33792)
    assert (c.num_experts, c.num_experts_per_token, c.num_shared_experts, c.moe_intermediate_size) == (896, 16, 2, 3072)
    assert (c.routed_expert_hidden_size, c.q_lora_rank, c.kv_lora_rank, c.qk_head_dim, c.v_head_dim) == (3584, 1536, 512, 192, 128)
    assert (c.rms_norm_eps, c.attn_res_block_size, c.linear_attn_config.gate_lower_bound) == (1e-5, 12, -5.0)
    assert (c.activation_situ_beta, c.activation_situ_linear_beta, c.hidden_act) == (4.0, 25.0, "situ")


def test_layer_lists_count_from_one():
    """Pitfall 37: 69 KDA and 24 MLA layers, the last two in a row; layer 0 is both KDA and dense."""
    c = k3.K3Config.k3()
    assert c.mla_layers == [*range(3, 92, 4), 92] and len(c.mla_layers) == 24
    assert sum(c.is_kda(i) for i in range(93)) == 69
    assert [i for i in range(93) if not c.is_moe(i)] == [0] and c.is_kda(0)


def test_moe_layer_frequency():
    c = k3.K3Config.toy(moe_layer_freq=2, first_k_dense_replace=3)
    assert [i for i in range(9) if c.is_moe(i)] == [4, 6, 8]


def test_toy_keeps_the_topology():
    c = k3.K3Config.toy()
    assert c.mla_layers == [3, 7, 8] and not c.is_moe(0) and c.is_moe(1)
    assert c.num_hidden_layers % c.attn_res_block_size != 0 and c.num_experts > c.num_experts_per_token
    assert c.routed_expert_hidden_size * 2 == c.hidden_size


@pytest.mark.parametrize("name", ["k3_tiny", "k3_odd", "k3_official_format", "kimi_linear_tiny"])
def test_json_round_trip_keeps_every_field(name, tmp_path):
    original = json.loads((GOLDEN / name / "config.json").read_text())
    c = k3.K3Config.from_json(GOLDEN / name)
    c.to_json(tmp_path / "config.json")
    assert k3.K3Config.from_json(tmp_path) == c
    written = json.loads((tmp_path / "config.json").read_text())
    for outer in ([original, written], [original.get("text_config", {}), written.get("text_config", {})]):
        for key, value in outer[0].items():
            if key != "text_config":
                assert outer[1][key] == value, key


def test_unknown_fields_survive(tmp_path):
    c = k3.K3Config.k3()
    data = c.to_dict() | {"brand_new": {"x": [1]}}
    data["linear_attn_config"]["also_new"] = 7
    again = k3.K3Config.from_dict({"model_type": "kimi_k3", "vision_config": {"depth": 27}, "text_config": data}).to_dict()
    assert again["vision_config"] == {"depth": 27} and again["text_config"]["brand_new"] == {"x": [1]}
    assert again["text_config"]["linear_attn_config"]["also_new"] == 7
    assert again["text_config"]["torchscript"] is False and again["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_lower_bound_survives_a_save():
    """Pitfall 5."""
    c = k3.K3Config.from_dict(k3.K3Config.toy().to_dict())
    assert c.linear_attn_config.gate_lower_bound == -5.0 and c == k3.K3Config.toy()


def test_null_counts_are_zero():
    data = k3.K3Config.toy().to_dict() | dict(num_experts=None, num_shared_experts=None, moe_intermediate_size=None, num_experts_per_token=None)
    c = k3.K3Config.from_dict(data)
    assert c.num_experts == 0 and not any(c.is_moe(i) for i in range(9))


def test_only_the_kda_layers_need_to_be_named():
    """What the released class reads: a layer that is not KDA is MLA; without KDA nothing of it is needed."""
    data = k3.K3Config.toy().to_dict()
    del data["linear_attn_config"]["full_attn_layers"]
    assert k3.K3Config.from_dict(data) == k3.K3Config.toy()
    for linear in (None, {}, {"kda_layers": []}):
        assert k3.K3Config.from_dict(data | dict(linear_attn_config=linear)).mla_layers == list(range(9))
    del data["linear_attn_config"]
    assert k3.K3Config.from_dict(data).mla_layers == list(range(9))


def test_null_means_the_default():
    data = k3.K3Config.toy().to_dict() | dict(rope_theta=None, num_expert_group=None, latent_moe_use_norm=None, initializer_range=None)
    c = k3.K3Config.from_dict(data)
    assert (c.rope_theta, c.num_expert_group, c.latent_moe_use_norm, c.initializer_range) == (10000.0, 1, False, 0.02)


def test_absurd_sizes_and_files_are_refused_at_once(tmp_path):
    for changes in (dict(num_hidden_layers=10 ** 18), dict(vocab_size=10 ** 30), dict(num_hidden_layers=10 ** 7)):
        with pytest.raises(k3.ConfigError) as e:
            k3.K3Config.from_dict(k3.K3Config.toy().to_dict() | changes)
        assert len(str(e.value)) < 500
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(k3.ConfigError, match="not a readable JSON file"):
        k3.K3Config.from_json(tmp_path)


def test_frozen():
    with pytest.raises(AttributeError):
        k3.K3Config.toy().hidden_size = 3


WRONG = [
    (dict(hidden_size=0), "hidden_size is 0"), (dict(hidden_size="64"), "hidden_size is '64'"), (dict(vocab_size=-3), "vocab_size is -3"),
    (dict(num_hidden_layers=2.5), "num_hidden_layers is 2.5"), (dict(intermediate_size=True), "intermediate_size is True"),
    (dict(kda_layers=(1, 2, 3, 4, 5, 6, 7)), r"\[4\].*two lists without a common layer"),
    (dict(kda_layers=(1, 2, 3, 5, 6)), r"\[7\].*cover every layer"), (dict(full_attn_layers=(4, 8, 9, 10)), r"full_attn_layers is \[10\].*from 1 to num_hidden_layers \(9\)"),
    (dict(kda_layers=(0, 1, 2, 3, 5, 6, 7)), r"kda_layers is \[0\]"), (dict(kda_layers=(1, 1, 2, 3, 5, 6, 7)), "free of repetitions"),
    (dict(num_experts_per_token=17), r"num_experts_per_token is 17; it must be between 1 and num_experts \(16\)"),
    (dict(num_experts_per_token=0), "num_experts_per_token is 0"), (dict(gate_lower_bound=0.0), "gate_lower_bound is 0.0; it must be a negative"),
    (dict(gate_lower_bound=5.0), "gate_lower_bound is 5.0"), (dict(hidden_act="relu"), "hidden_act is 'relu'; it must be one of situ, silu"),
    (dict(moe_router_activation_func="tanh"), "moe_router_activation_func is 'tanh'; it must be one of sigmoid, softmax"),
    (dict(quantization_config={"format": "mxfp4"}, moe_intermediate_size=40), "moe_intermediate_size is 40; it must be a multiple of 32"),
    (dict(quantization_config={"format": "mxfp4"}, routed_expert_hidden_size=48), "routed_expert_hidden_size is 48"),
    (dict(num_expert_group=3), r"num_expert_group is 3; it must be a divisor of num_experts \(16\)"),
    (dict(num_expert_group=8, topk_group=1), "topk_group is 1; it must be large enough"), (dict(num_expert_group=16, topk_group=4), "at least two experts"),
    (dict(num_key_value_heads=2), "num_key_value_heads is 2"), (dict(pad_token_id=256), r"pad_token_id is 256; .*vocab_size \(256\)"),
    (dict(mla_use_nope=False, qk_rope_head_dim=7), "qk_rope_head_dim is 7; it must be even"), (dict(rms_norm_eps=0), "rms_norm_eps is 0"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps is nan"), (dict(attn_res_block_size=0), "attn_res_block_size is 0"),
    (dict(activation_situ_beta=-4), "activation_situ_beta is -4"), (dict(latent_moe_use_norm=None), "latent_moe_use_norm is None; it must be true or false"),
    (dict(num_nextn_predict_layers=1), "num_nextn_predict_layers is 1"), (dict(routed_scaling_factor=0), "routed_scaling_factor is 0"),
    (dict(short_conv_kernel_size=0), "short_conv_kernel_size is 0"), (dict(nonsense=1), "no field nonsense"),
]


@pytest.mark.parametrize("changes, message", WRONG, ids=[str(w[0]) for w in WRONG])
def test_errors_name_field_value_and_what_is_allowed(changes, message):
    with pytest.raises(k3.ConfigError, match=message):
        k3.K3Config.toy(**changes)


@pytest.mark.parametrize("text, message", [("{", "not a readable JSON file"), ("[]", "JSON object"), ("{}", "lacks hidden_size"), ('{"text_config": 3}', "JSON object")])
def test_bad_files(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(k3.ConfigError, match=message):
        k3.K3Config.from_json(tmp_path)


@pytest.mark.parametrize("linear, message", [
    (3, "linear_attn_config is 3; it must be an object or null"), ({"kda_layers": [1]}, "lacks head_dim, num_heads"),
    ({"kda_layers": 3, "full_attn_layers": [], "num_heads": 1, "head_dim": 1}, "kda_layers is 3; it must be a list"),
    ({"kda_layers": [1, 2], "full_attn_layers": [4], "num_heads": 1, "head_dim": 1}, "cover every layer")])
def test_bad_layer_lists(linear, message):
    with pytest.raises(k3.ConfigError, match=message):
        k3.K3Config.from_dict(k3.K3Config.toy().to_dict() | dict(linear_attn_config=linear))


def test_missing_file(tmp_path):
    with pytest.raises(k3.ConfigError, match="no such file"):
        k3.K3Config.from_json(tmp_path)
