"""The streamed model: the bits of the ordinary one, from weights that it never holds."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import k3_teach as k3
from k3_teach.checkpoint import released_names
from k3_teach.scale.stream import FolderSource, StreamedModel, VirtualSource, first_layers, memory
from k3_teach.scale.stream.clock import part_of
from k3_teach.scale.stream.report import active_bytes
from tests.helpers import GOLDEN, tokens, toy

PLAIN = dict(attn_res_block_size=None, routed_expert_hidden_size=None, latent_moe_use_norm=False, gate_lower_bound=None,
             use_full_rank_gate=False, hidden_act="silu", q_lora_rank=None, tie_word_embeddings=True)  # as Kimi Linear has it


def filled(source, dtype) -> k3.K3Model:
    """The ordinary model with the weights of a source."""
    model = k3.K3Model(source.config, dtype=dtype).eval()
    with torch.no_grad():
        for name, (p, e) in released_names(model).items():
            (p if e is None else p[e]).copy_(source.read(name, p.dtype))
    return model


def same_bits(ordinary, streamed):
    """Without a cache; prefill, prefill in pieces, decoding; one row, and two with padding on the left; few experts and many."""
    cached = torch.ones(2, 4, dtype=torch.bool)
    with torch.no_grad():
        for B, T in ((1, 1), (2, 7), (1, 12)):
            ids = tokens(B, T, vocab=ordinary.config.vocab_size)
            mask = None if B == 1 else torch.arange(T) >= torch.tensor([[0], [3]])
            a, trace = ordinary(ids, mask, return_trace=True)
            b, again = streamed(ids, mask, return_trace=True)
            assert torch.equal(a, b) and all(torch.equal(trace[n], again[n]) for n in trace) and trace.keys() == again.keys()
            one, two = ordinary.new_cache(B), streamed.new_cache(B)
            pieces = [ids, ids[:, :3], ids[:, -1:]]
            for piece in pieces:
                so_far = None if mask is None else torch.cat((mask, cached), 1)[:, :len(one) + piece.shape[1]]
                assert torch.equal(ordinary(piece, so_far, one), streamed(piece, so_far, two))
            for x, y in zip(one.states, two.states):
                assert all(torch.equal(s, t) for s, t in zip(x.tensors(), y.tensors()))


@pytest.mark.parametrize("changes", [{}, PLAIN, dict(num_experts=0, num_shared_experts=0)], ids=["k3", "plain", "dense"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_virtual_weights_give_the_bits_of_the_ordinary_model(changes, dtype):
    source = VirtualSource(k3.K3Config.toy(**changes), seed=3, dtype=dtype)
    same_bits(filled(source, dtype), StreamedModel(source, dtype))


@pytest.mark.parametrize("name", ["k3_tiny", "k3_odd", "k3_official_format", "kimi_linear_tiny"])
def test_a_folder_gives_the_bits_of_the_loaded_model(name):
    same_bits(k3.load_checkpoint(GOLDEN / name, torch.float64), StreamedModel(FolderSource(GOLDEN / name), torch.float64))


@pytest.mark.parametrize("options", [{}, dict(mxfp4_experts=True, released_layout=True)], ids=["plain", "released"])
def test_shards(tmp_path, options):
    """A header moves what lies behind it off the lines of the cache, where a product may sum in another order: not in float64."""
    k3.save_checkpoint(toy(seed=17), tmp_path, max_shard_bytes=1_000_000, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source = FolderSource(tmp_path)
    plain = [n for n in source.names if source.kind(n) == "F64"]
    assert any(source.raw(n).data_ptr() % 64 for n in plain) and not any(source.read(n, torch.float64).data_ptr() % 64 for n in plain)
    same_bits(k3.load_checkpoint(tmp_path), StreamedModel(source, torch.float64))


def test_the_engine_takes_it():
    source = VirtualSource(k3.K3Config.toy(), dtype=torch.float64)
    ids, options = tokens(2, 5), dict(temperature=1.0, seed=1, prefill_chunk=2)
    a, b = (torch.stack(list(k3.generate(m, ids, 4, **options))) for m in (filled(source, torch.float64), StreamedModel(source, torch.float64)))
    assert torch.equal(a, b)


# --- what is read --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("T", [1, 3, 40])
def test_only_chosen_experts_are_read(T):
    model, ids = StreamedModel(VirtualSource(k3.K3Config.toy(num_experts=48)), torch.bfloat16), tokens(1, T)
    read, original = [], model.source.read
    model.source.read = lambda name, dtype: read.append(name) or original(name, dtype)
    trace = model(ids, return_trace=True)[1]
    for i in range(1, 9):
        experts = {int(n.split(".")[5]) for n in read if n.startswith(f"model.layers.{i}.block_sparse_moe.experts.")}
        assert experts == set(trace[f"L{i}.topk_idx"].flatten().tolist()) and len(experts) < 48
    others = [n for n in read if ".experts." not in n]
    assert len(others) == len(set(others))      # once in a pass


@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["k3", "plain"])
def test_a_decoded_token_reads_the_active_weights(changes):
    """Counted while it runs, and from the configuration."""
    model = StreamedModel(VirtualSource(k3.K3Config.toy(**changes)), torch.bfloat16)
    cache = model.new_cache()
    model(tokens(1, 3), cache=cache)
    model(tokens(1, 1), cache=cache)
    p = model.clock.passes[-1]
    assert (p.tokens, p.cached) == (1, 3)
    assert p.total_bytes == active_bytes(model.config, 2)
    assert all(seconds >= 0 for seconds in p.seconds.values()) and {"KDA mixers", "MLA mixers", "router", "routed experts"} <= p.seconds.keys()


def test_parts_of_the_model():
    c = k3.K3Config.toy()
    names = {"model.layers.0.mlp.gate_proj.weight": "dense feed-forward", "model.layers.3.self_attn.q_a_proj.weight": "MLA mixers",
             "model.layers.2.self_attn.A_log": "KDA mixers", "model.layers.1.block_sparse_moe.gate.weight": "router",
             "model.layers.1.block_sparse_moe.experts.3.w1.weight": "routed experts", "lm_head.weight": "output head",
             "model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight": "shared experts", "model.norm.weight": "depth reads and norms",
             "model.layers.1.block_sparse_moe.routed_expert_norm.weight": "latent projections", "model.embed_tokens.weight": "embedding",
             "model.layers.1.mlp_res_proj.weight": "depth reads and norms"}
    assert {n: part_of(n, c) for n in names} == names


def test_virtual_weights_depend_on_seed_and_name_alone():
    """The same in another process; other numbers for another seed and for another name; views where they can be."""
    names = ["model.layers.3.self_attn.o_proj.weight", "model.layers.0.self_attn.A_log", "model.layers.1.block_sparse_moe.experts.7.w2.weight"]
    code = ("import torch, k3_teach as k3; from k3_teach.scale.stream import VirtualSource; s = VirtualSource(k3.K3Config.toy(), 5); "
            f"print([s.read(n, torch.float32).sum().item() for n in {names}])")
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    source = VirtualSource(k3.K3Config.toy(), 5)
    here = [source.read(n, torch.float32).sum().item() for n in names]
    assert there.strip() == str(here)
    assert here != [VirtualSource(k3.K3Config.toy(), 6).read(n, torch.float32).sum().item() for n in names]
    stack = [source.read(f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight", torch.bfloat16) for e in range(16)]
    assert len({x.data_ptr() for x in stack}) == 16
    assert all(x.untyped_storage().data_ptr() == source.pool.untyped_storage().data_ptr() for x in stack)
    assert abs(source.pool.float().std() / 0.02 - 1) < 0.02
    assert source.read("model.norm.weight", torch.float64).eq(1).all()
    state = torch.get_rng_state()
    source.read("model.layers.0.self_attn.dt_bias", torch.float32)
    assert torch.equal(state, torch.get_rng_state())
    for wrong in ("model.layers.9.self_attn.A_log", "model.layers.1.block_sparse_moe.experts.16.w1.weight"):
        with pytest.raises(k3.InputError, match="is no tensor of this model"):
            source.read(wrong, torch.float32)


def test_first_layers_keep_the_pattern():
    c = first_layers(k3.K3Config.k3(), 4)
    assert [c.is_kda(i) for i in range(4)] == [True, True, True, False] and [c.is_moe(i) for i in range(4)] == [False, True, True, True]
    assert (c.hidden_size, c.num_experts) == (7168, 896)
    for n in (0, 94):
        with pytest.raises(k3.InputError, match="it must be from 1 to 93"):
            first_layers(k3.K3Config.k3(), n)


# --- memory --------------------------------------------------------------------------------------------------------

def test_the_plan_of_the_released_configuration(monkeypatch):
    """Refused before anything is made; the items are what they should be."""
    source = VirtualSource(first_layers(k3.K3Config.k3(), 4))
    model = StreamedModel(source, ceiling="8GB")
    planned = memory.plan(model, 1, 8, 0)
    assert planned["pool of numbers"] == 2 * (163840 * 7168 + 2 ** 26 - 5) and planned["states, old and new"] > 2 * 3 * 96 * 128 * 128 * 4
    assert sum(planned.values()) < 4e9
    model.ceiling = 2 * 10 ** 9
    with pytest.raises(k3.InputError, match=r"the ceiling is 2.00 GB; this needs .* pool of numbers 2.48 GB"):
        model(torch.zeros(1, 8, dtype=torch.long))
    assert "pool" not in source.__dict__


def test_a_process_above_the_ceiling_is_ended(monkeypatch):
    model = StreamedModel(VirtualSource(k3.K3Config.toy()), ceiling="6GB")
    cache = model.new_cache()
    model(tokens(1, 2), cache=cache)
    assert 0 < model.peak < 6e9 or memory.resident() is None
    monkeypatch.setattr(memory, "resident", lambda: 7 * 10 ** 9)
    with pytest.raises(k3.InputError, match="the ceiling is 6.00 GB; after layer 0 the process holds 7.00 GB"):
        model(tokens(1, 1), cache=cache)
    assert len(cache) == 2


def test_resident_memory_sees_what_is_made():
    before = memory.resident()
    if before is None:
        pytest.skip("not Linux")
    x = torch.ones(2 ** 26, dtype=torch.uint8)
    assert 2 ** 26 * 0.9 < memory.resident() - before < 2 ** 26 * 1.3 and x.sum()


@pytest.mark.parametrize("text, nbytes", [("8GB", 8 * 10 ** 9), ("1.5 GiB", 3 * 2 ** 29), (123, 123), ("7mb", 7 * 10 ** 6)])
def test_bytes_as_text(text, nbytes):
    assert memory.parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "8XB", "nan", True, "1e9"])
def test_no_number_of_bytes(text):
    with pytest.raises(k3.InputError, match="the ceiling is"):
        memory.parse_bytes(text)


# --- what is wrong with a folder -----------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    k3.save_checkpoint(toy(dtype=torch.float32), tmp_path, max_shard_bytes=200_000)
    return tmp_path


def shard_of(folder, name):
    return next(p for p in sorted(folder.glob("*.safetensors")) if name in load_file(p))


@pytest.mark.parametrize("damage, message", [
    (lambda p: p.unlink(), "shards that are not there: {}"), (lambda p: p.write_bytes(p.read_bytes()[:-1000]), "{}: not a readable safetensors file"),
    (lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]), "{}: not a readable safetensors file"), (lambda p: p.write_bytes(b""), "{}: not a readable"),
], ids=["missing", "truncated", "header", "empty"])
def test_a_bad_shard_is_named_before_anything_runs(folder, damage, message):
    path = shard_of(folder, "model.layers.4.self_attn.o_proj.weight")
    damage(path)
    with pytest.raises(k3.CheckpointError) as e:
        FolderSource(folder)
    assert message.format(path.name) in str(e.value)


def test_tensors_that_do_not_fit(folder):
    name = "model.layers.4.self_attn.o_proj.weight"
    path = shard_of(folder, name)
    tensors = load_file(path)
    lost = next(n for n in tensors if n != name)
    del tensors[lost]
    save_file(tensors | {name: torch.zeros(3, 3), "model.mystery": torch.zeros(1)}, path)
    with pytest.raises(k3.CheckpointError) as e:
        FolderSource(folder)
    assert "3 tensors do not fit" in str(e.value) and f"missing: {lost}" in str(e.value) and f"misshapen: {name} is [3, 3]" in str(e.value) and path.name in str(e.value)
    assert "extra: model.mystery" in str(e.value)


def test_numbers_that_are_none_name_layer_and_shard(folder):
    name = "model.layers.4.self_attn.o_proj.weight"
    path = shard_of(folder, name)
    tensors = load_file(path)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path)
    model = StreamedModel(FolderSource(folder), torch.float32)
    cache = model.new_cache()
    with pytest.raises(k3.InputError) as e:
        model(tokens(1, 2), cache=cache)
    assert str(e.value).startswith("layer 4 gives NaN or infinity") and str(path) in str(e.value)
    assert "layer 5" not in str(e.value) and len(cache) == 0 and not cache.states[0].tensors()
    assert StreamedModel(FolderSource(folder, layers=4), torch.float32)(tokens(1, 2)).isfinite().all()     # layer 4 is not among them


@pytest.mark.parametrize("name, message", [
    ("lm_head.weight", "the output head gives NaN"), ("model.embed_tokens.weight", "layer 0 gives NaN"), ("model.layers.5.mlp_res_proj.weight", "model.layers.5.mlp_res_proj.weight holds NaN")])
def test_numbers_that_are_none_outside_the_layers(folder, name, message):
    path = shard_of(folder, name)
    tensors = load_file(path)
    tensors[name].fill_(torch.nan)
    save_file(tensors, path)
    with pytest.raises(k3.InputError, match=message) as e:
        StreamedModel(FolderSource(folder), torch.float32)(tokens(1, 2))
    assert str(path) in str(e.value)


def test_a_shard_that_changes_while_it_is_read(folder):
    """If the file itself were cut, reading on would kill the process (SIGBUS): nothing that is kept may be a view of it."""
    model, path = StreamedModel(FolderSource(folder), torch.float32), shard_of(folder, "model.layers.4.self_attn.o_proj.weight")
    kept = {f"model.{name}".replace(".module", ""): p for name, p in model.named_parameters() if not p.is_meta}
    assert len(kept) > 9 and all(p.data_ptr() != model.source.raw(name).data_ptr() for name, p in kept.items())
    (folder / "other").write_bytes(path.read_bytes()[:100])
    (folder / "other").replace(path)
    with pytest.raises(k3.CheckpointError, match=f"{path.name}: has changed since it was opened"):
        model(tokens(1, 2))


def test_another_model_of_the_same_shape_is_another(folder):
    before, path = FolderSource(folder).identity, sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    save_file({n: x + 1 for n, x in tensors.items()}, path, {"format": "pt"})
    assert FolderSource(folder).identity != before
