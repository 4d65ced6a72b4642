"""MXFP4. Expected values come from a hand table, Python's own powers of two and a scalar encoder written out here."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3_teach import mxfp4
from k3_teach.errors import InputError
from k3_teach.mxfp4 import decode, encode

GOLDEN = Path(__file__).parent / "golden" / "k3_official_format" / "model.safetensors"

# Sign, two exponent bits of bias 1, one mantissa bit: written out from the layout.
HAND = {0b0000: 0.0, 0b0001: 0.5, 0b0010: 1.0, 0b0011: 1.5, 0b0100: 2.0, 0b0101: 3.0, 0b0110: 4.0, 0b0111: 6.0,
        0b1000: -0.0, 0b1001: -0.5, 0b1010: -1.0, 0b1011: -1.5, 0b1100: -2.0, 0b1101: -3.0, 0b1110: -4.0, 0b1111: -6.0}
CODES = np.array([HAND[c] for c in range(16)])

blocks = st.tuples(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 3))


def random_packed(seed, rows, groups, low=1, high=250):
    g = np.random.default_rng(seed)
    return (torch.from_numpy(g.integers(0, 256, (rows, groups * 16), dtype=np.uint8)),
            torch.from_numpy(g.integers(low, high + 1, (rows, groups), dtype=np.uint8)))


def slow_decode(packed, scale):
    """One element after another, in float64."""
    packed, scale = np.asarray(packed), np.asarray(scale)
    out = np.empty((packed.shape[0], packed.shape[1] * 2))
    for row in range(out.shape[0]):
        for col in range(out.shape[1]):
            byte = int(packed[row, col // 2])
            code = byte % 16 if col % 2 == 0 else byte // 16
            out[row, col] = HAND[code] * 2.0 ** (int(scale[row, col // 32]) - 127)
    return out


def slow_encode_block(values):
    """32 values -> their decoded MXFP4 values: scale from the largest, then the nearest of 16, ties to an even code."""
    largest = max(abs(v) for v in values)
    if largest == 0:
        return [v * 1.0 for v in values]
    exponent = max(np.floor(np.log2(largest)) - 2, -127)
    out = []
    for v in values:
        x = abs(v) / 2.0 ** exponent
        code = min(range(8), key=lambda c: (abs(HAND[c] - x), c % 2))
        out.append(np.copysign(HAND[code] * 2.0 ** exponent, v))
    return out


def bits(x):
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


# --- decode --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("byte", [0, 1, 2, 100, 126, 127, 128, 200, 251, 252])
def test_every_code_in_both_halves_of_a_byte(dtype, byte):
    packed = torch.tensor([[*range(16), *(c << 4 for c in range(16))]], dtype=torch.uint8)  # low halves, high halves
    weight = decode(packed, torch.full((1, 2), byte, dtype=torch.uint8), dtype)
    assert weight.dtype == dtype and weight.shape == (1, 64)
    expected = torch.from_numpy(CODES * 2.0 ** (byte - 127))
    assert torch.equal(bits(weight[0, 0:32:2].double()), bits(expected))
    assert torch.equal(bits(weight[0, 33:64:2].double()), bits(expected))
    assert not weight[0, 1:32:2].any() and not weight[0, 32:64:2].any()


def test_low_half_is_the_even_column():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 15] = 0x72, 0xF1
    weight = decode(packed, torch.tensor([[127]], dtype=torch.uint8))
    assert weight[0, :2].tolist() == [1.0, 6.0] and weight[0, 30:].tolist() == [0.5, -6.0]


def test_a_scale_covers_32_columns_of_its_own_row():
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)  # ones
    weight = decode(packed, torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8))
    assert weight[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [4, 4, 8, 8]]


@given(blocks)
@settings(deadline=None, max_examples=30)
def test_decode_equals_one_element_at_a_time(shape):
    packed, scale = random_packed(*shape, low=0, high=252)
    expected = torch.from_numpy(slow_decode(packed, scale))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(bits(decode(packed, scale, dtype).double()), bits(expected))


def test_leading_axes_and_chunks(monkeypatch):
    packed, scale = (t.view(2, 3, 4, -1) for t in random_packed(0, 24, 2))
    whole = decode(packed, scale)
    assert whole.shape == (2, 3, 4, 64)
    assert torch.equal(whole[1, 2], decode(packed[1, 2], scale[1, 2]))
    again = encode(whole)
    monkeypatch.setattr(mxfp4, "CHUNK", 5 * 64)
    assert torch.equal(decode(packed, scale), whole)
    assert all(torch.equal(a, b) for a, b in zip(encode(whole), again))
    strided = packed.transpose(0, 1)
    assert torch.equal(decode(strided, scale.transpose(0, 1)), whole.transpose(0, 1))


def test_empty():
    weight = decode(torch.empty(0, 16, dtype=torch.uint8), torch.empty(0, 1, dtype=torch.uint8))
    assert weight.shape == (0, 32) and [t.shape for t in encode(weight)] == [(0, 16), (0, 1)]


def test_largest_scale_is_exact_or_an_error():
    scale, small, large = torch.tensor([[254]], dtype=torch.uint8), torch.zeros(1, 16, dtype=torch.uint8), None
    small[0, 0], large = 0xB3, small.clone()
    assert decode(small, scale)[0, :2].tolist() == [1.5 * 2.0**127, -1.5 * 2.0**127]
    large[0, 1] = 0x04  # 2 * 2^127 = 2^128
    assert float(decode(large, scale, torch.float64)[0, 2]) == 2.0**128
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(InputError, match="float64"):
            decode(large, scale, dtype)


def test_float16_is_exact_or_an_error():
    packed = torch.full((1, 16), 0x37, dtype=torch.uint8)  # 6 and 1.5
    for byte, fits in ((103, False), (104, True), (140, True), (141, False)):
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        if fits:
            expected = [6 * 2.0**(byte - 127), 1.5 * 2.0**(byte - 127)]
            assert decode(packed, scale, torch.float16)[0, :2].tolist() == expected
        else:
            with pytest.raises(InputError, match="float16"):
                decode(packed, scale, torch.float16)
    zeros = torch.zeros_like(packed)
    assert not decode(zeros, torch.tensor([[0]], dtype=torch.uint8), torch.float16).any()
    assert not decode(zeros, torch.tensor([[254]], dtype=torch.uint8), torch.float16).any()


def test_decode_rejects():
    packed, scale = random_packed(0, 2, 2)
    scale[1, 0] = 255
    with pytest.raises(InputError, match="NaN"):
        decode(packed, scale)
    scale[1, 0] = 127
    for p, s in ((packed[:, :-1], scale), (packed, scale[:, :1]), (packed[:1], scale), (packed[0], scale[0, 0]),
                 (packed[None], scale)):
        with pytest.raises(InputError, match=r"in/32"):
            decode(p, s)
    float32 = torch.float32
    for p, s, dtype in ((packed.int(), scale, float32), (packed, scale.float(), float32), (packed, scale, torch.int8)):
        with pytest.raises(InputError, match="uint8"):
            decode(p, s, dtype)


# --- encode --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value,code", [
    (0.0, 0.0), (0.24, 0.0), (0.25, 0.0), (0.26, 0.5), (0.74, 0.5), (0.75, 1.0), (1.24, 1.0), (1.25, 1.0), (1.26, 1.5),
    (1.74, 1.5), (1.75, 2.0), (2.49, 2.0), (2.5, 2.0), (2.51, 3.0), (3.49, 3.0), (3.5, 4.0), (4.99, 4.0), (5.0, 4.0),
    (5.01, 6.0), (6.0, 6.0), (7.99, 6.0)])
@pytest.mark.parametrize("exponent", [-100, 0, 7])
def test_rounding_is_to_nearest_and_ties_go_to_the_even_mantissa(value, code, exponent):
    weight = torch.zeros(1, 32, dtype=torch.float64)
    weight[0, 0], weight[0, 1], weight[0, 2] = 4.0, value, -value  # 4 fixes the scale at 2^0
    packed, scale = encode(weight * 2.0**exponent)
    assert int(scale) == 127 + exponent
    assert decode(packed, scale, torch.float64)[0, :3].tolist() == [v * 2.0**exponent for v in (4.0, code, -code)]


@pytest.mark.parametrize("largest,byte", [
    (4.0, 127), (7.99, 127), (8.0, 128), (3.99, 126), (1.0, 125), (6 * 2.0**120, 247), (2.0**-125, 0), (2.0**-126, 0),
    (2.0**-149, 0)])
def test_scale_is_the_exponent_of_the_largest_less_two(largest, byte):
    weight = torch.zeros(1, 64)
    weight[0, 40] = -largest
    assert encode(weight)[1].tolist() == [[127, byte]]  # an empty block gets scale 1


@given(blocks, st.floats(-30, 30))
@settings(deadline=None, max_examples=30)
def test_encode_equals_one_element_at_a_time(shape, log_size):
    seed, rows, groups = shape
    weight = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, groups * 32)) * 2.0**log_size).float()
    got = decode(*encode(weight), torch.float64)
    expected = [slow_encode_block(block) for block in weight.double().reshape(-1, 32).tolist()]
    assert torch.equal(bits(got.reshape(-1, 32)), bits(torch.tensor(expected, dtype=torch.float64)))


@given(blocks)
@settings(deadline=None, max_examples=50)
def test_decoded_numbers_survive_a_round_trip_bit_for_bit(shape):
    packed, scale = random_packed(*shape, low=0, high=252)
    packed[0, :8] = 0x98  # -0 and -0.5
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weight = decode(packed, scale, dtype)
        again = encode(weight)
        assert torch.equal(bits(decode(*again, dtype).double()), bits(weight.double()))
        assert all(torch.equal(a, b) for a, b in zip(encode(decode(*again, dtype)), again))


@pytest.mark.parametrize("code", range(16))
def test_a_block_of_one_code_survives_every_scale(code):
    packed = torch.full((253, 16), code * 17, dtype=torch.uint8)
    weight = decode(packed, torch.arange(253, dtype=torch.uint8)[:, None])
    assert torch.equal(bits(decode(*encode(weight))), bits(weight))


def test_error_is_at_most_a_quarter_of_the_largest():
    """Widest gap 4..6 of an element whose largest is at least 4, so half of 2 / 4; beyond 6 up to 8 as well."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = (decode(*encode(weight)) - weight).abs().unflatten(-1, (-1, 32)).amax(-1)
    assert (error <= 0.25 * weight.abs().unflatten(-1, (-1, 32)).amax(-1)).all()


