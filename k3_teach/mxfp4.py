"""MXFP4: the four-bit format of the released routed experts, 4.25 bits a weight.

    w = element * 2^(scale - 127)          one scale for 32 consecutive input columns

An element is E2M1, a sign, two exponent bits and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4,
6 and their negatives. A scale is E8M0, a byte that is an exponent; 255 is NaN (OCP
Microscaling Formats v1.0). Stored as compressed-tensors' `mxfp4-pack-quantized`: two
elements a byte, the even column in the low four bits.

Shapes: packed uint8 [..., out, in/2], scale uint8 [..., out, in/32], weight [..., out, in].
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError, shown

BLOCK = 32           # columns that share a scale
BIAS = 127           # the exponent stored as 0 is -127
CHUNK = 1 << 22      # weights in work at once: bounds the temporaries to tens of megabytes

# By code; code 8 + n is -MAGNITUDES[n], -0 included.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# First and last byte of scale with which every element is exact in a dtype. Beyond them it
# depends on the element.
ALWAYS_EXACT = {torch.float64: (0, 254), torch.float32: (0, 252),
                torch.bfloat16: (0, 252), torch.float16: (104, 140)}


def byte_table(dtype: torch.dtype = torch.float32, device=None) -> Tensor:
    """[256, 2]: the two elements in every byte, even column first."""
    elements = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    element = torch.tensor(elements, dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([element[byte & 15], element[byte >> 4]], -1)


def scale_table(dtype: torch.dtype = torch.float32, device=None) -> Tensor:
    """[256]: 2^(byte - 127); the last is NaN."""
    powers = [2.0 ** (byte - BIAS) for byte in range(255)]
    powers.append(float("nan"))
    return torch.tensor(powers, dtype=torch.float64, device=device).to(dtype)


def _decode_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [R, in/2], scale [R, in/32] -> [R, in]: two table look-ups and one product."""
    look_up = lambda table, codes: table.index_select(0, codes.flatten().int())
    elements = look_up(byte_table(dtype, packed.device), packed).view(*scale.shape, BLOCK)
    scales = look_up(scale_table(dtype, scale.device), scale).view(*scale.shape, 1)
    return elements.mul_(scales).flatten(1)


