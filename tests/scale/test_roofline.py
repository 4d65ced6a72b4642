"""Intensities: against the layers themselves, counted operation by operation, and against known figures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import k3_teach as k3
from k3_teach.cache import LatentCache
from k3_teach.scale.roofline import CHIPS, Attention, Chip, attainable, attentions, chips_needed, intensity, least_seconds

K3 = {a.name: a for a in attentions(k3.K3Config.k3())}


def flop(fn) -> int:
    """Floating-point operations of the matrix products in `fn`, as torch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        fn()
    return counter.get_total_flops()


def per_cached_token(fn, tokens=64) -> float:
    """What grows with the history: the slope between a cache of `tokens` and one of twice as many."""
    return (flop(lambda: fn(2 * tokens)) - flop(lambda: fn(tokens))) / tokens


# --- the multiply-adds, counted ------------------------------------------------------------------------------------

@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("config", [k3.K3Config.toy(), k3.K3Config.k3()], ids=["toy", "K3"])
def test_absorbed_mla_is_what_the_kernel_does(config, query_tokens):
    c, a = config, attentions(config)[3]
    H, L, R, N, V = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim
    q, kv_b = torch.zeros(1, H, query_tokens, N + R, device="meta"), torch.zeros(H, N + V, L, device="meta")

    def decode(S):
        k3.mla_absorbed(q, torch.zeros(1, S, L + R, device="meta"), kv_b, V, 1.0)

    # The kernel's value is the whole cached row, L + R wide, of which the last R are thrown away.
    assert a.name == "MLA absorbed"
    assert per_cached_token(decode) == 2 * query_tokens * (a.decode_macs + H * R)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_attention_is_what_the_layer_does(groups):
    layer = k3.GroupedQueryAttention(32, 4, groups, 6)
    a = Attention("GQA", 4, 6, 6, cached=2 * groups * 6)
    caches = {S: LatentCache() for S in (64, 128)}
    for S, cache in caches.items():
        layer(torch.zeros(1, S - 1, 32), state=cache)
    step = {S: flop(lambda: layer(torch.zeros(1, 1, 32), state=cache)) for S, cache in caches.items()}
    assert (step[128] - step[64]) / 64 == 2 * a.decode_macs
    assert caches[64].rows.shape[-1] == a.cached


def test_what_is_cached_is_what_a_cache_holds():
    """MLA absorbed: the rows of the model's own cache."""
    c = k3.K3Config.toy()
    model, a = k3.K3Model(c), attentions(c)[3]
    cache = model.new_cache(1)
    model(torch.zeros(1, 10, dtype=torch.long), cache=cache)
    assert {state.rows.shape[-1] for state in cache.states if isinstance(state, LatentCache)} == {a.cached}


@pytest.mark.parametrize("name", ["MHA", "MLA expanded", "MFA-like", "K = V"])
def test_prefill_by_counting(name):
    """Every pair costs heads (key + value); there are T^2 of them, as a mask is no saving in the plain form."""
    a, T = next(a for a in attentions(k3.K3Config.toy()) if a.name == name), 16
    q, k, v = (torch.zeros(1, a.heads, T, w) for w in (a.key, a.key, a.value))
    assert flop(lambda: k3.attention_eager(q, k, v, 1.0)) == 2 * T * T * a.prefill_macs


# --- known figures -------------------------------------------------------------------------------------------------

def test_multiply_adds_at_released_size():
    """Per pair: 24,576 for 128 + 128, 30,720 for 192 + 128, 49,152, 98,304; decoding, MLA takes 3.40 times its own."""
    assert {name: a.prefill_macs for name, a in K3.items()} == {
        "MHA": 24_576, "MLA expanded": 30_720, "GQA8": 24_576, "MLA absorbed": 30_720, "MFA-like": 49_152, "K = V": 98_304}
    assert {name: a.decode_macs for name, a in K3.items()} == {
        "MHA": 24_576, "MLA expanded": 30_720, "GQA8": 24_576, "MLA absorbed": 104_448, "MFA-like": 49_152, "K = V": 98_304}
    assert K3["MLA absorbed"].decode_macs / K3["MHA"].decode_macs == 4.25
    assert K3["MLA absorbed"].decode_macs / K3["MLA absorbed"].prefill_macs == pytest.approx(3.4)


def test_cached_numbers_at_released_size():
    assert {name: a.cached for name, a in K3.items()} == {
        "MHA": 24_576, "MLA expanded": 30_720, "GQA8": 2_048, "MLA absorbed": 576, "MFA-like": 512, "K = V": 512}


def test_intensities_at_released_size():
    assert {name: round(intensity(a), 1) for name, a in K3.items()} == {
        "MHA": 1.0, "MLA expanded": 1.0, "GQA8": 12.0, "MLA absorbed": 181.3, "MFA-like": 96.0, "K = V": 192.0}
    assert round(intensity(K3["MLA absorbed"], 2)) == 363 and round(intensity(K3["MLA absorbed"], 4), 1) == 725.3


