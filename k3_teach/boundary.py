"""The functions of the package as they look from outside, where anything may be passed.

`k3_teach.attention` is `parts.attention.attention` with its arguments checked. The package
itself calls the unchecked ones, whose arguments its own checks have seen to: of ids, masks and
caches in `validate`, of a configuration, of a file. So a step of decoding pays nothing.
"""

import torch

from k3_teach.arguments import (
    COUNT, FUNCTION, NOT_NEGATIVE, NUMBER, POSITIVE, SIZE, TRUTH, checked, optional)
from k3_teach.errors import InputError
from k3_teach.model import next_token_loss
from k3_teach.parts import (
    attention as attend, attn_res as depth, balance, compressed_attention as compressed, kda,
    kda_layer, mla, moe, norm, rope, situ)
from k3_teach.train import muon
from k3_teach.validate import check_device

next_token_loss = checked(next_token_loss, logits="B T vocab", ids="index vocab: B T",
                          attention_mask="mask: B T?")

# --- attention ------------------------------------------------------------------------
_qkv = dict(q="B H T K", k="* S K", v="* S V", scale=NUMBER, mask="bool: * T S?")
attention = checked(attend.attention, same_dtype=True, **_qkv)
attention_eager = checked(attend.attention_eager, same_dtype=True, **_qkv)


def _check_room(T, S, valid=None, device=None) -> None:
    check_device(device)
    here = valid is None or valid.device == torch.empty(0, device=device).device
    if T > S or not here or valid is not None and valid.shape[1] != S:
        shape = None if valid is None else f"{list(valid.shape)} on {valid.device}"
        raise InputError(f"T is {T}, S {S}, valid {shape}, device {device}; T must be at most "
                         "S, and valid [B, S] on the same device")


causal_mask = checked(attend.causal_mask, T=SIZE, S=SIZE, valid="bool: B L?", also=_check_room)
_mla = dict(q="B H T D", latent="B S LR", kv_b="H NV L", v_dim=SIZE, scale=NUMBER,
            mask="bool: * T S?")


def _check_widths(q, latent, kv_b, v_dim, scale, mask=None) -> None:
    own, shared = kv_b.shape[1] - v_dim, latent.shape[-1] - kv_b.shape[2]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        raise InputError(f"mask is {list(mask.shape)}; it must be [B, 1, T, S], for all heads")
    if own < 0 or shared < 0 or q.shape[-1] != own + shared or q.shape[2] > latent.shape[1]:
        ends = [list(x.shape[-2:]) for x in (q, latent, kv_b)]
        raise InputError(f"q, latent, kv_b end in {ends} and v_dim is {v_dim}; they must end in "
                         "[T, N+R], [S, L+R], [N+V, L] with T at most S, and V is v_dim")


mla_absorbed = checked(mla.mla_absorbed, same_dtype=True, also=_check_widths, **_mla)
mla_expanded = checked(mla.mla_expanded, same_dtype=True, also=_check_widths, **_mla)
_compressed = dict(q="B H T D", kv="B S D", ratio=SIZE, top_k=COUNT, window=SIZE,
                   scale=NUMBER, index_q="B I T J?", index_k="B n J?", index_weights="B I T?",
                   scores="...?", overlap=TRUTH, recent=TRUTH)


def _check_index(q, kv, *args, index_q=None, index_k=None, **options) -> None:
    widths = [x.shape[-1] for x in (q if index_q is None else index_q,
                                    kv if index_k is None else index_k)]
    if widths[0] != widths[1]:
        raise InputError(f"index_q and index_k end in {widths}; they must be equally wide, and "
                         "are q and kv where they are None")


csa = checked(compressed.csa, same_dtype=True, also=_check_index, **_compressed)
hca = checked(compressed.hca, same_dtype=True, **_compressed)

# --- KDA ------------------------------------------------------------------------------
def _check_taps(x, weight, taps=None) -> None:
    W = weight.shape[-1]
    if taps is not None and taps.shape[1] != W - 1:
        raise InputError(f"taps holds {taps.shape[1]} tokens; for a weight of width {W} it must "
                         f"hold {W - 1}")


