"""Refuse what cannot be meant: a configuration of no model, inputs that fit none.

Every message names the field or argument, its value, and what is allowed.
"""

import sys
from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor

from k3_teach.cache import Cache, KDAState
from k3_teach.errors import ConfigError, InputError, shown
from k3_teach.mxfp4 import BLOCK

POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
            "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
            "moe_layer_freq", "num_expert_group", "topk_group")
COUNT = ("qk_rope_head_dim", "num_experts", "num_shared_experts",
         "first_k_dense_replace", "num_nextn_predict_layers")
OPTIONAL = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size",
            "num_key_value_heads")
LINEAR_POSITIVE = ("num_heads", "head_dim", "short_conv_kernel_size")
OBJECTS = ("quantization_config", "wrapper", "extra")
LIMIT = 2 ** 20     # of a size: a product of three, in bytes, is still below 2^63
SIZE = f"a positive integer below {LIMIT}"
TRUTH = ("mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm",
         "moe_renormalize", "tie_word_embeddings")


def validate(config) -> None:
    """ConfigError if `config` (a K3Config) describes no model.

    The message names the field, its value, and what is allowed.
    """
    _validate_types(config)
    _validate_layers(config)
    _validate_experts(config)
    _validate_attention(config)
    _validate_numbers(config)


def _require(ok: bool, name: str, value, allowed: str):
    if not ok:
        raise ConfigError(f"{name} is {shown(value)}; it must be {allowed}")