def test_tokens_and_bytes_scale():
    a = K3["MLA absorbed"]
    assert intensity(a, 3) == 3 * intensity(a) and intensity(a, 1, 1) == 2 * intensity(a) == intensity(a, 2)
    assert intensity(a, bytes_per_number=0.5) == 4 * intensity(a)


# --- the roof ------------------------------------------------------------------------------------------------------

def test_ridges():
    assert {chip.name: round(chip.ridge) for chip in CHIPS} == {
        "A100 80GB SXM": 153, "H100 SXM": 295, "H200 SXM": 206, "H20": 37, "B200": 281, "MI300X": 247, "MI355X": 315}


def test_chips_are_as_on_their_data_sheets():
    """TFLOP/s of dense bfloat16, TB/s and GB."""
    assert {chip.name: (chip.flops / 1e12, chip.bandwidth / 1e12, chip.memory / 1e9) for chip in CHIPS} == {
        "A100 80GB SXM": (312, 2.039, 80), "H100 SXM": (989.4, 3.35, 80), "H200 SXM": (989.4, 4.8, 141),
        "H20": (148, 4.0, 96), "B200": (2250, 8.0, 180), "MI300X": (1307.4, 5.3, 192),
        "MI355X": (2516.6, 8.0, 288)}


def test_one_token_waits_for_memory_on_an_h100_and_two_do_not():
    h100, h20 = (next(chip for chip in CHIPS if chip.name == name) for name in ("H100 SXM", "H20"))
    one, two = intensity(K3["MLA absorbed"]), intensity(K3["MLA absorbed"], 2)
    assert one < h100.ridge < two and h20.ridge < one
    assert attainable(h100, one) == h100.bandwidth * one < h100.flops
    assert attainable(h100, two) == h100.flops and attainable(h20, one) == h20.flops


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_the_roof_bends_at_the_ridge(chip):
    """Against time as the larger of two: W FLOP and W / x bytes take max(W / peak, W / x / bandwidth)."""
    for x in (0.1, 1, chip.ridge / 2, chip.ridge, 2 * chip.ridge, 1e6):
        seconds = max(1e15 / chip.flops, 1e15 / x / chip.bandwidth)
        assert attainable(chip, x) == pytest.approx(1e15 / seconds, rel=1e-12)
    assert attainable(chip, 0) == 0


def test_chips_are_plausible_and_cited():
    """Units: a slip of 1000 would leave these ranges. Every source is an entry of the bibliography."""
    bib = (Path(__file__).parents[2] / "book" / "references.bib").read_text(encoding="utf-8")
    keys = set(re.findall(r"^@\w+\{(\w+),", bib, re.M))
    for chip in CHIPS:
        assert 1e14 < chip.flops < 1e16 and 1e12 < chip.bandwidth < 1e13 and 5e10 < chip.memory < 5e11
        assert chip.source in keys
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


@pytest.mark.parametrize("call, what", [
    (lambda: intensity(K3["MHA"], 0), "query_tokens is 0"),
    (lambda: intensity(K3["MHA"], bytes_per_number=0), "bytes_per_number is 0"),
    (lambda: intensity(K3["MHA"], bytes_per_number=float("nan")), "bytes_per_number is nan"),
    (lambda: attainable(CHIPS[0], -1.0), "flop_per_byte is -1.0"),
    (lambda: attainable(CHIPS[0], float("nan")), "flop_per_byte is nan"),
    (lambda: chips_needed(CHIPS[0], 1.0, 0.0), "usable is 0.0"),
    (lambda: chips_needed(CHIPS[0], 1.0, 1.5), "usable is 1.5"),
])
def test_values_out_of_range(call, what):
    with pytest.raises(k3.InputError, match=what):
        call()


def test_records_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        CHIPS[0].flops = 1.0
    assert replace(CHIPS[0], flops=2e15).ridge == 2e15 / 2.039e12
    assert Chip("x", 6.0, 2.0, 1.0, "").ridge == 3


def test_how_many_chips():
    """1.56 TB are 20 chips of 80 GB filled to the brim, 22 at nine tenths; a byte more than full needs another."""
    h100 = next(chip for chip in CHIPS if chip.name == "H100 SXM")
    assert chips_needed(h100, 1_560_860_324_864, 1.0) == 20 and chips_needed(h100, 1_560_860_324_864) == 22
    assert chips_needed(h100, 80e9, 1.0) == 1 and chips_needed(h100, 80e9 + 1, 1.0) == 2


def test_least_seconds_is_the_roof():
    chip = Chip("x", 6.0, 2.0, 1.0, "")
    assert least_seconds(chip, 12.0, 2.0) == 2 and least_seconds(chip, 6.0, 4.0) == 2 and least_seconds(chip, 6.0, 4.0, 4) == 0.5
    for x in (1.0, 3.0, 9.0):
        assert 100 / least_seconds(chip, 100, 100 / x) == pytest.approx(attainable(chip, x))
