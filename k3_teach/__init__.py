"""k3_teach: the Kimi K3 text model in PyTorch, written to be read.

`config` says what a model is; `parts/` holds its mechanisms, one file each; `model` puts
them together; `boundary` checks what is passed to a part from outside; `cache` is what
decoding keeps; `checkpoint` reads the released format and
`saving` writes it; `generate/` continues a text and `speculative` does so with a draft;
`scale/` counts what it costs, and runs it at full size; `train/` trains it; `conformance/`
tests other implementations.
"""

from k3_teach.boundary import (
    apply_rope, attention, attention_eager, attn_res, bounded_gate, causal_mask, chunk_kda, csa,
    experts_grouped, experts_loop, expert_load, glu, hca, l2_normalize, max_vio, merge_live,
    mla_absorbed, mla_expanded, muon_direction, newton_schulz, next_token_loss, per_head,
    quantile_bias, read_sealed, recurrent_kda, rms_norm, rope_angles, route, short_conv,
    sign_update, situ_glu, softcap, softplus_gate, swiglu)
from k3_teach.cache import Cache, KDAState, LatentCache
from k3_teach.checkpoint import load_checkpoint
from k3_teach.config import K3Config, LinearAttnConfig
from k3_teach.errors import (
    CheckpointError, ConfigError, InputError, K3Error, TrainingError)
from k3_teach.generate import generate
from k3_teach.init import init_parameters
from k3_teach.model import K3Model
from k3_teach.parts.attention import GroupedQueryAttention
from k3_teach.parts.attn_res import BlockStream, PlainStream, TwoPhaseStream
from k3_teach.parts.balance import QuantileHistogram
from k3_teach.parts.balancer import Balancer
from k3_teach.parts.kda_layer import KDA
from k3_teach.parts.latent_moe import LatentMoE
from k3_teach.parts.mla import MLA
from k3_teach.parts.moe import Experts, MoE, Router
from k3_teach.parts.norm import RMSNorm
from k3_teach.parts.situ import Activation, GatedMLP
from k3_teach.saving import save_checkpoint
from k3_teach.speculative import speculate, speculate_greedy
from k3_teach.train.muon import Muon

__version__ = "0.1.0"
