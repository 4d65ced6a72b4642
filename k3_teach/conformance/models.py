"""The special models of the kit: one of two stored models with exact changes of some tensors
and fields, so that a mistake that hardly shows in an ordinary model shows at once.

Most are cut to four layers, three KDA and one MLA, and have whatever is not looked at
multiplied by zero: then a wrong attention fails no probe of the experts.

Patterns are those of `fnmatch`, over the stored names. Numbers that are scaled are scaled
by powers of two, so that all of them stay exact in float32.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np

from k3_teach.conformance.folder import read_folder, read_tensors, write_folder

DATA = Path(__file__).with_name("data")
KDA, MLA = "model.layers.[012456].self_attn", "model.layers.[37].self_attn"
LINEAR = "linear_attn_config"
REPEATED = 4        # a token whose beta is near 1 in every head of the model `alike`


def zero(w):
    return 0 * w


def times(factor):
    return lambda w: w * np.float32(factor)


def all_equal(value):
    return lambda w: np.full_like(w, value)


def ramp(low, high):
    return lambda w: np.linspace(low, high, w.size, dtype=np.float32).reshape(w.shape)


NO_KDA = {f"{KDA}.o_proj.weight": zero}
NO_MLA = {f"{MLA}.o_proj.weight": zero}
NO_ROUTED = {"*.routed_expert_up_proj.weight": zero}
NO_SHARED = {"*.shared_experts.down_proj.weight": zero}
NO_DENSE = {"*.mlp.down_proj.weight": zero}
NO_FFN = NO_ROUTED | NO_SHARED | NO_DENSE
ONLY_KDA = NO_MLA | NO_FFN
CONSTANT_GATE = {"*.f_b_proj.weight": zero, "*.A_log": zero}    # then g = -5 sigmoid(dt_bias)
NO_DECAY = CONSTANT_GATE | {"*.dt_bias": all_equal(-40)}        # g = 0 under any formula
SLOW = CONSTANT_GATE | {"*.dt_bias": all_equal(-8)}             # e^g = 0.9983
FAST = CONSTANT_GATE | {"*.dt_bias": all_equal(20)}             # g = -5


@dataclass(frozen=True)
class Model:
    """changes: pattern -> function of an array; config: fields with other values; edit: a
    function of all tensors, for what two tensors share; short: only the first four layers;
    length: tokens of the text; repeat: one token all along; traces: what of the trace is
    compared, beside the logits; base: the stored model; bfloat16: stored as such."""

    changes: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    edit: object = None
    short: bool = True
    length: int = 24
    repeat: bool = False
    traces: tuple[str, ...] = ()
    base: str = "odd"
    bfloat16: str = ""


def square(t):
    """As many KDA heads as channels, 3: a head's number and a channel's cannot be told apart
    by their shapes."""
    for name in [n for n in t if fnmatchcase(n, f"{KDA}.*")]:
        part = name.split("self_attn.")[1].split(".")[0]
        if part in ("q_proj", "k_proj", "v_proj", "g_proj", "q_conv1d", "k_conv1d", "v_conv1d",
                    "dt_bias"):
            t[name] = t[name][:9]
        elif part in ("f_a_proj", "o_norm"):
            t[name] = t[name][:3]
        elif part == "f_b_proj":
            t[name] = t[name][:9, :3]
        elif part == "o_proj":
            t[name] = t[name][:, :9]


def pairs(score, bias=None, opposite=False):
    """An edit: experts 2j and 2j + 1 have router rows that differ by the factor `score`, and
    the biases `bias` in turn; opposite: their outputs are opposite, too."""
    def edit(t):
        for name in [n for n in t if n.endswith(".gate.weight")]:
            t[name][1::2] = t[name][::2] * np.float32(score)
            flat = t[name.replace("weight", "e_score_correction_bias")]
            flat[:] = 0 if bias is None else np.resize(bias, flat.shape)
        for name in [n for n in t if opposite and ".experts." in n]:
            head, rest = name.split(".experts.")
            e, rest = rest.split(".", 1)
            if int(e) % 2:
                twin = t[f"{head}.experts.{int(e) - 1}.{rest}"]
                t[name] = -twin if rest.startswith("w2") else twin.copy()
    return edit


def blind_padding(t):
    t["model.embed_tokens.weight"][58] = np.nan


def extra_tail(t):
    for name in [n for n in t if n.endswith(".A_log")]:
        t[name][3:] = 0.5


def lose_norms(t):
    for name in [n for n in t if n.endswith(".routed_expert_norm.weight")]:
        del t[name]


def to_bfloat16(w):
    return (w.view(np.uint32) & 0xFFFF0000).view(np.float32)


UP_AND_GATE = times(2 ** 12)
TWINS = [0.5, 0.5 + 2 ** -12, 0.5 + 2 ** -12, 0.5]
CONV = "*.[qkv]_conv1d.weight"
EXPERTS = NO_KDA | NO_MLA | NO_DENSE

MODELS = {
    # whole models: `odd` and `official` are the released model's own outputs
    "odd": Model(short=False, length=75),
    "official": Model(base="official", short=False, length=29),
    "whole": Model(),
    "lost": Model(edit=lose_norms),
    # the gate of KDA
    "padded": Model({"*.A_log": lambda a: np.pad(a, (0, 5))} | ONLY_KDA),
    "official_tail": Model(base="official", short=False, edit=extra_tail),
    "square": Model(ONLY_KDA | {"*.A_log": ramp(-1.5, 1.5)}, {"head_dim": 3}, square),
    "bounded": Model(ONLY_KDA | CONSTANT_GATE | {"*.dt_bias": ramp(-8, 8)}, traces=("g",)),
    "unbounded": Model(ONLY_KDA, {"gate_lower_bound": None}, traces=("g",)),
    "bound_3": Model(ONLY_KDA, {"gate_lower_bound": -3.0}),
    "strong_gate": Model(ONLY_KDA | {"*.f_b_proj.weight": times(8), "*.dt_bias": zero},
                         traces=("g",)),
    "constants": Model(ONLY_KDA | {"*.f_b_proj.weight": zero, "*.A_log": ramp(-1, 0.75),
                                   "*.dt_bias": ramp(3, -3)}, traces=("g",)),
    # the recurrence
    "small_keys": Model(ONLY_KDA | NO_DECAY | {"*.[qk]_conv1d.weight": times(2 ** -8)}),
    "slow": Model(ONLY_KDA | SLOW, length=130),
    "alike": Model(ONLY_KDA | CONSTANT_GATE | {"*.dt_bias": all_equal(-8.5),
                                               "*.b_proj.weight": times(16)},
                   length=130, repeat=True),
    "sweep": Model(ONLY_KDA | {"*.dt_bias": ramp(-12, 8)}, length=75),
    "fast": Model(ONLY_KDA | FAST, length=75),
    "very_fast": Model(ONLY_KDA | FAST, {"gate_lower_bound": -40.0}, length=75),
    "memory": Model(ONLY_KDA | NO_DECAY | {CONV: lambda w: w * np.float32([0, 0, 0, 1])},
                    length=75),
    "mixed": Model(NO_ROUTED, length=75),
    "taps": Model(ONLY_KDA | NO_DECAY
                  | {CONV: lambda w: 0 * w + np.float32([256, -256, 257, -256])}, repeat=True),
    "taps_bf16": Model(ONLY_KDA | {CONV: to_bfloat16}, bfloat16=CONV),
    # attention
    "small_latents": Model(NO_KDA | NO_FFN | {f"{MLA}.q_a_proj.weight": times(2 ** -10),
                                              f"{MLA}.kv_a_proj_with_mqa.weight": times(2 ** -10)}),
    "blind": Model({"model.embed_tokens.weight": lambda w: w}, edit=blind_padding, short=False),
    # depth
    "sharp": Model(NO_KDA | NO_MLA | NO_ROUTED | {"model.output_attn_res_proj.weight": times(16)},
                   short=False, traces=("attn_in", "mlp_in")),
    "uniform": Model(NO_KDA | NO_MLA | NO_ROUTED | {"*_res_proj.weight": zero},
                     short=False, traces=("prefix", "nblocks")),
    "loud": Model(NO_KDA | NO_MLA | NO_ROUTED | {"model.embed_tokens.weight": times(64)},
                  short=False),
    "blocks_5": Model(NO_KDA | NO_MLA | NO_ROUTED, {"attn_res_block_size": 5}, short=False,
                      traces=("nblocks",)),
    # experts
    "routed": Model(EXPERTS | NO_SHARED | {"*.routed_expert_up_proj.weight": times(8)},
                    traces=("latent",)),
    "near_ties": Model(EXPERTS | NO_SHARED, edit=pairs(1 + 2 ** -12), length=75),
    "bias_ties": Model(EXPERTS | NO_SHARED, edit=pairs(1, TWINS), length=75),
    "cancel": Model(EXPERTS | NO_SHARED, {"num_experts_per_token": 2},
                    pairs(1 + 2 ** -6, opposite=True)),
    "all_experts": Model(EXPERTS | NO_SHARED, {"num_experts_per_token": 10}),
    "loud_dense": Model(NO_KDA | NO_MLA | NO_ROUTED | NO_SHARED
                        | {"*.mlp.[gu]*_proj.weight": UP_AND_GATE}),
    "loud_shared": Model(EXPERTS | NO_ROUTED | {"*.shared_experts.[gu]*.weight": UP_AND_GATE}),
    "loud_routed": Model(EXPERTS | NO_SHARED | {"*.experts.*.w[13].weight": UP_AND_GATE}),
}


def text(name: str) -> np.ndarray:
    """ids [T], the text on which a model is looked at."""
    model = MODELS[name]
    if model.repeat:
        return np.full(model.length, REPEATED)
    return np.resize(golden()[f"{model.base}.input_ids"], model.length)


@cache
def golden() -> dict[str, np.ndarray]:
    """What the released model computed."""
    return read_tensors(DATA / "golden.safetensors")


@cache
def expected() -> dict[str, np.ndarray]:
    """What `reference` computed of the special models: logits [T,vocab] under their names,
    and entries of the trace, as "sharp.L3.attn_in"."""
    return read_tensors(DATA / "expected.safetensors")


def build(name: str) -> tuple[dict, dict[str, np.ndarray], tuple[str, ...]]:
    """The configuration, the tensors, and the names of those stored in bfloat16."""
    model = MODELS[name]
    config, tensors = read_folder(DATA / model.base)
    if model.short:
        tensors = {n: w for n, w in tensors.items() if not fnmatchcase(n, "model.layers.[4567].*")}
        config["num_hidden_layers"] = 4
        config[LINEAR] |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    for key, value in model.config.items():
        (config[LINEAR] if key in config[LINEAR] else config)[key] = value
    tensors = {n: w.copy() for n, w in tensors.items()}
    for pattern, change in model.changes.items():
        for n in [n for n in tensors if fnmatchcase(n, pattern)]:
            tensors[n] = change(tensors[n])
    if model.edit:
        model.edit(tensors)
    halved = tuple(n for n in tensors if model.bfloat16 and fnmatchcase(n, model.bfloat16))
    return config, tensors, halved


def write_model(name: str, folder) -> None:
    """Write the model `name` in the released format."""
    config, tensors, halved = build(name)
    write_folder(folder, config, tensors, halved)