def _is_int(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_positive_int(x) -> bool:
    return _is_int(x) and 0 < x < LIMIT


def _is_number(x) -> bool:
    number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return number and abs(x) <= sys.float_info.max      # False for NaN too


def _validate_types(c) -> None:
    for n in POSITIVE:
        v = getattr(c, n)
        _require(_is_positive_int(v), n, v, SIZE)
    v = c.max_position_embeddings           # no tensor has this size
    _require(_is_int(v) and 0 < v < 2 ** 40, "max_position_embeddings", v,
             "a positive integer")
    for n in COUNT:
        v = getattr(c, n)
        _require(_is_int(v) and 0 <= v < LIMIT, n, v, f"an integer from 0 to {LIMIT - 1}")
    for n in OPTIONAL:
        v = getattr(c, n)
        _require(v is None or _is_positive_int(v), n, v, f"{SIZE}, or null")
    for n in OBJECTS:
        v = getattr(c, n)
        absent = v is None and n != "extra"
        _require(absent or isinstance(v, Mapping), n, v, "an object or null")
    linear, n = c.linear_attn_config, "linear_attn_config"
    _require(hasattr(linear, "kda_layers"), n, linear, "a LinearAttnConfig")
    for n in LINEAR_POSITIVE:
        v, n = getattr(c.linear_attn_config, n), f"linear_attn_config.{n}"
        _require(_is_positive_int(v), n, v, SIZE)
    for n in TRUTH:
        v = getattr(c, n)
        _require(isinstance(v, bool), n, v, "true or false")


def _validate_layers(c) -> None:
    linear, L = c.linear_attn_config, c.num_hidden_layers
    kda, mla = linear.kda_layers, linear.full_attn_layers
    for name, layers in (("kda_layers", kda), ("full_attn_layers", mla)):
        name = f"linear_attn_config.{name}"
        _require(isinstance(layers, (tuple, list)), name, layers, "a list")
        wrong = [i for i in layers if not _is_int(i) or not 1 <= i <= L][:9]
        _require(not wrong, name, wrong,
                 f"layer numbers from 1 to num_hidden_layers ({L})")
        repeated = len(set(layers)) < len(layers)
        _require(not repeated, name, sorted(layers), "free of repetitions")
    both = sorted(set(kda) & set(mla))[:9]
    _require(not both, "linear_attn_config", both, "two lists without a common layer: "
             "these are in kda_layers and in full_attn_layers")
    known = {*kda, *mla}
    lost = [] if len(known) == L else [next(i for i in count(1) if i not in known)]
    _require(not lost, "linear_attn_config", lost, "two lists that cover every layer: "
             "this one, and perhaps others, is in neither kda_layers nor full_attn_layers")


def _validate_experts(c) -> None:
    _one_of(c, "hidden_act", ("situ", "silu"))
    for n in ("activation_situ_beta", "activation_situ_linear_beta"):
        v = getattr(c, n)
        ok = v is None or _is_number(v) and v > 0
        _require(ok, n, v, "a positive number or null")
    if c.num_experts == 0:
        return
    E, k = c.num_experts, c.num_experts_per_token
    v = c.moe_intermediate_size
    _require(_is_positive_int(v), "moe_intermediate_size", v, SIZE)
    _require(_is_int(k) and 1 <= k <= E, "num_experts_per_token", k,
             f"between 1 and num_experts ({E})")
    _one_of(c, "moe_router_activation_func", ("sigmoid", "softmax"))
    _positive_number(c, "routed_scaling_factor")
    _validate_groups(c)
    if "mxfp4" not in str(c.quantization_config):
        return
    latent = c.routed_expert_hidden_size is not None
    width = "routed_expert_hidden_size" if latent else "hidden_size"
    for n in ("moe_intermediate_size", width):
        v = getattr(c, n)
        _require(v % BLOCK == 0, n, v,
                 f"a multiple of {BLOCK} when quantization_config is given: "
                 f"MXFP4 shares one scale among {BLOCK} columns")


def _validate_groups(c) -> None:
    E, k = c.num_experts, c.num_experts_per_token
    groups, kept = c.num_expert_group, c.topk_group
    _require(E % groups == 0, "num_expert_group", groups,
             f"a divisor of num_experts ({E})")
    if groups == 1 or groups <= kept:           # the router then has no groups
        return
    size = E // groups
    _require(size >= 2, "num_expert_group", groups, "such that a group has at least "
             "two experts: a group is scored by its best two")
    _require(kept * size >= k, "topk_group", kept, "large enough that the kept groups "
             f"hold num_experts_per_token ({k}) experts")


def _validate_attention(c) -> None:
    linear, name = c.linear_attn_config, "linear_attn_config"
    v = linear.gate_lower_bound
    ok = v is None or _is_number(v) and v < 0
    _require(ok, f"{name}.gate_lower_bound", v,
             "a negative number (log decay per token) or null")
    v = linear.use_full_rank_gate
    _require(isinstance(v, bool), f"{name}.use_full_rank_gate", v, "true or false")
    heads, v = c.num_attention_heads, c.num_key_value_heads
    _require(v in (None, heads), "num_key_value_heads", v,
             f"num_attention_heads ({heads}): "
             "every MLA head makes its own key from the latent")
    rope = c.qk_rope_head_dim
    _require(c.mla_use_nope or rope % 2 == 0, "qk_rope_head_dim", rope,
             "even when mla_use_nope is false")


def _validate_numbers(c) -> None:
    for n in ("rms_norm_eps", "initializer_range", "rope_theta"):
        _positive_number(c, n)
    for n in ("pad_token_id", "bos_token_id", "eos_token_id"):
        v = getattr(c, n)
        pad = n == "pad_token_id"                   # the others do not enter the model
        ids = v if isinstance(v, list) and not pad else [v]
        limit = c.vocab_size if pad else 2 ** 40
        ok = v is None or all(_is_int(i) and 0 <= i < limit for i in ids)
        what = f" below vocab_size ({limit})" if pad else ", a list of such,"
        _require(ok, n, v, f"a token id{what} or null")
    v = c.num_nextn_predict_layers
    _require(v == 0, "num_nextn_predict_layers", v,
             "0: the released checkpoint holds no multi-token prediction layer")


def _one_of(c, name: str, allowed: tuple[str, ...]) -> None:
    v = getattr(c, name)
    _require(v in allowed, name, v, f"one of {', '.join(allowed)}")


def _positive_number(c, name: str) -> None:
    v = getattr(c, name)
    _require(_is_number(v) and v > 0, name, v, "a positive number")


# --- inputs of a model ----------------------------------------------------------------

def check_dtype(dtype) -> None:
    """InputError unless `dtype` is None or one that a model can have."""
    allowed = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in allowed):
        names = ", ".join(map(str, allowed))
        raise InputError(f"dtype is {shown(dtype)}; it must be one of {names}, or None")


