"""Files that are broken, or made to do harm: a model comes of them, or an error of our own type, soon and in little memory."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import k3_teach as k3
from k3_teach.errors import K3Error
from k3_teach.train import store
from k3_teach.train.loop import Trainer
from k3_teach.train.recipe import Recipe
from k3_teach.train.text import BPE, Bytes, Data, load_tokenizer
from tests.helpers import toy

ROOT = Path(__file__).parents[2]
SMALL = dict(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,), vocab_size=16, hidden_size=16, num_heads=2, head_dim=4, num_attention_heads=2,
             kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, intermediate_size=16, num_experts=2,
             num_experts_per_token=1, num_shared_experts=1, moe_intermediate_size=32, routed_expert_hidden_size=32, attn_res_block_size=1)
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NORM = "language_model.model.norm.weight"
FUZZ = settings(derandomize=True, deadline=None, database=None, max_examples=150,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    k3.save_checkpoint(toy(dtype=torch.float32, **SMALL), folder, mxfp4_experts=True, released_layout=True)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def refused(folder, message, kind=k3.CheckpointError):
    with pytest.raises(kind, match=message) as caught:
        k3.load_checkpoint(folder)
    assert len(str(caught.value)) < 5000


def attempt(folder):
    """The model, or None where our own error came. Any other error fails the test."""
    try:
        return k3.load_checkpoint(folder)
    except K3Error:
        return None


# --- safetensors ------------------------------------------------------------------------------------------------

def parts(folder):
    data = (folder / WEIGHTS).read_bytes()
    size, = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + size]), data[8 + size:]


def write(folder, header, body):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + body)


@pytest.mark.parametrize("change", [
    dict(data_offsets=[-4, 60]), dict(data_offsets=[0, 64]), dict(data_offsets=[64, 0]), dict(data_offsets=[2 ** 62, 2 ** 62 + 64]), dict(data_offsets=None),
    dict(shape=[2 ** 40, 2 ** 40]), dict(shape=[2 ** 32, 2 ** 32, 16]), dict(shape=[2 ** 64]), dict(shape=[-16]), dict(shape="x"), dict(shape=[0, 2 ** 62]),
    dict(dtype="Q9"), dict(dtype=None), dict(dtype="F8_E4M3"), dict(dtype="F4"), dict(dtype="I32"), dict(dtype="U32")], ids=str)
def test_a_header_that_lies_about_a_tensor(folder, change):
    header, body = parts(folder)
    header[NORM].update(change)
    write(folder, header, body)
    refused(folder, "not a readable safetensors file|misshapen")


@pytest.mark.parametrize("header", [b"[]", b"null", b"", b'{"a":NaN}', b"\xff\xfe", b'{"a":' + b"[" * 100_000, b'{"__metadata__":{"a":3}}'], ids=lambda b: repr(b[:12]))
def test_a_header_that_is_none(folder, header):
    write(folder, header, parts(folder)[1])
    refused(folder, "not a readable safetensors file")


@pytest.mark.parametrize("size", [0, 7, 2 ** 27, 2 ** 40, 2 ** 63, 2 ** 64 - 1])
def test_a_length_beyond_the_file(folder, size):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + data[8:])
    refused(folder, "not a readable safetensors file")


def test_a_name_that_stands_twice(folder):
    """The reader of the library takes the last of them, in silence."""
    header, body = parts(folder)
    twice = json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    write(folder, twice.encode(), body)
    refused(folder, f"{NORM} is stored twice")


def test_what_is_no_ordinary_file_is_not_opened(folder):
    """A pipe would wait for ever; a link is followed, as in the cache of Hugging Face."""
    for name in (WEIGHTS, CONFIG):
        (folder / name).rename(folder / f"{name}.real")
        os.mkfifo(folder / name)
    refused(folder, "it must be an ordinary file", k3.ConfigError)
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(f"{CONFIG}.real")
    refused(folder, "holds no model.safetensors")
    os.mkfifo(folder / "model-1.safetensors")
    refused(folder, "holds no model.safetensors")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(f"{WEIGHTS}.real")
    assert attempt(folder)


@FUZZ
@given(st.data())
def test_bytes_of_a_checkpoint_changed_at_random(whole, tmp_path, data):
    folder = tmp_path / "fuzz"
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    file = folder / data.draw(st.sampled_from([WEIGHTS, WEIGHTS, CONFIG]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        near = data.draw(st.sampled_from([9, 8000, len(content)]))      # length, header, all
        at = data.draw(st.integers(0, max(0, min(near, len(content)) - 1)))
        edit = data.draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
        piece = data.draw(st.sampled_from([b"\0", b"\xff", b"9", b"-", b"[", b'"', b"}", b"e9", b"0" * 9]) | st.binary(min_size=1, max_size=3))
        end = at + len(piece) * (edit == "set") + 10 * (edit == "cut")
        content[at:end] = {"cut": b"", "repeat": content[at:at + 64]}.get(edit, piece)
    file.write_bytes(content)
    attempt(folder)


# --- JSON -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["../whole/model.safetensors", "/etc/passwd", "..", ".", "", "a\0b", "sub/model.safetensors", "./model.safetensors",
                                  "..\\model.safetensors", "C:\\model.safetensors", "x" * 5000, "\ud800", "config.json", None, 3, [], {}], ids=ascii)
def test_an_index_that_names_what_is_no_shard(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, "same folder|not there|cannot be a file|weight_map|not a readable safetensors")


def test_an_index_of_a_million_entries(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"a{i}": f"f{i % 1000}" for i in range(10 ** 6)}}))
    refused(folder, "names 1000 shards that are not there: f0, f1, ")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 10 ** 5, b'{"weight_map":' * 10 ** 4, b'{"a":' + b"9" * 5000 + b"}",
                                  b'{"weight_map":{},"weight_map":{}}'], ids=lambda b: repr(b[:12]))
@pytest.mark.parametrize("name", [CONFIG, INDEX])
def test_json_that_is_none(folder, name, text):
    (folder / name).write_bytes(text)
    refused(folder, "JSON|twice|configuration", k3.ConfigError if name == CONFIG else k3.CheckpointError)


VALUES = [None, True, -1, 0, 3, 2 ** 19, 2 ** 31, 2 ** 63, 10 ** 400, float("inf"), float("nan"), 0.5, 1e-300, "x", "", [], [1], [[]], {}, {"a": 1}]


def test_any_value_in_any_field_of_a_configuration(whole):
    """A configuration, which can then be written, and from which a model is made on paper; or our error."""
    fields = json.loads((whole / CONFIG).read_text())["text_config"]
    linear, made = fields["linear_attn_config"], 0
    tried = [(fields | {n: v}) for n in fields for v in VALUES] + [fields | {"linear_attn_config": linear | {n: v}} for n in linear for v in VALUES]
    for text in tried:
        try:
            config = k3.K3Config.from_dict(text)
        except k3.ConfigError as error:
            assert len(str(error)) < 500
            continue
        made += 1
        json.loads(config.to_json())
        if config.num_experts < 1000 and config.num_hidden_layers < 100:
            k3.K3Model(config, device="meta")
    assert made > 100


@pytest.mark.parametrize("field", ["num_experts", "num_shared_experts", "vocab_size", "hidden_size", "head_dim", "moe_intermediate_size"])
def test_a_configuration_of_a_giant_beside_small_files(folder, field):
    """Refused before room is made for it: one of 2^19 experts has a million names."""
    config = json.loads((folder / CONFIG).read_text())
    text = config["text_config"]
    (text["linear_attn_config"] if field == "head_dim" else text)[field] = 2 ** 19
    (folder / CONFIG).write_text(json.dumps(config))
    refused(folder, "do not fit|files hold only")


@pytest.mark.parametrize("folder", [None, 3, [], "\0", b"x", "x" * 5000], ids=ascii)
def test_a_folder_that_is_no_path(folder):
    for call in (k3.load_checkpoint, k3.K3Config.from_json, lambda f: k3.save_checkpoint(toy(**SMALL), f)):
        with pytest.raises(k3.InputError, match="it must be a path"):
            call(folder)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", 3.5, [], "cpu:x", "cuda:-7"], ids=str)
def test_a_device_that_is_none(whole, device):
    for call in (lambda: k3.load_checkpoint(whole, device=device), lambda: k3.K3Model(k3.K3Config.toy(), device=device)):
        with pytest.raises(k3.InputError, match="device is"):
            call()


# --- a run, a tokenizer -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("run"), Data("the cat sat on the mat. " * 1000, Bytes())
    model = k3.K3Model(k3.K3Config.toy(**SMALL | dict(vocab_size=256)))
    list(Trainer(model, data, Recipe(steps=1, rows=1, length=8), folder).run())
    return folder, data


@pytest.mark.parametrize("change", [dict(step="x"), dict(step=-1), dict(step=True), dict(step=1.5), dict(recipe=3), dict(recipe={}), dict(recipe={"steps": "x"}),
                                    dict(recipe={"steps": 1, "mystery": 2}), dict(recipe={"steps": 1, "lr": "x"}), dict(text=3), dict(text=None)], ids=str)
def test_a_run_with_another_training_json(run, tmp_path, change):
    folder = Path(shutil.copytree(run[0], tmp_path / "run"))
    file = store.newest(folder) / store.TRAINING
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(K3Error):
        Trainer.resume(folder, run[1])


def test_momenta_that_do_not_fit(run, tmp_path):
    folder = Path(shutil.copytree(run[0], tmp_path / "run"))
    file = store.newest(folder) / store.OPTIMISER
    good = load_file(file)
    name = next(n for n in good if n.startswith("adamw:exp_avg:"))
    for bad in ({name: good[name].long()}, {name: torch.zeros(())}, {name: good[name][:1].clone()}, {"muon:x:y": torch.zeros(1)}, {"": torch.zeros(1)}, {name: None}):
        save_file({n: t for n, t in (good | bad).items() if t is not None}, file)
        with pytest.raises(k3.CheckpointError):
            Trainer.resume(folder, run[1])
    save_file(good, file)
    assert Trainer.resume(folder, run[1]).step == 1
    with pytest.raises(k3.InputError, match="a recipe has no mystery"):
        Trainer.resume(folder, run[1], mystery=3)


@FUZZ
@given(at=st.integers(0, 20_000), piece=st.binary(min_size=1, max_size=4))
def test_bytes_of_a_tokenizer_changed_at_random(tmp_path, at, piece):
    file = tmp_path / "tokenizer.json"
    if not hasattr(test_bytes_of_a_tokenizer_changed_at_random, "whole"):
        BPE.train("the cat sat on the mat " * 20, 270).save(tmp_path)
        test_bytes_of_a_tokenizer_changed_at_random.whole = file.read_bytes()
    data = test_bytes_of_a_tokenizer_changed_at_random.whole
    at %= len(data)
    file.write_bytes(data[:at] + piece + data[at + len(piece):])
    try:
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.decode(tokenizer.encode("the cat"))
    except K3Error:
        pass


# --- nothing that is read can run -------------------------------------------------------------------------------

def test_no_pickle_no_eval():
    forbidden = re.compile(r"\bpickle\.\w|^\s*(import|from) .*pickle|torch\.(load|save)\(|(?<![.\w])(eval|exec)\(|np\.load|allow_pickle|yaml\.load|marshal|shelve|joblib|weights_only")
    for path in [*(ROOT / "k3_teach").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        found = [line for line in path.read_text().splitlines() if forbidden.search(line)]
        assert found == [], path
