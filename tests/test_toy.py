"""The trained model that ships: its size, its format, and that it has learned what its log says."""

import json
import math

import pytest
import torch

import k3_teach as k3
from k3_teach import toy

# Written for this test; not in the text that the model has learned from.
PASSAGE = """The function returns a list of the names that the object defines. If the argument is not given,
the default value is used instead. A class may raise an exception when the value is not valid, and the
method is called with the same arguments as before."""


@pytest.fixture(scope="module", params=[toy.FOLDER, toy.DRAFT], ids=["toy", "draft"])
def shipped(request):
    return request.param, *toy.load(request.param)


def test_both_are_small():
    size = sum(f.stat().st_size for f in toy.FOLDER.rglob("*.safetensors"))
    assert size < 8e6


def test_the_format_is_the_released_one(shipped):
    folder, model, _ = shipped
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert text["model_type"] == "kimi_linear"
    from safetensors import safe_open
    with safe_open(folder / "model.safetensors", "pt") as f:
        names = set(f.keys())
        assert f.get_tensor("language_model.model.embed_tokens.weight").dtype == torch.bfloat16
        assert f.get_tensor("language_model.model.layers.1.self_attn.A_log").dtype == torch.float32
    assert all(name.startswith("language_model.") for name in names)
    assert not model.training and model.embed_tokens.weight.dtype == torch.float32


def test_toy_has_k3s_arrangement():
    c = toy.load()[0].config
    assert [c.is_kda(i) for i in range(9)] == [True] * 3 + [False] + [True] * 3 + [False] * 2
    assert not c.is_moe(0) and c.is_moe(1) and c.mla_use_nope and c.hidden_act == "situ"
    assert c.attn_res_block_size == 4 and c.linear_attn_config.gate_lower_bound == -5


def test_they_share_a_tokenizer():
    a, b = toy.load()[1], toy.load(toy.DRAFT)[1]
    assert a.vocab_size == b.vocab_size == toy.load()[0].config.vocab_size
    assert a.encode(PASSAGE) == b.encode(PASSAGE)


def test_it_has_learned_english(shipped):
    """Nats a byte on a passage of its kind: far below ln 256 / 1, and the large one below the small one."""
    _, model, tokenizer = shipped
    ids = torch.tensor([tokenizer.encode(PASSAGE)])
    with torch.no_grad():
        nats = float(k3.next_token_loss(model(ids), ids)) * (ids.shape[1] - 1) / len(PASSAGE.encode())
    assert 0.3 < nats < 1.5
    scrambled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        worse = float(k3.next_token_loss(model(scrambled), scrambled)) * (ids.shape[1] - 1) / len(PASSAGE.encode())
    assert worse > nats + 0.5


def test_the_log_is_whole(shipped):
    folder, _, _ = shipped
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0]["loss"] == pytest.approx(math.log(2048), abs=0.2)
    asked = [row for row in rows if "validation_loss" in row]
    assert asked[-1]["step"] == len(rows) and asked[-1]["nats_per_byte"] < 1.4
    ratio = {round(row["validation_loss"] / row["nats_per_byte"], 3) for row in asked}
    assert len(ratio) == 1


def test_another_configuration_is_one_clear_error(tmp_path):
    model, _ = toy.load(toy.DRAFT)
    k3.save_checkpoint(model, tmp_path)
    config = k3.K3Config.from_json(tmp_path).replace(hidden_size=64)
    config.to_json(tmp_path / "config.json")
    with pytest.raises(k3.CheckpointError, match="tensors do not fit the configuration\n  misshapen: model.embed_tokens"):
        k3.load_checkpoint(tmp_path)
