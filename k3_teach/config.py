"""The configuration: one frozen dataclass with the field names of the released `config.json`.

Every mechanism of the model is a field, so an ablation is a configuration, and so is Kimi Linear.
Fields that this package does not use are kept in `extra` and written back by `to_json`.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Mapping

from k3_teach.errors import ConfigError

MXFP4_GROUP = 32  # input columns that share one scale in the released expert weights
MODEL_TYPE = ("model_type", "kimi_linear")  # what the released text configuration calls itself


@dataclass(frozen=True)
class LinearAttnConfig:
    """Which layers mix tokens by Kimi Delta Attention and which by MLA, and the sizes of KDA."""

    kda_layers: tuple[int, ...]           # counted from 1, as in the released file
    full_attn_layers: tuple[int, ...]     # counted from 1; these layers are MLA
    num_heads: int
    head_dim: int                         # width of a key and of a value; the state of a head is head_dim x head_dim
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None # -5 in K3: g = -5 sigmoid(.); None: Kimi Linear's unbounded softplus gate
    use_full_rank_gate: bool = False      # output gate: one d x HK matrix, or two through a rank of head_dim


@dataclass(frozen=True)
class K3Config:
    """A K3 text model. Defaults are those of the released configuration class, not of K3: see `k3()`."""

    vocab_size: int
    hidden_size: int                      # width d of the residual stream
    num_hidden_layers: int
    intermediate_size: int                # width of the dense feed-forward
    linear_attn_config: LinearAttnConfig

    # multi-head latent attention
    num_attention_heads: int
    kv_lora_rank: int                     # width of the cached latent
    qk_nope_head_dim: int                 # per-head part of a key
    qk_rope_head_dim: int                 # part of a key that all heads share; rotated only if mla_use_nope is false
    v_head_dim: int
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = None        # None: one full matrix for the queries
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    rope_theta: float = 10000.0

    # feed-forward
    hidden_act: str = "silu"              # "situ" in K3
    activation_situ_beta: float | None = None         # None means 1
    activation_situ_linear_beta: float | None = None  # None: the up branch is not capped
    num_experts: int = 0
    num_experts_per_token: int = 1
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None      # latent width of the routed experts; None: full width
    latent_moe_use_norm: bool = False
    first_k_dense_replace: int = 0        # the first k layers are dense
    moe_layer_freq: int = 1
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1

    # the stream
    attn_res_block_size: int | None = None            # layers in a block of Attention Residuals; None: plain residual
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0     # the release holds no multi-token prediction layer
    quantization_config: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)   # other fields of the file, kept as they are
    wrapper: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)  # what surrounds `text_config`, if anything

    def __post_init__(self):
        validate(self)

    # --- what the numbers mean -------------------------------------------------------------------------------------

    def is_kda(self, layer: int) -> bool:
        """Does layer `layer` (counted from 0) mix tokens by KDA? If not, by MLA."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Does layer `layer` (counted from 0) have a mixture of experts? If not, a dense feed-forward."""
        return (self.num_experts > 0 and layer >= self.first_k_dense_replace
                and layer % self.moe_layer_freq == 0)

    @property
    def mla_layers(self) -> list[int]:
        """MLA layers, counted from 0."""
        return [i for i in range(self.num_hidden_layers) if not self.is_kda(i)]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """What a routed expert reads and writes: the latent width, or the full one."""
        return self.routed_expert_hidden_size or self.hidden_size

    def replace(self, **changes) -> "K3Config":
        """A copy with other values. Fields of `linear_attn_config` may be given directly."""
        inner = {f.name for f in fields(LinearAttnConfig)}
        nested = {k: changes.pop(k) for k in list(changes) if k in inner}
        if nested:
            changes["linear_attn_config"] = replace(changes.get("linear_attn_config", self.linear_attn_config), **nested)
        unknown = sorted(set(changes) - {f.name for f in fields(self)})
        if unknown:
            raise ConfigError(f"K3Config has no field {', '.join(unknown)}")
        return replace(self, **changes)

    # --- presets ---------------------------------------------------------------------------------------------------

    @classmethod
    def k3(cls) -> "K3Config":
        """The released configuration, every field (read from the released `config.json`)."""
        return cls.from_json(Path(__file__).with_name("k3_config.json"))

    @classmethod
    def toy(cls, **changes) -> "K3Config":
        """K3's arrangement at a size that a CPU runs in milliseconds.

        It keeps what makes K3's topology awkward: a dense first layer, three KDA layers to one MLA, a last layer that
        is MLA out of cadence, a short last block of Attention Residuals, experts at half width and more of them than
        a token uses.
        """
        toy = cls(
            vocab_size=256, hidden_size=64, num_hidden_layers=9, intermediate_size=160,
            linear_attn_config=LinearAttnConfig(
                kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8, 9), num_heads=4, head_dim=16,
                gate_lower_bound=-5.0, use_full_rank_gate=True),
            num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
            q_lora_rank=48, mla_use_output_gate=True,
            hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
            num_experts=16, num_experts_per_token=4, num_shared_experts=2, moe_intermediate_size=32,
            routed_expert_hidden_size=32, latent_moe_use_norm=True, first_k_dense_replace=1,
            attn_res_block_size=4, rms_norm_eps=1e-5, max_position_embeddings=4096)
        return toy.replace(**changes) if changes else toy

    # --- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, path) -> "K3Config":
        """Read a `config.json` (or a folder that holds one), nested in `text_config` or not. Kimi Linear's works too."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: not a JSON file ({e})") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "K3Config":
        """The same from a dictionary of released field names."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"a configuration is a JSON object, not {type(data).__name__}")
        wrapper = None
        if "text_config" in data:
            wrapper = {k: v for k, v in data.items() if k != "text_config"}
            data = data["text_config"]
        names = {f.name for f in fields(cls)} - {"extra", "wrapper", "linear_attn_config"}
        known = {k: v for k, v in data.items() if k in names}
        extra = {k: v for k, v in data.items() if k not in names | {"linear_attn_config"} and (k, v) != MODEL_TYPE}
        linear = data.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise ConfigError(f"linear_attn_config is {linear!r}; it must be an object with kda_layers, full_attn_layers, num_heads, head_dim")
        known["linear_attn_config"] = _linear_attn(linear, extra)
        missing = sorted(f.name for f in fields(cls) if f.default is f.default_factory and f.name not in known)
        if missing:
            raise ConfigError(f"the configuration lacks {', '.join(missing)}")
        return cls(**known, extra=extra, wrapper=wrapper)

    def to_dict(self) -> dict[str, Any]:
        """Released field names, unknown fields included, nested as it was read."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("extra", "wrapper")}
        extra = dict(self.extra)
        inner = extra.pop(_INNER, {})
        linear = {f.name: getattr(self.linear_attn_config, f.name) for f in fields(LinearAttnConfig)}
        own["linear_attn_config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in (linear | inner).items()}
        own["quantization_config"] = None if self.quantization_config is None else dict(self.quantization_config)
        text = dict([MODEL_TYPE]) | extra | own
        if self.quantization_config is None:
            del text["quantization_config"]
        return text if self.wrapper is None else dict(self.wrapper) | {"text_config": text}

    def to_json(self, path=None) -> str:
        """The configuration as JSON text; written to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


