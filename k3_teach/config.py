"""The configuration: a frozen dataclass with the field names of the released file.

Every mechanism of the model is a field, so an ablation is a configuration, and so is
Kimi Linear. Fields that this package does not use are kept in `extra` and written back
by `to_json`.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Mapping

from k3_teach.errors import ConfigError, shown
from k3_teach.files import as_path, read_json
from k3_teach.validate import validate

MODEL_TYPE = ("model_type", "kimi_linear")  # as the release has it


@dataclass(frozen=True)
class LinearAttnConfig:
    """Which layers mix tokens by Kimi Delta Attention, which by MLA; KDA's sizes."""

    kda_layers: tuple[int, ...]             # counted from 1, as in the released file
    full_attn_layers: tuple[int, ...]       # counted from 1; these layers are MLA
    num_heads: int
    head_dim: int                           # width of a key and of a value
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None   # -5 in K3: g = -5 sigmoid(.)
                                            # None: unbounded, as in Kimi Linear
    use_full_rank_gate: bool = False        # output gate: one matrix, or two through a
                                            # rank of head_dim


@dataclass(frozen=True)
class K3Config:
    """A K3 text model. ConfigError for values that describe no model.

    Defaults are those of the released configuration class, not of K3: see `k3()`.
    """

    vocab_size: int
    hidden_size: int                        # width d of the residual stream
    num_hidden_layers: int
    intermediate_size: int                  # inner width of the dense feed-forward
    linear_attn_config: LinearAttnConfig

    # multi-head latent attention
    num_attention_heads: int
    kv_lora_rank: int                       # width of the cached latent
    qk_nope_head_dim: int                   # a head's own part of a key
    qk_rope_head_dim: int                   # the part of a key that all heads share;
                                            # rotated only if mla_use_nope is false
    v_head_dim: int
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = None          # None: one full matrix for the queries
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    rope_theta: float = 10000.0

    # feed-forward
    hidden_act: str = "silu"                # "situ" in K3
    activation_situ_beta: float | None = None         # None: 1
    activation_situ_linear_beta: float | None = None  # None: up branch not capped
    num_experts: int = 0
    num_experts_per_token: int = 1
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0          # inner width of an expert
    routed_expert_hidden_size: int | None = None      # latent width; None: full width
    latent_moe_use_norm: bool = False
    first_k_dense_replace: int = 0          # the first k layers are dense
    moe_layer_freq: int = 1                 # of the rest, those it divides are MoE
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1

    # the stream
    attn_res_block_size: int | None = None  # layers in a block of Attention Residuals;
                                            # None: plain residual
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0       # for multi-token prediction: none released

    # how the experts are stored; other fields of the file; what surrounds `text_config`
    quantization_config: Mapping[str, Any] | None = field(
        default=None, hash=False, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    wrapper: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)

    def __post_init__(self):
        validate(self)

    # --- what the numbers mean --------------------------------------------------------

    def is_kda(self, layer: int) -> bool:
        """Does layer `layer` (counted from 0) mix tokens by KDA? If not, by MLA."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Does layer `layer` (counted from 0) have experts? If not, it is dense."""
        return (self.num_experts > 0 and layer >= self.first_k_dense_replace
                and layer % self.moe_layer_freq == 0)

    @property
    def mla_layers(self) -> list[int]:
        """MLA layers, counted from 0."""
        return [i for i in range(self.num_hidden_layers) if not self.is_kda(i)]

    @property
    def qk_head_dim(self) -> int:
        """Width of a key of MLA: a head's own part and the shared one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """What a routed expert reads and writes: the latent width, or the full one."""
        return self.routed_expert_hidden_size or self.hidden_size

    def replace(self, **changes) -> "K3Config":
        """A copy with other values; also of fields of `linear_attn_config`, directly.

        ConfigError for a field that there is not.
        """
        inner = _names(LinearAttnConfig)
        nested = {k: changes.pop(k) for k in list(changes) if k in inner}
        if nested:
            linear = changes.get("linear_attn_config", self.linear_attn_config)
            changes["linear_attn_config"] = replace(linear, **nested)
        unknown = sorted(set(changes) - _names(K3Config))
        if unknown:
            raise ConfigError(f"K3Config has no field {', '.join(unknown)}; "
                              "allowed are those of K3Config and of LinearAttnConfig")
        return replace(self, **changes)

    # --- presets ----------------------------------------------------------------------

    @classmethod
    def k3(cls) -> "K3Config":
        """The released configuration, every field of the released `config.json`."""
        return cls.from_json(Path(__file__).with_name("k3_config.json"))

    @classmethod
    def toy(cls, **changes) -> "K3Config":
        """K3's arrangement, so small that a CPU runs it in milliseconds.

        It keeps what makes K3's topology awkward: a dense first layer, three KDA layers
        to one MLA, a last layer that is MLA out of cadence, a short last block of
        Attention Residuals, experts at half width and more of them than a token uses.
        """
        linear = LinearAttnConfig(
            kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8, 9), num_heads=4,
            head_dim=16, gate_lower_bound=-5.0, use_full_rank_gate=True)
        toy = cls(
            vocab_size=256, hidden_size=64, num_hidden_layers=9, intermediate_size=160,
            linear_attn_config=linear, num_attention_heads=4, kv_lora_rank=32,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=48,
            mla_use_output_gate=True,
            hidden_act="situ", activation_situ_beta=4.0,
            activation_situ_linear_beta=25.0, num_experts=16, num_experts_per_token=4,
            num_shared_experts=2, moe_intermediate_size=32,
            routed_expert_hidden_size=32, latent_moe_use_norm=True,
            first_k_dense_replace=1, attn_res_block_size=4, rms_norm_eps=1e-5,
            max_position_embeddings=4096)
        return toy.replace(**changes) if changes else toy

    # --- files ------------------------------------------------------------------------

    @classmethod
    def from_json(cls, path) -> "K3Config":
        """Read a `config.json`, or a folder that holds one. Kimi Linear's works too.

        The fields may be nested in `text_config`. ConfigError for a file that is not
        there, is not JSON, or describes no model.
        """
        path = as_path(path, "path")
        path = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_json(path, ConfigError))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "K3Config":
        """The same from a dictionary of released field names, with the same errors."""
        wrapper = None
        if isinstance(data, Mapping) and "text_config" in data:
            wrapper = {k: v for k, v in data.items() if k != "text_config"}
            data = data["text_config"]
        if not isinstance(data, Mapping):
            kind = type(data).__name__
            raise ConfigError(f"a configuration is a JSON object, not {kind}")
        names = _names(cls) - {"extra", "wrapper", "linear_attn_config"}
        # A null means the default, as in the released configuration class.
        known = {k: v for k, v in data.items()
                 if k in names and (v is not None or getattr(cls, k, None) is None)}
        extra = {k: v for k, v in data.items()
                 if k not in names | {"linear_attn_config", _INNER} and (k, v) != MODEL_TYPE}
        required = {f.name for f in fields(cls) if f.default is f.default_factory}
        missing = sorted(required - {*known, "linear_attn_config"})
        if missing:
            raise ConfigError(f"the configuration lacks {', '.join(missing)}")
        linear, L = data.get("linear_attn_config"), data["num_hidden_layers"]
        known["linear_attn_config"] = _linear_attn(linear, extra, L)
        return cls(**known, extra=extra, wrapper=wrapper)

    def to_dict(self) -> dict[str, Any]:
        """Released field names, unknown fields included, nested as it was read."""
        own = {f.name: getattr(self, f.name) for f in fields(self)
               if f.name not in ("extra", "wrapper")}
        extra, inner = dict(self.extra), self.linear_attn_config
        unknown = extra.pop(_INNER, {})
        linear = {f.name: getattr(inner, f.name) for f in fields(LinearAttnConfig)}
        own["linear_attn_config"] = {k: list(v) if isinstance(v, tuple) else v
                                     for k, v in (linear | unknown).items()}
        text = dict([MODEL_TYPE]) | extra | own
        if self.quantization_config is None:
            del text["quantization_config"]
        else:
            text["quantization_config"] = dict(self.quantization_config)
        if self.wrapper is None:
            return text
        return dict(self.wrapper) | {"text_config": text}

    def to_json(self, path=None) -> str:
        """The configuration as JSON text; written to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