def test_half_precision_and_strided_weights():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for small in (weight, weight.half(), (weight * 1e-5).half()):
        assert all(torch.equal(a, b) for a, b in zip(encode(small), encode(small.double())))
    assert all(torch.equal(a, b) for a, b in zip(encode(weight[:, :64].T), encode(weight[:, :64].T.contiguous())))


def test_encode_rejects():
    for weight in (torch.zeros(2, 33), torch.zeros(2, 16), torch.tensor(1.0), torch.zeros(2, 32, dtype=torch.int64)):
        with pytest.raises(InputError, match="32"):
            encode(weight)
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InputError, match="NaN or infinity"):
            encode(torch.tensor([[value] + [0.0] * 31]))
    with pytest.raises(InputError, match="2\\^130"):
        encode(torch.full((1, 32), 2.0**131, dtype=torch.float64))


# --- the released format -------------------------------------------------------------------------------------------

def test_experts_in_the_released_format():
    tensors = load_file(GOLDEN)
    ends = ("experts.0.w1.weight_packed", "experts.7.w2.weight_packed")
    names = [n.removesuffix("_packed") for n in tensors if n.endswith(ends)]
    assert len(names) == 8
    for name in names:
        packed, scale = (torch.from_numpy(tensors[name + end]) for end in ("_packed", "_scale"))
        weight = decode(packed, scale)
        assert torch.equal(bits(weight.double()), bits(torch.from_numpy(slow_decode(packed, scale))))
        assert torch.equal(bits(decode(*encode(weight))), bits(weight))