def check_place(config, dtype, device) -> None:
    """InputError for what is no K3Config, and a dtype or device that no model has."""
    if not hasattr(config, "linear_attn_config"):
        raise InputError(f"config is {shown(config)}; it must be a K3Config")
    check_dtype(dtype)
    check_device(device)


def check_device(device, name: str = "device") -> None:
    """InputError unless `device` is None or a device that this torch can use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as e:
        raise InputError(f"{name} is {shown(device)}: {str(e).splitlines()[0]}; it must be one "
                         "that torch knows, such as 'cpu' or 'cuda'") from None


def check_cache(cache, kda: list[bool]) -> None:
    """InputError unless `cache` is a Cache for layers that are KDA where `kda` holds."""
    if not isinstance(cache, Cache):
        raise InputError(f"cache is {_kind(cache)}; it must come from new_cache")
    if [isinstance(s, KDAState) for s in cache.states] != kda:
        raise InputError(f"the cache is for {len(cache.states)} layers of another pattern "
                         f"than the model's {len(kda)}; it must come from its new_cache")


def check_ids(ids: Tensor, vocab_size: int, values: bool = False) -> None:
    """InputError unless ids are token ids [B, T]; values: on meta, they have none."""
    integers = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
    integers = integers and ids.layout == torch.strided and not (values and ids.is_meta)
    if not integers or ids.ndim != 2 or ids.numel() == 0:
        raise InputError(f"ids is {_kind(ids)}; "
                         "it must be an int64 tensor [B, T] with at least one token")
    if torch.compiler.is_compiling() or ids.is_meta:      # no values to look at
        return
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise InputError(f"ids holds {low.item()} to {high.item()}; "
                         f"token ids must be from 0 to {vocab_size - 1}")


def check_mask(mask: Tensor, ids: Tensor, past: int, before: Tensor | None, cached: bool
               ) -> Tensor | None:
    """The boolean mask [B, past + T], or None if nothing is padding.

    ids [B, T]; before [B, past]: the mask of the cached tokens, None: no padding there.
    InputError for another shape or dtype, for another opinion on the cached tokens, and
    for padding in a wrong place.
    """
    shape = [len(ids), past + ids.shape[1]]
    fits = isinstance(mask, Tensor) and list(mask.shape) == shape
    fits = fits and mask.layout == torch.strided and mask.is_meta == ids.is_meta
    if not fits or mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise InputError(f"attention_mask is {_kind(mask)}; it must be bool or integer,"
                         f" {shape}: it covers the {past} cached tokens too")
    mask = mask.to(device=ids.device, dtype=torch.bool)
    known = mask[:, :past]
    expected = torch.ones_like(known) if before is None else before
    if past and not torch.equal(known, expected):
        raise InputError("attention_mask says otherwise about the cached tokens than "
                         "the masks they came with")
    if bool(mask.all()):
        return None
    on_left = (mask[:, 1:] >= mask[:, :-1]).all(-1)
    on_right = (mask[:, 1:] <= mask[:, :-1]).all(-1)
    wrong = ~on_left if cached else ~(on_left | on_right)
    if bool(wrong.any()):
        where = "on the left when there is a cache" if cached else "on one side"
        raise InputError(f"attention_mask has padding after real tokens in row "
                         f"{wrong.nonzero()[0].item()}; padding must stand {where}")
    return mask


def _kind(x) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{x.dtype} of shape {list(x.shape)}"