_kda = dict(q="B T H K", k="B T H K", v="B T H V", g="B T H K", beta="B T H",
            initial_state="B H K V?")
recurrent_kda = checked(kda.recurrent_kda, **_kda)
chunk_kda = checked(kda.chunk_kda, **_kda, chunk_size=optional(COUNT),
                    gate_lower_bound=optional(NUMBER))
short_conv = checked(kda_layer.short_conv, x="B T P", weight="P 1 W", taps="B before P?",
                     also=_check_taps)
l2_normalize = checked(kda_layer.l2_normalize, x="... K", eps=NOT_NEGATIVE)
_gate = dict(z="... H K", A_log="H", dt_bias="H K")
bounded_gate = checked(kda_layer.bounded_gate, **_gate, lower_bound=NUMBER)
softplus_gate = checked(kda_layer.softplus_gate, **_gate)

# --- the stream -----------------------------------------------------------------------
attn_res = checked(depth.attn_res, sources="... d", query="d", eps=NOT_NEGATIVE)
read_sealed = checked(depth.read_sealed, sealed="... d", queries="P d", eps=NOT_NEGATIVE)
merge_live = checked(depth.merge_live, mixture="wide: ... d", log_sum="wide: ...",
                     live="... d", query="d", eps=NOT_NEGATIVE)
rms_norm = checked(norm.rms_norm, x="... d", weight="any: d", eps=NOT_NEGATIVE)


def _check_pairs(x, angles) -> None:
    if x.shape[-1] != 2 * angles.shape[-1]:
        raise InputError(f"angles is {list(angles.shape)} for x {list(x.shape)}; it must hold "
                         "one angle for two channels")


rope_angles = checked(rope.rope_angles, positions="number: ... T", dim=SIZE, base=POSITIVE)
apply_rope = checked(rope.apply_rope, x="... T dim", angles="any: * T half", also=_check_pairs)

# --- feed-forwards --------------------------------------------------------------------
softcap = checked(situ.softcap, x="...", beta=optional(POSITIVE))
glu = checked(situ.glu, gate="...", up="**")
swiglu = checked(situ.swiglu, gate="...", up="**")
situ_glu = checked(situ.situ_glu, gate="...", up="**", beta=optional(POSITIVE),
                   linear_beta=optional(POSITIVE))


def _check_groups(scores, *args, num_groups=1, topk_group=1, **options) -> None:
    E = scores.shape[1]
    if num_groups > max(1, topk_group) and (E % num_groups or E < 2 * num_groups):
        raise InputError(f"num_groups is {num_groups}; groups must divide {E} experts "
                         "and have at least two each, for their best two are their score")


route = checked(moe.route, also=_check_groups, scores="N E", bias="any: E", top_k=COUNT,
                renormalize=TRUTH,
                scaling=NUMBER, num_groups=COUNT, topk_group=COUNT)
_experts = dict(w1="E m l", x="N l", idx="index E: N k", weights="kin: N k",
                w2="E l m", w3="E m l", act=FUNCTION)
experts_loop = checked(moe.experts_loop, same_dtype=True, **_experts)
experts_grouped = checked(moe.experts_grouped, same_dtype=True, **_experts)
expert_load = checked(balance.expert_load, idx="index: ...", num_experts=SIZE)
max_vio = checked(balance.max_vio, load="number: E")
sign_update = checked(balance.sign_update, bias="E", load="int: E", step=NUMBER)
quantile_bias = checked(balance.quantile_bias, scores="N E", bias="E", top_k=SIZE,
                        rank=("'q', 'q+1' or 'midpoint'", ("q", "q+1", "midpoint").__contains__))

# --- Muon -----------------------------------------------------------------------------
_three = "three numbers", lambda x: (isinstance(x, (tuple, list)) and len(x) == 3
                                     and all(map(NUMBER[1], x)))
newton_schulz = checked(muon.newton_schulz, G="... m n", steps=COUNT, coefficients=_three)
per_head = checked(muon.per_head, G="... m n", num_heads=SIZE, fn=FUNCTION)
muon_direction = checked(muon.muon_direction, momentum="... m n", num_heads=optional(SIZE),
                         steps=COUNT, rms=NUMBER)