# Where `extra` keeps the fields of the inner object that this package does not use.
_INNER = "linear_attn_config (unknown fields)"


def _names(dataclass) -> set[str]:
    return {f.name for f in fields(dataclass)}


def _linear_attn(data, extra: dict, num_layers) -> LinearAttnConfig:
    """The inner object of the file; its fields that are not used go into `extra`.

    Without it no layer is KDA. A layer that is not in kda_layers is MLA, so that
    full_attn_layers may be left out; without KDA layers, so may their sizes.
    """
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError(f"linear_attn_config is {shown(data)}; it must be an object or null")
    names = _names(LinearAttnConfig)
    unknown = {k: v for k, v in data.items() if k not in names}
    if unknown:
        extra[_INNER] = unknown
    known = {k: v for k, v in data.items() if k in names and v is not None}
    kda = known.setdefault("kda_layers", [])
    if not kda:
        known = {"num_heads": 1, "head_dim": 1} | known
    countable = isinstance(kda, list) and isinstance(num_layers, int) and num_layers < 10 ** 4
    if "full_attn_layers" not in known and countable:
        known["full_attn_layers"] = [i for i in range(1, num_layers + 1) if i not in kda]
    required = {"full_attn_layers", "num_heads", "head_dim"}
    missing = sorted(required - set(known))
    if missing:
        raise ConfigError(f"linear_attn_config lacks {', '.join(missing)}")
    for k in ("kda_layers", "full_attn_layers"):
        if not isinstance(known[k], (list, tuple)):
            raise ConfigError(f"linear_attn_config.{k} is {shown(known[k])}; "
                              "it must be a list of layer numbers from 1")
        known[k] = tuple(known[k])
    return LinearAttnConfig(**known)