def _row_chunks(columns: int, *tensors: Tensor):
    """The same rows of each tensor [..., width], CHUNK weights at a time. They are views,
    so they can be written to."""
    if all(t.numel() for t in tensors):
        size = max(1, CHUNK // columns)
        yield from zip(*(t.reshape(-1, t.shape[-1]).split(size) for t in tensors))


def _has_values(x) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta


def _check_packed(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    kinds = [getattr(x, "dtype", None) for x in (packed, scale)]
    if kinds != [torch.uint8] * 2 or dtype not in [*ALWAYS_EXACT]:
        got = f"packed is {kinds[0]}, scale {kinds[1]}, to {shown(dtype)}"
        raise InputError(f"{got}; need uint8, uint8, to a float")
    if not (_has_values(packed) and _has_values(scale) and packed.device == scale.device):
        raise InputError("packed and scale must hold values, on one device")
    if not scale.ndim or packed.shape != (*scale.shape[:-1], scale.shape[-1] * BLOCK // 2):
        got = f"packed {tuple(packed.shape)}, scale {tuple(scale.shape)}"
        raise InputError(f"{got}; need [..., in/2] and [..., in/32]")
    if bool((scale == 255).any()):
        raise InputError("a scale byte is 255, which is NaN; need 0 to 254")


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights of the file (OCP MX v1.0), exactly -> [..., out, in] in `dtype`.

    packed uint8 [..., out, in/2], scale uint8 [..., out, in/32]. float32 and bfloat16 hold
    every value with a scale byte up to 252; beyond, and in float16, some are too large or
    too small. InputError where one would be rounded or overflow, for a scale of 255 (NaN),
    and for wrong shapes or dtypes.
    """
    _check_packed(packed, scale, dtype)
    columns = packed.shape[-1] * 2
    weight = torch.empty(*packed.shape[:-1], columns, dtype=dtype, device=packed.device)
    for out, p, s in _row_chunks(columns, weight, packed, scale):
        low, high = int(s.min()), int(s.max())
        exact = ALWAYS_EXACT[dtype][0] <= low and high <= ALWAYS_EXACT[dtype][1]
        values = _decode_rows(p, s, dtype if exact else torch.float64)
        out.copy_(values)
        if not exact and not torch.equal(out.double(), values):
            got = f"{dtype} cannot hold scale bytes {low}..{high}"
            raise InputError(f"{got}; decode to float64")
    return weight


def _round_to_code(magnitude: Tensor) -> Tensor:
    """Nearest E2M1 code 0..7 of values >= 0, uint8. A tie goes to the even code, which has
    the even mantissa."""
    # The code is the number of midpoints below the value. A value on a midpoint counts it
    # only if its tie goes up.
    like = {"dtype": magnitude.dtype, "device": magnitude.device}
    to_lower = torch.tensor([0.25, 1.25, 2.5, 5.0], **like)
    to_upper = torch.tensor([0.75, 1.75, 3.5], **like)
    code = torch.bucketize(magnitude, to_lower, out_int32=True)
    code = code + torch.bucketize(magnitude, to_upper, out_int32=True, right=True)
    return code.to(torch.uint8)


def _encode_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, in] float32 or float64 -> packed [R, in/2], scale [R, in/32]."""
    blocks = weight.contiguous().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # floor(log2(largest)) - 2, so that the largest lands in [4, 8); a block of zeros: 0
    exponent = torch.frexp(largest).exponent - 3
    exponent = exponent.masked_fill(largest == 0, 0).clamp_min(-BIAS)
    if bool((exponent > BIAS).any()):
        raise InputError("a weight is beyond 2^130, the end of the scale")
    # 2^-exponent from the table, and a product with it: no step rounds
    inverse = scale_table(weight.dtype, weight.device)[(BIAS - exponent).long()]
    code = _round_to_code(blocks.abs() * inverse) + 8 * blocks.signbit().to(torch.uint8)
    code = code.flatten(1)
    packed = code[:, 0::2] | code[:, 1::2] << 4
    return packed, (exponent + BIAS).squeeze(-1).to(torch.uint8)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest MXFP4 to a weight [..., out, in].

    -> packed uint8 [..., out, in/2], scale uint8 [..., out, in/32].
    Scale 2^(floor(log2(largest of the block)) - 2); elements to nearest, ties to even,
    beyond 6 to 6 (OCP Microscaling Formats v1.0). What MXFP4 can hold comes back exactly,
    -0 included: decode(*encode(w)) == w. The scale byte may differ from the one that w was
    decoded from, where a block did not use its largest elements.

    InputError for in not a multiple of 32, for values that are not finite or beyond the
    format, and for integers.
    """
    if not _has_values(weight):
        raise InputError(f"weight is {shown(weight)}; need a tensor that holds values")
    if weight.ndim < 1 or weight.shape[-1] % BLOCK or weight.dtype not in ALWAYS_EXACT:
        got = f"weight is {weight.dtype} {tuple(weight.shape)}"
        raise InputError(f"{got}; need floats, {BLOCK} n columns")
    if not bool(weight.isfinite().all()):
        raise InputError("weight holds NaN or infinity; need finite values")
    lead, columns = weight.shape[:-1], weight.shape[-1]
    packed = torch.empty(*lead, columns // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*lead, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    for rows, p, s in _row_chunks(columns, weight, packed, scale):
        new_p, new_s = _encode_rows(rows if rows.dtype == torch.float64 else rows.float())
        p.copy_(new_p)
        s.copy_(new_s)
    return packed, scale
