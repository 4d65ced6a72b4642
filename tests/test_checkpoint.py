"""Reading and writing the released format: bit-equal round trips, and one error that lists everything wrong."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import k3_teach as k3
from tests.helpers import GOLDEN, tokens, toy


def same(a: k3.K3Model, b: k3.K3Model):
    x, y = a.state_dict(), b.state_dict()
    assert x.keys() == y.keys()
    for n in x:
        assert x[n].dtype == y[n].dtype and torch.equal(x[n], y[n]), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, dict(released_layout=True), dict(max_shard_bytes=100_000)], ids=str)
def test_round_trip_is_bit_equal(tmp_path, dtype, options):
    model = toy(dtype=dtype)
    k3.save_checkpoint(model, tmp_path, **options)
    again = k3.load_checkpoint(tmp_path)
    same(model, again)
    ids = tokens(1, 6)
    assert torch.equal(model(ids), again(ids))
    assert again.config.linear_attn_config == model.config.linear_attn_config
    assert again.layers[1].block_sparse_moe.gate.e_score_correction_bias.requires_grad is False


@pytest.mark.parametrize("changes", [dict(tie_word_embeddings=True), dict(attn_res_block_size=None), dict(num_shared_experts=0), dict(num_experts=0)], ids=str)
def test_round_trip_of_variants(tmp_path, changes):
    model = toy(**changes)
    k3.save_checkpoint(model, tmp_path)
    same(model, k3.load_checkpoint(tmp_path))


def test_released_layout_on_disk(tmp_path):
    """Names, padding of A_log, nesting of the configuration: as the release has them."""
    model = toy(dtype=torch.bfloat16)
    k3.save_checkpoint(model, tmp_path, released_layout=True, mxfp4_experts=True)
    golden = load_file(GOLDEN / "k3_official_format" / "model.safetensors")
    names = load_file(tmp_path / "model.safetensors")
    a_log = names["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (16,) and a_log.dtype == torch.float32 and not a_log[4:].any()
    strip = lambda ns: {n.split(".", 4)[-1] if ".layers." in n else n for n in ns}
    assert strip(n for n in names if ".layers.1." in n and ".experts." not in n) == strip(n for n in golden if ".layers.1." in n and ".experts." not in n)
    assert names["language_model.model.layers.1.block_sparse_moe.experts.15.w2.weight_packed"].shape == (32, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "kimi_k3" and config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_mxfp4_experts_are_decoded_and_written_back_unchanged(tmp_path):
    model = k3.load_checkpoint(GOLDEN / "k3_official_format", dtype=torch.float32)
    k3.save_checkpoint(model, tmp_path, released_layout=True, mxfp4_experts=True)
    same(model, k3.load_checkpoint(tmp_path))
    again = load_file(tmp_path / "model.safetensors")
    original = load_file(GOLDEN / "k3_official_format" / "model.safetensors")
    assert again.keys() == original.keys()
    plain = [n for n in original if "_packed" not in n and "_scale" not in n]
    assert all(torch.equal(again[n], original[n]) for n in plain)


def test_a_plain_save_does_not_claim_to_be_quantised(tmp_path):
    model = toy(quantization_config={"format": "mxfp4-pack-quantized"})
    k3.save_checkpoint(model, tmp_path)
    assert k3.K3Config.from_json(tmp_path).quantization_config is None
    same(model, k3.load_checkpoint(tmp_path))


def test_shards_with_index_and_without(tmp_path):
    model = toy()
    k3.save_checkpoint(model, tmp_path, max_shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 5 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.numel() * p.element_size() for p in model.parameters())
    (tmp_path / "model.safetensors.index.json").unlink()
    same(model, k3.load_checkpoint(tmp_path))


def test_saving_again_leaves_no_old_shards(tmp_path):
    model = toy()
    k3.save_checkpoint(model, tmp_path, max_shard_bytes=200_000)
    k3.save_checkpoint(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    same(model, k3.load_checkpoint(tmp_path))


def test_float32_tensors_stay_float32_in_a_bfloat16_model(tmp_path):
    """Pitfalls 28 and 31."""
    model = k3.load_checkpoint(GOLDEN / "k3_tiny", dtype=torch.bfloat16)
    stored = load_file(GOLDEN / "k3_tiny" / "model.safetensors")
    for name, (p, _) in k3.checkpoint.released_names(model).items():
        if name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")):
            assert p.dtype == torch.float32 and torch.equal(p.detach().flatten(), stored[name].flatten()), name
        else:
            assert p.dtype == torch.bfloat16, name


# --- what is wrong with a folder ---------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    k3.save_checkpoint(toy(dtype=torch.float32), tmp_path)
    return tmp_path


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, *messages):
    with pytest.raises(k3.CheckpointError) as e:
        k3.load_checkpoint(folder)
    for m in messages:
        assert m in str(e.value), str(e.value)
    return str(e.value)


def test_missing_extra_and_misshapen_in_one_error(folder):
    """Pitfall 26: every tensor of the file is consumed, and every parameter is filled."""
    def change(t):
        del t["model.layers.1.block_sparse_moe.routed_expert_norm.weight"]
        del t["model.layers.2.block_sparse_moe.experts.7.w3.weight"]
        t["model.layers.1.mystery.weight"] = torch.zeros(3)
        t["model.norm.weight"] = torch.zeros(65)
        t["model.layers.3.block_sparse_moe.experts.0.w1.weight"] = torch.zeros(4, 4)
    edit(folder, change)
    refused(folder, "5 tensors do not fit", "missing: model.layers.1.block_sparse_moe.routed_expert_norm.weight",
            "missing: model.layers.2.block_sparse_moe.experts.7.w3.weight", "extra: model.layers.1.mystery.weight",
            "misshapen: model.norm.weight is [65], the configuration wants [64]",
            "misshapen: model.layers.3.block_sparse_moe.experts.0.w1.weight is [4, 4], the configuration wants [32, 32]")


def test_padded_a_log(folder):
    """Pitfall 1: zeros after the heads are cut; anything else there is an error."""
    before = k3.load_checkpoint(folder)
    name = "model.layers.0.self_attn.A_log"
    edit(folder, lambda t: t.update({name: torch.nn.functional.pad(t[name], (0, 12))}))
    same(before, k3.load_checkpoint(folder))
    edit(folder, lambda t: t.update({name: t[name][:4].view(1, 1, 4, 1).clone()}))
    same(before, k3.load_checkpoint(folder))
    edit(folder, lambda t: t.update({name: torch.nn.functional.pad(t[name].flatten(), (0, 12))}))
    edit(folder, lambda t: t[name].__setitem__(9, 0.5))
    refused(folder, f"{name} has 16 entries for 4 heads, and those after 4 are not zero")


def test_vision_tower_is_skipped_and_shared_experts_of_width_zero(tmp_path):
    model = toy(num_shared_experts=0, dtype=torch.float32)
    k3.save_checkpoint(model, tmp_path)
    edit(tmp_path, lambda t: t.update({"vision_tower.blocks.0.weight": torch.zeros(2), "mm_projector.weight": torch.zeros(2),
                                       "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight": torch.zeros(0, 64)}))
    same(model, k3.load_checkpoint(tmp_path))


def test_half_an_mxfp4_pair(tmp_path):
    model = k3.load_checkpoint(GOLDEN / "k3_official_format")
    k3.save_checkpoint(model, tmp_path, mxfp4_experts=True)
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    edit(tmp_path, lambda t: t.pop(f"{name}_scale"))
    refused(tmp_path, f"{name}_scale")
    edit(tmp_path, lambda t: (t.pop(f"{name}_packed"), t.update({f"{name}_scale": torch.zeros(32, 1, dtype=torch.uint8)})))
    refused(tmp_path, f"missing: {name}", f"extra: {name}_scale")


def test_stored_twice(folder):
    edit(folder, lambda t: t.update({"language_model.model.norm.weight": t["model.norm.weight"].clone()}))
    refused(folder, "stored twice")


def test_broken_files(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:1000])
    refused(folder, "not a readable safetensors file")
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no")


@pytest.mark.parametrize("index, message", [
    ("{", "not a readable JSON file"), ("{}", "must be JSON with a weight_map"), ('{"weight_map": 3}', "must be JSON with a weight_map"),
    ('{"weight_map": {"a": "../x.safetensors"}}', "same folder"), ('{"weight_map": {"a": "/etc/passwd"}}', "same folder"), ('{"weight_map": {"a": 3}}', "must be|same folder"),
    ('{"weight_map": {"a": "gone.safetensors"}}', "not there: gone.safetensors")])
def test_bad_index(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(k3.CheckpointError, match=message):
        k3.load_checkpoint(folder)


def test_no_folder(tmp_path):
    with pytest.raises(k3.ConfigError, match="no such file"):
        k3.load_checkpoint(tmp_path / "nowhere")


def test_an_interrupted_save_keeps_the_old_checkpoint(folder, monkeypatch):
    before = k3.load_checkpoint(folder)
    def fail(*args, **kwargs):
        raise OSError("disk full")
    monkeypatch.setattr(k3.saving, "save_file", fail)
    with pytest.raises(OSError):
        k3.save_checkpoint(toy(seed=1), folder)
    same(before, k3.load_checkpoint(folder))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_save_that_mxfp4_cannot_hold_leaves_nothing_behind(folder):
    before = k3.load_checkpoint(folder)
    with pytest.raises(k3.ConfigError, match="moe_intermediate_size is 40; it must be a multiple of 32"):
        k3.save_checkpoint(toy(moe_intermediate_size=40), folder, mxfp4_experts=True)
    same(before, k3.load_checkpoint(folder))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_golden_files_are_what_the_names_say():
    """Our names for the golden folders are exactly the names in them."""
    for folder in ("k3_tiny", "k3_odd", "kimi_linear_tiny"):
        model = k3.load_checkpoint(GOLDEN / folder)
        with safe_open(GOLDEN / folder / "model.safetensors", framework="pt") as f:
            assert set(f.keys()) == set(k3.checkpoint.released_names(model))


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupted_swap_is_finished(tmp_path, monkeypatch, at):
    """No mixture of two checkpoints: once files begin to move, they all do, and the interruption is passed on."""
    old, new = toy(seed=0), toy(seed=1)
    k3.save_checkpoint(old, tmp_path, max_shard_bytes=300_000)
    calls, replace = [], k3.saving.os.replace
    def interrupted(a, b):
        calls.append(b)
        if len(calls) == at:
            raise KeyboardInterrupt
        replace(a, b)
    monkeypatch.setattr(k3.saving.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        k3.save_checkpoint(new, tmp_path, max_shard_bytes=300_000)
    same(new, k3.load_checkpoint(tmp_path))
    assert not list(tmp_path.glob(".saving-*"))


@pytest.mark.parametrize("dtype, name", [(torch.int64, "I64"), (torch.bool, "BOOL"), (torch.uint8, "U8"), (torch.complex64, "C64")])
def test_weights_are_floating_point(folder, dtype, name):
    edit(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))
    refused(folder, f"misshapen: model.norm.weight is {name}, the configuration wants one of F64, F32, BF16, F16 or MXFP4")


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32"])
def test_dtypes_that_a_model_cannot_have(folder, dtype):
    with pytest.raises(k3.InputError, match="it must be one of torch.float64, torch.float32, torch.bfloat16, torch.float16"):
        k3.load_checkpoint(folder, dtype=dtype)