_INNER = "linear_attn_config (unknown fields)"


def _linear_attn(data: Mapping[str, Any], extra: dict) -> LinearAttnConfig:
    names = {f.name for f in fields(LinearAttnConfig)}
    missing = sorted({"kda_layers", "full_attn_layers", "num_heads", "head_dim"} - set(data))
    if missing:
        raise ConfigError(f"linear_attn_config lacks {', '.join(missing)}")
    unknown = {k: v for k, v in data.items() if k not in names}
    if unknown:
        extra[_INNER] = unknown
    known = {k: v for k, v in data.items() if k in names}
    for k in ("kda_layers", "full_attn_layers"):
        if not isinstance(known[k], (list, tuple)):
            raise ConfigError(f"linear_attn_config.{k} is {known[k]!r}; it must be a list of layer numbers from 1")
        known[k] = tuple(known[k])
    return LinearAttnConfig(**known)


# --- validation ----------------------------------------------------------------------------------------------------

_POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "kv_lora_rank",
             "qk_nope_head_dim", "v_head_dim", "moe_layer_freq", "num_expert_group", "topk_group", "max_position_embeddings")
_COUNT = ("qk_rope_head_dim", "num_experts", "num_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
_OPTIONAL = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size", "num_key_value_heads")
_LINEAR_POSITIVE = ("num_heads", "head_dim", "short_conv_kernel_size")
_TRUTH = ("mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize", "tie_word_embeddings")


def _require(ok: bool, name: str, value, allowed: str):
    if not ok:
        raise ConfigError(f"{name} is {value!r}; it must be {allowed}")


def _is_int(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < float("inf")


def validate(c: K3Config) -> None:
    """Raise ConfigError, naming the field, its value and what is allowed, if `c` describes no model."""
    linear = c.linear_attn_config
    for n in _POSITIVE:
        _require(_is_int(getattr(c, n)) and getattr(c, n) > 0, n, getattr(c, n), "a positive integer")
    for n in _COUNT:
        _require(_is_int(getattr(c, n)) and getattr(c, n) >= 0, n, getattr(c, n), "an integer of at least 0")
    for n in _OPTIONAL:
        v = getattr(c, n)
        _require(v is None or (_is_int(v) and v > 0), n, v, "a positive integer or null")
    for n in _LINEAR_POSITIVE:
        v = getattr(linear, n)
        _require(_is_int(v) and v > 0, f"linear_attn_config.{n}", v, "a positive integer")
    for n in _TRUTH:
        _require(isinstance(getattr(c, n), bool), n, getattr(c, n), "true or false")
    _validate_layers(c)
    _validate_experts(c)
    bound = linear.gate_lower_bound
    _require(bound is None or (_is_number(bound) and bound < 0), "linear_attn_config.gate_lower_bound", bound,
             "a negative number (log decay per token) or null")
    _require(isinstance(linear.use_full_rank_gate, bool), "linear_attn_config.use_full_rank_gate", linear.use_full_rank_gate, "true or false")
    _require(c.num_key_value_heads in (None, c.num_attention_heads), "num_key_value_heads", c.num_key_value_heads,
             f"num_attention_heads ({c.num_attention_heads}): every MLA head makes its own key from the latent")
    _require(c.mla_use_nope or c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", c.qk_rope_head_dim, "even when mla_use_nope is false")
    for n in ("rms_norm_eps", "initializer_range", "rope_theta"):
        _require(_is_number(getattr(c, n)) and getattr(c, n) > 0, n, getattr(c, n), "a positive number")
    for n in ("pad_token_id", "bos_token_id", "eos_token_id"):
        v = getattr(c, n)
        ok = v is None or (_is_int(v) and 0 <= v < c.vocab_size) or (n == "eos_token_id" and isinstance(v, list))
        _require(ok, n, v, f"a token id below vocab_size ({c.vocab_size}) or null")
    _require(c.num_nextn_predict_layers == 0, "num_nextn_predict_layers", c.num_nextn_predict_layers,
             "0: the released checkpoint holds no multi-token prediction layer")


def _validate_layers(c: K3Config) -> None:
    kda, mla = c.linear_attn_config.kda_layers, c.linear_attn_config.full_attn_layers
    for name, layers in (("kda_layers", kda), ("full_attn_layers", mla)):
        wrong = [i for i in layers if not _is_int(i) or not 1 <= i <= c.num_hidden_layers]
        _require(not wrong, f"linear_attn_config.{name}", wrong, f"layer numbers from 1 to num_hidden_layers ({c.num_hidden_layers})")
        _require(len(set(layers)) == len(layers), f"linear_attn_config.{name}", sorted(layers), "free of repetitions")
    both = sorted(set(kda) & set(mla))
    _require(not both, "linear_attn_config", both, "two lists without a common layer: these are in kda_layers and in full_attn_layers")
    lost = sorted(set(range(1, c.num_hidden_layers + 1)) - set(kda) - set(mla))
    _require(not lost, "linear_attn_config", lost, "two lists that cover every layer: these are in neither kda_layers nor full_attn_layers")


def _validate_experts(c: K3Config) -> None:
    acts = ("situ", "silu")
    _require(c.hidden_act in acts, "hidden_act", c.hidden_act, f"one of {', '.join(acts)}")
    for n in ("activation_situ_beta", "activation_situ_linear_beta"):
        v = getattr(c, n)
        _require(v is None or (_is_number(v) and v > 0), n, v, "a positive number or null")
    if c.num_experts == 0:
        return
    _require(_is_int(c.moe_intermediate_size) and c.moe_intermediate_size > 0, "moe_intermediate_size", c.moe_intermediate_size, "a positive integer")
    _require(_is_int(c.num_experts_per_token) and 1 <= c.num_experts_per_token <= c.num_experts, "num_experts_per_token",
             c.num_experts_per_token, f"between 1 and num_experts ({c.num_experts})")
    funcs = ("sigmoid", "softmax")
    _require(c.moe_router_activation_func in funcs, "moe_router_activation_func", c.moe_router_activation_func, f"one of {', '.join(funcs)}")
    _require(_is_number(c.routed_scaling_factor) and c.routed_scaling_factor > 0, "routed_scaling_factor", c.routed_scaling_factor, "a positive number")
    groups, size = c.num_expert_group, c.num_experts // c.num_expert_group
    _require(c.num_experts % groups == 0, "num_expert_group", groups, f"a divisor of num_experts ({c.num_experts})")
    if 1 < groups and groups > c.topk_group:
        _require(size >= 2, "num_expert_group", groups, "such that a group has at least two experts: a group is scored by its best two")
        _require(c.topk_group * size >= c.num_experts_per_token, "topk_group", c.topk_group,
                 f"large enough that the kept groups hold num_experts_per_token ({c.num_experts_per_token}) experts")
    if c.quantization_config is not None:
        for n in ("moe_intermediate_size", "routed_expert_hidden_size" if c.routed_expert_hidden_size else "hidden_size"):
            _require(getattr(c, n) % MXFP4_GROUP == 0, n, getattr(c, n),
                     f"a multiple of {MXFP4_GROUP} when quantization_config is given: MXFP4 shares one scale among {MXFP4_GROUP} columns")
