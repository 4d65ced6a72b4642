"""k3_teach: the Kimi K3 text model in PyTorch, written to be read.

`config` says what a model is; `parts/` holds its mechanisms, one file each; `model` puts
them together; `cache` is what decoding keeps; `checkpoint` reads the released format and
`saving` writes it; `generate/` continues a text and `speculative` does so with a draft;
`scale/` counts what it costs; `train/` holds the optimiser.
"""

from k3_teach.cache import Cache, KDAState, LatentCache
from k3_teach.checkpoint import load_checkpoint
from k3_teach.config import K3Config, LinearAttnConfig
from k3_teach.errors import (
    CheckpointError, ConfigError, InputError, K3Error, TrainingError)
from k3_teach.generate import generate
from k3_teach.init import init_parameters
from k3_teach.model import K3Model, next_token_loss
from k3_teach.parts.attention import (
    GroupedQueryAttention, attention, attention_eager, causal_mask)
from k3_teach.parts.attn_res import (
    BlockStream, PlainStream, TwoPhaseStream, attn_res, merge_live, read_sealed)
from k3_teach.parts.balance import (
    QuantileHistogram, expert_load, max_vio, quantile_bias, sign_update)
from k3_teach.parts.balancer import Balancer
from k3_teach.parts.compressed_attention import csa, hca
from k3_teach.parts.kda import chunk_kda, recurrent_kda
from k3_teach.parts.kda_layer import (
    KDA, bounded_gate, l2_normalize, short_conv, softplus_gate)
from k3_teach.parts.latent_moe import LatentMoE
from k3_teach.parts.mla import MLA, mla_absorbed, mla_expanded
from k3_teach.parts.moe import Experts, MoE, Router, experts_grouped, experts_loop, route
from k3_teach.parts.norm import RMSNorm, rms_norm
from k3_teach.parts.rope import apply_rope, rope_angles
from k3_teach.parts.situ import Activation, GatedMLP, glu, situ_glu, softcap, swiglu
from k3_teach.saving import save_checkpoint
from k3_teach.speculative import speculate, speculate_greedy
from k3_teach.train.muon import Muon, muon_direction, newton_schulz, per_head

__version__ = "0.1.0"
